/* device.h - one device: its memory and its table of operations
 *
 * Two tables exist: cpu (device_cpu.c; the .c files of this folder are the definitions) and cuda.
 * Model code calls dev->ops->op(dev, ...) and nothing else of this folder.
 *
 * Conventions. Matrices are row-major; a linear weight is (out, in); n counts rows, which are the
 * tokens of all documents of a micro-batch one after another. Documents are given by cu_seqlens,
 * n_docs + 1 ascending row numbers from 0 to n; state, convolution window and attention restart at
 * each. Outputs may not overlap inputs unless said. A gradient named d* is assigned; one named
 * acc_* is added to (+=). Ops cannot fail: scratch is the device's own and has its size
 * after the first step; a wrong shape is a broken invariant and asserts. One thread at a time
 * calls a device's ops.
 *
 * Elements. Activations, their gradients, and the weights that forward and backward read (matrices
 * and vectors alike) are elements of the device's one type, float32 or bfloat16. Everything typed
 * float is float32 on every device: statistics, router logits and weights, KDA's log-decay and
 * state, the rotary table, gradient sums of weights, and all that the optimizer takes. Math inside
 * is float32 whatever the elements are, and so are the sums of products. Strides, widths and
 * offsets count elements, never bytes.
 *
 * Where memory lies. The host may not look into what alloc gave. In host memory are: structs,
 * cu_seqlens and cu_rows, the offsets of groups, the arrays of a route, n_rerouted and n_dropped,
 * and arrays of pointers (w, acc_dw, r, acc_dr), which point into the device. All else is in the
 * device's: elements, floats, tokens, labels, ids, sent, selected, index, counts, histogram, packed
 * weights, and the accumulators acc, acc_loss, acc_sum and acc_bad. No op returns a number that it
 * computed: it adds it to an accumulator, which is read once, when the host may wait for it. */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include <math.h>

#include "common/err.h"
#include "common/packing.h"
#include "common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct device;

enum elem_type { ELEM_F32, ELEM_BF16 };

/* One element; without a body, so that nobody looks into it or steps over it by accident. */
typedef struct elem elem;

/* How ops take elements: from elem *, or from float * where the device's elements are float32. The
 * definitions of the CPU are written with float * and fit the table. In C++ no type is implied. */
#ifdef __cplusplus
typedef void *elem_ptr;
typedef const void *const_elem_ptr;
typedef void *const *elem_ptrs;
typedef const void *const *const_elem_ptrs;
#else
typedef union {
    elem  *p;
    float *f32;
} elem_ptr __attribute__((transparent_union));
typedef union {
    const elem  *p;
    const float *f32;
} const_elem_ptr __attribute__((transparent_union));
typedef union {
    elem  *const *p;
    float *const *f32;
} elem_ptrs __attribute__((transparent_union));
typedef union {
    const elem  *const *p;
    const float *const *f32;
} const_elem_ptrs __attribute__((transparent_union));
#endif

/* What the KDA recurrence keeps for its backward; sizes from kda_saved_floats. */
struct kda_shape {
    int64_t n_tokens;
    const int32_t *cu_seqlens; /* n_docs + 1 */
    int32_t n_docs;
    int32_t n_heads, head_dim; /* d_k = d_v = head_dim */
    float   scale;             /* s, applied to q: head_dim^-0.5 */
    bool    only_ends; /* states are (heads, d, d): the initial one is the first document's, the
                        * final one the last one's. The other documents begin with zeros */
};

struct attention_shape {
    int64_t n_tokens;
    const int32_t *cu_seqlens;
    int32_t n_docs;
    int32_t n_heads, nope_dim, rope_dim, v_dim;
    float   scale; /* (nope + rope)^-0.5 */
};

enum router_kind { ROUTER_SIGMOID, ROUTER_SOFTMAX };

struct router_shape {
    int64_t n_tokens;
    int32_t n_experts, top_k;
    bool    renormalize;
    float   routed_scale;
    enum router_kind kind; /* of the scores */
    int32_t n_groups;      /* of neighbouring experts, equal in size; 0 and 1: no groups */
    int32_t topk_group;    /* groups that a token may choose from */
};

enum overflow_kind { OVERFLOW_DROP, OVERFLOW_REROUTE };
enum overflow_order { KEEP_LARGEST_WEIGHTS, KEEP_FIRST_TOKENS };

/* What happens to choices beyond an expert's capacity. */
struct capacity_config {
    int64_t capacity; /* tokens an expert takes of this call's: ceil(T k / E factor) */
    enum overflow_kind  overflow;
    enum overflow_order order; /* who stays; equal weights: the first token */
};

/* Pairs (token, choice) on their way to experts, in chunks of whole tokens. What a chunk has for an
 * expert is cut into parts, one for each copy of the expert: with x = chunk n_experts + expert,
 * part i of first[x] .. first[x + 1] holds the pairs up to number end[i] of x, and pair r of them
 * lies at place[i] + r. The arrays lie in host memory. */
