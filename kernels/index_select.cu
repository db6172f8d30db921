/* index_select.cu - the keys that the lightning indexer chooses
 *
 * Scores exist for a block of queries at a time, small enough to stay mostly in the second-level
 * cache. A block of threads takes a query: the k-th largest score is found digit by digit, keys
 * above it are taken, and of those equal to it the first ones, in one ordered pass. */
#include "kernels/cuda_attention.h"

#include "kernels/index.cuh"

#define SELECT_THREADS     1024
#define SELECT_WARPS       (SELECT_THREADS / 32)
#define SELECT_BYTES       (64ll << 20) /* of scores at a time */
#define SELECT_QUERIES_MIN 128          /* enough blocks for the device */
#define SELECT_QUERIES_MAX 4096
#define SELECT_CACHE_MAX   24576 /* scores that fit into shared memory, two blocks together */
#define SELECT_BATCH       4     /* scores that a thread reads before it uses them */
#define DIGIT_BITS         11
#define N_DIGITS           (1 << DIGIT_BITS)

/* A number whose order as an integer is the score's; -0 is 0. */
__device__ __forceinline__ uint32_t ordered(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

struct select_shared {
    int32_t  counts[N_DIGITS];
    int32_t  sums[2][SELECT_BATCH][SELECT_WARPS]; /* of larger keys, and of equal ones */
    uint32_t digit;
    int32_t  above; /* keys with a larger one */
    int32_t  n_kept;
};

/* f(key, exists) for all keys of a row, by whole warps. */
template <typename K, typename F>
__device__ __forceinline__ void for_each_key(K key_at, int64_t n, F f)
{
    for (int64_t start = threadIdx.x; start - threadIdx.x < n;
         start += SELECT_BATCH * SELECT_THREADS) {
        uint32_t keys[SELECT_BATCH];
#pragma unroll
        for (int i = 0; i < SELECT_BATCH; i++) {
            int64_t j = start + i * SELECT_THREADS;
            keys[i] = j < n ? key_at(j) : 0;
        }
#pragma unroll
        for (int i = 0; i < SELECT_BATCH; i++)
            f(keys[i], start + i * SELECT_THREADS < n);
    }
}

/* The sum over the threads before this one. */
__device__ __forceinline__ int32_t sum_before(int32_t x, int32_t *sums)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int32_t sum = x;
    for (int i = 1; i < 32; i *= 2) {
        int32_t other = __shfl_up_sync(0xffffffffu, sum, i);
        sum += lane >= i ? other : 0;
    }
    if (lane == 31)
        sums[warp] = sum;
    __syncthreads();
    return warp_sum(lane < warp ? sums[lane] : 0) + sum - x;
}

/* Of the counted digits the one of the k-th largest key. */
__device__ __forceinline__ void find_digit(select_shared &s, int64_t k)
{
    int high = N_DIGITS - 1 - 2 * (int)threadIdx.x; /* this thread's two, the larger one */
    int32_t first = s.counts[high], second = s.counts[high - 1];
    int32_t before = sum_before(first + second, s.sums[0][0]);
    if (before < k && before + first >= k)
        s.digit = (uint32_t)high, s.above = before;
    else if (before + first < k && before + first + second >= k)
        s.digit = (uint32_t)high - 1, s.above = before + first;
    __syncthreads();
}

/* What is known of the k-th largest key, from its highest bit on. */
struct partial_key {
    uint32_t prefix, mask;
    int      n_bits; /* still to find */
    int32_t  above;  /* keys that are larger for sure */
};

/* The next digit, from n keys among which are all that match so far. */
template <typename K>
__device__ __forceinline__ void next_digit(partial_key &p, select_shared &s, K key_at, int64_t n,
                                           int64_t k)
{
    int width = p.n_bits < DIGIT_BITS ? p.n_bits : DIGIT_BITS, shift = p.n_bits - width;
    uint32_t digits = (1u << width) - 1;
    for (int i = (int)threadIdx.x; i < N_DIGITS; i += SELECT_THREADS)
        s.counts[i] = 0;
    __syncthreads();
    for_each_key(key_at, n, [&](uint32_t key, bool exists) {
        if (exists && (key & p.mask) == p.prefix)
            atomicAdd(&s.counts[key >> shift & digits], 1);
    });
    __syncthreads();
    find_digit(s, k - p.above);
    p.above += s.above;
    p.prefix |= s.digit << shift;
    p.mask |= digits << shift;
    p.n_bits = shift;
}

