/* index.cuh - the indexer's operands and scores, which selection and loss share */
#ifndef KERNELS_INDEX_CUH
#define KERNELS_INDEX_CUH

#include "kernels/documents.cuh"

template <typename T>
struct index_view {
    const T *q, *k, *w;
    documents docs;
    int32_t n_heads, d;
    float   scale;
};

template <typename T>
static inline index_view<T> index_view_of(struct device *dev, const void *q, const void *k,
                                          const void *w, const struct index_shape *s)
{
    documents docs = documents_of(dev, s->cu_seqlens, s->n_docs, s->n_tokens);
    return {(const T *)q, (const T *)k, (const T *)w, docs, s->n_heads, s->head_dim, s->scale};
}

/* scores (end - begin, n_keys), rows stride apart, of the keys 0 .. n_keys; -inf where a key is not
 * visible, which without fills may be left unwritten. begin < end <= n_keys. */
template <typename T>
void index_scores_launch(struct device *dev, float *scores, int64_t stride, int64_t begin,
                         int64_t end, int64_t n_keys, bool fills, const index_view<T> &x);

/* The same on tensor cores; false where it does not fit. */
bool index_tensor_launch(struct device *dev, float *scores, int64_t stride, int64_t begin,
                         int64_t end, int64_t n_keys, bool fills, const index_view<bf16> &x);

#endif
