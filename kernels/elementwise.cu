/* elementwise.cu - updates of whole buffers, casts, and sums over them */
#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_sums.cuh"

#define THREADS     256
#define EIGHT       8
#define N_BLOCKS    (132 * 16) /* that walk over a buffer */
#define ADD_THREADS 1024       /* that add partial sums up */

/* y = f(y, x) over n elements; READS_Y says whether f looks at y, else it may hold anything. */
template <typename Y, typename X, bool READS_Y, typename F>
__global__ static void __launch_bounds__(THREADS)
    update(Y *y, const X *x, int64_t n, bool in_vectors, F f)
{
    int64_t step = (int64_t)gridDim.x * THREADS * EIGHT;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EIGHT; i < n; i += step) {
        float a[EIGHT] = {}, b[EIGHT] = {};
        if (in_vectors && i + EIGHT <= n) {
            if (READS_Y)
                load_vector(y + i, a);
            if (x)
                load_vector(x + i, b);
#pragma unroll
            for (int j = 0; j < EIGHT; j++)
                a[j] = f(a[j], b[j]);
            store_vector(y + i, a);
        } else {
            for (int64_t j = i; j < n && j < i + EIGHT; j++)
                store(y + j, f(READS_Y ? load(y + j) : 0, x ? load(x + j) : 0));
        }
    }
}

template <bool READS_Y, typename Y, typename X, typename F>
static void run(struct device *dev, const char *op, Y *y, const X *x, int64_t n, F f)
{
    if (n <= 0)
        return;
    bool in_vectors = is_aligned16(y) && is_aligned16(x);
    unsigned n_blocks = grid_blocks(n, THREADS * EIGHT, N_BLOCKS);
    update<Y, X, READS_Y><<<n_blocks, THREADS, 0, cuda_stream(dev)>>>(y, x, n, in_vectors, f);
    cuda_check(dev, op, "n=%lld", (long long)n);
}

extern "C" void cuda_axpy(struct device *dev, float *y, float a, const float *x, int64_t n)
{
    run<true>(dev, "axpy", y, x, n, [a] __device__(float p, float q) { return p + a * q; });
}

extern "C" void cuda_scale(struct device *dev, float *y, float a, int64_t n)
{
    run<true>(dev, "scale", y, (const float *)NULL, n,
              [a] __device__(float p, float) { return p * a; });
}

extern "C" void cuda_add(struct device *dev, void *y, const void *x, int64_t n)
{
    ELEM_DISPATCH(dev, T, run<true>(dev, "add", (T *)y, (const T *)x, n,
                                    [] __device__(float p, float q) { return p + q; }));
}

extern "C" void cuda_to_f32(struct device *dev, float *y, const void *x, int64_t n)
{
    ELEM_DISPATCH(dev, T, run<false>(dev, "to_f32", y, (const T *)x, n,
                                     [] __device__(float, float q) { return q; }));
}

extern "C" void cuda_to_elem(struct device *dev, void *y, const float *x, int64_t n)
{
    ELEM_DISPATCH(dev, T, run<false>(dev, "to_elem", (T *)y, x, n,
                                     [] __device__(float, float q) { return q; }));
}

/* ---- sums ---- */

__global__ static void __launch_bounds__(ADD_THREADS)
    add_up(double *acc, const double *sums, int64_t n)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += ADD_THREADS)
        sum += sums[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *acc += sum;
}

extern "C" void cuda_sum_squares(struct device *dev, double *acc, const float *x, int64_t n)
{
    if (n <= 0)
        return;
    int64_t n_chunks = ceil_div(n, SUM_CHUNK);
    cuda_scratch_begin(dev);
    double *sums = (double *)cuda_scratch_take(dev, (size_t)n_chunks * sizeof(double));
    sum_squares_of_chunks<<<(unsigned)n_chunks, SUM_THREADS, 0, cuda_stream(dev)>>>(sums, x, n);
    add_up<<<1, ADD_THREADS, 0, cuda_stream(dev)>>>(acc, sums, n_chunks);
    cuda_check(dev, "sum_squares", "n=%lld", (long long)n);
}

/* Any thread that finds one writes the same word. */
__global__ static void __launch_bounds__(THREADS)
    find_not_finite(int32_t *acc_bad, const float *x, int64_t n)
{
    bool is_bad = false;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS)
        is_bad |= !isfinite(x[i]);
    if (is_bad)
        *acc_bad = 1;
}

extern "C" void cuda_all_finite(struct device *dev, int32_t *acc_bad, const float *x, int64_t n)
{
    if (n <= 0)
        return;
    unsigned n_blocks = grid_blocks(n, THREADS * EIGHT, N_BLOCKS);
    find_not_finite<<<n_blocks, THREADS, 0, cuda_stream(dev)>>>(acc_bad, x, n);
    cuda_check(dev, "all_finite", "n=%lld", (long long)n);
}
