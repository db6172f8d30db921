/* layer_norm.c - y = w (x - mean) / sqrt(var + eps) + b
 *
 * The variance is that of the differences from the mean, in a second pass, so that a mean far
 * from 0 costs no digits. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

#define BLOCK_ROWS 128 /* whose dw and db are summed by one task */

struct layer_norm {
    float *y, *stats, *dx, *parts; /* a part: dw (d), then db (d) */
    const float *x, *w, *b, *dy, *stats_in;
    int64_t d;
    float   eps, beta;
};

static void norm_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct layer_norm *s = arg;
    const float *restrict w = s->w, *restrict b = s->b;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict x = s->x + i * s->d;
        float *restrict y = s->y + i * s->d;
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < s->d; j++)
            sum += x[j];
        float mean = sum / (float)s->d;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < s->d; j++)
            squares += (x[j] - mean) * (x[j] - mean);
        float r = 1 / sqrtf(squares / (float)s->d + s->eps);
        for (int64_t j = 0; j < s->d; j++)
            y[j] = w[j] * ((x[j] - mean) * r) + b[j];
        s->stats[2 * i] = mean;
        s->stats[2 * i + 1] = r;
    }
}

void cpu_layer_norm(struct device *dev, float *y, float *stats, const float *x, const float *w,
                    const float *b, int64_t n, int64_t d, float eps)
{
    struct layer_norm s = {.y = y, .stats = stats, .x = x, .w = w, .b = b, .d = d, .eps = eps};
    cpu_for(dev, n, cpu_grain(d), norm_rows, &s);
}

/* With xn = (x - mean) r and g = w dy: dx = r (g - mean(g) - xn mean(g xn)). */
static void backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct layer_norm *s = arg;
    const float *restrict w = s->w;
    float *restrict dw = s->parts + begin / BLOCK_ROWS * 2 * s->d, *restrict db = dw + s->d;
    memset(dw, 0, (size_t)(2 * s->d) * sizeof *dw);
    for (int64_t i = begin; i < end; i++) {
        const float *restrict x = s->x + i * s->d, *restrict dy = s->dy + i * s->d;
        float *restrict dx = s->dx + i * s->d;
        float mean = s->stats_in[2 * i], r = s->stats_in[2 * i + 1], sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
        for (int64_t j = 0; j < s->d; j++) {
            sum += w[j] * dy[j];
            dot += w[j] * dy[j] * ((x[j] - mean) * r);
        }
        sum /= (float)s->d;
        dot /= (float)s->d;
        for (int64_t j = 0; j < s->d; j++) {
            float xn = (x[j] - mean) * r, g = r * (w[j] * dy[j] - sum - xn * dot);
            dx[j] = s->beta == 0 ? g : s->beta * dx[j] + g;
            dw[j] += dy[j] * xn;
            db[j] += dy[j];
        }
    }
}

void cpu_layer_norm_backward(struct device *dev, float *dx, float *acc_dw, float *acc_db,
                             const float *dy, const float *x, const float *w, const float *stats,
                             int64_t n, int64_t d, float beta)
{
    int64_t n_parts = cpu_n_tasks(n, BLOCK_ROWS);
    float *parts = cpu_shared(dev, (size_t)((n_parts + 1) * 2 * d) * sizeof(float));
    float *sums = parts + n_parts * 2 * d;
    struct layer_norm s = {
        .dx = dx, .dy = dy, .x = x, .w = w, .stats_in = stats, .d = d, .beta = beta,
        .parts = parts,
    };
    cpu_for(dev, n, BLOCK_ROWS, backward_rows, &s);
    memset(sums, 0, (size_t)(2 * d) * sizeof *sums);
    cpu_add_parts(dev, sums, parts, n_parts, 2 * d);
    for (int64_t j = 0; j < d; j++) {
        acc_dw[j] += sums[j];
        acc_db[j] += sums[d + j];
    }
}
