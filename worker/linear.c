/* linear.c - the products of a projection, forward and backward */
#include "worker/linear.h"

#include "worker/lora.h"

const elem *linear_weight(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                          int64_t first, int64_t in, int64_t out)
{
    if (!u->packed_rows || !u->packed_rows[role])
        return weight_rows(u, role, first, in);
    p->dev->ops->unpack(p->dev, p->lora.unpacked, (const uint8_t *)weight_of(u, role),
                        p->lora.packing, u->packed_rows[role], in, first, out);
    return p->lora.unpacked;
}

void linear_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                    elem *y, const elem *x, int64_t in, int64_t out, float beta)
{
    linear_rows_forward(p, u, role, y, x, in, 0, out, beta);
}

void linear_rows_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                         elem *y, const elem *x, int64_t in, int64_t first, int64_t out,
                         float beta)
{
    p->dev->ops->linear(p->dev, y, x, linear_weight(p, u, role, first, in, out), p->n, in, out,
                         beta);
    if (lora_has(u, role))
        lora_forward(p, u, role, y, x, in, first, out);
}

void linear_f32_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                        float *y, const elem *x, int64_t in, int64_t out)
{
    p->dev->ops->linear_f32(p->dev, y, x, linear_weight(p, u, role, 0, in, out), p->n, in, out,
                             0);
    if (lora_has(u, role))
        lora_f32_forward(p, u, role, y, x, in, out);
}

void linear_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                     elem *dx, float beta, const elem *dy, const elem *x, int64_t in,
                     int64_t out)
{
    linear_rows_backward(p, u, role, dx, beta, dy, x, in, 0, out);
}

void linear_rows_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                          elem *dx, float beta, const elem *dy, const elem *x, int64_t in,
                          int64_t first, int64_t out)
{
    const struct device_ops *ops = p->dev->ops;

    if (dx)
        ops->linear_dx(p->dev, dx, dy, linear_weight(p, u, role, first, in, out), p->n, in, out,
                       beta);
    if (unit_trains(u, role))
        ops->linear_dw(p->dev, gradient_of(u, role) + first * in, dy, x, p->n, in, out);
    if (lora_has(u, role))
        lora_backward(p, u, role, dx, dy, x, in, first, out);
}

/* A bias is a matrix one column wide, beside an input of ones. */
void linear_bias_forward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                         elem *y, int64_t first, int64_t out)
{
    p->dev->ops->linear(p->dev, y, p->ones, weight_rows(u, role, first, 1), p->n, 1, out, 1);
}

void linear_bias_backward(const struct pass *p, const struct unit_view *u, enum tensor_role role,
                          const elem *dy, int64_t first, int64_t out)
{
    if (unit_trains(u, role))
        p->dev->ops->linear_dw(p->dev, gradient_of(u, role) + first, dy, p->ones, p->n, 1, out);
}
