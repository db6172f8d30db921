/* elementwise.c - sums over whole buffers and the simplest updates */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"

#define SUM_BLOCK 8192 /* elements that one double sums */

struct vectors {
    float *y;
    const float *x;
    float   a;
    double *sums;
    bool   *flags;
};

static void axpy_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    struct vectors *s = arg;
    float *restrict y = s->y;
    const float *restrict x = s->x;
    float a = s->a;
    for (int64_t i = begin; i < end; i++)
        y[i] += a * x[i];
}

void cpu_axpy(struct device *dev, float *y, float a, const float *x, int64_t n)
{
    struct vectors s = {.y = y, .x = x, .a = a};
    cpu_for(dev, n, cpu_grain(1), axpy_range, &s);
}

void cpu_add(struct device *dev, float *y, const float *x, int64_t n)
{
    cpu_axpy(dev, y, 1, x, n);
}

/* Elements are float32 here. */
void cpu_cast(struct device *dev, float *y, const float *x, int64_t n)
{
    dev->ops->copy(dev, y, x, (size_t)n * sizeof *y);
}

static void scale_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    struct vectors *s = arg;
    float a = s->a;
    for (int64_t i = begin; i < end; i++)
        s->y[i] *= a;
}

void cpu_scale(struct device *dev, float *y, float a, int64_t n)
{
    struct vectors s = {.y = y, .a = a};
    cpu_for(dev, n, cpu_grain(1), scale_range, &s);
}

static void sum_squares_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    struct vectors *s = arg;
    const float *x = s->x;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; i++)
        sum += (double)x[i] * x[i];
    s->sums[begin / SUM_BLOCK] = sum;
}

void cpu_sum_squares(struct device *dev, double *acc, const float *x, int64_t n)
{
    int64_t n_blocks = cpu_n_tasks(n, SUM_BLOCK);
    struct vectors s = {.x = x, .sums = cpu_shared(dev, (size_t)n_blocks * sizeof(double))};
    cpu_for(dev, n, SUM_BLOCK, sum_squares_range, &s);
    double sum = 0;
    for (int64_t i = 0; i < n_blocks; i++)
        sum += s.sums[i];
    *acc += sum;
}

/* x - x is 0 for finite x only. */
static void all_finite_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    struct vectors *s = arg;
    const float *x = s->x;
    int n_bad = 0;
#pragma omp simd reduction(+ : n_bad)
    for (int64_t i = begin; i < end; i++)
        n_bad += x[i] - x[i] != 0;
    s->flags[begin / SUM_BLOCK] = n_bad == 0;
}

void cpu_all_finite(struct device *dev, int32_t *acc_bad, const float *x, int64_t n)
{
    int64_t n_blocks = cpu_n_tasks(n, SUM_BLOCK);
    struct vectors s = {.x = x, .flags = cpu_shared(dev, (size_t)n_blocks)};
    cpu_for(dev, n, SUM_BLOCK, all_finite_range, &s);
    for (int64_t i = 0; i < n_blocks; i++)
        if (!s.flags[i])
            *acc_bad = 1;
}
