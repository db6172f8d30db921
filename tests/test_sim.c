/* test_sim.c - thousands of random histories of a cluster, and a few stories to read
 *
 * test_sim                             stories, then SIM_SEEDS histories from seed SIM_FIRST
 * test_sim --seeds N --first S         the same from the command line
 * A seed that breaks a rule is run again and prints its trace. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "tests/sim.h"

static uint64_t n_seeds = 2000, first_seed = 1;

static struct sim *history(uint64_t seed, bool keeps_trace)
{
    struct sim *s = sim_create(seed, 1 + (uint32_t)(seed % 5), 1 + (uint32_t)(seed % 3));
    s->keeps_trace = keeps_trace;
    sim_history(s);
    return s;
}

static void every_history_keeps_the_rules(void **state)
{
    (void)state;
    struct sim_counts sum = {0};
    uint64_t n_failed = 0;
    clock_t from = clock();
    for (uint64_t seed = first_seed; seed < first_seed + n_seeds; seed++) {
        struct sim *s = history(seed, false);
        sum.n_events += s->counts.n_events;
        sum.n_packets += s->counts.n_packets;
        sum.n_lost += s->counts.n_lost;
        sum.n_crashes += s->counts.n_crashes;
        sum.n_kills += s->counts.n_kills;
        sum.n_records += s->counts.n_records;
        sum.n_attempts += s->counts.n_attempts;
        sum.n_done += s->counts.n_done;
        sum.n_plans += s->counts.n_plans;
        sum.n_placements += s->counts.n_placements;
        sum.n_plans_ended += s->counts.n_plans_ended;
        sum.n_late_wins += s->counts.n_late_wins;
        if (*s->failure) {
            fprintf(stderr, "seed %" PRIu64 ": %s\n", seed, s->failure);
            if (!n_failed++) {
                struct sim *again = history(seed, true);
                fprintf(stderr, "%s", again->trace);
                sim_destroy(again);
            }
        }
        sim_destroy(s);
    }
    printf("%" PRIu64 " seeds from %" PRIu64 " in %.1f s: %" PRIu64 " events, %" PRIu64
           " packets (%" PRIu64 " lost), %" PRIu64 " coordinator crashes, %" PRIu64
           " daemon kills, %" PRIu64 " records, %" PRIu64 " trainers, %" PRIu64 " jobs done, %"
           PRIu64 " plans (%" PRIu64 " carried out, %" PRIu64 " ended, %" PRIu64
           " of them too late), %" PRIu64 " failed\n", n_seeds, first_seed,
           (double)(clock() - from) / CLOCKS_PER_SEC,
           sum.n_events, sum.n_packets, sum.n_lost, sum.n_crashes, sum.n_kills, sum.n_records,
           sum.n_attempts, sum.n_done, sum.n_plans,
           sum.n_placements, sum.n_plans_ended, sum.n_late_wins, n_failed);
    assert_int_equal(n_failed, 0);
}

/* ---- stories ------------------------------------------------------------------------------ */

static struct sim *calm_cluster(uint32_t n_hosts)
{
    struct sim *s = sim_create(1, n_hosts, 1);
    s->keeps_trace = true;
    coord_sim_start(s);
    for (uint32_t i = 0; i < n_hosts; i++)
        host_start(s, i);
    sim_run_until(s, 2 * NS_PER_S);
    return s;
}

static void run_to(struct sim *s, double seconds)
{
    sim_run_until(s, (uint64_t)(seconds * NS_PER_S));
}

/* The trace since the last call must be that text. */
static void sim_expect(struct sim *s, const char *expected)
{
    assert_string_equal(s->failure, "");
    assert_string_equal(s->trace ? s->trace : "", expected);
    s->n_trace = 0;
    *s->trace = '\0';
}

