/* coll_flight.c - the events of calls on their way */
#include "worker/coll_flight.h"

#include <errno.h>

#include "common/clock.h"
#include "kernels/spans.h"

int flights_init(struct flights *f, struct err *err)
{
    cudaError_t rc = cudaStreamCreateWithFlags(&f->stream, cudaStreamNonBlocking);
    for (uint32_t i = 0; i < FLIGHTS && rc == cudaSuccess; i++) {
        struct flight *x = &f->ring[i];
        rc = cudaEventCreateWithFlags(&x->ready, cudaEventDisableTiming);
        if (rc == cudaSuccess)
            rc = cudaEventCreateWithFlags(&x->began, cudaEventDefault);
        if (rc == cudaSuccess)
            rc = cudaEventCreateWithFlags(&x->done, cudaEventDefault);
        if (rc == cudaSuccess)
            rc = cudaEventCreateWithFlags(&x->waited, cudaEventDefault);
    }
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&f->anchor, cudaEventDefault);
    return rc == cudaSuccess ? 0 : err_set(err, -EIO, "events of the collectives: %s",
                                           cudaGetErrorString(rc));
}

void flights_fini(struct flights *f)
{
    for (uint32_t i = 0; i < FLIGHTS; i++) {
        const cudaEvent_t events[] = {f->ring[i].ready, f->ring[i].began, f->ring[i].done,
                                      f->ring[i].waited};
        for (size_t k = 0; k < sizeof events / sizeof *events; k++)
            if (events[k])
                cudaEventDestroy(events[k]);
    }
    if (f->anchor)
        cudaEventDestroy(f->anchor);
    if (f->stream)
        cudaStreamDestroy(f->stream);
}

/* From one event to another; 0 where that is not known, or less. */
static uint64_t between_ns(cudaEvent_t from, cudaEvent_t to)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, from, to) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return ms > 0 ? (uint64_t)((double)ms * NS_PER_MS) : 0;
}

/* It went on beside the ops until it was over, or until the device stood still for it. */
static void tell(const struct flights *f, const struct flight *x, struct device *dev)
{
    uint64_t begin = f->anchor_ns + between_ns(f->anchor, x->began);
    uint64_t whole = between_ns(x->began, x->done), beside = between_ns(x->began, x->waited);
    spans_beside(dev, x->hidden, x->layer, begin, begin + (beside < whole ? beside : whole));
}

/* Times are read as far as all is over, in the order of the calls. */
static void tell_all(struct flights *f, struct device *dev)
{
    if (f->n_launched - f->n_told > FLIGHTS)
        f->n_told = f->n_launched - FLIGHTS;
    for (; f->n_told < f->n_launched; f->n_told++) {
        const struct flight *x = &f->ring[f->n_told % FLIGHTS];
        if (!x->is_waited || cudaEventQuery(x->waited) != cudaSuccess ||
            cudaEventQuery(x->done) != cudaSuccess)
            return;
        if (f->anchor_ns)
            tell(f, x, dev);
    }
    /* The stream is empty: times are counted from here on, so that they stay exact. */
    cudaEventRecord(f->anchor, f->stream);
    f->anchor_ns = clock_now_ns();
}

struct flight *flights_next(struct flights *f, struct device *dev)
{
    if (dev->spans)
        tell_all(f, dev);
    if (f->n_launched - f->n_landed == FLIGHTS)
        f->n_landed++; /* nobody will know when it ended: the recorder has forgotten it, too */
    struct flight *x = &f->ring[f->n_launched % FLIGHTS];
    x->is_waited = false;
    x->began_ns = 0;
    return x;
}

struct flight *flights_at(struct flights *f, uint32_t launch)
{
    return &f->ring[(launch - 1) % FLIGHTS];
}
