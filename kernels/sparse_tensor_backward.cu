/* sparse_tensor_backward.cu - gradients of attention over chosen keys in bf16 on tensor cores
 *
 * Three kernels over a block of queries. The first has a query and 64 heads, makes P and dS anew,
 * leaves both in scratch, and sums dq. The second has a query and all its heads, and makes what it
 * gives to its keys, dS^T q + P^T dO. The third adds up the parts of each key in the order of
 * queries (sparse_parts.cuh). */
#include "kernels/sparse_parts.cuh"
#include "kernels/sparse_tensor.cuh"

struct tensor_gradients {
    rows<bf16> dq;
    const bf16 *d_o;
    const float *lse, *along; /* (n, heads) */
    bf16   *p, *ds;           /* (block, padded heads, stride) */
    bf16   *parts;            /* (block, n_max, 576), columns as in sparse_parts.cuh */
    int64_t stride;           /* of a row of p and ds: n_max up to a multiple of 128 */
    int32_t n_heads_padded;
};

/* ---- P, dS and dq ---- */

enum {
    D_O_AT      = SPARSE_KEYS, /* after the queries */
    KEYS_AT     = D_O_AT + SPARSE_VALUES,
    P_AT        = KEYS_AT + SPARSE_KEYS,
    DS_AT       = P_AT + SPARSE_PANEL,
    QUERY_BYTES = DS_AT + SPARSE_PANEL,
};

/* The panel's 64 columns to rows of scratch. */
__device__ __forceinline__ void store_panel(bf16 *to, int64_t stride, const char *panel)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = (int)threadIdx.x + i * SPARSE_THREADS, row = at / 8, chunk = at % 8;
        *(uint4 *)(to + row * stride + chunk * 8) =
            *(const uint4 *)(panel + panel_offset<SPARSE_ROWS>(row, chunk));
    }
}

/* Scores become P, in its panel; n_left keys are there. */
__device__ __forceinline__ void store_p(char *memory, const float (&s)[32], const float (&lse)[2],
                                        float scale, int row, int n_left)
{
    int column = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float a = fast_exp2(s[4 * j + 2 * half] * scale - lse[half]);
            float b = fast_exp2(s[4 * j + 2 * half + 1] * scale - lse[half]);
            a = j * 8 + column < n_left ? a : 0;
            b = j * 8 + column + 1 < n_left ? b : 0;
            *panel_pair(memory + P_AT, row + half * 8, j) = pack_bf16(a, b);
        }
}

/* dP becomes dS, in its panel, with P from its own. */
__device__ __forceinline__ void store_ds(char *memory, const float (&dp)[32],
                                         const float (&along)[2], float scale, int row)
{
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 p = unpack_bf16(*panel_pair(memory + P_AT, row + half * 8, j));
            float a = scale * p.x * (dp[4 * j + 2 * half] - along[half]);
            float b = scale * p.y * (dp[4 * j + 2 * half + 1] - along[half]);
            *panel_pair(memory + DS_AT, row + half * 8, j) = pack_bf16(a, b);
        }
}

