/* ckpt_fp8.c - matrices of FP8 in a checkpoint, with a scale for each block, row, or all of it */
#include "worker/ckpt_fp8.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/bf16.h"
#include "kernels/fp8.h"

static bool has_shape(const struct st_view *v, uint64_t rows, uint64_t cols)
{
    const struct st_tensor *t = &v->tensor;
    return t->n_dims == 2 && t->dims[0] == rows && t->dims[1] == cols;
}

static uint64_t blocks(uint64_t n)
{
    return (n + FP8_BLOCK - 1) / FP8_BLOCK;
}

/* compressed-tensors' strategies block, channel and tensor; without its configuration, as shapes
 * tell them apart. */
static int find_blocks(const struct st_view *scale, const struct tensor_entry *e,
                       struct ckpt_source *out, struct err *err)
{
    const struct st_tensor *t = &scale->tensor;
    uint64_t rows = e->dims[0], cols = e->dims[1];
    char has[128];
    if (t->dtype != ST_F32 && t->dtype != ST_BF16)
        return err_set(err, -ENOTSUP, "%s: tensor '%s' is %s; scales of F8_E4M3 are F32 or BF16",
                       scale->file, t->name, st_dtype_name(t->dtype));
    if (has_shape(scale, rows, 1) || (t->n_dims == 1 && t->dims[0] == rows)) {
        out->block_rows = 1;
        out->block_cols = cols;
    } else if (scale->n_elements == 1) {
        out->block_rows = rows;
        out->block_cols = cols;
    } else if (!has_shape(scale, blocks(rows), blocks(cols))) {
        ckpt_dims_text(t->dims, t->n_dims, has);
        return err_set(err, -ENOTSUP, "%s: tensor '%s' has the shape %s; expected [%" PRIu64
                       ", 1], a scale a row, [1], one for all, or [%" PRIu64 ", %" PRIu64 "], of "
                       "blocks of %u x %u", scale->file, t->name, has, rows, blocks(rows),
                       blocks(cols), FP8_BLOCK, FP8_BLOCK);
    }
    return 0;
}

int ckpt_fp8_find(const struct st_view *values, const struct st_view *inverse,
                  const struct st_view *scale, const struct tensor_entry *e,
                  struct ckpt_source *out, struct err *err)
{
    struct ckpt_source s = { .values = values, .scales = inverse ? inverse : scale,
                             .width = e->dims[1], .block_rows = FP8_BLOCK,
                             .block_cols = FP8_BLOCK };
    uint64_t shape[2] = { blocks(e->dims[0]), blocks(e->dims[1]) };
    int rc;

    if (!s.scales)
        return err_set(err, -EINVAL, "%s: neither tensor '%s_scale_inv' nor '%s_scale' is there, "
                       "the scales of '%s'", values->file, e->name, e->name, values->tensor.name);
    if (e->n_dims != 2)
        return err_set(err, -EINVAL, "%s: tensor '%s' is F8_E4M3 but no matrix", values->file,
                       e->name);
    if (inverse) {
        if ((rc = ckpt_check_dtype(inverse, ST_F32, err)) == 0)
            rc = ckpt_check_shape(inverse, shape, 2, err);
    } else {
        rc = find_blocks(scale, e, &s, err);
    }
    if (rc == 0)
        *out = s;
    return rc;
}

static uint64_t scale_at(const struct ckpt_source *s, uint64_t row, uint64_t col)
{
    uint64_t across = (s->width + s->block_cols - 1) / s->block_cols;
    return row / s->block_rows * across + col / s->block_cols;
}

/* Of the numbers from `at` on, how many up to `end` have the same scale in the same row. */
static uint64_t count_alike(const struct ckpt_source *s, uint64_t at, uint64_t end)
{
    uint64_t col = at % s->width, stop = (col / s->block_cols + 1) * s->block_cols;
    stop = stop < s->width ? stop : s->width;
    return end - at < stop - col ? end - at : stop - col;
}

int ckpt_fp8_read(const struct ckpt_source *s, uint64_t first, uint64_t n, float *out,
                  struct err *err)
{
    for (uint64_t at = first, k; at < first + n; at += k) {
        float scale;
        int rc = st_read_f32(s->scales, scale_at(s, at / s->width, at % s->width), 1, &scale, err);
        if (rc < 0)
            return rc;
        k = count_alike(s, at, first + n);
        for (uint64_t i = at; i < at + k; i++)
            *out++ = fp8_e4m3_value(s->values->data[i]) * scale;
    }
    return 0;
}

/* Also no scale under which a code might become infinite. */
static int check_fp8(const struct ckpt_source *s, struct err *err)
{
    int64_t bad = fp8_e4m3_find_nan(s->values->data, (int64_t)s->values->n_bytes);
    for (uint64_t i = 0; i < s->scales->n_elements; i++) {
        float scale;
        int rc = st_read_f32(s->scales, i, 1, &scale, err);
        if (rc < 0)
            return rc;
        if (!isfinite(scale * FP8_LARGEST))
            return ckpt_no_number(s->scales, "scale", (int64_t)i, err);
    }
    return bad < 0 ? 0 : ckpt_no_number(s->values, "element", bad, err);
}

bool ckpt_fp8_has_our_blocks(const struct ckpt_source *s, const struct tensor_entry *e)
{
    return (s->block_rows >= e->dims[0] || s->block_rows % FP8_BLOCK == 0) &&
           (s->block_cols >= e->dims[1] || s->block_cols % FP8_BLOCK == 0);
}

int ckpt_fp8_take(const struct ckpt_source *s, const struct tensor_entry *e, uint8_t *out,
                  struct err *err)
{
    uint8_t *scales = out + packing_scales_at(PACKING_FP8, e->dims[0], e->dims[1]);
    int rc = check_fp8(s, err);
    memcpy(out, s->values->data, s->values->n_bytes);
    for (uint64_t row = 0; row < e->dims[0]; row += FP8_BLOCK)
        for (uint64_t col = 0; rc == 0 && col < e->dims[1]; col += FP8_BLOCK) {
            float scale;
            rc = st_read_f32(s->scales, scale_at(s, row, col), 1, &scale, err);
            memcpy(scales, &scale, sizeof scale);
            scales += sizeof scale;
        }
    return rc;
}

/* ---- written in the same form --------------------------------------------------------------- */

/* The least that puts all of the block within the codes; of what BF16 holds, the next above. */
static float scale_of(float largest, enum st_dtype dtype)
{
    float scale = largest > 0 ? largest / FP8_LARGEST : 1;
    if (dtype != ST_BF16)
        return scale;
    float rounded = bf16_value(bf16_of(scale));
    return rounded < scale ? bf16_value((uint16_t)(bf16_of(scale) + 1)) : rounded;
}

void ckpt_fp8_encode(const struct ckpt_source *s, const float *x, uint64_t rows,
                     uint8_t *out_codes, float *out_scales)
{
    uint64_t n = rows * s->width;
    memset(out_scales, 0, s->scales->n_elements * sizeof *out_scales);
    for (uint64_t i = 0; i < n; i++) {
        float *largest = &out_scales[scale_at(s, i / s->width, i % s->width)];
        *largest = fmaxf(*largest, fabsf(x[i]));
    }
    for (uint64_t k = 0; k < s->scales->n_elements; k++)
        out_scales[k] = scale_of(out_scales[k], s->scales->tensor.dtype);
    for (uint64_t i = 0; i < n; i++)
        out_codes[i] = fp8_e4m3_of(x[i] / out_scales[scale_at(s, i / s->width, i % s->width)]);
}
