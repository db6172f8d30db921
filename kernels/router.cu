/* router.cu - which experts a token goes to, with what weights, and how the load is counted
 *
 * A warp a token. Float32 on every device. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_math.cuh"
#include "kernels/cuda_router.cuh"

#define COUNT_THREADS   256
#define MARGIN_THREADS  512
#define TILE_EXPERTS    32 /* of one block's histogram */
#define TILE_BYTES_MAX  (160 * 1024)
#define TILE_TOKENS_MIN 64

/* What a kernel needs of router_shape. */
struct routing {
    int64_t n_tokens;
    int32_t n_experts, top_k, n_groups, topk_group;
    bool renormalize, is_sigmoid;
    float routed_scale;
};

static struct routing routing_of(const struct router_shape *shape)
{
    assert(shape->top_k >= 0 && shape->top_k <= shape->n_experts);
    if (shape->n_groups > 1) {
        assert(shape->n_experts % shape->n_groups == 0);
        assert(shape->topk_group > 0 && shape->topk_group <= shape->n_groups);
        assert(shape->top_k <= shape->n_experts / shape->n_groups * shape->topk_group);
    }
    return {shape->n_tokens,
            shape->n_experts,
            shape->top_k,
            shape->n_groups,
            shape->topk_group,
            shape->renormalize,
            shape->kind == ROUTER_SIGMOID,
            shape->routed_scale};
}

/* ---- the choice ---- */

__device__ __forceinline__ void scores_of(float *scores, const float *logits,
                                          const struct routing &s)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    if (s.is_sigmoid) {
        for (int32_t e = lane; e < s.n_experts; e += 32)
            scores[e] = sigmoid_of<float>(logits[e]);
        return;
    }
    float max = -INFINITY, sum = 0;
    for (int32_t e = lane; e < s.n_experts; e += 32)
        max = fmaxf(max, logits[e]);
    max = warp_max(max);
    for (int32_t e = lane; e < s.n_experts; e += 32)
        sum += expf(logits[e] - max);
    sum = warp_sum(sum);
    for (int32_t e = lane; e < s.n_experts; e += 32)
        scores[e] = expf(logits[e] - max) / sum;
}

/* The sum of the two largest of a group. */
__device__ __forceinline__ float worth_of(const uint32_t *keys, int32_t n)
{
    float best = -INFINITY, second = -INFINITY;
    for (int32_t e = 0; e < n; e++) {
        float sum = float_of_ordered(keys[e]);
        if (sum > best) {
            second = best;
            best = sum;
        } else if (sum > second) {
            second = sum;
        }
    }
    return n > 1 ? best + second : best;
}

/* Leaves the lowest key in all but the best groups. worths (n_groups) is shared memory. */
__device__ __forceinline__ void bar_groups(uint32_t *keys, uint32_t *worths,
                                           const struct routing &s)
{
    int32_t lane = (int32_t)threadIdx.x & 31, size = s.n_experts / s.n_groups;
    uint64_t last = 0; /* the least of the groups that take part */
    for (int32_t g = lane; g < s.n_groups; g += 32)
        worths[g] = ordered_bits(worth_of(keys + g * size, size));
    __syncwarp();
    select_top(worths, s.n_groups, s.topk_group,
               [&](int32_t, int32_t group, uint32_t worth) { last = ranked(worth, group); });
    for (int32_t e = lane; e < s.n_experts; e += 32)
        if (ranked(worths[e / size], e / size) < last)
            keys[e] = 0;
    __syncwarp();
}

/* The keys of a token's experts, of which the largest are chosen. */
__device__ __forceinline__ void keys_of(uint32_t *keys, uint32_t *worths, const float *scores,
                                        const float *bias, const struct routing &s)
{
    for (int32_t e = (int32_t)threadIdx.x & 31; e < s.n_experts; e += 32)
        keys[e] = ordered_bits(bias ? scores[e] + bias[e] : scores[e]);
    __syncwarp();
    if (s.n_groups > 1)
        bar_groups(keys, worths, s);
}

