/* agent.h - the worker daemon's core: what to do on a message, a trainer's word or a time
 *
 * It does no I/O. The shell calls one input function, or several, and then carries out the
 * turn's effects in order:
 *
 *     agent_begin(a, &turn, clock_now_ns());
 *     agent_message(...), agent_trainer_message(...), ...    any number
 *     agent_tick(a, &turn);                                  once, at the end of every turn
 *     carry out turn.effects; agent_turn_fini(&turn)
 *
 * A device runs one attempt at a time. The agent remembers attempts that have ended until the
 * coordinator says that it knows (Ack{ended}), and their reports and output until those are
 * stored. All it says are facts that only grow, so whatever is lost is said again: the whole
 * state in each heartbeat, step reports and log bytes from the last acknowledged one.
 *
 * Training never waits for the coordinator: while it is away the trainer runs and reports are
 * kept (bounded; the oldest are dropped and counted). Only when there was no word for the fence
 * time that the coordinator gave does the agent end its trainer, because from then on the
 * coordinator may start the job elsewhere. */
#ifndef WORKER_AGENT_H
#define WORKER_AGENT_H

#include "common/mem.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

enum effect_kind {
    EFFECT_SEND,     /* to the coordinator: envelope (complete, seq too, but for payload_bytes) and
                      * payload. Frames that cannot be sent (not connected) are thrown away. */
    EFFECT_SPAWN,    /* start a trainer for start->job_id, attempt, rank with an empty spool for
                      * its output and give it start as the first message. If that fails, call
                      * agent_trainer_exited with the reason. */
    EFFECT_FORWARD,  /* send message to the live trainer */
    EFFECT_KILL,     /* SIGKILL to the live trainer (its process group) */
    EFFECT_SEND_LOG, /* send a LOG notice with these bytes of the attempt's spool */
    EFFECT_FORGET,   /* the attempt's spool is no longer needed */
    EFFECT_NOTE,     /* a line worth a warning in the log */
};

struct effect {
    enum effect_kind        kind;
    job_id                  job; /* SPAWN, FORWARD, KILL, SEND_LOG, FORGET: which attempt */
    uint32_t                attempt, rank;
    Ballast__Envelope       envelope; /* SEND and SEND_LOG; seq grows over the process's life, so
                                       * that the coordinator knows an overtaken message */
    const ProtobufCMessage *payload;  /* SEND */
    const Ballast__Start   *start;    /* SPAWN */
    const Ballast__TrainerMessage *message; /* FORWARD */
    uint64_t                offset;   /* SEND_LOG: first byte of the spool */
    uint32_t                n_bytes;  /* SEND_LOG: at most LOG_CHUNK_BYTES_MAX */
    uint64_t                dropped_bytes; /* SEND_LOG: for the chunk's field of that name */
    const char             *note;
};

/* What the effects point to lives until agent_turn_fini. All zero is an empty turn. */
struct agent_turn {
    struct arena   arena;
    uint64_t       now_ns;
    struct effect *effects;
    size_t         n_effects;
};

void agent_turn_fini(struct agent_turn *t);

struct agent_config {
    const char *name, *node, *machine, *device, *version; /* copied */
    uint64_t memory_bytes;
    uint32_t cores, pid;
    uint64_t worker_epoch;         /* life of this process: larger than any earlier life's of the
                                    * same name, for example wall-clock nanoseconds */
    uint64_t hello_base_ns, hello_cap_ns; /* HELLO again when there is no answer, doubling */
    uint64_t closed_grace_ns;      /* from the end of a trainer's channel to SIGKILL */
    uint32_t steps_max;            /* step reports kept while they are not acknowledged, */
    size_t   step_bytes_max;       /* and their packed bytes; beyond it the oldest go */
    uint32_t loads_max;            /* load reports, the same */
    size_t   load_bytes_max;
    uint64_t log_window_bytes;     /* sent and not acknowledged at most */
};

/* 200 ms to 5 s, 5 s, 100,000 reports or 16 MiB, 256 or 32 MiB, 512 KiB; the rest zero or "". */
struct agent_config agent_config_default(void);

struct agent;

struct agent *agent_create(const struct agent_config *config);
void agent_destroy(struct agent *a);

void agent_begin(struct agent *a, struct agent_turn *t, uint64_t now_ns);

/* A checked message of the coordinator: WELCOME (a response to HELLO, or its refusal: payload
 * NULL, status in the envelope), START, STOP, ACK, PREPARE, ABORT_PLAN, SETTINGS, PEERS. Messages
 * of an older coordinator epoch or for another life of this worker are ignored. */
void agent_message(struct agent *a, struct agent_turn *t, const Ballast__Envelope *envelope,
                   const ProtobufCMessage *payload);

/* The connection to the coordinator is up (again): the agent says hello at once. Optional: without
 * it the agent notices by itself, later. */
void agent_connected(struct agent *a, struct agent_turn *t);

/* A checked message from the trainer of that attempt: state, step or load. */
void agent_trainer_message(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                           const Ballast__TrainerMessage *message);

/* The trainer's channel has ended (or carried nonsense: why, else NULL); its process must now
 * end soon, or is killed. */
void agent_trainer_closed(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          const char *why);

/* The process has been waited for. Read what its channel still holds first: its last words say
 * how it ended. exit_signal 0: it exited with exit_code. text: NULL, or why it could not be
 * started at all (then exit_code should be non-zero). */
void agent_trainer_exited(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          int exit_code, int exit_signal, const char *text);

/* The spool of that attempt holds spool_bytes by now; dropped_bytes were beyond the rate limit
 * and are not in it. is_closed: there will be no more. */
void agent_log_grown(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                     uint64_t spool_bytes, uint64_t dropped_bytes, bool is_closed);

/* For the next heartbeats. */
void agent_measured(struct agent *a, uint64_t loop_lag_ms, uint64_t memory_used_bytes);

/* What is known about its GPU now, copied: in all it says of itself from now on. NULL: nothing. One
 * that becomes sick is noted, and the coordinator gives it no new work. */
void agent_gpu(struct agent *a, struct agent_turn *t, const Ballast__GpuHealth *gpu);

/* The daemon has been told to end: stops the trainer (bounded), says goodbye, accepts no START.
 * agent_may_exit becomes true when all that is done; what is not acknowledged by then is lost to
 * the coordinator, which sees the worker GONE. */
void agent_shut_down(struct agent *a, struct agent_turn *t, const char *reason);
bool agent_may_exit(const struct agent *a);

/* Everything that is due by t->now_ns: heartbeats, hellos, resends, kills. */
void agent_tick(struct agent *a, struct agent_turn *t);

/* When the next turn must begin even without an input; UINT64_MAX: never. */
uint64_t agent_next_deadline_ns(const struct agent *a);

/* For a person: how many step and load reports were dropped because the buffer was full. */
uint64_t agent_n_reports_dropped(const struct agent *a);

/* Whether it holds nothing: no attempt, and no report or output that is not stored yet. */
bool agent_is_idle(const struct agent *a);

/* Whether the coordinator has answered within the lease. */
bool agent_is_attached(const struct agent *a);

#endif
