/* ops_cpu.h - the entries of the CPU's table; device.h says what each means */
#ifndef KERNELS_OPS_CPU_H
#define KERNELS_OPS_CPU_H

#include "kernels/device.h"

void cpu_axpy(struct device *dev, float *y, float a, const float *x, int64_t n);
void cpu_scale(struct device *dev, float *y, float a, int64_t n);
void cpu_add(struct device *dev, float *y, const float *x, int64_t n);
void cpu_cast(struct device *dev, float *y, const float *x, int64_t n);
void cpu_sum_squares(struct device *dev, double *acc, const float *x, int64_t n);
void cpu_all_finite(struct device *dev, int32_t *acc_bad, const float *x, int64_t n);
void cpu_checksum(struct device *dev, uint64_t *acc_sum, const uint64_t *x, int64_t n_words,
                  uint64_t first);
void cpu_linear(struct device *dev, float *y, const float *x, const float *w, int64_t n, int64_t in,
                int64_t out, float beta);
void cpu_linear_dx(struct device *dev, float *dx, const float *dy, const float *w, int64_t n,
                   int64_t in, int64_t out, float beta);
void cpu_linear_dw(struct device *dev, float *acc_dw, const float *dy, const float *x, int64_t n,
                   int64_t in, int64_t out);
void cpu_grouped_linear(struct device *dev, float *y, const float *x, const float *const *w,
                        const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out);
void cpu_grouped_linear_dx_pair(struct device *dev, float *dx, const float *dy,
                                const float *const *w, const float *dy2, const float *const *w2,
                                const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out);
void cpu_grouped_linear_dx(struct device *dev, float *dx, const float *dy, const float *const *w,
                           const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out,
                           float beta);
void cpu_grouped_linear_dw(struct device *dev, float *const *acc_dw, const float *dy,
                           const float *x, const int64_t *offsets, int32_t n_groups, int64_t in,
                           int64_t out);
void cpu_grouped_linear_packed(struct device *dev, float *y, const float *x,
                               const uint8_t *const *w, enum packing packing,
                               const int64_t *offsets, int32_t n_groups, int64_t in, int64_t out);
void cpu_grouped_linear_packed_dx(struct device *dev, float *dx, const float *dy,
                                  const uint8_t *const *w, enum packing packing,
                                  const int64_t *offsets, int32_t n_groups, int64_t in,
                                  int64_t out, float beta);
void cpu_unpack(struct device *dev, float *out, const uint8_t *w, enum packing packing,
                int64_t rows, int64_t cols, int64_t first, int64_t n_rows);
void cpu_heads_linear(struct device *dev, float *y, int64_t y_stride, const float *x,
                      int64_t x_stride, const float *w, int64_t w_stride, int64_t n,
                      int32_t n_heads, int64_t in, int64_t out, float beta);
void cpu_heads_linear_dx(struct device *dev, float *dx, int64_t x_stride, const float *dy,
                         int64_t y_stride, const float *w, int64_t w_stride, int64_t n,
                         int32_t n_heads, int64_t in, int64_t out, float beta);
void cpu_heads_linear_dw(struct device *dev, float *acc_dw, int64_t w_stride, const float *dy,
                         int64_t y_stride, const float *x, int64_t x_stride, int64_t n,
                         int32_t n_heads, int64_t in, int64_t out);
void cpu_rms_norm(struct device *dev, float *y, float *rstd, const float *x, const float *w,
                  int64_t n, int64_t d, float eps);
void cpu_rms_norm_backward(struct device *dev, float *dx, float *acc_dw, const float *dy,
                           const float *x, const float *w, const float *rstd, int64_t n, int64_t d,
                           float beta);
void cpu_gated_rms_norm(struct device *dev, float *y, float *rstd, const float *o, const float *g,
                        const float *w, int64_t n_rows, int64_t d, float eps);
void cpu_gated_rms_norm_backward(struct device *dev, float *d_o, float *dg, float *acc_dw,
                                 const float *dy, const float *o, const float *g, const float *w,
                                 const float *rstd, int64_t n_rows, int64_t d);
void cpu_l2_norm(struct device *dev, float *y, float *rstd, const float *x, int64_t n_rows,
                 int64_t d, float eps);
void cpu_l2_norm_backward(struct device *dev, float *dx, const float *dy, const float *y,
                          const float *rstd, int64_t n_rows, int64_t d);
void cpu_layer_norm(struct device *dev, float *y, float *stats, const float *x, const float *w,
                    const float *b, int64_t n, int64_t d, float eps);
void cpu_layer_norm_backward(struct device *dev, float *dx, float *acc_dw, float *acc_db,
                             const float *dy, const float *x, const float *w, const float *stats,
                             int64_t n, int64_t d, float beta);
