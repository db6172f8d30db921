/* ckpt_source.c - finds the stored form of a tensor and reads floats from it */
#include "worker/ckpt_source.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/lora_map.h"
#include "common/mem.h"
#include "kernels/mxfp4.h"
#include "kernels/packed.h"
#include "worker/ckpt_fp8.h"

#define NAME_BYTES 320

static const char *const suffixes[] = { "_packed", "_scale", "_scale_inv" };

static const struct st_view *find_with(const struct safetensors *st, const char *name,
                                       const char *suffix)
{
    char whole[NAME_BYTES];
    int n = snprintf(whole, sizeof whole, "%s%s", name, suffix);
    return n < (int)sizeof whole ? safetensors_find(st, whole) : NULL;
}

size_t ckpt_dims_text(const uint64_t *dims, uint32_t n, char out[128])
{
    size_t at = (size_t)snprintf(out, 128, "[");
    for (uint32_t i = 0; i < n && at < 100; i++)
        at += (size_t)snprintf(out + at, 128 - at, "%s%" PRIu64, i > 0 ? ", " : "", dims[i]);
    return at + (size_t)snprintf(out + at, 128 - at, "]");
}

int ckpt_check_shape(const struct st_view *v, const uint64_t *dims, uint32_t n_dims,
                       struct err *err)
{
    bool is_adapter = strncmp(v->tensor.name, LORA_NAME_PREFIX, strlen(LORA_NAME_PREFIX)) == 0;
    char has[128], wants[128];

    if (v->tensor.n_dims == n_dims && memcmp(v->tensor.dims, dims, n_dims * sizeof *dims) == 0)
        return 0;
    ckpt_dims_text(v->tensor.dims, v->tensor.n_dims, has);
    ckpt_dims_text(dims, n_dims, wants);
    return err_set(err, -EINVAL, "%s: tensor '%s' has the shape %s, %s %s", v->file,
                   v->tensor.name, has, is_adapter ? "expected" : "config.json makes it", wants);
}

int ckpt_check_dtype(const struct st_view *v, enum st_dtype dtype, struct err *err)
{
    if (v->tensor.dtype == dtype)
        return 0;
    return err_set(err, -EINVAL, "%s: tensor '%s' is %s, expected %s", v->file, v->tensor.name,
                   st_dtype_name(v->tensor.dtype), st_dtype_name(dtype));
}

static int missing(const struct st_view *v, const char *name, const char *suffix, struct err *err)
{
    return err_set(err, -EINVAL, "%s: tensor '%s%s' is missing, the scales of '%s'", v->file, name,
                   suffix, v->tensor.name);
}

static int find_mxfp4(const struct safetensors *st, const struct tensor_entry *e,
                      const struct st_view *packed, struct ckpt_source *out, struct err *err)
{
    const struct st_view *scale = find_with(st, e->name, "_scale");
    uint64_t rows = e->dims[0], width = e->dims[1];
    int rc;

    if (packed->tensor.dtype == ST_I32 || (scale && scale->tensor.dtype == ST_F8_E4M3))
        return err_set(err, -ENOTSUP, "%s: tensor '%s' is packed as %s, which is not read; "
                       "expected MXFP4, F8_E4M3 with scales, or BF16", packed->file,
                       packed->tensor.name,
                       packed->tensor.dtype == ST_I32 ? "whole numbers (INT4, INT8)" : "NVFP4");
    if (!scale)
        return missing(packed, e->name, "_scale", err);
    if (e->n_dims != 2 || width % MXFP4_GROUP != 0)
        return err_set(err, -EINVAL, "%s: tensor '%s' is packed in groups of %u, its rows do not "
                       "divide", packed->file, e->name, MXFP4_GROUP);
    if ((rc = ckpt_check_dtype(packed, ST_U8, err)) < 0 ||
        (rc = ckpt_check_dtype(scale, ST_U8, err)) < 0 ||
        (rc = ckpt_check_shape(packed, (uint64_t[]){ rows, width / 2 }, 2, err)) < 0 ||
        (rc = ckpt_check_shape(scale, (uint64_t[]){ rows, width / MXFP4_GROUP }, 2, err)) < 0)
        return rc;
    *out = (struct ckpt_source){ .values = packed, .scales = scale, .width = width };
    return 0;
}

static int find_fp8(const struct safetensors *st, const struct tensor_entry *e,
                    const struct st_view *values, struct ckpt_source *out, struct err *err)
{
    return ckpt_fp8_find(values, find_with(st, e->name, "_scale_inv"),
                         find_with(st, e->name, "_scale"), e, out, err);
}

/* ---- fused experts -------------------------------------------------------------------------- */

static const char experts_part[] = ".experts.", fused_gate_up[] = "gate_up_proj",
                  fused_down[] = "down_proj";

static const struct st_view *find_fused(const struct safetensors *st, const struct tensor_entry *e)
{
    const char *at = e->expert >= 0 && e->adapter == ADAPTER_NONE ? strstr(e->name, experts_part)
                                                                  : NULL;
    char name[NAME_BYTES];
    if (!at)
        return NULL;
    int n = snprintf(name, sizeof name, "%.*s%s%s", (int)(at - e->name), e->name, experts_part,
                     e->role == ROLE_EXPERT_DOWN ? fused_down : fused_gate_up);
    return n < (int)sizeof name ? safetensors_find(st, name) : NULL;
}

