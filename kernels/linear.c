/* linear.c - y = x w^T and its gradients */
#include "kernels/ops_cpu.h"

#include "kernels/product.h"

void cpu_linear(struct device *dev, float *y, const float *x, const float *w, int64_t n, int64_t in,
                int64_t out, float beta)
{
    product_spread(dev, y, out, as_is(x, in), transposed(w, in), n, out, in, 1, beta);
}

void cpu_linear_dx(struct device *dev, float *dx, const float *dy, const float *w, int64_t n,
                   int64_t in, int64_t out, float beta)
{
    product_spread(dev, dx, in, as_is(dy, out), as_is(w, in), n, in, out, 1, beta);
}

void cpu_linear_dw(struct device *dev, float *acc_dw, const float *dy, const float *x, int64_t n,
                   int64_t in, int64_t out)
{
    if (n > 0)
        product_spread(dev, acc_dw, in, transposed(dy, out), as_is(x, in), out, in, n, 1, 1);
}
