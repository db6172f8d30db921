/* apply.c - records: the one function that applies them, and the ways to make them
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
    if (c->n_waiting == c->n_waiting_alloc) {
        c->n_waiting_alloc = c->n_waiting_alloc ? 2 * c->n_waiting_alloc : 64;
        c->waiting = xrealloc(c->waiting, c->n_waiting_alloc * sizeof *c->waiting);
    }
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

static void apply_requeue(struct job *j, const Ballast__RecordState *s)
{
    j->n_restarts = j->n_failures_in_row = 0;
    j->started_at_ns = j->ended_at_ns = 0;
    j->ran_ms = 0;
    memset(j->requeue_key, 0, sizeof j->requeue_key);
    if (s->idempotency_key.len == sizeof j->requeue_key)
        memcpy(j->requeue_key, s->idempotency_key.data, sizeof j->requeue_key);
}

static int apply_state(struct coord *c, struct job *j, const Ballast__Record *r, struct err *err)
{
    const Ballast__RecordState *s = r->state;
    if (!job_may_move(j, s->state))
        return damaged(r, err, "a change of state that is not allowed");
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
    if (s->state == BALLAST__JOB_STATE__JOB_QUEUED)
        apply_requeue(j, s);
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

void coord_restore_key(struct coord *c, const char *user, const uint8_t key[16],
                       const uint8_t digest[16], job_id job, uint64_t age_ns)
{
    if (age_ns < c->config.key_keep_ns)
        keys_add(&c->keys, user, key, digest, job, c->now_ns + c->config.key_keep_ns - age_ns);
}

/* ---- making records ----------------------------------------------------------------------- */

Ballast__Record *emit_begin(struct coord *c, struct turn *t, job_id job,
                            Ballast__Record__WhatCase what)
{
    Ballast__Record *r = arena_alloc(&t->arena, sizeof *r);
    ballast__record__init(r);
    r->seq = c->last_seq + 1;
    r->at_ns = t->wall_ns;
    r->job_id = job;
    r->what_case = what;
    return r;
}

void emit_finish(struct coord *c, struct turn *t, Ballast__Record *r)
{
    struct err err = {0};
    turn_record(t, r);
    int rc = coord_apply(c, r, &err);
    assert(rc == 0);
}

static ProtobufCBinaryData binary(struct turn *t, const void *bytes, size_t n_bytes)
{
    return (ProtobufCBinaryData){.len = n_bytes, .data = arena_memdup(&t->arena, bytes, n_bytes)};
}

void emit_epoch(struct coord *c, struct turn *t)
{
    Ballast__Record *r = emit_begin(c, t, 0, BALLAST__RECORD__WHAT_EPOCH);
    r->epoch = arena_alloc(&t->arena, sizeof *r->epoch);
    ballast__record_epoch__init(r->epoch);
    r->epoch->coordinator_epoch = c->epoch + 1;
    emit_finish(c, t, r);
}

void emit_submitted(struct coord *c, struct turn *t, job_id id, Ballast__JobSpec *spec,
                    const char *user, const uint8_t *key, const uint8_t *digest)
{
    Ballast__Record *r = emit_begin(c, t, id, BALLAST__RECORD__WHAT_SUBMITTED);
    Ballast__RecordSubmitted *s = arena_alloc(&t->arena, sizeof *s);
    ballast__record_submitted__init(s);
    s->spec = spec;
    s->user = arena_strdup(&t->arena, user);
    s->idempotency_key = binary(t, key, IDEMPOTENCY_KEY_BYTES);
    s->request_digest = binary(t, digest, DIGEST_BYTES);
    r->submitted = s;
    emit_finish(c, t, r);
}

void emit_after(struct coord *c, struct turn *t, struct job *j, job_id done)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_AFTER);
    r->after = arena_alloc(&t->arena, sizeof *r->after);
    ballast__record_after__init(r->after);
    r->after->done_job = done;
    emit_finish(c, t, r);
}

