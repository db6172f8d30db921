/* test_coll.c - host collectives: ranks as threads and as processes, sums, ends, aborts */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "common/bf16.h"
#include "common/clock.h"
#include "kernels/spans.h"
#include "tests/coll_calls.h"
#include "tests/patience.h"
#include "worker/phases.h"

static int open_rank(struct rank *r, struct coll **out)
{
    struct coll_host_config config = {
        .id = r->id, .rank = r->rank, .world = r->world, .open_timeout_ns = 10 * NS_PER_S,
        .stage_bytes = 4096, /* many pieces */
        .call_timeout_ns = r->call_timeout_ns, .stopped_timeout_ns = NS_PER_S,
    };
    return coll_host_open(&config, out, &r->err);
}

static void *rank_main(void *arg)
{
    struct rank *r = arg;
    struct coll *c = NULL;
    struct device *dev = NULL;
    r->rc = open_rank(r, &c);
    if (r->rc == 0 && r->is_apart && (r->rc = device_cpu_open(1, true, &dev, &r->err)) == 0) {
        dev->is_host = false;
        c->dev = dev;
    }
    if (r->rc == 0)
        r->body(r, c);
    if (c)
        c->ops->close(c);
    if (dev)
        dev->ops->close(dev);
    return NULL;
}

static bool is_apart; /* of the next runs */

static void run_ranks(struct rank *ranks, uint32_t world,
                      void (*body)(struct rank *, struct coll *), uint64_t call_timeout_ns)
{
    pthread_t threads[WORLD_MAX];
    uint8_t id[16];
    make_id(id);
    for (uint32_t i = 0; i < world; i++) {
        ranks[i] = (struct rank){.rank = i, .world = world, .body = body, .is_apart = is_apart,
                                 .call_timeout_ns = call_timeout_ns};
        memcpy(ranks[i].id, id, 16);
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++)
        pthread_join(threads[i], NULL);
}

static void any_group_and_size_gives_the_plain_sum(void **state)
{
    is_apart = *state;
    static const uint32_t worlds[] = {1, 2, 3, 4, 8};
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        struct rank ranks[WORLD_MAX];
        seed0 += (uint32_t)w;
        run_ranks(ranks, worlds[w], random_calls, 20 * NS_PER_S);
        for (uint32_t i = 0; i < worlds[w]; i++)
            if (ranks[i].rc != 0)
                fail_msg("world %u rank %u seed %u: %s", worlds[w], i, seed0, ranks[i].err.text);
    }
    is_apart = false;
}

static void what_was_started_ends_in_any_order(void **state)
{
    is_apart = *state;
    for (uint32_t world = 1; world <= WORLD_MAX; world = world == 3 ? 8 : world + 1) {
        struct rank ranks[WORLD_MAX];
        seed0++;
        run_ranks(ranks, world, started_calls, 20 * NS_PER_S);
        for (uint32_t i = 0; i < world; i++)
            if (ranks[i].rc != 0)
                fail_msg("world %u rank %u seed %u: %s", world, i, seed0, ranks[i].err.text);
    }
    is_apart = false;
}

/* Sums that are lost where each step is rounded: 256 + 1 would stay 256. */
static void sum_bf16(struct rank *r, struct coll *c)
{
    static const float rows[][4] = {
        {256, 1, 1, 258}, {1, 0x1p-8f, 0x1p-8f, 1 + 0x1p-7f}, {-3, 3, 0.5f, 0.5f},
        {1, 0x1p-8f, 0, 1}, {1 + 0x1p-7f, 0x1p-8f, 0, 1 + 0x1p-6f}, {INFINITY, 1, 1, INFINITY},
    };
    enum { N = sizeof rows / sizeof *rows, M = 3000 };
    static _Thread_local uint16_t x[M], y[3 * M];
    for (size_t i = 0; i < M; i++)
        x[i] = bf16_of(rows[i % N][c->rank]);
    CHECK(r, coll_all_gather(c, &c->world_group, ELEM_BF16, x, M, 1, y, &r->err) == 0);
    for (size_t i = 0; i < 3 * M; i++)
        CHECK(r, y[i] == bf16_of(rows[i % M % N][i / M]));
    CHECK(r, c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_BF16, x, M, &r->err) == 0);
    for (size_t i = 0; i < M; i++)
        CHECK(r, bf16_value(x[i]) == rows[i % N][3]);
    for (size_t i = 0; i < 3 * M; i++)
        y[i] = bf16_of(rows[i % N][c->rank]);
    CHECK(r, coll_reduce_scatter(c, &c->world_group, ELEM_BF16, y, M / 2, 2, x, &r->err) == 0);
    for (size_t i = 0; i < M; i++)
        CHECK(r, bf16_value(x[i]) ==
                     rows[(i / (M / 2) * 3 * (M / 2) + c->rank * (M / 2) + i % (M / 2)) % N][3]);
}

