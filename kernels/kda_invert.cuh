/* kda_invert.cuh - the inverse of I + beta kk, (64, 64), unit lower triangular, by a whole block
 *
 * Diagonal blocks of 16 by substitution in float, then twice from two neighbouring blocks to one
 * of twice the size: [X 0; A Y] has -Y A X below the diagonal of its inverse. */
#ifndef KERNELS_KDA_INVERT_CUH
#define KERNELS_KDA_INVERT_CUH

#include "kernels/kda_chunk.cuh"

/* The diagonal blocks of 16 of (I + beta kk)^-1, a warp to each of four, a lane to each column. */
__device__ __forceinline__ void invert_diagonal(float *inverse, const float *kk, const float *beta)
{
    int first = warp_id() * 16, column = lane_id();
    if (warp_id() >= 4 || column >= 16)
        return;
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; r++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < r; i++)
            sum += kk[(first + r) * KDA_MATRIX + first + i] * x[i];
        x[r] = (r == column ? 1 : 0) - beta[first + r] * sum;
        inverse[(first + r) * KDA_MATRIX + first + column] = x[r];
    }
}

/* sum (16, 8) += left right of floats: exactly, or as well as elements need it. */
template <typename T>
__device__ __forceinline__ void float_product(float (&sum)[1][4], const float *left,
                                              const float *right, int k_begin, int k_end)
{
    if constexpr (sizeof(T) == sizeof(float))
        strip_product(sum, as_is(left, KDA_MATRIX), as_is(right, KDA_MATRIX), k_begin, k_end);
    else
        strip_product_tf32(sum, as_is(left, KDA_MATRIX), as_is(right, KDA_MATRIX), k_begin, k_end);
}

/* From the inverses of two neighbouring diagonal blocks of N rows, X and Y, to that of both: below
 * the diagonal, -Y A X. kk keeps A X meanwhile, above its diagonal, where it has nothing. */
template <typename T, int N>
__device__ __forceinline__ void invert_below(float *inverse, float *kk, const float *beta)
{
    constexpr int M = KDA_MATRIX, STRIPS = N / 16, TILES = N / 8;
    int warp = warp_id(), pair = warp / (STRIPS * TILES), first = pair * 2 * N;
    int row = warp / TILES % STRIPS * 16, column = warp % TILES * 8;
    bool active = first < KDA_CHUNK;
    float sum[1][4];
    if (active) {
        strip_clear(sum);
        float_product<T>(sum, kk + (first + N + row) * M + first,
                         inverse + first * M + first + column, column & ~15, N);
        const float *scale = beta + first + N + row + strip_row();
        sum[0][0] *= scale[0], sum[0][1] *= scale[0];
        sum[0][2] *= scale[8], sum[0][3] *= scale[8];
        strip_store(kk + (first + row) * M + first + N + column, M, sum, 16);
    }
    __syncthreads();
    if (active) {
        strip_clear(sum);
        float_product<T>(sum, inverse + (first + N + row) * M + first + N,
                         kk + first * M + first + N + column, 0, row + 16);
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[0][i] = -sum[0][i];
        strip_store(inverse + (first + N + row) * M + first + column, M, sum, 16);
    }
    __syncthreads();
}

/* The lower half of inverse; above its diagonal blocks of 16 it keeps what it had. kk is read below
 * its diagonal and written above. All have stride KDA_MATRIX; rounded as elements of T are. Ends
 * with a barrier. */
template <typename T>
__device__ __forceinline__ void kda_invert(float *inverse, float *kk, const float *beta)
{
    invert_diagonal(inverse, kk, beta);
    __syncthreads();
    invert_below<T, 16>(inverse, kk, beta);
    invert_below<T, 32>(inverse, kk, beta);
}

#endif
