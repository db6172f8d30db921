/* rate.c - a short product, large enough to be the device's best */
#include "worker/rate.h"

#define HOST_ROWS 256 /* a few milliseconds of one core */
#define GPU_ROWS  4096
#define TRIES     5

double rate_measure(struct device *dev)
{
    const struct device_ops *ops = dev->ops;
    int64_t n = dev->is_host ? HOST_ROWS : GPU_ROWS;
    size_t n_bytes = (size_t)(n * n) * elem_size(dev);
    elem *x = ops->alloc(dev, n_bytes), *y = ops->alloc(dev, n_bytes);
    double best_s = 0;
    bool is_there = x && y;
    for (uint32_t i = 0; i <= TRIES && is_there; i++) {
        ops->linear(dev, y, x, x, n, n, n, 0); /* the first one warms up */
        ops->mark(dev, i);
    }
    for (uint32_t i = 1; i <= TRIES && is_there; i++) { /* when all are on their way */
        double s = ops->elapsed(dev, i - 1, i);
        if (s > 0 && (best_s == 0 || s < best_s))
            best_s = s;
    }
    if (x)
        ops->free(dev, x);
    if (y)
        ops->free(dev, y);
    return best_s > 0 ? 2.0 * (double)n * (double)n * (double)n / best_s : 0;
}
