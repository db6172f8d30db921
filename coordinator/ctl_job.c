/* ctl_job.c - jobs: the list, one of them, and what is done to it */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/types.h"
#include "proto/job_file.h"
#include "proto/job_live.h"

#define PAGE_JOBS   1000u
#define COUNT_PRESET 1000u
#define WAIT_HOLD_MS 10000u

/* ---- jobs ----------------------------------------------------------------------------------- */

static const struct ctl_column columns[] = {
    {"JOBID", true}, {"NAME", false}, {"USER", false}, {"ST", false}, {"WORKERS", true},
    {"STEP", true}, {"LOSS", true}, {"TIME", true}, {"REASON", false},
};
static const struct ctl_column wide_columns[] = {
    {"JOBID", true}, {"NAME", false}, {"USER", false}, {"ST", false}, {"WORKERS", true},
    {"STEP", true}, {"LOSS", true}, {"TIME", true}, {"PRIO", true}, {"SUBMIT", false},
    {"START", false}, {"TOKENS/S", true}, {"IMBAL", true}, {"RESTARTS", true}, {"CKPT", true},
    {"REASON", false},
};

static void add_instant(struct ctl_table *t, int64_t ns)
{
    char text[CLOCK_STAMP_BYTES] = "-";
    if (ns)
        clock_stamp(ns, text);
    ctl_table_cell(t, "%s", text);
}

static void add_job(struct ctl_table *t, const Ballast__Job *job, bool is_wide)
{
    int64_t end_ns = job->ended_at_ns ? job->ended_at_ns : clock_wall_ns();
    ctl_table_cell(t, "%" PRIu64, job->id);
    ctl_table_cell(t, "%s", job->name);
    ctl_table_cell(t, "%s", job->user);
    ctl_table_cell(t, "%s", ctl_state_short(job));
    ctl_table_color(t, ctl_state_color(job->state));
    ctl_table_cell(t, "%" PRIu32, job->gang_size);
    ctl_table_cell(t, "%" PRIu64 "/%" PRIu64, job->step, job->steps);
    ctl_table_number(t, "%.4f", job->loss);
    ctl_table_age(t, job->started_at_ns, end_ns);
    if (is_wide) {
        ctl_table_cell(t, "%" PRId32, job->priority);
        add_instant(t, job->submitted_at_ns);
        add_instant(t, job->started_at_ns);
        ctl_table_number(t, "%.0f", job->tokens_per_second > 0 ? job->tokens_per_second
                                                               : (double)NAN);
        ctl_table_number(t, "%.2f", job->imbalance);
        ctl_table_cell(t, "%" PRIu32, job->n_restarts);
        ctl_table_cell(t, "%" PRIu64, job->checkpoint_step);
    }
    ctl_table_cell(t, "%s", job->reason);
}

