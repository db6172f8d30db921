/* attn_res.cu - attention residuals: softmax over the rows of the bank and the running sum
 *
 * A block a token; a thread owns K vectors of columns. The forward reads every row once: the
 * softmax goes along with the rows, and what was summed shrinks when a larger score appears. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_rows.cuh"

#define MIX_THREADS_MAX(V) ((V) > 1 ? 512 : 1024)

/* Columns of this thread: vector c of K begins at (c blockDim.x + threadIdx.x) V. */
template <int V, int K, typename F> __device__ __forceinline__ void each_vector(int64_t d, F f)
{
#pragma unroll
    for (int c = 0; c < K; c++) {
        int64_t j = ((int64_t)c * blockDim.x + threadIdx.x) * V;
        if (j < d)
            f(c, j);
    }
}

/* wt = g w */
template <typename T, int V, int K>
__device__ __forceinline__ void load_product(float (&wt)[K][V], const T *g, const T *w, int64_t d)
{
    each_vector<V, K>(d, [&](int c, int64_t j) {
        float other[V];
        load_elems(g + j, wt[c]);
        load_elems(w + j, other);
#pragma unroll
        for (int k = 0; k < V; k++)
            wt[c][k] *= other[k];
    });
}

/* Sums over the block, N at once; all threads get them. */
template <int N> __device__ __forceinline__ void block_sums(float (&x)[N], float (&shared)[N][32])
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int n_warps = (int)blockDim.x >> 5;
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = warp_sum(x[i]);
    __syncthreads(); /* the readers of the last use are through */
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < N; i++)
            shared[i][warp] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = warp_sum(lane < n_warps ? shared[i][lane] : 0.0f);
}

template <typename T, int V, int K>
__global__ static void __launch_bounds__(MIX_THREADS_MAX(V))
    mix_tokens(T *y, float *__restrict__ weights, const T *const *__restrict__ r, int32_t n_rows,
               const T *__restrict__ g, const T *__restrict__ w, int64_t d, float eps)
{
    extern __shared__ float scores[]; /* (n_rows) */
    __shared__ float shared[2][32];
    int64_t token = blockIdx.x;
    float wt[K][V], sum[K][V] = {}, max = -INFINITY, total = 0;
    load_product<T, V, K>(wt, g, w, d);
    for (int32_t n = 0; n < n_rows; n++) {
        const T *row = r[n] + token * d;
        float v[K][V], sums[2] = {}; /* of squares, of products with wt */
        each_vector<V, K>(d, [&](int c, int64_t j) {
            load_elems(row + j, v[c]);
#pragma unroll
            for (int k = 0; k < V; k++) {
                sums[0] += v[c][k] * v[c][k];
                sums[1] += v[c][k] * wt[c][k];
            }
        });
        block_sums(sums, shared);
        float score = sums[1] / sqrtf(sums[0] / (float)d + eps);
        float new_max = fmaxf(max, score);
        float shrink = expf(max - new_max), weight = expf(score - new_max);
        max = new_max;
        total = total * shrink + weight;
        each_vector<V, K>(d, [&](int c, int64_t) {
#pragma unroll
            for (int k = 0; k < V; k++)
                sum[c][k] = sum[c][k] * shrink + weight * v[c][k];
        });
        if (threadIdx.x == 0)
            scores[n] = score;
    }
    each_vector<V, K>(d, [&](int c, int64_t j) {
#pragma unroll
        for (int k = 0; k < V; k++)
            sum[c][k] /= total;
        store_elems(y + token * d + j, sum[c]);
    });
    __syncthreads();
    for (int32_t n = (int32_t)threadIdx.x; n < n_rows; n += (int32_t)blockDim.x)
        weights[token * n_rows + n] = expf(scores[n] - max) / total;
}

/* da_n = R_n . dy, ds = a (da - a . da); dR_n += a_n dy + ds_n r_n (wt - k_n (k_n . wt) / d) with
 * k_n = r_n R_n; dwt += ds_n k_n. A part is dwt of the tokens of a block. */
