/* ctl_list.c - rows: which match, in which order, and printed in the form asked for */
#include "coordinator/ctl_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

/* ---- values ---------------------------------------------------------------------------------- */

struct list_value list_text(const char *text)
{
    return (struct list_value){text, (double)NAN, NULL};
}

struct list_value list_count(struct arena *a, uint64_t n)
{
    return (struct list_value){arena_printf(a, "%" PRIu64, n), (double)n, NULL};
}

struct list_value list_real(struct arena *a, const char *format, double x)
{
    char text[64];
    ctl_number_text(format, x, "", text);
    return (struct list_value){arena_strdup(a, text), isfinite(x) ? x : (double)NAN, NULL};
}

struct list_value list_instant(struct arena *a, int64_t ns)
{
    char text[CLOCK_STAMP_BYTES] = "";
    if (ns)
        clock_stamp(ns, text);
    return (struct list_value){arena_strdup(a, text), ns ? (double)ns : (double)NAN, NULL};
}

struct list_value list_span(struct arena *a, int64_t from_ns, int64_t to_ns)
{
    char text[CLOCK_STAMP_BYTES];
    if (from_ns <= 0 || to_ns < from_ns)
        return list_text("");
    clock_duration((uint64_t)(to_ns - from_ns), text);
    return (struct list_value){arena_strdup(a, text), (double)(to_ns - from_ns) / NS_PER_S, NULL};
}

struct list_value list_bytes(struct arena *a, uint64_t n_bytes)
{
    char text[32] = "";
    if (n_bytes)
        ctl_bytes_text(n_bytes, text);
    return (struct list_value){arena_strdup(a, text), n_bytes ? (double)n_bytes : (double)NAN,
                               NULL};
}

/* ---- which ----------------------------------------------------------------------------------- */

static bool is_equal(const struct list_column *c, const struct list_value *v,
                     const struct list_term *t, size_t i)
{
    if (c->kind == LIST_TEXT)
        return !(c->word ? strcasecmp : strcmp)(v->text, t->texts[i]);
    return v->number == t->numbers[i];
}

static bool term_matches(const struct list_term *t, const struct list_value *v)
{
    bool is_any = false;
    double x = t->numbers[0];
    for (size_t i = 0; i < t->n_values; i++)
        is_any = is_any || is_equal(t->column, v, t, i);
    switch (t->op) {
    case BALLAST__LIST_OP__LIST_IS:       return is_any;
    case BALLAST__LIST_OP__LIST_IS_NOT:   return !is_any;
    case BALLAST__LIST_OP__LIST_BELOW:    return v->number < x;
    case BALLAST__LIST_OP__LIST_AT_MOST:  return v->number <= x;
    case BALLAST__LIST_OP__LIST_ABOVE:    return v->number > x;
    case BALLAST__LIST_OP__LIST_AT_LEAST: return v->number >= x;
    default:                              return strstr(v->text, t->texts[0]) != NULL;
    }
}

bool list_matches(struct list_query *q, const void *row)
{
    bool matches = true;
    for (size_t i = 0; i < q->n_terms && matches; i++) {
        struct list_value v = q->terms[i].column->value(row, &q->values);
        matches = term_matches(&q->terms[i], &v);
    }
    arena_reset(&q->values);
    return matches;
}

/* What is not known comes last, whatever the order. */
static int compare_values(enum list_kind kind, const struct list_value *a,
                          const struct list_value *b, bool descending)
{
    int order;
    if (kind == LIST_TEXT) {
        bool is_known = *a->text && *b->text;
        order = strverscmp(a->text, b->text); /* w2 before w10 */
        if (!is_known)
            return (*b->text != 0) - (*a->text != 0);
    } else {
        if (isnan(a->number) || isnan(b->number))
            return (isnan(a->number) != 0) - (isnan(b->number) != 0);
        order = (a->number > b->number) - (a->number < b->number);
    }
    return descending ? -order : order;
}

struct row {
    const void *row;
    size_t at;
    const struct list_value *keys; /* n_order of them */
};

static int compare_rows(const void *x, const void *y, void *context)
{
    const struct row *a = x, *b = y;
    const struct list_query *q = context;
    for (size_t i = 0; i < q->n_order; i++) {
        int order = compare_values(q->order[i].column->kind, &a->keys[i], &b->keys[i],
                                   q->order[i].descending);
        if (order)
            return order;
    }
    return (a->at > b->at) - (a->at < b->at); /* as they came */
}

