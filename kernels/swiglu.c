/* swiglu.c - y = silu(a) u */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"
#include "kernels/vmath.h"

struct swiglu {
    float *y, *da, *du;
    const float *dy, *a, *u;
};

static void swiglu_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct swiglu *s = arg;
    float *restrict y = s->y;
    const float *restrict a = s->a, *restrict u = s->u;
    for (int64_t i = begin; i < end; i++)
        y[i] = a[i] * vm_sigmoid(a[i]) * u[i];
}

void cpu_swiglu(struct device *dev, float *y, const float *a, const float *u, int64_t n)
{
    struct swiglu s = {.y = y, .a = a, .u = u};
    cpu_for(dev, n, cpu_grain(2), swiglu_range, &s);
}

static void swiglu_backward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct swiglu *s = arg;
    float *restrict da = s->da, *restrict du = s->du;
    const float *restrict dy = s->dy, *restrict a = s->a, *restrict u = s->u;
    for (int64_t i = begin; i < end; i++) {
        float gate = vm_sigmoid(a[i]);
        da[i] = dy[i] * u[i] * gate * (1 + a[i] * (1 - gate));
        du[i] = dy[i] * a[i] * gate;
    }
}

void cpu_swiglu_backward(struct device *dev, float *da, float *du, const float *dy, const float *a,
                         const float *u, int64_t n)
{
    struct swiglu s = {.da = da, .du = du, .dy = dy, .a = a, .u = u};
    cpu_for(dev, n, cpu_grain(2), swiglu_backward_range, &s);
}
