/* job_degrees.h - whether a job's ranks can be cut as it says, and what would fit instead */
#ifndef PROTO_JOB_DEGREES_H
#define PROTO_JOB_DEGREES_H

#include "common/problems.h"
#include "proto/ballast.pb-c.h"

/* A problem for each degree that does not divide what it cuts; the last of them says which degrees
 * would fit together, and with how many workers these would. And one for a batch that the workers
 * cannot share. n_experts as of job_spec_check_together. */
void job_degrees_check(const Ballast__JobSpec *spec, uint32_t n_experts, struct problems *out);

#endif
