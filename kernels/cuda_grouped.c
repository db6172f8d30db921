/* cuda_grouped.c - on the GPU: a linear per group of rows, the experts, also with packed weights */
#include <stdlib.h>

#include "kernels/ops_cuda.h"

#include "common/mem.h"
#include "kernels/cuda_products.h"
#include "kernels/cuda_tiles.h"
#include "kernels/mxfp4.h"

static int64_t n_tiles_of(const struct cuda_tile_group *g, int64_t side)
{
    return g->k == 0 ? 0 : (g->m + side - 1) / side * ((g->n + side - 1) / side);
}

static bool is_aligned(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride * 2 % 16 == 0; /* of bf16 */
}

void cuda_tiles(struct device *dev, const char *op, const struct cuda_tile_job *job,
                struct cuda_tile_group *groups, int32_t n_groups)
{
    int64_t n_tiles = 0, side = job->type == ELEM_BF16 ? CUDA_TILE_BF16 : CUDA_TILE_F32;
    bool all_aligned = true;
    for (int32_t i = 0; i < n_groups; i++) {
        struct cuda_tile_group *g = &groups[i];
        g->first_tile = n_tiles;
        n_tiles += n_tiles_of(g, side);
        all_aligned = all_aligned && is_aligned(g->a, job->a_stride) &&
                      (job->b_is_mxfp4 || is_aligned(g->b, job->b_stride));
    }
    if (n_tiles == 0)
        return;
    const struct cuda_tile_group *on_device =
        cuda_upload(dev, groups, (size_t)n_groups * sizeof *groups);
    cuda_tiles_launch(dev, job, all_aligned, on_device, n_groups, n_tiles);
    cuda_check(dev, op, "groups=%d first=(%lld, %lld, %lld)", n_groups, (long long)groups[0].m,
               (long long)groups[0].n, (long long)groups[0].k);
}

static const void *at(const void *p, enum elem_type type, int64_t i)
{
    return (const char *)p + i * (type == ELEM_BF16 ? 2 : 4);
}

void cuda_product_tiled(struct device *dev, const char *op, const struct cuda_product *p)
{
    int32_t n = p->n_batches > 1 ? p->n_batches : 1;
    struct cuda_tile_group *groups = xcalloc((size_t)n, sizeof *groups);
    struct cuda_tile_job job = {
        .c_stride = p->c_stride, .a_stride = p->a_stride, .b_stride = p->b_stride,
        .a_transposed = p->a_transposed, .b_transposed = p->b_transposed, .type = p->type,
        .c_type = p->c_type, .alpha = p->alpha, .beta = p->beta,
    };
    for (int32_t i = 0; i < n; i++)
        groups[i] = (struct cuda_tile_group){
            .c = (void *)at(p->c, p->c_type, i * p->c_batch), .a = at(p->a, p->type, i * p->a_batch),
            .b = at(p->b, p->type, i * p->b_batch), .m = p->m, .n = p->n, .k = p->k,
        };
    cuda_tiles(dev, op, &job, groups, n);
    free(groups);
}

/* ---- the experts ---- */

void cuda_grouped_linear(struct device *dev, elem_ptr y, const_elem_ptr x, const_elem_ptrs w,
                         const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    struct cuda_tile_group *groups = xcalloc((size_t)n_groups, sizeof *groups);
    struct cuda_tile_job job = {
        .c_stride = out, .a_stride = in, .b_stride = in, .b_transposed = true, .type = dev->elem,
        .c_type = dev->elem, .alpha = 1,
    };
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (struct cuda_tile_group){
            .c = elem_at(dev, y.p, offsets[g] * out), .a = const_elem_at(dev, x.p, offsets[g] * in),
            .b = w.p[g], .m = offsets[g + 1] - offsets[g], .n = out, .k = in,
        };
    cuda_tiles(dev, "grouped_linear", &job, groups, n_groups);
    free(groups);
}

