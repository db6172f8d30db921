/* moe_router.c - a layer's choices: routed, counted, cut to capacity, and the router's own losses
 *
 * The losses are made in the backward, where the gradient of the logits is at hand. Each is a mean
 * over the micro-batch's rows (or documents); weighted by the micro-batch's labels it becomes, once
 * gradients are divided by all labels, a mean over the micro-batches of all ranks, which does not
 * depend on which rank had which. */
#include "worker/moe.h"

#include <math.h>
#include <stdlib.h>

#include "common/mem.h"
#include "kernels/router_balance.h"
#include "worker/linear.h"
#include "worker/model.h"

static struct router_shape shape_of(const struct pass *p)
{
    return (struct router_shape){
        .n_tokens = p->n,
        .n_experts = (int32_t)p->spec->n_experts,
        .top_k = (int32_t)p->spec->top_k,
        .renormalize = p->spec->renormalize,
        .routed_scale = p->spec->routed_scale,
        .kind = p->spec->router_softmax ? ROUTER_SOFTMAX : ROUTER_SIGMOID,
        .n_groups = (int32_t)p->spec->n_expert_groups,
        .topk_group = (int32_t)p->spec->top_groups,
    };
}

/* ---- forward -------------------------------------------------------------------------------- */

/* What the router wants, which its correction bias follows. */
static void count_wishes(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                         const struct moe_saved *s, const struct router_shape *shape)
{
    size_t n = p->spec->n_experts, first = layer * n;
    float *lo = &e->margin_lo[layer], *hi = &e->margin_hi[layer];
    const float *bias = shard_host_buffers(e->shard) + u->at[ROLE_ROUTER_BIAS];

    router_balance_range(bias, (int32_t)n, lo, hi);
    p->dev->ops->router_histogram(p->dev, e->tokens + first,
                                  e->margins ? e->margins + first * MARGIN_BINS : NULL, s->scores,
                                  s->ids, bias_of(u), *lo, *hi, MARGIN_BINS, shape);
}

/* What they get. */
static void count_served(struct pass *p, struct moe *e, uint32_t layer, const struct moe_saved *s)
{
    struct activations_mark mark = activations_mark(p->act);
    size_t n = p->spec->n_experts;
    int32_t *counts = activations_take_i32(p->act, (int64_t)n);

    if (counts) {
        struct route all = {.n_pairs = p->n * p->spec->top_k, .pairs_each = p->n * p->spec->top_k,
                            .n_chunks = 1, .n_experts = (int32_t)n,
                            .top_k = (int32_t)p->spec->top_k};
        p->dev->ops->route_counts(p->dev, counts, s->sent, &all);
        p->dev->ops->to_host(p->dev, e->host_counts, counts, n * sizeof *counts);
        for (size_t i = 0; i < n; i++)
            e->served[layer * n + i] += e->host_counts[i];
    }
    activations_release(p->act, mark);
}

static void cut_to_capacity(struct pass *p, struct moe *e, uint32_t layer, const float *bias,
                            struct moe_saved *s, const struct router_shape *shape)
{
    const struct moe_rules *r = &e->rules;
    double even = (double)(p->n * p->spec->top_k) / p->spec->n_experts;
    struct capacity_config c = { .capacity = (int64_t)ceil(even * r->capacity_factor),
                                 .overflow = r->overflow, .order = r->order };
    int64_t n_rerouted = 0, n_dropped = 0;

    p->dev->ops->router_capacity(p->dev, s->ids, s->weights, s->sent, &n_rerouted, &n_dropped,
                                 s->scores, bias, &c, shape);
    if (!e->counting)
        return;
    e->rerouted[layer] += n_rerouted;
    e->dropped[layer] += n_dropped;
    count_served(p, e, layer, s);
}

void moe_router_carve(struct pass *p, const struct moe_rules *r, struct moe_saved *out)
{
    int64_t all = p->n * p->spec->n_experts, slots = p->n * p->spec->top_k;

    out->scores = activations_take_f32(p->act, all);
    out->weights = activations_take_f32(p->act, slots);
    out->ids = activations_take_i32(p->act, slots);
    if (r->z_loss > 0)
        out->logits = activations_take_f32(p->act, all);
    if (r->capacity_factor > 0)
        out->sent = activations_take_i32(p->act, slots);
}

/* A token's choices are far apart, so that they are on as many ranks as a router's would be, and
 * the next token's are the experts behind them. Without memory for that the router's stay. */
