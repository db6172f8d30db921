/* ops_cuda.h - the entries of the GPU's table; device.h says what each means
 *
 * cuda_<op> is defined in C or, with C linkage, in a .cu file, where elem_ptr is void *. */
#ifndef KERNELS_OPS_CUDA_H
#define KERNELS_OPS_CUDA_H

#include "kernels/device.h"

/* Every op of the table but name, close and memory. */
#define CUDA_OPS(OP)                                                                               \
    OP(axpy) OP(scale) OP(add) OP(to_f32) OP(to_elem) OP(sum_squares) OP(all_finite) OP(checksum)  \
    OP(linear) OP(linear_f32) OP(linear_dx) OP(linear_dw)                                          \
    OP(grouped_linear) OP(grouped_linear_dx) OP(grouped_linear_dx_pair) OP(grouped_linear_dw)      \
    OP(grouped_linear_packed) OP(grouped_linear_packed_dx) OP(unpack)                              \
    OP(heads_linear) OP(heads_linear_dx) OP(heads_linear_dw)                                       \
    OP(rms_norm) OP(rms_norm_backward) OP(gated_rms_norm) OP(gated_rms_norm_backward)              \
    OP(l2_norm) OP(l2_norm_backward) OP(layer_norm) OP(layer_norm_backward)                        \
    OP(sigmoid_gate) OP(sigmoid_gate_backward) OP(sigmoid) OP(sigmoid_backward)                    \
    OP(situ) OP(situ_backward) OP(swiglu) OP(swiglu_backward)                                      \
    OP(short_conv) OP(short_conv_backward) OP(kda_gate) OP(kda_gate_backward)                      \
    OP(kda_saved_floats) OP(kda_forward) OP(kda_backward)                                          \
    OP(attention) OP(attention_backward) OP(rotary) OP(rotary_backward)                            \
    OP(index_scores) OP(index_select) OP(sparse_attention) OP(sparse_attention_backward)           \
    OP(index_loss) OP(index_loss_dense) OP(attn_res) OP(attn_res_backward)                         \
    OP(router) OP(router_backward) OP(router_capacity) OP(router_segment_counts)                   \
    OP(router_aux_loss) OP(router_z_loss) OP(router_histogram)                                     \
    OP(combine) OP(combine_backward) OP(gather_rows) OP(scatter_add_rows)                          \
    OP(route_counts) OP(route_pairs) OP(route_rows) OP(route_write) OP(route_read)                 \
    OP(route_blocks)                                                                               \
    OP(embedding) OP(embedding_backward) OP(linear_cross_entropy)                                  \
    OP(adamw) OP(muon) OP(newton_schulz)

#ifdef __cplusplus
extern "C" {
#endif

/* The table says what an op takes, so that is its declaration. */
#define DECLARE(op) extern __typeof__(*((struct device_ops *)0)->op) cuda_##op;
CUDA_OPS(DECLARE)

#ifdef __cplusplus
}
#endif

#endif
