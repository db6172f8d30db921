/* split.h - the best shares of copies for the loads at hand, the placement being given
 *
 * The ranks run it at every step on the counts that dispatch exchanges, the planner on forecasts.
 * All ranks get the same bits from the same loads. */
#ifndef COMMON_SPLIT_H
#define COMMON_SPLIT_H

#include "common/placement.h"

struct split;

/* Prepares for one placement; a later change of it is not seen, except of its shares. speed:
 * (n_devices), relative, NULL for equal ones; copied. Gives, ended with split_destroy. */
struct split *split_create(const struct placement *p, const double *speed);
void split_destroy(struct split *s);

/* Other speeds from here on, as in split_create. */
void split_set_speed(struct split *s, const double *speed);

/* Shares that make the heaviest device (load over speed) as light as this placement allows,
 * exactly. load: (n_experts), finite, >= 0; out_share: (n_devices, n_slots) or NULL. Returns the
 * heaviest device's load over its speed. */
double split_solve(struct split *s, const double *load, double *out_share);

/* After split_solve: what each device carries, (n_devices); lives until the next split_solve. */
const double *split_device_load(const struct split *s);

/* After split_solve: the devices whose load cannot leave them and is the heaviest together; 1 in
 * out (n_devices). Where all devices are equally heavy, those are all. */
void split_locked(struct split *s, uint8_t *out);

/* Who sends how many rows of one expert to which copy, when the copies serve `share`: rows go to
 * the sender's own device first, then within its node, then anywhere. n_rows: (n_devices) rows
 * each device has for the expert; device: (n_copies) where the copies are; share: (n_copies),
 * sums to 1; out: (n_devices, n_copies), its rows sum to n_rows, its columns to the copies' parts
 * rounded to whole rows. */
void split_rows(uint32_t n_devices, uint32_t devices_per_node, const uint32_t *n_rows,
                uint32_t n_copies, const uint32_t *device, const double *share, uint32_t *out);

#endif
