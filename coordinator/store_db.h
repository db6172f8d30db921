/* store_db.h - one SQLite file: opened for good, checked, brought to our version
 *
 * For the store's own files only. One connection per file, in exclusive mode: SQLite 3.40's WAL
 * has a race that needs two. */
#ifndef COORDINATOR_STORE_DB_H
#define COORDINATOR_STORE_DB_H

#include <sqlite3.h>

#include "common/err.h"
#include "common/types.h"
#include "coordinator/store_schema.h"

/* WAL; FULL: a commit survives power loss; NORMAL: a process crash only. Creates the file,
 * migrates an older one after copying it to PATH.v<version>.backup, refuses a newer or foreign
 * one. Gives *out_db, ended with db_close. */
int  db_open(const char *path, const struct schema *schema, bool is_full, sqlite3 **out_db,
             struct err *err);
void db_close(sqlite3 *db);

/* 0, or the negative errno that fits, with what the statement was for. */
int db_exec(sqlite3 *db, const char *sql, struct err *err);
int db_prepare(sqlite3 *db, const char *sql, sqlite3_stmt **out_statement, struct err *err);

/* Steps a statement that gives no row, and resets it. */
int db_run(sqlite3_stmt *s, struct err *err);
/* 1: a row is there; 0: no more, and it was reset; negative: failed, and it was reset. */
int db_next(sqlite3_stmt *s, struct err *err);

/* Moves the WAL's pages into the file; never waits. */
void db_checkpoint(sqlite3 *db);

#endif
