/* cuda_tiles.h - products by our own tiles: what product.cu and its callers in C agree on */
#ifndef KERNELS_CUDA_TILES_H
#define KERNELS_CUDA_TILES_H

#include "kernels/cuda.h"

/* Rows and columns of c that a block computes at a time. */
#define CUDA_TILE_F32  64
#define CUDA_TILE_BF16 128
/* The same where the warpgroup's products do it. */
#define CUDA_TILE_WIDE_ROWS 128
#define CUDA_TILE_WIDE_COLS 256
#define CUDA_TILE_WIDE_GROUPS_MAX 2048
#define CUDA_TILE_BOXED_GROUPS_MAX 448 /* of sums that the copy engine adds */

/* One product of a group: c (m, n) = alpha (a b + a2 b2) + beta c; all pointers into the device. */
struct cuda_tile_group {
    void *c;
    const void *a, *b;
    const void *b2; /* alike in size; NULL, of all groups: there is no second pair */
    int64_t m, n, k;
    int64_t first_tile; /* tiles of the groups before */
    int32_t row;        /* of the job's shared operands: the group's first */
    int32_t b_slot;     /* of a b of its own: how many strides from the first slot */
    int32_t b2_slot;
    int32_t c_slot;     /* the same of c, where the copy engine adds to it */
};

/* What the copy engine sees as one array: matrices that lie whole strides of elements apart. */
struct cuda_tile_slots {
    const void *first;
    int64_t stride, n;
};

/* What the groups have in common; the fields are those of cuda_product. */
struct cuda_tile_job {
    int64_t c_stride, a_stride, b_stride;
    bool    a_transposed, b_transposed;
    enum elem_type type, c_type;
    float   alpha, beta;
    /* Where the groups' rows lie one after another: all of them. a NULL: each group has its own a
     * and b; b NULL: each has its own b, alike in size. */
    const void *shared_a, *shared_b;
    const void *shared_a2; /* alike in size */
    int64_t n_shared_rows;
    /* Set by cuda_tiles: */
    struct cuda_tile_slots b_slots, b2_slots; /* of b of one's own */
    struct cuda_tile_slots c_slots; /* where sums are added by the copy engine */
    bool adds_boxes; /* whether they are */
    bool in_pairs;   /* two tiles below each other share what they read of b */
};

#ifdef __cplusplus
extern "C" {
#endif

/* groups (n_groups) in host memory, in which first_tile and slots are filled in. Sums are taken
 * along k in one order. Returns false, and does nothing, where there is a second pair that the
 * kernel of wide tiles cannot take. */
bool cuda_tiles(struct device *dev, const char *op, struct cuda_tile_job *job,
                struct cuda_tile_group *groups, int32_t n_groups);

/* The products of shared rows by warpgroups (grouped_linear.cu): groups in the device, of which
 * there are at most CUDA_TILE_WIDE_GROUPS_MAX; all starts and strides of a and b are multiples of
 * 16 bytes. */
void cuda_tiles_wide_launch(struct device *dev, const struct cuda_tile_job *job,
                            const struct cuda_tile_group *groups, int32_t n_groups,
                            int64_t n_tiles);

/* The kernels of product.cu: groups in the device, n_tiles over all of them, at least one.
 * is_aligned: all a and b start on 16 bytes and so do their rows. */
void cuda_tiles_launch(struct device *dev, const struct cuda_tile_job *job, bool is_aligned,
                       const struct cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles);

#ifdef __cplusplus
}
#endif

#endif