template <int N_PANELS>
__device__ __forceinline__ void store_columns(bf16 *to, const float (&sums)[N_PANELS * 32],
                                              int half)
{
#pragma unroll
    for (int j = 0; j < N_PANELS * 8; j++)
        *(uint32_t *)(to + j * 8) = pack_bf16(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
}

/* Grid: groups of heads of a query of the block after each other. */
static __global__ void __launch_bounds__(SPARSE_THREADS, 1)
    sparse_queries(tensor_gradients g, sparse_operands<bf16> x, key_lists lists, int64_t begin,
                   unsigned n_groups)
{
    extern __shared__ char shared[];
    char *memory = panel_align(shared), *keys = memory + KEYS_AT;
    int64_t z = blockIdx.x / n_groups, t = begin + z;
    int head = (int)(blockIdx.x % n_groups) * SPARSE_ROWS, n = (int)lists.length(t);
    int group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    bf16 *p_to = g.p + (z * g.n_heads_padded + head) * g.stride;
    bf16 *ds_to = g.ds + (z * g.n_heads_padded + head) * g.stride;
    float lse[2], along[2], low[64], high[64], rope[32];
    for (int half = 0; half < 2; half++) {
        int h = head + row + half * 8;
        int64_t at = t * x.n_heads + h;
        lse[half] = h < x.n_heads ? g.lse[at] * LOG2E : INFINITY; /* so that P is 0 */
        along[half] = h < x.n_heads ? g.along[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < 64; i++)
        low[i] = high[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++)
        rope[i] = 0;
    load_queries(memory, x, t, head);
    load_heads(memory + D_O_AT, g.d_o, t, head, x.n_heads);
    uint64_t ds = panel_by_rows(memory + DS_AT);
    const char *columns = keys + group * 4 * SPARSE_PANEL;
    uint64_t k_low = panel_by_columns(columns, SPARSE_PANEL);
    uint64_t k_high = panel_by_columns(columns + 2 * SPARSE_PANEL, SPARSE_PANEL);
    uint64_t k_rope = panel_by_columns(keys + SPARSE_VALUES, SPARSE_PANEL);
    for (int first = 0; first < n; first += SPARSE_ROWS) {
        gather_keys(keys, x, lists, t, first, n);
        copy_async_commit();
        copy_async_wait<0>();
        panel_fence();
        __syncthreads();
        float s[32];
        if (group == 0) {
            sparse_dots<SPARSE_WIDTH>(s, memory, keys);
            store_p(memory, s, lse, x.scale * LOG2E, row, n - first);
        } else {
            sparse_dots<SPARSE_LATENT>(s, memory + D_O_AT, keys);
        }
        __syncthreads();
        if (group == 1) {
            store_ds(memory, s, along, x.scale, row);
            panel_fence();
        }
        __syncthreads();
        wgmma_keep(low);
        wgmma_keep(high);
        wgmma_keep(rope);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < SPARSE_ROWS / 16; i++) {
            uint64_t a = ds + panel_step((uint32_t)i * 32);
            uint64_t step = panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES);
            wgmma<false, true>(low, a, k_low + step);
            wgmma<false, true>(high, a, k_high + step);
        }
        wgmma_commit();
        if (group == 1) {
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < SPARSE_ROWS / 16; i++)
                wgmma<false, true>(rope, ds + panel_step((uint32_t)i * 32),
                                   k_rope + panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES));
            wgmma_commit();
        }
        store_panel(p_to + first, g.stride, memory + P_AT);
        store_panel(ds_to + first, g.stride, memory + DS_AT);
        wgmma_wait<0>();
        wgmma_keep(low);
        wgmma_keep(high);
        wgmma_keep(rope);
        __syncthreads(); /* all of the tile may be overwritten */
    }
    for (int half = 0; half < 2; half++) {
        int h = head + row + half * 8;
        int64_t at = t * x.n_heads + h;
        bf16 *to = g.dq.a + at * SPARSE_LATENT + group * 256 + lane % 4 * 2;
        if (h >= x.n_heads)
            continue;
        store_columns<2>(to, low, half);
        store_columns<2>(to + 128, high, half);
        if (group == 1)
            store_columns<1>(g.dq.b + at * g.dq.b_stride + lane % 4 * 2, rope, half);
    }
}

/* ---- parts of the keys' gradients ---- */

#define PART_COLUMNS 192 /* of a block: three panels */
#define PART_KEYS    GPU_SPARSE_STEP /* of a step, 64 a warpgroup */

template <int HEADS>
struct part_shared {
    static constexpr int panel = HEADS * PANEL_ROW_BYTES, d_o = 3 * panel, stages = 6 * panel,
                         stage_bytes = 4 * panel, bytes = stages + 2 * stage_bytes;
};

