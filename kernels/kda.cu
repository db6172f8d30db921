/* kda.cu - Kimi Delta Attention on the GPU, forward (kda.c is the definition)
 *
 * kda_prepare.cu does what needs no state, all chunks at once. The scan here takes the state over
 * the chunks of a document: a block has one head and SLICE columns of values, the state's strips
 * in registers, and per chunk
 *
 *   V' = u - w S;   o = q_start S + qk V';   S <- diag(decay) S + k_end^T V'
 *
 * while the next chunk's matrices are on their way. saved keeps the state before each chunk but a
 * document's first, as elements. */
#include "kernels/cuda_kda.h"

#include <vector>

#include "kernels/kda_chunk.cuh"

/* Chunks in shared memory at once: one in use, the others on their way. */
template <typename T, int D>
constexpr int n_stages = sizeof(T) == 4 ? 1 : D == 128 ? 3 : 2;

template <int D>
constexpr int slice_of = D < 32 ? D : 32;

/* The matrices of one chunk. */
template <typename T, int D>
struct scan_stage {
    T w[KDA_CHUNK * stride_of<T>(D)], q_start[KDA_CHUNK * stride_of<T>(D)];
    T k_end[KDA_CHUNK * stride_of<T>(D)];
    T qk[KDA_CHUNK * stride_of<T>(KDA_CHUNK)];
    T u[KDA_CHUNK * stride_of<T>(slice_of<D>)];
    float decay[D];
};

template <typename T, int D>
struct scan_shared {
    scan_stage<T, D> stages[n_stages<T, D>];
    T state[D * stride_of<T>(slice_of<D>)];
    T value[KDA_CHUNK * stride_of<T>(slice_of<D>)]; /* V' */
};

