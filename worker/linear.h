/* linear.h - a layer's projections, y = x w^T with the weight of a role; the only way to them
 *
 * Whatever changes what a projection is, or what of it is trained, changes these functions. Shapes:
 * x, dx (n, in); y, dy (n, out); the weight (out, in), or rows first .. first + out of one that has
 * more. */
#ifndef WORKER_LINEAR_H
#define WORKER_LINEAR_H

#include "worker/layer.h"

/* The weight's rows as elements: where they lie, or, where it is packed, unpacked into the pass's
 * scratch, where they stay until the next are. */
const elem *linear_weight(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                          int64_t first, int64_t in, int64_t out);

/* y = beta y + x w^T; beta 0 or 1. */
void linear_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                    elem *y, const elem *x, int64_t in, int64_t out, float beta);
void linear_rows_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                         elem *y, const elem *x, int64_t in, int64_t first, int64_t out,
                         float beta);
/* y is float32 whatever elements are: the router's logits. */
void linear_f32_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                        float *y, const elem *x, int64_t in, int64_t out);

/* y += the bias of a role, or its numbers first .. first + out; and its gradient. */
void linear_bias_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                         elem *y, int64_t first, int64_t out);
void linear_bias_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                          const elem *dy, int64_t first, int64_t out);

/* dx = beta dx + dy w, and dw += dy^T x. dx NULL: what x comes from has no gradient. */
void linear_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                     elem *dx, float beta, const elem *dy, const elem *x, int64_t in,
                     int64_t out);
void linear_rows_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                          elem *dx, float beta, const elem *dy, const elem *x, int64_t in,
                          int64_t first, int64_t out);

#endif
