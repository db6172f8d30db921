/* flash_attention_backward.cu - the gradients of attention in bf16 on tensor cores
 *
 * Two kernels, so that no sum needs atomics. One owns 128 queries and walks over keys: dq. One owns
 * 128 keys and walks over the queries that see them: the transposed scores and their gradients are,
 * as they come out of the products, operands of the next ones, which sum over queries. */
#include "kernels/flash.cuh"
#include "kernels/wgmma.cuh"

#define OWNED   128 /* rows of a block, 64 a warpgroup */
#define STEP    64  /* rows that it walks over at a time */
#define VALUE   128
#define THREADS 256
#define LOG2E   1.4426950408889634f

#define OWNED_PANEL (OWNED * PANEL_ROW_BYTES)
#define STEP_PANEL  (STEP * PANEL_ROW_BYTES)

struct flash_gradients {
    bf16 *dq, *dkv;
    float *dk_rope_heads;
    const bf16 *d_o;
    const float *lse, *along;
    attention_view<bf16> x;
};

/* Both kernels: rows of key width and of value width, owned and walked over. */
template <int ROPE>
struct backward_shared {
    static constexpr int key_dim = 128 + ROPE, values = OWNED * key_dim * 2,
                         stages = values + OWNED * VALUE * 2, step_values = STEP * key_dim * 2,
                         stage_bytes = step_values + STEP * VALUE * 2,
                         of_queries = stages + 2 * stage_bytes, /* lse and along, two stages */
                         bytes = of_queries + 2 * 2 * STEP * 4;
};

/* acc (64, key width) in three or two parts, so that each is one product. */
template <int ROPE>
struct key_sums {
    float nope[64], rope[ROPE / 2 > 0 ? ROPE / 2 : 1];

    __device__ __forceinline__ void zero()
    {
#pragma unroll
        for (int i = 0; i < 64; i++)
            nope[i] = 0;
#pragma unroll
        for (int i = 0; i < ROPE / 2; i++)
            rope[i] = 0;
    }
};

/* s (64, STEP) = a (64 rows in panels of OWNED) b (STEP rows)^T, over WIDTH columns. */
template <int WIDTH>
__device__ __forceinline__ void dots(float (&s)[STEP / 2], uint64_t a, uint64_t b)
{
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
        wgmma<false, false>(s, a + panel_step((uint32_t)(i / 4 * OWNED_PANEL + i % 4 * 32)),
                            b + panel_step((uint32_t)(i / 4 * STEP_PANEL + i % 4 * 32)));
}

/* sums += weights (64, STEP) times STEP rows of key width. */
template <int ROPE>
__device__ __forceinline__ void add_rows(key_sums<ROPE> &sums, const uint32_t (&weights)[4][4],
                                         const char *from)
{
    uint64_t nope = panel_by_columns(from, STEP_PANEL);
#pragma unroll
    for (int i = 0; i < STEP / 16; i++)
        wgmma<true>(sums.nope, weights[i], nope + panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES));
    if constexpr (ROPE > 0) {
        uint64_t rope = panel_by_columns(from + 2 * STEP_PANEL, STEP_PANEL);
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
            wgmma<true>(sums.rope, weights[i],
                        rope + panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES));
    }
}

template <int ROPE>
__device__ __forceinline__ void keep(key_sums<ROPE> &sums)
{
    wgmma_keep(sums.nope);
    wgmma_keep(sums.rope);
}

__device__ __forceinline__ void zero(float (&s)[STEP / 2])
{
#pragma unroll
    for (int i = 0; i < STEP / 2; i++)
        s[i] = 0;
    wgmma_keep(s);
}

/* Two neighbouring numbers of a row. */
__device__ __forceinline__ void store_pair(bf16 *to, float a, float b)
{
    *(uint32_t *)to = pack_bf16(a, b);
}

