/* job_map.h - the tensors of a job's model, with what its mode adds, freezes and packs
 *
 * The client plans memory by it and refuses what does not fit; the worker trains by it. Pure. */
#ifndef PROTO_JOB_MAP_H
#define PROTO_JOB_MAP_H

#include "common/lora_map.h"
#include "proto/ballast.pb-c.h"

bool job_trains_adapters(const Ballast__JobSpec *spec);

/* The adapters that train.lora describes; borrows the spec's texts. */
struct lora_config job_lora(const Ballast__JobSpec *spec);

/* Gives *out, ended with tensor_map_fini. On failure *out_key is the job file's key that does not
 * fit the model. */
int job_map_init(const Ballast__JobSpec *spec, const struct model_spec *model,
                 struct tensor_map *out, const char **out_key, struct err *err);

#endif
