/* cuda_ops_elementwise.c - cases of updates of whole buffers, sums over them, and optimizers */
#include "tests/cuda_ops.h"

#include <math.h>

static void count(struct trial *t, int64_t n, int n_floats, int n_elems)
{
    t->flops = (double)n;
    t->bytes = (double)n * (4.0 * n_floats + (double)elem_size(t->dev) * n_elems);
}

static void axpy(struct trial *t)
{
    int64_t n = t->d[0];
    const float *x = in_floats(t, n, 1);
    float *y = inout_floats(t, "y", n, 1);
    count(t, n, 3, 0);
    TRIAL_RUN(t)
        t->dev->ops->axpy(t->dev, y, 0.7f, x, n);
}

static void scale(struct trial *t)
{
    int64_t n = t->d[0];
    float *y = inout_floats(t, "y", n, 1);
    count(t, n, 2, 0);
    TRIAL_RUN(t)
        t->dev->ops->scale(t->dev, y, -0.3f, n);
}

static void add(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *x = in_elems(t, n, 1);
    elem *y = inout_elems(t, "y", n, 1);
    count(t, n, 0, 3);
    TRIAL_RUN(t)
        t->dev->ops->add(t->dev, y, x, n);
}

static void to_f32(struct trial *t)
{
    int64_t n = t->d[0];
    const elem *x = in_elems(t, n, 1);
    float *y = out_floats(t, "y", n);
    count(t, n, 1, 1);
    t->tolerance_bf16 = t->tolerance_f32 = 1e-30; /* exact */
    TRIAL_RUN(t)
        t->dev->ops->to_f32(t->dev, y, x, n);
}

static void to_elem(struct trial *t)
{
    int64_t n = t->d[0];
    const float *x = in_floats(t, n, 1);
    elem *y = out_elems(t, "y", n);
    count(t, n, 1, 1);
    TRIAL_RUN(t)
        t->dev->ops->to_elem(t->dev, y, x, n);
}

static void sum_squares(struct trial *t)
{
    int64_t n = t->d[0];
    const float *x = in_floats(t, n, 1);
    double *acc = inout_double(t, "acc", 1.5);
    count(t, n, 1, 0);
    t->tolerance_bf16 = t->tolerance_f32 = 1e-12;
    TRIAL_RUN(t)
        t->dev->ops->sum_squares(t->dev, acc, x, n);
}

/* d[1]: where the one bad number is, -1: nowhere; d[2]: 0 NaN, 1 infinite. */
static void all_finite(struct trial *t)
{
    int64_t n = t->d[0], at = t->d[1];
    float *host = trial_host(t, (size_t)n * sizeof *host);
    int32_t before = 0;
    for (int64_t i = 0; i < n; i++)
        host[i] = trial_normal(t) * 1e38f / 4;
    if (at >= 0)
        host[at] = t->d[2] ? -INFINITY : NAN;
    const float *x = in_floats_of(t, host, n);
    int32_t *acc_bad = inout_i32(t, "acc_bad", &before, 1, 0);
    count(t, n, 1, 0);
    TRIAL_RUN(t)
        t->dev->ops->all_finite(t->dev, acc_bad, x, n);
}

