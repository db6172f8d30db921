/* rms_norm.cu - y = w x rsqrt(mean x^2 + eps), a row a group of threads */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_rows.cuh"

template <typename T, int V, bool WIDE>
__global__ static void rms_norm_rows(T *__restrict__ y, float *__restrict__ rstd,
                                     const T *__restrict__ x, const T *__restrict__ w, int64_t n,
                                     int64_t d, float eps, int group)
{
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    int64_t i = (int64_t)blockIdx.x * at.n_rows + at.row;
    int64_t width = i < n ? d : 0;
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
    float r = 1 / sqrtf(row_sum<WIDE>(sum, group, shared) / (float)d + eps);
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V], scale[V];
        load_elems(x + j, v);
        load_elems(w + j, scale);
#pragma unroll
        for (int k = 0; k < V; k++)
            v[k] = scale[k] * (v[k] * r);
        store_elems(y + j, v);
    }
    if (at.lane == 0 && i < n)
        rstd[i] = r;
}

void cuda_rms_norm(struct device *dev, elem_ptr y, float *rstd, const_elem_ptr x, const_elem_ptr w,
                   int64_t n, int64_t d, float eps)
{
    if (n == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {y, x, w}));
    ROW_DISPATCH(
        dev, plan, T, V, WIDE,
        rms_norm_rows<T, V, WIDE>
        <<<(unsigned)ceil_div(n, plan.rows_per_block), plan.threads, 0, cuda_stream(dev)>>>(
            (T *)y, rstd, (const T *)x, (const T *)w, n, d, eps, plan.group));
    cuda_check(dev, "rms_norm", "n=%lld d=%lld", (long long)n, (long long)d);
}

/* With xn = x r: dx = r (w dy - xn mean(w dy xn)), dw = sum dy xn. */
template <typename T, int V, bool WIDE>
__global__ static void rms_norm_backward_rows(T *__restrict__ dx, float *__restrict__ parts,
                                              const T *__restrict__ dy, const T *__restrict__ x,
                                              const T *__restrict__ w,
                                              const float *__restrict__ rstd, int64_t n, int64_t d,
                                              float beta, int group, bool in_shared)
{
    extern __shared__ __align__(16) float block_sums[];
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    float *part = parts + (int64_t)blockIdx.x * d, *own = in_shared ? block_sums : NULL;
    float *dw = sums_begin<V>(own, part, d, d, at);
    for (int64_t first = (int64_t)blockIdx.x * at.n_rows; first < n;
         first += (int64_t)gridDim.x * at.n_rows) {
        int64_t i = first + at.row, width = i < n ? d : 0;
        const T *x_row = x + i * d, *dy_row = dy + i * d;
        T *dx_row = dx + i * d;
        float r = i < n ? rstd[i] : 0, dot = 0;
        for (int64_t j = at.lane * V; j < width; j += at.width * V) {
            float v[V], g[V], scale[V];
            load_elems(x_row + j, v);
            load_elems(dy_row + j, g);
            load_elems(w + j, scale);
#pragma unroll
            for (int k = 0; k < V; k++)
                dot += scale[k] * g[k] * v[k];
        }
        float along = row_sum<WIDE>(dot, group, shared) * r * r / (float)d; /* of x */
        for (int64_t j = at.lane * V; j < width; j += at.width * V) {
            float v[V], g[V], scale[V], out[V], to_w[V];
            load_elems(x_row + j, v);
            load_elems(dy_row + j, g);
            load_elems(w + j, scale);
            if (beta != 0)
                load_elems(dx_row + j, out);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float own_dx = r * (scale[k] * g[k] - v[k] * along);
                out[k] = beta != 0 ? beta * out[k] + own_dx : own_dx;
                to_w[k] = g[k] * (v[k] * r);
            }
            store_elems(dx_row + j, out);
            add_floats(dw + j, to_w);
        }
    }
    sums_end(own, part, d, at);
}

void cuda_rms_norm_backward(struct device *dev, elem_ptr dx, float *acc_dw, const_elem_ptr dy,
                            const_elem_ptr x, const_elem_ptr w, const float *rstd, int64_t n,
                            int64_t d, float beta)
{
    if (n == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {dx, dy, x, w}));
    unsigned n_parts = part_blocks(dev, &plan, n);
    size_t n_bytes = sums_bytes(&plan, d);
    cuda_scratch_begin(dev);
    float *parts = (float *)cuda_scratch_take(dev, (size_t)(n_parts * d) * sizeof *parts);
    ROW_DISPATCH(dev, plan, T, V, WIDE, {
        allow_shared(rms_norm_backward_rows<T, V, WIDE>, n_bytes);
        rms_norm_backward_rows<T, V, WIDE><<<n_parts, plan.threads, n_bytes, cuda_stream(dev)>>>(
            (T *)dx, parts, (const T *)dy, (const T *)x, (const T *)w, rstd, n, d, beta, plan.group,
            n_bytes > 0);
    });
    cuda_add_parts(dev, acc_dw, 1, parts, n_parts, d, d);
    cuda_check(dev, "rms_norm_backward", "n=%lld d=%lld", (long long)n, (long long)d);
}
