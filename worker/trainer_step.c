/* trainer_step.c - one step, and what is due at its boundary
 *
 * In this order: the load of a window that is over, changed settings, a move of experts, what a bad
 * step calls for, replicas compared, validation, a checkpoint; then the step is reported. */
#include "worker/trainer_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "kernels/spans.h"
#include "worker/replicas.h"
#include "worker/run_log.h"

#define SKIPS_MAX 10    /* in a row; a model that is spoiled does not recover */
#define LAST_SAVE_WAIT_S 240 /* altogether; from 1 s on doubled up to 32 s */
#define LAST_SAVE_DOUBLINGS 5
#define ROLLBACKS_MAX 3 /* without getting past the step that went wrong */

static double seconds_since(uint64_t began_ns)
{
    return (double)(clock_now_ns() - began_ns) / NS_PER_S;
}

static int validate(struct trainer *t, struct step_result *r, double *out_loss, struct err *err)
{
    uint64_t began = clock_now_ns();
    trainer_take_time(t);
    spans_begin(t->run.dev, PHASE_VALIDATION, -1);
    int rc = step_validate(&t->run, err);
    spans_end(t->run.dev);
    r->seconds[PHASE_VALIDATION] = seconds_since(began);
    if (rc == 0 && t->run.validation)
        *out_loss = t->run.state.validation_loss;
    return rc;
}

struct step_end {
    struct trainer *trainer;
    struct step_result *result;
    double   validation_loss;
    uint64_t began_ns; /* of its checkpoint */
    bool     is_told;
};

static void measure_checkpoint(const struct step_end *e)
{
    struct run *run = &e->trainer->run;
    e->result->seconds[PHASE_CHECKPOINT] = seconds_since(e->began_ns);
    usage_look(&run->usage, run->dev, run->coll);
    if (run->usage.peak > e->result->memory_bytes)
        e->result->memory_bytes = run->usage.peak;
}

static void tell_step(struct step_end *e)
{
    if (!e->is_told && e->trainer->run.coll->rank == 0)
        trainer_report_step(e->trainer, e->result, e->validation_loss);
    e->is_told = true;
}

/* What resumes from this checkpoint does not take its step again, so the step must have been
 * reported before the checkpoint counts. */
static void before_commit(void *context)
{
    struct step_end *e = context;
    measure_checkpoint(e);
    tell_step(e);
    channel_settle(e->trainer->channel);
}

static bool is_over(int rc)
{
    return rc == 0 || rc == -ECANCELED || rc == -ETIMEDOUT;
}

static int save(struct trainer *t, struct step_end *e, struct err *err)
{
    struct run *run = &t->run;
    e->began_ns = clock_now_ns();
    trainer_take_time(t);
    spans_begin(run->dev, PHASE_CHECKPOINT, -1);
    run->ckpt.before_commit = before_commit;
    run->ckpt.context = e;
    int rc = ckpt_save(&run->ckpt, &run->state, err);
    spans_end(run->dev);
    measure_checkpoint(e);
    return rc;
}

/* The job's end waits for whoever frees the disk, so that nothing is trained twice. Ranks hear of a
 * failure together, so they wait and try alike. */
static int save_at_last(struct trainer *t, struct step_end *e, struct err *err)
{
    struct run *run = &t->run;
    int rc = save(t, e, err);
    unsigned waited_s = 0;
    for (unsigned i = 0, wait_s; !is_over(rc) && waited_s < LAST_SAVE_WAIT_S; i++) {
        wait_s = i < LAST_SAVE_DOUBLINGS ? 1u << i : 1u << LAST_SAVE_DOUBLINGS;
        snprintf(t->warning, sizeof t->warning, "step %" PRIu64 ", the last, is not saved, tried "
                 "again in %u s: %.300s", run->state.step, wait_s, err->text);
        if (run->coll->rank == 0)
            log_warn("msg=\"%s\"", t->warning);
        trainer_report_running(t);
        sleep(wait_s);
        waited_s += wait_s;
        rc = save(t, e, err);
    }
    return rc;
}