static void bf16_is_summed_in_float32(void **state)
{
    struct rank ranks[WORLD_MAX];
    is_apart = *state;
    run_ranks(ranks, 3, sum_bf16, 20 * NS_PER_S);
    for (uint32_t i = 0; i < 3; i++)
        if (ranks[i].rc != 0)
            fail_msg("rank %u: %s", i, ranks[i].err.text);
    is_apart = false;
}

/* ---- what goes wrong ------------------------------------------------------------------------ */

static FILE *trace;

static void one_does_not_come(struct rank *r, struct coll *c)
{
    float x[4] = {0};
    c->layer = 7;
    r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 4, &r->err);
    c->ops->set_patience(c, 300 * NS_PER_MS, 0);
    if (r->rc == 0 && c->rank != 1)
        r->rc = c->ops->barrier(c, &c->world_group, &r->err);
    if (c->rank == 0)
        c->ops->trace(c, trace);
    if (c->rank == 1)
        stay_away(2);
    else
        atomic_fetch_add(&n_gave_up, 1);
}

static void a_member_that_stays_away_is_named(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    uint64_t began = clock_now_ns();
    char *lines = NULL;
    size_t n = 0;
    trace = open_memstream(&lines, &n);
    atomic_store(&n_gave_up, 0);
    run_ranks(ranks, 3, one_does_not_come, 20 * NS_PER_S);
    fclose(trace);
    assert_non_null(strstr(lines, "rank=0 op=barrier number=2 group=0 layer=7 n=0 ago_ms="));
    assert_non_null(strstr(lines, "rank=1 op=all_reduce number=1 group=0 layer=7 n=4 ago_ms="));
    assert_non_null(strstr(lines, " inside_ms="));
    free(lines);
    assert_true(was_soon(began, 3));
    const char *text = ranks[0].rc == -ETIMEDOUT ? ranks[0].err.text : ranks[2].err.text;
    assert_true(ranks[0].rc == -ETIMEDOUT || ranks[2].rc == -ETIMEDOUT);
    assert_true(ranks[0].rc < 0 && ranks[2].rc < 0);
    assert_non_null(strstr(text, "at barrier 2 of layer 7"));
    assert_non_null(strstr(text, "rank 1 computing after all_reduce 1 of layer 7"));
}

static void different_counts(struct rank *r, struct coll *c)
{
    float x[8] = {0};
    r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, c->rank == 2 ? 5 : 6,
                               &r->err);
}

static void members_that_disagree_are_told(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    run_ranks(ranks, 3, different_counts, 5 * NS_PER_S);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(ranks[i].rc == -EPROTO || ranks[i].rc == -ECANCELED);
        assert_non_null(strstr(ranks[i].err.text, "ranks disagree in group 0"));
    }
}

static void an_abort_ends_everybodys_call(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    run_ranks(ranks, 4, stopped_from_outside, 0);
    for (uint32_t i = 0; i < 4; i++)
        was_stopped(&ranks[i]);
}

/* ---- what goes wrong with what was started -------------------------------------------------- */

static int start_gather(struct rank *r, struct coll *c, int32_t layer, coll_ticket *out)
{
    static _Thread_local float in[4], out_of[4 * WORLD_MAX];
    c->layer = layer;
    return c->ops->start_all_gather(c, &c->world_group, ELEM_F32, in, 4, 1, out_of, out, &r->err);
}

static void one_starts_less(struct rank *r, struct coll *c)
{
    coll_ticket a = 0, b = 0;
    CHECK(r, start_gather(r, c, 3, &a) == 0);
    if (c->rank == 1) {
        stay_away(2);
        return;
    }
    CHECK(r, start_gather(r, c, 7, &b) == 0);
    CHECK(r, c->ops->finish(c, a, &r->err) == 0);
    c->ops->set_patience(c, 300 * NS_PER_MS, 0);
    if (r->rc == 0)
        r->rc = c->ops->finish(c, b, &r->err);
    atomic_fetch_add(&n_gave_up, 1);
}

