/* test_coll.c - host collectives: ranks as threads and as processes, sums, ends, aborts */
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/bf16.h"
#include "common/clock.h"
#include "tests/patience.h"
#include "worker/coll.h"

#define WORLD_MAX 8u

static uint32_t seed0;

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void make_id(uint8_t id[16])
{
    static uint32_t n;
    memset(id, 0, 16);
    uint32_t words[4] = {(uint32_t)getpid(), ++n, (uint32_t)time(NULL), seed0};
    memcpy(id, words, 16);
}

struct rank {
    uint8_t  id[16];
    bool     is_apart; /* tensors lie in a device's memory, which the host does not touch */
    uint32_t rank, world;
    uint64_t call_timeout_ns;
    void   (*body)(struct rank *r, struct coll *c);
    struct err err;
    int      rc;
};

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

/* ---- values --------------------------------------------------------------------------------- */

/* What rank puts at element i of call number k; any rank can work out anybody's. */
static float value(uint32_t k, uint32_t rank, size_t i)
{
    uint32_t s = k * 7919u + rank * 104729u + (uint32_t)i * 31u + seed0;
    return (float)((int32_t)(next(&s) % 20001u) - 10000) / 4096.0f * (rank == 1 ? 1e3f : 1.0f);
}

static float plain_sum(uint32_t k, const struct coll_group *g, size_t i)
{
    float sum = value(k, g->ranks[0], i);
    for (uint32_t m = 1; m < g->n_ranks; m++)
        sum += value(k, g->ranks[m], i);
    return sum;
}

