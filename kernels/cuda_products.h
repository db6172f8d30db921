/* cuda_products.h - one matrix product on the GPU: cuBLASLt's, or our own tiles
 *
 * For launchers of ops that are products or contain them. Takes no scratch. */
#ifndef KERNELS_CUDA_PRODUCTS_H
#define KERNELS_CUDA_PRODUCTS_H

#include "kernels/cuda.h"

/* c (m, n) = alpha a b + beta c with a (m, k) and b (k, n), row-major, strides between rows in
 * elements. A transposed operand is stored the other way round: a as (k, m), b as (n, k). With
 * beta 0 c is not read. Sums are float32; with float32 operands nothing is rounded to less. */
struct cuda_product {
    void *c;
    const void *a, *b;
    int64_t m, n, k;
    int64_t c_stride, a_stride, b_stride;
    bool    a_transposed, b_transposed;
    enum elem_type type;   /* of a and b */
    enum elem_type c_type; /* float32, or as type */
    int32_t n_batches;     /* products one after another in memory; 0 and 1: one */
    int64_t c_batch, a_batch, b_batch; /* elements from one to the next */
    float   alpha, beta;
};

#ifdef __cplusplus
extern "C" {
#endif

/* On the device's stream. Where the device is deterministic, an element's bits do not depend on
 * how many rows or columns there are. op is for the line of an error. */
void cuda_product(struct device *dev, const char *op, const struct cuda_product *p);

/* The same by our own tiles, always (product.cu). */
void cuda_product_tiled(struct device *dev, const char *op, const struct cuda_product *p);

#ifdef __cplusplus
}
#endif

#endif
