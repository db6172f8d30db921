/* index_loss_tensor.cu - the indexer's loss over chosen keys in bf16 on tensor cores
 *
 * Over a block of queries: one kernel sums the main attention's weights over 64 heads. One has a
 * query and walks over its keys twice: for the scores, whose divergence gives dI, and for what dI
 * does to q, w and the keys. The keys' parts come together as in sparse_parts.cuh. */
#include "kernels/index_loss.cuh"
#include "kernels/sparse_parts.cuh"
#include "kernels/sparse_tensor.cuh"

#define STEP       128 /* keys, 64 a warpgroup */
#define DIM        128
#define HEADS      64  /* of the index at most; those that lack are zero */
#define N_KEYS_MAX 4096

struct loss_work {
    key_lists lists;
    const float *lse; /* (n, heads) of the main attention */
    float   *target;  /* (block, groups of heads, n_max) */
    bf16    *parts;   /* (block, n_max, DIM), columns as in sparse_parts.cuh */
    unsigned n_groups;
    int64_t  begin;
};

/* ---- the target ---- */

enum {
    TILES_AT     = SPARSE_KEYS, /* after the queries: two tiles of keys */
    COLUMNS_AT   = TILES_AT + 2 * SPARSE_KEYS,
    TARGET_BYTES = COLUMNS_AT + 8 * SPARSE_ROWS * 4, /* a row a warp */
};

/* columns (64) = sums over this warp's 16 rows of the weights of scores s. */
__device__ __forceinline__ void sum_rows(float *columns, const float (&s)[32], float scale,
                                         const float (&lse)[2])
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int at = i / 2 * 4 + i % 2;
        float sum = fast_exp2(s[at] * scale - lse[0]) + fast_exp2(s[at + 2] * scale - lse[1]);
        for (int other = 4; other < 32; other *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane < 4)
            columns[i / 2 * 8 + lane * 2 + i % 2] = sum;
    }
}

/* Grid: groups of heads of a query of the block after each other. */
static __global__ void __launch_bounds__(SPARSE_THREADS, 1)
    target_of_heads(loss_work w, sparse_operands<bf16> x)
{
    extern __shared__ char shared[];
    char *memory = panel_align(shared), *tiles = memory + TILES_AT;
    float *columns = (float *)(memory + COLUMNS_AT);
    int64_t z = blockIdx.x / w.n_groups, t = w.begin + z;
    int head_group = (int)(blockIdx.x % w.n_groups), head = head_group * SPARSE_ROWS;
    int n = (int)w.lists.length(t), thread = (int)threadIdx.x, group = thread / 128;
    int row = thread / 32 % 4 * 16 + thread % 32 / 4;
    float *target = w.target + (z * w.n_groups + head_group) * w.lists.n_max, lse[2];
    for (int half = 0; half < 2; half++) {
        int h = head + row + half * 8;
        lse[half] = h < x.n_heads ? w.lse[t * x.n_heads + h] * LOG2E : INFINITY;
    }
    load_queries(memory, x, t, head);
    for (int first = 0; first < n; first += STEP) {
        gather_keys(tiles, x, w.lists, t, first, n);
        gather_keys(tiles + SPARSE_KEYS, x, w.lists, t, first + SPARSE_ROWS, n);
        copy_async_commit();
        copy_async_wait<0>();
        panel_fence();
        __syncthreads();
        float s[32];
        sparse_dots<SPARSE_WIDTH>(s, memory, tiles + group * SPARSE_KEYS);
        sum_rows(columns + thread / 32 * SPARSE_ROWS, s, x.scale * LOG2E, lse);
        __syncthreads(); /* also: the tiles may be overwritten */
        if (thread < STEP && first + thread < n) {
            const float *of_warps = columns + thread / 64 * 4 * SPARSE_ROWS + thread % 64;
            target[first + thread] = (of_warps[0] + of_warps[64]) + (of_warps[128] + of_warps[192]);
        }
    }
}

