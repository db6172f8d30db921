/* pack.h - a placement from nothing: how many copies each expert gets, and who stands where */
#ifndef COORDINATOR_PACK_H
#define COORDINATOR_PACK_H

#include "common/placement.h"

/* n_total slots for the experts: one each, the rest one by one to the expert whose copies carry
 * most; at most n_devices copies of one. Slots beyond that stay unused. load: (n_experts). */
void pack_copies(uint32_t n_experts, uint32_t n_devices, uint32_t n_total, const double *load,
                 uint32_t *out_copies);

/* Puts the copies, heaviest first, on the device with the least time that has room and does not
 * hold the expert; a node without a copy of it is preferred to one that has it. out: of this
 * shape. Its shares are even. */
void pack_place(const double *load, const uint32_t *copies, const double *speed, uint32_t n_nodes,
                struct placement *out);

#endif