/* n words, the place of the first. */
static void checksum(struct trial *t)
{
    int64_t n = t->d[0], before = 12345;
    uint64_t *host = trial_host(t, (size_t)n * sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = (uint64_t)trial_below(t, INT64_MAX);
    const uint64_t *x = in_bytes(t, host, (size_t)n * sizeof *host);
    int64_t *acc_sum = inout_i64(t, "acc_sum", &before, 1, 0);
    t->bytes = (double)n * sizeof *x;
    TRIAL_RUN(t)
        t->dev->ops->checksum(t->dev, (uint64_t *)acc_sum, x, n, (uint64_t)t->d[1]);
}

/* ---- optimizers ---- */

/* n, elements. */
static void adamw(struct trial *t)
{
    int64_t n = t->d[0];
    const struct adamw_config config = {
        .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f,
        .grad_scale = 0.01f, .correction1 = 0.1f, .correction2 = 0.05f,
    };
    const float *grad = in_floats(t, n, 1);
    float *w = inout_floats(t, "w", n, 1), *m = inout_floats(t, "m", n, 0.01f);
    float *v = inout_floats(t, "v", n, 0); /* no square is negative */
    elem *elems = t->d[1] ? out_elems(t, "w_elems", n) : NULL;
    count(t, n, 7, t->d[1] ? 1 : 0);
    TRIAL_RUN(t)
        t->dev->ops->adamw(t->dev, w, m, v, elems, grad, n, &config);
}

/* blocks, rows, cols, steps. A quintic that is not yet near 1 magnifies rounding. */
static void newton_schulz(struct trial *t)
{
    int64_t rows = t->d[1], cols = t->d[2];
    int32_t blocks = (int32_t)t->d[0], steps = (int32_t)t->d[3];
    float *x = inout_floats(t, "x", blocks * rows * cols, 1);
    t->tolerance_f32 = 2e-4;
    t->tolerance_bf16 = 8e-2;
    t->flops = (double)blocks * steps * 6 * (double)(rows * cols) * (double)(rows < cols ? rows
                                                                                        : cols);
    TRIAL_RUN(t)
        t->dev->ops->newton_schulz(t->dev, x, blocks, rows, cols, steps);
}

static void muon(struct trial *t)
{
    int64_t rows = t->d[1], cols = t->d[2];
    int32_t heads = (int32_t)t->d[0];
    int64_t n = heads * rows * cols;
    const struct muon_config config = {
        .lr = 0.02f, .momentum = 0.95f, .weight_decay = 0.1f, .grad_scale = 0.5f, .rms = 0.2f,
        .nesterov = t->d[3] != 0,
    };
    const float *grad = in_floats(t, n, 1);
    float *w = inout_floats(t, "w", n, 0.02f), *m = inout_floats(t, "m", n, 0.5f);
    t->tolerance_f32 = 2e-4;
    t->tolerance_bf16 = 3e-2;
    TRIAL_RUN(t)
        t->dev->ops->muon(t->dev, w, m, grad, heads, rows, cols, &config);
}

#define SIZES(op)                                                                                  \
    {#op, op, {0}}, {#op, op, {1}}, {#op, op, {7}}, {#op, op, {8}}, {#op, op, {1000}},             \
    {#op, op, {32768}}, {#op, op, {100003}}, {#op, op, {20000000}, CASE_LARGE},                    \
    {#op, op, {256 << 20}, CASE_BENCH}

static const struct op_case cases[] = {
    SIZES(axpy), SIZES(scale), SIZES(add), SIZES(to_f32), SIZES(to_elem), SIZES(sum_squares),
    {"all_finite", all_finite, {0, -1, 0}},
    {"all_finite", all_finite, {1, 0, 0}},
    {"all_finite", all_finite, {1, 0, 1}},
    {"all_finite", all_finite, {50000, -1, 0}},
    {"all_finite", all_finite, {50000, 49999, 0}},
    {"all_finite", all_finite, {50000, 17, 1}},
    {"all_finite", all_finite, {256 << 20, -1, 0}, CASE_BENCH},
    {"checksum", checksum, {0, 0}},
    {"checksum", checksum, {1, 5}},
    {"checksum", checksum, {100003, 1 << 20}},
    {"checksum", checksum, {64 << 20, 0}, CASE_BENCH},
    SIZES(adamw),
    {"adamw", adamw, {7, 1}},
    {"adamw", adamw, {100003, 1}},
    {"adamw", adamw, {256 << 20, 1}, CASE_BENCH},
    {"adamw", adamw, {1000000000, 1}, CASE_BENCH},
    {"newton_schulz", newton_schulz, {1, 1, 1, 5}},
    {"newton_schulz", newton_schulz, {3, 16, 16, 5}},
    {"newton_schulz", newton_schulz, {2, 24, 40, 5}},
    {"newton_schulz", newton_schulz, {2, 70, 33, 3}},
    {"newton_schulz", newton_schulz, {2, 512, 1024, 5}, CASE_LARGE},
    {"newton_schulz", newton_schulz, {64, 512, 1024, 5}, CASE_BENCH},
    {"muon", muon, {1, 5, 9, 1}},
    {"muon", muon, {4, 32, 48, 1}},
    {"muon", muon, {2, 96, 33, 0}},
};

OP_FAMILY(elementwise, cases)
