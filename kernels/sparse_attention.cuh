/* sparse_attention.cuh - what forward, backward and the indexer's loss share: operands as rows */
#ifndef KERNELS_SPARSE_ATTENTION_CUH
#define KERNELS_SPARSE_ATTENTION_CUH

#include "kernels/sparse.cuh"

template <typename T>
struct sparse_operands {
    rows<const T> q, keys, values;
    int32_t n_heads, latent, width; /* width: of a key, latent and rope */
    float   scale;
};

template <typename T>
static inline sparse_operands<T> sparse_operands_of(const void *q_latent, const void *q_rope,
                                                    int64_t q_rope_stride, const void *latent,
                                                    const void *k_rope, int64_t k_rope_stride,
                                                    const struct sparse_shape *s)
{
    int32_t d = s->latent_dim;
    return {{(const T *)q_latent, (const T *)q_rope, d, q_rope_stride, d},
            {(const T *)latent, (const T *)k_rope, d, k_rope_stride, d},
            {(const T *)latent, nullptr, d, 0, d},
            s->n_heads,
            d,
            d + s->rope_dim,
            s->scale};
}

#endif
