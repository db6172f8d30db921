/* trainer.c - the life of the child process that trains one rank
 *
 * START opens a run; then steps, until all are done or a stop was granted. The daemon hears of
 * everything over the channel and of every failure in one line with a hint whether another attempt
 * may fare better. */
#include "worker/trainer.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/log.h"
#include "worker/run_log.h"
#include "worker/trainer_parts.h"

#define NOW_SECONDS 2 /* from STOP_NOW to the end, also of a rank in the midst of a product */
#define HOST_BLOCK_BYTES (128 << 10)

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
    trainer_report_state(t, BALLAST__RANK_PHASE__RANK_SPAWNED, "", false);
    t->data_address = NULL; /* they go with what listens; told once is enough */
}

/* ---- the process ---------------------------------------------------------------------------- */

static int train(struct trainer *t, struct err *err)
{
    int rc = run_open(&t->run, t->start, &t->wishes, t->plans, &t->settings, err);
    if (rc < 0)
        return rc;
    run_log_start(&t->run);
    if (t->run.coll->rank == 0)
        run_log_plan(&t->run);
    trainer_report_state(t, BALLAST__RANK_PHASE__RANK_READY, "", false);
    atomic_store(&t->wishes.is_training, true);
    bool is_over = t->run.state.step >= t->run.spec->train_steps;
    while (!is_over && rc == 0)
        rc = trainer_step(t, &is_over, err);
    run_log_usage(&t->run);
    run_log_traffic(&t->run);
    return rc;
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
        trainer_report_state(t, BALLAST__RANK_PHASE__RANK_FINISHED, "", false);
        return 0;
    }
    if (rc == 0 || was_told) {
        printf("stopped at step %" PRIu64 "\n", t->run.state.step);
        trainer_report_state(t, BALLAST__RANK_PHASE__RANK_STOPPED, "told to stop", false);
        return 0;
    }
    printf("failed: %s\n", err->text);
    trainer_report_state(t, BALLAST__RANK_PHASE__RANK_FAILED, err->text, is_retryable(rc));
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
    /* A batch system tells every process of a task to end; the daemon, which is told too, lets a
     * checkpoint be written first. */
    signal(SIGTERM, SIG_IGN);
    signal(SIGALRM, end_now);
    rc = channel_open(fd, &events, t, &t->channel, &err);
    if (rc == 0)
        rc = channel_wait_start(t->channel, &t->start, &err);
    if (rc < 0) {
        log_error("msg=\"no START: %s\"", err.text);
        channel_close(t->channel);
        plans_destroy(t->plans);
        settings_fini(&t->settings);
        gang_fini(&t->gang);
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
