/* gated_rms_norm.cu - KDA's output: rms_norm(o) w sigmoid(g), a row per token and head */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_math.cuh"
#include "kernels/cuda_rows.cuh"

template <typename T, int V, bool WIDE>
__global__ static void gated_rows(T *__restrict__ y, float *__restrict__ rstd,
                                  const T *__restrict__ o, const T *__restrict__ g,
                                  const T *__restrict__ w, int64_t n_rows, int64_t d, float eps,
                                  int group)
{
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    int64_t i = (int64_t)blockIdx.x * at.n_rows + at.row;
    int64_t width = i < n_rows ? d : 0;
    y += i * d;
    o += i * d;
    g += i * d;
    float sum = 0;
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V];
        load_elems(o + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += v[k] * v[k];
    }
    float r = 1 / sqrtf(row_sum<WIDE>(sum, group, shared) / (float)d + eps);
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V], gate[V], scale[V];
        load_elems(o + j, v);
        load_elems(g + j, gate);
        load_elems(w + j, scale);
#pragma unroll
        for (int k = 0; k < V; k++)
            v[k] = scale[k] * (v[k] * r) * sigmoid_of<T>(gate[k]);
        store_elems(y + j, v);
    }
    if (at.lane == 0 && i < n_rows)
        rstd[i] = r;
}

void cuda_gated_rms_norm(struct device *dev, elem_ptr y, float *rstd, const_elem_ptr o,
                         const_elem_ptr g, const_elem_ptr w, int64_t n_rows, int64_t d, float eps)
{
    if (n_rows == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {y, o, g, w}));
    ROW_DISPATCH(
        dev, plan, T, V, WIDE,
        gated_rows<T, V, WIDE>
        <<<(unsigned)ceil_div(n_rows, plan.rows_per_block), plan.threads, 0, cuda_stream(dev)>>>(
            (T *)y, rstd, (const T *)o, (const T *)g, (const T *)w, n_rows, d, eps, plan.group));
    cuda_check(dev, "gated_rms_norm", "n_rows=%lld d=%lld", (long long)n_rows, (long long)d);
}

template <typename T, int V, bool WIDE>
__global__ static void gated_backward_rows(T *__restrict__ d_o, T *__restrict__ dg,
                                           float *__restrict__ parts, const T *__restrict__ dy,
                                           const T *__restrict__ o, const T *__restrict__ g,
                                           const T *__restrict__ w, const float *__restrict__ rstd,
                                           int64_t n_rows, int64_t d, int group, bool in_shared)
{
    extern __shared__ __align__(16) float block_sums[];
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    float *part = parts + (int64_t)blockIdx.x * d, *own = in_shared ? block_sums : NULL;
    float *dw = sums_begin<V>(own, part, d, d, at);
    for (int64_t first = (int64_t)blockIdx.x * at.n_rows; first < n_rows;
         first += (int64_t)gridDim.x * at.n_rows) {
        int64_t i = first + at.row, width = i < n_rows ? d : 0;
        float r = i < n_rows ? rstd[i] : 0, dot = 0;
        for (int64_t j = at.lane * V; j < width; j += at.width * V) {
            float v[V], gate[V], through[V], scale[V];
            load_elems(o + i * d + j, v);
            load_elems(g + i * d + j, gate);
            load_elems(dy + i * d + j, through);
            load_elems(w + j, scale);
#pragma unroll
            for (int k = 0; k < V; k++)
                dot += scale[k] * through[k] * sigmoid_of<T>(gate[k]) * v[k];
        }
        float along = row_sum<WIDE>(dot, group, shared) * r * r / (float)d;
        for (int64_t j = at.lane * V; j < width; j += at.width * V) {
            float v[V], gate[V], through[V], scale[V], to_w[V];
            load_elems(o + i * d + j, v);
            load_elems(g + i * d + j, gate);
            load_elems(dy + i * d + j, through);
            load_elems(w + j, scale);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float s = sigmoid_of<T>(gate[k]), normed = v[k] * r;
                through[k] *= s;
                gate[k] = scale[k] * normed * through[k] * (1 - s);
                to_w[k] = normed * through[k];
                v[k] = r * (scale[k] * through[k] - v[k] * along);
            }
            store_elems(d_o + i * d + j, v);
            store_elems(dg + i * d + j, gate);
            add_floats(dw + j, to_w);
        }
    }
    sums_end(own, part, d, at);
}

void cuda_gated_rms_norm_backward(struct device *dev, elem_ptr d_o, elem_ptr dg, float *acc_dw,
                                  const_elem_ptr dy, const_elem_ptr o, const_elem_ptr g,
                                  const_elem_ptr w, const float *rstd, int64_t n_rows, int64_t d)
{
    if (n_rows == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {d_o, dg, dy, o, g, w}));
    unsigned n_parts = part_blocks(dev, &plan, n_rows);
    size_t n_bytes = sums_bytes(&plan, d);
    cuda_scratch_begin(dev);
    float *parts = (float *)cuda_scratch_take(dev, (size_t)(n_parts * d) * sizeof *parts);
    ROW_DISPATCH(dev, plan, T, V, WIDE, {
        allow_shared(gated_backward_rows<T, V, WIDE>, n_bytes);
        gated_backward_rows<T, V, WIDE><<<n_parts, plan.threads, n_bytes, cuda_stream(dev)>>>(
            (T *)d_o, (T *)dg, parts, (const T *)dy, (const T *)o, (const T *)g, (const T *)w, rstd,
            n_rows, d, plan.group, n_bytes > 0);
    });
    cuda_add_parts(dev, acc_dw, 1, parts, n_parts, d, d);
    cuda_check(dev, "gated_rms_norm_backward", "n_rows=%lld d=%lld", (long long)n_rows,
               (long long)d);
}
