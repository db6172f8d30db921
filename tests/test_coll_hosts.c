/* test_coll_hosts.c - collectives of ranks on several hosts: threads that share memory with some of
 * the others only, and reach the rest through the network's loopback */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <arpa/inet.h>
#include <netinet/in.h>

#include <zmq.h>

#include "common/bf16.h"
#include "common/clock.h"
#include "tests/coll_calls.h"
#include "tests/patience.h"
#include "worker/coll_wire.h"
#include "worker/coll_wire_frame.h"
#include "worker/coll_wire_parts.h"

/* Which host each rank is on. */
static const struct {
    const char *says;
    uint32_t world, hosts[WORLD_MAX];
} places[] = {
    { "two ranks apart",                        2, { 0, 1 } },
    { "three hosts of one rank",                3, { 0, 1, 2 } },
    { "two hosts of two",                       4, { 0, 0, 1, 1 } },
    { "hosts of different sizes",               4, { 0, 1, 1, 1 } },
    { "ranks of a host are not neighbours",     4, { 0, 1, 0, 1 } },
    { "a host that comes twice, one that ends", 5, { 0, 0, 1, 0, 2 } },
    { "four hosts of two",                      8, { 0, 0, 1, 1, 2, 2, 3, 3 } },
    { "three hosts in any order",               8, { 2, 0, 0, 1, 2, 1, 1, 0 } },
};
#ifdef PATIENCE_SANITIZED
#define N_PLACES 5u /* many times slower: what differs in kind */
#define MUCH     1u
#else
#define N_PLACES (sizeof places / sizeof *places)
#define MUCH     16u
#endif

static struct {
    pthread_barrier_t meet;
    uint16_t data_ports[WORLD_MAX];
    struct wire_peer peers[WORLD_MAX];
    const uint32_t *hosts;
    uint64_t open_timeout_ns;
} run;

static void *rank_main(void *arg)
{
    struct rank *r = arg;
    struct coll *c = NULL;
    struct device *dev = NULL;
    struct coll_hosts hosts = {.hosts = run.hosts, .peers = run.peers};
    struct coll_host_config config = {
        .id = r->id, .rank = r->rank, .world = r->world, .open_timeout_ns = run.open_timeout_ns,
        .stage_bytes = 4096, .call_timeout_ns = r->call_timeout_ns, .hosts = &hosts,
    };
    r->rc = wire_open("tcp://127.0.0.1:*", &hosts.wire, &r->err);
    if (r->rc == 0) {
        run.peers[r->rank] = (struct wire_peer){wire_address(hosts.wire), wire_key(hosts.wire)};
        run.data_ports[r->rank] = hosts.wire->door_port;
    }
    pthread_barrier_wait(&run.meet);
    if (r->rc == 0)
        r->rc = coll_host_open(&config, &c, &r->err);
    pthread_barrier_wait(&run.meet); /* others have copied the addresses */
    if (r->rc == 0 && r->is_apart && (r->rc = device_cpu_open(1, true, &dev, &r->err)) == 0) {
        dev->is_host = false;
        c->dev = dev;
    }
    if (r->rc == 0)
        r->body(r, c);
    if (r->rc < 0 && c)
        c->ops->abort(c);
    if (c)
        c->ops->close(c);
    if (dev)
        dev->ops->close(dev);
    return NULL;
}

static bool is_apart; /* of the next runs */

static void run_ranks(struct rank *ranks, size_t place, void (*body)(struct rank *, struct coll *),
                      uint64_t call_timeout_ns)
{
    pthread_t threads[WORLD_MAX];
    uint32_t world = places[place].world;
    uint8_t id[16];
    make_id(id);
    pthread_barrier_init(&run.meet, NULL, world);
    run.hosts = places[place].hosts;
    run.open_timeout_ns = run.open_timeout_ns ? run.open_timeout_ns : 30 * NS_PER_S;
    for (uint32_t i = 0; i < world; i++) {
        ranks[i] = (struct rank){.rank = i, .world = world, .body = body, .is_apart = is_apart,
                                 .call_timeout_ns = call_timeout_ns};
        memcpy(ranks[i].id, id, 16);
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&run.meet);
    run.open_timeout_ns = 0;
}

/* The first who complains is not one who was told to stop. */
static void all_are_well(const struct rank *ranks, size_t place)
{
    for (int told = 0; told < 2; told++)
        for (uint32_t i = 0; i < places[place].world; i++)
            if (ranks[i].rc != 0 && (told || ranks[i].rc != -ECANCELED))
                fail_msg("%s: rank %u seed %u: %s", places[place].says, i, seed0,
                         ranks[i].err.text);
}

