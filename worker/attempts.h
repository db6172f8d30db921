/* attempts.h - the attempts of a worker: trainer processes and their output, as effects say */
#ifndef WORKER_ATTEMPTS_H
#define WORKER_ATTEMPTS_H

#include "worker/agent.h"
#include "worker/config.h"

struct uv_loop_s;
struct attempts;

/* What the shell lends; all of it lives longer than the attempts. */
struct attempts_shell {
    struct uv_loop_s *loop;
    const struct worker_config *config;
    struct agent *agent;
    void *context;
    /* Around what a trainer's event tells the agent. Effects are carried out in turn_end. */
    void (*turn_begin)(void *context, struct agent_turn *t);
    void (*turn_end)(void *context, struct agent_turn *t);
    void (*send)(void *context, const Ballast__Envelope *envelope,
                 const ProtobufCMessage *payload);
};

struct attempts *attempts_create(const struct attempts_shell *shell);

/* Kills what lives. The memory of children goes when the loop has run its close callbacks. */
void attempts_destroy(struct attempts *all);

/* SPAWN, FORWARD, KILL, SEND_LOG and FORGET. A spawn that fails is kept for the next turn. */
void attempts_carry_out(struct attempts *all, const struct effect *e);

/* Has a spawn failed that the agent does not know of? Telling is an input of a turn. */
bool attempts_has_failed(const struct attempts *all);
void attempts_tell_failed(struct attempts *all, struct agent_turn *t);

/* Output that the coordinator has stored need not be kept. */
void attempts_stored(struct attempts *all, const Ballast__Ack *ack);

uint64_t attempts_resident_bytes(const struct attempts *all);

/* One line an attempt, for people. */
void attempts_log(const struct attempts *all);

#endif