template <typename T, int D>
__device__ __forceinline__ void load_stage(scan_stage<T, D> &to, const kda_scratch<T> &from,
                                           int64_t index, int column)
{
    constexpr int S = stride_of<T>(D), M = stride_of<T>(KDA_CHUNK), SLICE = slice_of<D>;
    int64_t at = index * KDA_CHUNK * D;
    tile_copy_async(to.w, S, from.w + at, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(to.q_start, S, from.q_start + at, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(to.k_end, S, from.k_end + at, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(to.qk, M, from.qk + index * KDA_CHUNK * KDA_CHUNK, KDA_CHUNK, KDA_CHUNK,
                    KDA_CHUNK, KDA_CHUNK);
    tile_copy_async(to.u, stride_of<T>(SLICE), from.u + at + column, D, KDA_CHUNK, SLICE,
                    KDA_CHUNK);
    tile_copy_async(to.decay, D, from.decay + index * D, D, 1, D, 1);
}

template <typename T, int D>
__global__ void __launch_bounds__(KDA_THREADS, 1)
    scan(kda_view view, kda_scratch<T> in, const float *initial_state, float *final_state,
         T *states, T *o)
{
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    constexpr int SLICE = slice_of<D>, S = stride_of<T>(D), V = stride_of<T>(SLICE);
    constexpr int N_TILES = SLICE / 8, N_HALF = SLICE / 16, STAGES = n_stages<T, D>;
    auto *shared = (scan_shared<T, D> *)shared_bytes;
    int column = (int)blockIdx.x % (D / SLICE) * SLICE, pair = (int)blockIdx.x / (D / SLICE);
    int head = pair % view.n_active, doc = pair / view.n_active, warp = warp_id();
    int begin = view.first_chunk[doc], end = view.first_chunk[doc + 1];
    int64_t state_at = kda_state_at(view, doc, head) * D * D + column;
    bool has_strip = warp < D / 16; /* rows 16 warp .. of the state */
    int row = (warp & 3) * 16, half = warp / 4 * (SLICE / 2); /* of V' and o */

    float state[N_TILES][4];
    strip_clear(state);
    if (has_strip) {
        if (initial_state && kda_has_initial(view, doc))
            strip_load(state, initial_state + state_at + warp * 16 * D, D, false);
        strip_store(shared->state + warp * 16 * V, V, state, 16);
    }
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end)
            load_stage(shared->stages[i], in, (int64_t)(begin + i) * view.n_active + head, column);
        copy_async_commit();
    }
    for (int chunk = begin; chunk < end; chunk++) {
        const scan_stage<T, D> &stage = shared->stages[(chunk - begin) % STAGES];
        kda_item item = kda_item_at(view, chunk, head, doc);
        int next = chunk + STAGES - 1;
        if (STAGES > 1) {
            copy_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            __syncthreads();
        }
        if (next < end)
            load_stage(shared->stages[(next - begin) % STAGES], in,
                       (int64_t)next * view.n_active + head, column);
        copy_async_commit();
        if (STAGES == 1) {
            copy_async_wait<0>();
            __syncthreads();
        }

        if (!item.is_first)
            tile_store(states + item.saved * D * D + column, D, shared->state, V, D, SLICE);
        float sum[2][N_HALF][4]; /* w S, then V'; o */
        strip_clear(sum[0]);
        strip_clear(sum[1]);
        const tile<T, false> left[2] = {as_is(stage.w + row * S, S),
                                        as_is(stage.q_start + row * S, S)};
        strips_product<N_HALF, 2>(sum, left, as_is(shared->state + half, V), 0, D);
        float u[N_HALF][4];
        strip_load(u, stage.u + row * V + half, V);
#pragma unroll
        for (int t = 0; t < N_HALF; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[0][t][i] = u[t][i] - sum[0][t][i];
        strip_store(shared->value + row * V + half, V, sum[0], 16);
        __syncthreads();

        if (has_strip) {
            float above = stage.decay[warp * 16 + strip_row()];
            float below = stage.decay[warp * 16 + strip_row() + 8];
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                state[t][0] *= above, state[t][1] *= above;
                state[t][2] *= below, state[t][3] *= below;
            }
            strip_product(state, transposed(stage.k_end + warp * 16, S), as_is(shared->value, V),
                          0, KDA_CHUNK);
            strip_store(shared->state + warp * 16 * V, V, state, 16);
        }
        constexpr int M = stride_of<T>(KDA_CHUNK);
        strip_product(sum[1], as_is(stage.qk + row * M, M), as_is(shared->value + half, V), 0,
                      row + 16);
        int64_t stride = (int64_t)view.n_heads * D;
        strip_store(o + (item.row + row) * stride + (int64_t)item.head * D + column + half, stride,
                    sum[1], item.rows - row, view.is_aligned);
        if (STAGES == 1)
            __syncthreads();
    }
    if (final_state && kda_has_final(view, doc) && has_strip)
        strip_store(final_state + state_at + warp * 16 * D, D, state, 16, false);
}

/* ---- host ---- */

static size_t state_floats(struct device *dev, int32_t d)
{
    return (size_t)d * d / (dev->elem == ELEM_F32 ? 1 : 2);
}

size_t cuda_kda_saved_floats(struct device *dev, const struct kda_shape *shape)
{
    int64_t n = shape->n_tokens;
    size_t n_states = n > 0 ? (size_t)((n - 1) / KDA_CHUNK) : 0; /* kda_chunk.c says why */
    return n_states * shape->n_heads * state_floats(dev, shape->head_dim);
}

int64_t kda_chunks_at_once(const struct kda_shape *shape)
{
    int64_t n_chunks = ceil_div(shape->n_tokens, KDA_CHUNK);
    return n_chunks > GPU_KDA_CHUNKS_MIN ? n_chunks : GPU_KDA_CHUNKS_MIN;
}

kda_view kda_view_of(struct device *dev, const struct kda_shape *shape, int32_t doc,
                     bool is_aligned)
{
    int32_t d = shape->head_dim, end = doc;
    const int32_t *cu = shape->cu_seqlens;
    assert(d == 16 || d == 32 || d == 64 || d == 128);
    assert(cu[shape->n_docs] == shape->n_tokens);
    std::vector<int32_t> first_chunk(1, 0);
    for (int64_t n = 0; end < shape->n_docs; end++) {
        n += ceil_div(cu[end + 1] - cu[end], KDA_CHUNK);
        if (n > kda_chunks_at_once(shape))
            break;
        first_chunk.push_back((int32_t)n);
    }
    std::vector<int32_t> both(cu + doc, cu + end + 1);
    both.insert(both.end(), first_chunk.begin(), first_chunk.end());
    kda_view view = {};
    view.cu_seqlens =
        (const int32_t *)cuda_upload(dev, both.data(), both.size() * sizeof(int32_t));
    view.first_chunk = view.cu_seqlens + first_chunk.size();
    view.n_docs = end - doc;
    view.n_chunks = first_chunk.back();
    view.doc_begin = doc;
    view.n_all_docs = shape->n_docs;
    view.n_heads = shape->n_heads;
    view.scale = shape->scale;
    view.is_aligned = is_aligned;
    view.only_ends = shape->only_ends;
    return view;
}

template <typename T>
static kda_scratch<T> take_scratch(struct device *dev, size_t n_items, size_t d)
{
    kda_scratch<T> s = {};
    size_t n_bytes = n_items * KDA_CHUNK * d * sizeof(T);
    s.w = (T *)cuda_scratch_take(dev, n_bytes);
    s.u = (T *)cuda_scratch_take(dev, n_bytes);
    s.q_start = (T *)cuda_scratch_take(dev, n_bytes);
    s.k_end = (T *)cuda_scratch_take(dev, n_bytes);
    s.qk = (T *)cuda_scratch_take(dev, n_items * KDA_CHUNK * KDA_CHUNK * sizeof(T));
    s.decay = (float *)cuda_scratch_take(dev, n_items * d * sizeof(float));
    return s;
}

template <typename T, int D>
static void launch_scan(struct device *dev, const kda_view &view, const kda_scratch<T> &in,
                        const float *initial_state, float *final_state, T *states, T *o)
{
    constexpr size_t n_bytes = sizeof(scan_shared<T, D>);
    int64_t n_blocks = (int64_t)view.n_docs * view.n_active * (D / slice_of<D>);
    allow_shared(scan<T, D>, n_bytes);
    scan<T, D><<<(unsigned)n_blocks, KDA_THREADS, n_bytes, cuda_stream(dev)>>>(
        view, in, initial_state, final_state, states, o);
}

template <typename T>
static void forward(struct device *dev, kda_view view, const kda_scratch<T> &scratch,
                    const kda_inputs &in, int d, const float *initial_state, float *final_state,
                    T *states, T *o)
{
    int32_t at_once = kda_heads_at_once(view.n_heads);
    for (int32_t head = 0; head < view.n_heads; head += at_once) {
        view.head_begin = head;
        view.n_active = view.n_heads - head < at_once ? view.n_heads - head : at_once;
        if (view.n_chunks)
            kda_prepare_forward(dev, view, in, scratch, d);
        KDA_DISPATCH(d, D, launch_scan<T, D>(dev, view, scratch, initial_state, final_state,
                                             states, o));
    }
}

template <typename T>
static void forward_all(struct device *dev, const struct kda_shape *shape, bool is_aligned,
                        const kda_inputs &in, const float *initial_state, float *final_state,
                        T *states, T *o)
{
    int64_t n_items = kda_chunks_at_once(shape) * kda_heads_at_once(shape->n_heads);
    kda_scratch<T> scratch = take_scratch<T>(dev, (size_t)n_items, (size_t)shape->head_dim);
    for (int32_t doc = 0; doc < shape->n_docs;) {
        kda_view view = kda_view_of(dev, shape, doc, is_aligned);
        forward<T>(dev, view, scratch, in, shape->head_dim, initial_state, final_state, states, o);
        doc += view.n_docs;
    }
}

void cuda_kda_forward(struct device *dev, void *o, float *final_state, float *saved, const void *q,
                      const void *k, const void *v, const float *g, const void *beta,
                      const float *initial_state, const struct kda_shape *shape)
{
    if (shape->n_docs == 0)
        return;
    assert(is_aligned16(saved));
    cuda_scratch_begin(dev);
    bool is_aligned = is_aligned16(q) && is_aligned16(k) && is_aligned16(v) && is_aligned16(g) &&
                      is_aligned16(o);
    kda_inputs in = {q, k, v, beta, g, NULL, NULL, NULL};
    ELEM_DISPATCH(dev, T, forward_all<T>(dev, shape, is_aligned, in, initial_state, final_state,
                                         (T *)saved, (T *)o));
    cuda_check(dev, "kda_forward", "n=%lld documents=%d heads=%d d=%d",
               (long long)shape->n_tokens, shape->n_docs, shape->n_heads, shape->head_dim);
}
