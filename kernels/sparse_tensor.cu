/* sparse_tensor.cu - the forward of attention over chosen keys in bf16 on tensor cores
 *
 * Two tiles of gathered keys lie in shared memory: one is worked on, the next is on its way. The
 * first warpgroup makes the weights; then each sums its half of the value columns. */
#include "kernels/sparse_tensor.cuh"

#define HALF (SPARSE_LATENT / 2)

enum {
    STAGES_AT  = SPARSE_KEYS, /* after the queries */
    WEIGHTS_AT = STAGES_AT + 2 * SPARSE_KEYS,
    FACTORS_AT = WEIGHTS_AT + SPARSE_PANEL, /* of the rows of o */
    SHARED     = FACTORS_AT + SPARSE_ROWS * 4,
};

/* Of this thread's two rows. */
struct running {
    float max[2], sum[2];
};

/* Scores (64, 64) become weights in the panel, and the factors bring o to their maximum. */
__device__ __forceinline__ void make_weights(char *memory, float (&s)[32], running &r, float scale,
                                             int row, int n_left)
{
    float *factors = (float *)(memory + FACTORS_AT);
    int lane = (int)threadIdx.x % 32;
    if (n_left < SPARSE_ROWS) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= n_left)
                s[i] = -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = r.max[half], sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++)
            max = fmaxf(max, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
        max = warp_reduce<op_max, float, 4>(max);
        float factor = fast_exp2((r.max[half] - max) * scale);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float a = fast_exp2((s[4 * j + 2 * half] - max) * scale);
            float b = fast_exp2((s[4 * j + 2 * half + 1] - max) * scale);
            sum += a + b;
            *panel_pair(memory + WEIGHTS_AT, row + half * 8, j) = pack_bf16(a, b);
        }
        r.sum[half] = r.sum[half] * factor + sum;
        r.max[half] = max;
        if (lane % 4 == 0)
            factors[row + half * 8] = factor;
    }
}

/* The group's half of o (64, 256) += weights values. */
__device__ __forceinline__ void add_values(float (&low)[64], float (&high)[64], const char *memory,
                                           const char *keys, int group)
{
    uint64_t weights = panel_by_rows(memory + WEIGHTS_AT);
    const char *values = keys + group * 4 * SPARSE_PANEL;
    uint64_t v_low = panel_by_columns(values, SPARSE_PANEL);
    uint64_t v_high = panel_by_columns(values + 2 * SPARSE_PANEL, SPARSE_PANEL);
    wgmma_keep(low);
    wgmma_keep(high);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < SPARSE_ROWS / 16; i++) {
        uint64_t a = weights + panel_step((uint32_t)i * 32);
        uint64_t step = panel_step((uint32_t)i * 16 * PANEL_ROW_BYTES);
        wgmma<false, true>(low, a, v_low + step);
        wgmma<false, true>(high, a, v_high + step);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(low);
    wgmma_keep(high);
}

__device__ __forceinline__ void scale_rows(float (&o)[64], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < 64; i++)
        o[i] *= factor[i / 2 % 2];
}

__device__ __forceinline__ void store_row(bf16 *to, const float (&o)[64], int half)
{
#pragma unroll
    for (int j = 0; j < 16; j++)
        *(uint32_t *)(to + j * 8) = pack_bf16(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]);
}

/* Grid: groups of heads of a query after each other. */
static __global__ void __launch_bounds__(SPARSE_THREADS, 1)
    sparse_forward(bf16 *o, float *lse, sparse_operands<bf16> x, key_lists lists, unsigned n_groups)
{
    extern __shared__ char shared[];
    char *memory = panel_align(shared), *stages = memory + STAGES_AT;
    float *factors = (float *)(memory + FACTORS_AT);
    int64_t t = blockIdx.x / n_groups;
    int head = (int)(blockIdx.x % n_groups) * SPARSE_ROWS, n = (int)lists.length(t);
    int group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    float scale = x.scale * LOG2E, low[64], high[64];
    running r = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < 64; i++)
        low[i] = high[i] = 0;
    load_queries(memory, x, t, head);
    gather_keys(stages, x, lists, t, 0, n);
    copy_async_commit();
    for (int first = 0, tile = 0; first < n; first += SPARSE_ROWS, tile++) {
        char *keys = stages + tile % 2 * SPARSE_KEYS;
        if (first + SPARSE_ROWS < n) {
            gather_keys(stages + (tile + 1) % 2 * SPARSE_KEYS, x, lists, t, first + SPARSE_ROWS, n);
            copy_async_commit();
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        panel_fence();
        __syncthreads();
        if (group == 0) {
            float s[32];
            sparse_dots<SPARSE_WIDTH>(s, memory, keys);
            make_weights(memory, s, r, scale, row, n - first);
            panel_fence();
        }
        __syncthreads();
        const float factor[2] = {factors[row], factors[row + 8]};
        if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) {
            scale_rows(low, factor);
            scale_rows(high, factor);
        }
        add_values(low, high, memory, keys, group);
        __syncthreads(); /* tile, weights and factors may be overwritten */
    }
    for (int half = 0; group == 0 && half < 2; half++) {
        float sum = warp_reduce<op_sum, float, 4>(r.sum[half]);
        int h = head + row + half * 8;
        if (lane % 4 == 0)
            factors[row + half * 8] = 1 / sum;
        if (lane % 4 == 0 && h < x.n_heads)
            lse[t * x.n_heads + h] = r.max[half] * x.scale + logf(sum);
    }
    __syncthreads();
    const float factor[2] = {factors[row], factors[row + 8]};
    scale_rows(low, factor);
    scale_rows(high, factor);
    for (int half = 0; half < 2; half++) {
        int h = head + row + half * 8;
        bf16 *to = o + (t * x.n_heads + h) * SPARSE_LATENT + group * HALF + lane % 4 * 2;
        if (h >= x.n_heads)
            continue;
        store_row(to, low, half);
        store_row(to + HALF / 2, high, half);
    }
}

bool sparse_tensor_forward(struct device *dev, bf16 *o, float *lse,
                           const sparse_operands<bf16> &x, const key_lists &lists, int64_t n)
{
    constexpr size_t n_bytes = SHARED + 1024;
    unsigned n_groups = head_groups(x.n_heads);
    if (!sparse_fits(x) || !is_aligned16(o))
        return false;
    allow_shared(sparse_forward, n_bytes);
    sparse_forward<<<(unsigned)n * n_groups, SPARSE_THREADS, n_bytes, cuda_stream(dev)>>>(
        o, lse, x, lists, n_groups);
    return true;
}
