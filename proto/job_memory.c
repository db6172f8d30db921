/* job_memory.c - what the memory model is asked for a job */
#include "proto/job_memory.h"

#include <string.h>

#include "common/lora_map.h"

static int count_adapters(const Ballast__JobSpec *spec, const struct model_spec *model,
                          struct memory_input *out, struct err *err)
{
    struct lora_config lora = {
        .r = spec->lora_r, .alpha = spec->lora_alpha, .shared_a = spec->lora_shared_a,
        .targets = (const char *const *)spec->lora_targets, .n_targets = spec->n_lora_targets,
    };
    struct tensor_map map = {0};
    int rc = tensor_map_init(model, &map, err);
    if (rc == 0)
        rc = lora_map_add(&map, &lora, err);
    for (uint32_t u = 0; u < map.n_units && rc == 0; u++)
        out->dense_adapters += map.units[u].trained;
    out->expert_adapters = map.expert.trained;
    tensor_map_fini(&map);
    return rc;
}

int job_memory(const Ballast__JobSpec *spec, const struct model_spec *model,
               struct layout_degrees degrees, struct memory_plan *out, struct err *err)
{
    struct memory_input in = {
        .spec = model, .degrees = degrees,
        .n_tokens = (uint64_t)spec->train_micro_batch * spec->data_sequence_length,
        .recompute = !strcmp(spec->parallel_activation_checkpointing, "full"),
        .elem_bytes = strcmp(spec->train_precision, "bf16") ? 4 : 2,
        .count_margins = !strcmp(spec->moe_bias_update, "quantile"),
        .n_spare = spec->rebalance_spare_slots_per_rank,
    };
    if (!strcmp(spec->train_mode, "lora")) {
        int rc = count_adapters(spec, model, &in, err);
        if (rc < 0)
            return rc;
    }
    *out = memory_model(&in);
    return 0;
}
