/* job_map.c - what a job's mode makes of its model's tensor map */
#include "proto/job_map.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

bool job_trains_adapters(const Ballast__JobSpec *spec)
{
    return strcmp(spec->train_mode, "lora") == 0;
}

struct lora_config job_lora(const Ballast__JobSpec *spec)
{
    return (struct lora_config){
        .r = spec->lora_r, .alpha = spec->lora_alpha, .shared_a = spec->lora_shared_a,
        .indexers = spec->indexer_with_model,
        .targets = (const char *const *)spec->lora_targets, .n_targets = spec->n_lora_targets,
    };
}

static int add_adapters(const Ballast__JobSpec *spec, struct tensor_map *map, const char **out_key,
                        struct err *err)
{
    bool is_half = strcmp(spec->train_precision, "bf16") == 0;
    struct lora_config lora = job_lora(spec);
    *out_key = "train.lora.targets";
    int rc = lora_map_add(map, &lora, err);
    if (rc < 0)
        return rc;
    *out_key = "model.base_precision";
    return tensor_map_pack(map, packing_of_base(spec->model_base_precision),
                           is_half ? sizeof(uint16_t) : sizeof(float), err);
}

/* Layers in segments are KDA, or attention over keys that an indexer chooses. */
static int check_segments(const Ballast__JobSpec *spec, const struct model_spec *model,
                          struct err *err)
{
    for (uint32_t l = 0; l < model->n_layers && spec->parallel_segment_tokens; l++)
        if (model->layers[l].attention == ATTENTION_MLA && !model->index_top_k)
            return err_set(err, -ENOTSUP, "%" PRIu32 ", but layer %" PRIu32 " of the model has "
                           "attention over all keys, which needs them at once; expected off",
                           spec->parallel_segment_tokens, l);
    return 0;
}

int job_map_init(const Ballast__JobSpec *spec, const struct model_spec *model,
                 struct tensor_map *out, const char **out_key, struct err *err)
{
    bool alone = strcmp(spec->train_mode, "indexer") == 0;
    bool trains_indexers = alone || spec->indexer_with_model;
    struct tensor_map map;
    *out_key = alone ? "train.mode" : "train.indexer.with_model";
    if (trains_indexers && !model->index_top_k)
        return err_set(err, -ENOTSUP, "%s, but the model has no indexer; expected %s",
                       alone ? "indexer" : "true", alone ? "full" : "false");
    *out_key = "parallel.segment_tokens";
    int rc = check_segments(spec, model, err);
    if (rc < 0)
        return rc;
    *out_key = "model.path";
    rc = tensor_map_init(model, &map, err);
    if (rc < 0)
        return rc;
    if (trains_indexers && !job_trains_adapters(spec))
        tensor_map_train_indexers(&map, alone);
    if (job_trains_adapters(spec) && (rc = add_adapters(spec, &map, out_key, err)) < 0) {
        tensor_map_fini(&map);
        return rc;
    }
    map.has_muon = strcmp(spec->optimizer_name, "adamw") != 0;
    *out = map;
    return 0;
}
