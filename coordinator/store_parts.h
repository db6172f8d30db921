/* store_parts.h - what the parts of the store share: both connections and their statements
 *
 * Used by one thread at a time. */
#ifndef COORDINATOR_STORE_PARTS_H
#define COORDINATOR_STORE_PARTS_H

#include "coordinator/store.h"
#include "coordinator/store_db.h"
#include "coordinator/store_query.h"

/* Of jobs and records, in the order in which they are read. */
#define JOB_COLUMNS                                                                            \
    "id, name, user, state, reason, priority, gang_size, attempt, step, checkpoint_step, "     \
    "steps, n_restarts, held, submitted_at_ns, started_at_ns, ended_at_ns, exit, workers"
/* The body of those that tell a step. */
#define EVENT_COLUMNS "seq, at_ns, job, worker, kind, text, " \
    "CASE WHEN kind IN ('JOB_RUNNING', 'JOB_CHECKPOINT') THEN body END"

enum statement {
    /* state */
    S_BEGIN, S_COMMIT, S_ROLLBACK,
    S_RECORD, S_JOB_NEW, S_JOB_ASSIGNED, S_JOB_STATE, S_JOB_PROGRESS, S_JOB_HELD,
    S_JOB_AUTO, S_JOB_PRIORITY,
    S_PLAN_NEW, S_PLAN_END, S_PLANS_VOID, S_PLACEMENT_NEW, S_PLACEMENT_REALISED,
    S_ATTEMPT_NEW, S_ATTEMPT_END, S_WORKER, S_KEY, S_MARK, S_KEYS_TRIM,
    S_READ_MARKS, S_READ_LIVE, S_READ_KEYS, S_READ_JOBS, S_READ_JOB, S_READ_SPEC,
    S_READ_RECORDS, S_READ_ALL_RECORDS, S_READ_EVENTS, S_READ_EVENTS_OF, S_READ_PLACEMENT,
    S_READ_PLANS, S_READ_AUTO, S_READ_TIME_AT, S_READ_LAST_SEQ,
    /* stats */
    S_STATS_BEGIN, S_STATS_COMMIT, S_STATS_ROLLBACK,
    S_STEP, S_READ_STEPS, S_READ_STEP_LAST, S_READ_STEP_BEFORE, S_READ_LAST_STEP,
    S_READ_VALIDATION, S_READ_AUX_LOSS,
    S_SEGMENT_NEW, S_SEGMENT_LAST, S_SEGMENT_TIMES,
    S_LOAD_MARK, S_LOAD_WINDOW, S_LOAD_COUNTS, S_LOAD_TOTAL, S_LOAD_PARENT, S_LOAD_COVER,
    S_LOAD_DROP, S_LOAD_DROP_COUNTS,
    S_READ_LOAD_MARK, S_READ_LOAD_OPEN, S_READ_LOAD_BUCKET, S_READ_LOAD_TOTAL, S_READ_LOAD_OLD,
    S_READ_LOAD_CHILDREN, S_READ_LOAD_EXPIRED, S_READ_LOAD_ANY, S_READ_LOAD_COUNTS,
    S_READ_LOAD_NEWEST, S_READ_LOAD_SINCE,
    S_MAX
};

struct store_tables {
    sqlite3      *state, *stats;
    sqlite3_stmt *statements[S_MAX];
    struct query_db *query;
    uint64_t      list_deadline_ns; /* of the list that is read */
    char         *logs_dir; /* owned */
};

int  tables_open(struct store_tables *t, const char *state_dir, struct err *err);
void tables_close(struct store_tables *t);

/* Ready to bind; all were reset when they were last used. */
sqlite3_stmt *tables_statement(struct store_tables *t, enum statement which);

/* ---- store_write: inside a transaction of the caller ----------------------------------------- */

/* The record's row in the log, then what it means for the query tables. */
int write_record(struct store_tables *t, const Ballast__Record *r, struct err *err);
int write_steps(struct store_tables *t, const struct turn_steps *steps, struct err *err);
int write_rebuild(struct store_tables *t, struct err *err);

/* ---- store_read ------------------------------------------------------------------------------ */

/* Fills the read's results and rc. */
void read_run(struct store_tables *t, struct store_read *r);
/* The record in column 0, or NULL if it is not readable. */
Ballast__Record *read_record_at(sqlite3_stmt *s, struct arena *a);
int  read_spec(struct store_tables *t, struct store_read *r);

/* ---- store_list: by conditions, and in an order, of a client's choice ------------------------ */

/* Gives *out, a statement whose rows are of JOB_COLUMNS, ended with sqlite3_finalize. -EINVAL: a
 * condition that is none. */
int  list_jobs(struct store_tables *t, const struct store_read *r, sqlite3_stmt **out,
               struct err *err);
/* Fills events. Looks at a bounded number of records: is_truncated says that it gave up early, and
 * next where to go on. */
int  list_events(struct store_tables *t, struct store_read *r);
void list_event_at(sqlite3_stmt *s, struct store_read *r);
/* Ends a statement of this connection with -ETIME once `limit_ns` are over; 0: no more. */
void list_limit_time(struct store_tables *t, uint64_t limit_ns);

/* ---- store_read_balance ---------------------------------------------------------------------- */

int  read_loads(struct store_tables *t, struct store_read *r);
/* Of that epoch, -1: the newest; NULL if there is none: experts are in order then. */
int  read_placement_of(struct store_tables *t, job_id job, int64_t epoch, struct arena *a,
                       Ballast__Placement **out, struct err *err);
int  read_placement(struct store_tables *t, struct store_read *r);
int  read_plans(struct store_tables *t, struct store_read *r);

/* ---- store_read_history ---------------------------------------------------------------------- */

int  read_load_history(struct store_tables *t, struct store_read *r);

/* ---- store_folder ---------------------------------------------------------------------------- */

/* Makes it if need be and takes it for this process; gives the lock, which ends with close().
 * -EBUSY: another process has it. */
int folder_take(const char *state_dir, int *out_fd, struct err *err);

/* ---- store_log: outside of transactions ------------------------------------------------------ */

/* at_ns: now, by the wall clock. */
int  log_write(struct store_tables *t, struct store_log *log, int64_t at_ns, struct err *err);
int  log_read(struct store_tables *t, struct store_read *r);

#endif
