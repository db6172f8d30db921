/* ctl_jobs.c - lists of jobs, and of those that wait in the order in which they start
 *
 * The coordinator filters and sorts by what its database has; the rest is done here, over all
 * pages, and so is all of it once more: what a job is doing may have changed meanwhile. */
#include "coordinator/ctl_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/ctl_hostlist.h"
#include "coordinator/queue.h"
#include "coordinator/event.h"
#include "coordinator/json_of.h"

#define PAGE_JOBS    1000u
#define ORDERED_MAX  10000u /* that the coordinator sorts; an ordered list has one page */
#define COUNT_PRESET 1000u

/* ---- columns --------------------------------------------------------------------------------- */

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value column_##NAME(const void *row, struct arena *a)                      \
    {                                                                                          \
        const Ballast__Job *j = row;                                                           \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }

static struct list_value colored(const Ballast__Job *j, const char *text)
{
    struct list_value v = list_text(text);
    v.color = ctl_state_color(j->state);
    return v;
}

static struct list_value signed_count(struct arena *a, int64_t n)
{
    return (struct list_value){arena_printf(a, "%" PRId64, n), (double)n, NULL};
}

static struct list_value steps_of(struct arena *a, const Ballast__Job *j)
{
    return (struct list_value){arena_printf(a, "%" PRIu64 "/%" PRIu64, j->step, j->steps),
                               (double)j->step, NULL};
}

/* An instant that has not come is later than all others. */
static struct list_value to_come(struct arena *a, int64_t ns)
{
    struct list_value v = list_instant(a, ns);
    v.number = ns ? v.number : (double)INFINITY;
    return v;
}

static double known_speed(const Ballast__Job *j)
{
    return j->tokens_per_second > 0 ? j->tokens_per_second : (double)NAN;
}

static int64_t end_of(const Ballast__Job *j)
{
    return j->ended_at_ns ? j->ended_at_ns : clock_wall_ns();
}

/* Where it runs, in brackets why it does not. */
static struct list_value where_or_why(struct arena *a, const Ballast__Job *j)
{
    bool is_there = j->state == BALLAST__JOB_STATE__JOB_RUNNING ||
                    j->state == BALLAST__JOB_STATE__JOB_STARTING;
    char *where = is_there ? hostlist_pack(a, (const char *const *)j->workers, j->n_workers) : "";
    if (!*j->reason)
        return list_text(where);
    return list_text(arena_printf(a, "%s%s(%s)", where, *where ? " " : "", j->reason));
}

COLUMN(id, list_count(a, j->id))
COLUMN(name, list_text(j->name))
COLUMN(user, list_text(j->user))
COLUMN(short_state, colored(j, ctl_state_short(j)))
COLUMN(state, colored(j, event_job_state(j->state)))
COLUMN(workers, list_count(a, j->gang_size))
COLUMN(step, steps_of(a, j))
COLUMN(loss, list_real(a, "%.4f", j->loss))
COLUMN(valid, list_real(a, "%.4f", j->validation_loss))
COLUMN(time, list_span(a, j->started_at_ns, end_of(j)))
COLUMN(wait, list_span(a, j->submitted_at_ns, j->started_at_ns ? j->started_at_ns : end_of(j)))
COLUMN(priority, signed_count(a, j->priority))
COLUMN(submit, list_instant(a, j->submitted_at_ns))
COLUMN(start, to_come(a, j->started_at_ns))
COLUMN(end, to_come(a, j->ended_at_ns))
COLUMN(speed, list_real(a, "%.0f", known_speed(j)))
COLUMN(imbalance, list_real(a, "%.2f", j->imbalance))
COLUMN(restarts, list_count(a, j->n_restarts))
COLUMN(attempt, list_count(a, j->attempt))
COLUMN(checkpoint, list_count(a, j->checkpoint_step))
COLUMN(memory, list_bytes(a, j->memory_bytes))
COLUMN(exit, list_text(j->exit))
COLUMN(reason, list_text(j->reason))
COLUMN(where, where_or_why(a, j))

