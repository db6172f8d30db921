/* product.h - one matrix product on the calling thread, and one spread over all
 *
 * Every element of c is the same chain of fused multiply-adds over k whatever m, n and the number
 * of threads are. Our own and not a BLAS: it has that property, costs nothing to call on the small
 * blocks of the ops, and does not depend on a library's list of processors (a BLAS that does not
 * know the processor runs at a fifth of its speed). */
#ifndef KERNELS_PRODUCT_H
#define KERNELS_PRODUCT_H

#include "kernels/cpu.h"

/* A row-major matrix, or the transpose of one. */
struct matrix {
    const float *data;
    int64_t stride; /* floats from row to row as stored */
    bool    transposed;
};

static inline struct matrix as_is(const float *data, int64_t stride)
{
    return (struct matrix){data, stride, false};
}

static inline struct matrix transposed(const float *data, int64_t stride)
{
    return (struct matrix){data, stride, true};
}

/* c (m, n) = alpha a (m, k) b (k, n) + beta c, the shapes after transposing; beta 0 never reads
 * c. */
void product(struct cpu_thread *thread, float *c, int64_t c_stride, struct matrix a,
             struct matrix b, int64_t m, int64_t n, int64_t k, float alpha, float beta);

/* The same, spread over the device's threads by rows or columns of c, whichever are more. */
void product_spread(struct device *dev, float *c, int64_t c_stride, struct matrix a,
                    struct matrix b, int64_t m, int64_t n, int64_t k, float alpha, float beta);

/* The part of x that starts at row, col. */
static inline struct matrix matrix_from(struct matrix x, int64_t row, int64_t col)
{
    x.data += x.transposed ? col * x.stride + row : row * x.stride + col;
    return x;
}

/* Floats of cpu_thread.pack. */
size_t product_pack_floats(void);

#endif
