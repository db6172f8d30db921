/* router_capacity.cu - what happens to choices beyond an expert's capacity
 *
 * A stable sort by expert, and by weight where the largest stay, says whom each expert keeps. What
 * is left over goes elsewhere in token order, each taking room from those after it: one warp. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_router.cuh"
#include "kernels/cuda_sort.h"

#define CLAIM_THREADS 256

__global__ static void claim_keys(uint64_t *keys, const int32_t *ids, const float *weights,
                                  int64_t n, bool largest_stay)
{
    int64_t i = (int64_t)blockIdx.x * CLAIM_THREADS + threadIdx.x;
    if (i < n)
        keys[i] = (uint64_t)ids[i] << 32 | (largest_stay ? ~ordered_bits(weights[i]) : 0);
}

/* room[e]: all of it, for now; begin[e]: where the claims on e begin. */
__global__ static void find_claims(int64_t *begin, int32_t *room, const uint64_t *keys, int64_t n,
                                   int32_t n_experts, int32_t capacity)
{
    int64_t at = (int64_t)blockIdx.x * CLAIM_THREADS + threadIdx.x;
    if (at < n_experts)
        room[at] = capacity;
    if (at < n && (at == 0 || keys[at - 1] >> 32 != keys[at] >> 32))
        begin[keys[at] >> 32] = at;
}

__global__ static void keep_claims(int32_t *sent, int32_t *room, const int64_t *begin,
                                   const uint64_t *keys, const int32_t *order, int64_t n,
                                   int32_t capacity)
{
    int64_t at = (int64_t)blockIdx.x * CLAIM_THREADS + threadIdx.x;
    if (at >= n)
        return;
    int32_t e = (int32_t)(keys[at] >> 32);
    int64_t before = at - begin[e];
    sent[order[at]] = before < capacity ? e : -1;
    if (at + 1 == n || keys[at + 1] >> 32 != keys[at] >> 32)
        room[e] = before + 1 < capacity ? capacity - (int32_t)(before + 1) : 0;
}

struct rerouting {
    int32_t *ids, *sent;
    float *weights;
    const float *scores, *bias;
    int64_t n_tokens;
    int32_t n_experts, top_k;
    bool renormalize;
    float routed_scale;
};

/* The token's best expert with room that it did not choose; -1 if there is none. */
__device__ __forceinline__ int32_t best_with_room(const struct rerouting &s, const int32_t *room,
                                                  const uint8_t *is_chosen, const float *scores)
{
    uint64_t best = 0;
    for (int32_t e = (int32_t)threadIdx.x; e < s.n_experts; e += 32) {
        if (room[e] <= 0 || is_chosen[e])
            continue;
        uint64_t key = ranked(ordered_bits(s.bias ? scores[e] + s.bias[e] : scores[e]), e);
        best = key > best ? key : best;
    }
    best = warp_largest(best);
    return best ? place_of_ranked(best) : -1;
}

/* Returns how many of the token's choices found another expert. */
__device__ __forceinline__ int32_t reroute(const struct rerouting &s, int32_t *room,
                                           uint8_t *is_chosen, int64_t token)
{
    int32_t lane = (int32_t)threadIdx.x, n_rerouted = 0;
    int32_t *ids = s.ids + token * s.top_k, *sent = s.sent + token * s.top_k;
    const float *scores = s.scores + token * s.n_experts;
    for (int32_t j = lane; j < s.top_k; j += 32)
        is_chosen[ids[j]] = 1;
    __syncwarp();
    for (int32_t j = 0; j < s.top_k; j++) {
        if (sent[j] >= 0)
            continue;
        int32_t old = ids[j], expert = best_with_room(s, room, is_chosen, scores);
        if (expert < 0)
            continue;
        __syncwarp();
        if (lane == 0) {
            ids[j] = sent[j] = expert;
            is_chosen[old] = 0;
            is_chosen[expert] = 1;
            room[expert]--;
        }
        __syncwarp();
        n_rerouted++;
    }
    float sum = 0;
    for (int32_t j = 0; j < s.top_k; j++)
        sum += scores[ids[j]];
    float factor = s.renormalize ? s.routed_scale / (sum + 1e-20f) : s.routed_scale;
    for (int32_t j = lane; j < s.top_k; j += 32) {
        is_chosen[ids[j]] = 0;
        if (n_rerouted > 0)
            s.weights[token * s.top_k + j] = scores[ids[j]] * factor;
    }
    __syncwarp();
    return n_rerouted;
}

