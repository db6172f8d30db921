/* attention.h - what the forward and the backward of attention share: views of one head */
#ifndef KERNELS_ATTENTION_H
#define KERNELS_ATTENTION_H

#include "kernels/product.h"

/* Rows of one head and one range of tokens. */
struct attention_operands {
    const float *q, *kv, *k_rope;
    int64_t k_rope_stride;
};

static inline int64_t attention_q_stride(const struct attention_shape *s)
{
    return (int64_t)s->n_heads * (s->nope_dim + s->rope_dim);
}

static inline int64_t attention_kv_stride(const struct attention_shape *s)
{
    return (int64_t)s->n_heads * (s->nope_dim + s->v_dim);
}

static inline int64_t attention_o_stride(const struct attention_shape *s)
{
    return (int64_t)s->n_heads * s->v_dim;
}

/* scores (n_queries, n_keys) = scale (q_nope . k_nope + q_rope . k_rope), rows stride apart; q and
 * key count tokens from the first. */
void attention_scores(struct cpu_thread *t, float *scores, int64_t stride,
                      const struct attention_operands *x, const struct attention_shape *s,
                      int32_t head, int64_t query, int64_t n_queries, int64_t key, int64_t n_keys);

#endif
