/* l2_norm.cu - rows of length one: y = x / sqrt(sum x^2 + eps) */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_rows.cuh"

template <typename T, int V, bool WIDE>
__global__ static void l2_norm_rows(T *__restrict__ y, float *__restrict__ rstd,
                                    const T *__restrict__ x, int64_t n_rows, int64_t d, float eps,
                                    int group)
{
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    int64_t i = (int64_t)blockIdx.x * at.n_rows + at.row;
    int64_t width = i < n_rows ? d : 0;
    x += i * d;
    y += i * d;
    float sum = 0;
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V];
        load_elems(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += v[k] * v[k];
    }
    float r = 1 / sqrtf(row_sum<WIDE>(sum, group, shared) + eps);
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V];
        load_elems(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            v[k] *= r;
        store_elems(y + j, v);
    }
    if (at.lane == 0 && i < n_rows)
        rstd[i] = r;
}

void cuda_l2_norm(struct device *dev, elem_ptr y, float *rstd, const_elem_ptr x, int64_t n_rows,
                  int64_t d, float eps)
{
    if (n_rows == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {y, x}));
    ROW_DISPATCH(
        dev, plan, T, V, WIDE,
        l2_norm_rows<T, V, WIDE>
        <<<(unsigned)ceil_div(n_rows, plan.rows_per_block), plan.threads, 0, cuda_stream(dev)>>>(
            (T *)y, rstd, (const T *)x, n_rows, d, eps, plan.group));
    cuda_check(dev, "l2_norm", "n_rows=%lld d=%lld", (long long)n_rows, (long long)d);
}

/* dx = rstd (dy - y (y . dy)) */
template <typename T, int V, bool WIDE>
__global__ static void
l2_norm_backward_rows(T *__restrict__ dx, const T *__restrict__ dy, const T *__restrict__ y,
                      const float *__restrict__ rstd, int64_t n_rows, int64_t d, int group)
{
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    int64_t i = (int64_t)blockIdx.x * at.n_rows + at.row;
    int64_t width = i < n_rows ? d : 0;
    dx += i * d;
    dy += i * d;
    y += i * d;
    float dot = 0, r = i < n_rows ? rstd[i] : 0;
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V], g[V];
        load_elems(y + j, v);
        load_elems(dy + j, g);
#pragma unroll
        for (int k = 0; k < V; k++)
            dot += v[k] * g[k];
    }
    dot = row_sum<WIDE>(dot, group, shared);
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V], g[V];
        load_elems(y + j, v);
        load_elems(dy + j, g);
#pragma unroll
        for (int k = 0; k < V; k++)
            g[k] = r * (g[k] - v[k] * dot);
        store_elems(dx + j, g);
    }
}

void cuda_l2_norm_backward(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptr y,
                           const float *rstd, int64_t n_rows, int64_t d)
{
    if (n_rows == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {dx, dy, y}));
    ROW_DISPATCH(
        dev, plan, T, V, WIDE,
        l2_norm_backward_rows<T, V, WIDE>
        <<<(unsigned)ceil_div(n_rows, plan.rows_per_block), plan.threads, 0, cuda_stream(dev)>>>(
            (T *)dx, (const T *)dy, (const T *)y, rstd, n_rows, d, plan.group));
    cuda_check(dev, "l2_norm_backward", "n_rows=%lld d=%lld", (long long)n_rows, (long long)d);
}
