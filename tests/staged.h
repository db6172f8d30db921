/* staged.h - stages from one random placement to another, as the coordinator makes them */
#ifndef TESTS_STAGED_H
#define TESTS_STAGED_H

#include <stdlib.h>

#include "common/mem.h"
#include "coordinator/stages.h"
#include "worker/slots.h"

/* As many as there can be: in each a rank sends, and receives, one expert of a layer. What stays on
 * a device of `to` takes its slot in `from`. stage: per layer, to be freed. */
static inline void staged(const struct slots *from, struct slots *to, uint32_t **stage)
{
    struct stages_layer *layers = xcalloc(to->n_layers, sizeof *layers);
    double *load = xcalloc(to->n_experts, sizeof *load);
    uint32_t n = 0;
    for (uint32_t e = 0; e < to->n_experts; e++)
        load[e] = 1 + e;
    for (uint32_t l = 0; l < to->n_layers; l++) {
        struct placement *map = &to->layers[l].map, wanted;
        if (!slots_is_sparse(to, l))
            continue;
        placement_init_like(&wanted, map);
        placement_keep_slots(map, &from->layers[l].map);
        placement_share_evenly(map);
        placement_keep_homes(map, &wanted);
        placement_fini(&wanted);
        stage[l] = xcalloc(placement_n_total(map), sizeof *stage[l]);
        layers[n++] = (struct stages_layer){.from = &from->layers[l].map, .to = map, .load = load,
                                            .worth = 1, .stage = stage[l]};
    }
    stages_assign(layers, n, &(struct stages_budget){.layer_moves = 1, .n_max = STAGES_MAX});
    slots_index(to);
    free(load);
    free(layers);
}

#endif
