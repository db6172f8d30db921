/* agent_trainer.c - what trainers say and how they end, as the worker's core sees it */
#include "worker/agent_parts.h"

#include <inttypes.h>
#include <string.h>

#define LATE_NS         NS_PER_S
#define PATIENCE_MS_MAX (86400u * 1000u)

/* ---- trainer ------------------------------------------------------------------------------- */

/* What a trainer says of plans only grows. True if it is news. */
static bool merge_plan(struct attempt *x, const Ballast__RankState *s)
{
    bool is_news = false;
    if (s->prepared_epoch > x->prepared_epoch) {
        x->prepared_epoch = s->prepared_epoch;
        is_news = true;
    }
    if (s->rejected_epoch > x->rejected_epoch) {
        x->rejected_epoch = s->rejected_epoch;
        agent_set_line(&x->plan_text, s->plan_text);
        is_news = true;
    }
    if (s->placement_epoch > x->placement_epoch) {
        x->placement_epoch = s->placement_epoch;
        x->moved_bytes = s->moved_bytes;
        x->pause_s = s->pause_s;
        is_news = true;
    }
    return is_news;
}

/* When its next word is due. */
static void heard(struct attempt *x, const Ballast__RankState *s, uint64_t now_ns)
{
    uint64_t ms = s->patience_ms < PATIENCE_MS_MAX ? s->patience_ms : PATIENCE_MS_MAX;
    x->heard_ns = now_ns;
    x->late_ns = ms ? now_ns + ms * NS_PER_MS : UINT64_MAX;
    x->is_late = false;
}

static void on_trainer_state(struct agent *a, struct agent_turn *t, struct attempt *x,
                             const Ballast__RankState *s)
{
    heard(x, s, t->now_ns);
    bool is_news = s->checkpoint_step > x->checkpoint_step;
    is_news |= merge_plan(x, s);
    if (s->settings_revision > x->settings_revision) {
        x->settings_revision = s->settings_revision;
        is_news = true;
    }
    if (*s->data_address && !*x->data_address && s->data_key.len == DATA_KEY_BYTES) {
        agent_set_line(&x->data_address, s->data_address);
        memcpy(x->data_key, s->data_key.data, DATA_KEY_BYTES);
        is_news = true;
    }
    if (s->step > x->step)
        x->step = s->step;
    if (s->checkpoint_step > x->checkpoint_step)
        x->checkpoint_step = s->checkpoint_step;
    if (s->resumed_from_step)
        x->resumed_from_step = s->resumed_from_step;
    switch (s->phase) {
    case BALLAST__RANK_PHASE__RANK_READY:
    case BALLAST__RANK_PHASE__RANK_RUNNING:
        if (strcmp(s->text, x->warning) != 0) {
            agent_set_line(&x->warning, s->text);
            is_news = true;
        }
        if (s->phase > x->phase) {
            x->phase = s->phase;
            is_news = true;
        }
        break;
    case BALLAST__RANK_PHASE__RANK_FINISHED: /* true once it has exited with 0 */
    case BALLAST__RANK_PHASE__RANK_STOPPED:
        x->says_finished = s->phase == BALLAST__RANK_PHASE__RANK_FINISHED;
        x->says_stopped = !x->says_finished;
        agent_kill_by(x, t->now_ns + a->config.closed_grace_ns);
        break;
    case BALLAST__RANK_PHASE__RANK_FAILED:
        x->says_failed = true;
        x->is_retryable = s->retryable;
        if (x->stop_mode < BALLAST__STOP_MODE__STOP_NOW)
            agent_set_text(x, s->text);
        agent_kill_by(x, t->now_ns + a->config.closed_grace_ns);
        break;
    default:
        break;
    }
    if (is_news)
        agent_report(a, t, x);
}

void agent_look_for_hang(struct agent_turn *t, struct attempt *x)
{
    if (t->now_ns < x->late_ns)
        return;
    if (!x->is_late) {
        x->is_late = true;
        x->late_ns = t->now_ns + LATE_NS;
        return;
    }
    double silent_s = (double)(t->now_ns - x->heard_ns) / NS_PER_S;
    char *why = arena_printf(&t->arena, "the trainer has come no further for %.1f s after step "
                             "%" PRIu64, silent_s, x->step);
    agent_note(t, arena_printf(&t->arena, "job=%" PRIu64 " attempt=%u rank=%u msg=\"%s, killing "
                               "it\"", x->job, x->attempt, x->rank, why));
    x->late_ns = UINT64_MAX;
    if (!*x->text)
        agent_set_text(x, why);
    agent_kill(t, x);
}