/* ---- the loss and the gradients ---- */

enum {
    PANEL      = 64 * PANEL_ROW_BYTES,
    TILE_BYTES = 2 * PANEL, /* 64 keys */
    KEYS_AT    = 2 * PANEL, /* after the queries: two stages of two tiles */
    DA_AT      = KEYS_AT + 4 * TILE_BYTES,
    HEADS_AT   = DA_AT + 2 * PANEL, /* weights, then dw of each warp */
    SUMS_AT    = HEADS_AT + 9 * HEADS * 4,
    LISTS_AT   = SUMS_AT + 32 * 8, /* index, then target */
};

/* Index keys first .. first + STEP of the list of n, zeros from n on. */
__device__ __forceinline__ void load_keys(char *to, const index_view<bf16> &x,
                                          const key_lists &lists, int64_t t, int first, int n)
{
    int chunk = (int)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < STEP / 16; i++) {
        int r = (int)threadIdx.x / 16 + i * 16;
        bool valid = first + r < n;
        int64_t key = valid ? lists.selected[t * lists.n_max + first + r] : 0;
        copy_async(to + r / 64 * TILE_BYTES + panel_offset<64>(r % 64, chunk),
                   x.k + key * DIM + chunk * 8, valid);
    }
    copy_async_commit();
}

/* dots (64 keys of this warpgroup, 64 heads). */
__device__ __forceinline__ void dots_of_keys(float (&dots)[32], const char *keys, const char *q)
{
    uint64_t a = panel_by_rows(keys), b = panel_by_rows(q);
#pragma unroll
    for (int i = 0; i < 32; i++)
        dots[i] = 0;
    wgmma_keep(dots);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint64_t step = panel_step((uint32_t)(i / 4 * PANEL + i % 4 * 32));
        wgmma<false, false>(dots, a + step, b + step);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(dots);
}

/* Walks over the list: body(first, keys of this warpgroup) between barriers. */
template <typename F>
__device__ __forceinline__ void for_each_step(char *memory, const index_view<bf16> &x,
                                              const key_lists &lists, int64_t t, int n, F body)
{
    char *stages = memory + KEYS_AT;
    load_keys(stages, x, lists, t, 0, n);
    for (int first = 0, step = 0; first < n; first += STEP, step++) {
        if (first + STEP < n) {
            load_keys(stages + (step + 1) % 2 * 2 * TILE_BYTES, x, lists, t, first + STEP, n);
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        panel_fence();
        __syncthreads();
        body(first, stages + (step % 2 * 2 + (int)threadIdx.x / 128) * TILE_BYTES);
        __syncthreads(); /* the stage may be overwritten */
    }
}

/* This warp's index scores of its 16 keys. */
__device__ __forceinline__ void store_index(float *index, const float (&dots)[32],
                                            const float *weights, int row, int n_left)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 w = *(const float2 *)(weights + j * 8 + lane % 4 * 2);
            sum += w.x * fmaxf(dots[4 * j + 2 * half], 0);
            sum += w.y * fmaxf(dots[4 * j + 2 * half + 1], 0);
        }
        sum = warp_reduce<op_sum, float, 4>(sum);
        if (lane % 4 == 0 && row + half * 8 < n_left)
            index[row + half * 8] = sum;
    }
    __syncwarp(); /* what follows waits for products with whole warps */
}

/* dots become da; dw (this thread's columns) += dI relu(dots). */
__device__ __forceinline__ void make_da(float (&dots)[32], float (&dw)[16], const float (&d)[2],
                                        const float *weights)
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int column = i / 4 * 8 + (int)threadIdx.x % 4 * 2 + i % 2, half = i / 2 % 2;
        float dot = dots[i];
        dw[i / 4 * 2 + i % 2] += d[half] * fmaxf(dot, 0);
        dots[i] = dot > 0 ? weights[column] * d[half] : 0;
    }
}

