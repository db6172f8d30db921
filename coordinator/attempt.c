/* attempt.c - one attempt of a job: its gang starts, reports, is stopped, is over
 *
 * The coordinator never trusts one message. It compares what a worker says it holds with what it
 * should hold, and repeats START or STOP until they agree. A STOP makes the worker report the
 * rank as ended even if the START never came, and refuse that START from then on; so an end that
 * is reported is final, whatever is still on its way.
 *
 * While an attempt is STARTING or RUNNING its workers stay with it, also those whose rank has
 * finished. Once it is RECOVERING or STOPPING each worker is free as soon as its own rank has
 * ended, and the attempt is over when every rank has. */
#include "coordinator/core.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool is_wanted(const struct job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_STARTING ||
        j->state == BALLAST__JOB_STATE__JOB_RUNNING;
}

static bool is_stopping(const struct job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_RECOVERING ||
        j->state == BALLAST__JOB_STATE__JOB_STOPPING;
}

/* The job whose present attempt has that rank on w, or NULL. */
static struct job *job_of(struct coord *c, const struct worker *w)
{
    if (!w->job)
        return NULL;
    struct job *j = job_table_find(&c->jobs, w->job);
    assert(j && j->ranks && j->attempt == w->attempt && w->rank < j->n_gang);
    assert(j->ranks[w->rank].worker == w->index);
    return j;
}

/* ---- fates -------------------------------------------------------------------------------- */

static void set_fate(struct coord *c, struct job *j, uint32_t rank, enum rank_fate fate,
                     uint64_t over_ns)
{
    struct rank *r = &j->ranks[rank];
    j->n_alive += (fate == RANK_ALIVE) - (r->fate == RANK_ALIVE);
    r->fate = fate;
    r->over_ns = over_ns;
    core_wake_at(c, over_ns > c->now_ns ? over_ns : c->now_ns);
}

static void release_worker(struct coord *c, struct job *j, uint32_t rank)
{
    struct worker *w = c->fleet.workers[j->ranks[rank].worker];
    if (w->job == j->id && w->attempt == j->attempt) {
        w->job = 0;
        w->attempt = w->rank = 0;
        c->queue_is_stale = true;
    }
}

static void release_gang(struct coord *c, struct job *j)
{
    for (uint32_t r = 0; j->ranks && r < j->n_gang; r++)
        release_worker(c, j, r);
    free(j->ranks);
    free(j->said);
    j->ranks = NULL;
    j->said = NULL;
    j->n_alive = j->n_finished = 0;
}

static void release_ended(struct coord *c, struct job *j)
{
    for (uint32_t r = 0; j->ranks && r < j->n_gang; r++)
        if (j->ranks[r].fate == RANK_ENDED)
            release_worker(c, j, r);
}

/* ---- life of an attempt ------------------------------------------------------------------- */

static void watch(struct job *j)
{
    free(j->ranks);
    free(j->said);
    j->ranks = xcalloc(j->n_gang, sizeof *j->ranks);
    j->said = xcalloc(j->n_gang, sizeof *j->said);
    j->n_alive = j->n_gang;
    j->n_finished = 0;
}

