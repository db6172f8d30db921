/* mla.c - latent attention: queries, keys and values expanded from narrow latents
 *
 * The key-value projection makes the latent and the key part that all heads share in one matrix.
 * Its rows are two matrices one after the other, so both come out as blocks of their own. */
#include "worker/mla.h"

#include <math.h>

#include "worker/linear.h"
#include "worker/segments.h"

struct widths {
    int64_t q, kv, o, latent, rope;
};

static struct widths widths_of(const struct model_spec *m)
{
    return (struct widths){
        .q = (int64_t)m->heads * (m->qk_nope_dim + m->qk_rope_dim),
        .kv = (int64_t)m->heads * (m->qk_nope_dim + m->v_dim),
        .o = (int64_t)m->heads * m->v_dim,
        .latent = m->kv_lora_rank,
        .rope = m->qk_rope_dim,
    };
}

/* While indexers learn from all keys, attention is over all keys too. */
static bool is_sparse(const struct pass *p)
{
    return p->spec->index_top_k && p->index_stage != INDEX_DENSE;
}

static float score_scale(const struct model_spec *m)
{
    double factor = m->mla_rotary ? rotary_score_factor(&m->rotary) : 1;
    return (float)(factor / sqrt(m->qk_nope_dim + m->qk_rope_dim));
}

static struct attention_shape shape_of(const struct pass *p)
{
    const struct model_spec *m = p->spec;
    return (struct attention_shape){
        .n_tokens = p->n,
        .cu_seqlens = p->cu_seqlens,
        .n_docs = p->n_docs,
        .n_heads = (int32_t)m->heads,
        .nope_dim = (int32_t)m->qk_nope_dim,
        .rope_dim = (int32_t)m->qk_rope_dim,
        .v_dim = (int32_t)m->v_dim,
        .scale = score_scale(m),
    };
}

static struct rotary_shape rotary_shape_of(const struct pass *p)
{
    return (struct rotary_shape){
        .n_tokens = p->n,
        .cu_seqlens = position_seqlens(p),
        .n_docs = p->n_docs,
        .dim = (int32_t)p->spec->qk_rope_dim,
        .interleaved = p->spec->rotary_interleaved,
    };
}

/* The position parts of q (n, heads, nope + rope) and k_rope (n, rope), turned in place. */
static void turn_q(struct pass *p, elem *q)
{
    const struct model_spec *m = p->spec;
    struct rotary_shape shape = rotary_shape_of(p);

    if (m->mla_rotary)
        p->dev->ops->rotary(p->dev, elem_at(p->dev, q, m->qk_nope_dim), (int32_t)m->heads,
                            m->qk_nope_dim + m->qk_rope_dim, p->rotary, &shape);
}

static void turn_k(struct pass *p, elem *k_rope)
{
    struct rotary_shape shape = rotary_shape_of(p);

    if (p->spec->mla_rotary)
        p->dev->ops->rotary(p->dev, k_rope, 1, p->spec->qk_rope_dim, p->rotary, &shape);
}

static void turn_back(struct pass *p, elem *d_q, elem *d_k_rope)
{
    const struct model_spec *m = p->spec;
    struct rotary_shape shape = rotary_shape_of(p);

    if (!m->mla_rotary)
        return;
    p->dev->ops->rotary_backward(p->dev, elem_at(p->dev, d_q, m->qk_nope_dim), (int32_t)m->heads,
                                 m->qk_nope_dim + m->qk_rope_dim, p->rotary, &shape);
    p->dev->ops->rotary_backward(p->dev, d_k_rope, 1, m->qk_rope_dim, p->rotary, &shape);
}

/* What is narrow: keys, and what of queries a backward cannot do without. */
static void carve_keys(struct pass *p, enum carve what, struct mla_saved *out)
{
    const struct model_spec *m = p->spec;

    if (what != CARVE_AGAIN) {
        out->low = activations_take(p->act, p->n * m->kv_lora_rank);
        out->k_rope = activations_take(p->act, p->n * m->qk_rope_dim);
        out->lse = activations_take_f32(p->act, p->n * m->heads);
    }
    if (what != CARVE_KEPT) {
        out->kv_rstd = activations_take_f32(p->act, p->n);
        out->latent = activations_take(p->act, p->n * m->kv_lora_rank);
    }
    if (is_sparse(p))
        dsa_carve_keys(p, what, &out->dsa);
}