struct route {
    int64_t n_pairs, pairs_each; /* of ids; and of a chunk, where the last one may have fewer */
    int32_t n_chunks, n_experts, top_k;
    const int32_t *first;       /* (n_chunks n_experts + 1) */
    const int64_t *end, *place; /* (the last of first); end ascends for each x */
    const int64_t *chunk_at;    /* (n_chunks): where a chunk's places begin */
};

/* The rows that carry them: a token's row goes once to each rank that serves one of its pairs, or
 * once to the rank that passes it on to several. Arrays in host memory. */
struct route_targets {
    int32_t n_ranks;
    const int64_t *begin;  /* (n_chunks, n_ranks + 1): a rank's places, counted in their chunk */
    const int32_t *target; /* (n_ranks): where rows go whose pairs this one serves */
};

/* What is told to the rank that lays rows out: where one lies, and how much its pair weighs. */
struct route_note {
    int32_t at;
    float   weight;
};

/* Things in blocks, whose arrays lie in host memory: thing i of block b, from begin[b] on, has its
 * note at to[b] + i - begin[b], and what the note says is counted from add[b] on. */
struct route_notes {
    int32_t n_blocks;
    const int64_t *begin; /* (n_blocks + 1), ascending from 0 */
    const int64_t *to, *add;
};

struct rotary_shape {
    int64_t n_tokens;
    const int32_t *cu_seqlens; /* positions count from 0 in each document; the first number may be
                                * less than 0 where the first document began so much before */
    int32_t n_docs;
    int32_t dim;         /* rotated dims, the first of each row */
    bool    interleaved; /* pair i is dims 2i, 2i + 1; else i, i + dim / 2 */
};

/* The indexer of sparse attention, and latent attention in absorbed form over chosen keys.
 *
 * A long batch may come in segments, which cut documents. Then a call begins with the document that
 * a segment's first token is in, and ends with the segment: all keys from there on, but queries
 * (and what else is of them: chosen keys, outputs, gradients) of the tokens first .. n_tokens
 * alone. Segments go backwards from the last one where gradients are made: later has what queries
 * of later ones gave to the keys, and gets what those of this one give. No query of an earlier
 * segment sees the keys of this one, so their gradients are whole, and of keys they alone are
 * assigned. */
struct index_shape {
    int64_t n_tokens;
    const int32_t *cu_seqlens;
    int32_t n_docs;
    int32_t n_heads, head_dim;
    float   scale; /* of the sum over heads: (n_heads head_dim)^-0.5, or as the model says */
    int32_t top_k;
    int64_t first; /* of index_select and index_loss; in the first document */
    float  *later; /* (n_tokens, head_dim), of index_loss; NULL: there are no later ones */
};

struct sparse_shape {
    int64_t n_tokens;
    int32_t n_heads, latent_dim, rope_dim; /* keys: latent then rope; values: the latent */
    float   scale;
    int32_t top_k; /* columns of selected */
    int64_t first;
    float  *later; /* (n_tokens, latent_dim + rope_dim), of the backward; NULL: as above */
};

/* A part of a product that is r wide in between: what is added is z b^T. */
struct low_rank {
    int64_t r;
    const elem *z, *b; /* (n, r), (out, r) */
    elem  *dz;         /* (n, r), assigned where the product's dx is; else not used, nor acc_db */
    float *acc_db;     /* (out, r) */
};

struct muon_config {
    float lr, momentum, weight_decay;
    float grad_scale; /* as in adamw_config */
    float rms;        /* step = lr rms sqrt(max(rows, cols)) X; 0.2 */
    bool  nesterov;
};

struct adamw_config {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale;         /* gradients are multiplied by it first: 1 / tokens, times clipping */
    float correction1, correction2; /* 1 - beta^t */
};

/* Bytes. What was taken from the device by alloc and as scratch of ops, now and at most. */
struct device_memory {
    uint64_t in_use, peak;
    uint64_t scratch;   /* of in_use: the ops' own */
    uint64_t total;     /* that the device has; of a CPU, what this process may use */
    uint64_t available; /* of total, as far as the device can tell */
    uint64_t overhead;  /* of a GPU: what it held before anything was taken, its libraries' */
    uint64_t n_allocs;  /* so many times was memory taken, ever */
};

struct device_ops {
    const char *name;
    void (*close)(struct device *dev);

    /* ---- memory: zeroed, 64-byte aligned; NULL when the device has no more ---- */
    void *(*alloc)(struct device *dev, size_t n_bytes);
    void (*free)(struct device *dev, void *p);
    void (*copy)(struct device *dev, void *to, const void *from, size_t n_bytes);
    /* When it returns, the host may change its memory. */
    void (*to_device)(struct device *dev, void *to, const void *host, size_t n_bytes);
    /* When it returns, the host has what all ops before gave. */
    void (*to_host)(struct device *dev, void *host, const void *from, size_t n_bytes);
    /* Host memory, whole pages, that copies pass through again and again: they may be faster until
     * unpin. */
    void (*pin)(struct device *dev, void *host, size_t n_bytes);
    void (*unpin)(struct device *dev, void *host);
    void (*zero)(struct device *dev, void *p, size_t n_bytes);
    void (*synchronize)(struct device *dev);
    /* Mark number i in the order of ops, moved there if it was elsewhere; marks are numbered
     * densely from 0. */
    void (*mark)(struct device *dev, uint32_t i);
    /* Seconds from a mark to a later one; waits for that. */
    double (*elapsed)(struct device *dev, uint32_t from, uint32_t to);
    void (*memory)(struct device *dev, struct device_memory *out);
    /* The scratch of ops has so much at once from now on, so that no step has to take it. */
    void (*reserve)(struct device *dev, size_t n_bytes);
    /* A step ends here, for whoever times ops by step. */
    void (*step_over)(struct device *dev);