void attempt_start(struct coord *c, struct turn *t, struct job *j, const uint32_t *workers)
{
    emit_assigned(c, t, j, workers);
    watch(j);
    j->live_step = j->checkpoint_step;
    job_text(&j->warning, NULL);
    j->state_since_ns = t->now_ns;
    for (uint32_t r = 0; r < j->n_gang; r++) {
        struct worker *w = c->fleet.workers[workers[r]];
        assert(!w->job);
        j->ranks[r].worker = w->index;
        w->job = j->id;
        w->attempt = j->attempt;
        w->rank = r;
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
        ? arena_printf(&t->arena, " from step %" PRIu64, j->checkpoint_step) : "";
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
        release_gang(c, j);
        return;
    }
    s.state = BALLAST__JOB_STATE__JOB_STOPPING;
    emit_state(c, t, j, &s);
    release_ended(c, j);
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

/* A rank was lost before the checkpoint of a pause: the others cannot write theirs any more, so
 * the job waits with the last one. A failure that would come again ends it. */
static void hurry_pause(struct coord *c, struct turn *t, struct job *j, bool retryable,
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

/* Another attempt, from the newest checkpoint. */
static void recover(struct coord *c, struct turn *t, struct job *j, const char *reason,
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
    release_ended(c, j);
    stop_all(c, t, j);
}

/* Another attempt, unless the failure would come again or the budget is used up: a job that gets
 * further may be restarted for as long as machines fail. */
static void fail(struct coord *c, struct turn *t, struct job *j, bool retryable,
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
    recover(c, t, j, reason, true);
}

static void finish_if_over(struct coord *c, struct turn *t, struct job *j)
{
    if (!j->ranks || job_gang_over_ns(j) > t->now_ns)
        return;
    if (j->state == BALLAST__JOB_STATE__JOB_RECOVERING) {
        release_gang(c, j);
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
    release_gang(c, j);
}

static void move_to_running(struct coord *c, struct turn *t, struct job *j)
{
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = BALLAST__JOB_STATE__JOB_RUNNING;
    emit_state(c, t, j, &s);
    if (j->spec->scheduling_time_limit_s)
        core_wake_at(c, t->now_ns);
}

static void complete(struct coord *c, struct turn *t, struct job *j)
{
    if (j->state == BALLAST__JOB_STATE__JOB_STARTING)
        move_to_running(c, t, j);
    placing_over(c, t, j, "all steps are done");
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    s.state = BALLAST__JOB_STATE__JOB_DONE;
    s.reason = arena_printf(&t->arena, "finished all steps, %" PRIu64, j->spec->train_steps);
    s.exit = "0";
    emit_state(c, t, j, &s);
    release_gang(c, j);
}

/* ---- what workers say --------------------------------------------------------------------- */

static const char *exit_text(struct turn *t, const Ballast__RankState *s)
{
    if (s->exit_signal)
        return arena_printf(&t->arena, "%d:%d", s->exit_code, s->exit_signal);
    return arena_printf(&t->arena, "%d", s->exit_code);
}

static const char *end_text(struct turn *t, const struct worker *w, const Ballast__RankState *s)
{
    const char *why = s->text;
    if (!*why)
        why = s->exit_signal ? arena_printf(&t->arena, "killed by signal %d", s->exit_signal)
            : s->phase == BALLAST__RANK_PHASE__RANK_STOPPED ? "it was stopped"
            : arena_printf(&t->arena, "exited with %d", s->exit_code);
    return arena_printf(&t->arena, "rank %u on worker %s: %s", s->rank, w->name, why);
}

static void on_rank_ended(struct coord *c, struct turn *t, struct job *j, struct worker *w,
                          const Ballast__RankState *s)
{
    bool has_finished = s->phase == BALLAST__RANK_PHASE__RANK_FINISHED;
    bool has_failed = s->phase == BALLAST__RANK_PHASE__RANK_FAILED;
    set_fate(c, j, s->rank, RANK_ENDED, 0);
    j->n_finished += has_finished;
    if (is_wanted(j)) {
        if (s->phase == BALLAST__RANK_PHASE__RANK_STOPPED)
            recover(c, t, j, end_text(t, w, s), false); /* its worker was told to end */
        else if (!has_finished)
            fail(c, t, j, !has_failed || s->retryable, end_text(t, w, s), exit_text(t, s));
        else if (j->n_finished == j->n_gang)
            complete(c, t, j);
        return;
    }
    release_worker(c, j, s->rank);
    /* The first news of a failure may be a neighbour's; the cause decides whether to go on. */
    if (j->state == BALLAST__JOB_STATE__JOB_RECOVERING && has_failed && !s->retryable)
        attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_FAILED, BALLAST__STOP_MODE__STOP_NOW,
                    end_text(t, w, s), exit_text(t, s));
    if (has_failed || s->exit_code || s->exit_signal)
        hurry_pause(c, t, j, !has_failed || s->retryable, end_text(t, w, s), exit_text(t, s));
    finish_if_over(c, t, j);
}

static void on_rank_alive(struct coord *c, struct turn *t, struct job *j, struct worker *w,
                          const Ballast__RankState *s)
{
    if (is_stopping(j)) {
        if (j->ranks[s->rank].fate == RANK_SILENT)
            set_fate(c, j, s->rank, RANK_ALIVE, 0); /* it is back: now its end can be known */
        attempt_say_stop(c, t, j, w);
        return;
    }
    attempt_relay_peers(c, t, j, w, s);
    if (s->phase == BALLAST__RANK_PHASE__RANK_RUNNING && s->rank == 0 &&
        j->state == BALLAST__JOB_STATE__JOB_STARTING)
        move_to_running(c, t, j);
}

static void merge(struct coord *c, struct turn *t, struct job *j, const Ballast__RankState *s)
{
    struct rank *r = &j->ranks[s->rank];
    if (s->phase > r->phase)
        r->phase = s->phase;
    if (s->rank == 0 && s->step > j->live_step)
        j->live_step = s->step;
    if (s->rank == 0 && s->phase == BALLAST__RANK_PHASE__RANK_RUNNING)
        job_text(&j->warning, s->text);
    if (s->checkpoint_step > j->checkpoint_step ||
        (s->phase == BALLAST__RANK_PHASE__RANK_FINISHED && s->step > j->step))
        emit_progress(c, t, j, s->checkpoint_step, s->step);
    if (is_wanted(j)) {
        placing_report(c, t, j, s);
        settings_report(c, t, j, s);
    }
}

void attempt_report(struct coord *c, struct turn *t, struct worker *w,
                    const Ballast__RankState *s)
{
    struct job *j = job_of(c, w);
    bool is_ours = j && s->job_id == j->id && s->attempt == j->attempt && s->rank == w->rank;
    bool has_ended = rank_phase_has_ended(s->phase);
    if (!is_ours) {
        if (has_ended)
            attempt_ack_ended(t, w, s);
        else if (w->peer)
            attempt_fence(t, w->peer, w->epoch, s, "this attempt is not wanted any more");
        return;
    }
    merge(c, t, j, s);
    if (!has_ended) {
        if (j->ranks[s->rank].fate != RANK_ENDED)
            on_rank_alive(c, t, j, w, s);
        return;
    }
    if (j->ranks[s->rank].fate != RANK_ENDED)
        on_rank_ended(c, t, j, w, s);
    /* Only what is recorded may be forgotten: a rank that has finished while others run is not. */
    if (!is_wanted(j))
        attempt_ack_ended(t, w, s);
}

void attempt_missing(struct coord *c, struct turn *t, struct worker *w)
{
    struct job *j = job_of(c, w);
    if (!j || j->ranks[w->rank].fate == RANK_ENDED)
        return;
    if (j->state == BALLAST__JOB_STATE__JOB_STARTING) {
        attempt_say_start(t, w, attempt_start_template(c, t, j));
    } else if (is_stopping(j)) {
        if (j->ranks[w->rank].fate == RANK_SILENT)
            set_fate(c, j, w->rank, RANK_ALIVE, 0);
        attempt_say_stop(c, t, j, w);
    } else {
        fail(c, t, j, true, arena_printf(&t->arena, "worker %s does not hold rank %u any more",
                                         w->name, w->rank), "");
    }
}

void attempt_rank_lost(struct coord *c, struct turn *t, struct worker *w, enum rank_fate fate,
                       const char *why)
{
    struct job *j = job_of(c, w);
    if (!j || j->ranks[w->rank].fate == RANK_ENDED)
        return;
    uint64_t over_ns = fate == RANK_ENDED ? 0 : t->now_ns +
        (fate == RANK_ORPHAN ? c->config.orphan_ns
                             : c->config.fence_ns + c->config.lost_floor_ns);
    uint32_t rank = w->rank;
    set_fate(c, j, rank, fate, over_ns);
    if (is_wanted(j))
        fail(c, t, j, true, arena_printf(&t->arena, "rank %u: %s", rank, why), "");
    else if (fate != RANK_SILENT)
        release_worker(c, j, rank);
    if (fate == RANK_ORPHAN && j->ranks)
        release_worker(c, j, rank); /* the new life of the worker has nothing to do with it */
    hurry_pause(c, t, j, true, arena_printf(&t->arena, "rank %u: %s", rank, why), "");
    finish_if_over(c, t, j);
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
    fail(c, t, j, true, arena_printf(&t->arena, "rank %u on worker %s was not running after "
                                     "%" PRIu64 " s", rank, j->gang[rank],
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
        finish_if_over(c, t, j);
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
    watch(j);
    for (uint32_t r = 0; r < j->n_gang; r++) {
        struct worker *w = fleet_by_name(&c->fleet, j->gang[r]);
        if (!w)
            w = fleet_add(&c->fleet, j->gang[r]);
        assert(w); /* all of them fitted before the restart */
        j->ranks[r].worker = w->index;
        /* A worker that was given away again had reported the end of its rank before. */
        if (w->claim_seq > j->assigned_seq) {
            set_fate(c, j, r, RANK_ENDED, 0);
            continue;
        }
        struct job *earlier = job_of(c, w);
        if (earlier)
            set_fate(c, earlier, w->rank, RANK_ENDED, 0);
        w->claim_seq = j->assigned_seq;
        w->job = j->id;
        w->attempt = j->attempt;
        w->rank = r;
    }
}

void attempt_adopt_all(struct coord *c)
{
    for (size_t i = 0; i < c->jobs.n; i++) {
        struct job *j = c->jobs.jobs[i];
        j->live_step = j->summary.step > j->step ? j->summary.step : j->step;
        j->state_since_ns = j->running_since_ns = c->now_ns;
        j->not_before_ns = c->now_ns + j->backoff_ms * NS_PER_MS;
        j->wait.kind = is_stopping(j) ? WAIT_GANG : WAIT_NONE;
        if (is_wanted(j) || is_stopping(j))
            adopt(c, j);
        placing_adopt(c, j);
    }
}
