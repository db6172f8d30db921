/* apply.c - records: the one function that applies them
 *
 * Durable state changes here and nowhere else. A record is checked before it is applied, because
 * at replay it comes from a file; one that the core itself makes must pass. */
#include "coordinator/core.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/queue.h"

/* ---- the queue's list follows from the states --------------------------------------------- */

static struct queue_job place_of(const struct job *j)
{
    return (struct queue_job){.id = j->id, .priority = j->spec->scheduling_priority};
}

static size_t waiting_index(const struct coord *c, const struct job *j)
{
    struct queue_job wanted = place_of(j);
    size_t low = 0, high = c->n_waiting;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        struct queue_job other = place_of(c->waiting[middle]);
        if (queue_is_before(&other, &wanted))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void leave_queue(struct coord *c, struct job *j)
{
    size_t i = waiting_index(c, j);
    j->is_waiting = false;
    c->n_waiting--;
    memmove(c->waiting + i, c->waiting + i + 1, (c->n_waiting - i) * sizeof *c->waiting);
}

static void enter_queue(struct coord *c, struct job *j)
{
    size_t i = waiting_index(c, j);
    j->is_waiting = true;
    c->waiting = xgrow(c->waiting, c->n_waiting, &c->n_waiting_alloc, sizeof *c->waiting);
    memmove(c->waiting + i + 1, c->waiting + i, (c->n_waiting - i) * sizeof *c->waiting);
    c->waiting[i] = j;
    c->n_waiting++;
}

static void sync_waiting(struct coord *c, struct job *j)
{
    bool should_wait = j->state == BALLAST__JOB_STATE__JOB_QUEUED ||
        j->state == BALLAST__JOB_STATE__JOB_RECOVERING;
    c->queue_is_stale = true;
    if (should_wait == j->is_waiting)
        return;
    if (should_wait)
        enter_queue(c, j);
    else
        leave_queue(c, j);
}

/* ---- apply -------------------------------------------------------------------------------- */

static int damaged(const Ballast__Record *r, struct err *err, const char *what)
{
    return err_set(err, -EPROTO, "record %" PRIu64 " of job %" PRIu64 ": %s", r->seq, r->job_id,
                   what);
}

static int apply_submitted(struct coord *c, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordSubmitted *s = r->submitted;
    if (!r->job_id || !s->spec)
        return damaged(r, err, "SUBMITTED without an id or a specification");
    if (job_table_find(&c->jobs, r->job_id))
        return damaged(r, err, "SUBMITTED twice");
    struct job *j = job_create(r->job_id, s);
    j->submitted_at_ns = r->at_ns;
    job_table_add(&c->jobs, j);
    if (r->job_id > c->last_job_id)
        c->last_job_id = r->job_id;
    if (s->idempotency_key.len == IDEMPOTENCY_KEY_BYTES && s->request_digest.len == DIGEST_BYTES)
        keys_add(&c->keys, s->user, s->idempotency_key.data, s->request_digest.data, r->job_id,
                 c->now_ns + c->config.key_keep_ns);
    sync_waiting(c, j);
    return 0;
}

static int apply_assigned(struct coord *c, struct job *j, const Ballast__Record *r,
                          struct err *err)
{
    const Ballast__RecordAssigned *a = r->assigned;
    if (!job_may_move(j, BALLAST__JOB_STATE__JOB_STARTING))
        return damaged(r, err, "ASSIGNED in a state that does not allow it");
    if (a->attempt <= j->attempt || !a->n_workers || a->n_workers > RANKS_MAX ||
        a->n_worker_epochs != a->n_workers || a->coll_id.len != COLL_ID_BYTES)
        return damaged(r, err, "ASSIGNED with a wrong attempt, gang or rendezvous");
    for (uint32_t i = 0; i < j->n_gang; i++)
        free(j->gang[i]);
    free(j->gang);
    free(j->gang_epochs);
    j->n_gang = (uint32_t)a->n_workers;
    j->gang = xcalloc(j->n_gang, sizeof *j->gang);
    for (uint32_t i = 0; i < j->n_gang; i++)
        j->gang[i] = xstrdup(a->workers[i]);
    j->gang_epochs = xmemdup(a->worker_epochs, j->n_gang * sizeof *j->gang_epochs);
    memcpy(j->coll_id, a->coll_id.data, COLL_ID_BYTES);
    j->attempt = a->attempt;
    j->assigned_seq = r->seq;
    if (!j->started_at_ns)
        j->started_at_ns = r->at_ns;
    job_move(j, BALLAST__JOB_STATE__JOB_STARTING);
    job_text(&j->reason, "");
    sync_waiting(c, j);
    return 0;
}

static void apply_requeue(struct job *j)
{
    j->n_restarts = j->n_failures_in_row = 0;
    j->started_at_ns = j->ended_at_ns = 0;
    j->ran_ms = 0;
}

static void apply_key(struct job *j, const Ballast__RecordState *s)
{
    Ballast__JobState next = s->state == BALLAST__JOB_STATE__JOB_STOPPING ? s->then : s->state;
    if (s->idempotency_key.len != IDEMPOTENCY_KEY_BYTES)
        return;
    if (next == BALLAST__JOB_STATE__JOB_QUEUED)
        memcpy(j->queue_key, s->idempotency_key.data, sizeof j->queue_key);
    else if (next == BALLAST__JOB_STATE__JOB_PAUSED)
        memcpy(j->pause_key, s->idempotency_key.data, sizeof j->pause_key);
}

static int apply_state(struct coord *c, struct job *j, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordState *s = r->state;
    if (!job_may_move(j, s->state))
        return damaged(r, err, "a change of state that is not allowed");
    bool had_ended = job_has_ended(j);
    job_move(j, s->state);
    job_text(&j->reason, s->reason);
    job_text(&j->exit, s->exit);
    j->then = s->then;
    j->stop_mode = s->stop_mode;
    j->backoff_ms = s->not_before_ms;
    if (s->ran_ms > j->ran_ms)
        j->ran_ms = s->ran_ms;
    if (s->counts_as_restart) {
        j->n_restarts++;
        j->n_failures_in_row++;
    }
    if (job_has_ended(j)) {
        j->ended_at_ns = r->at_ns;
        j->held = false;
        c->has_ended_jobs = true;
    }
    if (s->state != BALLAST__JOB_STATE__JOB_RUNNING)
        rebalance_attempt_over(&j->rebalance);
    if (had_ended)
        apply_requeue(j);
    apply_key(j, s);
    sync_waiting(c, j);
    return 0;
}

static void apply_progress(struct job *j, const Ballast__RecordProgress *p)
{
    if (p->checkpoint_step > j->checkpoint_step) {
        j->checkpoint_step = p->checkpoint_step;
        j->n_failures_in_row = 0;
    }
    if (p->step > j->step)
        j->step = p->step;
    if (p->ran_ms > j->ran_ms)
        j->ran_ms = p->ran_ms;
}

static void apply_after(struct coord *c, struct job *j, job_id done)
{
    size_t n = 0;
    for (size_t i = 0; i < j->n_after; i++)
        if (j->after[i] != done)
            j->after[n++] = j->after[i];
    j->n_after = n;
    sync_waiting(c, j);
}

static int apply_worker(struct coord *c, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordWorker *what = r->worker_changed;
    if (!*r->worker)
        return damaged(r, err, "a worker without a name");
    struct worker *w = fleet_by_name(&c->fleet, r->worker);
    if (!w && !(w = fleet_add(&c->fleet, r->worker)))
        return 0; /* more workers than may attach: it says hello anew when there is room */
    job_text(&w->node, what->node);
    job_text(&w->machine, what->machine);
    job_text(&w->record_reason, what->reason);
    w->record_state = what->state;
    w->record_epoch = what->worker_epoch;
    w->is_drained = what->drained;
    c->queue_is_stale = true;
    return 0;
}

static int apply_rebalance(struct job *j, const Ballast__Record *r, struct err *err)
{
    struct rebalance *b = &j->rebalance;
    uint32_t n_devices = j->spec->parallel_expert_parallel_degree;
    const char *why = NULL;
    if (r->what_case == BALLAST__RECORD__WHAT_PLAN)
        why = rebalance_apply_plan(b, r->plan, n_devices);
    else if (r->what_case == BALLAST__RECORD__WHAT_PLAN_ENDED)
        why = rebalance_apply_plan_ended(b, r->plan_ended);
    else if (r->what_case == BALLAST__RECORD__WHAT_PLACEMENT)
        why = rebalance_apply_placement(b, r->placement, n_devices);
    else if (r->what_case == BALLAST__RECORD__WHAT_REALISED)
        why = rebalance_apply_realised(b, r->realised);
    else
        b->is_auto = r->rebalance_auto->on;
    return why ? damaged(r, err, why) : 0;
}

static int apply_settings(struct coord *c, struct job *j, const Ballast__Record *r,
                          struct err *err)
{
    const Ballast__RecordSettings *s = r->settings;
    if (!s->spec || s->revision <= j->settings_revision)
        return damaged(r, err, "SETTINGS without a specification or a newer revision");
    bool is_waiting = j->is_waiting;
    if (is_waiting)
        leave_queue(c, j); /* by the priority that it entered with */
    rebalance_settings(&j->rebalance, j->spec, s->spec);
    job_change_spec(j, s->spec, s->revision);
    if (is_waiting)
        enter_queue(c, j);
    c->queue_is_stale = true;
    return 0;
}

static int apply_epoch(struct coord *c, const Ballast__Record *r)
{
    if (r->epoch->coordinator_epoch > c->epoch)
        c->epoch = r->epoch->coordinator_epoch;
    return 0;
}

static int apply_what(struct coord *c, const Ballast__Record *r, struct err *err)
{
    struct job *j = job_table_find(&c->jobs, r->job_id);
    switch (r->what_case) {
    case BALLAST__RECORD__WHAT_SUBMITTED:      return apply_submitted(c, r, err);
    case BALLAST__RECORD__WHAT_WORKER_CHANGED: return apply_worker(c, r, err);
    case BALLAST__RECORD__WHAT_EPOCH:          return apply_epoch(c, r);
    default:
        break;
    }
    if (!j)
        return damaged(r, err, "there is no such job");
    switch (r->what_case) {
    case BALLAST__RECORD__WHAT_ASSIGNED: return apply_assigned(c, j, r, err);
    case BALLAST__RECORD__WHAT_STATE:    return apply_state(c, j, r, err);
    case BALLAST__RECORD__WHAT_PROGRESS: apply_progress(j, r->progress); return 0;
    case BALLAST__RECORD__WHAT_SETTINGS: return apply_settings(c, j, r, err);
    case BALLAST__RECORD__WHAT_AFTER:    apply_after(c, j, r->after->done_job); return 0;
    case BALLAST__RECORD__WHAT_HELD:
        j->held = r->held->held;
        job_text(&j->hold_reason, r->held->reason);
        job_text(&j->held_by, r->by);
        c->queue_is_stale = true;
        return 0;
    case BALLAST__RECORD__WHAT_PLAN:
    case BALLAST__RECORD__WHAT_PLAN_ENDED:
    case BALLAST__RECORD__WHAT_PLACEMENT:
    case BALLAST__RECORD__WHAT_REALISED:
    case BALLAST__RECORD__WHAT_REBALANCE_AUTO:
        return apply_rebalance(j, r, err);
    default:
        return damaged(r, err, "its kind is unknown; was it written by a newer version?");
    }
}

int coord_apply(struct coord *c, const Ballast__Record *record, struct err *err)
{
    int rc = apply_what(c, record, err);
    if (rc < 0)
        return rc;
    struct job *j = job_table_find(&c->jobs, record->job_id);
    if (j)
        j->last_seq = record->seq;
    if (record->seq > c->last_seq)
        c->last_seq = record->seq;
    return 0;
}

int coord_recall(struct coord *c, Ballast__Record *const *records, size_t n_records,
                 struct err *err)
{
    for (size_t i = 0; i < n_records; i++) {
        int rc = coord_apply(c, records[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

void coord_recall_steps(struct coord *c, const Ballast__Job *shown)
{
    struct job *j = job_table_find(&c->jobs, shown->id);
    if (!j || shown->step < j->live_step)
        return;
    j->live_step = shown->step;
    j->summary = (struct job_summary){
        .attempt = shown->attempt, .step = shown->step, .loss = shown->loss,
        .validation_loss = shown->validation_loss,
        .tokens_per_second = shown->tokens_per_second, .imbalance = shown->imbalance,
        .memory_bytes = shown->memory_bytes, .memory_planned_bytes = shown->memory_planned_bytes,
    };
}

void coord_restore_epoch(struct coord *c, uint64_t coordinator_epoch, record_seq last_seq,
                         job_id last_job_id)
{
    if (coordinator_epoch > c->epoch)
        c->epoch = coordinator_epoch;
    if (last_seq > c->last_seq)
        c->last_seq = last_seq;
    if (last_job_id > c->last_job_id)
        c->last_job_id = last_job_id;
}

void coord_restore_key(struct coord *c, const char *user,
                       const uint8_t key[IDEMPOTENCY_KEY_BYTES], const uint8_t *digest,
                       job_id job, uint64_t age_ns)
{
    if (age_ns < c->config.key_keep_ns)
        keys_add(&c->keys, user, key, digest, job, c->now_ns + c->config.key_keep_ns - age_ns);
}
