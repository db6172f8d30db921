/* test_agent.c - the worker's core, input by input */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "worker/agent.h"
#include "worker/outbox.h"

#define M(x) BALLAST__METHOD__METHOD_##x
#define PHASE(x) BALLAST__RANK_PHASE__RANK_##x

enum { LIFE = 5 };

struct bench {
    struct agent     *a;
    struct agent_turn turn;
    uint64_t          now_ns, coordinator_epoch, request_id, beat_seq;
};

static void begin(struct bench *b)
{
    agent_turn_fini(&b->turn);
    agent_begin(b->a, &b->turn, b->now_ns);
}

/* The nth effect of that kind, or NULL; sends are also told apart by method. */
static const struct effect *effect(const struct bench *b, enum effect_kind kind,
                                   Ballast__Method method)
{
    for (size_t i = 0; i < b->turn.n_effects; i++) {
        const struct effect *e = &b->turn.effects[i];
        if (e->kind == kind && (kind != EFFECT_SEND || e->envelope.method == method))
            return e;
    }
    return NULL;
}

static const struct effect *sent(const struct bench *b, Ballast__Method method)
{
    return effect(b, EFFECT_SEND, method);
}

static void finish(struct bench *b)
{
    agent_tick(b->a, &b->turn);
    const struct effect *hello = sent(b, M(HELLO)), *beat = sent(b, M(HEARTBEAT));
    if (hello)
        b->request_id = hello->envelope.request_id;
    if (hello || beat)
        b->beat_seq = (hello ? hello : beat)->envelope.seq;
}

static void pass(struct bench *b, double seconds)
{
    b->now_ns += (uint64_t)(seconds * NS_PER_S);
    begin(b);
    finish(b);
}

static void receive(struct bench *b, Ballast__Method method, const ProtobufCMessage *payload)
{
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    e.method = method;
    e.kind = method == M(HELLO) ? BALLAST__KIND__KIND_RESPONSE : BALLAST__KIND__KIND_NOTICE;
    e.request_id = b->request_id;
    e.worker_epoch = LIFE;
    e.coordinator_epoch = b->coordinator_epoch;
    begin(b);
    agent_message(b->a, &b->turn, &e, payload);
    finish(b);
}

static void welcome(struct bench *b)
{
    Ballast__Welcome w = BALLAST__WELCOME__INIT;
    w.coordinator_epoch = b->coordinator_epoch;
    w.heartbeat_interval_ms = 1000;
    w.lease_ms = 3000;
    w.fence_ms = 60000;
    receive(b, M(HELLO), &w.base);
}

static int setup(void **state)
{
    struct bench *b = xcalloc(1, sizeof *b);
    struct agent_config c = agent_config_default();
    c.name = "w1";
    c.worker_epoch = LIFE;
    c.steps_max = 4;
    c.log_window_bytes = 2 * LOG_CHUNK_BYTES_MAX;
    b->a = agent_create(&c);
    b->now_ns = 1000 * NS_PER_S;
    b->coordinator_epoch = 3;
    pass(b, 0);
    assert_non_null(sent(b, M(HELLO)));
    *state = b;
    return 0;
}

static int setup_attached(void **state)
{
    setup(state);
    welcome(*state);
    assert_true(agent_is_attached(((struct bench *)*state)->a));
    return 0;
}

static int teardown(void **state)
{
    struct bench *b = *state;
    agent_turn_fini(&b->turn);
    agent_destroy(b->a);
    free(b);
    return 0;
}

static void start(struct bench *b, job_id job, uint32_t attempt)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__Start s = BALLAST__START__INIT;
    s.job_id = job;
    s.attempt = attempt;
    s.rank = 2;
    s.spec = &spec;
    s.heard_seq = b->beat_seq;
    receive(b, M(START), &s.base);
}

static void stop(struct bench *b, job_id job, uint32_t attempt, Ballast__StopMode mode,
                 uint32_t grace_ms)
{
    Ballast__Stop s = BALLAST__STOP__INIT;
    s.job_id = job;
    s.attempt = attempt;
    s.rank = 2;
    s.mode = mode;
    s.grace_ms = grace_ms;
    s.reason = "cancelled";
    receive(b, M(STOP), &s.base);
}

