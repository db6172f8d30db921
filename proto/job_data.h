/* job_data.h - a job's files as the reader of tokens takes them: in trainers, and where they are
 * told of */
#ifndef PROTO_JOB_DATA_H
#define PROTO_JOB_DATA_H

#include "common/data_step.h"
#include "proto/ballast.pb-c.h"

enum job_data { JOB_TRAIN, JOB_VALIDATION };

/* Fills *out, which borrows from s; -EINVAL where the format is not known. */
int job_data_config(const Ballast__JobSpec *s, enum job_data which, uint32_t vocab,
                    struct data_config *out, struct err *err);

/* Of a step that begins with that sample. */
struct data_step job_data_step(const Ballast__JobSpec *s, uint64_t step, uint64_t first);

#endif