#define CHECK(r, condition)                                                                        \
    do {                                                                                           \
        if (!(condition) && (r)->rc == 0) {                                                        \
            (r)->rc = -EBADMSG;                                                                    \
            err_set(&(r)->err, -EBADMSG, "line %d: %s", __LINE__, #condition);                     \
        }                                                                                          \
    } while (0)

/* Between the host's x and tensor, which may be the same memory. */
static void upload(struct coll *c, void *tensor, const void *x, size_t n_bytes)
{
    if (c->dev)
        c->dev->ops->to_device(c->dev, tensor, x, n_bytes);
    else if (tensor != x)
        memcpy(tensor, x, n_bytes);
}

static void download(struct coll *c, void *x, const void *tensor, size_t n_bytes)
{
    if (c->dev)
        c->dev->ops->to_host(c->dev, x, tensor, n_bytes);
    else if (tensor != x)
        memcpy(x, tensor, n_bytes);
}

static void check_all_reduce(struct rank *r, struct coll *c, const struct coll_group *g, uint32_t k,
                             float *x, float *tensor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = value(k, c->rank, i);
    upload(c, tensor, x, n * sizeof *x);
    CHECK(r, c->ops->all_reduce(c, g, COLL_SUM, ELEM_F32, tensor, n, &r->err) == 0);
    download(c, x, tensor, n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        CHECK(r, x[i] == plain_sum(k, g, i));
    double m[2] = {value(k, c->rank, 1), -(double)c->rank}, largest = -1e30;
    CHECK(r, c->ops->all_reduce_f64(c, g, COLL_MAX, m, 2, &r->err) == 0);
    for (uint32_t i = 0; i < g->n_ranks; i++)
        largest = value(k, g->ranks[i], 1) > largest ? value(k, g->ranks[i], 1) : largest;
    CHECK(r, m[0] == largest && m[1] == -(double)g->ranks[0]);
}

static void check_scatter_gather(struct rank *r, struct coll *c, const struct coll_group *g,
                                 uint32_t k, float *x, float *tensor, float *y, size_t n,
                                 size_t n_blocks)
{
    size_t whole = n * n_blocks * g->n_ranks * sizeof *x;
    for (size_t i = 0; i < n * n_blocks * g->n_ranks; i++)
        x[i] = value(k, c->rank, i);
    upload(c, tensor, x, whole);
    CHECK(r, c->ops->reduce_scatter(c, g, ELEM_F32, tensor, n, n_blocks, y, &r->err) == 0);
    for (size_t b = 0; b < n_blocks; b++)
        for (size_t i = 0; i < n; i++)
            CHECK(r, y[b * n + i] == plain_sum(k, g, (b * g->n_ranks + g->me) * n + i));
    for (size_t i = 0; i < n * n_blocks; i++)
        y[i] = value(k + 1, c->rank, i);
    CHECK(r, c->ops->all_gather(c, g, ELEM_F32, y, n, n_blocks, tensor, &r->err) == 0);
    download(c, x, tensor, whole);
    for (size_t b = 0; b < n_blocks; b++)
        for (uint32_t m = 0; m < g->n_ranks; m++)
            for (size_t i = 0; i < n; i++)
                CHECK(r, x[(b * g->n_ranks + m) * n + i] == value(k + 1, g->ranks[m], b * n + i));
}

/* Rows that rank a sends to rank b in call k. */
static int64_t n_rows(uint32_t k, uint32_t a, uint32_t b)
{
    uint32_t s = k * 31u + a * 17u + b * 5u + seed0;
    return next(&s) % 3 == 0 ? 0 : next(&s) % 40;
}

static void check_rows(struct rank *r, struct coll *c, const struct coll_group *g, uint32_t k,
                       float *x, float *tensor, float *y, size_t row_floats)
{
    int64_t send[WORLD_MAX], recv[WORLD_MAX];
    int32_t mine[WORLD_MAX], all[WORLD_MAX * WORLD_MAX];
    size_t n = 0;
    for (uint32_t m = 0; m < g->n_ranks; m++) {
        send[m] = n_rows(k, c->rank, g->ranks[m]);
        for (int64_t row = 0; row < send[m]; row++)
            for (size_t i = 0; i < row_floats; i++)
                x[n++] = value(k + g->ranks[m], c->rank, (size_t)row * row_floats + i);
    }
    for (uint32_t m = 0; m < g->n_ranks; m++)
        mine[m] = (int32_t)send[m];
    CHECK(r, c->ops->all_gather_i32(c, g, mine, g->n_ranks, all, &r->err) == 0);
    for (uint32_t m = 0; m < g->n_ranks; m++) {
        recv[m] = all[m * g->n_ranks + g->me];
        CHECK(r, recv[m] == n_rows(k, g->ranks[m], c->rank));
    }
    upload(c, tensor, x, n * sizeof *x);
    CHECK(r, c->ops->all_to_all_rows(c, g, tensor, send, y, recv, row_floats * sizeof *x,
                                     &r->err) == 0);
    n = 0;
    for (uint32_t m = 0; m < g->n_ranks; m++)
        for (int64_t row = 0; row < recv[m]; row++)
            for (size_t i = 0; i < row_floats; i++, n++)
                CHECK(r, y[n] == value(k + c->rank, g->ranks[m], (size_t)row * row_floats + i));
}

/* The groups that a rank of world is in: everybody, neighbours, every second, itself. */
static struct coll_group group_of(const struct coll *c, uint32_t which, uint32_t *ranks)
{
    struct coll_group g = {.ranks = ranks, .id = which};
    uint32_t stride = which == 2 ? 2 : 1, size = which == 0 ? c->world : which == 3 ? 1 : 2;
    uint32_t first = which == 0 ? 0 : which == 1 ? c->rank / 2 * 2 : which == 2 ? c->rank % 2
                                                                                : c->rank;
    for (uint32_t i = 0; i < size && first + i * stride < c->world; i++) {
        ranks[i] = first + i * stride;
        g.me = ranks[i] == c->rank ? i : g.me;
        g.n_ranks++;
    }
    if (which == 2) /* all of the same parity */
        for (uint32_t at = first + 2 * stride; at < c->world; at += 2) {
            g.me = at == c->rank ? g.n_ranks : g.me;
            ranks[g.n_ranks++] = at;
        }
    return g;
}

static void random_calls(struct rank *r, struct coll *c)
{
    enum { ROOM = 1u << 17 };
    uint32_t ranks[4][WORLD_MAX], s = seed0;
    struct coll_group groups[4];
    for (uint32_t i = 0; i < 4; i++)
        groups[i] = group_of(c, i, ranks[i]);
    float *travelling = c->ops->alloc(c, ROOM * sizeof(float));
    float *own = calloc(ROOM, sizeof *own), *out = calloc(ROOM, sizeof *out);
    for (uint32_t k = 0; k < 60; k++) {
        const struct coll_group *g = &groups[next(&s) % 4];
        float *tensor = next(&s) % 2 ? travelling : own;
        size_t n = next(&s) % 4 == 0 ? next(&s) % 20000 : next(&s) % 70, blocks = next(&s) % 4;
        CHECK(r, travelling != NULL);
        if (k % 3 == 0)
            check_all_reduce(r, c, g, k, own, tensor, n);
        else if (k % 3 == 1)
            check_scatter_gather(r, c, g, k, own, tensor, out, n % 4000, blocks);
        else
            check_rows(r, c, g, k, own, tensor, out, 1 + n % 65);
        CHECK(r, c->ops->barrier(c, &c->world_group, &r->err) == 0);
    }
    c->ops->free(c, travelling);
    free(own);
    free(out);
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
    CHECK(r, c->ops->all_gather(c, &c->world_group, ELEM_BF16, x, M, 1, y, &r->err) == 0);
    for (size_t i = 0; i < 3 * M; i++)
        CHECK(r, y[i] == bf16_of(rows[i % M % N][i / M]));
    CHECK(r, c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_BF16, x, M, &r->err) == 0);
    for (size_t i = 0; i < M; i++)
        CHECK(r, bf16_value(x[i]) == rows[i % N][3]);
    for (size_t i = 0; i < 3 * M; i++)
        y[i] = bf16_of(rows[i % N][c->rank]);
    CHECK(r, c->ops->reduce_scatter(c, &c->world_group, ELEM_BF16, y, M / 2, 2, x, &r->err) == 0);
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
    if (r->rc == 0 && c->rank != 1)
        r->rc = c->ops->barrier(c, &c->world_group, &r->err);
    else
        nanosleep(&(struct timespec){.tv_nsec = 900 * 1000 * 1000}, NULL);
    if (c->rank == 0)
        c->ops->trace(c, trace);
}

static void a_member_that_stays_away_is_named(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    uint64_t began = clock_now_ns();
    char *lines = NULL;
    size_t n = 0;
    trace = open_memstream(&lines, &n);
    run_ranks(ranks, 3, one_does_not_come, 300 * NS_PER_MS);
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

static void *abort_soon(void *arg)
{
    struct coll *c = arg;
    nanosleep(&(struct timespec){.tv_nsec = 100 * 1000 * 1000}, NULL);
    c->ops->abort(c);
    return NULL;
}

static void stopped_from_outside(struct rank *r, struct coll *c)
{
    pthread_t thread;
    if (c->rank == 1) { /* which never comes to the barrier */
        pthread_create(&thread, NULL, abort_soon, c);
        pthread_join(thread, NULL);
    }
    r->rc = c->ops->barrier(c, &c->world_group, &r->err);
    CHECK(r, c->ops->barrier(c, &c->world_group, NULL) == -ECANCELED);
}

static void an_abort_ends_everybodys_call(void **state)
{
    (void)state;
    struct rank ranks[WORLD_MAX];
    run_ranks(ranks, 4, stopped_from_outside, 0);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(ranks[i].rc, -ECANCELED);
        assert_non_null(strstr(ranks[i].err.text, "rank 1 was stopped"));
    }
}

/* A rank as a process: writes its result to a pipe. */
struct report {
    int rc;
    char text[1024];
};

static pid_t fork_rank(const uint8_t id[16], uint32_t rank, uint32_t world, int to)
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
    while (r.rc == 0)
        r.rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 1024, &r.err);
    report.rc = r.rc;
    snprintf(report.text, sizeof report.text, "%s", r.err.text);
    _exit(write(to, &report, sizeof report) == sizeof report ? 0 : 1);
}

