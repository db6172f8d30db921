/* cuda_ops_norms.c - cases of norms and attention residuals */
#include "tests/cuda_ops.h"

#include <math.h>

/* n elements are read or written n_elems times. */
static void count(struct trial *t, int64_t n, int n_elems)
{
    t->bytes = (double)n * (double)elem_size(t->dev) * n_elems;
}

/* What a norm keeps for its backward is positive. */
static const float *in_positive(struct trial *t, int64_t n, float low, float high)
{
    float *x = trial_host(t, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = low + (high - low) * (float)trial_uniform(t);
    return in_floats_of(t, x, n);
}

/* What a gradient is added to, or NaN where beta is 0. */
static elem *gradient(struct trial *t, const char *name, int64_t n, float beta)
{
    return beta == 0 ? out_elems(t, name, n) : inout_elems(t, name, n, 1);
}

static void rms_norm(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    const elem *x = in_elems(t, n * d, 2), *w = in_elems(t, d, 1);
    elem *y = out_elems(t, "y", n * d);
    float *rstd = out_floats(t, "rstd", n);
    count(t, n * d, 2);
    TRIAL_RUN(t)
        t->dev->ops->rms_norm(t->dev, y, rstd, x, w, n, d, 1e-5f);
}

/* d[2]: beta */
static void rms_norm_backward(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    float beta = (float)t->d[2];
    const elem *dy = in_elems(t, n * d, 1), *x = in_elems(t, n * d, 2), *w = in_elems(t, d, 1);
    const float *rstd = in_positive(t, n, 0.3f, 0.7f);
    elem *dx = gradient(t, "dx", n * d, beta);
    float *acc_dw = inout_floats(t, "acc_dw", d, 1);
    count(t, n * d, beta == 0 ? 3 : 4);
    TRIAL_RUN(t)
        t->dev->ops->rms_norm_backward(t->dev, dx, acc_dw, dy, x, w, rstd, n, d, beta);
}

static void gated_rms_norm(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    const elem *o = in_elems(t, n * d, 2), *g = in_elems(t, n * d, 2), *w = in_elems(t, d, 1);
    elem *y = out_elems(t, "y", n * d);
    float *rstd = out_floats(t, "rstd", n);
    count(t, n * d, 3);
    TRIAL_RUN(t)
        t->dev->ops->gated_rms_norm(t->dev, y, rstd, o, g, w, n, d, 1e-5f);
}

static void gated_rms_norm_backward(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    const elem *dy = in_elems(t, n * d, 1), *o = in_elems(t, n * d, 2);
    const elem *g = in_elems(t, n * d, 2), *w = in_elems(t, d, 1);
    const float *rstd = in_positive(t, n, 0.3f, 0.7f);
    elem *d_o = out_elems(t, "d_o", n * d), *dg = out_elems(t, "dg", n * d);
    float *acc_dw = inout_floats(t, "acc_dw", d, 1);
    count(t, n * d, 5);
    TRIAL_RUN(t)
        t->dev->ops->gated_rms_norm_backward(t->dev, d_o, dg, acc_dw, dy, o, g, w, rstd, n, d);
}

static void l2_norm(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    const elem *x = in_elems(t, n * d, 1);
    elem *y = out_elems(t, "y", n * d);
    float *rstd = out_floats(t, "rstd", n);
    count(t, n * d, 2);
    TRIAL_RUN(t)
        t->dev->ops->l2_norm(t->dev, y, rstd, x, n, d, 1e-6f);
}

static void l2_norm_backward(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    const elem *dy = in_elems(t, n * d, 1), *y = in_elems(t, n * d, 1 / sqrtf((float)d));
    const float *rstd = in_positive(t, n, 0.1f, 2);
    elem *dx = out_elems(t, "dx", n * d);
    count(t, n * d, 3);
    TRIAL_RUN(t)
        t->dev->ops->l2_norm_backward(t->dev, dx, dy, y, rstd, n, d);
}

static void layer_norm(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    const elem *x = in_elems(t, n * d, 2), *w = in_elems(t, d, 1), *b = in_elems(t, d, 1);
    elem *y = out_elems(t, "y", n * d);
    float *stats = out_floats(t, "stats", 2 * n);
    count(t, n * d, 2);
    TRIAL_RUN(t)
        t->dev->ops->layer_norm(t->dev, y, stats, x, w, b, n, d, 1e-5f);
}

/* d[2]: beta */
static void layer_norm_backward(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    float beta = (float)t->d[2];
    const elem *dy = in_elems(t, n * d, 1), *x = in_elems(t, n * d, 2), *w = in_elems(t, d, 1);
    const float *stats = in_positive(t, 2 * n, 0.3f, 0.7f);
    elem *dx = gradient(t, "dx", n * d, beta);
    float *acc_dw = inout_floats(t, "acc_dw", d, 1), *acc_db = inout_floats(t, "acc_db", d, 1);
    count(t, n * d, beta == 0 ? 3 : 4);
    TRIAL_RUN(t)
        t->dev->ops->layer_norm_backward(t->dev, dx, acc_dw, acc_db, dy, x, w, stats, n, d, beta);
}

/* d[2] rows are mixed; d[3]: y is the last of them. */
static void attn_res(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    int32_t n_rows = (int32_t)t->d[2];
    const elem **r = trial_host(t, (size_t)n_rows * sizeof *r), *g, *w;
    elem *y = NULL;
    for (int32_t i = 0; i < n_rows; i++)
        if (t->d[3] && i == n_rows - 1)
            r[i] = y = inout_elems(t, "y", n * d, 1);
        else
            r[i] = in_elems(t, n * d, 1);
    g = in_elems(t, d, 1);
    w = in_elems(t, d, 0.1f);
    if (!y)
        y = out_elems(t, "y", n * d);
    float *weights = out_floats(t, "weights", n * n_rows);
    count(t, n * d, n_rows + 1);
    TRIAL_RUN(t)
        t->dev->ops->attn_res(t->dev, y, weights, r, n_rows, g, w, n, d, 1e-5f);
}

static const float *mix_weights(struct trial *t, int64_t n, int32_t n_rows)
{
    float *a = trial_host(t, (size_t)(n * n_rows) * sizeof *a);
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int32_t j = 0; j < n_rows; j++)
            sum += a[i * n_rows + j] = (float)trial_uniform(t) + 0.01f;
        for (int32_t j = 0; j < n_rows; j++)
            a[i * n_rows + j] /= sum;
    }
    return in_floats_of(t, a, n * n_rows);
}

