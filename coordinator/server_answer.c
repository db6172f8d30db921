/* server_answer.c - what a read of the databases becomes: an answer, a refusal, a job brought
 * back */
#include "coordinator/server_parts.h"

#include <errno.h>

#include "common/log.h"

/* The core, if what it knows is or will be durable. */
static struct coord *core_of(const struct server *s)
{
    return s->state == SERVER_SERVING ? s->core : NULL;
}

static ProtobufCMessage *answer_show(struct server *s, struct query *q)
{
    Ballast__JobShowReply *reply = arena_alloc(&q->arena, sizeof *reply);
    struct store_read *r = &q->read;
    struct coord *core = core_of(s);
    Ballast__Job *live = core ? coord_job(core, r->job, &q->arena) : NULL;
    ballast__job_show_reply__init(reply);
    reply->seq = core ? coord_last_seq(core) : 0;
    reply->job = live ? live : r->jobs[0];
    reply->spec = r->spec;
    reply->events = r->events;
    reply->n_events = r->n_events;
    return &reply->base;
}

static ProtobufCMessage *answer_list(struct server *s, struct query *q)
{
    Ballast__JobListReply *reply = arena_alloc(&q->arena, sizeof *reply);
    struct store_read *r = &q->read;
    struct coord *core = core_of(s);
    ballast__job_list_reply__init(reply);
    reply->seq = core ? coord_last_seq(core) : 0;
    reply->truncated = r->is_truncated;
    reply->jobs = r->jobs;
    reply->n_jobs = r->n_jobs;
    for (size_t i = 0; core && i < r->n_jobs; i++) {
        Ballast__Job *live = r->jobs[i]->ended_at_ns
                                 ? NULL : coord_job(core, r->jobs[i]->id, &q->arena);
        if (live)
            reply->jobs[i] = live;
    }
    return &reply->base;
}

static ProtobufCMessage *answer_events(struct query *q)
{
    Ballast__EventsReply *reply = arena_alloc(&q->arena, sizeof *reply);
    ballast__events_reply__init(reply);
    reply->events = q->read.events;
    reply->n_events = q->read.n_events;
    if (q->read.is_newest) {
        reply->before_seq = q->read.next;
        reply->next_seq = q->read.total + 1;
    } else {
        reply->next_seq = q->read.next;
    }
    return &reply->base;
}

static ProtobufCMessage *answer_output(struct query *q)
{
    Ballast__LogsReply *reply = arena_alloc(&q->arena, sizeof *reply);
    struct store_read *r = &q->read;
    ballast__logs_reply__init(reply);
    reply->bytes = (ProtobufCBinaryData){r->n_bytes, r->bytes};
    reply->next_offset = r->next;
    reply->ended = query_job_has_ended(r) && r->next >= r->total;
    reply->n_ranks = r->jobs[0]->gang_size;
    reply->times = r->times;
    reply->n_times = r->n_times;
    return &reply->base;
}

static ProtobufCMessage *answer_steps(struct query *q)
{
    Ballast__MetricsReply *reply = arena_alloc(&q->arena, sizeof *reply);
    struct store_read *r = &q->read;
    ballast__metrics_reply__init(reply);
    reply->steps = r->steps;
    reply->n_steps = r->n_steps;
    reply->ended = query_job_has_ended(r) && r->n_steps < r->limit;
    return &reply->base;
}

ProtobufCMessage *query_reply(struct server *s, struct query *q)
{
    switch (q->read.kind) {
    case STORE_JOB:
        return answer_show(s, q);
    case STORE_JOBS:
        return answer_list(s, q);
    case STORE_EVENTS:
        return answer_events(q);
    case STORE_OUTPUT:
        return answer_output(q);
    case STORE_STEPS:
        return answer_steps(q);
    default:
        return balance_answer(&q->read, &q->arena);
    }
}

static bool was_read(const struct query *q, job_id job)
{
    bool found = q->read.job == job;
    for (const struct query *r = q->recalled; r; r = r->next)
        found |= r->read.job == job;
    return found;
}

