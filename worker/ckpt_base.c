/* ckpt_base.c - packs a frozen matrix
 *
 * A rank's part may begin and end within a block or a group, so it is cut from the whole. */
#include "worker/ckpt_base.h"

#include <stdlib.h>

#include "common/mem.h"

int ckpt_base_read(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
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
