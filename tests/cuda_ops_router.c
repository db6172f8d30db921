/* cuda_ops_router.c - cases of the router, its capacity and its losses
 *
 * A choice is compared exactly, so sums that decide one lie further apart than the rounding of a
 * sigmoid; or they are equal in every bit, where the rule for ties is meant. */
#include "tests/cuda_ops.h"

#include <math.h>

/* d: n, experts, top_k, groups, groups of a token, flags */
enum { SOFTMAX = 1, AS_IS = 2, BIASED = 4, TIES = 8 };

static struct router_shape shape_of(const struct trial *t)
{
    return (struct router_shape){
        .n_tokens = t->d[0], .n_experts = (int32_t)t->d[1], .top_k = (int32_t)t->d[2],
        .n_groups = (int32_t)t->d[3], .topk_group = (int32_t)t->d[4],
        .renormalize = !(t->d[5] & AS_IS), .routed_scale = 2.446f,
        .kind = t->d[5] & SOFTMAX ? ROUTER_SOFTMAX : ROUTER_SIGMOID,
    };
}

/* 0 .. n - 1 in some order */
static void shuffle(struct trial *t, int32_t *order, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        int32_t j = (int32_t)trial_below(t, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
}

static const float *bias_of(struct trial *t, const struct router_shape *shape, float **out_host)
{
    float *bias = trial_host(t, (size_t)shape->n_experts * sizeof *bias);
    for (int32_t e = 0; e < shape->n_experts && t->d[5] & BIASED; e++)
        bias[e] = 0.2f * (float)trial_uniform(t) - 0.1f;
    if (out_host)
        *out_host = bias;
    return t->d[5] & BIASED ? in_floats_of(t, bias, shape->n_experts) : NULL;
}

/* Logits whose biased scores are a shuffled grid with jitter; with TIES all of a third token are
 * equal, so that its experts are the first ones. A softmax takes the grid as logits. */
static const float *apart_logits(struct trial *t, const struct router_shape *shape,
                                 const float *bias)
{
    int32_t n_experts = shape->n_experts;
    int32_t *order = trial_host(t, (size_t)n_experts * sizeof *order);
    float *x = trial_host(t, (size_t)(shape->n_tokens * n_experts) * sizeof *x);
    for (int64_t i = 0; i < shape->n_tokens; i++) {
        shuffle(t, order, n_experts);
        for (int32_t e = 0; e < n_experts; e++) {
            double at = (order[e] + 0.25 + 0.5 * trial_uniform(t)) / n_experts;
            double score = 0.15 + 0.7 * at - bias[e];
            bool is_tie = t->d[5] & TIES && i % 3 == 2;
            x[i * n_experts + e] = is_tie ? 0.5f
                                 : shape->kind == ROUTER_SOFTMAX ? (float)(8 * at)
                                 : (float)log(score / (1 - score));
        }
    }
    return in_floats_of(t, x, shape->n_tokens * n_experts);
}

/* Scores in (0, 1) as given numbers, so that both devices choose from the same. */
static const float *in_scores(struct trial *t, int64_t n)
{
    float *x = trial_host(t, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = 0.05f + 0.9f * (float)trial_uniform(t);
    if (t->d[5] & TIES) /* few different ones */
        for (int64_t i = 0; i < n; i++)
            x[i] = roundf(x[i] * 8) / 8;
    return in_floats_of(t, x, n);
}

/* (n, k) ids, different ones in a row, the first experts more often. */
static int32_t *some_ids(struct trial *t, const struct router_shape *shape)
{
    int32_t k = shape->top_k, n_experts = shape->n_experts;
    int32_t *ids = trial_host(t, (size_t)(shape->n_tokens * k) * sizeof *ids);
    bool *is_taken = trial_host(t, (size_t)n_experts);
    for (int64_t i = 0; i < shape->n_tokens; i++) {
        for (int32_t j = 0; j < k; j++) {
            double u = trial_uniform(t);
            int32_t e = (int32_t)(u * u * n_experts);
            while (is_taken[e])
                e = (e + 1) % n_experts;
            is_taken[e] = true;
            ids[i * k + j] = e;
        }
        for (int32_t j = 0; j < k; j++)
            is_taken[ids[i * k + j]] = false;
    }
    return ids;
}

static void count(struct trial *t, int n_floats)
{
    t->bytes = (double)(t->d[0] * t->d[1]) * 4 * n_floats;
}

static void router(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    int64_t n_chosen = shape.n_tokens * shape.top_k;
    float *host_bias;
    const float *bias = bias_of(t, &shape, &host_bias);
    const float *logits = apart_logits(t, &shape, host_bias);
    float *scores = out_floats(t, "scores", shape.n_tokens * shape.n_experts);
    int32_t *ids = out_i32(t, "ids", n_chosen, 0);
    float *weights = out_floats(t, "weights", n_chosen);
    count(t, 2);
    TRIAL_RUN(t)
        t->dev->ops->router(t->dev, scores, ids, weights, logits, bias, &shape);
}

static void router_backward(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    int64_t n_chosen = shape.n_tokens * shape.top_k;
    const float *scores = in_scores(t, shape.n_tokens * shape.n_experts);
    const float *d_weights = in_floats(t, n_chosen, 1);
    const int32_t *ids = in_bytes(t, some_ids(t, &shape), (size_t)n_chosen * sizeof *ids);
    float *d_logits = out_floats(t, "d_logits", shape.n_tokens * shape.n_experts);
    count(t, 2);
    TRIAL_RUN(t)
        t->dev->ops->router_backward(t->dev, d_logits, d_weights, scores, ids, &shape);
}

/* d[6]: capacity; d[7]: reroute 1, first tokens 2 */
static void router_capacity(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    struct capacity_config config = {
        .capacity = t->d[6], .overflow = t->d[7] & 1 ? OVERFLOW_REROUTE : OVERFLOW_DROP,
        .order = t->d[7] & 2 ? KEEP_FIRST_TOKENS : KEEP_LARGEST_WEIGHTS,
    };
    int64_t n_chosen = shape.n_tokens * shape.top_k, counts[2] = {3, 4};
    const float *bias = bias_of(t, &shape, NULL);
    const float *scores = in_scores(t, shape.n_tokens * shape.n_experts);
    int32_t *ids = inout_i32(t, "ids", some_ids(t, &shape), n_chosen, 0);
    float *weights = inout_floats(t, "weights", n_chosen, 1);
    int32_t *sent = out_i32(t, "sent", n_chosen, 0);
    int64_t *out_counts = out_i64(t, "n_rerouted, n_dropped", 2, 0);
    TRIAL_RUN(t)
        t->dev->ops->router_capacity(t->dev, ids, weights, sent, &counts[0], &counts[1], scores,
                                     bias, &config, &shape);
    t->dev->ops->to_device(t->dev, out_counts, counts, sizeof counts);
}

static int64_t *some_counts(struct trial *t, int64_t n)
{
    int64_t *counts = trial_host(t, (size_t)n * sizeof *counts);
    for (int64_t i = 0; i < n; i++)
        counts[i] = trial_below(t, 1000);
    return counts;
}

/* d[6]: segments */
static void router_segment_counts(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    int32_t n_segments = (int32_t)t->d[6];
    int64_t n = (int64_t)n_segments * shape.n_experts;
    const int32_t *cu_rows = trial_documents(t, shape.n_tokens, n_segments);
    const float *scores = in_scores(t, shape.n_tokens * shape.n_experts);
    int64_t *counts = inout_i64(t, "counts", some_counts(t, n), n, 0);
    count(t, 1);
    TRIAL_RUN(t)
        t->dev->ops->router_segment_counts(t->dev, counts, scores, cu_rows, n_segments, &shape);
}

/* d[6]: segments; d[7]: the loss alone */
static void router_aux_loss(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    int32_t n_segments = (int32_t)t->d[6];
    int64_t n = shape.n_tokens * shape.n_experts, n_counts = (int64_t)n_segments * shape.n_experts;
    const int32_t *cu_rows = trial_documents(t, shape.n_tokens, n_segments);
    const float *scores = in_scores(t, n);
    const int64_t *counts = in_bytes(t, some_counts(t, n_counts), (size_t)n_counts * 8);
    float *acc_d_logits = inout_floats(t, "acc_d_logits", n, 1e-5f);
    double *acc_loss = inout_double(t, "acc_loss", 0.5);
    count(t, 3);
    TRIAL_RUN(t)
        t->dev->ops->router_aux_loss(t->dev, acc_loss, t->d[7] ? NULL : acc_d_logits, 0.3f, scores,
                                     counts, cu_rows, n_segments, &shape);
}

static void router_z_loss(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    int64_t n = shape.n_tokens * shape.n_experts;
    const float *logits = in_floats(t, n, 3);
    float *acc_d_logits = inout_floats(t, "acc_d_logits", n, 1e-4f);
    double *acc_loss = inout_double(t, "acc_loss", 0.5);
    count(t, 3);
    TRIAL_RUN(t)
        t->dev->ops->router_z_loss(t->dev, acc_loss, t->d[7] ? NULL : acc_d_logits, 0.3f, logits,
                                   &shape);
}

/* d[6]: bins, 0: the counts alone */
static void router_histogram(struct trial *t)
{
    struct router_shape shape = shape_of(t);
    int32_t n_bins = (int32_t)t->d[6], n_experts = shape.n_experts;
    int64_t n_chosen = shape.n_tokens * shape.top_k, n = (int64_t)n_experts * (n_bins ? n_bins : 1);
    const float *bias = bias_of(t, &shape, NULL);
    const float *scores = in_scores(t, shape.n_tokens * n_experts);
    const int32_t *ids = in_bytes(t, some_ids(t, &shape), (size_t)n_chosen * sizeof *ids);
    int64_t *counts = inout_i64(t, "counts", some_counts(t, n_experts), n_experts, 0);
    int64_t *histogram = inout_i64(t, "histogram", some_counts(t, n), n, 1e-3);
    count(t, 2);
    TRIAL_RUN(t)
        t->dev->ops->router_histogram(t->dev, counts, n_bins ? histogram : NULL, scores, ids, bias,
                                      -1.1f, 0.8f, n_bins, &shape);
}

/* Shapes that every op of the router takes: one expert, fewer than a warp, odd, with groups,
 * K3's. */
#define SHAPES(op, ...)                                                                            \
    {#op, op, {0, 8, 2, 0, 0, 0, __VA_ARGS__}}, {#op, op, {1, 1, 1, 0, 0, 0, __VA_ARGS__}},        \
        {#op, op, {5, 7, 3, 0, 0, AS_IS, __VA_ARGS__}},                                            \
        {#op, op, {33, 40, 6, 1, 1, BIASED | TIES, __VA_ARGS__}},                                  \
        {#op, op, {30, 100, 8, 0, 0, SOFTMAX | AS_IS, __VA_ARGS__}},                               \
        {#op, op, {64, 64, 4, 0, 0, SOFTMAX | TIES, __VA_ARGS__}},                                 \
        {#op, op, {20, 24, 24, 0, 0, 0, __VA_ARGS__}},                                             \
        {#op, op, {200, 896, 16, 1, 1, BIASED, __VA_ARGS__}},                                      \
        {#op, op, {8192, 896, 16, 1, 1, BIASED, __VA_ARGS__}, CASE_BENCH}

#define GROUPED(op, ...)                                                                           \
    {#op, op, {50, 64, 6, 8, 3, BIASED, __VA_ARGS__}},                                             \
        {#op, op, {9, 12, 4, 12, 5, BIASED, __VA_ARGS__}},                                         \
        {#op, op, {40, 256, 8, 8, 4, BIASED | TIES, __VA_ARGS__}}

static const struct op_case cases[] = {
    SHAPES(router, 0),
    GROUPED(router, 0),
    {"router", router, {2000, 256, 8, 8, 4, BIASED}, CASE_LARGE},
    SHAPES(router_backward, 0),
    {"router_capacity", router_capacity, {0, 8, 2, 0, 0, 0, 1, 1}},
    {"router_capacity", router_capacity, {1, 1, 1, 0, 0, 0, 1, 0}},
    {"router_capacity", router_capacity, {1, 1, 1, 0, 0, 0, 0, 1}},
    {"router_capacity", router_capacity, {50, 12, 3, 0, 0, BIASED, 13, 0}},
    {"router_capacity", router_capacity, {50, 12, 3, 0, 0, 0, 13, 1}},
    {"router_capacity", router_capacity, {50, 12, 3, 0, 0, BIASED | TIES, 13, 1}},
    {"router_capacity", router_capacity, {50, 12, 3, 0, 0, AS_IS, 9, 3}},
    {"router_capacity", router_capacity, {70, 40, 6, 0, 0, BIASED, 5, 2}},
    {"router_capacity", router_capacity, {70, 40, 6, 0, 0, BIASED, 1000000000000, 3}},
    {"router_capacity", router_capacity, {300, 896, 16, 0, 0, BIASED, 6, 1}},
    {"router_capacity", router_capacity, {3000, 896, 16, 0, 0, BIASED, 60, 3}, CASE_LARGE},
    {"router_capacity", router_capacity, {8192, 896, 16, 0, 0, BIASED, 183, 1}, CASE_BENCH},
    SHAPES(router_segment_counts, 1),
    {"router_segment_counts", router_segment_counts, {90, 40, 6, 0, 0, 0, 7}},
    {"router_segment_counts", router_segment_counts, {90, 40, 6, 0, 0, TIES, 90}},
    SHAPES(router_aux_loss, 1, 0),
    {"router_aux_loss", router_aux_loss, {90, 40, 6, 0, 0, 0, 7, 0}},
    {"router_aux_loss", router_aux_loss, {90, 40, 6, 0, 0, SOFTMAX, 90, 0}},
    {"router_aux_loss", router_aux_loss, {90, 40, 6, 0, 0, 0, 3, 1}},
    SHAPES(router_z_loss, 0, 0),
    {"router_z_loss", router_z_loss, {90, 40, 6, 0, 0, 0, 0, 1}},
    SHAPES(router_histogram, 100),
    {"router_histogram", router_histogram, {90, 40, 6, 0, 0, TIES, 1}},
    {"router_histogram", router_histogram, {90, 40, 6, 0, 0, 0, 3000}},
    {"router_histogram", router_histogram, {90, 40, 6, 0, 0, BIASED, 0}},
    {"router_histogram", router_histogram, {2000, 896, 16, 0, 0, BIASED, 1000}, CASE_LARGE},
};
OP_FAMILY(router, cases)
