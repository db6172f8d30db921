/* lora_map.h - low-rank adapters beside the matrices of a model: which, where, under which names
 *
 * An adapter is two more tensors of the unit or of the expert's block, A (r, in) and B (out, r),
 * and everything else of the map is frozen. The names are those of the PEFT library:
 * base_model.model.<the module's path>.lora_A.weight and lora_B.weight. */
#ifndef COMMON_LORA_MAP_H
#define COMMON_LORA_MAP_H

#include "common/tensor_map.h"

#define LORA_RANK_MAX 4096u
#define LORA_NAME_BYTES 320
#define LORA_NAME_PREFIX "base_model.model."

struct lora_config { /* borrowed while it is used */
    uint32_t r;
    double   alpha;   /* the adapter's product is scaled by alpha / r */
    bool     shared_a; /* one A for all experts of a layer */
    /* Ends of module paths, as q_proj or self_attn.q_proj, in which an expert's number is left out
     * (experts.w1); "experts": all three matrices of the routed ones. */
    const char *const *targets;
    size_t n_targets;
    bool indexers; /* theirs are trained; else they rest as they are */
};

/* Adds adapters to map and freezes all that was there. -EINVAL for a target that names no matrix
 * of the model or one that takes no adapter, and where nothing would be trained; then the map is
 * as it was. */
int lora_map_add(struct tensor_map *map, const struct lora_config *c, struct err *err);

/* The name under which expert e stores an A that is shared. */
void lora_name_of_expert(const struct tensor_entry *shared, uint32_t e, char out[LORA_NAME_BYTES]);
/* And back: the name of expert 0's in out, and which expert's it is; -1 for one that is of none. */
int64_t lora_expert_of_name(const char *name, char out[LORA_NAME_BYTES]);

/* The target that stands for the module of an adapter's name, in out; -EINVAL for another name. */
int lora_target_of(const char *name, char out[LORA_NAME_BYTES], struct err *err);

/* Whether a tensor of an adapter's file is no adapter but a copy of the matrix beside which one
 * lies, as PEFT adds it for a head: base_model.model.<module>.base_layer.weight. Then the matrix'
 * name in out. */
bool lora_is_copy(const char *name, char out[LORA_NAME_BYTES]);

/* The matrix beside which an adapter lies, by its name without the ending .weight. */
const struct tensor_entry *lora_base_of(const struct tensor_map *map,
                                        const struct tensor_entry *adapter);

#endif