/* dw of the query from what each thread has of its columns. */
__device__ __forceinline__ void store_dw(char *memory, const index_gradients<bf16> &g,
                                         const float (&dw)[16], int64_t t)
{
    float *of_warps = (float *)(memory + HEADS_AT) + HEADS;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, n_heads = g.x.n_heads;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sum = dw[i];
        for (int other = 4; other < 32; other *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane < 4)
            of_warps[warp * HEADS + i / 2 * 8 + lane * 2 + i % 2] = sum;
    }
    __syncthreads();
    if ((int)threadIdx.x < n_heads) {
        float sum = 0;
        for (int i = 0; i < 8; i++)
            sum += of_warps[i * HEADS + threadIdx.x];
        store(g.dw + t * n_heads + threadIdx.x, g.x.scale * sum);
    }
}

/* dq of the query from the sums of both warpgroups. */
__device__ __forceinline__ void store_dq(char *memory, const index_gradients<bf16> &g,
                                         const float (&dq)[64], int64_t t)
{
    float *other = (float *)(memory + KEYS_AT); /* (64, DIM); the keys are through */
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    __syncthreads();
    if (threadIdx.x >= 128) {
#pragma unroll
        for (int i = 0; i < 64; i++)
            other[(row + i / 2 % 2 * 8) * DIM + i / 4 * 8 + lane % 4 * 2 + i % 2] = dq[i];
    }
    __syncthreads();
    if (threadIdx.x >= 128)
        return;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        int h = row + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (h < g.x.n_heads)
            store(g.dq + (t * g.x.n_heads + h) * DIM + column, dq[i] + other[h * DIM + column]);
    }
}

/* A block a query of the block. */
static __global__ void __launch_bounds__(SPARSE_THREADS, 1)
    loss_of_query(loss_work w, index_gradients<bf16> g)
{
    extern __shared__ char shared[];
    char *memory = panel_align(shared);
    float *weights = (float *)(memory + HEADS_AT), *index = (float *)(memory + LISTS_AT);
    double *sums = (double *)(memory + SUMS_AT);
    const index_view<bf16> &x = g.x;
    int64_t z = blockIdx.x, t = w.begin + z;
    int n = (int)w.lists.length(t), thread = (int)threadIdx.x, group = thread / 128;
    int row = thread / 32 % 4 * 16 + thread % 32 / 4;
    float *target = index + w.lists.n_max;
    panel_load<64, 16, SPARSE_THREADS>(memory, x.q, DIM, t * x.n_heads, (t + 1) * x.n_heads);
    if (thread < HEADS)
        weights[thread] = thread < x.n_heads ? load(x.w + t * x.n_heads + thread) * x.scale : 0;
    for (int j = thread; j < n; j += SPARSE_THREADS) {
        float sum = 0;
        for (unsigned i = 0; i < w.n_groups; i++)
            sum += w.target[(z * w.n_groups + i) * w.lists.n_max + j];
        target[j] = sum;
    }
    for_each_step(memory, x, w.lists, t, n, [&](int first, const char *keys) {
        float dots[32];
        dots_of_keys(dots, keys, memory);
        store_index(index + first + group * 64, dots, weights, row, n - first - group * 64);
    });
    float max = -INFINITY;
    for (int j = thread; j < n; j += SPARSE_THREADS)
        max = fmaxf(max, index[j]);
    max = block_max(max, (float *)sums);
    __syncthreads(); /* sums is used for other numbers */
    double loss = divergence(index, target, n, max, g.weight, sums);
    if (thread == 0)
        g.losses[t] = loss;
    __syncthreads(); /* index is whole */

    float dq[64], dw[16] = {0};
    char *da = memory + DA_AT + group * PANEL;
#pragma unroll
    for (int i = 0; i < 64; i++)
        dq[i] = 0;
    for_each_step(memory, x, w.lists, t, n, [&](int first, const char *keys) {
        float dots[32], part[64], d[2];
        uint32_t da_packed[4][4];
        for (int half = 0; half < 2; half++) {
            int j = first + group * 64 + row + half * 8;
            d[half] = j < n ? index[j] : 0;
        }
        dots_of_keys(dots, keys, memory);
        make_da(dots, dw, d, weights);
#pragma unroll
        for (int i = 0; i < 16; i++) /* rows are keys, columns are heads */
            *panel_pair(da, row + i % 2 * 8, i / 2) =
                pack_bf16(dots[i / 2 * 4 + i % 2 * 2], dots[i / 2 * 4 + i % 2 * 2 + 1]);
        panel_fence();
        __syncthreads();
        wgmma_pack(da_packed, dots);
#pragma unroll
        for (int i = 0; i < 64; i++)
            part[i] = 0;
        uint64_t by_heads = panel_by_columns(da, PANEL), k = panel_by_columns(keys, PANEL);
        uint64_t q = panel_by_columns(memory, PANEL);
        wgmma_keep(da_packed);
        wgmma_keep(part);
        wgmma_keep(dq);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint64_t step = panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES);
            wgmma<true>(part, da_packed[i], q + step);
            wgmma<true, true>(dq, by_heads + step, k + step);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(part);
        wgmma_keep(dq);
        wgmma_keep(da_packed);
        for (int half = 0; half < 2; half++) {
            int j = first + group * 64 + row + half * 8;
            if (j < n)
                store_part(w.parts + (z * w.lists.n_max + j) * DIM, part, half);
        }
        __syncwarp();
    });
    store_dw(memory, g, dw, t);
    store_dq(memory, g, dq, t);
}