static void any_group_and_size_gives_the_plain_sum(void **state)
{
    struct rank ranks[WORLD_MAX];
    is_apart = *state;
    for (size_t p = 0; p < N_PLACES; p++) {
        seed0++;
        run_ranks(ranks, p, random_calls, 60 * NS_PER_S);
        all_are_well(ranks, p);
    }
    is_apart = false;
}

static void what_was_started_ends_in_any_order(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    for (size_t p = 0; p < N_PLACES; p++) {
        seed0++;
        run_ranks(ranks, p, started_calls, 60 * NS_PER_S);
        all_are_well(ranks, p);
    }
}

/* ---- much ----------------------------------------------------------------------------------- */

/* Large enough for many windows, chunks and slots; values whose sum depends on the order. */
static void sum_much(struct rank *r, struct coll *c)
{
    enum { N = (MUCH << 20) + 3, STEP = 4099 };
    const struct coll_group *g = &c->world_group;
    float *x = c->ops->alloc(c, (size_t)N * sizeof *x);
    for (size_t i = 0; i < N; i++)
        x[i] = 1.0f + (float)c->rank * 0.1f;
    for (size_t i = 0; i < N; i += STEP)
        x[i] = value(5, c->rank, i);
    float same = 1.0f;
    for (uint32_t i = 1; i < c->world; i++)
        same += 1.0f + (float)i * 0.1f;
    CHECK(r, c->ops->all_reduce(c, g, COLL_SUM, ELEM_F32, x, N, &r->err) == 0);
    for (size_t i = 0; i < N; i++)
        CHECK(r, x[i] == (i % STEP ? same : plain_sum(5, g, i)));
}

static void gather_much(struct rank *r, struct coll *c)
{
    enum { N = (MUCH << 18) + 7, BLOCKS = 3 };
    const struct coll_group *g = &c->world_group;
    float *in = malloc((size_t)N * BLOCKS * sizeof *in);
    float *out = malloc((size_t)N * BLOCKS * g->n_ranks * sizeof *out);
    for (size_t i = 0; i < (size_t)N * BLOCKS; i++)
        in[i] = (float)(i % 8191) + 0.5f * (float)c->rank;
    CHECK(r, coll_all_gather(c, g, ELEM_F32, in, N, BLOCKS, out, &r->err) == 0);
    for (size_t b = 0; b < BLOCKS; b++)
        for (uint32_t m = 0; m < g->n_ranks; m++)
            for (size_t i = 0; i < N; i++)
                CHECK(r, out[(b * g->n_ranks + m) * N + i] ==
                             (float)((b * N + i) % 8191) + 0.5f * (float)m);
    free(in);
    free(out);
}

static void move_much(struct rank *r, struct coll *c)
{
    enum { ROW = 1024, ROWS = MUCH * 300 }; /* rank i sends j so many rows times i + j; odd none */
    const struct coll_group *g = &c->world_group;
    int64_t send[WORLD_MAX], recv[WORLD_MAX], n_out = 0, n_in = 0;
    for (uint32_t m = 0; m < g->n_ranks; m++) {
        send[m] = recv[m] = (c->rank + m) % 2 ? 0 : (int64_t)(c->rank + m) * ROWS;
        n_out += send[m];
        n_in += recv[m];
    }
    uint8_t *out = malloc((size_t)n_out * ROW + 1), *in = malloc((size_t)n_in * ROW + 1);
    for (uint32_t m = 0, at = 0; m < g->n_ranks; m++)
        for (int64_t k = 0; k < send[m]; k++, at++)
            memset(out + (size_t)at * ROW, (int)(c->rank * 31 + m * 7 + (uint32_t)k), ROW);
    CHECK(r, coll_all_to_all_rows(c, g, out, send, in, recv, ROW, &r->err) == 0);
    for (uint32_t m = 0, at = 0; m < g->n_ranks; m++)
        for (int64_t k = 0; k < recv[m]; k++, at++)
            CHECK(r, in[(size_t)at * ROW + ROW - 1] ==
                         (uint8_t)(m * 31 + c->rank * 7 + (uint32_t)k));
    free(out);
    free(in);
}

