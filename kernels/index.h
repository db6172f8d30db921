/* index.h - the index scores of a block of queries, which selection and loss share */
#ifndef KERNELS_INDEX_H
#define KERNELS_INDEX_H

#include "kernels/product.h"

struct index_operands {
    const float *q, *k, *w;
    const struct index_shape *shape;
};

/* Floats of index_block's dots for n_queries. */
int64_t index_dots(const struct index_shape *s, int64_t n_queries);

/* scores (n_queries, n_keys), rows stride apart, masked nowhere. */
void index_block(struct cpu_thread *t, float *scores, int64_t stride, float *dots,
                 const struct index_operands *x, int64_t query, int64_t n_queries, int64_t key,
                 int64_t n_keys);

/* to (n) = scale sum_h w[h] relu(dots[h][j]), dots' rows stride apart. */
void index_combine(float *to, const float *dots, int64_t stride, const float *w, int64_t n,
                   const struct index_shape *s);

#endif
