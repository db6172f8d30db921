/* propose.h - what the planner would do for one job now: the verdicts on all layers as one plan
 *
 * It knows a placement per sparse layer (in force) and, once it has thought, the one that should
 * come after it. Pure. A large model is thought through in parts, a few tens of ms each, so that
 * the coordinator stays quick. */
#ifndef COORDINATOR_PROPOSE_H
#define COORDINATOR_PROPOSE_H

#include "common/err.h"
#include "common/mem.h"
#include "coordinator/load.h"
#include "coordinator/stages.h"

struct propose_policy {
    uint32_t n_devices;     /* ranks of an expert group */
    uint32_t n_ranks;       /* of the job */
    uint32_t n_spare;       /* slots per device beyond those that the experts need */
    uint32_t n_nodes;       /* that the devices are dealt to, in order; divides n_devices */
    uint32_t horizon_steps;
    double   min_gain;
};

struct proposal {
    uint64_t revision;      /* of the placement and the window it was made from; never 0 */
    uint32_t n_changed;     /* layers; 0: nothing to do */
    uint32_t n_moves;
    uint64_t n_bytes;
    double   gain_s, cost_s; /* of each step, once */
    double   imbalance_before, imbalance_predicted; /* max over mean time, mean over layers */
    double   step_s;        /* of the window */
    char     reason[320];   /* in words, also why there is nothing to do */
};

struct propose;

struct propose *propose_create(const struct propose_policy *policy);
void propose_destroy(struct propose *p);

/* A window, and the placement (NULL or without layers: experts in order) that served it. */
void propose_observe(struct propose *p, const struct load_window *w,
                     const Ballast__Placement *in_force);

/* Thinks one part further about the windows observed, at least one; true when all is thought
 * through. */
bool propose_think(struct propose *p);

/* Thinks to the end, if that is not done. Lives until the next propose_observe. */
const struct proposal *propose_now(struct propose *p);

/* Thinks of a placement from outside instead, which passed check_placement: the layers that it
 * names. After a window at least. -EINVAL for another shape. Until propose_forget or a window. */
int  propose_given(struct propose *p, const Ballast__Placement *given, struct err *err);
/* What is proposed next is thought of anew. */
void propose_forget(struct propose *p);

/* Before propose_placement: spreads the moves of the newest proposal over step boundaries, and
 * returns over how many. Of the
 * budget, what an expert weighs is filled in. */
uint32_t propose_stages(struct propose *p, struct stages_budget budget);

/* The proposed placement as the ranks get it: the layers that change, or all. In the arena. */
Ballast__Placement *propose_placement(const struct propose *p, uint32_t epoch, bool all_layers,
                                      struct arena *arena);

/* What travels, in the arena; returns how many. */
size_t propose_moves(const struct propose *p, struct arena *arena, Ballast__PlanMove ***out_moves);

/* The newest proposal, if there was one, came into force; the next window tells the placement. */
void propose_applied(struct propose *p);

#endif
