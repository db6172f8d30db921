/* head.c - the final mix and norm, and the product with the vocabulary */
#include "worker/head.h"

#include "worker/linear.h"
#include "worker/lora.h"

static void carve(struct pass *p, struct head *h)
{
    uint32_t n_bank = bank_rows_attention(p->spec, p->spec->n_layers);
    int64_t n = p->n * p->spec->hidden;

    *h = (struct head){
        .mix = { .norm = ROLE_OUTPUT_RES_NORM, .proj = ROLE_OUTPUT_RES_PROJ, .n_bank = n_bank },
    };
    if (n_bank) {
        h->mix.weights = activations_take_f32(p->act, p->n * (n_bank + 1));
        h->mixed = activations_take(p->act, n);
    }
    h->rstd = activations_take_f32(p->act, p->n);
    h->x = activations_take(p->act, n);
    h->d_x = activations_take(p->act, n);
    h->d_mixed = activations_take(p->act, n);
}

void head_count(struct pass *p)
{
    struct activations_mark mark = activations_mark(p->act);
    struct head h;

    carve(p, &h);
    activations_release(p->act, mark);
}

int head_forward(struct pass *p, const struct unit_view *u, struct residuals *r, struct head *out,
                 struct err *err)
{
    carve(p, out);
    int rc = activations_check(p->act, err);
    if (rc < 0)
        return rc;
    out->from = out->mix.p = r->p[p->spec->n_layers];
    if (out->mixed) {
        mix_forward(p, u, r, &out->mix, out->mixed);
        out->from = out->mixed;
    }
    p->dev->ops->rms_norm(p->dev, out->x, out->rstd, out->from, weight_of(u, ROLE_FINAL_NORM),
                          p->n, p->spec->hidden, p->spec->norm_eps);
    return 0;
}

/* d_x NULL: the loss alone. */
static void loss(struct pass *p, const struct unit_view *u, const elem *x, elem *d_x,
                 const int32_t *labels)
{
    bool has_adapter = lora_has(u, ROLE_HEAD);
    struct low_rank beside;

    if (has_adapter)
        beside = lora_head_forward(p, u, x);
    p->dev->ops->linear_cross_entropy(p->dev, p->acc_loss, d_x,
                                      d_x && unit_trains(u, ROLE_HEAD) ? gradient_of(u, ROLE_HEAD)
                                                                       : NULL,
                                      x, weight_of(u, ROLE_HEAD), has_adapter ? &beside : NULL,
                                      labels, p->n, p->spec->hidden, p->spec->vocab);
    if (has_adapter && d_x)
        lora_head_backward(p, u, d_x, x);
}

void head_loss_only(struct pass *p, const struct unit_view *u, const struct head *h,
                    const int32_t *labels)
{
    loss(p, u, h->x, NULL, labels);
}

void head_loss_backward(struct pass *p, const struct unit_view *u, struct residuals *r,
                        const struct head *h, const int32_t *labels)
{
    const struct device_ops *ops = p->dev->ops;
    int64_t hidden = p->spec->hidden;
    elem *d_from = h->mixed ? h->d_mixed : r->d_p;
    size_t n_bytes = (size_t)(p->n * hidden) * elem_size(p->dev);

    loss(p, u, h->x, h->d_x, labels);
    ops->rms_norm_backward(p->dev, d_from, gradient_of(u, ROLE_FINAL_NORM), h->d_x, h->from,
                           weight_of(u, ROLE_FINAL_NORM), h->rstd, p->n, hidden, 0);
    if (h->mixed) {
        ops->zero(p->dev, r->d_p, n_bytes);
        for (uint32_t b = 0; b < h->mix.n_bank; b++)
            ops->zero(p->dev, r->d_bank[b], n_bytes);
        mix_backward(p, u, r, &h->mix, d_from, r->d_p);
    }
}

int head_logits(struct pass *p, const struct unit_view *u, const struct head *h,
                float *out_logits, struct err *err)
{
    struct activations_mark mark = activations_mark(p->act);
    int64_t n = p->n * p->spec->vocab;
    float *logits = activations_take_f32(p->act, n);
    int rc = activations_check(p->act, err);

    if (rc == 0 && n) {
        linear_f32_forward(p, u, ROLE_HEAD, logits, h->x, p->spec->hidden, p->spec->vocab);
        p->dev->ops->to_host(p->dev, out_logits, logits, (size_t)n * sizeof *logits);
    }
    activations_release(p->act, mark);
    return rc;
}
