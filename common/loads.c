/* loads.c - expert loads as CSV */
#include "common/loads.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "common/mem.h"
#include "common/csv.h"

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
    while ((rc = csv_row(c, v, err)) > 0) {
        row = xgrow(row, n, &cap, sizeof *row);
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
    static const struct csv_column column[] = {
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