/* Several at once, larger than what waits unasked for; a call of all comes before any finish. */
static void move_beside(struct rank *r, struct coll *c)
{
    enum { ROW = 4096, ROWS = 512, CALLS = 3 };
    const struct coll_group *g = &c->world_group;
    const size_t n_bytes = (size_t)g->n_ranks * ROWS * ROW;
    int64_t rows[WORLD_MAX];
    uint8_t *out[CALLS], *in[CALLS];
    coll_ticket tickets[CALLS];
    for (uint32_t m = 0; m < g->n_ranks; m++)
        rows[m] = ROWS;
    for (uint32_t k = 0; k < CALLS; k++) {
        out[k] = c->ops->alloc(c, n_bytes);
        in[k] = c->ops->alloc(c, n_bytes);
        for (uint32_t m = 0; m < g->n_ranks; m++)
            memset(out[k] + (size_t)m * ROWS * ROW, (int)(c->rank * 31 + m * 7 + k), ROWS * ROW);
        CHECK(r, c->ops->start_all_to_all_rows(c, g, out[k], rows, in[k], rows, ROW, &tickets[k],
                                               &r->err) == 0);
        CHECK(r, tickets[k] != 0); /* it travels meanwhile */
    }
    CHECK(r, c->ops->barrier(c, g, &r->err) == 0);
    for (uint32_t i = 0; i < CALLS; i++) {
        uint32_t k = (c->rank + i) % CALLS; /* everybody in his own order */
        CHECK(r, c->ops->finish(c, tickets[k], &r->err) == 0);
        for (size_t at = 0; at < n_bytes; at += ROW / 2) {
            uint32_t m = (uint32_t)(at / (ROWS * ROW));
            CHECK(r, in[k][at] == (uint8_t)(m * 31 + c->rank * 7 + k));
        }
    }
    for (uint32_t k = 0; k < CALLS; k++) {
        CHECK(r, c->ops->reclaim(c, tickets[k], &r->err) == 0);
        memset(out[k], 0, n_bytes);
    }
    CHECK(r, c->ops->barrier(c, g, &r->err) == 0);
}

static void rows_travel_while_a_rank_computes(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    for (size_t p = 2; p <= 4; p++) {
        run_ranks(ranks, p, move_beside, 60 * NS_PER_S);
        all_are_well(ranks, p);
    }
}

/* ---- units ---------------------------------------------------------------------------------- */

/* Rank 0 has started all that it starts; it has finished all. */
static atomic_bool has_started, has_finished;

static void tell(atomic_bool *what)
{
    atomic_store(what, true);
}

static void wait_until_told(struct rank *r, const atomic_bool *what)
{
    uint64_t end = patience_end_ns(20);
    while (!atomic_load(what) && clock_now_ns() < end)
        usleep(200);
    CHECK(r, atomic_load(what));
}

struct unit {
    float *slice, *whole, *gradient, *sum;
    size_t n;
    coll_ticket gather, scatter;
};

static void start_unit(struct rank *r, struct coll *c, struct unit *u, uint32_t k)
{
    const struct coll_group *g = &c->world_group;
    u->n = ((size_t)1 << 20) / g->n_ranks + k; /* more than a window, and many chunks */
    u->slice = c->ops->alloc(c, u->n * sizeof(float));
    u->whole = c->ops->alloc(c, u->n * g->n_ranks * sizeof(float));
    u->gradient = c->ops->alloc(c, u->n * g->n_ranks * sizeof(float));
    u->sum = c->ops->alloc(c, u->n * sizeof(float));
    for (size_t i = 0; i < u->n; i++)
        u->slice[i] = value(k, c->rank, i);
    for (size_t i = 0; i < u->n * g->n_ranks; i++)
        u->gradient[i] = value(k + 100, c->rank, i);
    c->layer = (int32_t)k;
    CHECK(r, c->ops->start_all_gather(c, g, ELEM_F32, u->slice, u->n, 1, u->whole, &u->gather,
                                      &r->err) == 0);
    CHECK(r, c->ops->start_reduce_scatter(c, g, ELEM_F32, u->gradient, u->n, 1, u->sum,
                                          &u->scatter, &r->err) == 0);
}

static void finish_unit(struct rank *r, struct coll *c, struct unit *u, uint32_t k)
{
    const struct coll_group *g = &c->world_group;
    CHECK(r, c->ops->finish(c, u->scatter, &r->err) == 0);
    CHECK(r, c->ops->finish(c, u->gather, &r->err) == 0);
    for (size_t i = 0; i < u->n && r->rc == 0; i++)
        CHECK(r, u->sum[i] == plain_sum(k + 100, g, g->me * u->n + i));
    for (size_t i = 0; i < u->n * g->n_ranks && r->rc == 0; i++)
        CHECK(r, u->whole[i] == value(k, g->ranks[i / u->n], i % u->n));
    CHECK(r, c->ops->reclaim(c, u->gather, &r->err) == 0);
    CHECK(r, c->ops->reclaim(c, u->scatter, &r->err) == 0);
}

