/* server_query.c - requests that the databases answer: read, perhaps wait for news, read again
 *
 * A query's read follows every batch handed over before it, and its answer leaves with a turn, so
 * nobody reads what may still be lost. Reads come back in the order in which they were handed
 * over, so what is parked before a turn comes back hears that turn's news. */
#include "coordinator/server_parts.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

#define EVENTS_DEFAULT 1000u
#define EVENTS_MAX     5000u
#define STEPS_DEFAULT  1000u
#define STEPS_MAX      10000u
#define JOBS_DEFAULT   1000u
#define JOBS_MAX       10000u
#define OUTPUT_BYTES_MAX (256u << 10)
#define SHOWN_EVENTS   20u

static uint32_t limit_of(uint32_t asked, uint32_t preset, uint32_t max)
{
    return asked == 0 ? preset : asked < max ? asked : max;
}

bool query_is_ours(const Ballast__Envelope *e, const ProtobufCMessage *payload)
{
    switch (e->method) {
    case BALLAST__METHOD__METHOD_JOB_SHOW:
    case BALLAST__METHOD__METHOD_EVENTS:
    case BALLAST__METHOD__METHOD_LOGS:
    case BALLAST__METHOD__METHOD_METRICS:
        return true;
    case BALLAST__METHOD__METHOD_JOB_LIST: {
        const Ballast__JobListRequest *m = (const Ballast__JobListRequest *)payload;
        return m->all_states || m->n_terms || m->n_order;
    }
    default:
        return balance_is_ours(e->method);
    }
}

/* ---- beginning ------------------------------------------------------------------------------- */

/* What to read for a request; returns how long it may wait for news. */
static uint32_t plan_read(const struct query *q, struct store_read *r)
{
    switch (q->envelope->method) {
    case BALLAST__METHOD__METHOD_JOB_SHOW:
        r->kind = STORE_JOB;
        r->job = ((const Ballast__JobRequest *)q->payload)->job_id;
        r->limit = SHOWN_EVENTS;
        return 0;
    case BALLAST__METHOD__METHOD_JOB_LIST: {
        const Ballast__JobListRequest *m = (const Ballast__JobListRequest *)q->payload;
        r->kind = STORE_JOBS;
        r->from = m->after_id;
        r->user = m->user;
        r->is_live = !m->all_states;
        r->terms = m->terms;
        r->n_terms = m->n_terms;
        r->order = m->order;
        r->n_order = m->n_order;
        r->limit = limit_of(m->limit, JOBS_DEFAULT, JOBS_MAX);
        return 0;
    }
    case BALLAST__METHOD__METHOD_EVENTS: {
        const Ballast__EventsRequest *m = (const Ballast__EventsRequest *)q->payload;
        r->kind = STORE_EVENTS;
        r->job = m->job_id;
        r->is_newest = m->last > 0;
        r->from = r->is_newest ? m->before_seq : m->from_seq;
        r->terms = m->terms;
        r->n_terms = m->n_terms;
        r->limit = m->last ? limit_of(m->last, 1, EVENTS_MAX)
                           : limit_of(m->limit, EVENTS_DEFAULT, EVENTS_MAX);
        return m->wait_ms;
    }
    case BALLAST__METHOD__METHOD_LOGS: {
        const Ballast__LogsRequest *m = (const Ballast__LogsRequest *)q->payload;
        r->kind = STORE_OUTPUT;
        r->job = m->job_id;
        r->rank = m->rank;
        r->from = m->offset;
        r->last = m->last_bytes;
        r->with_times = m->with_times;
        r->limit = limit_of(m->limit_bytes, OUTPUT_BYTES_MAX, OUTPUT_BYTES_MAX);
        return m->wait_ms;
    }
    case BALLAST__METHOD__METHOD_METRICS: {
        const Ballast__MetricsRequest *m = (const Ballast__MetricsRequest *)q->payload;
        r->kind = STORE_STEPS;
        r->job = m->job_id;
        r->from = m->after_step;
        r->last = m->last;
        r->wall_ns = m->since_ns;
        r->limit = limit_of(m->limit, STEPS_DEFAULT, STEPS_MAX);
        return m->wait_ms;
    }
    default:
        balance_plan_read(q->envelope->method, q->payload, r);
        return 0;
    }
}

void query_submit(struct server *s, struct query *q)
{
    q->submitted_ns = clock_now_ns();
    q->work.batch = (struct store_batch){.reads = &q->read, .n_reads = 1};
    s->n_out++;
    store_submit(s->store, &q->work.batch);
}

struct query *query_make_http(struct http_request *http, Ballast__Method method)
{
    struct query *q = xcalloc(1, sizeof *q);
    q->work.kind = WORK_QUERY;
    q->http = http;
    q->envelope = arena_alloc(&q->arena, sizeof *q->envelope);
    ballast__envelope__init(q->envelope);
    q->envelope->method = method;
    return q;
}

static struct query *make(struct server *s, link_peer peer, const struct identity *who,
                          const struct wire_bytes *frames)
{
    struct query *q = xcalloc(1, sizeof *q);
    struct checked_message m;
    Ballast__Status status;
    check_message(frames, WIRE_FRAMES, CHECK_CLIENT | CHECK_WORKER, &q->arena, &m, &status);
    q->work.kind = WORK_QUERY;
    q->envelope = m.envelope; /* it was checked before, in the turn's memory */
    q->payload = m.payload;
    q->peer = peer;
    q->user = xstrdup(who->user);
    q->is_limited = auth_is_limited(who);
    struct peer_state *p = peer_state_of(s, peer);
    if (p)
        p->n_queries++;
    return q;
}

