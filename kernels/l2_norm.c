/* l2_norm.c - rows of length one: y = x / sqrt(sum x^2 + eps) */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"

struct l2_norm {
    float *y, *rstd;
    const float *x;
    int64_t d;
    float   eps;
};

static void l2_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct l2_norm *s = arg;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict x = s->x + i * s->d;
        float *restrict y = s->y + i * s->d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < s->d; j++)
            sum += x[j] * x[j];
        float r = 1 / sqrtf(sum + s->eps);
        for (int64_t j = 0; j < s->d; j++)
            y[j] = x[j] * r;
        s->rstd[i] = r;
    }
}

void cpu_l2_norm(struct device *dev, float *y, float *rstd, const float *x, int64_t n_rows,
                 int64_t d, float eps)
{
    struct l2_norm s = {y, rstd, x, d, eps};
    cpu_for(dev, n_rows, cpu_grain(d), l2_rows, &s);
}

struct l2_norm_backward {
    float *dx;
    const float *dy, *y, *rstd;
    int64_t d;
};

/* dx = rstd (dy - y (y . dy)) */
static void l2_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct l2_norm_backward *s = arg;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict y = s->y + i * s->d, *restrict dy = s->dy + i * s->d;
        float *restrict dx = s->dx + i * s->d;
        float dot = 0, r = s->rstd[i];
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < s->d; j++)
            dot += y[j] * dy[j];
        for (int64_t j = 0; j < s->d; j++)
            dx[j] = r * (dy[j] - y[j] * dot);
    }
}

void cpu_l2_norm_backward(struct device *dev, float *dx, const float *dy, const float *y,
                          const float *rstd, int64_t n_rows, int64_t d)
{
    struct l2_norm_backward s = {dx, dy, y, rstd, d};
    cpu_for(dev, n_rows, cpu_grain(d), l2_backward_rows, &s);
}
