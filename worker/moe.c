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
    if (e->in_turn)
        dev->ops->free(dev, e->in_turn);
    free(e->w);
    free(e->dw);
    free(e->packed);
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

void moe_count_forward(struct pass *p, const struct moe *e)
{
    moe_trip_count(p, e, false);
}

void moe_count_backward(struct pass *p, const struct moe *e, bool is_again)
{
    struct mlp_shape shared = mlp_shared_shape(p->spec);
    struct activations_mark mark = activations_mark(p->act);
    struct mlp_saved s = {0};
    struct moe_scratch b;

    if (is_again)
        moe_trip_count(p, e, true);
    carve_scratch(p, &b);
    moe_trip_count_backward(p, e);
    if (shared.inter)
        mlp_backward(p, NULL, &shared, NULL, NULL, 1, &s);
    moe_router_count_backward(p, e);
    activations_release(p->act, mark);
}

void moe_drop(struct moe_saved *s)
{
    dispatch_plan_destroy(s->plan);
    s->plan = NULL;
}

/* ---- forward -------------------------------------------------------------------------------- */

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

int moe_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                const elem *x, elem *y, struct moe_saved *s, struct err *err)
{
    const struct model_spec *m = p->spec;
    struct mlp_shape shared = mlp_shared_shape(m);
    struct shard_experts held; /* over all pieces: groups that share them may have other numbers */
    int rc;

    s->x = x;
    moe_route(p, e, layer, u, x, s);
    if (m->latent_moe && !p->act->failed)
        linear_forward(p, u, ROLE_LATENT_DOWN, s->latent, x, m->hidden, m->latent, 0);
    if ((rc = activations_check(p->act, err)) < 0 ||
        (rc = shard_experts_acquire(e->shard, layer, &held, err)) < 0)
        return rc;
    rc = moe_set_out(p, e, layer, s, err);
    if (rc == 0 && shared.inter) /* while the first tokens travel */
        mlp_forward(p, u, &shared, x, y, &s->shared);
    if (rc == 0)
        rc = moe_travel(p, e, layer, u, s, err);
    shard_experts_release(e->shard, layer);
    if (rc == 0)
        combine(p, u, y, s);
    return rc;
}

int moe_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
              const elem *x, struct moe_saved *s, struct err *err)
{
    struct mlp_shape shared = mlp_shared_shape(p->spec);
    struct shard_experts held; /* also without rows, for the groups that share them */
    int rc;

    s->x = x;
    if ((rc = activations_check(p->act, err)) < 0 ||
        (rc = shard_experts_acquire(e->shard, layer, &held, err)) < 0)
        return rc;
    rc = moe_set_out_again(p, e, layer, s, err);
    if (rc == 0) {
        combine(p, u, NULL, s);
        if (shared.inter)
            mlp_forward(p, u, &shared, x, NULL, &s->shared);
        rc = moe_travel_again(p, e, layer, u, s, err);
    }
    shard_experts_release(e->shard, layer);
    return rc;
}

/* ---- backward ------------------------------------------------------------------------------- */

/* From dy to the gradient of every weight; gives that of the slots' weighted sum. */
static const elem *combine_backward(struct pass *p, const struct unit_view *u, const elem *dy,
                                    struct moe_scratch *b, const struct moe_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    const elem *d_sum = dy;

    if (m->latent_moe) {
        linear_backward(p, u, ROLE_LATENT_UP, b->d_latent, 0, dy, s->normed, m->latent, m->hidden);
        d_sum = b->d_latent;
    }
    if (m->latent_norm) {
        ops->rms_norm_backward(p->dev, b->d_sum, gradient_of(u, ROLE_LATENT_NORM), d_sum, s->sum,
                               weight_of(u, ROLE_LATENT_NORM), s->sum_rstd, p->n, m->latent, 0);
        d_sum = b->d_sum;
    }
    ops->combine_backward(p->dev, (elem *)NULL, b->d_weights, d_sum, s->slots, s->weights, p->n,
                          (int32_t)m->top_k, m->latent);
    return d_sum;
}

/* There and back; dx gets the shared experts' while the first gradients travel. */
static int from_experts(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        const elem *dy, elem *dx, struct moe_scratch *b, struct moe_saved *s,
                        struct err *err)
{
    struct mlp_shape shared = mlp_shared_shape(p->spec);
    struct shard_experts held;
    int rc = shard_experts_acquire(e->shard, layer, &held, err);
    if (rc < 0)
        return rc;
    const elem *d_sum = combine_backward(p, u, dy, b, s);
    rc = moe_set_out_backward(p, e, layer, d_sum, s, err);
    if (rc == 0 && shared.inter)
        mlp_backward(p, u, &shared, dy, dx, 0, &s->shared);
    if (rc == 0)
        rc = moe_travel_backward(p, e, layer, u, d_sum, b->d_slots, s, err);
    if (rc == 0 && (!p->lora.r || p->lora.on_experts))
        rc = shard_experts_reduce(e->shard, layer, err);
    shard_experts_release(e->shard, layer);
    return rc;
}

/* The sum of what came back of each token, into dx, which has the shared experts' if there are. */
static void sum_slots(struct pass *p, struct moe *e, const struct unit_view *u, elem *dx,
                      struct moe_scratch *b, const struct moe_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    bool adds = mlp_shared_shape(m).inter > 0;
    elem *sum = m->latent_moe || adds ? b->d_latent : dx;

    ops->combine(p->dev, sum, b->d_slots, e->ones, p->n, (int32_t)m->top_k, m->latent);
    if (m->latent_moe)
        linear_backward(p, u, ROLE_LATENT_DOWN, dx, adds, sum, s->x, m->hidden, m->latent);
    else if (adds)
        ops->add(p->dev, dx, sum, p->n * m->hidden);
}

int moe_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                 const elem *dy, elem *dx, struct moe_saved *s, struct err *err)
{
    const struct model_spec *m = p->spec;
    struct activations_mark mark = activations_mark(p->act);
    struct moe_scratch b;
    int rc;

    carve_scratch(p, &b);
    if ((rc = activations_check(p->act, err)) < 0 ||
        (rc = from_experts(p, e, layer, u, dy, dx, &b, s, err)) < 0)
        goto out;
    sum_slots(p, e, u, dx, &b, s);
    moe_router_backward(p, e, layer, b.d_logits, b.d_weights, s);
    p->dev->ops->to_elem(p->dev, b.d_router, b.d_logits, p->n * m->n_experts);
    linear_backward(p, u, ROLE_ROUTER, dx, 1, b.d_router, s->x, m->hidden, m->n_experts);
out:
    activations_release(p->act, mark);
    return rc;
}