    /* ---- elementwise ---- */
    /* y += a x */
    void (*axpy)(struct device *dev, float *y, float a, const float *x, int64_t n);
    void (*scale)(struct device *dev, float *y, float a, int64_t n);
    /* y += x */
    void (*add)(struct device *dev, elem_ptr y, const_elem_ptr x, int64_t n);
    void (*to_f32)(struct device *dev, float *y, const_elem_ptr x, int64_t n);
    /* to the nearest, ties to even */
    void (*to_elem)(struct device *dev, elem_ptr y, const float *x, int64_t n);
    /* *acc += the sum of squares, in double, fixed tree */
    void (*sum_squares)(struct device *dev, double *acc, const float *x, int64_t n);
    /* *acc_bad becomes 1 if any of x is NaN or infinite, else it stays */
    void (*all_finite)(struct device *dev, int32_t *acc_bad, const float *x, int64_t n);
    /* *acc_sum += what tells n_words words of 8 bytes from others, modulo 2^64; the sum over i of
     * x[i] mixed with first + i, so that parts may be taken apart and in any order */
    void (*checksum)(struct device *dev, uint64_t *acc_sum, const uint64_t *x, int64_t n_words,
                     uint64_t first);

    /* ---- products: x (n, in), w (out, in), y (n, out); beta 0 assigns, 1 adds ---- */
    void (*linear)(struct device *dev, elem_ptr y, const_elem_ptr x, const_elem_ptr w, int64_t n,
                   int64_t in, int64_t out, float beta);
    /* The same with a float32 y: the router's logits. */
    void (*linear_f32)(struct device *dev, float *y, const_elem_ptr x, const_elem_ptr w, int64_t n,
                       int64_t in, int64_t out, float beta);
    /* dx = dy w (+ beta dx) */
    void (*linear_dx)(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptr w,
                      int64_t n, int64_t in, int64_t out, float beta);
    /* acc_dw += dy^T x */
    void (*linear_dw)(struct device *dev, float *acc_dw, const_elem_ptr dy, const_elem_ptr x,
                      int64_t n, int64_t in, int64_t out);
    /* The same per group: rows offsets[g] .. offsets[g+1] with weight w[g]; empty groups are
     * fine. Groups are spread over the threads. */
    void (*grouped_linear)(struct device *dev, elem_ptr y, const_elem_ptr x, const_elem_ptrs w,
                           const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out);
    void (*grouped_linear_dx)(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptrs w,
                              const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                              float beta);
    /* Of two linears of the same rows, as an expert's gate and up are: dx = dy w + dy2 w2. */
    void (*grouped_linear_dx_pair)(struct device *dev, elem_ptr dx, const_elem_ptr dy,
                                   const_elem_ptrs w, const_elem_ptr dy2, const_elem_ptrs w2,
                                   const int64_t *offsets, int32_t n_groups, int64_t in,
                                   int64_t out);
    void (*grouped_linear_dw)(struct device *dev, float *const *acc_dw, const_elem_ptr dy,
                              const_elem_ptr x, const int64_t *offsets, int32_t n_groups,
                              int64_t in, int64_t out);
    /* The same over frozen weights that stay packed: w[g] (out, in) as common/packing.h lays it
     * out, from a multiple of 16 bytes on, no code and no scale of it NaN; MXFP4: in a multiple of
     * 32. Only some weights lie decoded at a time: blocks of them, or on a GPU as many as
     * GPU_UNPACK_BYTES hold. */
    void (*grouped_linear_packed)(struct device *dev, elem_ptr y, const_elem_ptr x,
                                  const uint8_t *const *w, enum packing packing,
                                  const int64_t *offsets, int32_t n_groups, int64_t in,
                                  int64_t out);
    void (*grouped_linear_packed_dx)(struct device *dev, elem_ptr dx, const_elem_ptr dy,
                                     const uint8_t *const *w, enum packing packing,
                                     const int64_t *offsets, int32_t n_groups, int64_t in,
                                     int64_t out, float beta);
    /* out (n_rows, cols) = rows first .. first + n_rows of a packed matrix w (rows, cols), which is
     * laid out and aligned as above. */
    void (*unpack)(struct device *dev, elem_ptr out, const uint8_t *w, enum packing packing,
                   int64_t rows, int64_t cols, int64_t first, int64_t n_rows);
    /* A linear per head, each head with its own weight: head h of token t is the row
     * x + (t n_heads + h) x_stride, and alike for y; w_h = w + h w_stride is (out, in). Absorbed
     * latent attention needs it: with kv_b's rows of a head, nope keys then v values, q_latent =
     * q_nope Wk is heads_linear_dx (dy = q_nope, out = nope) and o = o_latent Wv^T heads_linear. */
    void (*heads_linear)(struct device *dev, elem_ptr y, int64_t y_stride, const_elem_ptr x,
                         int64_t x_stride, const_elem_ptr w, int64_t w_stride, int64_t n,
                         int32_t n_heads, int64_t in, int64_t out, float beta);
    void (*heads_linear_dx)(struct device *dev, elem_ptr dx, int64_t x_stride, const_elem_ptr dy,
                            int64_t y_stride, const_elem_ptr w, int64_t w_stride, int64_t n,
                            int32_t n_heads, int64_t in, int64_t out, float beta);
    void (*heads_linear_dw)(struct device *dev, float *acc_dw, int64_t w_stride, const_elem_ptr dy,
                            int64_t y_stride, const_elem_ptr x, int64_t x_stride, int64_t n,
                            int32_t n_heads, int64_t in, int64_t out);

