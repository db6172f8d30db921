/* wgmma.cuh - products of a warpgroup (4 warps) on bf16 tiles in shared memory, with fp32 sums
 *
 * Tiles lie in panels of 64 columns: a row of a panel is 128 bytes, rows follow each other, a panel
 * begins at a multiple of 1024 bytes, and the 16-byte chunk c of row r lies at chunk c ^ r % 8.
 * A panel can be read both ways: its columns as what is summed over (by rows), or its rows
 * (by columns). D (64, N) of a warpgroup: warp w has rows 16 w .. 16 w + 15, and in each 8 columns
 * the four floats of mma_bf16 (cuda_elem.cuh); A in registers lies as mma_bf16's A.
 *
 * Order: tiles written by ordinary stores or copy_async, panel_fence by the writers, a barrier,
 * then wgmma_begin, any wgmma, wgmma_commit, wgmma_wait, and wgmma_keep of the sums before they are
 * read. */
#ifndef KERNELS_WGMMA_CUH
#define KERNELS_WGMMA_CUH

#include "kernels/cuda_elem.cuh"

#define PANEL_ROW_BYTES 128

/* Where 16-byte chunk `chunk` of row `row` lies, chunks counted over neighbouring panels of n_rows
 * rows. */
template <int N_ROWS>
__device__ __forceinline__ uint32_t panel_offset(int row, int chunk)
{
    return (uint32_t)(chunk / 8 * (N_ROWS * PANEL_ROW_BYTES) + row * PANEL_ROW_BYTES +
                      ((chunk ^ row) & 7) * 16);
}

/* The dynamic shared memory's first multiple of 1024; ask for 1024 bytes more. */
__device__ __forceinline__ char *panel_align(void *shared)
{
    uint32_t address = shared_address(shared);
    return (char *)shared + ((1024 - address % 1024) % 1024);
}

/* ---- what describes a tile; add panel_step to walk ---- */

/* Rows as they are, 16 columns from `at`: to walk along columns inside a panel add 32 bytes. */
__device__ __forceinline__ uint64_t panel_by_rows(const void *at)
{
    return (uint64_t)(shared_address(at) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* Columns as rows, 16 rows from `at`; more than 64 columns go on in the next panel. */
__device__ __forceinline__ uint64_t panel_by_columns(const void *at, uint32_t panel_bytes)
{
    return (uint64_t)(shared_address(at) >> 4 & 0x3fff) | (uint64_t)(panel_bytes >> 4) << 16 |
           64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ uint64_t panel_step(uint32_t n_bytes)
{
    return n_bytes >> 4;
}

/* What this thread wrote to shared memory is seen by products after the next barrier. */
__device__ __forceinline__ void panel_fence()
{
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/* Rows row .. row + N_ROWS of from, 16-byte chunks 0 .. N_CHUNKS, to the panels at to, by
 * N_THREADS threads; rows from n on become zero. Then copy_async_commit. */
template <int N_ROWS, int N_CHUNKS, int N_THREADS>
__device__ __forceinline__ void panel_load(char *to, const bf16 *from, int64_t stride, int64_t row,
                                           int64_t n)
{
    constexpr int n_rows = N_THREADS / N_CHUNKS; /* at a time */
    static_assert(N_THREADS % N_CHUNKS == 0 && N_ROWS % n_rows == 0 && n_rows % 8 == 0,
                  "every thread copies one column of chunks");
    int r = (int)threadIdx.x % N_THREADS / N_CHUNKS, chunk = (int)threadIdx.x % N_CHUNKS;
    int n_left = n - row < N_ROWS ? (int)(n - row) : N_ROWS;
    const bf16 *at = from + (row + r) * stride + chunk * 8;
    to += panel_offset<N_ROWS>(r, chunk);
#pragma unroll
    for (int i = 0; i < N_ROWS; i += n_rows, at += n_rows * stride)
        copy_async(to + i * PANEL_ROW_BYTES, r + i < n_left ? at : from, r + i < n_left);
}

/* ---- order ---- */

__device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

/* Until at most N_PENDING committed groups are not done. */
template <int N_PENDING>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N_PENDING) : "memory");
}

/* Keeps the compiler from moving uses of these registers over the calls around. */
template <int N>
__device__ __forceinline__ void wgmma_keep(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void wgmma_keep(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            asm volatile("" : "+r"(a[i][j])::"memory");
}

/* ---- D (64, N) += A (64, 16) B (16, N), N = 64, 128 or 256 by the length of d ---- */

#define WGMMA_FLOATS_8(i)                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_FLOATS_32(i)                                                                         \
    WGMMA_FLOATS_8(i), WGMMA_FLOATS_8(i + 8), WGMMA_FLOATS_8(i + 16), WGMMA_FLOATS_8(i + 24)

#define WGMMA_REGISTERS_64                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_128                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define WGMMA_REGISTERS_256                                                                        \
    WGMMA_REGISTERS_128 ", "                                                                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* A and B described; BY_COLUMNS where panel_by_columns describes it. */
template <bool A_BY_COLUMNS, bool B_BY_COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_REGISTERS_64
                 "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
                 : WGMMA_FLOATS_32(0)
                 : "l"(a), "l"(b), "r"(1), "n"((int)A_BY_COLUMNS), "n"((int)B_BY_COLUMNS));
}

template <bool A_BY_COLUMNS, bool B_BY_COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_REGISTERS_128
                 "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
                 : WGMMA_FLOATS_32(0), WGMMA_FLOATS_32(32)
                 : "l"(a), "l"(b), "r"(1), "n"((int)A_BY_COLUMNS), "n"((int)B_BY_COLUMNS));
}

template <bool A_BY_COLUMNS, bool B_BY_COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_REGISTERS_256
                 "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
                 : WGMMA_FLOATS_32(0), WGMMA_FLOATS_32(32), WGMMA_FLOATS_32(64), WGMMA_FLOATS_32(96)
                 : "l"(a), "l"(b), "r"(1), "n"((int)A_BY_COLUMNS), "n"((int)B_BY_COLUMNS));
}

/* A in registers. */
template <bool B_BY_COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_REGISTERS_64
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
                 : WGMMA_FLOATS_32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1),
                   "n"((int)B_BY_COLUMNS));
}

template <bool B_BY_COLUMNS>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_REGISTERS_128
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
                 : WGMMA_FLOATS_32(0), WGMMA_FLOATS_32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1),
                   "n"((int)B_BY_COLUMNS));
}

/* 2^x with the precision of the hardware; 0 for -inf. */
__device__ __forceinline__ float fast_exp2(float x)
{
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/* Sums as the A operands of a next product over their columns, 16 at a time. */
template <int N>
__device__ __forceinline__ void wgmma_pack(uint32_t (&a)[N / 8][4], const float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[i][j] = pack_bf16(d[8 * i + 2 * j], d[8 * i + 2 * j + 1]);
}

#endif
