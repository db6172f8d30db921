/* ctl_loads.c - CSV of loads and placements */
#include "coordinator/ctl_loads.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "common/field_text.h"
#include "common/mem.h"

#define COLUMNS_MAX 16

/* ---- lines ----------------------------------------------------------------------------------- */

struct column {
    const char *name, *other_name;
    bool        is_required, is_double;
    double      min, max;
};

struct csv {
    const char *path;
    FILE       *file;
    const struct column *column;
    uint32_t    n_columns;
    int         at[COLUMNS_MAX];    /* field of each column, -1 */
    uint32_t    n_fields;           /* in the first line */
    uint64_t    n_line;
    char        text[CSV_LINE_BYTES_MAX + 2]; /* one byte more than is allowed, and its end */
};

static int fail(const struct csv *c, struct err *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static int fail(const struct csv *c, struct err *err, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return err_set(err, -EINVAL, "%s:%" PRIu64 ": %s", c->path, c->n_line, text);
}

/* Into c->text, as much as fits; -1 at the end of the file. */
static ssize_t read_line(struct csv *c)
{
    size_t n = 0;
    for (int byte; n < sizeof c->text - 1 && (byte = getc(c->file)) != EOF;) {
        c->text[n++] = (char)byte;
        if (byte == '\n')
            break;
    }
    c->text[n] = '\0';
    return n ? (ssize_t)n : -1;
}

/* The next line that is not empty, without its end: 1, 0 at the end of the file, or negative. */
static int next_line(struct csv *c, struct err *err)
{
    for (;;) {
        ssize_t n = read_line(c);
        if (ferror(c->file))
            return err_set(err, -errno, "%s: %s", c->path, strerror(errno));
        if (n < 0)
            return 0;
        c->n_line++;
        if (memchr(c->text, '\0', (size_t)n))
            return fail(c, err, "a zero byte; a CSV file is expected");
        if (n > CSV_LINE_BYTES_MAX)
            return fail(c, err, "a line of more than %d bytes; a CSV file is expected",
                        CSV_LINE_BYTES_MAX);
        if (c->n_line > CSV_LINES_MAX)
            return fail(c, err, "more than %" PRIu64 " lines", (uint64_t)CSV_LINES_MAX);
        c->text[strcspn(c->text, "\r\n")] = '\0';
        if (c->text[strspn(c->text, " \t")])
            return 1;
    }
}

/* Cuts the next field off *rest: trimmed, without a pair of quotes; NULL after the last. */
static char *next_field(char **rest)
{
    char *field = *rest;
    if (!field)
        return NULL;
    size_t n = strcspn(field, ",");
    *rest = field[n] ? field + n + 1 : NULL;
    field[n] = '\0';
    field += strspn(field, " \t");
    for (n = strlen(field); n && (field[n - 1] == ' ' || field[n - 1] == '\t'); n--)
        field[n - 1] = '\0';
    if (n > 1 && field[0] == '"' && field[n - 1] == '"') {
        field[n - 1] = '\0';
        field++;
    }
    return field;
}

static int expected_columns(const struct csv *c, struct err *err, const char *problem)
{
    char names[256] = "";
    for (uint32_t i = 0; i < c->n_columns; i++) {
        strcat(names, i ? ", " : "");
        strcat(names, c->column[i].name);
        strcat(names, c->column[i].is_required ? "" : " (optional)");
    }
    return fail(c, err, "%s; the first line names the columns: %s", problem, names);
}

static int read_header(struct csv *c, struct err *err)
{
    char problem[160], quoted[FIELD_QUOTE_BYTES];
    int rc = next_line(c, err);
    if (rc < 0)
        return rc;
    if (rc == 0)
        return err_set(err, -EINVAL, "%s: the file is empty", c->path);
    char *rest = c->text, *field;
    if (!strncmp(rest, "\xef\xbb\xbf", 3)) /* a byte order mark, as spreadsheets write it */
        rest += 3;
    for (uint32_t i = 0; i < c->n_columns; i++)
        c->at[i] = -1;
    while ((field = next_field(&rest))) {
        uint32_t i = 0;
        while (i < c->n_columns && strcmp(field, c->column[i].name) != 0 &&
               (!c->column[i].other_name || strcmp(field, c->column[i].other_name) != 0))
            i++;
        field_quote(field, quoted);
        snprintf(problem, sizeof problem, "column %s is %s", quoted,
                 i == c->n_columns ? "unknown" : "there twice");
        if (i == c->n_columns || c->at[i] >= 0)
            return expected_columns(c, err, problem);
        c->at[i] = (int)c->n_fields++;
    }
    for (uint32_t i = 0; i < c->n_columns; i++) {
        snprintf(problem, sizeof problem, "no column '%s'", c->column[i].name);
        if (c->column[i].is_required && c->at[i] < 0)
            return expected_columns(c, err, problem);
    }
    return 0;
}

static int read_value(const struct csv *c, uint32_t i, const char *text, double *out,
                      struct err *err)
{
    const struct column *k = &c->column[i];
    char quoted[FIELD_QUOTE_BYTES];
    uint64_t whole;
    bool negative, is_number;
    double x = 0;
    if (k->is_double) {
        is_number = text_double(text, &x) && isfinite(x);
    } else {
        is_number = text_integer(text, &whole, &negative) == 0;
        x = is_number ? (negative ? -(double)whole : (double)whole) : 0;
    }
    if (!is_number || x < k->min || x > k->max) {
        field_quote(text, quoted);
        return fail(c, err, "%s is %s: must be a %snumber from %.17g to %.17g", k->name, quoted,
                    k->is_double ? "" : "whole ", k->min, k->max);
    }
    *out = x;
    return 0;
}

/* The next row: 1 and its values by column (NAN where the column is absent), 0 at the end. */
static int next_row(struct csv *c, double *out, struct err *err)
{
    char *field[COLUMNS_MAX], *rest;
    uint32_t n = 0;
    int rc = next_line(c, err);
    if (rc <= 0)
        return rc;
    rest = c->text;
    for (char *f; (f = next_field(&rest)); n++)
        if (n < c->n_fields)
            field[n] = f;
    if (n != c->n_fields)
        return fail(c, err, "%u fields: the first line has %u", n, c->n_fields);
    for (uint32_t i = 0; i < c->n_columns; i++) {
        out[i] = NAN;
        if (c->at[i] >= 0 && (rc = read_value(c, i, field[c->at[i]], &out[i], err)) < 0)
            return rc;
    }
    return 1;
}

static int csv_open(struct csv *c, const char *path, const struct column *column,
                    uint32_t n_columns, struct err *err)
{
    *c = (struct csv){ .path = path, .column = column, .n_columns = n_columns };
    c->file = fopen(path, "r");
    if (!c->file)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    return read_header(c, err);
}

static void csv_close(struct csv *c)
{
    if (c->file)
        fclose(c->file);
}

/* ---- loads ----------------------------------------------------------------------------------- */

struct load_row {
    int64_t  window;
    uint32_t layer, expert;
    double   load;
    uint64_t line;
};

static int by_place(const void *a, const void *b)
{
    const struct load_row *x = a, *y = b;
    if (x->window != y->window)
        return x->window < y->window ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->expert != y->expert)
        return x->expert < y->expert ? -1 : 1;
    return x->line < y->line ? -1 : x->line > y->line;
}

