/* cuda_parts.h - partial sums that blocks left, added in a fixed order
 *
 * Both take no scratch. */
#ifndef KERNELS_CUDA_PARTS_H
#define KERNELS_CUDA_PARTS_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[j] = beta to[j] + the sum over i of parts[i stride + j], j < d; beta 0 assigns. */
void cuda_add_parts(struct device *dev, float *to, float beta, const float *parts, int64_t n_parts,
                    int64_t stride, int64_t d);

/* *acc += factor times the sum of x (n). */
void cuda_add_losses(struct device *dev, double *acc, double factor, const double *x, int64_t n);

#ifdef __cplusplus
}
#endif

#endif
