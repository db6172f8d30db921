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
 * calls a device's ops. */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include <math.h>

#include "common/err.h"
#include "common/types.h"

struct device;

/* What the KDA recurrence keeps for its backward; sizes from kda_saved_floats. */
struct kda_shape {
    int64_t n_tokens;
    const int32_t *cu_seqlens; /* n_docs + 1 */
    int32_t n_docs;
    int32_t n_heads, head_dim; /* d_k = d_v = head_dim */
    float   scale;             /* s, applied to q: head_dim^-0.5 */
};

struct attention_shape {
    int64_t n_tokens;
    const int32_t *cu_seqlens;
    int32_t n_docs;
    int32_t n_heads, nope_dim, rope_dim, v_dim;
    float   scale; /* (nope + rope)^-0.5 */
};

struct router_shape {
    int64_t n_tokens;
    int32_t n_experts, top_k;
    bool    renormalize;
    float   routed_scale;
};

struct adamw_config {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale;         /* gradients are multiplied by it first: 1 / tokens, times clipping */
    float correction1, correction2; /* 1 - beta^t */
};

struct device_ops {
    const char *name;
    void (*close)(struct device *dev);

    /* ---- memory: zeroed, 64-byte aligned; NULL when the device has no more ---- */
    void *(*alloc)(struct device *dev, size_t n_bytes);
    void (*free)(struct device *dev, void *p);
    void (*copy)(struct device *dev, void *to, const void *from, size_t n_bytes);
    void (*to_device)(struct device *dev, void *to, const void *host, size_t n_bytes);
    void (*to_host)(struct device *dev, void *host, const void *from, size_t n_bytes);
    void (*zero)(struct device *dev, void *p, size_t n_bytes);
    void (*synchronize)(struct device *dev);

    /* ---- elementwise ---- */
    /* y += a x */
    void (*axpy)(struct device *dev, float *y, float a, const float *x, int64_t n);
    void (*scale)(struct device *dev, float *y, float a, int64_t n);
    /* sum of squares, in double, fixed tree */
    double (*sum_squares)(struct device *dev, const float *x, int64_t n);
    /* false if any element is NaN or infinite */
    bool (*all_finite)(struct device *dev, const float *x, int64_t n);

    /* ---- products: x (n, in), w (out, in), y (n, out); beta 0 assigns, 1 adds ---- */
    void (*linear)(struct device *dev, float *y, const float *x, const float *w, int64_t n,
                   int64_t in, int64_t out, float beta);
    /* dx = dy w (+ beta dx) */
    void (*linear_dx)(struct device *dev, float *dx, const float *dy, const float *w, int64_t n,
                      int64_t in, int64_t out, float beta);
    /* acc_dw += dy^T x */
    void (*linear_dw)(struct device *dev, float *acc_dw, const float *dy, const float *x, int64_t n,
                      int64_t in, int64_t out);
    /* The same per group: rows offsets[g] .. offsets[g+1] with weight w[g]; empty groups are
     * fine. Groups are spread over the threads. */
    void (*grouped_linear)(struct device *dev, float *y, const float *x, const float *const *w,
                           const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out);
    void (*grouped_linear_dx)(struct device *dev, float *dx, const float *dy, const float *const *w,
                              const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                              float beta);
    void (*grouped_linear_dw)(struct device *dev, float *const *acc_dw, const float *dy,
                              const float *x, const int64_t *offsets, int32_t n_groups, int64_t in,
                              int64_t out);

    /* ---- norms ---- */
    /* y = w x rsqrt(mean x^2 + eps); rstd (n) is kept for the backward */
    void (*rms_norm)(struct device *dev, float *y, float *rstd, const float *x, const float *w,
                     int64_t n, int64_t d, float eps);
    /* dx = beta dx + ...; acc_dw (d) */
    void (*rms_norm_backward)(struct device *dev, float *dx, float *acc_dw, const float *dy,
                              const float *x, const float *w, const float *rstd, int64_t n,
                              int64_t d, float beta);
    /* KDA's output: y = rms_norm(o per head of d; w (d)) * sigmoid(g). Rows are n tokens x heads. */
    void (*gated_rms_norm)(struct device *dev, float *y, float *rstd, const float *o,
                           const float *g, const float *w, int64_t n_rows, int64_t d, float eps);
    void (*gated_rms_norm_backward)(struct device *dev, float *d_o, float *dg, float *acc_dw,
                                    const float *dy, const float *o, const float *g, const float *w,
                                    const float *rstd, int64_t n_rows, int64_t d);
    /* y = x / sqrt(sum x^2 + eps) per row of d; rstd (n_rows) */
    void (*l2_norm)(struct device *dev, float *y, float *rstd, const float *x, int64_t n_rows,
                    int64_t d, float eps);
    void (*l2_norm_backward)(struct device *dev, float *dx, const float *dy, const float *y,
                             const float *rstd, int64_t n_rows, int64_t d);