static void ack_ended(struct bench *b, job_id job, uint32_t attempt)
{
    Ballast__Ack a = BALLAST__ACK__INIT;
    a.job_id = job;
    a.attempt = attempt;
    a.ended = true;
    receive(b, M(ACK), &a.base);
}

static void alive(struct bench *b)
{
    Ballast__Ack a = BALLAST__ACK__INIT;
    a.alive = true;
    a.heartbeat_interval_ms = 1000;
    a.heard_seq = b->beat_seq;
    receive(b, M(ACK), &a.base);
}

static void trainer_says(struct bench *b, job_id job, uint32_t attempt, Ballast__RankPhase phase,
                         const char *text, bool retryable)
{
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.phase = phase;
    s.text = (char *)text;
    s.retryable = retryable;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &s;
    begin(b);
    agent_trainer_message(b->a, &b->turn, job, attempt, &m);
    finish(b);
}

/* Rank's word after a step, with the time until its next one. */
static void trainer_goes_on(struct bench *b, uint64_t step, uint64_t patience_ms)
{
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.phase = PHASE(RUNNING);
    s.step = step;
    s.patience_ms = patience_ms;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &s;
    begin(b);
    agent_trainer_message(b->a, &b->turn, 7, 1, &m);
    finish(b);
}

static void trainer_steps(struct bench *b, job_id job, uint64_t step)
{
    Ballast__StepReport r = BALLAST__STEP_REPORT__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    r.step = step;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STEP;
    m.step = &r;
    begin(b);
    agent_trainer_message(b->a, &b->turn, job, 1, &m);
    finish(b);
}

static void trainer_exits(struct bench *b, job_id job, uint32_t attempt, int code, int signal)
{
    begin(b);
    agent_log_grown(b->a, &b->turn, job, attempt, 0, 0, true);
    agent_trainer_exited(b->a, &b->turn, job, attempt, code, signal, NULL);
    finish(b);
}

static const Ballast__RankState *reported(const struct bench *b)
{
    const struct effect *e = sent(b, M(RANK_STATE));
    assert_non_null(e);
    return (const Ballast__RankState *)e->payload;
}

/* ---- attempts ------------------------------------------------------------------------------ */

static void a_start_spawns_once(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    assert_int_equal(effect(b, EFFECT_SPAWN, 0)->start->job_id, 7);
    assert_int_equal(reported(b)->phase, PHASE(SPAWNED));
    start(b, 7, 1); /* repeated: only said again */
    assert_null(effect(b, EFFECT_SPAWN, 0));
    assert_int_equal(reported(b)->phase, PHASE(SPAWNED));
    trainer_says(b, 7, 1, PHASE(READY), "", false);
    assert_int_equal(reported(b)->phase, PHASE(READY));
    trainer_says(b, 7, 1, PHASE(READY), "", false);
    assert_null(sent(b, M(RANK_STATE))); /* no news */
}

static void how_a_trainer_ended(void **state)
{
    static const struct {
        Ballast__RankPhase says;
        const char *text;
        bool retryable;
        int code, signal;
        Ballast__RankPhase expected;
        const char *expected_text;
        bool expected_retryable;
    } rows[] = {
        {PHASE(FINISHED), "", false, 0, 0, PHASE(FINISHED), "", false},
        {PHASE(RUNNING), "", false, 0, 11, PHASE(FAILED),
         "the trainer was killed by signal 11 before it had finished", true},
        {PHASE(RUNNING), "", false, 0, 0, PHASE(FAILED),
         "the trainer exited with 0 before it had finished", true},
        {PHASE(FAILED), "no such file", false, 1, 0, PHASE(FAILED), "no such file", false},
        {PHASE(FAILED), "out of memory", true, 1, 0, PHASE(FAILED), "out of memory", true},
        {PHASE(FINISHED), "", false, 3, 0, PHASE(FAILED),
         "the trainer exited with 3 after its last step", true},
        {PHASE(STOPPED), "told to stop", false, 0, 0, PHASE(STOPPED),
         "another rank was told to stop", true},
        {PHASE(STOPPED), "told to stop", false, 0, 9, PHASE(FAILED),
         "the trainer was killed by signal 9 before it had finished", true},
    };
    struct bench *b = *state;
    for (uint32_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        start(b, 7, i + 1);
        trainer_says(b, 7, i + 1, rows[i].says, rows[i].text, rows[i].retryable);
        assert_true(!sent(b, M(RANK_STATE)) || reported(b)->phase < PHASE(FINISHED));
        trainer_exits(b, 7, i + 1, rows[i].code, rows[i].signal);
        assert_int_equal(reported(b)->phase, rows[i].expected);
        assert_string_equal(reported(b)->text, rows[i].expected_text);
        assert_int_equal(reported(b)->retryable, rows[i].expected_retryable);
    }
}

