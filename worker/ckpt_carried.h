/* ckpt_carried.h - tensors of a checkpoint that are not computed and go along as they are
 *
 * Private to ckpt. A vision tower or next-token layers of the model's folder are copied, byte for
 * byte, into a file of their own beside the weights. By the rank that makes the files. */
#ifndef WORKER_CKPT_CARRIED_H
#define WORKER_CKPT_CARRIED_H

#include "common/safetensors.h"
#include "common/tensor_map.h"

#define CKPT_CARRIED_FILE "model-carried.safetensors"

struct ckpt_carried {
    struct safetensors *st;
    struct st_tensor   *tensors; /* n; names live in st */
    const uint8_t     **data;    /* n */
    size_t   n;
    uint64_t n_bytes;
};

/* Of a folder without weights there is none. is_packed: the weights stay packed, and with them the
 * scales of their inputs. Gives *out, ended with ckpt_carried_close. */
int  ckpt_carried_open(const char *model_path, const struct tensor_map *map, bool is_packed,
                       struct ckpt_carried *out, struct err *err);
void ckpt_carried_close(struct ckpt_carried *c);

/* Makes folder/CKPT_CARRIED_FILE, durably. */
int ckpt_carried_write(const struct ckpt_carried *c, const char *folder, struct err *err);

#endif
