/* dsa.c - the indexer's choice, absorbed attention over it, and the same backwards */
#include "worker/dsa.h"

#include <math.h>

#include "worker/linear.h"
#include "worker/lora.h"
#include "worker/segments.h"

/* kv_b holds, per head, nope rows that make keys and then v rows that make values. */
struct heads {
    int32_t n;
    int64_t nope, rope, v, latent;
    int64_t q_stride; /* from head to head */
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
        .n_tokens = rows_before(p) + p->n,
        .first = rows_before(p),
        .n_heads = (int32_t)p->spec->heads,
        .latent_dim = (int32_t)p->spec->kv_lora_rank,
        .rope_dim = (int32_t)p->spec->qk_rope_dim,
        .scale = scale,
        .top_k = columns,
    };
}

/* The first of the rows of keys that are seen; those of the pass begin at x. */
static const elem *all_keys(const struct pass *p, const elem *x, int64_t width)
{
    return const_elem_at(p->dev, x, -rows_before(p) * width);
}

static float *all_sums(const struct pass *p, float *sums, int64_t width)
{
    return sums ? sums - rows_before(p) * width : NULL;
}

void dsa_carve_keys(struct pass *p, enum carve what, struct dsa_saved *out)
{
    out->columns = columns_of(p);
    if (what != CARVE_AGAIN)
        out->selected = activations_take_i32(p->act, p->n * out->columns);
}

void dsa_carve_queries(struct pass *p, enum carve what, struct dsa_saved *out)
{
    int64_t wide = p->n * p->spec->heads * p->spec->kv_lora_rank;

    if (what != CARVE_AGAIN)
        out->o_latent = activations_take(p->act, wide);
    if (what != CARVE_KEPT)
        out->q_latent = activations_take(p->act, wide);
}

/* ---- the indexer ---------------------------------------------------------------------------- */

struct index {
    elem  *q, *k_raw, *k, *w; /* (n, heads, d), (n, d) twice, (n, heads) */
    float *k_stats;           /* (n, 2) */
};

/* k: where the keys go, NULL: to scratch. */
static void carve_index(struct pass *p, elem *k, struct index *out)
{
    int64_t d = p->spec->index_head_dim, h = p->spec->index_heads;

    out->q = activations_take(p->act, p->n * h * d);
    out->k_raw = activations_take(p->act, p->n * d);
    out->k = k ? k : activations_take(p->act, p->n * d);
    out->k_stats = activations_take_f32(p->act, p->n * 2);
    out->w = activations_take(p->act, p->n * h);
}

typedef void (*turn_fn)(struct device *dev, elem_ptr x, int32_t n_heads, int64_t stride,
                        const float *table, const struct rotary_shape *shape);

void dsa_count_forward(struct pass *p)
{
    struct activations_mark mark = activations_mark(p->act);
    struct index i;

    carve_index(p, NULL, &i);
    if (p->index_stage != INDEX_FROZEN) /* where it learns, its gradients beside it */
        carve_index(p, NULL, &i);
    activations_release(p->act, mark);
}

/* The first dims of queries and key, by halves, with their positions or back. */
static void turn(struct pass *p, elem *q, elem *k, turn_fn fn)
{
    const struct model_spec *m = p->spec;
    struct rotary_shape shape = {
        .n_tokens = p->n, .cu_seqlens = position_seqlens(p), .n_docs = p->n_docs,
        .dim = (int32_t)m->rotary.dim,
    };

    if (!m->mla_rotary)
        return;
    fn(p->dev, q, (int32_t)m->index_heads, m->index_head_dim, p->rotary, &shape);
    fn(p->dev, k, 1, m->index_head_dim, p->rotary, &shape);
}

static struct index_shape index_shape_of(const struct pass *p, int32_t columns)
{
    const struct model_spec *m = p->spec;
    return (struct index_shape){
        .n_tokens = rows_before(p) + p->n, .first = rows_before(p),
        .cu_seqlens = key_seqlens(p), .n_docs = p->n_docs,
        .n_heads = (int32_t)m->index_heads, .head_dim = (int32_t)m->index_head_dim,
        .scale = 1 / sqrtf((float)m->index_heads * (float)m->index_head_dim), .top_k = columns,
    };
}

static void project(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                    struct index *i)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->index_head_dim, h = m->index_heads;

    linear_forward(p, u, ROLE_INDEX_Q, i->q, in->cq, m->q_lora_rank, h * d, 0);
    linear_forward(p, u, ROLE_INDEX_K, i->k_raw, in->x, m->hidden, d, 0);
    ops->layer_norm(p->dev, i->k, i->k_stats, i->k_raw, weight_of(u, ROLE_INDEX_K_NORM),
                    weight_of(u, ROLE_INDEX_K_NORM_BIAS), p->n, d, m->index_norm_eps);
    turn(p, i->q, i->k, p->dev->ops->rotary);
    linear_forward(p, u, ROLE_INDEX_WEIGHTS, i->w, in->x, m->hidden, h, 0);
}

