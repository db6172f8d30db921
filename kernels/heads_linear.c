/* heads_linear.c - a linear per head of strided rows: the absorbed form of latent attention */
#include "kernels/ops_cpu.h"

#include "kernels/product.h"

#define PIECE_FLOPS    (4 << 20)
#define PIECE_ROWS_MIN 48

struct heads {
    float *y; /* what is written: y, dx or acc_dw */
    int64_t y_stride;
    const float *a, *b;
    int64_t a_stride, b_stride;
    int64_t n, in, out;
    int32_t n_heads;
    float   beta;
    int64_t step, n_pieces; /* rows of a piece, pieces of a head */
};

/* Rows of one head, n_heads strides apart. */
static struct matrix rows_of(const struct heads *s, const float *x, int64_t stride, int32_t head,
                             int64_t row)
{
    return as_is(x + (row * s->n_heads + head) * stride, s->n_heads * stride);
}

static void forward_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct heads *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int32_t head = (int32_t)(i / s->n_pieces);
        int64_t row = i % s->n_pieces * s->step, rows = min_i64(s->step, s->n - row);
        product(thread, s->y + (row * s->n_heads + head) * s->y_stride, s->n_heads * s->y_stride,
                rows_of(s, s->a, s->a_stride, head, row),
                transposed(s->b + head * s->b_stride, s->in), rows, s->out, s->in, 1, s->beta);
    }
}

static void dx_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct heads *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int32_t head = (int32_t)(i / s->n_pieces);
        int64_t row = i % s->n_pieces * s->step, rows = min_i64(s->step, s->n - row);
        product(thread, s->y + (row * s->n_heads + head) * s->y_stride, s->n_heads * s->y_stride,
                rows_of(s, s->a, s->a_stride, head, row), as_is(s->b + head * s->b_stride, s->in),
                rows, s->in, s->out, 1, s->beta);
    }
}

static void dw_pieces(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct heads *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int32_t head = (int32_t)(i / s->n_pieces);
        int64_t row = i % s->n_pieces * s->step, rows = min_i64(s->step, s->out - row);
        struct matrix dy = transposed(s->a + head * s->a_stride + row, s->n_heads * s->a_stride);
        product(thread, s->y + head * s->y_stride + row * s->in, s->in, dy,
                rows_of(s, s->b, s->b_stride, head, 0), rows, s->in, s->n, 1, 1);
    }
}

static void spread(struct device *dev, struct heads s, int64_t rows, int64_t flops_per_row,
                   cpu_task task)
{
    s.step = max_i64(PIECE_ROWS_MIN, PIECE_FLOPS / max_i64(1, flops_per_row));
    s.n_pieces = cpu_n_tasks(rows, s.step);
    cpu_for(dev, s.n_heads * s.n_pieces, 1, task, &s);
}

void cpu_heads_linear(struct device *dev, float *y, int64_t y_stride, const float *x,
                      int64_t x_stride, const float *w, int64_t w_stride, int64_t n,
                      int32_t n_heads, int64_t in, int64_t out, float beta)
{
    struct heads s = {
        .y = y, .y_stride = y_stride, .a = x, .a_stride = x_stride, .b = w, .b_stride = w_stride,
        .n = n, .in = in, .out = out, .n_heads = n_heads, .beta = beta,
    };
    spread(dev, s, n, 2 * in * out, forward_pieces);
}

void cpu_heads_linear_dx(struct device *dev, float *dx, int64_t x_stride, const float *dy,
                         int64_t y_stride, const float *w, int64_t w_stride, int64_t n,
                         int32_t n_heads, int64_t in, int64_t out, float beta)
{
    struct heads s = {
        .y = dx, .y_stride = x_stride, .a = dy, .a_stride = y_stride, .b = w,
        .b_stride = w_stride, .n = n, .in = in, .out = out, .n_heads = n_heads, .beta = beta,
    };
    spread(dev, s, n, 2 * in * out, dx_pieces);
}

void cpu_heads_linear_dw(struct device *dev, float *acc_dw, int64_t w_stride, const float *dy,
                         int64_t y_stride, const float *x, int64_t x_stride, int64_t n,
                         int32_t n_heads, int64_t in, int64_t out)
{
    struct heads s = {
        .y = acc_dw, .y_stride = w_stride, .a = dy, .a_stride = y_stride, .b = x,
        .b_stride = x_stride, .n = n, .in = in, .out = out, .n_heads = n_heads,
    };
    if (n > 0)
        spread(dev, s, out, 2 * n * in, dw_pieces);
}
