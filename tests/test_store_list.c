/* test_store_list.c - lists of jobs and events by conditions, orders and pages */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/a_store.h"
#include "tests/patience.h"

#define TERMS_MAX 3

struct asked {
    const char *column;
    Ballast__ListOp op;
    const char *value, *or_value;
};

/* What a client would send; lives as long as the test. */
struct terms {
    Ballast__ListTerm terms[TERMS_MAX], *of[TERMS_MAX];
    char *values[TERMS_MAX][2];
    Ballast__ListOrder order, *orders[1];
};

static struct store_read with(struct terms *t, struct store_read r, const struct asked *asked,
                              const char *order)
{
    for (size_t i = 0; i < TERMS_MAX && asked[i].column; i++) {
        ballast__list_term__init(&t->terms[i]);
        t->values[i][0] = (char *)asked[i].value;
        t->values[i][1] = (char *)asked[i].or_value;
        t->terms[i].column = (char *)asked[i].column;
        t->terms[i].op = asked[i].op;
        t->terms[i].values = t->values[i];
        t->terms[i].n_values = asked[i].or_value ? 2 : 1;
        t->of[i] = &t->terms[i];
        r.terms = t->of;
        r.n_terms = i + 1;
    }
    if (order) {
        ballast__list_order__init(&t->order);
        t->order.descending = *order == '-';
        t->order.column = (char *)order + (*order == '-');
        t->orders[0] = &t->order;
        r.order = t->orders;
        r.n_order = 1;
    }
    return r;
}

/* Three jobs of ada: 1 DONE, 2 FAILED, 3 waits. */
static void tell_three_jobs(struct bench *b, struct story *s)
{
    for (uint64_t job = 1; job <= 3; job++)
        say_submitted(s, job);
    say_assigned(s, 1, 1);
    say_assigned(s, 2, 1);
    say_state(s, 2, BALLAST__JOB_STATE__JOB_FAILED, "the loss is not a number");
    say_state(s, 1, BALLAST__JOB_STATE__JOB_DONE, "all steps done");
    say_worker(s, "w0", BALLAST__WORKER_STATE__WORKER_IDLE);
    assert_int_equal(tell(b, s), 0);
}

static void text_of_jobs(const struct store_read *r, char out[64])
{
    *out = '\0';
    for (size_t i = 0; i < r->n_jobs; i++)
        snprintf(out + strlen(out), 64 - strlen(out), "%llu ", (unsigned long long)r->jobs[i]->id);
    if (r->is_truncated)
        strcat(out, "+");
}

static void jobs_are_chosen_and_ordered(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        struct asked asked[TERMS_MAX];
        const char *order, *jobs;
        uint32_t limit;
        bool is_live;
    } rows[] = {
        {"one state", {{"state", BALLAST__LIST_OP__LIST_IS, "FAILED", NULL}}, NULL, "2 ", 9, false},
        {"one of two", {{"state", BALLAST__LIST_OP__LIST_IS, "FAILED", "QUEUED"}}, NULL, "2 3 ",
         9, false},
        {"neither", {{"state", BALLAST__LIST_OP__LIST_IS_NOT, "FAILED", "QUEUED"}}, NULL, "1 ",
         9, false},
        {"all conditions hold",
         {{"user", BALLAST__LIST_OP__LIST_IS, "ada", NULL},
          {"jobid", BALLAST__LIST_OP__LIST_AT_LEAST, "2", NULL},
          {"name", BALLAST__LIST_OP__LIST_HOLDS, "brid", NULL}}, NULL, "2 3 ", 9, false},
        {"no such user", {{"user", BALLAST__LIST_OP__LIST_IS, "' OR 1 --", NULL}}, NULL, "", 9,
         false},
        {"the newest", {{NULL, 0, NULL, NULL}}, "-jobid", "3 2 +", 2, false},
        /* Records 6 and 7 are the ends, a nanosecond apart. */
        {"what has not ended counts as later",
         {{"end", BALLAST__LIST_OP__LIST_ABOVE, "1000000000006", NULL}}, "end", "1 3 ", 9, false},
        {"before that", {{"end", BALLAST__LIST_OP__LIST_AT_MOST, "1000000000006", NULL}}, NULL,
         "2 ", 9, false},
        {"the last to end", {{NULL, 0, NULL, NULL}}, "-end", "3 1 2 ", 9, false},
        {"live ones only", {{"user", BALLAST__LIST_OP__LIST_IS, "ada", NULL}}, NULL, "3 ", 9, true},
        {"a negative number", {{"prio", BALLAST__LIST_OP__LIST_BELOW, "-1", NULL}}, NULL, "", 9,
         false},
    };
    struct bench b;
    struct story s = {0};
    bench_make(&b);
    bench_open(&b);
    tell_three_jobs(&b, &s);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct terms t;
        char got[64];
        struct store_read r = do_read(&b, with(&t, (struct store_read){
            .kind = STORE_JOBS, .limit = rows[i].limit, .is_live = rows[i].is_live,
            .limit_ns = PATIENCE * NS_PER_S},
            rows[i].asked, rows[i].order));
        text_of_jobs(&r, got);
        if (r.rc < 0 || strcmp(got, rows[i].jobs))
            fail_msg("%s: jobs %s instead of %s; %s", rows[i].what, got, rows[i].jobs, r.err.text);
        store_read_fini(&r);
    }
    arena_fini(&s.arena);
    bench_remove(&b);
}