static const char *state_word(size_t i)
{
    return i + 1 <= JOB_STATE_MAX ? event_job_state((Ballast__JobState)(i + 1)) : NULL;
}

static const char *short_word(size_t i)
{
    Ballast__Job j = BALLAST__JOB__INIT;
    j.state = (Ballast__JobState)(i + 1);
    return i + 1 <= JOB_STATE_MAX ? ctl_state_short(&j) : i == JOB_STATE_MAX ? "H" : NULL;
}

static struct json *job_json(const void *row)
{
    return json_of_job(row);
}

static const struct list_column job_columns[] = {
    {"JOBID", LIST_NUMBER, LIST_ALWAYS, column_id, 0, true, NULL},
    {"NAME", LIST_TEXT, LIST_ALWAYS, column_name, 0, true, NULL},
    {"USER", LIST_TEXT, LIST_ALWAYS, column_user, 0, true, NULL},
    {"ST", LIST_TEXT, LIST_ALWAYS, column_short_state, 0, false, short_word},
    {"WORKERS", LIST_NUMBER, LIST_ALWAYS, column_workers, 0, true, NULL},
    {"STEP", LIST_NUMBER, LIST_ALWAYS, column_step, 0, false, NULL},
    {"LOSS", LIST_NUMBER, LIST_ALWAYS, column_loss, 0, false, NULL},
    {"TIME", LIST_SPAN, LIST_ALWAYS, column_time, 0, false, NULL},
    {"PRIO", LIST_NUMBER, LIST_WIDE, column_priority, 0, true, NULL},
    {"SUBMIT", LIST_INSTANT, LIST_WIDE, column_submit, 0, true, NULL},
    {"START", LIST_INSTANT, LIST_WIDE, column_start, 0, true, NULL},
    {"TOKENS/S", LIST_NUMBER, LIST_WIDE, column_speed, 0, false, NULL},
    {"IMBAL", LIST_NUMBER, LIST_WIDE, column_imbalance, 0, false, NULL},
    {"RESTARTS", LIST_NUMBER, LIST_WIDE, column_restarts, 0, true, NULL},
    {"CKPT", LIST_NUMBER, LIST_WIDE, column_checkpoint, 0, false, NULL},
    {"WORKERLIST(REASON)", LIST_TEXT, LIST_ALWAYS, column_where, 0, false, NULL},
    {"STATE", LIST_TEXT, LIST_ASKED, column_state, 0, true, state_word},
    {"REASON", LIST_TEXT, LIST_ASKED, column_reason, 0, false, NULL},
    {"END", LIST_INSTANT, LIST_ASKED, column_end, 0, true, NULL},
    {"EXIT", LIST_TEXT, LIST_ASKED, column_exit, 0, true, NULL},
    {"ATTEMPT", LIST_NUMBER, LIST_ASKED, column_attempt, 0, true, NULL},
    {"VALID", LIST_NUMBER, LIST_ASKED, column_valid, 0, false, NULL},
    {"MEMORY", LIST_BYTES, LIST_ASKED, column_memory, 0, false, NULL},
};
const struct ctl_list ctl_job_list = {
    .kind = "JobList", .rows = "jobs", .columns = job_columns,
    .n_columns = sizeof job_columns / sizeof *job_columns, .name = "jobid", .since = "end",
    .user = "user", .order = "jobid", .count = COUNT_PRESET, .json = job_json,
};