    /* ---- norms ---- */
    /* y = w x rsqrt(mean x^2 + eps); rstd (n) is kept for the backward */
    void (*rms_norm)(struct device *dev, elem_ptr y, float *rstd, const_elem_ptr x,
                     const_elem_ptr w, int64_t n, int64_t d, float eps);
    /* dx = beta dx + ...; acc_dw (d) */
    void (*rms_norm_backward)(struct device *dev, elem_ptr dx, float *acc_dw, const_elem_ptr dy,
                              const_elem_ptr x, const_elem_ptr w, const float *rstd, int64_t n,
                              int64_t d, float beta);
    /* KDA's output: y = rms_norm(o per head of d; w (d)) sigmoid(g). Rows are n tokens x heads. */
    void (*gated_rms_norm)(struct device *dev, elem_ptr y, float *rstd, const_elem_ptr o,
                           const_elem_ptr g, const_elem_ptr w, int64_t n_rows, int64_t d,
                           float eps);
    void (*gated_rms_norm_backward)(struct device *dev, elem_ptr d_o, elem_ptr dg, float *acc_dw,
                                    const_elem_ptr dy, const_elem_ptr o, const_elem_ptr g,
                                    const_elem_ptr w, const float *rstd, int64_t n_rows, int64_t d);
    /* y = x / sqrt(sum x^2 + eps) per row of d; rstd (n_rows) */
    void (*l2_norm)(struct device *dev, elem_ptr y, float *rstd, const_elem_ptr x, int64_t n_rows,
                    int64_t d, float eps);
    void (*l2_norm_backward)(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptr y,
                             const float *rstd, int64_t n_rows, int64_t d);

    /* y = w (x - mean) / sqrt(var + eps) + b; stats (n, 2): mean and 1 / sqrt(var + eps) */
    void (*layer_norm)(struct device *dev, elem_ptr y, float *stats, const_elem_ptr x,
                       const_elem_ptr w, const_elem_ptr b, int64_t n, int64_t d, float eps);
    /* dx = beta dx + ...; acc_dw, acc_db (d) */
    void (*layer_norm_backward)(struct device *dev, elem_ptr dx, float *acc_dw, float *acc_db,
                                const_elem_ptr dy, const_elem_ptr x, const_elem_ptr w,
                                const float *stats, int64_t n, int64_t d, float beta);

    /* ---- gates and activations ---- */
    /* y = o * sigmoid(g) */
    void (*sigmoid_gate)(struct device *dev, elem_ptr y, const_elem_ptr o, const_elem_ptr g,
                         int64_t n);
    void (*sigmoid_gate_backward)(struct device *dev, elem_ptr d_o, elem_ptr dg, const_elem_ptr dy,
                                  const_elem_ptr o, const_elem_ptr g, int64_t n);
    void (*sigmoid)(struct device *dev, elem_ptr y, const_elem_ptr x, int64_t n);
    /* dx = dy y (1 - y) */
    void (*sigmoid_backward)(struct device *dev, elem_ptr dx, const_elem_ptr dy, const_elem_ptr y,
                             int64_t n);
    /* y = b1 tanh(a/b1) sigmoid(a) * b2 tanh(u/b2); model.md 5.1 */
    void (*situ)(struct device *dev, elem_ptr y, const_elem_ptr a, const_elem_ptr u, int64_t n,
                 float b1, float b2);
    void (*situ_backward)(struct device *dev, elem_ptr da, elem_ptr du, const_elem_ptr dy,
                          const_elem_ptr a, const_elem_ptr u, int64_t n, float b1, float b2);
    /* y = silu(a) u */
    void (*swiglu)(struct device *dev, elem_ptr y, const_elem_ptr a, const_elem_ptr u, int64_t n);
    void (*swiglu_backward)(struct device *dev, elem_ptr da, elem_ptr du, const_elem_ptr dy,
                            const_elem_ptr a, const_elem_ptr u, int64_t n);