static void attn_res_backward(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1];
    int32_t n_rows = (int32_t)t->d[2];
    const elem **r = trial_host(t, (size_t)n_rows * sizeof *r);
    elem **acc_dr = trial_host(t, (size_t)n_rows * sizeof *acc_dr);
    for (int32_t i = 0; i < n_rows; i++) {
        r[i] = in_elems(t, n * d, 1);
        acc_dr[i] = inout_elems(t, "acc_dr", n * d, 1);
    }
    const elem *dy = in_elems(t, n * d, 1), *g = in_elems(t, d, 1), *w = in_elems(t, d, 0.1f);
    const float *weights = mix_weights(t, n, n_rows);
    float *acc_dg = inout_floats(t, "acc_dg", d, 1), *acc_dw = inout_floats(t, "acc_dw", d, 1);
    count(t, n * d, 3 * n_rows + 1);
    TRIAL_RUN(t)
        t->dev->ops->attn_res_backward(t->dev, acc_dr, acc_dg, acc_dw, dy, r, weights, n_rows, g,
                                       w, n, d, 1e-5f);
}

/* No rows, rows shorter than a vector, odd ones, a group's of every size, those of a block,
 * K3's. */
#define SHAPES(op)                                                                                 \
    {#op, op, {0, 8}}, {#op, op, {1, 1}}, {#op, op, {3, 5}}, {#op, op, {17, 8}},                   \
        {#op, op, {9, 33}}, {#op, op, {33, 64}}, {#op, op, {300, 128}}, {#op, op, {5, 512}},       \
        {#op, op, {3, 1023}}, {#op, op, {7, 1032}}, {#op, op, {700, 256}},                         \
        {#op, op, {65, 7168}, CASE_LARGE}, {#op, op, {2000, 3584}, CASE_LARGE},                    \
        {#op, op, {3, 65536}, CASE_LARGE}

static const struct op_case cases[] = {
    SHAPES(rms_norm),
    {"rms_norm", rms_norm, {8192, 7168}, CASE_BENCH},
    SHAPES(rms_norm_backward),
    {"rms_norm_backward", rms_norm_backward, {31, 96, 1}},
    {"rms_norm_backward", rms_norm_backward, {70, 1536, 1}},
    {"rms_norm_backward", rms_norm_backward, {8192, 7168, 0}, CASE_BENCH},
    {"rms_norm_backward", rms_norm_backward, {8192, 7168, 1}, CASE_BENCH},
    SHAPES(gated_rms_norm),
    {"gated_rms_norm", gated_rms_norm, {96 * 8192, 128}, CASE_BENCH},
    SHAPES(gated_rms_norm_backward),
    {"gated_rms_norm_backward", gated_rms_norm_backward, {96 * 200, 128}, CASE_LARGE},
    {"gated_rms_norm_backward", gated_rms_norm_backward, {96 * 8192, 128}, CASE_BENCH},
    SHAPES(l2_norm),
    {"l2_norm", l2_norm, {96 * 8192, 128}, CASE_BENCH},
    SHAPES(l2_norm_backward),
    {"l2_norm_backward", l2_norm_backward, {96 * 8192, 128}, CASE_BENCH},
    SHAPES(layer_norm),
    {"layer_norm", layer_norm, {65536, 128}, CASE_BENCH},
    SHAPES(layer_norm_backward),
    {"layer_norm_backward", layer_norm_backward, {31, 96, 1}},
    {"layer_norm_backward", layer_norm_backward, {65536, 128}, CASE_BENCH},
    {"attn_res", attn_res, {0, 8, 2}},
    {"attn_res", attn_res, {1, 1, 1}},
    {"attn_res", attn_res, {5, 7, 2}},
    {"attn_res", attn_res, {4, 256, 3, 1}},
    {"attn_res", attn_res, {6, 1000, 9}},
    {"attn_res", attn_res, {2, 1800, 5, 1}},
    {"attn_res", attn_res, {100, 7168, 9}, CASE_LARGE},
    {"attn_res", attn_res, {8192, 7168, 9}, CASE_BENCH},
    {"attn_res", attn_res, {8192, 7168, 2}, CASE_BENCH},
    {"attn_res_backward", attn_res_backward, {0, 8, 2}},
    {"attn_res_backward", attn_res_backward, {1, 1, 1}},
    {"attn_res_backward", attn_res_backward, {5, 7, 2}},
    {"attn_res_backward", attn_res_backward, {40, 256, 3}},
    {"attn_res_backward", attn_res_backward, {6, 1000, 9}},
    {"attn_res_backward", attn_res_backward, {2, 1800, 5}},
    {"attn_res_backward", attn_res_backward, {600, 7168, 9}, CASE_LARGE},
    {"attn_res_backward", attn_res_backward, {8192, 7168, 9}, CASE_BENCH},
};
OP_FAMILY(norms, cases)
