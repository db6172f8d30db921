/* index_loss.cu - how far the indexer is from the attention it stands for, and its gradients
 *
 * For each query KL(target || softmax of I) over its keys: the selected ones, or in the warm-up all
 * that it sees. d I = softmax(I) - target; then with a = q . k: dw = sum dI relu(a), da = w dI
 * where a > 0, dq = da k, dk = da^T q; sparse.cuh says in what order.
 * Over chosen keys, bf16 of the usual widths goes to index_loss_tensor.cu. */
#include "kernels/cuda_attention.h"

#include "kernels/attention.cuh"
#include "kernels/index_loss.cuh"

/* What a block of queries keeps; rows as long as the longest list. */
struct loss_scratch {
    float *target, *index; /* (block, n_max) */
    float *dots;           /* (block, index heads, n_max); become da */
};

/* ---- the target: weights of the main attention, summed over heads ---- */

/* From scores (block, heads, n_max). Grid: keys / 256, queries. */
static __global__ void sparse_target(float *target, const float *scores, const float *lse,
                                     sparse_work w)
{
    int64_t t = w.begin + blockIdx.y, j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    if (j >= w.lists.length(t))
        return;
    for (int32_t h = 0; h < w.n_heads; h++)
        sum += expf(scores[w.at(blockIdx.y, h, j)] - lse[t * w.n_heads + h]);
    target[blockIdx.y * w.lists.n_max + j] = sum;
}

/* Of the queries begin .. end. Grid: keys, queries, in tiles. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    dense_target(float *target, int64_t stride, const float *lse, int64_t begin, int64_t end,
                 attention_view<T> x)
{
    __shared__ tile_buffers s;
    int64_t key = (int64_t)blockIdx.x * TILE, query = begin + (int64_t)blockIdx.y * TILE;
    int64_t n_rows = end - query < TILE ? end - query : TILE;
    float scores[4][4], sums[4][4];
    if (key >= query + n_rows || key + TILE <= x.docs.first[query])
        return;
    tile_zero(sums);
    for (int head = 0; head < x.n_heads; head++) {
        attention_tile(scores, s, x.queries(head), query, x.keys(head), key, x.n, x.key_dim());
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                int64_t t = query + tile_row() + i;
                if (x.sees(t, key + tile_column() + j))
                    sums[i][j] += expf(x.scale * scores[i][j] - lse[t * x.n_heads + head]);
            }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t t = query + tile_row() + i, column = key + tile_column() + j;
            if (t < end && x.sees(t, column))
                target[(t - begin) * stride + column - x.docs.first[t]] = sums[i][j];
        }
}

/* ---- the loss of one query ---- */

/* dots (index heads, n_max) become da; dw of the query is assigned. A block a query. */
template <typename T>
static __global__ void __launch_bounds__(256)
    index_divergence(index_gradients<T> g, loss_scratch s, sparse_work w)
{
    __shared__ double shared_sums[32];
    __shared__ float  shared_max[32];
    int64_t t = w.begin + blockIdx.x, n = w.lists.length(t);
    float *index = s.index + blockIdx.x * w.lists.n_max, max = -INFINITY;
    float *dots = s.dots + w.at(blockIdx.x, 0, 0);
    const T *weights = g.x.w + t * w.n_heads;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        float score = 0;
        for (int32_t h = 0; h < w.n_heads; h++)
            score += load(weights + h) * g.x.scale * fmaxf(dots[h * w.lists.n_max + j], 0);
        index[j] = score;
        max = fmaxf(max, score);
    }
    max = block_max(max, shared_max);
    double loss = divergence(index, s.target + blockIdx.x * w.lists.n_max, n, max, g.weight,
                             shared_sums);
    if (threadIdx.x == 0)
        g.losses[t] = loss;
    __syncthreads(); /* index is whole */
    for (int32_t h = (int32_t)threadIdx.x / 32; h < w.n_heads; h += (int32_t)blockDim.x / 32) {
        float *row = dots + h * w.lists.n_max, sum = 0;
        float weight = load(weights + h) * g.x.scale;
        for (int64_t j = threadIdx.x % 32; j < n; j += 32) {
            float dot = row[j];
            sum += index[j] * fmaxf(dot, 0);
            row[j] = dot > 0 ? weight * index[j] : 0;
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            store(g.dw + t * w.n_heads + h, g.x.scale * sum);
    }
}

/* A block adds up the losses of all queries in one order. */
static __global__ void __launch_bounds__(1024) add_losses(double *acc_loss, const double *losses,
                                                          int64_t n)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += losses[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *acc_loss += sum;
}

/* ---- the keys' gradients where all keys are listed: da^T q, of a block of queries ---- */