/* No start waits for one of another rank, and no finish for one that computes. */
static void gather_beside(struct rank *r, struct coll *c)
{
    enum { UNITS = 3 };
    uint32_t ranks[WORLD_MAX];
    struct coll_group beside = group_of(c, 1, ranks);
    struct unit units[UNITS];
    double word = 1;
    if (c->rank != 0)
        wait_until_told(r, &has_started);
    for (uint32_t k = 0; k < UNITS; k++)
        start_unit(r, c, &units[k], k);
    if (c->rank == 0)
        tell(&has_started);
    CHECK(r, c->ops->barrier(c, &beside, &r->err) == 0); /* those that share a host meet there */
    if (c->rank != 0)
        wait_until_told(r, &has_finished);
    for (uint32_t k = UNITS; k-- > 0;)
        finish_unit(r, c, &units[k], k);
    if (c->rank == 0)
        tell(&has_finished);
    CHECK(r, c->ops->all_reduce_f64(c, &c->world_group, COLL_SUM, &word, 1, &r->err) == 0);
    CHECK(r, word == c->world);
}

static void units_travel_while_a_rank_computes(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    for (size_t p = 2; p <= 4; p++) {
        has_started = has_finished = false;
        run_ranks(ranks, p, gather_beside, 60 * NS_PER_S);
        all_are_well(ranks, p);
    }
}

static void what_is_large_comes_in_pieces(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    run_ranks(ranks, 2, sum_much, 60 * NS_PER_S);
    all_are_well(ranks, 2);
    run_ranks(ranks, 4, gather_much, 60 * NS_PER_S);
    all_are_well(ranks, 4);
    run_ranks(ranks, 3, move_much, 60 * NS_PER_S);
    all_are_well(ranks, 3);
}

/* Sums that are lost where each step, or each host, is rounded: 256 + 1 would stay 256. */
static void sum_bf16(struct rank *r, struct coll *c)
{
    enum { M = 9000 };
    static _Thread_local uint16_t x[M], y[4 * M];
    for (size_t i = 0; i < 4 * M; i++)
        y[i] = bf16_of(c->rank == 0 ? 256 : 0.5f);
    memcpy(x, y, sizeof x);
    CHECK(r, c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_BF16, x, M, &r->err) == 0);
    for (size_t i = 0; i < M; i++)
        CHECK(r, bf16_value(x[i]) == bf16_value(bf16_of(257.5f)));
    CHECK(r, coll_reduce_scatter(c, &c->world_group, ELEM_BF16, y, M / 2, 2, x, &r->err) == 0);
    for (size_t i = 0; i < M; i++)
        CHECK(r, bf16_value(x[i]) == bf16_value(bf16_of(257.5f)));
}

static void bf16_is_rounded_once(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    for (size_t p = 2; p <= 4; p++) {
        run_ranks(ranks, p, sum_bf16, 30 * NS_PER_S);
        all_are_well(ranks, p);
    }
}

/* ---- what goes wrong ------------------------------------------------------------------------ */

static FILE *trace;

static void one_does_not_come(struct rank *r, struct coll *c)
{
    float x[4] = {0};
    c->layer = 7;
    r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 4, &r->err);
    c->ops->set_patience(c, 300 * NS_PER_MS, 0);
    if (r->rc == 0 && c->rank != 3)
        r->rc = c->ops->barrier(c, &c->world_group, &r->err);
    if (c->rank == 0)
        c->ops->trace(c, trace);
    if (c->rank == 3)
        stay_away(3);
    else
        atomic_fetch_add(&n_gave_up, 1);
}

static void a_member_that_stays_away_is_named(void **state)
{
    struct rank ranks[WORLD_MAX];
    char *lines = NULL;
    size_t n = 0, n_named = 0;
    (void)state;
    trace = open_memstream(&lines, &n);
    atomic_store(&n_gave_up, 0);
    run_ranks(ranks, 2, one_does_not_come, 60 * NS_PER_S);
    fclose(trace);
    assert_non_null(strstr(lines, "rank=0 op=barrier number="));
    assert_non_null(strstr(lines, "rank=3 op=all_reduce number="));
    free(lines);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(ranks[i].rc < 0);
        n_named += strstr(ranks[i].err.text, "rank 3 computing after all_reduce") != NULL;
    }
    if (n_named == 0)
        fail_msg("rank 3 is not named: %s", ranks[0].err.text);
}

