/* cuda_sums.cuh - the first level of a sum of squares in double; its tree depends on n alone */
#ifndef KERNELS_CUDA_SUMS_CUH
#define KERNELS_CUDA_SUMS_CUH

#include "kernels/cuda_elem.cuh"

#define SUM_CHUNK   32768 /* floats of one partial sum */
#define SUM_THREADS 256

/* sums (gridDim.y, gridDim.x): of the chunks of each of gridDim.y vectors of n. */
__global__ static void __launch_bounds__(SUM_THREADS)
    sum_squares_of_chunks(double *sums, const float *x, int64_t n)
{
    __shared__ double shared[32];
    int64_t begin = (int64_t)blockIdx.x * SUM_CHUNK, end = min(n, begin + SUM_CHUNK);
    double sum = 0;
    x += blockIdx.y * n;
    for (int64_t i = begin + threadIdx.x; i < end; i += SUM_THREADS)
        sum += (double)x[i] * x[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        sums[blockIdx.y * (int64_t)gridDim.x + blockIdx.x] = sum;
}

#endif