static int take_fused(const struct tensor_entry *e, const struct st_view *v,
                      struct ckpt_source *out, struct err *err)
{
    uint64_t n = v->tensor.n_dims ? v->tensor.dims[0] : 0, expert = (uint64_t)e->expert;
    uint64_t parts = e->role == ROLE_EXPERT_DOWN ? 1 : 2;
    int rc = ckpt_check_shape(v, (uint64_t[]){ n > expert ? n : expert + 1, parts * e->dims[0],
                                          e->dims[1] }, 3, err);
    if (rc < 0)
        return rc;
    if (v->tensor.dtype == ST_F8_E4M3)
        return err_set(err, -ENOTSUP, "%s: tensor '%s' is fused and F8_E4M3; expected one of an "
                       "expert each, or BF16", v->file, v->tensor.name);
    *out = (struct ckpt_source){
        .values = v, .is_fused = true,
        .at = (parts * expert + (e->role == ROLE_EXPERT_UP)) * e->stored_count,
    };
    return 0;
}

/* The length of a fused tensor's name up to its last word, 0 for another tensor. */
static size_t fused_part(const char *name, bool *out_is_down)
{
    const char *part = strstr(name, experts_part);
    const char *word = part ? part + sizeof experts_part - 1 : "";
    *out_is_down = strcmp(word, fused_down) == 0;
    return *out_is_down || strcmp(word, fused_gate_up) == 0 ? (size_t)(word - name) : 0;
}

static const struct tensor_entry *next_of_layer(const struct tensor_map *map, const char *name,
                                                size_t *inout_i)
{
    bool is_down;
    size_t n = fused_part(name, &is_down);
    while (n > 0 && *inout_i < map->n_entries) {
        const struct tensor_entry *e = &map->entries[(*inout_i)++];
        if (e->expert >= 0 && e->adapter == ADAPTER_NONE &&
            (e->role == ROLE_EXPERT_DOWN) == is_down && strncmp(e->name, name, n) == 0)
            return e;
    }
    return NULL;
}

const struct tensor_entry *ckpt_source_next_part(const struct tensor_map *map,
                                                 const struct st_view *v, size_t *inout_i,
                                                 struct ckpt_source *out)
{
    const struct tensor_entry *e;
    while ((e = next_of_layer(map, v->tensor.name, inout_i)) && take_fused(e, v, out, NULL) < 0)
        ;
    return e;
}

/* ---- finding -------------------------------------------------------------------------------- */

int ckpt_source_find(const struct safetensors *st, const struct tensor_entry *e,
                     const char *folder, struct ckpt_source *out, struct err *err)
{
    const struct st_view *v = safetensors_find(st, e->name);
    const struct st_view *packed = v ? NULL : find_with(st, e->name, "_packed");
    const struct st_view *fused = v || packed ? NULL : find_fused(st, e);
    int rc;

    if (packed)
        return find_mxfp4(st, e, packed, out, err);
    if (fused)
        return take_fused(e, fused, out, err);
    if (!v)
        return err_set(err, -EINVAL, "%s: tensor '%s' is missing", folder, e->name);
    if ((rc = ckpt_check_shape(v, e->dims, e->n_dims, err)) < 0)
        return rc;
    if (v->tensor.dtype == ST_F8_E4M3)
        return find_fp8(st, e, v, out, err);
    *out = (struct ckpt_source){ .values = v };
    return 0;
}

static int check_finite(const struct ckpt_source *s, uint64_t first, uint64_t n, const float *x,
                        struct err *err)
{
    for (uint64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return err_set(err, -EINVAL, "%s: tensor '%s', element %" PRIu64 ": %s is no weight",
                           s->values->file, s->values->tensor.name, s->at + first + i,
                           isnan(x[i]) ? "NaN" : "an infinity");
    return 0;
}

/* A range may begin and end within a group; a scale that is NaN makes its numbers NaN. */
static void read_mxfp4(const struct ckpt_source *s, uint64_t first, uint64_t n, float *out)
{
    const uint8_t *scales = s->scales->data;

    for (uint64_t at = first; at < first + n;) {
        uint64_t group = at / MXFP4_GROUP, begin = at % MXFP4_GROUP;
        uint64_t end = first + n - group * MXFP4_GROUP;
        float whole[MXFP4_GROUP];
        end = end < MXFP4_GROUP ? end : MXFP4_GROUP;
        mxfp4_decode(whole, s->values->data + group * (MXFP4_GROUP / 2), scales + group,
                     MXFP4_GROUP);
        for (uint64_t i = begin; i < end; i++)
            *out++ = scales[group] == 255 ? NAN : whole[i];
        at += end - begin;
    }
}

int ckpt_source_read(const struct ckpt_source *s, uint64_t first, uint64_t n, float *out,
                     struct err *err)
{
    int rc = 0;