/* In the order of the queue, which is that of the rows. */
static const struct list_column queue_columns[] = {
    {"JOBID", LIST_NUMBER, LIST_ALWAYS, column_id, 0, true, NULL},
    {"NAME", LIST_TEXT, LIST_ALWAYS, column_name, 0, true, NULL},
    {"USER", LIST_TEXT, LIST_ALWAYS, column_user, 0, true, NULL},
    {"ST", LIST_TEXT, LIST_ALWAYS, column_short_state, 0, false, short_word},
    {"PRIO", LIST_NUMBER, LIST_ALWAYS, column_priority, 0, true, NULL},
    {"WORKERS", LIST_NUMBER, LIST_ALWAYS, column_workers, 0, true, NULL},
    {"WAIT", LIST_SPAN, LIST_ALWAYS, column_wait, 0, false, NULL},
    {"SUBMIT", LIST_INSTANT, LIST_WIDE, column_submit, 0, true, NULL},
    {"RESTARTS", LIST_NUMBER, LIST_WIDE, column_restarts, 0, true, NULL},
    {"REASON", LIST_TEXT, LIST_ALWAYS, column_reason, 0, false, NULL},
    {"STATE", LIST_TEXT, LIST_ASKED, column_state, 0, true, state_word},
};
const struct ctl_list ctl_queue_list = {
    .kind = "JobList", .rows = "waiting jobs", .columns = queue_columns,
    .n_columns = sizeof queue_columns / sizeof *queue_columns, .name = "jobid",
    .since = "submit", .user = "user", .count = COUNT_PRESET, .json = job_json,
};

/* ---- fetching -------------------------------------------------------------------------------- */

struct jobs {
    const void **rows; /* Ballast__Job; in the arena of the call */
    size_t   n;
    uint64_t seq;
    bool     truncated;
};

static int add_page(struct ctl *c, const Ballast__JobListRequest *request, struct jobs *out)
{
    const ProtobufCMessage *message;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_JOB_LIST, &request->base, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__JobListReply *page = (const Ballast__JobListReply *)message;
    out->rows = xrealloc(out->rows, (out->n + page->n_jobs + 1) * sizeof *out->rows);
    for (size_t i = 0; i < page->n_jobs; i++)
        out->rows[out->n++] = page->jobs[i];
    out->seq = page->seq;
    out->truncated = page->truncated && page->n_jobs;
    return CTL_OK;
}

/* All that the coordinator's conditions leave. */
static int fetch_all(struct ctl *c, Ballast__JobListRequest *request, struct jobs *out)
{
    request->limit = PAGE_JOBS;
    request->n_order = 0;
    do {
        int rc = add_page(c, request, out);
        if (rc != CTL_OK)
            return rc;
        request->after_id = out->n ? ((const Ballast__Job *)out->rows[out->n - 1])->id : 0;
    } while (out->truncated);
    return CTL_OK;
}

/* One page, if the coordinator can do all of it: the first of the order that was asked for, or the
 * newest. */
static int fetch(struct ctl *c, struct list_query *q, bool all_states, struct jobs *out)
{
    static Ballast__ListOrder newest = BALLAST__LIST_ORDER__INIT, *newest_first[] = {&newest};
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    bool is_told = list_tell_terms(q, &request.n_terms, &request.terms);
    request.all_states = all_states;
    if (!all_states && !q->n_terms && !q->is_ordered)
        return fetch_all(c, &request, out); /* it has those in memory */
    newest.column = "jobid";
    newest.descending = true;
    if (!q->is_ordered) {
        request.order = newest_first;
        request.n_order = 1;
    } else {
        is_told = list_tell_order(q, &request.n_order, &request.order) && is_told;
    }
    if (!is_told || q->count > ORDERED_MAX)
        return fetch_all(c, &request, out);
    request.limit = (uint32_t)q->count;
    int rc = add_page(c, &request, out);
    if (rc != CTL_OK || out->n == q->count || !out->truncated)
        return rc;
    out->n = 0; /* too large for a page */
    return fetch_all(c, &request, out);
}

/* Ids on the command line are one more condition. */
static int add_ids(struct ctl *c)
{
    char *ids = NULL;
    for (size_t i = 0; i < c->n_args; i++) {
        uint64_t id = ctl_job_id(c, c->args[i]);
        if (!id)
            return CTL_USAGE;
        ids = arena_printf(&c->arena, "%s%s%" PRIu64, ids ? ids : "jobid=", ids ? "," : "", id);
    }
    c->filters = xrealloc(c->filters, (c->n_filters + 1) * sizeof *c->filters);
    if (ids)
        c->filters[c->n_filters++] = ids;
    return CTL_OK;
}

