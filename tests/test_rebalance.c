/* test_rebalance.c - experts of one job: its loads, plans, calls and records, message by message */
#include "tests/a_core.h"

#include <math.h>

#define WHAT(x) BALLAST__RECORD__WHAT_##x
#define CODE(x) BALLAST__CODE__##x

enum { CLIENT = 1, W0 = 10, W1 = 11, WINDOW = 10 };

static Ballast__RankState ranks[2]; /* as the workers say it */

static void message(struct bench *b, uint64_t peer, Ballast__Method method, uint8_t key,
                    const ProtobufCMessage *payload)
{
    b->now_ns += NS_PER_MS;
    b->n_before = b->n_log;
    message_with(b, peer, method, key, payload);
}

/* The newest message made a record of that kind: it, else NULL. */
static const Ballast__Record *recorded(const struct bench *b, Ballast__Record__WhatCase what)
{
    for (size_t i = b->n_before; i < b->n_log; i++)
        if (b->log[i]->what_case == what)
            return b->log[i];
    return NULL;
}

static void hello(struct bench *b, uint64_t peer, bool holds_rank)
{
    Ballast__Hello h = BALLAST__HELLO__INIT;
    Ballast__RankState *rank = &ranks[peer - W0];
    h.name = peer == W0 ? "w0" : "w1";
    h.node = "n1";
    h.ranks = &rank;
    h.n_ranks = holds_rank;
    b->life[peer] = peer;
    message(b, peer, M(HELLO), 0, &h.base);
}

/* The rank's newest state. */
static void say(struct bench *b, uint64_t peer)
{
    message(b, peer, M(RANK_STATE), 0, &ranks[peer - W0].base);
}

static void pass(struct bench *b, double seconds)
{
    b->now_ns += (uint64_t)(seconds * NS_PER_S);
}

static void submit(struct bench *b, bool is_auto, uint32_t n_devices)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    spec.name = "experts";
    spec.parallel_workers = 2;
    spec.parallel_expert_parallel_degree = n_devices;
    spec.train_steps = 1000;
    spec.scheduling_max_restarts = 3;
    spec.rebalance_auto = is_auto;
    spec.rebalance_spare_slots_per_rank = 1;
    spec.rebalance_window_steps = WINDOW;
    spec.rebalance_horizon_steps = 200;
    spec.rebalance_min_gain = 0.1;
    request.spec = &spec;
    message(b, CLIENT, M(SUBMIT), 1, &request.base);
}

static void run(struct bench *b, uint32_t attempt)
{
    for (uint64_t peer = W0; peer <= W1; peer++) {
        Ballast__RankState *r = &ranks[peer - W0];
        ballast__rank_state__init(r);
        r->job_id = 1;
        r->attempt = attempt;
        r->rank = (uint32_t)(peer - W0);
        r->phase = PHASE(RUNNING);
        say(b, peer);
    }
}

static int setup_running(void **state, bool is_auto)
{
    struct bench *b = bench_create();
    submit(b, is_auto, 2);
    hello(b, W0, false);
    hello(b, W1, false);
    run(b, 1);
    *state = b;
    return 0;
}

static int setup(void **state)
{
    return setup_running(state, false);
}

static int setup_auto(void **state)
{
    return setup_running(state, true);
}

static void restart(struct bench *b)
{
    stop(b);
    start(b);
    hello(b, W0, true);
    hello(b, W1, true);
}

