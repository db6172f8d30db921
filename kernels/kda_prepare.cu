/* kda_prepare.cu - KDA on the GPU, the part that needs no state: all chunks at once
 *
 * A block has one item: the products kk and qk of its rows, level by level; the inverse of I + A,
 * A = beta kk, in float; and what the scan over chunks reads, w, u, q_start, k_end (kda_chunk.cuh).
 * For the backward, with the chunk's state S known, the values V' = (I + A)^-1 beta (v -
 * (k from_start) S) take the place of u, and qk^T dO that of qk. */
#include "kernels/kda_chunk.cuh"
#include "kernels/kda_invert.cuh"

/* g, before there is kk, and later the state lie over kk and inverse; the state may reach beyond
 * them. */
template <typename T, int D>
struct prepare_shared {
    T left[KDA_CHUNK * stride_of<T>(D)], right[KDA_CHUNK * stride_of<T>(D)];
    T qk[KDA_CHUNK * stride_of<T>(KDA_CHUNK)], solve[KDA_CHUNK * stride_of<T>(KDA_CHUNK)];
    float totals[KDA_EIGHTS * D];
    float beta[KDA_CHUNK];
    float kk[KDA_CHUNK * KDA_MATRIX], inverse[KDA_CHUNK * KDA_MATRIX];
};

template <typename T, int D, bool BACKWARD>
constexpr size_t prepare_shared_bytes()
{
    constexpr int  rows = D > KDA_CHUNK ? D : KDA_CHUNK;
    constexpr size_t state = (size_t)rows * stride_of<T>(D) * sizeof(T);
    constexpr size_t matrices = 2 * KDA_CHUNK * KDA_MATRIX * sizeof(float);
    constexpr size_t all = sizeof(prepare_shared<T, D>);
    return BACKWARD && state > matrices ? all + state - matrices : all;
}

/* What a block works on. */
template <typename T, int D>
struct prepare_block {
    prepare_shared<T, D> *shared;
    kda_item item;
    int64_t  stride; /* from token to token in q, k, v, g, dO */
};

/* Eight rows of two neighbouring channels. */
template <typename T>
struct channel_pair {
    kda_eight  e[2];
    pair_of<T> q[8], k[8];
};

/* Those of this thread: i, i + KDA_THREADS, ... of KDA_EIGHTS * D / 2. */
template <int D>
constexpr int n_pairs = (KDA_EIGHTS * D / 2 + KDA_THREADS - 1) / KDA_THREADS;

template <int D>
__device__ __forceinline__ bool has_pair(int i)
{
    return (int)threadIdx.x + i * KDA_THREADS < KDA_EIGHTS * D / 2;
}

template <typename T>
__device__ __forceinline__ pair_of<T> load_raw(const T *p)
{
    return *(const pair_of<T> *)p;
}

/* From left = k, right = q and kk = g as they are. */
template <typename T, int D>
__device__ __forceinline__ void load_pairs(const prepare_block<T, D> &b,
                                           channel_pair<T> (&pairs)[n_pairs<D>])
{
#pragma unroll
    for (int i = 0; i < n_pairs<D>; i++) {
        channel_pair<T> &p = pairs[i];
        int at = (int)threadIdx.x + i * KDA_THREADS;
        int eight = at / (D / 2), channel = at % (D / 2) * 2;
        p.e[0].eight = p.e[1].eight = eight;
        p.e[0].channel = channel, p.e[1].channel = channel + 1;
        if (!has_pair<D>(i))
            continue;
#pragma unroll
        for (int r = 0; r < 8; r++) {
            int row = eight * 8 + r;
            float2 g = load_pair(b.shared->kk + row * D + channel);
            p.e[0].step[r] = kda_exp<T>(g.x), p.e[1].step[r] = kda_exp<T>(g.y);
            p.k[r] = load_raw(b.shared->left + row * stride_of<T>(D) + channel);
            p.q[r] = load_raw(b.shared->right + row * stride_of<T>(D) + channel);
        }
        store_pair(b.shared->totals + eight * D + channel, kda_eight_total(p.e[0]),
                   kda_eight_total(p.e[1]));
    }
}

