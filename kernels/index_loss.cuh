/* index_loss.cuh - what both forms of the indexer's loss share */
#ifndef KERNELS_INDEX_LOSS_CUH
#define KERNELS_INDEX_LOSS_CUH

#include "kernels/index.cuh"
#include "kernels/sparse_attention.cuh"

template <typename T>
struct index_gradients {
    T *dq, *dk, *dw;
    float   weight;
    double *losses; /* (n) */
    index_view<T> x;
    int64_t n, first; /* queries, and keys before query 0 */
};

/* index (n) becomes d I times weight; returns the divergence to all threads of the block. */
__device__ __forceinline__ double divergence(float *index, const float *target, int64_t n,
                                             float max, float weight, double *shared)
{
    double sum = 0, total = 0, loss = 0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        sum += expf(index[j] - max);
        total += target[j];
    }
    double log_sum = log(block_sum(sum, shared));
    total = block_sum(total, shared);
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        double p = target[j] / total, log_q = (double)(index[j] - max) - log_sum;
        if (p > 0)
            loss += p * (log(p) - log_q);
        index[j] = weight * (float)(exp(log_q) - p);
    }
    return block_sum(loss, shared);
}

/* Over chosen keys in bf16 on tensor cores: all but the sum of the losses, with acc (first + n, d)
 * float32 += dk. False where it does not fit, and nothing was launched. */
bool index_loss_tensor(struct device *dev, float *acc, const index_gradients<bf16> &g,
                       const key_lists &lists, const sparse_operands<bf16> &core,
                       const float *lse);

#endif