void agent_trainer_message(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                           const Ballast__TrainerMessage *m)
{
    struct attempt *x = agent_find(a, job, attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STATE) {
        on_trainer_state(a, t, x, m->state);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP) {
        if (m->step->step > x->step)
            x->step = m->step->step;
        outbox_add(&a->steps, job, attempt, m->step->step, m->step->samples, &m->step->base);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_LOAD && m->load->job_id == job &&
               m->load->attempt == attempt) {
        outbox_add(&a->loads, job, attempt, m->load->last_step, 0, &m->load->base);
    }
}

void agent_trainer_closed(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          const char *why)
{
    struct attempt *x = agent_find(a, job, attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    agent_kill_by(x, t->now_ns + a->config.closed_grace_ns);
    if (why && !x->says_failed && !x->stop_mode)
        agent_set_text(x, why);
}

static const char *failure_text(struct agent_turn *t, const struct attempt *x)
{
    if (x->says_failed || *x->text)
        return arena_strdup(&t->arena, x->text);
    const char *when = x->says_finished ? "after its last step" : "before it had finished";
    if (x->exit_signal)
        return arena_printf(&t->arena, "the trainer was killed by signal %d %s", x->exit_signal,
                            when);
    return arena_printf(&t->arena, "the trainer exited with %d %s", x->exit_code, when);
}

/* Told to save and end, by the coordinator, it could not: somebody must know why. */
static bool failed_to_save(const struct agent *a, const struct attempt *x)
{
    return x->says_failed && x->stop_mode < BALLAST__STOP_MODE__STOP_NOW && !a->is_leaving;
}

void agent_trainer_exited(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          int exit_code, int exit_signal, const char *text)
{
    struct attempt *x = agent_find(a, job, attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    x->exit_code = exit_code;
    x->exit_signal = exit_signal;
    bool is_clean = !exit_code && !exit_signal && !text;
    if (text)
        agent_set_text(x, text);
    if (x->says_finished && is_clean)
        agent_end(a, t, x, BALLAST__RANK_PHASE__RANK_FINISHED, "", false);
    else if (x->says_stopped && is_clean && !x->stop_mode) /* all ranks stop at one step */
        agent_end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, "another rank was told to stop",
                  true);
    else if (x->stop_mode && !failed_to_save(a, x))
        agent_end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, x->text, true);
    else
        agent_end(a, t, x, BALLAST__RANK_PHASE__RANK_FAILED, failure_text(t, x),
                  x->says_failed ? x->is_retryable : true);
    agent_spawn_pending(a, t);
}

void agent_log_grown(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                     uint64_t spool_bytes, uint64_t dropped_bytes, bool is_closed)
{
    (void)t;
    struct attempt *x = agent_find(a, job, attempt);
    if (!x)
        return;
    if (spool_bytes > x->log_spooled)
        x->log_spooled = spool_bytes;
    x->log_dropped = dropped_bytes;
    x->is_log_closed |= is_closed;
}

void agent_measured(struct agent *a, uint64_t loop_lag_ms, uint64_t memory_used_bytes)
{
    a->loop_lag_ms = loop_lag_ms;
    a->memory_used_bytes = memory_used_bytes;
}

void agent_gpu(struct agent *a, struct agent_turn *t, const Ballast__GpuHealth *gpu)
{
    const char *before = a->gpu ? a->gpu->sick : "", *now = gpu ? gpu->sick : "";
    bool is_news = strcmp(before, now) != 0;
    if (is_news)
        agent_note(t, arena_printf(&t->arena, "worker=%s device=%s msg=\"%s%s\"", a->config.name,
                                   a->config.device, now[0] ? "gets no new work: " : "",
                                   now[0] ? now : "the GPU is well again"));
    gpu_free(a->gpu);
    a->gpu = gpu_dup(gpu);
    if (is_news && a->is_attached)
        a->next_beat_ns = t->now_ns; /* before a job is given to it */
}
