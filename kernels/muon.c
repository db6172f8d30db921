/* muon.c - momentum made orthogonal: Newton-Schulz, and the step that takes it
 *
 * Five rounds of a quintic that pulls singular values towards 1 (it leaves them within 0.7 to 1.2,
 * which is enough). A tall matrix is multiplied from the right and a wide one from the left, so
 * that the square of it is the smaller one. Blocks go one after the other, each product spread
 * over the threads. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/product.h"

#define ROUNDS    5
#define SUM_BLOCK 8192

static const float quintic[3] = {3.4445f, -4.7750f, 2.0315f};

/* What orthogonalising one block needs. */
struct scratch {
    float *next;           /* (rows, cols) */
    float *square, *poly;  /* (m, m), m the lesser of rows and cols */
    double *sums;
};

static size_t scratch_bytes(int64_t rows, int64_t cols)
{
    int64_t m = min_i64(rows, cols);
    return (size_t)cpu_n_tasks(rows * cols, SUM_BLOCK) * sizeof(double) +
           (size_t)(rows * cols + 2 * m * m) * sizeof(float);
}

static struct scratch carve(void *at, int64_t rows, int64_t cols)
{
    int64_t m = min_i64(rows, cols);
    struct scratch s = {.sums = at};
    s.next = (float *)(s.sums + cpu_n_tasks(rows * cols, SUM_BLOCK));
    s.square = s.next + rows * cols;
    s.poly = s.square + m * m;
    return s;
}

struct vectors {
    float *x, *w, *m;
    const float *grad;
    double *sums;
    float   scale, step, keep;
    const struct muon_config *config;
};

static void sum_squares(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct vectors *s = arg;
    const float *x = s->x;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; i++)
        sum += (double)x[i] * x[i];
    s->sums[begin / SUM_BLOCK] = sum;
}

static void scale_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct vectors *s = arg;
    for (int64_t i = begin; i < end; i++)
        s->x[i] *= s->scale;
}

static void normalise(struct device *dev, float *x, int64_t n, double *sums)
{
    struct vectors s = {.x = x, .sums = sums};
    double sum = 0;
    cpu_for(dev, n, SUM_BLOCK, sum_squares, &s);
    for (int64_t i = 0; i < cpu_n_tasks(n, SUM_BLOCK); i++)
        sum += sums[i];
    s.scale = (float)(1 / (sqrt(sum) + 1e-7));
    cpu_for(dev, n, cpu_grain(1), scale_range, &s);
}

/* With A = X X^T: X <- a X + (b A + c A^2) X, and alike from the right. */
static void round_of(struct device *dev, float *x, int64_t rows, int64_t cols,
                     const struct scratch *s)
{
    int64_t m = min_i64(rows, cols);
    bool tall = rows > cols;
    struct matrix across = tall ? transposed(x, cols) : as_is(x, cols);
    struct matrix down = tall ? as_is(x, cols) : transposed(x, cols);
    struct matrix square = as_is(s->square, m), poly = as_is(s->poly, m);
    product_spread(dev, s->square, m, across, down, m, m, tall ? rows : cols, 1, 0);
    memcpy(s->poly, s->square, (size_t)(m * m) * sizeof *s->poly);
    product_spread(dev, s->poly, m, square, square, m, m, m, quintic[2], quintic[1]);
    memcpy(s->next, x, (size_t)(rows * cols) * sizeof *x);
    product_spread(dev, s->next, cols, tall ? down : poly, tall ? poly : across, rows, cols, m, 1,
                   quintic[0]);
    memcpy(x, s->next, (size_t)(rows * cols) * sizeof *x);
}

static void orthogonalise(struct device *dev, float *x, int64_t rows, int64_t cols,
                          int32_t n_rounds, const struct scratch *s)
{
    normalise(dev, x, rows * cols, s->sums);
    for (int32_t i = 0; i < n_rounds; i++)
        round_of(dev, x, rows, cols, s);
}

void cpu_newton_schulz(struct device *dev, float *x, int32_t n_blocks, int64_t rows, int64_t cols,
                       int32_t n_steps)
{
    struct scratch s = carve(cpu_shared(dev, scratch_bytes(rows, cols)), rows, cols);
    for (int32_t i = 0; i < n_blocks; i++)
        orthogonalise(dev, x + i * rows * cols, rows, cols, n_steps, &s);
}

static void momentum_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct vectors *s = arg;
    float mu = s->config->momentum, grad_scale = s->config->grad_scale;
    for (int64_t i = begin; i < end; i++) {
        float g = s->grad[i] * grad_scale;
        s->m[i] = mu * s->m[i] + g;
        s->x[i] = s->config->nesterov ? g + mu * s->m[i] : s->m[i];
    }
}

static void step_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct vectors *s = arg;
    for (int64_t i = begin; i < end; i++)
        s->w[i] = s->w[i] * s->keep - s->step * s->x[i];
}

void cpu_muon(struct device *dev, float *w, float *m, const float *grad, int32_t n_heads,
              int64_t rows, int64_t cols, const struct muon_config *config)
{
    int64_t n = rows * cols;
    char *shared = cpu_shared(dev, scratch_bytes(rows, cols) + (size_t)n * sizeof(float));
    struct scratch scratch = carve(shared, rows, cols);
    double larger = (double)max_i64(rows, cols);
    struct vectors s = {
        .x = (float *)(shared + scratch_bytes(rows, cols)), .config = config,
        .step = (float)(config->lr * (double)config->rms * sqrt(larger)),
        .keep = (float)(1 - (double)config->lr * config->weight_decay),
    };
    for (int32_t h = 0; h < n_heads; h++) {
        s.w = w + h * n;
        s.m = m + h * n;
        s.grad = grad + h * n;
        cpu_for(dev, n, cpu_grain(4), momentum_range, &s);
        orthogonalise(dev, s.x, rows, cols, ROUNDS, &scratch);
        cpu_for(dev, n, cpu_grain(4), step_range, &s);
    }
}
