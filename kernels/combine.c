/* combine.c - each token's weighted sum of the outputs of its experts */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

struct combine {
    float *y, *d_slots, *d_weights;
    const float *dy, *slots, *weights;
    int32_t top_k;
    int64_t d;
};

static void combine_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct combine *s = arg;
    for (int64_t i = begin; i < end; i++) {
        float *restrict y = s->y + i * s->d;
        memset(y, 0, (size_t)s->d * sizeof *y);
        for (int64_t slot = i * s->top_k; slot < (i + 1) * s->top_k; slot++) {
            const float *restrict e = s->slots + slot * s->d;
            float weight = s->weights[slot];
            for (int64_t j = 0; j < s->d; j++)
                y[j] += weight * e[j];
        }
    }
}

void cpu_combine(struct device *dev, float *y, const float *slots, const float *weights, int64_t n,
                 int32_t top_k, int64_t d)
{
    struct combine s = {.y = y, .slots = slots, .weights = weights, .top_k = top_k, .d = d};
    cpu_for(dev, n, cpu_grain(d * top_k), combine_rows, &s);
}

static void combine_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct combine *s = arg;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict dy = s->dy + i * s->d;
        for (int64_t slot = i * s->top_k; slot < (i + 1) * s->top_k; slot++) {
            const float *restrict e = s->slots + slot * s->d;
            float weight = s->weights[slot], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t j = 0; j < s->d; j++)
                dot += e[j] * dy[j];
            s->d_weights[slot] = dot;
            if (!s->d_slots)
                continue;
            float *restrict de = s->d_slots + slot * s->d;
            for (int64_t j = 0; j < s->d; j++)
                de[j] = weight * dy[j];
        }
    }
}

void cpu_combine_backward(struct device *dev, float *d_slots, float *d_weights, const float *dy,
                          const float *slots, const float *weights, int64_t n, int32_t top_k,
                          int64_t d)
{
    struct combine s = {
        .d_slots = d_slots, .d_weights = d_weights, .dy = dy, .slots = slots, .weights = weights,
        .top_k = top_k, .d = d,
    };
    cpu_for(dev, n, cpu_grain(d * top_k), combine_backward_rows, &s);
}
