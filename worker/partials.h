/* partials.h - weight gradients of experts whose bits do not depend on who serves them
 *
 * In deterministic mode the gradient of an expert is made of one block for each source rank and
 * piece of its micro-batch. A block is the same wherever it is computed; the expert's home adds
 * them in rank order, piece after piece and micro-batch after micro-batch. */
#ifndef WORKER_PARTIALS_H
#define WORKER_PARTIALS_H

#include "worker/dispatch.h"
#include "worker/shard.h"

struct partials;

/* For one piece of a layer's backward; x with gradients. Gives *out, ended with partials_close. */
int partials_open(struct shard *s, uint32_t layer, const struct dispatch_piece *piece,
                  const struct shard_experts *x, struct partials **out, struct err *err);

/* Zeroed blocks of x's stride, by source, for the rows that a slot serves; NULL where it serves
 * none of that source. Live until the next partials_of_slot. */
float *const *partials_of_slot(struct partials *p, uint32_t slot);

/* Once the slot's blocks are computed: adds them up if it is the only slot of its expert. */
void partials_add_single(struct partials *p, uint32_t slot);

/* Blocks of experts with copies go to the experts' homes and are added there. Ends p. Collective
 * over the expert group. */
int partials_close(struct partials *p, struct err *err);

#endif