static void show_table(const struct ctl *c, Ballast__Job *const *jobs, size_t n)
{
    bool is_wide = c->format == CTL_WIDE;
    struct ctl_table t = {.columns = is_wide ? wide_columns : columns,
                          .n_columns = is_wide ? sizeof wide_columns / sizeof *wide_columns
                                               : sizeof columns / sizeof *columns};
    for (size_t i = 0; i < n; i++)
        add_job(&t, jobs[i], is_wide);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

static void show_jobs(const struct ctl *c, Ballast__Job *const *jobs, size_t n, uint64_t seq,
                      bool truncated)
{
    if (ctl_is_json(c)) {
        struct json *items = json_new_array();
        for (size_t i = 0; i < n; i++)
            json_push(items, ctl_json_job(jobs[i]));
        ctl_json_list(c, "JobList", seq, truncated, items);
    } else if (c->format == CTL_NAME) {
        for (size_t i = 0; i < n; i++)
            printf("%" PRIu64 "\n", jobs[i]->id);
    } else {
        show_table(c, jobs, n);
        if (!n && !c->all)
            ctl_hint(c, "no job is queued or running; -a also lists those that have ended");
    }
    if (truncated)
        ctl_hint(c, "only the first %zu jobs are listed; -c N lists more", n);
}

int ctl_jobs(struct ctl *c)
{
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    uint64_t n_max = c->count ? c->count : COUNT_PRESET;
    Ballast__Job **jobs = NULL; /* in the arena, over all pages */
    size_t n = 0;
    const Ballast__JobListReply *page;
    int rc;
    request.all_states = c->all;
    request.user = c->user ? (char *)c->user : request.user;
    do {
        const ProtobufCMessage *reply;
        uint64_t left = n_max - n;
        request.limit = (uint32_t)(left < PAGE_JOBS ? left : PAGE_JOBS);
        rc = ctl_call(c, BALLAST__METHOD__METHOD_JOB_LIST, &request.base, &reply);
        if (rc != CTL_OK)
            break;
        page = (const Ballast__JobListReply *)reply;
        jobs = xrealloc(jobs, (n + page->n_jobs) * sizeof *jobs);
        for (size_t i = 0; i < page->n_jobs; i++)
            jobs[n++] = page->jobs[i];
        request.after_id = page->n_jobs ? page->jobs[page->n_jobs - 1]->id : 0;
    } while (page->truncated && page->n_jobs && n < n_max);
    if (rc == CTL_OK)
        show_jobs(c, jobs, n, page->seq, page->truncated);
    free(jobs);
    return rc;
}

/* ---- one job -------------------------------------------------------------------------------- */

static void show_instant(const char *key, int64_t ns)
{
    char text[CLOCK_STAMP_BYTES];
    if (!ns)
        return;
    clock_stamp(ns, text);
    ctl_print_line(key, "%s", text);
}

/* Of a rank, as its trainer planned it beside what the largest one took. */
static void show_memory(const Ballast__Job *job)
{
    char taken[32], planned[32];
    if (!job->memory_bytes)
        return;
    ctl_bytes_text(job->memory_bytes, taken);
    ctl_bytes_text(job->memory_planned_bytes, planned);
    if (job->memory_planned_bytes)
        ctl_print_line("memory per rank", "%s taken at most, %s planned (%+.1f %%)", taken,
                       planned, 100 * ((double)job->memory_planned_bytes /
                                       (double)job->memory_bytes - 1));
    else
        ctl_print_line("memory per rank", "%s taken at most", taken);
}

static void show_job_lines(const Ballast__Job *job)
{
    ctl_print_line("id", "%" PRIu64, job->id);
    ctl_print_line("name", "%s", job->name);
    ctl_print_line("user", "%s", job->user);
    ctl_print_line("state", "%s%s", ctl_state_name(job->state), job->held ? " (held)" : "");
    ctl_print_line("reason", "%s", job->reason);
    ctl_print_line("exit", "%s", job->exit);
    ctl_print_line("step", "%" PRIu64 " of %" PRIu64, job->step, job->steps);
    if (job->checkpoint_step)
        ctl_print_line("checkpoint step", "%" PRIu64, job->checkpoint_step);
    if (isfinite(job->loss))
        ctl_print_line("loss", "%.4f", job->loss);
    if (isfinite(job->validation_loss))
        ctl_print_line("validation loss", "%.4f", job->validation_loss);
    if (job->tokens_per_second > 0)
        ctl_print_line("tokens/s", "%.0f", job->tokens_per_second);
    if (isfinite(job->imbalance))
        ctl_print_line("imbalance", "%.3f", job->imbalance);
    show_memory(job);
    ctl_print_line("attempt", "%" PRIu32 ", %" PRIu32 " restarts", job->attempt, job->n_restarts);
    ctl_print_line("priority", "%" PRId32, job->priority);
    ctl_print_line("workers", "%" PRIu32, job->gang_size);
    for (size_t i = 0; i < job->n_workers; i++)
        ctl_print_line("", "rank %zu: %s", i, job->workers[i]);
    show_instant("submitted", job->submitted_at_ns);
    show_instant("started", job->started_at_ns);
    show_instant("ended", job->ended_at_ns);
}

static void show_json(const struct ctl *c, const Ballast__JobShowReply *reply)
{
    struct json *o = ctl_json_job(reply->job), *events = json_new_array();
    for (size_t i = 0; i < reply->n_events; i++)
        json_push(events, ctl_json_event(reply->events[i]));
    if (reply->spec)
        json_put(o, "spec", ctl_json_spec(reply->spec));
    json_put(o, "events", events);
    ctl_json_one(c, "Job", reply->seq, o);
}

static void show_text(const Ballast__JobShowReply *reply)
{
    show_job_lines(reply->job);
    if (reply->spec) {
        char *yaml = job_file_text(reply->spec);
        printf("\n%s", yaml);
        free(yaml);
    }
    if (reply->n_events)
        putchar('\n');
    for (size_t i = 0; i < reply->n_events; i++) {
        const Ballast__Event *e = reply->events[i];
        char stamp[CLOCK_STAMP_BYTES];
        clock_stamp(e->at_ns, stamp);
        printf("%s  %-19s ", stamp, e->kind);
        ctl_print_escaped(stdout, e->text, strlen(e->text), false);
        putchar('\n');
    }
}

int ctl_job_show(struct ctl *c)
{
    Ballast__JobRequest request = BALLAST__JOB_REQUEST__INIT;
    const ProtobufCMessage *message;
    if (!(request.job_id = ctl_job_id(c, c->args[0])))
        return CTL_USAGE;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_JOB_SHOW, &request.base, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__JobShowReply *reply = (const Ballast__JobShowReply *)message;
    if (!reply->job)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job");
    if (ctl_is_json(c))
        show_json(c, reply);
    else if (c->format == CTL_NAME)
        printf("%" PRIu64 "\n", reply->job->id);
    else
        show_text(reply);
    return CTL_OK;
}

/* ---- what is done to a job ------------------------------------------------------------------ */

/* A call whose answer is the job after it. */
static int change(struct ctl *c, Ballast__Method method, const ProtobufCMessage *request)
{
    const ProtobufCMessage *message;
    int rc = ctl_call(c, method, request, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__JobReply *reply = (const Ballast__JobReply *)message;
    if (!reply->job)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job");
    if (ctl_is_json(c))
        ctl_json_one(c, "Job", reply->seq, ctl_json_job(reply->job));
    else if (c->format == CTL_NAME)
        printf("%" PRIu64 "\n", reply->job->id);
    else
        show_table(c, &(Ballast__Job *){reply->job}, 1);
    return CTL_OK;
}

static int act(struct ctl *c, Ballast__Method method)
{
    Ballast__JobRequest request = BALLAST__JOB_REQUEST__INIT;
    if (!(request.job_id = ctl_job_id(c, c->args[0])))
        return CTL_USAGE;
    request.reason = c->reason ? (char *)c->reason : request.reason;
    return change(c, method, &request.base);
}

int ctl_job_cancel(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_JOB_CANCEL);
}

int ctl_job_hold(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_JOB_HOLD);
}

