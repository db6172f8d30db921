/* decoder.c - mixes, norms and sublayers of one decoder layer, forward and backward */
#include "worker/decoder.h"

#include "kernels/spans.h"
#include "worker/phases.h"

#define MIXES(m) ((m)->residual == RESIDUAL_ATTN_RES)

uint32_t bank_rows_attention(const struct model_spec *m, uint32_t l)
{
    return MIXES(m) && l ? (l - 1) / m->attn_res_block + 1 : 0;
}

static uint32_t bank_rows_mlp(const struct model_spec *m, uint32_t l)
{
    return MIXES(m) ? l / m->attn_res_block + 1 : 0;
}

static bool starts_block(const struct model_spec *m, uint32_t l)
{
    return MIXES(m) && l % m->attn_res_block == 0;
}

static int32_t gather_rows(const struct pass *p, struct residuals *r, const struct mix *mix)
{
    for (uint32_t b = 0; b < mix->n_bank; b++)
        r->rows[b] = r->p[b * p->spec->attn_res_block];
    r->rows[mix->n_bank] = mix->p;
    return (int32_t)mix->n_bank + 1;
}

void mix_forward(struct pass *p, const struct unit_view *u, struct residuals *r,
                 const struct mix *mix, elem *y)
{
    int32_t n_rows = gather_rows(p, r, mix);

    p->dev->ops->attn_res(p->dev, y, mix->weights, r->rows, n_rows, weight_of(u, mix->norm),
                          weight_of(u, mix->proj), p->n, p->spec->hidden, p->spec->norm_eps);
}

void mix_backward(struct pass *p, const struct unit_view *u, struct residuals *r,
                  const struct mix *mix, const elem *dy, elem *d_p)
{
    int32_t n_rows = gather_rows(p, r, mix);

    for (uint32_t b = 0; b < mix->n_bank; b++)
        r->d_rows[b] = r->d_bank[b];
    r->d_rows[mix->n_bank] = d_p;
    p->dev->ops->attn_res_backward(p->dev, r->d_rows, gradient_of(u, mix->norm),
                                   gradient_of(u, mix->proj), dy, r->rows, mix->weights, n_rows,
                                   weight_of(u, mix->norm), weight_of(u, mix->proj), p->n,
                                   p->spec->hidden, p->spec->norm_eps);
}

/* ---- memory --------------------------------------------------------------------------------- */

/* Before a sublayer: its input, mixed where there is a bank, and normed. */
static void carve_input(struct pass *p, struct mix *mix, elem **mixed, float **rstd, elem **x)
{
    if (mix->n_bank) {
        mix->weights = activations_take_f32(p->act, p->n * (mix->n_bank + 1));
        *mixed = activations_take(p->act, p->n * p->spec->hidden);
    }
    *rstd = activations_take_f32(p->act, p->n);
    *x = activations_take(p->act, p->n * p->spec->hidden);
}

static void carve_attention(struct pass *p, uint32_t l, enum carve what, struct decoder_saved *s)
{
    if (what != CARVE_KEPT)
        carve_input(p, &s->attention_mix, &s->h, &s->h_rstd, &s->x);
    if (p->spec->layers[l].attention == ATTENTION_KDA)
        kda_carve(p, what, &s->kda);
    else
        mla_carve(p, what, &s->mla);
}

static void carve_feed_forward(struct pass *p, const struct moe *e, uint32_t l, enum carve what,
                               struct decoder_saved *s)
{
    struct mlp_shape dense = mlp_dense_shape(p->spec);

    if (what != CARVE_KEPT)
        carve_input(p, &s->mlp_mix, &s->m, &s->m_rstd, &s->y);
    if (p->spec->layers[l].mlp == MLP_MOE)
        moe_carve(p, e, what, &s->moe);
    else if (what != CARVE_KEPT)
        mlp_carve(p, &dense, &s->mlp);
}