/* The others are told by whoever waits first: in the call itself or in one that comes after. */
static void one_does_not_start(struct rank *r, struct coll *c)
{
    float *x = c->ops->alloc(c, 4 * 60000 * sizeof *x);
    coll_ticket t = 0;
    if (c->rank == 3) {
        wait_until_told(r, &has_finished);
        return;
    }
    r->rc = c->ops->start_all_gather(c, &c->world_group, ELEM_F32, x, 15000, 1, x + 60000, &t,
                                     &r->err);
    CHECK(r, r->rc == 0 && t != 0);
    r->rc = c->rank == 0 ? c->ops->barrier(c, &c->world_group, &r->err)
                         : c->ops->finish(c, t, &r->err);
    if (c->rank == 0)
        tell(&has_finished);
}

static void one_leaves_what_it_started(struct rank *r, struct coll *c)
{
    float *x = c->ops->alloc(c, 4 * 60000 * sizeof *x);
    uint32_t ranks[WORLD_MAX];
    struct coll_group alone = group_of(c, 3, ranks);
    coll_ticket t = 0;
    if (c->rank == 3)
        r->rc = c->ops->start_all_gather(c, &c->world_group, ELEM_F32, x, 15000, 1, x + 60000, &t,
                                         &r->err);
    while (c->rank != 3 && r->rc == 0 && usleep(1000) == 0)
        r->rc = c->ops->barrier(c, &alone, &r->err); /* until they are told */
}

static void what_is_started_and_not_met_ends_all(void **state)
{
    static const struct {
        void (*body)(struct rank *, struct coll *);
        uint64_t timeout_ns;
        const char *says;
    } rows[] = {
        { one_does_not_start, 300 * NS_PER_MS, "rank 3 computing after barrier 1" },
        { one_leaves_what_it_started, 20 * NS_PER_S, "rank 3 has left in the midst of a call" },
    };
    (void)state;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        for (size_t p = 2; p <= 3; p++) {
            struct rank ranks[WORLD_MAX];
            has_finished = false;
            run_ranks(ranks, p, rows[k].body, rows[k].timeout_ns);
            for (uint32_t i = 0; i < 3; i++)
                if (ranks[i].rc >= 0 || !strstr(ranks[i].err.text, rows[k].says))
                    fail_msg("rank %u, expected '%s' in: %d %s", i, rows[k].says, ranks[i].rc,
                             ranks[i].err.text);
        }
}

static void different_counts(struct rank *r, struct coll *c)
{
    static _Thread_local float x[60000];
    r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x,
                               c->rank == 3 ? 50000 : 6, &r->err);
}

static void different_calls(struct rank *r, struct coll *c)
{
    float x[8] = {0};
    r->rc = c->rank < 2 ? c->ops->barrier(c, &c->world_group, &r->err)
                        : c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 8, &r->err);
}

static void different_starts(struct rank *r, struct coll *c)
{
    float *x = c->ops->alloc(c, 4 * 60000 * sizeof *x);
    coll_ticket t = 0;
    r->rc = c->ops->start_reduce_scatter(c, &c->world_group, ELEM_F32, x,
                                         c->rank == 3 ? 50000 : 6, 1, x, &t, &r->err);
    if (r->rc == 0)
        r->rc = c->ops->finish(c, t, &r->err);
}

static void different_rows(struct rank *r, struct coll *c)
{
    int64_t send[4] = {1, 1, 1, 1}, recv[4] = {1, 1, 1, 1};
    static _Thread_local uint8_t in[64], out[64];
    recv[0] = c->rank == 3 ? 2 : 1;
    r->rc = coll_all_to_all_rows(c, &c->world_group, out, send, in, recv, 8, &r->err);
}

static void members_that_disagree_are_told(void **state)
{
    static const struct {
        void (*body)(struct rank *, struct coll *);
        const char *says;
    } rows[] = {
        { different_counts, "ranks disagree in group 0" },
        { different_calls, "ranks disagree in group 0" },
        { different_starts, "ranks disagree in group 0" },
        { different_rows, "rank 0 sends 1 rows to rank 3, which expects 2" },
    };
    (void)state;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        for (size_t p = 2; p <= 3; p++) {
            struct rank ranks[WORLD_MAX];
            run_ranks(ranks, p, rows[k].body, 20 * NS_PER_S);
            for (uint32_t i = 0; i < 4; i++) {
                if (ranks[i].rc != -EPROTO && ranks[i].rc != -ECANCELED)
                    fail_msg("rank %u: %d %s", i, ranks[i].rc, ranks[i].err.text);
                if (!strstr(ranks[i].err.text, rows[k].says))
                    fail_msg("expected '%s' in: %s", rows[k].says, ranks[i].err.text);
            }
        }
}

