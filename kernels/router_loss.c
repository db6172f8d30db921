/* router_loss.c - losses that pull a router towards an even load and small logits
 *
 * A row's part of a loss is a double of its own, and they are added in row order. */
#include "kernels/router.h"

#include <string.h>

#include "kernels/cpu.h"
#include "kernels/ops_cpu.h"
#include "kernels/vmath.h"

struct router_loss {
    float *acc_d_logits;
    float  weight;
    const float *scores, *logits;
    const int32_t *cu_rows;
    const float *shares;  /* (n_segments, E): E f_e / (rows of the segment * segments) */
    int32_t *ids;         /* (n, k) */
    double  *losses;      /* (n) */
    const struct router_shape *shape;
};

static double sum_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

/* ---- counts ---- */

static void choose_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct router_loss *s = arg;
    int32_t k = s->shape->top_k, n_experts = s->shape->n_experts;
    float *keys = cpu_scratch(thread, (size_t)k * sizeof *keys);
    for (int64_t i = begin; i < end; i++)
        router_select_top(s->ids + i * k, keys, s->scores + i * n_experts, n_experts, k);
}

void cpu_router_segment_counts(struct device *dev, int64_t *counts, const float *scores,
                               const int32_t *cu_rows, int32_t n_segments,
                               const struct router_shape *shape)
{
    int64_t n = shape->n_tokens, k = shape->top_k;
    assert(cu_rows[n_segments] == n && shape->top_k <= shape->n_experts);
    struct router_loss s = {
        .scores = scores, .shape = shape, .ids = cpu_shared(dev, (size_t)(n * k) * sizeof(int32_t)),
    };
    cpu_for(dev, n, cpu_grain(2 * shape->n_experts), choose_rows, &s);
    for (int32_t g = 0; g < n_segments; g++, counts += shape->n_experts)
        for (int64_t i = cu_rows[g] * k; i < cu_rows[g + 1] * k; i++)
            counts[s.ids[i]]++;
}

/* ---- Switch and sequence-wise ---- */

static void fill_shares(float *shares, const int64_t *counts, const int32_t *cu_rows,
                        int32_t n_segments, int32_t n_experts)
{
    int32_t n_filled = 0;
    for (int32_t g = 0; g < n_segments; g++)
        n_filled += cu_rows[g + 1] > cu_rows[g];
    for (int32_t g = 0; g < n_segments; g++, shares += n_experts, counts += n_experts) {
        double total = 0, rows = cu_rows[g + 1] - cu_rows[g];
        for (int32_t e = 0; e < n_experts; e++)
            total += (double)counts[e];
        double each = total > 0 && rows > 0 ? n_experts / (total * rows * n_filled) : 0;
        for (int32_t e = 0; e < n_experts; e++)
            shares[e] = (float)(each * (double)counts[e]);
    }
}

/* With y = scores / S: d y = share, d score = (share - sum of share y) / S. A softmax has S = 1 and
 * its own backward takes the sum off. */
static void aux_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct router_loss *s = arg;
    int32_t n_experts = s->shape->n_experts, segment = 0;
    bool is_sigmoid = s->shape->kind == ROUTER_SIGMOID;
    float *restrict d = cpu_scratch(thread, (size_t)n_experts * sizeof *d);
    for (int64_t i = begin; i < end; i++) {
        while (i >= s->cu_rows[segment + 1])
            segment++;
        const float *restrict scores = s->scores + i * n_experts;
        const float *restrict shares = s->shares + (int64_t)segment * n_experts;
        float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
        for (int32_t e = 0; e < n_experts; e++) {
            sum += scores[e];
            along += shares[e] * scores[e];
        }
        float inverse = is_sigmoid ? 1 / (sum + 1e-20f) : 1;
        s->losses[i] = (double)along * inverse;
        if (!s->acc_d_logits)
            continue;
        float mean = is_sigmoid ? along * inverse : 0, scale = s->weight * inverse;
        for (int32_t e = 0; e < n_experts; e++)
            d[e] = scale * (shares[e] - mean);
        router_backward_of_scores(d, scores, s->shape);
        float *restrict acc = s->acc_d_logits + i * n_experts;
        for (int32_t e = 0; e < n_experts; e++)
            acc[e] += d[e];
    }
}

void cpu_router_aux_loss(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                         const float *scores, const int64_t *counts, const int32_t *cu_rows,
                         int32_t n_segments, const struct router_shape *shape)
{
    int64_t n = shape->n_tokens, n_shares = (int64_t)n_segments * shape->n_experts;
    assert(cu_rows[n_segments] == n);
    double *losses = cpu_shared(dev, (size_t)n * sizeof *losses + (size_t)n_shares * sizeof(float));
    float *shares = (float *)(losses + n);
    fill_shares(shares, counts, cu_rows, n_segments, shape->n_experts);
    struct router_loss s = {
        .acc_d_logits = acc_d_logits, .weight = weight, .scores = scores, .cu_rows = cu_rows,
        .shares = shares, .losses = losses, .shape = shape,
    };
    cpu_for(dev, n, cpu_grain(4 * shape->n_experts), aux_rows, &s);
    *acc_loss += sum_of(losses, n);
}

/* ---- z-loss ---- */

/* With z = logsumexp(logits): d (z^2) = 2 z softmax(logits). */
static void z_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct router_loss *s = arg;
    int32_t n_experts = s->shape->n_experts;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict logits = s->logits + i * n_experts;
        float max = vm_max(logits, n_experts), sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int32_t e = 0; e < n_experts; e++)
            sum += vm_exp(logits[e] - max);
        double z = max + log(sum);
        s->losses[i] = z * z;
        if (!s->acc_d_logits)
            continue;
        float *restrict acc = s->acc_d_logits + i * n_experts;
        float scale = (float)(2 * z * s->weight / (double)s->shape->n_tokens) / sum;
        for (int32_t e = 0; e < n_experts; e++)
            acc[e] += scale * vm_exp(logits[e] - max);
    }
}

void cpu_router_z_loss(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                       const float *logits, const struct router_shape *shape)
{
    int64_t n = shape->n_tokens;
    if (n == 0)
        return;
    struct router_loss s = {
        .acc_d_logits = acc_d_logits, .weight = weight, .logits = logits, .shape = shape,
        .losses = cpu_shared(dev, (size_t)n * sizeof(double)),
    };
    cpu_for(dev, n, cpu_grain(4 * shape->n_experts), z_rows, &s);
    *acc_loss += sum_of(s.losses, n) / (double)n;
}
