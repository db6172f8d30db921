/* router.c - which experts a token goes to, with what weights, and how the load is counted
 *
 * Scores are sigmoids or a softmax; the bias takes part in the selection only, and so do groups:
 * experts outside the best groups are barred. Equal sums go to the lower expert, so a selection is
 * a function of its numbers. */
#include "kernels/router.h"

#include <string.h>

#include "kernels/cpu.h"
#include "kernels/ops_cpu.h"
#include "kernels/vmath.h"

struct router {
    float *scores_out, *weights, *d_logits, *alpha;
    int32_t *ids_out;
    const float *logits, *bias, *d_weights, *scores;
    const int32_t *ids;
    int64_t *counts, *histogram;
    float   lo, hi;
    int32_t n_bins;
    const struct router_shape *shape;
};

void router_select_top(int32_t *ids, float *keys, const float *sums, int32_t n, int32_t k)
{
    int32_t n_held = 0;
    for (int32_t e = 0; e < n; e++) {
        float key = sums[e];
        if (n_held == k && !(key > keys[k - 1]))
            continue;
        int32_t at = n_held < k ? n_held++ : k - 1;
        for (; at > 0 && key > keys[at - 1]; at--) {
            keys[at] = keys[at - 1];
            ids[at] = ids[at - 1];
        }
        keys[at] = key;
        ids[at] = e;
    }
}

static void add_bias(float *restrict sums, const float *restrict scores,
                     const float *restrict bias, int32_t n)
{
    for (int32_t e = 0; e < n; e++)
        sums[e] = bias ? scores[e] + bias[e] : scores[e];
}

/* The sum of the two largest. */
static float worth_of(const float *sums, int32_t n)
{
    float best = -INFINITY, second = -INFINITY;
    for (int32_t e = 0; e < n; e++) {
        if (sums[e] > best) {
            second = best;
            best = sums[e];
        } else if (sums[e] > second) {
            second = sums[e];
        }
    }
    return n > 1 ? best + second : best;
}

/* Leaves -inf in the sums of all but the best groups. */
static void bar_groups(float *sums, float *worths, float *keys, int32_t *groups,
                       const struct router_shape *shape)
{
    int32_t size = shape->n_experts / shape->n_groups;
    for (int32_t g = 0; g < shape->n_groups; g++)
        worths[g] = worth_of(sums + g * size, size);
    router_select_top(groups, keys, worths, shape->n_groups, shape->topk_group);
    for (int32_t i = 0; i < shape->topk_group; i++)
        worths[groups[i]] = NAN; /* kept */
    for (int32_t g = 0; g < shape->n_groups; g++)
        for (int32_t e = g * size; worths[g] == worths[g] && e < (g + 1) * size; e++)
            sums[e] = -INFINITY;
}

/* What selecting a token's experts needs beside it. */
struct selection {
    float *sums, *worths, *keys;
    int32_t *ids;
};

static struct selection selection_of(struct cpu_thread *thread, const struct router_shape *shape)
{
    size_t n = (size_t)shape->n_experts, n_keys = n + 1;
    float *sums = cpu_scratch(thread, (2 * n + n_keys) * sizeof *sums + n_keys * sizeof(int32_t));
    return (struct selection){sums, sums + n, sums + 2 * n, (int32_t *)(sums + 2 * n + n_keys)};
}

/* The k first of a token's experts into s.ids and s.keys. */
static void select_experts(struct selection s, const float *scores, const float *bias, int32_t k,
                           const struct router_shape *shape)
{
    add_bias(s.sums, scores, bias, shape->n_experts);
    if (shape->n_groups > 1)
        bar_groups(s.sums, s.worths, s.keys, s.ids, shape);
    router_select_top(s.ids, s.keys, s.sums, shape->n_experts, k);
}

static void scores_of(float *restrict scores, const float *restrict logits,
                      const struct router_shape *shape)
{
    int32_t n = shape->n_experts;
    if (shape->kind == ROUTER_SIGMOID) {
        for (int32_t e = 0; e < n; e++)
            scores[e] = vm_sigmoid(logits[e]);
        return;
    }
    float max = vm_max(logits, n), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int32_t e = 0; e < n; e++) {
        scores[e] = vm_exp(logits[e] - max);
        sum += scores[e];
    }
    for (int32_t e = 0; e < n; e++)
        scores[e] /= sum;
}

void router_weights(float *weights, const float *scores, const int32_t *ids,
                    const struct router_shape *shape)
{
    float sum = 0;
    for (int32_t j = 0; j < shape->top_k; j++)
        sum += scores[ids[j]];
    float factor = shape->renormalize ? shape->routed_scale / (sum + 1e-20f) : shape->routed_scale;
    for (int32_t j = 0; j < shape->top_k; j++)
        weights[j] = scores[ids[j]] * factor;
}

static void route_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct router *s = arg;
    int32_t n_experts = s->shape->n_experts, k = s->shape->top_k;
    struct selection selection = selection_of(thread, s->shape);
    for (int64_t i = begin; i < end; i++) {
        float *scores = s->scores_out + i * n_experts;
        int32_t *ids = s->ids_out + i * k;
        scores_of(scores, s->logits + i * n_experts, s->shape);
        select_experts(selection, scores, s->bias, k, s->shape);
        memcpy(ids, selection.ids, (size_t)k * sizeof *ids);
        router_weights(s->weights + i * k, scores, ids, s->shape);
    }
}

