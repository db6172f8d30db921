/* pausing.c - a job gives its workers back, and goes on where it was
 *
 * A pause lets the ranks finish their step, write a checkpoint and end. PAUSED holds no worker and
 * no memory, so it outlives any process; a resume puts the job back into the queue, and its next
 * attempt begins with that checkpoint. A requeue is both at once: the job waits for workers again,
 * whichever are free. None of them counts as a restart.
 *
 * A person may change his mind before the ranks have ended: what comes after STOPPING changes. */
#include "coordinator/core.h"

#include <inttypes.h>

#define QUEUED BALLAST__JOB_STATE__JOB_QUEUED
#define PAUSED BALLAST__JOB_STATE__JOB_PAUSED

/* Another end for ranks that are stopping anyhow. */
static void change_mind(struct coord *c, struct turn *t, struct job *j,
                        const Ballast__RecordState *wish)
{
    Ballast__RecordState s = *wish;
    s.state = BALLAST__JOB_STATE__JOB_STOPPING;
    s.stop_mode = j->stop_mode;
    s.exit = arena_strdup(&t->arena, j->exit);
    emit_state(c, t, j, &s);
}

/* PAUSED or QUEUED once no rank lives. */
static void give_back(struct coord *c, struct turn *t, struct job *j, Ballast__JobState then,
                      char *why, const Ballast__Envelope *e)
{
    bool trains = j->state == BALLAST__JOB_STATE__JOB_STARTING ||
        j->state == BALLAST__JOB_STATE__JOB_RUNNING;
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.then = then;
    s.stop_mode = trains ? BALLAST__STOP_MODE__STOP_CHECKPOINT : BALLAST__STOP_MODE__STOP_NOW;
    s.reason = why;
    s.idempotency_key = (ProtobufCBinaryData){
        .len = e->idempotency_key.len,
        .data = arena_memdup(&t->arena, e->idempotency_key.data, e->idempotency_key.len)};
    if (job_is_pausing(j))
        change_mind(c, t, j, &s);
    else
        attempt_stop(c, t, j, &s);
    if (j->state == QUEUED)
        j->wait = (struct wait_reason){0};
}

/* Whether it is, or will be, in that state without any doing. */
static bool is_bound_for(const struct job *j, Ballast__JobState state)
{
    return j->state == state || (job_is_pausing(j) && j->then == state);
}

/* Why the method does not go with the job as it is, or NULL. */
static const char *obstacle(struct turn *t, const struct job *j, Ballast__Method method)
{
    bool is_ending = j->state == BALLAST__JOB_STATE__JOB_STOPPING && !job_is_pausing(j);
    switch (method) {
    case BALLAST__METHOD__METHOD_JOB_PAUSE:
        return job_has_ended(j) || is_ending ? "only a job that has not ended can be paused"
                                             : NULL;
    case BALLAST__METHOD__METHOD_JOB_RESUME:
        if (j->state == QUEUED && j->held)
            return arena_printf(&t->arena, "it is held: ballast job release %" PRIu64
                                " lets it start", j->id);
        return j->state == PAUSED || job_is_pausing(j) ? NULL
               : "only a job that is PAUSED can be resumed";
    default: /* METHOD_JOB_REQUEUE */
        if (is_ending)
            return "it can be queued again once it has ended";
        return j->state == PAUSED ? arena_printf(&t->arena, "ballast job resume %" PRIu64
                                                 " lets it go on", j->id) : NULL;
    }
}

void call_job_pause(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                    const Ballast__Envelope *e, const Ballast__JobRequest *request)
{
    struct job *j = job_table_find(&c->jobs, request->job_id);
    bool pauses = e->method == BALLAST__METHOD__METHOD_JOB_PAUSE;
    Ballast__JobState then = pauses ? PAUSED : QUEUED;
    if (!j) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                    "there is no job %" PRIu64, request->job_id);
        return;
    }
    const char *hint = obstacle(t, j, e->method);
    if (call_has_key(e, pauses ? j->pause_key : j->queue_key)) {
        /* Its answer was lost: what came after it stays. */
    } else if (hint) {
        refuse_state(t, peer, e, j, hint);
        return;
    } else if (!is_bound_for(j, then)) {
        const char *did = pauses ? "paused"
            : e->method == BALLAST__METHOD__METHOD_JOB_RESUME ? "resumed" : "requeued";
        give_back(c, t, j, then,
                  arena_printf(&t->arena, "%s by %s%s%s", did, user,
                               *request->reason ? ": " : "", request->reason), e);
    }
    reply_job(c, t, peer, e, j);
}