/* Copies the keys that match to kept, in any order. */
template <typename K>
__device__ __forceinline__ void keep_matching(uint32_t *kept, const partial_key &p,
                                              select_shared &s, K key_at, int64_t n)
{
    int lane = (int)threadIdx.x % 32;
    if (threadIdx.x == 0)
        s.n_kept = 0;
    __syncthreads();
    for_each_key(key_at, n, [&](uint32_t key, bool exists) {
        bool matches = exists && (key & p.mask) == p.prefix;
        uint32_t mask = __ballot_sync(0xffffffffu, matches);
        int32_t at = 0;
        if (lane == 0 && mask)
            at = atomicAdd(&s.n_kept, __popc(mask));
        at = __shfl_sync(0xffffffffu, at, 0) + __popc(mask & ((1u << lane) - 1));
        if (matches)
            kept[at] = key;
    });
    __syncthreads();
}

/* The k-th largest of n > k keys, and in *out_above how many are larger. memory has room for
 * SELECT_CACHE_MAX keys, or is NULL. */
template <typename K>
__device__ __forceinline__ uint32_t kth_largest(select_shared &s, uint32_t *memory, K key_at,
                                                int64_t n, int64_t k, int32_t *out_above)
{
    partial_key p = {0, 0, 32, 0};
    next_digit(p, s, key_at, n, k);
    int32_t n_left = s.counts[s.digit];
    __syncthreads(); /* counts may be overwritten */
    if (memory && n_left <= SELECT_CACHE_MAX) {
        keep_matching(memory, p, s, key_at, n);
        while (p.n_bits > 0)
            next_digit(p, s, [&](int64_t j) { return memory[j]; }, n_left, k);
    }
    while (p.n_bits > 0)
        next_digit(p, s, key_at, n, k);
    *out_above = p.above;
    return p.prefix;
}

/* Keys above least and the first n_equal of those equal to it, ascending. */
template <typename K>
__device__ __forceinline__ void take_keys(int32_t *selected, select_shared &s, K key_at,
                                          int64_t first, int64_t n, uint32_t least, int32_t n_equal)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t lower = (1u << lane) - 1;
    int32_t larger_before = 0, equal_before = 0;
    for (int64_t start = 0; start < n; start += SELECT_BATCH * SELECT_THREADS) {
        uint32_t larger[SELECT_BATCH], equal[SELECT_BATCH];
#pragma unroll
        for (int i = 0; i < SELECT_BATCH; i++) {
            int64_t j = start + i * SELECT_THREADS + threadIdx.x;
            uint32_t key = j < n ? key_at(j) : 0;
            larger[i] = __ballot_sync(0xffffffffu, j < n && key > least);
            equal[i] = __ballot_sync(0xffffffffu, j < n && key == least);
        }
        __syncthreads(); /* the readers of the last round are through */
#pragma unroll
        for (int i = 0; i < SELECT_BATCH; i++)
            if (lane == 0)
                s.sums[0][i][warp] = __popc(larger[i]), s.sums[1][i][warp] = __popc(equal[i]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SELECT_BATCH; i++) {
            int32_t larger_of = s.sums[0][i][lane], equal_of = s.sums[1][i][lane];
            int32_t larger_rank = larger_before + warp_sum(lane < warp ? larger_of : 0) +
                                  __popc(larger[i] & lower);
            int32_t equal_rank =
                equal_before + warp_sum(lane < warp ? equal_of : 0) + __popc(equal[i] & lower);
            bool is_taken =
                (larger[i] >> lane & 1) || ((equal[i] >> lane & 1) && equal_rank < n_equal);
            if (is_taken)
                selected[larger_rank + (equal_rank < n_equal ? equal_rank : n_equal)] =
                    (int32_t)(first + start + i * SELECT_THREADS + threadIdx.x);
            larger_before += warp_sum(larger_of);
            equal_before += warp_sum(equal_of);
        }
    }
}

/* Query begin + blockIdx.x, whose row has the keys from 0. CACHED: the row fits the dynamic shared
 * memory; else that keeps those that are near the k-th largest. */
