/* cuda_attention.h - the GPU's attention: dense, by an indexer's choice, and the indexer's loss
 *
 * What each op means is said in device.h. */
#ifndef KERNELS_CUDA_ATTENTION_H
#define KERNELS_CUDA_ATTENTION_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

void cuda_attention(struct device *dev, elem_ptr o, float *lse, const_elem_ptr q,
                    const_elem_ptr kv, const_elem_ptr k_rope, int64_t k_rope_stride,
                    const struct attention_shape *shape);
void cuda_attention_backward(struct device *dev, elem_ptr dq, elem_ptr dkv, elem_ptr dk_rope,
                             int64_t dk_rope_stride, const_elem_ptr d_o, const_elem_ptr o,
                             const float *lse, const_elem_ptr q, const_elem_ptr kv,
                             const_elem_ptr k_rope, int64_t k_rope_stride,
                             const struct attention_shape *shape);
void cuda_index_scores(struct device *dev, float *scores, int64_t begin, int64_t end,
                       const_elem_ptr q, const_elem_ptr k, const_elem_ptr w,
                       const struct index_shape *shape);
void cuda_index_select(struct device *dev, int32_t *selected, const_elem_ptr q, const_elem_ptr k,
                       const_elem_ptr w, const struct index_shape *shape);
void cuda_sparse_attention(struct device *dev, elem_ptr o, float *lse, const_elem_ptr q_latent,
                           const_elem_ptr q_rope, int64_t q_rope_stride, const_elem_ptr latent,
                           const_elem_ptr k_rope, int64_t k_rope_stride, const int32_t *selected,
                           const struct sparse_shape *shape);
void cuda_sparse_attention_backward(struct device *dev, elem_ptr dq_latent, elem_ptr dq_rope,
                                    int64_t dq_rope_stride, elem_ptr d_latent, elem_ptr dk_rope,
                                    int64_t dk_rope_stride, const_elem_ptr d_o, const_elem_ptr o,
                                    const float *lse, const_elem_ptr q_latent,
                                    const_elem_ptr q_rope, int64_t q_rope_stride,
                                    const_elem_ptr latent, const_elem_ptr k_rope,
                                    int64_t k_rope_stride, const int32_t *selected,
                                    const struct sparse_shape *shape);
void cuda_index_loss(struct device *dev, double *acc_loss, elem_ptr dq, elem_ptr dk, elem_ptr dw,
                     float weight, const_elem_ptr q, const_elem_ptr k, const_elem_ptr w,
                     const int32_t *selected, const_elem_ptr q_latent, const_elem_ptr q_rope,
                     int64_t q_rope_stride, const_elem_ptr latent, const_elem_ptr k_rope,
                     int64_t k_rope_stride, const float *lse, const struct index_shape *shape,
                     const struct sparse_shape *core);
void cuda_index_loss_dense(struct device *dev, double *acc_loss, elem_ptr dq, elem_ptr dk,
                           elem_ptr dw, float weight, const_elem_ptr q, const_elem_ptr k,
                           const_elem_ptr w, const_elem_ptr core_q, const_elem_ptr core_kv,
                           const_elem_ptr k_rope, int64_t k_rope_stride, const float *lse,
                           const struct index_shape *shape, const struct attention_shape *core);

#ifdef __cplusplus
}
#endif

#endif
