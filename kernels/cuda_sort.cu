/* cuda_sort.cu - a stable sort on the GPU: CUB's radix sort of keys with their places */
#include "kernels/cuda_sort.h"

#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda_elem.cuh"

#define SORT_THREADS 256

__global__ static void count_up(int32_t *order, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * SORT_THREADS + threadIdx.x;
    if (i < n)
        order[i] = (int32_t)i;
}

extern "C" void cuda_sort(struct device *dev, uint64_t *keys, int64_t n, int n_bits,
                          const uint64_t **out_keys, const int32_t **out_order)
{
    assert(n > 0 && n <= INT32_MAX);
    uint64_t *other = (uint64_t *)cuda_scratch_take(dev, (size_t)n * sizeof *other);
    int32_t *order = (int32_t *)cuda_scratch_take(dev, 2 * (size_t)n * sizeof *order);
    cub::DoubleBuffer<uint64_t> both_keys(keys, other);
    cub::DoubleBuffer<int32_t> both_orders(order, order + n);
    size_t n_bytes = 0;
    cub::DeviceRadixSort::SortPairs(NULL, n_bytes, both_keys, both_orders, (int)n, 0, n_bits,
                                    cuda_stream(dev));
    void *room = cuda_scratch_take(dev, n_bytes);
    count_up<<<(unsigned)ceil_div(n, SORT_THREADS), SORT_THREADS, 0, cuda_stream(dev)>>>(order, n);
    cub::DeviceRadixSort::SortPairs(room, n_bytes, both_keys, both_orders, (int)n, 0, n_bits,
                                    cuda_stream(dev));
    *out_keys = both_keys.Current();
    *out_order = both_orders.Current();
}
