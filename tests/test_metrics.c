/* test_metrics.c - what is counted, and the text that Prometheus reads */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/metrics.h"

static struct metrics m;
static struct metrics_now now;

static int fresh(void **state)
{
    (void)state;
    memset(&m, 0, sizeof m);
    now = (struct metrics_now){.version = "1.2", .commit = "a\"b\\c\nd", .backup_s = -1};
    return 0;
}

static void assert_says(const char *line)
{
    char *text = metrics_text(&m, &now);
    const char *at = strstr(text, line);
    bool is_line = at && (at == text || at[-1] == '\n') && at[strlen(line)] == '\n';
    if (!is_line)
        fail_msg("expected the line '%s' in:\n%s", line, text);
    free(text);
}

static void buckets_add_up(void **state)
{
    (void)state;
    metrics_observe(&m, METRICS_COMMIT, 100 * 1000);       /* 0.1 ms: the first bound itself */
    metrics_observe(&m, METRICS_COMMIT, 200 * 1000);
    metrics_observe(&m, METRICS_COMMIT, 3600ull * NS_PER_S); /* beyond all */
    assert_says("ballast_commit_seconds_bucket{le=\"0.0001\"} 1");
    assert_says("ballast_commit_seconds_bucket{le=\"0.0003\"} 2");
    assert_says("ballast_commit_seconds_bucket{le=\"17.7147\"} 2");
    assert_says("ballast_commit_seconds_bucket{le=\"+Inf\"} 3");
    assert_says("ballast_commit_seconds_sum 3600.0003");
    assert_says("ballast_commit_seconds_count 3");
    assert_says("ballast_query_seconds_count 0");
}

static void labels_are_escaped(void **state)
{
    (void)state;
    assert_says("ballast_build_info{version=\"1.2\",commit=\"a\\\"b\\\\c\\nd\"} 1");
}

static void answers_are_counted_by_method_and_code(void **state)
{
    (void)state;
    metrics_answer(&m, BALLAST__METHOD__METHOD_SUBMIT, BALLAST__CODE__OK);
    metrics_answer(&m, BALLAST__METHOD__METHOD_SUBMIT, BALLAST__CODE__OK);
    metrics_answer(&m, BALLAST__METHOD__METHOD_SUBMIT, BALLAST__CODE__UNAVAILABLE);
    metrics_answer(&m, (Ballast__Method)9999, (Ballast__Code)9999); /* out of the tables */
    assert_says("ballast_requests_total{method=\"SUBMIT\",code=\"OK\"} 2");
    assert_says("ballast_requests_total{method=\"SUBMIT\",code=\"UNAVAILABLE\"} 1");
    assert_says("ballast_requests_total{method=\"UNKNOWN\",code=\"UNKNOWN\"} 1");
}