static int read_load_rows(struct csv *c, struct load_row **out_rows, size_t *out_n,
                          struct err *err)
{
    double v[4];
    size_t n = 0, cap = 0;
    struct load_row *row = NULL;
    int rc;
    while ((rc = next_row(c, v, err)) > 0) {
        if (n == cap) {
            cap = cap ? cap * 2 : 1024;
            row = xrealloc(row, cap * sizeof *row);
        }
        row[n++] = (struct load_row){ isnan(v[3]) ? 0 : (int64_t)v[3], (uint32_t)v[0],
                                      (uint32_t)v[1], v[2], c->n_line };
    }
    if (rc == 0 && n == 0)
        rc = err_set(err, -EINVAL, "%s: no loads after the first line", c->path);
    *out_rows = row;
    *out_n = n;
    return rc;
}

/* Which layers the first window has: the others must have the same. rows are sorted. */
static void count(const struct load_row *row, size_t n, struct loads *out)
{
    size_t n_first = 0;
    for (size_t i = 0; i < n; i++) {
        out->n_windows += i == 0 || row[i].window != row[i - 1].window;
        if (row[i].expert >= out->n_experts)
            out->n_experts = row[i].expert + 1;
        n_first += row[i].window == row[0].window;
    }
    out->window = xcalloc(out->n_windows, sizeof *out->window);
    out->layer = xcalloc(n_first, sizeof *out->layer);
    for (size_t i = 0; i < n_first; i++)
        if (i == 0 || row[i].layer != row[i - 1].layer)
            out->layer[out->n_layers++] = row[i].layer;
}