/* Windows up to that step; each a report of its own. */
static void loads(struct bench *b, uint64_t from_window, uint64_t to_window, uint32_t epoch,
                  uint32_t hot)
{
    for (uint64_t w = from_window; w <= to_window; w++) {
        uint32_t tokens[] = {hot, hot, 1000000, 1000000};
        Ballast__LayerLoad layer = BALLAST__LAYER_LOAD__INIT, *layers = &layer;
        Ballast__LoadReport r = BALLAST__LOAD_REPORT__INIT;
        layer.layer = 3;
        layer.tokens = tokens;
        layer.n_tokens = r.n_experts = 4;
        r.job_id = 1;
        r.attempt = ranks[0].attempt;
        r.first_step = (w - 1) * WINDOW + 1;
        r.last_step = w * WINDOW;
        r.n_nodes = 1;
        r.placement_epoch = epoch;
        r.layers = &layers;
        r.n_layers = 1;
        r.step_s = epoch ? 0.08 : 0.1;
        r.row_s = 1e-8;
        r.expert_bytes = 1000;
        r.device_imbalance = epoch ? 1.01 : 1.5;
        message(b, W0, M(LOAD), 0, &r.base);
        assert_int_equal(b->turn.n_loads, 1);
        assert_int_equal(((const Ballast__Ack *)sent(b, W0, M(ACK))->payload)->load_step,
                         r.last_step);
    }
}

static Ballast__Code call(struct bench *b, Ballast__Method method, uint8_t key, uint64_t revision,
                          bool on)
{
    Ballast__RebalanceRequest request = BALLAST__REBALANCE_REQUEST__INIT;
    request.job_id = 1;
    request.revision = revision;
    request.on = on;
    message(b, CLIENT, method, key, &request.base);
    return sent(b, CLIENT, method)->envelope.status->code;
}

static const Ballast__RebalancePlanReply *reply(const struct bench *b, Ballast__Method method)
{
    return (const Ballast__RebalancePlanReply *)sent(b, CLIENT, method)->payload;
}

static const char *reason(const struct bench *b, Ballast__Method method)
{
    return sent(b, CLIENT, method)->envelope.status->reason;
}

/* ---- calls --------------------------------------------------------------------------------- */

static void what_cannot_be_is_said(void **state)
{
    struct bench *b = *state = bench_create();
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(NOT_FOUND));
    submit(b, true, 1);
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(FAILED_PRECONDITION));
    assert_string_equal(reason(b, M(REBALANCE_PLAN)), "JOB_STATE");
    assert_string_equal(sent(b, CLIENT, M(REBALANCE_PLAN))->envelope.status->message,
                        "job 1 is QUEUED; experts move only while a job is RUNNING");
    hello(b, W0, false);
    hello(b, W1, false);
    run(b, 1);
    assert_int_equal(call(b, M(REBALANCE_APPLY), 9, 0, false), CODE(FAILED_PRECONDITION));
    assert_string_equal(reason(b, M(REBALANCE_APPLY)), "ONE_DEVICE");
}

static void without_loads_there_is_no_plan(void **state)
{
    struct bench *b = *state;
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(FAILED_PRECONDITION));
    assert_string_equal(reason(b, M(REBALANCE_PLAN)), "NO_LOADS");
    loads(b, 1, 1, 7, 9000000); /* of a placement that is not in force */
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(FAILED_PRECONDITION));
}

static void a_plan_that_is_looked_at_changes_nothing(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 8, 0, 5000000);
    assert_null(recorded(b, WHAT(PLAN))); /* it is told to, or does not */
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(OK));
    assert_int_equal(b->n_log, b->n_before);
    uint64_t revision = reply(b, M(REBALANCE_PLAN))->revision;
    assert_true(revision && reply(b, M(REBALANCE_PLAN))->n_moves);
    assert_true(reply(b, M(REBALANCE_PLAN))->predicted_gain_s > 0);
    assert_true(*reply(b, M(REBALANCE_PLAN))->reason);
    assert_false(reply(b, M(REBALANCE_PLAN))->auto_on);
    call(b, M(REBALANCE_PLAN), 0, 0, false);
    assert_true(reply(b, M(REBALANCE_PLAN))->revision == revision);
    loads(b, 9, 9, 0, 5000000);
    call(b, M(REBALANCE_PLAN), 0, 0, false);
    assert_false(reply(b, M(REBALANCE_PLAN))->revision == revision);
}

static void an_even_load_is_left_alone(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 8, 0, 1000000);
    assert_int_equal(call(b, M(REBALANCE_APPLY), 9, 0, false), CODE(OK));
    assert_int_equal(reply(b, M(REBALANCE_APPLY))->epoch, 0);
    assert_memory_equal(reply(b, M(REBALANCE_APPLY))->reason, "nothing to do", 13);
    assert_null(recorded(b, WHAT(PLAN)));
}