static void sort(struct list_query *q, const void **rows, size_t n)
{
    struct row *all = xcalloc(n + 1, sizeof *all);
    struct list_value *keys = xcalloc(n * q->n_order + 1, sizeof *keys);
    for (size_t i = 0; i < n; i++) {
        all[i] = (struct row){rows[i], i, keys + i * q->n_order};
        for (size_t k = 0; k < q->n_order; k++)
            keys[i * q->n_order + k] = q->order[k].column->value(rows[i], &q->values);
    }
    qsort_r(all, n, sizeof *all, compare_rows, q);
    for (size_t i = 0; i < n; i++)
        rows[i] = all[i].row;
    arena_reset(&q->values);
    free(keys);
    free(all);
}

size_t list_choose(struct list_query *q, const void **rows, size_t n, bool *out_cut)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (list_matches(q, rows[i]))
            rows[kept++] = rows[i];
    if (q->n_order)
        sort(q, rows, kept);
    *out_cut = kept > q->count;
    if (!*out_cut)
        return kept;
    if (!q->is_ordered)
        memmove(rows, rows + (kept - q->count), q->count * sizeof *rows);
    return q->count;
}

/* ---- printing -------------------------------------------------------------------------------- */

static bool any_has(struct list_query *q, const struct list_column *c, const void *const *rows,
                    size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (c->value(rows[i], &q->values).number > 0)
            return true;
    return false;
}

static size_t shown_columns(const struct ctl *c, struct list_query *q, const void *const *rows,
                            size_t n, const struct list_column **out)
{
    size_t n_out = 0;
    bool is_wide = c->format == CTL_WIDE;
    if (q->n_columns) {
        memcpy(out, q->columns, q->n_columns * sizeof *out);
        return q->n_columns;
    }
    for (size_t i = 0; i < q->list->n_columns && n_out < 64; i++) {
        const struct list_column *column = &q->list->columns[i];
        bool is_shown = column->shown == LIST_ALWAYS ||
                        (is_wide && column->shown <= LIST_IF_ANY) ||
                        (column->shown == LIST_IF_ANY && any_has(q, column, rows, n));
        if (c->phases ? !i || column->shown == LIST_PHASES : is_shown)
            out[n_out++] = column;
    }
    return n_out;
}

void list_print(const struct ctl *c, struct list_query *q, const void *const *rows, size_t n,
                bool with_header)
{
    const struct list_column *columns[64];
    struct ctl_column heads[64];
    struct ctl_table t = {.columns = heads, .n_columns = shown_columns(c, q, rows, n, columns),
                          .no_header = !with_header};
    for (size_t i = 0; i < t.n_columns; i++)
        heads[i] = (struct ctl_column){columns[i]->head, columns[i]->kind != LIST_TEXT &&
                                       columns[i]->kind != LIST_INSTANT, columns[i]->width};
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < t.n_columns; k++) {
            struct list_value v = columns[k]->value(rows[i], &q->values);
            ctl_table_cell(&t, "%s", v.text);
            ctl_table_color(&t, v.color);
        }
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
    arena_reset(&q->values);
}

static void print_names(struct list_query *q, const void *const *rows, size_t n)
{
    const struct list_column *name = list_column_find(q->list, q->list->name);
    for (size_t i = 0; i < n; i++) {
        const char *text = name->value(rows[i], &q->values).text;
        ctl_print_escaped(stdout, text, strlen(text), false);
        putchar('\n');
    }
}

void list_show(const struct ctl *c, struct list_query *q, const void *const *rows, size_t n,
               uint64_t seq, bool truncated)
{
    if (ctl_is_json(c)) {
        struct json *items = json_new_array();
        for (size_t i = 0; i < n; i++)
            json_push(items, q->list->json(rows[i]));
        ctl_json_list(c, q->list->kind, seq, truncated, items);
    } else if (c->format == CTL_NAME) {
        print_names(q, rows, n);
    } else {
        list_print(c, q, rows, n, true);
    }
    if (truncated)
        ctl_hint(c, "only the %s %zu %s are listed; -c N lists more",
                 q->is_ordered ? "first" : "last", n, q->list->rows);
}

int list_show_one(struct ctl *c, const struct ctl_list *list, const char *kind, const void *row,
                  uint64_t seq)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    int rc = list_begin(c, list, q);
    if (rc != CTL_OK)
        ;
    else if (ctl_is_json(c))
        ctl_json_one(c, kind, seq, list->json(row));
    else
        list_show(c, q, &row, 1, seq, false);
    list_fini(q);
    free(q);
    return rc;
}
