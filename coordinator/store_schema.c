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
    "  n_restarts INTEGER NOT NULL DEFAULT 0,"
    "  held INTEGER NOT NULL DEFAULT 0 CHECK (held IN (0, 1)),"
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

/* What became of plans, and which placements came about. The maps themselves are in the records
 * that `record` names. */
static const char state_2[] =
    "ALTER TABLE jobs ADD COLUMN rebalance_auto INTEGER CHECK (rebalance_auto IN (0, 1));"
    "CREATE TABLE plans ("
    "  job INTEGER NOT NULL REFERENCES jobs (id), epoch INTEGER NOT NULL,"
    "  base_epoch INTEGER NOT NULL,"
    "  state TEXT NOT NULL CHECK (state IN ('PREPARING', 'DONE', 'ENDED')),"
    "  proposed_at_ns INTEGER NOT NULL, ended_at_ns INTEGER NOT NULL DEFAULT 0,"
    "  at_step INTEGER NOT NULL, automatic INTEGER NOT NULL CHECK (automatic IN (0, 1)),"
    "  cause TEXT NOT NULL, n_moves INTEGER NOT NULL, bytes INTEGER NOT NULL,"
    "  predicted_gain_s REAL, predicted_cost_s REAL, imbalance_before REAL,"
    "  imbalance_predicted REAL, reason TEXT NOT NULL DEFAULT '',"
    "  PRIMARY KEY (job, epoch), CHECK ((ended_at_ns > 0) = (state != 'PREPARING'))"
    ") STRICT, WITHOUT ROWID;"
    "CREATE TABLE placements ("
    "  job INTEGER NOT NULL REFERENCES jobs (id), epoch INTEGER NOT NULL,"
    "  placed_at_ns INTEGER NOT NULL, at_step INTEGER NOT NULL, n_moves INTEGER NOT NULL,"
    "  bytes INTEGER NOT NULL, pause_s REAL, imbalance_before REAL, imbalance_predicted REAL,"
    "  imbalance_after REAL, realised_gain_s REAL, record INTEGER NOT NULL,"
    "  PRIMARY KEY (job, epoch)) STRICT, WITHOUT ROWID;";

/* Jobs may be PAUSED. A constraint cannot be changed, so the table is made anew. */
static const char state_3[] =
    "CREATE TABLE jobs_new ("
    "  id INTEGER PRIMARY KEY, name TEXT NOT NULL, user TEXT NOT NULL,"
    "  state TEXT NOT NULL CHECK (state IN ('QUEUED', 'STARTING', 'RUNNING', 'RECOVERING',"
    "    'PREEMPTING', 'STOPPING', 'PAUSED', 'DONE', 'FAILED', 'CANCELLED')),"
    "  reason TEXT NOT NULL DEFAULT '', priority INTEGER NOT NULL, gang_size INTEGER NOT NULL,"
    "  attempt INTEGER NOT NULL DEFAULT 0, step INTEGER NOT NULL DEFAULT 0,"
    "  checkpoint_step INTEGER NOT NULL DEFAULT 0, steps INTEGER NOT NULL,"
    "  n_restarts INTEGER NOT NULL DEFAULT 0,"
    "  held INTEGER NOT NULL DEFAULT 0 CHECK (held IN (0, 1)),"
    "  submitted_at_ns INTEGER NOT NULL, started_at_ns INTEGER NOT NULL DEFAULT 0,"
    "  ended_at_ns INTEGER NOT NULL DEFAULT 0, exit TEXT NOT NULL DEFAULT '',"
    "  workers TEXT NOT NULL DEFAULT '',"
    "  rebalance_auto INTEGER CHECK (rebalance_auto IN (0, 1)),"
    "  CHECK ((ended_at_ns > 0) = (state IN ('DONE', 'FAILED', 'CANCELLED')))) STRICT;"
    "INSERT INTO jobs_new SELECT id, name, user, state, reason, priority, gang_size, attempt,"
    "  step, checkpoint_step, steps, n_restarts, held, submitted_at_ns, started_at_ns,"
    "  ended_at_ns, exit, workers, rebalance_auto FROM jobs;"
    "DROP TABLE jobs;"
    "ALTER TABLE jobs_new RENAME TO jobs;"
    "CREATE INDEX jobs_live ON jobs (id) WHERE ended_at_ns = 0;";

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