static void a_member_that_is_behind_is_named(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    atomic_store(&n_gave_up, 0);
    run_ranks(ranks, 3, one_starts_less, 20 * NS_PER_S);
    const struct rank *r = ranks[0].rc == -ETIMEDOUT ? &ranks[0] : &ranks[2];
    assert_int_equal(r->rc, -ETIMEDOUT);
    assert_non_null(strstr(r->err.text, "at all_gather 2 of layer 7"));
    assert_non_null(strstr(r->err.text,
                           "rank 1 computing after the start of all_gather 1 of layer 3"));
}

static void different_starts(struct rank *r, struct coll *c)
{
    coll_ticket t = 0;
    float x[16] = {0}, y[16];
    if (c->rank == 2)
        CHECK(r, c->ops->start_reduce_scatter(c, &c->world_group, ELEM_F32, x, 4, 1, y, &t,
                                              &r->err) == 0);
    else
        CHECK(r, start_gather(r, c, -1, &t) == 0);
    r->rc = c->ops->finish(c, t, &r->err);
}

static void started_calls_that_disagree_are_told(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    run_ranks(ranks, 3, different_starts, 5 * NS_PER_S);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(ranks[i].rc == -EPROTO || ranks[i].rc == -ECANCELED);
        assert_non_null(strstr(ranks[i].err.text, "ranks disagree in group 0"));
    }
}

static void stopped_while_open(struct rank *r, struct coll *c)
{
    coll_ticket t = 0;
    pthread_t thread;
    if (c->rank == 1) { /* which never starts */
        pthread_create(&thread, NULL, abort_soon, c);
        pthread_join(thread, NULL);
        return;
    }
    CHECK(r, start_gather(r, c, -1, &t) == 0);
    if (r->rc == 0)
        r->rc = c->ops->finish(c, t, &r->err);
    CHECK(r, start_gather(r, c, -1, &t) == -ECANCELED);
}

static void an_abort_ends_what_was_started(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    run_ranks(ranks, 3, stopped_while_open, 0);
    for (uint32_t i = 0; i < 3; i += 2)
        was_stopped(&ranks[i]);
}

/* ---- a rank that computes for long, and one that hangs ---- */

static uint64_t idle_ns = 500 * NS_PER_MS;
static uint64_t longest_ns; /* that rank 1 got nothing done */

/* Rank 1 comes three times as late as one may that does nothing. */
static void works_on(struct rank *r, struct coll *c)
{
    c->ops->set_patience(c, 60 * NS_PER_S, idle_ns);
    _Atomic uint64_t *mine = c->ops->progress(c);
    for (int i = 0; c->rank == 1 && i < 30; i++) {
        uint64_t from_ns = clock_now_ns(), took_ns;
        atomic_fetch_add(mine, 1);
        nanosleep(&(struct timespec){.tv_sec = (time_t)(idle_ns / 10 / NS_PER_S),
                                     .tv_nsec = (long)(idle_ns / 10 % NS_PER_S)}, NULL);
        took_ns = clock_now_ns() - from_ns;
        longest_ns = took_ns > longest_ns ? took_ns : longest_ns;
    }
    CHECK(r, c->ops->barrier(c, &c->world_group, &r->err) == 0);
}

static void who_gets_something_done_is_waited_for(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    const char *said;
    for (;; idle_ns *= 2) {
        longest_ns = 0;
        said = NULL;
        run_ranks(ranks, 3, works_on, 60 * NS_PER_S);
        for (uint32_t i = 0; i < 3; i++)
            if (ranks[i].rc != 0)
                said = ranks[i].err.text;
        /* On a machine so busy that it got nothing done for as long, it was given up rightly. */
        if (!said || longest_ns < idle_ns / 2 || idle_ns > 10 * NS_PER_S)
            break;
    }
    if (said)
        fail_msg("%s", said);
}

