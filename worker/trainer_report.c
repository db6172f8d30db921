/* trainer_report.c - what the daemon hears of this rank, and until when its next word is due */
#include "worker/trainer_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"

#define STEPS_TO_KNOW     3     /* until their time says how long one may take */
#define STEPS_OF_PATIENCE 10.0  /* of the slowest */
#define PATIENCE_NS_MIN   (6 * NS_PER_S) /* what a busy machine does to a rank */
#define SLOW_RATIO        1.5   /* of the busiest rank's own work to the least busy one's, */
#define SLOW_STEPS        20    /* for so many steps */
/* Before that, how long a step may go on with nothing done: a piece of work of a CPU, or what a GPU
 * does between two collectives, takes a part of it. */
#define IDLE_NS_CPU (10 * NS_PER_S)
#define IDLE_NS_GPU (60 * NS_PER_S)

void trainer_report_state(struct trainer *t, Ballast__RankPhase phase, const char *text,
                          bool retryable)
{
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    s.job_id = t->start->job_id;
    s.attempt = t->start->attempt;
    s.rank = t->start->rank;
    s.phase = phase;
    s.step = t->run.state.step;
    s.checkpoint_step = t->run.checkpoint_step;
    s.resumed_from_step = t->run.resumed_from_step;
    s.text = (char *)text;
    s.retryable = retryable;
    struct plans_facts facts = plans_facts(t->plans);
    s.placement_epoch = t->run.slots.epoch;
    s.prepared_epoch = facts.prepared_epoch;
    s.rejected_epoch = facts.rejected_epoch;
    s.plan_text = (char *)facts.text;
    s.moved_bytes = facts.moved_bytes;
    s.pause_s = facts.pause_s;
    s.settings_revision = t->run.settings_revision;
    s.patience_ms = t->patience_ns / NS_PER_MS;
    if (t->data_address) {
        s.data_address = (char *)t->data_address;
        s.data_key = (ProtobufCBinaryData){.len = DATA_KEY_BYTES, .data = (uint8_t *)t->data_key};
    }
    channel_send_state(t->channel, &s);
}

void trainer_report_running(struct trainer *t)
{
    trainer_report_state(t, BALLAST__RANK_PHASE__RANK_RUNNING,
                         *t->warning ? t->warning : t->slow, false);
}

void trainer_report_step(struct trainer *t, const struct step_result *r, double validation_loss)
{
    Ballast__StepReport s = BALLAST__STEP_REPORT__INIT;
    Ballast__PhaseTime times[PHASES], *pointers[PHASES];
    for (int i = 0; i < PHASES; i++) {
        times[i] = (Ballast__PhaseTime)BALLAST__PHASE_TIME__INIT;
        times[i].name = (char *)phase_names[i];
        times[i].seconds = r->seconds[i];
        pointers[i] = &times[i];
    }
    s.step = t->run.state.step;
    s.attempt = t->start->attempt;
    s.at_ns = clock_wall_ns();
    s.loss = r->loss;
    s.validation_loss = validation_loss;
    s.grad_norm = r->grad_norm;
    s.lr = r->lr;
    s.tokens_per_second = r->tokens_per_second;
    s.mfu = r->mfu;
    s.memory_bytes = r->memory_bytes;
    s.memory_planned_bytes = t->run.plan.total;
    s.imbalance = r->imbalance;
    s.samples = t->run.state.next_sample;
    s.epoch_samples = data_windows(t->run.train);
    s.aux_loss = r->aux_loss;
    s.z_loss = r->z_loss;
    s.index_loss = r->index_loss;
    s.skipped = t->n_skipped;
    s.rerouted = r->n_rerouted;
    s.dropped = r->n_dropped;
    s.phases = pointers;
    s.n_phases = PHASES;
    channel_send_step(t->channel, &s);
}

void trainer_look_for_slow(struct trainer *t, const struct step_result *r)
{
    bool is_far = r->busy_s > SLOW_RATIO * r->least_busy_s && r->busy_s > 0;
    if (!is_far || (t->n_slow > 0 && r->busiest != t->slow_rank)) {
        t->n_slow = 0;
        t->slow[0] = '\0';
    }
    if (!is_far)
        return;
    t->slow_rank = r->busiest;
    if (++t->n_slow != SLOW_STEPS)
        return;
    snprintf(t->slow, sizeof t->slow, "rank %" PRIu32 " is slow: busy itself for %.3g s of a step, "
             "the least busy rank for %.3g s, for %d steps", r->busiest, r->busy_s,
             r->least_busy_s, SLOW_STEPS);
    if (t->run.coll->rank == 0)
        log_warn("step=%" PRIu64 " msg=\"%s\"", t->run.state.step, t->slow);
}

/* ---- patience ------------------------------------------------------------------------------- */

static bool on_gpu(const struct run *run)
{
    return strcmp(run->dev->ops->name, "cpu") != 0;
}

void trainer_take_time(struct trainer *t)
{
    t->patience_ns = 0;
    t->run.coll->ops->set_patience(t->run.coll, RUN_PATIENCE_NS, 0);
    channel_repeat_state(t->channel, false);
    trainer_report_running(t);
}

/* Nobody knows yet how long a step takes, but it must come on. */
static void expect_progress(struct trainer *t)
{
    uint64_t idle_ns = on_gpu(&t->run) ? IDLE_NS_GPU : IDLE_NS_CPU;
    t->run.coll->ops->set_patience(t->run.coll, RUN_PATIENCE_NS, idle_ns);
    t->patience_ns = idle_ns + idle_ns / 4;
    trainer_report_running(t);
    channel_repeat_state(t->channel, true);
}

void trainer_expect_step(struct trainer *t)
{
    if (t->n_timed < STEPS_TO_KNOW) {
        expect_progress(t);
        return;
    }
    uint64_t bound_ns = (uint64_t)(STEPS_OF_PATIENCE * t->slowest_s * NS_PER_S);
    bound_ns = bound_ns < PATIENCE_NS_MIN ? PATIENCE_NS_MIN : bound_ns;
    bound_ns = bound_ns > RUN_PATIENCE_NS ? RUN_PATIENCE_NS : bound_ns;
    t->run.coll->ops->set_patience(t->run.coll, bound_ns, 0);
    channel_repeat_state(t->channel, false);
    t->patience_ns = bound_ns + bound_ns / 4;
    trainer_report_running(t);
}

void trainer_time_step(struct trainer *t, const struct step_result *r)
{
    t->n_timed++;
    t->slowest_s = r->step_s > t->slowest_s ? r->step_s : t->slowest_s;
}
