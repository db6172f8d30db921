/* adamw.cu - decoupled AdamW in one pass over parameters, moments and gradient */
#include "kernels/cuda_elem.cuh"

#define THREADS 256

struct step {
    float keep, size, root2, beta1, beta2, eps, grad_scale;
};

__device__ __forceinline__ void update(float &w, float &m, float &v, float grad, const step &s)
{
    float g = grad * s.grad_scale;
    m += (1 - s.beta1) * (g - m);
    v = s.beta2 * v + (1 - s.beta2) * (g * g);
    w = w * s.keep - s.size * (m / (sqrtf(v) / s.root2 + s.eps));
}

__device__ __forceinline__ void store_four(float *to, const float (&x)[4])
{
    *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void store_four(bf16 *to, const float (&x)[4])
{
    *(uint2 *)to = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

template <typename T>
__global__ static void __launch_bounds__(THREADS)
    adamw(float *w, float *m, float *v, T *w_elems, const float *grad, int64_t n, bool in_vectors,
          step s)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (in_vectors && i + 4 <= n) {
        float a[4], b[4], c[4], g[4];
        load_vector(w + i, a);
        load_vector(m + i, b);
        load_vector(v + i, c);
        load_vector(grad + i, g);
#pragma unroll
        for (int j = 0; j < 4; j++)
            update(a[j], b[j], c[j], g[j], s);
        store_vector(w + i, a);
        store_vector(m + i, b);
        store_vector(v + i, c);
        if (w_elems)
            store_four(w_elems + i, a);
    } else {
        for (int64_t j = i; j < n && j < i + 4; j++) {
            update(w[j], m[j], v[j], grad[j], s);
            if (w_elems)
                store(w_elems + j, w[j]);
        }
    }
}

extern "C" void cuda_adamw(struct device *dev, float *w, float *m, float *v, void *w_elems,
                           const float *grad, int64_t n, const struct adamw_config *config)
{
    step s;
    if (n <= 0)
        return;
    s.keep = (float)(1 - (double)config->lr * config->weight_decay);
    s.size = config->lr / config->correction1;
    s.root2 = sqrtf(config->correction2);
    s.beta1 = config->beta1;
    s.beta2 = config->beta2;
    s.eps = config->eps;
    s.grad_scale = config->grad_scale;
    bool in_vectors = is_aligned16(w) && is_aligned16(m) && is_aligned16(v) &&
                      is_aligned16(grad) && (uintptr_t)w_elems % (4 * elem_size(dev)) == 0;
    unsigned n_blocks = (unsigned)ceil_div(n, THREADS * 4);
    ELEM_DISPATCH(dev, T, adamw<T><<<n_blocks, THREADS, 0, cuda_stream(dev)>>>(
                              w, m, v, (T *)w_elems, grad, n, in_vectors, s));
    cuda_check(dev, "adamw", "n=%lld", (long long)n);
}