template <int N_ROWS, int ROPE>
__device__ __forceinline__ void load_keys(char *to, char *values_to,
                                          const attention_view<bf16> &x, int head, int64_t key)
{
    rows<const bf16> keys = x.keys(head), values = x.values(head);
    panel_load<N_ROWS, 16, THREADS>(to, keys.a, keys.a_stride, key, x.n);
    if (ROPE > 0)
        panel_load<N_ROWS, 8, THREADS>(to + 2 * N_ROWS * PANEL_ROW_BYTES, keys.b, keys.b_stride,
                                       key, x.n);
    panel_load<N_ROWS, 16, THREADS>(values_to, values.a, values.a_stride, key, x.n);
}

template <int N_ROWS, int ROPE>
__device__ __forceinline__ void load_queries(char *to, char *values_to, const flash_gradients &g,
                                             int head, int64_t query)
{
    rows<const bf16> q = g.x.queries(head), d_o = g.x.of_values(g.d_o, head);
    panel_load<N_ROWS, 16, THREADS>(to, q.a, q.a_stride, query, g.x.n);
    if (ROPE > 0)
        panel_load<N_ROWS, 8, THREADS>(to + 2 * N_ROWS * PANEL_ROW_BYTES, q.a + 128, q.a_stride,
                                       query, g.x.n);
    panel_load<N_ROWS, 16, THREADS>(values_to, d_o.a, d_o.a_stride, query, g.x.n);
}

/* ---- dq ---- */

template <int ROPE>
static __global__ void __launch_bounds__(THREADS, 1) flash_dq(flash_gradients g)
{
    extern __shared__ char shared[];
    using layout = backward_shared<ROPE>;
    const attention_view<bf16> &x = g.x;
    char *memory = panel_align(shared), *stages = memory + layout::stages;
    int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * OWNED; /* long ones first */
    int64_t last = (query + OWNED < x.n ? query + OWNED : x.n) - 1;
    int64_t first_key = x.docs.first[query], key_of_all = x.docs.first[last];
    int head = (int)blockIdx.y, group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int row = group * 64 + (int)threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    float scale = x.scale * LOG2E, lse[2], along[2];
    int first_of_row[2]; /* counted from first_key, as all that is compared */
    int row_of_tile = row + (int)(query - first_key);
    for (int half = 0; half < 2; half++) {
        int64_t t = query + row + half * 8;
        t = t < x.n ? t : last;
        first_of_row[half] = x.docs.first[t] - (int)first_key;
        lse[half] = g.lse[t * x.n_heads + head] * LOG2E;
        along[half] = g.along[t * x.n_heads + head];
    }
    load_queries<OWNED, ROPE>(memory, memory + layout::values, g, head, query);
    load_keys<STEP, ROPE>(stages, stages + layout::step_values, x, head, first_key);
    copy_async_commit();

    key_sums<ROPE> sums;
    sums.zero();
    uint64_t q = panel_by_rows(memory + group * 64 * PANEL_ROW_BYTES);
    uint64_t d_o = panel_by_rows(memory + layout::values + group * 64 * PANEL_ROW_BYTES);
    int n_tiles = (int)((last - first_key) / STEP) + 1;
    for (int tile = 0; tile < n_tiles; tile++) {
        int64_t key = first_key + (int64_t)tile * STEP;
        char *stage = stages + tile % 2 * layout::stage_bytes;
        if (tile + 1 < n_tiles) {
            char *next = stages + (tile + 1) % 2 * layout::stage_bytes;
            load_keys<STEP, ROPE>(next, next + layout::step_values, x, head, key + STEP);
            copy_async_commit();
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        panel_fence();
        __syncthreads();
        float s[STEP / 2], ds[STEP / 2];
        zero(s);
        zero(ds);
        wgmma_begin();
        dots<layout::key_dim>(s, q, panel_by_rows(stage));
        dots<VALUE>(ds, d_o, panel_by_rows(stage + layout::step_values));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(s);
        wgmma_keep(ds);
        bool is_masked = key + STEP > query || key < key_of_all;
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) {
            int half = i / 2 % 2, at = tile * STEP + i / 4 * 8 + column + i % 2;
            float p = fast_exp2(s[i] * scale - lse[half]);
            if (is_masked && (at > row_of_tile + half * 8 || at < first_of_row[half]))
                p = 0;
            ds[i] = p * (ds[i] - along[half]);
        }
        uint32_t weights[STEP / 16][4];
        wgmma_pack(weights, ds);
        wgmma_keep(weights);
        keep(sums);
        wgmma_begin();
        add_rows<ROPE>(sums, weights, stage);
        wgmma_commit();
        wgmma_wait<0>();
        keep(sums);
        wgmma_keep(weights);
        __syncthreads(); /* the stage may be overwritten */
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t t = query + row + half * 8;
        if (t >= x.n)
            continue;
        bf16 *to = g.dq + t * x.q_stride() + (int64_t)head * layout::key_dim + column;
#pragma unroll
        for (int i = 0; i < 16; i++)
            store_pair(to + i * 8, sums.nope[4 * i + 2 * half] * x.scale,
                       sums.nope[4 * i + 2 * half + 1] * x.scale);
#pragma unroll
        for (int i = 0; i < ROPE / 8; i++)
            store_pair(to + 128 + i * 8, sums.rope[4 * i + 2 * half] * x.scale,
                       sums.rope[4 * i + 2 * half + 1] * x.scale);
    }
}

