/* store_vtab.c - the tables that a query sees: windows onto those of the two files
 *
 * A table is a row of a list: its columns, and where they come from. Conditions on plain columns
 * are handed down into the statement on the file, so that its indexes serve them. expert_load also
 * unpacks each row of counts into one row per expert. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/store_counts.h"
#include "coordinator/store_query.h"

/* ---- the tables ------------------------------------------------------------------------------ */

struct column {
    const char *name, *type;
    const char *expr;   /* NULL: the name. Conditions on an expression stay outside, but */
    const char *equal;  /* this one stands for column = ? */
    bool        is_key; /* an index serves it */
};

#define KEY(NAME, TYPE)        {NAME, TYPE, NULL, NULL, true}
#define COLUMN(NAME, TYPE)     {NAME, TYPE, NULL, NULL, false}
#define EXPR(NAME, TYPE, TEXT) {NAME, TYPE, TEXT, NULL, false}
#define SECONDS "CASE level WHEN 1 THEN 10 WHEN 2 THEN 60 WHEN 3 THEN 3600 ELSE 0 END"

static const struct column jobs[] = {
    KEY("id", "INTEGER"), COLUMN("name", "TEXT"), COLUMN("user", "TEXT"),
    COLUMN("state", "TEXT"), COLUMN("reason", "TEXT"), COLUMN("priority", "INTEGER"),
    COLUMN("gang_size", "INTEGER"), COLUMN("attempt", "INTEGER"), COLUMN("step", "INTEGER"),
    COLUMN("checkpoint_step", "INTEGER"), COLUMN("steps", "INTEGER"),
    COLUMN("n_restarts", "INTEGER"), COLUMN("held", "INTEGER"),
    COLUMN("rebalance_auto", "INTEGER"), COLUMN("submitted_at_ns", "INTEGER"),
    COLUMN("started_at_ns", "INTEGER"), COLUMN("ended_at_ns", "INTEGER"), COLUMN("exit", "TEXT"),
    COLUMN("workers", "TEXT"),
};
static const struct column attempts[] = {
    KEY("job", "INTEGER"), KEY("attempt", "INTEGER"), COLUMN("workers", "TEXT"),
    COLUMN("assigned_at_ns", "INTEGER"), COLUMN("ended_at_ns", "INTEGER"),
    COLUMN("reason", "TEXT"),
};
static const struct column events[] = {
    KEY("seq", "INTEGER"), COLUMN("at_ns", "INTEGER"), KEY("job", "INTEGER"),
    COLUMN("worker", "TEXT"), COLUMN("kind", "TEXT"), COLUMN("text", "TEXT"),
};
static const struct column workers[] = {
    KEY("name", "TEXT"), COLUMN("node", "TEXT"), COLUMN("state", "TEXT"),
    COLUMN("drained", "INTEGER"), COLUMN("reason", "TEXT"), COLUMN("changed_at_ns", "INTEGER"),
};
static const struct column plans[] = {
    KEY("job", "INTEGER"), KEY("epoch", "INTEGER"), COLUMN("base_epoch", "INTEGER"),
    COLUMN("state", "TEXT"), COLUMN("proposed_at_ns", "INTEGER"),
    COLUMN("ended_at_ns", "INTEGER"), COLUMN("at_step", "INTEGER"),
    COLUMN("automatic", "INTEGER"), COLUMN("cause", "TEXT"), COLUMN("n_moves", "INTEGER"),
    COLUMN("bytes", "INTEGER"), COLUMN("predicted_gain_s", "REAL"),
    COLUMN("predicted_cost_s", "REAL"), COLUMN("imbalance_before", "REAL"),
    COLUMN("imbalance_predicted", "REAL"), COLUMN("reason", "TEXT"),
    COLUMN("n_stages", "INTEGER"),
};
static const struct column placements[] = {
    KEY("job", "INTEGER"), KEY("epoch", "INTEGER"), COLUMN("placed_at_ns", "INTEGER"),
    COLUMN("at_step", "INTEGER"), COLUMN("n_moves", "INTEGER"), COLUMN("bytes", "INTEGER"),
    COLUMN("pause_s", "REAL"), COLUMN("imbalance_before", "REAL"),
    COLUMN("imbalance_predicted", "REAL"), COLUMN("imbalance_after", "REAL"),
    COLUMN("realised_gain_s", "REAL"),
};
static const struct column steps[] = {
    KEY("job", "INTEGER"), KEY("step", "INTEGER"), COLUMN("attempt", "INTEGER"),
    COLUMN("at_ns", "INTEGER"), COLUMN("loss", "REAL"), COLUMN("validation_loss", "REAL"),
    COLUMN("grad_norm", "REAL"), COLUMN("lr", "REAL"), COLUMN("tokens_per_second", "REAL"),
    COLUMN("mfu", "REAL"), COLUMN("memory_bytes", "INTEGER"), COLUMN("imbalance", "REAL"),
    COLUMN("phases", "TEXT"), COLUMN("aux_loss", "REAL"), COLUMN("z_loss", "REAL"),
    COLUMN("rerouted", "INTEGER"), COLUMN("dropped", "INTEGER"),
    COLUMN("index_loss", "REAL"), COLUMN("skipped", "INTEGER"),
    COLUMN("memory_planned_bytes", "INTEGER"), COLUMN("samples", "INTEGER"),
    COLUMN("epoch_samples", "INTEGER"),
};
static const struct column load_windows[] = {
    KEY("job", "INTEGER"), EXPR("seconds", "INTEGER", SECONDS), COLUMN("at_ns", "INTEGER"),
    COLUMN("first_step", "INTEGER"), COLUMN("last_step", "INTEGER"),
    COLUMN("n_steps", "INTEGER"), COLUMN("n_reports", "INTEGER"), COLUMN("attempt", "INTEGER"),
    COLUMN("placement_epoch", "INTEGER"), COLUMN("n_experts", "INTEGER"),
    COLUMN("device_imbalance", "REAL"),
};

