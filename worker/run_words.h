/* run_words.h - the job file's words as what the parts of a run are told */
#ifndef WORKER_RUN_WORDS_H
#define WORKER_RUN_WORDS_H

#include "worker/run.h"

/* Fills schedule, optim, rules, lora and what is done about biases, indexers and bad steps from
 * run->spec. -EINVAL names a word that is not known. */
int run_words(struct run *run, struct err *err);

/* Whether they go with the model, which has been read: else -ENOTSUP. */
int run_words_check(const struct run *run, struct err *err);

#endif
