/* ctl_wait.c - waiting for jobs to end or to come to a state
 *
 * The coordinator holds a call until its one job is there. Of several jobs one after the other is
 * asked so for a moment, and the rest of them just asked, so that none is missed for longer. */
#include "coordinator/ctl.h"
#include "coordinator/event.h"
#include "coordinator/json_of.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/clock.h"
#include "common/field.h"
#include "common/types.h"

#define HOLD_MS            10000u
#define HOLD_OF_SEVERAL_MS 500u
#define OPEN (-1) /* no exit code yet */

struct wait {
    struct ctl *c;
    const job_id *ids;
    size_t n, n_open;
    Ballast__JobState state; /* UNKNOWN: any end */
    int *codes;              /* of each: what its end means, or OPEN */
    struct json **shown;     /* of each that is not open, for --json */
    bool any_reached;
    size_t which;            /* the first that got there, if any_reached */
};

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

/* ---- asking ---------------------------------------------------------------------------------- */

static int ask(struct wait *w, size_t i, uint32_t hold_ms, const Ballast__JobReply **out)
{
    Ballast__JobWaitRequest request = BALLAST__JOB_WAIT_REQUEST__INIT;
    const ProtobufCMessage *message;
    uint64_t now_ns = clock_now_ns(), deadline_ns = w->c->deadline_ns;
    uint64_t left_ms = !deadline_ns ? hold_ms
                     : deadline_ns > now_ns ? (deadline_ns - now_ns) / NS_PER_MS : 0;
    request.job_id = w->ids[i];
    request.states = &w->state;
    request.n_states = w->state != BALLAST__JOB_STATE__JOB_UNKNOWN;
    request.wait_ms = left_ms < hold_ms ? (uint32_t)left_ms : hold_ms;
    int rc = ctl_poll(w->c, BALLAST__METHOD__METHOD_JOB_WAIT, &request.base, request.wait_ms,
                      &message);
    if (rc != CTL_OK)
        return rc;
    *out = (const Ballast__JobReply *)message;
    return (*out)->job ? CTL_OK
                       : ctl_fail(w->c, CTL_PROTOCOL, "the coordinator's answer holds no job");
}

/* What it means that the job has got there, or has ended elsewhere. */
static int code_of(const struct wait *w, const Ballast__Job *job, bool reached)
{
    if (w->state == BALLAST__JOB_STATE__JOB_UNKNOWN) {
        int code = ctl_exit_of_job(job);
        if (code != CTL_OK)
            ctl_hint(w->c, "job %" PRIu64 " is %s: %s", job->id, event_job_state(job->state),
                     job->reason);
        return code;
    }
    if (reached)
        return CTL_OK;
    if (w->c->any && w->n_open > 1) { /* another may be the one */
        ctl_hint(w->c, "job %" PRIu64 " will not be %s: it is %s", job->id,
                 event_job_state(w->state), event_job_state(job->state));
        return CTL_FAILED;
    }
    return ctl_fail(w->c, CTL_FAILED, "job %" PRIu64 " will not be %s: it is %s (%s)", job->id,
                    event_job_state(w->state), event_job_state(job->state), job->reason);
}

static int look(struct wait *w, size_t i, uint32_t hold_ms)
{
    const Ballast__JobReply *reply;
    int rc = ask(w, i, hold_ms, &reply);
    if (rc != CTL_OK)
        return rc;
    bool is_for_end = w->state == BALLAST__JOB_STATE__JOB_UNKNOWN;
    bool has_ended = job_state_is_ended(reply->job->state);
    bool reached = is_for_end ? has_ended : reply->reached || has_reached(reply->job, w->state);
    if (!reached && !has_ended)
        return CTL_OK;
    w->codes[i] = code_of(w, reply->job, reached);
    if (ctl_is_json(w->c))
        w->shown[i] = json_of_job(reply->job);
    w->n_open--;
    if (reached && !w->any_reached)
        w->which = i;
    w->any_reached |= reached;
    return CTL_OK;
}

