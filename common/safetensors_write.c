/* safetensors_write.c - plans a safetensors file and fills it in place, slice by slice
 *
 * Where every tensor lies follows from the declarations alone, so that all ranks of a job compute
 * the same plan and write their slices into one file without speaking to each other. */
#include "common/safetensors.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/bf16.h"
#include "common/file.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/safetensors_sum.h"

#define ALIGN_BYTES 64u /* of the data in the file */
#define CHUNK_ELEMENTS 16384u
#define FILE_BYTES_MAX (1ull << 60)

struct st_writer {
    const struct st_layout *layout;
    char *path;
    int   fd;
    struct st_sum *sums; /* of each tensor */
    uint16_t chunk[CHUNK_ELEMENTS];
};

/* ---- the plan ------------------------------------------------------------------------------- */

static uint64_t elements_of(const struct st_tensor *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->n_dims; i++)
        n *= t->dims[i];
    return n;
}

static int tensor_check(const struct st_tensor *t, uint64_t *out_bytes, struct err *err)
{
    uint64_t n = 1;
    bool overflows = t->n_dims > TENSOR_DIMS_MAX;

    if (!t->name || !*t->name || strcmp(t->name, "__metadata__") == 0)
        return err_set(err, -EINVAL, "a tensor to be written has no name of its own");
    for (const char *c = t->name; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return err_set(err, -EINVAL, "a tensor to be written has an unprintable name");
    for (uint32_t i = 0; !overflows && i < t->n_dims; i++)
        overflows = __builtin_mul_overflow(n, t->dims[i], &n);
    if (overflows || __builtin_mul_overflow(n, st_dtype_bits(t->dtype), &n) || n % 8)
        return err_set(err, -EINVAL, "tensor '%.200s': its size overflows or is no whole number "
                       "of bytes", t->name);
    *out_bytes = n / 8;
    return 0;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int check_unique(const struct st_tensor *tensors, size_t n, struct err *err)
{
    const char **names = xcalloc(n, sizeof *names);
    int rc = 0;

    for (size_t i = 0; i < n; i++)
        names[i] = tensors[i].name;
    qsort(names, n, sizeof *names, by_text);
    for (size_t i = 1; rc == 0 && i < n; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            rc = err_set(err, -EINVAL, "tensor '%.200s' is declared twice", names[i]);
    free(names);
    return rc;
}

static struct json *tensor_json(const struct st_tensor *t, uint64_t begin, uint64_t end)
{
    struct json *info = json_new_object(), *shape = json_new_array(), *pair = json_new_array();

    for (uint32_t i = 0; i < t->n_dims; i++)
        json_push(shape, json_new_u64(t->dims[i]));
    json_push(pair, json_new_u64(begin));
    json_push(pair, json_new_u64(end));
    json_put(info, "dtype", json_new_string(st_dtype_name(t->dtype)));
    json_put(info, "shape", shape);
    json_put(info, "data_offsets", pair);
    return info;
}

/* Spaces after the JSON bring the data to a multiple of ALIGN_BYTES. */
static int header_finish(struct st_layout *l, const struct json *root, struct err *err)
{
    char *text = json_text(root, false);
    size_t n = strlen(text), padded = (8 + n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES - 8;

    if (padded > SAFETENSORS_HEADER_BYTES_MAX) {
        free(text);
        return err_set(err, -EINVAL, "%zu tensors need a header of %zu bytes, allowed up to %u; "
                       "write more files", l->n_tensors, padded, SAFETENSORS_HEADER_BYTES_MAX);
    }
    l->header_bytes = 8 + padded;
    l->header = xcalloc(1, l->header_bytes);
    for (int i = 0; i < 8; i++)
        l->header[i] = (char)(padded >> (8 * i));
    memset(l->header + 8, ' ', padded);
    memcpy(l->header + 8, text, n);
    free(text);
    return 0;
}

int st_layout_init(const struct st_tensor *tensors, size_t n_tensors, struct st_layout *out,
                   struct err *err)
{
    struct st_layout l = { .tensors = tensors, .n_tensors = n_tensors };
    struct json *root = json_new_object(), *metadata = json_new_object();
    uint64_t at = 0;
    int rc = 0;

    json_put(metadata, "format", json_new_string("pt")); /* what HuggingFace's readers ask for */
    json_put(root, "__metadata__", metadata);
    l.offset = xcalloc(n_tensors, sizeof *l.offset);
    for (size_t i = 0; rc == 0 && i < n_tensors; i++) {
        uint64_t n_bytes = 0;
        rc = tensor_check(&tensors[i], &n_bytes, err);
        if (rc < 0)
            break;
        l.offset[i] = at;
        if (__builtin_add_overflow(at, n_bytes, &at) || at > FILE_BYTES_MAX)
            rc = err_set(err, -EINVAL, "%zu tensors are too large for one file", n_tensors);
        else
            json_put(root, tensors[i].name, tensor_json(&tensors[i], l.offset[i], at));
    }
    if (rc == 0)
        rc = check_unique(tensors, n_tensors, err);
    if (rc == 0)
        rc = header_finish(&l, root, err);
    json_destroy(root);
    if (rc < 0) {
        st_layout_fini(&l);
        return rc;
    }
    for (size_t i = 0; i < n_tensors; i++)
        l.offset[i] += l.header_bytes;
    l.file_bytes = l.header_bytes + at;
    *out = l;
    return 0;
}

void st_layout_fini(struct st_layout *l)
{
    free(l->offset);
    free(l->header);
    *l = (struct st_layout){0};
}

/* ---- the file ------------------------------------------------------------------------------- */

static int write_at(int fd, const char *path, const void *bytes, size_t n, uint64_t at,
                    struct err *err)
{
    int rc = file_write_at(fd, bytes, n, at);
    return rc < 0 ? err_set(err, rc, "%s: write: %s", path, strerror(-rc)) : 0;
}

static int finish(int fd, const char *path, int rc, struct err *err)
{
    if (rc == 0 && fsync(fd) < 0)
        rc = err_set(err, -errno, "%s: fsync: %s", path, strerror(errno));
    if (close(fd) < 0 && rc == 0)
        rc = err_set(err, -errno, "%s: close: %s", path, strerror(errno));
    return rc;
}

int st_create(const char *path, const struct st_layout *l, struct err *err)
{
    int rc = 0;

    /* Not truncated in place: someone may have the old file mapped. */
    if (unlink(path) < 0 && errno != ENOENT)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    /* Reserve the space now, so that a full disk is found before the slices are written. */
    if (fallocate(fd, 0, 0, (off_t)l->file_bytes) < 0 &&
        (errno != EOPNOTSUPP || ftruncate(fd, (off_t)l->file_bytes) < 0))
        rc = err_set(err, -errno, "%s: %" PRIu64 " bytes: %s", path, l->file_bytes,
                     strerror(errno));
    if (rc == 0)
        rc = write_at(fd, path, l->header, l->header_bytes, 0, err);
    return finish(fd, path, rc, err);
}

int st_writer_open(const char *path, const struct st_layout *l, struct st_writer **out,
                   struct err *err)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    struct st_writer *w = xcalloc(1, sizeof *w);
    w->layout = l;
    w->path = xstrdup(path);
    w->fd = fd;
    w->sums = xcalloc(l->n_tensors, sizeof *w->sums);
    *out = w;
    return 0;
}

/* As bf16_of in fewer bits of exponent: what is below its smallest normal number keeps fewer
 * digits, what is beyond its largest becomes infinite. */
static uint16_t f16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return sign | 0x7e00;
    if (bits < 0x38800000u) { /* below 2^-14: in steps of 2^-24, which the sum rounds to */
        float tiny = fabsf(x) + 0.5f;
        memcpy(&bits, &tiny, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000u);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return bits >= 0x47800000u ? sign | 0x7c00 : sign | (uint16_t)((bits - 0x38000000u) >> 13);
}

static int check_fits(const struct st_writer *w, const struct st_tensor *t, uint64_t at, float x,
                      uint16_t written, struct err *err)
{
    uint16_t exponent = t->dtype == ST_BF16 ? 0x7f80 : 0x7c00;
    if ((written & exponent) != exponent || !isfinite(x))
        return 0;
    return err_set(err, -ERANGE, "%s: tensor '%.200s', element %" PRIu64 ": %g is beyond %s",
                   w->path, t->name, at, (double)x, st_dtype_name(t->dtype));
}

int st_write_f32(struct st_writer *w, size_t i, uint64_t first, uint64_t n, const float *values,
                 struct err *err)
{
    assert(i < w->layout->n_tensors);
    const struct st_tensor *t = &w->layout->tensors[i];
    uint64_t total = elements_of(t), at = w->layout->offset[i];
    assert(first <= total && n <= total - first);

    if (t->dtype == ST_F32) {
        st_sum_add(&w->sums[i], t->dtype, first, values, n);
        return write_at(w->fd, w->path, values, 4 * n, at + 4 * first, err);
    }
    if (t->dtype != ST_BF16 && t->dtype != ST_F16)
        return err_set(err, -ENOTSUP, "%s: tensor '%.200s' is %s; F32, BF16 and F16 can be written",
                       w->path, t->name, st_dtype_name(t->dtype));
    while (n) {
        uint64_t some = n < CHUNK_ELEMENTS ? n : CHUNK_ELEMENTS;
        int rc = 0;
        for (uint64_t k = 0; k < some && rc == 0; k++) {
            w->chunk[k] = t->dtype == ST_BF16 ? bf16_of(values[k]) : f16_of(values[k]);
            rc = check_fits(w, t, first + k, values[k], w->chunk[k], err);
        }
        if (rc == 0)
            rc = write_at(w->fd, w->path, w->chunk, 2 * some, at + 2 * first, err);
        if (rc < 0)
            return rc;
        st_sum_add(&w->sums[i], t->dtype, first, w->chunk, some);
        values += some;
        first += some;
        n -= some;
    }
    return 0;
}

int st_write_bytes(struct st_writer *w, size_t i, const uint8_t *bytes, struct err *err)
{
    assert(i < w->layout->n_tensors);
    const struct st_tensor *t = &w->layout->tensors[i];
    uint64_t n = elements_of(t) * st_dtype_bits(t->dtype) / 8;

    uint32_t bits = st_dtype_bits(t->dtype);

    st_sum_add(&w->sums[i], t->dtype, 0, bytes, bits < 8 ? n : n / (bits / 8));
    return n ? write_at(w->fd, w->path, bytes, n, w->layout->offset[i], err) : 0;
}

struct st_sum st_writer_sum(const struct st_writer *w, size_t i)
{
    return w->sums[i];
}

int st_writer_close(struct st_writer *w, struct err *err)
{
    int rc = finish(w->fd, w->path, 0, err);
    free(w->path);
    free(w->sums);
    free(w);
    return rc;
}
