/* sparse_attention.h - what the forward, the backward and the indexer's loss share */
#ifndef KERNELS_SPARSE_ATTENTION_H
#define KERNELS_SPARSE_ATTENTION_H

#include "kernels/sparse.h"

struct sparse_operands {
    const float *q_latent, *q_rope;
    int64_t q_rope_stride;
    const float *latent, *k_rope;
    int64_t k_rope_stride;
    const struct sparse_shape *shape;
};

/* A query's keys, one after the other. */
struct sparse_keys {
    struct matrix latent, rope;
};

/* Floats of sparse_gather's to. */
int64_t sparse_gather_floats(const struct sparse_shape *s);

struct sparse_keys sparse_gather(float *to, const struct sparse_operands *x,
                                 const struct key_list *l);

/* The queries of all heads of one token. */
static inline struct matrix sparse_q_latent(const struct sparse_operands *x, int64_t query)
{
    int64_t d = x->shape->latent_dim;
    return as_is(x->q_latent + query * x->shape->n_heads * d, d);
}

static inline struct matrix sparse_q_rope(const struct sparse_operands *x, int64_t query)
{
    return as_is(x->q_rope + query * x->shape->n_heads * x->q_rope_stride, x->q_rope_stride);
}

/* scores (heads, n), rows stride apart. */
void sparse_scores(struct cpu_thread *t, float *scores, int64_t stride,
                   const struct sparse_operands *x, const struct sparse_keys *keys, int64_t query,
                   int64_t n);

#endif