static void an_abort_ends_everybodys_call(void **state)
{
    (void)state;
    for (size_t p = 2; p <= 4; p++) {
        struct rank ranks[WORLD_MAX];
        run_ranks(ranks, p, stopped_from_outside, 0);
        for (uint32_t i = 0; i < 4; i++)
            was_stopped(&ranks[i]);
    }
}

/* ---- somebody in the middle ------------------------------------------------------------------ */

/* This process has all ends: the one of the link from rank 0 to the other. */
static int link_to(uint16_t port)
{
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_in6 to = {0}; /* whose port is where IPv4 has it */
        socklen_t n = sizeof to;
        if (getpeername(fd, (struct sockaddr *)&to, &n) == 0 &&
            (to.sin6_family == AF_INET || to.sin6_family == AF_INET6) &&
            ntohs(to.sin6_port) == port)
            return fd;
    }
    return -1;
}

static bool is_cut; /* else something is put in */

static void meddle(struct rank *r, struct coll *c)
{
    uint8_t junk[100] = {1, 2, 3};
    r->rc = c->ops->barrier(c, &c->world_group, &r->err);
    if (r->rc == 0 && c->rank == 0) {
        int fd = link_to(run.data_ports[1]);
        CHECK(r, fd >= 0);
        CHECK(r, is_cut ? shutdown(fd, SHUT_RDWR) == 0
                        : send(fd, junk, sizeof junk, MSG_NOSIGNAL) == sizeof junk);
    }
    for (int i = 0; i < 1000 && r->rc == 0; i++)
        r->rc = c->ops->barrier(c, &c->world_group, &r->err);
}

static void who_meddles_ends_all_with_a_line(void **state)
{
    static const char *const says[] = {"what comes from rank 0 was changed on its way",
                                       "rank 0 has died"};
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct rank ranks[WORLD_MAX];
        is_cut = k == 1;
        run_ranks(ranks, 0, meddle, 20 * NS_PER_S);
        for (uint32_t i = 0; i < 2; i++)
            if (ranks[i].rc != -ECANCELED)
                fail_msg("rank %u: %d %s", i, ranks[i].rc, ranks[i].err.text);
        if (!strstr(ranks[1].err.text, says[k]) && !strstr(ranks[1].err.text, "rank 1 has died"))
            fail_msg("expected '%s' in: %s", says[k], ranks[1].err.text);
        if (!is_cut && !strstr(ranks[0].err.text, says[0]))
            fail_msg("expected '%s' in: %s", says[0], ranks[0].err.text);
    }
}

/* ---- ranks as processes --------------------------------------------------------------------- */

struct board {
    _Atomic uint32_t n_told, n_steps;
    char    addresses[4][WIRE_ADDRESS_BYTES];
    uint8_t keys[4][WIRE_KEY_BYTES];
    uint16_t data_ports[4];
    int     log; /* where ranks write what they refuse; 0: as ever */
    int     rc[4];
    char    text[4][1024];
};

static const uint32_t two_hosts[] = {0, 0, 1, 1};

static void work_for_ever(struct board *b, const uint8_t *id, uint32_t rank)
{
    struct wire_peer peers[4];
    struct coll_hosts hosts = {.hosts = two_hosts, .peers = peers};
    struct coll_host_config config = {.id = id, .rank = rank, .world = 4, .hosts = &hosts,
                                      .open_timeout_ns = 30 * NS_PER_S,
                                      .call_timeout_ns = 60 * NS_PER_S};
    struct coll *c = NULL;
    struct err err = {0};
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* not beyond the test */
    int rc = wire_open("tcp://127.0.0.1:*", &hosts.wire, &err);
    if (rc == 0) {
        strcpy(b->addresses[rank], wire_address(hosts.wire));
        memcpy(b->keys[rank], wire_key(hosts.wire), WIRE_KEY_BYTES);
        b->data_ports[rank] = hosts.wire->door_port;
    }
    if (b->log > 0)
        dup2(b->log, 2);
    atomic_fetch_add(&b->n_told, 1);
    while (atomic_load(&b->n_told) < 4)
        usleep(1000);
    for (uint32_t r = 0; r < 4; r++)
        peers[r] = (struct wire_peer){b->addresses[r], b->keys[r]};
    if (rc == 0)
        rc = coll_host_open(&config, &c, &err);
    float *x = rc == 0 ? c->ops->alloc(c, 400000) : NULL;
    while (rc == 0) {
        rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 100000, &err);
        atomic_fetch_add(&b->n_steps, 1);
    }
    b->rc[rank] = rc;
    snprintf(b->text[rank], sizeof b->text[rank], "%s", err.text);
    _exit(0);
}