static void choose(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                   struct dsa_saved *s)
{
    struct activations_mark mark = activations_mark(p->act);
    struct index_shape shape = index_shape_of(p, s->columns);
    struct index i;

    carve_index(p, s->index_k, &i);
    if (i.w) { /* the last one taken */
        project(p, u, in, &i);
        p->dev->ops->index_select(p->dev, s->selected, i.q,
                                  all_keys(p, i.k, p->spec->index_head_dim), i.w, &shape);
    }
    activations_release(p->act, mark);
}

/* From the gradients of turned queries, turned key and weights to the parameters'. */
static void index_backward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                           const struct index *i, struct index *d)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t dim = m->index_head_dim, h = m->index_heads;

    turn(p, d->q, d->k, ops->rotary_backward);
    linear_backward(p, u, ROLE_INDEX_Q, NULL, 0, d->q, in->cq, m->q_lora_rank, h * dim);
    ops->layer_norm_backward(p->dev, d->k_raw, gradient_of(u, ROLE_INDEX_K_NORM),
                             gradient_of(u, ROLE_INDEX_K_NORM_BIAS), d->k, i->k_raw,
                             weight_of(u, ROLE_INDEX_K_NORM), i->k_stats, p->n, dim, 0);
    linear_backward(p, u, ROLE_INDEX_K, NULL, 0, d->k_raw, in->x, m->hidden, dim);
    linear_backward(p, u, ROLE_INDEX_WEIGHTS, NULL, 0, d->w, in->x, m->hidden, h);
}

static void divergence(struct pass *p, const struct dsa_inputs *in, const elem *kv,
                       const float *lse, const struct index *i, struct index *d,
                       const struct dsa_saved *s)
{
    struct heads h = heads_of(p->spec);
    struct index_shape index = index_shape_of(p, kv ? columns_of(p) : s->columns);
    struct sparse_shape sparse = shape_of(p, in->scale, s->columns);
    struct attention_shape dense = {
        .n_tokens = p->n, .cu_seqlens = p->cu_seqlens, .n_docs = p->n_docs, .n_heads = h.n,
        .nope_dim = (int32_t)h.nope, .rope_dim = (int32_t)h.rope, .v_dim = (int32_t)h.v,
        .scale = in->scale,
    };
    const elem *q_rope = const_elem_at(p->dev, in->q, h.nope);

    index.later = all_sums(p, s->index_later, index.head_dim);
    if (kv)
        p->dev->ops->index_loss_dense(p->dev, p->acc_index_loss, d->q, d->k, d->w, p->index_weight,
                                      i->q, i->k, i->w, in->q, kv, in->k_rope, h.rope, lse, &index,
                                      &dense);
    else
        p->dev->ops->index_loss(p->dev, p->acc_index_loss, d->q, d->k, d->w, p->index_weight, i->q,
                                all_keys(p, i->k, index.head_dim), i->w, s->selected, s->q_latent,
                                q_rope, h.q_stride, all_keys(p, in->latent, h.latent),
                                all_keys(p, in->k_rope, h.rope), h.rope, lse, &index, &sparse);
}

void dsa_learn(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
               const elem *kv, const float *lse, const struct dsa_saved *s)
{
    struct activations_mark mark = activations_mark(p->act);
    struct index i, d;

    carve_index(p, s->index_k, &i);
    carve_index(p, NULL, &d);
    if (d.w) { /* the last one taken */
        project(p, u, in, &i);
        divergence(p, in, kv, lse, &i, &d, s);
        if (u->gradients)
            index_backward(p, u, in, &i, &d);
    }
    activations_release(p->act, mark);
}

/* ---- the core ------------------------------------------------------------------------------- */

/* The rows of kv_b that make keys, and those that make values. */
static struct lora_heads keys_of(const struct heads *h)
{
    return (struct lora_heads){ ROLE_MLA_KV_B, h->n, h->nope + h->v, 0, h->latent, h->nope };
}

static struct lora_heads values_of(const struct heads *h)
{
    return (struct lora_heads){ ROLE_MLA_KV_B, h->n, h->nope + h->v, h->nope, h->latent, h->v };
}

