/* kda_chunk.cuh - what the GPU kernels of KDA share: items, decays of a channel, scratch
 *
 * An item is one chunk of 64 tokens of one head; chunks restart at documents. As in kda_chunk.h,
 * every decay is a product of exp(g) over its own range of tokens, so none leaves the range of
 * float. Pairs of rows meet at the smallest aligned block that holds both, of 16, 32 or 64 rows
 * (n = 1, 2, 4 blocks of eight a half): the decay from i in the first half to r in the second is
 * (i + 1 .. end of the half) (start of the half .. r), one factor for either. Pairs inside eight
 * rows are multiplied out. */
#ifndef KERNELS_KDA_CHUNK_CUH
#define KERNELS_KDA_CHUNK_CUH

#include "common/gpu_bytes.h"
#include "kernels/kda_tile.cuh"

constexpr int KDA_CHUNK = 64, KDA_EIGHTS = KDA_CHUNK / 8, KDA_THREADS = 256;
constexpr int KDA_MATRIX = KDA_CHUNK + 4; /* stride of (64, 64) float matrices */

/* What all kernels are told. Heads and documents are done a group at a time, so that scratch stays
 * small; what is counted here is of a group. */
struct kda_view {
    const int32_t *cu_seqlens;  /* (n_docs + 1), device; rows of all tokens */
    const int32_t *first_chunk; /* (n_docs + 1), device: chunks of the group's earlier documents */
    int32_t n_docs, n_chunks;
    int32_t doc_begin, n_all_docs; /* documents before the group, and of the call */
    int32_t n_heads;              /* of the tensors */
    int32_t head_begin, n_active; /* the group's heads */
    float   scale;
    bool    is_aligned; /* all tensors of all tokens, to 16 bytes */
    bool    only_ends;  /* states are of the first document's start, the last one's end */
};

/* Where a document's state of a head of the group lies. */
__device__ __forceinline__ int64_t kda_state_at(const kda_view &view, int doc, int head)
{
    int64_t of_doc = view.only_ends ? 0 : (int64_t)(view.doc_begin + doc) * view.n_heads;
    return of_doc + view.head_begin + head;
}

__device__ __forceinline__ bool kda_has_initial(const kda_view &view, int doc)
{
    return !view.only_ends || view.doc_begin + doc == 0;
}

__device__ __forceinline__ bool kda_has_final(const kda_view &view, int doc)
{
    return !view.only_ends || view.doc_begin + doc == view.n_all_docs - 1;
}

struct kda_item {
    int64_t row;  /* its first token */
    int32_t rows; /* 1 .. KDA_CHUNK */
    int32_t head, doc;
    bool    is_first; /* of its document: its state is the given one or zero, and not saved */
    int64_t saved;    /* else the place of its state: as in kda_chunk.c, and the heads' in turn */
};

/* Matrices of the items of a group, from scratch; (64, d) each unless said. */
template <typename T>
struct kda_scratch {
    T *w;       /* (I + A)^-1 beta k from_start */
    T *u;       /* forward: (I + A)^-1 beta v; backward: V', the values written */
    T *q_start; /* s q from_start */
    T *k_end;   /* k to_end */
    T *qk;      /* forward: (64, 64) */
    float *decay; /* (d): of the whole chunk */
    T *y;         /* backward: qk^T dO, then dV' */
    T *inverse;   /* backward: (64, 64) */
    float *kk;    /* backward: (64, 64), without beta */
    T *d_state;   /* backward: (d, d) after the chunk */
};

__device__ __forceinline__ kda_item kda_item_at(const kda_view &view, int chunk, int head, int doc)
{
    kda_item item;
    int first = chunk - view.first_chunk[doc], end = view.cu_seqlens[doc + 1];
    item.row = view.cu_seqlens[doc] + (int64_t)first * KDA_CHUNK;
    item.rows = (int)min((int64_t)KDA_CHUNK, end - item.row);
    item.head = view.head_begin + head;
    item.doc = doc;
    item.is_first = first == 0;
    item.saved = (item.row / KDA_CHUNK - 1) * view.n_heads + item.head;
    return item;
}

