/* store_write.c - a record's row in the log, and what it means for the tables that people query
 *
 * The tables are written from the record alone, so that they can be made again from the log. */
#include "coordinator/store_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "coordinator/event.h"
#include "coordinator/store_bind.h"

#define KEYS_KEPT_NS (48 * 3600 * (int64_t)NS_PER_S) /* twice what is promised */

/* ---- the query tables ------------------------------------------------------------------------ */

static int set_mark(struct store_tables *t, const char *name, uint64_t value, struct err *err)
{
    struct binder b = bind(t, S_MARK);
    put_text(&b, name);
    put_int(&b, value);
    return db_run(b.s, err);
}

static int write_key(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordSubmitted *u = r->submitted;
    if (u->idempotency_key.len != IDEMPOTENCY_KEY_BYTES)
        return 0;
    struct binder b = bind(t, S_KEY);
    put_text(&b, u->user);
    put_blob(&b, u->idempotency_key.data, u->idempotency_key.len);
    put_blob(&b, u->request_digest.data, u->request_digest.len);
    put_int(&b, r->job_id);
    put_int(&b, (uint64_t)r->at_ns);
    int rc = db_run(b.s, err);
    if (rc < 0)
        return rc;
    b = bind(t, S_KEYS_TRIM);
    put_int(&b, (uint64_t)(r->at_ns - KEYS_KEPT_NS));
    return db_run(b.s, err);
}

static int write_submitted(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    const Ballast__JobSpec *spec = r->submitted->spec;
    struct binder b = bind(t, S_JOB_NEW);
    put_int(&b, r->job_id);
    put_text(&b, spec->name);
    put_text(&b, r->submitted->user);
    put_int(&b, (uint64_t)(int64_t)spec->scheduling_priority);
    put_int(&b, spec->parallel_workers);
    put_int(&b, spec->train_steps);
    put_int(&b, (uint64_t)r->at_ns);
    put_int(&b, spec->rebalance_auto);
    int rc = db_run(b.s, err);
    if (rc < 0 || (rc = set_mark(t, "job", r->job_id, err)) < 0)
        return rc;
    return write_key(t, r, err);
}

/* Names are joined with blanks; a name has none. */
static char *join_names(char *const *names, size_t n)
{
    size_t n_bytes = 1;
    for (size_t i = 0; i < n; i++)
        n_bytes += strlen(names[i]) + 1;
    char *text = xcalloc(1, n_bytes), *at = text;
    for (size_t i = 0; i < n; i++)
        at = stpcpy(stpcpy(at, i ? " " : ""), names[i]);
    return text;
}

static int write_assigned(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    char *names = join_names(r->assigned->workers, r->assigned->n_workers);
    struct binder b = bind(t, S_JOB_ASSIGNED);
    put_int(&b, r->job_id);
    put_int(&b, r->assigned->attempt);
    put_text(&b, names);
    put_int(&b, (uint64_t)r->at_ns);
    int rc = db_run(b.s, err);
    if (rc == 0) {
        b = bind(t, S_ATTEMPT_NEW);
        put_int(&b, r->job_id);
        put_int(&b, r->assigned->attempt);
        put_text(&b, names);
        put_int(&b, (uint64_t)r->at_ns);
        rc = db_run(b.s, err);
    }
    free(names);
    return rc;
}

static bool ends_the_attempt(Ballast__JobState state)
{
    return state == BALLAST__JOB_STATE__JOB_RECOVERING || state == BALLAST__JOB_STATE__JOB_QUEUED ||
           state == BALLAST__JOB_STATE__JOB_PAUSED || job_state_is_ended(state);
}

static int write_state(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordState *u = r->state;
    struct binder b = bind(t, S_JOB_STATE);
    put_int(&b, r->job_id);
    put_text(&b, event_job_state(u->state));
    put_text(&b, u->reason);
    put_text(&b, u->exit);
    put_int(&b, u->counts_as_restart);
    put_int(&b, (uint64_t)r->at_ns);
    int rc = db_run(b.s, err);
    if (rc < 0 || !ends_the_attempt(u->state))
        return rc;
    static const enum statement ends[] = {S_ATTEMPT_END, S_PLANS_VOID};
    for (size_t i = 0; rc == 0 && i < sizeof ends / sizeof ends[0]; i++) {
        b = bind(t, ends[i]);
        put_int(&b, r->job_id);
        put_int(&b, (uint64_t)r->at_ns);
        put_text(&b, u->reason);
        rc = db_run(b.s, err);
    }
    return rc;
}

static int write_progress(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    struct binder b = bind(t, S_JOB_PROGRESS);
    put_int(&b, r->job_id);
    put_int(&b, r->progress->checkpoint_step);
    put_int(&b, r->progress->step);
    return db_run(b.s, err);
}

