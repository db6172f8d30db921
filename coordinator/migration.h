/* migration.h - the life of one plan of a job: all ranks carry it out, or none does
 *
 *   NONE ──▶ PREPARING ──all prepared──▶ MIGRATING ──all migrated──▶ DONE
 *               │  a rank refuses,         ▲ │
 *               │  or it takes too long    │ │ a rank has migrated: it wins
 *               └─────────▶ ABORTING ◀─────┴─┘
 *                              │ a rank will surely never be prepared (again)
 *                              ▼
 *                            ENDED
 *
 * From DONE and ENDED the next plan leads to PREPARING; the end of the attempt leads to NONE from
 * everywhere. The ranks move at a step boundary at which every one of them is prepared, so one
 * rank that never will be is enough to know that none moves, and one that has moved is enough to
 * know that all do. In between (told to give up, not answered) nobody knows: then the coordinator
 * asks again and proposes nothing else. */
#ifndef COORDINATOR_MIGRATION_H
#define COORDINATOR_MIGRATION_H

#include "common/types.h"
#include "proto/ballast.pb-c.h"

enum migration_state {
    MIGRATION_NONE,
    MIGRATION_PREPARING,
    MIGRATION_MIGRATING,
    MIGRATION_ABORTING,
    MIGRATION_DONE,
    MIGRATION_ENDED,
};

struct migration {
    enum migration_state state;
    uint32_t epoch;      /* of the plan */
    uint64_t late_ns;    /* PREPARING: when it takes too long */
};

/* What a rank said of plans: facts that only grow within an attempt. */
struct migration_rank {
    uint32_t placement_epoch, prepared_epoch, rejected_epoch;
    uint64_t moved_bytes;
    double   pause_s;
    uint64_t asked_ns;   /* when PREPARE or ABORT was sent last */
};

const char *migration_state_name(enum migration_state state);

/* The only ways a state changes. */
bool migration_may_move(const struct migration *m, enum migration_state next);
void migration_move(struct migration *m, enum migration_state next);

/* The attempt is over: what its ranks have said is void. */
void migration_void(struct migration *m);

/* A plan is somewhere between proposed and known to be over. */
static inline bool migration_is_open(const struct migration *m)
{
    return m->state == MIGRATION_PREPARING || m->state == MIGRATION_MIGRATING ||
        m->state == MIGRATION_ABORTING;
}

void migration_hear(struct migration_rank *rank, const Ballast__RankState *said);

enum migration_news {
    MIGRATION_NO_NEWS,
    MIGRATION_REFUSED,  /* rank *out_rank will not; record that the plan has ended */
    MIGRATION_LATE,     /* PREPARING: rank *out_rank has not answered; record that, too */
    MIGRATION_COMPLETE, /* MIGRATING: every rank has migrated; record the placement */
};

/* Compares what the ranks have said with the plan, moves on where that needs no record, and says
 * what has to be recorded. */
enum migration_news migration_look(struct migration *m, const struct migration_rank *ranks,
                                   uint32_t n_ranks, uint64_t now_ns, uint32_t *out_rank);

/* Whether this rank has to be asked (PREPARING: to prepare; ABORTING, ENDED: to give up). */
bool migration_must_ask(const struct migration *m, const struct migration_rank *rank);

/* Whether another plan may be proposed: none is open, and no rank is still prepared. */
bool migration_is_settled(const struct migration *m, const struct migration_rank *ranks,
                          uint32_t n_ranks);

#endif
