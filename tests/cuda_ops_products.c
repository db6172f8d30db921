/* cuda_ops_products.c - cases of products: dense, a head at a time, per expert */
#include "tests/cuda_ops_groups.h"

/* Sums of k products of unit numbers, one beside other orders of summation. */
#define TOLERANCE_SUM_F32 2e-5

/* ---- dense: n, in, out, beta ---- */

static void count_dense(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[1], out = t->d[2];
    t->flops = product_flops(n, in, out);
    t->bytes = (double)elem_size(t->dev) * (double)(n * in + in * out + n * out);
}

static void linear(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[1], out = t->d[2], beta = t->d[3];
    const elem *x = in_elems(t, n * in, 1), *w = in_elems(t, out * in, 0.1f);
    elem *y = assigned(t, "y", n * out, beta);
    count_dense(t);
    TRIAL_RUN(t)
        t->dev->ops->linear(t->dev, y, x, w, n, in, out, (float)beta);
}

static void linear_f32(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[1], out = t->d[2], beta = t->d[3];
    const elem *x = in_elems(t, n * in, 1), *w = in_elems(t, out * in, 0.1f);
    float *y = beta ? inout_floats(t, "y", n * out, 1) : out_floats(t, "y", n * out);
    t->tolerance_bf16 = TOLERANCE_SUM_F32;
    count_dense(t);
    TRIAL_RUN(t)
        t->dev->ops->linear_f32(t->dev, y, x, w, n, in, out, (float)beta);
}

static void linear_dx(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[1], out = t->d[2], beta = t->d[3];
    const elem *dy = in_elems(t, n * out, 1), *w = in_elems(t, out * in, 0.1f);
    elem *dx = assigned(t, "dx", n * in, beta);
    count_dense(t);
    TRIAL_RUN(t)
        t->dev->ops->linear_dx(t->dev, dx, dy, w, n, in, out, (float)beta);
}

static void linear_dw(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[1], out = t->d[2];
    const elem *dy = in_elems(t, n * out, 1), *x = in_elems(t, n * in, 1);
    float *acc_dw = inout_floats(t, "acc_dw", out * in, 1);
    t->tolerance_bf16 = TOLERANCE_SUM_F32;
    count_dense(t);
    TRIAL_RUN(t)
        t->dev->ops->linear_dw(t->dev, acc_dw, dy, x, n, in, out);
}

/* ---- a head at a time: n, heads, in, out, extra width of rows, beta ---- */

static void heads_linear(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3], extra = t->d[4], beta = t->d[5];
    int32_t heads = (int32_t)t->d[1];
    int64_t x_stride = in + extra, w_stride = out * in + extra * in;
    const elem *x = in_elems(t, n * heads * x_stride, 1);
    const elem *w = in_elems(t, heads * w_stride, 0.1f);
    elem *y = inout_elems(t, "y", n * heads * (out + extra), 1);
    t->flops = product_flops(n * heads, in, out);
    TRIAL_RUN(t)
        t->dev->ops->heads_linear(t->dev, y, out + extra, x, x_stride, w, w_stride, n, heads, in,
                                  out, (float)beta);
}

static void heads_linear_dx(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3], extra = t->d[4], beta = t->d[5];
    int32_t heads = (int32_t)t->d[1];
    int64_t w_stride = out * in + extra * in;
    const elem *dy = in_elems(t, n * heads * (out + extra), 1);
    const elem *w = in_elems(t, heads * w_stride, 0.1f);
    elem *dx = inout_elems(t, "dx", n * heads * (in + extra), 1);
    t->flops = product_flops(n * heads, in, out);
    TRIAL_RUN(t)
        t->dev->ops->heads_linear_dx(t->dev, dx, in + extra, dy, out + extra, w, w_stride, n,
                                     heads, in, out, (float)beta);
}

static void heads_linear_dw(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3], extra = t->d[4];
    int32_t heads = (int32_t)t->d[1];
    int64_t w_stride = out * in + extra * in;
    const elem *dy = in_elems(t, n * heads * (out + extra), 1);
    const elem *x = in_elems(t, n * heads * (in + extra), 1);
    float *acc_dw = inout_floats(t, "acc_dw", heads * w_stride, 1);
    t->tolerance_bf16 = TOLERANCE_SUM_F32;
    t->flops = product_flops(n * heads, in, out);
    TRIAL_RUN(t)
        t->dev->ops->heads_linear_dw(t->dev, acc_dw, w_stride, dy, out + extra, x, in + extra, n,
                                     heads, in, out);
}

/* ---- per expert: rows, groups, in, out, kind of sizes, beta ---- */

/* Pointers to n_groups blocks of stride elements; each group's lies at its own place. */
static const elem **elem_groups(struct trial *t, const elem *all, int32_t n_groups, int64_t stride)
{
    const elem **to = trial_host(t, (size_t)n_groups * sizeof *to);
    for (int32_t g = 0; g < n_groups; g++)
        to[g] = const_elem_at(t->dev, all, (n_groups - 1 - g) * stride);
    return to;
}

static void grouped_linear(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3];
    int32_t groups = (int32_t)t->d[1];
    const int64_t *offsets = offsets_of(t, n, groups, t->d[4]);
    const elem *x = in_elems(t, n * in, 1), *all = in_elems(t, groups * in * out, 0.1f);
    const elem **w = elem_groups(t, all, groups, in * out);
    elem *y = out_elems(t, "y", n * out);
    count_grouped(t);
    TRIAL_RUN(t)
        t->dev->ops->grouped_linear(t->dev, y, x, w, offsets, groups, in, out);
}