/* left = k and right = q, times their factors at level n. */
template <typename T, int D>
__device__ __forceinline__ void write_level(const prepare_block<T, D> &b,
                                            const channel_pair<T> (&pairs)[n_pairs<D>], int n)
{
#pragma unroll
    for (int i = 0; i < n_pairs<D>; i++) {
        if (!has_pair<D>(i))
            continue;
        const channel_pair<T> &p = pairs[i];
        float factor[2][8];
        kda_level(factor[0], p.e[0], n, b.shared->totals, D);
        kda_level(factor[1], p.e[1], n, b.shared->totals, D);
        int at = p.e[0].eight * 8 * stride_of<T>(D) + p.e[0].channel;
#pragma unroll
        for (int r = 0; r < 8; r++, at += stride_of<T>(D)) {
            float2 k = p.k[r].floats(), q = p.q[r].floats();
            store_pair(b.shared->left + at, factor[0][r] * k.x, factor[1][r] * k.y);
            store_pair(b.shared->right + at, factor[0][r] * q.x, factor[1][r] * q.y);
        }
    }
}

/* left = k from_start; q_start and k_end go to global memory, decay too. */
template <typename T, int D>
__device__ __forceinline__ void write_ends(const prepare_block<T, D> &b,
                                           const channel_pair<T> (&pairs)[n_pairs<D>],
                                           float scale, T *q_start, T *k_end, float *decay)
{
#pragma unroll
    for (int i = 0; i < n_pairs<D>; i++) {
        if (!has_pair<D>(i))
            continue;
        const channel_pair<T> &p = pairs[i];
        float start[2][8], end[2][8];
        for (int c = 0; c < 2; c++) {
            kda_from_start(start[c], p.e[c], KDA_EIGHTS, b.shared->totals, D);
            kda_to_end(end[c], p.e[c], KDA_EIGHTS, b.shared->totals, D);
        }
        int row = p.e[0].eight * 8, channel = p.e[0].channel;
#pragma unroll
        for (int r = 0; r < 8; r++, row++) {
            float2 k = p.k[r].floats(), q = p.q[r].floats();
            float2 from_start = make_float2(start[0][r], start[1][r]);
            store_pair(b.shared->left + row * stride_of<T>(D) + channel, k.x * from_start.x,
                       k.y * from_start.y);
            store_pair(q_start + row * D + channel, scale * q.x * from_start.x,
                       scale * q.y * from_start.y);
            store_pair(k_end + row * D + channel, k.x * end[0][r], k.y * end[1][r]);
        }
        if (row == KDA_CHUNK)
            store_pair(decay + channel, start[0][7], start[1][7]);
    }
}

/* kk and qk of the pairs that meet at level n: left and right hold k and q of that level. */
template <typename T, int D, int N>
__device__ __forceinline__ void level_products(const prepare_block<T, D> &b, float scale)
{
    constexpr int N_TILES = N == 4 ? 2 : 1, S = stride_of<T>(D);
    int warp = warp_id(), part = warp & 3;
    int row, column; /* of this warp's strip; at level 1 only its last eight rows count */
    if (N == 1)
        row = column = part * 16;
    else if (N == 2)
        row = part / 2 * 32 + 16, column = part / 2 * 32 + part % 2 * 8;
    else
        row = 32 + part / 2 * 16, column = part % 2 * 16;

    float sum[N_TILES][4];
    strip_clear(sum);
    bool of_k = warp < 4;
    strip_product(sum, as_is((of_k ? b.shared->left : b.shared->right) + row * S, S),
                  transposed(b.shared->left + column * S, S), 0, D);
#pragma unroll
    for (int t = 0; t < N_TILES; t++) {
        int r = row + strip_row(), c = column + t * 8 + strip_column();
        if (of_k) {
            if (N > 1)
                store_pair(b.shared->kk + r * KDA_MATRIX + c, sum[t][0], sum[t][1]);
            store_pair(b.shared->kk + (r + 8) * KDA_MATRIX + c, sum[t][2], sum[t][3]);
        } else {
            constexpr int M = stride_of<T>(KDA_CHUNK);
            if (N > 1)
                store_pair(b.shared->qk + r * M + c, scale * sum[t][0], scale * sum[t][1]);
            store_pair(b.shared->qk + (r + 8) * M + c, scale * sum[t][2], scale * sum[t][3]);
        }
    }
}

