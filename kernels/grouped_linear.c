/* grouped_linear.c - a linear per group of rows: the experts
 *
 * Groups are of very different sizes, so the work is a list of pieces of about equal cost: a
 * small group is one, a large one is cut by rows (of y and dx) or by rows of dw. */
#include "kernels/ops_cpu.h"

#include "kernels/product.h"

#define PIECE_FLOPS    (16 << 20)
#define PIECE_ROWS_MIN 48

struct piece {
    int32_t group;
    int64_t begin, end; /* rows of the matrix that is written */
};

struct grouped {
    float       *y;          /* of linear and dx */
    float *const *acc_dw;
    const float *x, *dy;
    const float *const *w;
    const int64_t *offsets;
    int64_t in, out;
    float   beta;
    struct piece *pieces;
};

static int64_t rows_of_piece(int64_t flops_per_row)
{
    return max_i64(PIECE_ROWS_MIN, PIECE_FLOPS / max_i64(1, flops_per_row));
}

/* Cuts rows [begin, end) of group into pieces of at most step; returns how many there are now. */
static int64_t cut(struct piece *pieces, int64_t n_pieces, int32_t group, int64_t begin,
                   int64_t end, int64_t step)
{
    for (int64_t row = begin; row < end; row += step, n_pieces++)
        if (pieces)
            pieces[n_pieces] = (struct piece){group, row, min_i64(end, row + step)};
    return n_pieces;
}

static int64_t cut_rows(struct piece *pieces, const int64_t *offsets, int32_t n_groups,
                        int64_t in, int64_t out)
{
    int64_t n_pieces = 0, step = rows_of_piece(2 * in * out);
    for (int32_t g = 0; g < n_groups; g++)
        n_pieces = cut(pieces, n_pieces, g, offsets[g], offsets[g + 1], step);
    return n_pieces;
}

static int64_t cut_weights(struct piece *pieces, const int64_t *offsets, int32_t n_groups,
                           int64_t in, int64_t out)
{
    int64_t n_pieces = 0;
    for (int32_t g = 0; g < n_groups; g++) {
        int64_t rows = offsets[g + 1] - offsets[g];
        if (rows > 0)
            n_pieces = cut(pieces, n_pieces, g, 0, out, rows_of_piece(2 * rows * in));
    }
    return n_pieces;
}

static void forward_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    struct grouped *s = arg;
    for (int64_t i = begin; i < end; i++) {
        struct piece p = s->pieces[i];
        product(thread, s->y + p.begin * s->out, s->out, as_is(s->x + p.begin * s->in, s->in),
                transposed(s->w[p.group], s->in), p.end - p.begin, s->out, s->in, 1, 0);
    }
}

static void dx_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    struct grouped *s = arg;
    for (int64_t i = begin; i < end; i++) {
        struct piece p = s->pieces[i];
        product(thread, s->y + p.begin * s->in, s->in, as_is(s->dy + p.begin * s->out, s->out),
                as_is(s->w[p.group], s->in), p.end - p.begin, s->in, s->out, 1, s->beta);
    }
}

static void dw_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    struct grouped *s = arg;
    for (int64_t i = begin; i < end; i++) {
        struct piece p = s->pieces[i];
        int64_t row = s->offsets[p.group], rows = s->offsets[p.group + 1] - row;
        product(thread, s->acc_dw[p.group] + p.begin * s->in, s->in,
                transposed(s->dy + row * s->out + p.begin, s->out),
                as_is(s->x + row * s->in, s->in), p.end - p.begin, s->in, rows, 1, 1);
    }
}

void cpu_grouped_linear(struct device *dev, float *y, const float *x, const float *const *w,
                        const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    int64_t n_pieces = cut_rows(NULL, offsets, n_groups, in, out);
    struct piece *pieces = cpu_shared(dev, (size_t)n_pieces * sizeof *pieces);
    cut_rows(pieces, offsets, n_groups, in, out);
    struct grouped s = {.y = y, .x = x, .w = w, .in = in, .out = out, .pieces = pieces};
    cpu_for(dev, n_pieces, 1, forward_pieces, &s);
}

void cpu_grouped_linear_dx(struct device *dev, float *dx, const float *dy, const float *const *w,
                           const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                           float beta)
{
    int64_t n_pieces = cut_rows(NULL, offsets, n_groups, in, out);
    struct piece *pieces = cpu_shared(dev, (size_t)n_pieces * sizeof *pieces);
    cut_rows(pieces, offsets, n_groups, in, out);
    struct grouped s = {
        .y = dx, .dy = dy, .w = w, .in = in, .out = out, .beta = beta, .pieces = pieces,
    };
    cpu_for(dev, n_pieces, 1, dx_pieces, &s);
}

void cpu_grouped_linear_dx_pair(struct device *dev, float *dx, const float *dy,
                                const float *const *w, const float *dy2, const float *const *w2,
                                const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out)
{
    cpu_grouped_linear_dx(dev, dx, dy, w, offsets, n_groups, in, out, 0);
    cpu_grouped_linear_dx(dev, dx, dy2, w2, offsets, n_groups, in, out, 1);
}

void cpu_grouped_linear_dw(struct device *dev, float *const *acc_dw, const float *dy,
                           const float *x, const int64_t *offsets, int32_t n_groups, int64_t in,
                           int64_t out)
{
    int64_t n_pieces = cut_weights(NULL, offsets, n_groups, in, out);
    struct piece *pieces = cpu_shared(dev, (size_t)n_pieces * sizeof *pieces);
    cut_weights(pieces, offsets, n_groups, in, out);
    struct grouped s = {
        .acc_dw = acc_dw, .dy = dy, .x = x, .offsets = offsets, .in = in, .out = out,
        .pieces = pieces,
    };
    cpu_for(dev, n_pieces, 1, dw_pieces, &s);
}
