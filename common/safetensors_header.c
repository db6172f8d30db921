/* safetensors_header.c - one file's header: JSON that is checked in full and becomes views
 *
 * A header is foreign: it may hold offsets beyond the file, shapes that overflow, the same name
 * twice. Everything is checked here once, so a view can be read without a further check. */
#include "common/safetensors_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"

#define LFS_BEGINS "version https://git-lfs.github.com/spec/"

static const struct { const char *name; uint32_t bits; } dtypes[ST_DTYPES] = {
    [ST_BOOL] = { "BOOL", 8 },
    [ST_F4] = { "F4", 4 },
    [ST_F6_E2M3] = { "F6_E2M3", 6 },
    [ST_F6_E3M2] = { "F6_E3M2", 6 },
    [ST_U8] = { "U8", 8 },
    [ST_I8] = { "I8", 8 },
    [ST_F8_E5M2] = { "F8_E5M2", 8 },
    [ST_F8_E4M3] = { "F8_E4M3", 8 },
    [ST_F8_E8M0] = { "F8_E8M0", 8 },
    [ST_F8_E4M3FNUZ] = { "F8_E4M3FNUZ", 8 },
    [ST_F8_E5M2FNUZ] = { "F8_E5M2FNUZ", 8 },
    [ST_I16] = { "I16", 16 },
    [ST_U16] = { "U16", 16 },
    [ST_F16] = { "F16", 16 },
    [ST_BF16] = { "BF16", 16 },
    [ST_I32] = { "I32", 32 },
    [ST_U32] = { "U32", 32 },
    [ST_F32] = { "F32", 32 },
    [ST_C64] = { "C64", 64 },
    [ST_F64] = { "F64", 64 },
    [ST_I64] = { "I64", 64 },
    [ST_U64] = { "U64", 64 },
};

const char *st_dtype_name(enum st_dtype dtype)
{
    return dtypes[dtype].name;
}

uint32_t st_dtype_bits(enum st_dtype dtype)
{
    return dtypes[dtype].bits;
}

bool st_is_printable(const char *name)
{
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return false;
    return *name != '\0';
}

static int read_dtype(const struct json *info, enum st_dtype *out, struct err *err)
{
    const char *text = json_as_string(json_get(info, "dtype"));
    if (!text)
        return err_set(err, -EINVAL, "its dtype is missing or no text");
    for (int d = 0; d < ST_DTYPES; d++) {
        if (strcmp(text, dtypes[d].name) == 0) {
            *out = (enum st_dtype)d;
            return 0;
        }
    }
    return err_set(err, -EINVAL, "its dtype '%.20s' is unknown",
                   st_is_printable(text) ? text : "?");
}

static int read_shape(const struct json *info, struct st_view *v, struct err *err)
{
    const struct json *shape = json_get(info, "shape");
    size_t n_dims = json_count(shape);
    uint64_t n = 1, n_bits;

    if (json_kind_of(shape) != JSON_ARRAY)
        return err_set(err, -EINVAL, "its shape is missing or no list");
    if (n_dims > TENSOR_DIMS_MAX)
        return err_set(err, -EINVAL, "it has %zu dimensions, allowed up to %d", n_dims,
                       TENSOR_DIMS_MAX);
    v->tensor.n_dims = (uint32_t)n_dims;
    for (size_t i = 0; i < n_dims; i++) {
        uint64_t *dim = &v->tensor.dims[i];
        if (!json_as_u64(json_at(shape, i), dim))
            return err_set(err, -EINVAL, "dimension %zu is not a whole number", i);
        if (__builtin_mul_overflow(n, *dim, &n))
            return err_set(err, -EINVAL, "its shape overflows 64 bits");
    }
    if (__builtin_mul_overflow(n, dtypes[v->tensor.dtype].bits, &n_bits) || n_bits % 8)
        return err_set(err, -EINVAL, "its shape is no whole number of bytes");
    v->n_elements = n;
    v->n_bytes = n_bits / 8;
    return 0;
}

static int read_offsets(const struct json *info, uint64_t data_bytes, uint64_t *out_begin,
                        const struct st_view *v, struct err *err)
{
    const struct json *pair = json_get(info, "data_offsets");
    uint64_t begin, end;

    if (json_kind_of(pair) != JSON_ARRAY || json_count(pair) != 2 ||
        !json_as_u64(json_at(pair, 0), &begin) || !json_as_u64(json_at(pair, 1), &end))
        return err_set(err, -EINVAL, "its data_offsets are not two whole numbers");
    if (begin > end || end > data_bytes)
        return err_set(err, -EINVAL,
                       "its data_offsets %" PRIu64 " to %" PRIu64 " lie outside the %" PRIu64
                       " bytes of data; is the file cut short?", begin, end, data_bytes);
    if (end - begin != v->n_bytes)
        return err_set(err, -EINVAL,
                       "its data_offsets span %" PRIu64 " bytes, dtype and shape need %" PRIu64,
                       end - begin, v->n_bytes);
    *out_begin = begin;
    return 0;
}

