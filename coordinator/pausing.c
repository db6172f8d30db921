/* pausing.c - a job gives its workers back for a while, and goes on where it was
 *
 * A pause lets the ranks finish their step, write a checkpoint and end. PAUSED holds no worker and
 * no memory, so it outlives any process; a resume puts the job back into the queue, and its next
 * attempt begins with that checkpoint. Neither counts as a restart.
 *
 * A person may change his mind before the ranks have ended: what comes after STOPPING changes. */
#include "coordinator/core.h"

#include <inttypes.h>

static const char *who(struct turn *t, const char *did, const char *user, const char *reason)
{
    return arena_printf(&t->arena, "%s by %s%s%s", did, user, *reason ? ": " : "", reason);
}

/* Another end for ranks that are stopping anyhow. */
static void change_mind(struct coord *c, struct turn *t, struct job *j, Ballast__JobState then,
                        const char *why, const ProtobufCBinaryData *key)
{
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = BALLAST__JOB_STATE__JOB_STOPPING;
    s.then = then;
    s.stop_mode = j->stop_mode;
    s.reason = (char *)why;
    s.exit = arena_strdup(&t->arena, j->exit);
    s.idempotency_key = *key;
    emit_state(c, t, j, &s);
}

static void pause_job(struct coord *c, struct turn *t, struct job *j, const char *why,
                      const ProtobufCBinaryData *key)
{
    bool trains = j->state == BALLAST__JOB_STATE__JOB_STARTING ||
        j->state == BALLAST__JOB_STATE__JOB_RUNNING;
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.then = BALLAST__JOB_STATE__JOB_PAUSED;
    s.stop_mode = trains ? BALLAST__STOP_MODE__STOP_CHECKPOINT : BALLAST__STOP_MODE__STOP_NOW;
    s.reason = (char *)why;
    s.idempotency_key = *key;
    if (job_is_pausing(j))
        change_mind(c, t, j, BALLAST__JOB_STATE__JOB_PAUSED, why, key);
    else
        attempt_stop(c, t, j, &s);
}

static void resume_job(struct coord *c, struct turn *t, struct job *j, const char *why,
                       const ProtobufCBinaryData *key)
{
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    if (job_is_pausing(j)) {
        change_mind(c, t, j, BALLAST__JOB_STATE__JOB_QUEUED, why, key);
        return;
    }
    s.state = BALLAST__JOB_STATE__JOB_QUEUED;
    s.reason = (char *)why;
    s.idempotency_key = *key;
    emit_state(c, t, j, &s);
    j->wait = (struct wait_reason){0};
}

/* Whether it is, or will be, in that state without any doing. */
static bool is_bound_for(const struct job *j, Ballast__JobState state)
{
    return j->state == state || (job_is_pausing(j) && j->then == state);
}

void call_job_pause(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                    const Ballast__Envelope *e, const Ballast__JobRequest *request)
{
    struct job *j = job_table_find(&c->jobs, request->job_id);
    bool pauses = e->method == BALLAST__METHOD__METHOD_JOB_PAUSE;
    if (!j) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                    "there is no job %" PRIu64, request->job_id);
        return;
    }
    const ProtobufCBinaryData key = {
        .len = e->idempotency_key.len,
        .data = arena_memdup(&t->arena, e->idempotency_key.data, e->idempotency_key.len)};
    bool is_ending = j->state == BALLAST__JOB_STATE__JOB_STOPPING && !job_is_pausing(j);
    bool is_paused = j->state == BALLAST__JOB_STATE__JOB_PAUSED || job_is_pausing(j);
    if (call_has_key(e, pauses ? j->pause_key : j->queue_key)) {
        /* Its answer was lost: what came after it stays. */
    } else if (pauses && (job_has_ended(j) || is_ending)) {
        refuse_state(t, peer, e, j, "only a job that has not ended can be paused");
        return;
    } else if (!pauses && !is_paused) {
        refuse_state(t, peer, e, j, "only a job that is PAUSED can be resumed");
        return;
    } else if (pauses && !is_bound_for(j, BALLAST__JOB_STATE__JOB_PAUSED)) {
        pause_job(c, t, j, who(t, "paused", user, request->reason), &key);
    } else if (!pauses && !is_bound_for(j, BALLAST__JOB_STATE__JOB_QUEUED)) {
        resume_job(c, t, j, who(t, "resumed", user, request->reason), &key);
    }
    reply_job(c, t, peer, e, j);
}
