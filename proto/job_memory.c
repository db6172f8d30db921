/* job_memory.c - what the memory model is asked for a job */
#include "proto/job_memory.h"

#include <string.h>

#include "proto/job_map.h"

static void count_adapters(const Ballast__JobSpec *spec, const struct tensor_map *map,
                           struct memory_input *out)
{
    for (uint32_t u = 0; u < map->n_units; u++)
        out->dense_adapters += map->units[u].trained;
    out->expert_adapters = map->expert.trained;
    out->lora_rank = spec->lora_r;
    for (size_t i = 0; i < map->n_entries && out->spec->index_top_k; i++)
        out->lora_by_heads = out->lora_by_heads || (map->entries[i].role == ROLE_MLA_KV_B &&
                                                    map->entries[i].adapter != ADAPTER_NONE);
    out->packing = packing_of_base(spec->model_base_precision);
}

int job_memory_input(const Ballast__JobSpec *spec, const struct model_spec *model,
                     const struct job_machine *on, struct tensor_map *out_map,
                     struct memory_input *out, const char **out_key, struct err *err)
{
    bool is_narrow = !strcmp(spec->train_precision, "bf16");
    int rc = job_map_init(spec, model, out_map, out_key, err);
    if (rc < 0)
        return rc;
    *out = (struct memory_input){
        .spec = model, .map = out_map,
        .n_tokens = (uint64_t)spec->train_micro_batch * spec->data_sequence_length,
        .segment_tokens = spec->parallel_segment_tokens,
        .recompute = recompute_of(spec->parallel_activation_checkpointing),
        .elem_bytes = is_narrow ? 2 : 4, .on_gpu = on ? on->on_gpu : is_narrow,
        .n_threads = on ? on->n_threads : 1,
        .n_nodes = on && strcmp(spec->parallel_hierarchical_all_to_all, "off") ? on->n_nodes : 0,
        .count_margins = !strcmp(spec->train_mode, "full") &&
                         !strcmp(spec->moe_bias_update, "quantile"),
        .has_muon = out_map->has_muon,
        .has_z_loss = spec->moe_z_loss > 0, .has_capacity = spec->moe_capacity_factor > 0,
        .has_sequence_loss = spec->moe_aux_loss > 0 && !strcmp(spec->moe_aux_scope, "sequence"),
        .n_spare = spec->rebalance_spare_slots_per_rank,
        .is_blocking = !spec->parallel_overlap,
    };
    if (job_trains_adapters(spec))
        count_adapters(spec, out_map, out);
    return 0;
}

int job_memory(const Ballast__JobSpec *spec, const struct model_spec *model,
               struct layout_degrees degrees, const struct job_machine *on,
               struct memory_plan *out, const char **out_key, struct err *err)
{
    struct tensor_map map;
    struct memory_input in;
    int rc = job_memory_input(spec, model, on, &map, &in, out_key, err);
    if (rc < 0)
        return rc;
    in.degrees = degrees;
    *out = memory_model(&in);
    tensor_map_fini(&map);
    return 0;
}