static void force_balance(struct pass *p, struct moe *e, int32_t *ids)
{
    int64_t n = p->n * p->spec->top_k, apart = p->spec->n_experts / p->spec->top_k;

    if (n > e->n_in_turn) {
        int32_t *host = xcalloc((size_t)n, sizeof *host);
        for (int64_t i = 0; i < n; i++)
            host[i] = (int32_t)((i / p->spec->top_k + i % p->spec->top_k * apart) %
                                p->spec->n_experts);
        if (e->in_turn)
            p->dev->ops->free(p->dev, e->in_turn);
        e->in_turn = p->dev->ops->alloc(p->dev, (size_t)n * sizeof *host);
        e->n_in_turn = e->in_turn ? n : 0;
        if (e->in_turn)
            p->dev->ops->to_device(p->dev, e->in_turn, host, (size_t)n * sizeof *host);
        free(host);
    }
    if (n <= e->n_in_turn)
        p->dev->ops->copy(p->dev, ids, e->in_turn, (size_t)n * sizeof *ids);
}

void moe_route(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
               const elem *x, struct moe_saved *s)
{
    const struct router_shape shape = shape_of(p);
    const int32_t rows[2] = { 0, (int32_t)p->n };
    struct activations_mark mark = activations_mark(p->act);
    float *logits = s->logits ? s->logits
                              : activations_take_f32(p->act, p->n * p->spec->n_experts);

    if (logits && !p->act->failed) {
        linear_f32_forward(p, u, ROLE_ROUTER, logits, x, p->spec->hidden, p->spec->n_experts);
        p->dev->ops->router(p->dev, s->scores, s->ids, s->weights, logits, bias_of(u), &shape);
        if (e->rules.force_balance)
            force_balance(p, e, s->ids);
        if (e->counting)
            count_wishes(p, e, layer, u, s, &shape);
        if (e->surveying)
            p->dev->ops->router_segment_counts(p->dev, e->choices + layer * p->spec->n_experts,
                                               s->scores, rows, 1, &shape);
        if (s->sent && e->capping)
            cut_to_capacity(p, e, layer, bias_of(u), s, &shape);
    }
    activations_release(p->act, mark);
}

const int32_t *moe_choices_sent(const struct moe *e, const struct moe_saved *s)
{
    return s->sent && e->capping ? s->sent : s->ids;
}

/* ---- backward ------------------------------------------------------------------------------- */

static bool is_by_document(const struct moe *e)
{
    return e->rules.aux_loss > 0 && e->rules.aux_scope == AUX_SEQUENCE;
}

/* (n, n_experts), aligned for any type. */
static int64_t *take_counts(struct pass *p, int64_t n)
{
    return (int64_t *)activations_take_i32(p->act, 2 * n * p->spec->n_experts);
}

/* Each row may be a document of its own. */
void moe_router_count_backward(struct pass *p, const struct moe *e)
{
    struct activations_mark mark = activations_mark(p->act);

    if (is_by_document(e))
        take_counts(p, p->n);
    activations_release(p->act, mark);
}

/* Counts over the global batch were taken before; others are made of the scores. */
static void aux_loss(struct pass *p, struct moe *e, uint32_t layer, float *d_logits,
                     const struct moe_saved *s, const struct router_shape *shape)
{
    const int32_t all_rows[2] = { 0, (int32_t)p->n };
    const int32_t *rows = is_by_document(e) ? p->cu_seqlens : all_rows;
    int32_t n_segments = is_by_document(e) ? p->n_docs : 1;
    size_t n_bytes = (size_t)n_segments * p->spec->n_experts * sizeof(int64_t);
    struct activations_mark mark = activations_mark(p->act);
    int64_t *counts = e->choices + layer * p->spec->n_experts;

    if (e->rules.aux_scope != AUX_GLOBAL) {
        counts = take_counts(p, n_segments);
        if (counts) {
            p->dev->ops->zero(p->dev, counts, n_bytes);
            p->dev->ops->router_segment_counts(p->dev, counts, s->scores, rows, n_segments, shape);
        }
    }
    if (counts)
        p->dev->ops->router_aux_loss(p->dev, &e->acc_losses[MOE_AUX_LOSS], d_logits,
                                     e->rules.aux_loss * e->loss_weight, s->scores, counts, rows,
                                     n_segments, shape);
    activations_release(p->act, mark);
}

void moe_router_backward(struct pass *p, struct moe *e, uint32_t layer, float *d_logits,
                         const float *d_weights, const struct moe_saved *s)
{
    const struct router_shape shape = shape_of(p);

    p->dev->ops->router_backward(p->dev, d_logits, d_weights, s->scores, s->ids, &shape);
    if (p->n == 0)
        return;
    if (e->rules.aux_loss > 0)
        aux_loss(p, e, layer, d_logits, s, &shape);
    if (e->rules.z_loss > 0)
        p->dev->ops->router_z_loss(p->dev, &e->acc_losses[MOE_Z_LOSS], d_logits,
                                   e->rules.z_loss * e->loss_weight, s->logits, &shape);
}