/* A checkpoint that fails costs the checkpoint, unless the attempt ends with it. */
static int checkpoint(struct trainer *t, bool is_last, struct step_end *e, struct err *err)
{
    struct run *run = &t->run;
    struct step_result *r = e->result;
    int rc = run->state.step >= run->spec->train_steps ? save_at_last(t, e, err) : save(t, e, err);
    if (rc == 0) {
        run->checkpoint_step = run->state.step;
        t->warning[0] = '\0';
        if (run->coll->rank == 0)
            printf("checkpoint=%s/step-%" PRIu64 " seconds=%.2f\n", run->ckpt.path,
                   run->state.step, r->seconds[PHASE_CHECKPOINT]);
        return 0;
    }
    if (is_last || is_over(rc))
        return rc;
    t->n_failed_saves++;
    snprintf(t->warning, sizeof t->warning, "no checkpoint of step %" PRIu64 ": %.300s",
             run->state.step, err->text);
    if (run->coll->rank == 0)
        log_warn("step=%" PRIu64 " failed_checkpoints=%" PRIu64 " msg=\"no checkpoint, training "
                 "goes on: %s\"", run->state.step, t->n_failed_saves, err->text);
    return 0;
}

/* A checkpoint is written from one of the replicas, which must not be the one that is wrong. */
static int verify(struct trainer *t, bool saves, struct err *err)
{
    struct run *run = &t->run;
    uint64_t every = run->spec->train_verify_every_steps;
    if (every == 0 || !(saves || run->state.step % every == 0))
        return 0;
    trainer_take_time(t);
    spans_begin(run->dev, PHASE_AGREE, -1);
    int rc = replicas_check(run->shard, err);
    spans_end(run->dev);
    return rc < 0 ? err_prefix(err, "step %" PRIu64, run->state.step) : 0;
}

static int bad_step(struct trainer *t, const struct step_result *r, struct err *err)
{
    struct run *run = &t->run;
    uint64_t step = run->state.step, next_sample = run->state.next_sample;
    char what[512], where[BAD_TEXT_BYTES];
    snprintf(what, sizeof what, "step %" PRIu64 ": loss %g, gradient norm %g, %s", step, r->loss,
             r->grad_norm, bad_text(run, &r->bad, where));
    bool passed_by = r->bad.output < 0 && r->bad.tensor < 0; /* no rate is to blame */
    if (run->nan_rule == NAN_STOP)
        return err_set(err, -EDOM, "%s; %s, or set train.on_nan to skip or rollback", what,
                       passed_by ? "resubmit on other workers" : "lower train.optimizer.lr");
    if (run->nan_rule == NAN_SKIP) {
        t->n_skips = step == t->bad_step + 1 ? t->n_skips + 1 : 1;
        t->bad_step = step;
        if (t->n_skips > SKIPS_MAX)
            return err_set(err, -EDOM, "%s, after %u skipped steps in a row", what, SKIPS_MAX);
        t->n_skipped++;
        if (run->coll->rank == 0)
            log_warn("skipped=%" PRIu64 " msg=\"%s; its batch is skipped\"", t->n_skipped, what);
        return 0;
    }
    t->n_rollbacks = step == t->bad_step ? t->n_rollbacks + 1 : 1;
    t->bad_step = step;
    if (t->n_rollbacks > ROLLBACKS_MAX)
        return err_set(err, -EDOM, "%s, again after %u rollbacks", what, ROLLBACKS_MAX);
    trainer_take_time(t);
    int rc = run_restore(run, err);
    window_break(&run->window);
    run->state.next_sample = next_sample; /* not the same samples once more */
    t->n_skipped++;
    if (rc == 0 && run->coll->rank == 0)
        log_warn("skipped=%" PRIu64 " msg=\"%s; back to step %" PRIu64 ", its batch is skipped\"",
                 t->n_skipped, what, run->state.step);
    return rc;
}

/* The load of a window that is over goes out, before anything moves. */
static int report_load(struct trainer *t, const struct step_result *r, struct err *err)
{
    struct run *run = &t->run;
    Ballast__LoadReport *load = NULL;
    uint64_t step = run->state.step;
    int rc;
    if (run->model_spec.n_experts == 0)
        return 0;
    window_add(&run->window, step, model_counters(run->model), r->step_s, r->imbalance);
    if (plans_has_begun(t->plans)) /* the placement in force is none that has an epoch */
        window_break(&run->window);
    if (!window_is_over(&run->window, step))
        return 0;
    rc = window_report(&run->window, step, &run->slots, run->coll,
                       shard_expert_bytes(run->shard), &load, err);
    if (rc == 0)
        slots_set_speed(&run->slots, window_speeds(&run->window));
    if (rc < 0 || !load)
        return rc;
    load->job_id = t->start->job_id;
    load->attempt = t->start->attempt;
    channel_send_load(t->channel, load);
    ballast__load_report__free_unpacked(load, NULL);
    return 0;
}

