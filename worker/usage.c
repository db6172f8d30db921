/* usage.c - asks device, collectives and operating system what a rank takes */
#include "worker/usage.h"

#include "common/host_memory.h"

void usage_look(struct usage *u, struct device *dev, struct coll *coll)
{
    struct device_memory m;
    uint64_t shared, n_shared;
    dev->ops->memory(dev, &m);
    coll->ops->shared(coll, &shared, &n_shared);
    u->scratch = m.scratch;
    u->shared = shared;
    u->n_allocs = m.n_allocs + n_shared;
    if (dev->is_host)
        u->now = process_memory().anonymous + shared;
    else
        u->now = m.peak + m.overhead;
    if (u->now > u->peak)
        u->peak = u->now;
}