void cpu_sigmoid_gate(struct device *dev, float *y, const float *o, const float *g, int64_t n);
void cpu_sigmoid_gate_backward(struct device *dev, float *d_o, float *dg, const float *dy,
                               const float *o, const float *g, int64_t n);
void cpu_sigmoid(struct device *dev, float *y, const float *x, int64_t n);
void cpu_sigmoid_backward(struct device *dev, float *dx, const float *dy, const float *y,
                          int64_t n);
void cpu_situ(struct device *dev, float *y, const float *a, const float *u, int64_t n, float b1,
              float b2);
void cpu_situ_backward(struct device *dev, float *da, float *du, const float *dy, const float *a,
                       const float *u, int64_t n, float b1, float b2);
void cpu_swiglu(struct device *dev, float *y, const float *a, const float *u, int64_t n);
void cpu_swiglu_backward(struct device *dev, float *da, float *du, const float *dy, const float *a,
                         const float *u, int64_t n);
void cpu_short_conv(struct device *dev, float *y, float *pre, const float *x, const float *w,
                    const int32_t *cu_seqlens, int32_t n_docs, int64_t channels, int32_t kernel);
void cpu_short_conv_backward(struct device *dev, float *dx, float *acc_dw, const float *dy,
                             const float *pre, const float *x, const float *w,
                             const int32_t *cu_seqlens, int32_t n_docs, int64_t channels,
                             int32_t kernel);
void cpu_kda_gate(struct device *dev, float *g, const float *z, const float *dt_bias,
                  const float *a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                  float lower_bound);
void cpu_kda_gate_backward(struct device *dev, float *dz, float *acc_d_dt_bias, float *acc_d_a_log,
                           const float *dg, const float *z, const float *dt_bias,
                           const float *a_log, int64_t n, int32_t n_heads, int32_t d, bool bounded,
                           float lower_bound);
size_t cpu_kda_saved_floats(struct device *dev, const struct kda_shape *shape);
void cpu_kda_forward(struct device *dev, float *o, float *final_state, float *saved, const float *q,
                     const float *k, const float *v, const float *g, const float *beta,
                     const float *initial_state, const struct kda_shape *shape);
void cpu_kda_backward(struct device *dev, float *dq, float *dk, float *dv, float *dg, float *dbeta,
                      float *d_initial_state, const float *d_o, const float *d_final_state,
                      const float *q, const float *k, const float *v, const float *g,
                      const float *beta, const float *initial_state, const float *saved,
                      const struct kda_shape *shape);
void cpu_attention(struct device *dev, float *o, float *lse, const float *q, const float *kv,
                   const float *k_rope, int64_t k_rope_stride, const struct attention_shape *shape);
void cpu_attention_backward(struct device *dev, float *dq, float *dkv, float *dk_rope,
                            int64_t dk_rope_stride, const float *d_o, const float *o,
                            const float *lse, const float *q, const float *kv, const float *k_rope,
                            int64_t k_rope_stride, const struct attention_shape *shape);
void cpu_rotary(struct device *dev, float *x, int32_t n_heads, int64_t stride, const float *table,
                const struct rotary_shape *shape);
void cpu_rotary_backward(struct device *dev, float *dx, int32_t n_heads, int64_t stride,
                         const float *table, const struct rotary_shape *shape);
void cpu_index_scores(struct device *dev, float *scores, int64_t begin, int64_t end, const float *q,
                      const float *k, const float *w, const struct index_shape *shape);
void cpu_index_select(struct device *dev, int32_t *selected, const float *q, const float *k,
                      const float *w, const struct index_shape *shape);
void cpu_sparse_attention(struct device *dev, float *o, float *lse, const float *q_latent,
                          const float *q_rope, int64_t q_rope_stride, const float *latent,
                          const float *k_rope, int64_t k_rope_stride, const int32_t *selected,
                          const struct sparse_shape *shape);
void cpu_sparse_attention_backward(struct device *dev, float *dq_latent, float *dq_rope,
                                   int64_t dq_rope_stride, float *d_latent, float *dk_rope,
                                   int64_t dk_rope_stride, const float *d_o, const float *o,
                                   const float *lse, const float *q_latent, const float *q_rope,
                                   int64_t q_rope_stride, const float *latent, const float *k_rope,
                                   int64_t k_rope_stride, const int32_t *selected,
                                   const struct sparse_shape *shape);
void cpu_index_loss(struct device *dev, double *acc_loss, float *dq, float *dk, float *dw,
                    float weight, const float *q, const float *k, const float *w,
                    const int32_t *selected, const float *q_latent, const float *q_rope,
                    int64_t q_rope_stride, const float *latent, const float *k_rope,
                    int64_t k_rope_stride, const float *lse, const struct index_shape *shape,
                    const struct sparse_shape *core);
