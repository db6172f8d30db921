/* moves.h - what must travel between two placements, stage by stage, round by round
 *
 * All ranks of an expert group work out the same list. In a round a rank sends to at most one other
 * and receives from at most one, so that each link is used once. */
#ifndef WORKER_MOVES_H
#define WORKER_MOVES_H

#include "worker/shard_state.h"

#define MOVES_FROZEN       (1u << SLOT_FROZEN)
#define MOVES_WITH_WEIGHTS (1u << SLOT_WEIGHTS | MOVES_FROZEN)
#define MOVES_WITH_STATE   (1u << SLOT_MASTER | 1u << SLOT_M | 1u << SLOT_V)

struct move {
    uint32_t layer, expert, from, to; /* slots through all devices */
    uint32_t parts;  /* which, a bit for each slot_part */
    uint32_t stage;  /* at whose boundary it is needed */
    uint32_t round;  /* ROUND_NONE: stays on its device */
    size_t   at;     /* in the staging memory, where it comes here; bytes */
    uint32_t proof;  /* the first of its parts' places among the proofs, where it comes here */
};

struct moves {
    struct move *move;
    uint32_t n, n_devices, n_slots;
    size_t   n_alloc;
    size_t   part_bytes[SLOT_PARTS]; /* 0: there is no such part */
    uint32_t n_layers, n_stages;
    uint32_t **stage; /* (n_layers) of each slot, see placement_at_stage; NULL: whole at stage 0 */
    /* Rounds first_round[k] to first_round[k + 1] are those of stage k; the ones below
     * first_round[0] may go ahead of all. (n_stages + 1) */
    uint32_t *first_round;
};

/* stage: per layer where a slot's new content belongs, as placement_at_stage takes it, or NULL for
 * stage 0; NULL: stage 0 for all. part_bytes: (SLOT_PARTS) of one expert, as this rank holds it.
 * Both are copied. Ended with moves_fini. */
void moves_init(struct moves *m, const struct slots *from, const struct slots *to,
                uint32_t *const *stage, const size_t *part_bytes);
void moves_fini(struct moves *m);

static inline uint32_t moves_device(const struct moves *m, uint32_t slot)
{
    return slot / m->n_slots;
}

static inline bool moves_travels(const struct moves *m, const struct move *x)
{
    return moves_device(m, x->from) != moves_device(m, x->to);
}

/* What travels frozen needs not wait for its stage. */
static inline bool moves_goes_ahead(const struct moves *m, const struct move *x)
{
    return x->parts == MOVES_FROZEN && moves_travels(m, x);
}

static inline bool moves_has_part(const struct moves *m, const struct move *x, int part)
{
    return x->parts & 1u << part && m->part_bytes[part] > 0;
}

#endif
