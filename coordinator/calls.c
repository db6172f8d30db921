/* calls.c - what clients ask for
 *
 * Every change answers with the state after it. Asking twice is harmless: a submit by its key, the
 * rest by nature. */
#include "coordinator/core.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define JOBS_LISTED_DEFAULT 1000u

/* ---- submit ------------------------------------------------------------------------------- */

static void reply_submitted(struct turn *t, uint64_t peer, const Ballast__Envelope *e, job_id id,
                            bool repeated)
{
    Ballast__SubmitReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__submit_reply__init(reply);
    reply->job_id = id;
    reply->repeated_key = repeated;
    turn_reply(t, peer, e, &reply->base);
}

/* Whether the jobs it comes after allow it; answers if not. */
static bool check_after(struct coord *c, struct turn *t, uint64_t peer,
                        const Ballast__Envelope *e, const Ballast__JobSpec *spec)
{
    for (size_t i = 0; i < spec->n_scheduling_after; i++) {
        job_id id = spec->scheduling_after[i];
        const struct job *j = job_table_find(&c->jobs, id);
        if (!j) {
            turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                        "scheduling.after: there is no job %" PRIu64, id);
            return false;
        }
        if (job_has_ended(j) && j->state != BALLAST__JOB_STATE__JOB_DONE) {
            turn_refuse(t, peer, e, BALLAST__CODE__FAILED_PRECONDITION, "AFTER_JOB_NOT_DONE",
                        "scheduling.after: job %" PRIu64 " is %s and will not be DONE", id,
                        event_job_state(j->state));
            return false;
        }
    }
    return true;
}

/* With workers enough, but not of that size, the job would wait for ever while all seems well. With
 * too few of them it waits, as more may come. */
static bool check_fits(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                       const Ballast__JobSpec *spec)
{
    struct queue_worker *workers;
    struct queue_job job = core_queue_job(0, spec);
    size_t n = core_workers(&c->fleet, t->now_ns, &t->arena, &workers), n_large = 0;
    uint64_t needs = queue_memory_needed(&job, workers, n);
    for (size_t i = 0; i < n; i++)
        n_large += workers[i].memory_bytes >= needs;
    if (n < spec->parallel_workers || n_large >= spec->parallel_workers)
        return true;
    turn_refuse(t, peer, e, BALLAST__CODE__RESOURCE_EXHAUSTED, "NO_FIT",
                "a rank needs %" PRIu64 " MiB of memory%s; of the %zu workers attached %zu have "
                "that, %u are needed", needs >> 20,
                needs > spec->memory_bytes_per_rank ? " where its experts lie on several nodes"
                                                    : "", n, n_large, spec->parallel_workers);
    return false;
}

static bool check_submit(struct coord *c, struct turn *t, uint64_t peer,
                         const Ballast__Envelope *e, const Ballast__SubmitRequest *request)
{
    const Ballast__JobSpec *spec = request->spec;
    if (!spec || !spec->parallel_workers || spec->parallel_workers > RANKS_MAX) {
        turn_refuse(t, peer, e, BALLAST__CODE__INVALID_ARGUMENT, "BAD_JOB",
                    "parallel.workers: must be 1 to %u", RANKS_MAX);
        return false;
    }
    if (c->jobs.n >= JOBS_LIVE_MAX) {
        turn_refuse(t, peer, e, BALLAST__CODE__RESOURCE_EXHAUSTED, "QUEUE_FULL",
                    "%u jobs are live, the most there may be; try again when some have ended",
                    JOBS_LIVE_MAX);
        t->out[t->n_out - 1].envelope.status->retry_after_ms = 1000;
        return false;
    }
    return check_fits(c, t, peer, e, spec) && check_after(c, t, peer, e, spec);
}

void call_submit(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                 const Ballast__Envelope *e, const Ballast__SubmitRequest *request)
{
    if (e->idempotency_key.len != IDEMPOTENCY_KEY_BYTES) {
        turn_refuse(t, peer, e, BALLAST__CODE__INVALID_ARGUMENT, "NO_KEY",
                    "a submit needs an idempotency key of %d bytes", IDEMPOTENCY_KEY_BYTES);
        return;
    }
    const uint8_t *key = e->idempotency_key.data;
    uint8_t digest[DIGEST_BYTES];
    size_t n_bytes = ballast__submit_request__get_packed_size(request);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__submit_request__pack(request, bytes);
    keys_digest(bytes, n_bytes, digest);

    const struct key_entry *known = keys_find(&c->keys, user, key);
    if (known && memcmp(known->digest, digest, sizeof digest)) {
        turn_refuse(t, peer, e, BALLAST__CODE__ALREADY_EXISTS, "KEY_REUSED",
                    "this idempotency key has made job %" PRIu64 " from another request",
                    known->job);
        return;
    }
    if (known) {
        reply_submitted(t, peer, e, known->job, true);
        return;
    }
    if (!check_submit(c, t, peer, e, request))
        return;
    job_id id = c->last_job_id + 1;
    emit_submitted(c, t, id, request->spec, user, key, digest);
    struct job *j = job_table_find(&c->jobs, id);
    if (request->hold)
        emit_held(c, t, j, true, "");
    for (size_t i = 0; i < request->spec->n_scheduling_after; i++) {
        job_id after = request->spec->scheduling_after[i];
        const struct job *other = job_table_find(&c->jobs, after);
        if (other->state == BALLAST__JOB_STATE__JOB_DONE)
            emit_after(c, t, j, after);
    }
    reply_submitted(t, peer, e, id, false);
}

