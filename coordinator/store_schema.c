/* store_schema.c - SQL of the tables; people may read them with any SQLite while nothing runs */
#include "coordinator/store_schema.h"

/* records is the truth; the tables after it are written from the same record in the same
 * transaction and can be made again from it. */
static const char state_1[] =
    "CREATE TABLE records ("
    "  seq INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, job INTEGER NOT NULL,"
    "  worker TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, body BLOB NOT NULL) STRICT;"
    "CREATE INDEX records_of_job ON records (job, seq) WHERE job > 0;"
    "CREATE VIEW events AS SELECT seq, at_ns, job, worker, kind, text FROM records;"

    "CREATE TABLE jobs ("
    "  id INTEGER PRIMARY KEY, name TEXT NOT NULL, user TEXT NOT NULL,"
    "  state TEXT NOT NULL CHECK (state IN ('QUEUED', 'STARTING', 'RUNNING', 'RECOVERING',"
    "    'PREEMPTING', 'STOPPING', 'DONE', 'FAILED', 'CANCELLED')),"
    "  reason TEXT NOT NULL DEFAULT '', priority INTEGER NOT NULL, gang_size INTEGER NOT NULL,"
    "  attempt INTEGER NOT NULL DEFAULT 0, step INTEGER NOT NULL DEFAULT 0,"
    "  checkpoint_step INTEGER NOT NULL DEFAULT 0, steps INTEGER NOT NULL,"
    "  n_restarts INTEGER NOT NULL DEFAULT 0, held INTEGER NOT NULL DEFAULT 0 CHECK (held IN (0, 1)),"
    "  submitted_at_ns INTEGER NOT NULL, started_at_ns INTEGER NOT NULL DEFAULT 0,"
    "  ended_at_ns INTEGER NOT NULL DEFAULT 0, exit TEXT NOT NULL DEFAULT '',"
    "  workers TEXT NOT NULL DEFAULT '',"
    "  CHECK ((ended_at_ns > 0) = (state IN ('DONE', 'FAILED', 'CANCELLED')))) STRICT;"
    "CREATE INDEX jobs_live ON jobs (id) WHERE ended_at_ns = 0;"

    "CREATE TABLE attempts ("
    "  job INTEGER NOT NULL REFERENCES jobs (id), attempt INTEGER NOT NULL, workers TEXT NOT NULL,"
    "  assigned_at_ns INTEGER NOT NULL, ended_at_ns INTEGER NOT NULL DEFAULT 0,"
    "  reason TEXT NOT NULL DEFAULT '', PRIMARY KEY (job, attempt)) STRICT, WITHOUT ROWID;"

    "CREATE TABLE workers ("
    "  name TEXT PRIMARY KEY, node TEXT NOT NULL,"
    "  state TEXT NOT NULL CHECK (state IN ('UNKNOWN', 'IDLE', 'BUSY', 'LATE', 'SUSPECT', 'LOST',"
    "    'DRAINED', 'GONE')),"
    "  drained INTEGER NOT NULL CHECK (drained IN (0, 1)), reason TEXT NOT NULL,"
    "  worker_epoch INTEGER NOT NULL, changed_at_ns INTEGER NOT NULL,"
    "  record INTEGER NOT NULL) STRICT, WITHOUT ROWID;"

    "CREATE TABLE idempotency ("
    "  user TEXT NOT NULL, key BLOB NOT NULL, digest BLOB NOT NULL, job INTEGER NOT NULL,"
    "  at_ns INTEGER NOT NULL, PRIMARY KEY (user, key)) STRICT, WITHOUT ROWID;"
    "CREATE INDEX idempotency_by_age ON idempotency (at_ns);"

    /* High-water marks: they must outlive whatever is trimmed. */
    "CREATE TABLE marks ("
    "  name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;"
    "INSERT INTO marks VALUES ('coordinator_epoch', 0), ('job', 0), ('seq', 0);";

static const char stats_1[] =
    "CREATE TABLE steps ("
    "  job INTEGER NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,"
    "  at_ns INTEGER NOT NULL, loss REAL, validation_loss REAL, grad_norm REAL, lr REAL,"
    "  tokens_per_second REAL, mfu REAL, memory_bytes INTEGER NOT NULL, imbalance REAL,"
    "  phases TEXT NOT NULL, PRIMARY KEY (job, step)) STRICT, WITHOUT ROWID;"

    /* From file_offset on, a rank's log file holds that attempt's output from its byte
     * attempt_offset on, until the next segment begins. */
    "CREATE TABLE log_segments ("
    "  job INTEGER NOT NULL, rank INTEGER NOT NULL, file_offset INTEGER NOT NULL,"
    "  attempt INTEGER NOT NULL, attempt_offset INTEGER NOT NULL,"
    "  PRIMARY KEY (job, rank, file_offset)) STRICT, WITHOUT ROWID;";

static const char *const state_steps[] = {state_1};
static const char *const stats_steps[] = {stats_1};

const struct schema schema_state = {"state", 0x424c5354, state_steps,
                                    sizeof state_steps / sizeof state_steps[0]};
const struct schema schema_stats = {"stats", 0x424c5353, stats_steps,
                                    sizeof stats_steps / sizeof stats_steps[0]};
