/* cuda_kda.h - the KDA recurrence on the GPU; device.h says what the ops do */
#ifndef KERNELS_CUDA_KDA_H
#define KERNELS_CUDA_KDA_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* head_dim is 16, 32, 64 or 128; saved is aligned to 16 bytes and keeps one state a chunk and head,
 * as elements, but of a document's first chunk. The backward takes as much scratch as some nine
 * tensors of q's shape, but of no more than 32 heads; many short documents go in several turns. */
size_t cuda_kda_saved_floats(struct device *dev, const struct kda_shape *shape);
void cuda_kda_forward(struct device *dev, elem_ptr o, float *final_state, float *saved,
                      const_elem_ptr q, const_elem_ptr k, const_elem_ptr v, const float *g,
                      const_elem_ptr beta, const float *initial_state,
                      const struct kda_shape *shape);
void cuda_kda_backward(struct device *dev, elem_ptr dq, elem_ptr dk, elem_ptr dv, float *dg,
                       elem_ptr dbeta, float *d_initial_state, const_elem_ptr d_o,
                       const float *d_final_state, const_elem_ptr q, const_elem_ptr k,
                       const_elem_ptr v, const float *g, const_elem_ptr beta,
                       const float *initial_state, const float *saved,
                       const struct kda_shape *shape);

#ifdef __cplusplus
}
#endif

#endif