static void grouped_linear_dx(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3], beta = t->d[5];
    int32_t groups = (int32_t)t->d[1];
    const int64_t *offsets = offsets_of(t, n, groups, t->d[4]);
    const elem *dy = in_elems(t, n * out, 1), *all = in_elems(t, groups * in * out, 0.1f);
    const elem **w = elem_groups(t, all, groups, in * out);
    elem *dx = assigned(t, "dx", n * in, beta);
    count_grouped(t);
    TRIAL_RUN(t)
        t->dev->ops->grouped_linear_dx(t->dev, dx, dy, w, offsets, groups, in, out, (float)beta);
}

static void grouped_linear_dx_pair(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3];
    int32_t groups = (int32_t)t->d[1];
    const int64_t *offsets = offsets_of(t, n, groups, t->d[4]);
    const elem *dy[2], **w[2];
    for (int i = 0; i < 2; i++) {
        dy[i] = in_elems(t, n * out, 1);
        w[i] = elem_groups(t, in_elems(t, groups * in * out, 0.1f), groups, in * out);
    }
    elem *dx = out_elems(t, "dx", n * in);
    count_grouped(t);
    t->flops *= 2;
    TRIAL_RUN(t)
        t->dev->ops->grouped_linear_dx_pair(t->dev, dx, dy[0], w[0], dy[1], w[1], offsets, groups,
                                            in, out);
}

static void grouped_linear_dw(struct trial *t)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3];
    int32_t groups = (int32_t)t->d[1];
    const int64_t *offsets = offsets_of(t, n, groups, t->d[4]);
    const elem *dy = in_elems(t, n * out, 1), *x = in_elems(t, n * in, 1);
    float *all = inout_floats(t, "acc_dw", groups * in * out, 1);
    float **acc_dw = trial_host(t, (size_t)groups * sizeof *acc_dw);
    for (int32_t g = 0; g < groups; g++)
        acc_dw[g] = all + (groups - 1 - g) * in * out;
    t->tolerance_bf16 = TOLERANCE_SUM_F32;
    count_grouped(t);
    TRIAL_RUN(t)
        t->dev->ops->grouped_linear_dw(t->dev, acc_dw, dy, x, offsets, groups, in, out);
}

#define DENSE(op)                                                                                  \
    {#op, op, {0, 8, 8}},                                                                          \
    {#op, op, {1, 1, 1}},                                                                          \
    {#op, op, {1, 64, 128}},                                                                       \
    {#op, op, {3, 5, 7, 1}},                                                                       \
    {#op, op, {17, 33, 129}},                                                                      \
    {#op, op, {128, 256, 64, 1}},                                                                  \
    {#op, op, {257, 72, 200}},                                                                     \
    {#op, op, {300, 511, 130, 1}},                                                                 \
    {#op, op, {1000, 1024, 512}, CASE_LARGE},                                                      \
    {#op, op, {512, 7168, 3072}, CASE_LARGE},                                                      \
    {#op, op, {8192, 7168, 7168}, CASE_BENCH},                                                     \
    {#op, op, {16384, 1024, 3072}, CASE_BENCH}

#define HEADS(op)                                                                                  \
    {#op, op, {0, 2, 8, 8, 0, 0}},                                                                 \
    {#op, op, {1, 1, 3, 5, 0, 0}},                                                                 \
    {#op, op, {5, 3, 7, 9, 3, 1}},                                                                 \
    {#op, op, {130, 4, 64, 32, 0, 0}},                                                             \
    {#op, op, {65, 2, 32, 48, 16, 1}},                                                             \
    {#op, op, {256, 16, 512, 128, 64, 0}, CASE_LARGE},                                             \
    {#op, op, {8192, 64, 512, 128, 64, 0}, CASE_BENCH}

#define GROUPED(op)                                                                                \
    {#op, op, {0, 3, 8, 8, EVEN, 0}},                                                              \
    {#op, op, {1, 1, 3, 5, EVEN, 0}},                                                              \
    {#op, op, {40, 7, 17, 9, SKEWED, 1}},                                                          \
    {#op, op, {200, 5, 64, 96, SKEWED, 0}},                                                        \
    {#op, op, {301, 4, 130, 136, ONE_HAS_ALL, 1}},                                                 \
    {#op, op, {600, 16, 256, 64, SKEWED, 1}},                                                      \
    {#op, op, {333, 5, 72, 264, SKEWED, 0}},                                                       \
    {#op, op, {333, 6, 264, 328, ONE_HAS_ALL, 1}},                                                 \
    {#op, op, {1700, 3, 328, 520, SKEWED, 1}},                                                     \
    {#op, op, {2000, 32, 512, 256, SKEWED, 0}, CASE_LARGE},                                        \
    {#op, op, {1500, 3, 3584, 3072, EVEN, 1}, CASE_LARGE},                                         \
    {#op, op, {131072, 14, 3584, 3072, EVEN, 0}, CASE_BENCH},                                      \
    {#op, op, {131072, 14, 3584, 3072, SKEWED, 0}, CASE_BENCH},                                    \
    {#op, op, {131072, 112, 3584, 3072, EVEN, 0}, CASE_BENCH},                                     \
    {#op, op, {65536, 64, 2048, 1024, EVEN, 0}, CASE_BENCH},                                       \
    {#op, op, {65536, 64, 2048, 1024, SKEWED, 0}, CASE_BENCH}

static const struct op_case cases[] = {
    DENSE(linear), DENSE(linear_f32), DENSE(linear_dx), DENSE(linear_dw),
    HEADS(heads_linear), HEADS(heads_linear_dx), HEADS(heads_linear_dw),
    GROUPED(grouped_linear), GROUPED(grouped_linear_dx), GROUPED(grouped_linear_dw),
    GROUPED(grouped_linear_dx_pair),
};

OP_FAMILY(products, cases)
