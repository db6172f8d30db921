/* index_tensor.cu - the indexer's scores in bf16 on tensor cores, for 16 to 128 heads of 128
 *
 * A block keeps 256 keys, 128 a warpgroup, and walks over queries: the heads of some queries are
 * the 128 columns of a product, so that the sum over heads stays within a thread and its
 * neighbours. */
#include "kernels/index.cuh"
#include "kernels/wgmma.cuh"

#define KEYS     256
#define COLUMNS  128 /* of a product: heads of one or more queries */
#define DIM      128
#define THREADS  256
#define N_STAGES 3
#define CHUNK    64 /* queries of a block */

#define KEY_PANEL   (KEYS * PANEL_ROW_BYTES)
#define STAGE_PANEL (COLUMNS * PANEL_ROW_BYTES)

enum {
    STAGES_AT  = KEYS * DIM * 2,
    STAGE_SIZE = COLUMNS * DIM * 2,
    WEIGHTS_AT = STAGES_AT + N_STAGES * STAGE_SIZE,
    SHARED     = WEIGHTS_AT + N_STAGES * COLUMNS * 4,
};

struct score_block {
    float  *scores; /* (end - begin, n_keys), rows stride apart */
    int64_t stride, begin, end, n_keys;
    bool    fills; /* writes -inf where nothing is visible, too */
};

/* -inf for the queries begin .. end and the block's keys. */
__device__ __forceinline__ void fill(const score_block &b, int64_t begin, int64_t end, int64_t key)
{
    int64_t column = key + threadIdx.x;
    for (int64_t t = begin; b.fills && column < b.n_keys && t < end; t++)
        b.scores[(t - b.begin) * b.stride + column] = -INFINITY;
}

/* Rows of heads and their weights, from query t on; before end. */
template <int HEADS>
__device__ __forceinline__ void load_queries(char *memory, int stage, const index_view<bf16> &x,
                                             int64_t t, int64_t end)
{
    float *weights = (float *)(memory + WEIGHTS_AT) + stage * COLUMNS;
    int64_t row = t * HEADS + threadIdx.x;
    panel_load<COLUMNS, DIM / 8, THREADS>(memory + STAGES_AT + stage * STAGE_SIZE, x.q, DIM,
                                          t * HEADS, end * HEADS);
    if (threadIdx.x < COLUMNS)
        weights[threadIdx.x] = row < end * HEADS ? load(x.w + row) * x.scale : 0;
}

/* Of 64 keys, this warp's 16 from row_key on, and COLUMNS / HEADS queries from t on. */
template <int HEADS>
__device__ __forceinline__ void store_scores(const score_block &b, const index_view<bf16> &x,
                                             const float (&dots)[COLUMNS / 2],
                                             const float *weights, int64_t t, int64_t end,
                                             int64_t row_key)
{
    constexpr int n_queries = COLUMNS / HEADS;
    int lane = (int)threadIdx.x % 32;
    float sums[2 * n_queries];
#pragma unroll
    for (int i = 0; i < 2 * n_queries; i++)
        sums[i] = 0;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
        float2 w = *(const float2 *)(weights + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &sum = sums[j * 8 / HEADS * 2 + half];
            sum += w.x * fmaxf(dots[4 * j + 2 * half], 0);
            sum += w.y * fmaxf(dots[4 * j + 2 * half + 1], 0);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * n_queries; i++) {
        float sum = warp_reduce<op_sum, float, 4>(sums[i]);
        int64_t query = t + i / 2, key = row_key + lane / 4 + i % 2 * 8;
        if (i % 4 != lane % 4 || query >= end || key >= b.n_keys)
            continue;
        bool sees = key <= query && key >= x.docs.first[query];
        b.scores[(query - b.begin) * b.stride + key] = sees ? sum : -INFINITY;
    }
    __syncwarp(); /* what follows waits for products with whole warps */
}

__device__ __forceinline__ void dots_of(float (&dots)[COLUMNS / 2], uint64_t keys, uint64_t queries)
{
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        wgmma<false, false>(dots, keys + panel_step((uint32_t)(i / 4 * KEY_PANEL + i % 4 * 32)),
                            queries + panel_step((uint32_t)(i / 4 * STAGE_PANEL + i % 4 * 32)));
    wgmma_commit();
}

