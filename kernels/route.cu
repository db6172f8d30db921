/* route.cu - where rows are packed on their way to experts, and what ranks tell of them */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_sort.h"

#define ROUTE_THREADS 256

static unsigned blocks_of(int64_t n)
{
    return (unsigned)ceil_div(n, ROUTE_THREADS);
}

static int bits_of(int64_t n)
{
    int n_bits = 1;
    while (n >> n_bits)
        n_bits++;
    return n_bits;
}

/* chunk n_experts + expert, or -1. */
__device__ static int64_t part_of(const int32_t *ids, int64_t pair, int64_t pairs_each,
                                  int32_t n_experts)
{
    return ids[pair] < 0 ? -1 : pair / pairs_each * n_experts + ids[pair];
}

__global__ static void count_pairs(int32_t *counts, const int32_t *ids, int64_t n_pairs,
                                   int64_t pairs_each, int32_t n_experts)
{
    int64_t s = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (s < n_pairs && ids[s] >= 0)
        atomicAdd(counts + part_of(ids, s, pairs_each, n_experts), 1);
}

void cuda_route_counts(struct device *dev, int32_t *counts, const int32_t *ids,
                       const struct route *route)
{
    size_t n = (size_t)route->n_chunks * (size_t)route->n_experts;
    cudaMemsetAsync(counts, 0, n * sizeof *counts, cuda_stream(dev));
    if (route->n_pairs > 0)
        count_pairs<<<blocks_of(route->n_pairs), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
            counts, ids, route->n_pairs, route->pairs_each, route->n_experts);
    cuda_check(dev, "route_counts", "n_pairs=%lld experts=%d", (long long)route->n_pairs,
               route->n_experts);
}

__global__ static void keys_of_pairs(uint64_t *keys, const int32_t *ids, int64_t n_pairs,
                                     int64_t pairs_each, int32_t n_experts, int64_t n_parts)
{
    int64_t s = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (s >= n_pairs)
        return;
    int64_t x = part_of(ids, s, pairs_each, n_experts);
    keys[s] = (uint64_t)(x < 0 ? n_parts : x);
}

/* begin[x]: where the sorted ones with the key x begin. */
__global__ static void find_keys(int64_t *begin, const uint64_t *keys, int64_t n)
{
    int64_t at = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (at < n && (at == 0 || keys[at - 1] != keys[at]))
        begin[keys[at]] = at;
}

struct route_arrays {
    const int32_t *first;
    const int64_t *end, *place, *chunk_at;
    int64_t n_parts, pairs_each;
};

__global__ static void place_pairs(int64_t *place_of, int64_t *pair_at, const uint64_t *keys,
                                   const int32_t *order, const int64_t *begin, int64_t n_pairs,
                                   struct route_arrays route)
{
    int64_t at = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (at >= n_pairs)
        return;
    int64_t pair = order[at], x = (int64_t)keys[at];
    if (x == route.n_parts) {
        place_of[pair] = -1;
        return;
    }
    int64_t r = at - begin[x];
    int32_t part = route.first[x];
    while (r >= route.end[part])
        part++;
    int64_t place = route.place[part] + r;
    place_of[pair] = place - route.chunk_at[pair / route.pairs_each];
    pair_at[place] = pair;
}

void cuda_route_pairs(struct device *dev, int64_t *place_of, int64_t *pair_at, const int32_t *ids,
                      const struct route *route)
{
    int64_t n = route->n_pairs;
    size_t n_x = (size_t)route->n_chunks * (size_t)route->n_experts;
    size_t n_parts = (size_t)route->first[n_x];
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    /* The largest go first: where the ring of uploads grows, earlier ones are gone. */
    const void *end = cuda_upload(dev, route->end, n_parts * sizeof *route->end);
    const void *place = cuda_upload(dev, route->place, n_parts * sizeof *route->place);
    struct route_arrays arrays = {
        (const int32_t *)cuda_upload(dev, route->first, n_x * sizeof *route->first),
        (const int64_t *)end, (const int64_t *)place,
        (const int64_t *)cuda_upload(dev, route->chunk_at,
                                     (size_t)route->n_chunks * sizeof *route->chunk_at),
        (int64_t)n_x, route->pairs_each};
    uint64_t *keys = (uint64_t *)cuda_scratch_take(dev, (size_t)n * sizeof *keys);
    int64_t *begin = (int64_t *)cuda_scratch_take(dev, (n_x + 1) * sizeof *begin);
    const uint64_t *sorted;
    const int32_t *order;
    keys_of_pairs<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
        keys, ids, n, route->pairs_each, route->n_experts, (int64_t)n_x);
    cuda_sort(dev, keys, n, bits_of((int64_t)n_x), &sorted, &order);
    find_keys<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(begin, sorted, n);
    place_pairs<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(place_of, pair_at, sorted,
                                                                     order, begin, n, arrays);
    cuda_check(dev, "route_pairs", "n_pairs=%lld experts=%d", (long long)n, route->n_experts);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* The last of n blocks that begins at or before `at`. */
