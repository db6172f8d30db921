/* tensor_list.c - groups tensors by name, type and shape while it reads them */
#include "common/tensor_list.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "common/json.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/safetensors.h"

#define GROUPS_MAX     20000u
#define LINE_BYTES_MAX 16384
#define FILE_BYTES_MAX (64u << 20)
#define SLOTS          65536u /* above three times GROUPS_MAX */
#define TENSORS_MAX    (64u << 20)

/* ---- groups --------------------------------------------------------------------------------- */

static uint64_t hash_of(const char *name, const char *dtype, const uint64_t *dims, uint32_t n)
{
    uint64_t h = hash_fnv(HASH_FNV, name, strlen(name));
    h = hash_fnv(h, dtype, strlen(dtype));
    h = hash_fnv(h, dims, n * sizeof *dims);
    return h ^ h >> 29;
}

static int group_of(struct tensor_list *list, const char *name, const char *dtype, uint32_t n_dims,
                    const uint64_t *dims, struct tensor_group **out, struct err *err)
{
    uint64_t at = hash_of(name, dtype, dims, n_dims);
    for (; list->slots[at % list->n_slots]; at++) {
        struct tensor_group *g = &list->groups[list->slots[at % list->n_slots] - 1];
        if (!strcmp(g->name, name) && !strcmp(g->dtype, dtype) && g->n_dims == n_dims &&
            !memcmp(g->dims, dims, n_dims * sizeof *dims)) {
            *out = g;
            return 0;
        }
    }
    if (list->n_groups == GROUPS_MAX)
        return err_set(err, -EFBIG, "more than %u different names and shapes of tensors",
                       GROUPS_MAX);
    list->groups = xgrow(list->groups, list->n_groups, &list->cap, sizeof *list->groups);
    struct tensor_group *g = &list->groups[list->n_groups++];
    *g = (struct tensor_group){.name = xstrdup(name), .n_dims = n_dims};
    snprintf(g->dtype, sizeof g->dtype, "%s", dtype);
    memcpy(g->dims, dims, n_dims * sizeof *dims);
    list->slots[at % list->n_slots] = (uint32_t)list->n_groups;
    *out = g;
    return 0;
}

/* A number that stands alone between dots, after `word`: its place in name, or NULL. */
static const char *number_after(const char *name, const char *word)
{
    const char *at = name;
    while ((at = strstr(at, word))) {
        at += strlen(word);
        size_t n = strspn(at, "0123456789");
        if (n && n < 6 && at[n] == '.')
            return at;
    }
    return NULL;
}

/* Replaces the number of a layer or expert by mark; gives the number, or -1. */
static int64_t generalise(char *name, const char *word, const char *mark)
{
    char *at = (char *)(uintptr_t)number_after(name, word);
    if (!at)
        return -1;
    int64_t x = strtol(at, NULL, 10);
    size_t n = strspn(at, "0123456789"), n_mark = strlen(mark);
    memmove(at + n_mark, at + n, strlen(at + n) + 1);
    memcpy(at, mark, n_mark);
    return x;
}

static int count_in(struct tensor_list *list, struct tensor_group *g, uint32_t layer, uint64_t n,
                    struct err *err)
{
    if (layer >= TENSOR_LAYERS_MAX)
        return err_set(err, -EINVAL, "tensor '%.200s': layer %u, expected less than %u", g->name,
                       layer, TENSOR_LAYERS_MAX);
    if (list->n_tensors + n > TENSORS_MAX)
        return err_set(err, -EFBIG, "more than %u tensors", TENSORS_MAX);
    g->per_layer[layer] += (uint32_t)n;
    g->n_tensors += n;
    list->n_tensors += n;
    if (__builtin_add_overflow(list->n_elements, n * g->n_elements, &list->n_elements) ||
        __builtin_add_overflow(list->n_bytes, n * g->n_bytes, &list->n_bytes))
        return err_set(err, -EINVAL, "tensor '%.200s': the sizes of all tensors overflow",
                       g->name);
    return 0;
}

static int add_named(struct tensor_list *list, const char *name, const struct st_view *v,
                     struct err *err)
{
    static const uint64_t none[1];
    char general[512];
    struct tensor_group *g;
    if (strlen(name) > sizeof general - 16)
        return err_set(err, -EINVAL, "tensor '%.60s...': the name is longer than %zu bytes", name,
                       sizeof general - 16);
    memcpy(general, name, strlen(name) + 1);
    static const char *const words[] = {"layers.", "blocks.", ".h.", "layer.", "block."};
    int64_t layer = -1;
    for (size_t i = 0; layer < 0 && i < sizeof words / sizeof *words; i++)
        layer = generalise(general, words[i], "{L}");
    generalise(general, ".experts.", "{E}");
    int rc = group_of(list, general, v ? st_dtype_name(v->tensor.dtype) : "", v ? v->tensor.n_dims
                      : 0, v ? v->tensor.dims : none, &g, err);
    if (rc < 0)
        return rc;
    g->has_layers = layer >= 0;
    g->n_elements = v ? v->n_elements : 0;
    g->n_bytes = v ? v->n_bytes : 0;
    return count_in(list, g, layer < 0 ? 0 : (uint32_t)layer, 1, err);
}

