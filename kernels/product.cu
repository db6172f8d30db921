/* product.cu - products by tiles of our own: groups of any sizes, fixed order
 *
 * A block takes one tile of c after another, from all groups as from one list, so that small and
 * large groups fill the device alike. An element of c is summed along k in one order whatever the
 * number of rows, which is what deterministic runs need. float32 is summed by the ordinary units;
 * bf16 by tensor cores from a ring of tiles in shared memory. */
#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_tiles.h"

#define THREADS 256
#define STRIP   8 /* tiles of rows that are done together: they share b through the cache */

struct place {
    int32_t group;
    int64_t row, col; /* of the tile's first element */
};

/* The tile's group is the last that begins at or before it: empty ones begin where the next
 * does. */
__device__ static place find_tile(const cuda_tile_group *groups, int32_t n_groups, int64_t tile,
                                  int side)
{
    int32_t low = 0, high = n_groups;
    while (high - low > 1) {
        int32_t middle = (low + high) / 2;
        if (groups[middle].first_tile <= tile)
            low = middle;
        else
            high = middle;
    }
    const cuda_tile_group *g = &groups[low];
    int64_t t = tile - g->first_tile;
    int64_t n_rows = (g->m + side - 1) / side, n_cols = (g->n + side - 1) / side;
    int64_t strip = t / (STRIP * n_cols), in_strip = t % (STRIP * n_cols);
    int64_t height = min((int64_t)STRIP, n_rows - strip * STRIP);
    place p;
    p.group = low;
    p.row = (strip * STRIP + in_strip % height) * side;
    p.col = in_strip / height * side;
    return p;
}

__device__ static void put(void *c, bool is_bf16, int64_t at, float sum, float alpha, float beta)
{
    float x = alpha * sum;
    if (is_bf16) {
        bf16 *p = (bf16 *)c + at;
        store(p, beta == 0 ? x : x + beta * load(p));
    } else {
        float *p = (float *)c + at;
        store(p, beta == 0 ? x : x + beta * load(p));
    }
}

/* ---- float32 ---- */

#define DEPTH 16 /* of a tile along k */
#define SIDE  CUDA_TILE_F32

/* Tile (DEPTH, SIDE) of an operand, zeros beyond its end: element (k, i) is number k of row i where
 * rows lie along k, else number i of row k. Neighbouring threads read along rows. */
__device__ static void load_f32(float (*to)[SIDE + 4], const void *from, bool along_k,
                                int64_t stride, int64_t k0, int64_t n_k, int64_t i0, int64_t n_i)
{
    for (int e = (int)threadIdx.x; e < DEPTH * SIDE; e += THREADS) {
        int k = along_k ? e % DEPTH : e / SIDE;
        int i = along_k ? e / DEPTH : e % SIDE;
        int64_t row = along_k ? i0 + i : k0 + k, col = along_k ? k0 + k : i0 + i;
        bool is_there = k0 + k < n_k && i0 + i < n_i;
        to[k][i] = is_there ? ((const float *)from)[row * stride + col] : 0;
    }
}

__global__ static void __launch_bounds__(THREADS)
    tiles_f32(cuda_tile_job job, const cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles)
{
    __shared__ float a[DEPTH][SIDE + 4], b[DEPTH][SIDE + 4];
    int ty = (int)threadIdx.x / 16 * 4, tx = (int)threadIdx.x % 16 * 4;
    for (int64_t tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        place p = find_tile(groups, n_groups, tile, SIDE);
        cuda_tile_group g = groups[p.group];
        float sum[4][4] = {};
        for (int64_t k0 = 0; k0 < g.k; k0 += DEPTH) {
            load_f32(a, g.a, !job.a_transposed, job.a_stride, k0, g.k, p.row, g.m);
            load_f32(b, g.b, job.b_transposed, job.b_stride, k0, g.k, p.col, g.n);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < DEPTH; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        sum[i][j] += a[k][ty + i] * b[k][tx + j];
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (p.row + ty + i < g.m && p.col + tx + j < g.n)
                    put(g.c, false, (p.row + ty + i) * job.c_stride + p.col + tx + j, sum[i][j],
                        job.alpha, job.beta);
    }
}

#undef DEPTH
#undef SIDE

/* ---- bf16 ---- */

#define DEPTH  32
#define SIDE   CUDA_TILE_BF16
#define STAGES 4
/* Rows of shared tiles are 16 bytes longer, so that the eight rows a matrix is read from lie in
 * different banks. */
#define LD_ALONG_K (DEPTH + 8) /* tile (SIDE, DEPTH) */
#define LD_ALONG_I (SIDE + 8)  /* tile (DEPTH, SIDE) */
#define TILE_ELEMS (SIDE * LD_ALONG_K)
#define SHARED_BYTES (STAGES * 2 * TILE_ELEMS * (int)sizeof(bf16))

__device__ __forceinline__ void copy_async_part(void *to_shared, const void *from, int n_bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to_shared)),
                 "l"(from), "r"(n_bytes)
                 : "memory");
}

