/* cuda_parts.cu - partial sums that blocks left, added in a fixed order */
#include "kernels/cuda_parts.h"

#include "kernels/cuda_elem.cuh"

#define TILE         32 /* columns of a block, and threads that share the parts of a column */
#define LOSS_THREADS 1024

__global__ static void add_parts(float *to, float beta, const float *parts, int64_t n_parts,
                                 int64_t stride, int64_t d)
{
    __shared__ float sums[TILE][TILE + 1];
    int64_t j = (int64_t)blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    if (j < d) {
#pragma unroll 4
        for (int64_t i = threadIdx.y; i < n_parts; i += TILE)
            sum += parts[i * stride + j];
    }
    sums[threadIdx.x][threadIdx.y] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.y][threadIdx.x]); /* a warp a column */
    int64_t column = (int64_t)blockIdx.x * TILE + threadIdx.y;
    if (threadIdx.x == 0 && column < d)
        to[column] = beta == 0 ? sum : beta * to[column] + sum;
}

extern "C" void cuda_add_parts(struct device *dev, float *to, float beta, const float *parts,
                               int64_t n_parts, int64_t stride, int64_t d)
{
    if (d == 0)
        return;
    add_parts<<<(unsigned)ceil_div(d, TILE), dim3(TILE, TILE), 0, cuda_stream(dev)>>>(
        to, beta, parts, n_parts, stride, d);
}

__global__ static void add_losses(double *acc, double factor, const double *x, int64_t n)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += LOSS_THREADS)
        sum += x[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *acc += factor * sum;
}

extern "C" void cuda_add_losses(struct device *dev, double *acc, double factor, const double *x,
                                int64_t n)
{
    add_losses<<<1, LOSS_THREADS, 0, cuda_stream(dev)>>>(acc, factor, x, n);
}
