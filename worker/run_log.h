/* run_log.h - a run in the output of its ranks, for people (`ballast logs`) */
#ifndef WORKER_RUN_LOG_H
#define WORKER_RUN_LOG_H

#include "worker/run.h"
#include "worker/step.h"

void run_log_start(const struct run *r);

/* What a rank should take, and at the end beside it what this one took. */
void run_log_plan(const struct run *r);
void run_log_usage(const struct run *r);
/* Rows that left this rank; by way of few ranks of a node fewer are sent to other nodes. */
void run_log_traffic(const struct run *r);

/* On rank 0: the first step and the last, one with a validation (not NAN), and of the others as
 * many as people can read; *logged_ns is when it spoke last. */
void run_log_step(const struct run *run, const struct step_result *r, double validation_loss,
                  uint64_t *logged_ns);

#endif