static void a_killed_worker_costs_an_attempt_not_the_job(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(3);
    sim_expect(s, "[   1.001] coordinator: epoch 1\n"
                  "[   1.002] coordinator: worker w0 attached\n"
                  "[   1.002] coordinator: worker w1 attached\n"
                  "[   1.002] coordinator: worker w2 attached\n");
    client_submit(s, 0, 2, 6, 2);
    run_to(s, 6);
    sim_expect(s, "[   2.002] coordinator: job 1 QUEUED\n"
                  "[   2.002] coordinator: job 1 STARTING attempt 1 on w0 w1\n"
                  "[   2.003] client: call 0 answered 0\n"
                  "[   2.003] w0: trainer of job 1 attempt 1 rank 0 started\n"
                  "[   2.003] w1: trainer of job 1 attempt 1 rank 1 started\n"
                  "[   4.005] coordinator: job 1 RUNNING\n"
                  "[   5.005] coordinator: job 1 checkpoint at step 2\n");
    host_kill(s, 1);
    run_to(s, 20);
    sim_expect(s, "[   6.000] w1: the daemon was killed\n"
                  "[   8.556] w0: trainer of job 1 attempt 1 ended, 1:0\n"
                  "[   8.558] coordinator: job 1 RECOVERING: rank 0 on worker w0: a collective "
                  "failed\n"
                  "[   9.005] coordinator: worker w1 lost: silent for 4.0 s\n"
                  "[   9.558] coordinator: job 1 STARTING attempt 2 on w0 w2\n"
                  "[   9.559] w0: trainer of job 1 attempt 2 rank 0 started\n"
                  "[   9.559] w2: trainer of job 1 attempt 2 rank 1 started\n"
                  "[  11.561] coordinator: job 1 RUNNING\n"
                  "[  12.561] coordinator: job 1 checkpoint at step 4\n"
                  "[  14.561] coordinator: job 1 checkpoint at step 6\n"
                  "[  14.621] w0: trainer of job 1 attempt 2 ended, 0:0\n"
                  "[  14.638] w2: trainer of job 1 attempt 2 ended, 0:0\n"
                  "[  14.640] coordinator: job 1 DONE: finished all steps, 6\n");
    sim_destroy(s);
}

static void a_submit_whose_answer_is_lost_makes_one_job(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(1);
    s->n_trace = 0;
    client_submit(s, 0, 1, 2, 2);
    run_to(s, 2.0015); /* the turn is made, not committed */
    coord_sim_crash(s, 9); /* durable, but the answer never leaves */
    sim_say(s, "coordinator: killed");
    run_to(s, 3);
    coord_sim_start(s);
    run_to(s, 12);
    sim_expect(s, "[   2.002] coordinator: job 1 QUEUED\n"
                  "[   2.002] coordinator: job 1 STARTING attempt 1 on w0\n"
                  "[   2.002] coordinator: killed\n"
                  "[   3.001] coordinator: epoch 2\n"
                  "[   3.009] w0: trainer of job 1 attempt 1 rank 0 started\n"
                  "[   3.868] client: call 0 answered 0\n"
                  "[   5.011] coordinator: job 1 RUNNING\n"
                  "[   6.011] coordinator: job 1 checkpoint at step 2\n"
                  "[   6.022] w0: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[   6.024] coordinator: job 1 DONE: finished all steps, 2\n");
    sim_destroy(s);
}

static void training_goes_on_while_the_coordinator_is_away(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(2);
    client_submit(s, 0, 2, 8, 4);
    run_to(s, 5);
    s->n_trace = 0;
    coord_sim_crash(s, 0);
    sim_say(s, "coordinator: killed");
    run_to(s, 9);
    coord_sim_start(s);
    run_to(s, 13);
    sim_expect(s, "[   5.000] coordinator: killed\n"
                  "[   9.001] coordinator: epoch 2\n"
                  "[  10.008] coordinator: job 1 checkpoint at step 4\n"
                  "[  11.005] coordinator: job 1 checkpoint at step 8\n"
                  "[  11.077] w0: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[  11.086] w1: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[  11.088] coordinator: job 1 DONE: finished all steps, 8\n");
    for (size_t step = 1; step <= 8; step++)
        assert_int_equal(s->store.steps[1][step], 1);
    sim_destroy(s);
}

