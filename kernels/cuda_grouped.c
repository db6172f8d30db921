/* cuda_grouped.c - on the GPU: a linear per group of rows, the experts */
#include <stdlib.h>

#include "kernels/ops_cuda.h"

#include "common/mem.h"
#include "kernels/cuda_products.h"
#include "kernels/cuda_tiles.h"

#define PAIRED_ROWS_MIN 512 /* of a group, on average */
/* Summed over, on average: with more rows there is little to add for each product, and the second
 * cache serves reads and writes as fast. Between what was measured at 1,170 and at 9,362. */
#define ADDED_ROWS_MAX 4096

/* ---- which kernel takes a job ---- */

static bool is_aligned(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride * 2 % 16 == 0; /* of bf16 */
}

static bool all_are_aligned(const struct cuda_tile_job *job, const struct cuda_tile_group *groups,
                            int32_t n_groups)
{
    for (int32_t i = 0; i < n_groups; i++)
        if (!is_aligned(groups[i].a, job->a_stride) || !is_aligned(groups[i].b, job->b_stride) ||
            !is_aligned(groups[i].b2, job->b_stride))
            return false;
    return is_aligned(job->shared_a2, job->a_stride);
}

/* Does not look at how many rows there are: that must not change the order of sums. */
static bool is_wide(const struct cuda_tile_job *job, int32_t n_groups, bool all_aligned)
{
    return job->type == ELEM_BF16 && job->shared_a && all_aligned &&
           n_groups <= CUDA_TILE_WIDE_GROUPS_MAX && job->n_shared_rows <= INT32_MAX;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b > 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

enum operand { B, B2, C };

static uintptr_t matrix_of(const struct cuda_tile_group *g, enum operand which)
{
    return (uintptr_t)(which == B ? g->b : which == B2 ? g->b2 : g->c);
}

static int32_t *slot_of(struct cuda_tile_group *g, enum operand which)
{
    return which == B ? &g->b_slot : which == B2 ? &g->b2_slot : &g->c_slot;
}

/* The copy engine wants one array for all experts: an operand of each, wherever they lie, are slots
 * some stride apart. Returns whether it can have them. */
static bool find_slots(struct cuda_tile_slots *s, struct cuda_tile_group *groups, int32_t n_groups,
                       enum operand which)
{
    uintptr_t first = UINTPTR_MAX, last = 0, stride = 0;
    for (int32_t i = 0; i < n_groups; i++) {
        uintptr_t at = matrix_of(&groups[i], which);
        first = at < first ? at : first;
        last = at > last ? at : last;
    }
    for (int32_t i = 0; i < n_groups; i++)
        stride = common_divisor(stride, matrix_of(&groups[i], which) - first);
    s->first = (const void *)first;
    s->stride = (int64_t)(stride / (which == C ? sizeof(float) : 2));
    s->n = stride > 0 ? (int64_t)((last - first) / stride) + 1 : 1;
    for (int32_t i = 0; stride > 0 && i < n_groups; i++)
        *slot_of(&groups[i], which) = (int32_t)((matrix_of(&groups[i], which) - first) / stride);
    return s->n <= INT32_MAX && first % 16 == 0 && stride % 16 == 0;
}

/* Of all that the copy engine reads. */
static bool find_slots_of_b(struct cuda_tile_job *job, struct cuda_tile_group *groups,
                            int32_t n_groups)
{
    return job->shared_b || (find_slots(&job->b_slots, groups, n_groups, B) &&
                             (!job->shared_a2 || find_slots(&job->b2_slots, groups, n_groups, B2)));
}

/* Sums over few rows: a product is then short beside what it adds to. An element is added to once
 * and alike by either way. */
static bool wants_boxes(const struct cuda_tile_job *job, const struct cuda_tile_group *groups,
                        int32_t n_groups)
{
    int64_t n_rows = 0;
    for (int32_t i = 0; i < n_groups; i++)
        n_rows += groups[i].k;
    return job->a_transposed && job->c_type == ELEM_F32 && job->alpha == 1 && job->beta == 1 &&
           job->c_stride % 4 == 0 && n_groups <= CUDA_TILE_BOXED_GROUPS_MAX &&
           n_rows <= (int64_t)n_groups * ADDED_ROWS_MAX;
}

static int64_t count_tiles(struct cuda_tile_group *groups, int32_t n_groups, int64_t rows,
                           int64_t cols)
{
    int64_t n_tiles = 0;
    for (int32_t i = 0; i < n_groups; i++) {
        struct cuda_tile_group *g = &groups[i];
        g->first_tile = n_tiles;
        if (g->k > 0)
            n_tiles += (g->m + rows - 1) / rows * ((g->n + cols - 1) / cols);
    }
    return n_tiles;
}

/* Worth it where the groups' last pairs, which may be half empty, are few. */
static bool is_in_pairs(const struct cuda_tile_group *groups, int32_t n_groups)
{
    int64_t n_rows = 0;
    for (int32_t i = 0; i < n_groups; i++)
        n_rows += groups[i].m;
    return n_rows >= (int64_t)n_groups * PAIRED_ROWS_MIN;
}

bool cuda_tiles(struct device *dev, const char *op, struct cuda_tile_job *job,
                struct cuda_tile_group *groups, int32_t n_groups)
{
    bool all_aligned = all_are_aligned(job, groups, n_groups);
    bool wide = is_wide(job, n_groups, all_aligned) && find_slots_of_b(job, groups, n_groups);
    if (job->shared_a2 && !wide)
        return false;
    int64_t rows = job->type == ELEM_BF16 ? CUDA_TILE_BF16 : CUDA_TILE_F32, cols = rows;
    if (wide) {
        job->in_pairs = is_in_pairs(groups, n_groups);
        job->adds_boxes = wants_boxes(job, groups, n_groups) &&
                          find_slots(&job->c_slots, groups, n_groups, C);
        rows = CUDA_TILE_WIDE_ROWS * (job->in_pairs ? 2 : 1);
        cols = CUDA_TILE_WIDE_COLS;
    }
    int64_t n_tiles = count_tiles(groups, n_groups, rows, cols);
    if (n_tiles == 0)
        return true;
    const struct cuda_tile_group *on_device =
        cuda_upload(dev, groups, (size_t)n_groups * sizeof *groups);
    if (wide)
        cuda_tiles_wide_launch(dev, job, on_device, n_groups, n_tiles);
    else
        cuda_tiles_launch(dev, job, all_aligned, on_device, n_groups, n_tiles);
    cuda_check(dev, op, "groups=%d first=(%lld, %lld, %lld)", n_groups, (long long)groups[0].m,
               (long long)groups[0].n, (long long)groups[0].k);
    return true;
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
            .c = (void *)at(p->c, p->c_type, i * p->c_batch),
            .a = at(p->a, p->type, i * p->a_batch), .b = at(p->b, p->type, i * p->b_batch),
            .m = p->m, .n = p->n, .k = p->k,
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
        .c_type = dev->elem, .alpha = 1, .shared_a = x.p, .n_shared_rows = offsets[n_groups],
    };
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (struct cuda_tile_group){
            .c = elem_at(dev, y.p, offsets[g] * out), .a = const_elem_at(dev, x.p, offsets[g] * in),
            .b = w.p[g], .m = offsets[g + 1] - offsets[g], .n = out, .k = in,
            .row = (int32_t)offsets[g],
        };
    cuda_tiles(dev, "grouped_linear", &job, groups, n_groups);
    free(groups);
}

