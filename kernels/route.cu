/* route.cu - where rows are packed on their way to experts, and how their blocks change order */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_sort.h"

#define ROUTE_THREADS 256

__global__ static void count_pairs(int32_t *counts, const int32_t *ids, int64_t n_pairs)
{
    int64_t s = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (s < n_pairs && ids[s] >= 0)
        atomicAdd(counts + ids[s], 1);
}

void cuda_route_counts(struct device *dev, int32_t *counts, const int32_t *ids, int64_t n_pairs,
                       int32_t n_experts)
{
    cudaMemsetAsync(counts, 0, (size_t)n_experts * sizeof *counts, cuda_stream(dev));
    if (n_pairs > 0)
        count_pairs<<<(unsigned)ceil_div(n_pairs, ROUTE_THREADS), ROUTE_THREADS, 0,
                      cuda_stream(dev)>>>(counts, ids, n_pairs);
    cuda_check(dev, "route_counts", "n_pairs=%lld experts=%d", (long long)n_pairs, n_experts);
}

__global__ static void keys_of_pairs(uint64_t *keys, const int32_t *ids, int64_t n_pairs,
                                     int32_t n_experts)
{
    int64_t s = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (s < n_pairs)
        keys[s] = (uint64_t)(ids[s] < 0 ? n_experts : ids[s]);
}

/* begin[e]: where the sorted pairs of expert e begin. */
__global__ static void find_experts(int64_t *begin, const uint64_t *keys, int64_t n_pairs)
{
    int64_t at = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (at < n_pairs && (at == 0 || keys[at - 1] != keys[at]))
        begin[keys[at]] = at;
}

struct route_arrays {
    const int32_t *first;
    const int64_t *end, *place;
    int32_t n_experts, top_k;
};

__global__ static void place_pairs(int64_t *place_of, int64_t *pair_at, int64_t *token_at,
                                   const uint64_t *keys, const int32_t *order, const int64_t *begin,
                                   int64_t n_pairs, struct route_arrays route)
{
    int64_t at = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (at >= n_pairs)
        return;
    int64_t pair = order[at];
    int32_t e = (int32_t)keys[at];
    if (e == route.n_experts) {
        place_of[pair] = -1;
        return;
    }
    int64_t r = at - begin[e];
    int32_t part = route.first[e];
    while (r >= route.end[part])
        part++;
    int64_t place = route.place[part] + r;
    place_of[pair] = place;
    pair_at[place] = pair;
    token_at[place] = pair / route.top_k;
}

void cuda_route_pairs(struct device *dev, int64_t *place_of, int64_t *pair_at, int64_t *token_at,
                      const int32_t *ids, const struct route *route)
{
    int64_t n = route->n_pairs;
    size_t n_experts = (size_t)route->n_experts, n_parts = (size_t)route->first[n_experts];
    if (n == 0)
        return;
    unsigned n_blocks = (unsigned)ceil_div(n, ROUTE_THREADS);
    cuda_scratch_begin(dev);
    struct route_arrays arrays = {
        (const int32_t *)cuda_upload(dev, route->first, n_experts * sizeof *route->first),
        (const int64_t *)cuda_upload(dev, route->end, n_parts * sizeof *route->end),
        (const int64_t *)cuda_upload(dev, route->place, n_parts * sizeof *route->place),
        route->n_experts, route->top_k};
    uint64_t *keys = (uint64_t *)cuda_scratch_take(dev, (size_t)n * sizeof *keys);
    int64_t *begin = (int64_t *)cuda_scratch_take(dev, (n_experts + 1) * sizeof *begin);
    const uint64_t *sorted;
    const int32_t *order;
    int n_bits = 1;
    while (route->n_experts >> n_bits)
        n_bits++;
    keys_of_pairs<<<n_blocks, ROUTE_THREADS, 0, cuda_stream(dev)>>>(keys, ids, n, route->n_experts);
    cuda_sort(dev, keys, n, n_bits, &sorted, &order);
    find_experts<<<n_blocks, ROUTE_THREADS, 0, cuda_stream(dev)>>>(begin, sorted, n);
    place_pairs<<<n_blocks, ROUTE_THREADS, 0, cuda_stream(dev)>>>(place_of, pair_at, token_at,
                                                                  sorted, order, begin, n, arrays);
    cuda_check(dev, "route_pairs", "n_pairs=%lld experts=%d", (long long)n, route->n_experts);
}

__global__ static void map_blocks(int64_t *to_of, int64_t *from_of, const int64_t *from,
                                  const int64_t *to, int32_t n_blocks, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (i >= n)
        return;
    int32_t low = 0, high = n_blocks; /* the last block that begins at or before i */
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (from[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    int64_t k = to[low] + i - from[low];
    to_of[i] = k;
    from_of[k] = i;
}

void cuda_route_blocks(struct device *dev, int64_t *to_of, int64_t *from_of, const int64_t *from,
                       const int64_t *to, int32_t n_blocks)
{
    int64_t n = from[n_blocks];
    if (n == 0)
        return;
    const void *starts = cuda_upload(dev, from, (size_t)(n_blocks + 1) * sizeof *from);
    const void *places = cuda_upload(dev, to, (size_t)n_blocks * sizeof *to);
    map_blocks<<<(unsigned)ceil_div(n, ROUTE_THREADS), ROUTE_THREADS, 0, cuda_stream(dev)>>>(
        to_of, from_of, (const int64_t *)starts, (const int64_t *)places, n_blocks, n);
    cuda_check(dev, "route_blocks", "n=%lld blocks=%d", (long long)n, n_blocks);
}
