/* lora.h - low-rank adapters beside a layer's projections: y += s B A x, s = alpha / r
 *
 * A model with adapters is frozen: only A (r, in) and B (out, r) get gradients. A x is made again
 * in the backward rather than kept. Where one A serves all experts of a layer, its gradient is one
 * sum over all their rows. */
#ifndef WORKER_LORA_H
#define WORKER_LORA_H

#include "common/lora_map.h"
#include "worker/layer.h"

/* The offsets of each unit's adapters. Gives an array of n_units, freed with free(); NULL where the
 * map has none. */
struct adapters_at *lora_find(const struct tensor_map *map);

/* Of adapters that lora_map_add has added to the map; c NULL: there are none. */
struct lora_pass lora_of(const struct lora_config *c, const struct tensor_map *map);

/* Takes the scratch of a pass whose lora is set. */
void lora_carve(struct pass *p, const struct adapters_at *units, uint32_t n_units);

static inline bool lora_has(const struct unit_view *u, enum tensor_role role)
{
    return u->adapters && u->adapters->b[role] != NO_ADAPTER;
}

/* ---- projections, for linear.c; shapes as there ---- */

/* y += the adapter's part. */
void lora_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role, elem *y,
                  const elem *x, int64_t in, int64_t first, int64_t out);
/* The same where y is float32. */
void lora_f32_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                      float *y, const elem *x, int64_t in, int64_t out);
/* dx += its part, unless NULL; gradients of A and B are added. */
void lora_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                   elem *dx, const elem *dy, const elem *x, int64_t in, int64_t first,
                   int64_t out);

/* ---- the product with the vocabulary, for head.c, which makes the loss in the same op ---- */

/* What that op adds to its logits, from x (n, hidden); the scratch of the pass is in it until
 * lora_head_backward, which, once the op has made dz, adds to d_x and to A's gradient. */
struct low_rank lora_head_forward(const struct pass *p, const struct unit_view *u, const elem *x);
void lora_head_backward(const struct pass *p, const struct unit_view *u, elem *d_x,
                        const elem *x);

/* ---- projections of each head by itself, for dsa.c ---- */

/* Rows first .. first + out of each head's rows of a weight (heads * rows, in); x and dx are (n,
 * heads, in), y and dy (n, heads, .) with a stride from head to head. */
struct lora_heads {
    enum tensor_role role;
    int32_t n_heads;
    int64_t rows, first, in, out;
};
/* y += s B A x; x += s (y B) A; and the gradients of both, where one is the other's input. */
void lora_heads_y(const struct pass *p, const struct unit_view *u, const struct lora_heads *h,
                  elem *y, int64_t y_stride, const elem *x);
void lora_heads_x(const struct pass *p, const struct unit_view *u, const struct lora_heads *h,
                  elem *x, const elem *y, int64_t y_stride);
void lora_heads_gradients(const struct pass *p, const struct unit_view *u,
                          const struct lora_heads *h, const elem *y, int64_t y_stride,
                          const elem *x);

/* x (n) *= s, through floats (n). */
void lora_scale(const struct pass *p, elem *x, float *floats, int64_t n);

#endif
