/* load.h - how many tokens each expert of one job saw, in windows of steps
 *
 * Reports of the job's ranks are summed until they cover a window. Two windows are kept: the
 * newest whole one and the one that is being filled. */
#ifndef COORDINATOR_LOAD_H
#define COORDINATOR_LOAD_H

#include "common/types.h"
#include "proto/ballast.pb-c.h"

struct load_window {
    uint32_t  attempt, epoch;          /* the placement that served all of it */
    uint64_t  first_step, last_step, n_steps; /* n_steps: that reports cover */
    uint32_t  n_layers, n_experts, n_devices;
    uint32_t *layer;                   /* (n_layers) their numbers, ascending */
    double   *tokens;                  /* (n_layers, n_experts), over all nodes */
    double   *speed;                   /* (n_devices) relative; n_devices 0: not measured */
    /* means over the window */
    double    step_s, row_s, link_bytes_per_s;
    double    imbalance;               /* max over mean of rows over devices; NaN: not known */
    uint64_t  expert_bytes, state_bytes; /* of one expert */
    uint64_t  frozen_bytes; /* of expert_bytes */
};

struct load;

struct load *load_create(uint32_t window_steps);
void load_destroy(struct load *l);

/* Adds a checked report. True if a window has become whole by it. A report of steps that were
 * seen, of an older attempt or of an older placement changes nothing; one that does not follow on
 * what is there (a newer attempt or placement, steps missing, another model) begins a window. */
bool load_add(struct load *l, const Ballast__LoadReport *r);

/* The newest whole window, or NULL. Lives until the next load_add. */
const struct load_window *load_newest(const struct load *l);

#endif
