/* cuda_rows.cuh - rows and columns laid over threads, for ops that memory bounds
 *
 * A narrow row belongs to a group of up to 32 neighbouring threads, a wide one to a block. Threads
 * step over a row in vectors of V elements: 16 bytes, or one element where a pointer or a width
 * forbids that. Columns that a thread owns it owns in every row, so a gradient summed over rows
 * needs no atomics: blocks leave partial sums, cuda_add_parts adds them in a fixed order. */
#ifndef KERNELS_CUDA_ROWS_CUH
#define KERNELS_CUDA_ROWS_CUH

#include <initializer_list>

#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_parts.h"

#define ROW_THREADS           256
#define SHARED_BYTES_MAX      (160 * 1024) /* of the sums that a block holds for a wide row */
#define PART_BLOCKS_PER_SM    4

/* ---- V elements; 16-byte accesses unless V is 1 ---- */

template <typename T, int V>
__device__ __forceinline__ void load_elems(const T *p, float (&out)[V])
{
    if constexpr (V == 1)
        out[0] = load(p);
    else
        load_vector(p, out);
}

template <typename T, int V>
__device__ __forceinline__ void store_elems(T *p, const float (&x)[V])
{
    if constexpr (V == 1)
        store(p, x[0]);
    else
        store_vector(p, x);
}

/* float32 beside vectors of elements of any type: V is 1, 4 or 8. */
template <int V>
__device__ __forceinline__ void load_floats(const float *p, float (&out)[V])
{
    if constexpr (V == 1) {
        out[0] = *p;
    } else {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            float4 four = *(const float4 *)(p + i);
            out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
        }
    }
}

template <int V>
__device__ __forceinline__ void store_floats(float *p, const float (&x)[V])
{
    if constexpr (V == 1) {
        *p = x[0];
    } else {
#pragma unroll
        for (int i = 0; i < V; i += 4)
            *(float4 *)(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}

template <int V>
__device__ __forceinline__ void add_floats(float *p, const float (&x)[V])
{
    float sum[V];
    load_floats(p, sum);
#pragma unroll
    for (int i = 0; i < V; i++)
        sum[i] += x[i];
    store_floats(p, sum);
}

/* ---- on the host: how a launch is laid out ---- */

/* Whether rows of d elements at these places may be read in 16-byte vectors; float32 places with
 * rows of d may be among them. */
static inline bool rows_are_aligned(const struct device *dev, int64_t d,
                                    std::initializer_list<const void *> places)
{
    if (!is_aligned16(d * (int64_t)elem_size(dev)))
        return false;
    for (const void *p : places)
        if (!is_aligned16(p))
            return false;
    return true;
}

static inline int64_t vectors_of(const struct device *dev, int64_t d, bool vectors)
{
    return vectors ? d * (int64_t)elem_size(dev) / 16 : d;
}

struct row_plan {
    bool vectors, wide;
    int  group;          /* threads of a narrow row */
    int  threads;        /* of a block */
    int  rows_per_block; /* at a time */
};

static inline struct row_plan row_plan_of(const struct device *dev, int64_t d, bool vectors)
{
    int64_t n = vectors_of(dev, d, vectors);
    struct row_plan plan = {vectors, n > 4 * 32, 1, ROW_THREADS, 1};
    if (plan.wide) {
        int64_t steps = ceil_div(n, ROW_THREADS); /* all of about equal use */
        plan.threads = (int)(ceil_div(ceil_div(n, steps), 32) * 32);
        return plan;
    }
    while (plan.group < n && plan.group < 32)
        plan.group *= 2;
    plan.rows_per_block = plan.threads / plan.group;
    return plan;
}

/* Blocks that walk over n rows and leave a part each. */
static inline unsigned part_blocks(struct device *dev, const struct row_plan *plan, int64_t n)
{
    int per_sm = plan->wide ? PART_BLOCKS_PER_SM : 2 * PART_BLOCKS_PER_SM;
    return grid_blocks(n, plan->rows_per_block, (int64_t)per_sm * cuda_n_multiprocessors(dev));
}

/* Shared memory for a block's sums of n_sums per row; 0: too large, they lie in the part itself. */
static inline size_t sums_bytes(const struct row_plan *plan, int64_t n_sums)
{
    size_t n_bytes = (size_t)(n_sums * plan->rows_per_block) * sizeof(float);
    return n_bytes <= SHARED_BYTES_MAX ? n_bytes : 0;
}

#define VECTOR_DISPATCH(dev, vectors, T, V, ...)                                                   \
    ELEM_DISPATCH(                                                                                 \
        dev, T, if (vectors) {                                                                     \
            constexpr int V = vector_elems<T>;                                                     \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            constexpr int V = 1;                                                                   \
            __VA_ARGS__;                                                                           \
        })

/* Runs the statements with T, V and WIDE of the device and the plan. */
#define ROW_DISPATCH(dev, plan, T, V, WIDE, ...)                                                   \
    VECTOR_DISPATCH(                                                                               \
        dev, (plan).vectors, T, V, if ((plan).wide) {                                              \
            constexpr bool WIDE = true;                                                            \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            constexpr bool WIDE = false;                                                           \
            __VA_ARGS__;                                                                           \
        })

/* ---- in a kernel ---- */

/* This thread's place: lane of width threads in the block's row number row. */
struct row_lane {
    int lane, width;
    int row, n_rows; /* of those that the block has at a time */
};

template <bool WIDE>
__device__ __forceinline__ struct row_lane row_lane_of(int group)
{
    if (WIDE)
        return {(int)threadIdx.x, (int)blockDim.x, 0, 1};
    return {(int)threadIdx.x & (group - 1), group, (int)threadIdx.x / group,
            (int)blockDim.x / group};
}

/* Over the threads of a row; all threads of the block must call, shared has 32 floats. */
template <bool WIDE>
__device__ __forceinline__ float row_sum(float x, int group, float *shared)
{
    if constexpr (WIDE) {
        return block_sum(x, shared);
    } else {
        for (int i = group / 2; i > 0; i /= 2)
            x += __shfl_xor_sync(0xffffffffu, x, i);
        return x;
    }
}

/* Where this thread's row of n_sums running sums lies: shared, or the part itself where shared is
 * NULL. They become 0; lane owns its own columns alone. */
template <int V>
__device__ __forceinline__ float *sums_begin(float *shared, float *part, int64_t n_sums, int64_t d,
                                             const struct row_lane &at)
{
    float *sums = shared ? shared + at.row * n_sums : part;
    const float zero[V] = {};
    for (int64_t first = 0; first < n_sums; first += d)
        for (int64_t j = at.lane * V; j < d; j += at.width * V)
            store_floats(sums + first + j, zero);
    return sums;
}

/* The block's rows of sums, in order, become its part. All threads of the block must call. */
__device__ __forceinline__ void sums_end(const float *shared, float *part, int64_t n_sums,
                                         const struct row_lane &at)
{
    if (!shared)
        return;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < n_sums; j += blockDim.x) {
        float sum = shared[j];
        for (int row = 1; row < at.n_rows; row++)
            sum += shared[row * n_sums + j];
        part[j] = sum;
    }
}

#endif