static void carve_kept_queries(struct pass *p, const struct widths *w, struct mla_saved *out)
{
    const struct model_spec *m = p->spec;

    if (m->q_lora_rank)
        out->q_low = activations_take(p->act, p->n * m->q_lora_rank);
    else
        out->q = activations_take(p->act, p->n * w->q);
    if (!is_sparse(p))
        out->o = activations_take(p->act, p->n * w->o);
    if (m->mla_output_gate)
        out->gate = activations_take(p->act, p->n * w->o);
}

static void carve_queries_again(struct pass *p, const struct widths *w, struct mla_saved *out)
{
    const struct model_spec *m = p->spec;

    if (m->q_lora_rank) {
        out->q_rstd = activations_take_f32(p->act, p->n);
        out->q_latent = activations_take(p->act, p->n * m->q_lora_rank);
        out->q = activations_take(p->act, p->n * w->q);
    }
    if (is_sparse(p))
        out->o = activations_take(p->act, p->n * w->o);
    else
        out->kv = activations_take(p->act, p->n * w->kv);
    if (m->mla_output_gate)
        out->gated = activations_take(p->act, p->n * w->o);
}

static void carve_queries(struct pass *p, enum carve what, struct mla_saved *out)
{
    struct widths w = widths_of(p->spec);

    if (what != CARVE_AGAIN)
        carve_kept_queries(p, &w, out);
    if (what != CARVE_KEPT)
        carve_queries_again(p, &w, out);
    if (is_sparse(p))
        dsa_carve_queries(p, what, &out->dsa);
}

/* What a segment has of what all share. */
static void view_keys(const struct pass *p, struct mla_saved *out)
{
    const struct mla_saved *cut = p->mla_cut;
    const struct model_spec *m = p->spec;
    int64_t begin = p->segment->begin;

    out->low = segment_rows(p, cut->low, begin, m->kv_lora_rank);
    out->latent = segment_rows(p, cut->latent, begin, m->kv_lora_rank);
    out->k_rope = segment_rows(p, cut->k_rope, begin, m->qk_rope_dim);
    out->kv_rstd = segment_floats(cut->kv_rstd, begin, 1);
    out->lse = segment_floats(cut->lse, begin, m->heads);
    out->dsa = cut->dsa;
    if (cut->dsa.selected)
        out->dsa.selected = cut->dsa.selected + begin * cut->dsa.columns;
    out->dsa.index_k = segment_rows(p, cut->dsa.index_k, begin, m->index_head_dim);
    out->dsa.later = segment_floats(cut->dsa.later, begin, m->kv_lora_rank + m->qk_rope_dim);
    out->dsa.index_later = segment_floats(cut->dsa.index_later, begin, m->index_head_dim);
}

void mla_carve(struct pass *p, enum carve what, struct mla_saved *out)
{
    if (what != CARVE_AGAIN)
        *out = (struct mla_saved){0};
    if (p->segment)
        view_keys(p, out);
    else
        carve_keys(p, what, out);
    carve_queries(p, what, out);
}

/* What comes from the hidden width. */
static void project(struct pass *p, const struct unit_view *u, const struct widths *w,
                    struct mla_saved *s)
{
    int64_t hidden = p->spec->hidden;

