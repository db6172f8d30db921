/* router.c - which experts a token goes to, with what weights, and how the load is counted
 *
 * Scores are sigmoids; the bias takes part in the selection only. Equal sums go to the lower
 * expert, so a selection is a function of its numbers. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"
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

/* ids and keys (k): the k largest of scores + bias in descending order. */
static void select_top(int32_t *ids, float *keys, const float *scores, const float *bias,
                       int32_t n_experts, int32_t k)
{
    int32_t n = 0;
    for (int32_t e = 0; e < n_experts; e++) {
        float key = scores[e] + bias[e];
        if (n == k && !(key > keys[k - 1]))
            continue;
        int32_t at = n < k ? n++ : k - 1;
        for (; at > 0 && key > keys[at - 1]; at--) {
            keys[at] = keys[at - 1];
            ids[at] = ids[at - 1];
        }
        keys[at] = key;
        ids[at] = e;
    }
}

static void route_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct router *s = arg;
    int32_t n_experts = s->shape->n_experts, k = s->shape->top_k;
    float *keys = cpu_scratch(thread, (size_t)k * sizeof *keys);
    for (int64_t i = begin; i < end; i++) {
        const float *restrict logits = s->logits + i * n_experts;
        float *restrict scores = s->scores_out + i * n_experts;
        int32_t *ids = s->ids_out + i * k;
        float *weights = s->weights + i * k, sum = 0;
        for (int32_t e = 0; e < n_experts; e++)
            scores[e] = vm_sigmoid(logits[e]);
        select_top(ids, keys, scores, s->bias, n_experts, k);
        for (int32_t j = 0; j < k; j++)
            sum += scores[ids[j]];
        float factor = s->shape->renormalize ? s->shape->routed_scale / (sum + 1e-20f)
                                             : s->shape->routed_scale;
        for (int32_t j = 0; j < k; j++)
            weights[j] = scores[ids[j]] * factor;
    }
}

void cpu_router(struct device *dev, float *scores, int32_t *ids, float *weights,
                const float *logits, const float *bias, const struct router_shape *shape)
{
    assert(shape->top_k <= shape->n_experts);
    struct router s = {
        .scores_out = scores, .ids_out = ids, .weights = weights, .logits = logits, .bias = bias,
        .shape = shape,
    };
    cpu_for(dev, shape->n_tokens, cpu_grain(4 * shape->n_experts), route_rows, &s);
}

/* With S the sum of the chosen scores: d_score = (scale dw - sum w dw) / S. */
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
        for (int32_t j = 0; j < k; j++) {
            float y = scores[ids[j]];
            float dy = s->shape->renormalize ? scale * (dw[j] - along / sum) / sum : scale * dw[j];
            d_logits[ids[j]] = dy * y * (1 - y);
        }
    }
}

void cpu_router_backward(struct device *dev, float *d_logits, const float *d_weights,
                         const float *scores, const int32_t *ids, const struct router_shape *shape)
{
    struct router s = {
        .d_logits = d_logits, .d_weights = d_weights, .scores = scores, .ids = ids, .shape = shape,
    };
    cpu_for(dev, shape->n_tokens, cpu_grain(shape->n_experts), route_backward_rows, &s);
}

/* The token's first sum that was not chosen: a score must beat it less its bias to be chosen. */
static void cutoff_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct router *s = arg;
    int32_t n_experts = s->shape->n_experts, n = s->shape->top_k + 1;
    float *keys = cpu_scratch(thread, (size_t)n * (sizeof *keys + sizeof(int32_t)));
    int32_t *ids = (int32_t *)(keys + n);
    for (int64_t i = begin; i < end; i++) {
        select_top(ids, keys, s->scores + i * n_experts, s->bias, n_experts, n);
        s->alpha[i] = keys[n - 1];
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
    struct router s = {
        .alpha = cpu_shared(dev, (size_t)shape->n_tokens * sizeof(float)), .scores = scores,
        .bias = bias, .histogram = histogram, .lo = lo, .hi = hi, .n_bins = n_bins, .shape = shape,
    };
    cpu_for(dev, shape->n_tokens, cpu_grain(2 * shape->n_experts), cutoff_rows, &s);
    cpu_for(dev, shape->n_experts, max_i64(4, cpu_grain(shape->n_tokens)), histogram_experts, &s);
}
