/* transfer_parts.h - what every kind of transfer has: the moves, and how far they are
 *
 * There are two: of a shard's experts (transfer_shard.c), and of none, which tells how long it
 * would take (virtual_transfer.h). */
#ifndef WORKER_TRANSFER_PARTS_H
#define WORKER_TRANSFER_PARTS_H

#include "worker/moves.h"
#include "worker/transfer.h"

struct transfer_ops {
    /* The rounds from t->next_round up to `end`. Adds what it sends to t->ahead. */
    int  (*ahead)(struct transfer *t, uint32_t end, double *out_seconds, struct err *err);
    /* The same rounds, then t->next_stage is put in force. Adds to r, which has is_last already;
     * after a failure nothing is in force that was not. */
    int  (*run)(struct transfer *t, uint32_t end, struct transfer_result *r, struct err *err);
    void (*destroy)(struct transfer *t);
};

struct transfer {
    const struct transfer_ops *ops;
    struct slots *slots, to; /* in force, borrowed; planned */
    struct moves  moves;
    uint32_t next_round, next_stage;
    struct transfer_result ahead; /* of what has gone ahead, until the first stage tells it */
};

/* As transfer_create has them; part_bytes as moves_init. */
void transfer_init(struct transfer *t, const struct transfer_ops *ops, struct slots *slots,
                   struct slots *to, uint32_t *const *stage, const size_t *part_bytes);
void transfer_fini(struct transfer *t);

/* For `run`: what t->next_stage makes of the placement is in force from now on. */
void transfer_put_in_force(struct transfer *t);

#endif
