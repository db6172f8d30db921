/* kda_gradients.cu - KDA backward on the GPU, the part that needs no scan: all chunks at once
 *
 * A block has one item, its states before and after with their gradients known. With X the right
 * hand side of (I + A) V' = X: dX = (I + A)^-T dV', d_kk = -beta dX V'^T, d_qk = dO V'^T. Then a
 * pass for each WIDTH channels: products give what reaches q and k by way of the state, the
 * chunk's end and the pairs of each level (kda_chunk.cuh), and the thread that has eight rows of
 * a channel adds them up with their decays. Gradients of log decays are pair terms, plus at the
 * later row and minus at the earlier; dg is their reverse cumulative sum. */
#include "kernels/kda_channel.cuh"

/* dx = inverse^T dV'; it replaces dV'. */
template <typename T, int D>
__device__ __forceinline__ void solve_back(const gradients_block<T, D> &b)
{
    constexpr int S = stride_of<T>(D), M = stride_of<T>(KDA_CHUNK);
    int row = (warp_id() & 3) * 16, column = warp_id() / 4 * (D / 2);
    float sum[D / 16][4];
    strip_clear(sum);
    strip_product(sum, transposed(b.shared->kk + row, M), as_is(b.shared->dx + column, S), row,
                  KDA_CHUNK);
    __syncthreads();
    strip_store(b.shared->dx + row * S + column, S, sum, 16);
    __syncthreads();
}

/* One entry of d_kk or d_qk to its place. */
template <typename T, int D>
__device__ __forceinline__ void put_pair(const gradients_block<T, D> &b, bool of_k, int r, int i,
                                         float x)
{
    bool near = r / 8 == i / 8;
    if (near)
        (of_k ? b.shared->near_kk : b.shared->near_qk)[r * 8 + i % 8] = x;
    store((of_k ? b.shared->kk : b.shared->qk) + r * stride_of<T>(KDA_CHUNK) + i,
          near || i > r ? 0 : x);
}

/* 32 columns from `column` on of d_kk (warps 0 to 3) or d_qk; adds d_kk kk to d_beta[0..1] of the
 * lane's two rows. */
template <typename T, int D>
__device__ __forceinline__ void pair_gradients(const gradients_block<T, D> &b, const float *kk,
                                               int column, float (&d_beta)[2])
{
    constexpr int S = stride_of<T>(D);
    bool of_k = warp_id() < 4;
    int row = (warp_id() & 3) * 16;
    float sum[4][4];
    strip_clear(sum);
    strip_product(sum, as_is((of_k ? b.shared->dx : b.shared->d_o) + row * S, S),
                  transposed(b.shared->value + column * S, S), 0, D);
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            int r = row + strip_row() + n / 2 * 8, i = column + t * 8 + strip_column() + n % 2;
            if (of_k) {
                float x = i < r ? -sum[t][n] : 0;
                d_beta[n / 2] += x * kk[r * KDA_CHUNK + i];
                put_pair(b, true, r, i, b.shared->beta[r] * x);
            } else {
                put_pair(b, false, r, i, i <= r ? b.scale * sum[t][n] : 0);
            }
        }
}

template <typename T, int D>
__device__ __forceinline__ void all_pair_gradients(const gradients_block<T, D> &b, const float *kk)
{
    float d_beta[2] = {0, 0};
    int row = (warp_id() & 3) * 16;
    pair_gradients(b, kk, 0, d_beta);
    if (row >= 32)
        pair_gradients(b, kk, 32, d_beta);
    d_beta[0] = warp_reduce<op_sum, float, 4>(d_beta[0]);
    d_beta[1] = warp_reduce<op_sum, float, 4>(d_beta[1]);
    if (warp_id() < 4 && strip_column() == 0) {
        b.shared->d_beta[0][row + strip_row()] = d_beta[0];
        b.shared->d_beta[0][row + strip_row() + 8] = d_beta[1];
    }
}

/* dv = beta dx, and the part of d_beta that v answers for; a warp takes a row. */
template <typename T, int D>
__device__ __forceinline__ void value_gradients(const gradients_block<T, D> &b, T *dv, const T *v)
{
    for (int r = warp_id(); r < KDA_CHUNK; r += KDA_THREADS / 32) {
        float sum = 0;
        for (int j = lane_id() * 2; j < D && r < b.item.rows; j += 64) {
            float2 dx = load_pair(b.shared->dx + r * stride_of<T>(D) + j);
            float2 of_v = load_two(v + r * b.stride + j, b.is_aligned);
            sum += dx.x * of_v.x + dx.y * of_v.y;
            store_two(dv + r * b.stride + j, b.shared->beta[r] * dx.x, b.shared->beta[r] * dx.y,
                      b.is_aligned);
        }
        sum = warp_sum(sum);
        if (lane_id() == 0)
            b.shared->d_beta[1][r] = sum;
    }
}