static pid_t *fork_ranks(struct board *b)
{
    static pid_t pids[4];
    uint8_t id[16];
    make_id(id);
    for (uint32_t r = 0; r < 4; r++)
        if ((pids[r] = fork()) == 0)
            work_for_ever(b, id, r);
    uint64_t end = patience_end_ns(5);
    while (atomic_load(&b->n_steps) < 20 && clock_now_ns() < end)
        usleep(1000);
    return pids;
}

static struct board *new_board(void)
{
    return mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                0);
}

static void the_death_of_a_member_ends_all(void **state)
{
    (void)state;
    for (uint32_t victim = 1; victim < 4; victim++) { /* one beside a leader, a leader, the last */
        struct board *b = new_board();
        pid_t *pids = fork_ranks(b);
        char expected[32];
        uint64_t began = clock_now_ns();
        kill(pids[victim], SIGKILL);
        for (uint32_t r = 0; r < 4; r++)
            waitpid(pids[r], NULL, 0);
        assert_true(was_soon(began, 5));
        snprintf(expected, sizeof expected, "rank %u has died", victim);
        for (uint32_t r = 0; r < 4; r++)
            if (r != victim && (b->rc[r] != -ECANCELED || !strstr(b->text[r], expected)))
                fail_msg("rank %u, expected '%s' in: %d %s", r, expected, b->rc[r], b->text[r]);
        munmap(b, sizeof *b);
    }
}

/* ---- strangers ------------------------------------------------------------------------------ */

static uint16_t port_of(const char *address)
{
    return (uint16_t)atoi(strrchr(address, ':') + 1);
}

static int connect_plain(uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

/* Bytes that begin like ZeroMQ's greeting, and go on as they please. */
static void send_garbage(uint16_t port, uint32_t *s)
{
    static const uint8_t greeting[] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1, 'C', 'U', 'R', 'V',
                                       'E'};
    uint8_t bytes[600];
    int fd = connect_plain(port);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)next(s);
    memcpy(bytes, greeting, next(s) % (sizeof greeting + 1));
    if (next(s) % 2)
        memset(bytes + 17, 0, 47); /* a whole greeting; then frames of any kind and length */
    for (size_t at = 0, n; at < sizeof bytes; at += n) {
        n = 1 + next(s) % 200;
        n = n < sizeof bytes - at ? n : sizeof bytes - at;
        if (send(fd, bytes + at, n, MSG_NOSIGNAL) < 0)
            break;
    }
    close(fd);
}

/* As if it were a rank that begins its link: one that has it already, this one, or none. */
static void greet_falsely(uint16_t port, uint32_t rank, uint32_t *s)
{
    struct greeting g = {.magic = GREETING_MAGIC, .rank = rank};
    char byte;
    int fd = connect_plain(port);
    for (size_t i = 0; i < sizeof g.hello; i++)
        g.hello[i] = (uint8_t)next(s);
    assert_int_equal(send(fd, &g, sizeof g, MSG_NOSIGNAL), sizeof g);
    assert_true(recv(fd, &byte, 1, 0) <= 0); /* it is shown out */
    close(fd);
}

/* What ranks have said of those. */
static void was_refused(FILE *log)
{
    static const char *const says[] = {
        "a connection is refused: that is no greeting",
        "a connection is refused: its rank is here already",
    };
    static char text[1 << 16];
    rewind(log);
    assert_true(fread(text, 1, sizeof text - 1, log) > 0);
    for (size_t i = 0; i < sizeof says / sizeof *says; i++)
        if (!strstr(text, says[i]))
            fail_msg("expected '%s' in: %s", says[i], text);
}

/* Speaks ZeroMQ: with no keys, with keys of its own, or with the wrong key of the other side. */
static void *stranger(void *context, const struct board *b, uint32_t kind)
{
    char public_key[41], secret_key[41];
    void *s = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(s, ZMQ_LINGER, &(int){0}, sizeof(int));
    assert_int_equal(zmq_curve_keypair(public_key, secret_key), 0);
    if (kind > 0) {
        zmq_setsockopt(s, ZMQ_CURVE_PUBLICKEY, public_key, 41);
        zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, secret_key, 41);
        zmq_setsockopt(s, ZMQ_CURVE_SERVERKEY, b->keys[kind == 1 ? 0 : 1], WIRE_KEY_BYTES);
    }
    assert_int_equal(zmq_connect(s, b->addresses[0]), 0);
    for (int i = 0; i < 20; i++) {
        uint32_t head[10] = {0x42570003, 0}; /* as if it were a rank that aborts */
        zmq_send(s, head, 32, ZMQ_SNDMORE | ZMQ_DONTWAIT);
        zmq_send(s, "all must end", 12, ZMQ_DONTWAIT);
    }
    return s;
}

