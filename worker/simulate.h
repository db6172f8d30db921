/* simulate.h - virtual workers: what a coordinator sees of a fleet, without any training */
#ifndef WORKER_SIMULATE_H
#define WORKER_SIMULATE_H

#include "worker/config.h"

#define SIMULATED_MAX 4096u

/* Offers n workers to the coordinator of the file, until SIGTERM or SIGINT; a second one ends at
 * once. They are called NAME-0 and so on, eight to a node, and take every job: a step lasts 0.2 s,
 * losses fall, checkpoints are remembered while this process lives, and nothing is computed. */
int simulate_run(const struct worker_config *config, uint32_t n, struct err *err);

#endif
