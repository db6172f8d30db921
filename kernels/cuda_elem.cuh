/* cuda_elem.cuh - what kernels share: elements as floats, 16-byte accesses, reductions, fragments
 *
 * Kernels are templates on the element type T, float or __nv_bfloat16, and compute in fp32. */
#ifndef KERNELS_CUDA_ELEM_CUH
#define KERNELS_CUDA_ELEM_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda.h"

typedef __nv_bfloat16 bf16;

/* Runs the statements with T the device's element type: ELEM_DISPATCH(dev, T, kernel<T><<<..>>>(
 * (T *)y, (const T *)x)); */
#define ELEM_DISPATCH(dev, T, ...)                                                                 \
    do {                                                                                           \
        if ((dev)->elem == ELEM_F32) {                                                             \
            using T = float;                                                                       \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            using T = bf16;                                                                        \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

/* ---- on the host: sizes of launches ---- */

static inline int64_t ceil_div(int64_t n, int64_t d)
{
    return (n + d - 1) / d;
}

/* Blocks for n pieces of work where a kernel walks with the grid's stride. Not for n = 0. */
static inline unsigned grid_blocks(int64_t n, int64_t per_block, int64_t n_blocks_max)
{
    int64_t n_blocks = ceil_div(n, per_block);
    return (unsigned)(n_blocks < n_blocks_max ? n_blocks : n_blocks_max);
}

/* Whether 16-byte accesses may start here; give all pointers and row strides in bytes. */
static inline bool is_aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

static inline bool is_aligned16(int64_t n_bytes)
{
    return (n_bytes & 15) == 0;
}

/* Shared memory beyond 48 KiB must be allowed, once a kernel; cheap to repeat. A kernel's static
 * memory counts too; none that asks has more than 16 KiB of it. */
template <typename Kernel>
static inline void allow_shared(Kernel *kernel, size_t n_bytes)
{
    if (n_bytes > 32 * 1024)
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)n_bytes);
}

/* ---- one element ---- */

__device__ __forceinline__ float to_float(float x)
{
    return x;
}

__device__ __forceinline__ float to_float(bf16 x)
{
    return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

template <typename T>
__device__ __forceinline__ float load(const T *p)
{
    return to_float(*p);
}

template <typename T>
__device__ __forceinline__ void store(T *p, float x)
{
    *p = from_float<T>(x);
}

/* ---- 16 bytes of elements; p must be aligned to 16 bytes ---- */

template <typename T>
constexpr int vector_elems = 16 / (int)sizeof(T); /* 4 floats or 8 bf16 */

/* Two bf16 in a register, the first in the low half. */
__device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&both;
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t both)
{
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

__device__ __forceinline__ void load_vector(const float *p, float (&out)[4])
{
    float4 v = *(const float4 *)p;
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

__device__ __forceinline__ void load_vector(const bf16 *p, float (&out)[8])
{
    uint4 v = *(const uint4 *)p;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 both = unpack_bf16(words[i]);
        out[2 * i] = both.x, out[2 * i + 1] = both.y;
    }
}

__device__ __forceinline__ void store_vector(float *p, const float (&x)[4])
{
    *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void store_vector(bf16 *p, const float (&x)[8])
{
    *(uint4 *)p = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                             pack_bf16(x[6], x[7]));
}

/* Eight elements whatever their type, for kernels with operands of both. */
__device__ __forceinline__ void load_vector(const float *p, float (&out)[8])
{
    float4 v = ((const float4 *)p)[0], w = ((const float4 *)p)[1];
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    out[4] = w.x, out[5] = w.y, out[6] = w.z, out[7] = w.w;
}

__device__ __forceinline__ void store_vector(float *p, const float (&x)[8])
{
    ((float4 *)p)[0] = make_float4(x[0], x[1], x[2], x[3]);
    ((float4 *)p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

/* ---- reductions in a fixed order; all threads get the result ---- */

struct op_sum {
    template <typename N>
    __device__ static N of(N a, N b)
    {
        return a + b;
    }
    template <typename N>
    __device__ static N identity()
    {
        return N(0);
    }
};

struct op_max {
    template <typename N>
    __device__ static N of(N a, N b)
    {
        return a > b ? a : b;
    }
    template <typename N>
    __device__ static N identity()
    {
        return N(-INFINITY);
    }
};

/* Over neighbouring WIDTH lanes of a full warp: 32, 16, 8, 4 or 2. */
template <typename Op, typename N, int WIDTH = 32>
__device__ __forceinline__ N warp_reduce(N x)
{
#pragma unroll
    for (int i = WIDTH / 2; i > 0; i /= 2)
        x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, i));
    return x;
}

template <typename N>
__device__ __forceinline__ N warp_sum(N x)
{
    return warp_reduce<op_sum, N>(x);
}

template <typename N>
__device__ __forceinline__ N warp_max(N x)
{
    return warp_reduce<op_max, N>(x);
}

/* Over all threads of a block, whose count is a multiple of 32 (one dimension); every thread must
 * call. shared has room for 32 numbers and may be used again at once for the same thing. */
template <typename Op, typename N>
__device__ __forceinline__ N block_reduce(N x, N *shared)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int n_warps = (int)blockDim.x >> 5;
    x = warp_reduce<Op, N>(x);
    if (n_warps == 1)
        return x;
    __syncthreads(); /* the readers of the last use are through */
    if (lane == 0)
        shared[warp] = x;
    __syncthreads();
    x = lane < n_warps ? shared[lane] : Op::template identity<N>();
    return warp_reduce<Op, N>(x);
}