template <bool CACHED>
static __global__ void __launch_bounds__(SELECT_THREADS)
    select_rows(int32_t *selected, const float *scores, int64_t stride, int64_t begin,
                const int32_t *first_of, int32_t k)
{
    extern __shared__ uint32_t cache[];
    __shared__ select_shared s;
    int64_t t = begin + blockIdx.x, first = first_of[t], n = t - first + 1;
    const float *row = scores + blockIdx.x * stride + first;
    int32_t above = 0;
    selected += t * k;
    for (int64_t j = n + threadIdx.x; j < k; j += SELECT_THREADS)
        selected[j] = -1;
    if (n <= k) {
        for (int64_t j = threadIdx.x; j < n; j += SELECT_THREADS)
            selected[j] = (int32_t)(first + j);
        return;
    }
    if (CACHED)
        for (int64_t j = threadIdx.x; j < n; j += SELECT_THREADS)
            cache[j] = ordered(row[j]);
    __syncthreads();
    auto key_at = [&](int64_t j) { return CACHED ? cache[j] : ordered(row[j]); };
    uint32_t least = kth_largest(s, CACHED ? nullptr : cache, key_at, n, k, &above);
    take_keys(selected, s, key_at, first, n, least, k - above);
}

static void select_launch(struct device *dev, int32_t *selected, const float *scores,
                          int64_t stride, int64_t begin, int64_t end, const int32_t *first,
                          int32_t k)
{
    unsigned n_queries = (unsigned)(end - begin);
    constexpr size_t most_bytes = SELECT_CACHE_MAX * sizeof(uint32_t);
    size_t n_bytes = end < SELECT_CACHE_MAX ? (size_t)end * sizeof(uint32_t) : most_bytes;
    cudaStream_t stream = cuda_stream(dev);
    if (end <= SELECT_CACHE_MAX) {
        allow_shared(select_rows<true>, most_bytes); /* of any call */
        select_rows<true><<<n_queries, SELECT_THREADS, n_bytes, stream>>>(selected, scores, stride,
                                                                         begin, first, k);
    } else {
        allow_shared(select_rows<false>, n_bytes);
        select_rows<false><<<n_queries, SELECT_THREADS, n_bytes, stream>>>(
            selected, scores, stride, begin, first, k);
    }
}

template <typename T>
static void select_all(struct device *dev, int32_t *selected, index_view<T> x, int64_t first,
                       int64_t n, int32_t k)
{
    /* As if queries were there from token 0 on. */
    selected -= first * k;
    x.q -= first * x.n_heads * x.d;
    x.w -= first * x.n_heads;
    int64_t stride = ceil_div(n, 4) * 4, block = SELECT_BYTES / (stride * (int64_t)sizeof(float));
    block = block < SELECT_QUERIES_MIN ? SELECT_QUERIES_MIN : block;
    block = block > SELECT_QUERIES_MAX ? SELECT_QUERIES_MAX : block;
    block = block > n - first ? n - first : block;
    float *scores = (float *)cuda_scratch_take(dev, (size_t)(block * stride) * sizeof *scores);
    for (int64_t begin = first; begin < n; begin += block) {
        int64_t end = begin + block < n ? begin + block : n;
        if (end > k) /* else each query of the block takes all that it sees */
            index_scores_launch<T>(dev, scores, stride, begin, end, end, false, x);
        select_launch(dev, selected, scores, stride, begin, end, x.docs.first, k);
    }
}

extern "C" void cuda_index_select(struct device *dev, int32_t *selected, const void *q,
                                  const void *k, const void *w, const struct index_shape *shape)
{
    assert(shape->top_k > 0 && shape->n_heads > 0);
    if (shape->n_tokens == shape->first)
        return;
    cuda_scratch_begin(dev);
    ELEM_DISPATCH(dev, T,
                  select_all<T>(dev, selected, index_view_of<T>(dev, q, k, w, shape),
                                shape->first, shape->n_tokens, shape->top_k));
    cuda_check(dev, "index_select", "first=%lld n=%lld heads=%d d=%d top_k=%d",
               (long long)shape->first, (long long)shape->n_tokens, shape->n_heads,
               shape->head_dim, shape->top_k);
}
