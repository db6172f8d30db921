/* ckpt_base.h - frozen weights on their way from a checkpoint, in the precision they are held in
 *
 * Private to ckpt. */
#ifndef WORKER_CKPT_BASE_H
#define WORKER_CKPT_BASE_H

#include "worker/ckpt.h"
#include "worker/ckpt_source.h"

/* Whether a tensor of that form is made from the matrix as a whole. */
bool ckpt_base_is_whole(const struct tensor_entry *e, const struct ckpt_source *source,
                        enum base_precision precision);

/* One that is: reads the matrix and writes this rank's part of it. */
int ckpt_base_read(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                   const struct ckpt_source *source, struct err *err);

#endif
