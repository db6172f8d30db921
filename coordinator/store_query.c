/* store_query.c - runs one SELECT within limits of what it may name, of time, memory and rows */
#include "coordinator/store_query.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/field_text.h"
#include "coordinator/store_bind.h"
#include "proto/check.h"

#define TIME_NS       (2 * NS_PER_S)
#define MEMORY_BYTES  (128 << 20) /* of sorts, recursion and long values */
#define MEMORY_LOOK_NS (5 * NS_PER_MS)
#define VALUE_BYTES   (128 << 10)
#define REPLY_BYTES   (8u << 20)
#define OPS_PER_LOOK  200

enum stop { STOP_NOT, STOP_TIME, STOP_MEMORY };

struct query_db {
    sqlite3 *db, *state, *stats; /* the latter two borrowed */
    uint64_t limit_ns, deadline_ns; /* of the query that runs */
    uint64_t look_ns;            /* when to look at the memory again */
    int64_t  memory_max;         /* of the process; SQLite keeps no count of its own */
    int      statm;              /* /proc/self/statm */
    enum stop stopped;
    char     denied[64];         /* the first thing that was not allowed */
};

/* ---- what a query may do --------------------------------------------------------------------- */

/* Within one call of a function nobody looks at the time, so none may be long: instr and replace
 * take the square of VALUE_BYTES; printf and format, which are missing, repeat a character as
 * often as they are told. */
static const char *const functions[] = {
    "abs", "acos", "asin", "atan", "atan2", "avg", "ceil", "ceiling", "char", "coalesce", "cos",
    "count", "cume_dist", "date", "datetime", "degrees", "dense_rank", "exp", "first_value",
    "floor", "glob", "group_concat", "hex", "ifnull", "iif", "instr", "json",
    "json_array", "json_array_length", "json_each", "json_extract", "json_group_array",
    "json_group_object", "json_object", "json_quote", "json_type", "json_valid", "julianday",
    "lag", "last_value", "lead", "length", "like", "likelihood", "likely", "ln", "log", "log10",
    "log2", "lower", "ltrim", "max", "min", "mod", "nth_value", "ntile", "nullif",
    "percent_rank", "pi", "pow", "power", "quote", "radians", "random", "rank",
    "replace", "round", "row_number", "rtrim", "sign", "sin", "sqrt", "strftime", "substr",
    "substring", "sum", "tan", "time", "total", "trim", "trunc", "typeof", "unicode",
    "unixepoch", "unlikely", "upper",
    "->", "->>",
};

static bool is_safe_function(const char *name)
{
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (!sqlite3_stricmp(functions[i], name))
            return true;
    return false;
}

static int authorize(void *context, int action, const char *first, const char *second,
                     const char *database, const char *trigger)
{
    struct query_db *q = context;
    (void)first;
    (void)database;
    (void)trigger;
    if (action == SQLITE_SELECT || action == SQLITE_READ || action == SQLITE_RECURSIVE ||
        (action == SQLITE_FUNCTION && second && is_safe_function(second)))
        return SQLITE_OK;
    if (!*q->denied && action == SQLITE_FUNCTION)
        snprintf(q->denied, sizeof q->denied, "the function %.40s", second ? second : "");
    else if (!*q->denied)
        snprintf(q->denied, sizeof q->denied, "this statement");
    return SQLITE_DENY;
}

static int64_t resident_bytes(const struct query_db *q)
{
    char text[128] = "";
    if (pread(q->statm, text, sizeof text - 1, 0) <= 0)
        return 0;
    const char *pages = strchr(text, ' ');
    return pages ? strtoll(pages, NULL, 10) * sysconf(_SC_PAGESIZE) : 0;
}

/* Called every few operations; not 0 ends the query. */
static int look(void *context)
{
    struct query_db *q = context;
    uint64_t now_ns = clock_now_ns();
    if (now_ns > q->deadline_ns)
        q->stopped = STOP_TIME;
    if (now_ns > q->look_ns) {
        q->look_ns = now_ns + MEMORY_LOOK_NS;
        if (resident_bytes(q) > q->memory_max)
            q->stopped = STOP_MEMORY;
    }
    return q->stopped != STOP_NOT;
}

static void watch(struct query_db *q, bool on)
{
    sqlite3 *const all[] = {q->db, q->state, q->stats};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        sqlite3_progress_handler(all[i], on ? OPS_PER_LOOK : 0, on ? look : NULL, q);
}

