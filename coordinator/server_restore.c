/* server_restore.c - the core from the store, again after each commit that failed
 *
 * Turns come back committed or not. One that was not makes the core a liar: it knows what never
 * happened, so it is dropped and made anew from the records. */
#include "coordinator/server_parts.h"

#include <assert.h>
#include <inttypes.h>

#include "common/clock.h"
#include "common/log.h"

#define RETRY_NS NS_PER_S

/* ---- the state read -------------------------------------------------------------------------- */

static void drop_core(struct server *s)
{
    assert(!s->open);
    coord_destroy(s->core);
    s->core = NULL;
    s->has_failed = false;
    s->restart = NULL;
}

void server_restore(struct server *s)
{
    struct query *q = xcalloc(1, sizeof *q);
    q->work.kind = WORK_RESTORE;
    q->read = (struct store_read){.kind = STORE_RESTORE, .wall_ns = clock_wall_ns(),
                                  .keep_ns = s->core_config.key_keep_ns};
    q->work.batch = (struct store_batch){.reads = &q->read, .n_reads = 1};
    s->state = SERVER_RESTORING;
    s->n_out++;
    store_resume(s->store);
    store_submit(s->store, &q->work.batch);
}

static int replay(struct server *s, const struct store_read *r, struct err *err)
{
    const struct store_restored *from = &r->restored;
    coord_restore_epoch(s->core, from->coordinator_epoch, from->last_seq, from->last_job);
    for (size_t i = 0; i < from->n_keys; i++) {
        const struct store_key *k = &from->keys[i];
        coord_restore_key(s->core, k->user, k->key, k->digest, k->job, k->age_ns);
    }
    for (size_t i = 0; i < r->n_records; i++) {
        int rc = coord_apply(s->core, r->records[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static void on_restored(struct server *s, struct query *q)
{
    struct err err = {0};
    int rc = q->read.rc;
    if (s->state == SERVER_STOPPING) {
        query_free(q);
        return;
    }
    if (rc < 0)
        err = q->read.err;
    s->core = coord_create(&s->core_config);
    if (rc == 0)
        rc = replay(s, &q->read, &err);
    size_t n_records = q->read.n_records;
    query_free(q);
    if (rc < 0) {
        server_fail(s, rc, err.text);
        return;
    }
    s->state = SERVER_STARTING;
    struct turn_work *w = turn_get(s);
    coord_start(s->core, &w->turn);
    s->restart = w;
    turn_end(s);
    log_info("epoch=%" PRIu64 " seq=%" PRIu64 " records=%zu msg=\"state restored\"",
             coord_epoch(s->core), coord_last_seq(s->core), n_records);
}

/* ---- what comes back from the store ---------------------------------------------------------- */

static void count_records(struct server *s, const struct turn *t)
{
    for (size_t i = 0; i < t->n_records; i++) {
        const Ballast__Record *r = t->records[i];
        bool wants_job = r->what_case == BALLAST__RECORD__WHAT_ASSIGNED && s->core;
        metrics_record(&s->metrics, r,
                       wants_job ? coord_job(s->core, r->job_id, &s->scratch) : NULL);
    }
    arena_reset(&s->scratch);
}

static void on_turn_back(struct server *s, struct turn_work *w)
{
    s->n_turns_out--;
    if (w->work.batch.rc < 0) {
        if (!s->has_failed) /* the first one says why, those after it only that they follow */
            s->store_err = w->work.batch.err;
        s->has_failed = true;
        if (s->link)
            turn_fail(s, &w->turn);
        return;
    }
    count_records(s, &w->turn);
    if (w->turn.n_records && s->core && !s->has_failed)
        coord_committed(s->core, w->turn.records[w->turn.n_records - 1]->seq);
    if (w == s->restart) {
        s->restart = NULL;
        if (s->state == SERVER_STARTING) {
            s->state = SERVER_SERVING;
            s->store_err = (struct err){0};
            if (!s->link && server_listen(s) < 0)
                return;
        }
    }
    if (!s->link)
        return;
    turn_send(s, &w->turn);
    query_wake(s, w);
}

/* Counts what came of a batch that is back. */
static void observe(struct server *s, const struct work *work)
{
    const struct query *q = (const struct query *)work;
    if (work->batch.commit_ns)
        metrics_observe(&s->metrics, METRICS_COMMIT, work->batch.commit_ns);
    if (work->kind != WORK_QUERY)
        return;
    metrics_observe(&s->metrics, METRICS_QUERY, clock_now_ns() - q->submitted_ns);
    if (q->read.kind == STORE_BACKUP && q->read.rc == 0)
        s->backup_ns = clock_now_ns();
}

/* A commit failed: everything decided since is void. */
static void recover(struct server *s)
{
    if (s->state != SERVER_STOPPING)
        s->state = s->state == SERVER_STARTING ? SERVER_WAITING : SERVER_RESTORING;
    if (s->n_turns_out)
        return; /* the rest of them fail too, and come first */
    bool was_starting = s->state == SERVER_WAITING;
    drop_core(s);
    if (s->state == SERVER_STOPPING)
        return;
    if (was_starting)
        s->retry_ns = clock_now_ns() + RETRY_NS;
    else
        server_restore(s);
}

void server_take_stored(struct server *s)
{
    struct turn_work *turns = NULL, **last_turn = &turns;
    struct query *answers = NULL, **last = &answers, *restored = NULL;
    for (struct store_batch *b = store_take_done(s->store), *next; b; b = next) {
        struct work *work = (struct work *)b;
        next = b->next;
        s->n_out--;
        observe(s, work);
        s->n_sql -= work->kind == WORK_QUERY && ((struct query *)work)->read.kind == STORE_SQL;
        if (work->kind == WORK_TURN) {
            struct turn_work *w = (struct turn_work *)work;
            on_turn_back(s, w);
            *last_turn = w;
            last_turn = &w->next;
        } else if (work->kind == WORK_RESTORE) {
            restored = (struct query *)work;
        } else if (!s->link || !query_park(s, (struct query *)work)) {
            *last = (struct query *)work;
            last = &(*last)->next;
            *last = NULL;
        }
    }
    if (s->has_failed)
        recover(s);
    if (restored)
        on_restored(s, restored);
    for (struct turn_work *w = turns, *next; w; w = next) {
        next = w->next;
        for (size_t i = 0; s->state == SERVER_SERVING && i < w->n_logs; i++)
            coord_ack_log(s->core, &turn_get(s)->turn, w->logs[i].peer, w->logs[i].chunk,
                          w->logs[i].stored_offset);
        turn_free(w);
    }
    if (answers && s->state == SERVER_SERVING)
        turn_get(s);
    for (struct query *q = answers, *next; q; q = next) {
        next = q->next;
        if (s->link)
            query_answer(s, q);
        else
            query_free(q);
    }
    if (s->open)
        turn_end(s);
}
