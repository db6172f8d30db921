/* store_read.c - answers what only the databases know, a bounded page at a time */
#include "coordinator/store_parts.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "common/json.h"
#include "coordinator/event.h"
#include "coordinator/store_bind.h"

#define PAGE_BYTES_MAX (4u << 20) /* of one answer, whatever its limit says */

/* ---- records --------------------------------------------------------------------------------- */

Ballast__Record *read_record_at(sqlite3_stmt *s, struct arena *a)
{
    return ballast__record__unpack(arena_pb(a), (size_t)sqlite3_column_bytes(s, 0),
                                   sqlite3_column_blob(s, 0));
}

static int read_records(struct store_tables *t, struct store_read *r, enum statement which)
{
    sqlite3_stmt *s = tables_statement(t, which);
    int rc;
    if (which == S_READ_RECORDS)
        sqlite3_bind_int64(s, 1, (sqlite3_int64)r->job);
    while ((rc = db_next(s, &r->err)) > 0) {
        Ballast__Record *record = read_record_at(s, &r->arena);
        if (!record) {
            sqlite3_reset(s);
            return err_set(&r->err, -EBADMSG, "a record of the log is not readable");
        }
        PUSH(&r->arena, r->records, r->n_records, record);
    }
    return rc;
}

static int read_marks(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_MARKS);
    uint64_t seq = 0;
    int rc;
    while ((rc = db_next(s, &r->err)) > 0) {
        const char *name = (const char *)sqlite3_column_text(s, 0);
        if (!strcmp(name, "coordinator_epoch"))
            r->restored.coordinator_epoch = int_at(s, 1);
        else if (!strcmp(name, "job"))
            r->restored.last_job = int_at(s, 1);
        else if (!strcmp(name, "seq"))
            seq = int_at(s, 1);
    }
    s = tables_statement(t, S_READ_LAST_SEQ);
    if (rc < 0 || (rc = db_next(s, &r->err)) < 0)
        return rc;
    r->restored.last_seq = int_at(s, 0);
    sqlite3_reset(s);
    if (r->restored.last_seq != seq)
        return err_set(&r->err, -EBADMSG, "state.db: the newest record is %lu, expected %lu: the "
                       "file was damaged or edited; restore a backup",
                       (unsigned long)r->restored.last_seq, (unsigned long)seq);
    return 0;
}

static int read_keys(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_KEYS);
    struct store_restored *out = &r->restored;
    int rc;
    sqlite3_bind_int64(s, 1, r->wall_ns - (int64_t)r->keep_ns);
    while ((rc = db_next(s, &r->err)) > 0) {
        if (sqlite3_column_bytes(s, 1) != IDEMPOTENCY_KEY_BYTES || sqlite3_column_bytes(s, 2) != 16)
            continue;
        int64_t age_ns = r->wall_ns - sqlite3_column_int64(s, 4);
        struct store_key key = {
            .user = text_at(s, 0, &r->arena),
            .key = arena_memdup(&r->arena, sqlite3_column_blob(s, 1), 16),
            .digest = arena_memdup(&r->arena, sqlite3_column_blob(s, 2), 16),
            .job = int_at(s, 3),
            .age_ns = age_ns > 0 ? (uint64_t)age_ns : 0,
        };
        PUSH(&r->arena, out->keys, out->n_keys, key);
    }
    return rc;
}

static int read_restore(struct store_tables *t, struct store_read *r)
{
    int rc = read_marks(t, r);
    if (rc == 0)
        rc = read_records(t, r, S_READ_LIVE);
    return rc < 0 ? rc : read_keys(t, r);
}

/* ---- events ---------------------------------------------------------------------------------- */

/* Of a job, or of all, without conditions. */
static int read_events(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, r->job ? S_READ_EVENTS_OF : S_READ_EVENTS);
    size_t used = r->arena.used_bytes;
    int rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)r->from);
    sqlite3_bind_int64(s, 2, r->limit);
    if (r->job)
        sqlite3_bind_int64(s, 3, (sqlite3_int64)r->job);
    r->next = r->from;
    while ((rc = db_next(s, &r->err)) > 0) {
        list_event_at(s, r);
        r->next = r->events[r->n_events - 1]->seq + 1;
        if (r->arena.used_bytes - used > PAGE_BYTES_MAX) {
            sqlite3_reset(s);
            return 0;
        }
    }
    return rc;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void parse_phases(const char *text, Ballast__StepReport *out, struct arena *a)
{
    struct json *object;
    if (json_parse(text, strlen(text), MESSAGE_BYTES_MAX, &object, NULL) < 0)
        return;
    out->phases = arena_alloc(a, (json_count(object) + 1) * sizeof *out->phases);
    for (struct json_iter i = json_iter(object); json_next(&i);) {
        Ballast__PhaseTime *p = arena_alloc(a, sizeof *p);
        ballast__phase_time__init(p);
        p->name = arena_strdup(a, i.key);
        if (!json_as_double(i.value, &p->seconds))
            p->seconds = NAN;
        out->phases[out->n_phases++] = p;
    }
    json_destroy(object);
}