static void a_small_job_does_not_overtake_a_large_one(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(2);
    s->n_trace = 0;
    client_submit(s, 0, 1, 2, 2);
    run_to(s, 2.1);
    client_submit(s, 0, 2, 1, 2);
    run_to(s, 2.2);
    client_submit(s, 0, 1, 1, 2);
    run_to(s, 12);
    sim_expect(s, "[   2.002] coordinator: job 1 QUEUED\n"
                  "[   2.002] coordinator: job 1 STARTING attempt 1 on w0\n"
                  "[   2.003] client: call 0 answered 0\n"
                  "[   2.003] w0: trainer of job 1 attempt 1 rank 0 started\n"
                  "[   2.102] coordinator: job 2 QUEUED\n"
                  "[   2.103] client: call 1 answered 0\n"
                  "[   2.202] coordinator: job 3 QUEUED\n"
                  "[   2.203] client: call 2 answered 0\n"
                  "[   4.005] coordinator: job 1 RUNNING\n"
                  "[   5.005] coordinator: job 1 checkpoint at step 2\n"
                  "[   5.012] w0: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[   5.014] coordinator: job 1 DONE: finished all steps, 2\n"
                  "[   5.014] coordinator: job 2 STARTING attempt 1 on w0 w1\n"
                  "[   5.015] w0: trainer of job 2 attempt 1 rank 0 started\n"
                  "[   5.015] w1: trainer of job 2 attempt 1 rank 1 started\n"
                  "[   7.017] coordinator: job 2 checkpoint at step 1\n"
                  "[   7.017] coordinator: job 2 RUNNING\n"
                  "[   7.021] w1: trainer of job 2 attempt 1 ended, 0:0\n"
                  "[   7.100] w0: trainer of job 2 attempt 1 ended, 0:0\n"
                  "[   7.102] coordinator: job 2 DONE: finished all steps, 1\n"
                  "[   7.102] coordinator: job 3 STARTING attempt 1 on w0\n"
                  "[   7.103] w0: trainer of job 3 attempt 1 rank 0 started\n"
                  "[   9.105] coordinator: job 3 checkpoint at step 1\n"
                  "[   9.105] coordinator: job 3 RUNNING\n"
                  "[   9.184] w0: trainer of job 3 attempt 1 ended, 0:0\n"
                  "[   9.186] coordinator: job 3 DONE: finished all steps, 1\n");
    sim_destroy(s);
}

static void a_pause_costs_no_step(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(2);
    client_submit(s, 0, 2, 6, 100);
    run_to(s, 5.5);
    s->n_trace = 0;
    client_job(s, 0, BALLAST__METHOD__METHOD_JOB_PAUSE, 1, "lunch");
    run_to(s, 5.503);
    coord_sim_crash(s, 9);
    sim_say(s, "coordinator: killed");
    run_to(s, 7);
    coord_sim_start(s);
    run_to(s, 20);
    client_job(s, 0, BALLAST__METHOD__METHOD_JOB_RESUME, 1, "");
    run_to(s, 40);
    sim_expect(s, "[   5.502] coordinator: job 1 STOPPING: paused by user: lunch\n"
                  "[   5.503] coordinator: killed\n"
                  "[   5.503] client: call 1 answered 0\n"
                  "[   6.048] w0: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[   6.078] w1: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[   7.001] coordinator: epoch 2\n"
                  "[   7.008] coordinator: job 1 checkpoint at step 3\n"
                  "[   7.008] coordinator: job 1 PAUSED: paused by user: lunch; ballast job "
                  "resume 1 lets it go on from step 3\n"
                  "[  20.002] coordinator: job 1 QUEUED: resumed by user\n"
                  "[  20.002] coordinator: job 1 STARTING attempt 2 on w0 w1\n"
                  "[  20.003] client: call 2 answered 0\n"
                  "[  20.003] w0: trainer of job 1 attempt 2 rank 0 started\n"
                  "[  20.003] w1: trainer of job 1 attempt 2 rank 1 started\n"
                  "[  22.005] coordinator: job 1 RUNNING\n"
                  "[  24.005] coordinator: job 1 checkpoint at step 6\n"
                  "[  24.021] w0: trainer of job 1 attempt 2 ended, 0:0\n"
                  "[  24.083] w1: trainer of job 1 attempt 2 ended, 0:0\n"
                  "[  24.085] coordinator: job 1 DONE: finished all steps, 6\n");
    for (size_t step = 1; step <= 6; step++)
        assert_int_equal(s->store.steps[1][step], step <= 3 ? 1 : 2);
    sim_destroy(s);
}

static void submit_experts(struct sim *s, uint64_t steps)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    spec.name = "experts";
    spec.parallel_workers = spec.parallel_expert_parallel_degree = 2;
    spec.train_steps = spec.checkpoint_every_steps = steps;
    spec.scheduling_max_restarts = 3;
    spec.rebalance_auto = true;
    spec.rebalance_spare_slots_per_rank = 1;
    spec.rebalance_window_steps = 3;
    spec.rebalance_horizon_steps = 200;
    spec.rebalance_min_gain = 0.01;
    request.spec = &spec;
    client_call(s, 0, BALLAST__METHOD__METHOD_SUBMIT, &request.base);
}

