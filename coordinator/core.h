/* core.h - what the files of the coordinator's core share; nobody else includes it
 *
 * coord.c    turns and time; look.c: what the shell may look at
 * apply.c    records: the one function that applies them
 * emit.c     the ways to make them; dump.c: the durable state in words
 * calls.c    what clients ask for; calls_rebalance.c: of the placement of experts
 * pausing.c  a job that gives its workers back for a while
 * settings.c changed settings of a job: asked for, recorded, told to its ranks
 * attach.c   workers come, beat, fall silent and go
 * placing.c  experts move: loads come in, plans are proposed, followed, recorded
 * attempt.c  one attempt of a job: its gang starts, is stopped, is over; attempt_gang.c: its
 *            workers, attempt_report.c: what they say, attempt_say.c: what they are told */
#ifndef COORDINATOR_CORE_H
#define COORDINATOR_CORE_H

#include "coordinator/coord.h"
#include "coordinator/event.h"
#include "coordinator/fleet.h"
#include "coordinator/job.h"
#include "coordinator/keys.h"
#include "coordinator/queue.h"

/* A JOB_WAIT that has no answer yet. */
struct pending_wait {
    uint64_t          peer, deadline_ns;
    Ballast__Envelope request; /* method and ids only */
    job_id            job;
    uint32_t          states;  /* bits; 0: any ended state */
};

struct coord {
    struct coord_config config;

    /* durable */
    struct job_table jobs;
    struct fleet     fleet;
    struct keys      keys;
    uint64_t         epoch;
    record_seq       last_seq;
    job_id           last_job_id;
    record_seq       committed_seq; /* what the shell said is in the store */

    /* of this life */
    struct job         **waiting; /* QUEUED and RECOVERING, in the queue's order */
    size_t               n_waiting, n_waiting_alloc;
    struct pending_wait *waits;
    size_t               n_waits, n_waits_alloc;
    job_id              *ended; /* in this turn */
    size_t               n_ended, n_ended_alloc;
    uint64_t             now_ns, started_ns, next_scan_ns, next_prune_ns;
    job_id              *placing; /* jobs whose newest window of load is to be looked at */
    size_t               n_placing, n_placing_alloc;
    bool                 queue_is_stale; /* something changed that may let a job start */
    bool                 has_ended_jobs;
};

/* The tick looks at everybody at this time, or earlier. */
void core_wake_at(struct coord *c, uint64_t at_ns);

/* What the queue sees of a job; and of workers that are attached and not drained, in the arena. */
struct queue_job core_queue_job(job_id id, const Ballast__JobSpec *spec);
size_t core_workers(const struct fleet *f, uint64_t now_ns, struct arena *arena,
                    struct queue_worker **out_workers);

/* ---- emit.c: each makes one record and applies it ----------------------------------------- */

/* For those who fill in what the record says themselves. */
Ballast__Record *emit_begin(struct coord *c, struct turn *t, job_id job,
                            Ballast__Record__WhatCase what);
void emit_finish(struct coord *c, struct turn *t, Ballast__Record *r);

void emit_epoch(struct coord *c, struct turn *t);
void emit_submitted(struct coord *c, struct turn *t, job_id id, Ballast__JobSpec *spec,
                    const char *user, const uint8_t *key, const uint8_t *digest);
void emit_after(struct coord *c, struct turn *t, struct job *j, job_id done);
void emit_assigned(struct coord *c, struct turn *t, struct job *j, const uint32_t *workers);
void emit_held(struct coord *c, struct turn *t, struct job *j, bool held, const char *reason);
void emit_progress(struct coord *c, struct turn *t, struct job *j, uint64_t checkpoint_step,
                   uint64_t step);

/* Fills in ran_ms; the rest is the caller's. Strings must live as long as the turn. */
void emit_state(struct coord *c, struct turn *t, struct job *j, const Ballast__RecordState *what);
void emit_worker(struct coord *c, struct turn *t, const char *name,
                 const Ballast__RecordWorker *what);

/* ---- calls.c ------------------------------------------------------------------------------ */

void call_submit(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                 const Ballast__Envelope *e, const Ballast__SubmitRequest *request);
void call_job(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
              const Ballast__JobRequest *request);
/* Whether the call was made before: an answer was lost. */
bool call_has_key(const Ballast__Envelope *e, const uint8_t key[IDEMPOTENCY_KEY_BYTES]);
void call_job_wait(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                   const Ballast__JobWaitRequest *request);
void call_job_list(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                   const Ballast__JobListRequest *request);
void call_worker(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                 const Ballast__WorkerDrainRequest *request);
void call_worker_list(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e);
void call_ping(struct coord *c, struct turn *t, uint64_t peer, const char *user,
               const Ballast__Envelope *e);

void call_rebalance(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                    const Ballast__Envelope *e, const Ballast__RebalanceRequest *request);
void refuse_state(struct turn *t, uint64_t peer, const Ballast__Envelope *e, const struct job *j,
                  const char *hint);
void reply_job(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
               const struct job *j);

/* Answers the waits that are satisfied or over; gives the next moment one is over. */
uint64_t calls_answer_waits(struct coord *c, struct turn *t);

