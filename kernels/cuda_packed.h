/* cuda_packed.h - packed matrices as elements, several at once */
#ifndef KERNELS_CUDA_PACKED_H
#define KERNELS_CUDA_PACKED_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As the op unpack, of n matrices w (host array) alike: out (n, n_rows, cols). Takes no scratch. */
void cuda_unpack_matrices(struct device *dev, void *out, const uint8_t *const *w, int32_t n,
                          enum packing packing, int64_t rows, int64_t cols, int64_t first,
                          int64_t n_rows);

#ifdef __cplusplus
}
#endif

#endif