    if (p->spec->q_lora_rank)
        linear_forward(p, u, ROLE_MLA_Q_A, s->q_low, s->x, hidden, p->spec->q_lora_rank, 0);
    else
        linear_forward(p, u, ROLE_MLA_Q, s->q, s->x, hidden, w->q, 0);
    linear_rows_forward(p, u, ROLE_MLA_KV_A, s->low, s->x, hidden, 0, w->latent, 0);
    linear_rows_forward(p, u, ROLE_MLA_KV_A, s->k_rope, s->x, hidden, w->latent, w->rope, 0);
    if (!p->spec->attention_bias)
        return;
    if (p->spec->q_lora_rank)
        linear_bias_forward(p, u, ROLE_MLA_Q_A_BIAS, s->q_low, 0, p->spec->q_lora_rank);
    linear_bias_forward(p, u, ROLE_MLA_KV_A_BIAS, s->low, 0, w->latent);
    linear_bias_forward(p, u, ROLE_MLA_KV_A_BIAS, s->k_rope, w->latent, w->rope);
}

/* What comes from that: latents, and queries where they have one. */
static void expand(struct pass *p, const struct unit_view *u, const struct widths *w,
                   struct mla_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;

    ops->rms_norm(p->dev, s->latent, s->kv_rstd, s->low, weight_of(u, ROLE_MLA_KV_A_NORM), p->n,
                  w->latent, m->latent_norm_eps);
    if (!m->q_lora_rank)
        return;
    ops->rms_norm(p->dev, s->q_latent, s->q_rstd, s->q_low, weight_of(u, ROLE_MLA_Q_A_NORM), p->n,
                  m->q_lora_rank, m->latent_norm_eps);
    linear_forward(p, u, ROLE_MLA_Q_B, s->q, s->q_latent, m->q_lora_rank, w->q, 0);
    turn_q(p, s->q);
}

static void expand_kv(struct pass *p, const struct unit_view *u, const struct widths *w,
                      struct mla_saved *s)
{
    linear_forward(p, u, ROLE_MLA_KV_B, s->kv, s->latent, w->latent, w->kv, 0);
}

/* The expanded form: o from q, the latent and k_rope over all keys. */
static void attend_densely(struct pass *p, const struct unit_view *u, const struct widths *w,
                           struct mla_saved *s)
{
    struct attention_shape shape = shape_of(p);

    expand_kv(p, u, w, s);
    p->dev->ops->attention(p->dev, s->o, s->lse, s->q, s->kv, s->k_rope, w->rope, &shape);
}

static struct dsa_inputs dsa_inputs_of(const struct pass *p, const struct mla_saved *s)
{
    return (struct dsa_inputs){ s->x, s->q_latent, s->q, s->latent, s->k_rope,
                                score_scale(p->spec) };
}

/* All that does not look at other tokens. */
static void prepare(struct pass *p, const struct unit_view *u, const struct widths *w,
                    struct mla_saved *s)
{
    project(p, u, w, s);
    turn_k(p, s->k_rope);
    if (!p->spec->q_lora_rank)
        turn_q(p, s->q);
    expand(p, u, w, s);
}

void mla_layer_forward(struct pass *p, const struct unit_view *u, const elem *x, elem *y,
                       float beta, struct mla_saved *s)
{
    const struct model_spec *m = p->spec;
    struct widths w = widths_of(m);

    s->x = x;
    if (p->act->failed)
        return;
    prepare(p, u, &w, s);
    struct dsa_inputs in = dsa_inputs_of(p, s);
    if (is_sparse(p))
        dsa_forward(p, u, &in, s->o, s->lse, &s->dsa);
    else
        attend_densely(p, u, &w, s);
    if (p->index_stage != INDEX_FROZEN && !p->act->failed)
        dsa_learn(p, u, &in, s->kv, s->lse, &s->dsa);
    if (m->mla_output_gate) {
        linear_forward(p, u, ROLE_MLA_G, s->gate, x, m->hidden, w.o, 0);
        p->dev->ops->sigmoid_gate(p->dev, s->gated, s->o, s->gate, p->n * w.o);
    }
    if (!y)
        return;
    linear_forward(p, u, ROLE_MLA_O, y, m->mla_output_gate ? s->gated : s->o, w.o, m->hidden,
                   beta);
    if (m->attention_bias)
        linear_bias_forward(p, u, ROLE_MLA_O_BIAS, y, 0, m->hidden);
}

void mla_layer_again(struct pass *p, const struct unit_view *u, const elem *x,
                     struct mla_saved *s)
{
    struct widths w = widths_of(p->spec);