static void what_was_looked_at_is_applied_once(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 8, 0, 5000000);
    call(b, M(REBALANCE_PLAN), 0, 0, false);
    uint64_t revision = reply(b, M(REBALANCE_PLAN))->revision;
    assert_int_equal(call(b, M(REBALANCE_APPLY), 8, revision - 1, false), CODE(ABORTED));
    assert_string_equal(reason(b, M(REBALANCE_APPLY)), "REVISION");
    assert_int_equal(call(b, M(REBALANCE_APPLY), 9, revision, false), CODE(OK));
    assert_int_equal(reply(b, M(REBALANCE_APPLY))->epoch, 1);
    const Ballast__RecordPlan *plan = recorded(b, WHAT(PLAN))->plan;
    assert_false(plan->automatic);
    assert_memory_equal(plan->cause, "asked for by ann", 16);
    assert_int_equal(plan->placement->n_layers, 1);
    for (uint64_t peer = W0; peer <= W1; peer++) {
        const Ballast__Prepare *p = (const void *)sent(b, peer, M(PREPARE))->payload;
        assert_int_equal(p->placement->epoch, 1);
        assert_int_equal(p->base_epoch, 0);
    }
    assert_int_equal(call(b, M(REBALANCE_APPLY), 9, revision, false), CODE(OK));
    assert_int_equal(reply(b, M(REBALANCE_APPLY))->epoch, 1);
    assert_null(recorded(b, WHAT(PLAN)));
    assert_int_equal(call(b, M(REBALANCE_APPLY), 7, 0, false), CODE(FAILED_PRECONDITION));
    assert_string_equal(reason(b, M(REBALANCE_APPLY)), "PLAN_OPEN");
}

/* Experts 0 1 2 on device 0, 3 and a copy of 0 on device 1, or what the caller makes of it. */
static Ballast__Code apply_given(struct bench *b, uint8_t key, uint32_t n_slots, int32_t last)
{
    int32_t experts[] = {0, 1, 2, 3, last, -1};
    double share[] = {0.5, 1, 1, 1, 0.5, 0};
    uint32_t home[] = {0, 1, 2, 3};
    Ballast__PlacementLayer layer = BALLAST__PLACEMENT_LAYER__INIT, *layers = &layer;
    Ballast__Placement placement = BALLAST__PLACEMENT__INIT;
    Ballast__RebalanceRequest request = BALLAST__REBALANCE_REQUEST__INIT;
    layer.layer = 3;
    layer.experts = experts;
    layer.share = share;
    layer.home = home;
    layer.n_experts = layer.n_share = 2 * (size_t)n_slots;
    layer.n_home = 4;
    placement.n_devices = 2;
    placement.n_slots = n_slots;
    placement.layers = &layers;
    placement.n_layers = 1;
    request.job_id = 1;
    request.placement = &placement;
    message(b, CLIENT, M(REBALANCE_APPLY), key, &request.base);
    return sent(b, CLIENT, M(REBALANCE_APPLY))->envelope.status->code;
}

static void a_placement_of_a_person_is_carried_out(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 8, 0, 1000000); /* even: the planner would stay */
    assert_int_equal(apply_given(b, 8, 2, 0), CODE(INVALID_ARGUMENT));
    assert_string_equal(reason(b, M(REBALANCE_APPLY)), "PLACEMENT");
    assert_string_equal(sent(b, CLIENT, M(REBALANCE_APPLY))->envelope.status->message,
                        "the placement does not fit job 1: it has 2 devices with 2 slots, this job "
                        "has 2 with 3");
    assert_int_equal(apply_given(b, 9, 3, 0), CODE(OK));
    assert_int_equal(reply(b, M(REBALANCE_APPLY))->epoch, 1);
    const Ballast__RecordPlan *plan = recorded(b, WHAT(PLAN))->plan;
    const Ballast__PlacementLayer *l = plan->placement->layers[0];
    static const int32_t expected[] = {0, 1, 2, 0, 3, -1}; /* 3 stays in its slot */
    assert_memory_equal(l->experts, expected, sizeof expected);
    assert_int_equal(l->home[0], 0);
    assert_int_equal(l->home[2], 2); /* its old device has it no more */
    assert_int_equal(plan->n_moves, 2);
    ranks[1].rejected_epoch = 1;
    say(b, W1);
    ranks[0].rejected_epoch = 1;
    say(b, W0);
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(OK)); /* the planner's */
    assert_int_equal(reply(b, M(REBALANCE_PLAN))->n_moves, 0);
}

