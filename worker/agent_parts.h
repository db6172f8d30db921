/* agent_parts.h - what the files of the worker's core share; nobody else includes it
 *
 * agent.c              life, and what is due by time
 * agent_attempt.c      effects; attempts: PENDING (the one before still has to die) -> LIVE ->
 *                      ENDED -> forgotten
 * agent_coordinator.c  what is said to and by the coordinator
 * agent_trainer.c      what trainers say and how they end */
#ifndef WORKER_AGENT_PARTS_H
#define WORKER_AGENT_PARTS_H

#include "proto/gpu.h"
#include "worker/agent.h"
#include "worker/outbox.h"

#define ATTEMPTS_MAX 64  /* ended ones wait here for the coordinator */
#define SEEN_MAX     256 /* jobs whose newest attempt is remembered */
#define BEATS_MAX    64  /* heartbeats whose sending time is remembered */

enum life { LIFE_PENDING, LIFE_LIVE, LIFE_ENDED };

struct attempt {
    job_id             job;
    uint32_t           attempt, rank;
    enum life          life;
    Ballast__Start    *start; /* PENDING */

    /* what is reported */
    Ballast__RankPhase phase;
    uint64_t           step, checkpoint_step, resumed_from_step;
    int32_t            exit_code, exit_signal;
    char              *text;     /* of its end */
    char              *warning;  /* while it runs */
    bool               is_retryable;
    uint32_t           placement_epoch, prepared_epoch, rejected_epoch;
    char              *plan_text;
    uint64_t           moved_bytes;
    double             pause_s;
    uint32_t           settings_revision;
    char              *data_address; /* "": it has not told */
    uint8_t            data_key[DATA_KEY_BYTES];

    /* LIVE */
    bool               has_peers; /* the trainer was told of the others */
    uint32_t           forwarded_epoch; /* newest plan that the trainer was asked to prepare */
    uint32_t           aborted_epoch;   /* newest plan that it was told to give up */
    bool               says_finished, says_stopped, says_failed;
    uint32_t           forwarded_revision; /* newest settings that it was told */
    Ballast__StopMode  stop_mode; /* UNKNOWN: not told to stop */
    uint64_t           kill_ns;   /* UINT64_MAX: no reason to */
    uint64_t           heard_ns, late_ns; /* the trainer's last word, and when it is late;
                                           * UINT64_MAX: it may take its time */
    bool               is_late;   /* it gets a moment more, should this daemon have slept */

    bool               is_acked;  /* its end is recorded */
    bool               has_spool, is_log_closed;
    uint64_t           log_spooled, log_dropped, log_sent, log_acked, log_resend_ns;
};

struct seen {
    job_id   job;
    uint32_t attempt;
};

struct beat {
    uint64_t seq, sent_ns;
};

struct agent {
    struct agent_config config;
    struct attempt      attempts[ATTEMPTS_MAX]; /* in order of their coming */
    size_t              n_attempts;
    struct seen         seen[SEEN_MAX]; /* a ring */
    size_t              n_seen;
    struct outbox       steps, loads;
    uint64_t            steps_resend_ns, loads_resend_ns; /* 0: nothing is under way */

    uint64_t    seq, next_request_id;
    struct beat beats[BEATS_MAX]; /* a ring */
    size_t      n_beats;

    bool     is_attached;       /* the last HELLO was welcomed, and answers still come */
    uint64_t coordinator_epoch; /* highest seen */
    uint64_t interval_ns, lease_ns, fence_ns;
    uint64_t answered_ns;       /* when the last answer to a heartbeat or hello came */
    uint64_t lease_from_ns;     /* when the newest one that was answered had been sent */
    uint64_t next_beat_ns, next_hello_ns, hello_wait_ns;
    uint64_t hello_request_id, hello_sent_ns; /* of the newest hello */
    Ballast__Code refused_with; /* of the last refusal, to note it once */

    uint64_t loop_lag_ms, memory_used_bytes;
    Ballast__GpuHealth *gpu; /* NULL: nothing is known */
    bool     is_leaving, has_said_goodbye;
    char    *leave_reason;
};

/* ---- agent_attempt.c: effects -------------------------------------------------------------- */

struct effect *agent_effect(struct agent_turn *t, enum effect_kind kind, const struct attempt *x);
void agent_fill_envelope(struct agent *a, Ballast__Envelope *e, Ballast__Kind kind,
                         Ballast__Method method);
struct effect *agent_say(struct agent *a, struct agent_turn *t, Ballast__Kind kind,
                         Ballast__Method method, const ProtobufCMessage *payload);
void agent_note(struct agent_turn *t, const char *text);

/* An empty message to the live trainer; the caller says what. */
Ballast__TrainerMessage *agent_forward(struct agent_turn *t, const struct attempt *x);

/* ---- agent_attempt.c: attempts ------------------------------------------------------------- */

struct attempt *agent_find(struct agent *a, job_id job, uint32_t attempt);
struct attempt *agent_in_life(struct agent *a, enum life life);
uint32_t agent_newest_seen(const struct agent *a, job_id job);
struct attempt *agent_add(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          uint32_t rank, enum life life);
void agent_forget(struct agent *a, struct agent_turn *t, struct attempt *x);
void agent_attempt_fini(struct attempt *x);

/* While nobody listens the next hello carries it. */
void   agent_report(struct agent *a, struct agent_turn *t, const struct attempt *x);
size_t agent_describe_all(struct agent *a, struct arena *arena, Ballast__RankState ***out);
void   agent_set_line(char **line, const char *text); /* bounded; replaces *line */
void   agent_set_text(struct attempt *x, const char *text);

void agent_end(struct agent *a, struct agent_turn *t, struct attempt *x, Ballast__RankPhase phase,
               const char *text, bool retryable);
/* Nothing lives any more: the one that waited for that goes. */
void agent_spawn_pending(struct agent *a, struct agent_turn *t);
void agent_kill(struct agent_turn *t, struct attempt *x);
void agent_kill_by(struct attempt *x, uint64_t at_ns);
/* A repetition changes nothing. */
void agent_stop(struct agent *a, struct agent_turn *t, struct attempt *x, Ballast__StopMode mode,
                uint64_t grace_ns, const char *reason);

/* ---- agent_trainer.c ----------------------------------------------------------------------- */

/* Kills a trainer whose word is overdue. */
void agent_look_for_hang(struct agent_turn *t, struct attempt *x);

/* ---- agent_coordinator.c ------------------------------------------------------------------- */

void agent_say_hello(struct agent *a, struct agent_turn *t);
void agent_beat(struct agent *a, struct agent_turn *t);
void agent_detach(struct agent *a, uint64_t now_ns);

#endif
