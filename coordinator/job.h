/* job.h - one job: its life, its gang, and the table of the jobs in memory
 *
 *   QUEUED ──▶ STARTING ──▶ RUNNING ──▶ DONE        every rank has finished
 *     ▲         │  ▲  │        │ │
 *     │         │  │  └────────┼─┴────▶ STOPPING ──▶ CANCELLED, FAILED, DONE, PAUSED, QUEUED
 *     │         ▼  │           ▼           ▲
 *     │       RECOVERING ◀─────┘ ──────────┘        a rank was lost: the next attempt
 *     └── requeue of an ended or RECOVERING job, resume of one that is PAUSED
 *
 * QUEUED, RECOVERING may also end or be PAUSED at once: nothing is left to stop. What comes after
 * STOPPING may change while that is PAUSED or QUEUED: a cancel, a resume, another pause. Held is a
 * fact beside QUEUED, RECOVERING and PAUSED: it waits for a person.
 *
 * A rank's fate is what the coordinator knows about its process, which decides when the next
 * attempt may start: never while two gangs of one job could make steps. */
#ifndef COORDINATOR_JOB_H
#define COORDINATOR_JOB_H

#include "common/err.h"
#include "common/mem.h"
#include "common/types.h"
#include "coordinator/rebalance.h"
#include "proto/job_states.h"

#define COLL_ID_BYTES 16

enum rank_fate {
    RANK_ALIVE,  /* it exists, or may come to exist */
    RANK_ENDED,  /* its worker said so, or has a newer life whose orphan time is over */
    RANK_ORPHAN, /* its daemon is dead: it ends before over_ns */
    RANK_SILENT, /* its worker is lost: it ends itself before over_ns, or is stuck in a
                  * collective for ever once another rank has ended */
};

struct rank {
    uint32_t           worker; /* index in the fleet */
    enum rank_fate     fate;
    Ballast__RankPhase phase;  /* as last reported; only grows */
    uint64_t           over_ns;
    uint32_t           settings_revision; /* in force there, as last reported; only grows */
    uint64_t           settings_asked_ns; /* when SETTINGS was sent last */
    char               data_address[DATA_ADDRESS_BYTES_MAX + 1]; /* "": it has not told */
    uint8_t            data_key[DATA_KEY_BYTES];
};

enum wait_kind {
    WAIT_NONE,    /* not looked at yet */
    WAIT_HELD,
    WAIT_AFTER,   /* for job a */
    WAIT_BACKOFF, /* until not_before_ns */
    WAIT_GANG,    /* the ranks of the last attempt have not ended */
    WAIT_WORKERS, /* needs a workers, b are attached, c free */
    WAIT_MEMORY,  /* needs a workers of d bytes, b such are attached, c free */
    WAIT_NODE,    /* for a workers of one node: spread over several they have too little memory */
    WAIT_BEHIND,  /* behind job a, which goes first */
};

struct wait_reason {
    enum wait_kind kind;
    uint64_t       a, b, c, d;
};

/* Folded from step reports; what is not known yet is NaN or 0. */
struct job_summary {
    uint32_t attempt;
    uint64_t step;
    double   loss, validation_loss, tokens_per_second, imbalance;
    uint64_t memory_bytes, memory_planned_bytes;
};

struct job {
    /* durable: changed by coord_apply only */
    job_id             id;
    Ballast__JobSpec  *spec;
    uint32_t           settings_revision; /* of spec; grows with every change */
    Ballast__JobSpec  *start_spec;  /* STARTING, when spec was changed since: what the attempt
                                     * starts with on all ranks; else NULL */
    uint32_t           start_revision;
    char              *user;
    Ballast__JobState  state;
    char              *reason, *exit;
    char              *warning; /* by rank 0 while it runs; not durable */
    Ballast__JobState  then; /* STOPPING: what comes after */
    Ballast__StopMode  stop_mode;
    bool               held;
    char              *hold_reason, *held_by; /* by: its user; "": an older record tells none */
    uint32_t           attempt, n_restarts, n_failures_in_row;
    uint64_t           checkpoint_step, step, ran_ms, backoff_ms;
    uint32_t           states_seen; /* bits, since it last waited or stopped */
    uint64_t          *after;       /* jobs that are not DONE yet */
    size_t             n_after;
    char             **gang;        /* names, in rank order; kept for display when it has ended */
    uint64_t          *gang_epochs;
    uint32_t           n_gang;
    uint8_t            coll_id[COLL_ID_BYTES];
    record_seq         assigned_seq, last_seq; /* of its assignment, of its newest record */
    uint8_t            queue_key[IDEMPOTENCY_KEY_BYTES]; /* of the newest requeue or resume */
    uint8_t            pause_key[IDEMPOTENCY_KEY_BYTES]; /* of the newest pause */
    int64_t            submitted_at_ns, started_at_ns, ended_at_ns; /* wall, display */
    struct rebalance   rebalance;  /* durable in part */

