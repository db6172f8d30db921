/* attempt.c - one attempt of a job: its gang starts, is stopped, is over
 *
 * The coordinator never trusts one message. It compares what a worker says it holds with what it
 * should hold, and repeats START or STOP until they agree. A STOP makes the worker report the
 * rank as ended even if the START never came, and refuse that START from then on; so an end that
 * is reported is final, whatever is still on its way.
 *
 * While an attempt is STARTING or RUNNING its workers stay with it, also those whose rank has
 * finished. Once it is RECOVERING or STOPPING each worker is free as soon as its own rank has
 * ended, and the attempt is over when every rank has. */
#include "coordinator/attempt_parts.h"

#include <assert.h>
#include <inttypes.h>

/* ---- life of an attempt ------------------------------------------------------------------- */

void attempt_start(struct coord *c, struct turn *t, struct job *j, const uint32_t *workers)
{
    emit_assigned(c, t, j, workers);
    attempt_watch(j);
    j->live_step = j->checkpoint_step;
    job_text(&j->warning, NULL);
    j->state_since_ns = t->now_ns;
    for (uint32_t r = 0; r < j->n_gang; r++) {
        struct worker *w = c->fleet.workers[workers[r]];
        assert(!w->job);
        attempt_take(j, r, w);
    }
    const Ballast__Start *template = attempt_start_template(c, t, j);
    for (uint32_t r = 0; r < j->n_gang; r++)
        attempt_say_start(t, c->fleet.workers[workers[r]], template);
    core_wake_at(c, t->now_ns + c->config.start_timeout_ns);
}

static void stop_all(struct coord *c, struct turn *t, struct job *j)
{
    for (uint32_t r = 0; r < j->n_gang; r++)
        if (j->ranks[r].fate == RANK_ALIVE)
            attempt_say_stop(c, t, j, c->fleet.workers[j->ranks[r].worker]);
    j->wait.kind = WAIT_GANG;
    core_wake_at(c, t->now_ns);
}

/* A job that is PAUSED says where it is and what to type. */
static char *reason_of(struct turn *t, const struct job *j, Ballast__JobState state,
                       const char *reason)
{
    if (state != BALLAST__JOB_STATE__JOB_PAUSED)
        return arena_strdup(&t->arena, reason);
    const char *place = j->checkpoint_step
        ? arena_printf(&t->arena, " from step %" PRIu64, j->checkpoint_step)
        : j->step ? "; it has written no checkpoint" : "";
    return arena_printf(&t->arena, "%s; ballast job resume %" PRIu64 " lets it go on%s", reason,
                        j->id, place);
}

void attempt_stop(struct coord *c, struct turn *t, struct job *j,
                  const Ballast__RecordState *wish)
{
    Ballast__RecordState s = *wish;
    placing_over(c, t, j, s.reason);
    if (job_gang_over_ns(j) <= t->now_ns && job_may_move(j, s.then)) {
        s.state = s.then;
        s.then = BALLAST__JOB_STATE__JOB_UNKNOWN;
        s.stop_mode = BALLAST__STOP_MODE__STOP_UNKNOWN;
        s.reason = reason_of(t, j, s.state, s.reason);
        emit_state(c, t, j, &s);
        attempt_release_all(c, j);
        return;
    }
    s.state = BALLAST__JOB_STATE__JOB_STOPPING;
    emit_state(c, t, j, &s);
    attempt_release_ended(c, j);
    stop_all(c, t, j);
}

void attempt_end(struct coord *c, struct turn *t, struct job *j, Ballast__JobState then,
                 Ballast__StopMode mode, const char *reason, const char *exit)
{
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.then = then;
    s.stop_mode = mode;
    s.reason = arena_strdup(&t->arena, reason);
    s.exit = arena_strdup(&t->arena, exit);
    attempt_stop(c, t, j, &s);
}