/* dS, then P, of all heads and 128 keys; zeros where a tile of 64 has none of the n. */
template <int HEADS>
__device__ __forceinline__ void load_weights(char *to, const tensor_gradients &g, int64_t z,
                                             int first, int n)
{
    constexpr int panel = part_shared<HEADS>::panel;
#pragma unroll 1 /* for its registers */
    for (int i = 0; i < PART_KEYS / 64; i++) {
        int64_t at = z * HEADS * g.stride + first + 64 * i, end = first + 64 * i < n ? HEADS : 0;
        panel_load<HEADS, 8, SPARSE_THREADS>(to + i * panel, g.ds + at, g.stride, 0, end);
        panel_load<HEADS, 8, SPARSE_THREADS>(to + (2 + i) * panel, g.p + at, g.stride, 0, end);
    }
    copy_async_commit();
}

/* Three panels of all heads of a query; the last lies elsewhere, or is zero where has_last is not
 * true. */
template <int HEADS>
__device__ __forceinline__ void load_part(char *to, const bf16 *from, int64_t stride,
                                          const bf16 *last, int64_t last_stride, bool has_last,
                                          int64_t t, int32_t n_heads)
{
    constexpr int panel = part_shared<HEADS>::panel;
    int64_t end = (t + 1) * n_heads;
    panel_load<HEADS, 8, SPARSE_THREADS>(to, from, stride, t * n_heads, end);
    panel_load<HEADS, 8, SPARSE_THREADS>(to + panel, from + 64, stride, t * n_heads, end);
    panel_load<HEADS, 8, SPARSE_THREADS>(to + 2 * panel, last, last_stride, t * n_heads,
                                         has_last ? end : 0);
}

/* Grid: parts of columns, queries of the block. */
template <int HEADS>
static __global__ void __launch_bounds__(SPARSE_THREADS, HEADS == 64 ? 2 : 1)
    sparse_keys(tensor_gradients g, sparse_operands<bf16> x, key_lists lists, int64_t begin)
{
    extern __shared__ char shared[];
    using layout = part_shared<HEADS>;
    char *memory = panel_align(shared), *stages = memory + layout::stages;
    int64_t z = blockIdx.y, t = begin + z;
    int part = (int)blockIdx.x, column = part * PART_COLUMNS, n = (int)lists.length(t);
    int group = (int)threadIdx.x / 128, warp = (int)threadIdx.x / 32 % 4;
    bool has_rope = part == 2; /* its last panel, which is no value */
    const bf16 *q = x.q.a + column, *d_o = g.d_o + column;
    load_part<HEADS>(memory, q, SPARSE_LATENT, has_rope ? x.q.b : q + 128,
                     has_rope ? x.q.b_stride : SPARSE_LATENT, true, t, x.n_heads);
    load_part<HEADS>(memory + layout::d_o, d_o, SPARSE_LATENT, has_rope ? d_o : d_o + 128,
                     SPARSE_LATENT, !has_rope, t, x.n_heads);
    load_weights<HEADS>(stages, g, z, 0, n);
    uint64_t q_low = panel_by_columns(memory, layout::panel);
    uint64_t q_high = panel_by_columns(memory + 2 * layout::panel, layout::panel);
    uint64_t o_low = panel_by_columns(memory + layout::d_o, layout::panel);
    uint64_t o_high = panel_by_columns(memory + layout::d_o + 2 * layout::panel, layout::panel);
    for (int first = 0, step = 0; first < n; first += PART_KEYS, step++) {
        if (first + PART_KEYS < n) {
            load_weights<HEADS>(stages + (step + 1) % 2 * layout::stage_bytes, g, z,
                                first + PART_KEYS, n);
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        panel_fence();
        __syncthreads();
        const char *stage = stages + step % 2 * layout::stage_bytes + group * layout::panel;
        uint64_t ds = panel_by_columns(stage, layout::panel);
        uint64_t p = panel_by_columns(stage + 2 * layout::panel, layout::panel);
        float low[64], high[32];
#pragma unroll
        for (int i = 0; i < 64; i++)
            low[i] = 0;
#pragma unroll
        for (int i = 0; i < 32; i++)
            high[i] = 0;
        wgmma_keep(low);
        wgmma_keep(high);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < HEADS / 16; i++) {
            uint64_t at = panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES);
            wgmma<true, true>(low, ds + at, q_low + at);
            wgmma<true, true>(high, ds + at, q_high + at);
            wgmma<true, true>(low, p + at, o_low + at);
            wgmma<true, true>(high, p + at, o_high + at);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(low);
        wgmma_keep(high);
        for (int half = 0; half < 2; half++) {
            int j = first + group * 64 + warp * 16 + (int)threadIdx.x % 32 / 4 + half * 8;
            bf16 *to = g.parts + (z * lists.n_max + j) * SPARSE_WIDTH + column;
            if (j >= n)
                continue;
            store_part(to, low, half);
            store_part(to + 128, high, half);
        }
        __syncthreads(); /* the stage may be overwritten */
    }
}