/* Another job must be brought back for the same request: keep what was read, read that too. */
static void recall_more(struct server *s, struct query *q, job_id job)
{
    struct query *kept = xcalloc(1, sizeof *kept);
    kept->read = q->read;
    kept->next = q->recalled;
    q->recalled = kept;
    q->read = (struct store_read){.kind = STORE_RECORDS, .job = job};
    query_submit(s, q);
}

static void bring_back(struct server *s, const struct store_read *r)
{
    struct err err = {0};
    if (coord_job_spec(s->core, r->job) || !r->n_records)
        return; /* another request of this turn has brought it back */
    if (coord_recall(s->core, r->records, r->n_records, &err) < 0)
        log_error("job=%llu msg=\"%s\"", (unsigned long long)r->job, err.text);
    else if (r->n_jobs)
        coord_recall_steps(s->core, r->jobs[0]);
}

/* True when the request is done with, in the turn under way. */
static bool finish_recall(struct server *s, struct query *q)
{
    struct turn_work *w = turn_get(s);
    bring_back(s, &q->read);
    for (struct query *r = q->recalled; r; r = r->next)
        bring_back(s, &r->read);
    job_id more = coord_wants_job(s->core, q->envelope->method, q->payload);
    if (more && !was_read(q, more)) {
        recall_more(s, q, more);
        return false;
    }
    w->turn.is_limited = q->is_limited;
    coord_message(s->core, &w->turn, q->peer, q->user, q->envelope, q->payload);
    return true;
}

static void refuse_read(struct query *q, Ballast__Status *out)
{
    static const struct {
        int rc;
        Ballast__Code code;
        const char *reason;
    } rows[] = {
        {-ENOENT, BALLAST__CODE__NOT_FOUND, "NO_JOB"},
        {-EINVAL, BALLAST__CODE__INVALID_ARGUMENT, "BAD_LIST"},
        {-ETIME, BALLAST__CODE__RESOURCE_EXHAUSTED, "LIST_TOO_LONG"},
        {0, BALLAST__CODE__DATA_LOSS, "STORE"},
    };
    size_t i = 0;
    while (rows[i].rc && rows[i].rc != q->read.rc)
        i++;
    check_status(out, &q->arena, rows[i].code, rows[i].reason, "%s", q->read.err.text);
}

bool query_refuses(struct query *q, Ballast__Status *out_status)
{
    const struct store_read *r = &q->read;
    if (balance_refuses(r, &q->arena, out_status))
        return true;
    if (r->rc < 0) {
        refuse_read(q, out_status);
        return true;
    }
    if (r->kind == STORE_OUTPUT && r->rank >= r->jobs[0]->gang_size) {
        check_status(out_status, &q->arena, BALLAST__CODE__OUT_OF_RANGE, "RANK",
                     "job %llu has %u ranks", (unsigned long long)r->job,
                     r->jobs[0]->gang_size);
        return true;
    }
    return false;
}

void query_answer(struct server *s, struct query *q)
{
    struct peer_state *p = q->http ? NULL : peer_state_of(s, q->peer);
    Ballast__Status status;
    if (q->http)
        http_answer_query(s, q);
    if (!p) {
        query_free(q); /* nobody waits for it any more */
        return;
    }
    if (query_refuses(q, &status)) {
        refuse(s, q->peer, q->envelope, &status);
    } else if (q->is_recall && s->state != SERVER_SERVING) {
        say_not_serving(s, &q->arena, &status);
        refuse(s, q->peer, q->envelope, &status);
    } else if (q->is_recall) {
        if (!finish_recall(s, q))
            return;
    } else {
        answer(s, q->peer, q->envelope, query_reply(s, q));
    }
    p->n_queries--;
    if (!s->open) {
        query_free(q);
        return;
    }
    q->next = s->open->answered;
    s->open->answered = q;
}