static struct decoder_saved begin_saved(const struct pass *p, uint32_t l, enum carve what)
{
    return (struct decoder_saved){
        .makes_again = what == CARVE_KEPT,
        .mark = activations_mark(p->act),
        .attention_mix = { ROLE_ATTN_RES_NORM, ROLE_ATTN_RES_PROJ,
                           .n_bank = bank_rows_attention(p->spec, l) },
        .mlp_mix = { ROLE_MLP_RES_NORM, ROLE_MLP_RES_PROJ, .n_bank = bank_rows_mlp(p->spec, l) },
    };
}

void decoder_carve(struct pass *p, const struct moe *e, uint32_t l, enum carve what,
                   struct decoder_saved *out)
{
    *out = begin_saved(p, l, what);
    carve_attention(p, l, what, out);
    out->mid = activations_take(p->act, p->n * p->spec->hidden);
    carve_feed_forward(p, e, l, what, out);
}

static void again_attention(struct pass *p, uint32_t l, struct decoder_saved *s)
{
    if (s->makes_again)
        carve_attention(p, l, CARVE_AGAIN, s);
}

static void again_feed_forward(struct pass *p, const struct moe *e, uint32_t l,
                               struct decoder_saved *s)
{
    if (s->makes_again)
        carve_feed_forward(p, e, l, CARVE_AGAIN, s);
}

/* Gives back what is made again; what all keep stays. */
static void drop_again(struct pass *p, struct decoder_saved *s, struct activations_mark mark)
{
    if (!s->makes_again)
        return;
    moe_drop(&s->moe);
    activations_release(p->act, mark);
}

void decoder_count_forward(struct pass *p, const struct moe *e, uint32_t l, enum carve what,
                           struct decoder_saved *out)
{
    const struct model_spec *m = p->spec;

    decoder_carve(p, e, l, what, out);
    struct activations_mark mark = activations_mark(p->act);
    again_attention(p, l, out);
    if (m->layers[l].attention == ATTENTION_KDA)
        kda_layer_forward(p, NULL, NULL, NULL, 0, &out->kda);
    else if (m->index_top_k)
        dsa_count_forward(p);
    drop_again(p, out, mark);
    again_feed_forward(p, e, l, out);
    if (m->layers[l].mlp == MLP_MOE)
        moe_count_forward(p, e);
    drop_again(p, out, mark);
}

void decoder_count_backward(struct pass *p, const struct moe *e, uint32_t l,
                            struct decoder_saved *s)
{
    const struct model_spec *m = p->spec;
    struct mlp_shape dense = mlp_dense_shape(m);
    struct activations_mark mark = activations_mark(p->act);

    activations_take(p->act, p->n * m->hidden); /* where dx goes */
    struct activations_mark before = activations_mark(p->act);
    again_feed_forward(p, e, l, s);
    if (m->layers[l].mlp == MLP_MOE)
        moe_count_backward(p, e, s->makes_again);
    else
        mlp_backward(p, NULL, &dense, NULL, NULL, 0, &s->mlp);
    drop_again(p, s, before);
    again_attention(p, l, s);
    if (m->layers[l].attention == ATTENTION_KDA)
        kda_layer_backward(p, NULL, NULL, NULL, &s->kda);
    else
        mla_layer_backward(p, NULL, NULL, NULL, &s->mla);
    activations_release(p->act, mark);
}

/* ---- forward -------------------------------------------------------------------------------- */

/* Mixes into h where there is a bank, then norms. */
static void enter(struct pass *p, const struct unit_view *u, struct residuals *r, struct mix *mix,
                  const elem *sum, elem *h, enum tensor_role norm, elem *x, float *rstd)
{
    mix->p = sum;
    if (h)
        mix_forward(p, u, r, mix, h);
    p->dev->ops->rms_norm(p->dev, x, rstd, h ? h : sum, weight_of(u, norm), p->n, p->spec->hidden,
                          p->spec->norm_eps);
}

static enum phase attention_phase(const struct model_spec *m, uint32_t l)
{
    return m->layers[l].attention == ATTENTION_KDA ? PHASE_KDA : PHASE_MLA;
}

static enum phase feed_forward_phase(const struct model_spec *m, uint32_t l)
{
    return m->layers[l].mlp == MLP_MOE ? PHASE_MOE : PHASE_MLP;
}