static int write_held(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    struct binder b = bind(t, S_JOB_HELD);
    put_int(&b, r->job_id);
    put_int(&b, r->held->held);
    return db_run(b.s, err);
}

static int write_worker(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordWorker *u = r->worker_changed;
    struct binder b = bind(t, S_WORKER);
    put_text(&b, r->worker);
    put_text(&b, u->node);
    put_text(&b, event_worker_state(u->state));
    put_int(&b, u->drained);
    put_text(&b, u->reason);
    put_int(&b, u->worker_epoch);
    put_int(&b, (uint64_t)r->at_ns);
    put_int(&b, r->seq);
    return db_run(b.s, err);
}

static int write_auto(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    struct binder b = bind(t, S_JOB_AUTO);
    put_int(&b, r->job_id);
    put_int(&b, r->rebalance_auto->on);
    return db_run(b.s, err);
}

static int write_settings(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    struct binder b = bind(t, S_JOB_PRIORITY);
    put_int(&b, r->job_id);
    put_int(&b, (uint64_t)(int64_t)r->settings->spec->scheduling_priority);
    return db_run(b.s, err);
}

/* ---- plans and placements -------------------------------------------------------------------- */

static int write_plan(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordPlan *u = r->plan;
    struct binder b = bind(t, S_PLAN_NEW);
    put_int(&b, r->job_id);
    put_int(&b, u->placement ? u->placement->epoch : 0);
    put_int(&b, u->base_epoch);
    put_int(&b, (uint64_t)r->at_ns);
    put_int(&b, u->at_step);
    put_int(&b, u->automatic);
    put_text(&b, u->cause);
    put_int(&b, u->n_moves);
    put_int(&b, u->bytes);
    put_real(&b, u->predicted_gain_s);
    put_real(&b, u->predicted_cost_s);
    put_real(&b, u->imbalance_before);
    put_real(&b, u->imbalance_predicted);
    put_int(&b, u->n_stages ? u->n_stages : 1);
    return db_run(b.s, err);
}

static int end_plan(struct store_tables *t, const Ballast__Record *r, uint32_t epoch,
                    const char *state, const char *reason, struct err *err)
{
    struct binder b = bind(t, S_PLAN_END);
    put_int(&b, r->job_id);
    put_int(&b, epoch);
    put_text(&b, state);
    put_int(&b, (uint64_t)r->at_ns);
    put_text(&b, reason);
    return db_run(b.s, err);
}

static int write_placement(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordPlacement *u = r->placement;
    struct binder b = bind(t, S_PLACEMENT_NEW);
    put_int(&b, r->job_id);
    put_int(&b, u->epoch);
    put_int(&b, (uint64_t)r->at_ns);
    put_int(&b, u->at_step);
    put_int(&b, u->n_moves);
    put_int(&b, u->bytes);
    put_real(&b, u->pause_s);
    put_real(&b, u->imbalance_before);
    put_real(&b, u->imbalance_predicted);
    put_int(&b, r->seq);
    int rc = db_run(b.s, err);
    return rc < 0 ? rc : end_plan(t, r, u->epoch, "DONE", "", err);
}

static int write_realised(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    struct binder b = bind(t, S_PLACEMENT_REALISED);
    put_int(&b, r->job_id);
    put_int(&b, r->realised->epoch);
    put_real(&b, r->realised->imbalance_after);
    put_real(&b, r->realised->gain_s);
    return db_run(b.s, err);
}

static int write_query_tables(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    switch (r->what_case) {
    case BALLAST__RECORD__WHAT_SUBMITTED:
        return write_submitted(t, r, err);
    case BALLAST__RECORD__WHAT_ASSIGNED:
        return write_assigned(t, r, err);
    case BALLAST__RECORD__WHAT_STATE:
        return write_state(t, r, err);
    case BALLAST__RECORD__WHAT_PROGRESS:
        return write_progress(t, r, err);
    case BALLAST__RECORD__WHAT_HELD:
        return write_held(t, r, err);
    case BALLAST__RECORD__WHAT_WORKER_CHANGED:
        return write_worker(t, r, err);
    case BALLAST__RECORD__WHAT_EPOCH:
        return set_mark(t, "coordinator_epoch", r->epoch->coordinator_epoch, err);
    case BALLAST__RECORD__WHAT_PLAN:
        return write_plan(t, r, err);
    case BALLAST__RECORD__WHAT_PLAN_ENDED:
        return end_plan(t, r, r->plan_ended->epoch, "ENDED", r->plan_ended->reason, err);
    case BALLAST__RECORD__WHAT_PLACEMENT:
        return write_placement(t, r, err);
    case BALLAST__RECORD__WHAT_REALISED:
        return write_realised(t, r, err);
    case BALLAST__RECORD__WHAT_REBALANCE_AUTO:
        return write_auto(t, r, err);
    case BALLAST__RECORD__WHAT_SETTINGS:
        return write_settings(t, r, err);
    case BALLAST__RECORD__WHAT_AFTER: /* no table tells it; the log does */
    case BALLAST__RECORD__WHAT__NOT_SET:
    default:
        return 0;
    }
}

