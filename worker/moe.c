/* moe.c - router, dispatch, expert products, combine, and the same backwards */
#include "worker/moe.h"

#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"
#include "worker/linear.h"
#include "worker/model.h"

int moe_init(struct moe *e, const struct model_spec *m, const struct slots *slots,
             const struct moe_rules *rules, bool count_margins, struct device *dev,
             struct err *err)
{
    uint32_t n_groups = slots->n_slots > slots->n_devices ? slots->n_slots : slots->n_devices;
    size_t n = (size_t)m->n_layers * m->n_experts * sizeof(int64_t);

    e->n_slots = slots->n_slots;
    e->n_sources = slots->n_devices;
    e->w = xcalloc(3 * (size_t)slots->n_slots, sizeof *e->w);
    e->dw = xcalloc(3 * (size_t)n_groups, sizeof *e->dw);
    e->packed = xcalloc(3 * (size_t)slots->n_slots, sizeof *e->packed);
    e->scales = xcalloc(3 * (size_t)slots->n_slots, sizeof *e->scales);
    e->a = xcalloc(3 * (size_t)slots->n_slots, sizeof *e->a);
    e->b = xcalloc(3 * (size_t)slots->n_slots, sizeof *e->b);
    e->da = xcalloc(3 * (size_t)n_groups, sizeof *e->da);
    e->db = xcalloc(3 * (size_t)n_groups, sizeof *e->db);
    e->layer_rows = xcalloc(m->n_layers, sizeof *e->layer_rows);
    e->margin_lo = xcalloc(m->n_layers, sizeof *e->margin_lo);
    e->margin_hi = xcalloc(m->n_layers, sizeof *e->margin_hi);
    e->served = xcalloc((size_t)m->n_layers * m->n_experts, sizeof *e->served);
    e->rerouted = xcalloc(m->n_layers, sizeof *e->rerouted);
    e->dropped = xcalloc(m->n_layers, sizeof *e->dropped);
    e->host_counts = xcalloc(m->n_experts, sizeof *e->host_counts);
    e->rules = *rules;
    e->choices = dev->ops->alloc(dev, n);
    e->acc_losses = dev->ops->alloc(dev, MOE_LOSSES * sizeof *e->acc_losses);
    e->tokens = dev->ops->alloc(dev, n);
    if (count_margins)
        e->margins = dev->ops->alloc(dev, n * MARGIN_BINS);
    if (!e->tokens || !e->choices || !e->acc_losses || (count_margins && !e->margins))
        return err_set(err, -ENOMEM, "the device has no %zu bytes for the router's counters",
                       n * (count_margins ? MARGIN_BINS + 1 : 1));
    return 0;
}

void moe_fini(struct moe *e, struct device *dev)
{
    if (e->tokens)
        dev->ops->free(dev, e->tokens);
    if (e->margins)
        dev->ops->free(dev, e->margins);
    if (e->choices)
        dev->ops->free(dev, e->choices);
    if (e->acc_losses)
        dev->ops->free(dev, e->acc_losses);
    free(e->w);
    free(e->dw);
    free(e->packed);
    free(e->scales);
    free(e->a);
    free(e->b);
    free(e->da);
    free(e->db);
    free(e->layer_rows);
    free(e->margin_lo);
    free(e->margin_hi);
    free(e->served);
    free(e->rerouted);
    free(e->dropped);
    free(e->host_counts);
    *e = (struct moe){0};
}

/* ---- memory --------------------------------------------------------------------------------- */

static void carve_kept(struct pass *p, const struct moe *e, struct moe_saved *out)
{
    const struct model_spec *m = p->spec;

    moe_router_carve(p, &e->rules, out);
    if (m->latent_moe)
        out->latent = activations_take(p->act, p->n * m->latent);
    out->slots = activations_take(p->act, p->n * m->top_k * m->latent);
}

static void carve_again(struct pass *p, struct moe_saved *out)
{
    const struct model_spec *m = p->spec;
    struct mlp_shape shared = mlp_shared_shape(m);
    int64_t latent = p->n * m->latent;

    out->normed = out->sum = activations_take(p->act, latent);
    if (m->latent_norm) {
        out->sum_rstd = activations_take_f32(p->act, p->n);
        out->normed = activations_take(p->act, latent);
    }
    if (shared.inter)
        mlp_carve(p, &shared, &out->shared);
}

void moe_carve(struct pass *p, const struct moe *e, enum carve what, struct moe_saved *out)
{
    if (what != CARVE_AGAIN) {
        *out = (struct moe_saved){0};
        carve_kept(p, e, out);
    }
    if (what != CARVE_KEPT)
        carve_again(p, out);
}