/* ---- safetensors ---------------------------------------------------------------------------- */

static int read_safetensors(const char *folder, struct tensor_list *list, struct err *err)
{
    struct safetensors *st;
    int rc = safetensors_open(folder, &st, err);
    if (rc < 0)
        return rc;
    list->source = TENSORS_SAFETENSORS;
    for (size_t i = 0; rc == 0 && i < safetensors_count(st); i++) {
        const struct st_view *v = safetensors_at(st, i);
        rc = add_named(list, v->tensor.name, v, err);
    }
    safetensors_close(st);
    return rc;
}

/* Names without shapes: the shards are somewhere else. */
static int read_index(const char *path, struct tensor_list *list, struct err *err)
{
    struct json *root;
    int rc = json_read_file(path, SAFETENSORS_HEADER_BYTES_MAX, &root, err);
    if (rc < 0)
        return rc;
    const struct json *map = json_get(root, "weight_map");
    if (json_kind_of(map) != JSON_OBJECT || json_count(map) == 0)
        rc = err_set(err, -EINVAL, "weight_map is missing, empty or not an object");
    list->source = TENSORS_INDEX;
    for (struct json_iter i = json_iter(map); rc == 0 && json_next(&i);) {
        const char *file = json_as_string(i.value);
        rc = file && !strchr(file, '/')
                 ? add_named(list, i.key, NULL, err)
                 : err_set(err, -EINVAL, "weight_map: tensor '%.200s' is not given a file of this "
                           "folder", i.key);
    }
    json_as_u64(json_get(json_get(root, "metadata"), "total_size"), &list->n_bytes);
    json_destroy(root);
    if (rc < 0)
        err_prefix(err, "%s", path);
    return rc;
}

/* Whether shards lie beside the index; it is for the reader of both to say which of them lack. */
static bool has_shards(const char *folder)
{
    DIR *d = opendir(folder);
    struct dirent *e;
    bool found = false;
    while (d && !found && (e = readdir(d))) {
        size_t n = strlen(e->d_name), n_end = strlen(".safetensors");
        found = n > n_end && !strcmp(e->d_name + n - n_end, ".safetensors");
    }
    if (d)
        closedir(d);
    return found;
}

/* ---- a plain list --------------------------------------------------------------------------- */

/* One "a", "a-b" or "a-b/s" of a list of ranges. Moves *at behind it. */
static bool next_range(const char **at, uint64_t *first, uint64_t *last, uint64_t *step)
{
    char *end;
    *step = 1;
    if (!isdigit((unsigned char)**at))
        return false;
    *first = *last = strtoull(*at, &end, 10);
    if (*end == '-' && isdigit((unsigned char)end[1]))
        *last = strtoull(end + 1, &end, 10);
    if (*end == '/' && isdigit((unsigned char)end[1]))
        *step = strtoull(end + 1, &end, 10);
    *at = end + (*end == ',');
    return (*end == ',' || *end == '\0') && *last >= *first && *step > 0 && *last < EXPERTS_MAX;
}

static bool count_range(const char *text, uint64_t *out)
{
    uint64_t first, last, step;
    if (!strcmp(text, "-")) {
        *out = 1;
        return true;
    }
    for (*out = 0; *text; *out += (last - first) / step + 1)
        if (!next_range(&text, &first, &last, &step))
            return false;
    return *out > 0 && *out <= EXPERTS_MAX;
}

static bool read_shape(const char *text, struct tensor_group *g)
{
    uint64_t n = 1;
    g->n_dims = 0;
    while (*text) {
        char *end;
        if (g->n_dims == TENSOR_DIMS_MAX || !isdigit((unsigned char)*text))
            return false;
        uint64_t x = strtoull(text, &end, 10);
        if ((*end != ',' && *end != '\0') || (*end == ',' && !end[1]) ||
            __builtin_mul_overflow(n, x, &n))
            return false;
        g->dims[g->n_dims++] = x;
        text = end + (*end == ',');
    }
    g->n_elements = n;
    return n <= UINT64_MAX / 64;
}

static bool dtype_bits(const char *name, uint32_t *out)
{
    for (int d = 0; d < ST_DTYPES; d++)
        if (!strcmp(st_dtype_name((enum st_dtype)d), name)) {
            *out = st_dtype_bits((enum st_dtype)d);
            return true;
        }
    return false;
}