static int missing(const char *path, const struct loads *l, const struct load_row *near,
                   int64_t window, uint32_t layer, uint32_t expert, struct err *err)
{
    char where[48] = "";
    if (l->has_windows)
        snprintf(where, sizeof where, "window %" PRId64 ", ", window);
    return err_set(err, -EINVAL, "%s:%" PRIu64 ": %slayer %u: expert %u is missing; every layer "
                   "needs one load for each of the experts 0 to %u", path, near->line, where,
                   layer, expert, l->n_experts - 1);
}

/* Rows must be exactly all (window, layer, expert), in order. */
static int fill(const char *path, const struct load_row *row, size_t n, struct loads *l,
                struct err *err)
{
    size_t i = 0;
    for (size_t j = 1; j < n; j++)
        if (row[j].window == row[j - 1].window && row[j].layer == row[j - 1].layer &&
            row[j].expert == row[j - 1].expert)
            return err_set(err, -EINVAL, "%s:%" PRIu64 ": layer %u expert %u was there already, "
                           "in line %" PRIu64, path, row[j].line, row[j].layer, row[j].expert,
                           row[j - 1].line);
    for (uint32_t w = 0; w < l->n_windows; w++) {
        l->window[w] = row[i].window;
        for (uint32_t k = 0; k < l->n_layers; k++)
            for (uint32_t e = 0; e < l->n_experts; e++, i++) {
                const struct load_row *r = &row[i < n ? i : n - 1];
                if (i < n && r->window == l->window[w] && r->layer < l->layer[k])
                    return err_set(err, -EINVAL, "%s:%" PRIu64 ": layer %u is not in the first "
                                   "window", path, r->line, r->layer);
                if (i == n || r->window != l->window[w] || r->layer != l->layer[k] ||
                    r->expert != e)
                    return missing(path, l, i ? &row[i - 1] : r, l->window[w], l->layer[k], e,
                                   err);
                l->load[i] = r->load;
            }
        if (i < n && row[i].window == l->window[w])
            return err_set(err, -EINVAL, "%s:%" PRIu64 ": layer %u is not in the first window",
                           path, row[i].line, row[i].layer);
    }
    return 0;
}

int loads_read(const char *path, struct loads *out, struct err *err)
{
    static const struct column column[] = {
        { "layer", NULL, true, false, 0, LAYERS_MAX - 1 },
        { "expert", NULL, true, false, 0, EXPERTS_MAX - 1 },
        { "load", NULL, true, true, 0, 1e15 },
        { "window", NULL, false, false, 0, 1e15 },
    };
    struct csv c;
    struct load_row *row = NULL;
    struct loads l = { 0 };
    size_t n = 0;
    int rc = csv_open(&c, path, column, sizeof column / sizeof *column, err);
    if (rc == 0)
        rc = read_load_rows(&c, &row, &n, err);
    if (rc == 0) {
        qsort(row, n, sizeof *row, by_place);
        l.has_windows = c.at[3] >= 0;
        count(row, n, &l);
        l.load = xcalloc(n, sizeof *l.load);
        rc = fill(path, row, n, &l, err);
    }
    free(row);
    csv_close(&c);
    if (rc < 0)
        loads_fini(&l);
    else
        *out = l;
    return rc;
}

void loads_fini(struct loads *l)
{
    free(l->window);
    free(l->layer);
    free(l->load);
    *l = (struct loads){ 0 };
}

const double *loads_at(const struct loads *l, uint32_t window, uint32_t layer)
{
    return l->load + ((size_t)window * l->n_layers + layer) * l->n_experts;
}

/* ---- placements ------------------------------------------------------------------------------ */

enum { LAYER, DEVICE, EXPERT, SLOT, SHARE, HOME, NODE, N_PLACE_COLUMNS };

struct place_row {
    double   v[N_PLACE_COLUMNS];
    uint64_t line;
};