static void carve_rows(struct pass *p, struct moe_saved *s)
{
    int64_t inter = s->n_rows * p->spec->expert_inter;

    s->rows = activations_take(p->act, s->n_rows * p->spec->latent);
    s->gate = activations_take(p->act, inter);
    s->up = activations_take(p->act, inter);
    s->hidden = activations_take(p->act, inter);
}

static void carve_scratch(struct pass *p, struct moe_scratch *b)
{
    const struct model_spec *m = p->spec;
    int64_t slots = p->n * m->top_k;

    b->d_weights = activations_take_f32(p->act, slots);
    b->d_logits = activations_take_f32(p->act, p->n * m->n_experts);
    b->d_router = activations_take(p->act, p->n * m->n_experts);
    b->d_latent = activations_take(p->act, p->n * m->latent);
    b->d_sum = activations_take(p->act, p->n * m->latent);
    b->d_slots = activations_take(p->act, slots * m->latent);
}

/* The rows' part of it. */
static void carve_row_scratch(struct pass *p, int64_t n_rows, struct moe_scratch *b)
{
    const struct model_spec *m = p->spec;

    b->d_rows = activations_take(p->act, n_rows * m->latent);
    b->d_gate = activations_take(p->act, n_rows * m->expert_inter);
    b->d_up = activations_take(p->act, n_rows * m->expert_inter);
    b->d_hidden = activations_take(p->act, n_rows * m->expert_inter);
    moe_lora_carve_backward(p, n_rows, &b->lora);
}

void moe_count_forward(struct pass *p, int64_t n_rows)
{
    struct moe_saved s = { .n_rows = n_rows };
    struct moe_lora_scratch lora;

    carve_rows(p, &s);
    struct activations_mark mark = activations_mark(p->act);
    activations_take(p->act, n_rows * p->spec->latent); /* what goes back */
    moe_lora_carve_forward(p, n_rows, &lora);
    activations_release(p->act, mark);
}

void moe_count_backward(struct pass *p, int64_t n_rows, bool is_again)
{
    struct mlp_shape shared = mlp_shared_shape(p->spec);
    struct moe_saved s = { .n_rows = n_rows };
    struct moe_scratch b;
    struct activations_mark mark = activations_mark(p->act);

    if (is_again) {
        carve_rows(p, &s);
        struct activations_mark rows = activations_mark(p->act);
        moe_lora_carve_forward(p, n_rows, &b.lora);
        activations_release(p->act, rows);
    }
    carve_scratch(p, &b);
    struct activations_mark before = activations_mark(p->act);
    carve_row_scratch(p, n_rows, &b);
    activations_release(p->act, before);
    if (shared.inter)
        mlp_backward(p, NULL, &shared, NULL, NULL, 1, &s.shared);
    activations_release(p->act, mark);
}

void moe_drop(struct moe_saved *s)
{
    dispatch_plan_destroy(s->plan);
    s->plan = NULL;
}

/* ---- forward -------------------------------------------------------------------------------- */

/* What the n tokens from first on are to a plan. */
struct part {
    const elem *latent; /* (n, latent) */
    elem *slots;        /* (n, top_k, latent) */
    int64_t first, n;
};

static struct part part_of(const struct pass *p, const struct moe_saved *s, int64_t first,
                           int64_t n)
{
    const elem *latent = p->spec->latent_moe ? s->latent : s->x;
    int64_t at = first * p->spec->latent;
    return (struct part){const_elem_at(p->dev, latent, at),
                         elem_at(p->dev, s->slots, at * p->spec->top_k), first, n};
}

/* To the experts; s->plan's rows and what their backward needs. */
static int arrive(struct pass *p, const struct part *t, struct moe_saved *s, struct err *err)
{
    carve_rows(p, s);
    int rc = activations_check(p->act, err);
    return rc < 0 ? rc : dispatch_send_tokens(s->plan, t->latent, s->rows, err);
}

/* To the experts and back: slots from latents. */
static int travel(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                  const struct part *t, struct moe_saved *s, struct err *err)
{
    int rc = arrive(p, t, s, err);
    struct activations_mark mark = activations_mark(p->act);
    elem *out_rows = activations_take(p->act, s->n_rows * p->spec->latent);
    if (rc == 0)
        rc = activations_check(p->act, err);
    if (rc == 0)
        rc = moe_experts_forward(p, e, layer, u, out_rows, s, err);
    if (rc == 0)
        rc = dispatch_return(s->plan, out_rows, t->slots, err);
    activations_release(p->act, mark);
    return rc;
}

/* ---- part by part --------------------------------------------------------------------------- */

/* Where all tokens go to one expert, they come to it a few at a time: slower, in the same memory.
 * All ranks of all expert groups that share experts hold them over all their parts. */