template <typename N>
__device__ __forceinline__ N block_sum(N x, N *shared)
{
    return block_reduce<op_sum, N>(x, shared);
}

template <typename N>
__device__ __forceinline__ N block_max(N x, N *shared)
{
    return block_reduce<op_max, N>(x, shared);
}

/* ---- asynchronous copies from global to shared memory, 16 bytes each ---- */

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Where !valid, 16 zero bytes; from must be an address that may be named all the same. */
__device__ __forceinline__ void copy_async(void *to_shared, const void *from, bool valid)
{
    int n_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to_shared)),
                 "l"(from), "r"(n_bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit()
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* Until at most N_PENDING of this thread's groups are on their way; then __syncthreads. */
template <int N_PENDING>
__device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N_PENDING) : "memory");
}

/* ---- tensor cores: mma.sync m16n8k16, bf16 with fp32 sums ----
 *
 * With lane = 4 r + c (r 0..7, c 0..3), D (16, 8) += A (16, 16) B (16, 8) lies so:
 *   D: d[0], d[1] at row r,     columns 2c, 2c + 1; d[2], d[3] at row r + 8
 *   A: a[0] row r,     columns 2c, 2c + 1;      a[1] row r + 8, the same columns;
 *      a[2] row r,     columns 2c + 8, 2c + 9;  a[3] row r + 8, the same columns
 *   B: b[0] rows 2c, 2c + 1 of column r;        b[1] rows 2c + 8, 2c + 9 of column r
 * each register holding two bf16, the lower index in its low half. So two neighbouring D tiles
 * (columns 0..15), packed, are the A operand of a next product. */

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Matrices of 8 x 8 bf16 from shared memory: lane i gives the address of row i % 8 (16 bytes,
 * aligned) of matrix i / 8; register m of lane 4 r + c gets row r, columns 2c, 2c + 1 of matrix m.
 * The transposed forms get rows 2c, 2c + 1 of column r instead.
 *
 * A (16, 16) stored by rows of stride s: ldmatrix_x4 at tile + (lane % 16) s + lane / 16 * 8.
 * B (16, 8) stored as rows of n with k along them (a weight (out, in)): two n tiles of 8 at once by
 * ldmatrix_x4 at tile + (lane % 8 + lane / 16 * 8) s + lane / 8 % 2 * 8: r[0..1], r[2..3].
 * B stored as rows of k with n along them: ldmatrix_x4_transposed at tile + (lane % 16) s +
 * lane / 16 * 8: r[0..1] of columns 0..7, r[2..3] of 8..15. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

/* The addresses are those of lanes 0 to 15. */
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_transposed(uint32_t (&r)[2], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

#endif