static bool has_job(const struct jobs *jobs, uint64_t id)
{
    for (size_t i = 0; i < jobs->n; i++)
        if (((const Ballast__Job *)jobs->rows[i])->id == id)
            return true;
    return false;
}

/* A line for each id on the command line that is no job's. */
static int check_ids(struct ctl *c, const struct jobs *jobs)
{
    int rc = CTL_OK;
    for (size_t i = 0; i < c->n_args; i++) {
        uint64_t id = ctl_job_id(c, c->args[i]);
        if (!has_job(jobs, id))
            rc = ctl_fail(c, CTL_NOT_FOUND, "there is no job %" PRIu64, id);
    }
    return rc;
}

int ctl_jobs(struct ctl *c)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    struct jobs jobs = {0};
    bool all = c->all || c->since || c->n_args, was_cut = false;
    size_t n_filters = c->n_filters; /* --watch comes here again */
    int rc = add_ids(c);
    if (rc == CTL_OK)
        rc = list_begin(c, &ctl_job_list, q);
    c->n_filters = n_filters;
    if (rc == CTL_OK)
        rc = fetch(c, q, all, &jobs);
    if (rc == CTL_OK) {
        bool only_ids = c->n_args && q->n_terms == 1; /* what is not found is not there */
        jobs.n = list_choose(q, jobs.rows, jobs.n, &was_cut);
        was_cut |= jobs.truncated;
        if (jobs.n || !only_ids)
            list_show(c, q, jobs.rows, jobs.n, jobs.seq, was_cut);
        if (only_ids && !was_cut)
            rc = check_ids(c, &jobs);
        if (!jobs.n && !all && !q->n_terms && c->format == CTL_TABLE)
            ctl_hint(c, "no job is queued or running; -a also lists those that have ended");
    }
    free(jobs.rows);
    list_fini(q);
    free(q);
    return rc;
}

/* ---- the queue ------------------------------------------------------------------------------- */

static int by_queue(const void *a, const void *b)
{
    const Ballast__Job *x = *(const void *const *)a, *y = *(const void *const *)b;
    struct queue_job one = {.id = x->id, .priority = x->priority};
    struct queue_job other = {.id = y->id, .priority = y->priority};
    return x->held != y->held ? (x->held ? 1 : -1) : queue_is_before(&one, &other) ? -1 : 1;
}

/* Leaves those that wait, in their order; held ones after all others. */
static size_t keep_waiting(const void **rows, size_t n)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        const Ballast__Job *j = rows[i];
        if (j->state == BALLAST__JOB_STATE__JOB_QUEUED ||
            j->state == BALLAST__JOB_STATE__JOB_RECOVERING)
            rows[kept++] = j;
    }
    if (kept)
        qsort(rows, kept, sizeof *rows, by_queue);
    return kept;
}

static void say_free(struct ctl *c)
{
    const Ballast__WorkerListReply *fleet;
    size_t n_free = 0;
    if (c->quiet || c->format != CTL_TABLE || ctl_fleet(c, &fleet) != CTL_OK)
        return;
    for (size_t i = 0; i < fleet->n_workers; i++)
        n_free += fleet->workers[i]->state == BALLAST__WORKER_STATE__WORKER_IDLE;
    ctl_hint(c, "%zu of %zu workers are free", n_free, fleet->n_workers);
}

/* The front of the queue is what a cut leaves. */
int ctl_queue(struct ctl *c)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    struct jobs jobs = {0};
    bool was_cut = false;
    int rc = list_begin(c, &ctl_queue_list, q);
    q->is_ordered = true;
    if (rc == CTL_OK) {
        list_tell_terms(q, &request.n_terms, &request.terms);
        rc = fetch_all(c, &request, &jobs);
    }
    if (rc == CTL_OK) {
        jobs.n = list_choose(q, jobs.rows, keep_waiting(jobs.rows, jobs.n), &was_cut);
        list_show(c, q, jobs.rows, jobs.n, jobs.seq, was_cut);
        say_free(c);
    }
    free(jobs.rows);
    list_fini(q);
    free(q);
    return rc;
}
