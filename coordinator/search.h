/* search.h - improves a placement for a set of scenarios, one small change at a time
 *
 * The objective is the heaviest device's time, averaged over scenarios, shares being re-split in
 * each of them; what is summed is a high power of every device's time, which has a slope where a
 * maximum has none. */
#ifndef COORDINATOR_SEARCH_H
#define COORDINATOR_SEARCH_H

#include "common/placement.h"
#include "coordinator/scenario.h"

struct search_problem {
    uint32_t n_experts, n_devices, n_slots;
    uint32_t n_nodes;      /* devices are dealt to nodes in order; divides n_devices */
    const double *speed;   /* (n_devices) relative, mean 1; NULL for equal ones */
    float weight[SCENARIOS]; /* how much a scenario counts; sums to 1 */
    float move_price;      /* what an expert that travels must win, in units of the objective */
    float node_price;      /* a device's worth of rows that a copy spares the links, likewise */
    bool  keep_homes;      /* only other copies come, go and move */
    uint64_t seed;
};

struct search;

/* Starts from p, which is in force: moves are counted against it. load: (n_experts, SCENARIOS)
 * as scenario_draw gives them. Gives; search_destroy. problem and p are kept until then. */
struct search *search_create(const struct search_problem *problem, const struct placement *p,
                             const float *load);
void search_destroy(struct search *s);
/* The same as if made anew, in the memory that is there; problem as it is now, p of its shape. */
void search_restart(struct search *s, const struct placement *p, const float *load);

/* Other scenarios from here on: what was fitted to the accidents of a few draws does not last. */
void search_redraw(struct search *s, const float *load);

/* Looks at n_candidates changes and takes what improves, or worsens by less than a random part of
 * `heat`, in units of the objective; 0 only improves. */
void search_run(struct search *s, uint32_t n_candidates, float heat);

/* Max over mean time in each scenario, as far as shares were relaxed. */
void search_ratios(const struct search *s, float out[SCENARIOS]);

/* One step of the path that was taken; step 0 is the start. */
struct search_step {
    double   ratio;   /* weighted mean over scenarios of max over mean time, after it */
    uint32_t n_moves; /* (device, expert) pairs that the start does not have */
};
uint32_t search_n_steps(const struct search *s); /* >= 1 */
const struct search_step *search_steps(const struct search *s); /* lives until search_run */

/* The placement after a step, with even shares; an expert that stays on its device stays in its
 * slot, homes as near to the start's as can be. */
void search_placement(const struct search *s, uint32_t step, struct placement *out);

#endif
