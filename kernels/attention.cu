/* attention.cu - latent attention in expanded form: causal softmax attention in each document
 *
 * bf16 of the usual widths goes to flash_attention.cu. Else, for every width: one pass finds each
 * query's log-sum-exp, a second one computes the weights anew for every 64 columns of values. */
#include "kernels/cuda_attention.h"

#include "kernels/attention.cuh"
#include "kernels/flash.cuh"

template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_lse(float *lse, attention_view<T> x)
{
    __shared__ tile_buffers s;
    int64_t query = (int64_t)blockIdx.x * TILE;
    int head = (int)blockIdx.y, row = tile_row(), column = tile_column();
    int64_t n_keys = query + TILE < x.n ? query + TILE : x.n;
    float acc[4][4], max[4], sum[4];
    for (int i = 0; i < 4; i++)
        max[i] = -INFINITY, sum[i] = 0;
    for (int64_t key = attention_first_key(x.docs, query); key < n_keys; key += TILE) {
        attention_tile(acc, s, x.queries(head), query, x.keys(head), key, x.n, x.key_dim());
        for (int i = 0; i < 4; i++) {
            float largest = max[i], part = 0;
            for (int j = 0; j < 4; j++) {
                bool sees = x.sees(query + row + i, key + column + j);
                acc[i][j] = sees ? x.scale * acc[i][j] : -INFINITY;
                largest = fmaxf(largest, acc[i][j]);
            }
            largest = warp_reduce<op_max, float, 16>(largest);
            float base = largest == -INFINITY ? 0 : largest;
            for (int j = 0; j < 4; j++)
                part += expf(acc[i][j] - base);
            sum[i] = sum[i] * expf(max[i] - base) + warp_reduce<op_sum, float, 16>(part);
            max[i] = largest;
        }
    }
    for (int i = 0; i < 4; i++)
        if (column == 0 && query + row + i < x.n)
            lse[(query + row + i) * x.n_heads + head] = max[i] + logf(sum[i]);
}

/* 64 columns of o. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_values(T *o, const float *lse, attention_view<T> x)
{
    __shared__ tile_buffers s;
    __shared__ float p[TILE][TILE + 1];
    int64_t query = (int64_t)blockIdx.x * TILE, first = (int64_t)blockIdx.z * TILE;
    int head = (int)blockIdx.y, row = tile_row(), column = tile_column();
    int64_t n_keys = query + TILE < x.n ? query + TILE : x.n;
    rows<const T> values = x.values(head);
    float scores[4][4], acc[4][4];
    tile_zero(acc);
    for (int64_t key = attention_first_key(x.docs, query); key < n_keys; key += TILE) {
        attention_tile(scores, s, x.queries(head), query, x.keys(head), key, x.n, x.key_dim());
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                int64_t t = query + row + i;
                bool sees = x.sees(t, key + column + j);
                p[row + i][column + j] =
                    sees ? expf(x.scale * scores[i][j] - lse[t * x.n_heads + head]) : 0;
            }
        tile_product<true, false>(
            acc, s, TILE, [&](int i, int64_t k) { return p[i][k]; },
            [&](int j, int64_t k) {
                bool within = key + k < x.n && first + j < x.v;
                return within ? load(values.at(key + k, first + j)) : 0.0f;
            });
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t t = query + row + i, c = first + column + j;
            if (t < x.n && c < x.v)
                store(o + (t * x.n_heads + head) * x.v + c, acc[i][j]);
        }
}

template <typename T>
static void attention_plain(struct device *dev, T *o, float *lse, const attention_view<T> &x)
{
    unsigned n_tiles = (unsigned)ceil_div(x.n, TILE), n_heads = (unsigned)x.n_heads;
    dim3 value_tiles(n_tiles, n_heads, (unsigned)ceil_div(x.v, TILE));
    attention_lse<T><<<dim3(n_tiles, n_heads), TILE_THREADS, 0, cuda_stream(dev)>>>(lse, x);
    attention_values<T><<<value_tiles, TILE_THREADS, 0, cuda_stream(dev)>>>(o, lse, x);
}

static void forward(struct device *dev, float *o, float *lse, const attention_view<float> &x)
{
    attention_plain(dev, o, lse, x);
}

static void forward(struct device *dev, bf16 *o, float *lse, const attention_view<bf16> &x)
{
    if (flash_fits(x) && is_aligned16(o))
        flash_forward(dev, o, lse, x);
    else
        attention_plain(dev, o, lse, x);
}

extern "C" void cuda_attention(struct device *dev, void *o, float *lse, const void *q,
                               const void *kv, const void *k_rope, int64_t k_rope_stride,
                               const struct attention_shape *shape)
{
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    assert(shape->n_heads > 0 && shape->n_heads <= 65535);
    if (shape->n_tokens == 0)
        return;
    cuda_scratch_begin(dev);
    ELEM_DISPATCH(dev, T,
                  forward(dev, (T *)o, lse,
                          attention_view_of<T>(dev, q, kv, k_rope, k_rope_stride, shape)));
    cuda_check(dev, "attention", "n=%lld heads=%d nope=%d rope=%d v=%d",
               (long long)shape->n_tokens, shape->n_heads, shape->nope_dim, shape->rope_dim,
               shape->v_dim);
}