static int read_tensor(struct safetensors *st, const struct st_file *f, const uint8_t *data,
                       uint64_t data_bytes, const char *name, const struct json *info,
                       struct err *err)
{
    struct st_view v = { .file = f->path };
    uint64_t begin = 0;
    int rc;

    if (!st_is_printable(name))
        return err_set(err, -EINVAL, "%s: tensor %zu has an empty or unprintable name", f->path,
                       st->n_views);
    if (json_kind_of(info) != JSON_OBJECT)
        rc = err_set(err, -EINVAL, "it is not an object");
    else if ((rc = read_dtype(info, &v.tensor.dtype, err)) == 0 &&
             (rc = read_shape(info, &v, err)) == 0)
        rc = read_offsets(info, data_bytes, &begin, &v, err);
    if (rc < 0) {
        err_prefix(err, "%s: tensor '%.200s'", f->path, name);
        return rc;
    }
    v.data = data + begin;
    v.tensor.name = arena_strdup(&st->names, name);
    st->views = xgrow(st->views, st->n_views, &st->views_cap, sizeof *st->views);
    st->views[st->n_views++] = v;
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct st_view *x = a, *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->n_bytes > y->n_bytes) - (x->n_bytes < y->n_bytes); /* empty ones first */
}

/* Tensors of one file must cover its data, each byte once. */
static int check_cover(struct st_view *views, size_t n, const struct st_file *f,
                       const uint8_t *data, struct err *err)
{
    const uint8_t *at = data, *end = f->map + f->n_bytes;

    if (n)
        qsort(views, n, sizeof *views, by_place);
    for (size_t i = 0; i < n; i++) {
        if (views[i].data != at)
            return err_set(err, -EINVAL, "%s: tensor '%.200s' %s at byte %td of the data",
                           f->path, views[i].tensor.name,
                           views[i].data < at ? "overlaps the one before it"
                                              : "leaves a hole before it", views[i].data - data);
        at += views[i].n_bytes;
    }
    if (at != end)
        return err_set(err, -EINVAL, "%s: the last %td bytes of the data belong to no tensor",
                       f->path, end - at);
    return 0;
}

static int check_metadata(const struct st_file *f, const struct json *v, struct err *err)
{
    bool ok = json_kind_of(v) == JSON_OBJECT;
    for (struct json_iter i = json_iter(v); ok && json_next(&i);)
        ok = json_kind_of(i.value) == JSON_STRING;
    return ok ? 0 : err_set(err, -EINVAL, "%s: __metadata__ is not an object of texts", f->path);
}

static int read_members(struct safetensors *st, const struct st_file *f, const struct json *root,
                        size_t header_bytes, struct err *err)
{
    const uint8_t *data = f->map + 8 + header_bytes;
    size_t first = st->n_views;
    int rc = 0;

    for (struct json_iter i = json_iter(root); rc == 0 && json_next(&i);) {
        if (strcmp(i.key, "__metadata__") == 0)
            rc = check_metadata(f, i.value, err);
        else
            rc = read_tensor(st, f, data, f->n_bytes - 8 - header_bytes, i.key, i.value, err);
    }
    if (rc == 0)
        rc = check_cover(st->views + first, st->n_views - first, f, data, err);
    return rc;
}

static uint64_t read_le64(const uint8_t *p)
{
    uint64_t x = 0;
    for (int i = 7; i >= 0; i--)
        x = x << 8 | p[i];
    return x;
}

int st_read_header(struct safetensors *st, const struct st_file *f, struct err *err)
{
    struct json *root;
    uint64_t n;

    if (f->n_bytes < 8)
        return err_set(err, -EINVAL, "%s: %zu bytes are too few for a safetensors file", f->path,
                       f->n_bytes);
    n = read_le64(f->map);
    if (f->n_bytes > sizeof LFS_BEGINS && !memcmp(f->map, LFS_BEGINS, sizeof LFS_BEGINS - 1))
        return err_set(err, -EINVAL, "%s: a pointer of Git LFS in place of the file; get it with "
                       "git lfs pull", f->path);
    if (n > SAFETENSORS_HEADER_BYTES_MAX)
        return err_set(err, -EFBIG, "%s: a header of %" PRIu64 " bytes, allowed up to %u; is it a "
                       "safetensors file?", f->path, n, SAFETENSORS_HEADER_BYTES_MAX);
    if (n > f->n_bytes - 8)
        return err_set(err, -EINVAL, "%s: cut short: the header has %" PRIu64
                       " bytes, the file %zu", f->path, n, f->n_bytes);
    const char *text = (const char *)f->map + 8;
    if (n == 0 || text[0] != '{')
        return err_set(err, -EINVAL, "%s: the header does not begin with {", f->path);
    if (memmem(text, n, "\\u0000", 6)) /* would end a name early */
        return err_set(err, -EINVAL, "%s: the header holds a NUL character", f->path);
    int rc = json_parse(text, n, SAFETENSORS_HEADER_BYTES_MAX, &root, err);
    if (rc < 0) {
        err_prefix(err, "%s: header", f->path);
        return rc;
    }
    rc = read_members(st, f, root, n, err);
    json_destroy(root);
    return rc;
}