    /* ---- KDA; model.md part 2 ---- */
    /* y = silu(causal depthwise convolution of x (n, channels) with w (channels, kernel)), no bias,
     * last tap on the current token, window reset at each document; pre keeps the value before
     * the silu. */
    void (*short_conv)(struct device *dev, elem_ptr y, elem_ptr pre, const_elem_ptr x,
                       const_elem_ptr w, const int32_t *cu_seqlens, int32_t n_docs,
                       int64_t channels, int32_t kernel);
    void (*short_conv_backward)(struct device *dev, elem_ptr dx, float *acc_dw, const_elem_ptr dy,
                                const_elem_ptr pre, const_elem_ptr x, const_elem_ptr w,
                                const int32_t *cu_seqlens, int32_t n_docs, int64_t channels,
                                int32_t kernel);
    /* g (n, heads, d) from z (n, heads, d) + dt_bias (heads, d) and a_log (heads). bounded: g =
     * lower_bound sigmoid(exp(a_log) z), else g = -exp(a_log) softplus(z); z includes the bias. */
    void (*kda_gate)(struct device *dev, float *g, const_elem_ptr z, const_elem_ptr dt_bias,
                     const_elem_ptr a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                     float lower_bound);
    void (*kda_gate_backward)(struct device *dev, elem_ptr dz, float *acc_d_dt_bias,
                              float *acc_d_a_log, const float *dg, const_elem_ptr z,
                              const_elem_ptr dt_bias, const_elem_ptr a_log, int64_t n,
                              int32_t n_heads, int32_t d, bool bounded, float lower_bound);
    /* Floats that kda_forward leaves in saved for kda_backward (chunk states and more): from the
     * numbers of tokens, heads and channels, however many documents there are. */
    size_t (*kda_saved_floats)(struct device *dev, const struct kda_shape *shape);
    /* q, k (normalised), v, g, o: (n, heads, d); beta (n, heads). initial_state and final_state:
     * (n_docs, heads, d, d) or NULL (zero, not wanted). */
    void (*kda_forward)(struct device *dev, elem_ptr o, float *final_state, float *saved,
                        const_elem_ptr q, const_elem_ptr k, const_elem_ptr v, const float *g,
                        const_elem_ptr beta, const float *initial_state,
                        const struct kda_shape *shape);
    /* initial_state as in the forward. d_final_state and d_initial_state may be NULL. */
    void (*kda_backward)(struct device *dev, elem_ptr dq, elem_ptr dk, elem_ptr dv, float *dg,
                         elem_ptr dbeta, float *d_initial_state, const_elem_ptr d_o,
                         const float *d_final_state, const_elem_ptr q, const_elem_ptr k,
                         const_elem_ptr v, const float *g, const_elem_ptr beta,
                         const float *initial_state, const float *saved,
                         const struct kda_shape *shape);

    /* ---- latent attention, expanded form; model.md part 3 ---- */
    /* q (n, heads, nope + rope); kv (n, heads, nope + v): keys then values; k_rope rows of one
     * shared key part, k_rope_stride apart; o (n, heads, v); lse (n, heads). */
    void (*attention)(struct device *dev, elem_ptr o, float *lse, const_elem_ptr q,
                      const_elem_ptr kv, const_elem_ptr k_rope, int64_t k_rope_stride,
                      const struct attention_shape *shape);
    /* dk_rope (n, dk_rope_stride): its rope_dim leading elements of each row are assigned. */
    void (*attention_backward)(struct device *dev, elem_ptr dq, elem_ptr dkv, elem_ptr dk_rope,
                               int64_t dk_rope_stride, const_elem_ptr d_o, const_elem_ptr o,
                               const float *lse, const_elem_ptr q, const_elem_ptr kv,
                               const_elem_ptr k_rope, int64_t k_rope_stride,
                               const struct attention_shape *shape);

    /* ---- rotary position embedding ---- */
    /* In place: of each token, n_heads rows stride apart, (t n_heads + h) stride from x; the
     * first dim of a row turn by the token's position in its document. So the rope part of
     * q (n, heads, nope + rope) is x = q + nope, stride = nope + rope; a key part shared by the
     * heads is n_heads = 1. table (n_positions, dim) is rotary_table's (common/rotary.h), with at
     * least as many positions as the longest document has tokens. */
    void (*rotary)(struct device *dev, elem_ptr x, int32_t n_heads, int64_t stride,
                   const float *table, const struct rotary_shape *shape);
    /* The gradient of the turned rows becomes that of the rows before, in place. */
    void (*rotary_backward)(struct device *dev, elem_ptr dx, int32_t n_heads, int64_t stride,
                            const float *table, const struct rotary_shape *shape);

    /* ---- sparse attention with a lightning indexer (DSA); model.md part 4 ---- */
    /* q (n, heads, d), k (n, d), w (n, heads), all of the index: I[t,s] = scale sum_h w[t,h]
     * relu(q[t,h] . k[s]) for s <= t in t's document. */

