/* usage.h - the memory that one rank takes, measured, to compare with its plan
 *
 * What a plan's total is about: on a CPU the rank's process, of memory shared with other ranks the
 * part that is its own; on a GPU the device's memory with what its libraries hold. */
#ifndef WORKER_USAGE_H
#define WORKER_USAGE_H

#include "kernels/device.h"
#include "worker/coll.h"

struct usage {
    uint64_t now, peak;  /* bytes, over all looks; of a GPU's tensors also between them */
    uint64_t scratch;    /* of ops */
    uint64_t shared;     /* memory shared with other ranks, this rank's part */
    uint64_t n_allocs;   /* how often tensors' memory was taken */
};

void usage_look(struct usage *u, struct device *dev, struct coll *coll);

#endif