/* ---- cancel, hold, release ---------------------------------------------------------------- */

static Ballast__JobReply *describe(struct coord *c, struct turn *t, const struct job *j)
{
    Ballast__JobReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__job_reply__init(reply);
    reply->seq = c->last_seq;
    reply->job = job_describe(j, t->now_ns, &t->arena);
    return reply;
}

void reply_job(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
               const struct job *j)
{
    turn_reply(t, peer, e, &describe(c, t, j)->base);
}

void refuse_state(struct turn *t, uint64_t peer, const Ballast__Envelope *e, const struct job *j,
                  const char *hint)
{
    turn_refuse(t, peer, e, BALLAST__CODE__FAILED_PRECONDITION, "JOB_STATE",
                "job %" PRIu64 " is %s; %s", j->id, event_job_state(j->state), hint);
}

static void cancel(struct coord *c, struct turn *t, struct job *j, const char *reason)
{
    bool is_ending = j->state == BALLAST__JOB_STATE__JOB_STOPPING && !job_is_pausing(j);
    if (job_has_ended(j) || is_ending)
        return; /* asked twice, or too late: as it is */
    attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_CANCELLED, BALLAST__STOP_MODE__STOP_NOW,
                *reason ? arena_printf(&t->arena, "cancelled: %s", reason) : "cancelled", "");
}

static bool is_pending(const struct job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_QUEUED ||
        j->state == BALLAST__JOB_STATE__JOB_RECOVERING;
}

bool call_has_key(const Ballast__Envelope *e, const uint8_t key[IDEMPOTENCY_KEY_BYTES])
{
    return e->idempotency_key.len == IDEMPOTENCY_KEY_BYTES &&
        !memcmp(e->idempotency_key.data, key, IDEMPOTENCY_KEY_BYTES);
}

void call_job(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
              const Ballast__JobRequest *request)
{
    struct job *j = job_table_find(&c->jobs, request->job_id);
    if (!j) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                    "there is no job %" PRIu64, request->job_id);
        return;
    }
    switch (e->method) {
    case BALLAST__METHOD__METHOD_JOB_CANCEL:
        cancel(c, t, j, request->reason);
        break;
    case BALLAST__METHOD__METHOD_JOB_HOLD:
        if (!is_pending(j)) {
            refuse_state(t, peer, e, j, j->state == BALLAST__JOB_STATE__JOB_PAUSED
                         ? "it does not start before it is resumed"
                         : "only a job that waits (QUEUED, RECOVERING) can be held");
            return;
        }
        if (!j->held || strcmp(j->hold_reason, request->reason))
            emit_held(c, t, j, true, request->reason);
        j->wait.kind = WAIT_HELD;
        break;
    default: /* METHOD_JOB_RELEASE */
        if (j->held) {
            emit_held(c, t, j, false, "");
            j->wait.kind = WAIT_NONE;
        }
        break;
    }
    reply_job(c, t, peer, e, j);
}

/* ---- wait --------------------------------------------------------------------------------- */

static bool is_satisfied(const struct job *j, uint32_t states)
{
    return job_has_ended(j) || (j->states_seen & states);
}

static void answer_wait(struct coord *c, struct turn *t, uint64_t peer,
                        const Ballast__Envelope *e, const struct job *j, uint32_t states)
{
    Ballast__JobReply *reply = describe(c, t, j);
    reply->reached = j->states_seen & states;
    turn_reply(t, peer, e, &reply->base);
}

void call_job_wait(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                   const Ballast__JobWaitRequest *request)
{
    const struct job *j = job_table_find(&c->jobs, request->job_id);
    if (!j) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                    "there is no job %" PRIu64, request->job_id);
        return;
    }
    uint32_t states = 0;
    for (size_t i = 0; i < request->n_states; i++)
        if (request->states[i] > 0 && request->states[i] <= JOB_STATE_MAX)
            states |= 1u << request->states[i];
    uint64_t wait_ms = request->wait_ms < DEADLINE_MS_MAX ? request->wait_ms : DEADLINE_MS_MAX;
    if (e->deadline_ms && e->deadline_ms < wait_ms)
        wait_ms = e->deadline_ms;
    if (is_satisfied(j, states) || !wait_ms) {
        answer_wait(c, t, peer, e, j, states);
        return;
    }
    c->waits = xgrow(c->waits, c->n_waits, &c->n_waits_alloc, sizeof *c->waits);
    struct pending_wait *w = &c->waits[c->n_waits++];
    *w = (struct pending_wait){.peer = peer, .job = j->id, .states = states,
                               .deadline_ns = t->now_ns + wait_ms * NS_PER_MS};
    ballast__envelope__init(&w->request);
    w->request.method = e->method;
    w->request.request_id = e->request_id;
    w->request.trace_id = e->trace_id;
    core_wake_at(c, w->deadline_ns);
}

