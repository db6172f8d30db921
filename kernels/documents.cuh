/* documents.cuh - which tokens are in a token's document
 *
 * Query t sees key s where first[t] <= s <= t. Both arrays are expanded on the device once an op,
 * so that blocks of queries need not end where documents do. */
#ifndef KERNELS_DOCUMENTS_CUH
#define KERNELS_DOCUMENTS_CUH

#include "kernels/cuda_elem.cuh"

struct documents {
    const int32_t *first, *end; /* (n_tokens) of the token's document */
};

static __global__ void documents_expand(int32_t *first, int32_t *end, const int32_t *cu_seqlens,
                                        int32_t n_docs, int64_t n)
{
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n)
        return;
    int32_t low = 0, high = n_docs - 1; /* the last document that begins at or before t */
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (cu_seqlens[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    first[t] = cu_seqlens[low];
    end[t] = cu_seqlens[low + 1];
}

/* Takes scratch and launches; n > 0. */
static inline documents documents_of(struct device *dev, const int32_t *cu_seqlens, int32_t n_docs,
                                     int64_t n)
{
    assert(cu_seqlens[n_docs] == n);
    int32_t *first = (int32_t *)cuda_scratch_take(dev, (size_t)n * sizeof *first);
    int32_t *end = (int32_t *)cuda_scratch_take(dev, (size_t)n * sizeof *end);
    const void *cu = cuda_upload(dev, cu_seqlens, (size_t)(n_docs + 1) * sizeof *cu_seqlens);
    documents_expand<<<(unsigned)ceil_div(n, 256), 256, 0, cuda_stream(dev)>>>(
        first, end, (const int32_t *)cu, n_docs, n);
    return {first, end};
}

#endif
