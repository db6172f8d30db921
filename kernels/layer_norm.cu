/* layer_norm.cu - y = w (x - mean) / sqrt(var + eps) + b
 *
 * As in the definition, the variance is that of the differences from the mean, in a second pass. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_rows.cuh"

template <typename T, int V, bool WIDE>
__global__ static void layer_norm_rows(T *__restrict__ y, float *__restrict__ stats,
                                       const T *__restrict__ x, const T *__restrict__ w,
                                       const T *__restrict__ b, int64_t n, int64_t d, float eps,
                                       int group)
{
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    int64_t i = (int64_t)blockIdx.x * at.n_rows + at.row;
    int64_t width = i < n ? d : 0;
    x += i * d;
    y += i * d;
    float sum = 0, squares = 0;
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V];
        load_elems(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += v[k];
    }
    float mean = row_sum<WIDE>(sum, group, shared) / (float)d;
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V];
        load_elems(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            squares += (v[k] - mean) * (v[k] - mean);
    }
    float r = 1 / sqrtf(row_sum<WIDE>(squares, group, shared) / (float)d + eps);
    for (int64_t j = at.lane * V; j < width; j += at.width * V) {
        float v[V], scale[V], shift[V];
        load_elems(x + j, v);
        load_elems(w + j, scale);
        load_elems(b + j, shift);
#pragma unroll
        for (int k = 0; k < V; k++)
            v[k] = scale[k] * ((v[k] - mean) * r) + shift[k];
        store_elems(y + j, v);
    }
    if (at.lane == 0 && i < n) {
        stats[2 * i] = mean;
        stats[2 * i + 1] = r;
    }
}

void cuda_layer_norm(struct device *dev, elem_ptr y, float *stats, const_elem_ptr x,
                     const_elem_ptr w, const_elem_ptr b, int64_t n, int64_t d, float eps)
{
    if (n == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {y, x, w, b}));
    ROW_DISPATCH(
        dev, plan, T, V, WIDE,
        layer_norm_rows<T, V, WIDE>
        <<<(unsigned)ceil_div(n, plan.rows_per_block), plan.threads, 0, cuda_stream(dev)>>>(
            (T *)y, stats, (const T *)x, (const T *)w, (const T *)b, n, d, eps, plan.group));
    cuda_check(dev, "layer_norm", "n=%lld d=%lld", (long long)n, (long long)d);
}

/* With xn = (x - mean) r and g = w dy: dx = r (g - mean(g) - xn mean(g xn)). A part is dw, then
 * db. */
template <typename T, int V, bool WIDE>
__global__ static void layer_norm_backward_rows(T *__restrict__ dx, float *__restrict__ parts,
                                                const T *__restrict__ dy, const T *__restrict__ x,
                                                const T *__restrict__ w,
                                                const float *__restrict__ stats, int64_t n,
                                                int64_t d, float beta, int group, bool in_shared)
{
    extern __shared__ __align__(16) float block_sums[];
    __shared__ float shared[32];
    struct row_lane at = row_lane_of<WIDE>(group);
    float *part = parts + (int64_t)blockIdx.x * 2 * d, *own = in_shared ? block_sums : NULL;
    float *dw = sums_begin<V>(own, part, 2 * d, d, at), *db = dw + d;
    for (int64_t first = (int64_t)blockIdx.x * at.n_rows; first < n;
         first += (int64_t)gridDim.x * at.n_rows) {
        int64_t i = first + at.row, width = i < n ? d : 0;
        const T *x_row = x + i * d, *dy_row = dy + i * d;
        T *dx_row = dx + i * d;
        float mean = i < n ? stats[2 * i] : 0, r = i < n ? stats[2 * i + 1] : 0, sum = 0, dot = 0;
        for (int64_t j = at.lane * V; j < width; j += at.width * V) {
            float v[V], g[V], scale[V];
            load_elems(x_row + j, v);
            load_elems(dy_row + j, g);
            load_elems(w + j, scale);
#pragma unroll
            for (int k = 0; k < V; k++) {
                sum += scale[k] * g[k];
                dot += scale[k] * g[k] * ((v[k] - mean) * r);
            }
        }
        sum = row_sum<WIDE>(sum, group, shared) / (float)d;
        dot = row_sum<WIDE>(dot, group, shared) / (float)d;
        for (int64_t j = at.lane * V; j < width; j += at.width * V) {
            float v[V], g[V], scale[V], out[V], to_w[V];
            load_elems(x_row + j, v);
            load_elems(dy_row + j, g);
            load_elems(w + j, scale);
            if (beta != 0)
                load_elems(dx_row + j, out);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float xn = (v[k] - mean) * r, own_dx = r * (scale[k] * g[k] - sum - xn * dot);
                out[k] = beta != 0 ? beta * out[k] + own_dx : own_dx;
                to_w[k] = g[k] * xn;
            }
            store_elems(dx_row + j, out);
            add_floats(dw + j, to_w);
            add_floats(db + j, g);
        }
    }
    sums_end(own, part, 2 * d, at);
}

void cuda_layer_norm_backward(struct device *dev, elem_ptr dx, float *acc_dw, float *acc_db,
                              const_elem_ptr dy, const_elem_ptr x, const_elem_ptr w,
                              const float *stats, int64_t n, int64_t d, float beta)
{
    if (n == 0)
        return;
    struct row_plan plan = row_plan_of(dev, d, rows_are_aligned(dev, d, {dx, dy, x, w}));
    unsigned n_parts = part_blocks(dev, &plan, n);
    size_t n_bytes = sums_bytes(&plan, 2 * d);
    cuda_scratch_begin(dev);
    float *parts = (float *)cuda_scratch_take(dev, (size_t)(n_parts * 2 * d) * sizeof *parts);
    ROW_DISPATCH(dev, plan, T, V, WIDE, {
        allow_shared(layer_norm_backward_rows<T, V, WIDE>, n_bytes);
        layer_norm_backward_rows<T, V, WIDE><<<n_parts, plan.threads, n_bytes, cuda_stream(dev)>>>(
            (T *)dx, parts, (const T *)dy, (const T *)x, (const T *)w, stats, n, d, beta,
            plan.group, n_bytes > 0);
    });
    cuda_add_parts(dev, acc_dw, 1, parts, n_parts, 2 * d, d);
    cuda_add_parts(dev, acc_db, 1, parts + d, n_parts, 2 * d, d);
    cuda_check(dev, "layer_norm_backward", "n=%lld d=%lld", (long long)n, (long long)d);
}