    /* ---- gates and activations ---- */
    /* y = o * sigmoid(g) */
    void (*sigmoid_gate)(struct device *dev, float *y, const float *o, const float *g, int64_t n);
    void (*sigmoid_gate_backward)(struct device *dev, float *d_o, float *dg, const float *dy,
                                  const float *o, const float *g, int64_t n);
    void (*sigmoid)(struct device *dev, float *y, const float *x, int64_t n);
    /* dx = dy y (1 - y) */
    void (*sigmoid_backward)(struct device *dev, float *dx, const float *dy, const float *y,
                             int64_t n);
    /* y = b1 tanh(a/b1) sigmoid(a) * b2 tanh(u/b2); model.md 5.1 */
    void (*situ)(struct device *dev, float *y, const float *a, const float *u, int64_t n, float b1,
                 float b2);
    void (*situ_backward)(struct device *dev, float *da, float *du, const float *dy, const float *a,
                          const float *u, int64_t n, float b1, float b2);
    /* y = silu(a) u */
    void (*swiglu)(struct device *dev, float *y, const float *a, const float *u, int64_t n);
    void (*swiglu_backward)(struct device *dev, float *da, float *du, const float *dy,
                            const float *a, const float *u, int64_t n);

    /* ---- KDA; model.md part 2 ---- */
    /* y = silu(causal depthwise convolution of x (n, channels) with w (channels, kernel)), no bias,
     * last tap on the current token, window reset at each document; pre keeps the value before
     * the silu. */
    void (*short_conv)(struct device *dev, float *y, float *pre, const float *x, const float *w,
                       const int32_t *cu_seqlens, int32_t n_docs, int64_t channels, int32_t kernel);
    void (*short_conv_backward)(struct device *dev, float *dx, float *acc_dw, const float *dy,
                                const float *pre, const float *x, const float *w,
                                const int32_t *cu_seqlens, int32_t n_docs, int64_t channels,
                                int32_t kernel);
    /* g (n, heads, d) from z (n, heads, d) + dt_bias (heads, d) and a_log (heads). bounded: g =
     * lower_bound sigmoid(exp(a_log) z), else g = -exp(a_log) softplus(z); z includes the bias. */
    void (*kda_gate)(struct device *dev, float *g, const float *z, const float *dt_bias,
                     const float *a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                     float lower_bound);
    void (*kda_gate_backward)(struct device *dev, float *dz, float *acc_d_dt_bias,
                              float *acc_d_a_log, const float *dg, const float *z,
                              const float *dt_bias, const float *a_log, int64_t n, int32_t n_heads,
                              int32_t d, bool bounded, float lower_bound);
    /* Floats that kda_forward leaves in saved for kda_backward (chunk states and more). */
    size_t (*kda_saved_floats)(struct device *dev, const struct kda_shape *shape);
    /* q, k (normalised), v, g, o: (n, heads, d); beta (n, heads). initial_state and final_state:
     * (n_docs, heads, d, d) or NULL (zero, not wanted). */
    void (*kda_forward)(struct device *dev, float *o, float *final_state, float *saved,
                        const float *q, const float *k, const float *v, const float *g,
                        const float *beta, const float *initial_state,
                        const struct kda_shape *shape);
    /* d_final_state and d_initial_state may be NULL. */
    void (*kda_backward)(struct device *dev, float *dq, float *dk, float *dv, float *dg,
                         float *dbeta, float *d_initial_state, const float *d_o,
                         const float *d_final_state, const float *q, const float *k, const float *v,
                         const float *g, const float *beta, const float *initial_state,
                         const float *saved, const struct kda_shape *shape);

    /* ---- latent attention, expanded form; model.md part 3 ---- */
    /* q (n, heads, nope + rope); kv (n, heads, nope + v): keys then values; k_rope rows of one
     * shared key part, k_rope_stride floats apart; o (n, heads, v); lse (n, heads). */
    void (*attention)(struct device *dev, float *o, float *lse, const float *q, const float *kv,
                      const float *k_rope, int64_t k_rope_stride,
                      const struct attention_shape *shape);
    /* dk_rope (n, d_k_rope_stride): its rope_dim leading floats of each row are assigned. */
    void (*attention_backward)(struct device *dev, float *dq, float *dkv, float *dk_rope,
                               int64_t dk_rope_stride, const float *d_o, const float *o,
                               const float *lse, const float *q, const float *kv,
                               const float *k_rope, int64_t k_rope_stride,
                               const struct attention_shape *shape);

