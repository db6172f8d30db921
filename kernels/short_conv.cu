/* short_conv.cu - silu of a causal depthwise convolution over each document
 *
 * A thread owns V channels and walks down (backward: up) a run of rows with the window in
 * registers. K is the length of that window: the kernel's, or more with leading taps of 0. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_columns.cuh"
#include "kernels/cuda_math.cuh"

#define KERNEL_SHORT 4 /* windows up to this are held for vectors of channels */
#define KERNEL_MAX   16

struct conv_shape {
    const int32_t *cu_seqlens;
    int32_t n_docs, kernel;
    int64_t n, channels, n_column_blocks, run_rows;
};

/* taps[t] of V channels, the last one on the current row. */
template <typename T, int V, int K>
__device__ __forceinline__ void load_taps(float (&taps)[K][V], const T *w, int64_t channel,
                                          int32_t kernel)
{
#pragma unroll
    for (int t = 0; t < K; t++)
#pragma unroll
        for (int k = 0; k < V; k++) {
            int at = t - (K - kernel);
            taps[t][k] = at < 0 ? 0 : load(w + (channel + k) * kernel + at);
        }
}

template <int V, int K> __device__ __forceinline__ void shift_window(float (&window)[K][V])
{
#pragma unroll
    for (int t = 0; t + 1 < K; t++)
#pragma unroll
        for (int k = 0; k < V; k++)
            window[t][k] = window[t + 1][k];
}

template <int V, int K> __device__ __forceinline__ void clear_window(float (&window)[K][V])
{
#pragma unroll
    for (int t = 0; t < K; t++)
#pragma unroll
        for (int k = 0; k < V; k++)
            window[t][k] = 0;
}

template <typename T, int V, int K>
__global__ static void conv_rows(T *__restrict__ y, T *__restrict__ pre, const T *__restrict__ x,
                                 const T *__restrict__ w, struct conv_shape s)
{
    int64_t run = blockIdx.x / s.n_column_blocks, block = blockIdx.x % s.n_column_blocks;
    int64_t channel = (block * COLUMN_THREADS + threadIdx.x) * V;
    if (channel >= s.channels)
        return;
    int64_t begin = run * s.run_rows, end = min(begin + s.run_rows, s.n);
    int32_t doc = document_of(s.cu_seqlens, s.n_docs, begin);
    int64_t doc_begin = s.cu_seqlens[doc], doc_end = s.cu_seqlens[doc + 1];
    float taps[K][V], window[K][V];
    load_taps<T, V, K>(taps, w, channel, s.kernel);
    clear_window(window);
#pragma unroll
    for (int t = 1; t < K; t++)
        if (begin - (K - t) >= doc_begin)
            load_elems(x + (begin - (K - t)) * s.channels + channel, window[t]);
    for (int64_t i = begin; i < end; i++) {
        while (i >= doc_end) { /* the next one that has rows */
            doc_end = s.cu_seqlens[++doc + 1];
            clear_window(window);
        }
        shift_window(window);
        load_elems(x + i * s.channels + channel, window[K - 1]);
        float sum[V], out[V];
#pragma unroll
        for (int k = 0; k < V; k++) {
            sum[k] = 0;
#pragma unroll
            for (int t = K - 1; t >= 0; t--)
                sum[k] += taps[t][k] * window[t][k];
            out[k] = sum[k] * sigmoid_of<T>(sum[k]);
        }
        store_elems(pre + i * s.channels + channel, sum);
        store_elems(y + i * s.channels + channel, out);
    }
}

/* window[t] holds d_pre of the row K - 1 - t ahead: that row has this one under tap t. Walking up,
 * the window slides the other way. A part is dw as acc_dw lies. */
