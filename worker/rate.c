/* rate.c - a short product, large enough to be the device's best */
#include "worker/rate.h"

#define HOST_ROWS 256 /* a few milliseconds of one core */
#define GPU_ROWS  4096
#define TRIES     5
#define MARKS     (TRIES + 1)

double rate_measure(struct device *dev)
{
    const struct device_ops *ops = dev->ops;
    int64_t n = dev->is_host ? HOST_ROWS : GPU_ROWS;
    size_t n_bytes = (size_t)(n * n) * elem_size(dev);
    elem *x = ops->alloc(dev, n_bytes), *w = ops->alloc(dev, n_bytes);
    elem *y = ops->alloc(dev, n_bytes);
    double best_s = 0;
    for (uint32_t i = 0; i < MARKS && x && w && y; i++) {
        ops->linear(dev, y, x, w, n, n, n, 0); /* the first one warms up */
        ops->mark(dev, i);
        double s = i > 0 ? ops->elapsed(dev, i - 1, i) : 0;
        if (i > 0 && s > 0 && (best_s == 0 || s < best_s))
            best_s = s;
    }
    elem *const blocks[] = {x, w, y};
    for (int i = 0; i < 3; i++)
        if (blocks[i])
            ops->free(dev, blocks[i]);
    return best_s > 0 ? 2.0 * (double)n * (double)n * (double)n / best_s : 0;
}
