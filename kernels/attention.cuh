/* attention.cuh - what the kernels of attention in expanded form share: views of one head */
#ifndef KERNELS_ATTENTION_CUH
#define KERNELS_ATTENTION_CUH

#include "kernels/documents.cuh"
#include "kernels/tile.cuh"

template <typename T>
struct attention_view {
    const T *q, *kv, *k_rope;
    int64_t k_rope_stride, n;
    int32_t n_heads, nope, rope, v;
    float   scale;
    documents docs;

    __device__ __forceinline__ int32_t key_dim() const
    {
        return nope + rope;
    }
    __device__ __forceinline__ int64_t q_stride() const
    {
        return (int64_t)n_heads * (nope + rope);
    }
    __device__ __forceinline__ int64_t kv_stride() const
    {
        return (int64_t)n_heads * (nope + v);
    }
    __device__ __forceinline__ rows<const T> queries(int head) const
    {
        return {q + (int64_t)head * (nope + rope), nullptr, q_stride(), 0, nope + rope};
    }
    __device__ __forceinline__ rows<const T> keys(int head) const
    {
        return {kv + (int64_t)head * (nope + v), k_rope, kv_stride(), k_rope_stride, nope};
    }
    __device__ __forceinline__ rows<const T> values(int head) const
    {
        return {kv + (int64_t)head * (nope + v) + nope, nullptr, kv_stride(), 0, v};
    }
    __device__ __forceinline__ rows<const T> of_values(const T *o, int head) const
    {
        return {o + (int64_t)head * v, nullptr, (int64_t)n_heads * v, 0, v};
    }
    __device__ __forceinline__ bool sees(int64_t query, int64_t key) const
    {
        return query < n && key <= query && key >= docs.first[query];
    }
};

template <typename T>
static inline attention_view<T> attention_view_of(struct device *dev, const void *q,
                                                  const void *kv, const void *k_rope,
                                                  int64_t k_rope_stride,
                                                  const struct attention_shape *s)
{
    documents docs = documents_of(dev, s->cu_seqlens, s->n_docs, s->n_tokens);
    return {(const T *)q, (const T *)kv, (const T *)k_rope, k_rope_stride, s->n_tokens,
            s->n_heads,   s->nope_dim,   s->rope_dim,       s->v_dim,      s->scale,
            docs};
}

/* The tile of a(query + i) . b(key + j); rows from n on count as zero. */
template <typename T>
__device__ __forceinline__ void attention_tile(float (&acc)[4][4], tile_buffers &s, rows<const T> a,
                                               int64_t query, rows<const T> b, int64_t key,
                                               int64_t n, int32_t depth)
{
    tile_zero(acc);
    tile_product<true, true>(
        acc, s, depth,
        [&](int i, int64_t k) { return query + i < n ? load(a.at(query + i, k)) : 0.0f; },
        [&](int j, int64_t k) { return key + j < n ? load(b.at(key + j, k)) : 0.0f; });
}

/* Tiles of keys for the queries of a tile: from the first that its first query sees. */
__device__ __forceinline__ int64_t attention_first_key(const documents &docs, int64_t query)
{
    return docs.first[query] / TILE * TILE;
}

#endif