static Ballast__StepReport *step_at(sqlite3_stmt *s, struct arena *a)
{
    Ballast__StepReport *r = arena_alloc(a, sizeof *r);
    ballast__step_report__init(r);
    r->step = int_at(s, 0);
    r->attempt = (uint32_t)int_at(s, 1);
    r->at_ns = sqlite3_column_int64(s, 2);
    r->loss = real_at(s, 3);
    r->validation_loss = real_at(s, 4);
    r->grad_norm = real_at(s, 5);
    r->lr = real_at(s, 6);
    r->tokens_per_second = real_at(s, 7);
    r->mfu = real_at(s, 8);
    r->memory_bytes = int_at(s, 9);
    r->imbalance = real_at(s, 10);
    parse_phases((const char *)sqlite3_column_text(s, 11), r, a);
    r->aux_loss = real_at(s, 12);
    r->z_loss = real_at(s, 13);
    r->rerouted = int_at(s, 14);
    r->dropped = int_at(s, 15);
    r->index_loss = real_at(s, 16);
    r->skipped = int_at(s, 17);
    r->memory_planned_bytes = int_at(s, 18);
    r->samples = int_at(s, 19);
    r->epoch_samples = int_at(s, 20);
    return r;
}

/* Raises r->from to a step that the statement gives: with it, all before are left out. */
static int skip_steps(struct store_tables *t, struct store_read *r, enum statement which,
                      int64_t what)
{
    sqlite3_stmt *s = tables_statement(t, which);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)r->job);
    sqlite3_bind_int64(s, 2, what);
    int rc = db_next(s, &r->err);
    if (rc <= 0)
        return rc;
    r->from = int_at(s, 0) > r->from ? int_at(s, 0) : r->from;
    sqlite3_reset(s);
    return 0;
}

static int read_steps(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_STEPS);
    size_t used = r->arena.used_bytes;
    int rc = r->last ? skip_steps(t, r, S_READ_STEP_LAST, r->last) : 0;
    if (rc == 0 && r->wall_ns) /* later steps are newer: an attempt writes over what it repeats */
        rc = skip_steps(t, r, S_READ_STEP_BEFORE, r->wall_ns);
    if (rc < 0)
        return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)r->job);
    sqlite3_bind_int64(s, 2, (sqlite3_int64)r->from);
    sqlite3_bind_int64(s, 3, r->limit);
    r->next = r->from;
    while ((rc = db_next(s, &r->err)) > 0) {
        Ballast__StepReport *step = step_at(s, &r->arena);
        PUSH(&r->arena, r->steps, r->n_steps, step);
        r->next = step->step;
        if (r->arena.used_bytes - used > PAGE_BYTES_MAX) {
            sqlite3_reset(s);
            return 0;
        }
    }
    return rc;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static void split_names(char *text, Ballast__Job *out, struct arena *a)
{
    size_t n = *text ? 1 : 0;
    for (const char *c = text; *c; c++)
        n += *c == ' ';
    out->workers = arena_alloc(a, (n + 1) * sizeof *out->workers);
    for (char *save, *name = strtok_r(text, " ", &save); name; name = strtok_r(NULL, " ", &save))
        out->workers[out->n_workers++] = name;
}

static Ballast__Job *job_at(sqlite3_stmt *s, struct arena *a)
{
    Ballast__Job *j = arena_alloc(a, sizeof *j);
    ballast__job__init(j);
    j->id = int_at(s, 0);
    j->name = text_at(s, 1, a);
    j->user = text_at(s, 2, a);
    j->state = event_job_state_parse((const char *)sqlite3_column_text(s, 3));
    j->reason = text_at(s, 4, a);
    j->priority = sqlite3_column_int(s, 5);
    j->gang_size = (uint32_t)int_at(s, 6);
    j->attempt = (uint32_t)int_at(s, 7);
    j->step = int_at(s, 8);
    j->checkpoint_step = int_at(s, 9);
    j->steps = int_at(s, 10);
    j->n_restarts = (uint32_t)int_at(s, 11);
    j->held = sqlite3_column_int(s, 12);
    j->submitted_at_ns = sqlite3_column_int64(s, 13);
    j->started_at_ns = sqlite3_column_int64(s, 14);
    j->ended_at_ns = sqlite3_column_int64(s, 15);
    j->exit = text_at(s, 16, a);
    split_names(text_at(s, 17, a), j, a);
    j->loss = j->validation_loss = j->imbalance = NAN;
    return j;
}

/* What the job's last steps said. */
static int add_summary(struct store_tables *t, Ballast__Job *j, struct err *err)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_LAST_STEP);
    int rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)j->id);
    if ((rc = db_next(s, err)) > 0) {
        j->step = int_at(s, 0) > j->step ? int_at(s, 0) : j->step;
        j->loss = real_at(s, 3);
        j->tokens_per_second = real_at(s, 7);
        j->memory_bytes = int_at(s, 9);
        j->imbalance = real_at(s, 10);
        j->memory_planned_bytes = int_at(s, 18);
        sqlite3_reset(s);
    }
    s = tables_statement(t, S_READ_VALIDATION);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)j->id);
    if (rc >= 0 && (rc = db_next(s, err)) > 0) {
        j->validation_loss = real_at(s, 0);
        sqlite3_reset(s);
    }
    return rc < 0 ? rc : 0;
}

