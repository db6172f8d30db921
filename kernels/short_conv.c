/* short_conv.c - silu of a causal depthwise convolution over each document
 *
 * Weights are transposed to (kernel, channels) first, so that the inner loop runs over channels
 * that lie side by side. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"
#include "kernels/vmath.h"

#define BLOCK_ROWS 64 /* whose dw is summed by one task */

struct conv {
    float *y, *pre_out, *dx, *d_pre, *dw_parts;
    const float *dy, *pre, *x, *taps; /* taps (kernel, channels) */
    const int32_t *cu_seqlens;
    int32_t n_docs, kernel;
    int64_t channels;
};

static void transpose_taps(float *taps, const float *w, int64_t channels, int32_t kernel)
{
    for (int32_t t = 0; t < kernel; t++)
        for (int64_t c = 0; c < channels; c++)
            taps[t * channels + c] = w[c * kernel + t];
}

/* The document that row is in. */
static int32_t document_of(const struct conv *s, int64_t row)
{
    int32_t low = 0, high = s->n_docs;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (s->cu_seqlens[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void conv_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct conv *s = arg;
    int32_t doc = document_of(s, begin);
    for (int64_t i = begin; i < end; i++) {
        while (i >= s->cu_seqlens[doc + 1])
            doc++;
        float *restrict pre = s->pre_out + i * s->channels, *restrict y = s->y + i * s->channels;
        memset(pre, 0, (size_t)s->channels * sizeof *pre);
        int64_t back_max = min_i64(s->kernel - 1, i - s->cu_seqlens[doc]);
        for (int64_t back = 0; back <= back_max; back++) {
            const float *restrict x = s->x + (i - back) * s->channels;
            const float *restrict tap = s->taps + (s->kernel - 1 - back) * s->channels;
            for (int64_t c = 0; c < s->channels; c++)
                pre[c] += tap[c] * x[c];
        }
        for (int64_t c = 0; c < s->channels; c++)
            y[c] = pre[c] * vm_sigmoid(pre[c]);
    }
}

void cpu_short_conv(struct device *dev, float *y, float *pre, const float *x, const float *w,
                    const int32_t *cu_seqlens, int32_t n_docs, int64_t channels, int32_t kernel)
{
    float *taps = cpu_shared(dev, (size_t)(channels * kernel) * sizeof *taps);
    transpose_taps(taps, w, channels, kernel);
    struct conv s = {
        .y = y, .pre_out = pre, .x = x, .taps = taps, .cu_seqlens = cu_seqlens, .n_docs = n_docs,
        .kernel = kernel, .channels = channels,
    };
    cpu_for(dev, cu_seqlens[n_docs], cpu_grain(channels * kernel), conv_rows, &s);
}

static void silu_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct conv *s = arg;
    const float *restrict pre = s->pre, *restrict dy = s->dy;
    float *restrict d_pre = s->d_pre;
    for (int64_t i = begin * s->channels; i < end * s->channels; i++) {
        float gate = vm_sigmoid(pre[i]);
        d_pre[i] = dy[i] * gate * (1 + pre[i] * (1 - gate));
    }
}

/* dx of a row comes from the rows after it in its document, dw from the rows before. */
static void conv_backward_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct conv *s = arg;
    int64_t width = s->channels;
    float *dw = s->dw_parts + begin / BLOCK_ROWS * s->kernel * width;
    memset(dw, 0, (size_t)(s->kernel * width) * sizeof *dw);
    int32_t doc = document_of(s, begin);
    for (int64_t i = begin; i < end; i++) {
        while (i >= s->cu_seqlens[doc + 1])
            doc++;
        float *restrict dx = s->dx + i * width;
        const float *restrict x = s->x + i * width;
        memset(dx, 0, (size_t)width * sizeof *dx);
        int64_t ahead_max = min_i64(s->kernel - 1, s->cu_seqlens[doc + 1] - 1 - i);
        for (int64_t ahead = 0; ahead <= ahead_max; ahead++) {
            const float *restrict d_pre = s->d_pre + (i + ahead) * width;
            const float *restrict tap = s->taps + (s->kernel - 1 - ahead) * width;
            float *restrict d_tap = dw + (s->kernel - 1 - ahead) * width;
            for (int64_t c = 0; c < width; c++) {
                dx[c] += tap[c] * d_pre[c];
                d_tap[c] += x[c] * d_pre[c];
            }
        }
    }
}

void cpu_short_conv_backward(struct device *dev, float *dx, float *acc_dw, const float *dy,
                             const float *pre, const float *x, const float *w,
                             const int32_t *cu_seqlens, int32_t n_docs, int64_t channels,
                             int32_t kernel)
{
    int64_t n = cu_seqlens[n_docs], n_parts = cpu_n_tasks(n, BLOCK_ROWS), size = channels * kernel;
    float *shared = cpu_shared(dev, (size_t)(n * channels + (n_parts + 2) * size) * sizeof *shared);
    float *taps = shared, *dw_sum = taps + size, *d_pre = dw_sum + size;
    transpose_taps(taps, w, channels, kernel);
    struct conv s = {
        .dx = dx, .dy = dy, .pre = pre, .x = x, .taps = taps, .d_pre = d_pre,
        .dw_parts = d_pre + n * channels, .cu_seqlens = cu_seqlens, .n_docs = n_docs,
        .kernel = kernel, .channels = channels,
    };
    cpu_for(dev, n, cpu_grain(2 * channels), silu_backward_rows, &s);
    cpu_for(dev, n, BLOCK_ROWS, conv_backward_rows, &s);
    memset(dw_sum, 0, (size_t)size * sizeof *dw_sum);
    cpu_add_parts(dev, dw_sum, s.dw_parts, n_parts, size);
    for (int64_t c = 0; c < channels; c++)
        for (int32_t t = 0; t < kernel; t++)
            acc_dw[c * kernel + t] += dw_sum[t * channels + c];
}
