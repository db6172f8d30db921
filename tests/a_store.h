/* a_store.h - for tests of the store: one whose batches are waited for, and records to fill it */
#ifndef TESTS_A_STORE_H
#define TESTS_A_STORE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/store.h"
#include "tests/folder.h"

/* ---- a store whose batches are waited for ---------------------------------------------------- */

struct bench {
    char folder[64];
    struct store *store;
    pthread_mutex_t lock;
    pthread_cond_t  wake;
    bool is_notified;
};

static inline void notify(void *context)
{
    struct bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->is_notified = true;
    pthread_cond_signal(&b->wake);
    pthread_mutex_unlock(&b->lock);
}

static inline void bench_make(struct bench *b)
{
    *b = (struct bench){.folder = "/tmp/test_store.XXXXXX"};
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->wake, NULL);
    assert_non_null(mkdtemp(b->folder));
}

static inline void bench_open(struct bench *b)
{
    struct err err = {0};
    if (store_open(b->folder, notify, b, &b->store, &err) < 0)
        fail_msg("%s", err.text);
}

static inline void bench_remove(struct bench *b)
{
    store_close(b->store);
    remove_tree(b->folder);
}

/* Waits until batches are said to be back, and takes them. */
static inline struct store_batch *next_done(struct bench *b)
{
    pthread_mutex_lock(&b->lock);
    while (!b->is_notified)
        pthread_cond_wait(&b->wake, &b->lock);
    b->is_notified = false;
    pthread_mutex_unlock(&b->lock);
    return store_take_done(b->store);
}

/* Hands a batch over and waits until it is back. */
static inline int do_batch(struct bench *b, struct store_batch *batch)
{
    store_submit(b->store, batch);
    for (;;)
        for (struct store_batch *d = next_done(b); d; d = d->next)
            if (d == batch)
                return batch->rc;
}

static inline struct store_read do_read(struct bench *b, struct store_read read)
{
    struct store_batch batch = {.reads = &read, .n_reads = 1};
    do_batch(b, &batch);
    return read;
}

/* ---- records --------------------------------------------------------------------------------- */

static uint8_t digest[16] = "0123456789abcde";

struct story {
    struct arena arena;
    Ballast__Record *records[64];
    size_t   n;
    uint64_t seq;
};

static inline Ballast__Record *say(struct story *s, uint64_t job, const char *worker)
{
    Ballast__Record *r = arena_alloc(&s->arena, sizeof *r);
    ballast__record__init(r);
    r->seq = ++s->seq;
    r->at_ns = 1000 * (int64_t)NS_PER_S + (int64_t)s->seq;
    r->job_id = job;
    r->worker = arena_strdup(&s->arena, worker);
    s->records[s->n++] = r;
    return r;
}

static inline void say_submitted(struct story *s, uint64_t job)
{
    Ballast__Record *r = say(s, job, "");
    r->what_case = BALLAST__RECORD__WHAT_SUBMITTED;
    r->submitted = arena_alloc(&s->arena, sizeof *r->submitted);
    ballast__record_submitted__init(r->submitted);
    r->submitted->spec = arena_alloc(&s->arena, sizeof *r->submitted->spec);
    ballast__job_spec__init(r->submitted->spec);
    r->submitted->spec->name = "hybrid";
    r->submitted->spec->train_steps = 300;
    r->submitted->spec->parallel_workers = 2;
    r->submitted->user = "ada";
    uint8_t *key = arena_alloc(&s->arena, 16);
    memcpy(key, &job, sizeof job);
    r->submitted->idempotency_key = (ProtobufCBinaryData){16, key};
    r->submitted->request_digest = (ProtobufCBinaryData){16, digest};
}

static inline void say_assigned(struct story *s, uint64_t job, uint32_t attempt)
{
    static char *names[] = {"w0", "w1"};
    Ballast__Record *r = say(s, job, "");
    r->what_case = BALLAST__RECORD__WHAT_ASSIGNED;
    r->assigned = arena_alloc(&s->arena, sizeof *r->assigned);
    ballast__record_assigned__init(r->assigned);
    r->assigned->attempt = attempt;
    r->assigned->workers = names;
    r->assigned->n_workers = 2;
}

static inline void say_state(struct story *s, uint64_t job, Ballast__JobState state,
                             const char *reason)
{
    Ballast__Record *r = say(s, job, "");
    r->what_case = BALLAST__RECORD__WHAT_STATE;
    r->state = arena_alloc(&s->arena, sizeof *r->state);
    ballast__record_state__init(r->state);
    r->state->state = state;
    r->state->reason = arena_strdup(&s->arena, reason);
    r->state->exit = state == BALLAST__JOB_STATE__JOB_DONE ? "0" : "";
}

static inline void say_worker(struct story *s, const char *name, Ballast__WorkerState state)
{
    Ballast__Record *r = say(s, 0, name);
    r->what_case = BALLAST__RECORD__WHAT_WORKER_CHANGED;
    r->worker_changed = arena_alloc(&s->arena, sizeof *r->worker_changed);
    ballast__record_worker__init(r->worker_changed);
    r->worker_changed->state = state;
    r->worker_changed->worker_epoch = UINT64_MAX - 3;
}

static inline int tell(struct bench *b, struct story *s)
{
    struct store_batch batch = {.records = s->records, .n_records = s->n};
    int rc = do_batch(b, &batch);
    s->n = 0;
    return rc;
}

/* Job 1 ran and is done, job 2 lives on its second attempt, w0 was lost and came back. */
static inline void tell_two_jobs(struct bench *b, struct story *s)
{
    say_worker(s, "w0", BALLAST__WORKER_STATE__WORKER_IDLE);
    say_submitted(s, 1);
    say_assigned(s, 1, 1);
    say_state(s, 1, BALLAST__JOB_STATE__JOB_RUNNING, "");
    say_state(s, 1, BALLAST__JOB_STATE__JOB_DONE, "all steps done");
    say_submitted(s, 2);
    say_assigned(s, 2, 1);
    say_worker(s, "w0", BALLAST__WORKER_STATE__WORKER_LOST);
    say_state(s, 2, BALLAST__JOB_STATE__JOB_RECOVERING, "worker w0 was lost");
    say_worker(s, "w0", BALLAST__WORKER_STATE__WORKER_IDLE);
    say_assigned(s, 2, 2);
    assert_int_equal(tell(b, s), 0);
}

/* A new store that was told so; ended as bench_make and bench_open are. */
static inline void begin_with_two_jobs(struct bench *b, struct story *s)
{
    bench_make(b);
    bench_open(b);
    tell_two_jobs(b, s);
}

#endif