static void experts_move_while_the_job_trains(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(2);
    submit_experts(s, 8);
    s->n_trace = 0;
    run_to(s, 20);
    sim_expect(s, "[   2.002] coordinator: job 1 QUEUED\n"
                  "[   2.002] coordinator: job 1 STARTING attempt 1 on w0 w1\n"
                  "[   2.003] client: call 0 answered 0\n"
                  "[   2.003] w0: trainer of job 1 attempt 1 rank 0 started\n"
                  "[   2.003] w1: trainer of job 1 attempt 1 rank 1 started\n"
                  "[   4.005] coordinator: job 1 RUNNING\n"
                  "[   6.005] coordinator: job 1 plan 1\n"
                  "[   8.003] job 1 attempt 1: experts move, placement 1\n"
                  "[   8.005] coordinator: job 1 placement 1 in force, 2000 bytes moved\n"
                  "[  11.005] coordinator: job 1 checkpoint at step 8\n"
                  "[  11.050] w0: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[  11.077] w1: trainer of job 1 attempt 1 ended, 0:0\n"
                  "[  11.079] coordinator: job 1 DONE: finished all steps, 8\n");
    sim_destroy(s);
}

static void a_death_before_the_move_leaves_the_old_placement(void **state)
{
    (void)state;
    struct sim *s = calm_cluster(2);
    submit_experts(s, 8);
    run_to(s, 7.1); /* the plan is prepared on both */
    s->n_trace = 0;
    host_kill_trainer(s, 1, 11);
    run_to(s, 30);
    sim_expect(s, "[   7.100] w1: trainer of job 1 attempt 1 ended, 0:11\n"
                  "[   7.102] coordinator: job 1 plan 1 ended: rank 1 on worker w1: the trainer "
                  "was killed by signal 11 before it had finished\n"
                  "[   7.102] coordinator: job 1 RECOVERING: rank 1 on worker w1: the trainer was "
                  "killed by signal 11 before it had finished\n"
                  "[   7.925] w0: trainer of job 1 attempt 1 ended, 1:0\n"
                  "[   8.102] coordinator: job 1 STARTING attempt 2 on w0 w1\n"
                  "[   8.103] w0: trainer of job 1 attempt 2 rank 0 started\n"
                  "[   8.103] w1: trainer of job 1 attempt 2 rank 1 started\n"
                  "[  10.105] coordinator: job 1 RUNNING\n"
                  "[  15.105] coordinator: job 1 plan 2\n"
                  "[  17.103] job 1 attempt 2: experts move, placement 2\n"
                  "[  17.105] coordinator: job 1 checkpoint at step 8\n"
                  "[  17.105] coordinator: job 1 placement 2 in force, 4000 bytes moved\n"
                  "[  17.184] w0: trainer of job 1 attempt 2 ended, 0:0\n"
                  "[  17.194] w1: trainer of job 1 attempt 2 ended, 0:0\n"
                  "[  17.196] coordinator: job 1 DONE: finished all steps, 8\n");
    sim_destroy(s);
}

static uint64_t number(const char *text)
{
    return strtoull(text, NULL, 10);
}

int main(int argc, char **argv)
{
    if (getenv("SIM_SEEDS"))
        n_seeds = number(getenv("SIM_SEEDS"));
    if (getenv("SIM_FIRST"))
        first_seed = number(getenv("SIM_FIRST"));
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seeds"))
            n_seeds = number(argv[i + 1]);
        else if (!strcmp(argv[i], "--first"))
            first_seed = number(argv[i + 1]);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_worker_costs_an_attempt_not_the_job),
        cmocka_unit_test(a_submit_whose_answer_is_lost_makes_one_job),
        cmocka_unit_test(training_goes_on_while_the_coordinator_is_away),
        cmocka_unit_test(a_small_job_does_not_overtake_a_large_one),
        cmocka_unit_test(a_pause_costs_no_step),
        cmocka_unit_test(experts_move_while_the_job_trains),
        cmocka_unit_test(a_death_before_the_move_leaves_the_old_placement),
        cmocka_unit_test(every_history_keeps_the_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
