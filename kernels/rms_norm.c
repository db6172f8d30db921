/* rms_norm.c - y = w x rsqrt(mean x^2 + eps) */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

#define BLOCK_ROWS 128 /* whose dw is summed by one task */

struct rms_norm {
    float *y, *rstd, *dx, *dw_parts;
    const float *x, *w, *dy, *rstd_in;
    int64_t d;
    float   eps, beta;
};

static void norm_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct rms_norm *s = arg;
    const float *restrict w = s->w;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict x = s->x + i * s->d;
        float *restrict y = s->y + i * s->d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < s->d; j++)
            sum += x[j] * x[j];
        float r = 1 / sqrtf(sum / (float)s->d + s->eps);
        for (int64_t j = 0; j < s->d; j++)
            y[j] = w[j] * (x[j] * r);
        s->rstd[i] = r;
    }
}

void cpu_rms_norm(struct device *dev, float *y, float *rstd, const float *x, const float *w,
                  int64_t n, int64_t d, float eps)
{
    struct rms_norm s = {.y = y, .rstd = rstd, .x = x, .w = w, .d = d, .eps = eps};
    cpu_for(dev, n, cpu_grain(d), norm_rows, &s);
}

/* With xn = x r: dx = r (w dy - xn mean(w dy xn)), dw = sum dy xn. */
static void norm_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct rms_norm *s = arg;
    const float *restrict w = s->w;
    float *restrict dw = s->dw_parts + begin / BLOCK_ROWS * s->d;
    memset(dw, 0, (size_t)s->d * sizeof *dw);
    for (int64_t i = begin; i < end; i++) {
        const float *restrict x = s->x + i * s->d, *restrict dy = s->dy + i * s->d;
        float *restrict dx = s->dx + i * s->d;
        float r = s->rstd_in[i], dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < s->d; j++)
            dot += w[j] * dy[j] * x[j];
        float along = dot * r * r / (float)s->d; /* of x */
        if (s->beta == 0) {
            for (int64_t j = 0; j < s->d; j++)
                dx[j] = r * (w[j] * dy[j] - x[j] * along);
        } else {
            for (int64_t j = 0; j < s->d; j++)
                dx[j] = s->beta * dx[j] + r * (w[j] * dy[j] - x[j] * along);
        }
        for (int64_t j = 0; j < s->d; j++)
            dw[j] += dy[j] * (x[j] * r);
    }
}

void cpu_rms_norm_backward(struct device *dev, float *dx, float *acc_dw, const float *dy,
                           const float *x, const float *w, const float *rstd, int64_t n, int64_t d,
                           float beta)
{
    int64_t n_parts = cpu_n_tasks(n, BLOCK_ROWS);
    struct rms_norm s = {
        .dx = dx, .dy = dy, .x = x, .w = w, .rstd_in = rstd, .d = d, .beta = beta,
        .dw_parts = cpu_shared(dev, (size_t)(n_parts * d) * sizeof(float)),
    };
    cpu_for(dev, n, BLOCK_ROWS, norm_backward_rows, &s);
    cpu_add_parts(dev, acc_dw, s.dw_parts, n_parts, d);
}
