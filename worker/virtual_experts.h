/* virtual_experts.h - the experts that the virtual ranks of an attempt would have
 *
 * Tokens are routed by popularity, ranks are as busy as the placement in force makes them, plans
 * are prepared and carried out as trainers do it, and nothing is computed or sent. All ranks of the
 * attempt share one. */
#ifndef WORKER_VIRTUAL_EXPERTS_H
#define WORKER_VIRTUAL_EXPERTS_H

#include "common/cluster.h"
#include "proto/ballast.pb-c.h"
#include "worker/popularity.h"

/* A step in which all ranks are equally busy, and what part of it is in experts. */
#define VIRTUAL_STEP_S      0.2
#define VIRTUAL_EXPERT_PART 0.5

struct virtual_experts;

/* *out NULL: the job's model has none. cluster: rates of links. Both are kept. Gives *out, ended
 * with virtual_experts_destroy. */
int  virtual_experts_create(const Ballast__Start *start, const struct popularity *popularity,
                            const struct cluster *cluster, struct virtual_experts **out,
                            struct err *err);
void virtual_experts_destroy(struct virtual_experts *x);

/* A PREPARE has reached one more rank; once for each rank and epoch. */
void virtual_experts_prepare(struct virtual_experts *x, const Ballast__Prepare *prepare);
void virtual_experts_abort(struct virtual_experts *x, const Ballast__AbortPlan *abort_plan);
/* What may change in the job's life, from the next window on. */
void virtual_experts_settings(struct virtual_experts *x, const Ballast__JobSpec *spec);

struct virtual_step {
    double mean_s, busiest_s; /* in experts: of a rank, of the one that all wait for */
    double pause_s;           /* that moves held it up */
    double imbalance;         /* max over mean of rows over ranks, mean over layers */
    Ballast__LoadReport *load; /* of the window that it ends, for load_report__free_unpacked; or
                                * NULL */
};

/* Step `step`, counted from 1, and its boundary. */
void virtual_experts_step(struct virtual_experts *x, uint64_t step, struct virtual_step *out);

/* What a rank says of plans. Borrows what it sets. */
void virtual_experts_say(const struct virtual_experts *x, uint32_t rank,
                         Ballast__RankState *state);

#endif