static void an_end_is_said_until_it_is_recorded(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    trainer_exits(b, 7, 1, 1, 0);
    pass(b, 1.1);
    assert_int_equal(((const Ballast__Heartbeat *)sent(b, M(HEARTBEAT))->payload)->n_ranks, 1);
    ack_ended(b, 7, 1);
    assert_non_null(effect(b, EFFECT_FORGET, 0));
    pass(b, 1.1);
    assert_int_equal(((const Ballast__Heartbeat *)sent(b, M(HEARTBEAT))->payload)->n_ranks, 0);
    assert_true(agent_is_idle(b->a));
}

static void a_stop_is_bounded(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    stop(b, 7, 1, BALLAST__STOP_MODE__STOP_CHECKPOINT, 5000);
    assert_int_equal(effect(b, EFFECT_FORWARD, 0)->message->stop->mode,
                     BALLAST__STOP_MODE__STOP_CHECKPOINT);
    stop(b, 7, 1, BALLAST__STOP_MODE__STOP_CHECKPOINT, 5000);
    assert_null(effect(b, EFFECT_FORWARD, 0));
    stop(b, 7, 1, BALLAST__STOP_MODE__STOP_NOW, 2000); /* harder, sooner */
    assert_non_null(effect(b, EFFECT_FORWARD, 0));
    pass(b, 1.9);
    assert_null(effect(b, EFFECT_KILL, 0));
    pass(b, 0.2);
    assert_non_null(effect(b, EFFECT_KILL, 0));
    trainer_exits(b, 7, 1, 0, 9);
    assert_int_equal(reported(b)->phase, PHASE(STOPPED));
}

static void who_cannot_save_says_why(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    stop(b, 7, 1, BALLAST__STOP_MODE__STOP_CHECKPOINT, 5000);
    trainer_says(b, 7, 1, PHASE(FAILED), "the disk is full", true);
    trainer_exits(b, 7, 1, 1, 0);
    assert_int_equal(reported(b)->phase, PHASE(FAILED));
    assert_string_equal(reported(b)->text, "the disk is full");
    assert_true(reported(b)->retryable);
}

static void a_stop_for_a_start_that_never_came_is_final(void **state)
{
    struct bench *b = *state;
    stop(b, 7, 2, BALLAST__STOP_MODE__STOP_NOW, 0);
    assert_int_equal(reported(b)->phase, PHASE(STOPPED));
    assert_int_equal(reported(b)->rank, 2);
    ack_ended(b, 7, 2);
    start(b, 7, 2);
    assert_null(effect(b, EFFECT_SPAWN, 0));
    start(b, 7, 1);
    assert_null(effect(b, EFFECT_SPAWN, 0));
    stop(b, 7, 2, BALLAST__STOP_MODE__STOP_NOW, 0); /* said again, also when forgotten */
    assert_int_equal(reported(b)->phase, PHASE(STOPPED));
    start(b, 7, 3);
    assert_non_null(effect(b, EFFECT_SPAWN, 0));
}

static void one_attempt_lives_at_a_time(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    start(b, 8, 1);
    assert_non_null(effect(b, EFFECT_KILL, 0));
    assert_null(effect(b, EFFECT_SPAWN, 0));
    trainer_exits(b, 7, 1, 0, 9);
    assert_int_equal(effect(b, EFFECT_SPAWN, 0)->start->job_id, 8);
}

static void a_closed_channel_must_be_followed_by_the_end(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    begin(b);
    agent_trainer_closed(b->a, &b->turn, 7, 1, NULL);
    finish(b);
    for (int i = 0; i < 4; i++) {
        pass(b, 1);
        alive(b);
    }
    assert_null(effect(b, EFFECT_KILL, 0));
    pass(b, 1.1);
    assert_non_null(effect(b, EFFECT_KILL, 0));
}

