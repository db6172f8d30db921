/* store_query.h - people's SELECT over both databases, read-only by construction
 *
 * The statements run on a connection of their own, an empty database in memory, in which every
 * table that people may see is a virtual one; those read the two files through the writer's own
 * connections, because the files admit no other. So a query can neither name nor change anything
 * else, and one statement joins jobs with expert_load although the files are two. */
#ifndef COORDINATOR_STORE_QUERY_H
#define COORDINATOR_STORE_QUERY_H

#include <sqlite3.h>

#include "common/err.h"

struct store_tables;
struct store_read;
struct query_db;

/* Borrows t's connections until query_close. */
int  query_open(struct store_tables *t, struct query_db **out_query, struct err *err);
void query_close(struct query_db *q);

/* Runs r->sql: fills columns and rows, at most r->limit. -EINVAL: not one SELECT that is allowed;
 * -ETIMEDOUT, -ENOMEM: it needed too much. */
int query_run(struct query_db *q, struct store_read *r);

/* ---- store_vtab.c: the tables ---------------------------------------------------------------- */

/* Makes them known to db; 0 or -1. state and stats are borrowed. */
int vtab_register(sqlite3 *db, sqlite3 *state, sqlite3 *stats);

#endif