/* of_k = dx S^T, of_q = dO S^T; of_state. */
template <typename T, int D>
__device__ __forceinline__ void state_products(const gradients_block<T, D> &b)
{
    constexpr int S = stride_of<T>(D), F = float_stride<D>, WIDTH = width_of<D>;
    const T *state = b.shared->slices, *d_state = state + WIDTH * S;
    bool of_k = warp_id() < 4;
    int row = (warp_id() & 3) * 16;
    float sum[WIDTH / 8][4];
    strip_clear(sum);
    strip_product(sum, as_is((of_k ? b.shared->dx : b.shared->d_o) + row * S, S),
                  transposed(state, S), 0, D);
    strip_store((of_k ? b.shared->of_k : b.shared->of_q) + row * F, F, sum, 16);
    for (int c = warp_id(); c < WIDTH; c += KDA_THREADS / 32) {
        float both = 0;
        for (int j = lane_id(); j < D; j += 32)
            both += load(state + c * S + j) * load(d_state + c * S + j);
        both = warp_sum(both);
        if (lane_id() == 0)
            b.shared->of_state[c] = both;
    }
}

/* of_k = V' dS^T */
template <typename T, int D>
__device__ __forceinline__ void end_products(const gradients_block<T, D> &b)
{
    constexpr int S = stride_of<T>(D), F = float_stride<D>, WIDTH = width_of<D>;
    int row = (warp_id() & 3) * 16, column = warp_id() / 4 * (WIDTH / 2);
    float sum[WIDTH / 16][4];
    strip_clear(sum);
    strip_product(sum, as_is(b.shared->value + row * S, S),
                  transposed(b.shared->slices + (WIDTH + column) * S, S), 0, D);
    strip_store(b.shared->of_k + row * F + column, F, sum, 16);
}

/* Pairs of level N. In rows of later halves: of_k = d_kk k, of_q = d_qk k; in those of earlier
 * ones of_k = d_kk^T k + d_qk^T q; k and q decayed to where the halves meet. */
template <typename T, int D, int N>
__device__ __forceinline__ void level_products(const gradients_block<T, D> &b)
{
    constexpr int WIDTH = width_of<D>, F = float_stride<D>;
    constexpr int M = stride_of<T>(KDA_CHUNK), L = stride_of<T>(WIDTH);
    constexpr int N_TILES = N == 1 ? WIDTH / 8 : WIDTH / 16, K = N == 4 ? 32 : 16;
    int part = warp_id() & 3, column = N == 1 ? 0 : part % 2 * (WIDTH / 2);
    int later, earlier;           /* the first rows of the halves */
    int of_later = 0, of_earlier = 0; /* this warp's strip in them */
    if (N == 1)
        later = earlier = part * 16; /* a strip has both halves, entries elsewhere are 0 */
    else if (N == 2)
        later = part / 2 * 32 + 16, earlier = part / 2 * 32;
    else
        later = 32, earlier = 0, of_later = of_earlier = part / 2 * 16;

    const T *k = b.shared->slices + column, *q = k + KDA_CHUNK * L;
    int corner = later * M + earlier;
    float sum[N_TILES][4];
    strip_clear(sum);
    if (warp_id() < 4) {
        strip_product(sum, transposed(b.shared->kk + corner + of_earlier, M),
                      as_is(k + later * L, L), 0, K);
        strip_product(sum, transposed(b.shared->qk + corner + of_earlier, M),
                      as_is(q + later * L, L), 0, K);
        strip_store(b.shared->of_k + (earlier + of_earlier) * F + column, F, sum, N == 1 ? 8 : 16);
        return;
    }
    for (int of_q = 0; of_q < 2; of_q++) {
        strip_clear(sum);
        strip_product(sum, as_is((of_q ? b.shared->qk : b.shared->kk) + corner + of_later * M, M),
                      as_is(k + earlier * L, L), 0, K);
        float *to = (of_q ? b.shared->of_q : b.shared->of_k) + (later + of_later) * F + column;
        int row = strip_row();
#pragma unroll
        for (int t = 0; t < N_TILES; t++) {
            if (N > 1)
                store_pair(to + row * F + t * 8 + strip_column(), sum[t][0], sum[t][1]);
            store_pair(to + (row + 8) * F + t * 8 + strip_column(), sum[t][2], sum[t][3]);
        }
    }
}

