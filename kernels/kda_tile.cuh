/* kda_tile.cuh - products of small matrices in shared memory, one warp a strip of 16 rows
 *
 * A sum of a strip lies in registers as the tensor cores leave it (cuda_elem.cuh: mma_bf16):
 * sum[t] is columns 8 t .. 8 t + 7, and a lane has rows lane / 4 and + 8, columns lane % 4 * 2 and
 * + 1 of each. Elements of bf16 go through tensor cores; float is multiplied exactly, in the same
 * places, so that all code around the products is one. Rows are padded by 16 bytes, which puts
 * eight rows of a matrix into different banks. */
#ifndef KERNELS_KDA_TILE_CUH
#define KERNELS_KDA_TILE_CUH

#include "kernels/cuda_elem.cuh"

/* Elements from row to row of a matrix of n columns. */
template <typename T>
constexpr __host__ __device__ int stride_of(int n)
{
    return n + vector_elems<T>;
}

/* A matrix as it lies, element (i, j) at i * stride + j, or its transpose. */
template <typename T, bool TRANSPOSED>
struct tile {
    const T *at;
    int stride;
};

template <typename T>
__device__ __forceinline__ tile<T, false> as_is(const T *at, int stride)
{
    return {at, stride};
}

template <typename T>
__device__ __forceinline__ tile<T, true> transposed(const T *at, int stride)
{
    return {at, stride};
}

__device__ __forceinline__ int lane_id()
{
    return (int)threadIdx.x & 31;
}

__device__ __forceinline__ int warp_id()
{
    return (int)threadIdx.x >> 5;
}

/* The row of this lane's first pair in a strip, and the column of its pair in 8 columns. */
__device__ __forceinline__ int strip_row()
{
    return lane_id() >> 2;
}

__device__ __forceinline__ int strip_column()
{
    return (lane_id() & 3) * 2;
}

/* ---- bf16: fragments ---- */

__device__ __forceinline__ void load_left(uint32_t (&a)[4], tile<bf16, false> m, int k)
{
    int lane = lane_id();
    ldmatrix_x4(a, m.at + (lane & 15) * m.stride + k + (lane >> 4) * 8);
}

__device__ __forceinline__ void load_left(uint32_t (&a)[4], tile<bf16, true> m, int k)
{
    int lane = lane_id();
    ldmatrix_x4_transposed(a, m.at + (k + (lane & 7) + (lane >> 4) * 8) * m.stride +
                                  (lane >> 3 & 1) * 8);
}

/* 16 columns from n on. */
__device__ __forceinline__ void load_right(uint32_t (&b)[4], tile<bf16, false> m, int k, int n)
{
    int lane = lane_id();
    ldmatrix_x4_transposed(b, m.at + (k + (lane & 15)) * m.stride + n + (lane >> 4) * 8);
}

__device__ __forceinline__ void load_right(uint32_t (&b)[4], tile<bf16, true> m, int k, int n)
{
    int lane = lane_id();
    ldmatrix_x4(b, m.at + (n + (lane & 7) + (lane >> 4) * 8) * m.stride + k + (lane >> 3 & 1) * 8);
}

/* 8 columns. */
__device__ __forceinline__ void load_right(uint32_t (&b)[2], tile<bf16, false> m, int k, int n)
{
    ldmatrix_x2_transposed(b, m.at + (k + (lane_id() & 15)) * m.stride + n);
}

__device__ __forceinline__ void load_right(uint32_t (&b)[2], tile<bf16, true> m, int k, int n)
{
    int lane = lane_id();
    ldmatrix_x2(b, m.at + (n + (lane & 7)) * m.stride + k + (lane >> 3 & 1) * 8);
}

/* Sums of one or two strips with the same right side, k_begin .. k_end in steps of 16. */
template <int N_TILES, int N_STRIPS, bool LEFT, bool RIGHT>
__device__ __forceinline__ void strips_product(float (&sum)[N_STRIPS][N_TILES][4],
                                               const tile<bf16, LEFT> (&left)[N_STRIPS],
                                               tile<bf16, RIGHT> right, int k_begin, int k_end)
{
#pragma unroll 4
    for (int k = k_begin; k < k_end; k += 16) {
        uint32_t a[N_STRIPS][4];
#pragma unroll
        for (int s = 0; s < N_STRIPS; s++)
            load_left(a[s], left[s], k);
#pragma unroll
        for (int t = 0; t + 1 < N_TILES; t += 2) {
            uint32_t b[4];
            load_right(b, right, k, t * 8);
            const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
            for (int s = 0; s < N_STRIPS; s++) {
                mma_bf16(sum[s][t], a[s], b0);
                mma_bf16(sum[s][t + 1], a[s], b1);
            }
        }
        if (N_TILES % 2) {
            uint32_t b[2];
            load_right(b, right, k, (N_TILES - 1) * 8);
#pragma unroll
            for (int s = 0; s < N_STRIPS; s++)
                mma_bf16(sum[s][N_TILES - 1], a[s], b);
        }
    }
}