typedef int (*part_fn)(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                       const struct part *t, struct moe_saved *s, void *arg, struct err *err);

static int each_part(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                     const struct moe_saved *s, part_fn fn, void *arg, struct err *err)
{
    int64_t n_each = dispatch_safe_tokens(e->dispatch), n_parts = dispatch_n_parts(e->dispatch);
    int rc = 0;
    for (int64_t i = 0; i < n_parts && rc == 0; i++) {
        int64_t first = i * n_each < p->n ? i * n_each : p->n, rest = p->n - first;
        /* A batch that is larger than planned for goes with the last part. */
        struct part t = part_of(p, s, first, rest < n_each || i + 1 == n_parts ? rest : n_each);
        struct activations_mark mark = activations_mark(p->act);
        struct moe_saved here = {.x = s->x};
        rc = dispatch_plan_part(e->dispatch, layer,
                                moe_choices_sent(e, s) + first * p->spec->top_k, t.n, &here.plan,
                                err);
        if (rc == 0) {
            here.n_rows = dispatch_plan_rows(here.plan);
            rc = fn(p, e, layer, u, &t, &here, arg, err);
        }
        moe_drop(&here);
        activations_release(p->act, mark);
    }
    return rc;
}

static int part_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        const struct part *t, struct moe_saved *s, void *arg, struct err *err)
{
    (void)arg;
    if (e->counting)
        e->layer_rows[layer] += s->n_rows;
    return travel(p, e, layer, u, t, s, err);
}

static void combine(struct pass *p, const struct unit_view *u, elem *y, struct moe_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;

    ops->combine(p->dev, s->sum, s->slots, s->weights, p->n, (int32_t)m->top_k, m->latent);
    if (m->latent_norm)
        ops->rms_norm(p->dev, s->normed, s->sum_rstd, s->sum, weight_of(u, ROLE_LATENT_NORM), p->n,
                      m->latent, m->norm_eps);
    if (!y)
        return;
    if (m->latent_moe)
        linear_forward(p, u, ROLE_LATENT_UP, y, s->normed, m->latent, m->hidden, 1);
    else
        ops->add(p->dev, y, s->normed, p->n * m->hidden);
}

/* The layer's experts are held over all parts: groups that share them may have other numbers. */
static int to_experts(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                      struct moe_saved *s, struct err *err)
{
    struct shard_experts x;
    int rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc < 0)
        return rc;
    if (s->plan) {
        struct part whole = part_of(p, s, 0, p->n);
        s->n_rows = dispatch_plan_rows(s->plan);
        rc = part_forward(p, e, layer, u, &whole, s, NULL, err);
    } else {
        rc = each_part(p, e, layer, u, s, part_forward, NULL, err);
    }
    shard_experts_release(e->shard, layer);
    return rc;
}

int moe_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                const elem *x, elem *y, struct moe_saved *s, struct err *err)
{
    const struct model_spec *m = p->spec;
    struct mlp_shape shared = mlp_shared_shape(m);
    int rc;

    s->x = x;
    moe_route(p, e, layer, u, x, s);
    if (m->latent_moe && !p->act->failed)
        linear_forward(p, u, ROLE_LATENT_DOWN, s->latent, x, m->hidden, m->latent, 0);
    if ((rc = activations_check(p->act, err)) < 0 ||
        (rc = dispatch_plan_create(e->dispatch, layer, moe_choices_sent(e, s), p->n, &s->plan,
                                   err)) < 0)
        return rc;
    if ((rc = to_experts(p, e, layer, u, s, err)) < 0)
        return rc;
    combine(p, u, y, s);
    if (shared.inter)
        mlp_forward(p, u, &shared, x, y, &s->shared);
    return 0;
}

/* Where they go part by part, the backward does this for each; the experts are held all the same,
 * for the groups that share them. */
static int experts_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                         struct moe_saved *s, struct err *err)
{
    struct shard_experts x;
    int rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc < 0)
        return rc;
    if (s->plan) {
        struct part whole = part_of(p, s, 0, p->n);
        s->n_rows = dispatch_plan_rows(s->plan);
        if ((rc = arrive(p, &whole, s, err)) == 0)
            rc = moe_experts_forward(p, e, layer, u, NULL, s, err);
    }
    shard_experts_release(e->shard, layer);
    return rc;
}

int moe_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
              const elem *x, struct moe_saved *s, struct err *err)
{
    struct mlp_shape shared = mlp_shared_shape(p->spec);
    int rc;

    s->x = x;
    if ((rc = activations_check(p->act, err)) < 0)
        return rc;
    combine(p, u, NULL, s);
    if (shared.inter)
        mlp_forward(p, u, &shared, x, NULL, &s->shared);
    rc = dispatch_plan_create(e->dispatch, layer, moe_choices_sent(e, s), p->n, &s->plan, err);
    return rc < 0 ? rc : experts_again(p, e, layer, u, s, err);
}

