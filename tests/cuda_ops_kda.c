/* cuda_ops_kda.c - cases of the KDA recurrence: documents of every length about a chunk's, decays
 * from none to all, with and without states */
#include "tests/cuda_ops.h"

#include <string.h>

#define ROWS_RANDOM 10007 /* different rows of a head */

/* Elements round in every product of the chain. */
#define TOLERANCE_BF16 2e-2
/* And dg is a sum of differences: of ten million elements one is off by half their mean size. */
#define TOLERANCE_BF16_BACKWARD 4e-2

/* A shape's documents; EIGHT are of random lengths, EVEN eight of the same, SHORT of 1 to 20
 * tokens: more chunks than are done at once. */
enum { ONE, PACKED, WITH_EMPTY, EIGHT, EVEN, SHORT };

/* How fast the state decays. */
enum { NEVER, SLOW, USUAL, FAST, AT_ONCE, OF_EVERY_SIZE };

/* d: tokens, documents, heads, head_dim, decay, states. */
struct kda_case {
    struct kda_shape shape;
    int64_t n_elems, n_beta, n_state;
    const elem  *q, *k, *v, *beta;
    const float *g, *state;
};

static const int32_t *short_documents(struct trial *t, int64_t n, int32_t *out_n_docs)
{
    int32_t *cu = trial_host(t, (size_t)(n + 1) * sizeof *cu), n_docs = 0;
    cu[0] = 0;
    for (; cu[n_docs] < n; n_docs++) {
        int64_t end = cu[n_docs] + 1 + n_docs * 7 % 20;
        cu[n_docs + 1] = (int32_t)(end < n ? end : n);
    }
    *out_n_docs = n_docs;
    return cu;
}

static const int32_t *documents(struct trial *t, int64_t n, int64_t kind, int32_t *out_n_docs)
{
    static const int32_t with_empty[] = {0, 0, 70, 71, 71, 135};
    static const int32_t packed[] = {0, 1, 71, 87, 215, 218};
    switch (kind) {
    case PACKED: *out_n_docs = 5; return packed;
    case WITH_EMPTY: *out_n_docs = 5; return with_empty;
    case EIGHT: *out_n_docs = 8; return trial_documents(t, n, 8);
    case SHORT: return short_documents(t, n, out_n_docs);
    }
    int32_t n_docs = kind == EVEN ? 8 : 1;
    int32_t *cu = trial_host(t, (size_t)(n_docs + 1) * sizeof *cu);
    for (int32_t i = 1; i <= n_docs; i++)
        cu[i] = (int32_t)(n * i / n_docs);
    *out_n_docs = n_docs;
    return cu;
}

static float decay_of(struct trial *t, int64_t kind)
{
    double u = trial_uniform(t);
    switch (kind) {
    case NEVER: return 0;
    case SLOW: return (float)(-0.01 * u);
    case FAST: return (float)(-5 * u);
    case AT_ONCE: return (float)(-200 * u);
    case OF_EVERY_SIZE: return (float)-pow(10, 6 * u - 4);
    }
    return (float)-u;
}

/* The first rows again and again: random numbers for long sequences take longer than all else. */
static void repeat_rows(float *x, int64_t n_rows, int64_t n, int64_t width)
{
    for (int64_t i = n_rows; i < n; i += n_rows)
        memcpy(x + i * width, x, (size_t)((n - i < n_rows ? n - i : n_rows) * width) * sizeof *x);
}

static int64_t n_random(int64_t n)
{
    return n < ROWS_RANDOM ? n : ROWS_RANDOM;
}

/* Random rows, of length 1 if asked. */
static const elem *rows(struct trial *t, int64_t n, int64_t d, bool unit)
{
    float *x = trial_host(t, (size_t)(n * d) * sizeof *x);
    for (int64_t i = 0; i < n_random(n); i++) {
        float *row = x + i * d;
        double sum = 1e-12;
        for (int64_t j = 0; j < d; j++) {
            row[j] = trial_normal(t);
            sum += (double)row[j] * row[j];
        }
        for (int64_t j = 0; j < d && unit; j++)
            row[j] = (float)(row[j] / sqrt(sum));
    }
    repeat_rows(x, n_random(n), n, d);
    return in_elems_of(t, x, n * d);
}

static struct kda_case inputs(struct trial *t)
{
    struct kda_case c = {.shape = {
        .n_tokens = t->d[0], .n_heads = (int32_t)t->d[2], .head_dim = (int32_t)t->d[3],
        .scale = (float)(1 / sqrt((double)t->d[3])),
    }};
    c.shape.cu_seqlens = documents(t, t->d[0], t->d[1], &c.shape.n_docs);
    c.n_beta = t->d[0] * t->d[2];
    c.n_elems = c.n_beta * t->d[3];
    c.n_state = c.shape.n_docs * t->d[2] * t->d[3] * t->d[3];
    c.q = rows(t, c.n_beta, t->d[3], true);
    c.k = rows(t, c.n_beta, t->d[3], true);
    c.v = rows(t, c.n_beta, t->d[3], false);
    float *g = trial_host(t, (size_t)c.n_elems * sizeof *g);
    for (int64_t i = 0; i < n_random(c.n_beta) * t->d[3]; i++)
        g[i] = decay_of(t, t->d[4]);
    repeat_rows(g, n_random(c.n_beta), c.n_beta, t->d[3]);
    float *beta = trial_host(t, (size_t)c.n_beta * sizeof *beta);
    for (int64_t i = 0; i < c.n_beta; i++)
        beta[i] = (float)trial_uniform(t);
    c.g = in_floats_of(t, g, c.n_elems);
    c.beta = in_elems_of(t, beta, c.n_beta);
    c.state = t->d[5] ? in_floats(t, c.n_state, 0.3f) : NULL;
    t->tolerance_bf16 = TOLERANCE_BF16;
    return c;
}

