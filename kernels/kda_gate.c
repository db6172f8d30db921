/* kda_gate.c - the log decay of KDA from its raw gate
 *
 * bounded:  g = L sigmoid(e^A (z + bias)), in (L, 0)
 * softplus: g = -e^A softplus(z + bias) */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"
#include "kernels/vmath.h"

#define BLOCK_ROWS 64 /* whose parameter gradients are summed by one task */

struct kda_gate {
    float *g, *dz, *parts; /* parts (n_blocks, heads d + heads): d_dt_bias, then d_a_log */
    const float *dg, *z, *dt_bias, *a_log;
    int32_t n_heads, d;
    bool    bounded;
    float   lower_bound;
};

static void gate_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct kda_gate *s = arg;
    int32_t d = s->d;
    for (int64_t row = begin * s->n_heads; row < end * s->n_heads; row++) {
        int64_t head = row % s->n_heads;
        const float *restrict z = s->z + row * d, *restrict bias = s->dt_bias + head * d;
        float *restrict g = s->g + row * d;
        float rate = vm_exp(s->a_log[head]), bound = s->lower_bound;
        if (s->bounded) {
            for (int32_t j = 0; j < d; j++)
                g[j] = bound * vm_sigmoid(rate * (z[j] + bias[j]));
        } else {
            for (int32_t j = 0; j < d; j++)
                g[j] = -rate * vm_softplus(z[j] + bias[j]);
        }
    }
}

void cpu_kda_gate(struct device *dev, float *g, const float *z, const float *dt_bias,
                  const float *a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                  float lower_bound)
{
    struct kda_gate s = {
        .g = g, .z = z, .dt_bias = dt_bias, .a_log = a_log, .n_heads = n_heads, .d = d,
        .bounded = bounded, .lower_bound = lower_bound,
    };
    cpu_for(dev, n, cpu_grain((int64_t)n_heads * d * 2), gate_rows, &s);
}

/* dz of one head's row; returns its part of d_a_log. */
static float bounded_backward(float *restrict dz, float *restrict d_bias, const float *restrict dg,
                              const float *restrict z, const float *restrict bias, int32_t d,
                              float rate, float bound)
{
    float d_a_log = 0;
#pragma omp simd reduction(+ : d_a_log)
    for (int32_t j = 0; j < d; j++) {
        float x = z[j] + bias[j], y = vm_sigmoid(rate * x);
        dz[j] = dg[j] * bound * y * (1 - y) * rate;
        d_bias[j] += dz[j];
        d_a_log += dz[j] * x;
    }
    return d_a_log;
}

static float softplus_backward(float *restrict dz, float *restrict d_bias, const float *restrict dg,
                               const float *restrict z, const float *restrict bias, int32_t d,
                               float rate)
{
    float d_a_log = 0;
#pragma omp simd reduction(+ : d_a_log)
    for (int32_t j = 0; j < d; j++) {
        float x = z[j] + bias[j];
        dz[j] = -rate * dg[j] * vm_sigmoid(x);
        d_bias[j] += dz[j];
        d_a_log += -rate * vm_softplus(x) * dg[j];
    }
    return d_a_log;
}

static void gate_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct kda_gate *s = arg;
    int32_t d = s->d;
    int64_t width = (int64_t)s->n_heads * d, size = width + s->n_heads;
    float *part = s->parts + begin / BLOCK_ROWS * size;
    memset(part, 0, (size_t)size * sizeof *part);
    for (int64_t row = begin * s->n_heads; row < end * s->n_heads; row++) {
        int64_t head = row % s->n_heads;
        const float *z = s->z + row * d, *dg = s->dg + row * d, *bias = s->dt_bias + head * d;
        float rate = vm_exp(s->a_log[head]);
        part[width + head] +=
            s->bounded ? bounded_backward(s->dz + row * d, part + head * d, dg, z, bias, d, rate,
                                          s->lower_bound)
                       : softplus_backward(s->dz + row * d, part + head * d, dg, z, bias, d, rate);
    }
}

void cpu_kda_gate_backward(struct device *dev, float *dz, float *acc_d_dt_bias, float *acc_d_a_log,
                           const float *dg, const float *z, const float *dt_bias,
                           const float *a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                           float lower_bound)
{
    int64_t width = (int64_t)n_heads * d, size = width + n_heads;
    int64_t n_parts = cpu_n_tasks(n, BLOCK_ROWS);
    float *sum = cpu_shared(dev, (size_t)((n_parts + 1) * size) * sizeof *sum);
    struct kda_gate s = {
        .dz = dz, .parts = sum + size, .dg = dg, .z = z, .dt_bias = dt_bias, .a_log = a_log,
        .n_heads = n_heads, .d = d, .bounded = bounded, .lower_bound = lower_bound,
    };
    cpu_for(dev, n, BLOCK_ROWS, gate_backward_rows, &s);
    memset(sum, 0, (size_t)size * sizeof *sum);
    cpu_add_parts(dev, sum, s.parts, n_parts, size);
    for (int64_t j = 0; j < width; j++)
        acc_d_dt_bias[j] += sum[j];
    for (int32_t h = 0; h < n_heads; h++)
        acc_d_a_log[h] += sum[width + h];
}