/* One warp; it looks at 32 tokens at once for those that have something left over. */
__global__ static void reroute_tokens(int64_t *n_rerouted, const int32_t *room_given,
                                      struct rerouting s)
{
    extern __shared__ int32_t room[]; /* (E), then is_chosen (E) bytes */
    uint8_t *is_chosen = (uint8_t *)(room + s.n_experts);
    int64_t total = 0;
    for (int32_t e = (int32_t)threadIdx.x; e < s.n_experts; e += 32) {
        room[e] = room_given[e];
        is_chosen[e] = 0;
    }
    __syncwarp();
    for (int64_t first = 0; first < s.n_tokens; first += 32) {
        int64_t own = first + threadIdx.x;
        bool is_left = false;
        for (int32_t j = 0; own < s.n_tokens && j < s.top_k; j++)
            is_left = is_left || s.sent[own * s.top_k + j] < 0;
        for (unsigned left = __ballot_sync(0xffffffffu, is_left); left; left &= left - 1)
            total += reroute(s, room, is_chosen, first + __ffs((int)left) - 1);
    }
    if (threadIdx.x == 0)
        *n_rerouted = total;
}

__global__ static void drop_unsent(float *weights, unsigned long long *n_dropped,
                                   const int32_t *sent, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * CLAIM_THREADS + threadIdx.x;
    if (i >= n || sent[i] >= 0)
        return;
    weights[i] = 0;
    atomicAdd(n_dropped, 1ull);
}

/* room (E): what is left of each expert after it kept whom it keeps. Takes scratch. */
static void keep_all(struct device *dev, int32_t *sent, int32_t *room, const int32_t *ids,
                     const float *weights, int64_t n, int32_t n_experts, int32_t capacity,
                     enum overflow_order order)
{
    unsigned n_blocks = (unsigned)ceil_div(n, CLAIM_THREADS);
    unsigned n_blocks_all = (unsigned)ceil_div(n > n_experts ? n : n_experts, CLAIM_THREADS);
    uint64_t *keys = (uint64_t *)cuda_scratch_take(dev, (size_t)n * sizeof *keys);
    int64_t *begin = (int64_t *)cuda_scratch_take(dev, (size_t)n_experts * sizeof *begin);
    const uint64_t *sorted;
    const int32_t *places;
    int n_bits = 33;
    while ((n_experts - 1) >> (n_bits - 32))
        n_bits++;
    claim_keys<<<n_blocks, CLAIM_THREADS, 0, cuda_stream(dev)>>>(keys, ids, weights, n,
                                                                 order == KEEP_LARGEST_WEIGHTS);
    cuda_sort(dev, keys, n, n_bits, &sorted, &places);
    find_claims<<<n_blocks_all, CLAIM_THREADS, 0, cuda_stream(dev)>>>(begin, room, sorted, n,
                                                                      n_experts, capacity);
    keep_claims<<<n_blocks, CLAIM_THREADS, 0, cuda_stream(dev)>>>(sent, room, begin, sorted, places,
                                                                  n, capacity);
}

static void reroute_all(struct device *dev, int64_t *n_rerouted, const int32_t *room,
                        const struct rerouting &s)
{
    size_t n_bytes = (size_t)s.n_experts * (sizeof(int32_t) + 1);
    allow_shared(reroute_tokens, n_bytes);
    reroute_tokens<<<1, 32, n_bytes, cuda_stream(dev)>>>(n_rerouted, room, s);
}

/* The host wants the numbers, so it waits: only models with a capacity come here. */
static void add_totals(struct device *dev, int64_t *n_rerouted, int64_t *n_dropped,
                       const int64_t *totals)
{
    int64_t host[2] = {};
    cudaMemcpyAsync(host, totals, sizeof host, cudaMemcpyDeviceToHost, cuda_stream(dev));
    cudaStreamSynchronize(cuda_stream(dev));
    *n_rerouted += host[0];
    *n_dropped += host[1];
}

void cuda_router_capacity(struct device *dev, int32_t *ids, float *weights, int32_t *sent,
                          int64_t *n_rerouted, int64_t *n_dropped, const float *scores,
                          const float *bias, const struct capacity_config *config,
                          const struct router_shape *shape)
{
    int64_t n = shape->n_tokens * shape->top_k;
    int32_t n_experts = shape->n_experts;
    int32_t capacity = (int32_t)(config->capacity < n ? config->capacity : n);
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    int32_t *room = (int32_t *)cuda_scratch_take(dev, (size_t)n_experts * sizeof *room);
    int64_t *totals = (int64_t *)cuda_scratch_take(dev, 2 * sizeof *totals);
    cudaMemsetAsync(totals, 0, 2 * sizeof *totals, cuda_stream(dev));
    keep_all(dev, sent, room, ids, weights, n, n_experts, capacity, config->order);
    struct rerouting s = {ids,
                          sent,
                          weights,
                          scores,
                          bias,
                          shape->n_tokens,
                          n_experts,
                          shape->top_k,
                          shape->renormalize,
                          shape->routed_scale};
    if (config->overflow == OVERFLOW_REROUTE)
        reroute_all(dev, totals, room, s);
    drop_unsent<<<(unsigned)ceil_div(n, CLAIM_THREADS), CLAIM_THREADS, 0, cuda_stream(dev)>>>(
        weights, (unsigned long long *)totals + 1, sent, n);
    add_totals(dev, n_rerouted, n_dropped, totals);
    cuda_check(dev, "router_capacity", "n=%lld experts=%d top_k=%d", (long long)shape->n_tokens,
               n_experts, shape->top_k);
}