static void set_limits(sqlite3 *db)
{
    static const struct {
        int id, value;
    } limits[] = {
        {SQLITE_LIMIT_LENGTH, VALUE_BYTES},      {SQLITE_LIMIT_SQL_LENGTH, SQL_BYTES_MAX},
        {SQLITE_LIMIT_COLUMN, SQL_COLUMNS_MAX},  {SQLITE_LIMIT_EXPR_DEPTH, 100},
        {SQLITE_LIMIT_COMPOUND_SELECT, 50},      {SQLITE_LIMIT_VDBE_OP, 100000},
        {SQLITE_LIMIT_FUNCTION_ARG, 32},         {SQLITE_LIMIT_ATTACHED, 0},
        {SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200}, {SQLITE_LIMIT_VARIABLE_NUMBER, 8},
        {SQLITE_LIMIT_TRIGGER_DEPTH, 0},         {SQLITE_LIMIT_WORKER_THREADS, 0},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        sqlite3_limit(db, limits[i].id, limits[i].value);
}

int query_open(struct store_tables *t, struct query_db **out_query, struct err *err)
{
    struct query_db *q = xcalloc(1, sizeof *q);
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_MEMORY | SQLITE_OPEN_NOMUTEX;
    q->state = t->state;
    q->stats = t->stats;
    q->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (q->statm < 0 || sqlite3_open_v2(":memory:", &q->db, flags, NULL) != SQLITE_OK ||
        vtab_register(q->db, q->state, q->stats) < 0 ||
        sqlite3_exec(q->db, "SELECT 1 FROM json_each('[]'), json_tree('[]')", NULL, NULL, NULL)) {
        query_close(q);
        return err_set(err, -EIO, "the connection for queries cannot be made");
    }
    set_limits(q->db);
    sqlite3_db_config(q->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_db_config(q->db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
    sqlite3_db_config(q->db, SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0, NULL);
    sqlite3_set_authorizer(q->db, authorize, q);
    *out_query = q;
    return 0;
}

void query_close(struct query_db *q)
{
    if (!q)
        return;
    sqlite3_close(q->db);
    if (q->statm >= 0)
        close(q->statm);
    free(q);
}

/* ---- what it gives --------------------------------------------------------------------------- */

/* A copy that is UTF-8 without control characters, at most n_max bytes. */
static char *clean_text(struct arena *a, const char *text, size_t n, size_t n_max, bool has_lines)
{
    if (n > n_max)
        n = n_max;
    while (n && n == n_max && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--; /* not within a character */
    char *copy = arena_alloc(a, n + 1);
    memcpy(copy, text, n);
    for (size_t i = 0; i < n; i++)
        if (iscntrl((unsigned char)copy[i]) && !(has_lines && strchr("\n\r\t", copy[i])))
            copy[i] = copy[i] && strchr("\n\r\t", copy[i]) ? ' ' : '?';
    if (!check_is_lines(copy, n_max))
        for (size_t i = 0; i < n; i++)
            if ((unsigned char)copy[i] >= 0x80)
                copy[i] = '?';
    return copy;
}

static char *blob_text(struct arena *a, const uint8_t *bytes, size_t n)
{
    size_t n_shown = n < SQL_CELL_BYTES_MAX / 2 - 8 ? n : SQL_CELL_BYTES_MAX / 2 - 8;
    char *text = arena_alloc(a, 2 * n_shown + 4), *at = text + 2;
    memcpy(text, "x'", 2);
    for (size_t i = 0; i < n_shown; i++)
        at += sprintf(at, "%02x", bytes[i]);
    *at = '\'';
    return text;
}

static void add_row(struct store_read *r, sqlite3_stmt *s)
{
    Ballast__DbRow *row = arena_alloc(&r->arena, sizeof *row);
    int n = sqlite3_column_count(s);
    ballast__db_row__init(row);
    row->n_cells = row->n_is_null = (size_t)n;
    row->cells = arena_alloc(&r->arena, (size_t)n * sizeof *row->cells);
    row->is_null = arena_alloc(&r->arena, (size_t)n * sizeof *row->is_null);
    for (int i = 0; i < n; i++) {
        int type = sqlite3_column_type(s, i);
        double x = type == SQLITE_FLOAT ? sqlite3_column_double(s, i) : 0;
        char number[NUMBER_TEXT_BYTES];
        const char *text = type == SQLITE_BLOB ? NULL : (const char *)sqlite3_column_text(s, i);
        if (type == SQLITE_FLOAT && isfinite(x)) { /* SQLite's own text has 15 digits */
            text_shortest(x, number);
            text = number;
        }
        row->is_null[i] = type == SQLITE_NULL;
        if (type == SQLITE_BLOB)
            row->cells[i] = blob_text(&r->arena, sqlite3_column_blob(s, i),
                                      (size_t)sqlite3_column_bytes(s, i));
        else
            row->cells[i] = text ? clean_text(&r->arena, text, strlen(text), SQL_CELL_BYTES_MAX,
                                              true) : arena_strdup(&r->arena, "");
    }
    PUSH(&r->arena, r->rows, r->n_rows, row);
}

/* ---- running --------------------------------------------------------------------------------- */

static int failed(struct query_db *q, struct store_read *r)
{
    if (q->stopped == STOP_TIME)
        return err_set(&r->err, -ETIMEDOUT, "the query took longer than %d s: ask for less, as "
                       "with WHERE job = ... or a GROUP BY over fewer rows",
                       (int)(q->limit_ns / NS_PER_S));
    if (q->stopped == STOP_MEMORY || sqlite3_errcode(q->db) == SQLITE_NOMEM)
        return err_set(&r->err, -ENOMEM, "the query needed more than %d MiB of memory: ask for "
                       "less", MEMORY_BYTES >> 20);
    if (*q->denied)
        return err_set(&r->err, -EINVAL, "%s is not allowed: one SELECT that only reads",
                       q->denied);
    const char *text = sqlite3_errmsg(q->db);
    const char *tables = strncmp(text, "no such table", 13) ? "" : "; there are jobs, attempts, "
                         "events, workers, plans, placements, steps, load_windows, expert_load";
    return err_set(&r->err, -EINVAL, "%s%s",
                   clean_text(&r->arena, text, strlen(text), REASON_BYTES_MAX, false), tables);
}

static bool is_blank(const char *text)
{
    while (isspace((unsigned char)*text) || *text == ';')
        text++;
    return !*text;
}

static int prepare(struct query_db *q, struct store_read *r, sqlite3_stmt **out_statement)
{
    const char *rest;
    if (sqlite3_prepare_v2(q->db, r->sql, -1, out_statement, &rest) != SQLITE_OK)
        return failed(q, r);
    if (!*out_statement)
        return err_set(&r->err, -EINVAL, "there is no statement");
    if (!is_blank(rest))
        return err_set(&r->err, -EINVAL, "one statement at a time: what follows the first ';' is "
                       "not run");
    if (!sqlite3_stmt_readonly(*out_statement) || !sqlite3_column_count(*out_statement))
        return err_set(&r->err, -EINVAL, "this statement is not allowed: one SELECT that only "
                       "reads");
    return 0;
}

static int collect(struct query_db *q, struct store_read *r, sqlite3_stmt *s)
{
    for (int i = 0; i < sqlite3_column_count(s); i++) {
        const char *name = sqlite3_column_name(s, i);
        char *copy = clean_text(&r->arena, name ? name : "", name ? strlen(name) : 0,
                                NAME_BYTES_MAX, false);
        PUSH(&r->arena, r->columns, r->n_columns, copy);
    }
    size_t used = r->arena.used_bytes;
    for (;;) {
        int rc = sqlite3_step(s);
        if (rc == SQLITE_DONE)
            return 0;
        if (rc != SQLITE_ROW)
            return failed(q, r);
        if (r->n_rows == r->limit) {
            r->is_truncated = true;
            return 0;
        }
        add_row(r, s);
        if (r->arena.used_bytes - used > REPLY_BYTES) { /* this row was too much */
            r->n_rows--;
            r->is_truncated = true;
            return 0;
        }
    }
}

int query_run(struct query_db *q, struct store_read *r)
{
    sqlite3_stmt *s = NULL;
    q->limit_ns = r->limit_ns ? r->limit_ns : TIME_NS;
    q->deadline_ns = clock_now_ns() + q->limit_ns;
    q->look_ns = 0;
    q->memory_max = resident_bytes(q) + MEMORY_BYTES;
    q->stopped = STOP_NOT;
    q->denied[0] = 0;
    watch(q, true);
    int rc = prepare(q, r, &s);
    if (rc == 0)
        rc = collect(q, r, s);
    sqlite3_finalize(s);
    watch(q, false);
    if (rc < 0)
        r->n_rows = r->n_columns = 0;
    return rc;
}
