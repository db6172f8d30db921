/* moe_product.c - the products of the experts' own matrices, plain or packed */
#include "worker/moe.h"

static int32_t number_of(enum tensor_role role)
{
    return role - ROLE_EXPERT_GATE;
}

/* Packed bytes of n numbers, and then their scales. */
static void point_packed(struct moe *e, uint32_t at, const elem *from, int64_t n)
{
    e->packed[at] = (const uint8_t *)(const void *)from;
    e->scales[at] = e->packed[at] + n / 2;
}

void moe_product_point(const struct pass *p, struct moe *e, const struct shard_experts *x,
                       const struct unit_view *u)
{
    int64_t n = (int64_t)p->spec->latent * p->spec->expert_inter;

    for (int role = ROLE_EXPERT_GATE; role <= ROLE_EXPERT_DOWN; role++)
        for (uint32_t i = 0; i < x->n_slots; i++) {
            uint32_t at = (uint32_t)number_of((enum tensor_role)role) * x->n_slots + i;
            e->w[at] = shard_at(u->dev, &x->weights[i], u->at[role]);
            if (p->lora.packed_experts)
                point_packed(e, at, e->w[at], n);
        }
}

void moe_product_forward(const struct pass *p, const struct moe *e, const struct moe_product *w,
                         elem *y, const elem *x)
{
    int32_t at = number_of(w->role) * w->n_groups;

    if (p->lora.packed_experts)
        p->dev->ops->grouped_linear_mxfp4(p->dev, y, x, e->packed + at, e->scales + at, w->offsets,
                                          w->n_groups, w->in, w->out);
    else
        p->dev->ops->grouped_linear(p->dev, y, x, e->w + at, w->offsets, w->n_groups, w->in,
                                    w->out);
}

void moe_product_dx(const struct pass *p, const struct moe *e, const struct moe_product *w,
                    elem *dx, const elem *dy, float beta)
{
    int32_t at = number_of(w->role) * w->n_groups;

    if (p->lora.packed_experts)
        p->dev->ops->grouped_linear_mxfp4_dx(p->dev, dx, dy, e->packed + at, e->scales + at,
                                             w->offsets, w->n_groups, w->in, w->out, beta);
    else
        p->dev->ops->grouped_linear_dx(p->dev, dx, dy, e->w + at, w->offsets, w->n_groups, w->in,
                                       w->out, beta);
}