__device__ static int32_t block_of(const int64_t *begin, int32_t n, int64_t at)
{
    int32_t low = 0, high = n;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (begin[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

struct target_arrays {
    const int64_t *begin;
    const int32_t *target;
    int32_t n_ranks, top_k;
    int64_t n_pairs, pairs_each;
};

/* chunk n_ranks + target of a pair's row, or -1. */
__device__ static int64_t number_of(const struct target_arrays &t, const int64_t *place_of,
                                    int64_t pair)
{
    int64_t chunk = pair / t.pairs_each, place = place_of[pair];
    if (place < 0)
        return -1;
    return chunk * t.n_ranks +
           t.target[block_of(t.begin + chunk * (t.n_ranks + 1), t.n_ranks, place)];
}

/* The first pair of the token with the same number. */
__device__ static int64_t first_with(const struct target_arrays &t, const int64_t *place_of,
                                     int64_t pair, int64_t number)
{
    int64_t s = pair / t.top_k * t.top_k;
    while (s < pair && number_of(t, place_of, s) != number)
        s++;
    return s;
}

/* Only a row's first pair has a key. */
__global__ static void keys_of_rows(uint64_t *keys, int32_t *counts, const int64_t *place_of,
                                    int64_t n_numbers, struct target_arrays t)
{
    int64_t s = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (s >= t.n_pairs)
        return;
    int64_t number = number_of(t, place_of, s);
    bool is_first = number >= 0 && first_with(t, place_of, s, number) == s;
    keys[s] = (uint64_t)(is_first ? number : n_numbers);
    if (is_first)
        atomicAdd(counts + number, 1);
}

__global__ static void place_rows(int64_t *row_of, int64_t *pair_at, int64_t *token_at,
                                  const uint64_t *keys, const int32_t *order, int64_t n_numbers,
                                  struct target_arrays t)
{
    int64_t at = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (at >= t.n_pairs)
        return;
    int64_t pair = order[at];
    bool is_first = (int64_t)keys[at] < n_numbers;
    row_of[pair] = is_first ? at : -1;
    if (!is_first)
        return;
    pair_at[at] = pair;
    token_at[at] = pair / t.top_k;
}

/* The other pairs of a row. Only entries of first pairs are read, and those are not written. */
__global__ static void join_rows(int64_t *row_of, const int64_t *place_of, struct target_arrays t)
{
    int64_t s = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (s >= t.n_pairs)
        return;
    int64_t number = number_of(t, place_of, s);
    int64_t first = number < 0 ? s : first_with(t, place_of, s, number);
    if (first < s)
        row_of[s] = row_of[first];
}

void cuda_route_rows(struct device *dev, int32_t *counts, int64_t *row_of, int64_t *pair_at,
                     int64_t *token_at, const int64_t *place_of,
                     const struct route_targets *targets, const struct route *route)
{
    int64_t n = route->n_pairs;
    size_t n_ranks = (size_t)targets->n_ranks, n_numbers = (size_t)route->n_chunks * n_ranks;
    cudaMemsetAsync(counts, 0, n_numbers * sizeof *counts, cuda_stream(dev));
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    struct target_arrays t = {
        (const int64_t *)cuda_upload(dev, targets->begin,
                                     (size_t)route->n_chunks * (n_ranks + 1) *
                                         sizeof *targets->begin),
        (const int32_t *)cuda_upload(dev, targets->target, n_ranks * sizeof *targets->target),
        targets->n_ranks, route->top_k, n, route->pairs_each};
    uint64_t *keys = (uint64_t *)cuda_scratch_take(dev, (size_t)n * sizeof *keys);
    const uint64_t *sorted;
    const int32_t *order;
    keys_of_rows<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(keys, counts, place_of,
                                                                      (int64_t)n_numbers, t);
    cuda_sort(dev, keys, n, bits_of((int64_t)n_numbers), &sorted, &order);
    place_rows<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
        row_of, pair_at, token_at, sorted, order, (int64_t)n_numbers, t);
    join_rows<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(row_of, place_of, t);
    cuda_check(dev, "route_rows", "n_pairs=%lld ranks=%d", (long long)n, targets->n_ranks);
}

/* ---- notes ----------------------------------------------------------------------------------- */

__global__ static void write_notes(struct route_note *notes, const int64_t *pair_at,
                                   const int64_t *row_of, const float *weights, int32_t top_k,
                                   const int64_t *begin, const int64_t *to, const int64_t *add,
                                   int32_t n_blocks, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (i >= n)
        return;
    int32_t b = block_of(begin, n_blocks, i);
    int64_t pair = pair_at[i];
    struct route_note note = {(int32_t)(add[b] + (row_of ? row_of[pair] : pair / top_k)),
                              weights ? weights[pair] : 0};
    notes[to[b] + i - begin[b]] = note;
}

void cuda_route_write(struct device *dev, struct route_note *notes, const int64_t *pair_at,
                      const int64_t *row_of, const float *weights, int32_t top_k,
                      const struct route_notes *layout)
{
    size_t n_blocks = (size_t)layout->n_blocks;
    int64_t n = n_blocks ? layout->begin[n_blocks] : 0;
    if (n == 0)
        return;
    const void *begin = cuda_upload(dev, layout->begin, (n_blocks + 1) * sizeof *layout->begin);
    const void *to = cuda_upload(dev, layout->to, n_blocks * sizeof *layout->to);
    const void *add = cuda_upload(dev, layout->add, n_blocks * sizeof *layout->add);
    write_notes<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
        notes, pair_at, row_of, weights, top_k, (const int64_t *)begin, (const int64_t *)to,
        (const int64_t *)add, layout->n_blocks, n);
    cuda_check(dev, "route_write", "n=%lld blocks=%d", (long long)n, layout->n_blocks);
}

__global__ static void read_notes(int64_t *at, float *weights, const struct route_note *notes,
                                  const int64_t *from, const int64_t *to, int32_t n_blocks,
                                  int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (i >= n)
        return;
    int32_t b = block_of(from, n_blocks, i);
    int64_t k = to[b] + i - from[b];
    at[k] = notes[i].at;
    if (weights)
        weights[k] = notes[i].weight;
}

void cuda_route_read(struct device *dev, int64_t *at, float *weights,
                     const struct route_note *notes, const int64_t *from, const int64_t *to,
                     int32_t n_blocks)
{
    int64_t n = n_blocks ? from[n_blocks] : 0;
    if (n == 0)
        return;
    const void *starts = cuda_upload(dev, from, (size_t)(n_blocks + 1) * sizeof *from);
    const void *places = cuda_upload(dev, to, (size_t)n_blocks * sizeof *to);
    read_notes<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
        at, weights, notes, (const int64_t *)starts, (const int64_t *)places, n_blocks, n);
    cuda_check(dev, "route_read", "n=%lld blocks=%d", (long long)n, n_blocks);
}

__global__ static void map_blocks(int64_t *to_of, const int64_t *from, const int64_t *to,
                                  int32_t n_blocks, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (i >= n)
        return;
    int32_t b = block_of(from, n_blocks, i);
    to_of[i] = to[b] + i - from[b];
}

void cuda_route_blocks(struct device *dev, int64_t *to_of, const int64_t *from, const int64_t *to,
                       int32_t n_blocks)
{
    int64_t n = n_blocks ? from[n_blocks] : 0;
    if (n == 0)
        return;
    const void *starts = cuda_upload(dev, from, (size_t)(n_blocks + 1) * sizeof *from);
    const void *places = cuda_upload(dev, to, (size_t)n_blocks * sizeof *to);
    map_blocks<<<blocks_of(n), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
        to_of, (const int64_t *)starts, (const int64_t *)places, n_blocks, n);
    cuda_check(dev, "route_blocks", "n=%lld blocks=%d", (long long)n, n_blocks);
}
