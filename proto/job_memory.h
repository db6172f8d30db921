/* job_memory.h - the memory plan of one rank of a job */
#ifndef PROTO_JOB_MEMORY_H
#define PROTO_JOB_MEMORY_H

#include "common/memory_model.h"
#include "proto/ballast.pb-c.h"

/* degrees: as layout_init resolved them. -EINVAL where adapters do not fit the model; *out_key is
 * then the job file's key that is to blame. */
struct job_machine {
    bool     on_gpu;
    uint32_t n_threads; /* of a CPU */
    uint32_t n_nodes;   /* on which an expert group lies, as evenly as it goes; 0: one */
    uint32_t node_ranks; /* ranks that one node has, for other layouts; 0: all */
};

/* on: NULL where it is not known yet; then what the precision implies, one thread and one node. */
int job_memory(const Ballast__JobSpec *spec, const struct model_spec *model,
               struct layout_degrees degrees, const struct job_machine *on,
               struct memory_plan *out, const char **out_key, struct err *err);

/* All that the plan asks for but the degrees. Gives *out_map, which *out points to. */
int job_memory_input(const Ballast__JobSpec *spec, const struct model_spec *model,
                     const struct job_machine *on, struct tensor_map *out_map,
                     struct memory_input *out, const char **out_key, struct err *err);

#endif
