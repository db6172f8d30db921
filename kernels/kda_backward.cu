/* kda_backward.cu - Kimi Delta Attention on the GPU, backward (kda_backward.c is the definition)
 *
 * Three passes: all chunks prepared again, now with their states (kda_prepare.cu); the scan here,
 * which takes dS, the gradient of the state, from the last chunk of a document to its first,
 *
 *   dV' = qk^T dO + k_end dS;   dS <- diag(decay) dS + q_start^T dO - w^T dV'
 *
 * a block to one head and SLICE columns of values; and then all gradients, all chunks at once
 * (kda_gradients.cu). */
#include "kernels/cuda_kda.h"

#include "kernels/kda_chunk.cuh"

/* Chunks in shared memory at once: one in use, the others on their way. */
template <typename T, int D>
constexpr int n_stages = sizeof(T) == 4 ? 1 : D == 128 ? 3 : 2;

template <int D>
constexpr int slice_of = D < 32 ? D : 32;

/* The matrices of one chunk. */
template <typename T, int D>
struct back_stage {
    T w[KDA_CHUNK * stride_of<T>(D)], q_start[KDA_CHUNK * stride_of<T>(D)];
    T k_end[KDA_CHUNK * stride_of<T>(D)];
    T y[KDA_CHUNK * stride_of<T>(slice_of<D>)];
    T d_o[KDA_CHUNK * stride_of<T>(slice_of<D>)];
    float decay[D];
};

template <typename T, int D>
struct back_shared {
    back_stage<T, D> stages[n_stages<T, D>];
    T d_state[D * stride_of<T>(slice_of<D>)];
    T d_value[KDA_CHUNK * stride_of<T>(slice_of<D>)]; /* dV' */
};

