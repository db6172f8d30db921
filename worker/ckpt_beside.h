/* ckpt_beside.h - the small files of a checkpoint beside its tensors
 *
 * Private to ckpt. What is written is durable. */
#ifndef WORKER_CKPT_BESIDE_H
#define WORKER_CKPT_BESIDE_H

#include "common/err.h"
#include "common/json.h"

/* Indented. */
int ckpt_write_json(const struct json *o, const char *path, struct err *err);

int ckpt_copy_file(const char *from, const char *to, struct err *err);

/* config.json, without what it says about quantization unless is_packed; and what other tools want
 * beside it where the model has it. */
int ckpt_copy_model_files(const char *model_path, bool is_packed, const char *folder,
                          struct err *err);

#endif