    s->x = x;
    if (p->act->failed)
        return;
    expand(p, u, &w, s);
    struct dsa_inputs in = dsa_inputs_of(p, s);
    if (is_sparse(p))
        dsa_again(p, u, &in, s->o, &s->dsa);
    else
        expand_kv(p, u, &w, s);
    if (p->spec->mla_output_gate)
        p->dev->ops->sigmoid_gate(p->dev, s->gated, s->o, s->gate, p->n * w.o);
}

struct scratch {
    elem *d_gated, *d_o, *d_gate;  /* (n, heads * v); d_gated is d_o without a gate */
    elem *d_q, *d_kv, *d_k_rope;
    elem *d_q_latent, *d_o_latent; /* (n, heads, kv_lora_rank), with an indexer only */
    elem *d_latent, *d_low;        /* (n, the wider of the two latents) */
};

static void carve_scratch(struct pass *p, const struct widths *w, struct scratch *b)
{
    int64_t q_low = p->spec->q_lora_rank, low = q_low > w->latent ? q_low : w->latent;

    b->d_o = b->d_gated = activations_take(p->act, p->n * w->o);
    if (p->spec->mla_output_gate) {
        b->d_gated = activations_take(p->act, p->n * w->o);
        b->d_gate = activations_take(p->act, p->n * w->o);
    }
    b->d_q = activations_take(p->act, p->n * w->q);
    if (is_sparse(p)) {
        b->d_q_latent = activations_take(p->act, p->n * p->spec->heads * w->latent);
        b->d_o_latent = activations_take(p->act, p->n * p->spec->heads * w->latent);
    } else {
        b->d_kv = activations_take(p->act, p->n * w->kv);
    }
    b->d_k_rope = activations_take(p->act, p->n * w->rope);
    b->d_latent = activations_take(p->act, p->n * low);
    b->d_low = activations_take(p->act, p->n * low);
}

/* dx += */
static void backward_q(struct pass *p, const struct unit_view *u, const struct widths *w,
                       struct scratch *b, elem *dx, const struct mla_saved *s)
{
    const struct model_spec *m = p->spec;

    if (!m->q_lora_rank) {
        linear_backward(p, u, ROLE_MLA_Q, dx, 1, b->d_q, s->x, m->hidden, w->q);
        return;
    }
    linear_backward(p, u, ROLE_MLA_Q_B, b->d_latent, 0, b->d_q, s->q_latent, m->q_lora_rank, w->q);
    p->dev->ops->rms_norm_backward(p->dev, b->d_low, gradient_of(u, ROLE_MLA_Q_A_NORM),
                                   b->d_latent, s->q_low, weight_of(u, ROLE_MLA_Q_A_NORM),
                                   s->q_rstd, p->n, m->q_lora_rank, 0);
    linear_backward(p, u, ROLE_MLA_Q_A, dx, 1, b->d_low, s->x, m->hidden, m->q_lora_rank);
    if (m->attention_bias)
        linear_bias_backward(p, u, ROLE_MLA_Q_A_BIAS, b->d_low, 0, m->q_lora_rank);
}

/* dx = */
static void backward_kv(struct pass *p, const struct unit_view *u, const struct widths *w,
                        struct scratch *b, elem *dx, const struct mla_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    int64_t hidden = p->spec->hidden;

    ops->rms_norm_backward(p->dev, b->d_low, gradient_of(u, ROLE_MLA_KV_A_NORM), b->d_latent,
                           s->low, weight_of(u, ROLE_MLA_KV_A_NORM), s->kv_rstd, p->n, w->latent,
                           0);
    linear_rows_backward(p, u, ROLE_MLA_KV_A, dx, 0, b->d_low, s->x, hidden, 0, w->latent);
    linear_rows_backward(p, u, ROLE_MLA_KV_A, dx, 1, b->d_k_rope, s->x, hidden, w->latent, w->rope);
    if (p->spec->attention_bias) {
        linear_bias_backward(p, u, ROLE_MLA_KV_A_BIAS, b->d_low, 0, w->latent);
        linear_bias_backward(p, u, ROLE_MLA_KV_A_BIAS, b->d_k_rope, w->latent, w->rope);
    }
}

