/* kda_gate.cu - the log decay of KDA from its raw gate
 *
 * bounded:  g = L sigmoid(e^A (z + bias)), in (L, 0)
 * softplus: g = -e^A softplus(z + bias)
 *
 * g is float32 whatever the elements are, so the exponentials are the accurate ones. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_columns.cuh"
#include "kernels/cuda_math.cuh"

struct gate_shape {
    int64_t n, width, n_column_blocks, run_rows; /* width = heads d */
    int32_t d;
    float lower_bound;
};

/* This thread's columns, and what their parameters are. */
template <typename T, int V> struct gate_columns {
    int64_t first;
    float bias[V], rate[V]; /* rate = e^A of the column's head */

    __device__ __forceinline__ gate_columns(const T *dt_bias, const T *a_log,
                                            const struct gate_shape &s)
    {
        first = (blockIdx.x % s.n_column_blocks * COLUMN_THREADS + threadIdx.x) * V;
        if (first >= s.width)
            return;
        load_elems(dt_bias + first, bias);
#pragma unroll
        for (int k = 0; k < V; k++)
            rate[k] = expf(load(a_log + (first + k) / s.d));
    }
};

template <typename T, int V, bool BOUNDED>
__global__ static void gate_rows(float *__restrict__ g, const T *__restrict__ z,
                                 const T *__restrict__ dt_bias, const T *__restrict__ a_log,
                                 struct gate_shape s)
{
    gate_columns<T, V> columns(dt_bias, a_log, s);
    if (columns.first >= s.width)
        return;
    int64_t begin = blockIdx.x / s.n_column_blocks * s.run_rows;
    int64_t end = min(begin + s.run_rows, s.n);
#pragma unroll 2
    for (int64_t i = begin; i < end; i++) {
        float x[V];
        load_elems(z + i * s.width + columns.first, x);
#pragma unroll
        for (int k = 0; k < V; k++) {
            x[k] += columns.bias[k];
            x[k] = BOUNDED ? s.lower_bound * sigmoid_of<float>(columns.rate[k] * x[k])
                           : -columns.rate[k] * softplus(x[k]);
        }
        store_floats(g + i * s.width + columns.first, x);
    }
}

/* A part: the gradient of dt_bias (width), then what each column adds to that of its a_log. */
template <typename T, int V, bool BOUNDED>
__global__ static void gate_backward_rows(T *__restrict__ dz, float *__restrict__ parts,
                                          const float *__restrict__ dg, const T *__restrict__ z,
                                          const T *__restrict__ dt_bias,
                                          const T *__restrict__ a_log, struct gate_shape s)
{
    gate_columns<T, V> columns(dt_bias, a_log, s);
    if (columns.first >= s.width)
        return;
    int64_t run = blockIdx.x / s.n_column_blocks, begin = run * s.run_rows;
    int64_t end = min(begin + s.run_rows, s.n);
    float d_bias[V] = {}, d_a_log[V] = {};
#pragma unroll 2
    for (int64_t i = begin; i < end; i++) {
        float x[V], d[V];
        load_elems(z + i * s.width + columns.first, x);
        load_floats(dg + i * s.width + columns.first, d);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float rate = columns.rate[k], v = x[k] + columns.bias[k];
            if (BOUNDED) {
                float y = sigmoid_of<float>(rate * v);
                x[k] = d[k] * s.lower_bound * y * (1 - y) * rate;
                d_a_log[k] += x[k] * v;
            } else {
                x[k] = -rate * d[k] * sigmoid_of<float>(v);
                d_a_log[k] += -rate * softplus(v) * d[k];
            }
            d_bias[k] += x[k];
        }
        store_elems(dz + i * s.width + columns.first, x);
    }
    store_floats(parts + run * 2 * s.width + columns.first, d_bias);
    store_floats(parts + run * 2 * s.width + s.width + columns.first, d_a_log);
}

/* acc[h] += the sum of the d columns of head h; a warp a head. */
__global__ static void add_head_columns(float *acc, const float *columns, int32_t d)
{
    float sum = 0;
    for (int32_t j = (int32_t)threadIdx.x; j < d; j += 32)
        sum += columns[(int64_t)blockIdx.x * d + j];
    sum = warp_sum(sum);
    if (threadIdx.x == 0)
        acc[blockIdx.x] += sum;
}

#define GATE_DISPATCH(dev, vectors, bounded, T, V, BOUNDED, ...)                                   \
    VECTOR_DISPATCH(                                                                               \
        dev, vectors, T, V,                                                                        \
        if (bounded) {                                                                             \
            constexpr bool BOUNDED = true;                                                         \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            constexpr bool BOUNDED = false;                                                        \
            __VA_ARGS__;                                                                           \
        })

void cuda_kda_gate(struct device *dev, float *g, const_elem_ptr z, const_elem_ptr dt_bias,
                   const_elem_ptr a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                   float lower_bound)
{
    int64_t width = (int64_t)n_heads * d;
    if (n == 0)
        return;
    bool vectors = rows_are_aligned(dev, width, {g, z, dt_bias});
    struct column_plan plan = column_plan_of(dev, n, vectors_of(dev, width, vectors));
    struct gate_shape s = {n, width, plan.n_column_blocks, plan.run_rows, d, lower_bound};
    GATE_DISPATCH(dev, vectors, bounded, T, V, BOUNDED,
                  gate_rows<T, V, BOUNDED><<<plan.n_blocks, COLUMN_THREADS, 0, cuda_stream(dev)>>>(
                      g, (const T *)z, (const T *)dt_bias, (const T *)a_log, s));
    cuda_check(dev, "kda_gate", "n=%lld heads=%d d=%d", (long long)n, n_heads, d);
}

void cuda_kda_gate_backward(struct device *dev, elem_ptr dz, float *acc_d_dt_bias,
                            float *acc_d_a_log, const float *dg, const_elem_ptr z,
                            const_elem_ptr dt_bias, const_elem_ptr a_log, int64_t n,
                            int32_t n_heads, int32_t d, bool bounded, float lower_bound)
{
    int64_t width = (int64_t)n_heads * d;
    if (n == 0)
        return;
    bool vectors = rows_are_aligned(dev, width, {dz, dg, z, dt_bias});
    struct column_plan plan = column_plan_of(dev, n, vectors_of(dev, width, vectors));
    struct gate_shape s = {n, width, plan.n_column_blocks, plan.run_rows, d, lower_bound};
    cuda_scratch_begin(dev);
    size_t n_floats = (size_t)(plan.n_runs * 2 * width);
    float *parts = (float *)cuda_scratch_take(dev, n_floats * sizeof *parts);
    float *columns = (float *)cuda_scratch_take(dev, (size_t)width * sizeof *columns);
    GATE_DISPATCH(dev, vectors, bounded, T, V, BOUNDED,
                  gate_backward_rows<T, V, BOUNDED>
                  <<<plan.n_blocks, COLUMN_THREADS, 0, cuda_stream(dev)>>>(
                      (T *)dz, parts, dg, (const T *)z, (const T *)dt_bias, (const T *)a_log, s));
    cuda_add_parts(dev, acc_d_dt_bias, 1, parts, plan.n_runs, 2 * width, width);
    cuda_add_parts(dev, columns, 0, parts + width, plan.n_runs, 2 * width, width);
    add_head_columns<<<(unsigned)n_heads, 32, 0, cuda_stream(dev)>>>(acc_d_a_log, columns, d);
    cuda_check(dev, "kda_gate_backward", "n=%lld heads=%d d=%d", (long long)n, n_heads, d);
}
