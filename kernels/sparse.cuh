/* sparse.cuh - products of one query's heads with its own list of keys, and sums for each key
 *
 * The plain way, for every width: a block of queries keeps its weights (query, head, place in the
 * list) in scratch between steps. A gradient of keys collects from many queries: each query leaves
 * its part of each of its keys in scratch, then each key adds up the parts it finds, in the order
 * of queries. So the sums need no atomics and have one order. */
#ifndef KERNELS_SPARSE_CUH
#define KERNELS_SPARSE_CUH

#include "common/gpu_bytes.h"
#include "kernels/tile.cuh"

/* The keys of query t: chosen ones, ascending, or all from the first of its document. */
struct key_lists {
    const int32_t *selected; /* (n, n_max), or NULL */
    const int32_t *lengths;  /* (n), of selected */
    const int32_t *first;    /* (n), where selected is NULL */
    int64_t n_max;           /* of one list: the row length of all weights */

    __device__ __forceinline__ int64_t length(int64_t t) const
    {
        return selected ? lengths[t] : t - first[t] + 1;
    }
    __device__ __forceinline__ int64_t key(int64_t t, int64_t j) const
    {
        return selected ? selected[t * n_max + j] : first[t] + j;
    }
};

/* How many keys come before the first -1. */
static __global__ void sparse_lengths(int32_t *lengths, const int32_t *selected, int32_t top_k,
                                      int64_t n)
{
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n)
        return;
    int32_t low = 0, high = top_k;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (selected[t * top_k + middle] >= 0)
            low = middle + 1;
        else
            high = middle;
    }
    lengths[t] = low;
}

static inline key_lists key_lists_of(struct device *dev, const int32_t *selected, int32_t top_k,
                                     int64_t n)
{
    int32_t *lengths = (int32_t *)cuda_scratch_take(dev, (size_t)n * sizeof *lengths);
    sparse_lengths<<<(unsigned)ceil_div(n, 256), 256, 0, cuda_stream(dev)>>>(lengths, selected,
                                                                             top_k, n);
    return {selected, lengths, nullptr, top_k};
}

/* Queries of a block, given what one of them keeps in scratch. */
static inline int64_t sparse_block(int64_t n, int64_t query_bytes)
{
    int64_t block = (int64_t)GPU_SPARSE_BYTES / query_bytes;
    block = block < 1 ? 1 : block > GPU_SPARSE_QUERIES ? GPU_SPARSE_QUERIES : block;
    return block < n ? block : n;
}

/* Of the block of queries that begins at begin; a launch's z is the query in the block. */
struct sparse_work {
    key_lists lists;
    int64_t begin;
    int32_t n_heads;
    int64_t first; /* keys before query 0 */

    /* Of query z of the block, in weights (block, heads, n_max). */
    __device__ __forceinline__ int64_t at(int64_t z, int64_t head, int64_t j) const
    {
        return (z * n_heads + head) * lists.n_max + j;
    }
};

static inline dim3 sparse_grid(int64_t n_columns, int64_t n_rows, int64_t n_queries)
{
    return dim3((unsigned)ceil_div(n_columns, TILE), (unsigned)ceil_div(n_rows, TILE),
                (unsigned)n_queries);
}

/* out (block, heads, n_max) = scale x(t n_heads + h) . y(key), over depth columns. Grid: keys,
 * heads, queries. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    sparse_dots(float *out, rows<const T> x, rows<const T> y, sparse_work w, int32_t depth,
                float scale)
{
    __shared__ tile_buffers s;
    int64_t t = w.begin + blockIdx.z, n = w.lists.length(t);
    int64_t first = (int64_t)blockIdx.x * TILE;
    int head = (int)blockIdx.y * TILE;
    float acc[4][4];
    if (first >= n)
        return;
    tile_zero(acc);
    tile_product<true, true>(
        acc, s, depth,
        [&](int i, int64_t k) {
            return head + i < w.n_heads ? load(x.at(t * w.n_heads + head + i, k)) : 0.0f;
        },
        [&](int j, int64_t k) {
            return first + j < n ? load(y.at(w.lists.key(t, first + j), k)) : 0.0f;
        });
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t h = head + tile_row() + i, key = first + tile_column() + j;
            if (h < w.n_heads && key < n)
                out[w.at(blockIdx.z, h, key)] = scale * acc[i][j];
        }
}

/* out(t n_heads + h) (width columns) = sum over the list of weights y(key). Grid: columns, heads,
 * queries. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    sparse_sums(rows<T> out, const float *weights, rows<const T> y, sparse_work w, int32_t width)
{
    __shared__ tile_buffers s;
    int64_t t = w.begin + blockIdx.z, n = w.lists.length(t);
    int64_t first = (int64_t)blockIdx.x * TILE;
    int head = (int)blockIdx.y * TILE;
    float acc[4][4];
    tile_zero(acc);
    tile_product<true, false>(
        acc, s, n,
        [&](int i, int64_t k) {
            return head + i < w.n_heads ? weights[w.at(blockIdx.z, head + i, k)] : 0.0f;
        },
        [&](int j, int64_t k) {
            return first + j < width ? load(y.at(w.lists.key(t, k), first + j)) : 0.0f;
        });
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t h = head + tile_row() + i, c = first + tile_column() + j;
            if (h < w.n_heads && c < width)
                store(out.at(t * w.n_heads + h, c), acc[i][j]);
        }
}

/* ---- gradients of keys ---- */