    /* scores (end - begin, n): I of the queries begin .. end, -inf where s is not visible. */
    void (*index_scores)(struct device *dev, float *scores, int64_t begin, int64_t end,
                         const_elem_ptr q, const_elem_ptr k, const_elem_ptr w,
                         const struct index_shape *shape);
    /* selected (n, top_k): the keys (row numbers) with the largest I, all where no more are
     * visible; equal ones go to the lower key. Ascending, -1 after the last. */
    void (*index_select)(struct device *dev, int32_t *selected, const_elem_ptr q, const_elem_ptr k,
                         const_elem_ptr w, const struct index_shape *shape);
    /* Over the selected keys: o (n, heads, latent), lse (n, heads). q_latent (n, heads, latent);
     * q_rope's row of token t and head h is (t heads + h) q_rope_stride from it; latent
     * (n, latent) are keys and values; k_rope's rows are k_rope_stride apart. */
    void (*sparse_attention)(struct device *dev, elem_ptr o, float *lse, const_elem_ptr q_latent,
                             const_elem_ptr q_rope, int64_t q_rope_stride, const_elem_ptr latent,
                             const_elem_ptr k_rope, int64_t k_rope_stride, const int32_t *selected,
                             const struct sparse_shape *shape);
    /* All four gradients are assigned, d_latent being that of keys and values together; dq_rope
     * and dk_rope have strides as q_rope and k_rope, and only their rope_dim are written. */
    void (*sparse_attention_backward)(struct device *dev, elem_ptr dq_latent, elem_ptr dq_rope,
                                      int64_t dq_rope_stride, elem_ptr d_latent, elem_ptr dk_rope,
                                      int64_t dk_rope_stride, const_elem_ptr d_o, const_elem_ptr o,
                                      const float *lse, const_elem_ptr q_latent,
                                      const_elem_ptr q_rope, int64_t q_rope_stride,
                                      const_elem_ptr latent, const_elem_ptr k_rope,
                                      int64_t k_rope_stride, const int32_t *selected,
                                      const struct sparse_shape *shape);
    /* The indexer's loss: the sum over rows of KL(target || softmax of I), target = the main
     * attention's weights summed over heads and normalised to 1. acc_loss gets it without weight;
     * dq, dk and dw of the index are assigned, times weight. Main attention is only looked at.
     * Sparse stage: over the selected keys, main attention as in sparse_attention with its lse. */
    void (*index_loss)(struct device *dev, double *acc_loss, elem_ptr dq, elem_ptr dk, elem_ptr dw,
                       float weight, const_elem_ptr q, const_elem_ptr k, const_elem_ptr w,
                       const int32_t *selected, const_elem_ptr q_latent, const_elem_ptr q_rope,
                       int64_t q_rope_stride, const_elem_ptr latent, const_elem_ptr k_rope,
                       int64_t k_rope_stride, const float *lse, const struct index_shape *shape,
                       const struct sparse_shape *core);
    /* Dense warm-up: over all visible keys, main attention as in attention with its lse. */
    void (*index_loss_dense)(struct device *dev, double *acc_loss, elem_ptr dq, elem_ptr dk,
                             elem_ptr dw, float weight, const_elem_ptr q, const_elem_ptr k,
                             const_elem_ptr w, const_elem_ptr core_q, const_elem_ptr core_kv,
                             const_elem_ptr k_rope, int64_t k_rope_stride, const float *lse,
                             const struct index_shape *shape, const struct attention_shape *core);

    /* ---- attention residuals; model.md 1.2 ---- */
    /* y (n, d) = softmax-weighted sum of the rows r[0..n_rows) (each (n, d)); norm g (d), proj w
     * (d); weights (n, n_rows) is kept. y may be one of r. */
    void (*attn_res)(struct device *dev, elem_ptr y, float *weights, const_elem_ptrs r,
                     int32_t n_rows, const_elem_ptr g, const_elem_ptr w, int64_t n, int64_t d,
                     float eps);
    /* acc_dr[i] (n, d) += ...; acc_dg, acc_dw (d) */
    void (*attn_res_backward)(struct device *dev, elem_ptrs acc_dr, float *acc_dg, float *acc_dw,
                              const_elem_ptr dy, const_elem_ptrs r, const float *weights,
                              int32_t n_rows, const_elem_ptr g, const_elem_ptr w, int64_t n,
                              int64_t d, float eps);

