/* tensor_map.h - where each tensor of a checkpoint lives in the model's parameter blocks
 *
 * Parameters are grouped in units that are gathered and freed together: unit 0 is the embedding,
 * unit 1 + l the dense parameters of layer l, the last unit the final norms and the head. The
 * routed experts of a layer stand outside the units: expert e of layer l is one block of
 * expert_count floats, w1 (gate), w3 (up), w2 (down) in this order. Inside a unit a tensor starts
 * at a multiple of 16 floats. A rank's slice of a unit is thus a range of floats. */
#ifndef COMMON_TENSOR_MAP_H
#define COMMON_TENSOR_MAP_H

#include "common/err.h"
#include "common/model_spec.h"

enum tensor_init { INIT_NORMAL, INIT_ONES, INIT_ZEROS, INIT_A_LOG, INIT_DT_BIAS, INIT_HEAD };

struct tensor_entry {
    char    *name;          /* the published name */
    uint32_t unit;          /* of dense tensors; for experts 1 + layer */
    int32_t  expert;        /* -1: dense */
    uint64_t offset;        /* in floats, from the start of the unit or of the expert's block */
    uint64_t count;         /* live floats */
    uint64_t stored_count;  /* as stored: A_log is padded with zeros to a multiple of 128 */
    uint32_t n_dims;
    uint64_t dims[TENSOR_DIMS_MAX]; /* as stored */
    enum tensor_init init;
    bool     is_buffer;     /* no gradient, no optimizer: the router's correction bias */
    bool     is_unreached;  /* the loss never reaches it (layer 0's self_attention_res_*) */
    bool     is_matrix;     /* decayed by decay: matrices (2-D, not norm, bias, conv, A_log) */
    bool     keep_f32;      /* published in F32 even in BF16 checkpoints */
};

struct tensor_map {
    struct tensor_entry *entries;
    size_t    n_entries;
    uint32_t  n_units;
    uint64_t *unit_count;   /* floats of each unit, padded to a multiple of 16 */
    uint64_t  expert_count; /* floats of one routed expert's block, padded to a multiple of 16 */
};

/* Gives *out_map, ended with tensor_map_fini. Fails with -ENOTSUP for a family it lacks. */
int  tensor_map_init(const struct model_spec *m, struct tensor_map *out_map, struct err *err);
void tensor_map_fini(struct tensor_map *map);

/* The entry of that name, or NULL. */
const struct tensor_entry *tensor_map_find(const struct tensor_map *map, const char *name);

#endif
