/* grouped_packed.c - the experts' linear over weights that stay packed
 *
 * A piece of work is some rows or columns of one weight against all rows of its group, so that
 * every number is decoded once, into a block that stays in the second cache. */
#include "kernels/ops_cpu.h"

#include "kernels/packed.h"
#include "kernels/product.h"

#define PIECE 64 /* rows of a weight in the forward, columns in the backward */

struct grouped {
    float *y; /* or dx */
    const float *x; /* or dy */
    const uint8_t *const *w;
    enum packing packing;
    const int64_t *offsets;
    int64_t in, out, n_pieces; /* of each weight */
    float   beta;
};

static struct packed weight(const struct grouped *s, int64_t g)
{
    return (struct packed){s->packing, s->w[g], s->out, s->in};
}

static void forward_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct grouped *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t g = i / s->n_pieces, first = i % s->n_pieces * PIECE;
        int64_t row = s->offsets[g], rows = s->offsets[g + 1] - row;
        int64_t n_out = min_i64(PIECE, s->out - first);
        struct packed from = weight(s, g);
        if (rows == 0)
            continue;
        float *w = cpu_scratch(thread, (size_t)(n_out * s->in) * sizeof *w);
        packed_decode(w, &from, first, n_out, 0, s->in);
        product(thread, s->y + row * s->out + first, s->out, as_is(s->x + row * s->in, s->in),
                transposed(w, s->in), rows, n_out, s->in, 1, 0);
    }
}

static void dx_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct grouped *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t g = i / s->n_pieces, first = i % s->n_pieces * PIECE;
        int64_t row = s->offsets[g], rows = s->offsets[g + 1] - row;
        int64_t n_in = min_i64(PIECE, s->in - first);
        struct packed from = weight(s, g);
        if (rows == 0)
            continue;
        float *w = cpu_scratch(thread, (size_t)(s->out * n_in) * sizeof *w);
        packed_decode(w, &from, 0, s->out, first, n_in);
        product(thread, s->y + row * s->in + first, s->in, as_is(s->x + row * s->out, s->out),
                as_is(w, n_in), rows, n_in, s->out, 1, s->beta);
    }
}

void cpu_grouped_linear_packed(struct device *dev, float *y, const float *x,
                               const uint8_t *const *w, enum packing packing,
                               const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    struct grouped s = {
        .y = y, .x = x, .w = w, .packing = packing, .offsets = offsets, .in = in, .out = out,
        .n_pieces = cpu_n_tasks(out, PIECE),
    };
    assert(packing != PACKING_MXFP4 || in % MXFP4_GROUP == 0);
    cpu_for(dev, n_groups * s.n_pieces, 1, forward_pieces, &s);
}

void cpu_grouped_linear_packed_dx(struct device *dev, float *dx, const float *dy,
                                  const uint8_t *const *w, enum packing packing,
                                  const int64_t *offsets, int32_t n_groups, int64_t in,
                                  int64_t out, float beta)
{
    struct grouped s = {
        .y = dx, .x = dy, .w = w, .packing = packing, .offsets = offsets, .in = in, .out = out,
        .n_pieces = cpu_n_tasks(in, PIECE), .beta = beta,
    };
    assert(packing != PACKING_MXFP4 || in % MXFP4_GROUP == 0);
    cpu_for(dev, n_groups * s.n_pieces, 1, dx_pieces, &s);
}
