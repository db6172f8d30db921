/* cuda_packed.cuh - numbers of packed matrices, common/packing.h, as floats and as bf16 */
#ifndef KERNELS_CUDA_PACKED_CUH
#define KERNELS_CUDA_PACKED_CUH

#include <cuda_fp8.h>

#include "common/packing.h"
#include "kernels/cuda_elem.cuh"

/* 2^(code - 127) / 2; scales below 1 / 2^126 are subnormal. */
__device__ __forceinline__ float half_scale(uint8_t code)
{
    return __uint_as_float(code >= 2 ? (uint32_t)(code - 1) << 23 : 1u << (21 + code));
}

/* Twice the number of four bits. */
__device__ __forceinline__ float twice(uint32_t code)
{
    /* 0 1 2 3 4 6 8 12, four bits each from the lowest */
    float size = (float)(0xc8643210u >> (4 * (code & 7)) & 15);
    return code & 8 ? -size : size;
}

/* The numbers of two codes of FP8; float16 has them all. */
__device__ __forceinline__ float2 two_of_fp8(uint32_t codes)
{
    return __half22float2(__half2(
        __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(codes & 0xffff), __NV_E4M3)));
}

/* Of the block that a number of a matrix is in whose rows have n_cols. */
__device__ __forceinline__ float fp8_scale(const void *scales, int64_t row, int64_t col,
                                           int64_t n_cols)
{
    int64_t across = (n_cols + FP8_BLOCK - 1) / FP8_BLOCK;
    return ((const float *)scales)[row / FP8_BLOCK * across + col / FP8_BLOCK];
}

template <packing P>
__device__ __forceinline__ float unpack_one(const uint8_t *codes, const void *scales, int64_t row,
                                            int64_t col, int64_t n_cols)
{
    int64_t i = row * n_cols + col;
    if (P == PACKING_FP8)
        return fp8_scale(scales, row, col, n_cols) * two_of_fp8(codes[i]).x;
    return half_scale(((const uint8_t *)scales)[i / MXFP4_GROUP]) *
           twice(codes[i / 2] >> (i % 2 * 4) & 15);
}

/* Eight neighbours from i on as bf16; all of them exist, as rows are whole groups. */
__device__ __forceinline__ uint4 eight_of_mxfp4(const uint8_t *from, const uint8_t *scales,
                                                int64_t i)
{
    uint32_t codes = *(const uint32_t *)(from + i / 2);
    float scale = half_scale(scales[i / MXFP4_GROUP]);
    return make_uint4(pack_bf16(scale * twice(codes), scale * twice(codes >> 4)),
                      pack_bf16(scale * twice(codes >> 8), scale * twice(codes >> 12)),
                      pack_bf16(scale * twice(codes >> 16), scale * twice(codes >> 20)),
                      pack_bf16(scale * twice(codes >> 24), scale * twice(codes >> 28)));
}

__device__ __forceinline__ uint32_t scaled_pair(uint32_t codes, float scale)
{
    float2 both = two_of_fp8(codes);
    return pack_bf16(scale * both.x, scale * both.y);
}

/* The same of a block of FP8, n of them and zeros; one at a time where rows are no multiple of 8.
 * A code of 0 is zero. */
__device__ __forceinline__ uint4 eight_of_fp8(const uint8_t *from, int n, float scale)
{
    uint2 codes = make_uint2(0, 0);
    if (n == 8 && (uintptr_t)from % 8 == 0) {
        codes = *(const uint2 *)from;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            codes.x |= j < n ? (uint32_t)from[j] << (8 * j) : 0;
            codes.y |= j + 4 < n ? (uint32_t)from[j + 4] << (8 * j) : 0;
        }
    }
    return make_uint4(scaled_pair(codes.x, scale), scaled_pair(codes.x >> 16, scale),
                      scaled_pair(codes.y, scale), scaled_pair(codes.y >> 16, scale));
}

/* Eight neighbours of a row, from a multiple of 8 on, of which n exist; the others are zero. */
template <packing P>
__device__ __forceinline__ uint4 unpack_eight(const uint8_t *codes, const void *scales, int64_t row,
                                              int64_t col, int64_t n_cols, int n)
{
    int64_t i = row * n_cols + col;
    if (n <= 0)
        return make_uint4(0, 0, 0, 0);
    if (P == PACKING_FP8)
        return eight_of_fp8(codes + i, n, fp8_scale(scales, row, col, n_cols));
    return eight_of_mxfp4(codes, (const uint8_t *)scales, i);
}

#endif