/* Channels first .. first + WIDTH - 1. d_state: of the state after the item. */
template <typename T, int D>
__device__ __forceinline__ void channels_pass(const gradients_block<T, D> &b, const kda_inputs &in,
                                              const kda_gradients &out, const kda_view &view,
                                              const T *d_state, int first, float (&of_beta)[8])
{
    constexpr int WIDTH = width_of<D>, S = stride_of<T>(D);
    bool active = threadIdx.x < KDA_EIGHTS * WIDTH;
    channel c;
    c.e.eight = (int)threadIdx.x / WIDTH, c.e.channel = (int)threadIdx.x % WIDTH;
    kda_load_state<T, D>(b.shared->slices, S, view, in, b.item, first, WIDTH);
    tile_copy_async(b.shared->slices + WIDTH * S, S, d_state + first * D, D, WIDTH, D, WIDTH);
    copy_async_commit();
    if (active) {
        load_channel(b, in, c, first);
        b.shared->totals[threadIdx.x] = kda_eight_total(c.e);
    }
    copy_async_wait<0>();
    __syncthreads();
    state_products(b);
    __syncthreads();
    if (active)
        add_state(b, c, of_beta);
    __syncthreads();
    end_products(b);
    __syncthreads();
    if (active) {
        b.shared->ends[threadIdx.x] = add_end(b, c);
        write_level(b, c, 1);
    }
    __syncthreads();
    level_products<T, D, 1>(b);
    __syncthreads();
    if (active) {
        add_level(b, c, 1);
        write_level(b, c, 2);
    }
    __syncthreads();
    level_products<T, D, 2>(b);
    __syncthreads();
    if (active) {
        add_level(b, c, 2);
        write_level(b, c, 4);
    }
    __syncthreads();
    level_products<T, D, 4>(b);
    __syncthreads();
    if (active) {
        add_level(b, c, 4);
        add_near(b, c);
        b.shared->sums[threadIdx.x] = sum_back(c);
    }
    __syncthreads();
    if (active)
        store_channel(b, out, c, first, later_sum(b, c));
    __syncthreads();
}

template <typename T, int D>
__global__ void __launch_bounds__(KDA_THREADS, sizeof(T) == 2 ? 2 : 1)
    gradients(kda_view view, kda_inputs in, kda_scratch<T> scratch, kda_gradients out)
{
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    constexpr int S = stride_of<T>(D), M = stride_of<T>(KDA_CHUNK), WIDTH = width_of<D>;
    int64_t index = blockIdx.x, square = KDA_CHUNK * KDA_CHUNK, size = (int64_t)KDA_CHUNK * D;
    gradients_block<T, D> b;
    b.shared = (gradients_shared<T, D> *)shared_bytes;
    b.item = kda_find_item(view, index);
    b.stride = (int64_t)view.n_heads * D;
    b.at = (b.item.row * view.n_heads + b.item.head) * D;
    b.scale = view.scale;
    b.is_aligned = view.is_aligned;

    tile_copy_async(b.shared->d_o, S, (const T *)in.d_o + b.at, b.stride, KDA_CHUNK, D,
                    b.item.rows, b.is_aligned);
    tile_copy_async(b.shared->value, S, scratch.u + index * size, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(b.shared->dx, S, scratch.y + index * size, D, KDA_CHUNK, D, KDA_CHUNK);
    tile_copy_async(b.shared->kk, M, scratch.inverse + index * square, KDA_CHUNK, KDA_CHUNK,
                    KDA_CHUNK, KDA_CHUNK);
    copy_async_commit();
    int64_t beta_at = b.item.row * view.n_heads + b.item.head;
    bool exists = (int)threadIdx.x < b.item.rows;
    if (threadIdx.x < KDA_CHUNK)
        b.shared->beta[threadIdx.x] =
            exists ? load((const T *)in.beta + beta_at + threadIdx.x * view.n_heads) : 0;
    copy_async_wait<0>();
    __syncthreads();
    solve_back(b);
    value_gradients(b, (T *)out.dv + b.at, (const T *)in.v + b.at);
    all_pair_gradients(b, scratch.kk + index * square);

    float of_beta[8] = {};
    for (int first = 0; first < D; first += WIDTH)
        channels_pass(b, in, out, view, scratch.d_state + index * D * D, first, of_beta);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float sum = warp_reduce<op_sum, float, WIDTH>(of_beta[r]);
        int eight = (int)threadIdx.x / WIDTH;
        if (eight < KDA_EIGHTS && threadIdx.x % WIDTH == 0)
            b.shared->d_beta[2][eight * 8 + r] = sum;
    }
    __syncthreads();
    if (exists) {
        int r = (int)threadIdx.x;
        store((T *)out.dbeta + beta_at + (int64_t)r * view.n_heads,
              b.shared->d_beta[0][r] + b.shared->d_beta[1][r] - b.shared->d_beta[2][r]);
    }
}

template <typename T, int D>
static void launch(struct device *dev, const kda_view &view, const kda_inputs &in,
                   const kda_scratch<T> &scratch, const kda_gradients &out)
{
    constexpr size_t n_bytes = sizeof(gradients_shared<T, D>);
    int64_t n_items = (int64_t)view.n_chunks * view.n_active;
    allow_shared(gradients<T, D>, n_bytes);
    gradients<T, D>
        <<<(unsigned)n_items, KDA_THREADS, n_bytes, cuda_stream(dev)>>>(view, in, scratch, out);
}

template <typename T>
void kda_gradients_launch(struct device *dev, const kda_view &view, const kda_inputs &in,
                          const kda_scratch<T> &scratch, const kda_gradients &out, int d)
{
    KDA_DISPATCH(d, D, launch<T, D>(dev, view, in, scratch, out));
}

template void kda_gradients_launch(struct device *, const kda_view &, const kda_inputs &,
                                   const kda_scratch<float> &, const kda_gradients &, int);
template void kda_gradients_launch(struct device *, const kda_view &, const kda_inputs &,
                                   const kda_scratch<bf16> &, const kda_gradients &, int);
