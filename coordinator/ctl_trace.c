/* ctl_trace.c - files of other systems: which format, and records as loads of windows
 *
 * The first record tells the format of a file of JSON lines; a file may hold one format only. */
#include "coordinator/ctl_trace.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/mem.h"

#define FILE_BYTES_MAX (4ull << 30)
#define LINE_BYTES_MAX (64u << 20)

/* ---- records --------------------------------------------------------------------------------- */

int trace_fail(const struct trace *t, struct err *err, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!t->n_line)
        return err_set(err, -EINVAL, "%s: %s", t->path, text);
    return err_set(err, -EINVAL, "%s:%" PRIu64 ": %s", t->path, t->n_line, text);
}

double *trace_add(struct trace *t, uint64_t step, uint32_t layer, uint32_t rank,
                  uint32_t n_experts)
{
    t->record = xgrow(t->record, t->n_records, &t->n_alloc, sizeof *t->record);
    struct trace_record *r = &t->record[t->n_records++];
    *r = (struct trace_record){ step, layer, rank, n_experts,
                                xcalloc(n_experts, sizeof *r->load) };
    return r->load;
}

int trace_load(const struct trace *t, const struct json *v, double *out, struct err *err)
{
    if (!json_as_double(v, out) || !isfinite(*out) || *out < 0)
        return trace_fail(t, err, "a load is not a finite number from 0");
    return 0;
}

static void trace_fini(struct trace *t)
{
    for (size_t i = 0; i < t->n_records; i++)
        free(t->record[i].load);
    free(t->record);
}

/* ---- records to loads ------------------------------------------------------------------------ */

