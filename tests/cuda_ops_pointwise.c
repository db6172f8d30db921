/* cuda_ops_pointwise.c - cases of gates, activations, short convolution, KDA's gate and rotary */
#include "tests/cuda_ops.h"

static void count(struct trial *t, int64_t n, int n_elems, int n_floats)
{
    t->bytes = (double)n * ((double)elem_size(t->dev) * n_elems + 4.0 * n_floats);
}

/* ---- gates and activations ---- */

static void sigmoid(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *x = in_elems(t, n, 4);
    elem *y = out_elems(t, "y", n);
    count(t, n, 2, 0);
    TRIAL_RUN(t)
        t->dev->ops->sigmoid(t->dev, y, x, n);
}

static void sigmoid_backward(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *dy = in_elems(t, n, 1), *y = in_elems(t, n, 1);
    elem *dx = out_elems(t, "dx", n);
    count(t, n, 3, 0);
    TRIAL_RUN(t)
        t->dev->ops->sigmoid_backward(t->dev, dx, dy, y, n);
}

static void sigmoid_gate(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *o = in_elems(t, n, 1), *g = in_elems(t, n, 4);
    elem *y = out_elems(t, "y", n);
    count(t, n, 3, 0);
    TRIAL_RUN(t)
        t->dev->ops->sigmoid_gate(t->dev, y, o, g, n);
}

static void sigmoid_gate_backward(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *dy = in_elems(t, n, 1), *o = in_elems(t, n, 1), *g = in_elems(t, n, 4);
    elem *d_o = out_elems(t, "d_o", n), *dg = out_elems(t, "dg", n);
    count(t, n, 5, 0);
    TRIAL_RUN(t)
        t->dev->ops->sigmoid_gate_backward(t->dev, d_o, dg, dy, o, g, n);
}

/* d[1]: the width of its inputs; K3's bounds. */
static void situ(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *a = in_elems(t, n, (float)t->d[1]), *u = in_elems(t, n, 5 * (float)t->d[1]);
    elem *y = out_elems(t, "y", n);
    count(t, n, 3, 0);
    TRIAL_RUN(t)
        t->dev->ops->situ(t->dev, y, a, u, n, 4, 25);
}

static void situ_backward(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *a = in_elems(t, n, (float)t->d[1]), *u = in_elems(t, n, 5 * (float)t->d[1]);
    const elem *dy = in_elems(t, n, 1);
    elem *da = out_elems(t, "da", n), *du = out_elems(t, "du", n);
    count(t, n, 5, 0);
    TRIAL_RUN(t)
        t->dev->ops->situ_backward(t->dev, da, du, dy, a, u, n, 4, 25);
}

static void swiglu(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *a = in_elems(t, n, 4), *u = in_elems(t, n, 2);
    elem *y = out_elems(t, "y", n);
    count(t, n, 3, 0);
    TRIAL_RUN(t)
        t->dev->ops->swiglu(t->dev, y, a, u, n);
}

static void swiglu_backward(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *dy = in_elems(t, n, 1), *a = in_elems(t, n, 4), *u = in_elems(t, n, 2);
    elem *da = out_elems(t, "da", n), *du = out_elems(t, "du", n);
    count(t, n, 5, 0);
    TRIAL_RUN(t)
        t->dev->ops->swiglu_backward(t->dev, da, du, dy, a, u, n);
}

/* ---- KDA's small ops ---- */

/* d: n, documents, channels, kernel */
static void short_conv(struct trial *t)
{
    int64_t n = t->d[0], channels = t->d[2];
    int32_t n_docs = (int32_t)t->d[1], kernel = (int32_t)t->d[3];
    const int32_t *cu = trial_documents(t, n, n_docs);
    const elem *x = in_elems(t, n * channels, 1), *w = in_elems(t, channels * kernel, 0.5f);
    elem *y = out_elems(t, "y", n * channels), *pre = out_elems(t, "pre", n * channels);
    count(t, n * channels, 3, 0);
    TRIAL_RUN(t)
        t->dev->ops->short_conv(t->dev, y, pre, x, w, cu, n_docs, channels, kernel);
}

static void short_conv_backward(struct trial *t)
{
    int64_t n = t->d[0], channels = t->d[2];
    int32_t n_docs = (int32_t)t->d[1], kernel = (int32_t)t->d[3];
    const int32_t *cu = trial_documents(t, n, n_docs);
    const elem *x = in_elems(t, n * channels, 1), *w = in_elems(t, channels * kernel, 0.5f);
    const elem *dy = in_elems(t, n * channels, 1), *pre = in_elems(t, n * channels, 1);
    elem *dx = out_elems(t, "dx", n * channels);
    float *acc_dw = inout_floats(t, "acc_dw", channels * kernel, 1);
    count(t, n * channels, 4, 0);
    TRIAL_RUN(t)
        t->dev->ops->short_conv_backward(t->dev, dx, acc_dw, dy, pre, x, w, cu, n_docs, channels,
                                         kernel);
}

/* d: n, heads, d, bounded */
static void kda_gate(struct trial *t)
{
    int64_t n = t->d[0], width = t->d[1] * t->d[2];
    const elem *z = in_elems(t, n * width, 3), *dt_bias = in_elems(t, width, 1);
    const elem *a_log = in_elems(t, t->d[1], 1);
    float *g = out_floats(t, "g", n * width);
    count(t, n * width, 1, 1);
    TRIAL_RUN(t)
        t->dev->ops->kda_gate(t->dev, g, z, dt_bias, a_log, n, (int32_t)t->d[1],
                              (int32_t)t->d[2], t->d[3], -5);
}

