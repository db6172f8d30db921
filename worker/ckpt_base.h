/* ckpt_base.h - frozen weights on their way from a checkpoint to where they are packed
 *
 * Private to ckpt. */
#ifndef WORKER_CKPT_BASE_H
#define WORKER_CKPT_BASE_H

#include "worker/ckpt.h"
#include "worker/ckpt_source.h"

/* Of a matrix that the map keeps packed: reads the whole and writes this rank's part of it. */
int ckpt_base_read(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                   const struct ckpt_source *source, struct err *err);

#endif
