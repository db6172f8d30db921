/* emit.c - makes records; each is applied at once, so that the core knows what it says */
#include "coordinator/core.h"

#include <assert.h>

Ballast__Record *emit_begin(struct coord *c, struct turn *t, job_id job,
                            Ballast__Record__WhatCase what)
{
    Ballast__Record *r = arena_alloc(&t->arena, sizeof *r);
    ballast__record__init(r);
    r->seq = c->last_seq + 1;
    r->at_ns = t->wall_ns;
    r->job_id = job;
    if (t->by)
        r->by = arena_strdup(&t->arena, t->by);
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
    c->ended = xgrow(c->ended, c->n_ended, &c->n_ended_alloc, sizeof *c->ended);
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
    if (t->worker_by)
        r->by = arena_strdup(&t->arena, t->worker_by);
    r->worker_changed = arena_memdup(&t->arena, what, sizeof *what);
    r->worker_changed->node = arena_strdup(&t->arena, what->node);
    r->worker_changed->machine = arena_strdup(&t->arena, what->machine);
    r->worker_changed->reason = arena_strdup(&t->arena, what->reason);
    emit_finish(c, t, r);
}