uint64_t calls_answer_waits(struct coord *c, struct turn *t)
{
    uint64_t next_ns = UINT64_MAX;
    size_t n = 0;
    for (size_t i = 0; i < c->n_waits; i++) {
        struct pending_wait *w = &c->waits[i];
        const struct job *j = job_table_find(&c->jobs, w->job);
        if (j && !is_satisfied(j, w->states) && t->now_ns < w->deadline_ns) {
            if (w->deadline_ns < next_ns)
                next_ns = w->deadline_ns;
            c->waits[n++] = *w;
        } else if (j) {
            answer_wait(c, t, w->peer, &w->request, j, w->states);
        }
    }
    c->n_waits = n;
    return next_ns;
}

/* ---- lists -------------------------------------------------------------------------------- */

void call_job_list(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                   const Ballast__JobListRequest *request)
{
    Ballast__JobListReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__job_list_reply__init(reply);
    size_t limit = request->limit ? request->limit : JOBS_LISTED_DEFAULT;
    size_t n = coord_jobs(c, request->after_id, request->user, limit + 1, &t->arena,
                          &reply->jobs);
    reply->seq = c->last_seq;
    reply->truncated = n > limit;
    reply->n_jobs = n > limit ? limit : n;
    turn_reply(t, peer, e, &reply->base);
}

void call_worker_list(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e)
{
    Ballast__WorkerListReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__worker_list_reply__init(reply);
    reply->seq = c->last_seq;
    reply->n_workers = coord_workers(c, t->now_ns, &t->arena, &reply->workers);
    turn_reply(t, peer, e, &reply->base);
}

/* ---- drain, resume ------------------------------------------------------------------------ */

static void set_drained(struct coord *c, struct turn *t, const struct worker *w, bool drained,
                        const char *reason)
{
    Ballast__RecordWorker r = BALLAST__RECORD_WORKER__INIT;
    r.node = w->node;
    r.machine = w->machine;
    r.state = w->record_state;
    r.worker_epoch = w->record_epoch;
    r.drained = drained;
    r.reason = arena_strdup(&t->arena, reason);
    emit_worker(c, t, w->name, &r);
}

void call_worker(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                 const Ballast__WorkerDrainRequest *request)
{
    struct worker *w = fleet_by_name(&c->fleet, request->name);
    if (!w) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_WORKER",
                    "there is no worker '%s'", request->name);
        return;
    }
    if (e->method == BALLAST__METHOD__METHOD_WORKER_DRAIN) {
        if (!w->is_drained || strcmp(w->record_reason, request->reason))
            set_drained(c, t, w, true, request->reason);
    } else if (w->is_drained) {
        set_drained(c, t, w, false, request->reason);
        if (e->idempotency_key.len == sizeof w->resume_key)
            memcpy(w->resume_key, e->idempotency_key.data, sizeof w->resume_key);
    } else if (!call_has_key(e, w->resume_key)) {
        turn_refuse(t, peer, e, BALLAST__CODE__FAILED_PRECONDITION, "WORKER_STATE",
                    "worker %s is not drained", w->name);
        return;
    }
    Ballast__WorkerReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__worker_reply__init(reply);
    reply->seq = c->last_seq;
    reply->worker = fleet_describe(w, t->now_ns, &t->arena);
    turn_reply(t, peer, e, &reply->base);
}

void call_ping(struct coord *c, struct turn *t, uint64_t peer, const char *user,
               const Ballast__Envelope *e)
{
    Ballast__PingReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__ping_reply__init(reply);
    reply->version = arena_strdup(&t->arena, c->config.version);
    reply->commit = arena_strdup(&t->arena, c->config.commit);
    reply->dashboard = arena_strdup(&t->arena, c->config.dashboard);
    reply->coordinator_epoch = c->epoch;
    reply->uptime_ms = (t->now_ns - c->started_ns) / NS_PER_MS;
    reply->seq = c->last_seq;
    reply->n_workers = (uint32_t)c->fleet.n;
    reply->n_workers_alive = c->fleet.n_attached;
    reply->n_jobs_live = (uint32_t)c->jobs.n;
    reply->user = arena_strdup(&t->arena, user);
    turn_reply(t, peer, e, &reply->base);
}
