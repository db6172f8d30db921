/* store_db.c - opens, checks and migrates one file; foreign codes become errno here */
#include "coordinator/store_db.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/mem.h"

#define STATEMENT_BYTES_MAX (1 << 20)
#define BLOB_BYTES_MAX      (64 << 20)

static int db_error(sqlite3 *db, const char *doing, struct err *err)
{
    static const struct {
        int sqlite, code;
    } codes[] = {
        {SQLITE_FULL, -ENOSPC},     {SQLITE_BUSY, -EBUSY},       {SQLITE_LOCKED, -EBUSY},
        {SQLITE_CORRUPT, -EBADMSG}, {SQLITE_NOTADB, -EBADMSG},   {SQLITE_READONLY, -EROFS},
        {SQLITE_PERM, -EACCES},     {SQLITE_CONSTRAINT, -EPROTO}, {SQLITE_CANTOPEN, -ENOENT},
        {SQLITE_INTERRUPT, -ETIME},
    };
    int code = -EIO;
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        if (sqlite3_errcode(db) == codes[i].sqlite)
            code = codes[i].code;
    const char *path = sqlite3_db_filename(db, "main");
    if (code == -EBADMSG && path)
        return err_set(err, code, "%s: is damaged, or no SQLite database: put a backup in its "
                       "place, or move it away to begin without what it held", path);
    return err_set(err, code, "%s: %s: %s (SQLite %d)", path ? path : "database", doing,
                   sqlite3_errmsg(db), sqlite3_extended_errcode(db));
}

int db_exec(sqlite3 *db, const char *sql, struct err *err)
{
    if (sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK)
        return 0;
    char doing[64];
    snprintf(doing, sizeof doing, "%.60s", sql);
    return db_error(db, doing, err);
}

int db_prepare(sqlite3 *db, const char *sql, sqlite3_stmt **out_statement, struct err *err)
{
    if (sqlite3_prepare_v3(db, sql, -1, SQLITE_PREPARE_PERSISTENT, out_statement, NULL) ==
        SQLITE_OK)
        return 0;
    return db_error(db, sql, err);
}

int db_next(sqlite3_stmt *s, struct err *err)
{
    int rc = sqlite3_step(s);
    if (rc == SQLITE_ROW)
        return 1;
    int failed = 0;
    if (rc != SQLITE_DONE)
        failed = db_error(sqlite3_db_handle(s), sqlite3_sql(s), err);
    sqlite3_reset(s);
    return failed;
}

int db_run(sqlite3_stmt *s, struct err *err)
{
    int rc = db_next(s, err);
    if (rc > 0)
        sqlite3_reset(s);
    return rc < 0 ? rc : 0;
}

void db_checkpoint(sqlite3 *db)
{
    sqlite3_wal_checkpoint_v2(db, NULL, SQLITE_CHECKPOINT_PASSIVE, NULL, NULL);
}

static int read_pragma(sqlite3 *db, const char *sql, int64_t *out_value, struct err *err)
{
    sqlite3_stmt *s;
    int rc = db_prepare(db, sql, &s, err);
    if (rc < 0)
        return rc;
    if ((rc = db_next(s, err)) > 0)
        *out_value = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    return rc < 0 ? rc : 0;
}

static int write_pragma(sqlite3 *db, const char *name, uint32_t value, struct err *err)
{
    char sql[96];
    snprintf(sql, sizeof sql, "PRAGMA %s = %u", name, value);
    return db_exec(db, sql, err);
}

/* A whole copy, checked and on the disk before it gets its name. */
static int back_up(sqlite3 *db, const char *path, int64_t version, struct err *err)
{
    char *name = xasprintf("%s.v%d.backup", path, (int)version);
    char *part = xasprintf("%s.part", name);
    sqlite3 *copy = NULL;
    int rc = 0;
    unlink(part);
    if (sqlite3_open_v2(part, &copy, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, NULL)) {
        rc = db_error(copy, "backup", err);
    } else {
        sqlite3_backup *b = sqlite3_backup_init(copy, "main", db, "main");
        if (b)
            sqlite3_backup_step(b, -1);
        if (!b || sqlite3_backup_finish(b) != SQLITE_OK)
            rc = db_error(copy, "backup", err);
    }
    sqlite3_close(copy);
    if (rc == 0 && rename(part, name))
        rc = err_set(err, -errno, "%s: cannot rename to %s: %s", part, name, strerror(errno));
    free(part);
    free(name);
    return rc;
}

static int run_step(sqlite3 *db, const struct schema *schema, uint32_t step, struct err *err)
{
    int rc;
    if ((rc = db_exec(db, "BEGIN IMMEDIATE", err)) < 0)
        return rc;
    if ((rc = db_exec(db, schema->steps[step], err)) < 0 ||
        (rc = write_pragma(db, "application_id", schema->application_id, err)) < 0 ||
        (rc = write_pragma(db, "user_version", step + 1, err)) < 0 ||
        (rc = db_exec(db, "COMMIT", err)) < 0) {
        sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
        return rc;
    }
    return 0;
}