static void live_for(struct bench *b, int seconds)
{
    for (int i = 0; i < seconds; i++) {
        pass(b, 1);
        alive(b);
        assert_null(effect(b, EFFECT_KILL, 0));
    }
}

static void a_trainer_that_hangs_is_killed(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    live_for(b, 40); /* it loads, and says nothing */
    trainer_goes_on(b, 4, 7500);
    live_for(b, 7);
    trainer_goes_on(b, 5, 7500);
    live_for(b, 7);
    trainer_goes_on(b, 6, 0); /* a checkpoint takes its time */
    live_for(b, 60);
    trainer_goes_on(b, 6, 7500);
    live_for(b, 8); /* late, but perhaps it was this daemon that slept */
    trainer_goes_on(b, 7, 7500); /* so it was */
    live_for(b, 8);
    pass(b, 1);
    assert_non_null(effect(b, EFFECT_KILL, 0));
    trainer_exits(b, 7, 1, 0, 9);
    assert_int_equal(reported(b)->phase, PHASE(FAILED));
    assert_true(reported(b)->retryable);
    assert_string_equal(reported(b)->text,
                        "the trainer has come no further for 9.0 s after step 7");
}

/* ---- coordinator --------------------------------------------------------------------------- */

static void hello_is_repeated_with_backoff(void **state)
{
    struct bench *b = *state; /* one was said */
    pass(b, 0.19);
    assert_null(sent(b, M(HELLO)));
    pass(b, 0.02);
    assert_non_null(sent(b, M(HELLO)));
    pass(b, 0.3);
    assert_null(sent(b, M(HELLO)));
    pass(b, 0.2);
    assert_non_null(sent(b, M(HELLO)));
    start(b, 7, 1); /* not before the welcome */
    assert_null(effect(b, EFFECT_SPAWN, 0));
}

static void silence_of_the_coordinator_leads_to_hello_and_then_to_the_fence(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    pass(b, 1);
    assert_non_null(sent(b, M(HEARTBEAT)));
    pass(b, 2);
    assert_non_null(sent(b, M(HELLO)));
    assert_false(agent_is_attached(b->a));
    pass(b, 56);
    assert_null(effect(b, EFFECT_FORWARD, 0));
    pass(b, 1.1);
    assert_non_null(effect(b, EFFECT_FORWARD, 0));
    pass(b, 5);
    assert_non_null(effect(b, EFFECT_KILL, 0));
}

static void the_fence_counts_from_what_was_answered(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    pass(b, 1);
    uint64_t old = b->beat_seq;
    for (int i = 0; i < 59; i++) { /* answers come, but to a heartbeat of long ago */
        pass(b, 1);
        b->beat_seq = old;
        alive(b);
        assert_null(effect(b, EFFECT_FORWARD, 0));
    }
    assert_true(agent_is_attached(b->a));
    pass(b, 1);
    assert_non_null(effect(b, EFFECT_FORWARD, 0));
}

static void a_start_that_was_long_under_way_is_refused(void **state)
{
    struct bench *b = *state;
    uint64_t old = b->beat_seq;
    for (int i = 0; i < 61; i++) {
        pass(b, 1);
        alive(b);
    }
    uint64_t fresh = b->beat_seq;
    b->beat_seq = old;
    start(b, 7, 1);
    assert_null(effect(b, EFFECT_SPAWN, 0));
    b->beat_seq = fresh;
    start(b, 7, 1);
    assert_non_null(effect(b, EFFECT_SPAWN, 0));
}

static void a_new_coordinator_hears_everything_again(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    trainer_steps(b, 7, 1);
    assert_non_null(sent(b, M(STEPS)));
    b->coordinator_epoch = 4;
    Ballast__Ack unknown = BALLAST__ACK__INIT;
    receive(b, M(ACK), &unknown.base);
    const Ballast__Hello *h = (const void *)sent(b, M(HELLO))->payload;
    assert_int_equal(h->n_ranks, 1);
    welcome(b);
    assert_non_null(sent(b, M(STEPS)));
    b->coordinator_epoch = 3;
    stop(b, 7, 1, BALLAST__STOP_MODE__STOP_NOW, 0); /* of the one before */
    assert_null(effect(b, EFFECT_FORWARD, 0));
}

