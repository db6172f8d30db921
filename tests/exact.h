/* exact.h - exact answers for tiny cases, by trying everything */
#ifndef TESTS_EXACT_H
#define TESTS_EXACT_H

#include "common/placement.h"

/* The least heaviest device (load over speed) with shares free: by all sets of devices, the load
 * that cannot leave the set over its speed. At most 16 devices. */
double oracle_split(const struct placement *p, const double *load, const double *speed);

/* The least max load without copies, n_slots experts at most on a device: branch and bound. */
double oracle_single(const double *load, uint32_t n_experts, uint32_t n_devices, uint32_t n_slots);

/* The least max load with copies and free shares, over all placements: a few experts and slots. */
double oracle_copies(const double *load, uint32_t n_experts, uint32_t n_devices, uint32_t n_slots);

#endif