void attempt_hurry_pause(struct coord *c, struct turn *t, struct job *j, bool retryable,
                         const char *why, const char *exit)
{
    if (!job_is_pausing(j))
        return;
    if (!retryable)
        attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_FAILED, BALLAST__STOP_MODE__STOP_NOW, why,
                    exit);
    else if (j->stop_mode == BALLAST__STOP_MODE__STOP_CHECKPOINT)
        attempt_end(c, t, j, j->then, BALLAST__STOP_MODE__STOP_NOW,
                    arena_printf(&t->arena, "%s; %s", j->reason, why), "");
}

void attempt_recover(struct coord *c, struct turn *t, struct job *j, const char *reason,
                     bool counts_as_restart)
{
    uint64_t backoff_ns = job_backoff_ns(j, c->config.backoff_base_ns, c->config.backoff_cap_ns);
    placing_over(c, t, j, reason);
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = BALLAST__JOB_STATE__JOB_RECOVERING;
    s.reason = arena_strdup(&t->arena, reason);
    s.not_before_ms = backoff_ns / NS_PER_MS;
    s.counts_as_restart = counts_as_restart;
    emit_state(c, t, j, &s);
    j->not_before_ns = t->now_ns + backoff_ns;
    core_wake_at(c, j->not_before_ns);
    attempt_release_ended(c, j);
    stop_all(c, t, j);
}

/* A job that gets further may be restarted for as long as machines fail. */
void attempt_fail(struct coord *c, struct turn *t, struct job *j, bool retryable,
                  const char *reason, const char *exit)
{
    uint32_t budget = j->spec->scheduling_max_restarts;
    if (!retryable || j->n_failures_in_row >= budget) {
        if (retryable && budget)
            reason = arena_printf(&t->arena, "%s; it was restarted %u times without a new "
                                  "checkpoint, as often as scheduling.max_restarts allows",
                                  reason, j->n_failures_in_row);
        attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_FAILED, BALLAST__STOP_MODE__STOP_NOW, reason,
                    exit);
        return;
    }
    attempt_recover(c, t, j, reason, true);
}

void attempt_finish_if_over(struct coord *c, struct turn *t, struct job *j)
{
    if (!j->ranks || job_gang_over_ns(j) > t->now_ns)
        return;
    if (j->state == BALLAST__JOB_STATE__JOB_RECOVERING) {
        attempt_release_all(c, j);
        return;
    }
    if (j->state != BALLAST__JOB_STATE__JOB_STOPPING)
        return;
    bool is_done = j->n_finished == j->n_gang;
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = is_done ? BALLAST__JOB_STATE__JOB_DONE : j->then;
    s.reason = is_done ? "finished before it could be stopped"
                       : reason_of(t, j, s.state, j->reason);
    s.exit = is_done ? "0" : arena_strdup(&t->arena, j->exit);
    emit_state(c, t, j, &s);
    attempt_release_all(c, j);
}

void attempt_move_to_running(struct coord *c, struct turn *t, struct job *j,
                             uint64_t resumed_from_step)
{
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = BALLAST__JOB_STATE__JOB_RUNNING;
    s.attempt = j->attempt;
    s.resumed_from_step = resumed_from_step;
    emit_state(c, t, j, &s);
    if (j->spec->scheduling_time_limit_s)
        core_wake_at(c, t->now_ns);
}

void attempt_complete(struct coord *c, struct turn *t, struct job *j, uint64_t resumed_from_step)
{
    if (j->state == BALLAST__JOB_STATE__JOB_STARTING)
        attempt_move_to_running(c, t, j, resumed_from_step);
    placing_over(c, t, j, "all steps are done");
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = BALLAST__JOB_STATE__JOB_DONE;
    s.reason = arena_printf(&t->arena, "finished all steps, %" PRIu64, j->spec->train_steps);
    s.exit = "0";
    emit_state(c, t, j, &s);
    attempt_release_all(c, j);
}

/* ---- time --------------------------------------------------------------------------------- */

