/* model_walk.c - the units of a model one after another, there and back
 *
 * A unit is gathered, used and let go in an order that follows from the model alone: every rank
 * makes the same collective calls. While one is computed with, the next one comes, and the
 * gradients of the one before go home. */
#include "worker/model_parts.h"

#include "kernels/spans.h"
#include "worker/head.h"
#include "worker/phases.h"

#define NOTHING INT64_C(-1) /* in place of a unit or a layer */

static uint32_t unit_of_layer(uint32_t l)
{
    return 1 + l;
}

static uint32_t unit_of_head(const struct model *m)
{
    return 1 + m->config.spec->n_layers;
}

/* ---- units ---------------------------------------------------------------------------------- */

/* The sparse layer after from, upwards or downwards, from itself included. */
static int64_t find_sparse(const struct model *m, int64_t from, int step)
{
    const struct model_spec *s = m->config.spec;
    while (from >= 0 && from < (int64_t)s->n_layers && s->layers[from].mlp != MLP_MOE)
        from += step;
    return from < (int64_t)s->n_layers ? from : NOTHING;
}

/* Whose experts come after those of layer l. */
static int64_t experts_after(const struct model *m, uint32_t l, bool backward)
{
    if (backward)
        return find_sparse(m, (int64_t)l - 1, -1);
    int64_t next = find_sparse(m, (int64_t)l + 1, 1);
    return next == NOTHING && m->has_backward ? (int64_t)l : next;
}

/* next: the unit that is opened after this one. */
static int open_unit(struct model *m, uint32_t unit, bool backward, int64_t next,
                     struct unit_view *out, struct err *err)
{
    *out = (struct unit_view){
        .dev = m->config.dev, .at = m->at[unit], .buffers = shard_buffers(m->config.shard),
        .sink = shard_sink(m->config.shard), .packed_rows = m->packed_rows[unit],
        .adapters = m->adapters ? &m->adapters[unit] : NULL,
    };
    int rc = shard_acquire(m->config.shard, unit, &out->weights, err);
    if (rc == 0 && next != NOTHING)
        rc = shard_prefetch(m->config.shard, (uint32_t)next, err);
    if (rc == 0 && backward)
        out->gradients = shard_gradient(m->config.shard, unit);
    return rc;
}

static int close_unit(struct model *m, uint32_t unit, const struct unit_view *u, int rc,
                      struct err *err)
{
    if (rc == 0 && u->gradients)
        rc = shard_reduce(m->config.shard, unit, err);
    if (u->weights.trained)
        shard_release(m->config.shard, unit);
    return rc;
}

static int64_t unit_after_layer(const struct model *m, uint32_t l, bool backward)
{
    if (backward)
        return l > 0 ? unit_of_layer(l - 1) : NOTHING;
    if (l + 1 < m->config.spec->n_layers)
        return unit_of_layer(l + 1);
    return m->has_head ? (int64_t)unit_of_head(m) : NOTHING;
}

static int embed(struct model *m, struct err *err)
{
    struct pass *p = &m->pass;
    struct unit_view u;
    int64_t sparse = find_sparse(m, 0, 1);
    int rc = open_unit(m, 0, false, unit_of_layer(0), &u, err);

    if (rc == 0 && sparse != NOTHING)
        rc = shard_experts_prefetch(m->config.shard, (uint32_t)sparse, err);
    spans_begin(p->dev, PHASE_EMBEDDING, -1);
    if (rc == 0)
        p->dev->ops->embedding(p->dev, m->residuals.p[0], weight_of(&u, ROLE_EMBEDDING), m->tokens,
                               p->n, p->spec->hidden);
    spans_end(p->dev);
    return close_unit(m, 0, &u, rc, err);
}

static int embed_backward(struct model *m, struct err *err)
{
    struct pass *p = &m->pass;
    struct unit_view u = { .dev = m->config.dev, .at = m->at[0],
                           .weights.n_trained = m->config.map->units[0].trained,
                           .gradients = shard_gradient(m->config.shard, 0) };

    if (!unit_trains(&u, ROLE_EMBEDDING))
        return 0;
    spans_begin(p->dev, PHASE_EMBEDDING, -1);
    p->dev->ops->embedding_backward(p->dev, gradient_of(&u, ROLE_EMBEDDING), m->residuals.d_p,
                                    m->tokens, p->n, p->spec->hidden);
    spans_end(p->dev);
    return close_unit(m, 0, &u, 0, err);
}

/* ---- layers --------------------------------------------------------------------------------- */

enum carve model_kept(const struct model *m)
{
    return m->config.recompute == RECOMPUTE_SELECTIVE ? CARVE_KEPT : CARVE_ALL;
}

/* In segments: their own backward makes all again but what they share. */
static int forward_cut(struct model *m, uint32_t l, const struct unit_view *u, struct err *err)
{
    bool holds = m->pass.spec->layers[l].mlp == MLP_MOE;
    struct decoder_cut *cut = &m->cuts[l];
    int rc = holds ? shard_experts_hold(m->config.shard, l, err) : 0;

    decoder_cut_carve(&m->pass, l, cut);
    if (rc == 0)
        rc = decoder_cut_forward(&m->pass, &m->moe, l, u, &m->residuals, m->residuals.p[l + 1],
                                 cut, err);
    if (rc == 0 && holds)
        shard_experts_release(m->config.shard, l);
    if (rc == 0 && !m->has_backward)
        activations_release(&m->act, cut->mark);
    return rc;
}

