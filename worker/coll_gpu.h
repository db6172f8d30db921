/* coll_gpu.h - collectives of ranks that have a GPU each
 *
 * Private to coll_choose; only in builds with GPU code. Arguments are as in coll.h. Tensors travel
 * through NCCL on the device's one stream: a call returns once it is in that stream, so ops and
 * calls happen in the order in which they were made, and nothing waits for the device. Words,
 * rendezvous, aborts and the flight recorder are the host collectives'. */
#ifndef WORKER_COLL_GPU_H
#define WORKER_COLL_GPU_H

#include "worker/coll.h"

/* Over the ranks of host, which coll_host_open gave, on dev, whose GPU no other rank has; both are
 * kept until close. groups: those that calls will name besides the world's; every rank has groups
 * of the same ids and sizes, in the same order. Collective. Takes host and gives *out_coll; on
 * failure host is still the caller's, and aborted. */
int coll_gpu_open(struct coll *host, struct device *dev, const struct coll_group *groups,
                  uint32_t n_groups, struct coll **out_coll, struct err *err);

#endif