/* ---- backward ------------------------------------------------------------------------------- */

/* From dy to the gradient of every slot and weight. */
static void combine_backward(struct pass *p, const struct unit_view *u, const elem *dy,
                             struct moe_scratch *b, const struct moe_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    const elem *d_normed = dy, *d_sum;

    if (m->latent_moe) {
        linear_backward(p, u, ROLE_LATENT_UP, b->d_latent, 0, dy, s->normed, m->latent, m->hidden);
        d_normed = b->d_latent;
    }
    d_sum = d_normed;
    if (m->latent_norm) {
        ops->rms_norm_backward(p->dev, b->d_sum, gradient_of(u, ROLE_LATENT_NORM), d_normed, s->sum,
                               weight_of(u, ROLE_LATENT_NORM), s->sum_rstd, p->n, m->latent, 0);
        d_sum = b->d_sum;
    }
    ops->combine_backward(p->dev, b->d_slots, b->d_weights, d_sum, s->slots, s->weights, p->n,
                          (int32_t)m->top_k, m->latent);
}

/* d_slots: in, the gradient of what came back; out, of what went. The rows are s's. */
static int travel_backward(struct pass *p, struct moe *e, uint32_t layer,
                           const struct unit_view *u, elem *d_slots, const struct moe_saved *s,
                           struct err *err)
{
    struct moe_scratch b;
    struct activations_mark mark = activations_mark(p->act);
    carve_row_scratch(p, s->n_rows, &b);
    int rc = activations_check(p->act, err);
    if (rc == 0)
        rc = dispatch_send_slots(s->plan, d_slots, b.d_rows, err);
    if (rc == 0)
        rc = moe_experts_backward(p, e, layer, u, &b, s, err);
    if (rc == 0)
        rc = dispatch_return(s->plan, b.d_rows, d_slots, err);
    activations_release(p->act, mark);
    return rc;
}

/* The rows of a part were not kept: they come once more, and their products are made again. arg:
 * d_slots of all tokens. */
static int part_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                         const struct part *t, struct moe_saved *s, void *arg, struct err *err)
{
    elem *d_slots = elem_at(p->dev, (elem *)arg, t->first * p->spec->top_k * p->spec->latent);
    int rc = arrive(p, t, s, err);
    if (rc == 0)
        rc = moe_experts_forward(p, e, layer, u, NULL, s, err);
    return rc < 0 ? rc : travel_backward(p, e, layer, u, d_slots, s, err);
}

static int from_experts(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        elem *d_slots, const struct moe_saved *s, struct err *err)
{
    struct shard_experts x;
    int rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc < 0)
        return rc;
    rc = s->plan ? travel_backward(p, e, layer, u, d_slots, s, err)
                 : each_part(p, e, layer, u, s, part_backward, d_slots, err);
    if (rc == 0 && (!p->lora.r || p->lora.on_experts))
        rc = shard_experts_reduce(e->shard, layer, err);
    shard_experts_release(e->shard, layer);
    return rc;
}

int moe_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                 const elem *dy, elem *dx, struct moe_saved *s, struct err *err)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    struct activations_mark mark = activations_mark(p->act);
    struct mlp_shape shared = mlp_shared_shape(m);
    struct moe_scratch b;
    int rc;

    carve_scratch(p, &b);
    if ((rc = activations_check(p->act, err)) < 0)
        goto out;
    combine_backward(p, u, dy, &b, s);
    if ((rc = from_experts(p, e, layer, u, b.d_slots, s, err)) < 0)
        goto out;
    if (m->latent_moe) {
        ops->combine(p->dev, b.d_latent, b.d_slots, e->ones, p->n, (int32_t)m->top_k, m->latent);
        linear_backward(p, u, ROLE_LATENT_DOWN, dx, 0, b.d_latent, s->x, m->hidden, m->latent);
    } else {
        ops->combine(p->dev, dx, b.d_slots, e->ones, p->n, (int32_t)m->top_k, m->latent);
    }
    moe_router_backward(p, e, layer, b.d_logits, b.d_weights, s);
    ops->to_elem(p->dev, b.d_router, b.d_logits, p->n * m->n_experts);
    linear_backward(p, u, ROLE_ROUTER, dx, 1, b.d_router, s->x, m->hidden, m->n_experts);
    if (shared.inter)
        mlp_backward(p, u, &shared, dy, dx, 1, &s->shared);
out:
    activations_release(p->act, mark);
    return rc;
}