/* This warp's rows of the block's shared memory: keys (n_experts), then worths (n_groups). */
__device__ __forceinline__ uint32_t *warp_keys(uint32_t *shared, const struct routing &s)
{
    return shared + (threadIdx.x >> 5) * (s.n_experts + s.n_groups);
}

__global__ static void route_tokens(float *__restrict__ scores, int32_t *__restrict__ ids,
                                    float *__restrict__ weights, const float *__restrict__ logits,
                                    const float *__restrict__ bias, struct routing s)
{
    extern __shared__ uint32_t shared_keys[];
    int64_t token = token_of_warp(s.n_tokens);
    int32_t lane = (int32_t)threadIdx.x & 31;
    if (token < 0)
        return;
    uint32_t *keys = warp_keys(shared_keys, s);
    float *row = scores + token * s.n_experts, sum = 0;
    int32_t *chosen = ids + token * s.top_k;
    scores_of(row, logits + token * s.n_experts, s);
    keys_of(keys, keys + s.n_experts, row, bias, s); /* each lane reads what it wrote */
    select_top(keys, s.n_experts, s.top_k, [&](int32_t j, int32_t expert, uint32_t) {
        if (lane == 0)
            chosen[j] = expert;
    });
    __syncwarp();
    for (int32_t j = 0; j < s.top_k; j++)
        sum += row[chosen[j]];
    float factor = s.renormalize ? s.routed_scale / (sum + 1e-20f) : s.routed_scale;
    for (int32_t j = lane; j < s.top_k; j += 32)
        weights[token * s.top_k + j] = row[chosen[j]] * factor;
}

void cuda_router(struct device *dev, float *scores, int32_t *ids, float *weights,
                 const float *logits, const float *bias, const struct router_shape *shape)
{
    struct routing s = routing_of(shape);
    if (s.n_tokens == 0)
        return;
    size_t n_bytes = router_shared(s.n_experts + s.n_groups);
    allow_shared(route_tokens, n_bytes);
    route_tokens<<<router_blocks(s.n_tokens), ROUTER_WARPS * 32, n_bytes, cuda_stream(dev)>>>(
        scores, ids, weights, logits, bias, s);
    cuda_check(dev, "router", "n=%lld experts=%d top_k=%d", (long long)s.n_tokens, s.n_experts,
               s.top_k);
}

/* ---- its gradient ---- */

/* With S the sum of the chosen scores: d_score = scale (dw - sum of score dw / S) / S, and 0 where
 * an expert was not chosen; a softmax then takes its own sum off everywhere. */
__global__ static void route_backward_tokens(float *__restrict__ d_logits,
                                             const float *__restrict__ d_weights,
                                             const float *__restrict__ scores,
                                             const int32_t *__restrict__ ids, struct routing s)
{
    int64_t token = token_of_warp(s.n_tokens);
    int32_t lane = (int32_t)threadIdx.x & 31;
    if (token < 0)
        return;
    const float *row = scores + token * s.n_experts, *dw = d_weights + token * s.top_k;
    const int32_t *chosen = ids + token * s.top_k;
    float *d = d_logits + token * s.n_experts, sum = 1e-20f, along = 0, mean = 0;
    for (int32_t j = 0; j < s.top_k; j++) {
        sum += row[chosen[j]];
        along += row[chosen[j]] * dw[j];
    }
    auto d_score = [&](int32_t j) {
        return s.renormalize ? s.routed_scale * (dw[j] - along / sum) / sum
                             : s.routed_scale * dw[j];
    };
    for (int32_t j = 0; !s.is_sigmoid && j < s.top_k; j++)
        mean += row[chosen[j]] * d_score(j);
    for (int32_t e = lane; e < s.n_experts; e += 32)
        d[e] = s.is_sigmoid ? 0 : -row[e] * mean;
    __syncwarp();
    for (int32_t j = lane; j < s.top_k; j += 32) {
        float score = row[chosen[j]];
        d[chosen[j]] = score * (s.is_sigmoid ? (1 - score) * d_score(j) : d_score(j) - mean);
    }
}