void cpu_index_loss_dense(struct device *dev, double *acc_loss, float *dq, float *dk, float *dw,
                          float weight, const float *q, const float *k, const float *w,
                          const float *core_q, const float *core_kv, const float *k_rope,
                          int64_t k_rope_stride, const float *lse, const struct index_shape *shape,
                          const struct attention_shape *core);
void cpu_attn_res(struct device *dev, float *y, float *weights, const float *const *r,
                  int32_t n_rows, const float *g, const float *w, int64_t n, int64_t d, float eps);
void cpu_attn_res_backward(struct device *dev, float *const *acc_dr, float *acc_dg, float *acc_dw,
                           const float *dy, const float *const *r, const float *weights,
                           int32_t n_rows, const float *g, const float *w, int64_t n, int64_t d,
                           float eps);
void cpu_router(struct device *dev, float *scores, int32_t *ids, float *weights,
                const float *logits, const float *bias, const struct router_shape *shape);
void cpu_router_backward(struct device *dev, float *d_logits, const float *d_weights,
                         const float *scores, const int32_t *ids, const struct router_shape *shape);
void cpu_router_capacity(struct device *dev, int32_t *ids, float *weights, int32_t *sent,
                         int64_t *n_rerouted, int64_t *n_dropped, const float *scores,
                         const float *bias, const struct capacity_config *config,
                         const struct router_shape *shape);
void cpu_router_segment_counts(struct device *dev, int64_t *counts, const float *scores,
                               const int32_t *cu_rows, int32_t n_segments,
                               const struct router_shape *shape);
void cpu_router_aux_loss(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                         const float *scores, const int64_t *counts, const int32_t *cu_rows,
                         int32_t n_segments, const struct router_shape *shape);
void cpu_router_z_loss(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                       const float *logits, const struct router_shape *shape);
void cpu_router_histogram(struct device *dev, int64_t *counts, int64_t *histogram,
                          const float *scores, const int32_t *ids, const float *bias, float lo,
                          float hi, int32_t n_bins, const struct router_shape *shape);
void cpu_combine(struct device *dev, float *y, const float *slots, const float *weights, int64_t n,
                 int32_t top_k, int64_t d);
void cpu_combine_backward(struct device *dev, float *d_slots, float *d_weights, const float *dy,
                          const float *slots, const float *weights, int64_t n, int32_t top_k,
                          int64_t d);
void cpu_gather_rows(struct device *dev, float *out, const float *in, const int64_t *index,
                     const float *scale, int64_t n, int64_t d);
void cpu_scatter_add_rows(struct device *dev, float *acc, const float *in, const int64_t *index,
                          int64_t n, int64_t d);
void cpu_route_counts(struct device *dev, int32_t *counts, const int32_t *ids,
                      const struct route *route);
void cpu_route_pairs(struct device *dev, int64_t *place_of, int64_t *pair_at, const int32_t *ids,
                     const struct route *route);
void cpu_route_rows(struct device *dev, int32_t *counts, int64_t *row_of, int64_t *pair_at,
                    int64_t *token_at, const int64_t *place_of, const struct route_targets *targets,
                    const struct route *route);
void cpu_route_write(struct device *dev, struct route_note *notes, const int64_t *pair_at,
                     const int64_t *row_of, const float *weights, int32_t top_k,
                     const struct route_notes *layout);
void cpu_route_read(struct device *dev, int64_t *at, float *weights,
                    const struct route_note *notes, const int64_t *from, const int64_t *to,
                    int32_t n_blocks);
void cpu_route_blocks(struct device *dev, int64_t *to_of, const int64_t *from, const int64_t *to,
                      int32_t n_blocks);
void cpu_embedding(struct device *dev, float *y, const float *table, const int32_t *tokens,
                   int64_t n, int64_t d);
void cpu_embedding_backward(struct device *dev, float *acc_table, const float *dy,
                            const int32_t *tokens, int64_t n, int64_t d);
void cpu_linear_cross_entropy(struct device *dev, double *acc_loss, float *dx, float *acc_dw,
                              const float *x, const float *w, const struct low_rank *beside,
                              const int32_t *labels, int64_t n, int64_t d, int64_t vocab);
void cpu_adamw(struct device *dev, float *w, float *m, float *v, float *w_elems, const float *grad,
               int64_t n, const struct adamw_config *config);
void cpu_muon(struct device *dev, float *w, float *m, const float *grad, int32_t n_heads,
              int64_t rows, int64_t cols, const struct muon_config *config);
void cpu_newton_schulz(struct device *dev, float *x, int32_t n_blocks, int64_t rows, int64_t cols,
                       int32_t n_steps);

#endif
