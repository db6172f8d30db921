/* coll_flight.h - calls on their way through a device: which have begun, are over, were waited for
 *
 * Private to coll_nccl. The last FLIGHTS calls are known; a call that is further back is over, as
 * all are in one stream. */
#ifndef WORKER_COLL_FLIGHT_H
#define WORKER_COLL_FLIGHT_H

#include <cuda_runtime_api.h>

#include "worker/coll_call.h"
#include "worker/phases.h"

#define FLIGHTS SHM_RING

struct flight {
    cudaEvent_t ready, began, done; /* ready: the ops before it are over */
    cudaEvent_t waited;             /* the ops behind its finish would begin */
    bool     is_waited;
    uint32_t note;
    enum phase hidden; /* what counts as such: the device computed meanwhile */
    int32_t  layer;
    uint64_t began_ns; /* when it was first seen to have begun; 0: not yet */
};

struct flights {
    cudaStream_t stream;
    struct flight ring[FLIGHTS];
    uint32_t n_launched, n_landed, n_told;
    cudaEvent_t anchor; /* in the stream, at anchor_ns of clock_now_ns; it was empty then */
    uint64_t anchor_ns;
};

/* On the calling thread's device; fini also after a failure. */
int  flights_init(struct flights *f, struct err *err);
void flights_fini(struct flights *f);

/* The next call, not launched yet. What went on beside the ops of dev is told to its spans. */
struct flight *flights_next(struct flights *f, struct device *dev);
/* The call of a number from 1 on, or a later one that has its place. */
struct flight *flights_at(struct flights *f, uint32_t launch);

#endif