    /* of this life of the coordinator */
    struct rank       *ranks;       /* n_gang; NULL when no gang is to be watched */
    struct migration_rank *said;    /* n_gang, with ranks: what each has said of plans */
    uint32_t           n_alive;     /* ranks with RANK_ALIVE */
    uint32_t           n_finished;
    uint64_t           live_step;   /* newest step of the present attempt, or what it resumes */
    uint64_t           not_before_ns, state_since_ns, running_since_ns;
    struct wait_reason wait;
    struct job_summary summary;
    bool               is_waiting; /* in the queue's list */
};

static inline bool job_has_ended(const struct job *j)
{
    return job_state_is_ended(j->state);
}

/* Its attempt shall go on: it has a gang, all of whose ranks are wanted. */
static inline bool job_is_wanted(const struct job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_STARTING ||
        j->state == BALLAST__JOB_STATE__JOB_RUNNING;
}

/* Its attempt shall end: the ranks that are left are told to stop. */
static inline bool job_is_stopping(const struct job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_RECOVERING ||
        j->state == BALLAST__JOB_STATE__JOB_STOPPING;
}

/* The only ways a state changes. */
bool job_may_move(const struct job *j, Ballast__JobState next);
void job_move(struct job *j, Ballast__JobState next);

struct job *job_create(job_id id, const Ballast__RecordSubmitted *submitted);
void        job_destroy(struct job *j);

/* New settings, of which it makes a copy. */
void job_change_spec(struct job *j, const Ballast__JobSpec *spec, uint32_t revision);

/* Replaces one text the job owns; NULL reads as "". */
void job_text(char **text, const char *new_text);

/* When the last attempt surely makes no step any more; UINT64_MAX: not before a rank's end. */
uint64_t job_gang_over_ns(const struct job *j);

/* It stops, but not for good: PAUSED or QUEUED comes next. */
static inline bool job_is_pausing(const struct job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_STOPPING &&
        (j->then == BALLAST__JOB_STATE__JOB_PAUSED || j->then == BALLAST__JOB_STATE__JOB_QUEUED);
}

/* Milliseconds RUNNING, over all attempts. */
uint64_t job_ran_ms(const struct job *j, uint64_t now_ns);

/* How long until the next attempt: base, doubled with each failure without progress. */
uint64_t job_backoff_ns(const struct job *j, uint64_t base_ns, uint64_t cap_ns);

/* Folds reports of an attempt in; older ones than those folded change nothing. */
void job_fold(struct job *j, uint32_t attempt, const Ballast__StepReports *reports);

/* For people, in the arena. */
const char    *job_reason(const struct job *j, uint64_t now_ns, struct arena *arena);
Ballast__Job  *job_describe(const struct job *j, uint64_t now_ns, struct arena *arena);

/* ---- the table: jobs by id, ascending ----------------------------------------------------- */

struct job_table {
    struct job **jobs;
    size_t       n, n_alloc;
};

struct job *job_table_find(const struct job_table *t, job_id id);
size_t      job_table_above(const struct job_table *t, job_id id); /* index of the next larger */
void        job_table_add(struct job_table *t, struct job *j);     /* takes j */

/* Forgets ended jobs all of whose records are among the first committed ones; returns whether
 * others that have ended are left. */
bool        job_table_forget_ended(struct job_table *t, record_seq committed);
void        job_table_fini(struct job_table *t);

#endif
