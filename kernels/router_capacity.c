/* router_capacity.c - what happens to choices beyond an expert's capacity
 *
 * First every expert says whom it keeps, each by itself; then the rest goes elsewhere or nowhere,
 * in token order, because each rerouted choice takes room from those after it. */
#include "kernels/router.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu.h"
#include "kernels/ops_cpu.h"

/* A choice that wants an expert. */
struct claim {
    float   weight;
    int64_t at; /* token * k + slot */
};

struct capacity {
    int32_t *ids, *sent;
    float   *weights;
    const float *scores, *bias;
    const struct capacity_config *config;
    const struct router_shape *shape;
    int64_t *begin, *room;  /* (E + 1) an expert's first claim; (E) what it can still take */
    struct claim *claims;   /* by expert, in token order */
};

static int larger_weight_first(const void *a, const void *b)
{
    const struct claim *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight > y->weight ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

static void collect_claims(struct capacity *c)
{
    int64_t n_choices = c->shape->n_tokens * c->shape->top_k, *next = c->room;
    memset(c->begin, 0, (size_t)(c->shape->n_experts + 1) * sizeof *c->begin);
    for (int64_t i = 0; i < n_choices; i++)
        c->begin[c->ids[i] + 1]++;
    for (int32_t e = 0; e < c->shape->n_experts; e++) {
        c->begin[e + 1] += c->begin[e];
        next[e] = c->begin[e];
    }
    for (int64_t i = 0; i < n_choices; i++)
        c->claims[next[c->ids[i]]++] = (struct claim){c->weights[i], i};
}

static void keep_experts(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct capacity *c = arg;
    for (int64_t e = begin; e < end; e++) {
        struct claim *claims = c->claims + c->begin[e];
        int64_t n = c->begin[e + 1] - c->begin[e], n_kept = min_i64(n, c->config->capacity);
        if (n > n_kept && c->config->order == KEEP_LARGEST_WEIGHTS)
            qsort(claims, (size_t)n, sizeof *claims, larger_weight_first);
        for (int64_t i = 0; i < n; i++)
            c->sent[claims[i].at] = i < n_kept ? (int32_t)e : -1;
        c->room[e] = c->config->capacity - n_kept;
    }
}

static bool is_chosen(const int32_t *ids, int32_t k, int32_t expert)
{
    for (int32_t j = 0; j < k; j++)
        if (ids[j] == expert)
            return true;
    return false;
}

/* The token's best expert with room that it did not choose; -1 if there is none. */
static int32_t best_with_room(const struct capacity *c, int64_t token)
{
    const float *scores = c->scores + token * c->shape->n_experts;
    const int32_t *ids = c->ids + token * c->shape->top_k;
    int32_t best = -1;
    float best_sum = 0;
    for (int32_t e = 0; e < c->shape->n_experts; e++) {
        float sum = c->bias ? scores[e] + c->bias[e] : scores[e];
        if (c->room[e] > 0 && (best < 0 || sum > best_sum) &&
            !is_chosen(ids, c->shape->top_k, e)) {
            best = e;
            best_sum = sum;
        }
    }
    return best;
}

/* Returns how many of the token's choices found another expert. */
static int64_t reroute(struct capacity *c, int64_t token)
{
    int32_t k = c->shape->top_k, *ids = c->ids + token * k, *sent = c->sent + token * k;
    int64_t n_rerouted = 0;
    for (int32_t j = 0; j < k; j++) {
        int32_t expert = sent[j] < 0 ? best_with_room(c, token) : -1;
        if (expert < 0)
            continue;
        ids[j] = sent[j] = expert;
        c->room[expert]--;
        n_rerouted++;
    }
    if (n_rerouted > 0)
        router_weights(c->weights + token * k, c->scores + token * c->shape->n_experts, ids,
                       c->shape);
    return n_rerouted;
}

void cpu_router_capacity(struct device *dev, int32_t *ids, float *weights, int32_t *sent,
                         int64_t *n_rerouted, int64_t *n_dropped, const float *scores,
                         const float *bias, const struct capacity_config *config,
                         const struct router_shape *shape)
{
    int64_t n_choices = shape->n_tokens * shape->top_k, n_experts = shape->n_experts;
    struct capacity c = {
        .ids = ids, .sent = sent, .weights = weights, .scores = scores, .bias = bias,
        .config = config, .shape = shape,
        .begin = cpu_shared(dev, (size_t)(2 * n_experts + 1) * sizeof(int64_t) +
                                     (size_t)n_choices * sizeof(struct claim)),
    };
    c.room = c.begin + n_experts + 1;
    c.claims = (struct claim *)(c.room + n_experts);
    collect_claims(&c);
    cpu_for(dev, n_experts, 1, keep_experts, &c);
    for (int64_t t = 0; config->overflow == OVERFLOW_REROUTE && t < shape->n_tokens; t++)
        *n_rerouted += reroute(&c, t);
    for (int64_t i = 0; i < n_choices; i++)
        if (sent[i] < 0) {
            weights[i] = 0;
            ++*n_dropped;
        }
}
