/* attempt_report.c - what workers say of the ranks of an attempt, and what follows from it */
#include "coordinator/attempt_parts.h"

#include <inttypes.h>

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
    attempt_set_fate(c, j, s->rank, RANK_ENDED, 0);
    j->n_finished += has_finished;
    if (job_is_wanted(j)) {
        if (s->phase == BALLAST__RANK_PHASE__RANK_STOPPED)
            attempt_recover(c, t, j, end_text(t, w, s), false); /* its worker was told to end */
        else if (!has_finished)
            attempt_fail(c, t, j, !has_failed || s->retryable, end_text(t, w, s), exit_text(t, s));
        else if (j->n_finished == j->n_gang)
            attempt_complete(c, t, j, s->resumed_from_step);
        return;
    }
    attempt_release(c, j, s->rank);
    /* The first news of a failure may be a neighbour's; the cause decides whether to go on. */
    if (j->state == BALLAST__JOB_STATE__JOB_RECOVERING && has_failed && !s->retryable)
        attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_FAILED, BALLAST__STOP_MODE__STOP_NOW,
                    end_text(t, w, s), exit_text(t, s));
    if (has_failed || s->exit_code || s->exit_signal)
        attempt_hurry_pause(c, t, j, !has_failed || s->retryable, end_text(t, w, s),
                            exit_text(t, s));
    attempt_finish_if_over(c, t, j);
}

static void on_rank_alive(struct coord *c, struct turn *t, struct job *j, struct worker *w,
                          const Ballast__RankState *s)
{
    if (job_is_stopping(j)) {
        if (j->ranks[s->rank].fate == RANK_SILENT)
            attempt_set_fate(c, j, s->rank, RANK_ALIVE, 0); /* back: now its end can be known */
        attempt_say_stop(c, t, j, w);
        return;
    }
    attempt_relay_peers(c, t, j, w, s);
    if (s->phase == BALLAST__RANK_PHASE__RANK_RUNNING && s->rank == 0 &&
        j->state == BALLAST__JOB_STATE__JOB_STARTING)
        attempt_move_to_running(c, t, j, s->resumed_from_step);
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
    if (job_is_wanted(j)) {
        placing_report(c, t, j, s);
        settings_report(c, t, j, s);
    }
}

void attempt_report(struct coord *c, struct turn *t, struct worker *w,
                    const Ballast__RankState *s)
{
    struct job *j = attempt_of(c, w);
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
    if (!job_is_wanted(j))
        attempt_ack_ended(t, w, s);
}

void attempt_missing(struct coord *c, struct turn *t, struct worker *w)
{
    struct job *j = attempt_of(c, w);
    if (!j || j->ranks[w->rank].fate == RANK_ENDED)
        return;
    if (j->state == BALLAST__JOB_STATE__JOB_STARTING) {
        attempt_say_start(t, w, attempt_start_template(c, t, j));
    } else if (job_is_stopping(j)) {
        if (j->ranks[w->rank].fate == RANK_SILENT)
            attempt_set_fate(c, j, w->rank, RANK_ALIVE, 0);
        attempt_say_stop(c, t, j, w);
    } else {
        attempt_fail(c, t, j, true,
                     arena_printf(&t->arena, "worker %s does not hold rank %u any more", w->name,
                                  w->rank), "");
    }
}

void attempt_rank_lost(struct coord *c, struct turn *t, struct worker *w, enum rank_fate fate,
                       const char *why)
{
    struct job *j = attempt_of(c, w);
    if (!j || j->ranks[w->rank].fate == RANK_ENDED)
        return;
    uint64_t over_ns = fate == RANK_ENDED ? 0 : t->now_ns +
        (fate == RANK_ORPHAN ? c->config.orphan_ns
                             : c->config.fence_ns + c->config.lost_floor_ns);
    uint32_t rank = w->rank;
    attempt_set_fate(c, j, rank, fate, over_ns);
    if (job_is_wanted(j))
        attempt_fail(c, t, j, true, arena_printf(&t->arena, "rank %u: %s", rank, why), "");
    else if (fate != RANK_SILENT)
        attempt_release(c, j, rank);
    if (fate == RANK_ORPHAN && j->ranks)
        attempt_release(c, j, rank); /* the new life of the worker has nothing to do with it */
    attempt_hurry_pause(c, t, j, true, arena_printf(&t->arena, "rank %u: %s", rank, why), "");
    attempt_finish_if_over(c, t, j);
}
