/* attention_backward.cu - gradients of latent attention
 *
 * The weights come back from the scores and the forward's log-sum-exp. With D = o . dO per query:
 * dS = scale P (dO V^T - D). bf16 of the usual widths goes to flash_attention_backward.cu. Else a
 * block owns what it writes, 64 rows of 64 columns, and computes P and dS anew for it; the shared
 * key part collects per head, and the heads are added in order. */
#include "kernels/cuda_attention.h"

#include "kernels/attention.cuh"
#include "kernels/flash.cuh"
#include "kernels/output_dots.cuh"

template <typename T>
struct attention_gradients {
    T *dq, *dkv;
    float *dk_rope_heads; /* (heads, n, rope) */
    const T *d_o;
    const float *lse, *along; /* (n, heads) */
    attention_view<T> x;
};

/* p and ds (64 queries, 64 keys) in shared memory; either may be NULL. */
template <typename T>
__device__ __forceinline__ void gradient_tiles(float (*p)[TILE + 1], float (*ds)[TILE + 1],
                                               tile_buffers &s, const attention_gradients<T> &g,
                                               int head, int64_t query, int64_t key)
{
    const attention_view<T> &x = g.x;
    float scores[4][4], dots[4][4];
    int row = tile_row(), column = tile_column();
    attention_tile(scores, s, x.queries(head), query, x.keys(head), key, x.n, x.key_dim());
    if (ds)
        attention_tile(dots, s, x.of_values(g.d_o, head), query, x.values(head), key, x.n, x.v);
    for (int i = 0; i < 4; i++) {
        int64_t t = query + row + i, at = t * x.n_heads + head;
        float lse = t < x.n ? g.lse[at] : 0, along = t < x.n ? g.along[at] : 0;
        for (int j = 0; j < 4; j++) {
            bool sees = x.sees(t, key + column + j);
            float weight = sees ? expf(x.scale * scores[i][j] - lse) : 0;
            if (p)
                p[row + i][column + j] = weight;
            if (ds)
                ds[row + i][column + j] = x.scale * weight * (dots[i][j] - along);
        }
    }
}

/* 64 columns of dq: ds k over the keys. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS) attention_dq(attention_gradients<T> g)
{
    __shared__ tile_buffers s;
    __shared__ float ds[TILE][TILE + 1];
    const attention_view<T> &x = g.x;
    int64_t query = (int64_t)blockIdx.x * TILE, first = (int64_t)blockIdx.z * TILE;
    int head = (int)blockIdx.y, row = tile_row(), column = tile_column();
    int64_t n_keys = query + TILE < x.n ? query + TILE : x.n;
    rows<const T> keys = x.keys(head);
    float acc[4][4];
    tile_zero(acc);
    for (int64_t key = attention_first_key(x.docs, query); key < n_keys; key += TILE) {
        gradient_tiles<T>(nullptr, ds, s, g, head, query, key);
        tile_product<true, false>(
            acc, s, TILE, [&](int i, int64_t k) { return ds[i][k]; },
            [&](int j, int64_t k) {
                bool within = key + k < x.n && first + j < x.key_dim();
                return within ? load(keys.at(key + k, first + j)) : 0.0f;
            });
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t t = query + row + i, c = first + column + j;
            if (t < x.n && c < x.key_dim())
                store(g.dq + t * x.q_stride() + (int64_t)head * x.key_dim() + c, acc[i][j]);
        }
}

/* acc (64 keys, 64 columns from first) = sum over the queries that see them of p^T dO or ds^T q. */
template <bool VALUES, typename T>
__device__ __forceinline__ void key_sums(float (&acc)[4][4], tile_buffers &s,
                                         float (*weights)[TILE + 1],
                                         const attention_gradients<T> &g, int head, int64_t key,
                                         int64_t first)
{
    const attention_view<T> &x = g.x;
    int64_t last = key + TILE < x.n ? key + TILE - 1 : x.n - 1, end = x.docs.end[last];
    rows<const T> from = VALUES ? x.of_values(g.d_o, head) : x.queries(head);
    int32_t width = VALUES ? x.v : x.key_dim();
    tile_zero(acc);
    for (int64_t query = key; query < end; query += TILE) {
        gradient_tiles<T>(VALUES ? weights : nullptr, VALUES ? nullptr : weights, s, g, head, query,
                          key);
        tile_product<false, false>(
            acc, s, TILE, [&](int i, int64_t k) { return weights[k][i]; },
            [&](int j, int64_t k) {
                bool within = query + k < x.n && first + j < width;
                return within ? load(from.at(query + k, first + j)) : 0.0f;
            });
    }
}