static int read_place_rows(struct csv *c, struct place_row **out, size_t *out_n, struct err *err)
{
    size_t n = 0, cap = 0;
    struct place_row *row = NULL, r;
    int rc;
    while ((rc = next_row(c, r.v, err)) > 0) {
        if (n == cap) {
            cap = cap ? cap * 2 : 1024;
            row = xrealloc(row, cap * sizeof *row);
        }
        r.line = c->n_line;
        row[n++] = r;
    }
    *out = row;
    *out_n = n;
    return rc;
}

static uint32_t find_layer(const struct loads *l, uint32_t layer)
{
    uint32_t k = 0;
    while (k < l->n_layers && l->layer[k] != layer)
        k++;
    return k;
}

/* As many slots as the fullest device needs, and a spare one beyond what all experts need. */
static uint32_t slots_needed(const struct loads *l, const struct place_row *row, size_t n,
                             uint32_t n_devices)
{
    uint32_t *used = xcalloc((size_t)l->n_layers * n_devices, sizeof *used);
    uint32_t most = (l->n_experts + n_devices - 1) / n_devices + 1;
    for (size_t i = 0; i < n; i++) {
        uint32_t k = find_layer(l, (uint32_t)row[i].v[LAYER]);
        if (k == l->n_layers || row[i].v[DEVICE] >= n_devices)
            continue;
        uint32_t now = ++used[(size_t)k * n_devices + (uint32_t)row[i].v[DEVICE]];
        most = now > most ? now : most;
    }
    free(used);
    return most;
}

/* Slots may count through all devices, as others write them: then so many per device, else 0. */
static uint32_t slots_counted_through(const struct place_row *row, size_t n, uint32_t n_slots,
                                      uint32_t n_devices)
{
    double max = -1;
    for (size_t i = 0; i < n; i++)
        max = fmax(max, row[i].v[SLOT]); /* fmax passes over NAN */
    uint32_t per_device = max < n_slots ? 0 : (uint32_t)max / n_devices + 1;
    for (size_t i = 0; i < n && per_device; i++)
        if (row[i].v[DEVICE] != floor(row[i].v[SLOT] / per_device))
            return 0;
    return per_device <= n_slots ? per_device : 0;
}

/* The slot a row means, or -1 and what is wrong. */
static int64_t row_slot(struct csv *c, const struct placement *p, const struct place_row *r,
                        const uint64_t *taken, struct err *err)
{
    uint32_t device = (uint32_t)r->v[DEVICE], first = device * p->n_slots, i = 0;
    c->n_line = r->line;
    if (r->v[DEVICE] >= p->n_devices) {
        fail(c, err, "device %.0f: there are devices 0 to %u", r->v[DEVICE], p->n_devices - 1);
        return -1;
    }
    if (!isnan(r->v[SLOT])) {
        if (r->v[SLOT] >= p->n_slots) {
            fail(c, err, "slot %.0f: a device has slots 0 to %u", r->v[SLOT], p->n_slots - 1);
            return -1;
        }
        i = (uint32_t)r->v[SLOT];
        if (taken[first + i]) {
            fail(c, err, "slot %u of device %u is taken, in line %" PRIu64, i, device,
                 taken[first + i]);
            return -1;
        }
        return first + i;
    }
    while (i < p->n_slots && taken[first + i])
        i++;
    if (i == p->n_slots) {
        fail(c, err, "device %u has more experts than its %u slots", device, p->n_slots);
        return -1;
    }
    return first + i;
}

static int place_row(struct csv *c, struct placement *p, const struct place_row *r,
                     uint64_t *taken, bool *has_home, struct err *err)
{
    int64_t slot = row_slot(c, p, r, taken, err);
    int32_t expert = (int32_t)r->v[EXPERT];
    if (slot < 0)
        return -EINVAL;
    taken[slot] = r->line;
    if (expert < 0)
        return 0;
    if ((uint32_t)expert >= p->n_experts)
        return fail(c, err, "expert %d: the loads have experts 0 to %u", expert,
                    p->n_experts - 1);
    int32_t other = placement_find(p, (uint32_t)slot / p->n_slots, (uint32_t)expert);
    if (other >= 0)
        return fail(c, err, "expert %d is on device %.0f already, in line %" PRIu64, expert,
                    r->v[DEVICE], taken[other]);
    p->expert[slot] = expert;
    if (r->v[HOME] == 1 && has_home[expert])
        return fail(c, err, "expert %d has two homes", expert);
    if (r->v[HOME] == 1) {
        has_home[expert] = true;
        p->home[expert] = (uint32_t)slot;
    }
    return 0;
}

