/* ckpt_sums.c - adds checksums up over ranks, writes them, and looks whether they still hold */
#include "worker/ckpt_sums.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/json.h"
#include "common/mem.h"
#include "worker/ckpt_beside.h"

#define FORMAT          1u
#define FILE_BYTES_MAX  ((size_t)1 << 30)
#define TEXT_BYTES      33
#define PARTS           8 /* of 16 bits: their sums over ranks are exact in double */
#define SUMS_AT_ONCE    ((size_t)1024) /* what collectives keep for a message stays taken */

void ckpt_sums_add(struct ckpt_sums *s, const char *place, const char *tensor, struct st_sum sum)
{
    if (s->n % 64 == 0)
        s->items = xrealloc(s->items, (s->n + 64) * sizeof *s->items);
    s->items[s->n++] = (struct ckpt_sum){place, xstrdup(tensor), sum};
}

void ckpt_sums_fini(struct ckpt_sums *s)
{
    for (size_t i = 0; i < s->n; i++)
        free(s->items[i].tensor);
    free(s->items);
    *s = (struct ckpt_sums){0};
}

static void split(const struct ckpt_sum *items, size_t n, double *out)
{
    for (size_t i = 0; i < n * PARTS; i++) {
        const struct st_sum *sum = &items[i / PARTS].sum;
        uint64_t word = i % PARTS < 4 ? sum->plain : sum->weighted;
        out[i] = (double)(word >> (16 * (i % 4)) & 0xffff);
    }
}

static void join(struct ckpt_sum *items, size_t n, const double *parts)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t words[2] = {0};
        for (int k = 0; k < PARTS; k++)
            words[k / 4] += (uint64_t)parts[i * PARTS + (size_t)k] << (16 * (k % 4));
        items[i].sum = (struct st_sum){words[0], words[1]};
    }
}

int ckpt_sums_gather(struct ckpt_sums *s, struct coll *coll, struct err *err)
{
    double *parts = xcalloc(SUMS_AT_ONCE * PARTS, sizeof *parts);
    int rc = 0;
    for (size_t at = 0, n; at < s->n && rc == 0; at += n) {
        n = s->n - at < SUMS_AT_ONCE ? s->n - at : SUMS_AT_ONCE;
        split(s->items + at, n, parts);
        rc = coll->ops->all_reduce_f64(coll, &coll->world_group, COLL_SUM, parts, n * PARTS, err);
        if (rc == 0)
            join(s->items + at, n, parts);
    }
    free(parts);
    return rc;
}

static void text_of(struct st_sum sum, char out[TEXT_BYTES])
{
    snprintf(out, TEXT_BYTES, "%016" PRIx64 "%016" PRIx64, sum.plain, sum.weighted);
}

int ckpt_sums_write(const struct ckpt_sums *s, const char *folder, struct err *err)
{
    struct json *root = json_new_object(), *places = json_new_object(), *place = NULL;
    const char *last = NULL;
    for (size_t i = 0; i < s->n; i++) {
        char text[TEXT_BYTES];
        if (!last || strcmp(last, s->items[i].place) != 0) {
            place = json_new_object();
            last = s->items[i].place;
            json_put(places, last, place);
        }
        text_of(s->items[i].sum, text);
        json_put(place, s->items[i].tensor, json_new_string(text));
    }
    json_put(root, "format", json_new_u64(FORMAT));
    json_put(root, "tensors", places);
    char *path = xasprintf("%s/ballast/checksums.json", folder);
    int rc = ckpt_write_json(root, path, err);
    free(path);
    json_destroy(root);
    return rc;
}

/* Every world-th tensor, from number *at on, which goes on over places. */
static int check_place(const char *path, const struct json *sums, const struct coll *coll,
                       size_t *at, struct err *err)
{
    struct safetensors *st;
    int rc = safetensors_open(path, &st, err);
    if (rc < 0)
        return rc;
    for (struct json_iter i = json_iter(sums); rc == 0 && json_next(&i);) {
        char text[TEXT_BYTES];
        const char *expected = json_as_string(i.value);
        const struct st_view *v = safetensors_find(st, i.key);
        if ((*at)++ % coll->world != coll->rank || !v) /* what is missing, the reader misses */
            continue;
        text_of(st_sum(v), text);
        if (!expected || strcmp(text, expected) != 0)
            rc = err_set(err, -EINVAL, "%s: tensor '%.200s' is damaged: its checksum is %s, it was "
                         "written with %.40s", v->file, i.key, text, expected ? expected : "none");
    }
    safetensors_close(st);
    return rc;
}

int ckpt_sums_check(const char *folder, const struct coll *coll, struct err *err)
{
    struct json *root = NULL;
    size_t at = 0;
    uint64_t format;
    char *path = xasprintf("%s/ballast/checksums.json", folder);
    bool is_there = access(path, F_OK) == 0;
    int rc = is_there ? json_read_file(path, FILE_BYTES_MAX, &root, err) : 0;
    if (rc == 0 && is_there &&
        (rc = json_get_u64(root, "format", FORMAT, FORMAT, &format, err)) < 0)
        err_prefix(err, "%s", path);
    free(path);
    const struct json *places = rc == 0 && root ? json_get(root, "tensors") : NULL;
    for (struct json_iter i = json_iter(places); places && rc == 0 && json_next(&i);) {
        char *place = xasprintf("%s%s", folder, i.key);
        rc = check_place(place, i.value, coll, &at, err);
        free(place);
    }
    json_destroy(root);
    return rc;
}