static void strangers_change_nothing(void **state)
{
    enum { HELD = 300 };
    struct board *b = new_board();
    FILE *log = tmpfile();
    b->log = fileno(log);
    pid_t *pids = fork_ranks(b);
    void *context = zmq_ctx_new(), *sockets[3];
    uint32_t s = seed0;
    int held[HELD]; /* they say nothing at all */
    (void)state;
    greet_falsely(b->data_ports[0], 2, &s);
    greet_falsely(b->data_ports[0], 0, &s);
    greet_falsely(b->data_ports[3], 1000, &s);
    for (uint32_t i = 0; i < HELD; i++)
        held[i] = connect_plain(i == 0 ? port_of(b->addresses[0]) : b->data_ports[0]);
    for (uint32_t kind = 0; kind < 3; kind++)
        sockets[kind] = stranger(context, b, kind);
    for (int i = 0; i < 200; i++)
        send_garbage(i % 2 ? port_of(b->addresses[i / 2 % 4]) : b->data_ports[i / 2 % 4], &s);
    uint32_t before = atomic_load(&b->n_steps);
    uint64_t end = patience_end_ns(5);
    while (atomic_load(&b->n_steps) < before + 200 && clock_now_ns() < end)
        usleep(1000);
    for (uint32_t r = 0; r < 4; r++)
        if (b->rc[r] != 0)
            fail_msg("rank %u: %s", r, b->text[r]);
    assert_true(atomic_load(&b->n_steps) >= before + 200);
    for (uint32_t kind = 0; kind < 3; kind++)
        zmq_close(sockets[kind]);
    zmq_ctx_term(context);
    for (uint32_t i = 0; i < HELD; i++)
        close(held[i]);
    for (uint32_t r = 0; r < 4; r++)
        kill(pids[r], SIGKILL);
    for (uint32_t r = 0; r < 4; r++)
        waitpid(pids[r], NULL, 0);
    was_refused(log);
    fclose(log);
    munmap(b, sizeof *b);
}

static void an_address_is_one_that_others_reach(void **state)
{
    static const struct {
        const char *address, *says; /* NULL: it is fine */
    } rows[] = {
        { "tcp://127.0.0.1:*", NULL },
        { "tcp://10.0.0.7:5555", NULL },
        { "tcp://[::1]:*", NULL },
        { "ipc:///tmp/x", "expected tcp://IP:*" },
        { "tcp://10.0.0.7", "expected tcp://IP:*" },
        { "tcp://node7:*", "is no number of an address" },
        { "tcp://0.0.0.0:*", "must be able to reach it" },
        { "tcp://[::]:5", "must be able to reach it" },
        { "tcp://10.0.0.7:0", "expected a port" },
        { "tcp://10.0.0.7:70000", "expected a port" },
        { "tcp://10.0.0.7:65535", "expected a port" },
        { "tcp://10.0.0.7:55x", "expected a port" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct err err = {0};
        int rc = wire_address_check(rows[i].address, &err);
        assert_int_equal(rc, rows[i].says ? -EINVAL : 0);
        if (rows[i].says && !strstr(err.text, rows[i].says))
            fail_msg("expected '%s' in: %s", rows[i].says, err.text);
    }
    assert_true(wire_is_loopback("tcp://127.3.0.1:5") && wire_is_loopback("tcp://[::1]:5"));
    assert_false(wire_is_loopback("tcp://10.0.0.7:5"));
}

int main(void)
{
    seed0 = (uint32_t)test_seed();
    static bool yes = true; /* in memory apart */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_group_and_size_gives_the_plain_sum),
        cmocka_unit_test_prestate(any_group_and_size_gives_the_plain_sum, &yes),
        cmocka_unit_test(what_was_started_ends_in_any_order),
        cmocka_unit_test(what_is_large_comes_in_pieces),
        cmocka_unit_test(rows_travel_while_a_rank_computes),
        cmocka_unit_test(units_travel_while_a_rank_computes),
        cmocka_unit_test(bf16_is_rounded_once),
        cmocka_unit_test(a_member_that_stays_away_is_named),
        cmocka_unit_test(what_is_started_and_not_met_ends_all),
        cmocka_unit_test(members_that_disagree_are_told),
        cmocka_unit_test(an_abort_ends_everybodys_call),
        cmocka_unit_test(who_meddles_ends_all_with_a_line),
        cmocka_unit_test(the_death_of_a_member_ends_all),
        cmocka_unit_test(strangers_change_nothing),
        cmocka_unit_test(an_address_is_one_that_others_reach),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
