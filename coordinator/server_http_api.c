/* server_http_api.c - the dashboard's JSON, which is that of the client's --json
 *
 * What the databases answer goes the same way as a client's request, as a query. Live jobs are
 * told as the core knows them, perhaps a moment before what they say is durable: nothing is
 * promised to who only looks. */
#include "coordinator/server_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/version.h"
#include "coordinator/event.h"
#include "coordinator/http.h"
#include "coordinator/json_of.h"

#define QUERIES_MAX   16u   /* at once; what comes beyond is told to come again */
#define ITEMS_MAX     1000u /* jobs or events of one answer */
#define JOBS_SHOWN    100u
#define EVENTS_SHOWN  100u
#define STEPS_SHOWN   1000u
#define STEPS_MAX     10000u
#define WINDOWS_SHOWN 60u

/* Takes value. */
static void say_json(struct http_request *r, unsigned status, struct json *value)
{
    char *text = json_text(value, false);
    http_answer(r, status, "application/json", text, strlen(text), 0);
    free(text);
    json_destroy(value);
}

static void refuse_with(struct http_request *r, const Ballast__Status *why)
{
    static const struct {
        Ballast__Code code;
        unsigned status;
    } rows[] = {
        {BALLAST__CODE__INVALID_ARGUMENT, 400},   {BALLAST__CODE__NOT_FOUND, 404},
        {BALLAST__CODE__FAILED_PRECONDITION, 409}, {BALLAST__CODE__RESOURCE_EXHAUSTED, 429},
        {BALLAST__CODE__UNAVAILABLE, 503},        {BALLAST__CODE__OK, 500},
    };
    struct json *o = json_new_object();
    size_t i = 0;
    while (rows[i].code != BALLAST__CODE__OK && rows[i].code != why->code)
        i++;
    json_put(o, "code", json_new_string(check_code_name(why->code)));
    json_put(o, "reason", json_new_string(why->reason));
    json_put(o, "message", json_new_string(why->message));
    say_json(r, rows[i].status, o);
}

static void refuse_now(struct server *s, struct http_request *r, Ballast__Code code,
                       const char *reason, const char *message)
{
    Ballast__Status status;
    check_status(&status, &s->scratch, code, reason, "%s", message);
    refuse_with(r, &status);
    arena_reset(&s->scratch);
}

/* ---- what the core answers ------------------------------------------------------------------- */

static void say_cluster(struct server *s, struct http_request *r)
{
    struct metrics_now now;
    struct json *o = json_new_object(), *jobs = json_new_object(), *workers = json_new_object();
    http_look_around(s, &now);
    for (int i = BALLAST__JOB_STATE__JOB_QUEUED; i <= (int)JOB_STATE_MAX; i++)
        if (!job_state_is_ended((Ballast__JobState)i))
            json_put(jobs, event_job_state((Ballast__JobState)i), json_new_u64(now.n_jobs[i]));
    for (int i = BALLAST__WORKER_STATE__WORKER_IDLE; i <= (int)WORKER_STATE_MAX; i++)
        json_put(workers, event_worker_state((Ballast__WorkerState)i),
                 json_new_u64(now.fleet.n[i]));
    json_put(o, "version", json_new_string(BALLAST_VERSION));
    json_put(o, "commit", json_new_string(BALLAST_COMMIT));
    json_put(o, "uptime_seconds",
             json_new_double((double)(clock_wall_ns() - s->started_wall_ns) / 1e9));
    json_put(o, "jobs", jobs);
    json_put(o, "workers", workers);
    say_json(r, 200, json_of_one("Cluster", coord_last_seq(s->core), o));
}

static void say_workers(struct server *s, struct http_request *r)
{
    struct arena a = {0};
    struct json *items = json_new_array();
    Ballast__Worker **workers;
    size_t n = coord_workers(s->core, clock_now_ns(), &a, &workers);
    for (size_t i = 0; i < n; i++)
        json_push(items, json_of_worker(workers[i]));
    say_json(r, 200, json_of_list("WorkerList", coord_last_seq(s->core), false, items));
    arena_fini(&a);
}

/* ---- what the databases answer --------------------------------------------------------------- */

/* ?name=, or preset where it is not given. False where it is no number up to max. */
static bool read_number(const struct http_request *r, const char *name, uint64_t preset,
                        uint64_t max, uint64_t *out)
{
    const char *text = http_argument(r, name);
    char *end;
    *out = preset;
    if (!text)
        return true;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno && *out <= max;
}