/* The first blocks along z make the keys' gradient, the others the values'. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS) attention_dkv(attention_gradients<T> g)
{
    __shared__ tile_buffers s;
    __shared__ float weights[TILE][TILE + 1];
    const attention_view<T> &x = g.x;
    int64_t key = (int64_t)blockIdx.x * TILE;
    int head = (int)blockIdx.y, n_key_tiles = (x.key_dim() + TILE - 1) / TILE;
    bool of_values = (int)blockIdx.z >= n_key_tiles;
    int64_t first = ((int64_t)blockIdx.z - (of_values ? n_key_tiles : 0)) * TILE;
    float acc[4][4];
    if (of_values)
        key_sums<true>(acc, s, weights, g, head, key, first);
    else
        key_sums<false>(acc, s, weights, g, head, key, first);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t t = key + tile_row() + i, c = first + tile_column() + j;
            T *row = g.dkv + t * x.kv_stride() + (int64_t)head * (x.nope + x.v);
            if (t >= x.n || c >= (of_values ? x.v : x.key_dim()))
                continue;
            if (of_values)
                store(row + x.nope + c, acc[i][j]);
            else if (c < x.nope)
                store(row + c, acc[i][j]);
            else
                g.dk_rope_heads[(head * x.n + t) * x.rope + c - x.nope] = acc[i][j];
        }
}

template <typename T>
static __global__ void attention_dk_rope(T *dk_rope, int64_t stride, const float *of_heads,
                                         int64_t n, int32_t rope, int32_t n_heads)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * rope)
        return;
    float sum = 0;
    for (int32_t h = 0; h < n_heads; h++)
        sum += of_heads[h * n * rope + i];
    store(dk_rope + i / rope * stride + i % rope, sum);
}

template <typename T>
static void backward_plain(struct device *dev, const attention_gradients<T> &g)
{
    const attention_view<T> &x = g.x;
    unsigned n_tiles = (unsigned)ceil_div(x.n, TILE), n_heads = (unsigned)x.n_heads;
    unsigned n_key_tiles = (unsigned)ceil_div(x.nope + x.rope, TILE);
    unsigned n_value_tiles = (unsigned)ceil_div(x.v, TILE);
    cudaStream_t stream = cuda_stream(dev);
    attention_dq<T><<<dim3(n_tiles, n_heads, n_key_tiles), TILE_THREADS, 0, stream>>>(g);
    attention_dkv<T>
        <<<dim3(n_tiles, n_heads, n_key_tiles + n_value_tiles), TILE_THREADS, 0, stream>>>(g);
}

static void gradients(struct device *dev, const attention_gradients<float> &g)
{
    backward_plain(dev, g);
}

static void gradients(struct device *dev, const attention_gradients<bf16> &g)
{
    if (flash_fits(g.x) && is_aligned16(g.d_o) && is_aligned16(g.dq) && is_aligned16(g.dkv))
        flash_backward(dev, g.dq, g.dkv, g.dk_rope_heads, g.d_o, g.lse, g.along, g.x);
    else
        backward_plain(dev, g);
}

template <typename T>
static void backward(struct device *dev, T *dq, T *dkv, T *dk_rope, int64_t dk_rope_stride,
                     const T *d_o, const T *o, const float *lse, const attention_view<T> &x)
{
    size_t n_rows = (size_t)x.n * (size_t)x.n_heads;
    float *along = (float *)cuda_scratch_take(dev, n_rows * sizeof *along);
    float *of_heads =
        (float *)cuda_scratch_take(dev, n_rows * (size_t)x.rope * sizeof *of_heads);
    output_dots_of(dev, along, d_o, o, (int64_t)n_rows, x.v);
    gradients(dev, attention_gradients<T>{dq, dkv, of_heads, d_o, lse, along, x});
    if (x.rope > 0)
        attention_dk_rope<T>
            <<<(unsigned)ceil_div(x.n * x.rope, 256), 256, 0, cuda_stream(dev)>>>(
                dk_rope, dk_rope_stride, of_heads, x.n, x.rope, x.n_heads);
}

extern "C" void cuda_attention_backward(struct device *dev, void *dq, void *dkv, void *dk_rope,
                                        int64_t dk_rope_stride, const void *d_o, const void *o,
                                        const float *lse, const void *q, const void *kv,
                                        const void *k_rope, int64_t k_rope_stride,
                                        const struct attention_shape *shape)
{
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    assert(shape->n_heads > 0 && shape->n_heads <= 65535);
    if (shape->n_tokens == 0)
        return;
    cuda_scratch_begin(dev);
    ELEM_DISPATCH(dev, T,
                  backward<T>(dev, (T *)dq, (T *)dkv, (T *)dk_rope, dk_rope_stride, (const T *)d_o,
                              (const T *)o, lse,
                              attention_view_of<T>(dev, q, kv, k_rope, k_rope_stride, shape)));
    cuda_check(dev, "attention_backward", "n=%lld heads=%d nope=%d rope=%d v=%d",
               (long long)shape->n_tokens, shape->n_heads, shape->nope_dim, shape->rope_dim,
               shape->v_dim);
}
