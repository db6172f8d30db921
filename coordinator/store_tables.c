/* store_tables.c - opens both databases and prepares every statement once */
#include "coordinator/store_parts.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define ENDED "('DONE', 'FAILED', 'CANCELLED')"
#define STEP_COLUMNS                                                                           \
    "step, attempt, at_ns, loss, validation_loss, grad_norm, lr, tokens_per_second, mfu, "     \
    "memory_bytes, imbalance, phases, aux_loss, z_loss, rerouted, dropped, index_loss, skipped, " \
    "memory_planned_bytes, samples, epoch_samples"

#define LOAD_COLUMNS                                                                           \
    "id, at_ns, first_step, last_step, n_steps, n_reports, attempt, placement_epoch, "         \
    "n_nodes, n_experts, device_imbalance"

static const char *const sql[S_MAX] = {
    [S_BEGIN] = "BEGIN IMMEDIATE",
    [S_COMMIT] = "COMMIT",
    [S_ROLLBACK] = "ROLLBACK",
    [S_RECORD] = "INSERT INTO records VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    [S_JOB_NEW] = "INSERT INTO jobs (id, name, user, state, priority, gang_size, steps, "
                  "submitted_at_ns, rebalance_auto) VALUES (?1, ?2, ?3, 'QUEUED', ?4, ?5, ?6, "
                  "?7, ?8)",
    [S_JOB_ASSIGNED] = "UPDATE jobs SET attempt = ?2, workers = ?3, state = 'STARTING', "
                       "reason = '', started_at_ns = CASE WHEN started_at_ns = 0 THEN ?4 "
                       "ELSE started_at_ns END WHERE id = ?1",
    [S_JOB_STATE] = "UPDATE jobs SET state = ?2, reason = ?3, exit = ?4, "
                    "n_restarts = CASE WHEN ended_at_ns > 0 THEN 0 ELSE n_restarts + ?5 END, "
                    "started_at_ns = CASE WHEN ended_at_ns > 0 THEN 0 ELSE started_at_ns END, "
                    "held = CASE WHEN ?2 IN " ENDED " THEN 0 ELSE held END, "
                    "ended_at_ns = CASE WHEN ?2 IN " ENDED " THEN ?6 ELSE 0 END WHERE id = ?1",
    [S_JOB_PROGRESS] = "UPDATE jobs SET checkpoint_step = max(checkpoint_step, ?2), "
                       "step = max(step, ?3) WHERE id = ?1",
    [S_JOB_HELD] = "UPDATE jobs SET held = ?2 WHERE id = ?1",
    [S_JOB_AUTO] = "UPDATE jobs SET rebalance_auto = ?2 WHERE id = ?1",
    [S_JOB_PRIORITY] = "UPDATE jobs SET priority = ?2 WHERE id = ?1",
    [S_PLAN_NEW] = "INSERT OR REPLACE INTO plans (job, epoch, base_epoch, state, proposed_at_ns, "
                   "at_step, automatic, cause, n_moves, bytes, predicted_gain_s, "
                   "predicted_cost_s, imbalance_before, imbalance_predicted, n_stages) VALUES "
                   "(?1, ?2, ?3, 'PREPARING', ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
    [S_PLAN_END] = "UPDATE plans SET state = ?3, ended_at_ns = ?4, reason = ?5 "
                   "WHERE job = ?1 AND epoch = ?2",
    [S_PLANS_VOID] = "UPDATE plans SET state = 'ENDED', ended_at_ns = ?2, reason = 'the attempt is "
                     "over' || CASE WHEN ?3 = '' THEN '' ELSE ': ' || ?3 END "
                     "WHERE job = ?1 AND state = 'PREPARING'",
    [S_PLACEMENT_NEW] = "INSERT OR REPLACE INTO placements (job, epoch, placed_at_ns, at_step, "
                        "n_moves, bytes, pause_s, imbalance_before, imbalance_predicted, record) "
                        "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
    [S_PLACEMENT_REALISED] = "UPDATE placements SET imbalance_after = ?3, realised_gain_s = ?4 "
                             "WHERE job = ?1 AND epoch = ?2",
    [S_ATTEMPT_NEW] = "INSERT INTO attempts (job, attempt, workers, assigned_at_ns) "
                      "VALUES (?1, ?2, ?3, ?4)",
    [S_ATTEMPT_END] = "UPDATE attempts SET ended_at_ns = ?2, reason = ?3 WHERE job = ?1 AND "
                      "attempt = (SELECT attempt FROM jobs WHERE id = ?1) AND ended_at_ns = 0",
    [S_WORKER] = "INSERT OR REPLACE INTO workers VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    [S_KEY] = "INSERT OR IGNORE INTO idempotency VALUES (?1, ?2, ?3, ?4, ?5)",
    [S_MARK] = "UPDATE marks SET value = ?2 WHERE name = ?1 AND value < ?2",
    [S_KEYS_TRIM] = "DELETE FROM idempotency WHERE (user, key) IN (SELECT user, key FROM "
                    "idempotency WHERE at_ns < ?1 ORDER BY at_ns LIMIT 2)",
    [S_READ_MARKS] = "SELECT name, value FROM marks",
    [S_READ_LIVE] = "SELECT body FROM records WHERE seq IN ("
                    "SELECT r.seq FROM jobs j JOIN records r ON r.job = j.id AND r.job > 0 "
                    "WHERE j.ended_at_ns = 0 UNION ALL SELECT record FROM workers) ORDER BY seq",
    [S_READ_KEYS] = "SELECT user, key, digest, job, at_ns FROM idempotency "
                    "WHERE +at_ns >= ?1", /* most are: a scan beats the index */
    [S_READ_JOBS] = "SELECT " JOB_COLUMNS " FROM jobs WHERE id > ?1 AND (?2 = '' OR user = ?2) "
                    "ORDER BY id LIMIT ?3",
    [S_READ_JOB] = "SELECT " JOB_COLUMNS " FROM jobs WHERE id = ?1",
    [S_READ_SPEC] = "SELECT body FROM records WHERE job = ?1 AND job > 0 AND kind IN "
                    "('JOB_SUBMITTED', 'JOB_SETTINGS') ORDER BY seq DESC LIMIT 1",
    [S_READ_RECORDS] = "SELECT body FROM records WHERE job = ?1 AND job > 0 ORDER BY seq",
    [S_READ_ALL_RECORDS] = "SELECT body FROM records ORDER BY seq",
    [S_READ_EVENTS] = "SELECT " EVENT_COLUMNS " FROM records WHERE seq >= ?1 ORDER BY seq "
                      "LIMIT ?2",
    [S_READ_EVENTS_OF] = "SELECT " EVENT_COLUMNS " FROM records WHERE job = ?3 AND job > 0 AND "
                         "seq >= ?1 ORDER BY seq LIMIT ?2",
    [S_READ_PLACEMENT] = "SELECT r.body FROM placements p JOIN records r ON r.seq = p.record "
                         "WHERE p.job = ?1 AND (?2 < 0 OR p.epoch = ?2) "
                         "ORDER BY p.epoch DESC LIMIT 1",
    [S_READ_PLANS] = "SELECT * FROM (SELECT p.epoch, p.state, coalesce(q.placed_at_ns, "
                     "p.proposed_at_ns), coalesce(q.at_step, p.at_step), p.automatic, p.cause, "
                     "coalesce(q.n_moves, p.n_moves), coalesce(q.bytes, p.bytes), q.pause_s, "
                     "p.imbalance_before, p.imbalance_predicted, q.imbalance_after, "
                     "p.predicted_gain_s, q.realised_gain_s, p.reason, p.n_stages FROM plans p "
                     "LEFT JOIN placements q ON q.job = p.job AND q.epoch = p.epoch "
                     "WHERE p.job = ?1 ORDER BY p.epoch DESC LIMIT ?2) ORDER BY 1",
    [S_READ_AUTO] = "SELECT rebalance_auto FROM jobs WHERE id = ?1",
    [S_READ_TIME_AT] = "SELECT seq, at_ns FROM records WHERE seq >= ?1 ORDER BY seq LIMIT 1",
    [S_READ_LAST_SEQ] = "SELECT coalesce(max(seq), 0) FROM records",

    [S_STATS_BEGIN] = "BEGIN IMMEDIATE",
    [S_STATS_COMMIT] = "COMMIT",
    [S_STATS_ROLLBACK] = "ROLLBACK",
    [S_STEP] = "INSERT INTO steps (job, " STEP_COLUMNS ") "
               "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, "
               "?17, ?18, ?19, ?20, ?21, ?22) "
               "ON CONFLICT (job, step) DO UPDATE SET attempt = excluded.attempt, "
               "at_ns = excluded.at_ns, loss = excluded.loss, "
               "validation_loss = excluded.validation_loss, grad_norm = excluded.grad_norm, "
               "lr = excluded.lr, tokens_per_second = excluded.tokens_per_second, "
               "mfu = excluded.mfu, memory_bytes = excluded.memory_bytes, "
               "imbalance = excluded.imbalance, phases = excluded.phases, "
               "aux_loss = excluded.aux_loss, z_loss = excluded.z_loss, "
               "rerouted = excluded.rerouted, dropped = excluded.dropped, "
               "index_loss = excluded.index_loss, skipped = excluded.skipped, "
               "memory_planned_bytes = excluded.memory_planned_bytes, "
               "samples = excluded.samples, epoch_samples = excluded.epoch_samples "
               "WHERE excluded.attempt >= steps.attempt",
    [S_READ_STEPS] = "SELECT " STEP_COLUMNS " FROM steps WHERE job = ?1 AND step > ?2 "
                     "ORDER BY step LIMIT ?3",
    [S_READ_STEP_LAST] = "SELECT step FROM steps WHERE job = ?1 ORDER BY step DESC "
                         "LIMIT 1 OFFSET ?2",
    [S_READ_STEP_BEFORE] = "SELECT step FROM steps WHERE job = ?1 AND at_ns < ?2 "
                           "ORDER BY step DESC LIMIT 1",
    [S_READ_LAST_STEP] = "SELECT " STEP_COLUMNS " FROM steps WHERE job = ?1 "
                         "ORDER BY step DESC LIMIT 1",
    [S_READ_VALIDATION] = "SELECT validation_loss FROM steps WHERE job = ?1 AND "
                          "validation_loss IS NOT NULL ORDER BY step DESC LIMIT 1",
    [S_READ_AUX_LOSS] = "SELECT avg(aux_loss) FROM steps WHERE job = ?1 AND "
                        "step BETWEEN ?2 AND ?3",
    [S_LOAD_MARK] = "INSERT OR REPLACE INTO load_marks VALUES (?1, ?2, ?3, ?4)",
    [S_LOAD_WINDOW] = "INSERT INTO load_windows (job, level, at_ns, first_step, last_step, "
                      "n_steps, n_reports, attempt, placement_epoch, n_nodes, n_experts, "
                      "device_imbalance, parent, is_cover) "
                      "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 0, ?13)",
    [S_LOAD_COUNTS] = "INSERT OR REPLACE INTO load_counts VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    [S_LOAD_TOTAL] = "UPDATE load_windows SET at_ns = ?2, first_step = ?3, last_step = ?4, "
                     "n_steps = ?5, n_reports = ?6, attempt = ?7, placement_epoch = ?8, "
                     "device_imbalance = ?9 WHERE id = ?1",
    [S_LOAD_PARENT] = "UPDATE load_windows SET parent = ?2 WHERE id = ?1",
    [S_LOAD_COVER] = "UPDATE load_windows SET is_cover = 1 WHERE id = ?1",
    [S_LOAD_DROP] = "DELETE FROM load_windows WHERE id = ?1",
    [S_LOAD_DROP_COUNTS] = "DELETE FROM load_counts WHERE key >= ?1 * 1024 "
                           "AND key < (?1 + 1) * 1024",
    [S_READ_LOAD_MARK] = "SELECT attempt, last_step, at_ns FROM load_marks WHERE job = ?1",
    [S_READ_LOAD_OPEN] = "SELECT job, at_ns, n_experts FROM load_windows WHERE parent = 0 AND "
                         "level = ?1 AND at_ns < ?2 ORDER BY job, at_ns LIMIT 1",
    [S_READ_LOAD_BUCKET] = "SELECT " LOAD_COLUMNS " FROM load_windows WHERE parent = 0 AND "
                           "level = ?1 AND job = ?2 AND at_ns >= ?3 AND at_ns < ?4 AND "
                           "n_experts = ?5 ORDER BY at_ns, id",
    [S_READ_LOAD_TOTAL] = "SELECT " LOAD_COLUMNS " FROM load_windows WHERE parent = 0 AND "
                          "level = 4 AND job = ?1 AND n_experts = ?2",
    [S_READ_LOAD_OLD] = "SELECT id FROM load_windows p WHERE level = ?1 AND is_cover = 0 AND "
                        "at_ns < ?2 AND NOT EXISTS (SELECT 1 FROM load_windows c WHERE "
                        "c.parent = p.id AND c.parent > 0 AND c.is_cover = 0) "
                        "ORDER BY at_ns LIMIT 1",
    [S_READ_LOAD_CHILDREN] = "SELECT id FROM load_windows WHERE parent = ?1 AND parent > 0",
    [S_READ_LOAD_EXPIRED] = "SELECT id FROM load_windows WHERE level = 3 AND is_cover = 1 AND "
                            "at_ns < ?1 ORDER BY at_ns LIMIT 1",
    [S_READ_LOAD_ANY] = "SELECT 1 FROM load_windows WHERE level < 3 LIMIT 1",
    [S_READ_LOAD_COUNTS] = "SELECT key & 1023, width, imbalance_min, imbalance_max, tokens, "
                           "rerouted, dropped FROM load_counts WHERE key >= ?1 * 1024 AND "
                           "key < (?1 + 1) * 1024 AND (?2 < 0 OR key = ?1 * 1024 + ?2)",
    [S_READ_LOAD_NEWEST] = "SELECT " LOAD_COLUMNS " FROM load_windows WHERE job = ?1 AND "
                           "level < 4 ORDER BY at_ns DESC, level LIMIT 1",
    [S_READ_LOAD_SINCE] = "SELECT " LOAD_COLUMNS " FROM load_windows w WHERE job = ?1 AND "
                          "at_ns > ?2 AND n_experts = ?3 AND level <= ?4 AND (parent = 0 OR "
                          "(SELECT level FROM load_windows p WHERE p.id = w.parent) > ?4) "
                          "UNION ALL SELECT " LOAD_COLUMNS " FROM load_windows WHERE job = ?1 AND "
                          "at_ns > ?2 AND n_experts = ?3 AND level > ?4 AND is_cover = 1",
    [S_SEGMENT_NEW] = "INSERT OR REPLACE INTO log_segments VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    [S_SEGMENT_LAST] = "SELECT file_offset, attempt, attempt_offset, at_ns FROM log_segments "
                       "WHERE job = ?1 AND rank = ?2 ORDER BY file_offset DESC LIMIT 1",
    [S_SEGMENT_TIMES] = "SELECT file_offset, at_ns FROM log_segments WHERE job = ?1 AND "
                        "rank = ?2 AND file_offset < ?4 AND file_offset >= coalesce((SELECT "
                        "max(file_offset) FROM log_segments WHERE job = ?1 AND rank = ?2 AND "
                        "file_offset <= ?3), 0) ORDER BY file_offset LIMIT ?5",
};

static int open_both(struct store_tables *t, const char *state_dir, struct err *err)
{
    char *state = xasprintf("%s/state.db", state_dir), *stats = xasprintf("%s/stats.db", state_dir);
    int rc = db_open(state, &schema_state, true, &t->state, err);
    if (rc == 0)
        rc = db_open(stats, &schema_stats, false, &t->stats, err);
    free(state);
    free(stats);
    return rc;
}

int tables_open(struct store_tables *t, const char *state_dir, struct err *err)
{
    int rc = open_both(t, state_dir, err);
    for (int i = 0; rc == 0 && i < S_MAX; i++)
        rc = db_prepare(i < S_STATS_BEGIN ? t->state : t->stats, sql[i], &t->statements[i], err);
    if (rc == 0)
        rc = query_open(t, &t->query, err);
    if (rc == 0) {
        t->logs_dir = xasprintf("%s/logs", state_dir);
        if (mkdir(t->logs_dir, 0700) && errno != EEXIST)
            rc = err_set(err, -errno, "%s: cannot be made: %s", t->logs_dir, strerror(errno));
    }
    return rc;
}

void tables_close(struct store_tables *t)
{
    query_close(t->query); /* it reads through the others */
    db_close(t->state);
    db_close(t->stats);
    free(t->logs_dir);
    *t = (struct store_tables){0};
}

sqlite3_stmt *tables_statement(struct store_tables *t, enum statement which)
{
    return t->statements[which];
}
