/* decoder.c - mixes, norms and sublayers of one decoder layer, forward and backward */
#include "worker/decoder.h"

#include "kernels/spans.h"
#include "worker/phases.h"

#define MIXES(m) ((m)->residual == RESIDUAL_ATTN_RES)

uint32_t bank_rows_attention(const struct model_spec *m, uint32_t l)
{
    return MIXES(m) && l ? (l - 1) / m->attn_res_block + 1 : 0;
}

uint32_t bank_rows_mlp(const struct model_spec *m, uint32_t l)
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

static void carve_mix(struct pass *p, enum tensor_role norm, enum tensor_role proj,
                      uint32_t n_bank, struct mix *mix, elem **mixed)
{
    *mix = (struct mix){ .norm = norm, .proj = proj, .n_bank = n_bank };
    *mixed = NULL;
    if (n_bank) {
        mix->weights = activations_take_f32(p->act, p->n * (n_bank + 1));
        *mixed = activations_take(p->act, p->n * p->spec->hidden);
    }
}

void decoder_carve(struct pass *p, const struct moe *e, uint32_t l, struct decoder_saved *out)
{
    const struct model_spec *m = p->spec;
    struct mlp_shape dense = mlp_dense_shape(m);
    int64_t wide = p->n * m->hidden;

    *out = (struct decoder_saved){0};
    carve_mix(p, ROLE_ATTN_RES_NORM, ROLE_ATTN_RES_PROJ, bank_rows_attention(m, l),
              &out->attention_mix, &out->h);
    out->h_rstd = activations_take_f32(p->act, p->n);
    out->x = activations_take(p->act, wide);
    if (m->layers[l].attention == ATTENTION_KDA)
        kda_carve(p, &out->kda);
    else
        mla_carve(p, &out->mla);
    out->mid = activations_take(p->act, wide);
    carve_mix(p, ROLE_MLP_RES_NORM, ROLE_MLP_RES_PROJ, bank_rows_mlp(m, l), &out->mlp_mix,
              &out->m);
    out->m_rstd = activations_take_f32(p->act, p->n);
    out->y = activations_take(p->act, wide);
    if (m->layers[l].mlp == MLP_DENSE)
        mlp_carve(p, &dense, &out->mlp);
    else
        moe_carve(p, e, &out->moe);
}

void decoder_count(struct pass *p, const struct moe *e, uint32_t l, int64_t n_rows)
{
    const struct model_spec *m = p->spec;
    struct mlp_shape dense = mlp_dense_shape(m);
    struct decoder_saved s;

    decoder_carve(p, e, l, &s);
    struct activations_mark mark = activations_mark(p->act);
    activations_take(p->act, p->n * m->hidden); /* where dx goes */
    if (m->layers[l].attention == ATTENTION_KDA)
        kda_layer_backward(p, NULL, NULL, NULL, &s.kda);
    else
        mla_layer_backward(p, NULL, NULL, NULL, &s.mla);
    if (m->layers[l].mlp == MLP_DENSE)
        mlp_backward(p, NULL, &dense, NULL, NULL, 0, &s.mlp);
    activations_release(p->act, mark);
    if (m->layers[l].mlp == MLP_MOE) /* the rows stay */
        moe_count(p, n_rows);
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
    float beta = starts_block(m, l) ? 0 : 1;
    int rc = activations_check(p->act, err);

    if (rc < 0)
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

int decoder_backward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                     struct residuals *r, struct decoder_saved *s, struct err *err)
{
    const struct model_spec *m = p->spec;
    struct activations_mark mark = activations_mark(p->act);
    elem *dx = activations_take(p->act, p->n * m->hidden);
    int rc = activations_check(p->act, err);

    if (rc < 0 || (rc = feed_forward_backward(p, e, l, u, r->d_p, dx, s, err)) < 0 ||
        (rc = leave(p, u, r, &s->mlp_mix, s->m, ROLE_MLP_NORM, s->m_rstd, dx, r->d_p, err)) < 0 ||
        (rc = attention_backward(p, l, u, r->d_p, dx, s, err)) < 0)
        goto out;
    /* A block's first layer began a new sum: what flows on is the gradient of the row it pushed,
     * gathered from all later mixes. */
    if (starts_block(m, l))
        r->d_p = r->d_bank[l / m->attn_res_block];
    rc = leave(p, u, r, &s->attention_mix, s->h, ROLE_ATTN_NORM, s->h_rstd, dx, r->d_p, err);
out:
    activations_release(p->act, mark);
    return rc;
}
