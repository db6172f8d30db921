/* ckpt_source.h - the floats of one tensor in a checkpoint, however they are stored
 *
 * Private to ckpt and export. Plain (F32, BF16, F16); NAME_packed and NAME_scale, MXFP4; F8_E4M3
 * with NAME_scale_inv, a float for each block of 128 x 128, or with NAME_scale, of F32 or BF16, for
 * each such block, each row or the whole matrix; or plain, fused: the matrices of all experts of a
 * layer in two tensors, experts.gate_up_proj (experts, gate rows then up rows, in) and
 * experts.down_proj (experts, out, in). */
#ifndef WORKER_CKPT_SOURCE_H
#define WORKER_CKPT_SOURCE_H

#include "common/safetensors.h"
#include "common/tensor_map.h"

struct ckpt_source {
    const struct st_view *values, *scales; /* scales NULL: plain */
    uint64_t width;                        /* of a row */
    uint64_t block_rows, block_cols;       /* of FP8: numbers to a scale */
    uint64_t at;                           /* of values: how many are before this tensor's */
    bool     is_fused;
};

/* folder is for the error: -EINVAL names a tensor that is missing or of another shape. *out lives
 * until safetensors_close. */
int ckpt_source_find(const struct safetensors *st, const struct tensor_entry *e,
                     const char *folder, struct ckpt_source *out, struct err *err);

/* Elements first .. first + n; -EINVAL names the first that is no finite number. */
int ckpt_source_read(const struct ckpt_source *s, uint64_t first, uint64_t n, float *out,
                     struct err *err);

/* The whole matrix of e, as e is packed: the bytes that are stored if they are so, else packed from
 * what is. Out: packing_bytes. */
int ckpt_source_read_packed(const struct ckpt_source *s, const struct tensor_entry *e,
                            uint8_t *out, struct err *err);
/* What its codes are, whatever they are scaled by. */
enum packing ckpt_source_packing(const struct ckpt_source *s);

/* NAME of a matrix NAME.weight with input_scale: what other programs round its inputs by where
 * they run the model in FP8. It says nothing of the weights. */
bool ckpt_source_is_input_scale(const struct tensor_map *map, const char *name);

/* The next matrix, from entry *inout_i of the map on, that is a part of v, and where in it;
 * *inout_i goes behind it. NULL: there are no more, as in a tensor that is not fused. */
const struct tensor_entry *ckpt_source_next_part(const struct tensor_map *map,
                                                 const struct st_view *v, size_t *inout_i,
                                                 struct ckpt_source *out);

/* The first tensor that is neither the model's, in any of these forms, nor one that it carries
 * along: -EINVAL. */
int ckpt_source_check_names(const struct safetensors *st, const struct tensor_map *map,
                            struct err *err);

#endif
