/* checksum.cu - a sum of integers, which has the same bits in every order */
#include "common/mix.h"
#include "kernels/cuda_elem.cuh"

#define THREADS  256
#define EACH     8          /* words of a thread, about */
#define N_BLOCKS (132 * 16) /* that walk over the words */

__global__ static void __launch_bounds__(THREADS)
    checksum(unsigned long long *acc_sum, const uint64_t *x, int64_t n_words, uint64_t first)
{
    uint64_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n_words;
         i += (int64_t)gridDim.x * THREADS)
        sum += mix_at(x[i], first + (uint64_t)i);
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0 && sum != 0)
        atomicAdd(acc_sum, (unsigned long long)sum);
}

extern "C" void cuda_checksum(struct device *dev, uint64_t *acc_sum, const uint64_t *x,
                              int64_t n_words, uint64_t first)
{
    if (n_words <= 0)
        return;
    unsigned n_blocks = grid_blocks(n_words, THREADS * EACH, N_BLOCKS);
    checksum<<<n_blocks, THREADS, 0, cuda_stream(dev)>>>((unsigned long long *)acc_sum, x, n_words,
                                                         first);
    cuda_check(dev, "checksum", "n_words=%lld", (long long)n_words);
}
