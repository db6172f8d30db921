/* index.h - index scores, as selection and loss share them */
#ifndef KERNELS_INDEX_H
#define KERNELS_INDEX_H

#include "kernels/product.h"

struct index_operands {
    const float *q, *k, *w;
    const struct index_shape *shape;
};

/* to (n) = scale sum_h w[h] relu(dots[h][j]), dots' rows stride apart. */
void index_combine(float *to, const float *dots, int64_t stride, const float *w, int64_t n,
                   const struct index_shape *s);

#endif
