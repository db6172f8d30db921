/* trainer.c - the life of the child process that trains one rank
 *
 * START opens a run; then steps, each followed by what is due at its boundary: validation, a
 * checkpoint, a granted stop. The daemon hears of everything over the channel and of every failure
 * in one line with a hint whether another attempt may fare better. */
#include "worker/trainer.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "kernels/spans.h"
#include "worker/channel.h"
#include "worker/gang.h"
#include "worker/replicas.h"
#include "worker/run.h"
#include "worker/run_log.h"
#include "worker/step.h"

#define NOW_SECONDS 2 /* from STOP_NOW to the end, also of a rank in the midst of a product */
#define STEPS_TO_KNOW     3     /* until their time says how long one may take */
#define STEPS_OF_PATIENCE 10.0  /* of the slowest */
#define PATIENCE_NS_MIN   (6 * NS_PER_S) /* what a busy machine does to a rank */
/* Before that, how long a step may go on with nothing done: a piece of work of a CPU, or what a GPU
 * does between two collectives, takes a part of it. */
#define IDLE_NS_CPU (10 * NS_PER_S)
#define IDLE_NS_GPU (60 * NS_PER_S)
#define HOST_BLOCK_BYTES (128 << 10)
#define SKIPS_MAX 10    /* in a row; a model that is spoiled does not recover */
#define ROLLBACKS_MAX 3 /* without getting past the step that went wrong */

struct trainer {
    struct channel *channel;
    const Ballast__Start *start;
    struct run_wishes wishes;
    struct gang gang;
    const char *data_address; /* NULL: this rank need not tell */
    const uint8_t *data_key;
    struct plans *plans;
    struct settings settings;
    struct run run;
    uint64_t logged_ns;
    uint64_t n_rollbacks, n_skips, bad_step; /* of step bad_step; up to it, in a row */
    double   slowest_s;   /* of this attempt's steps */
    uint64_t n_timed;     /* of them */
    uint64_t patience_ns; /* until the daemon's next word from here is late; 0: no bound */
    uint64_t n_failed_saves, n_skipped; /* of this attempt; batches, also by rollback */
    char     warning[400]; /* of what people should look at while it runs; empty: all is well */
};

/* ---- words to the daemon -------------------------------------------------------------------- */

static void send_state(struct trainer *t, Ballast__RankPhase phase, const char *text,
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

static void send_running(struct trainer *t)
{
    send_state(t, BALLAST__RANK_PHASE__RANK_RUNNING, t->warning, false);
}

static void send_step(struct trainer *t, const struct step_result *r, double validation_loss)
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

/* ---- patience ------------------------------------------------------------------------------- */

static bool on_gpu(const struct run *run)
{
    return strcmp(run->dev->ops->name, "cpu") != 0;
}

/* What lasts as long as disks and networks let it: other ranks wait long, and the daemon is told
 * that there is no bound. */
static void take_time(struct trainer *t)
{
    t->patience_ns = 0;
    t->run.coll->ops->set_patience(t->run.coll, RUN_PATIENCE_NS, 0);
    channel_repeat_state(t->channel, false);
    send_running(t);
}

/* Nobody knows yet how long a step takes, but it must come on. */
static void expect_progress(struct trainer *t)
{
    uint64_t idle_ns = on_gpu(&t->run) ? IDLE_NS_GPU : IDLE_NS_CPU;
    t->run.coll->ops->set_patience(t->run.coll, RUN_PATIENCE_NS, idle_ns);
    t->patience_ns = idle_ns + idle_ns / 4;
    send_running(t);
    channel_repeat_state(t->channel, true);
}

/* A step that takes many times as long as the slowest one so far hangs. Who waits in a collective
 * can say for whom, so it speaks before the daemon does. */
static void expect_step(struct trainer *t)
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
    send_running(t);
}

static void time_step(struct trainer *t, const struct step_result *r)
{
    t->n_timed++;
    t->slowest_s = r->step_s > t->slowest_s ? r->step_s : t->slowest_s;
}

