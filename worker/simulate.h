/* simulate.h - virtual workers: what a coordinator sees of a fleet, without any training */
#ifndef WORKER_SIMULATE_H
#define WORKER_SIMULATE_H

#include "worker/config.h"

#define SIMULATED_MAX 4096u

struct simulate_options {
    uint32_t    n;            /* workers, at most SIMULATED_MAX */
    const char *loads_file;   /* of experts, as `ballast balance --loads` reads it; NULL: made up */
    const char *cluster_file; /* a cluster.yaml, for the rates of links; NULL: an H200's */
    uint64_t    seed;         /* of loads that are made up */
};

/* Offers workers to the coordinator of the config, until SIGTERM or SIGINT; a second one ends at
 * once. They are called NAME-0 and so on, eight to a node, and take every job: losses fall,
 * checkpoints are remembered while this process lives, and nothing is computed. A step of evenly
 * loaded ranks lasts 0.2 s; ranks report the loads of their experts, wait for the busiest one, and
 * carry out plans. */
int simulate_run(const struct worker_config *config, const struct simulate_options *options,
                 struct err *err);

#endif
