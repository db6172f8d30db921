/* simulate_parts.h - what simulate.c and simulate_trainer.c share */
#ifndef WORKER_SIMULATE_PARTS_H
#define WORKER_SIMULATE_PARTS_H

#include <uv.h>

#include "common/link.h"
#include "worker/agent.h"
#include "worker/crowd.h"

struct simulation;

/* A trainer that only counts; job 0: there is none. */
struct counter {
    job_id   job;
    uint32_t attempt, rank;
    struct crowd *crowd;
    uint64_t step, resumed_from_step, every_steps, ready_ns;
    uint32_t arrived_epoch, settings_revision; /* epoch: the newest plan that has arrived */
    bool     is_ready, is_killed;
};

struct virtual {
    struct simulation *all;
    struct agent  *agent;
    struct link   *link;
    char          *name;
    struct counter trainer;
};

struct saved {
    job_id   job;
    uint64_t step;
};

struct simulation {
    uv_loop_t       loop;
    uv_timer_t      timer;
    uv_signal_t     signals[2];
    struct virtual *workers;
    uint32_t        n;
    struct saved   *saved; /* the newest checkpoint of each job */
    size_t          n_saved;
    struct crowd   *crowds;
    struct popularity popularity;
    struct cluster    cluster;
    bool            is_ending;
};

/* The newest checkpoint's step of a job, 0: none, as if on a file system. Lives until the next
 * call. */
uint64_t *simulated_checkpoint(struct simulation *s, job_id job);

/* Whether a trainer has something to do, and what that is. */
bool counter_is_due(const struct counter *c, uint64_t now_ns);
void counter_go_on(struct virtual *v, struct agent_turn *t);

#endif