    /* ---- router and combine; model.md 5.1 ---- */
    /* scores (n, E): sigmoid, or softmax over E, of the logits; ids (n, k): the largest of scores +
     * bias, descending, equal ones to the lower index; bias NULL: none. With groups only the
     * topk_group groups of most worth take part, a group's worth being the sum of its two largest
     * biased scores. weights (n, k) = scores[ids] * routed_scale, where renormalize / (sum +
     * 1e-20) first. */
    void (*router)(struct device *dev, float *scores, int32_t *ids, float *weights,
                   const float *logits, const float *bias, const struct router_shape *shape);
    /* d_logits (n, E) from d_weights (n, k) */
    void (*router_backward)(struct device *dev, float *d_logits, const float *d_weights,
                            const float *scores, const int32_t *ids,
                            const struct router_shape *shape);
    /* Choices beyond an expert's capacity. In: ids and weights as router gave them. sent (n, k):
     * the expert a choice goes to, or -1 where it goes nowhere; its weight becomes 0. Rerouting
     * happens in token order: a choice goes to the token's best expert by score + bias (NULL:
     * none) that the token did not choose and that has room, groups apart; ids then holds that
     * expert, and the token's weights are made anew from its ids, so router_backward takes scores
     * and ids as they are afterwards, with 0 as d_weights of what was not sent. n_rerouted and
     * n_dropped += choices of this call. */
    void (*router_capacity)(struct device *dev, int32_t *ids, float *weights, int32_t *sent,
                            int64_t *n_rerouted, int64_t *n_dropped, const float *scores,
                            const float *bias, const struct capacity_config *config,
                            const struct router_shape *shape);
    /* counts (n_segments, E) += tokens per expert by the k largest scores alone, without bias or
     * groups, of each segment of rows cu_rows[i] .. cu_rows[i + 1]. The losses below count so. */
    void (*router_segment_counts)(struct device *dev, int64_t *counts, const float *scores,
                                  const int32_t *cu_rows, int32_t n_segments,
                                  const struct router_shape *shape);
    /* The mean over segments of E sum_e f_e P_e: f_e = counts_e / sum counts without gradient, P_e
     * = the mean over the segment's rows of the scores normalised to 1 over E. Switch: one segment
     * of all rows, counts of the micro-batch, or summed over micro-batches and ranks for the loss
     * over the global batch. Sequence-wise: a segment each. acc_loss gets it without weight;
     * acc_d_logits (n, E) += weight times its gradient; NULL: the loss alone. */
    void (*router_aux_loss)(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                            const float *scores, const int64_t *counts, const int32_t *cu_rows,
                            int32_t n_segments, const struct router_shape *shape);
    /* The mean over rows of logsumexp(logits)^2; weight and acc_d_logits as above. */
    void (*router_z_loss)(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                          const float *logits, const struct router_shape *shape);
    /* counts (E) += tokens per expert; histogram (E, n_bins) += margins r = alpha - score, where
     * alpha is the token's (k+1)-th largest of score + bias; bins are uniform over [lo, hi].
     * histogram NULL: the counts alone. */
    void (*router_histogram)(struct device *dev, int64_t *counts, int64_t *histogram,
                             const float *scores, const int32_t *ids, const float *bias, float lo,
                             float hi, int32_t n_bins, const struct router_shape *shape);
    /* y (n, d) = sum over k, in order, of weights (n, k) * slots (n, k, d) */
    void (*combine)(struct device *dev, elem_ptr y, const_elem_ptr slots, const float *weights,
                    int64_t n, int32_t top_k, int64_t d);
    /* d_slots (n, k, d) = weights dy, NULL: not wanted; d_weights (n, k) = slots . dy */
    void (*combine_backward)(struct device *dev, elem_ptr d_slots, float *d_weights,
                             const_elem_ptr dy, const_elem_ptr slots, const float *weights,
                             int64_t n, int32_t top_k, int64_t d);
    /* out[i] = scale[i] in[index[i]] for rows of d, zeros where index[i] is -1; scale NULL: as they
     * are. And acc[index[i]] += in[i], in ascending i */
    void (*gather_rows)(struct device *dev, elem_ptr out, const_elem_ptr in, const int64_t *index,
                        const float *scale, int64_t n, int64_t d);
    void (*scatter_add_rows)(struct device *dev, elem_ptr acc, const_elem_ptr in,
                             const int64_t *index, int64_t n, int64_t d);

    /* ---- routes: where rows are packed on their way to experts ---- */
    /* counts (n_chunks, n_experts) = how often each is in a chunk of ids; an id of -1 goes nowhere.
     * Of the route its first five numbers are looked at. */
    void (*route_counts)(struct device *dev, int32_t *counts, const int32_t *ids,
                         const struct route *route);
    /* The place of every pair: pair r of its chunk and expert, from 0 in the order of ids, lies at
     * the place that route says. place_of (n_pairs): counted from its chunk_at; -1 for an id of -1.
     * pair_at (pairs that go somewhere): the pair at a place. */
    void (*route_pairs)(struct device *dev, int64_t *place_of, int64_t *pair_at, const int32_t *ids,
                        const struct route *route);
    /* Rows by (chunk, target, token). row_of (n_pairs): the row that carries a pair, -1: it goes
     * nowhere. pair_at and token_at (n_pairs at most): a row's first pair, and its token, pair /
     * top_k. counts (n_chunks, n_ranks): rows of each chunk and target. */
    void (*route_rows)(struct device *dev, int32_t *counts, int64_t *row_of, int64_t *pair_at,
                       int64_t *token_at, const int64_t *place_of,
                       const struct route_targets *targets, const struct route *route);
    /* A note of each thing, whose pair is pair_at: at = add + row_of[pair], row_of NULL: pair /
     * top_k; weight = weights[pair], weights NULL: 0. */
    void (*route_write)(struct device *dev, struct route_note *notes, const int64_t *pair_at,
                        const int64_t *row_of, const float *weights, int32_t top_k,
                        const struct route_notes *layout);
    /* Notes in another order: block b, from from[b] on (ascending, from[n_blocks] in all), is read
     * to to[b] and on; both in host memory. at and weights (notes); weights NULL: not wanted. */
    void (*route_read)(struct device *dev, int64_t *at, float *weights,
                       const struct route_note *notes, const int64_t *from, const int64_t *to,
                       int32_t n_blocks);
    /* to_of[i] = to[b] + i - from[b] for i of the block b that begins at from[b] (ascending,
     * from[n_blocks] rows in all); both in host memory. */
    void (*route_blocks)(struct device *dev, int64_t *to_of, const int64_t *from,
                         const int64_t *to, int32_t n_blocks);

