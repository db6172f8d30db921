/* cuda_pointwise.cuh - ops whose every output element depends on the inputs of its own place */
#ifndef KERNELS_CUDA_POINTWISE_CUH
#define KERNELS_CUDA_POINTWISE_CUH

#include "kernels/cuda_rows.cuh"

#define POINTWISE_THREADS 256

template <typename T, int IN, int OUT>
struct pointwise {
    T *out[OUT];
    const T *in[IN];
    int64_t n;
};

/* f(x, y) turns IN floats into OUT. A thread has V elements; the last one what is left. */
template <typename T, int V, int IN, int OUT, typename F>
__global__ static void pointwise_kernel(struct pointwise<T, IN, OUT> p, F f)
{
    int64_t first = ((int64_t)blockIdx.x * POINTWISE_THREADS + threadIdx.x) * V;
    if (first + V <= p.n) {
        float in[IN][V], out[OUT][V];
#pragma unroll
        for (int a = 0; a < IN; a++)
            load_elems(p.in[a] + first, in[a]);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float x[IN], y[OUT];
#pragma unroll
            for (int a = 0; a < IN; a++)
                x[a] = in[a][k];
            f(x, y);
#pragma unroll
            for (int a = 0; a < OUT; a++)
                out[a][k] = y[a];
        }
#pragma unroll
        for (int a = 0; a < OUT; a++)
            store_elems(p.out[a] + first, out[a]);
        return;
    }
    for (int64_t i = first; i < p.n; i++) {
        float x[IN], y[OUT];
#pragma unroll
        for (int a = 0; a < IN; a++)
            x[a] = load(p.in[a] + i);
        f(x, y);
#pragma unroll
        for (int a = 0; a < OUT; a++)
            store(p.out[a] + i, y[a]);
    }
}

template <typename T, int IN, int OUT, typename F>
static void pointwise_launch(struct device *dev, const struct pointwise<T, IN, OUT> &p, F f)
{
    bool vectors = true;
    for (int a = 0; a < IN; a++)
        vectors = vectors && is_aligned16(p.in[a]);
    for (int a = 0; a < OUT; a++)
        vectors = vectors && is_aligned16(p.out[a]);
    constexpr int V = vector_elems<T>;
    if (vectors)
        pointwise_kernel<T, V><<<(unsigned)ceil_div(p.n, V * POINTWISE_THREADS), POINTWISE_THREADS,
                                 0, cuda_stream(dev)>>>(p, f);
    else
        pointwise_kernel<T, 1><<<(unsigned)ceil_div(p.n, POINTWISE_THREADS), POINTWISE_THREADS, 0,
                                 cuda_stream(dev)>>>(p, f);
}

#endif