static int fill_placement(struct csv *c, const struct place_row *row, size_t n, uint32_t layer,
                          struct placement *p, struct err *err)
{
    uint64_t *taken = xcalloc(placement_n_total(p), sizeof *taken); /* the line that took a slot */
    bool *has_home = xcalloc(p->n_experts, sizeof *has_home);
    uint32_t *home = xcalloc(p->n_experts, sizeof *home);
    int rc = 0;
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        p->expert[s] = PLACEMENT_EMPTY;
    for (size_t i = 0; i < n && rc == 0; i++)
        if (row[i].v[LAYER] == layer)
            rc = place_row(c, p, &row[i], taken, has_home, err);
    memcpy(home, p->home, p->n_experts * sizeof *home);
    if (rc == 0) {
        placement_share_evenly(p);
        placement_keep_homes(p, NULL);
        for (uint32_t e = 0; e < p->n_experts; e++)
            if (has_home[e])
                p->home[e] = home[e];
        struct err why;
        if (placement_check(p, &why) < 0)
            rc = err_set(err, -EINVAL, "%s: layer %u: %s", c->path, layer, why.text);
    }
    free(home);
    free(has_home);
    free(taken);
    return rc;
}

int placements_read(const char *path, const struct loads *l, uint32_t n_devices, uint32_t n_slots,
                    struct placement **out, struct err *err)
{
    static const struct column column[] = {
        [LAYER] = { "layer", NULL, true, false, 0, LAYERS_MAX - 1 },
        [DEVICE] = { "device", "gpu", true, false, 0, RANKS_MAX - 1 },
        [EXPERT] = { "expert", NULL, true, false, -1, EXPERTS_MAX - 1 },
        [SLOT] = { "slot", NULL, false, false, 0, PLACEMENT_SLOTS_MAX },
        [SHARE] = { "share", NULL, false, true, 0, 1 },
        [HOME] = { "home", NULL, false, false, 0, 1 },
        [NODE] = { "node", NULL, false, false, 0, RANKS_MAX - 1 },
    };
    struct csv c;
    struct place_row *row = NULL;
    size_t n = 0;
    int rc = csv_open(&c, path, column, N_PLACE_COLUMNS, err);
    if (rc == 0)
        rc = read_place_rows(&c, &row, &n, err);
    struct placement *p = xcalloc(l->n_layers, sizeof *p);
    if (rc == 0 && !n_slots)
        n_slots = slots_needed(l, row, n, n_devices);
    uint32_t through = slots_counted_through(row, n, n_slots, n_devices);
    for (size_t i = 0; i < n && through; i++)
        row[i].v[SLOT] = fmod(row[i].v[SLOT], through);
    for (uint32_t k = 0; k < l->n_layers && rc == 0; k++) {
        rc = placement_init(&p[k], l->n_experts, n_devices, n_slots, err);
        if (rc == 0)
            rc = fill_placement(&c, row, n, l->layer[k], &p[k], err);
    }
    free(row);
    csv_close(&c);
    if (rc < 0)
        placements_free(p, l->n_layers);
    else
        *out = p;
    return rc;
}

void placements_free(struct placement *p, uint32_t n_layers)
{
    for (uint32_t k = 0; p && k < n_layers; k++)
        placement_fini(&p[k]);
    free(p);
}

int placements_write(const char *path, const struct loads *l, const struct placement *p,
                     struct err *err)
{
    FILE *f = fopen(path, "w");
    if (!f)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    fprintf(f, "layer,device,slot,expert,share,home\n");
    for (uint32_t k = 0; k < l->n_layers; k++)
        for (uint32_t s = 0; s < placement_n_total(&p[k]); s++) {
            int32_t e = p[k].expert[s];
            fprintf(f, "%u,%u,%u,%d,%.17g,%d\n", l->layer[k], s / p[k].n_slots,
                    s % p[k].n_slots, e, p[k].share[s], e >= 0 && p[k].home[e] == s);
        }
    bool failed = ferror(f);
    if (fclose(f) != 0 || failed)
        return err_set(err, -EIO, "%s: cannot be written in full: %s", path, strerror(errno));
    return 0;
}
