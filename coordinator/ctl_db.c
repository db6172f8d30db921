/* ctl_db.c - people's SQL over what the coordinator stores, and a copy of it */
#include "coordinator/ctl.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BACKUP_TIMEOUT_MS (9u * 60 * 1000)

/* ---- query ----------------------------------------------------------------------------------- */

/* As JSON writes numbers: a text like 007 or 1e stays a text. */
static bool is_number(const char *text)
{
    const char *digits = text + (*text == '-');
    if (!isdigit((unsigned char)*digits) || (*digits == '0' && isdigit((unsigned char)digits[1])))
        return false;
    char *end;
    strtod(text, &end);
    return !*end && !strpbrk(text, "xXnNiI");
}

static struct json *cell_json(const Ballast__DbRow *row, size_t i)
{
    const char *text = row->cells[i];
    if (i < row->n_is_null && row->is_null[i])
        return NULL;
    if (!is_number(text))
        return json_new_string(text);
    char *end;
    errno = 0;
    long long whole = strtoll(text, &end, 10);
    return !*end && !errno ? json_new_i64(whole) : json_new_double(strtod(text, NULL));
}

/* A column whose name another before it has is name_2: an object has each key once. */
static const char *name_of(struct arena *a, const Ballast__DbQueryReply *r, size_t column)
{
    size_t n_before = 0;
    for (size_t i = 0; i < column; i++)
        n_before += !strcmp(r->columns[i], r->columns[column]);
    return n_before ? arena_printf(a, "%s_%zu", r->columns[column], n_before + 1)
                    : r->columns[column];
}

static void show_json(struct ctl *c, const Ballast__DbQueryReply *r)
{
    struct json *items = json_new_array();
    const char **names = xcalloc(r->n_columns + 1, sizeof *names);
    for (size_t k = 0; k < r->n_columns; k++)
        names[k] = name_of(&c->arena, r, k);
    for (size_t i = 0; i < r->n_rows; i++) {
        struct json *o = json_new_object();
        for (size_t k = 0; k < r->n_columns && k < r->rows[i]->n_cells; k++)
            json_put(o, names[k], cell_json(r->rows[i], k));
        json_push(items, o);
    }
    free(names);
    ctl_json_list(c, "RowList", 0, r->truncated, items);
}

/* To a terminal, where a cell could steer it, without control characters. */
static void print_csv_cell(const char *text, bool is_last)
{
    if (isatty(STDOUT_FILENO)) {
        ctl_print_escaped(stdout, text, strlen(text), false);
        fputs(is_last ? "\n" : ",", stdout);
        return;
    }
    if (strpbrk(text, ",\"\n\r")) {
        putchar('"');
        for (const char *at = text; *at; at++) {
            if (*at == '"')
                putchar('"');
            putchar(*at);
        }
        putchar('"');
    } else {
        fputs(text, stdout);
    }
    fputs(is_last ? "\n" : ",", stdout);
}

static void show_csv(const struct ctl *c, const Ballast__DbQueryReply *r)
{
    for (size_t k = 0; !c->no_header && k < r->n_columns; k++)
        print_csv_cell(r->columns[k], k + 1 == r->n_columns);
    for (size_t i = 0; i < r->n_rows; i++)
        for (size_t k = 0; k < r->rows[i]->n_cells; k++)
            print_csv_cell(r->rows[i]->cells[k], k + 1 == r->rows[i]->n_cells);
}

static bool is_number_column(const Ballast__DbQueryReply *r, size_t k)
{
    for (size_t i = 0; i < r->n_rows; i++)
        if (*r->rows[i]->cells[k] && !is_number(r->rows[i]->cells[k]))
            return false;
    return r->n_rows > 0;
}

static void show_rows(const struct ctl *c, const Ballast__DbQueryReply *r)
{
    struct ctl_column *columns = xcalloc(r->n_columns + 1, sizeof *columns);
    for (size_t k = 0; k < r->n_columns; k++)
        columns[k] = (struct ctl_column){r->columns[k], is_number_column(r, k)};
    struct ctl_table t = {.columns = columns, .n_columns = r->n_columns};
    for (size_t i = 0; i < r->n_rows; i++)
        for (size_t k = 0; k < r->n_columns; k++)
            ctl_table_cell(&t, "%s", r->rows[i]->cells[k]);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
    free(columns);
}

/* Every row as wide as the head. */
static bool is_whole(const Ballast__DbQueryReply *r)
{
    for (size_t i = 0; i < r->n_rows; i++)
        if (r->rows[i]->n_cells != r->n_columns)
            return false;
    return true;
}

int ctl_db_query(struct ctl *c)
{
    Ballast__DbQueryRequest request = BALLAST__DB_QUERY_REQUEST__INIT;
    const ProtobufCMessage *message;
    if (c->csv && ctl_is_json(c))
        return ctl_fail(c, CTL_USAGE, "--csv and --json exclude each other");
    request.sql = c->args[0];
    request.limit_rows = (uint32_t)(c->count < SQL_ROWS_MAX ? c->count : SQL_ROWS_MAX);
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_DB_QUERY, &request.base, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__DbQueryReply *r = (const Ballast__DbQueryReply *)message;
    if (!is_whole(r))
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer has rows of different widths");
    if (ctl_is_json(c))
        show_json(c, r);
    else if (c->csv)
        show_csv(c, r);
    else
        show_rows(c, r);
    if (r->truncated)
        ctl_hint(c, "only the first %zu rows; -c N gives more, up to %u", r->n_rows,
                 SQL_ROWS_MAX);
    return CTL_OK;
}

/* ---- backup ---------------------------------------------------------------------------------- */

int ctl_db_backup(struct ctl *c)
{
    Ballast__DbBackupRequest request = BALLAST__DB_BACKUP_REQUEST__INIT;
    const ProtobufCMessage *message;
    char *folder = c->args[0][0] == '/' ? NULL : getcwd(NULL, 0);
    char *path = xasprintf("%s%s%s", folder ? folder : "", folder ? "/" : "", c->args[0]);
    free(folder);
    request.path = path;
    c->timeout_ms = c->timeout_ms ? c->timeout_ms : BACKUP_TIMEOUT_MS;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_DB_BACKUP, &request.base, &message);
    free(path);
    if (rc != CTL_OK)
        return rc;
    const Ballast__DbBackupReply *r = (const Ballast__DbBackupReply *)message;
    if (ctl_is_json(c)) {
        struct json *o = json_new_object();
        json_put(o, "path", json_new_string(r->path));
        json_put(o, "bytes", json_new_u64(r->bytes));
        ctl_json_one(c, "Backup", 0, o);
        return CTL_OK;
    }
    ctl_print_escaped(stdout, r->path, strlen(r->path), false);
    putchar('\n');
    ctl_hint(c, "%" PRIu64 " bytes, checked; to restore, put it in an empty state_dir as state.db",
             r->bytes);
    return CTL_OK;
}