/* Eight neighbouring numbers of a row, from number `at` of the matrix on, of which n_valid exist,
 * into shared memory. */
__device__ __forceinline__ void load_eight(bf16 *to, const void *from, int64_t at, int n_valid,
                                           bool is_aligned)
{
    if (is_aligned) {
        copy_async_part(to, (const bf16 *)from + (n_valid > 0 ? at : 0), 2 * n_valid);
    } else {
        const bf16 *p = (const bf16 *)from + at;
        for (int j = 0; j < 8; j++)
            to[j] = j < n_valid ? p[j] : from_float<bf16>(0);
    }
}

/* Tile (ROWS, COLS) of a row-major matrix (n_rows, n_cols), zeros beyond its end. */
template <int ROWS, int COLS, int LD>
__device__ __forceinline__ void load_tile(bf16 *to, const void *from, int64_t stride, int64_t row0,
                                          int64_t n_rows, int64_t col0, int64_t n_cols,
                                          bool is_aligned)
{
    constexpr int PER_ROW = COLS / 8;
#pragma unroll
    for (int e = (int)threadIdx.x; e < ROWS * PER_ROW; e += THREADS) {
        int r = e / PER_ROW, c = e % PER_ROW * 8;
        int64_t left = row0 + r < n_rows ? n_cols - col0 - c : 0;
        int n_valid = left >= 8 ? 8 : left > 0 ? (int)left : 0;
        load_eight(to + r * LD + c, from, (row0 + r) * stride + col0 + c, n_valid, is_aligned);
    }
}

/* Both operands' tiles at k0. */
template <bool A_T, bool B_T>
__device__ __forceinline__ void load_stage(bf16 *stage, const cuda_tile_job &job,
                                           const cuda_tile_group &g, const place &p, int64_t k0,
                                           bool is_aligned)
{
    bf16 *a = stage, *b = stage + TILE_ELEMS;
    if (A_T)
        load_tile<DEPTH, SIDE, LD_ALONG_I>(a, g.a, job.a_stride, k0, g.k, p.row, g.m, is_aligned);
    else
        load_tile<SIDE, DEPTH, LD_ALONG_K>(a, g.a, job.a_stride, p.row, g.m, k0, g.k, is_aligned);
    if (B_T)
        load_tile<SIDE, DEPTH, LD_ALONG_K>(b, g.b, job.b_stride, p.col, g.n, k0, g.k, is_aligned);
    else
        load_tile<DEPTH, SIDE, LD_ALONG_I>(b, g.b, job.b_stride, k0, g.k, p.col, g.n, is_aligned);
}

/* A warp's 64 x 32 of the tile, at row0, col0, over DEPTH. */
template <bool A_T, bool B_T>
__device__ __forceinline__ void multiply(float (&d)[4][4][4], const bf16 *stage, int row0, int col0)
{
    const bf16 *a = stage, *b = stage + TILE_ELEMS;
    int lane = (int)threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t fa[4][4], fb[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = row0 + 16 * i;
            if (A_T)
                ldmatrix_x4_transposed(fa[i], a + (k + lane % 8 + lane / 16 * 8) * LD_ALONG_I +
                                                  row + lane / 8 % 2 * 8);
            else
                ldmatrix_x4(fa[i], a + (row + lane % 16) * LD_ALONG_K + k + lane / 16 * 8);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int col = col0 + 16 * j;
            if (B_T)
                ldmatrix_x4(fb[j], b + (col + lane % 8 + lane / 16 * 8) * LD_ALONG_K + k +
                                       lane / 8 % 2 * 8);
            else
                ldmatrix_x4_transposed(fb[j], b + (k + lane % 16) * LD_ALONG_I + col +
                                                  lane / 16 * 8);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t pair[2] = {fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]};
                mma_bf16(d[i][j], fa[i], pair);
            }
    }
}

