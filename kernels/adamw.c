/* adamw.c - decoupled AdamW, in the order of operations that PyTorch takes */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"

struct adamw {
    float *w, *m, *v;
    const float *grad;
    const struct adamw_config *config;
};

static void adamw_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct adamw *s = arg;
    const struct adamw_config *c = s->config;
    float *restrict w = s->w, *restrict m = s->m, *restrict v = s->v;
    const float *restrict grad = s->grad;
    float keep = (float)(1 - (double)c->lr * c->weight_decay);
    float step = c->lr / c->correction1, root2 = sqrtf(c->correction2);
    float beta1 = c->beta1, beta2 = c->beta2, eps = c->eps, grad_scale = c->grad_scale;
    for (int64_t i = begin; i < end; i++) {
        float g = grad[i] * grad_scale;
        m[i] += (1 - beta1) * (g - m[i]);
        v[i] = beta2 * v[i] + (1 - beta2) * (g * g);
        w[i] = w[i] * keep - step * (m[i] / (sqrtf(v[i]) / root2 + eps));
    }
}

void cpu_adamw(struct device *dev, float *w, float *m, float *v, float *w_elems, const float *grad,
               int64_t n, const struct adamw_config *config)
{
    struct adamw s = {w, m, v, grad, config};
    cpu_for(dev, n, cpu_grain(4), adamw_range, &s);
    if (w_elems)
        cpu_cast(dev, w_elems, w, n);
}