static int read_jobs(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_JOBS), *own = NULL;
    size_t used = r->arena.used_bytes;
    int rc = r->n_terms || r->n_order || r->is_live ? list_jobs(t, r, &own, &r->err) : 0;
    if (rc < 0)
        return rc;
    s = own ? own : s;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)r->from);
    sqlite3_bind_text(s, 2, r->user ? r->user : "", -1, SQLITE_STATIC);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)r->limit + 1); /* one more: is there more? */
    while ((rc = db_next(s, &r->err)) > 0) {
        if (r->n_jobs == r->limit || r->arena.used_bytes - used > PAGE_BYTES_MAX) {
            r->is_truncated = true;
            sqlite3_reset(s);
            rc = 0;
            break;
        }
        Ballast__Job *j = job_at(s, &r->arena);
        PUSH(&r->arena, r->jobs, r->n_jobs, j);
    }
    sqlite3_finalize(own);
    list_limit_time(t, 0);
    if (rc == -ETIME)
        return err_set(&r->err, -ETIME, "this list takes longer than a coordinator looks for one; "
                       "ask for fewer jobs: of one user, or since a time");
    for (size_t i = 0; rc == 0 && i < r->n_jobs; i++)
        rc = add_summary(t, r->jobs[i], &r->err);
    return rc;
}

static int read_one_job(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_JOB);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)r->job);
    int rc = db_next(s, &r->err);
    if (rc == 0)
        return err_set(&r->err, -ENOENT, "there is no job %lu", (unsigned long)r->job);
    if (rc < 0)
        return rc;
    Ballast__Job *j = job_at(s, &r->arena);
    sqlite3_reset(s);
    PUSH(&r->arena, r->jobs, r->n_jobs, j);
    return add_summary(t, j, &r->err);
}

int read_spec(struct store_tables *t, struct store_read *r)
{
    sqlite3_stmt *s = tables_statement(t, S_READ_SPEC);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)r->job);
    int rc = db_next(s, &r->err);
    if (rc <= 0)
        return rc;
    Ballast__Record *record = read_record_at(s, &r->arena);
    if (record && record->what_case == BALLAST__RECORD__WHAT_SUBMITTED)
        r->spec = record->submitted->spec;
    else if (record && record->what_case == BALLAST__RECORD__WHAT_SETTINGS)
        r->spec = record->settings->spec;
    sqlite3_reset(s);
    return 0;
}

static int read_job(struct store_tables *t, struct store_read *r)
{
    int rc = read_one_job(t, r);
    if (rc < 0 || (rc = read_spec(t, r)) < 0)
        return rc;
    r->is_newest = true;
    return list_events(t, r);
}

/* ---- all ------------------------------------------------------------------------------------- */

static int run(struct store_tables *t, struct store_read *r)
{
    int rc = 0;
    bool is_of_job = r->kind == STORE_STEPS || r->kind == STORE_OUTPUT ||
                     r->kind == STORE_LOADS || r->kind == STORE_LOAD_HISTORY ||
                     r->kind == STORE_PLACEMENT || r->kind == STORE_PLANS ||
                     (r->kind == STORE_EVENTS && r->job);
    if (is_of_job && (rc = read_one_job(t, r)) < 0)
        return rc;
    switch (r->kind) {
    case STORE_RESTORE:
        return read_restore(t, r);
    case STORE_JOBS:
        return read_jobs(t, r);
    case STORE_JOB:
        return read_job(t, r);
    case STORE_RECORDS:
        rc = read_records(t, r, S_READ_RECORDS);
        return rc < 0 || !r->n_records ? rc : read_one_job(t, r);
    case STORE_EVENTS:
        return r->n_terms || r->is_newest ? list_events(t, r) : read_events(t, r);
    case STORE_STEPS:
        return read_steps(t, r);
    case STORE_OUTPUT:
        return log_read(t, r);
    case STORE_REBUILD:
        return write_rebuild(t, &r->err);
    case STORE_LOADS:
        return read_loads(t, r);
    case STORE_LOAD_HISTORY:
        return read_load_history(t, r);
    case STORE_PLACEMENT:
        return read_placement(t, r);
    case STORE_PLANS:
        return read_plans(t, r);
    case STORE_SQL:
        return query_run(t->query, r);
    case STORE_BACKUP: /* the writer's own: it goes on between batches */
        break;
    }
    return err_set(&r->err, -EINVAL, "no such read");
}

void read_run(struct store_tables *t, struct store_read *r)
{
    r->rc = run(t, r);
}

void store_read_fini(struct store_read *r)
{
    arena_fini(&r->arena);
}
