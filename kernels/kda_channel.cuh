/* kda_channel.cuh - KDA backward on the GPU: what one thread adds up for eight rows of a channel
 *
 * The products of kda_gradients.cu leave in shared memory what reaches q and k by one way; the
 * thread multiplies it by the decays on that way and adds it to dq, dk and db, the gradient of
 * the log decays from the chunk's start on. */
#ifndef KERNELS_KDA_CHANNEL_CUH
#define KERNELS_KDA_CHANNEL_CUH

#include "kernels/kda_chunk.cuh"

/* Channels a pass, and the stride of (64, WIDTH) float matrices. */
template <int D>
constexpr int width_of = D < 32 ? D : 32;
template <int D>
constexpr int float_stride = width_of<D> + 4;

/* slices: rows of the state before and of d_state; then k and q of a level. kk: first inverse. */
template <typename T, int D>
struct gradients_shared {
    static constexpr int WIDTH = width_of<D>, S = stride_of<T>(D), L = stride_of<T>(WIDTH);
    static constexpr int M = stride_of<T>(KDA_CHUNK), F = float_stride<D>;
    T d_o[KDA_CHUNK * S], value[KDA_CHUNK * S], dx[KDA_CHUNK * S];
    T slices[2 * (WIDTH * S > KDA_CHUNK * L ? WIDTH * S : KDA_CHUNK * L)];
    T kk[KDA_CHUNK * M], qk[KDA_CHUNK * M]; /* gradients, s and beta in; 0 inside eight rows */
    float of_k[KDA_CHUNK * F], of_q[KDA_CHUNK * F]; /* products on their way to the channels */
    float near_kk[KDA_CHUNK * 8], near_qk[KDA_CHUNK * 8]; /* the gradients inside eight rows */
    float totals[KDA_EIGHTS * WIDTH], sums[KDA_EIGHTS * WIDTH], ends[KDA_EIGHTS * WIDTH];
    float of_state[WIDTH]; /* sum over values of S dS */
    float beta[KDA_CHUNK], d_beta[3][KDA_CHUNK];
};

template <typename T, int D>
struct gradients_block {
    gradients_shared<T, D> *shared;
    kda_item item;
    int64_t  stride, at; /* of q, k, v: from token to token; the item's first row, its head */
    float    scale;
    bool     is_aligned; /* v, dv and dO */
};

/* Eight rows of one channel and what is known of their gradients. */
struct channel {
    kda_eight e;
    float q[8], k[8], dq[8], dk[8], db[8];
};

template <typename T, int D>
__device__ __forceinline__ void write_level(const gradients_block<T, D> &b, const channel &c, int n)
{
    constexpr int L = stride_of<T>(width_of<D>);
    T *k = b.shared->slices, *q = k + KDA_CHUNK * L;
    float factor[8];
    kda_level(factor, c.e, n, b.shared->totals, width_of<D>);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int at = (c.e.eight * 8 + r) * L + c.e.channel;
        store(k + at, factor[r] * c.k[r]);
        store(q + at, factor[r] * c.q[r]);
    }
}

/* What an element is that x was stored in. */
template <typename T>
__device__ __forceinline__ float as_stored(float x)
{
    T element;
    store(&element, x);
    return load(&element);
}

/* In db a pair's term at its later row must be the one at its earlier row, as dg is the sum of both
 * for all rows before: so k and q are as rounded here as they were in the products. */
template <typename T, int D>
__device__ __forceinline__ void add_level(const gradients_block<T, D> &b, channel &c, int n)
{
    constexpr int F = float_stride<D>;
    float factor[8];
    kda_level(factor, c.e, n, b.shared->totals, width_of<D>);
    bool later = kda_is_later(c.e, n);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int at = (c.e.eight * 8 + r) * F + c.e.channel;
        float of_k = b.shared->of_k[at], k = as_stored<T>(factor[r] * c.k[r]);
        c.dk[r] += factor[r] * of_k;
        if (later) {
            float of_q = b.shared->of_q[at], q = as_stored<T>(factor[r] * c.q[r]);
            c.dq[r] += factor[r] * of_q;
            c.db[r] += q * of_q + k * of_k;
        } else {
            c.db[r] -= k * of_k;
        }
    }
}

