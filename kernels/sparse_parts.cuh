/* sparse_parts.cuh - what queries give to their keys, in bf16, and its sums
 *
 * A key gets hundreds of parts, whose roundings are independent. A row of parts keeps, of 32
 * columns, what a thread has of four tiles of 8 together, so that it is written 16 bytes at a time.
 */
#ifndef KERNELS_SPARSE_PARTS_CUH
#define KERNELS_SPARSE_PARTS_CUH

#include "kernels/cuda_elem.cuh"

/* What column lies at a place of a row. */
__device__ __forceinline__ int part_column(int place)
{
    int in_group = place % 32;
    return place / 32 * 32 + in_group % 8 / 2 * 8 + in_group / 8 * 2 + place % 2;
}

/* Sums of a warpgroup's product, in groups of 32 columns, of one of this thread's two rows. */
template <int N>
__device__ __forceinline__ void store_part(bf16 *to, const float (&sums)[N], int half)
{
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = pack_bf16(sums[16 * i + 4 * j + 2 * half],
                                 sums[16 * i + 4 * j + 2 * half + 1]);
        *(uint4 *)(to + i * 32 + threadIdx.x % 4 * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* Rows that a block adds at a time, 16 bytes a thread. */
template <int WIDTH>
struct part_rows {
    static constexpr int lanes = WIDTH / 8, n = WIDTH == 576 ? 4 : 16, threads = lanes * n;
    static_assert(WIDTH % 32 == 0 && threads % 32 == 0 && threads <= 1024, "whole warps");
};

/* acc (keys, WIDTH) += the parts of a key; a block a key. Thread row r adds every n-th part from
 * the r-th, then the n sums come together. */
template <int WIDTH>
static __global__ void __launch_bounds__(part_rows<WIDTH>::threads)
    sparse_add_parts(float *acc, const bf16 *parts, const int32_t *place, int64_t block,
                     int64_t n_max, int n_queries)
{
    constexpr int n_threads = part_rows<WIDTH>::threads, n_lanes = part_rows<WIDTH>::lanes,
                  n_rows = part_rows<WIDTH>::n;
    __shared__ int32_t counts[n_threads / 32];
    __shared__ int64_t found[n_threads];
    __shared__ float sums[n_rows][WIDTH];
    int64_t key = blockIdx.x;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int row = (int)threadIdx.x / n_lanes, chunk = (int)threadIdx.x % n_lanes;
    float sum[8] = {0};
    bool has_any = false;
    for (int first = 0; first < n_queries; first += n_threads) {
        int z = first + (int)threadIdx.x;
        int32_t at = z < n_queries ? place[key * block + z] : 0;
        uint32_t mask = __ballot_sync(0xffffffffu, at > 0);
        if (lane == 0)
            counts[warp] = __popc(mask);
        __syncthreads();
        int n = 0, rank = __popc(mask & ((1u << lane) - 1));
        for (int i = 0; i < n_threads / 32; i++) {
            rank += i < warp ? counts[i] : 0;
            n += counts[i];
        }
        if (at > 0)
            found[rank] = z * n_max + at - 1;
        __syncthreads();
        has_any = has_any || n > 0;
#pragma unroll 4
        for (int i = row; i < n; i += n_rows) {
            float x[8];
            load_vector(parts + found[i] * WIDTH + chunk * 8, x);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum[j] += x[j];
        }
        __syncthreads(); /* counts and found may be overwritten */
    }
    if (!has_any)
        return;
#pragma unroll
    for (int j = 0; j < 8; j++)
        sums[row][part_column(chunk * 8 + j)] = sum[j];
    __syncthreads();
    for (int c = (int)threadIdx.x; c < WIDTH; c += n_threads) {
        float total = 0;
        for (int i = 0; i < n_rows; i++)
            total += sums[i][c];
        acc[key * WIDTH + c] += total;
    }
}

#endif