/* Names the rendezvous of an attempt: unlike any other of this machine, also of another
 * coordinator's, which has another seed. */
static void make_coll_id(const struct coord *c, const struct job *j, uint8_t out[COLL_ID_BYTES])
{
    uint64_t parts[] = {c->config.seed, c->epoch, j->id, j->attempt + 1, c->last_seq};
    keys_digest(parts, sizeof parts, out);
}

void emit_assigned(struct coord *c, struct turn *t, struct job *j, const uint32_t *workers)
{
    size_t n = j->spec->parallel_workers;
    uint8_t coll_id[COLL_ID_BYTES];
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_ASSIGNED);
    Ballast__RecordAssigned *a = arena_alloc(&t->arena, sizeof *a);
    ballast__record_assigned__init(a);
    make_coll_id(c, j, coll_id);
    a->attempt = j->attempt + 1;
    a->coll_id = binary(t, coll_id, sizeof coll_id);
    a->n_workers = a->n_worker_epochs = n;
    a->workers = arena_alloc(&t->arena, n * sizeof *a->workers);
    a->worker_epochs = arena_alloc(&t->arena, n * sizeof *a->worker_epochs);
    for (size_t i = 0; i < n; i++) {
        const struct worker *w = c->fleet.workers[workers[i]];
        a->workers[i] = arena_strdup(&t->arena, w->name);
        a->worker_epochs[i] = w->epoch;
    }
    r->assigned = a;
    emit_finish(c, t, r);
}

void emit_held(struct coord *c, struct turn *t, struct job *j, bool held, const char *reason)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_HELD);
    r->held = arena_alloc(&t->arena, sizeof *r->held);
    ballast__record_held__init(r->held);
    r->held->held = held;
    r->held->reason = arena_strdup(&t->arena, reason);
    emit_finish(c, t, r);
}

void emit_progress(struct coord *c, struct turn *t, struct job *j, uint64_t checkpoint_step,
                   uint64_t step)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_PROGRESS);
    r->progress = arena_alloc(&t->arena, sizeof *r->progress);
    ballast__record_progress__init(r->progress);
    r->progress->checkpoint_step = checkpoint_step;
    r->progress->step = step;
    r->progress->ran_ms = job_ran_ms(j, t->now_ns);
    emit_finish(c, t, r);
    j->running_since_ns = t->now_ns; /* the time before is in ran_ms now */
}

/* The tick tells the jobs that come after it. */
static void note_ended(struct coord *c, job_id id)
{
    if (c->n_ended == c->n_ended_alloc) {
        c->n_ended_alloc = c->n_ended_alloc ? 2 * c->n_ended_alloc : 16;
        c->ended = xrealloc(c->ended, c->n_ended_alloc * sizeof *c->ended);
    }
    c->ended[c->n_ended++] = id;
}

void emit_state(struct coord *c, struct turn *t, struct job *j, const Ballast__RecordState *what)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_STATE);
    r->state = arena_memdup(&t->arena, what, sizeof *what);
    r->state->ran_ms = job_ran_ms(j, t->now_ns);
    emit_finish(c, t, r);
    j->state_since_ns = j->running_since_ns = t->now_ns;
    if (job_has_ended(j))
        note_ended(c, j->id);
}

void emit_worker(struct coord *c, struct turn *t, const char *name,
                 const Ballast__RecordWorker *what)
{
    Ballast__Record *r = emit_begin(c, t, 0, BALLAST__RECORD__WHAT_WORKER_CHANGED);
    r->worker = arena_strdup(&t->arena, name);
    r->worker_changed = arena_memdup(&t->arena, what, sizeof *what);
    r->worker_changed->node = arena_strdup(&t->arena, what->node);
    r->worker_changed->reason = arena_strdup(&t->arena, what->reason);
    emit_finish(c, t, r);
}

/* ---- dump --------------------------------------------------------------------------------- */