/* From the first head's first row on. */
static const elem *weight_of_heads(const struct pass *p, const struct unit_view *u,
                                   const struct lora_heads *w)
{
    const elem *all = linear_weight(p, u, w->role, 0, w->in, w->n_heads * w->rows);
    return const_elem_at(p->dev, all, w->first * w->in);
}

/* y (n, heads, rows) = x (n, heads, latent) w^T for each head. */
static void heads_y(const struct pass *p, const struct unit_view *u, const struct lora_heads *w,
                    elem *y, int64_t y_stride, const elem *x)
{
    p->dev->ops->heads_linear(p->dev, y, y_stride, x, w->in,
                              weight_of_heads(p, u, w), w->rows * w->in, p->n,
                              w->n_heads, w->in, w->out, 0);
    if (lora_has(u, w->role))
        lora_heads_y(p, u, w, y, y_stride, x);
}

/* x = y w for each head. */
static void heads_x(const struct pass *p, const struct unit_view *u, const struct lora_heads *w,
                    elem *x, const elem *y, int64_t y_stride)
{
    p->dev->ops->heads_linear_dx(p->dev, x, w->in, y, y_stride,
                                 weight_of_heads(p, u, w), w->rows * w->in, p->n,
                                 w->n_heads, w->in, w->out, 0);
    if (lora_has(u, w->role))
        lora_heads_x(p, u, w, x, y, y_stride);
}

/* dw += y^T x for each head. */
static void heads_gradients(const struct pass *p, const struct unit_view *u,
                            const struct lora_heads *w, const elem *y, int64_t y_stride,
                            const elem *x)
{
    if (unit_trains(u, w->role))
        p->dev->ops->heads_linear_dw(p->dev, gradient_of(u, w->role) + w->first * w->in,
                                     w->rows * w->in, y, y_stride, x, w->in, p->n, w->n_heads,
                                     w->in, w->out);
    if (lora_has(u, w->role))
        lora_heads_gradients(p, u, w, y, y_stride, x);
}

void dsa_turn_queries(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                      struct dsa_saved *s)
{
    struct heads h = heads_of(p->spec);
    struct lora_heads keys = keys_of(&h);

    heads_x(p, u, &keys, s->q_latent, in->q, h.q_stride);
}

void dsa_forward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in, elem *o,
                 float *lse, struct dsa_saved *s)
{
    struct heads h = heads_of(p->spec);
    struct lora_heads values = values_of(&h);
    struct sparse_shape shape = shape_of(p, in->scale, s->columns);
    const elem *q_rope = const_elem_at(p->dev, in->q, h.nope);

    if (!s->is_chosen)
        choose(p, u, in, s);
    if (p->act->failed)
        return;
    dsa_turn_queries(p, u, in, s);
    p->dev->ops->sparse_attention(p->dev, s->o_latent, lse, s->q_latent, q_rope, h.q_stride,
                                  all_keys(p, in->latent, h.latent),
                                  all_keys(p, in->k_rope, h.rope), h.rope, s->selected, &shape);
    heads_y(p, u, &values, o, h.v, s->o_latent);
}

void dsa_again(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in, elem *o,
               struct dsa_saved *s)
{
    struct heads h = heads_of(p->spec);
    struct lora_heads values = values_of(&h);

    dsa_turn_queries(p, u, in, s);
    heads_y(p, u, &values, o, h.v, s->o_latent);
}

void dsa_backward(struct pass *p, const struct unit_view *u, const struct dsa_inputs *in,
                  const elem *d_o, const float *lse, struct dsa_gradients *d,
                  const struct dsa_saved *s)
{
    struct heads h = heads_of(p->spec);
    struct lora_heads keys = keys_of(&h), values = values_of(&h);
    struct sparse_shape shape = shape_of(p, in->scale, s->columns);
    const elem *q_rope = const_elem_at(p->dev, in->q, h.nope);
    elem *dq_rope = elem_at(p->dev, d->q, h.nope);

    shape.later = all_sums(p, s->later, h.latent + h.rope);
    heads_x(p, u, &values, d->o_latent, d_o, h.v);
    heads_gradients(p, u, &values, d_o, h.v, s->o_latent);
    p->dev->ops->sparse_attention_backward(p->dev, d->q_latent, dq_rope, h.q_stride,
                                           d->latent, d->k_rope, h.rope, d->o_latent, s->o_latent,
                                           lse, s->q_latent, q_rope, h.q_stride,
                                           all_keys(p, in->latent, h.latent),
                                           all_keys(p, in->k_rope, h.rope), h.rope, s->selected,
                                           &shape);
    heads_y(p, u, &keys, d->q, h.q_stride, d->q_latent);
    heads_gradients(p, u, &keys, in->q, h.q_stride, d->q_latent);
}
