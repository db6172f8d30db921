/* step_batch.h - the samples of a step that are this rank's */
#ifndef WORKER_STEP_BATCH_H
#define WORKER_STEP_BATCH_H

#include "worker/run.h"

/* Micro-batches of a rank in a step. */
uint64_t step_n_batches(const struct run *run);

/* Micro-batch k of the next step, into run->batch. */
int step_batch(struct run *run, uint64_t k, struct err *err);

/* The same as the model takes it; lives as long as b is not changed. */
struct model_batch step_batch_of(const struct data_batch *b);

#endif
