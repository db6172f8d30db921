/* mlp.h - the gated feed-forward, of dense layers and of shared experts */
#ifndef WORKER_MLP_H
#define WORKER_MLP_H

#include "worker/layer.h"

/* Which parameters: those of a dense layer, or those of the shared experts of a MoE layer. */
struct mlp_shape {
    enum tensor_role gate, up, down;
    int64_t inter;
};

struct mlp_shape mlp_dense_shape(const struct model_spec *m);
struct mlp_shape mlp_shared_shape(const struct model_spec *m); /* inter 0: there are none */

struct mlp_saved {
    const elem *x;            /* (n, hidden), the input; borrowed */
    elem *gate, *up, *hidden; /* (n, inter); hidden = activation(gate) * up */
};

void mlp_carve(struct pass *p, const struct mlp_shape *shape, struct mlp_saved *out);

/* y (n, hidden) += the layer of x; y NULL: only what the backward needs. */
void mlp_forward(struct pass *p, const struct unit_view *u, const struct mlp_shape *shape,
                 const elem *x, elem *y, struct mlp_saved *s);

/* dx = beta dx + the gradient; takes scratch and gives it back. */
void mlp_backward(struct pass *p, const struct unit_view *u, const struct mlp_shape *shape,
                  const elem *dy, elem *dx, float beta, const struct mlp_saved *s);

/* The model's activation of n elements: y = f(gate) * up. */
void mlp_activate(const struct pass *p, elem *y, const elem *gate, const elem *up, int64_t n);
void mlp_activate_backward(const struct pass *p, elem *d_gate, elem *d_up, const elem *dy,
                           const elem *gate, const elem *up, int64_t n);

#endif