static void automatic_mode_is_switched_at_once(void **state)
{
    struct bench *b = *state;
    assert_int_equal(call(b, M(REBALANCE_AUTO), 9, 0, false), CODE(OK));
    assert_false(recorded(b, WHAT(REBALANCE_AUTO))->rebalance_auto->on);
    call(b, M(REBALANCE_AUTO), 9, 0, false);
    assert_null(recorded(b, WHAT(REBALANCE_AUTO)));
    loads(b, 1, 8, 0, 5000000);
    restart(b); /* it is remembered */
    loads(b, 9, 9, 0, 5000000);
    assert_null(recorded(b, WHAT(PLAN)));
    call(b, M(REBALANCE_AUTO), 8, 0, true);
    loads(b, 10, 10, 0, 5000000);
    assert_non_null(recorded(b, WHAT(PLAN)));
    assert_true(recorded(b, WHAT(PLAN))->plan->automatic);
    call(b, M(REBALANCE_AUTO), 7, 0, false); /* also the plan that is open */
    assert_string_equal(recorded(b, WHAT(PLAN_ENDED))->plan_ended->reason,
                        "ann switched automatic rebalancing off");
    assert_non_null(sent(b, W0, M(ABORT_PLAN)));
    assert_non_null(sent(b, W1, M(ABORT_PLAN)));
}

/* ---- a plan's life ------------------------------------------------------------------------- */

static void prepared(struct bench *b, uint32_t epoch)
{
    for (uint64_t peer = W0; peer <= W1; peer++) {
        ranks[peer - W0].prepared_epoch = epoch;
        say(b, peer);
    }
}

static void migrated(struct bench *b, uint32_t epoch)
{
    for (uint64_t peer = W0; peer <= W1; peer++) {
        ranks[peer - W0].placement_epoch = epoch;
        ranks[peer - W0].moved_bytes = 100 * peer;
        ranks[peer - W0].pause_s = 0.01 * (double)peer;
        say(b, peer);
    }
}

static void a_plan_comes_into_force_and_its_gain_is_seen(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 1, 0, 5000000);
    const Ballast__RecordPlan *plan = recorded(b, WHAT(PLAN))->plan;
    assert_true(plan->automatic && plan->n_moves && plan->step_s == 0.1);
    assert_true(plan->imbalance_before == 1.5);
    prepared(b, 1);
    loads(b, 2, 2, 0, 5000000); /* training goes on */
    migrated(b, 1);
    const Ballast__RecordPlacement *p = recorded(b, WHAT(PLACEMENT))->placement;
    assert_int_equal(p->epoch, 1);
    assert_int_equal(p->bytes, 100 * (W0 + W1));
    assert_float_equal(p->pause_s, 0.01 * W1, 1e-9);
    assert_int_equal(p->placement->n_layers, 1);
    loads(b, 3, 3, 1, 5000000);
    const Ballast__RecordRealised *r = recorded(b, WHAT(REALISED))->realised;
    assert_int_equal(r->epoch, 1);
    assert_float_equal(r->gain_s, 0.02, 1e-9);
    assert_float_equal(r->imbalance_after, 1.01, 1e-9);

    ranks[1].phase = PHASE(FAILED); /* the next attempt starts with that placement */
    ranks[1].retryable = true;
    say(b, W1);
    ranks[0].phase = PHASE(STOPPED);
    say(b, W0);
    pass(b, 2);
    begin(b);
    finish(b);
    const Ballast__Start *s = (const void *)sent(b, W0, M(START))->payload;
    assert_int_equal(s->attempt, 2);
    assert_int_equal(s->placement->epoch, 1);
    assert_int_equal(s->placement->n_layers, 1);
}