/* What each query of a block gives to its keys. */
struct key_parts {
    float   *parts; /* (block, n_max, width) */
    int32_t *place; /* (keys, block): where key is in the query's list, from 1; 0: nowhere */
    int64_t  block; /* row length of place */
    int32_t  width;
};

/* parts = sum over heads of weights x(t n_heads + h), and in the first columns, where more is not
 * NULL, of more y. Grid: columns, keys, queries. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    sparse_parts(key_parts to, const float *weights, rows<const T> x, const float *more,
                 rows<const T> y, int32_t y_width, sparse_work w)
{
    __shared__ tile_buffers s;
    int64_t t = w.begin + blockIdx.z, n = w.lists.length(t);
    int64_t first = (int64_t)blockIdx.x * TILE, key = (int64_t)blockIdx.y * TILE;
    float acc[4][4];
    if (key >= n)
        return;
    tile_zero(acc);
    tile_product<false, false>(
        acc, s, w.n_heads,
        [&](int i, int64_t h) {
            return key + i < n ? weights[w.at(blockIdx.z, h, key + i)] : 0.0f;
        },
        [&](int j, int64_t h) {
            return first + j < to.width ? load(x.at(t * w.n_heads + h, first + j)) : 0.0f;
        });
    if (more && first < y_width)
        tile_product<false, false>(
            acc, s, w.n_heads,
            [&](int i, int64_t h) {
                return key + i < n ? more[w.at(blockIdx.z, h, key + i)] : 0.0f;
            },
            [&](int j, int64_t h) {
                return first + j < y_width ? load(y.at(t * w.n_heads + h, first + j)) : 0.0f;
            });
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t row = key + tile_row() + i, c = first + tile_column() + j;
            if (row < n && c < to.width)
                to.parts[(blockIdx.z * w.lists.n_max + row) * to.width + c] = acc[i][j];
        }
}

/* place must be zero. Grid: the lists' length / 256, queries. */
static __global__ void sparse_places(key_parts to, sparse_work w)
{
    int64_t t = w.begin + blockIdx.y, j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (j < w.lists.length(t))
        to.place[w.lists.key(t, j) * to.block + blockIdx.y] = (int32_t)j + 1;
}

/* acc (keys, width) += the parts of a key, in the order of queries; a block of 128 threads a key.
 */
static __global__ void __launch_bounds__(128)
    sparse_add(float *acc, key_parts from, int64_t n_max, int64_t n_queries)
{
    __shared__ int32_t counts[4];
    __shared__ int64_t found[128]; /* rows of parts */
    int64_t key = blockIdx.x;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int64_t first = 0; first < n_queries; first += 128) {
        int64_t z = first + threadIdx.x;
        int32_t place = z < n_queries ? from.place[key * from.block + z] : 0;
        uint32_t mask = __ballot_sync(0xffffffffu, place > 0);
        if (lane == 0)
            counts[warp] = __popc(mask);
        __syncthreads();
        int n = 0, at = __popc(mask & ((1u << lane) - 1));
        for (int i = 0; i < 4; i++) {
            at += i < warp ? counts[i] : 0;
            n += counts[i];
        }
        if (place > 0)
            found[at] = z * n_max + place - 1;
        __syncthreads();
        for (int64_t c = threadIdx.x; n > 0 && c < from.width; c += 128) {
            float sum = acc[key * from.width + c];
            for (int i = 0; i < n; i++)
                sum += from.parts[found[i] * from.width + c];
            acc[key * from.width + c] = sum;
        }
        __syncthreads();
    }
}

/* The sums of all keys, as elements. */
template <typename T>
static __global__ void sparse_store(rows<T> out, const float *acc, int64_t n, int32_t width)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * width)
        store(out.at(i / width, i % width), acc[i]);
}

/* (n, width), zero. */
static inline float *sparse_sums_take(struct device *dev, int64_t n, int32_t width)
{
    size_t n_bytes = (size_t)(n * width) * sizeof(float);
    float *acc = (float *)cuda_scratch_take(dev, n_bytes);
    cudaMemsetAsync(acc, 0, n_bytes, cuda_stream(dev));
    return acc;
}

static inline key_parts key_parts_take(struct device *dev, int64_t block, int64_t n_keys,
                                       int64_t n_max, int32_t width)
{
    size_t n_parts = (size_t)(block * n_max * width), n_places = (size_t)(n_keys * block);
    float *parts = (float *)cuda_scratch_take(dev, n_parts * sizeof *parts);
    int32_t *place = (int32_t *)cuda_scratch_take(dev, n_places * sizeof *place);
    return {parts, place, block, width};
}

/* Fills in the places of the block's keys. */
static inline void sparse_find(struct device *dev, const key_parts &parts, const sparse_work &w,
                               int64_t n_queries)
{
    size_t n_places = (size_t)((w.first + w.begin + n_queries) * parts.block);
    dim3 grid((unsigned)ceil_div(w.lists.n_max, 256), (unsigned)n_queries);
    cudaMemsetAsync(parts.place, 0, n_places * sizeof *parts.place, cuda_stream(dev));
    sparse_places<<<grid, 256, 0, cuda_stream(dev)>>>(parts, w);
}

/* After the block's parts are there: adds them to acc (n, width), keys below the block's end. */
static inline void sparse_collect(struct device *dev, float *acc, const key_parts &parts,
                                  const sparse_work &w, int64_t n_queries)
{
    sparse_find(dev, parts, w, n_queries);
    sparse_add<<<(unsigned)(w.first + w.begin + n_queries), 128, 0, cuda_stream(dev)>>>(
        acc, parts, w.lists.n_max, n_queries);
}

#endif