/* Sums every value over the lanes; lane i is left with the sums 2 i and 2 i + 1 in value[0..1]. */
template <int HALF = 32>
__device__ __forceinline__ void fold(float (&value)[64])
{
    bool upper = lane_id() & HALF / 2;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float mine = upper ? value[i + HALF] : value[i];
        float other = upper ? value[i] : value[i + HALF];
        value[i] = mine + __shfl_xor_sync(0xffffffffu, other, HALF / 2);
    }
    if constexpr (HALF > 2)
        fold<HALF / 2>(value);
}

/* Pairs inside eight rows, a warp to each eight, lanes along channels: the decayed key of i walks
 * down the rows below it. Of 64 sums, qk(r, i) at r (r + 1) / 2 + i and then kk(r, i) at 36 +
 * r (r - 1) / 2 + i, a lane gets two. Reads left = k, right = q and kk = g as they are. */
template <typename T, int D>
__device__ __forceinline__ float2 near_products(const prepare_block<T, D> &b)
{
    constexpr int S = stride_of<T>(D);
    int first = warp_id() * 8;
    float value[64];
#pragma unroll
    for (int i = 0; i < 64; i++)
        value[i] = 0;
#pragma unroll 1
    for (int channel = lane_id(); channel < D; channel += 32) {
        float k[8], q[8], step[8];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            k[r] = load(b.shared->left + (first + r) * S + channel);
            q[r] = load(b.shared->right + (first + r) * S + channel);
            step[r] = kda_exp<T>(b.shared->kk[(first + r) * D + channel]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float walker = k[i];
            value[i * (i + 1) / 2 + i] += q[i] * walker;
#pragma unroll
            for (int r = i + 1; r < 8; r++) {
                walker *= step[r];
                value[r * (r + 1) / 2 + i] += q[r] * walker;
                value[36 + r * (r - 1) / 2 + i] += k[r] * walker;
            }
        }
    }
    fold(value);
    return make_float2(value[0], value[1]);
}

template <typename T, int D>
__device__ __forceinline__ void put_near(const prepare_block<T, D> &b, float2 values, float scale)
{
    int first = warp_id() * 8;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        float x = part ? values.y : values.x;
        int at = lane_id() * 2 + part, r = 0;
        if (at < 36) {
            while ((r + 1) * (r + 2) / 2 <= at)
                r++;
            T *row = b.shared->qk + (first + r) * stride_of<T>(KDA_CHUNK) + first;
            store(row + at - r * (r + 1) / 2, scale * x);
        } else {
            at -= 36;
            while ((r + 1) * r / 2 <= at)
                r++;
            b.shared->kk[(first + r) * KDA_MATRIX + first + at - r * (r - 1) / 2] = x;
        }
    }
}

/* solve = inverse times beta of its columns, zero above the diagonal, as elements. */
template <typename T, int D>
__device__ __forceinline__ void write_solve(const prepare_block<T, D> &b, T *inverse, float *kk)
{
    for (int i = (int)threadIdx.x * 2; i < KDA_CHUNK * KDA_CHUNK; i += KDA_THREADS * 2) {
        int r = i / KDA_CHUNK, c = i % KDA_CHUNK;
        float2 x = load_pair(b.shared->inverse + r * KDA_MATRIX + c);
        x.x = c <= r ? x.x : 0, x.y = c < r ? x.y : 0;
        store_pair(b.shared->solve + r * stride_of<T>(KDA_CHUNK) + c, x.x * b.shared->beta[c],
                   x.y * b.shared->beta[c + 1]);
        if (inverse) {
            float2 pair = load_pair(b.shared->kk + r * KDA_MATRIX + c);
            store_pair(inverse + i, x.x, x.y);
            store_pair(kk + i, c < r ? pair.x : 0, c + 1 < r ? pair.y : 0);
        }
    }
}