static void prepare_is_repeated_until_it_is_answered(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 1, 0, 5000000);
    say(b, W1);
    assert_null(sent(b, W1, M(PREPARE))); /* not at once */
    pass(b, 2.5);
    say(b, W1);
    assert_non_null(sent(b, W1, M(PREPARE)));
    ranks[1].prepared_epoch = 1;
    pass(b, 2.5);
    say(b, W1);
    assert_null(sent(b, W1, M(PREPARE)));
}

static void a_refusal_frees_the_others(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 1, 0, 5000000);
    ranks[0].prepared_epoch = 1;
    say(b, W0);
    ranks[1].rejected_epoch = 1;
    ranks[1].plan_text = "no memory for 4096 bytes";
    say(b, W1);
    assert_string_equal(recorded(b, WHAT(PLAN_ENDED))->plan_ended->reason,
                        "rank 1 on worker w1: no memory for 4096 bytes");
    assert_non_null(sent(b, W0, M(ABORT_PLAN)));
    assert_null(sent(b, W1, M(ABORT_PLAN)));
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(FAILED_PRECONDITION));
    ranks[0].rejected_epoch = 1;
    say(b, W0);
    assert_int_equal(call(b, M(REBALANCE_PLAN), 0, 0, false), CODE(OK));
    loads(b, 2, 2, 0, 5000000);
    assert_null(recorded(b, WHAT(PLAN))); /* calm for a while */
    loads(b, 3, 3, 0, 5000000);
    assert_int_equal(recorded(b, WHAT(PLAN))->plan->placement->epoch, 2);
}

static void a_new_coordinator_carries_the_plan_on(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 1, 0, 5000000);
    prepared(b, 1);
    ranks[1].prepared_epoch = 0; /* it never heard of it */
    restart(b);
    assert_non_null(sent(b, W1, M(PREPARE)));
    ranks[1].prepared_epoch = 1;
    restart(b);
    assert_null(sent(b, W1, M(PREPARE)));
    migrated(b, 1);
    assert_non_null(recorded(b, WHAT(PLACEMENT)));
}

static void a_rank_that_is_late_is_told_to_give_up(void **state)
{
    struct bench *b = *state;
    loads(b, 1, 1, 0, 5000000);
    ranks[0].prepared_epoch = 1;
    for (int i = 0; i < 12; i++) { /* both live, one does not answer */
        say(b, W0);
        say(b, W1);
        pass(b, 5.5);
    }
    say(b, W0);
    assert_non_null(sent(b, W0, M(ABORT_PLAN)));
    const Ballast__Record *ended = b->log[b->n_log - 1];
    assert_int_equal(ended->what_case, WHAT(PLAN_ENDED));
    assert_string_equal(ended->plan_ended->reason, "rank 1 on worker w1 was not prepared after "
                        "60 s");
    migrated(b, 1); /* it was, and all have moved */
    assert_int_equal(recorded(b, WHAT(PLACEMENT))->placement->epoch, 1);
}

int main(void)
{
#define RUNNING(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
#define AUTOMATIC(f) cmocka_unit_test_setup_teardown(f, setup_auto, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(what_cannot_be_is_said, teardown),
        RUNNING(without_loads_there_is_no_plan),
        RUNNING(a_plan_that_is_looked_at_changes_nothing),
        RUNNING(an_even_load_is_left_alone),
        RUNNING(what_was_looked_at_is_applied_once),
        RUNNING(a_placement_of_a_person_is_carried_out),
        AUTOMATIC(automatic_mode_is_switched_at_once),
        AUTOMATIC(a_plan_comes_into_force_and_its_gain_is_seen),
        AUTOMATIC(prepare_is_repeated_until_it_is_answered),
        AUTOMATIC(a_refusal_frees_the_others),
        AUTOMATIC(a_new_coordinator_carries_the_plan_on),
        AUTOMATIC(a_rank_that_is_late_is_told_to_give_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