static uint64_t tick_starting(struct coord *c, struct turn *t, struct job *j)
{
    uint64_t until_ns = j->state_since_ns + c->config.start_timeout_ns;
    if (t->now_ns < until_ns)
        return until_ns;
    uint32_t rank = 0;
    while (rank + 1 < j->n_gang && j->ranks[rank].phase >= BALLAST__RANK_PHASE__RANK_READY)
        rank++;
    attempt_fail(c, t, j, true,
                 arena_printf(&t->arena, "rank %u on worker %s was not running after %" PRIu64
                              " s", rank, j->gang[rank],
                              (uint64_t)(c->config.start_timeout_ns / NS_PER_S)), "");
    return t->now_ns;
}

static uint64_t tick_running(struct coord *c, struct turn *t, struct job *j)
{
    uint64_t limit_ms = j->spec->scheduling_time_limit_s * 1000;
    uint64_t ran_ms = job_ran_ms(j, t->now_ns), next_ns = placing_tick(c, t, j);
    if (!limit_ms)
        return next_ns;
    if (ran_ms < limit_ms) {
        uint64_t over_ns = t->now_ns + (limit_ms - ran_ms) * NS_PER_MS;
        return over_ns < next_ns ? over_ns : next_ns;
    }
    attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_FAILED, BALLAST__STOP_MODE__STOP_CHECKPOINT,
                arena_printf(&t->arena, "time limit: it has run for the %" PRIu64
                             " s of scheduling.time_limit", limit_ms / 1000), "");
    return t->now_ns;
}

uint64_t attempt_tick(struct coord *c, struct turn *t, struct job *j)
{
    switch (j->state) {
    case BALLAST__JOB_STATE__JOB_STARTING:
        return tick_starting(c, t, j);
    case BALLAST__JOB_STATE__JOB_RUNNING:
        return tick_running(c, t, j);
    case BALLAST__JOB_STATE__JOB_STOPPING:
    case BALLAST__JOB_STATE__JOB_RECOVERING:
        attempt_finish_if_over(c, t, j);
        if (j->ranks)
            return job_gang_over_ns(j);
        return j->state == BALLAST__JOB_STATE__JOB_RECOVERING && t->now_ns < j->not_before_ns
            ? j->not_before_ns : UINT64_MAX;
    default:
        return UINT64_MAX;
    }
}

/* ---- after a start ------------------------------------------------------------------------ */

static void adopt(struct coord *c, struct job *j)
{
    attempt_watch(j);
    for (uint32_t r = 0; r < j->n_gang; r++) {
        struct worker *w = fleet_by_name(&c->fleet, j->gang[r]);
        if (!w)
            w = fleet_add(&c->fleet, j->gang[r]);
        assert(w); /* all of them fitted before the restart */
        /* A worker that was given away again had reported the end of its rank before. */
        if (w->claim_seq > j->assigned_seq) {
            j->ranks[r].worker = w->index;
            attempt_set_fate(c, j, r, RANK_ENDED, 0);
            continue;
        }
        struct job *earlier = attempt_of(c, w);
        if (earlier)
            attempt_set_fate(c, earlier, w->rank, RANK_ENDED, 0);
        w->claim_seq = j->assigned_seq;
        attempt_take(j, r, w);
    }
}

void attempt_adopt_all(struct coord *c)
{
    for (size_t i = 0; i < c->jobs.n; i++) {
        struct job *j = c->jobs.jobs[i];
        j->live_step = j->summary.step > j->step ? j->summary.step : j->step;
        j->state_since_ns = j->running_since_ns = c->now_ns;
        j->not_before_ns = c->now_ns + j->backoff_ms * NS_PER_MS;
        j->wait.kind = job_is_stopping(j) ? WAIT_GANG : WAIT_NONE;
        if (job_is_wanted(j) || job_is_stopping(j))
            adopt(c, j);
        placing_adopt(c, j);
    }
}