/* dy2 and w2 NULL: there is no second pair. */
static bool dx_of(struct device *dev, elem *dx, const elem *dy, const elem *const *w,
                  const elem *dy2, const elem *const *w2, const int64_t *offsets,
                  int32_t n_groups, int64_t in, int64_t out, float beta)
{
    struct cuda_tile_group *groups = xcalloc((size_t)n_groups, sizeof *groups);
    struct cuda_tile_job job = {
        .c_stride = in, .a_stride = out, .b_stride = in, .type = dev->elem, .c_type = dev->elem,
        .alpha = 1, .beta = beta, .shared_a = dy, .shared_a2 = dy2,
        .n_shared_rows = offsets[n_groups],
    };
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (struct cuda_tile_group){
            .c = elem_at(dev, dx, offsets[g] * in), .a = const_elem_at(dev, dy, offsets[g] * out),
            .b = w[g], .b2 = w2 ? w2[g] : NULL, .m = offsets[g + 1] - offsets[g], .n = in,
            .k = out, .row = (int32_t)offsets[g],
        };
    bool is_done = cuda_tiles(dev, "grouped_linear_dx", &job, groups, n_groups);
    free(groups);
    return is_done;
}

void cuda_grouped_linear_dx(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptrs w,
                            const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                            float beta)
{
    dx_of(dev, dx.p, dy.p, w.p, NULL, NULL, offsets, n_groups, in, out, beta);
}

void cuda_grouped_linear_dx_pair(struct device *dev, elem_ptr dx, const_elem_ptr dy,
                                 const_elem_ptrs w, const_elem_ptr dy2, const_elem_ptrs w2,
                                 const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    if (dx_of(dev, dx.p, dy.p, w.p, dy2.p, w2.p, offsets, n_groups, in, out, 0))
        return;
    dx_of(dev, dx.p, dy.p, w.p, NULL, NULL, offsets, n_groups, in, out, 0);
    dx_of(dev, dx.p, dy2.p, w2.p, NULL, NULL, offsets, n_groups, in, out, 1);
}

void cuda_grouped_linear_dw(struct device *dev, float *const *acc_dw, const_elem_ptr dy,
                            const_elem_ptr x, const int64_t *offsets, int32_t n_groups, int64_t in,
                            int64_t out)
{
    struct cuda_tile_group *groups = xcalloc((size_t)n_groups, sizeof *groups);
    struct cuda_tile_job job = {
        .c_stride = in, .a_stride = out, .b_stride = in, .a_transposed = true, .type = dev->elem,
        .c_type = ELEM_F32, .alpha = 1, .beta = 1, .shared_a = dy.p, .shared_b = x.p,
        .n_shared_rows = offsets[n_groups],
    };
    for (int32_t g = 0; g < n_groups; g++)
        groups[g] = (struct cuda_tile_group){
            .c = acc_dw[g], .a = const_elem_at(dev, dy.p, offsets[g] * out),
            .b = const_elem_at(dev, x.p, offsets[g] * in), .m = out, .n = in,
            .k = offsets[g + 1] - offsets[g], .row = (int32_t)offsets[g],
        };
    cuda_tiles(dev, "grouped_linear_dw", &job, groups, n_groups);
    free(groups);
}
