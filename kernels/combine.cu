/* combine.cu - each token's weighted sum of the outputs of its experts */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_rows.cuh"

/* grid: tokens, and blocks of columns where the grid's second dimension goes. */
template <typename T, int V>
__global__ static void combine_tokens(T *__restrict__ y, const T *__restrict__ slots,
                                      const float *__restrict__ weights, int32_t top_k, int64_t d)
{
    int64_t token = blockIdx.x;
    const float *w = weights + token * top_k;
    for (int64_t j = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * V; j < d;
         j += (int64_t)gridDim.y * blockDim.x * V) {
        const T *e = slots + token * top_k * d + j;
        float sum[V] = {};
#pragma unroll 4
        for (int32_t slot = 0; slot < top_k; slot++) {
            float v[V], weight = w[slot];
            load_elems(e + slot * d, v);
#pragma unroll
            for (int k = 0; k < V; k++)
                sum[k] += weight * v[k];
        }
        store_elems(y + token * d + j, sum);
    }
}

void cuda_combine(struct device *dev, elem_ptr y, const_elem_ptr slots, const float *weights,
                  int64_t n, int32_t top_k, int64_t d)
{
    if (n == 0)
        return;
    bool vectors = rows_are_aligned(dev, d, {y, slots});
    int64_t n_vectors = vectors_of(dev, d, vectors);
    int threads = (int)(n_vectors < ROW_THREADS ? ceil_div(n_vectors, 32) * 32 : ROW_THREADS);
    dim3 grid((unsigned)n, grid_blocks(n_vectors, threads, 64));
    VECTOR_DISPATCH(dev, vectors, T, V,
                    combine_tokens<T, V><<<grid, threads, 0, cuda_stream(dev)>>>(
                        (T *)y, (const T *)slots, weights, top_k, d));
    cuda_check(dev, "combine", "n=%lld top_k=%d d=%lld", (long long)n, top_k, (long long)d);
}

/* A row of the plan is a slot. */
template <typename T, int V, bool WIDE>
__global__ static void combine_backward_slots(T *__restrict__ d_slots,
                                              float *__restrict__ d_weights,
                                              const T *__restrict__ dy, const T *__restrict__ slots,
                                              const float *__restrict__ weights, int64_t n_slots,
                                              int32_t top_k, int64_t d, int group)
{
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    int64_t slot = (int64_t)blockIdx.x * at.n_rows + at.row;
    int64_t width = slot < n_slots ? d : 0;
    float weight = slot < n_slots ? weights[slot] : 0, dot = 0;
    const T *dy_row = dy + slot / top_k * d;
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V], g[V];
        load_elems(slots + slot * d + j, v);
        load_elems(dy_row + j, g);
#pragma unroll
        for (int k = 0; k < V; k++) {
            dot += v[k] * g[k];
            g[k] *= weight;
        }
        if (d_slots)
            store_elems(d_slots + slot * d + j, g);
    }
    dot = row_sum<WIDE>(dot, group, shared);
    if (at.lane == 0 && slot < n_slots)
        d_weights[slot] = dot;
}

void cuda_combine_backward(struct device *dev, elem_ptr d_slots, float *d_weights,
                           const_elem_ptr dy, const_elem_ptr slots, const float *weights, int64_t n,
                           int32_t top_k, int64_t d)
{
    if (n == 0 || top_k == 0)
        return;
    int64_t n_slots = n * top_k;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {d_slots, dy, slots}));
    ROW_DISPATCH(
        dev, plan, T, V, WIDE,
        combine_backward_slots<T, V, WIDE>
        <<<(unsigned)ceil_div(n_slots, plan.rows_per_block), plan.threads, 0, cuda_stream(dev)>>>(
            (T *)d_slots, d_weights, (const T *)dy, (const T *)slots, weights, n_slots, top_k, d,
            plan.group));
    cuda_check(dev, "combine_backward", "n=%lld top_k=%d d=%lld", (long long)n, top_k,
               (long long)d);
}