static void tell_migration(const struct run *run, uint32_t epoch,
                           const struct transfer_result *moved)
{
    if (run->coll->rank == 0)
        printf("step=%" PRIu64 " %s=%u sent_mib=%.2f pause_s=%.4f\n", run->state.step,
               moved->is_last ? "placement" : "stage_of", epoch,
               (double)moved->sent_bytes / (1 << 20), moved->seconds);
}

/* What all ranks are ready for, or its next stage. A failure ends the attempt. */
static int migrate(struct trainer *t, struct step_result *r, struct err *err)
{
    struct run *run = &t->run;
    struct transfer_result moved;
    trainer_take_time(t);
    spans_begin(run->dev, PHASE_MIGRATION, -1);
    int rc = plans_carry_out(t->plans, &moved, err);
    spans_end(run->dev);
    if (rc < 0)
        return rc;
    r->seconds[PHASE_MIGRATION] = moved.seconds;
    window_moved(&run->window, &moved);
    if (run->state.step % run->window.n_steps != 0) /* else the next step begins a window */
        window_break(&run->window);
    tell_migration(run, r->epoch, &moved);
    if (moved.is_last) {
        failpoint("before-migrated-sent");
        trainer_report_running(t);
    }
    return 0;
}

/* All ranks are ready for a plan, and it moves frozen weights, of which some go now. */
static int go_ahead(struct trainer *t, struct step_result *r, struct err *err)
{
    spans_begin(t->run.dev, PHASE_MIGRATION, -1);
    int rc = plans_go_ahead(t->plans, (size_t)t->run.spec->rebalance_boundary_mib << 20,
                            &r->seconds[PHASE_MIGRATION], err);
    spans_end(t->run.dev);
    if (rc == 0 && t->run.coll->rank == 0)
        printf("step=%" PRIu64 " plan=%u ahead_s=%.4f\n", t->run.state.step, r->epoch,
               r->seconds[PHASE_MIGRATION]);
    return rc;
}

/* All ranks have them: from this boundary on they hold. */
static void change_settings(struct trainer *t)
{
    struct run *run = &t->run;
    run_change_settings(run);
    if (run->coll->rank == 0)
        printf("step=%" PRIu64 " settings=%u checkpoint_every=%" PRIu64 " validation_every=%" PRIu64
               " window=%u\n", run->state.step, run->settings_revision,
               run->spec->checkpoint_every_steps, run->spec->train_validation_every_steps,
               run->spec->rebalance_window_steps);
}

static bool is_due(uint64_t step, uint64_t every)
{
    return every > 0 && step % every == 0;
}

int trainer_step(struct trainer *t, bool *out_is_over, struct err *err)
{
    struct run *run = &t->run;
    const Ballast__JobSpec *s = run->spec;
    struct step_result r;
    double validation_loss = NAN;
    trainer_expect_step(t);
    failpoint("before-step");
    int rc = step_train(run, &r, err);
    if (rc < 0)
        return rc;
    trainer_time_step(t, &r);
    trainer_look_for_slow(t, &r);
    if ((rc = report_load(t, &r, err)) < 0)
        return rc;
    if (r.settings > run->settings_revision)
        change_settings(t);
    bool ends = run->state.step >= s->train_steps || r.wish != WISH_NONE;
    if (r.epoch > 0 && !ends)
        rc = r.ahead == r.epoch ? migrate(t, &r, err) : go_ahead(t, &r, err);
    if (rc < 0)
        return rc;
    if (r.is_bad && ((rc = bad_step(t, &r, err)) < 0 || run->nan_rule == NAN_ROLLBACK))
        return rc;
    uint64_t step = run->state.step;
    bool is_last = step >= s->train_steps || r.wish == WISH_CHECKPOINT;
    bool saves = is_last || is_due(step, s->checkpoint_every_steps);
    bool validates = s->train_validation_every_steps > 0
                         ? is_due(step, s->train_validation_every_steps) || step >= s->train_steps
                         : saves;
    if (r.wish == WISH_NOW)
        return err_set(err, -ECANCELED, "a rank was told to stop at once");
    if ((rc = verify(t, saves, err)) < 0)
        return rc;
    if (validates && (rc = validate(t, &r, &validation_loss, err)) < 0)
        return rc;
    struct step_end end = {.trainer = t, .result = &r, .validation_loss = validation_loss};
    if (saves && (rc = checkpoint(t, is_last, &end, err)) < 0)
        return rc;
    spans_settle(run->dev); /* what came after the step belongs to its trace */
    run_log_step(run, &r, validation_loss, &t->logged_ns);
    tell_step(&end);
    trainer_report_running(t);
    *out_is_over = is_last;
    return 0;
}
