/* decoder_cut.c - walks a decoder layer through the segments of a batch, there and back */
#include "worker/decoder_cut.h"

#include <stdlib.h>

#include "common/mem.h"

static bool is_kda(const struct pass *p, uint32_t l)
{
    return p->spec->layers[l].attention == ATTENTION_KDA;
}

void decoder_cut_carve(struct pass *p, uint32_t l, struct decoder_cut *out)
{
    *out = (struct decoder_cut){.mark = activations_mark(p->act)};
    if (is_kda(p, l))
        kda_cut_carve(p, p->segments->n, &out->kda);
    else
        mla_cut_carve(p, &out->mla);
}

static struct pass pass_of(const struct pass *p, int32_t i, struct decoder_cut *cut)
{
    struct pass part = segment_pass(p, &p->segments->all[i]);
    part.kda_cut = &cut->kda;
    part.mla_cut = &cut->mla;
    return part;
}

/* ---- the residual stream's rows of a segment ------------------------------------------------ */

static uint32_t n_bank(const struct pass *p)
{
    return bank_rows_attention(p->spec, p->spec->n_layers);
}

static struct residuals residuals_create(const struct pass *p, const struct residuals *whole)
{
    struct residuals r = *whole; /* the arguments of one mix are anybody's */
    r.p = xcalloc(p->spec->n_layers + 1, sizeof *r.p);
    r.d_bank = xcalloc(n_bank(p) + 1, sizeof *r.d_bank);
    return r;
}

static void residuals_destroy(struct residuals *r)
{
    free(r->p);
    free(r->d_bank);
}

static void residuals_view(const struct pass *part, const struct residuals *whole,
                           struct residuals *out)
{
    int64_t begin = part->segment->begin, hidden = part->spec->hidden;
    for (uint32_t l = 0; l <= part->spec->n_layers; l++)
        out->p[l] = segment_rows(part, whole->p[l], begin, hidden);
    for (uint32_t b = 0; b < n_bank(part); b++)
        out->d_bank[b] = segment_rows(part, whole->d_bank[b], begin, hidden);
    out->d_p = segment_rows(part, whole->d_p, begin, hidden);
}

/* ---- forward -------------------------------------------------------------------------------- */

/* Backwards, as keys learn from later queries. */
static int learn(struct pass *p, uint32_t l, const struct unit_view *u, struct residuals *view,
                 const struct residuals *r, struct decoder_cut *cut, struct err *err)
{
    struct activations_mark before = activations_mark(p->act);
    int rc = 0;

    mla_cut_carve_learning(p, &cut->mla);
    for (int32_t i = p->segments->n; rc == 0 && i-- > 0;) {
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = pass_of(p, i, cut);
        residuals_view(&part, r, view);
        rc = decoder_learn(&part, l, u, view, err);
        activations_release(p->act, mark);
    }
    cut->mla.dsa.index_later = NULL;
    activations_release(p->act, before);
    return rc;
}

int decoder_cut_forward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                        struct residuals *r, elem *out, struct decoder_cut *cut, struct err *err)
{
    struct residuals view = residuals_create(p, r);
    bool learns = p->index_stage != INDEX_FROZEN && !is_kda(p, l);
    int rc = activations_check(p->act, err);

    for (int32_t i = 0; rc == 0 && i < p->segments->n; i++) {
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = pass_of(p, i, cut);
        struct decoder_saved s;
        part.index_stage = INDEX_FROZEN;
        residuals_view(&part, r, &view);
        decoder_carve(&part, e, l, CARVE_ALL, &s);
        rc = decoder_forward(&part, e, l, u, &view,
                             segment_rows(p, out, part.segment->begin, p->spec->hidden), &s, err);
        moe_drop(&s.moe);
        activations_release(p->act, mark);
    }
    if (rc == 0 && learns)
        rc = learn(p, l, u, &view, r, cut, err);
    residuals_destroy(&view);
    return rc;
}

/* ---- backward ------------------------------------------------------------------------------- */

static void carve_backward(struct pass *p, uint32_t l, struct decoder_cut *cut)
{
    if (is_kda(p, l))
        kda_cut_carve_backward(p, &cut->kda);
    else
        mla_cut_carve_backward(p, &cut->mla);
}

int decoder_cut_backward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                         struct residuals *r, struct decoder_cut *cut, struct err *err)
{
    struct activations_mark before = activations_mark(p->act);
    struct residuals view = residuals_create(p, r);
    float loss_weight = e->loss_weight;

    carve_backward(p, l, cut);
    int rc = activations_check(p->act, err);
    for (int32_t i = p->segments->n; rc == 0 && i-- > 0;) {
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = pass_of(p, i, cut);
        struct decoder_saved s;
        residuals_view(&part, r, &view);
        /* The router's losses are means over rows. */
        e->loss_weight = p->n ? loss_weight * (float)part.n / (float)p->n : 0;
        decoder_carve(&part, e, l, CARVE_ALL, &s);
        rc = decoder_forward(&part, e, l, u, &view, NULL, &s, err);
        if (rc == 0)
            rc = decoder_backward(&part, e, l, u, &view, &s, err);
        moe_drop(&s.moe);
        activations_release(p->act, mark);
    }
    e->loss_weight = loss_weight;
    decoder_pass_on(p->spec, l, r);
    residuals_destroy(&view);
    activations_release(p->act, before);
    return rc;
}

/* ---- counting ------------------------------------------------------------------------------- */

static void count_segment(struct pass *p, int32_t i, const struct moe *e, uint32_t l,
                          struct decoder_cut *cut)
{
    struct activations_mark before = activations_mark(p->act);
    struct pass part = pass_of(p, i, cut);
    struct decoder_saved s;

    if (!is_kda(p, l) && p->index_stage != INDEX_FROZEN) {
        mla_cut_carve_learning(p, &cut->mla);
        decoder_carve(&part, e, l, CARVE_ALL, &s);
        dsa_count_forward(&part);
        activations_release(p->act, before);
    }
    carve_backward(p, l, cut);
    part.index_stage = INDEX_FROZEN;
    decoder_count_forward(&part, e, l, CARVE_ALL, &s);
    decoder_count_backward(&part, e, l, &s);
    activations_release(p->act, before);
}

void decoder_cut_count(struct pass *p, const struct moe *e, uint32_t l, struct decoder_cut *cut)
{
    /* The first has the most rows, the second may have some of the first beside them. */
    for (int32_t i = 0; i < 2 && i < p->segments->n; i++)
        count_segment(p, i, e, l, cut);
}