/* The last three are unpacked; what they are unpacked from follows in the statement. */
enum { LOAD_NODE = 8, LOAD_EXPERT, LOAD_TOKENS };
static const struct column expert_load[] = {
    KEY("job", "INTEGER"),
    {"layer", "INTEGER", "c.key & 1023", "c.key = w.id * 1024 + ?", true},
    {"window_start_step", "INTEGER", "w.first_step", "w.first_step = ?", false},
    {"window_end_step", "INTEGER", "w.last_step", "w.last_step = ?", false},
    EXPR("at", "TEXT", "strftime('%Y-%m-%dT%H:%M:%fZ', w.at_ns / 1e9, 'unixepoch')"),
    EXPR("seconds", "INTEGER", SECONDS), EXPR("placement_epoch", "INTEGER", "w.placement_epoch"),
    EXPR("attempt", "INTEGER", "w.attempt"),
    EXPR("node", "INTEGER", "w.n_nodes"), EXPR("expert", "INTEGER", "w.n_experts"),
    EXPR("tokens", "INTEGER", "c.width"),
};

#define N_OF(ARRAY) (sizeof(ARRAY) / sizeof(ARRAY)[0])
#define TABLE(NAME, SOURCE, IS_STATS, ROWS)                                                    \
    {#NAME, SOURCE, NAME, N_OF(NAME), IS_STATS, false, ROWS}

struct table {
    const char *name, *source; /* FROM ... WHERE a condition */
    const struct column *columns;
    size_t n_columns;
    bool   is_stats, is_unpacked;
    double n_rows; /* a guess, for the order of joins */
};
static const struct table tables[] = {
    TABLE(jobs, "jobs WHERE 1", false, 1e4),
    TABLE(attempts, "attempts WHERE 1", false, 2e4),
    TABLE(events, "events WHERE 1", false, 1e6),
    TABLE(workers, "workers WHERE 1", false, 1e3),
    TABLE(plans, "plans WHERE 1", false, 1e4),
    TABLE(placements, "placements WHERE 1", false, 1e4),
    TABLE(steps, "steps WHERE 1", true, 1e6),
    TABLE(load_windows, "load_windows WHERE is_cover = 1", true, 1e4),
    {"expert_load", "load_windows w JOIN load_counts c ON c.key >= w.id * 1024 AND "
     "c.key < (w.id + 1) * 1024 WHERE w.is_cover = 1", expert_load, N_OF(expert_load), true, true,
     1e8},
};

/* What a module knows: its table, and the file's connection. */
struct window {
    const struct table *table;
    sqlite3 *db; /* borrowed */
};

struct connected {
    sqlite3_vtab base;
    const struct window *window;
};

struct cursor {
    sqlite3_vtab_cursor base;
    sqlite3_stmt *s;
    sqlite3_int64 row;
    bool     is_over;
    size_t   i, n, n_experts; /* unpacked: the count shown, of how many */
    uint32_t width;
    bool     has_nodes;
    int64_t  expert;          /* the only one wanted, or -1 */
};

/* ---- opening --------------------------------------------------------------------------------- */

static int on_connect(sqlite3 *db, void *context, int n_args, const char *const *args,
                      sqlite3_vtab **out_table, char **out_error)
{
    const struct window *w = context;
    sqlite3_str *text = sqlite3_str_new(db);
    (void)n_args;
    (void)args;
    (void)out_error;
    sqlite3_str_appendall(text, "CREATE TABLE x (");
    for (size_t i = 0; i < w->table->n_columns; i++)
        sqlite3_str_appendf(text, "%s\"%w\" %s", i ? ", " : "", w->table->columns[i].name,
                            w->table->columns[i].type);
    sqlite3_str_appendall(text, ")");
    char *sql = sqlite3_str_finish(text);
    int rc = sql ? sqlite3_declare_vtab(db, sql) : SQLITE_NOMEM;
    sqlite3_free(sql);
    if (rc != SQLITE_OK)
        return rc;
    struct connected *c = xcalloc(1, sizeof *c);
    c->window = w;
    *out_table = &c->base;
    return SQLITE_OK;
}

static int on_disconnect(sqlite3_vtab *table)
{
    free(table);
    return SQLITE_OK;
}

/* ---- which conditions the file's statement takes over ---------------------------------------- */

static const char *operator_of(unsigned char op)
{
    switch (op) {
    case SQLITE_INDEX_CONSTRAINT_EQ: return "=";
    case SQLITE_INDEX_CONSTRAINT_GT: return ">";
    case SQLITE_INDEX_CONSTRAINT_GE: return ">=";
    case SQLITE_INDEX_CONSTRAINT_LT: return "<";
    case SQLITE_INDEX_CONSTRAINT_LE: return "<=";
    default:                         return NULL;
    }
}

/* Appends the condition to text: true if it is taken. SQLite checks every row again, so a taken
 * condition may let too much through, never too little. */
static bool take_condition(const struct column *column, unsigned char op, sqlite3_str *text)
{
    const char *sign = operator_of(op);
    bool is_equal = op == SQLITE_INDEX_CONSTRAINT_EQ;
    if (!sign || (column->expr && !(is_equal && column->equal)))
        return false;
    if (column->equal && is_equal)
        sqlite3_str_appendf(text, " AND %s", column->equal);
    else
        sqlite3_str_appendf(text, " AND %s %s ?", column->name, sign);
    return true;
}

static int on_best_index(sqlite3_vtab *base, sqlite3_index_info *info)
{
    const struct table *t = ((struct connected *)base)->window->table;
    sqlite3_str *text = sqlite3_str_new(NULL);
    double n_rows = t->n_rows;
    int n_args = 0;
    info->idxNum = 0;
    for (int i = 0; t->is_unpacked && i < info->nConstraint; i++)
        if (info->aConstraint[i].usable && info->aConstraint[i].iColumn == LOAD_EXPERT &&
            info->aConstraint[i].op == SQLITE_INDEX_CONSTRAINT_EQ && !info->idxNum) {
            info->aConstraintUsage[i].argvIndex = ++n_args; /* the cursor's */
            info->idxNum = 1;
            n_rows /= 100;
        }
    for (int i = 0; i < info->nConstraint; i++) {
        int at = info->aConstraint[i].iColumn;
        if (!info->aConstraint[i].usable || at < 0 || info->aConstraintUsage[i].argvIndex ||
            sqlite3_stricmp(sqlite3_vtab_collation(info, i), "BINARY") ||
            !take_condition(&t->columns[at], info->aConstraint[i].op, text))
            continue;
        info->aConstraintUsage[i].argvIndex = ++n_args;
        bool is_equal = info->aConstraint[i].op == SQLITE_INDEX_CONSTRAINT_EQ;
        n_rows /= !t->columns[at].is_key ? 2 : is_equal ? 100 : 4;
    }
    info->idxStr = sqlite3_str_finish(text);
    info->needToFreeIdxStr = 1;
    info->estimatedRows = n_rows < 1 ? 1 : (sqlite3_int64)n_rows;
    info->estimatedCost = n_rows + 1;
    return SQLITE_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static int on_open(sqlite3_vtab *table, sqlite3_vtab_cursor **out_cursor)
{
    (void)table;
    struct cursor *c = xcalloc(1, sizeof *c);
    *out_cursor = &c->base;
    return SQLITE_OK;
}

static int on_close(sqlite3_vtab_cursor *base)
{
    struct cursor *c = (struct cursor *)base;
    sqlite3_finalize(c->s);
    free(c);
    return SQLITE_OK;
}

/* The first count of the row that is wanted: false if there is none. */
static bool unpack_row(struct cursor *c, int n_columns)
{
    int n_nodes = sqlite3_column_int(c->s, LOAD_NODE);
    c->n_experts = (size_t)sqlite3_column_int64(c->s, LOAD_EXPERT);
    c->width = (uint32_t)sqlite3_column_int(c->s, LOAD_TOKENS);
    c->has_nodes = n_nodes > 0;
    c->n = c->n_experts * (n_nodes ? (size_t)n_nodes : 1);
    c->i = c->expert > 0 ? (size_t)c->expert : 0;
    bool is_whole = (size_t)sqlite3_column_bytes(c->s, n_columns) == c->n * c->width;
    return is_whole && (c->expert < (int64_t)c->n_experts) && c->n;
}

static int on_next(sqlite3_vtab_cursor *base)
{
    struct cursor *c = (struct cursor *)base;
    const struct table *t = ((struct connected *)base->pVtab)->window->table;
    c->row++;
    if (t->is_unpacked && c->n) {
        c->i += c->expert < 0 ? 1 : c->n_experts;
        if (c->i < c->n)
            return SQLITE_OK;
    }
    for (;;) {
        int rc = sqlite3_step(c->s);
        c->is_over = rc != SQLITE_ROW;
        if (rc != SQLITE_ROW)
            return rc == SQLITE_DONE ? SQLITE_OK : rc;
        if (!t->is_unpacked || unpack_row(c, (int)t->n_columns))
            return SQLITE_OK;
    }
}

static char *statement_text(const struct table *t, const char *conditions)
{
    sqlite3_str *text = sqlite3_str_new(NULL);
    sqlite3_str_appendall(text, "SELECT ");
    for (size_t i = 0; i < t->n_columns; i++)
        sqlite3_str_appendf(text, "%s%s", i ? ", " : "",
                            t->columns[i].expr ? t->columns[i].expr : t->columns[i].name);
    sqlite3_str_appendf(text, "%s FROM %s%s", t->is_unpacked ? ", c.tokens" : "", t->source,
                        conditions);
    return sqlite3_str_finish(text);
}

static int on_filter(sqlite3_vtab_cursor *base, int has_expert, const char *conditions,
                     int n_args, sqlite3_value **args)
{
    struct cursor *c = (struct cursor *)base;
    const struct window *w = ((struct connected *)base->pVtab)->window;
    char *sql = statement_text(w->table, conditions ? conditions : "");
    sqlite3_finalize(c->s);
    *c = (struct cursor){.base = c->base, .expert = -1};
    int rc = sql ? sqlite3_prepare_v2(w->db, sql, -1, &c->s, NULL) : SQLITE_NOMEM;
    sqlite3_free(sql);
    if (rc != SQLITE_OK)
        return rc;
    if (has_expert) {
        c->expert = sqlite3_value_int64(args[0]);
        c->is_over = c->expert < 0;
    }
    for (int i = has_expert; i < n_args; i++)
        sqlite3_bind_value(c->s, i - has_expert + 1, args[i]);
    return c->is_over ? SQLITE_OK : on_next(base);
}

static int is_over(sqlite3_vtab_cursor *base)
{
    return ((struct cursor *)base)->is_over;
}

static int on_column(sqlite3_vtab_cursor *base, sqlite3_context *out, int column)
{
    struct cursor *c = (struct cursor *)base;
    const struct table *t = ((struct connected *)base->pVtab)->window->table;
    if (!t->is_unpacked || column < LOAD_NODE)
        sqlite3_result_value(out, sqlite3_column_value(c->s, column));
    else if (column == LOAD_NODE && c->has_nodes)
        sqlite3_result_int64(out, (sqlite3_int64)(c->i / c->n_experts));
    else if (column == LOAD_EXPERT)
        sqlite3_result_int64(out, (sqlite3_int64)(c->i % c->n_experts));
    else if (column == LOAD_TOKENS)
        sqlite3_result_int64(out, (sqlite3_int64)counts_at(
            sqlite3_column_blob(c->s, (int)t->n_columns), c->width, c->i));
    return SQLITE_OK;
}

static int on_rowid(sqlite3_vtab_cursor *base, sqlite3_int64 *out_row)
{
    *out_row = ((struct cursor *)base)->row;
    return SQLITE_OK;
}

/* Without xCreate a table is simply there, under its module's name; without xUpdate it is
 * read-only. */
static const sqlite3_module module = {
    .xConnect = on_connect, .xBestIndex = on_best_index, .xDisconnect = on_disconnect,
    .xOpen = on_open, .xClose = on_close, .xFilter = on_filter, .xNext = on_next, .xEof = is_over,
    .xColumn = on_column, .xRowid = on_rowid,
};

int vtab_register(sqlite3 *db, sqlite3 *state, sqlite3 *stats)
{
    for (size_t i = 0; i < N_OF(tables); i++) {
        struct window *w = xcalloc(1, sizeof *w);
        w->table = &tables[i];
        w->db = tables[i].is_stats ? stats : state;
        if (sqlite3_create_module_v2(db, tables[i].name, &module, w, free) != SQLITE_OK)
            return -1; /* and w was freed */
        /* Connected now: later the authorizer would see it declare its columns. */
        char *sql = xasprintf("SELECT 1 FROM %s WHERE 0", tables[i].name);
        int rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
        free(sql);
        if (rc != SQLITE_OK)
            return -1;
    }
    return 0;
}