int ctl_job_release(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_JOB_RELEASE);
}

int ctl_job_pause(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_JOB_PAUSE);
}

int ctl_job_resume(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_JOB_RESUME);
}

int ctl_job_requeue(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_JOB_REQUEUE);
}

/* Mistakes are told before anything is contacted. */
int ctl_job_set(struct ctl *c)
{
    Ballast__JobSetRequest request = BALLAST__JOB_SET_REQUEST__INIT;
    Ballast__JobSpec ignored = BALLAST__JOB_SPEC__INIT;
    struct err err = {0};
    if (!(request.job_id = ctl_job_id(c, c->args[0])))
        return CTL_USAGE;
    request.assignments = c->args + 1;
    request.n_assignments = c->n_args - 1;
    for (size_t i = 0; i < request.n_assignments; i++)
        if (job_live_set(&ignored, request.assignments[i], &err) < 0)
            return ctl_fail(c, CTL_USAGE, "%s", err.text);
    return change(c, BALLAST__METHOD__METHOD_JOB_SET, &request.base);
}

/* ---- wait ----------------------------------------------------------------------------------- */

int ctl_exit_of_job(const Ballast__Job *job)
{
    const char *colon = strchr(job->exit, ':'); /* "code:signal" */
    int signal_number = colon ? atoi(colon + 1) : 0;
    if (job->state == BALLAST__JOB_STATE__JOB_DONE)
        return CTL_OK;
    return signal_number > 0 && signal_number < 65 ? CTL_SIGNAL + signal_number : CTL_FAILED;
}