static void kda_gate_backward(struct trial *t)
{
    int64_t n = t->d[0], width = t->d[1] * t->d[2];
    const elem *z = in_elems(t, n * width, 3), *dt_bias = in_elems(t, width, 1);
    const elem *a_log = in_elems(t, t->d[1], 1);
    const float *dg = in_floats(t, n * width, 1);
    elem *dz = out_elems(t, "dz", n * width);
    float *acc_d_dt_bias = inout_floats(t, "acc_d_dt_bias", width, 1);
    float *acc_d_a_log = inout_floats(t, "acc_d_a_log", t->d[1], 1);
    count(t, n * width, 2, 1);
    t->tolerance_f32 = 1e-4; /* long sums of either sign */
    TRIAL_RUN(t)
        t->dev->ops->kda_gate_backward(t->dev, dz, acc_d_dt_bias, acc_d_a_log, dg, z, dt_bias,
                                       a_log, n, (int32_t)t->d[1], (int32_t)t->d[2], t->d[3], -5);
}

/* ---- rotary: d: n, documents, heads, dim, what lies before it in a row, interleaved ---- */

static void turn(struct trial *t, bool backward)
{
    int64_t n = t->d[0], heads = t->d[2], dim = t->d[3], before = t->d[4], stride = before + dim;
    struct rotary_shape shape = {
        .n_tokens = n, .n_docs = (int32_t)t->d[1], .dim = (int32_t)dim, .interleaved = t->d[5],
    };
    shape.cu_seqlens = trial_documents(t, n, shape.n_docs);
    const float *table = in_floats(t, n * dim, 0.6f);
    elem *rows = inout_elems(t, "x", n * heads * stride, 1);
    elem *x = elem_at(t->dev, rows, before);
    count(t, n * heads * dim, 2, 0);
    TRIAL_RUN(t)
        if (backward)
            t->dev->ops->rotary_backward(t->dev, x, (int32_t)heads, stride, table, &shape);
        else
            t->dev->ops->rotary(t->dev, x, (int32_t)heads, stride, table, &shape);
}

static void rotary(struct trial *t)
{
    turn(t, false);
}

static void rotary_backward(struct trial *t)
{
    turn(t, true);
}

#define COUNTS(op)                                                                                 \
    {#op, op, {0, 1}}, {#op, op, {1, 1}}, {#op, op, {7, 3}}, {#op, op, {2048, 1}},                 \
        {#op, op, {12345, 2}}, {#op, op, {1000003, 1}, CASE_LARGE},                                \
        {#op, op, {100663296, 1}, CASE_BENCH}

/* d[3] is the kernel: shorter and longer than the window of vectors, runs of rows and their ends,
 * documents shorter than the window. */
#define CONVOLUTIONS(op)                                                                           \
    {#op, op, {0, 1, 8, 4}}, {#op, op, {1, 1, 1, 1}}, {#op, op, {3, 1, 8, 4}},                     \
        {#op, op, {70, 5, 24, 4}}, {#op, op, {40, 40, 16, 4}}, {#op, op, {100, 9, 5, 4}},          \
        {#op, op, {65, 2, 264, 3}}, {#op, op, {33, 3, 16, 2}}, {#op, op, {64, 3, 16, 7}},          \
        {#op, op, {50, 2, 40, 16}}, {#op, op, {300, 7, 1032, 4}},                                  \
        {#op, op, {3000, 30, 1024, 4}, CASE_LARGE}, {#op, op, {150, 4, 12288, 4}, CASE_LARGE},     \
        {#op, op, {8192, 3, 12288, 4}, CASE_BENCH}, {#op, op, {16384, 4, 1024, 4}, CASE_BENCH}

#define GATES(op)                                                                                  \
    {#op, op, {0, 2, 16, 1}}, {#op, op, {1, 1, 1, 0}}, {#op, op, {5, 3, 7, 0}},                    \
        {#op, op, {5, 3, 7, 1}}, {#op, op, {40, 2, 16, 0}}, {#op, op, {130, 4, 32, 1}},            \
        {#op, op, {333, 1, 64, 1}}, {#op, op, {200, 96, 128, 1}, CASE_LARGE},                      \
        {#op, op, {200, 32, 128, 0}, CASE_LARGE}, {#op, op, {8192, 96, 128, 1}, CASE_BENCH}

#define TURNS(op)                                                                                  \
    {#op, op, {0, 1, 2, 8, 0, 0}}, {#op, op, {1, 1, 1, 2, 0, 0}}, {#op, op, {9, 2, 3, 6, 1, 1}},   \
        {#op, op, {9, 2, 3, 6, 1, 0}}, {#op, op, {20, 3, 4, 16, 8, 1}},                            \
        {#op, op, {20, 3, 4, 16, 8, 0}}, {#op, op, {30, 30, 1, 64, 512, 1}},                       \
        {#op, op, {50, 4, 16, 64, 128, 0}}, {#op, op, {8192, 4, 64, 64, 128, 1}, CASE_BENCH},      \
        {#op, op, {8192, 4, 64, 64, 64, 0}, CASE_BENCH}

static const struct op_case cases[] = {
    COUNTS(sigmoid),
    COUNTS(sigmoid_backward),
    COUNTS(sigmoid_gate),
    COUNTS(sigmoid_gate_backward),
    COUNTS(situ),
    COUNTS(situ_backward),
    COUNTS(swiglu),
    COUNTS(swiglu_backward),
    CONVOLUTIONS(short_conv),
    CONVOLUTIONS(short_conv_backward),
    GATES(kda_gate),
    GATES(kda_gate_backward),
    TURNS(rotary),
    TURNS(rotary_backward),
};
OP_FAMILY(pointwise, cases)