static bool ask_jobs(const struct http_request *r, struct query *q, job_id job)
{
    Ballast__JobListRequest *m = arena_alloc(&q->arena, sizeof *m);
    Ballast__ListOrder *order = arena_alloc(&q->arena, sizeof *order);
    uint64_t count, all;
    (void)job;
    ballast__job_list_request__init(m);
    ballast__list_order__init(order);
    order->column = "jobid";
    order->descending = true; /* the newest first */
    m->order = arena_memdup(&q->arena, &order, sizeof order);
    m->n_order = 1;
    q->payload = &m->base;
    bool is_right = read_number(r, "all", 1, 1, &all);
    is_right &= read_number(r, "count", JOBS_SHOWN, ITEMS_MAX, &count) && count;
    m->all_states = all != 0;
    m->limit = (uint32_t)count;
    return is_right;
}

static bool ask_job(const struct http_request *r, struct query *q, job_id job)
{
    Ballast__JobRequest *m = arena_alloc(&q->arena, sizeof *m);
    (void)r;
    ballast__job_request__init(m);
    m->job_id = job;
    q->payload = &m->base;
    return true;
}

static bool ask_events(const struct http_request *r, struct query *q, job_id job)
{
    Ballast__EventsRequest *m = arena_alloc(&q->arena, sizeof *m);
    uint64_t count;
    ballast__events_request__init(m);
    q->payload = &m->base;
    bool is_right = read_number(r, "count", EVENTS_SHOWN, ITEMS_MAX, &count) && count;
    m->job_id = job;
    m->last = (uint32_t)count + 1; /* are there more? */
    return is_right;
}

static bool ask_steps(const struct http_request *r, struct query *q, job_id job)
{
    Ballast__MetricsRequest *m = arena_alloc(&q->arena, sizeof *m);
    uint64_t count;
    ballast__metrics_request__init(m);
    q->payload = &m->base;
    bool is_right = read_number(r, "count", STEPS_SHOWN, STEPS_MAX, &count) && count &&
                    read_number(r, "after", 0, INT64_MAX, &m->after_step);
    m->job_id = job;
    m->last = m->limit = (uint32_t)count + 1; /* are there more? */
    return is_right;
}

/* ?window=, or preset where it is not given. False where it is none. */
static bool read_window(const struct http_request *r, const char *preset, struct arena *a,
                        char **out)
{
    const char *text = http_argument(r, "window");
    *out = arena_strdup(a, text ? text : preset);
    return check_is_window(*out);
}

static bool ask_experts(const struct http_request *r, struct query *q, job_id job)
{
    Ballast__ExpertsRequest *m = arena_alloc(&q->arena, sizeof *m);
    ballast__experts_request__init(m);
    m->job_id = job;
    m->layer = -1;
    q->payload = &m->base;
    return read_window(r, "1m", &q->arena, &m->window);
}

static bool ask_load_history(const struct http_request *r, struct query *q, job_id job)
{
    uint64_t count;
    bool is_right = ask_experts(r, q, job);
    Ballast__ExpertsRequest *m = (Ballast__ExpertsRequest *)q->payload;
    is_right &= read_window(r, "1h", &q->arena, &m->window);
    is_right &= read_number(r, "count", WINDOWS_SHOWN, LOAD_WINDOWS_MAX, &count) && count;
    m->history = (uint32_t)count;
    return is_right;
}

static bool ask_rebalances(const struct http_request *r, struct query *q, job_id job)
{
    Ballast__RebalanceRequest *m = arena_alloc(&q->arena, sizeof *m);
    (void)r;
    ballast__rebalance_request__init(m);
    m->job_id = job;
    q->payload = &m->base;
    return true;
}

/* Paths below /api/v1/; N stands for a job's id. */
static const struct route {
    const char *path;
    Ballast__Method method;
    bool (*ask)(const struct http_request *r, struct query *q, job_id job);
} routes[] = {
    {"jobs", BALLAST__METHOD__METHOD_JOB_LIST, ask_jobs},
    {"events", BALLAST__METHOD__METHOD_EVENTS, ask_events},
    {"jobs/N", BALLAST__METHOD__METHOD_JOB_SHOW, ask_job},
    {"jobs/N/events", BALLAST__METHOD__METHOD_EVENTS, ask_events},
    {"jobs/N/steps", BALLAST__METHOD__METHOD_METRICS, ask_steps},
    {"jobs/N/experts", BALLAST__METHOD__METHOD_EXPERTS, ask_experts},
    {"jobs/N/load-history", BALLAST__METHOD__METHOD_EXPERTS, ask_load_history},
    {"jobs/N/rebalances", BALLAST__METHOD__METHOD_REBALANCE_HISTORY, ask_rebalances},
};

static bool matches(const char *pattern, const char *path, job_id *out_job)
{
    *out_job = 0;
    for (; *pattern && *path; pattern++) {
        if (*pattern == 'N') {
            size_t n = strspn(path, "0123456789");
            if (n == 0 || n > 19)
                return false;
            *out_job = strtoull(path, NULL, 10);
            path += n;
        } else if (*pattern != *path++) {
            return false;
        }
    }
    return !*pattern && !*path;
}

