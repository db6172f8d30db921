/* safetensors.c - opens safetensors files and folders, hands out views and numbers */
#include "common/safetensors_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/bf16.h"
#include "common/file.h"
#include "common/json.h"

#define SHARDS_MAX 100000u

/* ---- files ---------------------------------------------------------------------------------- */

static int map_file(struct st_file *f, struct err *err)
{
    struct stat s;
    int fd = file_open(f->path, &s, err), rc = 0;
    if (fd < 0)
        return fd;
    if (s.st_size > 0) {
        void *map = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            rc = err_set(err, -errno, "%s: mmap: %s", f->path, strerror(errno));
        } else {
            f->map = map;
            f->n_bytes = (size_t)s.st_size;
        }
    }
    close(fd);
    return rc;
}

static int add_file(struct safetensors *st, char *path, struct err *err)
{
    struct st_file *f = &st->files[st->n_files++];
    f->path = path;
    int rc = map_file(f, err);
    return rc < 0 ? rc : st_read_header(st, f, err);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool is_plain_file_name(const char *name)
{
    return st_is_printable(name) && !strchr(name, '/') && name[0] != '.' && strlen(name) <= 255;
}

/* The shards that an index names, each once: gives names that live as long as map. */
static int shard_names(const char *path, const struct json *map, const char ***out_names,
                       size_t *out_n, struct err *err)
{
    size_t n = 0, n_unique = 0;
    const char **names = xcalloc(json_count(map), sizeof *names);

    for (struct json_iter i = json_iter(map); json_next(&i);) {
        names[n] = json_as_string(i.value);
        if (!names[n] || !is_plain_file_name(names[n])) {
            free(names);
            return err_set(err, -EINVAL,
                           "%s: weight_map: tensor '%.200s' is not given a file of this folder",
                           path, st_is_printable(i.key) ? i.key : "?");
        }
        n++;
    }
    qsort(names, n, sizeof *names, by_text);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(names[i], names[n_unique - 1]) != 0)
            names[n_unique++] = names[i];
    if (n_unique > SHARDS_MAX) {
        free(names);
        return err_set(err, -EINVAL, "%s: weight_map names %zu files, allowed up to %u", path,
                       n_unique, SHARDS_MAX);
    }
    *out_names = names;
    *out_n = n_unique;
    return 0;
}

static int add_shards(struct safetensors *st, const char *path, const struct json *map,
                      struct err *err)
{
    const char **names = NULL, *slash = strrchr(path, '/');
    int folder_bytes = slash ? (int)(slash - path) + 1 : 0;
    size_t n = 0;
    int rc = shard_names(path, map, &names, &n, err);

    if (rc < 0)
        return rc;
    st->files = xcalloc(n, sizeof *st->files);
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = add_file(st, xasprintf("%.*s%s", folder_bytes, path, names[i]), err);
    free(names);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct st_view *)a)->tensor.name,
                  ((const struct st_view *)b)->tensor.name);
}

static int sort_views(struct safetensors *st, struct err *err)
{
    if (st->n_views)
        qsort(st->views, st->n_views, sizeof *st->views, by_name);
    for (size_t i = 1; i < st->n_views; i++)
        if (by_name(&st->views[i - 1], &st->views[i]) == 0)
            return err_set(err, -EINVAL, "%s: tensor '%.200s' is also in %s", st->views[i].file,
                           st->views[i].tensor.name, st->views[i - 1].file);
    return 0;
}

/* Every tensor that the index promises must be in the file it names. */
static int check_index(const struct safetensors *st, const char *path, const struct json *map,
                       struct err *err)
{
    for (struct json_iter i = json_iter(map); json_next(&i);) {
        const struct st_view *v = safetensors_find(st, i.key);
        const char *file = json_as_string(i.value);
        const char *base = v ? strrchr(v->file, '/') : NULL;
        if (!v || strcmp(base ? base + 1 : v->file, file) != 0)
            return err_set(err, -EINVAL, "%s: weight_map: tensor '%.200s' is not in %.200s", path,
                           st_is_printable(i.key) ? i.key : "?", file);
    }
    return 0;
}