static size_t count_files(const char *folder)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

/* What happens to the others when one gets a signal: all say the same within some seconds. */
static void after_signal(uint32_t victim, int signal_number, const char *says)
{
    enum { WORLD = 4 };
    uint8_t id[16];
    int pipes[2];
    pid_t pids[WORLD];
    size_t n_files = count_files("/dev/shm");
    make_id(id);
    assert_int_equal(pipe(pipes), 0);
    for (uint32_t i = 0; i < WORLD; i++)
        pids[i] = fork_rank(id, i, WORLD, pipes[1]);
    nanosleep(&(struct timespec){.tv_nsec = 200 * 1000 * 1000}, NULL);
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
    assert_int_equal(count_files("/dev/shm"), n_files);
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
    seed0 = getenv("SEED") ? (uint32_t)atoi(getenv("SEED")) : (uint32_t)time(NULL);
    printf("seed %u\n", seed0);
    static bool yes = true; /* in memory apart */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_group_and_size_gives_the_plain_sum),
        cmocka_unit_test_prestate(any_group_and_size_gives_the_plain_sum, &yes),
        cmocka_unit_test(bf16_is_summed_in_float32),
        cmocka_unit_test_prestate(bf16_is_summed_in_float32, &yes),
        cmocka_unit_test(a_member_that_stays_away_is_named),
        cmocka_unit_test(members_that_disagree_are_told),
        cmocka_unit_test(an_abort_ends_everybodys_call),
        cmocka_unit_test(the_death_of_a_member_ends_all),
        cmocka_unit_test(a_stopped_member_is_given_up),
        cmocka_unit_test(a_run_that_never_gathers_ends_in_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