    if (!s->scales)
        rc = st_read_f32(s->values, s->at + first, n, out, err);
    else if (s->values->tensor.dtype == ST_U8)
        read_mxfp4(s, first, n, out);
    else
        rc = ckpt_fp8_read(s, first, n, out, err);
    return rc < 0 ? rc : check_finite(s, first, n, out, err);
}

enum packing ckpt_source_packing(const struct ckpt_source *s)
{
    return !s->scales ? PACKING_NONE
           : s->values->tensor.dtype == ST_U8 ? PACKING_MXFP4
                                              : PACKING_FP8;
}

int ckpt_no_number(const struct st_view *v, const char *what, int64_t i, struct err *err)
{
    return err_set(err, -EINVAL, "%s: tensor '%s', %s %" PRId64 " is no number", v->file,
                   v->tensor.name, what, i);
}

static int check_mxfp4(const struct ckpt_source *s, struct err *err)
{
    int64_t bad = mxfp4_find_nan(s->scales->data, (int64_t)s->scales->n_bytes);
    return bad < 0 ? 0 : ckpt_no_number(s->scales, "scale", bad, err);
}

static int take_mxfp4(const struct ckpt_source *s, const struct tensor_entry *e, uint8_t *out,
                      struct err *err)
{
    int rc = check_mxfp4(s, err);
    memcpy(out, s->values->data, s->values->n_bytes);
    memcpy(out + packing_scales_at(PACKING_MXFP4, e->dims[0], e->dims[1]), s->scales->data,
           s->scales->n_bytes);
    return rc;
}

int ckpt_source_read_packed(const struct ckpt_source *s, const struct tensor_entry *e,
                            uint8_t *out, struct err *err)
{
    int rc;
    if (ckpt_source_packing(s) == e->packing && e->packing == PACKING_MXFP4)
        return take_mxfp4(s, e, out, err);
    if (ckpt_source_packing(s) == e->packing && ckpt_fp8_has_our_blocks(s, e))
        return ckpt_fp8_take(s, e, out, err);
    float *whole = xcalloc(e->stored_count, sizeof *whole);
    rc = ckpt_source_read(s, 0, e->stored_count, whole, err);
    if (rc == 0)
        packed_encode(out, e->packing, whole, (int64_t)e->dims[0], (int64_t)e->dims[1]);
    free(whole);
    return rc;
}

/* ---- names ---------------------------------------------------------------------------------- */

bool ckpt_source_is_input_scale(const struct tensor_map *map, const char *name)
{
    static const char ending[] = ".input_scale";
    char matrix[NAME_BYTES];
    size_t n = strlen(name), tail = sizeof ending - 1;
    if (n <= tail || strcmp(name + n - tail, ending) != 0)
        return false;
    int length = snprintf(matrix, sizeof matrix, "%.*s.weight", (int)(n - tail), name);
    return length < (int)sizeof matrix && tensor_map_find(map, matrix);
}

/* Whether a name with one of the suffixes is the model's without it. */
static bool is_part_of_model(const struct tensor_map *map, const char *name)
{
    char part[NAME_BYTES];
    size_t n = strlen(name);

    if (tensor_map_find(map, name))
        return true;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        size_t m = strlen(suffixes[i]);
        if (n < m || n >= sizeof part || strcmp(name + n - m, suffixes[i]) != 0)
            continue;
        snprintf(part, sizeof part, "%.*s", (int)(n - m), name);
        if (tensor_map_find(map, part))
            return true;
    }
    return false;
}

/* 1: v is fused, of just the experts that the model has; 0: it is no fused tensor of the
 * model's. */
static int check_fused(const struct safetensors *st, const struct tensor_map *map,
                       const struct st_view *v, struct err *err)
{
    const struct tensor_entry *e;
    uint64_t n_parts = 0, dims[3] = {0};
    for (size_t i = 0; (e = next_of_layer(map, v->tensor.name, &i)); n_parts++) {
        if (safetensors_find(st, e->name) || find_with(st, e->name, "_packed"))
            return err_set(err, -EINVAL, "%s: tensor '%s' holds what '%s' does, too", v->file,
                           v->tensor.name, e->name);
        bool is_down = e->role == ROLE_EXPERT_DOWN;
        memcpy(dims, (uint64_t[]){ (uint64_t)e->expert + 1, e->dims[0] * (is_down ? 1 : 2),
                                   e->dims[1] }, sizeof dims);
    }
    return n_parts == 0 ? 0 : ckpt_check_shape(v, dims, 3, err) < 0 ? -EINVAL : 1;
}

int ckpt_source_check_names(const struct safetensors *st, const struct tensor_map *map,
                            struct err *err)
{
    for (size_t i = 0; i < safetensors_count(st); i++) {
        const struct st_view *v = safetensors_at(st, i);
        const char *name = v->tensor.name;
        int rc = check_fused(st, map, v, err);
        if (rc < 0)
            return rc;
        if (rc == 0 && !is_part_of_model(map, name) && !tensor_map_is_carried(map, name) &&
            !ckpt_source_is_input_scale(map, name))
            return err_set(err, -EINVAL, "%s: tensor '%.200s' is none of the model that "
                           "config.json describes", v->file, name);
    }
    return 0;
}
