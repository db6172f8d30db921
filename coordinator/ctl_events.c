/* ctl_events.c - what happened: the newest that are wanted, then (-f) what comes
 *
 * The coordinator looks through its log from the newest back, a bounded way at a time, so several
 * calls may be needed; from then on it is a long poll from the number of a record, and an outage or
 * a restart of the coordinator costs a pause and nothing else. */
#include "coordinator/ctl_list.h"
#include "coordinator/event.h"
#include "coordinator/json_of.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define HOLD_MS       10000u
#define EVENTS_PRESET 200u
#define EVENTS_PAGE   500u
#define EVENTS_MOST   5000u /* of one answer */
#define SORTED_MOST   100000u /* that are brought here to be sorted, or looked through */

/* ---- columns --------------------------------------------------------------------------------- */

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value event_##NAME(const void *row, struct arena *a)                    \
    {                                                                                          \
        const Ballast__Event *e = row;                                                         \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }

COLUMN(seq, list_count(a, e->seq))
COLUMN(time, list_instant(a, e->at_ns))
COLUMN(about, list_text(e->job_id ? arena_printf(a, "job %" PRIu64, e->job_id) : e->worker))
COLUMN(job, e->job_id ? list_count(a, e->job_id) : list_text(""))
COLUMN(worker, list_text(e->worker))
COLUMN(kind, list_text(e->kind))
COLUMN(step, e->has_step ? list_count(a, e->step) : list_text(""))
COLUMN(text, list_text(e->text))

static struct json *event_json(const void *row)
{
    return json_of_event(row);
}

static const struct list_column event_columns[] = {
    {"SEQ", LIST_NUMBER, LIST_ALWAYS, event_seq, 8, true, NULL},
    {"TIME", LIST_INSTANT, LIST_ALWAYS, event_time, 24, true, NULL},
    {"ABOUT", LIST_TEXT, LIST_ALWAYS, event_about, 10, false, NULL},
    {"JOB", LIST_NUMBER, LIST_WIDE, event_job, 6, true, NULL},
    {"WORKER", LIST_TEXT, LIST_WIDE, event_worker, 12, true, NULL},
    {"KIND", LIST_TEXT, LIST_ALWAYS, event_kind, 18, true, NULL},
    {"STEP", LIST_NUMBER, LIST_WIDE, event_step, 8, false, NULL},
    {"TEXT", LIST_TEXT, LIST_ALWAYS, event_text, 0, true, NULL},
};
const struct ctl_list ctl_event_list = {
    .kind = "EventList", .rows = "events", .columns = event_columns,
    .n_columns = sizeof event_columns / sizeof *event_columns, .name = "seq", .since = "time",
    .count = EVENTS_PRESET, .json = event_json,
};

/* ---- the newest ------------------------------------------------------------------------------ */

/* Oldest first, at most one more than q wants (all of them to be sorted). */
struct events {
    const void **rows;
    size_t   n;
    uint64_t next_seq;
    bool     has_more;
};

/* A page is older than what is there. */
static void put_before(struct events *out, const Ballast__EventsReply *page)
{
    out->rows = xrealloc(out->rows, (out->n + page->n_events + 1) * sizeof *out->rows);
    memmove(out->rows + page->n_events, out->rows, out->n * sizeof *out->rows);
    for (size_t i = 0; i < page->n_events; i++)
        out->rows[i] = page->events[i];
    out->n += page->n_events;
}

static int fetch(struct ctl *c, struct list_query *q, const Ballast__EventsRequest *wanted,
                 struct events *out)
{
    Ballast__EventsRequest request = *wanted;
    bool is_told = list_tell_terms(q, &request.n_terms, &request.terms);
    uint64_t n_max = SORTED_MOST;
    if (is_told && !q->is_ordered && q->count < UINT64_MAX)
        n_max = q->count + 1; /* one more: is any left out? */
    do {
        const ProtobufCMessage *message;
        uint64_t left = n_max - out->n;
        request.last = (uint32_t)(left < EVENTS_MOST ? left : EVENTS_MOST);
        request.limit = request.last;
        int rc = ctl_call(c, BALLAST__METHOD__METHOD_EVENTS, &request.base, &message);
        if (rc != CTL_OK)
            return rc;
        const Ballast__EventsReply *reply = (const Ballast__EventsReply *)message;
        if (!request.before_seq)
            out->next_seq = reply->next_seq;
        put_before(out, reply);
        request.before_seq = reply->before_seq;
    } while (request.before_seq && out->n < n_max && !ctl_interrupts);
    out->has_more = request.before_seq != 0;
    return CTL_OK;
}

static void show(struct ctl *c, struct list_query *q, const void *const *rows, size_t n,
                 bool truncated, uint64_t seq)
{
    if (!c->follow)
        list_show(c, q, rows, n, seq, truncated);
    else if (c->format != CTL_JSON)
        list_print(c, q, rows, n, true);
    else
        for (size_t i = 0; i < n; i++)
            ctl_json_line(json_of_event(rows[i]));
}

static int list_newest(struct ctl *c, struct list_query *q, Ballast__EventsRequest *request)
{
    struct events events = {0};
    bool was_cut;
    int rc = fetch(c, q, request, &events);
    if (rc == CTL_OK) {
        size_t n_looked = events.n;
        events.n = list_choose(q, events.rows, events.n, &was_cut);
        bool truncated = was_cut || events.has_more;
        show(c, q, events.rows, events.n, truncated, events.next_seq);
        if (events.has_more && n_looked >= SORTED_MOST)
            ctl_hint(c, "these are of the newest %u events; older ones were not looked at: "
                     "--since, --job or a --filter by kind make them fewer", SORTED_MOST);
        request->from_seq = events.next_seq;
    }
    free(events.rows);
    return rc;
}

/* ---- what comes ------------------------------------------------------------------------------ */

static int follow(struct ctl *c, struct list_query *q, Ballast__EventsRequest *request)
{
    request->limit = EVENTS_PAGE;
    request->wait_ms = HOLD_MS;
    list_tell_terms(q, &request->n_terms, &request->terms);
    for (;;) {
        const ProtobufCMessage *message;
        fflush(stdout);
        arena_reset(&c->arena);
        int rc = ctl_poll(c, BALLAST__METHOD__METHOD_EVENTS, &request->base, request->wait_ms,
                          &message);
        if (rc != CTL_OK)
            return rc;
        const Ballast__EventsReply *reply = (const Ballast__EventsReply *)message;
        for (size_t i = 0; i < reply->n_events; i++) {
            const void *row = reply->events[i];
            if (!list_matches(q, row))
                continue;
            if (c->format == CTL_JSON)
                ctl_json_line(json_of_event(row));
            else
                list_print(c, q, &row, 1, false);
        }
        request->from_seq = reply->next_seq;
    }
}

int ctl_events(struct ctl *c)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    Ballast__EventsRequest request = BALLAST__EVENTS_REQUEST__INIT;
    request.job_id = c->job;
    int rc = list_begin(c, &ctl_event_list, q);
    if (rc == CTL_OK && c->follow && (c->sort || c->format == CTL_YAML || c->format == CTL_NAME))
        rc = ctl_fail(c, CTL_USAGE, "--follow prints events as they come: neither --sort nor -o "
                      "yaml or name goes with it");
    if (rc == CTL_OK) {
        ctl_catch_interrupt();
        rc = list_newest(c, q, &request);
    }
    if (rc == CTL_OK && c->follow)
        rc = follow(c, q, &request);
    list_fini(q);
    free(q);
    return c->follow ? ctl_detached(c, rc, "nothing was changed") : rc;
}
