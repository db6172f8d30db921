/* lora.c - the products of adapters
 *
 * Everything between A and B is r wide. It is scaled there, and in float32, because elements have
 * no product with a number. */
#include "worker/lora.h"

#include <stdlib.h>

#include "common/mem.h"

/* ---- where they are ------------------------------------------------------------------------- */

struct adapters_at *lora_find(const struct tensor_map *map)
{
    struct adapters_at *units;

    if (!map->adapter_names)
        return NULL;
    units = xcalloc(map->n_units, sizeof *units);
    for (uint32_t u = 0; u < map->n_units; u++)
        for (int role = 0; role < TENSOR_ROLES; role++)
            units[u].a[role] = units[u].b[role] = NO_ADAPTER;
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (e->adapter == ADAPTER_A && e->expert <= 0)
            units[e->unit].a[e->role] = e->offset;
        if (e->adapter == ADAPTER_B && e->expert <= 0)
            units[e->unit].b[e->role] = e->offset;
    }
    return units;
}

struct lora_pass lora_of(const struct lora_config *c, const struct tensor_map *map)
{
    struct lora_pass l = {0};

    if (!c)
        return l;
    l.r = c->r;
    l.scale = (float)(c->alpha / c->r);
    l.shared_a = c->shared_a;
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        l.on_experts = l.on_experts || (e->adapter == ADAPTER_B && e->expert >= 0);
        if (e->packing != PACKING_NONE)
            l.packing = e->packing;
        if (e->packing == PACKING_NONE || e->expert >= 0) /* an op unpacks experts' itself */
            continue;
        int64_t n = (int64_t)e->stored_count;
        l.unpacked_max = n > l.unpacked_max ? n : l.unpacked_max;
    }
    return l;
}

/* Sparse attention brings queries and values through kv_b's adapter head by head. */
static bool goes_by_heads(const struct pass *p, const struct adapters_at *units, uint32_t n_units)
{
    bool has = false;
    for (uint32_t i = 0; i < n_units; i++)
        has = has || units[i].b[ROLE_MLA_KV_B] != NO_ADAPTER;
    return has && p->spec->index_top_k;
}

void lora_carve(struct pass *p, const struct adapters_at *units, uint32_t n_units)
{
    int64_t rows = p->n * (goes_by_heads(p, units, n_units) ? p->spec->heads : 1);

    p->lora.z = activations_take(p->act, rows * p->lora.r);
    p->lora.dz = activations_take(p->act, rows * p->lora.r);
    p->lora.floats = activations_take_f32(p->act, rows * p->lora.r);
    p->lora.unpacked = activations_take(p->act, p->lora.unpacked_max);
}

static const elem *weight_a(const struct unit_view *u, enum tensor_role role)
{
    return shard_at(u->dev, &u->weights, u->adapters->a[role]);
}

/* From row first on. */
static const elem *weight_b(const struct pass *p, const struct unit_view *u,
                            enum tensor_role role, int64_t first)
{
    return shard_at(u->dev, &u->weights, u->adapters->b[role] + (uint64_t)(first * p->lora.r));
}

static float *gradient_a(const struct unit_view *u, enum tensor_role role)
{
    return u->gradients + u->adapters->a[role];
}

static float *gradient_b(const struct unit_view *u, enum tensor_role role)
{
    return u->gradients + u->adapters->b[role];
}

void lora_scale(const struct pass *p, elem *x, float *floats, int64_t n)
{
    p->dev->ops->to_f32(p->dev, floats, x, n);
    p->dev->ops->scale(p->dev, floats, p->lora.scale, n);
    p->dev->ops->to_elem(p->dev, x, floats, n);
}

/* z (n, r) = s A x */
static void shrink(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                   const elem *x, int64_t n, int64_t in)
{
    const struct lora_pass *l = &p->lora;

    p->dev->ops->linear_f32(p->dev, l->floats, x, weight_a(u, role), n, in, l->r, 0);
    p->dev->ops->scale(p->dev, l->floats, l->scale, n * l->r);
    p->dev->ops->to_elem(p->dev, l->z, l->floats, n * l->r);
}

/* ---- projections ---------------------------------------------------------------------------- */

void lora_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role, elem *y,
                  const elem *x, int64_t in, int64_t first, int64_t out)
{
    const struct lora_pass *l = &p->lora;

    shrink(p, u, role, x, p->n, in);
    p->dev->ops->linear(p->dev, y, l->z, weight_b(p, u, role, first), p->n, l->r, out, 1);
}

