/* cuda_packed.c - on the GPU: the experts' linear over weights that stay packed
 *
 * Weights of as many experts as lie in GPU_UNPACK_BYTES are unpacked, in one launch, and multiplied
 * as others are; then those of the next ones. Whatever rows there are that is faster than to decode
 * within a product, whose tiles of rows each decode the same weights again. */
#include <stdlib.h>

#include "kernels/ops_cuda.h"

#include "common/mem.h"
#include "kernels/cuda.h"
#include "kernels/cuda_packed.h"

struct call {
    bool  is_dx;
    elem *to;
    const elem *from;
    const uint8_t *const *w;
    enum packing packing;
    const int64_t *offsets;
    int32_t n_groups;
    int64_t in, out;
    float beta; /* of dx */
};

static int32_t count_used(const struct call *c)
{
    int32_t n = 0;
    for (int32_t g = 0; g < c->n_groups; g++)
        n += c->offsets[g + 1] > c->offsets[g];
    return n;
}

/* How many are unpacked at once, so that runs of them are alike. */
static int32_t size_of_runs(int32_t n_used, size_t matrix_bytes)
{
    int32_t fit = (int32_t)(packing_room((uint64_t)n_used, matrix_bytes) / matrix_bytes);
    int32_t n_runs = (n_used + fit - 1) / fit;
    return (n_used + n_runs - 1) / n_runs;
}

/* The weights of n experts that have rows, from first on, are w[first ..]; returns where the next
 * one of these is, or the end. What has no rows is not read, but wants an address like the
 * others'. */
static int32_t unpack_run(struct device *dev, const struct call *c, int32_t first, int32_t n,
                          elem *room, const elem **w)
{
    const uint8_t **packed = xcalloc((size_t)n, sizeof *packed);
    int32_t g = first, n_found = 0;
    for (; g < c->n_groups; g++) {
        bool has_rows = c->offsets[g + 1] > c->offsets[g];
        if (has_rows && n_found == n)
            break;
        w[g] = elem_at(dev, room, has_rows ? n_found * c->in * c->out : 0);
        if (has_rows)
            packed[n_found++] = c->w[g];
    }
    cuda_unpack_matrices(dev, room, packed, n_found, c->packing, c->out, c->in, 0, c->out);
    free(packed);
    return g;
}

static void multiply(struct device *dev, const struct call *c)
{
    size_t matrix_bytes = (size_t)(c->in * c->out) * elem_size(dev);
    int32_t n_used = count_used(c);
    if (n_used == 0)
        return;
    assert(packing_check(c->packing, "the experts", (uint64_t)c->in, NULL) == 0);
    int32_t n = size_of_runs(n_used, matrix_bytes);
    const elem **w = xcalloc((size_t)c->n_groups, sizeof *w);
    cuda_scratch_begin(dev); /* the plain products take none */
    elem *room = cuda_scratch_take(dev, (size_t)n * matrix_bytes);
    for (int32_t first = 0, end; first < c->n_groups; first = end) {
        end = unpack_run(dev, c, first, n, room, w);
        if (c->is_dx)
            dev->ops->grouped_linear_dx(dev, c->to, c->from, w + first, c->offsets + first,
                                        end - first, c->in, c->out, c->beta);
        else
            dev->ops->grouped_linear(dev, c->to, c->from, w + first, c->offsets + first,
                                     end - first, c->in, c->out);
    }
    free(w);
}

void cuda_grouped_linear_packed(struct device *dev, elem_ptr y, const_elem_ptr x,
                                const uint8_t *const *w, enum packing packing,
                                const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    multiply(dev, &(struct call){.to = y.p, .from = x.p, .w = w, .packing = packing,
                                 .offsets = offsets, .n_groups = n_groups, .in = in, .out = out});
}

void cuda_grouped_linear_packed_dx(struct device *dev, elem_ptr dx, const_elem_ptr dy,
                                   const uint8_t *const *w, enum packing packing,
                                   const int64_t *offsets, int32_t n_groups, int64_t in,
                                   int64_t out, float beta)
{
    multiply(dev, &(struct call){.is_dx = true, .to = dx.p, .from = dy.p, .w = w,
                                 .packing = packing, .offsets = offsets, .n_groups = n_groups,
                                 .in = in, .out = out, .beta = beta});
}