/* Another attempt meets the same file, key or model, but perhaps another disk or neighbour. */
static bool is_retryable(int rc)
{
    static const int for_good[] = {EINVAL, ENOENT, EACCES, EPERM, ENOTSUP, EFBIG, ENOTDIR, EISDIR,
                                   EROFS, EDOM, ENAMETOOLONG, ELOOP};
    for (size_t i = 0; i < sizeof for_good / sizeof *for_good; i++)
        if (rc == -for_good[i])
            return false;
    return true;
}

/* ---- words from the daemon; on the channel's thread ----------------------------------------- */

static void end_now(int signal_number)
{
    (void)signal_number;
    _exit(1);
}

static void on_stop(void *user, const Ballast__Stop *stop)
{
    struct trainer *t = user;
    bool can_wait = stop && stop->mode != BALLAST__STOP_MODE__STOP_NOW &&
                    atomic_load(&t->wishes.is_training);
    unsigned wish = can_wait ? WISH_CHECKPOINT : WISH_NOW;
    if (atomic_load(&t->wishes.wish) < wish)
        atomic_store(&t->wishes.wish, wish);
    if (wish != WISH_NOW || atomic_exchange(&t->wishes.cancelled, true))
        return;
    alarm(NOW_SECONDS);
    struct coll *c = atomic_load(&t->wishes.coll);
    if (c)
        c->ops->abort(c);
}

static void on_prepare(void *user, const Ballast__Prepare *prepare)
{
    struct trainer *t = user;
    plans_prepare(t->plans, prepare);
}

static void on_abort_plan(void *user, const Ballast__AbortPlan *abort_plan)
{
    struct trainer *t = user;
    plans_abort(t->plans, abort_plan);
}

static void on_settings(void *user, const Ballast__Settings *settings)
{
    struct trainer *t = user;
    settings_arrive(&t->settings, settings);
}

static void on_peers(void *user, const Ballast__Peers *peers)
{
    struct trainer *t = user;
    gang_arrive(&t->gang, peers);
}

/* On the training thread: where this rank listens. */
static void tell_address(void *user, const char *address, const uint8_t *key)
{
    struct trainer *t = user;
    t->data_address = address;
    t->data_key = key;
    send_state(t, BALLAST__RANK_PHASE__RANK_SPAWNED, "", false);
    t->data_address = NULL; /* they go with what listens; told once is enough */
}

/* ---- steps ---------------------------------------------------------------------------------- */

static double seconds_since(uint64_t began_ns)
{
    return (double)(clock_now_ns() - began_ns) / NS_PER_S;
}