void query_begin_http(struct server *s, struct query *q)
{
    plan_read(q, &q->read);
    query_submit(s, q);
}

void query_begin(struct server *s, link_peer peer, const struct identity *who,
                 const struct wire_bytes *frames)
{
    struct query *q = make(s, peer, who, frames);
    uint32_t wait_ms = plan_read(q, &q->read);
    q->deadline_ns = clock_now_ns() + wait_ms * NS_PER_MS;
    s->n_sql += q->read.kind == STORE_SQL;
    query_submit(s, q);
}

void query_begin_recall(struct server *s, link_peer peer, const struct identity *who,
                        const struct wire_bytes *frames, job_id job)
{
    struct query *q = make(s, peer, who, frames);
    q->is_recall = true;
    q->read = (struct store_read){.kind = STORE_RECORDS, .job = job};
    query_submit(s, q);
}

void query_free(struct query *q)
{
    for (struct query *r = q->recalled, *next; r; r = next) {
        next = r->next;
        query_free(r);
    }
    store_read_fini(&q->read);
    arena_fini(&q->arena);
    free(q->user);
    free(q);
}

/* ---- waiting for news ------------------------------------------------------------------------ */

bool query_job_has_ended(const struct store_read *r)
{
    return r->n_jobs && r->jobs[0]->ended_at_ns > 0;
}

static bool is_empty(const struct store_read *r)
{
    switch (r->kind) {
    case STORE_EVENTS:
        return !r->n_events && !r->is_truncated && !r->is_newest;
    case STORE_STEPS:
        return !r->n_steps && !query_job_has_ended(r);
    case STORE_OUTPUT:
        return !r->n_bytes && !query_job_has_ended(r) && r->rank < r->jobs[0]->gang_size;
    default:
        return false;
    }
}

bool query_park(struct server *s, struct query *q)
{
    if (q->is_recall || q->read.rc < 0 || !is_empty(&q->read) ||
        clock_now_ns() >= q->deadline_ns || s->state == SERVER_STOPPING ||
        !peer_state_of(s, q->peer))
        return false;
    q->previous = NULL;
    q->next = s->parked;
    if (s->parked)
        s->parked->previous = q;
    s->parked = q;
    s->n_parked++;
    if (q->deadline_ns < s->poll_deadline_ns)
        s->poll_deadline_ns = q->deadline_ns;
    return true;
}

static void unpark(struct server *s, struct query *q)
{
    if (q->previous)
        q->previous->next = q->next;
    else
        s->parked = q->next;
    if (q->next)
        q->next->previous = q->previous;
    q->next = q->previous = NULL;
    s->n_parked--;
}

static bool concerns(const struct store_read *r, const struct turn_work *w)
{
    const struct turn *t = &w->turn;
    for (size_t i = 0; i < t->n_records; i++)
        if (r->kind == STORE_EVENTS ? !r->job || t->records[i]->job_id == r->job
                                    : t->records[i]->job_id == r->job)
            return true;
    for (size_t i = 0; r->kind == STORE_STEPS && i < t->n_steps; i++)
        if (t->steps[i].job == r->job)
            return true;
    for (size_t i = 0; r->kind == STORE_OUTPUT && i < w->n_logs; i++)
        if (w->logs[i].chunk->job_id == r->job && w->logs[i].chunk->rank == r->rank)
            return true;
    return false;
}

void query_wake(struct server *s, const struct turn_work *w)
{
    if (!w->turn.n_records && !w->turn.n_steps && !w->n_logs)
        return;
    for (struct query *q = s->parked, *next; q; q = next) {
        next = q->next;
        if (!concerns(&q->read, w))
            continue;
        unpark(s, q);
        store_read_fini(&q->read);
        q->read = (struct store_read){0};
        plan_read(q, &q->read);
        query_submit(s, q);
    }
}

void query_expire(struct server *s, uint64_t now_ns)
{
    if (now_ns < s->poll_deadline_ns)
        return;
    s->poll_deadline_ns = UINT64_MAX;
    for (struct query *q = s->parked, *next; q; q = next) {
        next = q->next;
        if (now_ns >= q->deadline_ns) {
            unpark(s, q);
            query_answer(s, q);
        } else if (q->deadline_ns < s->poll_deadline_ns) {
            s->poll_deadline_ns = q->deadline_ns;
        }
    }
}

void query_stop_all(struct server *s)
{
    Ballast__Status status;
    check_status(&status, &s->scratch, BALLAST__CODE__UNAVAILABLE, "STOPPING",
                 "the coordinator is stopping");
    while (s->parked) {
        struct query *q = s->parked;
        unpark(s, q);
        refuse(s, q->peer, q->envelope, &status);
        query_free(q);
    }
}

void query_forget_peer(struct server *s, link_peer peer)
{
    for (struct query *q = s->parked, *next; q; q = next) {
        next = q->next;
        if (q->peer == peer) {
            unpark(s, q);
            query_free(q);
        }
    }
}
