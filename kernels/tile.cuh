/* tile.cuh - a tile of 64 x 64 of a product, in fp32, of whatever two functions give
 *
 * The plain way, for every element type and every width: what is summed over passes through shared
 * memory, zeros beyond the ends are the functions' business. Sums go in ascending order. */
#ifndef KERNELS_TILE_CUH
#define KERNELS_TILE_CUH

#include "kernels/cuda_elem.cuh"

#define TILE         64
#define TILE_DEPTH   32
#define TILE_THREADS 256

struct tile_buffers {
    float a[TILE_DEPTH][TILE + 4], b[TILE_DEPTH][TILE + 4];
};

/* This thread's part of a tile is rows tile_row() + 0..3, columns tile_column() + 0..3; the 16
 * threads of a row are neighbouring lanes. */
__device__ __forceinline__ int tile_row()
{
    return (int)threadIdx.x / 16 * 4;
}

__device__ __forceinline__ int tile_column()
{
    return (int)threadIdx.x % 16 * 4;
}

__device__ __forceinline__ void tile_zero(float (&acc)[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            acc[i][j] = 0;
}

/* Which index of a(i, k) is contiguous in memory: neighbouring threads take neighbours of it. */
template <bool BY_DEPTH, typename F>
__device__ __forceinline__ void tile_fill(float (&to)[TILE_DEPTH][TILE + 4], int64_t first,
                                          int64_t depth, F f)
{
    for (int at = (int)threadIdx.x; at < TILE * TILE_DEPTH; at += TILE_THREADS) {
        int i = BY_DEPTH ? at / TILE_DEPTH : at % TILE;
        int k = BY_DEPTH ? at % TILE_DEPTH : at / TILE;
        to[k][i] = first + k < depth ? f(i, first + k) : 0.0f;
    }
}

/* acc += sum over k < depth of a(row, k) b(column, k), by TILE_THREADS threads. What a and b read
 * from shared memory may have been written just before, and may be written again afterwards. */
template <bool A_BY_DEPTH, bool B_BY_DEPTH, typename A, typename B>
__device__ __forceinline__ void tile_product(float (&acc)[4][4], tile_buffers &s, int64_t depth,
                                             A a, B b)
{
    for (int64_t first = 0; first < depth; first += TILE_DEPTH) {
        __syncthreads();
        tile_fill<A_BY_DEPTH>(s.a, first, depth, a);
        tile_fill<B_BY_DEPTH>(s.b, first, depth, b);
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < TILE_DEPTH; k++) {
            float4 x = *(const float4 *)&s.a[k][tile_row()];
            float4 y = *(const float4 *)&s.b[k][tile_column()];
            const float rows[4] = {x.x, x.y, x.z, x.w}, columns[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    acc[i][j] += rows[i] * columns[j];
        }
    }
}

/* Rows in two parts that lie apart, as a latent and its rope part do; b is not looked at where
 * a_dim is the whole width. */
template <typename T>
struct rows {
    T *a, *b;
    int64_t a_stride, b_stride;
    int32_t a_dim;

    __device__ __forceinline__ T *at(int64_t row, int64_t column) const
    {
        return column < a_dim ? a + row * a_stride + column : b + row * b_stride + column - a_dim;
    }
};

template <typename T>
static inline rows<T> whole_rows(T *a, int64_t stride)
{
    return {a, nullptr, stride, 0, INT32_MAX};
}

#endif
