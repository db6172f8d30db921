/* gate.c - the sigmoid, alone and as a gate on another tensor */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"
#include "kernels/vmath.h"

struct gate {
    float *y, *d_o, *dg;
    const float *dy, *o, *g;
};

static void sigmoid_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct gate *s = arg;
    float *restrict y = s->y;
    const float *restrict x = s->g;
    for (int64_t i = begin; i < end; i++)
        y[i] = vm_sigmoid(x[i]);
}

void cpu_sigmoid(struct device *dev, float *y, const float *x, int64_t n)
{
    struct gate s = {.y = y, .g = x};
    cpu_for(dev, n, cpu_grain(2), sigmoid_range, &s);
}

static void sigmoid_backward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct gate *s = arg;
    float *restrict dx = s->dg;
    const float *restrict dy = s->dy, *restrict y = s->g;
    for (int64_t i = begin; i < end; i++)
        dx[i] = dy[i] * y[i] * (1 - y[i]);
}

void cpu_sigmoid_backward(struct device *dev, float *dx, const float *dy, const float *y, int64_t n)
{
    struct gate s = {.dg = dx, .dy = dy, .g = y};
    cpu_for(dev, n, cpu_grain(2), sigmoid_backward_range, &s);
}

static void gate_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct gate *s = arg;
    float *restrict y = s->y;
    const float *restrict o = s->o, *restrict g = s->g;
    for (int64_t i = begin; i < end; i++)
        y[i] = o[i] * vm_sigmoid(g[i]);
}

void cpu_sigmoid_gate(struct device *dev, float *y, const float *o, const float *g, int64_t n)
{
    struct gate s = {.y = y, .o = o, .g = g};
    cpu_for(dev, n, cpu_grain(2), gate_range, &s);
}

static void gate_backward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct gate *s = arg;
    float *restrict d_o = s->d_o, *restrict dg = s->dg;
    const float *restrict dy = s->dy, *restrict o = s->o, *restrict g = s->g;
    for (int64_t i = begin; i < end; i++) {
        float gate = vm_sigmoid(g[i]);
        d_o[i] = dy[i] * gate;
        dg[i] = dy[i] * o[i] * gate * (1 - gate);
    }
}

void cpu_sigmoid_gate_backward(struct device *dev, float *d_o, float *dg, const float *dy,
                               const float *o, const float *g, int64_t n)
{
    struct gate s = {.d_o = d_o, .dg = dg, .dy = dy, .o = o, .g = g};
    cpu_for(dev, n, cpu_grain(4), gate_backward_range, &s);
}
