/* job_memory.h - the memory plan of one rank of a job */
#ifndef PROTO_JOB_MEMORY_H
#define PROTO_JOB_MEMORY_H

#include "common/memory_model.h"
#include "proto/ballast.pb-c.h"

/* degrees: as layout_init resolved them. -EINVAL where adapters do not fit the model; *out_key is
 * then the job file's key that is to blame. */
int job_memory(const Ballast__JobSpec *spec, const struct model_spec *model,
               struct layout_degrees degrees, struct memory_plan *out, const char **out_key,
               struct err *err);

#endif