template <typename T, int V, int K>
__global__ static void __launch_bounds__(MIX_THREADS_MAX(V))
    mix_backward_tokens(T *const *__restrict__ acc_dr, float *__restrict__ parts,
                        const T *__restrict__ dy, const T *const *__restrict__ r,
                        const float *__restrict__ weights, int32_t n_rows, const T *__restrict__ g,
                        const T *__restrict__ w, int64_t n, int64_t d, float eps)
{
    extern __shared__ float of_rows[]; /* (3, n_rows): da, r_n, R_n . wt; then warp_sums */
    float *da = of_rows, *scale = da + n_rows, *dots = scale + n_rows, *warp_sums = dots + n_rows;
    int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5;
    int32_t n_warps = (int32_t)blockDim.x >> 5;
    float wt[K][V], d_wt[K][V] = {};
    load_product<T, V, K>(wt, g, w, d);
    for (int64_t token = blockIdx.x; token < n; token += gridDim.x) {
        const float *a = weights + token * n_rows;
        float dy_own[K][V];
        each_vector<V, K>(d, [&](int c, int64_t j) { load_elems(dy + token * d + j, dy_own[c]); });
        __syncthreads(); /* the last token's readers of of_rows are through */
        for (int32_t i = 0; i < n_rows; i++) {
            const T *row = r[i] + token * d;
            float sums[3] = {}; /* of squares, of products with wt and with dy */
            each_vector<V, K>(d, [&](int c, int64_t j) {
                float v[V];
                load_elems(row + j, v);
#pragma unroll
                for (int k = 0; k < V; k++) {
                    sums[0] += v[k] * v[k];
                    sums[1] += v[k] * wt[c][k];
                    sums[2] += v[k] * dy_own[c][k];
                }
            });
#pragma unroll
            for (int k = 0; k < 3; k++) {
                sums[k] = warp_sum(sums[k]);
                if (lane == 0)
                    warp_sums[(i * 3 + k) * n_warps + warp] = sums[k];
            }
        }
        __syncthreads();
        for (int32_t i = warp; i < n_rows; i += n_warps) {
            float sums[3];
#pragma unroll
            for (int k = 0; k < 3; k++)
                sums[k] = warp_sum(lane < n_warps ? warp_sums[(i * 3 + k) * n_warps + lane] : 0);
            if (lane == 0) {
                scale[i] = 1 / sqrtf(sums[0] / (float)d + eps);
                dots[i] = sums[1];
                da[i] = sums[2];
            }
        }
        __syncthreads();
        float mean = 0;
        for (int32_t i = 0; i < n_rows; i++)
            mean += a[i] * da[i];
        for (int32_t i = 0; i < n_rows; i++) {
            const T *row = r[i] + token * d;
            T *dr = acc_dr[i] + token * d;
            float weight = a[i], ds = weight * (da[i] - mean), s = scale[i];
            float of_wt = ds * s, of_row = ds * s * s * s * dots[i] / (float)d;
            each_vector<V, K>(d, [&](int c, int64_t j) {
                float v[V], out[V];
                load_elems(row + j, v);
                load_elems(dr + j, out);
#pragma unroll
                for (int k = 0; k < V; k++) {
                    out[k] += weight * dy_own[c][k] + of_wt * wt[c][k] - of_row * v[k];
                    d_wt[c][k] += of_wt * v[k];
                }
                store_elems(dr + j, out);
            });
        }
    }
    each_vector<V, K>(
        d, [&](int c, int64_t j) { store_floats(parts + (int64_t)blockIdx.x * d + j, d_wt[c]); });
}

/* acc_dg += d_wt w, acc_dw += d_wt g */
template <typename T>
__global__ static void split_product(float *acc_dg, float *acc_dw, const float *d_wt, const T *g,
                                     const T *w, int64_t d)
{
    int64_t j = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if (j >= d)
        return;
    acc_dg[j] += d_wt[j] * load(w + j);
    acc_dw[j] += d_wt[j] * load(g + j);
}

struct mix_plan {
    bool vectors;
    int per_thread, threads; /* vectors of a thread: 1, 2 or 4 */
};

static bool all_aligned16(const void *const *rows, int32_t n_rows)
{
    for (int32_t i = 0; i < n_rows; i++)
        if (!is_aligned16(rows[i]))
            return false;
    return true;
}