static int add_layers(struct tensor_list *list, struct tensor_group *g, const char *layers,
                      uint64_t n_experts, struct err *err)
{
    uint64_t first, last, step;
    int rc = 0;
    if (!strcmp(layers, "-"))
        return count_in(list, g, 0, n_experts, err);
    while (rc == 0 && *layers) {
        if (!next_range(&layers, &first, &last, &step))
            return err_set(err, -EINVAL, "wrong range of layers");
        for (uint64_t l = first; rc == 0 && l <= last; l += step)
            rc = count_in(list, g, (uint32_t)l, n_experts, err);
    }
    return rc;
}

static int add_row(struct tensor_list *list, char *cell[5], struct err *err)
{
    struct tensor_group row = {0}, *g;
    char general[512];
    uint64_t n_experts;
    uint32_t bits;
    bool by_layer = strstr(cell[0], "{L}") != NULL;
    if (!*cell[0] || strlen(cell[0]) > sizeof general - 16 ||
        by_layer != (strcmp(cell[1], "-") != 0))
        return err_set(err, -EINVAL, "the name and its layers do not agree");
    if (!count_range(cell[2], &n_experts))
        return err_set(err, -EINVAL, "wrong range of experts");
    if (!dtype_bits(cell[3], &bits) || !read_shape(cell[4], &row))
        return err_set(err, -EINVAL, "wrong type or shape");
    memcpy(general, cell[0], strlen(cell[0]) + 1);
    int64_t layer = by_layer ? -1 : generalise(general, "layers.", "{L}");
    int rc = group_of(list, general, cell[3], row.n_dims, row.dims, &g, err);
    if (rc < 0)
        return rc;
    g->has_layers = by_layer || layer >= 0;
    g->n_elements = row.n_elements;
    g->n_bytes = row.n_elements * bits / 8;
    return layer >= 0 ? count_in(list, g, (uint32_t)layer, n_experts, err)
                      : add_layers(list, g, cell[1], n_experts, err);
}

static int read_line(struct tensor_list *list, char *line, uint32_t number, bool *seen_head,
                     struct err *err)
{
    char *cell[5], *at = line;
    int n = 0, rc;
    line[strcspn(line, "\r\n")] = '\0';
    if (!*line || *line == '#')
        return 0;
    while (n < 5 && at)
        cell[n++] = strsep(&at, "\t");
    if (n < 5 || at)
        rc = err_set(err, -EINVAL, "expected five columns: name, layers, experts, dtype, shape");
    else if (!*seen_head && !strcmp(cell[0], "name"))
        rc = 0;
    else
        rc = add_row(list, cell, err);
    *seen_head = true;
    if (rc < 0)
        err_prefix(err, "line %u", number);
    return rc;
}

static int read_tsv(const char *path, struct tensor_list *list, struct err *err)
{
    char *line = xcalloc(1, LINE_BYTES_MAX);
    bool seen_head = false;
    struct stat s;
    int rc = 0;
    FILE *f = file_stream(path, err);
    if (!f) {
        free(line);
        return err->code;
    }
    if (fstat(fileno(f), &s) == 0 && s.st_size > FILE_BYTES_MAX)
        rc = err_set(err, -EINVAL, "expected a file of at most %u MiB", FILE_BYTES_MAX >> 20);
    list->source = TENSORS_TSV;
    for (uint32_t n = 1; rc == 0 && fgets(line, LINE_BYTES_MAX, f); n++)
        rc = strlen(line) == LINE_BYTES_MAX - 1
                 ? err_set(err, -EINVAL, "line %u is longer than %d bytes", n, LINE_BYTES_MAX)
                 : read_line(list, line, n, &seen_head, err);
    if (rc == 0 && list->n_tensors == 0)
        rc = err_set(err, -EINVAL, "no tensors in it");
    fclose(f);
    free(line);
    if (rc < 0)
        err_prefix(err, "%s", path);
    return rc;
}

int tensor_list_read(const char *folder, struct tensor_list *out, struct err *err)
{
    struct tensor_list list = {.n_slots = SLOTS};
    char *single = xasprintf("%s/model.safetensors", folder);
    char *index = xasprintf("%s/model.safetensors.index.json", folder);
    char *tsv = xasprintf("%s/tensors.tsv", folder);
    struct stat s;
    int rc = 0;
    list.slots = xcalloc(SLOTS, sizeof *list.slots);
    if (lstat(single, &s) == 0 || (lstat(index, &s) == 0 && has_shards(folder)))
        rc = read_safetensors(folder, &list, err);
    else if (lstat(tsv, &s) == 0)
        rc = read_tsv(tsv, &list, err);
    else if (lstat(index, &s) == 0)
        rc = read_index(index, &list, err);
    free(single);
    free(index);
    free(tsv);
    if (rc < 0)
        tensor_list_fini(&list);
    else
        *out = list;
    return rc;
}

void tensor_list_fini(struct tensor_list *list)
{
    for (size_t i = 0; i < list->n_groups; i++)
        free(list->groups[i].name);
    free(list->groups);
    free(list->slots);
    *list = (struct tensor_list){0};
}
