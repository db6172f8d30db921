/* test_job.c - the life of one job, when its gang is over, what people read */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/event.h"
#include "coordinator/job.h"

#define S(state) BALLAST__JOB_STATE__JOB_##state

static struct job *a_job(job_id id)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__RecordSubmitted submitted = BALLAST__RECORD_SUBMITTED__INIT;
    spec.name = "j";
    spec.parallel_workers = 2;
    spec.train_steps = 100;
    submitted.spec = &spec;
    submitted.user = "ann";
    return job_create(id, &submitted);
}

static void states_move_as_drawn(void **state)
{
    (void)state;
    static const struct { Ballast__JobState from, to; bool allowed; } rows[] = {
        {S(QUEUED), S(STARTING), true},    {S(QUEUED), S(RUNNING), false},
        {S(QUEUED), S(CANCELLED), true},   {S(QUEUED), S(STOPPING), false},
        {S(STARTING), S(RUNNING), true},   {S(STARTING), S(DONE), false},
        {S(STARTING), S(CANCELLED), false}, {S(RUNNING), S(DONE), true},
        {S(RUNNING), S(QUEUED), false},    {S(RUNNING), S(RECOVERING), true},
        {S(RECOVERING), S(STARTING), true}, {S(RECOVERING), S(RUNNING), false},
        {S(STOPPING), S(CANCELLED), true}, {S(STOPPING), S(RUNNING), false},
        {S(DONE), S(QUEUED), true},        {S(DONE), S(RUNNING), false},
        {S(CANCELLED), S(DONE), false},    {S(RUNNING), S(UNKNOWN), false},
        {S(QUEUED), S(PAUSED), true},      {S(RUNNING), S(PAUSED), false},
        {S(STARTING), S(PAUSED), false},   {S(RECOVERING), S(PAUSED), true},
        {S(RECOVERING), S(QUEUED), true},
        {S(STOPPING), S(PAUSED), true},    {S(STOPPING), S(QUEUED), true},
        {S(STOPPING), S(STOPPING), true},  {S(PAUSED), S(QUEUED), true},
        {S(PAUSED), S(CANCELLED), true},   {S(PAUSED), S(STARTING), false},
        {S(PAUSED), S(FAILED), false},     {S(DONE), S(PAUSED), false},
    };
    struct job *j = a_job(1);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        j->state = rows[i].from;
        if (job_may_move(j, rows[i].to) != rows[i].allowed)
            fail_msg("%s to %s", event_job_state(rows[i].from), event_job_state(rows[i].to));
    }
    job_destroy(j);
}

static void a_gang_is_over_when_no_step_can_be_made(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        enum rank_fate fates[2];
        uint64_t over_ns[2], expected;
    } rows[] = {
        {"a living rank", {RANK_ENDED, RANK_ALIVE}, {0, 0}, UINT64_MAX},
        {"all have ended", {RANK_ENDED, RANK_ENDED}, {0, 0}, 0},
        {"an orphan has its time", {RANK_ENDED, RANK_ORPHAN}, {0, 7}, 7},
        {"silent beside one that ended is stuck", {RANK_ENDED, RANK_SILENT}, {0, 300}, 0},
        {"silent beside an orphan", {RANK_ORPHAN, RANK_SILENT}, {7, 300}, 7},
        {"all silent: the fence", {RANK_SILENT, RANK_SILENT}, {290, 300}, 300},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct job *j = a_job(1);
        j->n_gang = 2;
        j->gang = xcalloc(2, sizeof *j->gang);
        j->ranks = xcalloc(2, sizeof *j->ranks);
        for (int r = 0; r < 2; r++) {
            j->ranks[r].fate = rows[i].fates[r];
            j->ranks[r].over_ns = rows[i].over_ns[r];
            j->n_alive += rows[i].fates[r] == RANK_ALIVE;
        }
        if (job_gang_over_ns(j) != rows[i].expected)
            fail_msg("%s", rows[i].shows);
        job_destroy(j);
    }
}