/* ---- dk and dv ---- */

/* lse in base 2 and along of STEP queries, by the first threads; the reader's barrier follows. */
__device__ __forceinline__ void load_of_queries(float *to, const flash_gradients &g, int head,
                                                int64_t query)
{
    int i = (int)threadIdx.x;
    if (i < STEP) {
        bool within = query + i < g.x.n;
        int64_t at = (query + i) * g.x.n_heads + head;
        to[i] = within ? g.lse[at] * LOG2E : 0;
        to[STEP + i] = within ? g.along[at] : 0;
    }
}

template <int ROPE>
static __global__ void __launch_bounds__(THREADS, 1) flash_dkv(flash_gradients g)
{
    extern __shared__ char shared[];
    using layout = backward_shared<ROPE>;
    const attention_view<bf16> &x = g.x;
    char *memory = panel_align(shared), *stages = memory + layout::stages;
    float *of_queries = (float *)(memory + layout::of_queries);
    int64_t key = (int64_t)blockIdx.x * OWNED;
    int64_t last = (key + OWNED < x.n ? key + OWNED : x.n) - 1;
    int64_t end = x.docs.end[last], end_of_all = x.docs.end[key];
    int head = (int)blockIdx.y, group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int row = group * 64 + (int)threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    float scale = x.scale * LOG2E;
    int end_of_row[2]; /* counted from key, as all that is compared */
    for (int half = 0; half < 2; half++) {
        int64_t t = key + row + half * 8;
        end_of_row[half] = x.docs.end[t < x.n ? t : last] - (int)key;
    }
    load_keys<OWNED, ROPE>(memory, memory + layout::values, x, head, key);
    load_queries<STEP, ROPE>(stages, stages + layout::step_values, g, head, key);
    copy_async_commit();
    load_of_queries(of_queries, g, head, key);

    key_sums<ROPE> dk;
    float dv[VALUE / 2];
    dk.zero();
#pragma unroll
    for (int i = 0; i < VALUE / 2; i++)
        dv[i] = 0;
    uint64_t k = panel_by_rows(memory + group * 64 * PANEL_ROW_BYTES);
    uint64_t v = panel_by_rows(memory + layout::values + group * 64 * PANEL_ROW_BYTES);
    int n_tiles = (int)((end - key - 1) / STEP) + 1;
    for (int tile = 0; tile < n_tiles; tile++) {
        int64_t query = key + (int64_t)tile * STEP;
        char *stage = stages + tile % 2 * layout::stage_bytes;
        const float *lse = of_queries + tile % 2 * 2 * STEP, *along = lse + STEP;
        if (tile + 1 < n_tiles) {
            char *next = stages + (tile + 1) % 2 * layout::stage_bytes;
            load_queries<STEP, ROPE>(next, next + layout::step_values, g, head, query + STEP);
            copy_async_commit();
            load_of_queries(of_queries + (tile + 1) % 2 * 2 * STEP, g, head, query + STEP);
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        panel_fence();
        __syncthreads();
        float p[STEP / 2], ds[STEP / 2];
        zero(p);
        zero(ds);
        wgmma_begin();
        dots<layout::key_dim>(p, k, panel_by_rows(stage));
        dots<VALUE>(ds, v, panel_by_rows(stage + layout::step_values));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(p);
        wgmma_keep(ds);
        bool is_masked = query < key + OWNED || query + STEP > end_of_all;
        int offset = tile * STEP + column;
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) {
            int half = i / 2 % 2, place = i / 4 * 8 + i % 2, at = offset + place;
            float weight = fast_exp2(p[i] * scale - lse[column + place]);
            if (is_masked && (at < row + half * 8 || at >= end_of_row[half]))
                weight = 0;
            p[i] = weight;
            ds[i] = weight * (ds[i] - along[column + place]);
        }
        uint32_t p_weights[STEP / 16][4], ds_weights[STEP / 16][4];
        wgmma_pack(p_weights, p);
        wgmma_pack(ds_weights, ds);
        wgmma_keep(p_weights);
        wgmma_keep(ds_weights);
        wgmma_keep(dv);
        keep(dk);
        wgmma_begin();
        uint64_t d_o = panel_by_columns(stage + layout::step_values, STEP_PANEL);
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
            wgmma<true>(dv, p_weights[i], d_o + panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES));
        add_rows<ROPE>(dk, ds_weights, stage);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(dv);
        keep(dk);
        wgmma_keep(p_weights);
        wgmma_keep(ds_weights);
        __syncthreads(); /* the stage may be overwritten */
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t t = key + row + half * 8;
        if (t >= x.n)
            continue;
        bf16 *to = g.dkv + t * x.kv_stride() + (int64_t)head * (128 + VALUE) + column;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            store_pair(to + i * 8, dk.nope[4 * i + 2 * half] * x.scale,
                       dk.nope[4 * i + 2 * half + 1] * x.scale);
            store_pair(to + 128 + i * 8, dv[4 * i + 2 * half], dv[4 * i + 2 * half + 1]);
        }
        float *rope_to = g.dk_rope_heads + (head * x.n + t) * ROPE + column;