static float *saved_of(struct trial *t, const struct kda_case *c)
{
    return scratch_bytes(t, t->dev->ops->kda_saved_floats(t->dev, &c->shape) * sizeof(float));
}

/* Multiply-adds of a token and head: in a chunk of 64, its pairs and its solve, then the state. */
static double flops_of(const struct kda_case *c, double n_pairs, double n_states)
{
    double d = c->shape.head_dim;
    return 2 * (double)c->n_beta * (n_pairs * 32 * d + n_states * d * d);
}

static void kda_forward(struct trial *t)
{
    struct kda_case c = inputs(t);
    elem *o = out_elems(t, "o", c.n_elems);
    float *final_state = c.state ? out_floats(t, "final_state", c.n_state) : NULL;
    float *saved = saved_of(t, &c);
    double size = (double)elem_size(t->dev);
    t->flops = flops_of(&c, 5, 3);
    t->bytes = (double)c.n_elems * (4 * size + 4) + (double)c.n_beta * size;
    TRIAL_RUN(t)
        t->dev->ops->kda_forward(t->dev, o, final_state, saved, c.q, c.k, c.v, c.g, c.beta,
                                 c.state, &c.shape);
}

static void kda_backward(struct trial *t)
{
    struct kda_case c = inputs(t);
    const elem *d_o = rows(t, c.n_beta, t->d[3], false);
    const float *d_final = c.state ? in_floats(t, c.n_state, 0.3f) : NULL;
    size_t size = elem_size(t->dev);
    elem *o = scratch_bytes(t, (size_t)c.n_elems * size);
    float *saved = saved_of(t, &c);
    elem *dq = out_elems(t, "dq", c.n_elems), *dk = out_elems(t, "dk", c.n_elems);
    elem *dv = out_elems(t, "dv", c.n_elems), *dbeta = out_elems(t, "dbeta", c.n_beta);
    float *dg = out_floats(t, "dg", c.n_elems);
    float *d_initial = c.state ? out_floats(t, "d_initial_state", c.n_state) : NULL;
    t->tolerance_bf16 = TOLERANCE_BF16_BACKWARD;
    t->flops = flops_of(&c, 18, 9);
    t->bytes = (double)c.n_elems * (7 * (double)size + 8) + (double)c.n_beta * 2 * (double)size;
    t->dev->ops->kda_forward(t->dev, o, NULL, saved, c.q, c.k, c.v, c.g, c.beta, c.state, &c.shape);
    TRIAL_RUN(t)
        t->dev->ops->kda_backward(t->dev, dq, dk, dv, dg, dbeta, d_initial, d_o, d_final, c.q, c.k,
                                  c.v, c.g, c.beta, c.state, saved, &c.shape);
}

#define BOTH(...)                                                                                  \
    {"kda_forward", kda_forward, __VA_ARGS__},                                                     \
    {"kda_backward", kda_backward, __VA_ARGS__}

static const struct op_case cases[] = {
    BOTH({1, ONE, 8, 16, USUAL, 1}),
    BOTH({15, ONE, 2, 16, USUAL, 1}),
    BOTH({16, ONE, 2, 32, USUAL, 0}),
    BOTH({17, ONE, 1, 64, FAST, 1}),
    BOTH({63, ONE, 1, 128, USUAL, 1}),
    BOTH({64, ONE, 2, 128, SLOW, 1}),
    BOTH({65, ONE, 2, 32, FAST, 1}),
    BOTH({200, ONE, 2, 64, SLOW, 1}),
    BOTH({200, ONE, 1, 128, USUAL, 0}),
    BOTH({218, PACKED, 3, 16, USUAL, 1}),
    BOTH({218, PACKED, 2, 128, FAST, 1}),
    BOTH({135, WITH_EMPTY, 2, 64, USUAL, 1}),
    BOTH({90, EIGHT, 3, 32, USUAL, 0}),
    BOTH({90, ONE, 1, 16, NEVER, 1}),
    BOTH({90, ONE, 2, 128, AT_ONCE, 1}),
    BOTH({130, ONE, 2, 64, OF_EVERY_SIZE, 1}),
    BOTH({70, ONE, 35, 16, USUAL, 1}),
    BOTH({300, SHORT, 2, 32, USUAL, 1}),
    BOTH({300, SHORT, 3, 128, FAST, 0}),
    BOTH({700, EIGHT, 96, 128, FAST, 1}, CASE_LARGE),
    BOTH({2500, ONE, 32, 128, USUAL, 1}, CASE_LARGE),
    BOTH({8192, ONE, 32, 128, USUAL, 0}, CASE_BENCH),
    BOTH({65536, ONE, 32, 128, USUAL, 0}, CASE_BENCH),
    BOTH({8192, EIGHT, 32, 128, USUAL, 0}, CASE_BENCH),
    BOTH({8192, EVEN, 32, 128, USUAL, 0}, CASE_BENCH),
    BOTH({8192, SHORT, 32, 128, USUAL, 0}, CASE_BENCH),
    BOTH({8192, ONE, 96, 128, USUAL, 0}, CASE_BENCH),
    BOTH({16384, EVEN, 8, 128, USUAL, 0}, CASE_BENCH),
};

OP_FAMILY(kda, cases)
