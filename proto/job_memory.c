/* job_memory.c - what the memory model is asked for a job */
#include "proto/job_memory.h"

#include <string.h>

#include "proto/job_map.h"

static int count_adapters(const Ballast__JobSpec *spec, const struct model_spec *model,
                          struct memory_input *out, const char **out_key, struct err *err)
{
    struct tensor_map map;
    int rc = job_map_init(spec, model, &map, out_key, err);
    if (rc < 0)
        return rc;
    for (uint32_t u = 0; u < map.n_units; u++)
        out->dense_adapters += map.units[u].trained;
    out->expert_adapters = map.expert.trained;
    out->packed_experts = !strcmp(spec->model_base_precision, "mxfp4");
    tensor_map_fini(&map);
    return 0;
}

int job_memory(const Ballast__JobSpec *spec, const struct model_spec *model,
               struct layout_degrees degrees, struct memory_plan *out, const char **out_key,
               struct err *err)
{
    struct memory_input in = {
        .spec = model, .degrees = degrees,
        .n_tokens = (uint64_t)spec->train_micro_batch * spec->data_sequence_length,
        .recompute = !strcmp(spec->parallel_activation_checkpointing, "full"),
        .elem_bytes = strcmp(spec->train_precision, "bf16") ? 4 : 2,
        .count_margins = !strcmp(spec->train_mode, "full") &&
                         !strcmp(spec->moe_bias_update, "quantile"),
        .n_spare = spec->rebalance_spare_slots_per_rank,
    };
    if (job_trains_adapters(spec)) {
        int rc = count_adapters(spec, model, &in, out_key, err);
        if (rc < 0)
            return rc;
    }
    *out = memory_model(&in);
    return 0;
}