/* ---- attach.c ----------------------------------------------------------------------------- */

void attach_hello(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                  const Ballast__Hello *hello);
void attach_heartbeat(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                      const Ballast__Heartbeat *beat);
void attach_rank_state(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                       const Ballast__RankState *state);
void attach_steps(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                  const Ballast__StepReports *reports);
void attach_load(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                 const Ballast__LoadReport *report);
void attach_goodbye(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                    const Ballast__Goodbye *goodbye);
uint64_t attach_tick(struct coord *c, struct turn *t);

/* ---- pausing.c ---------------------------------------------------------------------------- */

void call_job_pause(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                    const Ballast__Envelope *e, const Ballast__JobRequest *request);

/* ---- settings.c --------------------------------------------------------------------------- */

void call_job_set(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                  const Ballast__Envelope *e, const Ballast__JobSetRequest *request);

/* What a rank of the present attempt says of its settings. */
void settings_report(struct coord *c, struct turn *t, struct job *j,
                     const Ballast__RankState *state);

/* ---- placing.c ---------------------------------------------------------------------------- */

/* A report of the present attempt. */
void placing_load(struct coord *c, struct job *j, const Ballast__LoadReport *report);

/* What a rank of the present attempt says of plans. */
void placing_report(struct coord *c, struct turn *t, struct job *j,
                    const Ballast__RankState *state);

/* The attempt is over by the next record: an open plan has ended. */
void placing_over(struct coord *c, struct turn *t, struct job *j, const char *why);

/* An open plan that is automatic and not prepared by all ranks is given up, the attempt goes on. */
void placing_give_up(struct coord *c, struct turn *t, struct job *j, const char *why);

/* What is due for this job, which is RUNNING; gives when to look again. */
uint64_t placing_tick(struct coord *c, struct turn *t, struct job *j);

/* Looks at one window of one job, or thinks one part further about it. */
void placing_think(struct coord *c, struct turn *t);

/* Why nothing can be proposed for this job now, in the arena, or NULL: then its planner knows the
 * newest window, and propose_now may be asked. out_reason: the same for machines. */
const char *placing_obstacle(struct coord *c, struct turn *t, struct job *j,
                             const char **out_reason);

/* Makes the planner's newest proposal, which has moves, the job's open plan. key: of a person's
 * call, or NULL: automatic. */
void placing_begin(struct coord *c, struct turn *t, struct job *j, const char *cause,
                   const ProtobufCBinaryData *key);

/* After a start: an open plan goes on. */
void placing_adopt(struct coord *c, struct job *j);

/* ---- attempt.c ---------------------------------------------------------------------------- */

static inline bool rank_phase_has_ended(Ballast__RankPhase phase)
{
    return phase >= BALLAST__RANK_PHASE__RANK_FINISHED;
}

/* At a start: watches the gangs that the records left running. */
void attempt_adopt_all(struct coord *c);

/* Starts j on these workers (fleet indices, in rank order). */
void attempt_start(struct coord *c, struct turn *t, struct job *j, const uint32_t *workers);

/* What a worker's present life says about a rank. */
void attempt_report(struct coord *c, struct turn *t, struct worker *w,
                    const Ballast__RankState *state);

/* The newest word of w does not mention the rank it should hold: START or STOP again, or it is
 * lost. */
void attempt_missing(struct coord *c, struct turn *t, struct worker *w);

/* The process of w's rank is gone, or will be: with the fate and why. */
void attempt_rank_lost(struct coord *c, struct turn *t, struct worker *w, enum rank_fate fate,
                       const char *why);

/* Ends a job that has not ended: at once if no rank lives, else by way of STOPPING. */
void attempt_end(struct coord *c, struct turn *t, struct job *j, Ballast__JobState then,
                 Ballast__StopMode mode, const char *reason, const char *exit);

/* The same, with the whole record: then, stop_mode, reason, exit and the key of the call. */
void attempt_stop(struct coord *c, struct turn *t, struct job *j,
                  const Ballast__RecordState *wish);

/* Every rank's end is known: its worker forgets the attempt. */
void attempt_ack_ended(struct turn *t, const struct worker *w, const Ballast__RankState *state);

/* STOP_NOW for an attempt that nobody wants any more. */
void attempt_fence(struct turn *t, uint64_t peer, uint64_t worker_epoch,
                   const Ballast__RankState *state, const char *reason);

/* attempt_say.c: what all ranks are told, but for the rank, in the arena; START and STOP to one. */
Ballast__Start *attempt_start_template(struct coord *c, struct turn *t, const struct job *j);
void attempt_say_start(struct turn *t, const struct worker *w, const Ballast__Start *template);
void attempt_say_stop(struct coord *c, struct turn *t, const struct job *j,
                      const struct worker *w);

/* A rank tells where it listens. */
void attempt_relay_peers(struct coord *c, struct turn *t, struct job *j, const struct worker *w,
                         const Ballast__RankState *s);

/* What is due for this job; gives when to look again (UINT64_MAX: never). */
uint64_t attempt_tick(struct coord *c, struct turn *t, struct job *j);

#endif