int decoder_forward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                    struct residuals *r, elem *out, struct decoder_saved *s, struct err *err)
{
    const struct model_spec *m = p->spec;
    size_t bytes = (size_t)p->n * m->hidden * elem_size(p->dev);
    struct activations_mark mark = activations_mark(p->act);
    float beta = starts_block(m, l) ? 0 : 1;
    int rc;

    again_attention(p, l, s);
    if ((rc = activations_check(p->act, err)) < 0)
        return rc;
    enter(p, u, r, &s->attention_mix, r->p[l], s->h, ROLE_ATTN_NORM, s->x, s->h_rstd);
    if (beta != 0)
        p->dev->ops->copy(p->dev, s->mid, r->p[l], bytes);
    spans_begin(p->dev, attention_phase(m, l), (int32_t)l);
    if (m->layers[l].attention == ATTENTION_KDA)
        kda_layer_forward(p, u, s->x, s->mid, beta, &s->kda);
    else
        mla_layer_forward(p, u, s->x, s->mid, beta, &s->mla);
    spans_end(p->dev);
    drop_again(p, s, mark);
    again_feed_forward(p, e, l, s);
    if ((rc = activations_check(p->act, err)) < 0)
        return rc;

    enter(p, u, r, &s->mlp_mix, s->mid, s->m, ROLE_MLP_NORM, s->y, s->m_rstd);
    if (out)
        p->dev->ops->copy(p->dev, out, s->mid, bytes);
    struct mlp_shape dense = mlp_dense_shape(m);
    spans_begin(p->dev, feed_forward_phase(m, l), (int32_t)l);
    if (m->layers[l].mlp == MLP_MOE)
        rc = moe_forward(p, e, l, u, s->y, out, &s->moe, err);
    else
        mlp_forward(p, u, &dense, s->y, out, &s->mlp);
    spans_end(p->dev);
    drop_again(p, s, mark);
    return rc;
}

int decoder_learn(struct pass *p, uint32_t l, const struct unit_view *u, struct residuals *r,
                  struct err *err)
{
    struct decoder_saved s = begin_saved(p, l, CARVE_ALL);
    int rc;

    carve_attention(p, l, CARVE_ALL, &s);
    if ((rc = activations_check(p->act, err)) < 0)
        return rc;
    enter(p, u, r, &s.attention_mix, r->p[l], s.h, ROLE_ATTN_NORM, s.x, s.h_rstd);
    spans_begin(p->dev, attention_phase(p->spec, l), (int32_t)l);
    mla_layer_learn(p, u, s.x, &s.mla);
    spans_end(p->dev);
    return activations_check(p->act, err);
}

/* ---- again ---------------------------------------------------------------------------------- */

static int attention_again(struct pass *p, uint32_t l, const struct unit_view *u,
                           struct residuals *r, struct decoder_saved *s, struct err *err)
{
    int rc;

    again_attention(p, l, s);
    if ((rc = activations_check(p->act, err)) < 0 || !s->makes_again)
        return rc;
    enter(p, u, r, &s->attention_mix, r->p[l], s->h, ROLE_ATTN_NORM, s->x, s->h_rstd);
    spans_begin(p->dev, attention_phase(p->spec, l), (int32_t)l);
    if (p->spec->layers[l].attention == ATTENTION_KDA)
        kda_layer_again(p, u, s->x, &s->kda);
    else
        mla_layer_again(p, u, s->x, &s->mla);
    spans_end(p->dev);
    return activations_check(p->act, err);
}

static int feed_forward_again(struct pass *p, struct moe *e, uint32_t l,
                              const struct unit_view *u, struct residuals *r,
                              struct decoder_saved *s, struct err *err)
{
    struct mlp_shape dense = mlp_dense_shape(p->spec);
    int rc;

    again_feed_forward(p, e, l, s);
    if ((rc = activations_check(p->act, err)) < 0 || !s->makes_again)
        return rc;
    enter(p, u, r, &s->mlp_mix, s->mid, s->m, ROLE_MLP_NORM, s->y, s->m_rstd);
    spans_begin(p->dev, feed_forward_phase(p->spec, l), (int32_t)l);
    if (p->spec->layers[l].mlp == MLP_MOE)
        rc = moe_again(p, e, l, u, s->y, &s->moe, err);
    else
        mlp_forward(p, u, &dense, s->y, NULL, &s->mlp);
    spans_end(p->dev);
    return rc;
}

