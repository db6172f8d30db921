/* gated_rms_norm.c - KDA's output: rms_norm(o) w sigmoid(g), a row per token and head */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"
#include "kernels/vmath.h"

#define BLOCK_ROWS 256 /* whose dw is summed by one task */

struct gated {
    float *y, *rstd, *d_o, *dg, *dw_parts;
    const float *o, *g, *w, *dy, *rstd_in;
    int64_t d;
    float   eps;
};

static void gated_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct gated *s = arg;
    const float *restrict w = s->w;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict o = s->o + i * s->d, *restrict g = s->g + i * s->d;
        float *restrict y = s->y + i * s->d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < s->d; j++)
            sum += o[j] * o[j];
        float r = 1 / sqrtf(sum / (float)s->d + s->eps);
        for (int64_t j = 0; j < s->d; j++)
            y[j] = w[j] * (o[j] * r) * vm_sigmoid(g[j]);
        s->rstd[i] = r;
    }
}

void cpu_gated_rms_norm(struct device *dev, float *y, float *rstd, const float *o, const float *g,
                        const float *w, int64_t n_rows, int64_t d, float eps)
{
    struct gated s = {.y = y, .rstd = rstd, .o = o, .g = g, .w = w, .d = d, .eps = eps};
    cpu_for(dev, n_rows, cpu_grain(d), gated_rows, &s);
}

/* d_o holds the gradient of the norm's output, w included, until its row is known whole. */
static void gated_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct gated *s = arg;
    const float *restrict w = s->w;
    float *restrict dw = s->dw_parts + begin / BLOCK_ROWS * s->d;
    memset(dw, 0, (size_t)s->d * sizeof *dw);
    for (int64_t i = begin; i < end; i++) {
        const float *restrict o = s->o + i * s->d, *restrict g = s->g + i * s->d;
        const float *restrict dy = s->dy + i * s->d;
        float *restrict d_o = s->d_o + i * s->d, *restrict dg = s->dg + i * s->d;
        float r = s->rstd_in[i], dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < s->d; j++) {
            float gate = vm_sigmoid(g[j]), normed = o[j] * r;
            float through = dy[j] * gate;
            dg[j] = w[j] * normed * through * (1 - gate);
            dw[j] += normed * through;
            d_o[j] = w[j] * through;
            dot += w[j] * through * o[j];
        }
        float along = dot * r * r / (float)s->d;
        for (int64_t j = 0; j < s->d; j++)
            d_o[j] = r * (d_o[j] - o[j] * along);
    }
}

void cpu_gated_rms_norm_backward(struct device *dev, float *d_o, float *dg, float *acc_dw,
                                 const float *dy, const float *o, const float *g, const float *w,
                                 const float *rstd, int64_t n_rows, int64_t d)
{
    int64_t n_parts = cpu_n_tasks(n_rows, BLOCK_ROWS);
    struct gated s = {
        .d_o = d_o, .dg = dg, .dy = dy, .o = o, .g = g, .w = w, .rstd_in = rstd, .d = d,
        .dw_parts = cpu_shared(dev, (size_t)(n_parts * d) * sizeof(float)),
    };
    cpu_for(dev, n_rows, BLOCK_ROWS, gated_backward_rows, &s);
    cpu_add_parts(dev, acc_dw, s.dw_parts, n_parts, d);
}
