/* router_balance.h - the next selection bias of the experts of one layer
 *
 * Pure functions of counts summed over all micro-batches and ranks; called once an optimizer step,
 * on the host. */
#ifndef KERNELS_ROUTER_BALANCE_H
#define KERNELS_ROUTER_BALANCE_H

#include <stdint.h>

/* The histogram's range for this bias: [least bias - 1, greatest bias + 1]. */
void router_balance_range(const float *bias, int32_t n_experts, float *out_lo, float *out_hi);

/* Quantile rule: the bias with which each expert would have been chosen by top_k / n_experts of
 * the n_tokens, given histogram (n_experts, n_bins) of router_histogram over [lo, hi]; mean 0.
 * Without tokens the bias stays. */
void router_balance_quantile(float *bias, const int64_t *histogram, int64_t n_tokens,
                             int32_t n_experts, int32_t top_k, int32_t n_bins, float lo, float hi);

/* Sign rule: bias += rate sign(mean count - count). */
void router_balance_sign(float *bias, const int64_t *counts, int32_t n_experts, float rate);

#endif