/* d_q, d_latent and d_k_rope from d_o. */
static void attend_backward(struct pass *p, const struct unit_view *u, const struct widths *w,
                            struct scratch *b, const struct mla_saved *s)
{
    struct attention_shape shape = shape_of(p);

    if (is_sparse(p)) {
        struct dsa_inputs in = dsa_inputs_of(p, s);
        struct dsa_gradients d = { b->d_q_latent, b->d_o_latent, b->d_q, b->d_latent, b->d_k_rope };
        dsa_backward(p, u, &in, b->d_o, s->lse, &d, &s->dsa);
        return;
    }
    p->dev->ops->attention_backward(p->dev, b->d_q, b->d_kv, b->d_k_rope, w->rope, b->d_o, s->o,
                                    s->lse, s->q, s->kv, s->k_rope, w->rope, &shape);
    linear_backward(p, u, ROLE_MLA_KV_B, b->d_latent, 0, b->d_kv, s->latent, w->latent, w->kv);
}

void mla_layer_backward(struct pass *p, const struct unit_view *u, const elem *dy, elem *dx,
                        const struct mla_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    struct activations_mark mark = activations_mark(p->act);
    struct widths w = widths_of(m);
    struct scratch b = {0};

    carve_scratch(p, &w, &b);
    if (!b.d_low) /* the last one taken */
        goto out;
    linear_backward(p, u, ROLE_MLA_O, b.d_gated, 0, dy, m->mla_output_gate ? s->gated : s->o, w.o,
                    m->hidden);
    if (m->attention_bias)
        linear_bias_backward(p, u, ROLE_MLA_O_BIAS, dy, 0, m->hidden);
    if (m->mla_output_gate)
        ops->sigmoid_gate_backward(p->dev, b.d_o, b.d_gate, b.d_gated, s->o, s->gate, p->n * w.o);
    attend_backward(p, u, &w, &b, s);
    turn_back(p, b.d_q, b.d_k_rope);
    backward_kv(p, u, &w, &b, dx, s);
    backward_q(p, u, &w, &b, dx, s);
    if (m->mla_output_gate)
        linear_backward(p, u, ROLE_MLA_G, dx, 1, b.d_gate, s->x, m->hidden, w.o);
out:
    activations_release(p->act, mark);
}

/* ---- in segments ---------------------------------------------------------------------------- */

void mla_cut_carve(struct pass *p, struct mla_saved *out)
{
    *out = (struct mla_saved){0};
    carve_keys(p, CARVE_ALL, out);
    out->dsa.index_k = activations_take(p->act, p->n * p->spec->index_head_dim);
}

/* (n, width); 0. */
static float *take_sums(struct pass *p, int64_t width)
{
    float *sums = activations_take_f32(p->act, p->n * width);

    if (sums)
        p->dev->ops->zero(p->dev, sums, (size_t)(p->n * width) * sizeof *sums);
    return sums;
}

void mla_cut_carve_backward(struct pass *p, struct mla_saved *cut)
{
    cut->dsa.is_chosen = true;
    cut->dsa.later = take_sums(p, p->spec->kv_lora_rank + p->spec->qk_rope_dim);
}

void mla_cut_carve_learning(struct pass *p, struct mla_saved *cut)
{
    cut->dsa.is_chosen = true;
    cut->dsa.index_later = take_sums(p, p->spec->index_head_dim);
}

void mla_layer_learn(struct pass *p, const struct unit_view *u, const elem *x,
                     struct mla_saved *s)
{
    struct widths w = widths_of(p->spec);

    s->x = x;
    if (p->act->failed)
        return;
    prepare(p, u, &w, s);
    struct dsa_inputs in = dsa_inputs_of(p, s);
    dsa_turn_queries(p, u, &in, &s->dsa);
    dsa_learn(p, u, &in, NULL, s->lse, &s->dsa);
}