void cuda_grouped_linear_dx(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptrs w,
                            const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                            float beta)
{
    struct cuda_tile_group *groups = xcalloc((size_t)n_groups, sizeof *groups);
    struct cuda_tile_job job = {
        .c_stride = in, .a_stride = out, .b_stride = in, .type = dev->elem, .c_type = dev->elem,
        .alpha = 1, .beta = beta,
    };
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (struct cuda_tile_group){
            .c = elem_at(dev, dx.p, offsets[g] * in),
            .a = const_elem_at(dev, dy.p, offsets[g] * out), .b = w.p[g],
            .m = offsets[g + 1] - offsets[g], .n = in, .k = out,
        };
    cuda_tiles(dev, "grouped_linear_dx", &job, groups, n_groups);
    free(groups);
}

void cuda_grouped_linear_dw(struct device *dev, float *const *acc_dw, const_elem_ptr dy,
                            const_elem_ptr x, const int64_t *offsets, int32_t n_groups, int64_t in,
                            int64_t out)
{
    struct cuda_tile_group *groups = xcalloc((size_t)n_groups, sizeof *groups);
    struct cuda_tile_job job = {
        .c_stride = in, .a_stride = out, .b_stride = in, .a_transposed = true, .type = dev->elem,
        .c_type = ELEM_F32, .alpha = 1, .beta = 1,
    };
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (struct cuda_tile_group){
            .c = acc_dw[g], .a = const_elem_at(dev, dy.p, offsets[g] * out),
            .b = const_elem_at(dev, x.p, offsets[g] * in), .m = out, .n = in,
            .k = offsets[g + 1] - offsets[g],
        };
    cuda_tiles(dev, "grouped_linear_dw", &job, groups, n_groups);
    free(groups);
}

/* ---- weights that stay packed ---- */

static void packed_product(struct device *dev, const char *op, struct cuda_tile_job *job,
                           elem *c, const elem *a, const uint8_t *const *packed,
                           const uint8_t *const *scales, const int64_t *offsets, int32_t n_groups,
                           int64_t n, int64_t k)
{
    struct cuda_tile_group *groups = xcalloc((size_t)n_groups, sizeof *groups);
    for (int32_t g = 0; g < n_groups; g++) {
        assert((uintptr_t)packed[g] % 4 == 0);
        groups[g] = (struct cuda_tile_group){
            .c = elem_at(dev, c, offsets[g] * n), .a = const_elem_at(dev, a, offsets[g] * k),
            .b = packed[g], .b_scales = scales[g], .m = offsets[g + 1] - offsets[g], .n = n, .k = k,
        };
    }
    cuda_tiles(dev, op, job, groups, n_groups);
    free(groups);
}

void cuda_grouped_linear_mxfp4(struct device *dev, elem_ptr y, const_elem_ptr x,
                               const uint8_t *const *packed, const uint8_t *const *scales,
                               const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    struct cuda_tile_job job = {
        .c_stride = out, .a_stride = in, .b_stride = in, .b_transposed = true, .b_is_mxfp4 = true,
        .type = dev->elem, .c_type = dev->elem, .alpha = 1,
    };
    assert(in % MXFP4_GROUP == 0);
    packed_product(dev, "grouped_linear_mxfp4", &job, y.p, x.p, packed, scales, offsets, n_groups,
                   out, in);
}

void cuda_grouped_linear_mxfp4_dx(struct device *dev, elem_ptr dx, const_elem_ptr dy,
                                  const uint8_t *const *packed, const uint8_t *const *scales,
                                  const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                                  float beta)
{
    struct cuda_tile_job job = {
        .c_stride = in, .a_stride = out, .b_stride = in, .b_is_mxfp4 = true, .type = dev->elem,
        .c_type = dev->elem, .alpha = 1, .beta = beta,
    };
    assert(in % MXFP4_GROUP == 0);
    packed_product(dev, "grouped_linear_mxfp4_dx", &job, dx.p, dy.p, packed, scales, offsets,
                   n_groups, in, out);
}
