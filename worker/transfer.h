/* transfer.h - experts move: from the placement in force to another one, at step boundaries
 *
 * Where a home moves, master weight and optimizer state travel from the old home to the new one;
 * where an expert becomes served without having been, its weights do. Everything goes into memory
 * of its own and is verified there; only when all ranks have all of it is it taken. Moves stay
 * inside each expert group, between ranks that hold the same slice of an expert.
 *
 * Frozen weights cannot change, so they go ahead: some at each of the boundaries before, as many as
 * hold up a step but little. In a fine-tuning job with adapters they are nearly all of a move. What
 * is trained moves stage by stage, one at a boundary; after each a placement is in force. */
#ifndef WORKER_TRANSFER_H
#define WORKER_TRANSFER_H

#include "worker/shard.h"

struct transfer;

struct transfer_result {
    uint64_t sent_bytes;   /* by this rank, since the last one; the first has what went ahead */
    double   seconds;      /* that this boundary held up the step */
    double   link_seconds; /* of rounds in which this rank sent, as sent_bytes */
    bool     is_last;      /* stage: the plan's placement is in force */
};

/* Works out the moves and takes the memory for what comes here. slots is what shard was opened
 * with and is in force; to: takes it over, also on failure. stage: per layer, as
 * placement_check_stages has found it sound, or NULL; NULL: all at once. Gives *out, ended with
 * transfer_destroy. -ENOMEM. */
int  transfer_create(struct shard *s, struct slots *slots, struct slots *to,
                     uint32_t *const *stage, struct transfer **out, struct err *err);
void transfer_destroy(struct transfer *t);

/* What may go ahead, about n_bytes_max of it from a rank (0: all); *out_seconds is how long it
 * took. The same calls on all ranks of an expert group, which may have less or nothing to send.
 * Collective. */
int  transfer_ahead(struct transfer *t, size_t n_bytes_max, double *out_seconds, struct err *err);
/* Nothing is left that may go ahead. */
bool transfer_is_ahead(const struct transfer *t);

/* The moves of the next stage, and what has not gone ahead. On success what this stage makes of the
 * placement is in force on every rank, copies included; slots has the new epoch after the last one
 * only. On failure, which is then one of all ranks, slots, weights and state are as they were
 * before the stage. Collective. */
int transfer_run(struct transfer *t, struct transfer_result *out, struct err *err);
/* A stage of it is in force: there is no way back. */
bool transfer_has_begun(const struct transfer *t);

#endif
