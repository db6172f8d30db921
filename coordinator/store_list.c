/* store_list.c - lists of jobs and events by conditions, and in an order, of a client's choice
 *
 * Names of columns come from the tables below and values are bound, so nothing that a client says
 * becomes SQL. All of it runs on the writer's thread, where commits wait for it: jobs are looked
 * for within a limit of time, events block by block, and who wants more asks again. */
#include <errno.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/field.h"
#include "common/field_text.h"
#include "coordinator/event.h"
#include "coordinator/store_bind.h"

#define JOBS_LIMIT_NS   NS_PER_S
#define EVENTS_LIMIT_NS (200 * NS_PER_MS)
#define EVENTS_BLOCK    20000u
#define PAGE_BYTES_MAX  (4u << 20)
#define OPS_PER_LOOK    1000
#define FIRST_VALUE     4 /* parameters before it are the statement's own */

struct list_column {
    const char *name, *sql;
    bool is_number;
    bool zero_is_never; /* an instant that has not come: later than all others */
};
static const struct list_column job_columns[] = {
    {"jobid", "id", true, false},           {"name", "name", false, false},
    {"user", "user", false, false},         {"state", "state", false, false},
    {"prio", "priority", true, false},      {"workers", "gang_size", true, false},
    {"attempt", "attempt", true, false},    {"restarts", "n_restarts", true, false},
    {"exit", "exit", false, false},         {"submit", "submitted_at_ns", true, false},
    {"start", "started_at_ns", true, true}, {"end", "ended_at_ns", true, true},
    {NULL, NULL, false, false},
};
static const struct list_column event_columns[] = {
    {"seq", "seq", true, false},        {"time", "at_ns", true, false},
    {"job", "job", true, false},        {"worker", "worker", false, false},
    {"kind", "kind", false, false},     {"text", "text", false, false},
    {NULL, NULL, false, false},
};

static const struct list_column *find(const struct list_column *columns, const char *name,
                                      struct err *err)
{
    char quoted[FIELD_QUOTE_BYTES];
    for (; columns->name; columns++)
        if (!strcmp(columns->name, name))
            return columns;
    field_quote(name, quoted);
    err_set(err, -EINVAL, "%s is no column that this coordinator can filter or sort by", quoted);
    return NULL;
}

/* ---- SQL of the conditions ------------------------------------------------------------------- */

static void write_values(FILE *out, size_t n, int *next)
{
    for (size_t i = 0; i < n; i++)
        fprintf(out, "%s?%d", i ? ", " : "", (*next)++);
}

/* " AND (...)"; *next is the number of the next parameter. */
static int write_term(FILE *out, const struct list_column *columns, const Ballast__ListTerm *term,
                      int *next, struct err *err)
{
    static const char *const signs[] = {
        [BALLAST__LIST_OP__LIST_BELOW] = "<",  [BALLAST__LIST_OP__LIST_AT_MOST] = "<=",
        [BALLAST__LIST_OP__LIST_ABOVE] = ">",  [BALLAST__LIST_OP__LIST_AT_LEAST] = ">=",
    };
    const struct list_column *c = find(columns, term->column, err);
    if (!c)
        return -EINVAL;
    bool is_set = term->op == BALLAST__LIST_OP__LIST_IS ||
                  term->op == BALLAST__LIST_OP__LIST_IS_NOT;
    if (!is_set && term->n_values != 1)
        return err_set(err, -EINVAL, "column %s is compared with %zu values; expected one",
                       c->name, term->n_values);
    if (is_set) {
        fprintf(out, " AND %s %s (", c->sql,
                term->op == BALLAST__LIST_OP__LIST_IS ? "IN" : "NOT IN");
        write_values(out, term->n_values, next);
        fputc(')', out);
    } else if (term->op == BALLAST__LIST_OP__LIST_HOLDS) {
        fprintf(out, " AND instr(%s, ?%d) > 0", c->sql, (*next)++);
    } else {
        bool is_later = term->op == BALLAST__LIST_OP__LIST_ABOVE ||
                        term->op == BALLAST__LIST_OP__LIST_AT_LEAST;
        fprintf(out, " AND (%s %s ?%d", c->sql, signs[term->op], (*next)++);
        if (c->zero_is_never)
            fprintf(out, is_later ? " OR %s = 0" : " AND %s != 0", c->sql);
        fputc(')', out);
    }
    return 0;
}

static int write_terms(FILE *out, const struct list_column *columns, const struct store_read *r,
                       struct err *err)
{
    int next = FIRST_VALUE, rc = 0;
    for (size_t i = 0; i < r->n_terms && rc == 0; i++)
        rc = write_term(out, columns, r->terms[i], &next, err);
    return rc;
}

