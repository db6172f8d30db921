/* muon.h - Muon over matrices that lie cut over ranks
 *
 * A matrix is orthogonalised as a whole, or head by head. Where a unit is cut, its gradients and
 * momenta are gathered, each member makes the steps of every so manyth matrix, and all take their
 * slices of them; what is not a matrix is AdamW's (optim.h). */
#ifndef WORKER_MUON_H
#define WORKER_MUON_H

#include "common/model_spec.h"
#include "worker/shard.h"

struct muon_step {
    const struct model_spec *spec;
    bool  per_head; /* projections to heads are so many matrices */
    double lr, momentum, grad_scale, weight_decay;
};

/* The update of all that tensor_is_for_muon. m of such a tensor is its momentum. Collective. */
int muon_step(struct shard *s, const struct tensor_map *map, const struct muon_step *step,
              struct err *err);

#endif