/* Expert load. A window is a report (level 0), or the sum of the windows of 10 s, 1 min or 1 h
 * (levels 1 to 3), or of a whole job (4). parent is the window that its counts went into, 0 while
 * none has them; is_cover says that the counts stand nowhere finer, so that the windows with it
 * hold every token once.
 *
 * Of a layer of a window there is one row, key = window * 1024 + layer; tokens holds unsigned
 * little-endian numbers of `width` bytes, (n_nodes, n_experts) or, where n_nodes is 0, (n_experts)
 * summed over nodes. imbalance is max over mean of experts: the least and the most of any report
 * in the window. */
static const char stats_2[] =
    "CREATE TABLE load_windows ("
    "  id INTEGER PRIMARY KEY, job INTEGER NOT NULL,"
    "  level INTEGER NOT NULL CHECK (level BETWEEN 0 AND 4), at_ns INTEGER NOT NULL,"
    "  first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, n_steps INTEGER NOT NULL,"
    "  n_reports INTEGER NOT NULL, attempt INTEGER NOT NULL, placement_epoch INTEGER NOT NULL,"
    "  n_nodes INTEGER NOT NULL, n_experts INTEGER NOT NULL, device_imbalance REAL,"
    "  parent INTEGER NOT NULL, is_cover INTEGER NOT NULL CHECK (is_cover IN (0, 1))) STRICT;"
    "CREATE INDEX load_windows_of_job ON load_windows (job, at_ns);"
    "CREATE INDEX load_windows_open ON load_windows (level, job, at_ns) WHERE parent = 0;"
    "CREATE INDEX load_windows_of_parent ON load_windows (parent) WHERE parent > 0;"
    "CREATE INDEX load_windows_by_age ON load_windows (level, is_cover, at_ns);"
    "CREATE TABLE load_counts ("
    "  key INTEGER PRIMARY KEY, width INTEGER NOT NULL CHECK (width IN (1, 2, 4, 8)),"
    "  imbalance_min REAL NOT NULL, imbalance_max REAL NOT NULL, tokens BLOB NOT NULL) STRICT;"

    /* The newest report of a job that is stored: what is not newer was said before. */
    "CREATE TABLE load_marks ("
    "  job INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, last_step INTEGER NOT NULL,"
    "  at_ns INTEGER NOT NULL) STRICT;";

/* Moves may be spread over several step boundaries. */
static const char state_4[] = "ALTER TABLE plans ADD COLUMN n_stages INTEGER NOT NULL DEFAULT 1;";

/* Lists of jobs by user, and since a time. */
static const char state_5[] =
    "CREATE INDEX jobs_of_user ON jobs (user, id);"
    "CREATE INDEX jobs_by_end ON jobs (ended_at_ns);";

static const char *const state_steps[] = {state_1, state_2, state_3, state_4, state_5};
/* What routers lose, and the choices beyond an expert's capacity. */
static const char stats_3[] =
    "ALTER TABLE steps ADD COLUMN aux_loss REAL;"
    "ALTER TABLE steps ADD COLUMN z_loss REAL;"
    "ALTER TABLE steps ADD COLUMN rerouted INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE steps ADD COLUMN dropped INTEGER NOT NULL DEFAULT 0;";

/* And indexers that train beside the model. */
static const char stats_4[] = "ALTER TABLE steps ADD COLUMN index_loss REAL;";

/* Batches passed over, because they gave what is not a number. */
static const char stats_5[] = "ALTER TABLE steps ADD COLUMN skipped INTEGER NOT NULL DEFAULT 0;";

/* Choices beyond an expert's capacity, of a layer. */
static const char stats_6[] =
    "ALTER TABLE load_counts ADD COLUMN rerouted INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE load_counts ADD COLUMN dropped INTEGER NOT NULL DEFAULT 0;";

/* What a rank was to take. */
static const char stats_7[] =
    "ALTER TABLE steps ADD COLUMN memory_planned_bytes INTEGER NOT NULL DEFAULT 0;";

/* How far into its data a job was. */
static const char stats_8[] =
    "ALTER TABLE steps ADD COLUMN samples INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE steps ADD COLUMN epoch_samples INTEGER NOT NULL DEFAULT 0;";

/* When a segment's first bytes came; so that it is known of all of them, one may be of the same
 * attempt as that before it. */
static const char stats_9[] =
    "ALTER TABLE log_segments ADD COLUMN at_ns INTEGER NOT NULL DEFAULT 0;";

static const char *const stats_steps[] = {stats_1, stats_2, stats_3, stats_4, stats_5,
                                          stats_6, stats_7, stats_8, stats_9};

const struct schema schema_state = {"state", 0x424c5354, state_steps,
                                    sizeof state_steps / sizeof state_steps[0]};
const struct schema schema_stats = {"stats", 0x424c5353, stats_steps,
                                    sizeof stats_steps / sizeof stats_steps[0]};
