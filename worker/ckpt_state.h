/* ckpt_state.h - FOLDER/ballast/state.json of a checkpoint; private to ckpt */
#ifndef WORKER_CKPT_STATE_H
#define WORKER_CKPT_STATE_H

#include "worker/ckpt.h"

int ckpt_state_write(const struct ckpt_config *c, const char *folder, const struct ckpt_state *s,
                     struct err *err);

/* -EINVAL for what is no state of this format, or of a job that trains something else: adapters
 * instead of a whole model, or beside another base. */
int ckpt_state_read(const struct ckpt_config *c, const char *folder, struct ckpt_state *out,
                    struct err *err);

#endif
