/* cuda_router.cuh - one warp chooses the experts of one token
 *
 * A float and its place become one number that grows with the float and, among equal ones, with a
 * lower place. So the next choice is the largest number below the last one: nothing is marked as
 * taken, and equal sums go to the lower expert. */
#ifndef KERNELS_CUDA_ROUTER_CUH
#define KERNELS_CUDA_ROUTER_CUH

#include "kernels/cuda_elem.cuh"

#define ROUTER_WARPS 4 /* of a block, a token each */

/* Its bits in an order that agrees with that of floats; both zeros alike, NaN below all. */
__device__ __forceinline__ uint32_t ordered_bits(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f);
    if (x != x)
        return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float float_of_ordered(uint32_t ordered)
{
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

__device__ __forceinline__ uint64_t ranked(uint32_t ordered, int32_t place)
{
    return (uint64_t)ordered << 32 | (0xffffffffu - (uint32_t)place);
}

__device__ __forceinline__ int32_t place_of_ranked(uint64_t key)
{
    return (int32_t)(0xffffffffu - (uint32_t)key);
}

/* The largest of this lane's keys (lane, lane + 32, ... of n) below last. 0: there is none. */
__device__ __forceinline__ uint64_t lane_best(const uint32_t *keys, int32_t n, uint64_t last)
{
    uint64_t best = 0;
    for (int32_t e = (int32_t)threadIdx.x & 31; e < n; e += 32) {
        uint64_t key = ranked(keys[e], e);
        if (key < last && key > best)
            best = key;
    }
    return best;
}

__device__ __forceinline__ uint64_t warp_largest(uint64_t x)
{
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        uint64_t other = __shfl_xor_sync(0xffffffffu, x, i);
        x = other > x ? other : x;
    }
    return x;
}

/* take(j, place, ordered) for the k <= n largest of keys (shared, n), descending; all lanes get
 * every one. */
template <typename F>
__device__ __forceinline__ void select_top(const uint32_t *keys, int32_t n, int32_t k, F take)
{
    uint64_t own = lane_best(keys, n, ~(uint64_t)0);
    for (int32_t j = 0; j < k; j++) {
        uint64_t best = warp_largest(own);
        take(j, place_of_ranked(best), (uint32_t)(best >> 32));
        if (own == best)
            own = lane_best(keys, n, best);
    }
}

/* The warp's token, -1 beyond the last one, where all warps of the block have one at a time. */
__device__ __forceinline__ int64_t token_of_warp(int64_t n_tokens)
{
    int64_t token = (int64_t)blockIdx.x * ROUTER_WARPS + (threadIdx.x >> 5);
    return token < n_tokens ? token : -1;
}

static inline unsigned router_blocks(int64_t n_tokens)
{
    return (unsigned)ceil_div(n_tokens, ROUTER_WARPS);
}

/* ROUTER_WARPS rows of n 4-byte numbers in shared memory. */
static inline size_t router_shared(int64_t n)
{
    return (size_t)(ROUTER_WARPS * n) * 4;
}

#endif