static void conditions_that_are_none_are_refused(void **state)
{
    (void)state;
    static const struct {
        struct asked asked[TERMS_MAX];
        const char *order, *why;
    } rows[] = {
        {{{"id; DROP TABLE jobs", BALLAST__LIST_OP__LIST_IS, "1", NULL}}, NULL, "is no column"},
        {{{"jobid", BALLAST__LIST_OP__LIST_IS, "seven", NULL}}, NULL, "not a whole number"},
        {{{"jobid", BALLAST__LIST_OP__LIST_BELOW, "1", "2"}}, NULL, "expected one"},
        {{{NULL, 0, NULL, NULL}}, "-loss", "'loss' is no column"},
    };
    struct bench b;
    bench_make(&b);
    bench_open(&b);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct terms t;
        struct store_read r = do_read(&b, with(&t, (struct store_read){.kind = STORE_JOBS,
                                               .limit = 9}, rows[i].asked, rows[i].order));
        assert_int_equal(r.rc, -EINVAL);
        assert_non_null(strstr(r.err.text, rows[i].why));
        store_read_fini(&r);
    }
    bench_remove(&b);
}

static void a_list_that_takes_too_long_ends(void **state)
{
    (void)state;
    static const struct asked all[TERMS_MAX] = {
        {"name", BALLAST__LIST_OP__LIST_HOLDS, "nobody has it", NULL}};
    struct bench b;
    struct story s = {0};
    struct terms t;
    bench_make(&b);
    bench_open(&b);
    for (uint64_t job = 1; job <= 640; job++) {
        say_submitted(&s, job);
        if (s.n == 64)
            assert_int_equal(tell(&b, &s), 0);
    }
    struct store_read asked = {.kind = STORE_JOBS, .limit = 9, .limit_ns = 1};
    struct store_read r = do_read(&b, with(&t, asked, all, NULL));
    assert_int_equal(r.rc, -ETIME);
    store_read_fini(&r);
    asked.limit_ns = PATIENCE * NS_PER_S;
    r = do_read(&b, with(&t, asked, all, NULL));
    assert_int_equal(r.rc, 0);
    store_read_fini(&r);
    arena_fini(&s.arena);
    bench_remove(&b);
}

static struct store_read events(struct bench *b, struct terms *t, const struct asked *asked,
                                uint64_t from, uint32_t limit, bool is_newest)
{
    struct store_read r = do_read(b, with(t, (struct store_read){
        .kind = STORE_EVENTS, .from = from, .limit = limit, .is_newest = is_newest}, asked, NULL));
    assert_int_equal(r.rc, 0);
    return r;
}

