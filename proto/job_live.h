/* job_live.h - the keys of the job file that may change while the job lives
 *
 * None of them enters the arithmetic of a step, so a run with changes has the losses of one
 * without. All are numbers. Pure. */
#ifndef PROTO_JOB_LIVE_H
#define PROTO_JOB_LIVE_H

#include "proto/job_spec.h"

/* Sets one of them, "checkpoint.every_steps=50", by its row of the job file's table. On failure
 * (-EINVAL) spec is untouched and err names the key and what is allowed. */
int job_live_set(Ballast__JobSpec *spec, const char *assignment, struct err *err);

/* Copies all of them; nothing else of to changes. */
void job_live_copy(Ballast__JobSpec *to, const Ballast__JobSpec *from);

/* "checkpoint.every_steps 100 -> 50, checkpoint.keep 3 -> 1": those that differ, "" if none does.
 * Gives, freed with free(). */
char *job_live_differences(const Ballast__JobSpec *before, const Ballast__JobSpec *after);

#endif