#pragma unroll
        for (int i = 0; i < ROPE / 8; i++)
            *(float2 *)(rope_to + i * 8) = make_float2(dk.rope[4 * i + 2 * half] * x.scale,
                                                       dk.rope[4 * i + 2 * half + 1] * x.scale);
    }
}

template <int ROPE>
static void launch(struct device *dev, const flash_gradients &g)
{
    constexpr size_t n_bytes = backward_shared<ROPE>::bytes + 1024;
    dim3 grid((unsigned)ceil_div(g.x.n, OWNED), (unsigned)g.x.n_heads);
    allow_shared(flash_dq<ROPE>, n_bytes);
    allow_shared(flash_dkv<ROPE>, n_bytes);
    flash_dq<ROPE><<<grid, THREADS, n_bytes, cuda_stream(dev)>>>(g);
    flash_dkv<ROPE><<<grid, THREADS, n_bytes, cuda_stream(dev)>>>(g);
}

void flash_backward(struct device *dev, bf16 *dq, bf16 *dkv, float *dk_rope_heads, const bf16 *d_o,
                    const float *lse, const float *along, const attention_view<bf16> &x)
{
    flash_gradients g = {dq, dkv, dk_rope_heads, d_o, lse, along, x};
    if (x.rope == 0)
        launch<0>(dev, g);
    else
        launch<64>(dev, g);
}
