/* refine.h - improves a placement with care: many scenarios, and what re-splitting makes of changes
 *
 * A search looks at many changes and judges each in passing; here few are looked at, those that the
 * prices of the devices' time recommend, and shares are found anew around each before it counts. */
#ifndef COORDINATOR_REFINE_H
#define COORDINATOR_REFINE_H

#include "coordinator/search.h"

#define REFINE_DRAWS     4
#define REFINE_SCENARIOS (REFINE_DRAWS * SCENARIOS)

/* Tries n_tries changes of p and keeps those that win more than their moves cost; moves are counted
 * against in_force. load: (REFINE_DRAWS, n_experts, SCENARIOS), as scenario_draw gives them. The
 * problem's weights are not used: all scenarios count alike. */
void refine(const struct search_problem *problem, const struct placement *in_force,
            const float *load, uint32_t n_tries, struct placement *p);

#endif