void lora_f32_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                      float *y, const elem *x, int64_t in, int64_t out)
{
    const struct lora_pass *l = &p->lora;

    shrink(p, u, role, x, p->n, in);
    p->dev->ops->linear_f32(p->dev, y, l->z, weight_b(p, u, role, 0), p->n, l->r, out, 1);
}

void lora_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                   elem *dx, const elem *dy, const elem *x, int64_t in, int64_t first,
                   int64_t out)
{
    const struct device_ops *ops = p->dev->ops;
    const struct lora_pass *l = &p->lora;

    ops->linear_dx(p->dev, l->dz, dy, weight_b(p, u, role, first), p->n, l->r, out, 0);
    lora_scale(p, l->dz, l->floats, p->n * l->r);
    shrink(p, u, role, x, p->n, in);
    ops->linear_dw(p->dev, gradient_b(u, role) + first * l->r, dy, l->z, p->n, l->r, out);
    ops->linear_dw(p->dev, gradient_a(u, role), l->dz, x, p->n, in, l->r);
    if (dx)
        ops->linear_dx(p->dev, dx, l->dz, weight_a(u, role), p->n, in, l->r, 1);
}

/* ---- the vocabulary ------------------------------------------------------------------------- */

struct low_rank lora_head_forward(const struct pass *p, const struct unit_view *u, const elem *x)
{
    shrink(p, u, ROLE_HEAD, x, p->n, p->spec->hidden);
    return (struct low_rank){
        .r = p->lora.r, .z = p->lora.z, .b = weight_b(p, u, ROLE_HEAD, 0), .dz = p->lora.dz,
        .acc_db = u->gradients ? gradient_b(u, ROLE_HEAD) : NULL,
    };
}

void lora_head_backward(const struct pass *p, const struct unit_view *u, elem *d_x, const elem *x)
{
    const struct device_ops *ops = p->dev->ops;
    const struct lora_pass *l = &p->lora;
    int64_t hidden = p->spec->hidden;

    lora_scale(p, l->dz, l->floats, p->n * l->r);
    ops->linear_dw(p->dev, gradient_a(u, ROLE_HEAD), l->dz, x, p->n, hidden, l->r);
    ops->linear_dx(p->dev, d_x, l->dz, weight_a(u, ROLE_HEAD), p->n, hidden, l->r, 1);
}

/* ---- heads ---------------------------------------------------------------------------------- */

/* dz (n, heads, r) = s y B */
static void shrink_heads(const struct pass *p, const struct unit_view *u,
                         const struct lora_heads *h, const elem *y, int64_t y_stride)
{
    const struct lora_pass *l = &p->lora;

    p->dev->ops->heads_linear_dx(p->dev, l->dz, l->r, y, y_stride,
                                 weight_b(p, u, h->role, h->first), h->rows * l->r, p->n,
                                 h->n_heads, l->r, h->out, 0);
    lora_scale(p, l->dz, l->floats, p->n * h->n_heads * l->r);
}

void lora_heads_y(const struct pass *p, const struct unit_view *u, const struct lora_heads *h,
                  elem *y, int64_t y_stride, const elem *x)
{
    const struct lora_pass *l = &p->lora;

    shrink(p, u, h->role, x, p->n * h->n_heads, h->in);
    p->dev->ops->heads_linear(p->dev, y, y_stride, l->z, l->r,
                              weight_b(p, u, h->role, h->first), h->rows * l->r, p->n,
                              h->n_heads, l->r, h->out, 1);
}

void lora_heads_x(const struct pass *p, const struct unit_view *u, const struct lora_heads *h,
                  elem *x, const elem *y, int64_t y_stride)
{
    shrink_heads(p, u, h, y, y_stride);
    p->dev->ops->linear_dx(p->dev, x, p->lora.dz, weight_a(u, h->role), p->n * h->n_heads, h->in,
                           p->lora.r, 1);
}

void lora_heads_gradients(const struct pass *p, const struct unit_view *u,
                          const struct lora_heads *h, const elem *y, int64_t y_stride,
                          const elem *x)
{
    const struct lora_pass *l = &p->lora;

    shrink_heads(p, u, h, y, y_stride);
    shrink(p, u, h->role, x, p->n * h->n_heads, h->in);
    p->dev->ops->heads_linear_dw(p->dev, gradient_b(u, h->role) + h->first * l->r, h->rows * l->r,
                                 y, y_stride, l->z, l->r, p->n, h->n_heads, l->r, h->out);
    p->dev->ops->linear_dw(p->dev, gradient_a(u, h->role), l->dz, x, p->n * h->n_heads, h->in,
                           l->r);
}
