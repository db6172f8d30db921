/* moe_lora.c - the adapters of the experts that a rank serves, by groups of rows as their matrices
 *
 * B is each expert's own; A too, or one of the layer's unit for all rows. */
#include "worker/lora.h"
#include "worker/moe.h"

static uint32_t number_of(enum tensor_role role)
{
    return (uint32_t)(role - ROLE_EXPERT_GATE);
}

static bool has_own_a(const struct pass *p, const struct unit_view *u, enum tensor_role role)
{
    return lora_has(u, role) && !p->lora.shared_a;
}

static const elem *shared_a(const struct unit_view *u, enum tensor_role role)
{
    return shard_at(u->dev, &u->weights, u->adapters->a[role]);
}

/* ---- memory --------------------------------------------------------------------------------- */

void moe_lora_carve_forward(struct pass *p, int64_t n_rows, struct moe_lora_scratch *out)
{
    *out = (struct moe_lora_scratch){0};
    if (!p->lora.on_experts)
        return;
    for (int i = 0; i < 3; i++) /* one after another */
        out->z[i] = i ? out->z[0] : activations_take(p->act, n_rows * p->lora.r);
    out->floats = activations_take_f32(p->act, n_rows * p->lora.r);
    out->y = activations_take(p->act, n_rows * p->spec->latent);
}

void moe_lora_carve_backward(struct pass *p, int64_t n_rows, struct moe_lora_scratch *out)
{
    *out = (struct moe_lora_scratch){0};
    for (int i = 0; i < 3 && p->lora.on_experts; i++) {
        out->z[i] = activations_take(p->act, n_rows * p->lora.r);
        out->dz[i] = activations_take(p->act, n_rows * p->lora.r);
    }
    if (p->lora.on_experts)
        out->floats = activations_take_f32(p->act, n_rows * p->lora.r);
}

/* ---- where they are ------------------------------------------------------------------------- */

void moe_lora_point(const struct pass *p, struct moe *e, const struct shard_experts *x,
                    const struct unit_view *u)
{
    for (int role = ROLE_EXPERT_GATE; p->lora.on_experts && role <= ROLE_EXPERT_DOWN; role++)
        for (uint32_t i = 0; i < x->n_slots && lora_has(u, (enum tensor_role)role); i++) {
            uint32_t at = number_of((enum tensor_role)role) * x->n_slots + i;
            e->b[at] = shard_at(u->dev, &x->weights[i], u->adapters->b[role]);
            if (!p->lora.shared_a)
                e->a[at] = shard_at(u->dev, &x->weights[i], u->adapters->a[role]);
        }
}

void moe_lora_point_gradients(const struct pass *p, struct moe *e, uint32_t i, uint32_t n,
                              float *block, const struct unit_view *u)
{
    for (int role = ROLE_EXPERT_GATE; p->lora.on_experts && role <= ROLE_EXPERT_DOWN; role++) {
        uint32_t at = number_of((enum tensor_role)role) * n + i;
        if (lora_has(u, (enum tensor_role)role))
            e->db[at] = block + u->adapters->b[role];
        if (has_own_a(p, u, (enum tensor_role)role))
            e->da[at] = block + u->adapters->a[role];
    }
}

/* ---- products ------------------------------------------------------------------------------- */

/* z (n_rows, r) = s A x */
static void shrink(struct pass *p, struct moe *e, const struct unit_view *u,
                   const struct moe_product *w, const elem *x, elem *z, float *floats)
{
    const struct device_ops *ops = p->dev->ops;

    if (p->lora.shared_a)
        ops->linear(p->dev, z, x, shared_a(u, w->role), w->n_rows, w->in, p->lora.r, 0);
    else
        ops->grouped_linear(p->dev, z, x, e->a + number_of(w->role) * (uint32_t)w->n_groups,
                            w->offsets, w->n_groups, w->in, p->lora.r);
    lora_scale(p, z, floats, w->n_rows * p->lora.r);
}

void moe_lora_forward(struct pass *p, struct moe *e, const struct unit_view *u,
                      const struct moe_product *w, elem *y, elem *more, const elem *x,
                      struct moe_lora_scratch *b)
{
    elem *z = b->z[number_of(w->role)];

    if (!lora_has(u, w->role))
        return;
    shrink(p, e, u, w, x, z, b->floats);
    p->dev->ops->grouped_linear(p->dev, more, z,
                                e->b + number_of(w->role) * (uint32_t)w->n_groups, w->offsets,
                                w->n_groups, p->lora.r, w->out);
    p->dev->ops->add(p->dev, y, more, w->n_rows * w->out);
}

void moe_lora_shrink(struct pass *p, struct moe *e, const struct unit_view *u,
                     const struct moe_product *w, const elem *dy, const elem *x,
                     struct moe_lora_scratch *b)
{
    uint32_t i = number_of(w->role);

    if (!lora_has(u, w->role))
        return;
    shrink(p, e, u, w, x, b->z[i], b->floats);
    p->dev->ops->grouped_linear_dx(p->dev, b->dz[i], dy, e->b + i * (uint32_t)w->n_groups,
                                   w->offsets, w->n_groups, p->lora.r, w->out, 0);
    lora_scale(p, b->dz[i], b->floats, w->n_rows * p->lora.r);
}

void moe_lora_dx(struct pass *p, struct moe *e, const struct unit_view *u,
                 const struct moe_product *w, elem *dx, const struct moe_lora_scratch *b)
{
    const struct device_ops *ops = p->dev->ops;
    uint32_t i = number_of(w->role);

    if (!lora_has(u, w->role))
        return;
    if (p->lora.shared_a)
        ops->linear_dx(p->dev, dx, b->dz[i], shared_a(u, w->role), w->n_rows, w->in, p->lora.r, 1);
    else
        ops->grouped_linear_dx(p->dev, dx, b->dz[i], e->a + i * (uint32_t)w->n_groups, w->offsets,
                               w->n_groups, w->in, p->lora.r, 1);
}

void moe_lora_gradients(struct pass *p, struct moe *e, const struct unit_view *u,
                        const struct moe_product *w, const elem *dy, const elem *x,
                        const struct moe_lora_scratch *b)
{
    const struct device_ops *ops = p->dev->ops;
    uint32_t i = number_of(w->role), at = i * (uint32_t)w->n_groups;

    if (lora_has(u, w->role))
        ops->grouped_linear_dw(p->dev, e->db + at, dy, b->z[i], w->offsets, w->n_groups,
                               p->lora.r, w->out);
    if (has_own_a(p, u, w->role))
        ops->grouped_linear_dw(p->dev, e->da + at, b->dz[i], x, w->offsets, w->n_groups, w->in,
                               p->lora.r);
}

void moe_lora_shared_gradient(struct pass *p, const struct unit_view *u,
                              const struct moe_product *w, const elem *x,
                              const struct moe_lora_scratch *b)
{
    if (lora_has(u, w->role) && p->lora.shared_a)
        p->dev->ops->linear_dw(p->dev, u->gradients + u->adapters->a[w->role],
                               b->dz[number_of(w->role)], x, w->n_rows, w->in, p->lora.r);
}
