/* router.h - what routing, capacity and the losses of routing share */
#ifndef KERNELS_ROUTER_H
#define KERNELS_ROUTER_H

#include "kernels/device.h"

/* ids and keys (k): the k <= n largest sums in descending order, equal ones by id. */
void router_select_top(int32_t *ids, float *keys, const float *sums, int32_t n, int32_t k);

/* The weights (top_k) of one token's experts from its scores. */
void router_weights(float *weights, const float *scores, const int32_t *ids,
                    const struct router_shape *shape);

/* Gradients of a token's scores in d become those of its logits. */
void router_backward_of_scores(float *d, const float *scores, const struct router_shape *shape);

#endif