/* Both wait for each other, and neither keeps the other alive. */
static void waits_in_another_order(struct rank *r, struct coll *c)
{
    static const uint32_t two[] = {0, 1};
    struct coll_group a = {.ranks = two, .n_ranks = 2, .me = c->rank, .id = COLL_FSDP};
    struct coll_group b = {.ranks = two, .n_ranks = 2, .me = c->rank, .id = COLL_EP};
    c->ops->set_patience(c, 60 * NS_PER_S, idle_ns);
    r->rc = c->ops->barrier(c, c->rank ? &a : &b, &r->err);
}

static void who_gets_nothing_done_is_given_up(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    uint64_t began = clock_now_ns();
    run_ranks(ranks, 2, waits_in_another_order, 60 * NS_PER_S);
    for (uint32_t i = 0; i < 2; i++)
        assert_true(ranks[i].rc == -ETIMEDOUT || ranks[i].rc == -ECANCELED);
    assert_non_null(strstr(ranks[0].err.text, "waited"));
    print_message("given up after %.1f s: %s\n", (double)(clock_now_ns() - began) / NS_PER_S,
                  ranks[0].err.text);
    assert_true(clock_now_ns() - began < 50 * NS_PER_S); /* not after 60, as it would */
}

/* ---- time that is hidden -------------------------------------------------------------------- */

static double hidden_s[2], open_s;
static atomic_uint n_started;

static void wait_for_starts(uint32_t n)
{
    while (atomic_load(&n_started) < n)
        nanosleep(&(struct timespec){.tv_nsec = 3 * 1000 * 1000}, NULL);
}

static void one_comes_late(struct rank *r, struct coll *c)
{
    struct device *dev;
    coll_ticket a = 0, b = 0;
    CHECK(r, device_cpu_open(1, true, &dev, &r->err) == 0);
    spans_open(dev);
    dev->is_host = true; /* also where it lies apart: its memory is not used */
    c->dev = dev;
    wait_for_starts(c->rank);
    uint64_t began = clock_now_ns();
    if (c->rank == 1)
        nanosleep(&(struct timespec){.tv_nsec = 3 * 1000 * 1000}, NULL);
    CHECK(r, start_gather(r, c, 3, &a) == 0 && start_gather(r, c, 4, &b) == 0);
    atomic_fetch_add(&n_started, 1);
    wait_for_starts(2);
    CHECK(r, c->ops->finish(c, b, &r->err) == 0 && c->ops->finish(c, a, &r->err) == 0);
    hidden_s[c->rank] = spans_seconds(dev, PHASE_GATHER_HIDDEN);
    if (c->rank == 0)
        open_s = (double)(clock_now_ns() - began) / NS_PER_S;
    CHECK(r, c->ops->barrier(c, &c->world_group, &r->err) == 0);
    c->dev = NULL;
    spans_close(dev);
    dev->ops->close(dev);
}

static void what_is_waited_for_meanwhile_is_hidden_time(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    run_ranks(ranks, 2, one_comes_late, 20 * NS_PER_S);
    for (uint32_t i = 0; i < 2; i++)
        if (ranks[i].rc != 0)
            fail_msg("rank %u: %s", i, ranks[i].err.text);
    /* Both calls were waited for at once; the last rank waited for nobody but between its two. */
    assert_true(hidden_s[0] > 0.003 && hidden_s[0] < open_s);
    assert_true(hidden_s[1] == 0);
}

/* A rank as a process: writes its result to a pipe. */
struct report {
    int rc;
    char text[1024];
};

static pid_t fork_rank(const uint8_t id[16], uint32_t rank, uint32_t world, int to,
                       _Atomic uint32_t *n_calls)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    struct rank r = {.rank = rank, .world = world, .call_timeout_ns = 30 * NS_PER_S};
    struct coll *c = NULL;
    struct report report = {0};
    memcpy(r.id, id, 16);
    r.rc = open_rank(&r, &c);
    float *x = r.rc == 0 ? c->ops->alloc(c, 4096) : NULL;
    for (; r.rc == 0; atomic_fetch_add(n_calls, 1))
        r.rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 1024, &r.err);
    report.rc = r.rc;
    snprintf(report.text, sizeof report.text, "%s", r.err.text);
    _exit(write(to, &report, sizeof report) == sizeof report ? 0 : 1);
}