static void dump_job(FILE *out, const struct job *j)
{
    fprintf(out, "job %" PRIu64 " %s user=%s reason=\"%s\" exit=%s then=%s stop=%d held=%d \"%s\"",
            j->id, job_state_name(j->state), j->user, j->reason, j->exit,
            job_state_name(j->then), j->stop_mode, j->held, j->hold_reason);
    fprintf(out, " attempt=%u restarts=%u in_row=%u checkpoint=%" PRIu64 " step=%" PRIu64
            " ran_ms=%" PRIu64 " backoff_ms=%" PRIu64 " seen=%x assigned=%" PRIu64,
            j->attempt, j->n_restarts, j->n_failures_in_row, j->checkpoint_step, j->step,
            j->ran_ms, j->backoff_ms, j->states_seen, j->assigned_seq);
    fprintf(out, " at=%" PRId64 ",%" PRId64 ",%" PRId64, j->submitted_at_ns, j->started_at_ns,
            j->ended_at_ns);
    for (size_t i = 0; i < j->n_after; i++)
        fprintf(out, " after=%" PRIu64, j->after[i]);
    for (uint32_t r = 0; r < j->n_gang; r++)
        fprintf(out, " %s:%" PRIu64, j->gang[r], j->gang_epochs[r]);
    fprintf(out, " settings=%u start=%u", j->settings_revision,
            j->start_spec ? j->start_revision : j->settings_revision);
    rebalance_dump(out, &j->rebalance);
    uint8_t digest[DIGEST_BYTES];
    size_t n_bytes = ballast__job_spec__get_packed_size(j->spec);
    uint8_t *bytes = xcalloc(1, n_bytes);
    ballast__job_spec__pack(j->spec, bytes);
    keys_digest(bytes, n_bytes, digest);
    free(bytes);
    fprintf(out, " spec=%02x%02x%02x%02x requeue=%02x%02x coll=%02x%02x\n", digest[0], digest[1],
            digest[2], digest[3], j->requeue_key[0], j->requeue_key[1], j->coll_id[0],
            j->coll_id[1]);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(struct worker *const *)a)->name, (*(struct worker *const *)b)->name);
}

static void dump_workers(FILE *out, const struct fleet *f)
{
    struct worker **sorted = xmemdup(f->workers, f->n * sizeof *sorted);
    qsort(sorted, f->n, sizeof *sorted, by_name);
    for (size_t i = 0; i < f->n; i++) {
        const struct worker *w = sorted[i];
        if (w->record_state)
            fprintf(out, "worker %s node=%s state=%d epoch=%" PRIu64 " drained=%d \"%s\"\n",
                    w->name, w->node, w->record_state, w->record_epoch, w->is_drained,
                    w->record_reason);
    }
    free(sorted);
}

char *coord_dump(const struct coord *c)
{
    char *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);
    assert(out);
    uint64_t keys_sum = 0;
    for (size_t i = 0; i < c->keys.n_slots; i++) {
        const struct key_entry *e = &c->keys.slots[i];
        uint64_t parts[3] = {e->user_hash, e->job, 0};
        memcpy(&parts[2], e->key, sizeof parts[2]);
        uint8_t digest[DIGEST_BYTES];
        keys_digest(parts, sizeof parts, digest);
        memcpy(parts, digest, sizeof parts[0]);
        keys_sum += e->job ? parts[0] : 0; /* in any order */
    }
    fprintf(out, "epoch %" PRIu64 " seq %" PRIu64 " job %" PRIu64 " keys %zu %016" PRIx64 "\n",
            c->epoch, c->last_seq, c->last_job_id, c->keys.n, keys_sum);
    for (size_t i = 0; i < c->jobs.n; i++)
        if (!job_has_ended(c->jobs.jobs[i]))
            dump_job(out, c->jobs.jobs[i]);
    dump_workers(out, &c->fleet);
    fclose(out);
    return text;
}
