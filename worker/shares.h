/* shares.h - how many rows of each source go to which slot, from the counts of one step
 *
 * Every rank of an expert group computes the same from the same counts: the loads decide what part
 * of an expert each of its copies serves, and rows go to the copy nearest to their source. */
#ifndef WORKER_SHARES_H
#define WORKER_SHARES_H

#include "worker/slots.h"

struct shares; /* scratch, reused by all layers */

struct shares *shares_create(const struct slots *slots);
void shares_destroy(struct shares *s);

/* Rows that each source has for each expert: (n_experts) of source m at m stride. */
struct shares_counts {
    const int32_t *at;
    size_t stride;
};

static inline int32_t shares_count(const struct shares_counts *c, uint32_t source, uint32_t expert)
{
    return c->at[source * c->stride + expert];
}

/* Out: to_slot (n_devices * n_slots), rows of `me` for each slot; arrived (n_devices, n_slots),
 * rows for my slots by source. whole_sources: a source's rows for an expert all go to one copy, and
 * servers (n_copied, n_devices) says to which slot; -1: it has none. Where sources are not whole,
 * device_rows (n_devices) gets added what comes to each device at most, and the most of any is
 * returned; the same on all. */
int64_t shares_rows(struct shares *s, const struct slots *slots, uint32_t layer,
                    const struct shares_counts *counts, bool whole_sources, int64_t *to_slot,
                    int64_t *arrived, int64_t *device_rows, int32_t *servers);

#endif
