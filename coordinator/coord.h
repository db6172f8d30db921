/* coord.h - the coordinator's core: what happens on a message or at a time, without any I/O
 *
 * The shell drives it in turns, and a turn is a transaction:
 *
 *     coord_begin(c, &turn, clock_now_ns(), clock_wall_ns());
 *     coord_message(c, &turn, ...);      any number; also coord_peer_gone
 *     coord_tick(c, &turn);              once, at the end of every turn
 *     commit turn.records and turn.steps; on success send turn.out, tell coord_committed the seq
 *     of the last record; turn_fini(&turn)
 *
 * Nothing of turn.out may leave before its records are committed: an acknowledgement promises
 * that they are durable. The core has applied the records to itself already when it emits them,
 * so several turns may wait for one commit; but if a commit fails, the core knows things that
 * never happened: destroy it, build a new one from the store (below) and answer the requests of
 * the turns that were lost with UNAVAILABLE.
 *
 * Start: coord_create; coord_restore_epoch and coord_restore_key; coord_apply for the records of
 * every live job and of the workers, in order of seq; then one turn with coord_start between
 * coord_begin and coord_tick, committed before anything else.
 *
 * Memory holds live jobs, ended ones only until their end is committed. The shell answers what
 * comes from the databases (server_query); coord_job and coord_jobs give it the live part. All
 * other requests and all notices but LOG go to coord_message; before it, coord_wants_job says if
 * an ended job has to be brought back.
 *
 * Times are monotonic; the wall clock is copied into records and never decides anything. */
#ifndef COORDINATOR_COORD_H
#define COORDINATOR_COORD_H

#include "common/err.h"
#include "coordinator/turn.h"
#include "proto/job_states.h"

/* ---- life --------------------------------------------------------------------------------- */

struct coord_config {
    uint64_t heartbeat_floor_ns;    /* shortest interval between a worker's heartbeats */
    uint32_t heartbeats_per_s;      /* of the whole fleet: interval = max(floor, workers / this) */
    uint32_t late_intervals;        /* silent for longer: LATE */
    uint32_t suspect_intervals;     /* SUSPECT: gets no new work */
    uint32_t lost_intervals;        /* LOST, but never before lost_floor_ns */
    uint64_t lost_floor_ns;
    uint64_t restart_grace_ns;      /* after a start: how long workers may take to come back */
    uint64_t fence_ns;              /* a silent worker ends its trainers by itself after this */
    uint64_t orphan_ns;             /* a trainer outlives its killed daemon by less than this */
    uint64_t backoff_base_ns;       /* before the next attempt, doubled each time */
    uint64_t backoff_cap_ns;
    uint64_t start_timeout_ns;      /* STARTING for longer: the attempt has failed */
    uint64_t stop_grace_ns;         /* STOP_NOW until SIGKILL */
    uint64_t checkpoint_grace_ns;   /* STOP_CHECKPOINT until SIGKILL */
    uint64_t pause_grace_ns;        /* the same of a pause, which may cost no step */
    uint64_t prepare_timeout_ns;    /* a plan that a rank has not prepared by then is given up; or
                                     * ten steps, if they take longer */
    uint64_t key_keep_ns;           /* idempotency keys are remembered at least this long */
    uint64_t seed;                  /* random, new at each start: makes rendezvous names unique */
    const char *version, *commit;   /* for PING and WELCOME; borrowed, as is the next */
    const char *dashboard;          /* IP:PORT, for PING; "": there is none */
};

/* 1 s, 1000 a second, 2 / 3 / 4 intervals and 10 s, 30 s, 300 s, 2 s, 1 s to 60 s, 15 min, 5 s,
 * 60 s, 15 min, 60 s, 24 h; seed 0, all texts "". */
struct coord_config coord_config_default(void);

struct coord;

struct coord *coord_create(const struct coord_config *config); /* config is copied */
void coord_destroy(struct coord *c);

/* ---- the store's side --------------------------------------------------------------------- */

/* The one function that changes durable state, live (by the core itself) and at replay. Copies
 * what it needs. At replay records come in order of seq; records of ended jobs may be missing.
 * Returns -EPROTO for a record that cannot follow what was applied before (a damaged log). */
int coord_apply(struct coord *c, const Ballast__Record *record, struct err *err);

/* What the skipped records of ended jobs would have told: the newest coordinator_epoch, record
 * seq and job id that the store has. */
void coord_restore_epoch(struct coord *c, uint64_t coordinator_epoch, record_seq last_seq,
                         job_id last_job_id);