/* ---- launches ---- */

bool index_loss_tensor(struct device *dev, float *acc, const index_gradients<bf16> &g,
                       const key_lists &lists, const sparse_operands<bf16> &core, const float *lse)
{
    const index_view<bf16> &x = g.x;
    int64_t n_max = lists.n_max;
    if (!sparse_fits(core) || x.d != DIM || x.n_heads > HEADS || n_max > N_KEYS_MAX ||
        !is_aligned16(x.q) || !is_aligned16(x.k))
        return false;
    unsigned n_groups = head_groups(core.n_heads);
    int64_t target_bytes = n_groups * n_max * (int64_t)sizeof(float), part_bytes = n_max * DIM * 2;
    int64_t block = sparse_block(g.n, target_bytes + part_bytes);
    size_t query_bytes = LISTS_AT + 2 * (size_t)n_max * sizeof(float) + 1024;
    cudaStream_t stream = cuda_stream(dev);
    loss_work w = {lists, lse, nullptr, nullptr, n_groups, 0};
    w.target = (float *)cuda_scratch_take(dev, (size_t)(block * target_bytes));
    w.parts = (bf16 *)cuda_scratch_take(dev, (size_t)(block * part_bytes));
    int32_t *place = (int32_t *)cuda_scratch_take(
        dev, (size_t)((g.first + g.n) * block) * sizeof *place);
    key_parts places = {nullptr, place, block, DIM};
    allow_shared(target_of_heads, TARGET_BYTES + 1024);
    allow_shared(loss_of_query, query_bytes);
    for (; w.begin < g.n; w.begin += block) {
        int64_t m = g.n - w.begin < block ? g.n - w.begin : block;
        target_of_heads<<<(unsigned)m * n_groups, SPARSE_THREADS, TARGET_BYTES + 1024, stream>>>(
            w, core);
        loss_of_query<<<(unsigned)m, SPARSE_THREADS, query_bytes, stream>>>(w, g);
        sparse_find(dev, places, {lists, w.begin, x.n_heads, g.first}, m);
        sparse_add_parts<DIM>
            <<<(unsigned)(g.first + w.begin + m), part_rows<DIM>::threads, 0, stream>>>(
                acc, w.parts, place, block, n_max, (int)m);
    }
    return true;
}