/* Until none is open, or with --any the first has got there. */
static int look_until_over(struct wait *w)
{
    for (size_t turn = 0; w->n_open; turn++) {
        uint32_t hold_ms = turn == 0 && w->n > 1 ? 0 /* an id that is none is told at once */
                         : w->n_open > 1         ? HOLD_OF_SEVERAL_MS : HOLD_MS;
        size_t nth = turn % w->n_open, n_seen = 0;
        for (size_t i = 0; i < w->n; i++) {
            if (w->codes[i] != OPEN)
                continue;
            arena_reset(&w->c->arena);
            int rc = look(w, i, n_seen++ == nth ? hold_ms : 0);
            if (rc != CTL_OK)
                return rc;
            if (w->c->any && w->any_reached)
                return CTL_OK;
        }
    }
    return CTL_OK;
}

/* ---- what is said ---------------------------------------------------------------------------- */

static int fail_late(const struct wait *w)
{
    char *open = arena_strdup(&w->c->arena, "");
    for (size_t i = 0; i < w->n; i++)
        if (w->codes[i] == OPEN)
            open = arena_printf(&w->c->arena, "%s%s%" PRIu64, open, *open ? ", " : "", w->ids[i]);
    return ctl_fail(w->c, CTL_WAIT_TIMEOUT, "job%s %s: the time to wait is over",
                    w->n_open > 1 ? "s" : "", open);
}

/* As they were when they got there: one, or a list of them. */
static void show_json(struct wait *w)
{
    if (w->n == 1 || w->c->any) {
        ctl_json_one(w->c, "Job", 0, w->shown[w->which]);
        w->shown[w->which] = NULL;
        return;
    }
    struct json *items = json_new_array();
    for (size_t i = 0; i < w->n; i++) {
        json_push(items, w->shown[i]);
        w->shown[i] = NULL;
    }
    ctl_json_list(w->c, "JobList", 0, false, items);
}

static int finish(struct wait *w)
{
    bool shows = !w->c->any || w->any_reached;
    if (ctl_is_json(w->c) && shows)
        show_json(w);
    else if (w->c->any && w->any_reached)
        printf("%" PRIu64 "\n", w->ids[w->which]);
    if (w->c->any && w->any_reached)
        return w->codes[w->which];
    int code = CTL_OK;
    for (size_t i = 0; i < w->n && code == CTL_OK; i++)
        code = w->codes[i];
    return code;
}

int ctl_wait_for(struct ctl *c, const job_id *ids, size_t n_ids, Ballast__JobState state)
{
    struct wait w = {.c = c, .ids = ids, .n = n_ids, .n_open = n_ids, .state = state,
                     .codes = xcalloc(n_ids, sizeof *w.codes),
                     .shown = xcalloc(n_ids, sizeof *w.shown)};
    for (size_t i = 0; i < n_ids; i++)
        w.codes[i] = OPEN;
    int rc = look_until_over(&w);
    rc = rc == CTL_OK ? finish(&w) : rc == CTL_WAIT_TIMEOUT ? fail_late(&w) : rc;
    for (size_t i = 0; i < n_ids; i++)
        json_destroy(w.shown[i]);
    free(w.shown);
    free(w.codes);
    return rc;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* "state=RUNNING" or "RUNNING". */
static bool read_state(const struct ctl *c, Ballast__JobState *out)
{
    char quoted[FIELD_QUOTE_BYTES];
    const char *word = c->wait_for;
    if (!strncmp(word, "state=", 6))
        word += 6;
    for (int s = BALLAST__JOB_STATE__JOB_QUEUED; s <= (int)JOB_STATE_MAX; s++)
        if (!strcasecmp(word, event_job_state((Ballast__JobState)s))) {
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
    job_id *ids = xcalloc(c->n_args, sizeof *ids);
    bool is_good = !c->wait_for || read_state(c, &state);
    for (size_t i = 0; i < c->n_args && is_good; i++)
        is_good = (ids[i] = ctl_job_id(c, c->args[i])) != 0;
    if (c->timeout_ms)
        c->deadline_ns = clock_now_ns() + c->timeout_ms * NS_PER_MS;
    int rc = is_good ? ctl_wait_for(c, ids, c->n_args, state) : CTL_USAGE;
    free(ids);
    return rc;
}