static int write_order(FILE *out, const struct list_column *columns, const struct store_read *r,
                       struct err *err)
{
    fputs(" ORDER BY ", out);
    for (size_t i = 0; i < r->n_order; i++) {
        const struct list_column *c = find(columns, r->order[i]->column, err);
        const char *way = r->order[i]->descending ? " DESC" : "";
        if (!c)
            return -EINVAL;
        if (c->zero_is_never)
            fprintf(out, "%s = 0%s, ", c->sql, way);
        fprintf(out, "%s%s, ", c->sql, way);
    }
    fputs("id", out);
    return 0;
}

static int bind_value(sqlite3_stmt *s, int at, const struct list_column *c, const char *text,
                      struct err *err)
{
    uint64_t magnitude;
    bool is_negative;
    char quoted[FIELD_QUOTE_BYTES];
    if (!c->is_number)
        return sqlite3_bind_text(s, at, text, -1, SQLITE_STATIC);
    if (text_integer(text, &magnitude, &is_negative) < 0 || magnitude > INT64_MAX) {
        field_quote(text, quoted);
        return err_set(err, -EINVAL, "column %s: %s is not a whole number", c->name, quoted);
    }
    return sqlite3_bind_int64(s, at, is_negative ? -(int64_t)magnitude : (int64_t)magnitude);
}

static int bind_terms(sqlite3_stmt *s, const struct list_column *columns,
                      const struct store_read *r, struct err *err)
{
    int at = FIRST_VALUE, rc = 0;
    for (size_t i = 0; i < r->n_terms; i++)
        for (size_t k = 0; k < r->terms[i]->n_values && rc == 0; k++)
            rc = bind_value(s, at++, find(columns, r->terms[i]->column, err),
                            r->terms[i]->values[k], err);
    return rc;
}

/* Takes the text of sql, which `written` says is whole. */
static int prepare(struct store_tables *t, int written, char *sql,
                   const struct list_column *columns, const struct store_read *r,
                   sqlite3_stmt **out, struct err *err)
{
    sqlite3_stmt *s = NULL;
    int rc = written < 0 ? written : db_prepare(t->state, sql, &s, err);
    if (rc == 0)
        rc = bind_terms(s, columns, r, err);
    free(sql);
    if (rc < 0)
        sqlite3_finalize(s);
    else
        *out = s;
    return rc;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static int look(void *deadline_ns)
{
    return clock_now_ns() > *(const uint64_t *)deadline_ns;
}

void list_limit_time(struct store_tables *t, uint64_t limit_ns)
{
    t->list_deadline_ns = clock_now_ns() + limit_ns;
    sqlite3_progress_handler(t->state, limit_ns ? OPS_PER_LOOK : 0, limit_ns ? look : NULL,
                             &t->list_deadline_ns);
}

int list_jobs(struct store_tables *t, const struct store_read *r, sqlite3_stmt **out,
              struct err *err)
{
    char *sql = NULL;
    size_t n = 0;
    FILE *text = open_memstream(&sql, &n);
    if (!text)
        abort();
    fputs("SELECT " JOB_COLUMNS " FROM jobs WHERE id > ?1 AND (?2 = '' OR user = ?2)", text);
    if (r->is_live)
        fputs(" AND ended_at_ns = 0", text);
    int rc = write_terms(text, job_columns, r, err);
    if (rc == 0)
        rc = write_order(text, job_columns, r, err);
    fputs(" LIMIT ?3", text);
    fclose(text);
    rc = prepare(t, rc, sql, job_columns, r, out, err);
    if (rc == 0)
        list_limit_time(t, r->limit_ns ? r->limit_ns : JOBS_LIMIT_NS);
    return rc;
}

/* ---- events ---------------------------------------------------------------------------------- */

/* Records keep what their text tells as a number, too. */
static void read_step(sqlite3_stmt *s, int column, struct arena *a, Ballast__Event *out)
{
    size_t n_bytes = (size_t)sqlite3_column_bytes(s, column);
    Ballast__Record *r = n_bytes ? ballast__record__unpack(arena_pb(a), n_bytes,
                                                           sqlite3_column_blob(s, column)) : NULL;
    const Ballast__Event *told = r ? event_of_record(r, a) : NULL;
    out->has_step = told && told->has_step;
    out->step = told ? told->step : 0;
}

void list_event_at(sqlite3_stmt *s, struct store_read *r)
{
    Ballast__Event *e = arena_alloc(&r->arena, sizeof *e);
    ballast__event__init(e);
    e->seq = int_at(s, 0);
    e->at_ns = sqlite3_column_int64(s, 1);
    e->job_id = int_at(s, 2);
    e->worker = text_at(s, 3, &r->arena);
    e->kind = text_at(s, 4, &r->arena);
    e->text = text_at(s, 5, &r->arena);
    read_step(s, 6, &r->arena, e);
    PUSH(&r->arena, r->events, r->n_events, e);
}

/* The first record that is not older, by halving: times rise with the log, as clocks do. */
static int seq_since(struct store_tables *t, int64_t at_ns, uint64_t end, uint64_t *out,
                     struct err *err)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_TIME_AT);
    uint64_t low = 1, high = end;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        sqlite3_bind_int64(s, 1, (sqlite3_int64)middle);
        int rc = db_next(s, err);
        if (rc < 0)
            return rc;
        bool is_older = rc > 0 && sqlite3_column_int64(s, 1) < at_ns;
        uint64_t seq = rc > 0 ? int_at(s, 0) : high;
        sqlite3_reset(s);
        if (is_older)
            low = seq + 1;
        else
            high = middle;
    }
    *out = low;
    return 0;
}