/* Of 50,000 records every hundredth is job 1's start, which is more than one block holds. */
static void events_are_looked_for_block_by_block(void **state)
{
    (void)state;
    enum { N = 50000 };
    static const struct asked assigned[TERMS_MAX] = {
        {"kind", BALLAST__LIST_OP__LIST_IS, "JOB_ASSIGNED", NULL}};
    static const struct asked since[TERMS_MAX] = {
        {"kind", BALLAST__LIST_OP__LIST_IS, "JOB_ASSIGNED", NULL},
        {"time", BALLAST__LIST_OP__LIST_AT_LEAST, "1000000049800", NULL}};
    struct bench b;
    struct story s = {0};
    struct terms t;
    bench_make(&b);
    bench_open(&b);
    say_submitted(&s, 1);
    for (uint32_t i = 2; i <= N; i++) {
        if (i % 100 == 0)
            say_assigned(&s, 1, i / 100);
        else
            say_worker(&s, "w0", BALLAST__WORKER_STATE__WORKER_IDLE);
        if (s.n == 64) {
            assert_int_equal(tell(&b, &s), 0);
            arena_reset(&s.arena);
        }
    }
    assert_int_equal(tell(&b, &s), 0);
    uint64_t from = 0, n = 0; /* newest first, in pages of 60 */
    do {
        struct store_read r = events(&b, &t, assigned, from, 60, true);
        for (size_t i = r.n_events; i-- > 0; n++)
            assert_int_equal(r.events[i]->seq, N - 100 * n);
        assert_int_equal(r.total, N);
        from = r.next;
        store_read_fini(&r);
    } while (from);
    assert_int_equal(n, N / 100);
    struct store_read r = events(&b, &t, since, 0, 60, true);
    assert_int_equal(r.n_events, 3);
    assert_int_equal(r.next, 0);
    store_read_fini(&r);
    from = n = 0; /* and upwards, as who follows */
    do {
        r = events(&b, &t, assigned, from, 60, false);
        for (size_t i = 0; i < r.n_events; i++)
            assert_int_equal(r.events[i]->seq, 100 * ++n);
        from = r.next;
        store_read_fini(&r);
    } while (from <= N);
    assert_int_equal(n, N / 100);
    arena_fini(&s.arena);
    bench_remove(&b);
}

/* The last of a job's steps, and those since a time. */
static void steps_are_counted_from_the_end(void **state)
{
    (void)state;
    struct bench b;
    struct story s = {0};
    Ballast__StepReport step[20], *of[20];
    Ballast__StepReports reports = BALLAST__STEP_REPORTS__INIT;
    bench_make(&b);
    bench_open(&b);
    say_submitted(&s, 1);
    assert_int_equal(tell(&b, &s), 0);
    for (size_t i = 0; i < 20; i++) {
        ballast__step_report__init(&step[i]);
        step[i].step = i + 1;
        step[i].attempt = 1;
        step[i].at_ns = 1000 + (int64_t)i;
        of[i] = &step[i];
    }
    reports.job_id = 1;
    reports.attempt = 1;
    reports.steps = of;
    reports.n_steps = 20;
    struct turn_steps steps = {1, &reports};
    struct store_batch batch = {.steps = &steps, .n_steps = 1};
    assert_int_equal(do_batch(&b, &batch), 0);
    static const struct { uint32_t last; int64_t since_ns; size_t first, n; } rows[] = {
        {0, 0, 1, 20}, {5, 0, 16, 5}, {20, 0, 1, 20}, {99, 0, 1, 20}, {0, 1010, 11, 10},
        {5, 1010, 16, 5}, {0, 1, 1, 20}, {0, 9999, 0, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct store_read r = do_read(&b, (struct store_read){
            .kind = STORE_STEPS, .job = 1, .limit = 99, .last = rows[i].last,
            .wall_ns = rows[i].since_ns});
        assert_int_equal(r.rc, 0);
        assert_int_equal(r.n_steps, rows[i].n);
        assert_int_equal(r.n_steps ? r.steps[0]->step : 0, rows[i].first);
        store_read_fini(&r);
    }
    arena_fini(&s.arena);
    bench_remove(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_are_chosen_and_ordered),
        cmocka_unit_test(conditions_that_are_none_are_refused),
        cmocka_unit_test(a_list_that_takes_too_long_ends),
        cmocka_unit_test(events_are_looked_for_block_by_block),
        cmocka_unit_test(steps_are_counted_from_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