static int open_index(struct safetensors *st, const char *path, struct err *err)
{
    struct json *root;
    int rc = json_read_file(path, SAFETENSORS_HEADER_BYTES_MAX, &root, err);

    if (rc < 0)
        return rc;
    const struct json *map = json_get(root, "weight_map");
    if (json_kind_of(map) != JSON_OBJECT || json_count(map) == 0)
        rc = err_set(err, -EINVAL, "%s: weight_map is missing, empty or not an object", path);
    else if ((rc = add_shards(st, path, map, err)) == 0 && (rc = sort_views(st, err)) == 0)
        rc = check_index(st, path, map, err);
    json_destroy(root);
    return rc;
}

static int open_file(struct safetensors *st, const char *path, struct err *err)
{
    st->files = xcalloc(1, sizeof *st->files);
    int rc = add_file(st, xstrdup(path), err);
    return rc < 0 ? rc : sort_views(st, err);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static int open_folder(struct safetensors *st, const char *path, struct err *err)
{
    char *file = xasprintf("%s/model.safetensors", path);
    char *index = xasprintf("%s/model.safetensors.index.json", path);
    int rc;

    if (access(file, F_OK) == 0)
        rc = open_file(st, file, err);
    else if (access(index, F_OK) == 0)
        rc = open_index(st, index, err);
    else
        rc = err_set(err, -ENOENT, "%s: holds neither model.safetensors nor "
                     "model.safetensors.index.json", path);
    free(file);
    free(index);
    return rc;
}

int safetensors_open(const char *path, struct safetensors **out, struct err *err)
{
    struct safetensors *st = xcalloc(1, sizeof *st);
    struct stat s;
    int rc;

    if (stat(path, &s) == 0 && S_ISDIR(s.st_mode))
        rc = open_folder(st, path, err);
    else if (ends_with(path, ".index.json"))
        rc = open_index(st, path, err);
    else
        rc = open_file(st, path, err);
    if (rc < 0) {
        safetensors_close(st);
        return rc;
    }
    *out = st;
    return 0;
}

void safetensors_close(struct safetensors *st)
{
    if (!st)
        return;
    for (size_t i = 0; i < st->n_files; i++) {
        if (st->files[i].map)
            munmap(st->files[i].map, st->files[i].n_bytes);
        free(st->files[i].path);
    }
    free(st->files);
    free(st->views);
    arena_fini(&st->names);
    free(st);
}

/* ---- looking -------------------------------------------------------------------------------- */

size_t safetensors_count(const struct safetensors *st)
{
    return st->n_views;
}

const struct st_view *safetensors_at(const struct safetensors *st, size_t i)
{
    return &st->views[i];
}

const struct st_view *safetensors_find(const struct safetensors *st, const char *name)
{
    struct st_view key = { .tensor.name = name };
    return st->n_views ? bsearch(&key, st->views, st->n_views, sizeof key, by_name) : NULL;
}

static float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float float_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, mantissa = h & 1023;

    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent)
        return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

static int check_range(const struct st_view *v, uint64_t first, uint64_t n, struct err *err)
{
    if (first > v->n_elements || n > v->n_elements - first)
        return err_set(err, -EINVAL, "%s: tensor '%.200s' has %" PRIu64 " elements, asked for %"
                       PRIu64 " from %" PRIu64, v->file, v->tensor.name, v->n_elements, n, first);
    return 0;
}

int st_read_f32(const struct st_view *v, uint64_t first, uint64_t n, float *out, struct err *err)
{
    int rc = check_range(v, first, n, err);
    if (rc < 0)
        return rc;
    if (v->tensor.dtype == ST_F32) {
        memcpy(out, v->data + 4 * first, 4 * n);
        return 0;
    }
    if (v->tensor.dtype != ST_BF16 && v->tensor.dtype != ST_F16)
        return err_set(err, -ENOTSUP, "%s: tensor '%.200s' is %s; F32, BF16 and F16 can be read "
                       "as numbers", v->file, v->tensor.name, st_dtype_name(v->tensor.dtype));
    const uint8_t *from = v->data + 2 * first;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        out[i] = v->tensor.dtype == ST_BF16 ? bf16_value(half) : float_of_f16(half);
    }
    return 0;
}

int st_read_i32(const struct st_view *v, uint64_t first, uint64_t n, int32_t *out,
                struct err *err)
{
    int rc = check_range(v, first, n, err);
    if (rc < 0)
        return rc;
    if (v->tensor.dtype != ST_I32)
        return err_set(err, -ENOTSUP, "%s: tensor '%.200s' is %s, expected I32", v->file,
                       v->tensor.name, st_dtype_name(v->tensor.dtype));
    memcpy(out, v->data + 4 * first, 4 * n);
    return 0;
}
