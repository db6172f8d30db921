/* index_scores.cu - what the lightning indexer thinks of each key
 *
 * The heads of some queries are the rows of one product with a tile of keys; their sum over heads
 * goes in one order, so that the same query and key have the same score in every call. bf16 of the
 * usual widths goes to index_tensor.cu. */
#include "kernels/cuda_attention.h"

#include "kernels/index.cuh"
#include "kernels/tile.cuh"

/* Queries of one tile: as many as have all their heads in its rows. */
__host__ __device__ static inline int tile_queries(int32_t n_heads)
{
    return n_heads < TILE ? TILE / n_heads : 1;
}

/* scores (queries, stride) of n_keys keys from first_key. Grid: queries, keys. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    index_tile(float *scores, int64_t stride, int64_t begin, int64_t end, int64_t n_keys,
               index_view<T> x)
{
    __shared__ tile_buffers s;
    __shared__ float parts[TILE][TILE + 1];
    int n_queries = tile_queries(x.n_heads);
    int64_t t = begin + (int64_t)blockIdx.x * n_queries, key = (int64_t)blockIdx.y * TILE;
    if (end - t < n_queries)
        n_queries = (int)(end - t);
    bool is_visible = key < t + n_queries && key + TILE > x.docs.first[t];
    float sums[TILE * TILE / TILE_THREADS] = {0}; /* of numbers threadIdx.x + i TILE_THREADS */
    int64_t n_rows = (int64_t)n_queries * x.n_heads;
    for (int64_t first = 0; is_visible && first < n_rows; first += TILE) {
        float acc[4][4];
        int n = n_rows - first < TILE ? (int)(n_rows - first) : TILE;
        tile_zero(acc);
        tile_product<true, true>(
            acc, s, x.d,
            [&](int i, int64_t k) {
                return i < n ? load(x.q + (t * x.n_heads + first + i) * x.d + k) : 0.0f;
            },
            [&](int j, int64_t k) {
                return key + j < n_keys ? load(x.k + (key + j) * x.d + k) : 0.0f;
            });
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                int row = tile_row() + i;
                float w = row < n ? load(x.w + t * x.n_heads + first + row) * x.scale : 0;
                parts[row][tile_column() + j] = w * fmaxf(acc[i][j], 0);
            }
        __syncthreads();
        int per_query = x.n_heads < TILE ? x.n_heads : n;
#pragma unroll
        for (int i = 0; i < TILE * TILE / TILE_THREADS; i++) {
            int at = (int)threadIdx.x + i * TILE_THREADS;
            for (int h = 0; at < n_queries * TILE && h < per_query; h++)
                sums[i] += parts[at / TILE * per_query + h][at % TILE];
        }
    }
#pragma unroll
    for (int i = 0; i < TILE * TILE / TILE_THREADS; i++) {
        int at = (int)threadIdx.x + i * TILE_THREADS;
        int64_t query = t + at / TILE, column = key + at % TILE;
        if (at >= n_queries * TILE || column >= n_keys)
            continue;
        bool sees = column <= query && column >= x.docs.first[query];
        scores[(query - begin) * stride + column] = sees ? sums[i] : -INFINITY;
    }
}

template <typename T>
static void plain_launch(struct device *dev, float *scores, int64_t stride, int64_t begin,
                         int64_t end, int64_t n_keys, const index_view<T> &x)
{
    dim3 grid((unsigned)ceil_div(end - begin, tile_queries(x.n_heads)),
              (unsigned)ceil_div(n_keys, TILE));
    index_tile<T><<<grid, TILE_THREADS, 0, cuda_stream(dev)>>>(scores, stride, begin, end, n_keys,
                                                               x);
}

template <>
void index_scores_launch<float>(struct device *dev, float *scores, int64_t stride, int64_t begin,
                                int64_t end, int64_t n_keys, bool, const index_view<float> &x)
{
    plain_launch(dev, scores, stride, begin, end, n_keys, x);
}

template <>
void index_scores_launch<bf16>(struct device *dev, float *scores, int64_t stride, int64_t begin,
                               int64_t end, int64_t n_keys, bool fills, const index_view<bf16> &x)
{
    if (!index_tensor_launch(dev, scores, stride, begin, end, n_keys, fills, x))
        plain_launch(dev, scores, stride, begin, end, n_keys, x);
}

extern "C" void cuda_index_scores(struct device *dev, float *scores, int64_t begin, int64_t end,
                                  const void *q, const void *k, const void *w,
                                  const struct index_shape *shape)
{
    int64_t n = shape->n_tokens;
    assert(begin >= 0 && end <= n && shape->n_heads > 0);
    if (begin >= end)
        return;
    cuda_scratch_begin(dev);
    ELEM_DISPATCH(dev, T,
                  index_scores_launch<T>(dev, scores, n, begin, end, n, true,
                                         index_view_of<T>(dev, q, k, w, shape)));
    cuda_check(dev, "index_scores", "n=%lld begin=%lld end=%lld heads=%d d=%d", (long long)n,
               (long long)begin, (long long)end, shape->n_heads, shape->head_dim);
}