/* ---- float ---- */

template <bool TRANSPOSED>
__device__ __forceinline__ float element(tile<float, TRANSPOSED> m, int i, int j)
{
    return TRANSPOSED ? m.at[j * m.stride + i] : m.at[i * m.stride + j];
}

template <int N_TILES, int N_STRIPS, bool LEFT, bool RIGHT>
__device__ __forceinline__ void strips_product(float (&sum)[N_STRIPS][N_TILES][4],
                                               const tile<float, LEFT> (&left)[N_STRIPS],
                                               tile<float, RIGHT> right, int k_begin, int k_end)
{
    int row = strip_row(), column = strip_column();
#pragma unroll 2
    for (int k = k_begin; k < k_end; k++) {
        float a[N_STRIPS][2];
#pragma unroll
        for (int s = 0; s < N_STRIPS; s++) {
            a[s][0] = element(left[s], row, k);
            a[s][1] = element(left[s], row + 8, k);
        }
#pragma unroll
        for (int t = 0; t < N_TILES; t++) {
            float b0 = element(right, k, t * 8 + column);
            float b1 = element(right, k, t * 8 + column + 1);
#pragma unroll
            for (int s = 0; s < N_STRIPS; s++) {
                sum[s][t][0] += a[s][0] * b0;
                sum[s][t][1] += a[s][0] * b1;
                sum[s][t][2] += a[s][1] * b0;
                sum[s][t][3] += a[s][1] * b1;
            }
        }
    }
}

/* ---- float through tensor cores: for matrices that are rounded to bf16 afterwards ---- */

/* D (16, 8) += A (16, 8) B (8, 8), operands rounded to TF32's ten bits. D lies as in mma_bf16; with
 * lane = 4 r + c, A: a[0] row r, column c; a[1] row r + 8; a[2], a[3] the same at column c + 4; B:
 * b[0] row c, b[1] row c + 4 of column r. */
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Its low bits are cut off by the tensor core. */
__device__ __forceinline__ uint32_t to_tf32(float x)
{
    return __float_as_uint(x) + 0x1000u;
}

/* One tile of 8 columns; k_begin .. k_end in steps of 8. */
__device__ __forceinline__ void strip_product_tf32(float (&sum)[1][4], tile<float, false> left,
                                                   tile<float, false> right, int k_begin,
                                                   int k_end)
{
    int row = lane_id() >> 2, column = lane_id() & 3;
#pragma unroll 4
    for (int k = k_begin; k < k_end; k += 8) {
        const uint32_t a[4] = {to_tf32(element(left, row, k + column)),
                               to_tf32(element(left, row + 8, k + column)),
                               to_tf32(element(left, row, k + column + 4)),
                               to_tf32(element(left, row + 8, k + column + 4))};
        const uint32_t b[2] = {to_tf32(element(right, k + column, row)),
                               to_tf32(element(right, k + column + 4, row))};
        mma_tf32(sum[0], a, b);
    }
}

/* ---- either ---- */

/* sum (16, 8 N_TILES) += left (16, K) right (K, 8 N_TILES), K from k_begin to k_end, multiples of
 * 16. */
template <int N_TILES, typename T, bool LEFT, bool RIGHT>
__device__ __forceinline__ void strip_product(float (&sum)[N_TILES][4], tile<T, LEFT> left,
                                              tile<T, RIGHT> right, int k_begin, int k_end)
{
    const tile<T, LEFT> one[1] = {left};
    strips_product<N_TILES, 1>((float(&)[1][N_TILES][4])sum, one, right, k_begin, k_end);
}

template <int N_TILES>
__device__ __forceinline__ void strip_clear(float (&sum)[N_TILES][4])
{
#pragma unroll
    for (int t = 0; t < N_TILES; t++)
        sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
}

