/* job_fit.h - what to change in a job so that a rank of it fits into the memory there is */
#ifndef PROTO_JOB_FIT_H
#define PROTO_JOB_FIT_H

#include "proto/job_memory.h"

#define JOB_FIT_TEXT_MAX 960

/* The three cheapest sets of changes with which the plan's total is at most most_bytes, each with
 * the bytes of a rank then: "any of these fits: parallel.activation_checkpointing: full (812 MiB);
 * ..."; or that none was found. What is changed: keys that leave the training itself as it is. */
void job_fit_text(const Ballast__JobSpec *spec, const struct model_spec *model,
                  const struct job_machine *on, uint64_t most_bytes,
                  char out_text[JOB_FIT_TEXT_MAX]);

#endif
