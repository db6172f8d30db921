/* sparse_attention_backward.cu - gradients of attention over chosen keys
 *
 * With D = o . dO per query and head: dS = scale P (dO V^T - D), dq = dS K. A chosen key gets
 * dS^T q and, as it is also the value, P^T dO; sparse.cuh says how queries' parts come together.
 * bf16 of the usual widths goes to sparse_tensor_backward.cu. */
#include "kernels/cuda_attention.h"

#include "kernels/output_dots.cuh"
#include "kernels/sparse_tensor.cuh"

template <typename T>
struct sparse_gradients {
    rows<T> dq, dk;
    const T *d_o;
    const float *lse, *along; /* (n, heads) */
    int64_t first;            /* keys before query 0 */
};

/* p: scores become weights; ds: dP becomes dS. Grid: keys / 256, heads, queries. */
static __global__ void sparse_score_gradients(float *p, float *ds, const float *lse,
                                              const float *along, sparse_work w, float scale)
{
    int64_t t = w.begin + blockIdx.z, j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= w.lists.length(t))
        return;
    int64_t at = w.at(blockIdx.z, blockIdx.y, j), row = t * w.n_heads + blockIdx.y;
    float weight = expf(p[at] - lse[row]);
    p[at] = weight;
    ds[at] = scale * weight * (ds[at] - along[row]);
}

template <typename T>
static void backward_plain(struct device *dev, const sparse_gradients<T> &g, float *acc,
                           const sparse_operands<T> &x, const key_lists &lists, int64_t n)
{
    cudaStream_t stream = cuda_stream(dev);
    int64_t n_max = lists.n_max, query_floats = x.n_heads * n_max;
    int64_t query_bytes = (2 * query_floats + n_max * x.width) * (int64_t)sizeof(float);
    int64_t block = sparse_block(n, query_bytes);
    size_t  weight_bytes = (size_t)(block * query_floats) * sizeof(float);
    float *p = (float *)cuda_scratch_take(dev, weight_bytes);
    float *ds = (float *)cuda_scratch_take(dev, weight_bytes);
    key_parts parts = key_parts_take(dev, block, g.first + n, n_max, x.width);
    rows<const T> d_o = whole_rows(g.d_o, x.latent);
    for (int64_t begin = 0; begin < n; begin += block) {
        int64_t m = n - begin < block ? n - begin : block;
        sparse_work w = {lists, begin, x.n_heads, g.first};
        dim3 dots = sparse_grid(n_max, x.n_heads, m);
        dim3 scores((unsigned)ceil_div(n_max, 256), (unsigned)x.n_heads, (unsigned)m);
        sparse_dots<T><<<dots, TILE_THREADS, 0, stream>>>(p, x.q, x.keys, w, x.width, x.scale);
        sparse_dots<T><<<dots, TILE_THREADS, 0, stream>>>(ds, d_o, x.values, w, x.latent, 1);
        sparse_score_gradients<<<scores, 256, 0, stream>>>(p, ds, g.lse, g.along, w, x.scale);
        sparse_sums<T><<<sparse_grid(x.width, x.n_heads, m), TILE_THREADS, 0, stream>>>(
            g.dq, ds, x.keys, w, x.width);
        sparse_parts<T><<<sparse_grid(x.width, n_max, m), TILE_THREADS, 0, stream>>>(
            parts, ds, x.q, p, d_o, x.latent, w);
        sparse_collect(dev, acc, parts, w, m);
    }
}

static void gradients(struct device *dev, const sparse_gradients<float> &g, float *acc,
                      const sparse_operands<float> &x, const key_lists &lists, int64_t n)
{
    backward_plain(dev, g, acc, x, lists, n);
}

static void gradients(struct device *dev, const sparse_gradients<bf16> &g, float *acc,
                      const sparse_operands<bf16> &x, const key_lists &lists, int64_t n)
{
    if (!sparse_tensor_backward(dev, acc, g.dq, g.d_o, g.lse, g.along, x, lists, g.first, n))
        backward_plain(dev, g, acc, x, lists, n);
}

template <typename T>
static void backward(struct device *dev, sparse_gradients<T> g, float *acc, const T *o,
                     const sparse_operands<T> &x, const key_lists &lists, int64_t n)
{
    int64_t n_rows = n * x.n_heads;
    float *along = (float *)cuda_scratch_take(dev, (size_t)n_rows * sizeof *along);
    output_dots_of(dev, along, g.d_o, o, n_rows, x.latent);
    g.along = along;
    gradients(dev, g, acc, x, lists, n);
    sparse_store<T><<<(unsigned)ceil_div(n * x.width, 256), 256, 0, cuda_stream(dev)>>>(
        g.dk, acc + g.first * x.width, n, x.width);
}

extern "C" void cuda_sparse_attention_backward(
    struct device *dev, void *dq_latent, void *dq_rope, int64_t dq_rope_stride, void *d_latent,
    void *dk_rope, int64_t dk_rope_stride, const void *d_o, const void *o, const float *lse,
    const void *q_latent, const void *q_rope, int64_t q_rope_stride, const void *latent,
    const void *k_rope, int64_t k_rope_stride, const int32_t *selected,
    const struct sparse_shape *shape)
{
    assert(shape->n_heads > 0 && shape->n_heads <= 65535 && shape->top_k > 0);
    assert(shape->later || shape->first == 0);
    int64_t n = shape->n_tokens - shape->first;
    int32_t d = shape->latent_dim;
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    float *acc = shape->later;
    if (!acc)
        acc = sparse_sums_take(dev, shape->n_tokens, d + shape->rope_dim);
    key_lists lists = key_lists_of(dev, selected, shape->top_k, n);
    ELEM_DISPATCH(dev, T,
                  backward<T>(dev,
                              {{(T *)dq_latent, (T *)dq_rope, d, dq_rope_stride, d},
                               {(T *)d_latent, (T *)dk_rope, d, dk_rope_stride, d},
                               (const T *)d_o, lse, nullptr, shape->first},
                              acc, (const T *)o,
                              sparse_operands_of<T>(q_latent, q_rope, q_rope_stride, latent,
                                                    k_rope, k_rope_stride, shape),
                              lists, n));
    cuda_check(dev, "sparse_attention_backward", "n=%lld heads=%d latent=%d rope=%d top_k=%d",
               (long long)n, shape->n_heads, d, shape->rope_dim, shape->top_k);
}