/* ---- the log --------------------------------------------------------------------------------- */

int write_record(struct store_tables *t, const Ballast__Record *r, struct err *err)
{
    struct arena arena = {0};
    const Ballast__Event *e = event_of_record(r, &arena);
    size_t n_bytes = ballast__record__get_packed_size(r);
    uint8_t *body = arena_alloc(&arena, n_bytes);
    ballast__record__pack(r, body);

    struct binder b = bind(t, S_RECORD);
    put_int(&b, r->seq);
    put_int(&b, (uint64_t)r->at_ns);
    put_int(&b, r->job_id);
    put_text(&b, r->worker);
    put_text(&b, e->kind);
    put_text(&b, e->text);
    put_blob(&b, body, n_bytes);
    int rc = db_run(b.s, err);
    arena_fini(&arena);
    return rc < 0 ? rc : write_query_tables(t, r, err);
}

static int rebuild_rows(struct store_tables *t, struct err *err)
{
    int rc = db_exec(t->state, "DELETE FROM placements; DELETE FROM plans;"
                               "DELETE FROM attempts; DELETE FROM jobs; DELETE FROM workers;"
                               "DELETE FROM idempotency", err);
    sqlite3_stmt *s = tables_statement(t, S_READ_ALL_RECORDS);
    while (rc >= 0 && (rc = db_next(s, err)) > 0) {
        Ballast__Record *r = ballast__record__unpack(NULL, (size_t)sqlite3_column_bytes(s, 0),
                                                     sqlite3_column_blob(s, 0));
        rc = r ? write_query_tables(t, r, err) : err_set(err, -EBADMSG, "a record is not readable");
        if (r)
            ballast__record__free_unpacked(r, NULL);
    }
    sqlite3_reset(s);
    return rc;
}

int write_rebuild(struct store_tables *t, struct err *err)
{
    int rc = db_run(tables_statement(t, S_BEGIN), err);
    if (rc < 0)
        return rc;
    if ((rc = rebuild_rows(t, err)) == 0)
        rc = db_run(tables_statement(t, S_COMMIT), err);
    if (rc < 0)
        db_run(tables_statement(t, S_ROLLBACK), NULL);
    return rc;
}

/* ---- step reports ---------------------------------------------------------------------------- */

static char *phases_text(const Ballast__StepReport *r)
{
    struct json *phases = json_new_object();
    for (size_t i = 0; i < r->n_phases; i++)
        json_put(phases, r->phases[i]->name, json_new_double(r->phases[i]->seconds));
    char *text = json_text(phases, false);
    json_destroy(phases);
    return text;
}

static int write_step(struct store_tables *t, job_id job, uint32_t attempt,
                      const Ballast__StepReport *r, struct err *err)
{
    char *phases = phases_text(r);
    struct binder b = bind(t, S_STEP);
    put_int(&b, job);
    put_int(&b, r->step);
    put_int(&b, attempt);
    put_int(&b, (uint64_t)r->at_ns);
    put_real(&b, r->loss);
    put_real(&b, r->validation_loss);
    put_real(&b, r->grad_norm);
    put_real(&b, r->lr);
    put_real(&b, r->tokens_per_second);
    put_real(&b, r->mfu);
    put_int(&b, r->memory_bytes);
    put_real(&b, r->imbalance);
    put_text(&b, phases);
    put_real(&b, r->aux_loss);
    put_real(&b, r->z_loss);
    put_int(&b, r->rerouted);
    put_int(&b, r->dropped);
    put_real(&b, r->index_loss);
    put_int(&b, r->skipped);
    put_int(&b, r->memory_planned_bytes);
    put_int(&b, r->samples);
    put_int(&b, r->epoch_samples);
    int rc = db_run(b.s, err);
    free(phases);
    return rc;
}

int write_steps(struct store_tables *t, const struct turn_steps *steps, struct err *err)
{
    const Ballast__StepReports *reports = steps->reports;
    for (size_t i = 0; i < reports->n_steps; i++) {
        int rc = write_step(t, steps->job, reports->attempt, reports->steps[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}
