/* positions.c - computes rotary angles on the host and keeps them on the device */
#include "worker/positions.h"

#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"

void positions_fini(struct positions *p, struct device *dev)
{
    if (p->table)
        dev->ops->free(dev, p->table);
    *p = (struct positions){0};
}

int positions_grow(struct positions *p, const struct model_spec *m, struct device *dev, int64_t n,
                   struct err *err)
{
    if (!m->mla_rotary || n <= p->n)
        return 0;
    size_t count = (size_t)n * m->rotary.dim;
    float *table = dev->ops->alloc(dev, count * sizeof *table);
    if (!table)
        return err_set(err, -ENOMEM, "the device has no %zu bytes for the angles of %lld positions",
                       count * sizeof *table, (long long)n);
    float *host = xcalloc(count, sizeof *host);
    rotary_table(&m->rotary, n, host);
    dev->ops->to_device(dev, table, host, count * sizeof *host);
    dev->ops->synchronize(dev);
    free(host);
    positions_fini(p, dev);
    *p = (struct positions){ table, n };
    return 0;
}