    /* ---- attention residuals; model.md 1.2 ---- */
    /* y (n, d) = softmax-weighted sum of the rows r[0..n_rows) (each (n, d)); norm g (d), proj w
     * (d); weights (n, n_rows) is kept. y may be one of r. */
    void (*attn_res)(struct device *dev, float *y, float *weights, const float *const *r,
                     int32_t n_rows, const float *g, const float *w, int64_t n, int64_t d,
                     float eps);
    /* acc_dr[i] (n, d) += ...; acc_dg, acc_dw (d) */
    void (*attn_res_backward)(struct device *dev, float *const *acc_dr, float *acc_dg,
                              float *acc_dw, const float *dy, const float *const *r,
                              const float *weights, int32_t n_rows, const float *g, const float *w,
                              int64_t n, int64_t d, float eps);

    /* ---- router and combine; model.md 5.1 ---- */
    /* scores (n, E) = sigmoid(logits); ids (n, k): the largest of scores + bias, descending,
     * equal ones to the lower index; weights (n, k) = scores[ids] / (sum + 1e-20) * scale. */
    void (*router)(struct device *dev, float *scores, int32_t *ids, float *weights,
                   const float *logits, const float *bias, const struct router_shape *shape);
    /* d_logits (n, E) from d_weights (n, k) */
    void (*router_backward)(struct device *dev, float *d_logits, const float *d_weights,
                            const float *scores, const int32_t *ids,
                            const struct router_shape *shape);
    /* counts (E) += tokens per expert; histogram (E, n_bins) += margins r = alpha - score, where
     * alpha is the token's (k+1)-th largest of score + bias; bins are uniform over [lo, hi].
     * histogram NULL: the counts alone. */
    void (*router_histogram)(struct device *dev, int64_t *counts, int64_t *histogram,
                             const float *scores, const int32_t *ids, const float *bias, float lo,
                             float hi, int32_t n_bins, const struct router_shape *shape);
    /* y (n, d) = sum over k, in order, of weights (n, k) * slots (n, k, d) */
    void (*combine)(struct device *dev, float *y, const float *slots, const float *weights,
                    int64_t n, int32_t top_k, int64_t d);
    /* d_slots (n, k, d) = weights dy; d_weights (n, k) = slots . dy */
    void (*combine_backward)(struct device *dev, float *d_slots, float *d_weights, const float *dy,
                             const float *slots, const float *weights, int64_t n, int32_t top_k,
                             int64_t d);
    /* out[i] = in[index[i]] for rows of d; and acc[index[i]] += in[i], in ascending i */
    void (*gather_rows)(struct device *dev, float *out, const float *in, const int64_t *index,
                        int64_t n, int64_t d);
    void (*scatter_add_rows)(struct device *dev, float *acc, const float *in, const int64_t *index,
                             int64_t n, int64_t d);

    /* ---- ends ---- */
    void (*embedding)(struct device *dev, float *y, const float *table, const int32_t *tokens,
                      int64_t n, int64_t d);
    void (*embedding_backward)(struct device *dev, float *acc_table, const float *dy,
                               const int32_t *tokens, int64_t n, int64_t d);
    /* Sum over rows with label >= 0 of -log softmax(x w^T)[label]; never holds (n, vocab) whole.
     * dx (n, d) and acc_dw (vocab, d) are of that sum; both NULL: the loss alone. */
    double (*linear_cross_entropy)(struct device *dev, float *dx, float *acc_dw, const float *x,
                                   const float *w, const int32_t *labels, int64_t n, int64_t d,
                                   int64_t vocab);

    /* ---- optimizer: decoupled AdamW over n elements ---- */
    void (*adamw)(struct device *dev, float *w, float *m, float *v, const float *grad, int64_t n,
                  const struct adamw_config *config);
};

struct device {
    const struct device_ops *ops;
    uint32_t n_threads;
    bool     deterministic; /* asked for: bits do not depend on n or threads; the cpu's never do */
    void    *state;         /* the backend's own */
};

/* Gives *out, ended with ops->close. n_threads 0: all cores this process may run on. -ENOMEM. */
int device_cpu_open(uint32_t n_threads, bool deterministic, struct device **out, struct err *err);

#endif
