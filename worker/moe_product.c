/* moe_product.c - the products of the experts' own matrices, plain or packed */
#include "worker/moe.h"

static int32_t number_of(enum tensor_role role)
{
    return role - ROLE_EXPERT_GATE;
}

void moe_product_point(struct moe *e, const struct shard_experts *x, const struct unit_view *u)
{
    for (int role = ROLE_EXPERT_GATE; role <= ROLE_EXPERT_DOWN; role++)
        for (uint32_t i = 0; i < x->n_slots; i++) {
            uint32_t at = (uint32_t)number_of((enum tensor_role)role) * x->n_slots + i;
            e->w[at] = shard_at(u->dev, &x->weights[i], u->at[role]);
            e->packed[at] = (const uint8_t *)(const void *)e->w[at];
        }
}

void moe_product_forward(const struct pass *p, const struct moe *e, const struct moe_product *w,
                         elem *y, const elem *x)
{
    int32_t at = number_of(w->role) * w->n_groups;

    if (p->lora.packing != PACKING_NONE)
        p->dev->ops->grouped_linear_packed(p->dev, y, x, e->packed + at, p->lora.packing,
                                           w->offsets, w->n_groups, w->in, w->out);
    else
        p->dev->ops->grouped_linear(p->dev, y, x, e->w + at, w->offsets, w->n_groups, w->in,
                                    w->out);
}

void moe_product_dx(const struct pass *p, const struct moe *e, const struct moe_product *w,
                    elem *dx, const elem *dy)
{
    int32_t at = number_of(w->role) * w->n_groups;

    if (p->lora.packing != PACKING_NONE)
        p->dev->ops->grouped_linear_packed_dx(p->dev, dx, dy, e->packed + at, p->lora.packing,
                                              w->offsets, w->n_groups, w->in, w->out, 0);
    else
        p->dev->ops->grouped_linear_dx(p->dev, dx, dy, e->w + at, w->offsets, w->n_groups, w->in,
                                       w->out, 0);
}

void moe_product_dx_pair(const struct pass *p, const struct moe *e, const struct moe_product *w,
                         elem *dx, const elem *dy, const struct moe_product *w2, const elem *dy2)
{
    int32_t at = number_of(w->role) * w->n_groups, at2 = number_of(w2->role) * w->n_groups;

    if (p->lora.packing == PACKING_NONE) {
        p->dev->ops->grouped_linear_dx_pair(p->dev, dx, dy, e->w + at, dy2, e->w + at2, w->offsets,
                                            w->n_groups, w->in, w->out);
        return;
    }
    moe_product_dx(p, e, w, dx, dy);
    p->dev->ops->grouped_linear_packed_dx(p->dev, dx, dy2, e->packed + at2, p->lora.packing,
                                          w->offsets, w->n_groups, w->in, w->out, 1);
}
