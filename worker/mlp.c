/* mlp.c - two projections in, a gated activation, one projection out */
#include "worker/mlp.h"

#include "worker/linear.h"

struct mlp_shape mlp_dense_shape(const struct model_spec *m)
{
    return (struct mlp_shape){ ROLE_MLP_GATE, ROLE_MLP_UP, ROLE_MLP_DOWN, m->dense_inter };
}

struct mlp_shape mlp_shared_shape(const struct model_spec *m)
{
    return (struct mlp_shape){ ROLE_SHARED_GATE, ROLE_SHARED_UP, ROLE_SHARED_DOWN,
                               (int64_t)m->n_shared_experts * m->expert_inter };
}

void mlp_activate(const struct pass *p, elem *y, const elem *gate, const elem *up, int64_t n)
{
    const struct model_spec *m = p->spec;

    if (m->activation == ACTIVATION_SITU)
        p->dev->ops->situ(p->dev, y, gate, up, n, m->situ_beta, m->situ_linear_beta);
    else
        p->dev->ops->swiglu(p->dev, y, gate, up, n);
}

void mlp_activate_backward(const struct pass *p, elem *d_gate, elem *d_up, const elem *dy,
                           const elem *gate, const elem *up, int64_t n)
{
    const struct model_spec *m = p->spec;

    if (m->activation == ACTIVATION_SITU)
        p->dev->ops->situ_backward(p->dev, d_gate, d_up, dy, gate, up, n, m->situ_beta,
                                   m->situ_linear_beta);
    else
        p->dev->ops->swiglu_backward(p->dev, d_gate, d_up, dy, gate, up, n);
}

void mlp_carve(struct pass *p, const struct mlp_shape *shape, struct mlp_saved *out)
{
    *out = (struct mlp_saved){0};
    out->gate = activations_take(p->act, p->n * shape->inter);
    out->up = activations_take(p->act, p->n * shape->inter);
    out->hidden = activations_take(p->act, p->n * shape->inter);
}

void mlp_forward(struct pass *p, const struct unit_view *u, const struct mlp_shape *shape,
                 const elem *x, elem *y, struct mlp_saved *s)
{
    int64_t hidden = p->spec->hidden, inter = shape->inter;

    s->x = x;
    if (!s->hidden)
        return;
    linear_forward(p, u, shape->gate, s->gate, x, hidden, inter, 0);
    linear_forward(p, u, shape->up, s->up, x, hidden, inter, 0);
    mlp_activate(p, s->hidden, s->gate, s->up, p->n * inter);
    if (y)
        linear_forward(p, u, shape->down, y, s->hidden, inter, hidden, 1);
}

void mlp_backward(struct pass *p, const struct unit_view *u, const struct mlp_shape *shape,
                  const elem *dy, elem *dx, float beta, const struct mlp_saved *s)
{
    int64_t hidden = p->spec->hidden, inter = shape->inter;
    struct activations_mark mark = activations_mark(p->act);
    elem *d_hidden = activations_take(p->act, p->n * inter);
    elem *d_gate = activations_take(p->act, p->n * inter);
    elem *d_up = activations_take(p->act, p->n * inter);

    if (!d_up)
        goto out;
    linear_backward(p, u, shape->down, d_hidden, 0, dy, s->hidden, inter, hidden);
    mlp_activate_backward(p, d_gate, d_up, d_hidden, s->gate, s->up, p->n * inter);
    linear_backward(p, u, shape->gate, dx, beta, d_gate, s->x, hidden, inter);
    linear_backward(p, u, shape->up, dx, 1, d_up, s->x, hidden, inter);
out:
    activations_release(p->act, mark);
}
