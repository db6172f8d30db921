/* ctl_print.c - tables, escaping, and the words for states */
#include "coordinator/ctl.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#include "common/tame.h"
#include "coordinator/event.h"

/* ---- foreign text --------------------------------------------------------------------------- */

void ctl_print_escaped(FILE *out, const void *bytes, size_t n_bytes, bool keep_newlines)
{
    const unsigned char *s = bytes;
    for (size_t i = 0; i < n_bytes;) {
        size_t length = tame_printable((const char *)s + i, n_bytes - i);
        if (length)
            fwrite(s + i, 1, length, out);
        else if (s[i] == '\t' || (s[i] == '\n' && keep_newlines))
            fputc(s[i], out);
        else
            fprintf(out, "\\x%02x", s[i]);
        i += length ? length : 1;
    }
}

/* ---- tables --------------------------------------------------------------------------------- */

struct ctl_cell {
    char *text;
    const char *color;
};

char *ctl_clean_text(const char *format, va_list args)
{
    char *raw = NULL, *clean = NULL;
    size_t n_clean = 0;
    int n = vasprintf(&raw, format, args);
    FILE *out = open_memstream(&clean, &n_clean);
    if (n < 0 || !out)
        abort();
    ctl_print_escaped(out, raw, strlen(raw), false);
    fclose(out);
    free(raw);
    return clean;
}

void ctl_table_cell(struct ctl_table *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *clean = ctl_clean_text(format, args);
    va_end(args);
    if (!*clean) {
        free(clean);
        clean = xstrdup("-");
    }
    t->cells = xrealloc(t->cells, (t->n_cells + 1) * sizeof *t->cells);
    t->cells[t->n_cells++] = (struct ctl_cell){clean, NULL};
}

void ctl_table_color(struct ctl_table *t, const char *color)
{
    t->cells[t->n_cells - 1].color = color;
}

size_t ctl_bytes_within(const char *text, size_t n_cells, size_t *out_cells)
{
    size_t at = 0, n = strlen(text), used = 0;
    mbstate_t state = {0};
    while (at < n) {
        wchar_t letter;
        size_t n_bytes = mbrtowc(&letter, text + at, n - at, &state);
        bool is_one = n_bytes && n_bytes <= n - at;
        int cells = is_one ? wcwidth(letter) : 1;
        if (cells < 0)
            cells = 1;
        if (used + (size_t)cells > n_cells)
            break;
        if (!is_one)
            state = (mbstate_t){0};
        used += (size_t)cells;
        at += is_one ? n_bytes : 1;
    }
    if (out_cells)
        *out_cells = used;
    return at;
}

char *ctl_fitted(const char *text, size_t n_cells)
{
    size_t used, n_bytes = ctl_bytes_within(text, n_cells, &used);
    return xasprintf("%.*s%*s", (int)n_bytes, text, (int)(n_cells - used), "");
}

static size_t width(const char *text)
{
    size_t n_cells;
    ctl_bytes_within(text, SIZE_MAX, &n_cells);
    return n_cells;
}

bool ctl_wants_color(const struct ctl *c)
{
    const char *no_color = getenv("NO_COLOR");
    return !c->no_color && !(no_color && *no_color) && isatty(STDOUT_FILENO);
}

static void print_cell(const struct ctl_table *t, size_t column, const char *text,
                       const char *color, size_t columns_width)
{
    bool is_last = column + 1 == t->n_columns, is_right = t->columns[column].is_right;
    int pad = (int)(columns_width - width(text));
    if (is_right)
        printf("%*s", pad, "");
    if (color)
        printf("\033[%sm%s\033[0m", color, text);
    else
        fputs(text, stdout);
    if (!is_right && !is_last)
        printf("%*s", pad, "");
    fputs(is_last ? "\n" : "  ", stdout);
}