/* Grid: keys, chunks of queries. */
template <int HEADS>
static __global__ void __launch_bounds__(THREADS, 1) index_tensor(score_block b,
                                                                  index_view<bf16> x)
{
    extern __shared__ char shared[];
    constexpr int n_queries = COLUMNS / HEADS;
    char *memory = panel_align(shared);
    int64_t key = (int64_t)blockIdx.x * KEYS, begin = b.begin + (int64_t)blockIdx.y * CHUNK;
    int64_t end = begin + CHUNK < b.end ? begin + CHUNK : b.end;
    int64_t last_key = (key + KEYS < b.n_keys ? key + KEYS : b.n_keys) - 1;
    int64_t first = begin > key ? begin : key, last = x.docs.end[last_key]; /* that may see keys */
    first = first < end ? first : end;
    last = last < end ? last : end;
    last = last > first ? last : first;
    fill(b, begin, first, key);
    fill(b, last, end, key);
    if (first == last)
        return;

    int group = (int)threadIdx.x / 128, warp = (int)threadIdx.x / 32 % 4;
    int n_steps = (int)((last - first + n_queries - 1) / n_queries);
    panel_load<KEYS, DIM / 8, THREADS>(memory, x.k, DIM, key, b.n_keys);
    load_queries<HEADS>(memory, 0, x, first, last);
    copy_async_commit();
    if (n_steps > 1)
        load_queries<HEADS>(memory, 1, x, first + n_queries, last);
    copy_async_commit();
    const char *keys = memory + group * 128 * PANEL_ROW_BYTES;
    int64_t row_key = key + group * 128 + warp * 16;
    for (int step = 0; step < n_steps; step++) {
        int64_t t = first + (int64_t)step * n_queries;
        copy_async_wait<1>();
        panel_fence();
        __syncthreads(); /* also: the stage of the step before may be overwritten */
        if (step + 2 < n_steps)
            load_queries<HEADS>(memory, (step + 2) % N_STAGES, x, t + 2 * n_queries, last);
        copy_async_commit();
        float low[COLUMNS / 2], high[COLUMNS / 2]; /* of 64 keys each */
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++)
            low[i] = high[i] = 0;
        int stage = step % N_STAGES;
        uint64_t queries = panel_by_rows(memory + STAGES_AT + stage * STAGE_SIZE);
        const float *weights = (const float *)(memory + WEIGHTS_AT) + stage * COLUMNS;
        wgmma_keep(low);
        wgmma_keep(high);
        wgmma_begin();
        dots_of(low, panel_by_rows(keys), queries);
        dots_of(high, panel_by_rows(keys + 64 * PANEL_ROW_BYTES), queries);
        wgmma_wait<1>();
        wgmma_keep(low);
        store_scores<HEADS>(b, x, low, weights, t, last, row_key);
        wgmma_wait<0>();
        wgmma_keep(high);
        store_scores<HEADS>(b, x, high, weights, t, last, row_key + 64);
    }
}

template <int HEADS>
static void launch(struct device *dev, const score_block &b, const index_view<bf16> &x)
{
    constexpr size_t n_bytes = SHARED + 1024;
    dim3 grid((unsigned)ceil_div(b.n_keys, KEYS), (unsigned)ceil_div(b.end - b.begin, CHUNK));
    allow_shared(index_tensor<HEADS>, n_bytes);
    index_tensor<HEADS><<<grid, THREADS, n_bytes, cuda_stream(dev)>>>(b, x);
}

bool index_tensor_launch(struct device *dev, float *scores, int64_t stride, int64_t begin,
                         int64_t end, int64_t n_keys, bool fills, const index_view<bf16> &x)
{
    score_block b = {scores, stride, begin, end, n_keys, fills};
    if (x.d != DIM || !is_aligned16(x.q) || !is_aligned16(x.k))
        return false;
    switch (x.n_heads) {
    case 16:  launch<16>(dev, b, x); return true;
    case 32:  launch<32>(dev, b, x); return true;
    case 64:  launch<64>(dev, b, x); return true;
    case 128: launch<128>(dev, b, x); return true;
    default:  return false;
    }
}