__device__ static void write_tile(const float (&d)[4][4][4], const cuda_tile_job &job,
                                  const cuda_tile_group &g, int64_t row0, int64_t col0)
{
    int lane = (int)threadIdx.x & 31;
    bool is_bf16 = job.c_type == ELEM_BF16;
    bool in_pairs = job.c_stride % 2 == 0 && ((uintptr_t)g.c & (is_bf16 ? 3 : 7)) == 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int64_t row = row0 + 16 * i + lane / 4 + 8 * h;
                int64_t col = col0 + 8 * j + lane % 4 * 2;
                int64_t at = row * job.c_stride + col;
                float x = d[i][j][2 * h], y = d[i][j][2 * h + 1];
                if (row >= g.m || col >= g.n)
                    continue;
                if (in_pairs && job.beta == 0 && col + 1 < g.n) {
                    x *= job.alpha, y *= job.alpha;
                    if (is_bf16)
                        *(uint32_t *)((bf16 *)g.c + at) = pack_bf16(x, y);
                    else
                        *(float2 *)((float *)g.c + at) = make_float2(x, y);
                    continue;
                }
                put(g.c, is_bf16, at, x, job.alpha, job.beta);
                if (col + 1 < g.n)
                    put(g.c, is_bf16, at + 1, y, job.alpha, job.beta);
            }
}

template <bool A_T, bool B_T>
__global__ static void __launch_bounds__(THREADS, 2)
    tiles_bf16(cuda_tile_job job, bool is_aligned, const cuda_tile_group *groups, int32_t n_groups,
               int64_t n_tiles)
{
    extern __shared__ __align__(128) bf16 ring[];
    int warp = (int)threadIdx.x / 32, row = warp / 4 * 64, col = warp % 4 * 32;
    for (int64_t tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        place p = find_tile(groups, n_groups, tile, SIDE);
        cuda_tile_group g = groups[p.group];
        int n_steps = (int)((g.k + DEPTH - 1) / DEPTH);
        float d[4][4][4] = {};
        for (int s = 0; s < STAGES - 1; s++) {
            if (s < n_steps)
                load_stage<A_T, B_T>(ring + s * 2 * TILE_ELEMS, job, g, p, (int64_t)s * DEPTH,
                                     is_aligned);
            copy_async_commit();
        }
        for (int s = 0; s < n_steps; s++) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            int next = s + STAGES - 1; /* into the stage that was read last */
            if (next < n_steps)
                load_stage<A_T, B_T>(ring + next % STAGES * 2 * TILE_ELEMS, job, g, p,
                                     (int64_t)next * DEPTH, is_aligned);
            copy_async_commit();
            multiply<A_T, B_T>(d, ring + s % STAGES * 2 * TILE_ELEMS, row, col);
        }
        copy_async_wait<0>();
        __syncthreads(); /* before the next tile's copies */
        write_tile(d, job, g, p.row + row, p.col + col);
    }
}

template <bool A_T, bool B_T>
static void launch_bf16(struct device *dev, const cuda_tile_job *job, bool is_aligned,
                        const cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles)
{
    unsigned n_blocks = grid_blocks(n_tiles, 1, 2 * cuda_n_multiprocessors(dev));
    allow_shared(tiles_bf16<A_T, B_T>, SHARED_BYTES);
    tiles_bf16<A_T, B_T><<<n_blocks, THREADS, SHARED_BYTES, cuda_stream(dev)>>>(
        *job, is_aligned, groups, n_groups, n_tiles);
}

extern "C" void cuda_tiles_launch(struct device *dev, const cuda_tile_job *job, bool is_aligned,
                                  const cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles)
{
    if (job->type == ELEM_F32) {
        unsigned n_blocks = grid_blocks(n_tiles, 1, 4 * cuda_n_multiprocessors(dev));
        tiles_f32<<<n_blocks, THREADS, 0, cuda_stream(dev)>>>(*job, groups, n_groups, n_tiles);
        return;
    }
    auto launch = job->a_transposed
                      ? (job->b_transposed ? launch_bf16<true, true> : launch_bf16<true, false>)
                      : (job->b_transposed ? launch_bf16<false, true> : launch_bf16<false, false>);
    launch(dev, job, is_aligned, groups, n_groups, n_tiles);
}