/* The item of scratch place `index`. */
__device__ __forceinline__ kda_item kda_find_item(const kda_view &view, int64_t index)
{
    int chunk = (int)(index / view.n_active), low = 0, high = view.n_docs;
    while (high - low > 1) { /* the last document that starts at or before chunk */
        int middle = (low + high) / 2;
        if (view.first_chunk[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return kda_item_at(view, chunk, (int)(index % view.n_active), low);
}

template <typename T>
__device__ __forceinline__ float kda_exp(float x);

template <>
__device__ __forceinline__ float kda_exp<float>(float x)
{
    return expf(x);
}

template <>
__device__ __forceinline__ float kda_exp<bf16>(float x)
{
    return exp2f(x * 1.44269504f);
}

/* Eight rows of one channel: row r of rows 8 eight .. + 7. */
struct kda_eight {
    int   eight, channel;
    float step[8]; /* exp(g); 1 in rows after the last */
};

/* rows: how many of the eight rows exist; g: the channel in the first of them. */
template <typename T>
__device__ __forceinline__ void kda_eight_load(kda_eight &e, const float *g, int64_t stride,
                                               int rows)
{
#pragma unroll
    for (int r = 0; r < 8; r++)
        e.step[r] = r < rows ? kda_exp<T>(g[r * stride]) : 1;
}

__device__ __forceinline__ float kda_eight_total(const kda_eight &e)
{
    float total = e.step[0];
#pragma unroll
    for (int r = 1; r < 8; r++)
        total *= e.step[r];
    return total;
}

/* Whether the eight is in the second half of its block at level n. */
__device__ __forceinline__ bool kda_is_later(const kda_eight &e, int n)
{
    return e.eight / n & 1;
}

/* factor[r]: start of the half at level n .. row r. totals: (8, n_channels) of all eights. The
 * loops have constant bounds so that their loads do not wait for each other. */
__device__ __forceinline__ void kda_from_start(float (&factor)[8], const kda_eight &e, int n,
                                               const float *totals, int n_channels)
{
    float product = 1;
#pragma unroll
    for (int i = 0; i < n - 1; i++) {
        int at = (e.eight & ~(n - 1)) + i;
        product *= at < e.eight ? totals[at * n_channels + e.channel] : 1;
    }
#pragma unroll
    for (int r = 0; r < 8; r++)
        factor[r] = product *= e.step[r];
}

/* factor[r]: row r + 1 .. end of the half at level n. */
__device__ __forceinline__ void kda_to_end(float (&factor)[8], const kda_eight &e, int n,
                                           const float *totals, int n_channels)
{
    float product = 1;
#pragma unroll
    for (int i = 0; i < n - 1; i++) {
        int at = (e.eight | (n - 1)) - i;
        product *= at > e.eight ? totals[at * n_channels + e.channel] : 1;
    }
#pragma unroll
    for (int r = 7; r >= 0; r--) {
        factor[r] = product;
        product *= e.step[r];
    }
}

/* The one of the two that the eight's half needs at level n. */
__device__ __forceinline__ void kda_level(float (&factor)[8], const kda_eight &e, int n,
                                          const float *totals, int n_channels)
{
    if (kda_is_later(e, n))
        kda_from_start(factor, e, n, totals, n_channels);
    else
        kda_to_end(factor, e, n, totals, n_channels);
}

/* ---- the prepared matrices of all items of a group (kda_prepare.cu) ---- */

/* Inputs of a call; elements are of type T. */
struct kda_inputs {
    const void  *q, *k, *v, *beta;
    const float *g;
    const void  *d_o, *states; /* backward: (n, heads, d); what the forward saved */
    const float *initial_state; /* backward: may be NULL */
};

/* Rows first .. first + n_rows - 1 of the state before the item, to shared memory. For all threads
 * of a block, who see it after copy_async_wait and a barrier. */
template <typename T, int D>
__device__ __forceinline__ void kda_load_state(T *to, int stride, const kda_view &view,
                                               const kda_inputs &in, const kda_item &item,
                                               int first, int n_rows)
{
    if (!item.is_first) {
        const T *from = (const T *)in.states + item.saved * D * D + first * D;
        tile_copy_async(to, stride, from, D, n_rows, D, n_rows);
        return;
    }
    bool is_given = in.initial_state && kda_has_initial(view, item.doc);
    int64_t at = kda_state_at(view, item.doc, item.head - view.head_begin) * D * D + first * D;
    for (int i = (int)threadIdx.x; i < n_rows * D; i += (int)blockDim.x)
        store(to + i / D * stride + i % D, is_given ? in.initial_state[at + i] : 0);
}

/* Fills w, u, q_start, k_end, qk and decay. */
template <typename T>
void kda_prepare_forward(struct device *dev, const kda_view &view, const kda_inputs &in,
                         const kda_scratch<T> &out, int d);

/* Fills w, u, q_start, k_end, decay, y, inverse and kk. */
template <typename T>
void kda_prepare_backward(struct device *dev, const kda_view &view, const kda_inputs &in,
                          const kda_scratch<T> &out, int d);

/* dq, dk, dv, dg and dbeta of all items of a group, once d_state and y (dV') are known
 * (kda_gradients.cu). */
struct kda_gradients {
    void  *dq, *dk, *dv, *dbeta;
    float *dg;
};

template <typename T>
void kda_gradients_launch(struct device *dev, const kda_view &view, const kda_inputs &in,
                          const kda_scratch<T> &scratch, const kda_gradients &out, int d);

/* ---- on the host ---- */

/* Heads done at once: with four blocks a head and document, these fill the device. */
static inline int32_t kda_heads_at_once(int32_t n_heads)
{
    return n_heads < GPU_KDA_HEADS ? n_heads : GPU_KDA_HEADS;
}

/* Runs the statements with D the head dimension. */
#define KDA_DISPATCH(d, D, ...)                                                                    \
    do {                                                                                           \
        switch (d) {                                                                               \
        case 16: {                                                                                 \
            constexpr int D = 16;                                                                  \
            __VA_ARGS__;                                                                           \
        } break;                                                                                   \
        case 32: {                                                                                 \
            constexpr int D = 32;                                                                  \
            __VA_ARGS__;                                                                           \
        } break;                                                                                   \
        case 64: {                                                                                 \
            constexpr int D = 64;                                                                  \
            __VA_ARGS__;                                                                           \
        } break;                                                                                   \
        default: {                                                                                 \
            constexpr int D = 128;                                                                 \
            __VA_ARGS__;                                                                           \
        } break;                                                                                   \
        }                                                                                          \
    } while (0)

/* Chunks whose scratch is taken at once: as many as one document of all tokens has, or a few. */
int64_t kda_chunks_at_once(const struct kda_shape *shape);

/* The documents from doc on whose chunks are no more, as kernels see them; heads are not yet
 * chosen. Asserts that the kernels can do it. */
kda_view kda_view_of(struct device *dev, const struct kda_shape *shape, int32_t doc,
                     bool is_aligned);

#endif