void cuda_router_backward(struct device *dev, float *d_logits, const float *d_weights,
                          const float *scores, const int32_t *ids, const struct router_shape *shape)
{
    struct routing s = routing_of(shape);
    if (s.n_tokens == 0)
        return;
    route_backward_tokens<<<router_blocks(s.n_tokens), ROUTER_WARPS * 32, 0, cuda_stream(dev)>>>(
        d_logits, d_weights, scores, ids, s);
    cuda_check(dev, "router_backward", "n=%lld experts=%d top_k=%d", (long long)s.n_tokens,
               s.n_experts, s.top_k);
}

/* ---- counts by the scores alone ---- */

__global__ static void count_segments(unsigned long long *counts, const float *__restrict__ scores,
                                      const int32_t *__restrict__ cu_rows, int32_t n_segments,
                                      struct routing s)
{
    extern __shared__ uint32_t shared_keys[];
    int64_t token = token_of_warp(s.n_tokens);
    if (token < 0)
        return;
    uint32_t *keys = shared_keys + (threadIdx.x >> 5) * s.n_experts;
    int32_t low = 0, high = n_segments; /* the segment that the token is in */
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (cu_rows[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    s.n_groups = 0;
    keys_of(keys, NULL, scores + token * s.n_experts, NULL, s);
    select_top(keys, s.n_experts, s.top_k, [&](int32_t, int32_t expert, uint32_t) {
        if ((threadIdx.x & 31) == 0)
            atomicAdd(counts + (int64_t)low * s.n_experts + expert, 1ull);
    });
}

void cuda_router_segment_counts(struct device *dev, int64_t *counts, const float *scores,
                                const int32_t *cu_rows, int32_t n_segments,
                                const struct router_shape *shape)
{
    struct routing s = routing_of(shape);
    assert(cu_rows[n_segments] == s.n_tokens);
    if (s.n_tokens == 0)
        return;
    size_t n_bytes = router_shared(s.n_experts);
    const void *cu = cuda_upload(dev, cu_rows, (size_t)(n_segments + 1) * sizeof *cu_rows);
    allow_shared(count_segments, n_bytes);
    count_segments<<<router_blocks(s.n_tokens), ROUTER_WARPS * 32, n_bytes, cuda_stream(dev)>>>(
        (unsigned long long *)counts, scores, (const int32_t *)cu, n_segments, s);
    cuda_check(dev, "router_segment_counts", "n=%lld experts=%d segments=%d", (long long)s.n_tokens,
               s.n_experts, n_segments);
}

/* ---- the load, and how far the scores are from changing it ---- */

__global__ static void count_experts(unsigned long long *counts, const int32_t *ids, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * COUNT_THREADS + threadIdx.x;
    if (i < n)
        atomicAdd(counts + ids[i], 1ull);
}

/* The token's first sum that was not chosen: a score must beat it less its bias to be chosen. */
__global__ static void cutoff_tokens(float *__restrict__ alpha, const float *__restrict__ scores,
                                     const float *__restrict__ bias, struct routing s)
{
    extern __shared__ uint32_t shared_keys[];
    int64_t token = token_of_warp(s.n_tokens);
    if (token < 0)
        return;
    uint32_t *keys = shared_keys + (threadIdx.x >> 5) * s.n_experts, cutoff = 0;
    keys_of(keys, NULL, scores + token * s.n_experts, bias, s);
    select_top(keys, s.n_experts, s.top_k + 1,
               [&](int32_t, int32_t, uint32_t ordered) { cutoff = ordered; });
    if ((threadIdx.x & 31) == 0)
        alpha[token] = float_of_ordered(cutoff);
}

struct margins {
    float lo, hi;
    int32_t n_bins, n_tiles; /* tiles of experts */
    int64_t run_tokens;      /* of one block */
};

/* A block has a tile of experts and a run of tokens; it counts in shared memory if it may. */
__global__ static void count_margins(unsigned long long *histogram, const float *__restrict__ alpha,
                                     const float *__restrict__ scores, struct margins m,
                                     struct routing s, bool in_shared)
{
    extern __shared__ uint32_t bins[]; /* (TILE_EXPERTS, n_bins) */
    int32_t tile = (int32_t)(blockIdx.x % m.n_tiles), lane = (int32_t)threadIdx.x % TILE_EXPERTS;
    int32_t e = tile * TILE_EXPERTS + lane;
    int64_t begin = blockIdx.x / m.n_tiles * m.run_tokens;
    int64_t end = min(begin + m.run_tokens, s.n_tokens);
    int32_t n_bins_held = in_shared ? TILE_EXPERTS * m.n_bins : 0;
    float width = (m.hi - m.lo) / (float)m.n_bins;
    for (int32_t i = (int32_t)threadIdx.x; i < n_bins_held; i += MARGIN_THREADS)
        bins[i] = 0;
    __syncthreads();
    for (int64_t token = begin + threadIdx.x / TILE_EXPERTS; e < s.n_experts && token < end;
         token += MARGIN_THREADS / TILE_EXPERTS) {
        float bin = floorf((alpha[token] - scores[token * s.n_experts + e] - m.lo) / width);
        bin = bin > 0 ? bin : 0;
        int32_t at = bin < (float)m.n_bins ? (int32_t)bin : m.n_bins - 1;
        if (in_shared)
            atomicAdd(bins + lane * m.n_bins + at, 1u);
        else
            atomicAdd(histogram + (int64_t)e * m.n_bins + at, 1ull);
    }
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < n_bins_held; i += MARGIN_THREADS)
        if (bins[i] > 0)
            atomicAdd(histogram + (int64_t)tile * TILE_EXPERTS * m.n_bins + i,
                      (unsigned long long)bins[i]);
}

static void histogram_of(struct device *dev, int64_t *histogram, const float *scores,
                         const float *bias, struct margins m, const struct routing &s)
{
    cuda_scratch_begin(dev);
    float *alpha = (float *)cuda_scratch_take(dev, (size_t)s.n_tokens * sizeof *alpha);
    size_t n_bytes = router_shared(s.n_experts);
    allow_shared(cutoff_tokens, n_bytes);
    cutoff_tokens<<<router_blocks(s.n_tokens), ROUTER_WARPS * 32, n_bytes, cuda_stream(dev)>>>(
        alpha, scores, bias, s);
    n_bytes = (size_t)m.n_bins * TILE_EXPERTS * sizeof(uint32_t);
    bool in_shared = n_bytes <= TILE_BYTES_MAX;
    m.n_tiles = (int32_t)ceil_div(s.n_experts, TILE_EXPERTS);
    int64_t n_runs = ceil_div(2 * (int64_t)cuda_n_multiprocessors(dev), m.n_tiles);
    m.run_tokens = ceil_div(s.n_tokens, n_runs);
    if (m.run_tokens < TILE_TOKENS_MIN)
        m.run_tokens = TILE_TOKENS_MIN;
    n_runs = ceil_div(s.n_tokens, m.run_tokens);
    allow_shared(count_margins, in_shared ? n_bytes : 0);
    count_margins<<<(unsigned)(n_runs * m.n_tiles), MARGIN_THREADS, in_shared ? n_bytes : 0,
                    cuda_stream(dev)>>>((unsigned long long *)histogram, alpha, scores, m, s,
                                        in_shared);
}

void cuda_router_histogram(struct device *dev, int64_t *counts, int64_t *histogram,
                           const float *scores, const int32_t *ids, const float *bias, float lo,
                           float hi, int32_t n_bins, const struct router_shape *shape)
{
    struct routing s = routing_of(shape);
    int64_t n = s.n_tokens * s.top_k;
    if (n == 0)
        return;
    count_experts<<<(unsigned)ceil_div(n, COUNT_THREADS), COUNT_THREADS, 0, cuda_stream(dev)>>>(
        (unsigned long long *)counts, ids, n);
    if (histogram && s.top_k < s.n_experts) {
        assert(s.n_groups <= 1);
        struct margins m = {lo, hi, n_bins, 0, 0};
        histogram_of(dev, histogram, scores, bias, m, s);
    }
    cuda_check(dev, "router_histogram", "n=%lld experts=%d top_k=%d", (long long)s.n_tokens,
               s.n_experts, s.top_k);
}