static int validate(struct trainer *t, struct step_result *r, double *out_loss, struct err *err)
{
    uint64_t began = clock_now_ns();
    take_time(t);
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
        send_step(e->trainer, e->result, e->validation_loss);
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

/* A checkpoint that fails costs the checkpoint, unless it is the last one. */
static int checkpoint(struct trainer *t, bool is_last, struct step_end *e, struct err *err)
{
    struct run *run = &t->run;
    struct step_result *r = e->result;
    e->began_ns = clock_now_ns();
    take_time(t);
    spans_begin(run->dev, PHASE_CHECKPOINT, -1);
    run->ckpt.before_commit = before_commit;
    run->ckpt.context = e;
    int rc = ckpt_save(&run->ckpt, &run->state, err);
    spans_end(run->dev);
    measure_checkpoint(e);
    if (rc == 0) {
        run->checkpoint_step = run->state.step;
        t->warning[0] = '\0';
        if (run->coll->rank == 0)
            printf("checkpoint=%s/step-%" PRIu64 " seconds=%.2f\n", run->ckpt.path,
                   run->state.step, r->seconds[PHASE_CHECKPOINT]);
        return 0;
    }
    if (is_last || rc == -ECANCELED || rc == -ETIMEDOUT)
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
    take_time(t);
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
    take_time(t);
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
    take_time(t);
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
        send_running(t);
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

/* One step and what is due after it. *out_is_over: all done, or a stop was granted. */
static int one_step(struct trainer *t, bool *out_is_over, struct err *err)
{
    struct run *run = &t->run;
    const Ballast__JobSpec *s = run->spec;
    struct step_result r;
    double validation_loss = NAN;
    expect_step(t);
    failpoint("before-step");
    int rc = step_train(run, &r, err);
    if (rc == 0)
        time_step(t, &r);
    if (rc < 0 || (rc = report_load(t, &r, err)) < 0)
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
    send_running(t);
    *out_is_over = is_last;
    return 0;
}

static int train(struct trainer *t, struct err *err)
{
    int rc = run_open(&t->run, t->start, &t->wishes, t->plans, &t->settings, err);
    if (rc < 0)
        return rc;
    run_log_start(&t->run);
    if (t->run.coll->rank == 0)
        run_log_plan(&t->run);
    send_state(t, BALLAST__RANK_PHASE__RANK_READY, "", false);
    atomic_store(&t->wishes.is_training, true);
    bool is_over = t->run.state.step >= t->run.spec->train_steps;
    while (!is_over && rc == 0)
        rc = one_step(t, &is_over, err);
    run_log_usage(&t->run);
    run_log_traffic(&t->run);
    return rc;
}

/* ---- the process ---------------------------------------------------------------------------- */

/* A neighbour that is stopped is noticed at once; perhaps all were told, and the word to this rank
 * is on its way. */
static void wait_for_own_word(struct trainer *t)
{
    for (int i = 0; i < 20 && atomic_load(&t->wishes.wish) != WISH_NOW; i++)
        usleep(5000);
}

static int finish(struct trainer *t, int rc, const struct err *err)
{
    channel_repeat_state(t->channel, false);
    t->patience_ns = 0; /* how long an end may take, the daemon knows */
    if (rc == -ECANCELED)
        wait_for_own_word(t);
    /* A neighbour that was not training yet when all were told to save just stops. */
    bool was_told = atomic_load(&t->wishes.wish) == WISH_NOW ||
                    (atomic_load(&t->wishes.wish) == WISH_CHECKPOINT && rc == -ECANCELED &&
                     t->run.state.step == t->run.resumed_from_step);
    uint64_t steps = t->run.spec ? t->run.spec->train_steps : 0;
    if (rc == 0 && t->run.state.step >= steps) {
        printf("finished at step %" PRIu64 "\n", t->run.state.step);
        send_state(t, BALLAST__RANK_PHASE__RANK_FINISHED, "", false);
        return 0;
    }
    if (rc == 0 || was_told) {
        printf("stopped at step %" PRIu64 "\n", t->run.state.step);
        send_state(t, BALLAST__RANK_PHASE__RANK_STOPPED, "told to stop", false);
        return 0;
    }
    printf("failed: %s\n", err->text);
    send_state(t, BALLAST__RANK_PHASE__RANK_FAILED, err->text, is_retryable(rc));
    if (t->run.coll) {
        t->run.coll->ops->abort(t->run.coll); /* nobody need wait for this rank */
        if (rc == -ETIMEDOUT)
            t->run.coll->ops->trace(t->run.coll, stdout);
    }
    return 1;
}

int trainer_main(int fd)
{
    static const struct channel_events events = {on_stop, on_prepare, on_abort_plan, on_settings,
                                                 on_peers};
    struct trainer *t = calloc(1, sizeof *t);
    struct err err = {0};
    int rc;
    if (!t)
        return 1;
    /* What is large and short-lived, as between device and file, goes back to the system at once;
     * glibc would learn to keep as much again. */
    mallopt(M_MMAP_THRESHOLD, HOST_BLOCK_BYTES);
    mallopt(M_TRIM_THRESHOLD, HOST_BLOCK_BYTES);
    t->plans = plans_create();
    settings_init(&t->settings);
    gang_init(&t->gang);
    t->wishes.tell = tell_address;
    t->wishes.tell_user = t;
    t->wishes.gang = &t->gang;
    t->run.ckpt_lock = -1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    log_init("trainer", LOG_INFO);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGALRM, end_now);
    rc = channel_open(fd, &events, t, &t->channel, &err);
    if (rc == 0)
        rc = channel_wait_start(t->channel, &t->start, &err);
    if (rc < 0) {
        log_error("msg=\"no START: %s\"", err.text);
        channel_close(t->channel);
        plans_destroy(t->plans);
        settings_fini(&t->settings);
        free(t);
        return 1;
    }
    rc = finish(t, train(t, &err), &err);
    channel_close(t->channel); /* before what the events look at */
    plans_destroy(t->plans);
    settings_fini(&t->settings);
    run_close(&t->run);
    gang_fini(&t->gang);
    free(t);
    return rc;
}