static void steps_are_kept_until_they_are_stored(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    trainer_steps(b, 7, 1);
    trainer_steps(b, 7, 2);
    assert_null(sent(b, M(STEPS))); /* one batch at a time */
    pass(b, 2.1);
    assert_int_equal(((const Ballast__StepReports *)sent(b, M(STEPS))->payload)->n_steps, 2);
    Ballast__Ack a = BALLAST__ACK__INIT;
    a.job_id = 7;
    a.attempt = 1;
    a.step = 1; /* the answer to the first one */
    receive(b, M(ACK), &a.base);
    const Ballast__StepReports *rest = (const void *)sent(b, M(STEPS))->payload;
    assert_int_equal(rest->n_steps, 1);
    assert_int_equal(rest->steps[0]->step, 2);
    for (uint64_t step = 3; step < 10; step++)
        trainer_steps(b, 7, step); /* the box holds 4 */
    assert_int_equal(agent_n_reports_dropped(b->a), 4);
}

/* ---- plans and loads ----------------------------------------------------------------------- */

static void prepare(struct bench *b, uint32_t epoch)
{
    Ballast__Placement placement = BALLAST__PLACEMENT__INIT;
    Ballast__Prepare p = BALLAST__PREPARE__INIT;
    placement.epoch = epoch;
    p.job_id = 7;
    p.attempt = 1;
    p.placement = &placement;
    receive(b, M(PREPARE), &p.base);
}

static void abort_plan(struct bench *b, uint32_t epoch)
{
    Ballast__AbortPlan p = BALLAST__ABORT_PLAN__INIT;
    p.job_id = 7;
    p.attempt = 1;
    p.epoch = epoch;
    receive(b, M(ABORT_PLAN), &p.base);
}

static void plan_state(struct bench *b, uint32_t prepared, uint32_t rejected, uint32_t placement)
{
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.phase = PHASE(RUNNING);
    s.prepared_epoch = prepared;
    s.rejected_epoch = rejected;
    s.plan_text = "no room";
    s.placement_epoch = placement;
    s.moved_bytes = 100 * placement;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &s;
    begin(b);
    agent_trainer_message(b->a, &b->turn, 7, 1, &m);
    finish(b);
}

/* What was sent to the trainer in the newest turn. */
static Ballast__TrainerMessage__WhatCase forwarded(const struct bench *b)
{
    const struct effect *e = effect(b, EFFECT_FORWARD, 0);
    return e ? e->message->what_case : BALLAST__TRAINER_MESSAGE__WHAT__NOT_SET;
}

#define WHAT(x) BALLAST__TRAINER_MESSAGE__WHAT_##x

static void a_warning_is_told_until_it_is_over(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    trainer_says(b, 7, 1, PHASE(RUNNING), "", false);
    assert_string_equal(reported(b)->text, "");
    trainer_says(b, 7, 1, PHASE(RUNNING), "no checkpoint of step 4: disk full", false);
    assert_string_equal(reported(b)->text, "no checkpoint of step 4: disk full");
    trainer_says(b, 7, 1, PHASE(RUNNING), "no checkpoint of step 4: disk full", false);
    assert_null(sent(b, M(RANK_STATE))); /* no news */
    trainer_says(b, 7, 1, PHASE(RUNNING), "", false);
    assert_string_equal(reported(b)->text, "");
    trainer_says(b, 7, 1, PHASE(RUNNING), "no checkpoint of step 8: disk full", false);
    begin(b);
    agent_trainer_exited(b->a, &b->turn, 7, 1, 0, 9, NULL);
    finish(b);
    assert_null(strstr(reported(b)->text, "no checkpoint")); /* is not what it ended of */
}