/* Two neighbouring elements, the first at an even index of an aligned row. */
__device__ __forceinline__ float2 load_pair(const float *p)
{
    return *(const float2 *)p;
}

__device__ __forceinline__ float2 load_pair(const bf16 *p)
{
    return unpack_bf16(*(const uint32_t *)p);
}

__device__ __forceinline__ void store_pair(float *p, float a, float b)
{
    *(float2 *)p = make_float2(a, b);
}

__device__ __forceinline__ void store_pair(bf16 *p, float a, float b)
{
    *(uint32_t *)p = pack_bf16(a, b);
}

/* Two elements as they are kept in registers. */
template <typename T>
struct pair_of;

template <>
struct pair_of<float> {
    float2 both;
    __device__ __forceinline__ float2 floats() const
    {
        return both;
    }
};

template <>
struct pair_of<bf16> {
    uint32_t both;
    __device__ __forceinline__ float2 floats() const
    {
        return unpack_bf16(both);
    }
};

/* The same where the caller's tensors may start anywhere. */
template <typename T>
__device__ __forceinline__ float2 load_two(const T *p, bool is_aligned)
{
    return is_aligned ? load_pair(p) : make_float2(load(p), load(p + 1));
}

template <typename T>
__device__ __forceinline__ void store_two(T *p, float a, float b, bool is_aligned)
{
    if (is_aligned)
        store_pair(p, a, b);
    else
        store(p, a), store(p + 1, b);
}

template <int N_TILES, typename T>
__device__ __forceinline__ void strip_load(float (&sum)[N_TILES][4], const T *from, int64_t stride,
                                           bool is_aligned = true)
{
    const T *above = from + strip_row() * stride + strip_column(), *below = above + 8 * stride;
#pragma unroll
    for (int t = 0; t < N_TILES; t++) {
        float2 a = load_two(above + t * 8, is_aligned), b = load_two(below + t * 8, is_aligned);
        sum[t][0] = a.x, sum[t][1] = a.y, sum[t][2] = b.x, sum[t][3] = b.y;
    }
}

/* The strip to rows at `to`; rows from `rows` on are left out. */
template <int N_TILES, typename T>
__device__ __forceinline__ void strip_store(T *to, int64_t stride, const float (&sum)[N_TILES][4],
                                            int rows, bool is_aligned = true)
{
    int row = strip_row();
    T *at = to + row * stride + strip_column();
#pragma unroll
    for (int t = 0; t < N_TILES; t++) {
        if (row < rows)
            store_two(at + t * 8, sum[t][0], sum[t][1], is_aligned);
        if (row + 8 < rows)
            store_two(at + 8 * stride + t * 8, sum[t][2], sum[t][3], is_aligned);
    }
}

/* ---- copies by the whole block: (n_rows, n_columns) elements from global to shared memory ---- */

/* Asynchronous, 16 bytes at a time. Rows from n_valid on are zero. */
template <typename T>
__device__ __forceinline__ void tile_copy_async(T *to, int to_stride, const T *from,
                                                int64_t from_stride, int n_rows, int n_columns,
                                                int n_valid, bool is_aligned = true)
{
    if (!is_aligned) {
        for (int i = (int)threadIdx.x; i < n_rows * n_columns; i += (int)blockDim.x) {
            int row = i / n_columns, column = i % n_columns;
            store(to + row * to_stride + column,
                  row < n_valid ? load(from + row * from_stride + column) : 0);
        }
        return;
    }
    int n_vectors = n_columns / vector_elems<T>;
    for (int i = (int)threadIdx.x; i < n_rows * n_vectors; i += (int)blockDim.x) {
        int row = i / n_vectors, column = i % n_vectors * vector_elems<T>;
        bool valid = row < n_valid;
        copy_async(to + row * to_stride + column,
                   from + (valid ? row : 0) * from_stride + column, valid);
    }
}

/* And back, at once. */
template <typename T>
__device__ __forceinline__ void tile_store(T *to, int64_t to_stride, const T *from,
                                           int from_stride, int n_rows, int n_columns)
{
    int n_vectors = n_columns / vector_elems<T>;
    for (int i = (int)threadIdx.x; i < n_rows * n_vectors; i += (int)blockDim.x) {
        int row = i / n_vectors, column = i % n_vectors * vector_elems<T>;
        *(uint4 *)(to + row * to_stride + column) =
            *(const uint4 *)(from + row * from_stride + column);
    }
}

#endif