static void check_shape(const struct router_shape *shape)
{
    assert(shape->top_k <= shape->n_experts);
    if (shape->n_groups <= 1)
        return;
    assert(shape->n_experts % shape->n_groups == 0);
    assert(shape->topk_group > 0 && shape->topk_group <= shape->n_groups);
    assert(shape->top_k <= shape->n_experts / shape->n_groups * shape->topk_group);
}

void cpu_router(struct device *dev, float *scores, int32_t *ids, float *weights,
                const float *logits, const float *bias, const struct router_shape *shape)
{
    check_shape(shape);
    struct router s = {
        .scores_out = scores, .ids_out = ids, .weights = weights, .logits = logits, .bias = bias,
        .shape = shape,
    };
    cpu_for(dev, shape->n_tokens, cpu_grain(4 * shape->n_experts), route_rows, &s);
}

void router_backward_of_scores(float *restrict d, const float *restrict scores,
                               const struct router_shape *shape)
{
    int32_t n = shape->n_experts;
    if (shape->kind == ROUTER_SIGMOID) {
        for (int32_t e = 0; e < n; e++)
            d[e] *= scores[e] * (1 - scores[e]);
        return;
    }
    float along = 0;
#pragma omp simd reduction(+ : along)
    for (int32_t e = 0; e < n; e++)
        along += scores[e] * d[e];
    for (int32_t e = 0; e < n; e++)
        d[e] = scores[e] * (d[e] - along);
}

/* With S the sum of the chosen scores: d_score = scale (dw - sum of score dw / S) / S. */
static void route_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct router *s = arg;
    int32_t n_experts = s->shape->n_experts, k = s->shape->top_k;
    float scale = s->shape->routed_scale;
    for (int64_t i = begin; i < end; i++) {
        const float *scores = s->scores + i * n_experts, *dw = s->d_weights + i * k;
        const int32_t *ids = s->ids + i * k;
        float *d_logits = s->d_logits + i * n_experts, sum = 1e-20f, along = 0;
        memset(d_logits, 0, (size_t)n_experts * sizeof *d_logits);
        for (int32_t j = 0; j < k; j++) {
            sum += scores[ids[j]];
            along += scores[ids[j]] * dw[j];
        }
        for (int32_t j = 0; j < k; j++)
            d_logits[ids[j]] = s->shape->renormalize ? scale * (dw[j] - along / sum) / sum
                                                     : scale * dw[j];
        router_backward_of_scores(d_logits, scores, s->shape);
    }
}

void cpu_router_backward(struct device *dev, float *d_logits, const float *d_weights,
                         const float *scores, const int32_t *ids, const struct router_shape *shape)
{
    struct router s = {
        .d_logits = d_logits, .d_weights = d_weights, .scores = scores, .ids = ids, .shape = shape,
    };
    cpu_for(dev, shape->n_tokens, cpu_grain(2 * shape->n_experts), route_backward_rows, &s);
}

/* The token's first sum that was not chosen: a score must beat it less its bias to be chosen. */
static void cutoff_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct router *s = arg;
    int32_t n_experts = s->shape->n_experts, n = s->shape->top_k + 1;
    struct selection selection = selection_of(thread, s->shape);
    for (int64_t i = begin; i < end; i++) {
        select_experts(selection, s->scores + i * n_experts, s->bias, n, s->shape);
        s->alpha[i] = selection.keys[n - 1];
    }
}

static void histogram_experts(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct router *s = arg;
    int32_t n_experts = s->shape->n_experts, n_bins = s->n_bins;
    float width = (s->hi - s->lo) / (float)n_bins;
    for (int64_t i = 0; i < s->shape->n_tokens; i++)
        for (int64_t e = begin; e < end; e++) {
            float bin = floorf((s->alpha[i] - s->scores[i * n_experts + e] - s->lo) / width);
            bin = bin > 0 ? bin : 0;
            int32_t at = bin < (float)n_bins ? (int32_t)bin : n_bins - 1;
            s->histogram[e * n_bins + at]++;
        }
}

void cpu_router_histogram(struct device *dev, int64_t *counts, int64_t *histogram,
                          const float *scores, const int32_t *ids, const float *bias, float lo,
                          float hi, int32_t n_bins, const struct router_shape *shape)
{
    for (int64_t i = 0; i < shape->n_tokens * shape->top_k; i++)
        counts[ids[i]]++;
    if (!histogram || shape->top_k == shape->n_experts)
        return; /* not wanted; or every expert is always chosen: there is no margin */
    assert(shape->n_groups <= 1);
    struct router s = {
        .alpha = cpu_shared(dev, (size_t)shape->n_tokens * sizeof(float)), .scores = scores,
        .bias = bias, .histogram = histogram, .lo = lo, .hi = hi, .n_bins = n_bins, .shape = shape,
    };
    cpu_for(dev, shape->n_tokens, cpu_grain(2 * shape->n_experts), cutoff_rows, &s);
    cpu_for(dev, shape->n_experts, max_i64(4, cpu_grain(shape->n_tokens)), histogram_experts, &s);
}
