/* trace.c - spans as events of the Chrome trace format
 *
 * The array is written an event a line; readers of the format take a file without its last
 * bracket, so a killed trainer leaves a good one. Readers drop an event that is half within another
 * one of its line. So what goes on beside the rest has lines of its own, as many as go on at once;
 * and times are cut to quarters of a microsecond, which a double holds of the wall's clock. */
#include "worker/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/mem.h"
#include "worker/phases.h"

#define LINES_MAX  8 /* of what goes on beside, and of the rest: the first */
#define QUARTER_NS 250 /* of a microsecond */

struct trace {
    char    *folder, *node;
    uint32_t rank;
    uint64_t first, n, step;
    FILE    *file; /* NULL: not begun, or given up */
    bool     has_failed;
    uint32_t n_lines;         /* that have a name in the file */
    int64_t  ends[LINES_MAX]; /* in quarters, of the last event of each line beside */
};

struct trace *trace_create(const char *folder, uint32_t rank, const char *node, uint64_t first,
                           uint64_t n)
{
    if (n == 0)
        return NULL;
    struct trace *t = xcalloc(1, sizeof *t);
    *t = (struct trace){.folder = xstrdup(folder), .node = xstrdup(node), .rank = rank,
                        .first = first, .n = n};
    return t;
}

static void close_file(struct trace *t)
{
    if (!t->file)
        return;
    fprintf(t->file, "\n]\n");
    if (fclose(t->file) != 0)
        log_warn("rank=%u msg=\"the trace is incomplete: %s\"", t->rank, strerror(errno));
    t->file = NULL;
}

bool trace_begins(struct trace *t, uint64_t step)
{
    bool is_wanted = t && step >= t->first && step - t->first < t->n;
    if (t && !is_wanted)
        close_file(t);
    if (is_wanted)
        t->step = step;
    return is_wanted;
}

static void give_up(struct trace *t, const char *path)
{
    log_warn("rank=%u msg=\"no trace, %s: %s\"", t->rank, path, strerror(errno));
    t->has_failed = true;
    if (t->file)
        fclose(t->file);
    t->file = NULL;
}

static struct json *event(const struct trace *t, const char *name, const char *kind,
                          uint64_t line)
{
    struct json *o = json_new_object();
    json_put(o, "name", json_new_string(name));
    json_put(o, "ph", json_new_string(kind));
    json_put(o, "pid", json_new_u64(t->rank));
    json_put(o, "tid", json_new_u64(line));
    return o;
}

/* Takes o. */
static void write_event(struct trace *t, const char *before, struct json *o)
{
    char *text = json_text(o, false);
    fprintf(t->file, "%s\n%s", before, text);
    free(text);
    json_destroy(o);
}

static void write_name(struct trace *t, const char *before, const char *of, uint64_t line,
                       const char *name)
{
    struct json *o = event(t, of, "M", line), *args = json_new_object();
    json_put(args, "name", json_new_string(name));
    json_put(o, "args", args);
    write_event(t, before, o);
}

static void begin_file(struct trace *t)
{
    char *path = xasprintf("%s/rank-%u.json", t->folder, t->rank);
    char *name = xasprintf("rank %u on %s", t->rank, t->node);
    if ((mkdir(t->folder, 0777) < 0 && errno != EEXIST) || !(t->file = file_create(path, NULL))) {
        give_up(t, path);
    } else {
        write_name(t, "[", "process_name", 0, name);
        write_name(t, ",", "thread_name", 0, "step");
        t->n_lines = 1;
    }
    free(name);
    free(path);
}

/* The first line on which nothing goes on from begin to end. They come as they end. */
static uint32_t line_beside(struct trace *t, int64_t begin, int64_t end)
{
    uint32_t line = 1;
    while (line + 1 < LINES_MAX && t->ends[line] > begin)
        line++;
    for (; t->n_lines <= line; t->n_lines++)
        write_name(t, ",", "thread_name", t->n_lines, "beside it");
    t->ends[line] = end;
    return line;
}

void trace_span(void *trace, const struct span *span)
{
    struct trace *t = trace;
    if (!t->file && !t->has_failed)
        begin_file(t);
    if (!t->file)
        return;
    int64_t begin = span->begin_ns / QUARTER_NS;
    int64_t end = (span->begin_ns + span->duration_ns) / QUARTER_NS;
    uint32_t line = phase_is_hidden(span->kind) ? line_beside(t, begin, end) : 0;
    struct json *o = event(t, phase_names[span->kind], "X", line), *args = json_new_object();
    json_put(o, "ts", json_new_double((double)begin / 4));
    json_put(o, "dur", json_new_double((double)(end - begin) / 4));
    json_put(args, "step", json_new_u64(t->step));
    if (span->layer >= 0)
        json_put(args, "layer", json_new_i64(span->layer));
    json_put(o, "args", args);
    write_event(t, ",", o);
    if (ferror(t->file))
        give_up(t, t->folder);
}

void trace_destroy(struct trace *t)
{
    if (!t)
        return;
    close_file(t);
    free(t->folder);
    free(t->node);
    free(t);
}