static void records_become_counters(void **state)
{
    Ballast__Job job = BALLAST__JOB__INIT;
    Ballast__Record r = BALLAST__RECORD__INIT;
    Ballast__RecordAssigned assigned = BALLAST__RECORD_ASSIGNED__INIT;
    Ballast__RecordState ended = BALLAST__RECORD_STATE__INIT;
    Ballast__RecordPlan plan = BALLAST__RECORD_PLAN__INIT;
    Ballast__RecordPlacement placed = BALLAST__RECORD_PLACEMENT__INIT;
    (void)state;
    r.what_case = BALLAST__RECORD__WHAT_SUBMITTED;
    metrics_record(&m, &r, NULL);

    job.submitted_at_ns = 1000 * (int64_t)NS_PER_S;
    r.at_ns = 1010 * (int64_t)NS_PER_S;
    r.what_case = BALLAST__RECORD__WHAT_ASSIGNED;
    r.assigned = &assigned;
    assigned.attempt = 1;
    metrics_record(&m, &r, &job);
    metrics_record(&m, &r, NULL); /* it has ended already: its wait is not known */
    assigned.attempt = 2;         /* did not wait in the queue since it was submitted */
    metrics_record(&m, &r, &job);

    r.what_case = BALLAST__RECORD__WHAT_STATE;
    r.state = &ended;
    ended.state = BALLAST__JOB_STATE__JOB_RECOVERING;
    ended.counts_as_restart = true;
    metrics_record(&m, &r, &job);
    ended.state = BALLAST__JOB_STATE__JOB_DONE;
    ended.counts_as_restart = false;
    ended.ran_ms = 2500;
    metrics_record(&m, &r, &job);

    r.what_case = BALLAST__RECORD__WHAT_PLAN;
    r.plan = &plan;
    plan.automatic = true;
    metrics_record(&m, &r, &job);
    r.what_case = BALLAST__RECORD__WHAT_PLACEMENT;
    r.placement = &placed;
    placed.n_moves = 7;
    placed.bytes = 4096;
    placed.pause_s = 0.002;
    metrics_record(&m, &r, &job);

    assert_says("ballast_records_total 8");
    assert_says("ballast_jobs_submitted_total 1");
    assert_says("ballast_job_queue_seconds_count 1");
    assert_says("ballast_job_queue_seconds_sum 10");
    assert_says("ballast_job_restarts_total 1");
    assert_says("ballast_jobs_ended_total{state=\"DONE\"} 1");
    assert_says("ballast_jobs_ended_total{state=\"FAILED\"} 0");
    assert_says("ballast_job_run_seconds_sum 2.5");
    assert_says("ballast_rebalance_plans_total{by=\"auto\"} 1");
    assert_says("ballast_rebalances_total{result=\"done\"} 1");
    assert_says("ballast_rebalance_moves_total 7");
    assert_says("ballast_rebalance_bytes_total 4096");
    assert_says("ballast_rebalance_pause_seconds_sum 0.002");
}

static void jobs_and_workers_have_series(void **state)
{
    Ballast__Job job = BALLAST__JOB__INIT, *jobs[] = {&job};
    Ballast__Worker cpu = BALLAST__WORKER__INIT, gpu = BALLAST__WORKER__INIT;
    Ballast__Worker *workers[] = {&cpu, &gpu};
    Ballast__GpuHealth health = BALLAST__GPU_HEALTH__INIT;
    (void)state;
    job.id = 12;
    job.name = "tiny";
    job.user = "ann";
    job.loss = NAN;
    job.step = 1234567;
    char *text = metrics_jobs_text(jobs, 1);
    assert_non_null(strstr(text,
                           "ballast_job_step{job=\"12\",name=\"tiny\",user=\"ann\"} 1234567\n"));
    assert_non_null(strstr(text, "ballast_job_loss{job=\"12\",name=\"tiny\",user=\"ann\"} NaN\n"));
    free(text);

    cpu.name = "c0";
    gpu.name = "g0";
    cpu.node = gpu.node = "n";
    cpu.state = BALLAST__WORKER_STATE__WORKER_LOST;
    gpu.state = BALLAST__WORKER_STATE__WORKER_BUSY;
    gpu.gpu = &health;
    health.sm_clock_mhz = 1980;
    health.sick = "";
    text = metrics_workers_text(workers, 2);
    assert_non_null(strstr(text, "ballast_worker_up{worker=\"c0\",node=\"n\"} 0\n"));
    assert_non_null(strstr(text, "ballast_worker_up{worker=\"g0\",node=\"n\"} 1\n"));
    assert_non_null(strstr(text,
                           "ballast_gpu_sm_clock_hertz{worker=\"g0\",node=\"n\"} 1980000000\n"));
    assert_null(strstr(text, "ballast_gpu_sm_clock_hertz{worker=\"c0\""));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(buckets_add_up, fresh),
        cmocka_unit_test_setup(labels_are_escaped, fresh),
        cmocka_unit_test_setup(answers_are_counted_by_method_and_code, fresh),
        cmocka_unit_test_setup(records_become_counters, fresh),
        cmocka_unit_test_setup(jobs_and_workers_have_series, fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