static void a_plan_goes_to_the_trainer_once(void **state)
{
    struct bench *b = *state;
    prepare(b, 1);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET)); /* nothing runs here */
    start(b, 7, 1);
    prepare(b, 1);
    assert_int_equal(forwarded(b), WHAT(PREPARE));
    prepare(b, 1);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
    plan_state(b, 1, 0, 0);
    assert_int_equal(reported(b)->prepared_epoch, 1);
    plan_state(b, 1, 0, 1);
    assert_int_equal(reported(b)->placement_epoch, 1);
    assert_int_equal(reported(b)->moved_bytes, 100);
    plan_state(b, 0, 0, 0); /* facts only grow */
    assert_null(sent(b, M(RANK_STATE)));
    prepare(b, 1);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
    assert_int_equal(reported(b)->placement_epoch, 1);
    pass(b, 1.1);
    const Ballast__Heartbeat *h = (const void *)sent(b, M(HEARTBEAT))->payload;
    assert_int_equal(h->ranks[0]->placement_epoch, 1);
}

static void a_plan_that_was_given_up_never_comes_back(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    prepare(b, 1);
    abort_plan(b, 1);
    assert_int_equal(forwarded(b), WHAT(ABORT_PLAN));
    abort_plan(b, 1);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
    assert_int_equal(reported(b)->rejected_epoch, 0); /* the trainer's word is awaited */
    plan_state(b, 1, 1, 0);
    assert_int_equal(reported(b)->rejected_epoch, 1);
    assert_string_equal(reported(b)->plan_text, "no room");

    abort_plan(b, 2); /* overtook its PREPARE: final at once */
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
    assert_int_equal(reported(b)->rejected_epoch, 2);
    prepare(b, 2);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
    assert_int_equal(reported(b)->rejected_epoch, 2);
    prepare(b, 3);
    assert_int_equal(forwarded(b), WHAT(PREPARE));
}

static void settings(struct bench *b, uint32_t revision)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__Settings s = BALLAST__SETTINGS__INIT;
    s.job_id = 7;
    s.attempt = 1;
    s.revision = revision;
    s.spec = &spec;
    receive(b, M(SETTINGS), &s.base);
}

static void settings_go_to_the_trainer_once(void **state)
{
    struct bench *b = *state;
    settings(b, 1);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET)); /* nothing runs here */
    start(b, 7, 1);
    settings(b, 1);
    assert_int_equal(forwarded(b), WHAT(SETTINGS));
    settings(b, 1);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
    assert_int_equal(reported(b)->settings_revision, 0); /* the trainer's word is awaited */
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.phase = PHASE(RUNNING);
    s.settings_revision = 1;
    m.what_case = WHAT(STATE);
    m.state = &s;
    begin(b);
    agent_trainer_message(b->a, &b->turn, 7, 1, &m);
    finish(b);
    assert_int_equal(reported(b)->settings_revision, 1);
    settings(b, 2);
    assert_int_equal(forwarded(b), WHAT(SETTINGS));
}

static void peers(struct bench *b)
{
    uint8_t key[DATA_KEY_BYTES] = {1};
    Ballast__Peer one = BALLAST__PEER__INIT, *all[] = {&one};
    Ballast__Peers p = BALLAST__PEERS__INIT;
    one.address = "tcp://10.0.0.1:5000";
    one.key = (ProtobufCBinaryData){sizeof key, key};
    p.job_id = 7;
    p.attempt = 1;
    p.peers = all;
    p.n_peers = 1;
    receive(b, M(PEERS), &p.base);
}

static void where_a_trainer_listens_is_told_and_answered_once(void **state)
{
    struct bench *b = *state;
    uint8_t key[DATA_KEY_BYTES] = {9};
    peers(b);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET)); /* nothing runs here */
    start(b, 7, 1);
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.phase = PHASE(SPAWNED);
    s.data_address = "tcp://10.0.0.2:5000";
    s.data_key = (ProtobufCBinaryData){sizeof key, key};
    m.what_case = WHAT(STATE);
    m.state = &s;
    begin(b);
    agent_trainer_message(b->a, &b->turn, 7, 1, &m);
    finish(b);
    assert_string_equal(reported(b)->data_address, "tcp://10.0.0.2:5000");
    assert_memory_equal(reported(b)->data_key.data, key, sizeof key);
    peers(b);
    assert_int_equal(forwarded(b), WHAT(PEERS));
    peers(b);
    assert_int_equal(forwarded(b), WHAT(_NOT_SET));
}