/* Grid: columns, keys below the block's end. */
template <typename T>
static __global__ void __launch_bounds__(TILE_THREADS)
    dense_keys(float *acc, const float *da, const T *q, int32_t d, sparse_work w, int64_t n_queries)
{
    __shared__ tile_buffers s;
    int64_t key = (int64_t)blockIdx.y * TILE, column = (int64_t)blockIdx.x * TILE;
    int64_t n_keys = w.begin + n_queries;
    float sums[4][4];
    tile_zero(sums);
    tile_product<false, false>(
        sums, s, n_queries * w.n_heads,
        [&](int i, int64_t k) {
            int64_t z = k / w.n_heads, t = w.begin + z, j = key + i - w.lists.first[t];
            bool is_listed = j >= 0 && j < w.lists.length(t);
            return is_listed ? da[w.at(z, k % w.n_heads, j)] : 0.0f;
        },
        [&](int j, int64_t k) {
            return column + j < d ? load(q + (w.begin * w.n_heads + k) * d + column + j) : 0.0f;
        });
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t row = key + tile_row() + i, c = column + tile_column() + j;
            if (row < n_keys && c < d)
                acc[row * d + c] += sums[i][j];
        }
}

/* ---- a block of queries, given its target ---- */

template <typename T>
static void loss_of_block(struct device *dev, const index_gradients<T> &g, const loss_scratch &s,
                          const sparse_work &w, int64_t m)
{
    const index_view<T> &x = g.x;
    int64_t n_max = w.lists.n_max;
    cudaStream_t stream = cuda_stream(dev);
    rows<const T> q = whole_rows(x.q, x.d), k = whole_rows(x.k, x.d);
    sparse_dots<T><<<sparse_grid(n_max, x.n_heads, m), TILE_THREADS, 0, stream>>>(s.dots, q, k, w,
                                                                                x.d, 1);
    index_divergence<T><<<(unsigned)m, 256, 0, stream>>>(g, s, w);
    sparse_sums<T><<<sparse_grid(x.d, x.n_heads, m), TILE_THREADS, 0, stream>>>(
        whole_rows(g.dq, x.d), s.dots, k, w, x.d);
}

static loss_scratch loss_scratch_take(struct device *dev, int64_t block, int64_t n_max,
                                      int32_t n_heads)
{
    size_t n_bytes = (size_t)(block * n_max) * sizeof(float);
    float *target = (float *)cuda_scratch_take(dev, n_bytes);
    float *index = (float *)cuda_scratch_take(dev, n_bytes);
    return {target, index, (float *)cuda_scratch_take(dev, n_bytes * (size_t)n_heads)};
}

template <typename T>
static void finish(struct device *dev, double *acc_loss, const index_gradients<T> &g,
                   const float *acc)
{
    cudaStream_t stream = cuda_stream(dev);
    sparse_store<T><<<(unsigned)ceil_div(g.n * g.x.d, 256), 256, 0, stream>>>(
        whole_rows(g.dk, g.x.d), acc + g.first * g.x.d, g.n, g.x.d);
    add_losses<<<1, 1024, 0, stream>>>(acc_loss, g.losses, g.n);
}

template <typename T>
static void selected_plain(struct device *dev, float *acc, const index_gradients<T> &g,
                           const key_lists &lists, const sparse_operands<T> &core,
                           const float *lse)
{
    const index_view<T> &x = g.x;
    int64_t n_max = lists.n_max;
    int64_t query_floats = n_max * (2 + x.n_heads + core.n_heads + x.d);
    int64_t block = sparse_block(g.n, query_floats * (int64_t)sizeof(float));
    cudaStream_t stream = cuda_stream(dev);
    loss_scratch s = loss_scratch_take(dev, block, n_max, x.n_heads);
    float *scores = (float *)cuda_scratch_take(
        dev, (size_t)(block * n_max * core.n_heads) * sizeof *scores);
    key_parts parts = key_parts_take(dev, block, g.first + g.n, n_max, x.d);
    rows<const T> q = whole_rows(x.q, x.d);
    for (int64_t begin = 0; begin < g.n; begin += block) {
        int64_t m = g.n - begin < block ? g.n - begin : block;
        sparse_work main_work = {lists, begin, core.n_heads, g.first};
        sparse_work work = {lists, begin, x.n_heads, g.first};
        sparse_dots<T><<<sparse_grid(n_max, core.n_heads, m), TILE_THREADS, 0, stream>>>(
            scores, core.q, core.keys, main_work, core.width, core.scale);
        sparse_target<<<dim3((unsigned)ceil_div(n_max, 256), (unsigned)m), 256, 0, stream>>>(
            s.target, scores, lse, main_work);
        loss_of_block(dev, g, s, work, m);
        sparse_parts<T><<<sparse_grid(x.d, n_max, m), TILE_THREADS, 0, stream>>>(
            parts, s.dots, q, nullptr, q, 0, work);
        sparse_collect(dev, acc, parts, work, m);
    }
}

static void selected(struct device *dev, float *acc, const index_gradients<float> &g,
                     const key_lists &lists, const sparse_operands<float> &core, const float *lse)
{
    selected_plain(dev, acc, g, lists, core, lse);
}

static void selected(struct device *dev, float *acc, const index_gradients<bf16> &g,
                     const key_lists &lists, const sparse_operands<bf16> &core, const float *lse)
{
    if (!index_loss_tensor(dev, acc, g, lists, core, lse))
        selected_plain(dev, acc, g, lists, core, lse);
}