/* ---- backward ------------------------------------------------------------------------------- */

/* The backward of enter: dx is the normed input's gradient; d_p gets its part added. */
static int leave(struct pass *p, const struct unit_view *u, struct residuals *r,
                 const struct mix *mix, const elem *h, enum tensor_role norm, const float *rstd,
                 const elem *dx, elem *d_p, struct err *err)
{
    struct activations_mark mark = activations_mark(p->act);
    elem *d_h = d_p;
    int rc = 0;

    if (h)
        d_h = activations_take(p->act, p->n * p->spec->hidden);
    if (d_h) {
        p->dev->ops->rms_norm_backward(p->dev, d_h, gradient_of(u, norm), dx, h ? h : mix->p,
                                       weight_of(u, norm), rstd, p->n, p->spec->hidden, h ? 0 : 1);
        if (h)
            mix_backward(p, u, r, mix, d_h, d_p);
    } else {
        rc = activations_check(p->act, err);
    }
    activations_release(p->act, mark);
    return rc;
}

static int feed_forward_backward(struct pass *p, struct moe *e, uint32_t l,
                                 const struct unit_view *u, const elem *dy, elem *dx,
                                 struct decoder_saved *s, struct err *err)
{
    struct mlp_shape dense = mlp_dense_shape(p->spec);
    int rc = 0;

    spans_begin(p->dev, feed_forward_phase(p->spec, l), (int32_t)l);
    if (p->spec->layers[l].mlp == MLP_MOE)
        rc = moe_backward(p, e, l, u, dy, dx, &s->moe, err);
    else
        mlp_backward(p, u, &dense, dy, dx, 0, &s->mlp);
    spans_end(p->dev);
    return rc < 0 ? rc : activations_check(p->act, err);
}

static int attention_backward(struct pass *p, uint32_t l, const struct unit_view *u,
                              const elem *dy, elem *dx, const struct decoder_saved *s,
                              struct err *err)
{
    spans_begin(p->dev, attention_phase(p->spec, l), (int32_t)l);
    if (p->spec->layers[l].attention == ATTENTION_KDA)
        kda_layer_backward(p, u, dy, dx, &s->kda);
    else
        mla_layer_backward(p, u, dy, dx, &s->mla);
    spans_end(p->dev);
    return activations_check(p->act, err);
}

void decoder_pass_on(const struct model_spec *m, uint32_t l, struct residuals *r)
{
    /* A block's first layer began a new sum: what flows on is the gradient of the row it pushed,
     * gathered from all later mixes. */
    if (starts_block(m, l))
        r->d_p = r->d_bank[l / m->attn_res_block];
}

int decoder_backward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                     struct residuals *r, struct decoder_saved *s, struct err *err)
{
    const struct model_spec *m = p->spec;
    struct activations_mark mark = activations_mark(p->act);
    elem *dx = activations_take(p->act, p->n * m->hidden);
    struct activations_mark before = activations_mark(p->act);
    int rc;

    if ((rc = feed_forward_again(p, e, l, u, r, s, err)) < 0 ||
        (rc = feed_forward_backward(p, e, l, u, r->d_p, dx, s, err)) < 0 ||
        (rc = leave(p, u, r, &s->mlp_mix, s->m, ROLE_MLP_NORM, s->m_rstd, dx, r->d_p, err)) < 0)
        goto out;
    drop_again(p, s, before);
    if ((rc = attention_again(p, l, u, r, s, err)) < 0 ||
        (rc = attention_backward(p, l, u, r->d_p, dx, s, err)) < 0)
        goto out;
    decoder_pass_on(m, l, r);
    rc = leave(p, u, r, &s->attention_mix, s->h, ROLE_ATTN_NORM, s->h_rstd, dx, r->d_p, err);
out:
    moe_drop(&s->moe);
    activations_release(p->act, mark);
    return rc;
}
