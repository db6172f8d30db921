/* balance_parts.h - what the parts of the balancer share */
#ifndef COORDINATOR_BALANCE_PARTS_H
#define COORDINATOR_BALANCE_PARTS_H

#include "coordinator/arrange.h"
#include "coordinator/balance.h"

struct split;

struct trial {
    bool     is_on;
    enum balance_kind kind;
    struct placement  before; /* what would be in force without the plan */
    struct split     *split;  /* of it */
    uint32_t n_windows;
    double   realised, predicted_per_window;
};

struct balance {
    struct balance_policy policy;
    struct forecast *forecast;
    uint32_t n_experts, n_devices, n_slots;
    uint32_t cooldown;            /* windows left */
    uint32_t barred[BALANCE_KINDS], n_losses[BALANCE_KINDS];
    struct trial trial;
    bool     was_tried;
    uint32_t first_rest;          /* so that layers do not wake all at once */
    double   found;               /* the ratio of the newest search, with what it found; 0: none */
    uint32_t n_resting;           /* windows left in which that is believed */
    bool     is_free;             /* of the present proposal */
};

/* ---- balance --------------------------------------------------------------------------------- */

/* What the heaviest device would take if all were even. */
double balance_even_time(const struct balance *b, const double *load);

/* Max over mean time of p under that load; out_share, unless NULL, gets the shares for it. */
double balance_ratio(const struct balance *b, const struct placement *p, const double *load,
                     double *out_share);

/* ---- balance_trial: what a plan really brings ------------------------------------------------ */

/* A window under the placement in force, beside the one that the plan replaced. */
void trial_watch(struct balance *b, const double *load, const struct placement *in_force);
void trial_end(struct balance *b);

/* ---- balance_candidate: a placement that could be had, judged and priced --------------------- */

#define N_JUDGED_MAX (ARRANGE_JUDGES_MAX * SCENARIOS)

struct candidate {
    struct placement placement;
    float    ratio[N_JUDGED_MAX];
    uint32_t n_judged;
    struct balance_verdict verdict;
    double net; /* over the horizon, in windows */
};

/* How it does in the judge's scenarios; the rest is for what has been judged. */
void   candidate_judge(const struct balance *b, struct arrange *a, struct candidate *c);
double candidate_ratio(const struct candidate *c); /* the mean */

/* Gain and risk of c against staying with `stay`, which is in force; what moves cost comes on top:
 * returns what c is worth at best. */
double candidate_measure(const struct balance *b, const struct candidate *stay,
                         struct candidate *c);
/* Gain, risk and price. */
void   candidate_weigh(const struct balance *b, const struct candidate *stay, struct candidate *c);
bool   candidate_is_worth_it(const struct balance *b, const struct candidate *c);

/* Nobody could win min_gain any more. */
bool   candidate_is_even_enough(const struct balance *b, const struct candidate *c);

/* ---- balance_search -------------------------------------------------------------------------- */

bool balance_differs(const struct placement *p, const struct placement *from);

/* The best of all kinds against `stay`, which is in force and judged; its copy, of the kind
 * BALANCE_STAY, if none is better. The caller ends best's placement. */
void balance_search(struct balance *b, struct arrange *a, const struct candidate *stay,
                    struct candidate *best);

#endif