static int by_layer_and_rank(const void *a, const void *b)
{
    const struct trace_record *x = a, *y = b;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int by_step_and_layer(const void *a, const void *b)
{
    const struct trace_record *x = a, *y = b;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    return (x->layer > y->layer) - (x->layer < y->layer);
}

/* The ranks that hold a layer hold its experts one after the other. */
static int join_ranks(struct trace *t, struct err *err)
{
    qsort(t->record, t->n_records, sizeof *t->record, by_layer_and_rank);
    uint32_t first = 0;
    for (size_t i = 0; i < t->n_records; i++) {
        struct trace_record *r = &t->record[i], *before = i ? r - 1 : NULL;
        bool is_next = before && before->layer == r->layer && before->rank != r->rank;
        if (!before || before->layer != r->layer)
            first = 0;
        if (r->rank == TRACE_RANK_NONE && is_next)
            return trace_fail(t, err, "layer %u: loads of all ranks and of single ones", r->layer);
        if (is_next)
            first = before->n_experts; /* which is widened already */
        if (first + r->n_experts > EXPERTS_MAX)
            return trace_fail(t, err, "layer %u has more than %u experts", r->layer, EXPERTS_MAX);
        double *load = xcalloc(first + r->n_experts, sizeof *load);
        memcpy(load + first, r->load, r->n_experts * sizeof *load);
        free(r->load);
        r->load = load;
        r->n_experts += first;
        if (before && !is_next && before->layer == r->layer && r->rank != TRACE_RANK_NONE &&
            before->n_experts != r->n_experts)
            return trace_fail(t, err, "layer %u: rank %u does not have as many experts in every "
                              "step", r->layer, r->rank);
    }
    return 0;
}

/* Numbers of layers, rising; those that predict further tokens follow the last of the others. */
static void name_layers(struct loads *l)
{
    uint32_t next = 0;
    for (uint32_t k = 0; k < l->n_layers; k++) {
        if (l->layer[k] >= TRACE_LAYER_MTP)
            l->layer[k] = next;
        next = l->layer[k] + 1;
    }
}

static void count(const struct trace *t, uint32_t window_steps, struct loads *out)
{
    uint64_t n_steps = 0;
    bool *has = xcalloc(2 * TRACE_LAYER_MTP, sizeof *has);
    for (size_t i = 0; i < t->n_records; i++) {
        const struct trace_record *r = &t->record[i];
        n_steps += !i || r->step != r[-1].step;
        out->n_experts = r->n_experts > out->n_experts ? r->n_experts : out->n_experts;
        out->n_layers += !has[r->layer];
        has[r->layer] = true;
    }
    out->layer = xcalloc(out->n_layers, sizeof *out->layer);
    for (uint32_t layer = 0, k = 0; layer < 2 * TRACE_LAYER_MTP; layer++)
        if (has[layer])
            out->layer[k++] = layer;
    free(has);
    out->n_windows = (uint32_t)((n_steps + window_steps - 1) / window_steps);
    out->has_windows = out->n_windows > 1;
    out->window = xcalloc(out->n_windows, sizeof *out->window);
}

static int add_up(const struct trace *t, uint32_t window_steps, struct loads *l, struct err *err)
{
    bool *has = xcalloc((size_t)l->n_windows * l->n_layers, sizeof *has);
    uint64_t n_step = 0;
    uint32_t k = 0;
    int rc = 0;
    l->load = xcalloc((size_t)l->n_windows * l->n_layers * l->n_experts, sizeof *l->load);
    for (size_t i = 0; i < t->n_records; i++) {
        const struct trace_record *r = &t->record[i];
        n_step += i && r->step != r[-1].step;
        if (!i || r->step != r[-1].step)
            k = 0;
        while (l->layer[k] != r->layer)
            k++;
        uint64_t w = n_step / window_steps;
        double *load = l->load + (w * l->n_layers + k) * l->n_experts;
        if (n_step % window_steps == 0)
            l->window[w] = (int64_t)r->step;
        has[w * l->n_layers + k] = true;
        for (uint32_t e = 0; e < r->n_experts; e++)
            load[e] += r->load[e];
    }
    for (size_t i = 0; i < (size_t)l->n_windows * l->n_layers && rc == 0; i++)
        if (!has[i])
            rc = trace_fail(t, err, "the window from step %" PRId64 " has nothing of layer %u",
                            l->window[i / l->n_layers], l->layer[i % l->n_layers]);
    free(has);
    return rc;
}

/* ---- files ----------------------------------------------------------------------------------- */

static int read_object(struct trace *t, const struct json *o, struct err *err)
{
    if (json_get(o, "top_indices"))
        return trace_megatron_routes(t, o, err);
    if (json_get(o, "tpe"))
        return trace_megatron_counts(t, o, err);
    if (json_get(o, "record_type"))
        return trace_vllm(t, o, err);
    if (json_get(o, "logical_count"))
        return trace_sglang_json(t, o, err);
    return trace_fail(t, err, "no known record; expected top_indices or tpe (Megatron), "
                      "record_type (vLLM) or logical_count (SGLang)");
}

static int read_text(struct trace *t, const char *text, size_t n_bytes, struct err *err)
{
    struct json *o;
    struct err why;
    int rc = json_parse(text, n_bytes, LINE_BYTES_MAX, &o, &why);
    if (rc < 0)
        return trace_fail(t, err, "%s", why.text);
    rc = json_kind_of(o) == JSON_OBJECT ? read_object(t, o, err)
                                        : trace_fail(t, err, "expected a JSON object");
    json_destroy(o);
    return rc;
}

static int read_lines(struct trace *t, const char *text, size_t n_bytes, struct err *err)
{
    int rc = 0;
    for (size_t at = 0; at < n_bytes && rc == 0;) {
        const char *end = memchr(text + at, '\n', n_bytes - at);
        size_t n = end ? (size_t)(end - text) - at : n_bytes - at;
        t->n_line++;
        if (n && text[at] != '\r')
            rc = read_text(t, text + at, n, err);
        at += n + 1;
    }
    t->n_line = 0;
    return rc;
}

static int read_bytes(const char *path, uint8_t **out, size_t *out_n, struct err *err)
{
    struct stat s;
    FILE *f = file_stream(path, err);
    int rc = 0;
    if (!f)
        return err->code;
    if (fstat(fileno(f), &s) < 0 || (uint64_t)s.st_size > FILE_BYTES_MAX)
        rc = err_set(err, -EINVAL, "%s: expected a file of at most 4 GiB", path);
    if (rc == 0) {
        uint8_t *bytes = xcalloc((size_t)s.st_size + 1, 1);
        *out_n = fread(bytes, 1, (size_t)s.st_size, f);
        *out = bytes;
        if (ferror(f)) {
            rc = err_set(err, -EIO, "%s: cannot be read: %s", path, strerror(errno));
            free(bytes);
        }
    }
    fclose(f);
    return rc;
}

/* The number in "rank3.jsonl", "router_trace_rank3.jsonl". */
static uint32_t rank_of(const char *path)
{
    const char *name = strrchr(path, '/'), *at;
    unsigned rank = TRACE_RANK_NONE;
    at = strstr(name ? name : path, "rank");
    if (at)
        (void)sscanf(at, "rank%6u", &rank);
    return rank;
}

static int read_file(struct trace *t, const char *path, struct err *err)
{
    uint8_t *bytes = NULL;
    size_t n = 0;
    int rc = read_bytes(path, &bytes, &n, err);
    if (rc < 0)
        return rc;
    t->path = path;
    t->rank = rank_of(path);
    size_t n_path = strlen(path);
    if (n > 4 && !memcmp(bytes, "PK\3\4", 4))
        rc = trace_sglang(t, bytes, n, err);
    else if (n_path > 5 && !strcmp(path + n_path - 5, ".json"))
        rc = read_text(t, (const char *)bytes, n, err);
    else
        rc = read_lines(t, (const char *)bytes, n, err);
    free(bytes);
    return rc;
}

static int is_part(const struct dirent *d)
{
    const char *end = strrchr(d->d_name, '.');
    return end && (!strcmp(end, ".jsonl") || !strcmp(end, ".pt"));
}

static int read_folder(struct trace *t, const char *path, struct err *err)
{
    struct dirent **entry;
    int n = scandir(path, &entry, is_part, alphasort), rc = 0;
    if (n < 0)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    for (int i = 0; i < n; i++) {
        char *file = xasprintf("%s/%s", path, entry[i]->d_name);
        if (rc == 0)
            rc = read_file(t, file, err);
        free(file);
        free(entry[i]);
    }
    free(entry);
    return rc;
}

static bool is_folder(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

bool trace_is_one(const char *path)
{
    char begin[4] = "";
    if (is_folder(path))
        return true;
    FILE *f = file_stream(path, NULL);
    if (!f)
        return false; /* whoever reads it says why */
    size_t n = fread(begin, 1, sizeof begin, f);
    fclose(f);
    return n == sizeof begin && (begin[0] == '{' || !memcmp(begin, "PK\3\4", 4));
}

int trace_read(const char *path, uint32_t window_steps, struct loads *out, struct err *err)
{
    struct trace t = { .path = path };
    struct loads l = { 0 };
    window_steps += !window_steps;
    int rc = is_folder(path) ? read_folder(&t, path, err) : read_file(&t, path, err);
    t.path = path;
    if (rc == 0 && !t.n_records)
        rc = trace_fail(&t, err, "no loads in it");
    if (rc == 0)
        rc = join_ranks(&t, err);
    if (rc == 0) {
        qsort(t.record, t.n_records, sizeof *t.record, by_step_and_layer);
        count(&t, window_steps, &l);
        rc = add_up(&t, window_steps, &l, err);
        name_layers(&l);
    }
    trace_fini(&t);
    if (rc < 0)
        loads_fini(&l);
    else
        *out = l;
    return rc;
}