static void trainer_loads(struct bench *b, uint64_t first, uint64_t last)
{
    uint32_t tokens[] = {3, 4};
    Ballast__LayerLoad layer = BALLAST__LAYER_LOAD__INIT, *layers = &layer;
    Ballast__LoadReport r = BALLAST__LOAD_REPORT__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    layer.tokens = tokens;
    layer.n_tokens = 2;
    r.job_id = 7;
    r.attempt = 1;
    r.first_step = first;
    r.last_step = last;
    r.layers = &layers;
    r.n_layers = 1;
    m.what_case = WHAT(LOAD);
    m.load = &r;
    begin(b);
    agent_trainer_message(b->a, &b->turn, 7, 1, &m);
    finish(b);
}

static void loads_are_kept_until_they_are_stored(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    trainer_loads(b, 1, 5);
    trainer_loads(b, 6, 10);
    assert_null(sent(b, M(LOAD))); /* one at a time */
    pass(b, 2.1);
    const Ballast__LoadReport *r = (const void *)sent(b, M(LOAD))->payload;
    assert_int_equal(r->last_step, 5);
    assert_int_equal(r->layers[0]->tokens[1], 4);
    Ballast__Ack a = BALLAST__ACK__INIT;
    a.job_id = 7;
    a.attempt = 1;
    a.load_step = 5;
    receive(b, M(ACK), &a.base);
    assert_int_equal(((const Ballast__LoadReport *)sent(b, M(LOAD))->payload)->last_step, 10);
    trainer_exits(b, 7, 1, 1, 0);
    ack_ended(b, 7, 1);
    assert_null(effect(b, EFFECT_FORGET, 0)); /* one report is not stored yet */
    a.load_step = 10;
    receive(b, M(ACK), &a.base);
    assert_non_null(effect(b, EFFECT_FORGET, 0));
    assert_true(agent_is_idle(b->a));
}

static void output_is_sent_in_a_window_and_again_when_lost(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    begin(b);
    agent_log_grown(b->a, &b->turn, 7, 1, 5 * LOG_CHUNK_BYTES_MAX, 0, false);
    finish(b);
    size_t n = 0;
    for (size_t i = 0; i < b->turn.n_effects; i++)
        n += b->turn.effects[i].kind == EFFECT_SEND_LOG;
    assert_int_equal(n, 2); /* the window */
    Ballast__Ack a = BALLAST__ACK__INIT;
    a.job_id = 7;
    a.attempt = 1;
    a.rank = 2;
    a.log_offset = LOG_CHUNK_BYTES_MAX;
    receive(b, M(ACK), &a.base);
    assert_int_equal(effect(b, EFFECT_SEND_LOG, 0)->offset, 2 * LOG_CHUNK_BYTES_MAX);
    pass(b, 2.1);
    assert_int_equal(effect(b, EFFECT_SEND_LOG, 0)->offset, LOG_CHUNK_BYTES_MAX);
}

static void leaving_stops_the_trainer_first(void **state)
{
    struct bench *b = *state;
    start(b, 7, 1);
    begin(b);
    agent_shut_down(b->a, &b->turn, "told to end");
    finish(b);
    assert_non_null(effect(b, EFFECT_FORWARD, 0));
    assert_null(sent(b, M(GOODBYE)));
    assert_false(agent_may_exit(b->a));
    trainer_exits(b, 7, 1, 1, 0);
    assert_int_equal(reported(b)->phase, PHASE(STOPPED));
    assert_non_null(sent(b, M(GOODBYE)));
    assert_true(agent_may_exit(b->a));
}

static void a_refusal_is_noted_once(void **state)
{
    struct bench *b = *state;
    Ballast__Status status = BALLAST__STATUS__INIT;
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    status.code = BALLAST__CODE__ALREADY_EXISTS;
    status.message = "worker w1 is attached already";
    status.retry_after_ms = 250;
    e.kind = BALLAST__KIND__KIND_RESPONSE;
    e.method = M(HELLO);
    e.worker_epoch = LIFE;
    e.status = &status;
    for (int i = 0; i < 3; i++) {
        e.request_id = b->request_id;
        begin(b);
        agent_message(b->a, &b->turn, &e, NULL);
        finish(b);
        assert_int_equal(effect(b, EFFECT_NOTE, 0) != NULL, i == 0);
        assert_true(agent_next_deadline_ns(b->a) == b->now_ns + 250 * NS_PER_MS);
        pass(b, 0.25);
        assert_non_null(sent(b, M(HELLO)));
    }
}