/* Strip `warp % 4` of solve times x, to global memory. */
template <typename T, int D>
__device__ __forceinline__ void solve_product(const prepare_block<T, D> &b, T *to, const T *x)
{
    constexpr int S = stride_of<T>(KDA_CHUNK);
    int row = (warp_id() & 3) * 16;
    float sum[D / 8][4];
    strip_clear(sum);
    strip_product(sum, as_is(b.shared->solve + row * S, S), as_is(x, stride_of<T>(D)), 0, row + 16);
    strip_store(to + row * D, D, sum, 16);
}

/* right = v - left S: what the state does not answer. */
template <typename T, int D>
__device__ __forceinline__ void write_residual(const prepare_block<T, D> &b, const T *state)
{
    constexpr int S = stride_of<T>(D), N_TILES = D / 16;
    int row = (warp_id() & 3) * 16, column = warp_id() / 4 * (D / 2);
    float sum[N_TILES][4];
    strip_clear(sum);
    strip_product(sum, as_is(b.shared->left + row * S, S), as_is(state + column, S), 0, D);
    T *at = b.shared->right + (row + strip_row()) * S + column + strip_column();
#pragma unroll
    for (int t = 0; t < N_TILES; t++, at += 8) {
        float2 above = load_pair(at), below = load_pair(at + 8 * S);
        store_pair(at, above.x - sum[t][0], above.y - sum[t][1]);
        store_pair(at + 8 * S, below.x - sum[t][2], below.y - sum[t][3]);
    }
}

template <typename T, int D>
__device__ __forceinline__ void all_pairs(const prepare_block<T, D> &b,
                                          const channel_pair<T> (&pairs)[n_pairs<D>], float scale)
{
    write_level(b, pairs, 1);
    __syncthreads();
    level_products<T, D, 1>(b, scale);
    __syncthreads();
    write_level(b, pairs, 2);
    __syncthreads();
    level_products<T, D, 2>(b, scale);
    __syncthreads();
    write_level(b, pairs, 4);
    __syncthreads();
    level_products<T, D, 4>(b, scale);
    __syncthreads();
}

/* Zero in qk above the diagonal, which no product writes. */
template <typename T, int D>
__device__ __forceinline__ void clear_qk(const prepare_block<T, D> &b)
{
    for (int i = (int)threadIdx.x; i < KDA_CHUNK * KDA_CHUNK; i += KDA_THREADS) {
        int r = i / KDA_CHUNK, c = i % KDA_CHUNK;
        if (c > r)
            store(b.shared->qk + r * stride_of<T>(KDA_CHUNK) + c, 0);
    }
}

