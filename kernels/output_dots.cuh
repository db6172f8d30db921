/* output_dots.cuh - o . dO of each query and head, which the gradient of a softmax needs */
#ifndef KERNELS_OUTPUT_DOTS_CUH
#define KERNELS_OUTPUT_DOTS_CUH

#include "kernels/cuda_elem.cuh"

/* A warp a row. */
template <typename T>
static __global__ void output_dots(float *along, const T *d_o, const T *o, int64_t n_rows,
                                   int32_t d)
{
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    float sum = 0;
    if (row >= n_rows)
        return;
    for (int64_t i = threadIdx.x % 32; i < d; i += 32)
        sum += load(o + row * d + i) * load(d_o + row * d + i);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        along[row] = sum;
}

/* along (n_rows) of o and d_o (n_rows, d); n_rows > 0. */
template <typename T>
static inline void output_dots_of(struct device *dev, float *along, const T *d_o, const T *o,
                                  int64_t n_rows, int32_t d)
{
    output_dots<T>
        <<<(unsigned)ceil_div(n_rows, 8), 256, 0, cuda_stream(dev)>>>(along, d_o, o, n_rows, d);
}

#endif