/* keep: for a backward without recomputation. */
static int forward_layer(struct model *m, uint32_t l, bool keep, struct err *err)
{
    struct pass *p = &m->pass;
    struct decoder_saved *saved = &m->layers[l];
    bool learns = m->is_learning && p->spec->layers[l].attention == ATTENTION_MLA;
    struct unit_view u;
    spans_begin(p->dev, PHASE_OTHER, (int32_t)l);
    int rc = open_unit(m, unit_of_layer(l), learns, unit_after_layer(m, l, false), &u, err);

    if (p->spec->layers[l].mlp == MLP_MOE)
        shard_experts_then(m->config.shard, experts_after(m, l, false));
    if (rc == 0 && m->cuts) {
        rc = forward_cut(m, l, &u, err);
    } else if (rc == 0) {
        decoder_carve(p, &m->moe, l, model_kept(m), saved);
        rc = decoder_forward(p, &m->moe, l, &u, &m->residuals, m->residuals.p[l + 1], saved, err);
    }
    if (rc == 0 && !keep && !m->cuts) {
        moe_drop(&saved->moe);
        activations_release(&m->act, saved->mark);
    }
    rc = close_unit(m, unit_of_layer(l), &u, rc, err);
    spans_end(p->dev);
    return rc;
}

static int backward_layer(struct model *m, uint32_t l, struct err *err)
{
    struct pass *p = &m->pass;
    struct decoder_saved *saved = &m->layers[l];
    bool is_sparse = p->spec->layers[l].mlp == MLP_MOE;
    bool holds = is_sparse && m->config.recompute != RECOMPUTE_OFF; /* it is run again before */
    struct unit_view u;
    spans_begin(p->dev, PHASE_OTHER, (int32_t)l);
    int rc = open_unit(m, unit_of_layer(l), true, unit_after_layer(m, l, true), &u, err);

    if (is_sparse)
        shard_experts_then(m->config.shard, experts_after(m, l, true));
    if (rc == 0 && holds)
        rc = shard_experts_hold(m->config.shard, l, err);
    if (rc == 0 && m->cuts) {
        rc = decoder_cut_backward(p, &m->moe, l, &u, &m->residuals, &m->cuts[l], err);
        saved->mark = m->cuts[l].mark;
    } else if (rc == 0 && m->config.recompute == RECOMPUTE_FULL) {
        decoder_carve(p, &m->moe, l, CARVE_ALL, saved);
        rc = decoder_forward(p, &m->moe, l, &u, &m->residuals, NULL, saved, err);
    }
    if (rc == 0 && !m->cuts)
        rc = decoder_backward(p, &m->moe, l, &u, &m->residuals, saved, err);
    if (rc == 0)
        activations_release(&m->act, saved->mark);
    if (rc == 0 && holds)
        shard_experts_release(m->config.shard, l);
    rc = close_unit(m, unit_of_layer(l), &u, rc, err);
    spans_end(p->dev);
    return rc;
}

/* ---- the head ------------------------------------------------------------------------------- */

int model_head_loss(struct model *m, bool backward, struct err *err)
{
    struct activations_mark mark = activations_mark(&m->act);
    struct unit_view u;
    struct head h;
    int64_t next = backward ? unit_of_layer(m->config.spec->n_layers - 1) : NOTHING;
    int rc = open_unit(m, unit_of_head(m), backward, next, &u, err);

    spans_begin(m->config.dev, PHASE_HEAD, -1);
    if (rc == 0)
        rc = head_forward(&m->pass, &u, &m->residuals, &h, err);
    if (rc == 0 && backward)
        head_loss_backward(&m->pass, &u, &m->residuals, &h, m->labels);
    else if (rc == 0)
        head_loss_only(&m->pass, &u, &h, m->labels);
    spans_end(m->config.dev);
    activations_release(&m->act, mark);
    return close_unit(m, unit_of_head(m), &u, rc, err);
}

int model_head_logits(struct model *m, float *out_logits, struct err *err)
{
    struct activations_mark mark = activations_mark(&m->act);
    struct unit_view u;
    struct head h;
    int rc = open_unit(m, unit_of_head(m), false, NOTHING, &u, err);

    if (rc == 0 && (rc = head_forward(&m->pass, &u, &m->residuals, &h, err)) == 0)
        rc = head_logits(&m->pass, &u, &h, out_logits, err);
    activations_release(&m->act, mark);
    return close_unit(m, unit_of_head(m), &u, rc, err);
}

/* ---- all of them ---------------------------------------------------------------------------- */

int model_forward(struct model *m, bool keep, struct err *err)
{
    int rc = embed(m, err);
    for (uint32_t l = 0; rc == 0 && l < m->config.spec->n_layers; l++)
        rc = forward_layer(m, l, keep, err);
    return rc;
}

int model_backward(struct model *m, struct err *err)
{
    int rc = 0;
    for (uint32_t l = m->config.spec->n_layers; rc == 0 && l-- > 0;)
        rc = backward_layer(m, l, err);
    return rc < 0 ? rc : embed_backward(m, err);
}

void model_drop_plans(struct model *m)
{
    for (uint32_t l = 0; l < m->config.spec->n_layers; l++)
        moe_drop(&m->layers[l].moe);
}