/* What happens to the others when one gets a signal: all say the same within some seconds. */
static void after_signal(uint32_t victim, int signal_number, const char *says)
{
    enum { WORLD = 4 };
    uint8_t id[16];
    int pipes[2];
    pid_t pids[WORLD];
    make_id(id);
    assert_int_equal(pipe(pipes), 0);
    _Atomic uint32_t *n_calls = mmap(NULL, sizeof *n_calls, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(n_calls != MAP_FAILED);
    for (uint32_t i = 0; i < WORLD; i++)
        pids[i] = fork_rank(id, i, WORLD, pipes[1], n_calls);
    uint64_t end = patience_end_ns(5);
    while (atomic_load(n_calls) < 20 && clock_now_ns() < end)
        nanosleep(&(struct timespec){.tv_nsec = 3 * 1000 * 1000}, NULL);
    uint64_t began = clock_now_ns();
    kill(pids[victim], signal_number);
    for (uint32_t i = 0; i + 1 < WORLD; i++) {
        struct report report;
        assert_int_equal(read(pipes[0], &report, sizeof report), sizeof report);
        assert_int_equal(report.rc, -ECANCELED);
        char expected[64];
        snprintf(expected, sizeof expected, "rank %u has %s", victim, says);
        if (!strstr(report.text, expected))
            fail_msg("expected '%s' in: %s", expected, report.text);
    }
    assert_true(was_soon(began, 5));
    kill(pids[victim], SIGKILL);
    for (uint32_t i = 0; i < WORLD; i++)
        waitpid(pids[i], NULL, 0);
    close(pipes[0]);
    close(pipes[1]);
    munmap(n_calls, sizeof *n_calls);
}

static void the_death_of_a_member_ends_all(void **state)
{
    (void)state;
    after_signal(2, SIGKILL, "died");
    after_signal(0, SIGKILL, "died");
}

static void a_stopped_member_is_given_up(void **state)
{
    (void)state;
    after_signal(2, SIGSTOP, "been stopped by a signal for 1 s, ");
    after_signal(0, SIGSTOP, "been stopped by a signal for 1 s, ");
}

static void a_run_that_never_gathers_ends_in_time(void **state)
{
    (void)state;
    uint8_t id[16];
    struct coll *c = NULL;
    struct err err = {0};
    make_id(id);
    struct coll_host_config config = {.id = id, .world = 3, .open_timeout_ns = 100 * NS_PER_MS};
    assert_int_equal(coll_host_open(&config, &c, &err), -ETIMEDOUT);
    assert_non_null(strstr(err.text, "these of 3 ranks have not come: 1 2"));
    config.rank = 2;
    assert_int_equal(coll_host_open(&config, &c, &err), -ETIMEDOUT);
    assert_non_null(strstr(err.text, "rank 0 has not come"));
    atomic_bool cancelled = true;
    config.cancelled = &cancelled;
    assert_int_equal(coll_host_open(&config, &c, &err), -ECANCELED);
    assert_null(c);
}

int main(void)
{
    seed0 = (uint32_t)test_seed();
    static bool yes = true; /* in memory apart */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_group_and_size_gives_the_plain_sum),
        cmocka_unit_test_prestate(any_group_and_size_gives_the_plain_sum, &yes),
        cmocka_unit_test(what_was_started_ends_in_any_order),
        cmocka_unit_test_prestate(what_was_started_ends_in_any_order, &yes),
        cmocka_unit_test(bf16_is_summed_in_float32),
        cmocka_unit_test_prestate(bf16_is_summed_in_float32, &yes),
        cmocka_unit_test(a_member_that_stays_away_is_named),
        cmocka_unit_test(members_that_disagree_are_told),
        cmocka_unit_test(an_abort_ends_everybodys_call),
        cmocka_unit_test(a_member_that_is_behind_is_named),
        cmocka_unit_test(started_calls_that_disagree_are_told),
        cmocka_unit_test(who_gets_something_done_is_waited_for),
        cmocka_unit_test(who_gets_nothing_done_is_given_up),
        cmocka_unit_test(an_abort_ends_what_was_started),
        cmocka_unit_test(what_is_waited_for_meanwhile_is_hidden_time),
        cmocka_unit_test(the_death_of_a_member_ends_all),
        cmocka_unit_test(a_stopped_member_is_given_up),
        cmocka_unit_test(a_run_that_never_gathers_ends_in_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
