/* rows.cu - rows moved by index; embedding is a gather by token
 *
 * Rows are added in ascending i: a stable sort brings those of one index together, and one thread
 * a column adds a run of them. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_rows.cuh"
#include "kernels/cuda_sort.h"

#define ADD_THREADS 128
#define ADD_BATCH   8  /* rows of a run on their way at once */
#define INDEX_BITS  40 /* more rows than that have no room in any device */
#define TOKEN_BITS  31

template <typename T, int V, typename Index>
__global__ static void gather_kernel(T *__restrict__ out, const T *__restrict__ in,
                                     const Index *__restrict__ index,
                                     const float *__restrict__ scale, int64_t n, int64_t d)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (i >= n)
        return;
    int64_t from = index[i];
    float factor = scale ? scale[i] : 1;
    for (int64_t j = (int64_t)threadIdx.x * V; j < d; j += blockDim.x * V) {
        float v[V] = {};
        if (from >= 0)
            load_elems(in + from * d + j, v);
        if (scale)
#pragma unroll
            for (int k = 0; k < V; k++)
                v[k] *= factor;
        store_elems(out + i * d + j, v);
    }
}

template <typename Index>
static void gather(struct device *dev, elem_ptr out, const_elem_ptr in, const Index *index,
                   const float *scale, int64_t n, int64_t d)
{
    bool vectors = rows_are_aligned(dev, d, {out, in});
    int64_t n_vectors = vectors_of(dev, d, vectors);
    unsigned x = 1;
    while (x < n_vectors && x < ROW_THREADS)
        x *= 2;
    dim3 block(x, ROW_THREADS / x);
    VECTOR_DISPATCH(dev, vectors, T, V,
                    gather_kernel<T, V>
                    <<<(unsigned)ceil_div(n, block.y), block, 0, cuda_stream(dev)>>>(
                        (T *)out, (const T *)in, index, scale, n, d));
}

void cuda_gather_rows(struct device *dev, elem_ptr out, const_elem_ptr in, const int64_t *index,
                      const float *scale, int64_t n, int64_t d)
{
    if (n == 0)
        return;
    gather(dev, out, in, index, scale, n, d);
    cuda_check(dev, "gather_rows", "n=%lld d=%lld", (long long)n, (long long)d);
}

void cuda_embedding(struct device *dev, elem_ptr y, const_elem_ptr table, const int32_t *tokens,
                    int64_t n, int64_t d)
{
    if (n == 0)
        return;
    gather(dev, y, table, tokens, NULL, n, d);
    cuda_check(dev, "embedding", "n=%lld d=%lld", (long long)n, (long long)d);
}

template <typename Index>
__global__ static void keys_of(uint64_t *keys, const Index *index, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if (i < n)
        keys[i] = (uint64_t)index[i];
}

/* A block has the run that begins at its place of the sorted keys, if one does, and some columns.
 */
template <typename Acc, typename T, int V>
__global__ static void add_runs(Acc *__restrict__ acc, const T *__restrict__ in,
                                const uint64_t *__restrict__ keys,
                                const int32_t *__restrict__ order, int64_t n, int64_t d)
{
    int64_t at = blockIdx.x, j = ((int64_t)blockIdx.y * ADD_THREADS + threadIdx.x) * V;
    uint64_t key = keys[at];
    if ((at > 0 && keys[at - 1] == key) || j >= d)
        return;
    Acc *to = acc + (int64_t)key * d + j;
    float sum[V];
#pragma unroll
    for (int k = 0; k < V; k++)
        sum[k] = load(to + k);
    bool goes_on = true;
    for (; goes_on; at += ADD_BATCH) {
        float v[ADD_BATCH][V];
        bool mine[ADD_BATCH];
#pragma unroll
        for (int b = 0; b < ADD_BATCH; b++) {
            mine[b] = at + b < n && keys[at + b] == key;
            if (mine[b])
                load_elems(in + order[at + b] * d + j, v[b]);
        }
#pragma unroll
        for (int b = 0; b < ADD_BATCH; b++)
#pragma unroll
            for (int k = 0; k < V; k++)
                sum[k] = mine[b] ? sum[k] + v[b][k] : sum[k];
        goes_on = mine[ADD_BATCH - 1];
    }
#pragma unroll
    for (int k = 0; k < V; k++)
        store(to + k, sum[k]);
}

template <typename Acc, typename T, typename Index>
static void scatter_add(struct device *dev, Acc *acc, const T *in, const Index *index, int n_bits,
                        int64_t n, int64_t d)
{
    cuda_scratch_begin(dev);
    uint64_t *keys = (uint64_t *)cuda_scratch_take(dev, (size_t)n * sizeof *keys);
    const uint64_t *sorted;
    const int32_t *order;
    keys_of<<<(unsigned)ceil_div(n, ROW_THREADS), ROW_THREADS, 0, cuda_stream(dev)>>>(keys, index,
                                                                                      n);
    cuda_sort(dev, keys, n, n_bits, &sorted, &order);
    bool vectors = rows_are_aligned(dev, d, {acc, in});
    dim3 grid((unsigned)n, (unsigned)ceil_div(vectors_of(dev, d, vectors), ADD_THREADS));
    if (vectors)
        add_runs<Acc, T, vector_elems<T>>
            <<<grid, ADD_THREADS, 0, cuda_stream(dev)>>>(acc, in, sorted, order, n, d);
    else
        add_runs<Acc, T, 1>
            <<<grid, ADD_THREADS, 0, cuda_stream(dev)>>>(acc, in, sorted, order, n, d);
}

void cuda_scatter_add_rows(struct device *dev, elem_ptr acc, const_elem_ptr in,
                           const int64_t *index, int64_t n, int64_t d)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, scatter_add(dev, (T *)acc, (const T *)in, index, INDEX_BITS, n, d));
    cuda_check(dev, "scatter_add_rows", "n=%lld d=%lld", (long long)n, (long long)d);
}

void cuda_embedding_backward(struct device *dev, float *acc_table, const_elem_ptr dy,
                             const int32_t *tokens, int64_t n, int64_t d)
{
    if (n == 0)
        return;
    ELEM_DISPATCH(dev, T, scatter_add(dev, acc_table, (const T *)dy, tokens, TOKEN_BITS, n, d));
    cuda_check(dev, "embedding_backward", "n=%lld d=%lld", (long long)n, (long long)d);
}
