/* situ.c - y = b1 tanh(a/b1) sigmoid(a) * b2 tanh(u/b2): a gated unit with both factors bounded */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"
#include "kernels/vmath.h"

struct situ {
    float *y, *da, *du;
    const float *dy, *a, *u;
    float b1, b2;
};

static void situ_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct situ *s = arg;
    float *restrict y = s->y;
    const float *restrict a = s->a, *restrict u = s->u;
    float b1 = s->b1, b2 = s->b2, inv1 = 1 / b1, inv2 = 1 / b2;
    for (int64_t i = begin; i < end; i++)
        y[i] = b1 * vm_tanh(a[i] * inv1) * vm_sigmoid(a[i]) * (b2 * vm_tanh(u[i] * inv2));
}

void cpu_situ(struct device *dev, float *y, const float *a, const float *u, int64_t n, float b1,
              float b2)
{
    struct situ s = {.y = y, .a = a, .u = u, .b1 = b1, .b2 = b2};
    cpu_for(dev, n, cpu_grain(4), situ_range, &s);
}

static void situ_backward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct situ *s = arg;
    float *restrict da = s->da, *restrict du = s->du;
    const float *restrict dy = s->dy, *restrict a = s->a, *restrict u = s->u;
    float b1 = s->b1, b2 = s->b2, inv1 = 1 / b1, inv2 = 1 / b2;
    for (int64_t i = begin; i < end; i++) {
        float ta = vm_tanh(a[i] * inv1), tu = vm_tanh(u[i] * inv2), gate = vm_sigmoid(a[i]);
        da[i] = dy[i] * b2 * tu * gate * ((1 - ta * ta) + b1 * ta * (1 - gate));
        du[i] = dy[i] * b1 * ta * gate * (1 - tu * tu);
    }
}

void cpu_situ_backward(struct device *dev, float *da, float *du, const float *dy, const float *a,
                       const float *u, int64_t n, float b1, float b2)
{
    struct situ s = {.da = da, .du = du, .dy = dy, .a = a, .u = u, .b1 = b1, .b2 = b2};
    cpu_for(dev, n, cpu_grain(4), situ_backward_range, &s);
}