/* Has the job been in state, as far as its present one tells? */
static bool has_reached(const Ballast__Job *job, Ballast__JobState state)
{
    bool was_on_the_way = state != BALLAST__JOB_STATE__JOB_PAUSED && !job_state_is_ended(state);
    return job->state == state || (job->state == BALLAST__JOB_STATE__JOB_DONE && was_on_the_way);
}

/* Holds calls until the job has (or has passed) state; UNKNOWN waits for any end. */
static int wait_until(struct ctl *c, job_id id, Ballast__JobState state,
                      const Ballast__Job **out_job, bool *out_reached)
{
    Ballast__JobWaitRequest request = BALLAST__JOB_WAIT_REQUEST__INIT;
    request.job_id = id;
    request.states = &state;
    request.n_states = state != BALLAST__JOB_STATE__JOB_UNKNOWN;
    for (;;) {
        const ProtobufCMessage *message;
        uint64_t now_ns = clock_now_ns();
        uint64_t left_ms = !c->deadline_ns ? WAIT_HOLD_MS
                         : c->deadline_ns > now_ns ? (c->deadline_ns - now_ns) / NS_PER_MS : 0;
        arena_reset(&c->arena);
        request.wait_ms = left_ms < WAIT_HOLD_MS ? (uint32_t)left_ms : WAIT_HOLD_MS;
        int rc = ctl_poll(c, BALLAST__METHOD__METHOD_JOB_WAIT, &request.base, request.wait_ms,
                          &message);
        if (rc != CTL_OK)
            return rc;
        const Ballast__JobReply *reply = (const Ballast__JobReply *)message;
        const Ballast__Job *job = reply->job;
        if (!job)
            return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job");
        *out_reached = request.n_states && (reply->reached || has_reached(job, state));
        if (job_state_is_ended(job->state) || *out_reached) {
            *out_job = job;
            return CTL_OK;
        }
    }
}

int ctl_wait_for(struct ctl *c, job_id id, Ballast__JobState state)
{
    const Ballast__Job *job = NULL;
    bool reached = false;
    int rc = wait_until(c, id, state, &job, &reached);
    if (rc == CTL_WAIT_TIMEOUT)
        return ctl_fail(c, CTL_WAIT_TIMEOUT, "job %" PRIu64 ": the time to wait is over", id);
    if (rc != CTL_OK)
        return rc;
    if (ctl_is_json(c))
        ctl_json_one(c, "Job", 0, ctl_json_job(job));
    if (state == BALLAST__JOB_STATE__JOB_UNKNOWN) {
        int code = ctl_exit_of_job(job);
        if (code != CTL_OK)
            ctl_hint(c, "job %" PRIu64 " is %s: %s", id, ctl_state_name(job->state),
                     job->reason);
        return code;
    }
    if (reached)
        return CTL_OK;
    return ctl_fail(c, CTL_FAILED, "job %" PRIu64 " will not be %s: it is %s (%s)", id,
                    ctl_state_name(state), ctl_state_name(job->state), job->reason);
}

/* "state=RUNNING" or "RUNNING". */
static bool read_state(const struct ctl *c, Ballast__JobState *out)
{
    char quoted[FIELD_QUOTE_BYTES];
    const char *word = c->wait_for;
    if (!strncmp(word, "state=", 6))
        word += 6;
    for (int s = BALLAST__JOB_STATE__JOB_QUEUED; s <= (int)JOB_STATE_MAX; s++)
        if (!strcasecmp(word, ctl_state_name((Ballast__JobState)s))) {
            *out = (Ballast__JobState)s;
            return true;
        }
    field_quote(c->wait_for, quoted);
    ctl_fail(c, CTL_USAGE, "--for: %s is not state=STATE with one of QUEUED, STARTING, RUNNING, "
             "RECOVERING, PREEMPTING, STOPPING, PAUSED, DONE, FAILED, CANCELLED", quoted);
    return false;
}

int ctl_wait(struct ctl *c)
{
    Ballast__JobState state = BALLAST__JOB_STATE__JOB_UNKNOWN;
    job_id id = ctl_job_id(c, c->args[0]);
    if (!id || (c->wait_for && !read_state(c, &state)))
        return CTL_USAGE;
    if (c->timeout_ms)
        c->deadline_ns = clock_now_ns() + c->timeout_ms * NS_PER_MS;
    return ctl_wait_for(c, id, state);
}
