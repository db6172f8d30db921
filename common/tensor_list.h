/* tensor_list.h - every tensor of a checkpoint, in groups that differ only by layer and expert
 *
 * From safetensors headers, from a list in the folder (tensors.tsv: name, layers, experts, dtype,
 * shape; ranges as in 0-2,4-46/2), or, where only an index lies there, from its names alone. A
 * model of half a million tensors has some hundred groups. */
#ifndef COMMON_TENSOR_LIST_H
#define COMMON_TENSOR_LIST_H

#include "common/err.h"
#include "common/types.h"

#define TENSOR_LAYERS_MAX (LAYERS_MAX + 64) /* next-token layers stand after the last */

struct tensor_group {
    char    *name;   /* numbers of layers and experts are {L} and {E} */
    char     dtype[16];
    uint32_t n_dims; /* 0 and n_elements 0: not known */
    uint64_t dims[TENSOR_DIMS_MAX];
    uint64_t n_elements, n_bytes;   /* of one tensor */
    bool     has_layers;
    uint32_t per_layer[TENSOR_LAYERS_MAX]; /* tensors of each layer; without layers, of [0] */
    uint64_t n_tensors;
};

enum tensor_source { TENSORS_NONE, TENSORS_SAFETENSORS, TENSORS_TSV, TENSORS_INDEX };

struct tensor_list {
    enum tensor_source source;
    struct tensor_group *groups;
    size_t   n_groups, cap;
    uint64_t n_tensors, n_elements, n_bytes; /* the last two 0 for TENSORS_INDEX without a size */
    uint32_t *slots; /* by hash of a group's name, type and shape; 1 + index, 0: free */
    size_t    n_slots;
};

/* Nothing to read is no error: source stays TENSORS_NONE. Gives *out, ended with
 * tensor_list_fini. Errors name file, line or tensor. */
int  tensor_list_read(const char *folder, struct tensor_list *out, struct err *err);
void tensor_list_fini(struct tensor_list *list);

#endif