/* A table that others refer to may be made anew in a step, so the references are looked at when all
 * is done. */
static int run_steps(sqlite3 *db, const char *path, const struct schema *schema, uint32_t version,
                     struct err *err)
{
    int64_t n_dangling = 0;
    int rc = db_exec(db, "PRAGMA foreign_keys = OFF", err);
    for (uint32_t step = version; rc == 0 && step < schema->n_steps; step++)
        rc = run_step(db, schema, step, err);
    if (rc == 0)
        rc = read_pragma(db, "SELECT count(*) FROM pragma_foreign_key_check", &n_dangling, err);
    if (rc == 0 && n_dangling)
        rc = err_set(err, -EPROTO, "%s: %d rows refer to what is not there: start from the backup "
                     "made when it was upgraded", path, (int)n_dangling);
    return rc < 0 ? rc : db_exec(db, "PRAGMA foreign_keys = ON", err);
}

static int migrate(sqlite3 *db, const char *path, const struct schema *schema, struct err *err)
{
    int64_t application = 0, version = 0, n_tables = 0;
    int rc;
    if ((rc = read_pragma(db, "PRAGMA application_id", &application, err)) < 0 ||
        (rc = read_pragma(db, "PRAGMA user_version", &version, err)) < 0 ||
        (rc = read_pragma(db, "SELECT count(*) FROM sqlite_schema", &n_tables, err)) < 0)
        return rc;
    bool is_new = !application && !version && !n_tables;
    if (!is_new && (uint32_t)application != schema->application_id)
        return err_set(err, -EBADMSG, "%s: not a %s database of ballast (application id 0x%x, "
                       "expected 0x%x)", path, schema->name, (unsigned)application,
                       schema->application_id);
    if (version > schema->n_steps)
        return err_set(err, -EPROTO, "%s: written by a newer ballast (version %d, this one knows "
                       "%u): run that one, or start from the backup made when it was upgraded",
                       path, (int)version, schema->n_steps);
    if (version == schema->n_steps)
        return 0;
    if (!is_new && (rc = back_up(db, path, version, err)) < 0)
        return rc;
    return run_steps(db, path, schema, (uint32_t)version, err);
}

static int configure(sqlite3 *db, bool is_full, struct err *err)
{
    sqlite3_limit(db, SQLITE_LIMIT_SQL_LENGTH, STATEMENT_BYTES_MAX);
    sqlite3_limit(db, SQLITE_LIMIT_LENGTH, BLOB_BYTES_MAX);
    sqlite3_limit(db, SQLITE_LIMIT_ATTACHED, 0);
    sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
    /* The exclusive mode comes before WAL, so that no shared memory file is ever made. */
    int rc = db_exec(db,
                     "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL;"
                     "PRAGMA cell_size_check = ON; PRAGMA foreign_keys = ON; PRAGMA mmap_size = 0;"
                     "PRAGMA temp_store = MEMORY; PRAGMA wal_autocheckpoint = 0;"
                     "PRAGMA journal_size_limit = 67108864; PRAGMA cache_size = -16384;", err);
    return rc < 0 ? rc : db_exec(db, is_full ? "PRAGMA synchronous = FULL"
                                             : "PRAGMA synchronous = NORMAL", err);
}

int db_open(const char *path, const struct schema *schema, bool is_full, sqlite3 **out_db,
            struct err *err)
{
    sqlite3 *db = NULL;
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX |
                SQLITE_OPEN_NOFOLLOW;
    int rc = 0;
    if (sqlite3_open_v2(path, &db, flags, NULL) != SQLITE_OK) {
        rc = err_set(err, -ENOENT, "%s: cannot be opened: %s", path, sqlite3_errmsg(db));
    } else {
        sqlite3_extended_result_codes(db, 0);
        sqlite3_busy_timeout(db, 100);
        if ((rc = configure(db, is_full, err)) == 0)
            rc = migrate(db, path, schema, err);
    }
    if (rc == -EBUSY)
        rc = err_set(err, rc, "%s: another process has it open: a second coordinator, or an "
                     "sqlite3 shell", path);
    if (rc < 0) {
        sqlite3_close(db);
        return rc;
    }
    *out_db = db;
    return 0;
}

void db_close(sqlite3 *db)
{
    if (!db)
        return;
    for (sqlite3_stmt *s; (s = sqlite3_next_stmt(db, NULL));)
        sqlite3_finalize(s);
    sqlite3_close(db); /* the last close checkpoints and removes the WAL */
}