template <typename T>
static void loss_of_selected(struct device *dev, double *acc_loss, const index_gradients<T> &g,
                             const key_lists &lists, const sparse_operands<T> &core,
                             const float *lse, float *acc)
{
    if (!acc)
        acc = sparse_sums_take(dev, g.n, g.x.d);
    selected(dev, acc, g, lists, core, lse);
    finish(dev, acc_loss, g, acc);
}

template <typename T>
static void loss_of_visible(struct device *dev, double *acc_loss, const index_gradients<T> &g,
                            int64_t longest, const attention_view<T> &core, const float *lse)
{
    const index_view<T> &x = g.x;
    key_lists lists = {nullptr, nullptr, x.docs.first, longest};
    int64_t block = sparse_block(g.n, longest * (2 + x.n_heads) * (int64_t)sizeof(float));
    cudaStream_t stream = cuda_stream(dev);
    float *acc = sparse_sums_take(dev, g.n, x.d);
    loss_scratch s = loss_scratch_take(dev, block, longest, x.n_heads);
    for (int64_t begin = 0; begin < g.n; begin += block) {
        int64_t end = g.n - begin < block ? g.n : begin + block;
        sparse_work work = {lists, begin, x.n_heads, 0};
        dim3 tiles((unsigned)ceil_div(end, TILE), (unsigned)ceil_div(end - begin, TILE));
        dim3 key_tiles((unsigned)ceil_div(x.d, TILE), (unsigned)ceil_div(end, TILE));
        dense_target<T><<<tiles, TILE_THREADS, 0, stream>>>(s.target, longest, lse, begin, end,
                                                            core);
        loss_of_block(dev, g, s, work, end - begin);
        dense_keys<T><<<key_tiles, TILE_THREADS, 0, stream>>>(acc, s.dots, x.q, x.d, work,
                                                              end - begin);
    }
    finish(dev, acc_loss, g, acc);
}

template <typename T>
static index_gradients<T> index_gradients_of(struct device *dev, void *dq, void *dk, void *dw,
                                             float weight, const index_view<T> &x, int64_t n,
                                             int64_t first)
{
    double *losses = (double *)cuda_scratch_take(dev, (size_t)n * sizeof *losses);
    return {(T *)dq, (T *)dk, (T *)dw, weight, losses, x, n, first};
}

extern "C" void cuda_index_loss(struct device *dev, double *acc_loss, void *dq, void *dk, void *dw,
                                float weight, const void *q, const void *k, const void *w,
                                const int32_t *selected, const void *q_latent, const void *q_rope,
                                int64_t q_rope_stride, const void *latent, const void *k_rope,
                                int64_t k_rope_stride, const float *lse,
                                const struct index_shape *shape, const struct sparse_shape *core)
{
    int64_t n = shape->n_tokens - shape->first;
    assert(shape->n_tokens == core->n_tokens && shape->first == core->first);
    assert(shape->top_k == core->top_k && shape->top_k > 0);
    assert(shape->first == 0 || shape->later);
    assert(shape->n_heads > 0 && core->n_heads > 0);
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    key_lists lists = key_lists_of(dev, selected, shape->top_k, n);
    ELEM_DISPATCH(dev, T,
                  loss_of_selected<T>(
                      dev, acc_loss,
                      index_gradients_of<T>(dev, dq, dk, dw, weight,
                                            index_view_of<T>(dev, q, k, w, shape), n,
                                            shape->first),
                      lists,
                      sparse_operands_of<T>(q_latent, q_rope, q_rope_stride, latent, k_rope,
                                            k_rope_stride, core),
                      lse, shape->later));
    cuda_check(dev, "index_loss", "n=%lld heads=%d d=%d top_k=%d", (long long)n, shape->n_heads,
               shape->head_dim, shape->top_k);
}

extern "C" void cuda_index_loss_dense(struct device *dev, double *acc_loss, void *dq, void *dk,
                                      void *dw, float weight, const void *q, const void *k,
                                      const void *w, const void *core_q, const void *core_kv,
                                      const void *k_rope, int64_t k_rope_stride, const float *lse,
                                      const struct index_shape *shape,
                                      const struct attention_shape *core)
{
    int64_t n = shape->n_tokens, longest = 0;
    assert(n == core->n_tokens && shape->n_heads > 0 && core->n_heads > 0);
    assert(shape->first == 0 && !shape->later);
    for (int32_t doc = 0; doc < shape->n_docs; doc++) {
        int64_t length = shape->cu_seqlens[doc + 1] - shape->cu_seqlens[doc];
        longest = length > longest ? length : longest;
    }
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    ELEM_DISPATCH(dev, T,
                  loss_of_visible<T>(
                      dev, acc_loss,
                      index_gradients_of<T>(dev, dq, dk, dw, weight,
                                            index_view_of<T>(dev, q, k, w, shape), n, 0),
                      longest,
                      attention_view_of<T>(dev, core_q, core_kv, k_rope, k_rope_stride, core),
                      lse));
    cuda_check(dev, "index_loss_dense", "n=%lld heads=%d d=%d", (long long)n, shape->n_heads,
               shape->head_dim);
}
