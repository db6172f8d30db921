/* ckpt_sums.h - checksums of a checkpoint's tensors, in ballast/checksums.json
 *
 * Private to ckpt. Ranks take them of what they write and add them up; whoever loads reads all
 * bytes once more, each rank its share of the tensors. A checkpoint without the file, of an older
 * version, is taken as it is. */
#ifndef WORKER_CKPT_SUMS_H
#define WORKER_CKPT_SUMS_H

#include "common/safetensors.h"
#include "worker/coll.h"

struct ckpt_sum {
    const char *place; /* in the checkpoint, as safetensors_open takes it; static text */
    char       *tensor;
    struct st_sum sum;
};
struct ckpt_sums {
    struct ckpt_sum *items; /* n; the same tensors in the same order on all ranks */
    size_t n;
};

void ckpt_sums_add(struct ckpt_sums *s, const char *place, const char *tensor, struct st_sum sum);
void ckpt_sums_fini(struct ckpt_sums *s);

/* Of all ranks' slices. Collective. */
int ckpt_sums_gather(struct ckpt_sums *s, struct coll *coll, struct err *err);
int ckpt_sums_write(const struct ckpt_sums *s, const char *folder, struct err *err);

/* This rank's share. -EINVAL names file and tensor of the first whose bytes are others. */
int ckpt_sums_check(const char *folder, const struct coll *coll, struct err *err);

#endif