static void an_outbox_acknowledges_in_order(void **state)
{
    (void)state;
    struct outbox o;
    struct arena arena = {0};
    Ballast__StepReport r = BALLAST__STEP_REPORT__INIT;
    outbox_init(&o, 1000, 1 << 20);
    for (r.step = 1; r.step <= 3; r.step++)
        outbox_add(&o, 1, 1, r.step, 0, &r.base);
    r.step = 2;
    outbox_add(&o, 1, 2, r.step, 0, &r.base); /* the next attempt does it again */
    assert_int_equal(outbox_batch(&o, &arena)->n_steps, 3);
    assert_int_equal(outbox_ack(&o, 1, 2, 9, 0), 0); /* not its turn */
    assert_int_equal(outbox_ack(&o, 1, 1, 2, 0), 2);
    assert_int_equal(outbox_ack(&o, 1, 1, 3, 0), 1);
    assert_true(outbox_has(&o, 1, 2));
    assert_int_equal(outbox_batch(&o, &arena)->attempt, 2);
    arena_fini(&arena);
    outbox_fini(&o);
}

/* Steps 6 and 7 once more: what is stored of the first time says nothing of the second. */
static void an_outbox_keeps_what_a_rollback_repeats(void **state)
{
    (void)state;
    static const uint64_t steps[] = {6, 7, 6, 7, 8}, samples[] = {48, 56, 72, 80, 88};
    struct outbox o;
    Ballast__StepReport r = BALLAST__STEP_REPORT__INIT;
    outbox_init(&o, 1000, 1 << 20);
    for (size_t i = 0; i < 5; i++) {
        r.step = steps[i];
        outbox_add(&o, 1, 1, steps[i], samples[i], &r.base);
    }
    assert_int_equal(outbox_ack(&o, 1, 1, 7, 56), 2);
    assert_int_equal(outbox_ack(&o, 1, 1, 7, 56), 0); /* the same once more */
    assert_int_equal(outbox_ack(&o, 1, 1, 7, 80), 2);
    assert_int_equal(outbox_ack(&o, 1, 1, 8, 0), 1); /* a coordinator that does not know them */
    outbox_fini(&o);
}

#define ATTACHED(f) cmocka_unit_test_setup_teardown(f, setup_attached, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ATTACHED(a_start_spawns_once),
        ATTACHED(how_a_trainer_ended),
        ATTACHED(a_trainer_that_hangs_is_killed),
        ATTACHED(an_end_is_said_until_it_is_recorded),
        ATTACHED(a_stop_is_bounded),
        ATTACHED(who_cannot_save_says_why),
        ATTACHED(a_stop_for_a_start_that_never_came_is_final),
        ATTACHED(one_attempt_lives_at_a_time),
        ATTACHED(a_closed_channel_must_be_followed_by_the_end),
        cmocka_unit_test_setup_teardown(hello_is_repeated_with_backoff, setup, teardown),
        ATTACHED(silence_of_the_coordinator_leads_to_hello_and_then_to_the_fence),
        ATTACHED(the_fence_counts_from_what_was_answered),
        ATTACHED(a_start_that_was_long_under_way_is_refused),
        ATTACHED(a_new_coordinator_hears_everything_again),
        ATTACHED(steps_are_kept_until_they_are_stored),
        ATTACHED(a_plan_goes_to_the_trainer_once),
        ATTACHED(a_plan_that_was_given_up_never_comes_back),
        ATTACHED(settings_go_to_the_trainer_once),
        ATTACHED(where_a_trainer_listens_is_told_and_answered_once),
        ATTACHED(loads_are_kept_until_they_are_stored),
        ATTACHED(output_is_sent_in_a_window_and_again_when_lost),
        ATTACHED(leaving_stops_the_trainer_first),
        cmocka_unit_test_setup_teardown(a_refusal_is_noted_once, setup, teardown),
        ATTACHED(a_warning_is_told_until_it_is_over),
        cmocka_unit_test(an_outbox_acknowledges_in_order),
        cmocka_unit_test(an_outbox_keeps_what_a_rollback_repeats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
