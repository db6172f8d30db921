/* bound.h - a lower bound on max over mean load */
#ifndef COORDINATOR_BOUND_H
#define COORDINATOR_BOUND_H

#include "common/types.h"

/* Of any placement on so many equally fast devices with so many slots each, shares being free;
 * >= 1, and 1 where there is no load. */
double bound_ratio(const double *load, uint32_t n_experts, uint32_t n_devices, uint32_t n_slots);

#endif
