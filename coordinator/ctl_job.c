/* ctl_job.c - one job, and what is done to jobs */
#include "coordinator/ctl_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/types.h"
#include "proto/job_file.h"
#include "proto/job_live.h"
#include "coordinator/event.h"
#include "coordinator/json_of.h"

#define STEPS_OF_PACE 50u /* the newest, for the time that is left */

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
        ctl_print_line("memory per rank", "%s taken at most, %s planned (%+.1f %% of the plan)",
                       taken, planned, 100 * ((double)job->memory_bytes /
                                              (double)job->memory_planned_bytes - 1));
    else
        ctl_print_line("memory per rank", "%s taken at most", taken);
}

/* Until its last step, as the newest steps of its attempt went, with all that came between them;
 * NAN: not known. */
static double seconds_left(struct ctl *c, const Ballast__Job *job)
{
    Ballast__MetricsRequest request = BALLAST__METRICS_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.job_id = job->id;
    request.last = request.limit = STEPS_OF_PACE;
    if (job->state != BALLAST__JOB_STATE__JOB_RUNNING || job->step >= job->steps ||
        ctl_call(c, BALLAST__METHOD__METHOD_METRICS, &request.base, &message) != CTL_OK)
        return NAN;
    const Ballast__MetricsReply *reply = (const Ballast__MetricsReply *)message;
    size_t first = reply->n_steps;
    while (first > 0 && reply->steps[first - 1]->attempt == job->attempt)
        first--;
    if (first + 2 > reply->n_steps)
        return NAN;
    const Ballast__StepReport *from = reply->steps[first], *to = reply->steps[reply->n_steps - 1];
    double took = (double)(to->at_ns - from->at_ns) / NS_PER_S;
    return took > 0 ? took / (double)(to->step - from->step) * (double)(job->steps - job->step)
                    : NAN;
}

static void show_left(double seconds)
{
    char left[CLOCK_STAMP_BYTES], until[CLOCK_STAMP_BYTES];
    if (!isfinite(seconds))
        return;
    clock_duration((uint64_t)(seconds * NS_PER_S), left);
    clock_stamp(clock_wall_ns() + (int64_t)(seconds * NS_PER_S), until);
    ctl_print_line("left", "%s, until about %.16sZ", left, until);
}

static void show_job_lines(const Ballast__Job *job, double left_s)
{
    ctl_print_line("id", "%" PRIu64, job->id);
    ctl_print_line("name", "%s", job->name);
    ctl_print_line("user", "%s", job->user);
    ctl_print_line("state", "%s%s", event_job_state(job->state), job->held ? " (held)" : "");
    ctl_print_line("reason", "%s", job->reason);
    ctl_print_line("exit", "%s", job->exit);
    ctl_print_line("step", "%" PRIu64 " of %" PRIu64, job->step, job->steps);
    show_left(left_s);
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

static void show_json(struct ctl *c, const Ballast__JobShowReply *reply)
{
    struct json *o = json_of_job_show(reply);
    json_put(o, "seconds_left", json_new_double(seconds_left(c, reply->job)));
    ctl_json_value(c, o);
}

static void show_text(const Ballast__JobShowReply *reply, double left_s)
{
    show_job_lines(reply->job, left_s);
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

int ctl_ask_job(struct ctl *c, const Ballast__JobShowReply **out)
{
    Ballast__JobRequest request = BALLAST__JOB_REQUEST__INIT;
    const ProtobufCMessage *message;
    if (!(request.job_id = ctl_job_id(c, c->args[0])))
        return CTL_USAGE;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_JOB_SHOW, &request.base, &message);
    if (rc != CTL_OK)
        return rc;
    *out = (const Ballast__JobShowReply *)message;
    return (*out)->job ? CTL_OK
                       : ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job");
}

int ctl_job_show(struct ctl *c)
{
    const Ballast__JobShowReply *reply;
    int rc = ctl_ask_job(c, &reply);
    if (rc != CTL_OK)
        return rc;
    if (ctl_is_json(c))
        show_json(c, reply);
    else if (c->format == CTL_NAME)
        printf("%" PRIu64 "\n", reply->job->id);
    else
        show_text(reply, seconds_left(c, reply->job));
    return CTL_OK;
}

/* ---- what is done to a job ------------------------------------------------------------------ */

/* Jobs as they are after what was done to them: rows; in JSON one object, or a list of several. */
static int show_changed(struct ctl *c, const void **jobs, size_t n, uint64_t seq)
{
    if (c->n_args == 1)
        return list_show_one(c, &ctl_job_list, "Job", jobs[0], seq);
    struct list_query *q = xcalloc(1, sizeof *q);
    int rc = list_begin(c, &ctl_job_list, q);
    if (rc == CTL_OK && n)
        list_show(c, q, jobs, n, seq, false);
    list_fini(q);
    free(q);
    return rc;
}

/* A call whose answer is the job after it. */
static int change(struct ctl *c, Ballast__Method method, const ProtobufCMessage *request,
                  const Ballast__JobReply **out_reply)
{
    const ProtobufCMessage *message;
    int rc = ctl_call(c, method, request, &message);
    if (rc != CTL_OK)
        return rc;
    *out_reply = (const Ballast__JobReply *)message;
    if (!(*out_reply)->job)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job");
    return CTL_OK;
}

/* Each of the jobs in turn; one that is refused does not keep the others from it. */
static int act(struct ctl *c, Ballast__Method method)
{
    const void **jobs = xcalloc(c->n_args, sizeof *jobs);
    uint64_t *ids = xcalloc(c->n_args, sizeof *ids), seq = 0;
    size_t n = 0;
    int rc = CTL_OK;
    for (size_t i = 0; i < c->n_args && rc == CTL_OK; i++)
        if (!(ids[i] = ctl_job_id(c, c->args[i])))
            rc = CTL_USAGE; /* before anything is done */
    for (size_t i = 0; i < c->n_args && rc != CTL_USAGE && rc != CTL_UNREACHABLE; i++) {
        Ballast__JobRequest request = BALLAST__JOB_REQUEST__INIT;
        const Ballast__JobReply *reply;
        request.job_id = ids[i];
        request.reason = c->reason ? (char *)c->reason : request.reason;
        int code = change(c, method, &request.base, &reply);
        if (code == CTL_OK) {
            jobs[n++] = reply->job;
            seq = reply->seq;
        }
        rc = rc == CTL_OK ? code : rc;
    }
    if (n) {
        int code = show_changed(c, jobs, n, seq);
        rc = rc == CTL_OK ? code : rc;
    }
    free(ids);
    free(jobs);
    return rc;
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
    const Ballast__JobReply *reply;
    int rc = change(c, BALLAST__METHOD__METHOD_JOB_SET, &request.base, &reply);
    return rc == CTL_OK ? list_show_one(c, &ctl_job_list, "Job", reply->job, reply->seq) : rc;
}