void ctl_table_print(const struct ctl *c, const struct ctl_table *t)
{
    size_t *widths = xcalloc(t->n_columns, sizeof *widths);
    bool has_color = ctl_wants_color(c);
    bool has_header = !c->no_header && !t->no_header;
    for (size_t i = 0; i < t->n_columns; i++) {
        size_t head = c->no_header ? 0 : width(t->columns[i].head);
        widths[i] = head > (size_t)t->columns[i].width ? head : (size_t)t->columns[i].width;
    }
    for (size_t i = 0; i < t->n_cells; i++)
        if (width(t->cells[i].text) > widths[i % t->n_columns])
            widths[i % t->n_columns] = width(t->cells[i].text);
    for (size_t i = 0; i < t->n_columns && has_header; i++)
        print_cell(t, i, t->columns[i].head, NULL, widths[i]);
    for (size_t i = 0; i < t->n_cells; i++)
        print_cell(t, i % t->n_columns, t->cells[i].text, has_color ? t->cells[i].color : NULL,
                   widths[i % t->n_columns]);
    free(widths);
}

void ctl_table_fini(struct ctl_table *t)
{
    for (size_t i = 0; i < t->n_cells; i++)
        free(t->cells[i].text);
    free(t->cells);
    t->cells = NULL;
    t->n_cells = 0;
}

void ctl_number_text(const char *format, double x, const char *none, char out_text[64])
{
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    if (isfinite(x))
        snprintf(out_text, 64, format, x);
    else
        snprintf(out_text, 64, "%s", none);
#pragma GCC diagnostic pop
}

void ctl_table_number(struct ctl_table *t, const char *format, double x)
{
    char text[64];
    ctl_number_text(format, x, "-", text);
    ctl_table_cell(t, "%s", text);
}

void ctl_bytes_text(uint64_t n_bytes, char out_text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double x = (double)n_bytes;
    size_t u = 0;
    while (x >= 1024 && u < 4) {
        x /= 1024;
        u++;
    }
    snprintf(out_text, 32, u ? "%.2f %s" : "%.0f %s", x, units[u]);
}

/* ---- states --------------------------------------------------------------------------------- */

static const struct {
    const char *two_letters, *color;
} job_states[] = {
    [BALLAST__JOB_STATE__JOB_UNKNOWN]    = {"?", NULL},
    [BALLAST__JOB_STATE__JOB_QUEUED]     = {"PD", NULL},
    [BALLAST__JOB_STATE__JOB_STARTING]   = {"CF", "36"},
    [BALLAST__JOB_STATE__JOB_RUNNING]    = {"R", "32"},
    [BALLAST__JOB_STATE__JOB_RECOVERING] = {"RC", "33"},
    [BALLAST__JOB_STATE__JOB_PREEMPTING] = {"PR", "33"},
    [BALLAST__JOB_STATE__JOB_STOPPING]   = {"CG", "33"},
    [BALLAST__JOB_STATE__JOB_DONE]       = {"CD", "34"},
    [BALLAST__JOB_STATE__JOB_FAILED]     = {"F", "31"},
    [BALLAST__JOB_STATE__JOB_CANCELLED]  = {"CA", "35"},
    [BALLAST__JOB_STATE__JOB_PAUSED]     = {"S", "33"},
};

static size_t known(Ballast__JobState state)
{
    size_t i = (size_t)state;
    return i < sizeof job_states / sizeof *job_states ? i : 0;
}

const char *ctl_state_short(const Ballast__Job *job)
{
    bool is_held = job->state == BALLAST__JOB_STATE__JOB_QUEUED && job->held;
    return is_held ? "H" : job_states[known(job->state)].two_letters;
}

const char *ctl_state_color(Ballast__JobState state)
{
    return job_states[known(state)].color;
}

void ctl_print_line(const char *key, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!*text)
        return;
    printf("%-16s ", key);
    ctl_print_escaped(stdout, text, strlen(text), false);
    putchar('\n');
}

const char *ctl_worker_state_word(size_t i)
{
    return i + 1 <= WORKER_STATE_MAX
               ? event_worker_state((Ballast__WorkerState)(i + 1)) : NULL;
}
