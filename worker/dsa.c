/* dsa.c - the indexer's choice, absorbed attention over it, and the same backwards */
#include "worker/dsa.h"

#include <math.h>

/* kv_b holds, per head, nope rows that make keys and then v rows that make values. */
struct heads {
    int32_t n;
    int64_t nope, rope, v, latent;
    int64_t q_stride, w_stride; /* from head to head: of queries, of kv_b */
};

static struct heads heads_of(const struct model_spec *m)
{
    return (struct heads){
        .n = (int32_t)m->heads,
        .nope = m->qk_nope_dim,
        .rope = m->qk_rope_dim,
        .v = m->v_dim,
        .latent = m->kv_lora_rank,
        .q_stride = m->qk_nope_dim + m->qk_rope_dim,
        .w_stride = (int64_t)(m->qk_nope_dim + m->v_dim) * m->kv_lora_rank,
    };
}

/* No more than there are tokens, and one where there are none. */
static int32_t columns_of(const struct pass *p)
{
    int64_t n = p->n < p->spec->index_top_k ? p->n : p->spec->index_top_k;
    return n > 0 ? (int32_t)n : 1;
}

static struct sparse_shape shape_of(const struct pass *p, float scale, int32_t columns)
{
    return (struct sparse_shape){
        .n_tokens = p->n,
        .n_heads = (int32_t)p->spec->heads,
        .latent_dim = (int32_t)p->spec->kv_lora_rank,
        .rope_dim = (int32_t)p->spec->qk_rope_dim,
        .scale = scale,
        .top_k = columns,
    };
}

void dsa_carve(struct pass *p, struct dsa_saved *out)
{
    int64_t wide = p->n * p->spec->heads * p->spec->kv_lora_rank;

    out->columns = columns_of(p);
    out->selected = (int32_t *)activations_take(p->act, p->n * out->columns);
    out->q_latent = activations_take(p->act, wide);
    out->o_latent = activations_take(p->act, wide);
}

/* ---- the indexer ---------------------------------------------------------------------------- */

struct index {
    float *q, *k_raw, *k, *k_stats, *w; /* (n, heads, d), (n, d) twice, (n, 2), (n, heads) */
};

static void carve_index(struct pass *p, struct index *out)
{
    int64_t d = p->spec->index_head_dim, h = p->spec->index_heads;

    out->q = activations_take(p->act, p->n * h * d);
    out->k_raw = activations_take(p->act, p->n * d);
    out->k = activations_take(p->act, p->n * d);
    out->k_stats = activations_take(p->act, p->n * 2);
    out->w = activations_take(p->act, p->n * h);
}

/* The first dims of queries and key turn with their positions. */
static void turn(struct pass *p, struct index *i)
{
    const struct model_spec *m = p->spec;
    struct rotary_shape shape = {
        .n_tokens = p->n, .cu_seqlens = p->cu_seqlens, .n_docs = p->n_docs,
        .dim = (int32_t)m->rotary.dim, .interleaved = m->index_rotary_interleaved,
    };

    if (!m->mla_rotary)
        return;
    p->dev->ops->rotary(p->dev, i->q, (int32_t)m->index_heads, m->index_head_dim, p->rotary,
                        &shape);
    p->dev->ops->rotary(p->dev, i->k, 1, m->index_head_dim, p->rotary, &shape);
}

static void choose(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                   struct dsa_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->index_head_dim, h = m->index_heads;
    struct activations_mark mark = activations_mark(p->act);
    struct index i;
    struct index_shape shape = {
        .n_tokens = p->n, .cu_seqlens = p->cu_seqlens, .n_docs = p->n_docs,
        .n_heads = (int32_t)h, .head_dim = (int32_t)d, .scale = 1 / sqrtf((float)(h * d)),
        .top_k = s->columns,
    };

    carve_index(p, &i);
    if (!i.w) /* the last one taken */
        goto out;
    ops->linear(p->dev, i.q, in->cq, weight_of(u, ROLE_INDEX_Q), p->n, m->q_lora_rank, h * d, 0);
    ops->linear(p->dev, i.k_raw, in->x, weight_of(u, ROLE_INDEX_K), p->n, m->hidden, d, 0);
    ops->layer_norm(p->dev, i.k, i.k_stats, i.k_raw, weight_of(u, ROLE_INDEX_K_NORM),
                    weight_of(u, ROLE_INDEX_K_NORM_BIAS), p->n, d, m->index_norm_eps);
    turn(p, &i);
    ops->linear(p->dev, i.w, in->x, weight_of(u, ROLE_INDEX_WEIGHTS), p->n, m->hidden, h, 0);
    ops->index_select(p->dev, s->selected, i.q, i.k, i.w, &shape);
out:
    activations_release(p->act, mark);
}

/* ---- the core ------------------------------------------------------------------------------- */

void dsa_forward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in, float *o,
                 float *lse, struct dsa_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    struct heads h = heads_of(p->spec);
    struct sparse_shape shape = shape_of(p, in->scale, s->columns);
    const float *k_rows = weight_of(u, ROLE_MLA_KV_B), *v_rows = k_rows + h.nope * h.latent;

    choose(p, u, in, s);
    if (p->act->failed)
        return;
    ops->heads_linear_dx(p->dev, s->q_latent, h.latent, in->q, h.q_stride, k_rows, h.w_stride,
                         p->n, h.n, h.latent, h.nope, 0);
    ops->sparse_attention(p->dev, s->o_latent, lse, s->q_latent, in->q + h.nope, h.q_stride,
                          in->latent, in->k_rope, h.rope, s->selected, &shape);
    ops->heads_linear(p->dev, o, h.v, s->o_latent, h.latent, v_rows, h.w_stride, p->n, h.n,
                      h.latent, h.v, 0);
}

void dsa_backward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                  const float *d_o, const float *lse, struct dsa_gradients *d,
                  const struct dsa_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    struct heads h = heads_of(p->spec);
    struct sparse_shape shape = shape_of(p, in->scale, s->columns);
    const float *k_rows = weight_of(u, ROLE_MLA_KV_B), *v_rows = k_rows + h.nope * h.latent;
    float *d_k_rows = gradient_of(u, ROLE_MLA_KV_B), *d_v_rows = d_k_rows + h.nope * h.latent;

    ops->heads_linear_dx(p->dev, d->o_latent, h.latent, d_o, h.v, v_rows, h.w_stride, p->n, h.n,
                         h.latent, h.v, 0);
    ops->heads_linear_dw(p->dev, d_v_rows, h.w_stride, d_o, h.v, s->o_latent, h.latent, p->n, h.n,
                         h.latent, h.v);
    ops->sparse_attention_backward(p->dev, d->q_latent, d->q + h.nope, h.q_stride, d->latent,
                                   d->k_rope, h.rope, d->o_latent, s->o_latent, lse, s->q_latent,
                                   in->q + h.nope, h.q_stride, in->latent, in->k_rope, h.rope,
                                   s->selected, &shape);
    ops->heads_linear(p->dev, d->q, h.q_stride, d->q_latent, h.latent, k_rows, h.w_stride, p->n,
                      h.n, h.latent, h.nope, 0);
    ops->heads_linear_dw(p->dev, d_k_rows, h.w_stride, in->q, h.q_stride, d->q_latent, h.latent,
                         p->n, h.n, h.latent, h.nope);
}
