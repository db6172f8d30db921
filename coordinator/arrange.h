/* arrange.h - the ways to find a placement for what is believed of the next window */
#ifndef COORDINATOR_ARRANGE_H
#define COORDINATOR_ARRANGE_H

#include "coordinator/search.h"

#define ARRANGE_JUDGES_MAX 4

struct arrange {
    struct search_problem problem;
    const struct belief  *belief;
    uint32_t n_phases; /* of search, each on scenarios of its own */
    uint32_t n_drawn;  /* phases whose scenarios are there already */
    float   *load;     /* (n_phases, n_experts, SCENARIOS) */
    uint32_t n_tries;  /* of changes, with care; 0 where there is no time for it */
    float   *careful;  /* (REFINE_DRAWS, n_experts, SCENARIOS); NULL before the first */
    uint32_t n_judges; /* draws that only the judge sees */
    struct search *search; /* one after the other uses its memory; NULL before the first */
    float   *judge;    /* (n_judges, n_experts, SCENARIOS); NULL before the first is judged */
};

/* problem's weights are made even. Ended with arrange_fini; belief is kept until then. */
void arrange_init(struct arrange *a, const struct search_problem *problem,
                  const struct belief *belief, uint32_t effort_us);
void arrange_fini(struct arrange *a);

/* From nothing, after `start`'s shape: copies, greedy places, search. */
void arrange_fresh(struct arrange *a, const struct placement *start, struct placement *out);

/* Homes stay where they are in start; search over the other copies alone. Copies added never make
 * a window worse, whatever comes, because shares are free. */
void arrange_copies(struct arrange *a, const struct placement *start, struct placement *out);

/* From start by single changes, each of which pays for itself at problem.move_price; of the path
 * the step is taken at which ratio + price of moves is least. */
void arrange_steps(struct arrange *a, const struct placement *start, struct placement *out);

/* Changes p until the loads are balanced to the last row, or no single swap improves it further.
 * keep_homes, keep_price as in the problem. */
void arrange_exactly(const double *load, const double *speed, bool keep_homes,
                     struct placement *p);

/* Max over mean time in n_judges * SCENARIOS scenarios that no arrangement has seen. */
void arrange_judge(struct arrange *a, const struct placement *p, float *out);

#endif
