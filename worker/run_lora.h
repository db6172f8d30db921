/* run_lora.h - a run that trains adapters: what its job file says, and what it begins from */
#ifndef WORKER_RUN_LORA_H
#define WORKER_RUN_LORA_H

#include "worker/run.h"

/* From the job file, where it says train.mode: lora; texts are borrowed from it. */
void run_lora_read(struct run *run);

/* The base, once, then the adapters: of the newest checkpoint, else of train.lora.adapter, else
 * initial ones. Collective. */
int run_lora_restore(struct run *run, struct err *err);

#endif
