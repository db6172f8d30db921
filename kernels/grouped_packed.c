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
    int64_t in, out; /* of each weight */
    bool    is_dx;
    float   beta;

    int64_t wide, deep; /* columns of y and of x: out and in, in the backward in and out */
    int64_t n_pieces;   /* of a group, along wide */
};

static void pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct grouped *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t g = i / s->n_pieces, first = i % s->n_pieces * PIECE;
        int64_t row = s->offsets[g], rows = s->offsets[g + 1] - row;
        int64_t n = min_i64(PIECE, s->wide - first);
        struct packed from = { s->packing, s->w[g], s->out, s->in };
        if (rows == 0)
            continue;
        float *w = cpu_scratch(thread, (size_t)(n * s->deep) * sizeof *w);
        if (s->is_dx)
            packed_decode(w, &from, 0, s->deep, first, n);
        else
            packed_decode(w, &from, first, n, 0, s->deep);
        product(thread, s->y + row * s->wide + first, s->wide,
                as_is(s->x + row * s->deep, s->deep),
                s->is_dx ? as_is(w, n) : transposed(w, s->deep), rows, n, s->deep, 1, s->beta);
    }
}

static void grouped(struct device *dev, struct grouped s, int32_t n_groups)
{
    assert(s.packing != PACKING_MXFP4 || s.in % MXFP4_GROUP == 0);
    s.wide = s.is_dx ? s.in : s.out;
    s.deep = s.is_dx ? s.out : s.in;
    s.n_pieces = cpu_n_tasks(s.wide, PIECE);
    cpu_for(dev, n_groups * s.n_pieces, 1, pieces, &s);
}

void cpu_grouped_linear_packed(struct device *dev, float *y, const float *x,
                               const uint8_t *const *w, enum packing packing,
                               const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    struct grouped s = { .y = y, .x = x, .w = w, .packing = packing, .offsets = offsets,
                         .in = in, .out = out };
    grouped(dev, s, n_groups);
}

void cpu_grouped_linear_packed_dx(struct device *dev, float *dx, const float *dy,
                                  const uint8_t *const *w, enum packing packing,
                                  const int64_t *offsets, int32_t n_groups, int64_t in,
                                  int64_t out, float beta)
{
    struct grouped s = { .y = dx, .x = dy, .w = w, .packing = packing, .offsets = offsets,
                         .in = in, .out = out, .is_dx = true, .beta = beta };
    grouped(dev, s, n_groups);
}