static void backoff_doubles_up_to_its_cap(void **state)
{
    (void)state;
    struct job *j = a_job(1);
    uint64_t expected_s[] = {1, 2, 4, 8, 16, 32, 60, 60};
    for (uint32_t i = 0; i < 8; i++) {
        j->n_failures_in_row = i;
        assert_int_equal(job_backoff_ns(j, NS_PER_S, 60 * NS_PER_S), expected_s[i] * NS_PER_S);
    }
    j->n_failures_in_row = UINT32_MAX;
    assert_int_equal(job_backoff_ns(j, NS_PER_S, 60 * NS_PER_S), 60 * NS_PER_S);
    job_destroy(j);
}

static void reports_fold_forwards_only(void **state)
{
    (void)state;
    struct job *j = a_job(1);
    Ballast__StepReport r = BALLAST__STEP_REPORT__INIT;
    Ballast__StepReport *steps[] = {&r};
    Ballast__StepReports reports = BALLAST__STEP_REPORTS__INIT;
    reports.steps = steps;
    reports.n_steps = 1;
    j->attempt = 2;
    r.step = 5, r.loss = 3.0, r.validation_loss = NAN;
    job_fold(j, 2, &reports);
    r.step = 4, r.loss = 9.0;
    job_fold(j, 2, &reports); /* late */
    r.step = 90;
    job_fold(j, 1, &reports); /* of an older attempt */
    assert_int_equal(j->summary.step, 5);
    assert_int_equal(j->live_step, 5);
    assert_true(j->summary.loss == 3.0);
    assert_true(isnan(j->summary.validation_loss));
    job_destroy(j);
}

static void reasons_say_it_in_words(void **state)
{
    (void)state;
    static const struct { struct wait_reason wait; const char *text; } rows[] = {
        {{WAIT_WORKERS, 8, 4, 2, 0}, "needs 8 workers, 4 attached, 2 free"},
        {{WAIT_WORKERS, 1, 0, 0, 0}, "needs 1 worker, 0 attached, 0 free"},
        {{WAIT_MEMORY, 2, 1, 0, 3u << 20},
         "needs 2 workers with 3 MiB of memory, 1 such attached, 0 free"},
        {{WAIT_BEHIND, 7, 0, 0, 0}, "waits behind job 7"},
        {{WAIT_NODE, 4, 0, 0, 0}, "waits until 4 workers of one node are free: where its experts "
         "lie on several, ranks need more memory than they have"},
        {{WAIT_AFTER, 7, 0, 0, 0}, "waits until job 7 is DONE"},
        {{WAIT_HELD, 0, 0, 0, 0}, "held by ada: for lunch; ballast job release 1 lets it start"},
    };
    struct arena arena = {0};
    struct job *j = a_job(1);
    job_text(&j->hold_reason, "for lunch");
    job_text(&j->held_by, "ada");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        j->wait = rows[i].wait;
        assert_string_equal(job_reason(j, 0, &arena), rows[i].text);
    }
    arena_fini(&arena);
    job_destroy(j);
}

static void the_table_keeps_ended_jobs_until_they_are_committed(void **state)
{
    (void)state;
    struct job_table t = {0};
    for (job_id id = 100; id > 0; id--)
        job_table_add(&t, a_job(id));
    assert_int_equal(job_table_find(&t, 57)->id, 57);
    assert_null(job_table_find(&t, 101));
    assert_int_equal(job_table_above(&t, 99), 99);
    job_table_find(&t, 57)->state = S(DONE);
    job_table_find(&t, 57)->last_seq = 9;
    assert_true(job_table_forget_ended(&t, 8));
    assert_non_null(job_table_find(&t, 57));
    assert_false(job_table_forget_ended(&t, 9));
    assert_null(job_table_find(&t, 57));
    assert_int_equal(t.n, 99);
    job_table_fini(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(states_move_as_drawn),
        cmocka_unit_test(a_gang_is_over_when_no_step_can_be_made),
        cmocka_unit_test(backoff_doubles_up_to_its_cap),
        cmocka_unit_test(reports_fold_forwards_only),
        cmocka_unit_test(reasons_say_it_in_words),
        cmocka_unit_test(the_table_keeps_ended_jobs_until_they_are_committed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