static struct mix_plan mix_plan_of(struct device *dev, int64_t d, bool vectors)
{
    int64_t n = vectors_of(dev, d, vectors);
    struct mix_plan plan = {vectors, 1, 0};
    while (plan.per_thread < 4 && ceil_div(n, plan.per_thread) > 512)
        plan.per_thread *= 2;
    plan.threads = (int)(ceil_div(ceil_div(n, plan.per_thread), 32) * 32);
    assert(plan.threads <= MIX_THREADS_MAX(vectors ? 4 : 1)); /* 16,384 columns of bfloat16 */
    return plan;
}

#define MIX_DISPATCH(dev, plan, T, V, K, ...)                                                      \
    VECTOR_DISPATCH(                                                                               \
        dev, (plan).vectors, T, V,                                                                 \
        if ((plan).per_thread == 1) {                                                              \
            constexpr int K = 1;                                                                   \
            __VA_ARGS__;                                                                           \
        } else if ((plan).per_thread == 2) {                                                       \
            constexpr int K = 2;                                                                   \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            constexpr int K = 4;                                                                   \
            __VA_ARGS__;                                                                           \
        })

void cuda_attn_res(struct device *dev, elem_ptr y, float *weights, const_elem_ptrs r,
                   int32_t n_rows, const_elem_ptr g, const_elem_ptr w, int64_t n, int64_t d,
                   float eps)
{
    assert(n_rows > 0);
    if (n == 0)
        return;
    bool vectors = rows_are_aligned(dev, d, {y, g, w}) && all_aligned16(r, n_rows);
    struct mix_plan plan = mix_plan_of(dev, d, vectors);
    const void *rows = cuda_upload(dev, r, (size_t)n_rows * sizeof *r);
    size_t n_bytes = (size_t)n_rows * sizeof(float);
    MIX_DISPATCH(
        dev, plan, T, V, K,
        mix_tokens<T, V, K><<<(unsigned)n, plan.threads, n_bytes, cuda_stream(dev)>>>(
            (T *)y, weights, (const T *const *)rows, n_rows, (const T *)g, (const T *)w, d, eps));
    cuda_check(dev, "attn_res", "n=%lld d=%lld rows=%d", (long long)n, (long long)d, n_rows);
}

void cuda_attn_res_backward(struct device *dev, elem_ptrs acc_dr, float *acc_dg, float *acc_dw,
                            const_elem_ptr dy, const_elem_ptrs r, const float *weights,
                            int32_t n_rows, const_elem_ptr g, const_elem_ptr w, int64_t n,
                            int64_t d, float eps)
{
    assert(n_rows > 0);
    if (n == 0)
        return;
    bool vectors = rows_are_aligned(dev, d, {dy, g, w}) && all_aligned16(r, n_rows) &&
                   all_aligned16(acc_dr, n_rows);
    struct mix_plan plan = mix_plan_of(dev, d, vectors);
    const void *rows = cuda_upload(dev, r, (size_t)n_rows * sizeof *r);
    const void *d_rows = cuda_upload(dev, acc_dr, (size_t)n_rows * sizeof *acc_dr);
    unsigned n_parts = grid_blocks(n, 1, PART_BLOCKS_PER_SM * cuda_n_multiprocessors(dev));
    size_t n_bytes = 3 * (size_t)n_rows * (size_t)(1 + plan.threads / 32) * sizeof(float);
    cuda_scratch_begin(dev);
    float *parts = (float *)cuda_scratch_take(dev, (size_t)(n_parts * d) * sizeof *parts);
    float *d_wt = (float *)cuda_scratch_take(dev, (size_t)d * sizeof *d_wt);
    MIX_DISPATCH(dev, plan, T, V, K, allow_shared(mix_backward_tokens<T, V, K>, n_bytes);
                 mix_backward_tokens<T, V, K><<<n_parts, plan.threads, n_bytes, cuda_stream(dev)>>>(
                     (T *const *)d_rows, parts, (const T *)dy, (const T *const *)rows, weights,
                     n_rows, (const T *)g, (const T *)w, n, d, eps));
    cuda_add_parts(dev, d_wt, 0, parts, n_parts, d, d);
    ELEM_DISPATCH(dev, T,
                  split_product<T>
                  <<<(unsigned)ceil_div(d, ROW_THREADS), ROW_THREADS, 0, cuda_stream(dev)>>>(
                      acc_dg, acc_dw, d_wt, (const T *)g, (const T *)w, d));
    cuda_check(dev, "attn_res_backward", "n=%lld d=%lld rows=%d", (long long)n, (long long)d,
               n_rows);
}
