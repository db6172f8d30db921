/* turn.h - what one loop turn produced: records to commit, then messages to send
 *
 * Everything it points to lives in its arena, until turn_fini. */
#ifndef COORDINATOR_TURN_H
#define COORDINATOR_TURN_H

#include "common/mem.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

struct outgoing {
    uint64_t                peer;     /* who: the shell's number of a connection */
    Ballast__Envelope       envelope; /* complete but for seq and payload_bytes */
    const ProtobufCMessage *payload;  /* NULL in a response that is not OK */
};

/* Step reports to be stored under (job_id, step), before turn.out is sent. A report replaces the
 * one stored for its step unless that has a higher attempt. The job may have ended already. */
struct turn_steps {
    job_id                       job;
    const Ballast__StepReports  *reports; /* the caller's message, in its arena */
};

/* A load report to be stored, before turn.out is sent. One that is not newer than what is stored
 * of its job changes nothing. The job may have ended already. */
struct turn_load {
    job_id                      job;
    const Ballast__LoadReport  *report; /* the caller's message, in its arena */
};

struct turn {
    struct arena       arena;
    uint64_t           now_ns;
    int64_t            wall_ns;
    uint64_t           coordinator_epoch; /* goes into every envelope */
    bool               is_limited; /* set by the shell before a coord_message: its user may change
                                    * no jobs but his own */
    const char        *by; /* the person whose call makes the next records, or NULL */
    const char        *worker_by; /* the same of what a worker says of itself */
    Ballast__Record  **records; /* in order of seq; what they name (job_id) has news for polls */
    size_t             n_records;
    struct outgoing   *out;
    size_t             n_out;
    struct turn_steps *steps;
    size_t             n_steps;
    struct turn_load  *loads;
    size_t             n_loads;
    char             **notes; /* lines worth a warning in the log: refused and fenced things */
    size_t             n_notes;
};

/* Frees all of it and leaves it empty. All zero is an empty turn. */
void turn_fini(struct turn *t);

/* Adds a response to a request, for what the shell answers itself; it then leaves after the
 * commit too, so that nobody reads what may still be lost. payload must live as long as the
 * turn. code is not OK. */
void turn_reply(struct turn *t, uint64_t peer, const Ballast__Envelope *request,
                const ProtobufCMessage *payload);
void turn_refuse(struct turn *t, uint64_t peer, const Ballast__Envelope *request,
                 Ballast__Code code, const char *reason, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* ---- for the core ------------------------------------------------------------------------- */

/* A notice to a worker's life. payload must live as long as the turn. */
void turn_notice(struct turn *t, uint64_t peer, uint64_t worker_epoch, Ballast__Method method,
                 const ProtobufCMessage *payload);
void turn_record(struct turn *t, Ballast__Record *record);
void turn_store_steps(struct turn *t, job_id job, const Ballast__StepReports *reports);
void turn_store_load(struct turn *t, job_id job, const Ballast__LoadReport *report);
void turn_note(struct turn *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
