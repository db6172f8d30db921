/* flash_attention.cu - the forward of attention in bf16 on tensor cores
 *
 * A block has 128 queries of a head, 64 a warpgroup, and walks over tiles of 128 keys, the next of
 * which is on its way while one is worked on. Scores, weights and output stay in registers, with a
 * running maximum and sum. */
#include "kernels/flash.cuh"
#include "kernels/wgmma.cuh"

#define QUERIES 128
#define KEYS    128
#define VALUE   128
#define THREADS 256
#define LOG2E   1.4426950408889634f

template <int ROPE>
struct flash_shared {
    static constexpr int key_dim = 128 + ROPE;
    static constexpr int q = 0, k = q + QUERIES * key_dim * 2, v = k + KEYS * key_dim * 2,
                         stage_bytes = KEYS * (key_dim + VALUE) * 2, bytes = k + 2 * stage_bytes;
};

template <int ROPE>
__device__ __forceinline__ void load_keys(char *stage, const attention_view<bf16> &x, int head,
                                          int64_t key)
{
    constexpr int panel_bytes = KEYS * PANEL_ROW_BYTES;
    rows<const bf16> keys = x.keys(head), values = x.values(head);
    panel_load<KEYS, 16, THREADS>(stage, keys.a, keys.a_stride, key, x.n);
    if (ROPE > 0)
        panel_load<KEYS, 8, THREADS>(stage + 2 * panel_bytes, keys.b, keys.b_stride, key, x.n);
    panel_load<KEYS, 16, THREADS>(stage + KEYS * (128 + ROPE) * 2, values.a, values.a_stride, key,
                                  x.n);
    copy_async_commit();
}

/* This thread's two rows: their running maximum of scores, and its own part of their sum. */
struct running {
    float max[2], sum[2];
};

/* Scores of 64 queries and KEYS keys become weights under the new maximum, in base 2; the two rows
 * of o are brought to it. */
__device__ __forceinline__ void softmax_tile(float (&s)[KEYS / 2], float (&o)[VALUE / 2],
                                             running &r, float scale)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = r.max[half];
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
            max = fmaxf(max, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
        max = warp_reduce<op_max, float, 4>(max);
        float base = max == -INFINITY ? 0 : max * scale;
        float correction = fast_exp2(r.max[half] * scale - base), sum = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            float &weight = s[4 * (i / 2) + 2 * half + i % 2];
            weight = fast_exp2(weight * scale - base);
            sum += weight;
        }
        r.sum[half] = r.sum[half] * correction + sum;
        r.max[half] = max;
#pragma unroll
        for (int i = 0; i < VALUE / 8; i++) {
            o[4 * i + 2 * half] *= correction;
            o[4 * i + 2 * half + 1] *= correction;
        }
    }
}

template <int ROPE>
static __global__ void __launch_bounds__(THREADS, 1)
    flash_kernel(bf16 *o, float *lse, attention_view<bf16> x)
{
    extern __shared__ char shared[];
    using layout = flash_shared<ROPE>;
    constexpr int key_dim = layout::key_dim, panel_bytes = KEYS * PANEL_ROW_BYTES;
    char *memory = panel_align(shared), *stages = memory + layout::k;
    int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * QUERIES; /* long ones first */
    int64_t last = (query + QUERIES < x.n ? query + QUERIES : x.n) - 1;
    int64_t first_key = x.docs.first[query], key_of_all = x.docs.first[last];
    int head = (int)blockIdx.y, group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int row = group * 64 + (int)threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    int row_of_tile = row + (int)(query - first_key); /* keys count from first_key */
    int first_of_row[2];
    for (int half = 0; half < 2; half++) {
        int64_t t = query + row + half * 8;
        first_of_row[half] = x.docs.first[t < x.n ? t : last] - (int)first_key;
    }
    rows<const bf16> queries = x.queries(head);
    panel_load<QUERIES, 16, THREADS>(memory, queries.a, queries.a_stride, query, x.n);
    if (ROPE > 0)
        panel_load<QUERIES, 8, THREADS>(memory + 2 * QUERIES * PANEL_ROW_BYTES, queries.a + 128,
                                        queries.a_stride, query, x.n);
    load_keys<ROPE>(stages, x, head, first_key);

    float s[KEYS / 2], sums[VALUE / 2];
    running r = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < VALUE / 2; i++)
        sums[i] = 0;
    uint64_t q = panel_by_rows(memory + group * 64 * PANEL_ROW_BYTES);
    int n_tiles = (int)((last - first_key) / KEYS) + 1;
    for (int tile = 0; tile < n_tiles; tile++) {
        int64_t key = first_key + (int64_t)tile * KEYS;
        char *stage = stages + tile % 2 * layout::stage_bytes;
        if (tile + 1 < n_tiles) {
            load_keys<ROPE>(stages + (tile + 1) % 2 * layout::stage_bytes, x, head, key + KEYS);
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        panel_fence();
        __syncthreads();
        uint64_t k = panel_by_rows(stage);
        uint64_t v = panel_by_columns(stage + KEYS * key_dim * 2, panel_bytes);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            s[i] = 0;
        wgmma_keep(s);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < key_dim / 16; i++) {
            uint64_t step = panel_step((uint32_t)(i / 4 * panel_bytes + i % 4 * 32));
            wgmma<false, false>(s, q + step, k + step);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(s);
        if (key + KEYS > query || key < key_of_all) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                int half = i / 2 % 2, at = tile * KEYS + i / 4 * 8 + column + i % 2;
                if (at > row_of_tile + half * 8 || at < first_of_row[half])
                    s[i] = -INFINITY;
            }
        }
        softmax_tile(s, sums, r, x.scale * LOG2E);
        uint32_t p[KEYS / 16][4];
        wgmma_pack(p, s);
        wgmma_keep(p);
        wgmma_keep(sums);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            wgmma<true>(sums, p[i], v + panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(sums);
        wgmma_keep(p);
        __syncthreads(); /* the tile may be overwritten */
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t t = query + row + half * 8;
        float sum = warp_reduce<op_sum, float, 4>(r.sum[half]), factor = 1 / sum;
        if (t >= x.n)
            continue;
        if (lane % 4 == 0)
            lse[t * x.n_heads + head] = r.max[half] * x.scale + logf(sum);
        bf16 *to = o + (t * x.n_heads + head) * VALUE + column;
#pragma unroll
        for (int i = 0; i < VALUE / 8; i++)
            *(uint32_t *)(to + i * 8) = pack_bf16(sums[4 * i + 2 * half] * factor,
                                                  sums[4 * i + 2 * half + 1] * factor);
    }
}

template <int ROPE>
static void launch(struct device *dev, bf16 *o, float *lse, const attention_view<bf16> &x)
{
    constexpr size_t n_bytes = flash_shared<ROPE>::bytes + 1024;
    dim3 grid((unsigned)ceil_div(x.n, QUERIES), (unsigned)x.n_heads);
    allow_shared(flash_kernel<ROPE>, n_bytes);
    flash_kernel<ROPE><<<grid, THREADS, n_bytes, cuda_stream(dev)>>>(o, lse, x);
}

void flash_forward(struct device *dev, bf16 *o, float *lse, const attention_view<bf16> &x)
{
    if (x.rope == 0)
        launch<0>(dev, o, lse, x);
    else
        launch<64>(dev, o, lse, x);
}