/* By way of the state before the chunk; of_beta collects (k from_start) . (dx S^T). */
template <typename T, int D>
__device__ __forceinline__ void add_state(const gradients_block<T, D> &b, channel &c,
                                          float (&of_beta)[8])
{
    constexpr int F = float_stride<D>;
    float factor[8];
    kda_from_start(factor, c.e, KDA_EIGHTS, b.shared->totals, width_of<D>);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int row = c.e.eight * 8 + r, at = row * F + c.e.channel;
        float of_k = factor[r] * b.shared->of_k[at];
        of_beta[r] += c.k[r] * of_k;
        c.dk[r] = -b.shared->beta[row] * of_k;
        c.dq[r] = b.scale * factor[r] * b.shared->of_q[at];
        c.db[r] = c.q[r] * c.dq[r] + c.k[r] * c.dk[r];
    }
}

/* By way of the state after the chunk. Returns what its decays get, all rows together. */
template <typename T, int D>
__device__ __forceinline__ float add_end(const gradients_block<T, D> &b, channel &c)
{
    constexpr int F = float_stride<D>;
    float factor[8], end = 0;
    kda_to_end(factor, c.e, KDA_EIGHTS, b.shared->totals, width_of<D>);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float of_k = factor[r] * b.shared->of_k[(c.e.eight * 8 + r) * F + c.e.channel];
        c.dk[r] += of_k;
        c.db[r] -= c.k[r] * of_k;
        end += c.k[r] * of_k;
    }
    return end;
}

/* Pairs inside the eight rows; that of a row with itself has no decay. */
template <typename T, int D>
__device__ __forceinline__ void add_near(const gradients_block<T, D> &b, channel &c)
{
    const float *near_kk = b.shared->near_kk + c.e.eight * 64;
    const float *near_qk = b.shared->near_qk + c.e.eight * 64;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float decay = 1, of_i = 0, self = near_qk[i * 8 + i];
#pragma unroll
        for (int r = i + 1; r < 8; r++) {
            decay *= c.e.step[r];
            float kk = near_kk[r * 8 + i], qk = near_qk[r * 8 + i];
            float of_k = kk * decay * c.k[i], of_q = qk * decay * c.k[i];
            c.dk[r] += of_k;
            c.dq[r] += of_q;
            c.db[r] += c.q[r] * of_q + c.k[r] * of_k;
            of_i += decay * (qk * c.q[r] + kk * c.k[r]);
        }
        c.dk[i] += of_i + self * c.q[i];
        c.dq[i] += self * c.k[i];
        c.db[i] -= c.k[i] * of_i;
    }
}

/* db to dg inside the eight rows; returns the sum of all. */
__device__ __forceinline__ float sum_back(channel &c)
{
    float sum = 0;
#pragma unroll
    for (int r = 7; r >= 0; r--)
        c.db[r] = sum += c.db[r];
    return sum;
}

/* What the decays of later rows, of the chunk's end and of the state add to every row's dg. */
template <typename T, int D>
__device__ __forceinline__ float later_sum(const gradients_block<T, D> &b, const channel &c)
{
    constexpr int WIDTH = width_of<D>;
    float sum = 0, decay = 1;
    for (int i = 0; i < KDA_EIGHTS; i++) {
        int at = i * WIDTH + c.e.channel;
        sum += b.shared->ends[at] + (i > c.e.eight ? b.shared->sums[at] : 0);
        decay *= b.shared->totals[at];
    }
    return sum + decay * b.shared->of_state[c.e.channel];
}

template <typename T, int D>
__device__ __forceinline__ void load_channel(const gradients_block<T, D> &b, const kda_inputs &in,
                                             channel &c, int first_channel)
{
    int rows = b.item.rows - c.e.eight * 8;
    int64_t at = b.at + c.e.eight * 8 * b.stride + first_channel + c.e.channel;
    kda_eight_load<T>(c.e, in.g + at, b.stride, rows);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        c.q[r] = r < rows ? load((const T *)in.q + at + r * b.stride) : 0;
        c.k[r] = r < rows ? load((const T *)in.k + at + r * b.stride) : 0;
    }
}

template <typename T, int D>
__device__ __forceinline__ void store_channel(const gradients_block<T, D> &b,
                                              const kda_gradients &out, const channel &c,
                                              int first_channel, float later)
{
    int rows = b.item.rows - c.e.eight * 8;
    int64_t at = b.at + c.e.eight * 8 * b.stride + first_channel + c.e.channel;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        if (r >= rows)
            break;
        store((T *)out.dq + at + r * b.stride, c.dq[r]);
        store((T *)out.dk + at + r * b.stride, c.dk[r]);
        out.dg[at + r * b.stride] = c.db[r] + later;
    }
}

#endif