template <typename T, int D>
__device__ __forceinline__ void load_stage(back_stage<T, D> &to, const kda_scratch<T> &from,
                                           const T *d_o, const kda_view &view, int chunk, int head,
                                           int doc, int column)
{
    constexpr int S = stride_of<T>(D), SLICE = slice_of<D>;
    kda_item item = kda_item_at(view, chunk, head, doc);
    int64_t index = (int64_t)chunk * view.n_active + head, at = index * KDA_CHUNK * D;
    tile_copy_async(to.w, S, from.w + at, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(to.q_start, S, from.q_start + at, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(to.k_end, S, from.k_end + at, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(to.y, stride_of<T>(SLICE), from.y + at + column, D, KDA_CHUNK, SLICE,
                    KDA_CHUNK);
    tile_copy_async(to.d_o, stride_of<T>(SLICE),
                    d_o + (item.row * view.n_heads + item.head) * D + column,
                    (int64_t)view.n_heads * D, KDA_CHUNK, SLICE, item.rows, view.is_aligned);
    tile_copy_async(to.decay, D, from.decay + index * D, D, 1, D, 1);
}

template <typename T, int D>
__global__ void __launch_bounds__(KDA_THREADS, 1)
    scan_back(kda_view view, kda_scratch<T> io, const T *d_o, const float *d_final_state,
              float *d_initial_state)
{
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    constexpr int SLICE = slice_of<D>, S = stride_of<T>(D), V = stride_of<T>(SLICE);
    constexpr int N_TILES = SLICE / 8, N_HALF = SLICE / 16, STAGES = n_stages<T, D>;
    auto *shared = (back_shared<T, D> *)shared_bytes;
    int column = (int)blockIdx.x % (D / SLICE) * SLICE, pair = (int)blockIdx.x / (D / SLICE);
    int head = pair % view.n_active, doc = pair / view.n_active, warp = warp_id();
    int begin = view.first_chunk[doc], end = view.first_chunk[doc + 1];
    int64_t state_at = kda_state_at(view, doc, head) * D * D + column;
    bool has_strip = warp < D / 16; /* rows 16 warp .. of dS */
    int row = (warp & 3) * 16, half = warp / 4 * (SLICE / 2); /* of dV' */

    float d_state[N_TILES][4];
    strip_clear(d_state);
    if (has_strip) {
        if (d_final_state && kda_has_final(view, doc))
            strip_load(d_state, d_final_state + state_at + warp * 16 * D, D, false);
        strip_store(shared->d_state + warp * 16 * V, V, d_state, 16);
    }
    for (int i = 0; i < STAGES - 1; i++) {
        if (end - 1 - i >= begin)
            load_stage(shared->stages[i], io, d_o, view, end - 1 - i, head, doc, column);
        copy_async_commit();
    }
    for (int chunk = end - 1; chunk >= begin; chunk--) {
        const back_stage<T, D> &stage = shared->stages[(end - 1 - chunk) % STAGES];
        int next = chunk - (STAGES - 1);
        int64_t index = (int64_t)chunk * view.n_active + head;
        if (STAGES > 1) {
            copy_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            __syncthreads();
        }
        if (next >= begin)
            load_stage(shared->stages[(end - 1 - next) % STAGES], io, d_o, view, next, head, doc,
                       column);
        copy_async_commit();
        if (STAGES == 1) {
            copy_async_wait<0>();
            __syncthreads();
        }

        tile_store(io.d_state + index * D * D + column, D, shared->d_state, V, D, SLICE);
        float d_value[N_HALF][4];
        strip_load(d_value, stage.y + row * V + half, V);
        strip_product(d_value, as_is(stage.k_end + row * S, S), as_is(shared->d_state + half, V),
                      0, D);
        strip_store(shared->d_value + row * V + half, V, d_value, 16);
        strip_store(io.y + index * KDA_CHUNK * D + row * D + column + half, D, d_value, 16);
        if (has_strip) {
            float above = stage.decay[warp * 16 + strip_row()];
            float below = stage.decay[warp * 16 + strip_row() + 8];
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                d_state[t][0] *= above, d_state[t][1] *= above;
                d_state[t][2] *= below, d_state[t][3] *= below;
            }
            strip_product(d_state, transposed(stage.q_start + warp * 16, S), as_is(stage.d_o, V),
                          0, KDA_CHUNK);
        }
        __syncthreads();

        if (has_strip) {
            float taken[N_TILES][4];
            strip_clear(taken);
            strip_product(taken, transposed(stage.w + warp * 16, S), as_is(shared->d_value, V), 0,
                          KDA_CHUNK);
#pragma unroll
            for (int t = 0; t < N_TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    d_state[t][i] -= taken[t][i];
            strip_store(shared->d_state + warp * 16 * V, V, d_state, 16);
        }
        if (STAGES == 1)
            __syncthreads();
    }
    if (d_initial_state && kda_has_initial(view, doc) && has_strip)
        strip_store(d_initial_state + state_at + warp * 16 * D, D, d_state, 16, false);
}

/* ---- host ---- */

template <typename T>
static kda_scratch<T> take_scratch(struct device *dev, size_t n_items, size_t d)
{
    kda_scratch<T> s = {};
    size_t n_bytes = n_items * KDA_CHUNK * d * sizeof(T), square = KDA_CHUNK * KDA_CHUNK;
    s.w = (T *)cuda_scratch_take(dev, n_bytes);
    s.u = (T *)cuda_scratch_take(dev, n_bytes);
    s.q_start = (T *)cuda_scratch_take(dev, n_bytes);
    s.k_end = (T *)cuda_scratch_take(dev, n_bytes);
    s.y = (T *)cuda_scratch_take(dev, n_bytes);
    s.decay = (float *)cuda_scratch_take(dev, n_items * d * sizeof(float));
    s.inverse = (T *)cuda_scratch_take(dev, n_items * square * sizeof(T));
    s.kk = (float *)cuda_scratch_take(dev, n_items * square * sizeof(float));
    s.d_state = (T *)cuda_scratch_take(dev, n_items * d * d * sizeof(T));
    return s;
}

template <typename T, int D>
static void launch_scan(struct device *dev, const kda_view &view, const kda_scratch<T> &scratch,
                        const T *d_o, const float *d_final_state, float *d_initial_state)
{
    constexpr size_t n_bytes = sizeof(back_shared<T, D>);
    int64_t n_blocks = (int64_t)view.n_docs * view.n_active * (D / slice_of<D>);
    allow_shared(scan_back<T, D>, n_bytes);
    scan_back<T, D><<<(unsigned)n_blocks, KDA_THREADS, n_bytes, cuda_stream(dev)>>>(
        view, scratch, d_o, d_final_state, d_initial_state);
}

template <typename T>
static void backward(struct device *dev, kda_view view, const kda_scratch<T> &scratch,
                     const kda_inputs &in, const kda_gradients &out, int d,
                     const float *d_final_state, float *d_initial_state)
{
    int32_t at_once = kda_heads_at_once(view.n_heads);
    for (int32_t head = 0; head < view.n_heads; head += at_once) {
        view.head_begin = head;
        view.n_active = view.n_heads - head < at_once ? view.n_heads - head : at_once;
        if (view.n_chunks)
            kda_prepare_backward(dev, view, in, scratch, d);
        KDA_DISPATCH(d, D, launch_scan<T, D>(dev, view, scratch, (const T *)in.d_o, d_final_state,
                                             d_initial_state));
        if (view.n_chunks)
            kda_gradients_launch(dev, view, in, scratch, out, d);
    }
}

template <typename T>
static void backward_all(struct device *dev, const struct kda_shape *shape, bool is_aligned,
                         const kda_inputs &in, const kda_gradients &out,
                         const float *d_final_state, float *d_initial_state)
{
    int64_t n_items = kda_chunks_at_once(shape) * kda_heads_at_once(shape->n_heads);
    kda_scratch<T> scratch = take_scratch<T>(dev, (size_t)n_items, (size_t)shape->head_dim);
    for (int32_t doc = 0; doc < shape->n_docs;) {
        kda_view view = kda_view_of(dev, shape, doc, is_aligned);
        backward<T>(dev, view, scratch, in, out, shape->head_dim, d_final_state, d_initial_state);
        doc += view.n_docs;
    }
}

void cuda_kda_backward(struct device *dev, void *dq, void *dk, void *dv, float *dg, void *dbeta,
                       float *d_initial_state, const void *d_o, const float *d_final_state,
                       const void *q, const void *k, const void *v, const float *g,
                       const void *beta, const float *initial_state, const float *saved,
                       const struct kda_shape *shape)
{
    if (shape->n_docs == 0)
        return;
    assert(is_aligned16(saved));
    cuda_scratch_begin(dev);
    bool is_aligned = is_aligned16(q) && is_aligned16(k) && is_aligned16(v) && is_aligned16(g) &&
                      is_aligned16(d_o) && is_aligned16(dv);
    kda_inputs in = {q, k, v, beta, g, d_o, saved, initial_state};
    kda_gradients out = {dq, dk, dv, dbeta, dg};
    ELEM_DISPATCH(dev, T, backward_all<T>(dev, shape, is_aligned, in, out, d_final_state,
                                          d_initial_state));
    cuda_check(dev, "kda_backward", "n=%lld documents=%d heads=%d d=%d",
               (long long)shape->n_tokens, shape->n_docs, shape->n_heads, shape->head_dim);
}