static const struct route *find_route(const char *path, job_id *out_job)
{
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        if (matches(routes[i].path, path, out_job))
            return &routes[i];
    return NULL;
}

void http_api(struct server *s, struct http_request *r, const char *path)
{
    job_id job;
    const struct route *route = find_route(path, &job);
    bool is_cluster = !strcmp(path, "cluster"), is_workers = !strcmp(path, "workers");
    if (!route && !is_cluster && !is_workers) {
        refuse_now(s, r, BALLAST__CODE__NOT_FOUND, "PATH", "there is cluster, workers, jobs, "
                   "events, jobs/N and of a job events, steps, experts, load-history, rebalances");
    } else if (s->state != SERVER_SERVING) {
        refuse_now(s, r, BALLAST__CODE__UNAVAILABLE, "STARTING",
                   "the coordinator reads its state, or is stopping");
    } else if (is_cluster) {
        say_cluster(s, r);
    } else if (is_workers) {
        say_workers(s, r);
    } else if (s->n_http_queries >= QUERIES_MAX || s->n_out > LIST_AT) {
        refuse_now(s, r, BALLAST__CODE__UNAVAILABLE, "BUSY", "the coordinator is busy");
    } else {
        struct query *q = query_make_http(r, route->method);
        if (route->ask(r, q, job)) {
            s->n_http_queries++;
            query_begin_http(s, q);
            return;
        }
        query_free(q);
        refuse_now(s, r, BALLAST__CODE__INVALID_ARGUMENT, "ARGUMENT",
                   "count and after are whole numbers, count is at least 1, all is 0 or 1, window "
                   "is one of last, 1m, 1h, all");
    }
}

/* ---- answers --------------------------------------------------------------------------------- */

#define LIST(KIND, seq, truncated, rows, n_rows, of)                                           \
    do {                                                                                       \
        struct json *items = json_new_array();                                                 \
        for (size_t i = 0; i < (n_rows); i++)                                                  \
            json_push(items, of((rows)[i]));                                                   \
        return json_of_list(KIND, seq, truncated, items);                                      \
    } while (0)

static struct json *jobs_json(const Ballast__JobListReply *m)
{
    LIST("JobList", m->seq, m->truncated, m->jobs, m->n_jobs, json_of_job);
}

static struct json *events_json(const Ballast__EventsRequest *asked, const Ballast__EventsReply *m)
{
    size_t first = m->n_events == asked->last; /* the one more, the oldest */
    LIST("EventList", m->next_seq - 1, m->before_seq != 0, m->events + first,
         m->n_events - first, json_of_event);
}

static struct json *steps_json(const Ballast__MetricsRequest *asked,
                               const Ballast__MetricsReply *m)
{
    size_t first = m->n_steps == asked->last; /* the one more, the oldest */
    LIST("StepList", 0, first, m->steps + first, m->n_steps - first, json_of_step);
}

static struct json *experts_json(const Ballast__ExpertsReply *m)
{
    LIST("ExpertList", 0, false, m->layers, m->n_layers, json_of_layer_load);
}

static struct json *rebalances_json(const Ballast__RebalanceHistoryReply *m)
{
    LIST("RebalanceList", 0, false, m->entries, m->n_entries, json_of_rebalance);
}

static struct json *reply_json(const struct query *q, const ProtobufCMessage *reply)
{
    switch (q->envelope->method) {
    case BALLAST__METHOD__METHOD_JOB_LIST:
        return jobs_json((const Ballast__JobListReply *)reply);
    case BALLAST__METHOD__METHOD_JOB_SHOW:
        return json_of_job_show((const Ballast__JobShowReply *)reply);
    case BALLAST__METHOD__METHOD_EVENTS:
        return events_json((const Ballast__EventsRequest *)q->payload,
                           (const Ballast__EventsReply *)reply);
    case BALLAST__METHOD__METHOD_METRICS:
        return steps_json((const Ballast__MetricsRequest *)q->payload,
                          (const Ballast__MetricsReply *)reply);
    case BALLAST__METHOD__METHOD_EXPERTS:
        if (q->read.kind == STORE_LOAD_HISTORY)
            return json_of_one("LoadHistory", 0,
                               json_of_load_history((const Ballast__ExpertsReply *)reply));
        return experts_json((const Ballast__ExpertsReply *)reply);
    default:
        return rebalances_json((const Ballast__RebalanceHistoryReply *)reply);
    }
}

void http_answer_query(struct server *s, struct query *q)
{
    Ballast__Status status;
    s->n_http_queries--;
    if (query_refuses(q, &status))
        refuse_with(q->http, &status);
    else
        say_json(q->http, 200, reply_json(q, query_reply(s, q)));
}
