/* ckpt_base.c - packs a frozen matrix, or rounds it block by block
 *
 * A rank's part may begin and end within a block or a group, so it is cut from the whole. */
#include "worker/ckpt_base.h"

#include <stdlib.h>

#include "common/mem.h"
#include "kernels/packed.h"

bool ckpt_base_is_whole(const struct tensor_entry *e, const struct ckpt_source *source,
                        enum base_precision precision)
{
    return e->packing != PACKING_NONE ||
           (precision == BASE_FP8 && tensor_is_projection(e->role) &&
            ckpt_source_packing(source) != PACKING_FP8);
}

static int read_packed(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                       const struct ckpt_source *source, struct err *err)
{
    struct device *dev = shard_device(s);
    size_t one = elem_size(dev);
    uint8_t *bytes = xcalloc(e->count, one);
    int rc = ckpt_source_read_packed(source, e, bytes, err);
    if (rc == 0)
        dev->ops->to_device(dev, p->elements, bytes + p->first * one, p->count * one);
    free(bytes);
    return rc;
}

static int read_rounded(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                        const struct ckpt_source *source, struct err *err)
{
    int64_t rows = (int64_t)e->dims[0], cols = (int64_t)e->dims[1];
    float *x = xcalloc(e->count, sizeof *x);
    uint8_t *bytes = xcalloc(packing_bytes(PACKING_FP8, e->dims[0], e->dims[1]), 1);
    struct packed w = {PACKING_FP8, bytes, rows, cols};
    int rc = ckpt_source_read(source, 0, e->count, x, err);
    if (rc == 0) {
        packed_encode(bytes, PACKING_FP8, x, rows, cols);
        packed_decode(x, &w, 0, rows, 0, cols);
        shard_part_write(s, p, 0, p->count, x + p->first);
    }
    free(bytes);
    free(x);
    return rc;
}

int ckpt_base_read(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                   const struct ckpt_source *source, struct err *err)
{
    return e->packing != PACKING_NONE ? read_packed(s, e, p, source, err)
                                      : read_rounded(s, e, p, source, err);
}
