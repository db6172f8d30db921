/* attn_res.c - attention residuals: softmax over the rows of the bank and the running sum
 *
 * Per token, with wt = g w (elementwise) and r_n = rsqrt(mean(R_n^2) + eps):
 *   s_n = r_n (R_n . wt),  a = softmax(s),  y = sum a_n R_n */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

#define BLOCK_ROWS 64 /* tokens whose weight gradient is summed by one task */

struct attn_res {
    float *y, *weights_out, *d_wt_parts;
    float *const *acc_dr;
    const float *const *r;
    const float *dy, *weights, *wt;
    int32_t n_rows;
    int64_t d;
    float   eps;
};

static void product_of_weights(float *wt, const float *g, const float *w, int64_t d)
{
    for (int64_t j = 0; j < d; j++)
        wt[j] = g[j] * w[j];
}

/* r_n, and in out_dot R_n . wt. */
static float row_norm(const float *restrict row, const float *restrict wt, int64_t d, float eps,
                      float *out_dot)
{
    float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
    for (int64_t j = 0; j < d; j++) {
        squares += row[j] * row[j];
        dot += row[j] * wt[j];
    }
    *out_dot = dot;
    return 1 / sqrtf(squares / (float)d + eps);
}

static void softmax(float *x, int32_t n)
{
    float max = x[0], sum = 0;
    for (int32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (int32_t i = 0; i < n; i++)
        sum += x[i] = expf(x[i] - max);
    for (int32_t i = 0; i < n; i++)
        x[i] /= sum;
}

/* The sum is built beside, because y may be one of the rows. */
static void mix_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct attn_res *s = arg;
    float *restrict sum = cpu_scratch(thread, (size_t)s->d * sizeof *sum);
    for (int64_t i = begin; i < end; i++) {
        float *a = s->weights_out + i * s->n_rows;
        for (int32_t n = 0; n < s->n_rows; n++) {
            float dot, r = row_norm(s->r[n] + i * s->d, s->wt, s->d, s->eps, &dot);
            a[n] = r * dot;
        }
        softmax(a, s->n_rows);
        memset(sum, 0, (size_t)s->d * sizeof *sum);
        for (int32_t n = 0; n < s->n_rows; n++) {
            const float *restrict row = s->r[n] + i * s->d;
            for (int64_t j = 0; j < s->d; j++)
                sum[j] += a[n] * row[j];
        }
        memcpy(s->y + i * s->d, sum, (size_t)s->d * sizeof *sum);
    }
}

void cpu_attn_res(struct device *dev, float *y, float *weights, const float *const *r,
                  int32_t n_rows, const float *g, const float *w, int64_t n, int64_t d, float eps)
{
    float *wt = cpu_shared(dev, (size_t)d * sizeof *wt);
    product_of_weights(wt, g, w, d);
    struct attn_res s = {
        .y = y, .weights_out = weights, .r = r, .wt = wt, .n_rows = n_rows, .d = d, .eps = eps,
    };
    cpu_for(dev, n, cpu_grain(d * n_rows), mix_rows, &s);
}

static float row_dot(const float *restrict a, const float *restrict b, int64_t d)
{
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < d; j++)
        dot += a[j] * b[j];
    return dot;
}

/* da_n = R_n . dy, ds = a (da - a . da); dR_n += a_n dy + ds_n r_n (wt - k_n (k_n . wt) / d) with
 * k_n = r_n R_n; dwt += ds_n k_n. */
static void mix_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct attn_res *s = arg;
    float *da = cpu_scratch(thread, (size_t)s->n_rows * sizeof *da);
    float *restrict d_wt = s->d_wt_parts + begin / BLOCK_ROWS * s->d;
    const float *restrict wt = s->wt;
    memset(d_wt, 0, (size_t)s->d * sizeof *d_wt);
    for (int64_t i = begin; i < end; i++) {
        const float *restrict dy = s->dy + i * s->d;
        const float *a = s->weights + i * s->n_rows;
        float mean = 0;
        for (int32_t n = 0; n < s->n_rows; n++) {
            da[n] = row_dot(s->r[n] + i * s->d, dy, s->d);
            mean += a[n] * da[n];
        }
        for (int32_t n = 0; n < s->n_rows; n++) {
            const float *restrict row = s->r[n] + i * s->d;
            float *restrict dr = s->acc_dr[n] + i * s->d;
            float dot, r = row_norm(row, wt, s->d, s->eps, &dot);
            float ds = a[n] * (da[n] - mean), weight = a[n];
            float of_wt = ds * r, of_row = ds * r * r * r * dot / (float)s->d;
            for (int64_t j = 0; j < s->d; j++) {
                dr[j] += weight * dy[j] + of_wt * wt[j] - of_row * row[j];
                d_wt[j] += of_wt * row[j];
            }
        }
    }
}

void cpu_attn_res_backward(struct device *dev, float *const *acc_dr, float *acc_dg, float *acc_dw,
                           const float *dy, const float *const *r, const float *weights,
                           int32_t n_rows, const float *g, const float *w, int64_t n, int64_t d,
                           float eps)
{
    int64_t n_parts = cpu_n_tasks(n, BLOCK_ROWS);
    float *wt = cpu_shared(dev, (size_t)((n_parts + 2) * d) * sizeof *wt), *d_wt = wt + d;
    product_of_weights(wt, g, w, d);
    struct attn_res s = {
        .acc_dr = acc_dr, .d_wt_parts = d_wt + d, .r = r, .dy = dy, .weights = weights, .wt = wt,
        .n_rows = n_rows, .d = d, .eps = eps,
    };
    cpu_for(dev, n, BLOCK_ROWS, mix_backward_rows, &s);
    memset(d_wt, 0, (size_t)d * sizeof *d_wt);
    cpu_add_parts(dev, d_wt, s.d_wt_parts, n_parts, d);
    for (int64_t j = 0; j < d; j++) {
        acc_dg[j] += d_wt[j] * w[j];
        acc_dw[j] += d_wt[j] * g[j];
    }
}