template <typename T, int V, int K>
__global__ static void conv_backward_rows(T *__restrict__ dx, float *__restrict__ parts,
                                          const T *__restrict__ dy, const T *__restrict__ pre,
                                          const T *__restrict__ x, const T *__restrict__ w,
                                          struct conv_shape s)
{
    int64_t run = blockIdx.x / s.n_column_blocks, block = blockIdx.x % s.n_column_blocks;
    int64_t channel = (block * COLUMN_THREADS + threadIdx.x) * V;
    if (channel >= s.channels)
        return;
    int64_t begin = run * s.run_rows, end = min(begin + s.run_rows, s.n);
    int32_t doc = document_of(s.cu_seqlens, s.n_docs, end - 1);
    int64_t doc_begin = s.cu_seqlens[doc], doc_end = s.cu_seqlens[doc + 1];
    float taps[K][V], window[K][V], dw[K][V];
    load_taps<T, V, K>(taps, w, channel, s.kernel);
    clear_window(window);
    clear_window(dw);
    for (int64_t i = min(end - 1 + K - 1, doc_end - 1); i >= begin; i--) {
        while (i < doc_begin) {
            doc_begin = s.cu_seqlens[--doc];
            clear_window(window);
        }
        float out[V], gradient[V];
        shift_window(window);
        load_elems(pre + i * s.channels + channel, out);
        load_elems(dy + i * s.channels + channel, gradient);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float gate = sigmoid_of<T>(out[k]);
            window[K - 1][k] = gradient[k] * gate * (1 + out[k] * (1 - gate));
        }
        if (i >= end)
            continue; /* of the next run; it only fills the window */
        load_elems(x + i * s.channels + channel, gradient);
#pragma unroll
        for (int k = 0; k < V; k++) {
            out[k] = 0;
#pragma unroll
            for (int t = K - 1; t >= 0; t--) {
                out[k] += taps[t][k] * window[t][k];
                dw[t][k] += gradient[k] * window[t][k];
            }
        }
        store_elems(dx + i * s.channels + channel, out);
    }
    float *part = parts + run * s.channels * s.kernel;
#pragma unroll
    for (int t = 0; t < K; t++)
#pragma unroll
        for (int k = 0; k < V; k++)
            if (t >= K - s.kernel)
                part[(channel + k) * s.kernel + t - (K - s.kernel)] = dw[t][k];
}

static struct conv_shape conv_shape_of(struct device *dev, const int32_t *cu_seqlens,
                                       int32_t n_docs, int64_t channels, int32_t kernel,
                                       const struct column_plan *plan)
{
    assert(kernel >= 1 && kernel <= KERNEL_MAX);
    const void *cu = cuda_upload(dev, cu_seqlens, (size_t)(n_docs + 1) * sizeof *cu_seqlens);
    return {(const int32_t *)cu,   n_docs,        kernel, cu_seqlens[n_docs], channels,
            plan->n_column_blocks, plan->run_rows};
}

void cuda_short_conv(struct device *dev, elem_ptr y, elem_ptr pre, const_elem_ptr x,
                     const_elem_ptr w, const int32_t *cu_seqlens, int32_t n_docs, int64_t channels,
                     int32_t kernel)
{
    int64_t n = cu_seqlens[n_docs];
    if (n == 0)
        return;
    bool vectors = kernel <= KERNEL_SHORT && rows_are_aligned(dev, channels, {y, pre, x});
    struct column_plan plan = column_plan_of(dev, n, vectors_of(dev, channels, vectors));
    struct conv_shape s = conv_shape_of(dev, cu_seqlens, n_docs, channels, kernel, &plan);
    VECTOR_DISPATCH(dev, vectors, T, V, constexpr int K = V > 1 ? KERNEL_SHORT : KERNEL_MAX;
                    conv_rows<T, V, K><<<plan.n_blocks, COLUMN_THREADS, 0, cuda_stream(dev)>>>(
                        (T *)y, (T *)pre, (const T *)x, (const T *)w, s));
    cuda_check(dev, "short_conv", "n=%lld channels=%lld kernel=%d", (long long)n,
               (long long)channels, kernel);
}

void cuda_short_conv_backward(struct device *dev, elem_ptr dx, float *acc_dw, const_elem_ptr dy,
                              const_elem_ptr pre, const_elem_ptr x, const_elem_ptr w,
                              const int32_t *cu_seqlens, int32_t n_docs, int64_t channels,
                              int32_t kernel)
{
    int64_t n = cu_seqlens[n_docs], size = channels * kernel;
    if (n == 0)
        return;
    bool vectors = kernel <= KERNEL_SHORT && rows_are_aligned(dev, channels, {dx, dy, pre, x});
    struct column_plan plan = column_plan_of(dev, n, vectors_of(dev, channels, vectors));
    struct conv_shape s = conv_shape_of(dev, cu_seqlens, n_docs, channels, kernel, &plan);
    cuda_scratch_begin(dev);
    float *parts = (float *)cuda_scratch_take(dev, (size_t)(plan.n_runs * size) * sizeof *parts);
    VECTOR_DISPATCH(
        dev, vectors, T, V, constexpr int K = V > 1 ? KERNEL_SHORT : KERNEL_MAX;
        conv_backward_rows<T, V, K><<<plan.n_blocks, COLUMN_THREADS, 0, cuda_stream(dev)>>>(
            (T *)dx, parts, (const T *)dy, (const T *)pre, (const T *)x, (const T *)w, s));
    cuda_add_parts(dev, acc_dw, 1, parts, plan.n_runs, size, size);
    cuda_check(dev, "short_conv_backward", "n=%lld channels=%lld kernel=%d", (long long)n,
               (long long)channels, kernel);
}
