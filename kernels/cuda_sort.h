/* cuda_sort.h - a stable sort on the GPU, for ops that add or choose in a fixed order */
#ifndef KERNELS_CUDA_SORT_H
#define KERNELS_CUDA_SORT_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sorts keys (n, device memory) ascending by their n_bits low bits, equal ones as they were; order
 * (n) is where each was. Both results are scratch of the calling op, which has begun; keys is
 * overwritten. n < 2^31. */
void cuda_sort(struct device *dev, uint64_t *keys, int64_t n, int n_bits,
               const uint64_t **out_keys, const int32_t **out_order);

#ifdef __cplusplus
}
#endif

#endif
