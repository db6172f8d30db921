/* moe_product.c - the products of the experts' own matrices, plain or packed */
#include "worker/moe.h"

#include "kernels/packed_experts.h"

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

static struct packed_experts packed_of(const struct pass *p, const struct moe *e,
                                       const struct moe_product *w)
{
    return (struct packed_experts){
        .w = e->packed + number_of(w->role) * w->n_groups, .packing = p->lora.packing,
        .offsets = w->offsets, .n_groups = w->n_groups, .in = w->in, .out = w->out,
        .room = p->lora.unpacks_experts ? p->lora.unpacked : NULL,
        .room_numbers = p->lora.unpacked_max,
    };
}

void moe_product_forward(const struct pass *p, const struct moe *e, const struct moe_product *w,
                         elem *y, const elem *x)
{
    int32_t at = number_of(w->role) * w->n_groups;
    struct packed_experts packed = packed_of(p, e, w);

    if (p->lora.packing != PACKING_NONE)
        packed_experts_forward(p->dev, y, x, &packed);
    else
        p->dev->ops->grouped_linear(p->dev, y, x, e->w + at, w->offsets, w->n_groups, w->in,
                                    w->out);
}

void moe_product_dx(const struct pass *p, const struct moe *e, const struct moe_product *w,
                    elem *dx, const elem *dy, float beta)
{
    int32_t at = number_of(w->role) * w->n_groups;
    struct packed_experts packed = packed_of(p, e, w);

    if (p->lora.packing != PACKING_NONE)
        packed_experts_dx(p->dev, dx, dy, &packed, beta);
    else
        p->dev->ops->grouped_linear_dx(p->dev, dx, dy, e->w + at, w->offsets, w->n_groups, w->in,
                                       w->out, beta);
}