    /* ---- ends ---- */
    void (*embedding)(struct device *dev, elem_ptr y, const_elem_ptr table, const int32_t *tokens,
                      int64_t n, int64_t d);
    void (*embedding_backward)(struct device *dev, float *acc_table, const_elem_ptr dy,
                               const int32_t *tokens, int64_t n, int64_t d);
    /* acc_loss += the sum over rows with label >= 0 of -log softmax(x w^T)[label]; never holds
     * (n, vocab) whole. dx (n, d) and acc_dw (vocab, d) are of that sum; acc_dw NULL: w is
     * frozen; both NULL: the loss alone. beside: what is added to the logits; NULL: nothing. */
    void (*linear_cross_entropy)(struct device *dev, double *acc_loss, elem_ptr dx, float *acc_dw,
                                 const_elem_ptr x, const_elem_ptr w, const struct low_rank *beside,
                                 const int32_t *labels, int64_t n, int64_t d, int64_t vocab);

    /* ---- optimizer: decoupled AdamW over n elements ---- */
    /* w_elems: what w becomes, as elements; NULL: not wanted. */
    void (*adamw)(struct device *dev, float *w, float *m, float *v, elem_ptr w_elems,
                  const float *grad, int64_t n, const struct adamw_config *config);
    /* Muon over a whole matrix of n_heads blocks (rows, cols), one below the other: each block is
     * orthogonalised by itself with its own scale. m is the momentum, as w. model.md part 7. */
    void (*muon)(struct device *dev, float *w, float *m, const float *grad, int32_t n_heads,
                 int64_t rows, int64_t cols, const struct muon_config *config);
    /* x (n_blocks, rows, cols) in place: n_steps of Newton-Schulz on x / (|x| + 1e-7), which brings
     * singular values near 1. */
    void (*newton_schulz)(struct device *dev, float *x, int32_t n_blocks, int64_t rows,
                          int64_t cols, int32_t n_steps);
};

struct device {
    const struct device_ops *ops;
    enum elem_type elem; /* of its elements; the cpu's are float32 */
    uint32_t n_threads;  /* that compute; of a GPU, that the host may use beside it */
    bool     deterministic; /* asked for: bits do not depend on n or threads; the cpu's never do */
    bool     is_host;       /* its memory is the host's, which may look into it without a copy */
    uint8_t  uuid[16];      /* of a GPU, the same in every process; zeros: the host */
    struct spans *spans;    /* who measures it, spans.h; NULL: nobody */
    void    *state;         /* the backend's own */
};

/* Gives *out, ended with ops->close. n_threads 0: all cores this process may run on. -ENOMEM. */
int device_cpu_open(uint32_t n_threads, bool deterministic, struct device **out, struct err *err);

/* The same on GPU number index, whose elements may be of either type. Only in builds with GPU code.
 * -ENODEV: it is not there or of another kind; -EIO with CUDA's words. */
int device_cuda_open(uint32_t index, enum elem_type type, bool deterministic, struct device **out,
                     struct err *err);

/* Whether name is cpu or cuda:N and this build has it. -EINVAL, -ENOTSUP. */
int device_check(const char *name, struct err *err);

/* The device of that name. The cpu's elements are float32: -EINVAL for others. n_threads as in the
 * device; 0: all cores, of a GPU's host one. */
int device_open(const char *name, enum elem_type type, uint32_t n_threads, bool deterministic,
                struct device **out, struct err *err);

/* Bytes of one element. */
static inline size_t elem_size(const struct device *dev)
{
    return dev->elem == ELEM_BF16 ? 2 : 4;
}

#ifndef __cplusplus
/* &p[i] */
static inline elem *elem_at(const struct device *dev, elem *p, int64_t i)
{
    return (elem *)((char *)p + i * (int64_t)elem_size(dev));
}

static inline const elem *const_elem_at(const struct device *dev, const elem *p, int64_t i)
{
    return (const elem *)((const char *)p + i * (int64_t)elem_size(dev));
}
#endif

#ifdef __cplusplus
}
#endif

#endif
