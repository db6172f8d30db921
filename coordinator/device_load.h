/* device_load.h - what counts of experts mean for devices, under a placement or with all in
 * order */
#ifndef COORDINATOR_DEVICE_LOAD_H
#define COORDINATOR_DEVICE_LOAD_H

#include "common/placement.h"
#include "proto/ballast.pb-c.h"

/* Experts in order, in slots as the job's file says: 0, or -EINVAL if it says too little. Gives
 * *out, ended with placement_fini. */
int device_load_in_order(const Ballast__JobSpec *spec, uint32_t n_experts, struct placement *out);

/* How many devices share a layer's experts: as m has it (NULL: no placement yet) or, without one,
 * spec (NULL: not known); 0: not known. */
uint32_t device_load_n_devices(const Ballast__Placement *m, const Ballast__JobSpec *spec);

/* Max over mean of the devices' tokens, under m or, where m is NULL or does not know the layer,
 * with experts in order; copies share an expert as
 * the ranks make them, as evenly as they can. NaN: not known. tokens: (n_experts). sums:
 * (n_devices) that the devices' tokens are added to, or NULL. */
double device_load_imbalance(const Ballast__Placement *m, const Ballast__JobSpec *spec,
                             uint32_t layer, const uint64_t *tokens, uint32_t n_experts,
                             double *sums);

#endif
