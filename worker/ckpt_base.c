/* ckpt_base.c - packs a frozen matrix, or rounds it block by block
 *
 * A rank's part may begin and end within a block or a group, so it is cut from the whole. */
#include "worker/ckpt_base.h"

#include <stdlib.h>

#include "common/mem.h"
#include "kernels/fp8.h"
#include "kernels/mxfp4.h"

bool ckpt_base_is_whole(const struct tensor_entry *e, const struct ckpt_source *source,
                        enum base_precision precision)
{
    return e->is_packed ||
           (precision == BASE_FP8 && tensor_is_projection(e->role) && !ckpt_source_is_fp8(source));
}

static int read_packed(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                       const struct ckpt_source *source, struct err *err)
{
    struct device *dev = shard_device(s);
    size_t one = elem_size(dev);
    uint64_t n = e->stored_count;
    uint8_t *bytes = xcalloc(e->count, one);
    int rc = ckpt_source_read_packed(source, n, bytes, bytes + n / 2, err);
    if (rc == 0)
        dev->ops->to_device(dev, p->elements, bytes + p->first * one, p->count * one);
    free(bytes);
    return rc;
}

static int read_rounded(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                        const struct ckpt_source *source, struct err *err)
{
    int64_t rows = (int64_t)e->dims[0], cols = (int64_t)e->dims[1];
    uint64_t across = (e->dims[1] + FP8_BLOCK - 1) / FP8_BLOCK;
    uint64_t down = (e->dims[0] + FP8_BLOCK - 1) / FP8_BLOCK;
    float *x = xcalloc(e->count, sizeof *x), *scales = xcalloc(across * down, sizeof *scales);
    uint8_t *codes = xcalloc(e->count, 1);
    int rc = ckpt_source_read(source, 0, e->count, x, err);
    if (rc == 0) {
        fp8_e4m3_encode(codes, scales, x, rows, cols, FP8_BLOCK);
        fp8_e4m3_decode(x, codes, scales, 0, rows, cols, FP8_BLOCK);
        shard_part_write(s, p, 0, p->count, x + p->first);
    }
    free(codes);
    free(scales);
    free(x);
    return rc;
}

int ckpt_base_read(struct shard *s, const struct tensor_entry *e, const struct shard_part *p,
                   const struct ckpt_source *source, struct err *err)
{
    return e->is_packed ? read_packed(s, e, p, source, err) : read_rounded(s, e, p, source, err);
}
