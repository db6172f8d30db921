/* stages.h - a plan's moves over several step boundaries, each of which may hold up a step a little
 *
 * What is in force after each stage is a placement in itself. The moves that win most for what they
 * send go first, so that each prefix is about as good as one of its size can be. */
#ifndef COORDINATOR_STAGES_H
#define COORDINATOR_STAGES_H

#include "common/placement.h"

struct stages_budget {
    uint64_t boundary_bytes; /* that a device sends, and receives, in a stage; 0: no limit */
    uint32_t layer_moves;    /* of one layer, likewise; 0: no limit */
    uint32_t n_max;          /* stages, 1 to STAGES_MAX; with more the budgets are made larger */
    uint64_t weight_bytes, state_bytes; /* of one expert, that move at a boundary */
};

struct stages_layer {
    const struct placement *from;
    struct placement *to;     /* settled: what stays on a device stays in its slot. What arrives at
                               * one device may change places there */
    const double     *load;   /* (n_experts) expected */
    double            worth;  /* of evenness in this layer, next to others */
    uint32_t         *stage;  /* (n_devices, n_slots) is filled, as placement_at_stage takes it */
};

/* Returns the number of stages; 1: all at once. At least one expert moves in each, whatever the
 * budget. All layers of one shape. */
uint32_t stages_assign(const struct stages_layer *layers, uint32_t n_layers,
                       const struct stages_budget *budget);

#endif