template <typename T, int D, bool BACKWARD>
__global__ void __launch_bounds__(KDA_THREADS, sizeof(T) == 2 ? 2 : 1)
    prepare(kda_view view, kda_inputs in, kda_scratch<T> out)
{
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    constexpr int S = stride_of<T>(D), M = stride_of<T>(KDA_CHUNK);
    int64_t index = blockIdx.x, size = (int64_t)KDA_CHUNK * D, square = KDA_CHUNK * KDA_CHUNK;
    prepare_block<T, D> b;
    b.shared = (prepare_shared<T, D> *)shared_bytes;
    b.item = kda_find_item(view, index);
    b.stride = (int64_t)view.n_heads * D;
    int64_t at = (b.item.row * view.n_heads + b.item.head) * D;

    if (threadIdx.x < KDA_CHUNK) {
        int64_t from = (b.item.row + threadIdx.x) * view.n_heads + b.item.head;
        bool exists = (int)threadIdx.x < b.item.rows;
        b.shared->beta[threadIdx.x] = exists ? load((const T *)in.beta + from) : 0;
    }
    tile_copy_async(b.shared->left, S, (const T *)in.k + at, b.stride, KDA_CHUNK, D, b.item.rows,
                    view.is_aligned);
    tile_copy_async(b.shared->right, S, (const T *)in.q + at, b.stride, KDA_CHUNK, D, b.item.rows,
                    view.is_aligned);
    tile_copy_async(b.shared->kk, D, in.g + at, b.stride, KDA_CHUNK, D, b.item.rows,
                    view.is_aligned);
    copy_async_commit();
    clear_qk(b);
    copy_async_wait<0>();
    __syncthreads();
    float2 near = near_products(b);
    channel_pair<T> pairs[n_pairs<D>];
    load_pairs(b, pairs);
    __syncthreads();
    put_near(b, near, view.scale);
    all_pairs(b, pairs, view.scale);

    T *state = (T *)b.shared->kk;
    tile_copy_async(b.shared->right, S, (const T *)in.v + at, b.stride, KDA_CHUNK, D, b.item.rows,
                    view.is_aligned);
    copy_async_commit();
    write_ends(b, pairs, view.scale, out.q_start + index * size, out.k_end + index * size,
               out.decay + index * D);
    kda_invert<T>(b.shared->inverse, b.shared->kk, b.shared->beta);
    write_solve(b, BACKWARD ? out.inverse + index * square : NULL,
                BACKWARD ? out.kk + index * square : NULL);
    if (!BACKWARD)
        tile_store(out.qk + index * square, KDA_CHUNK, b.shared->qk, M, KDA_CHUNK, KDA_CHUNK);
    if (BACKWARD) {
        __syncthreads(); /* kk and inverse are no longer needed */
        kda_load_state<T, D>(state, S, view, in, b.item, 0, D);
        copy_async_commit();
    }
    copy_async_wait<0>();
    __syncthreads();
    if (BACKWARD) {
        write_residual(b, state);
        __syncthreads();
        tile_copy_async(state, S, (const T *)in.d_o + at, b.stride, KDA_CHUNK, D, b.item.rows,
                        view.is_aligned);
        copy_async_commit();
    }
    bool of_w = warp_id() < 4;
    solve_product<T, D>(b, (of_w ? out.w : out.u) + index * size,
                        of_w ? b.shared->left : b.shared->right);
    if (BACKWARD) {
        copy_async_wait<0>();
        __syncthreads();
        constexpr int N_TILES = D / 16;
        int row = (warp_id() & 3) * 16, column = warp_id() / 4 * (D / 2);
        float sum[N_TILES][4];
        strip_clear(sum);
        strip_product(sum, transposed(b.shared->qk + row, M), as_is(state + column, S), row,
                      KDA_CHUNK);
        strip_store(out.y + index * size + row * D + column, D, sum, 16);
    }
}

template <typename T, int D, bool BACKWARD>
static void launch(struct device *dev, const kda_view &view, const kda_inputs &in,
                   const kda_scratch<T> &out)
{
    constexpr size_t n_bytes = prepare_shared_bytes<T, D, BACKWARD>();
    int64_t n_items = (int64_t)view.n_chunks * view.n_active;
    allow_shared(prepare<T, D, BACKWARD>, n_bytes);
    prepare<T, D, BACKWARD>
        <<<(unsigned)n_items, KDA_THREADS, n_bytes, cuda_stream(dev)>>>(view, in, out);
}

template <typename T>
void kda_prepare_forward(struct device *dev, const kda_view &view, const kda_inputs &in,
                         const kda_scratch<T> &out, int d)
{
    KDA_DISPATCH(d, D, launch<T, D, false>(dev, view, in, out));
}

template <typename T>
void kda_prepare_backward(struct device *dev, const kda_view &view, const kda_inputs &in,
                          const kda_scratch<T> &out, int d)
{
    KDA_DISPATCH(d, D, launch<T, D, true>(dev, view, in, out));
}

template void kda_prepare_forward(struct device *, const kda_view &, const kda_inputs &,
                                  const kda_scratch<float> &, int);
template void kda_prepare_forward(struct device *, const kda_view &, const kda_inputs &,
                                  const kda_scratch<bf16> &, int);
template void kda_prepare_backward(struct device *, const kda_view &, const kda_inputs &,
                                   const kda_scratch<float> &, int);
template void kda_prepare_backward(struct device *, const kda_view &, const kda_inputs &,
                                   const kda_scratch<bf16> &, int);