/* A key younger than key_keep_ns, of a live or an ended job; age by the wall clock, not negative.
 * digest: DIGEST_BYTES of keys.h. A key that is there already is left alone. */
void coord_restore_key(struct coord *c, const char *user,
                       const uint8_t key[IDEMPOTENCY_KEY_BYTES], const uint8_t *digest,
                       job_id job, uint64_t age_ns);

/* Begins to serve: a new coordinator_epoch (a record), full leases for everybody. */
void coord_start(struct coord *c, struct turn *t);

/* The id of an ended job that this request needs and that is not in memory, or 0. The shell then
 * reads the records of that job, calls coord_recall and asks again, until 0 or until the store
 * has no such records; only then coord_message. payload must be checked. */
job_id coord_wants_job(const struct coord *c, Ballast__Method method,
                       const ProtobufCMessage *payload);

/* Brings an ended job back for the turn under way (after coord_begin): all its records, in
 * order. -EPROTO: damaged. */
int coord_recall(struct coord *c, Ballast__Record *const *records, size_t n_records,
                 struct err *err);

/* What the stored step reports say about the job that was brought back: step, attempt, loss,
 * validation_loss, tokens_per_second, imbalance, memory. Display only. */
void coord_recall_steps(struct coord *c, const Ballast__Job *shown);

/* ---- the turn --------------------------------------------------------------------------------
 * coord_begin also notices if the shell was stalled for longer than an interval past the last
 * deadline (a slow disk, SIGSTOP): then nobody's silence in that time counts against them. */

void coord_begin(struct coord *c, struct turn *t, uint64_t now_ns, int64_t wall_ns);

/* One checked request or notice. user: who the shell takes the peer for. Requests get exactly
 * one response, in this turn or (JOB_WAIT) in a later one. The envelope and payload must live
 * until the turn is over. */
void coord_message(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                   const Ballast__Envelope *envelope, const ProtobufCMessage *payload);

/* The connection is gone (unreachable, dropped for not reading): its waits are forgotten, a
 * worker's silence begins. */
void coord_peer_gone(struct coord *c, struct turn *t, uint64_t peer);

/* Everything that is due by t->now_ns, then the queue. */
void coord_tick(struct coord *c, struct turn *t);

/* When the next turn must begin even without a message; UINT64_MAX: never. */
uint64_t coord_next_deadline_ns(const struct coord *c);

/* Everything up to that record is in the store and can be read there: jobs that have ended by
 * then are forgotten. (Were one forgotten before, coord_recall would bring back a live one.) */
void coord_committed(struct coord *c, record_seq seq);

/* ---- what the shell may look at --------------------------------------------------------------
 * Results are made in the arena given. */

/* A live job as `ballast jobs` shows it, or NULL. Step, loss and so on are folded from the step
 * reports since the coordinator started. */
Ballast__Job *coord_job(const struct coord *c, job_id job, struct arena *arena);

/* Its specification, lives until the next coord_begin; NULL if it is not in memory. */
const Ballast__JobSpec *coord_job_spec(const struct coord *c, job_id job);

/* Live jobs with ids above after_id, ascending, at most limit; user NULL or "": everybody's. */
size_t coord_jobs(const struct coord *c, job_id after_id, const char *user, size_t limit,
                  struct arena *arena, Ballast__Job ***out_jobs);

/* All workers, as `ballast workers` shows them. */
size_t coord_workers(const struct coord *c, uint64_t now_ns, struct arena *arena,
                     Ballast__Worker ***out_workers);

struct coord_fleet_counts {
    uint32_t n[WORKER_STATE_MAX + 1];
    uint64_t heartbeat_age_max_ns; /* of those that are attached */
};

/* Live jobs and workers, by state. */
void coord_count(const struct coord *c, uint64_t now_ns, uint32_t out_jobs[JOB_STATE_MAX + 1],
                 struct coord_fleet_counts *out_fleet);

/* Whether output of that job may be stored for this peer: it is an attached worker, and the job
 * exists (live or ended; logs arrive late). */
bool coord_accepts_log(const struct coord *c, uint64_t peer, const Ballast__LogChunk *chunk);

/* The answer to a LOG notice: log bytes below log_offset of that rank's attempt are stored. */
void coord_ack_log(struct coord *c, struct turn *t, uint64_t peer, const Ballast__LogChunk *chunk,
                   uint64_t log_offset);

uint64_t   coord_epoch(const struct coord *c);
record_seq coord_last_seq(const struct coord *c);

/* The durable state in words, one line a fact, in a canonical order: two cores that applied the
 * same records give the same text. Gives a string ended with free(). */
char *coord_dump(const struct coord *c);

#endif
