/* cuda_tiles.h - products by our own tiles: what product.cu and its callers in C agree on */
#ifndef KERNELS_CUDA_TILES_H
#define KERNELS_CUDA_TILES_H

#include "kernels/cuda.h"

/* Rows and columns of c that a block computes at a time. */
#define CUDA_TILE_F32  64
#define CUDA_TILE_BF16 128

/* One product of a group: c (m, n) = alpha a b + beta c; all pointers into the device. */
struct cuda_tile_group {
    void *c;
    const void *a, *b;
    const uint8_t *b_scales; /* of a packed b */
    int64_t m, n, k;
    int64_t first_tile; /* tiles of the groups before */
};

/* What the groups have in common; the fields are those of cuda_product. */
struct cuda_tile_job {
    int64_t c_stride, a_stride, b_stride;
    bool    a_transposed, b_transposed;
    bool    b_is_mxfp4; /* b packed: its stride counts numbers, a multiple of 32 */
    enum elem_type type, c_type;
    float   alpha, beta;
};

#ifdef __cplusplus
extern "C" {
#endif

/* groups (n_groups) in host memory, in which first_tile is filled in. is_aligned: all a and b
 * start on 16 bytes and so do their rows. Sums are taken along k in one order. */
void cuda_tiles(struct device *dev, const char *op, const struct cuda_tile_job *job,
                struct cuda_tile_group *groups, int32_t n_groups);

/* The kernels: groups in the device, n_tiles over all of them, at least one. */
void cuda_tiles_launch(struct device *dev, const struct cuda_tile_job *job, bool is_aligned,
                       const struct cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles);

#ifdef __cplusplus
}
#endif

#endif
