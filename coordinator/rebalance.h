/* rebalance.h - where a job's experts are, the plan that is open, and what the last one brought
 *
 * The durable part of a job's placements, changed by records only, and next to it what this life
 * of the coordinator knows: windows of load, the planner, how far the open plan is. */
#ifndef COORDINATOR_REBALANCE_H
#define COORDINATOR_REBALANCE_H

#include <stdio.h>

#include "coordinator/load.h"
#include "coordinator/migration.h"
#include "coordinator/propose.h"

struct rebalance {
    /* durable */
    bool                 is_auto;
    Ballast__Placement  *placement;    /* in force, all layers; NULL: experts in order, epoch 0 */
    uint32_t             newest_epoch; /* of all plans: none comes twice */
    Ballast__RecordPlan *plan;         /* the newest one, until it is in force or void */
    bool                 has_ended;    /* that plan; yet it may turn out to have been carried out */
    struct {
        uint32_t epoch;                /* 0: nothing to be seen */
        double   step_s, imbalance;    /* before */
    } unseen;                          /* a migration whose gain is not known yet */
    uint32_t             n_losses;     /* migrations in a row that made it worse */
    uint8_t              apply_key[IDEMPOTENCY_KEY_BYTES]; /* of the newest plan of a person */
    uint32_t             apply_epoch;

    /* of this life of the coordinator */
    struct migration     migration;
    struct load         *load;         /* NULL before the first report */
    struct propose      *propose;      /* NULL before the first window */
    uint32_t             n_nodes;      /* that propose was made for */
    bool                 is_new;       /* the newest window was not looked at */
    bool                 is_listed;    /* among those whose window will be looked at */
    bool                 is_thinking;  /* the planner has not thought it through */
    uint32_t             n_calm;       /* windows that pass before the next automatic plan */
};

void rebalance_init(struct rebalance *r, const Ballast__JobSpec *spec);
void rebalance_fini(struct rebalance *r);

static inline uint32_t rebalance_epoch(const struct rebalance *r)
{
    return r->placement ? r->placement->epoch : 0;
}

/* A plan that is recorded and neither ended nor in force. */
static inline bool rebalance_has_plan(const struct rebalance *r)
{
    return r->plan && !r->has_ended;
}

/* Each applies a record; NULL, or why it cannot follow what was before. */
const char *rebalance_apply_plan(struct rebalance *r, const Ballast__RecordPlan *p,
                                 uint32_t n_devices);
const char *rebalance_apply_plan_ended(struct rebalance *r, const Ballast__RecordPlanEnded *e);
const char *rebalance_apply_placement(struct rebalance *r, const Ballast__RecordPlacement *p,
                                      uint32_t n_devices);
const char *rebalance_apply_realised(struct rebalance *r, const Ballast__RecordRealised *x);

/* Before a job's settings change: where the balancing ones do, what was thought of is void. */
void rebalance_settings(struct rebalance *r, const Ballast__JobSpec *before,
                        const Ballast__JobSpec *after);

/* The attempt is over: what its ranks said is void. */
void rebalance_attempt_over(struct rebalance *r);

/* The durable part in words. */
void rebalance_dump(FILE *out, const struct rebalance *r);

#endif