/* ---- launches ---- */

template <int HEADS>
static void launch_keys(struct device *dev, const tensor_gradients &g,
                        const sparse_operands<bf16> &x, const key_lists &lists, int64_t begin,
                        int64_t m)
{
    constexpr size_t n_bytes = part_shared<HEADS>::bytes + 1024;
    allow_shared(sparse_keys<HEADS>, n_bytes);
    sparse_keys<HEADS><<<dim3(SPARSE_WIDTH / PART_COLUMNS, (unsigned)m), SPARSE_THREADS, n_bytes,
                         cuda_stream(dev)>>>(g, x, lists, begin);
}

/* A block of m queries; before: keys before query 0. */
static void gradients_of_block(struct device *dev, float *acc, const tensor_gradients &g,
                               const key_parts &places, const sparse_operands<bf16> &x,
                               const key_lists &lists, int64_t before, int64_t begin, int64_t m)
{
    constexpr size_t n_bytes = QUERY_BYTES + 1024;
    unsigned n_groups = head_groups(x.n_heads);
    cudaStream_t stream = cuda_stream(dev);
    allow_shared(sparse_queries, n_bytes);
    sparse_queries<<<(unsigned)m * n_groups, SPARSE_THREADS, n_bytes, stream>>>(g, x, lists, begin,
                                                                               n_groups);
    if (g.n_heads_padded == 64)
        launch_keys<64>(dev, g, x, lists, begin, m);
    else
        launch_keys<128>(dev, g, x, lists, begin, m);
    sparse_find(dev, places, {lists, begin, x.n_heads, before}, m);
    sparse_add_parts<SPARSE_WIDTH>
        <<<(unsigned)(before + begin + m), part_rows<SPARSE_WIDTH>::threads, 0, stream>>>(
            acc, g.parts, places.place, places.block, lists.n_max, (int)m);
}

bool sparse_tensor_backward(struct device *dev, float *acc, const rows<bf16> &dq, const bf16 *d_o,
                            const float *lse, const float *along, const sparse_operands<bf16> &x,
                            const key_lists &lists, int64_t first, int64_t n)
{
    if (!sparse_fits(x) || !fits_tensor(dq) || !is_aligned16(d_o) || x.n_heads > 128)
        return false;
    int32_t n_heads_padded = (int32_t)head_groups(x.n_heads) * SPARSE_ROWS;
    int64_t n_max = lists.n_max, stride = ceil_div(n_max, PART_KEYS) * PART_KEYS;
    int64_t part_bytes = n_max * SPARSE_WIDTH * 2, weight_bytes = n_heads_padded * stride * 2;
    int64_t block = sparse_block(n, part_bytes + 2 * weight_bytes);
    bf16 *p = (bf16 *)cuda_scratch_take(dev, (size_t)(block * weight_bytes));
    bf16 *ds = (bf16 *)cuda_scratch_take(dev, (size_t)(block * weight_bytes));
    bf16 *parts = (bf16 *)cuda_scratch_take(dev, (size_t)(block * part_bytes));
    int32_t *place = (int32_t *)cuda_scratch_take(
        dev, (size_t)((first + n) * block) * sizeof *place);
    tensor_gradients g = {dq, d_o, lse, along, p, ds, parts, stride, n_heads_padded};
    key_parts places = {nullptr, place, block, SPARSE_WIDTH};
    for (int64_t begin = 0; begin < n; begin += block) {
        int64_t m = n - begin < block ? n - begin : block;
        gradients_of_block(dev, acc, g, places, x, lists, first, begin, m);
    }
    return true;
}
