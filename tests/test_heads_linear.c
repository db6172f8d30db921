/* test_heads_linear.c - a linear per head against its definition; what lies between rows stays */
#include "tests/gradcheck.h"

static struct random rng;
static struct device *dev;

struct heads {
    int64_t n, in, out, x_stride, y_stride, w_stride;
    int32_t n_heads;
};

static const struct heads cases[] = {
    {1, 1, 1, 1, 1, 1, 1},
    {7, 5, 3, 8, 9, 40, 3},
    {150, 64, 20, 64, 28, 2048, 5},
    {70, 24, 130, 32, 130, 24 * 130, 2},
};

/* An input or output and what it holds where nobody may write. */
static void check(const char *what, const struct heads *c, const float *got, const float *before,
                  const double *want, int64_t n_rows, int64_t d, int64_t stride)
{
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t j = 0; j < stride; j++) {
            int64_t at = i * stride + j;
            if (j >= d && got[at] != before[at])
                fail_msg("%s of %d: the gap after row %d changed", what, (int)c->n, (int)i);
            if (j < d && !(fabs(got[at] - want[i * d + j]) < 1e-4))
                fail_msg("%s of %d: row %d, %d is %g, not %g", what, (int)c->n, (int)i, (int)j,
                         got[at], want[i * d + j]);
        }
}

static void run(const struct heads *c)
{
    int64_t rows = c->n * c->n_heads, n_w = c->n_heads * c->w_stride;
    float *x = random_floats(&rng, rows * c->x_stride, 1);
    float *y = random_floats(&rng, rows * c->y_stride, 1);
    float *w = random_floats(&rng, n_w, 1), *before;
    double *y_want = xcalloc((size_t)(rows * c->out), sizeof *y_want);
    double *x_want = xcalloc((size_t)(rows * c->in), sizeof *x_want);
    double *w_want = xcalloc((size_t)(c->n_heads * c->out * c->in), sizeof *w_want);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < c->out; o++)
            for (int64_t j = 0; j < c->in; j++) {
                int64_t head = i % c->n_heads;
                double at = w[head * c->w_stride + o * c->in + j];
                double xj = x[i * c->x_stride + j], yo = y[i * c->y_stride + o];
                y_want[i * c->out + o] += xj * at;
                x_want[i * c->in + j] += yo * at + (o == 0 ? xj : 0);
                w_want[(head * c->out + o) * c->in + j] += yo * xj;
            }
    for (int64_t i = 0; i < c->n_heads * c->out * c->in; i++)
        w_want[i] += w[i / (c->out * c->in) * c->w_stride + i % (c->out * c->in)];

    float *y2 = xmemdup(y, (size_t)(rows * c->y_stride) * sizeof *y);
    before = y;
    dev->ops->heads_linear(dev, y2, c->y_stride, x, c->x_stride, w, c->w_stride, c->n, c->n_heads,
                           c->in, c->out, 0);
    check("y", c, y2, before, y_want, rows, c->out, c->y_stride);
    float *x2 = xmemdup(x, (size_t)(rows * c->x_stride) * sizeof *x);
    dev->ops->heads_linear_dx(dev, x2, c->x_stride, y, c->y_stride, w, c->w_stride, c->n,
                              c->n_heads, c->in, c->out, 1);
    check("dx", c, x2, x, x_want, rows, c->in, c->x_stride);
    float *w2 = xmemdup(w, (size_t)n_w * sizeof *w);
    dev->ops->heads_linear_dw(dev, w2, c->w_stride, y, c->y_stride, x, c->x_stride, c->n,
                              c->n_heads, c->in, c->out);
    check("dw", c, w2, w, w_want, c->n_heads, c->out * c->in, c->w_stride);
    float *floats[] = {x, y, w, y2, x2, w2};
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++)
        free(floats[i]);
    free(y_want);
    free(x_want);
    free(w_want);
}

static void agrees_with_its_definition(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        run(&cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_its_definition),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
