/* sparse_attention.cu - latent attention in absorbed form over the keys chosen for each query
 *
 * All heads share the keys, so a query's heads are the rows of one product with its gathered keys,
 * whose first part is also what is summed. bf16 of the usual widths goes to sparse_tensor.cu. */
#include "kernels/cuda_attention.h"

#include "kernels/sparse_tensor.cuh"

/* Scores become weights; a block a row of scores, heads along x and queries along y. */
static __global__ void __launch_bounds__(256) sparse_softmax(float *lse, float *scores,
                                                             sparse_work w)
{
    __shared__ float shared[32];
    int64_t t = w.begin + blockIdx.y, n = w.lists.length(t);
    float *row = scores + w.at(blockIdx.y, blockIdx.x, 0), max = -INFINITY, sum = 0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x)
        max = fmaxf(max, row[j]);
    max = block_max(max, shared);
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        row[j] = expf(row[j] - max);
        sum += row[j];
    }
    sum = block_sum(sum, shared);
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x)
        row[j] /= sum;
    if (threadIdx.x == 0)
        lse[t * w.n_heads + blockIdx.x] = max + logf(sum);
}

template <typename T>
static void forward_plain(struct device *dev, T *o, float *lse, const sparse_operands<T> &x,
                          const key_lists &lists, int64_t n)
{
    cudaStream_t stream = cuda_stream(dev);
    int64_t query_floats = x.n_heads * lists.n_max;
    int64_t block = sparse_block(n, query_floats * (int64_t)sizeof(float));
    float *p = (float *)cuda_scratch_take(dev, (size_t)(block * query_floats) * sizeof *p);
    rows<T> out = whole_rows(o, x.latent);
    for (int64_t begin = 0; begin < n; begin += block) {
        int64_t m = n - begin < block ? n - begin : block;
        sparse_work w = {lists, begin, x.n_heads, 0};
        sparse_dots<T><<<sparse_grid(lists.n_max, x.n_heads, m), TILE_THREADS, 0, stream>>>(
            p, x.q, x.keys, w, x.width, x.scale);
        sparse_softmax<<<dim3((unsigned)x.n_heads, (unsigned)m), 256, 0, stream>>>(lse, p, w);
        sparse_sums<T><<<sparse_grid(x.latent, x.n_heads, m), TILE_THREADS, 0, stream>>>(
            out, p, x.values, w, x.latent);
    }
}

static void forward(struct device *dev, float *o, float *lse, const sparse_operands<float> &x,
                    const key_lists &lists, int64_t n)
{
    forward_plain(dev, o, lse, x, lists, n);
}

static void forward(struct device *dev, bf16 *o, float *lse, const sparse_operands<bf16> &x,
                    const key_lists &lists, int64_t n)
{
    if (!sparse_tensor_forward(dev, o, lse, x, lists, n))
        forward_plain(dev, o, lse, x, lists, n);
}

extern "C" void cuda_sparse_attention(struct device *dev, void *o, float *lse, const void *q_latent,
                                      const void *q_rope, int64_t q_rope_stride,
                                      const void *latent, const void *k_rope,
                                      int64_t k_rope_stride, const int32_t *selected,
                                      const struct sparse_shape *shape)
{
    assert(shape->n_heads > 0 && shape->top_k > 0);
    int64_t n = shape->n_tokens - shape->first;
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    key_lists lists = key_lists_of(dev, selected, shape->top_k, n);
    ELEM_DISPATCH(dev, T,
                  forward(dev, (T *)o, lse,
                          sparse_operands_of<T>(q_latent, q_rope, q_rope_stride, latent, k_rope,
                                                k_rope_stride, shape),
                          lists, n));
    cuda_check(dev, "sparse_attention", "n=%lld heads=%d latent=%d rope=%d top_k=%d",
               (long long)n, shape->n_heads, shape->latent_dim, shape->rope_dim, shape->top_k);
}
