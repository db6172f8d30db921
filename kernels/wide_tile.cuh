/* wide_tile.cuh - what a warpgroup has of a wide tile of c: added to what is there, and written
 *
 * Its 64 rows lie in registers as wgmma leaves them: pair j of a lane's row h is d[4 j + 2 h]. */
#ifndef KERNELS_WIDE_TILE_CUH
#define KERNELS_WIDE_TILE_CUH

#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_tiles.h"
#include "kernels/wgmma.cuh"

#define COLS CUDA_TILE_WIDE_COLS

/* Two neighbouring elements of c, of which the second may be beyond its end: it reads as 0. */
template <typename C>
__device__ __forceinline__ float2 read_pair(const C *c, bool both, bool in_pairs)
{
    if (!both || !in_pairs)
        return make_float2(load(c), both ? load(c + 1) : 0);
    if constexpr (sizeof(C) == 2)
        return unpack_bf16(*(const uint32_t *)c);
    else
        return *(const float2 *)c;
}

template <typename C>
__device__ __forceinline__ void write_pair(C *c, float x, float y, bool both, bool in_pairs)
{
    if (both && in_pairs) {
        if constexpr (sizeof(C) == 2)
            *(uint32_t *)c = pack_bf16(x, y);
        else
            *(float2 *)c = make_float2(x, y);
        return;
    }
    store(c, x);
    if (both)
        store(c + 1, y);
}

/* The warpgroup's rows of c: what a lane has of them, pair j of its row h being d[4 j + 2 h]. */
template <typename C>
struct own_rows {
    C      *at[2]; /* NULL beyond the group's rows */
    int     n_cols;
    bool    in_pairs, in_vectors; /* whether pairs, and eight in a row, can be written at once */
};

template <typename C>
__device__ __forceinline__ own_rows<C> find_rows(const cuda_tile_job &job, const cuda_tile_group &g,
                                                 int64_t row0, int64_t col0)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32 & 3;
    C *c = (C *)g.c;
    own_rows<C> own;
    own.n_cols = (int)min(g.n - col0, (int64_t)COLS);
    own.in_pairs = job.c_stride % 2 == 0 && ((uintptr_t)c & (2 * sizeof(C) - 1)) == 0;
    own.in_vectors = job.c_stride % 8 == 0 && own.n_cols % 8 == 0 && ((uintptr_t)c & 15) == 0;
    for (int h = 0; h < 2; h++) {
        int64_t row = row0 + 16 * warp + lane / 4 + 8 * h;
        own.at[h] = row < g.m ? c + row * job.c_stride + col0 : NULL;
    }
    return own;
}

/* d = alpha d + beta c. Many reads are on their way at once: one after another they would take
 * longer than the products of a small group. */
template <typename C>
__device__ __forceinline__ void add_tile(float (&d)[COLS / 2], const own_rows<C> &own, float alpha,
                                         float beta)
{
    constexpr int AT_ONCE = 16;
    int lane_col = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j0 = 0; j0 < COLS / 8; j0 += AT_ONCE) {
            float2 before[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                int col = 8 * (j0 + j) + lane_col;
                before[j] = own.at[h] && col < own.n_cols
                                ? read_pair(own.at[h] + col, col + 1 < own.n_cols, own.in_pairs)
                                : make_float2(0, 0);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                float *pair = &d[4 * (j0 + j) + 2 * h];
                pair[0] = alpha * pair[0] + beta * before[j].x;
                pair[1] = alpha * pair[1] + beta * before[j].y;
            }
        }
}

/* Four lanes have two columns of each of four groups of eight; afterwards each has a whole group,
 * which is one write. By all lanes of a warp. */
__device__ __forceinline__ uint4 trade(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t other = __shfl_xor_sync(~0u, odd ? a : b, 1);
    (odd ? a : b) = other;
    other = __shfl_xor_sync(~0u, odd ? c : d, 1);
    (odd ? c : d) = other;
    uint32_t first = __shfl_xor_sync(~0u, high ? a : c, 2);
    uint32_t second = __shfl_xor_sync(~0u, high ? b : d, 2);
    return high ? make_uint4(first, second, c, d) : make_uint4(a, b, first, second);
}

__device__ __forceinline__ void write_vectors(const float (&d)[COLS / 2],
                                              const own_rows<bf16> &own)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < COLS / 8; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                pairs[i] = pack_bf16(d[4 * (j + i) + 2 * h], d[4 * (j + i) + 2 * h + 1]);
            uint4 eight = trade(pairs[0], pairs[1], pairs[2], pairs[3]);
            int col = 8 * (j + (int)threadIdx.x % 4);
            if (own.at[h] && col < own.n_cols)
                *(uint4 *)(own.at[h] + col) = eight;
        }
}

template <typename C>
__device__ static void write_tile(float (&d)[COLS / 2], const cuda_tile_job &job,
                                  const cuda_tile_group &g, int64_t row0, int64_t col0)
{
    const own_rows<C> own = find_rows<C>(job, g, row0, col0);
    int lane_col = (int)threadIdx.x % 4 * 2;
    if (job.beta != 0)
        add_tile(d, own, job.alpha, job.beta);
    else if (job.alpha != 1)
#pragma unroll
        for (int i = 0; i < COLS / 2; i++)
            d[i] *= job.alpha;
    if constexpr (sizeof(C) == 2) {
        if (own.in_vectors) {
            write_vectors(d, own);
            return;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!own.at[h])
            continue;
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            int col = 8 * j + lane_col;
            if (col < own.n_cols)
                write_pair(own.at[h] + col, d[4 * j + 2 * h], d[4 * j + 2 * h + 1],
                           col + 1 < own.n_cols, own.in_pairs);
        }
    }
}

#endif