/* No record below it can satisfy the terms. */
static int lowest_seq(struct store_tables *t, const struct store_read *r, uint64_t end,
                      uint64_t *out, struct err *err)
{
    *out = 1;
    for (size_t i = 0; i < r->n_terms; i++) {
        const Ballast__ListTerm *term = r->terms[i];
        uint64_t at_ns, seq;
        bool is_negative, is_since = term->op == BALLAST__LIST_OP__LIST_AT_LEAST ||
                                     term->op == BALLAST__LIST_OP__LIST_ABOVE;
        if (strcmp(term->column, "time") || !is_since ||
            text_integer(term->values[0], &at_ns, &is_negative) < 0 || is_negative)
            continue;
        int rc = seq_since(t, (int64_t)at_ns, end, &seq, err);
        if (rc < 0)
            return rc;
        *out = seq > *out ? seq : *out;
    }
    return 0;
}

static int read_last_seq(struct store_tables *t, uint64_t *out, struct err *err)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_LAST_SEQ);
    int rc = db_next(s, err);
    if (rc <= 0)
        return rc;
    *out = int_at(s, 0);
    sqlite3_reset(s);
    return 0;
}

/* Records from `from`, below `to`. */
static int read_block(struct store_read *r, sqlite3_stmt *s, uint64_t from, uint64_t to)
{
    size_t used = r->arena.used_bytes;
    int rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)from);
    sqlite3_bind_int64(s, 2, (sqlite3_int64)to);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)(r->limit - r->n_events));
    while ((rc = db_next(s, &r->err)) > 0) {
        list_event_at(s, r);
        if (r->arena.used_bytes - used > PAGE_BYTES_MAX) {
            r->limit = (uint32_t)r->n_events; /* enough of them */
            sqlite3_reset(s);
            return 0;
        }
    }
    return rc;
}

static void reverse(struct store_read *r)
{
    for (size_t i = 0, j = r->n_events; i + 1 < j; i++) {
        Ballast__Event *e = r->events[i];
        r->events[i] = r->events[--j];
        r->events[j] = e;
    }
}

/* From the newest down, or from `from` up: block by block until there are enough. A job's own are
 * found by an index and are one block. */
static int read_blocks(struct store_tables *t, struct store_read *r, sqlite3_stmt *s,
                       uint64_t last_seq)
{
    uint64_t end = r->is_newest && r->from && r->from <= last_seq ? r->from : last_seq + 1;
    uint64_t low = r->from, until_ns = clock_now_ns() + EVENTS_LIMIT_NS;
    uint64_t block = r->job ? UINT64_MAX >> 1 : EVENTS_BLOCK;
    int rc = r->is_newest ? lowest_seq(t, r, end, &low, &r->err) : 0;
    low = low ? low : 1;
    bool is_first = true; /* which is read however late it is, so that who asks again gets on */
    while (rc == 0 && low < end && r->n_events < r->limit &&
           (is_first || clock_now_ns() < until_ns)) {
        is_first = false;
        uint64_t step = end - low < block ? end - low : block;
        if (r->is_newest) {
            rc = read_block(r, s, end - step, end);
            end -= step;
        } else {
            rc = read_block(r, s, low, low + step);
            low += step;
        }
    }
    bool is_full = r->n_events == r->limit && r->n_events;
    if (is_full)
        r->next = r->events[r->n_events - 1]->seq + !r->is_newest;
    else
        r->next = !r->is_newest ? low : low < end ? end : 0;
    r->is_truncated = !r->is_newest && !is_full && low < end;
    return rc;
}

int list_events(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = NULL;
    char *sql = NULL;
    size_t n = 0;
    uint64_t last_seq = 0;
    FILE *text = open_memstream(&sql, &n);
    if (!text)
        abort();
    fputs("SELECT " EVENT_COLUMNS " FROM records WHERE seq >= ?1 AND seq < ?2", text);
    if (r->job)
        fprintf(text, " AND job = %llu AND job > 0", (unsigned long long)r->job);
    int rc = write_terms(text, event_columns, r, &r->err);
    fprintf(text, " ORDER BY seq%s LIMIT ?3", r->is_newest ? " DESC" : "");
    fclose(text);
    if ((rc = prepare(t, rc, sql, event_columns, r, &s, &r->err)) < 0)
        return rc;
    if ((rc = read_last_seq(t, &last_seq, &r->err)) == 0)
        rc = read_blocks(t, r, s, last_seq);
    sqlite3_finalize(s);
    r->total = last_seq;
    if (r->is_newest)
        reverse(r);
    return rc;
}
