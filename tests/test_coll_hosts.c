/* test_coll_hosts.c - collectives of ranks on several hosts: threads that share memory with some of
 * the others only, and reach the rest through the network's loopback */
#include <math.h>
#include <pthread.h>
#include <signal.h>
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
#define N_PLACES (sizeof places / sizeof *places)

static struct {
    pthread_barrier_t meet;
    struct wire *wires[WORLD_MAX];
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
    if (r->rc == 0)
        run.peers[r->rank] = (struct wire_peer){wire_address(hosts.wire), wire_key(hosts.wire)};
    run.wires[r->rank] = hosts.wire;
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

int main(void)
{
    seed0 = getenv("SEED") ? (uint32_t)atoi(getenv("SEED")) : (uint32_t)time(NULL);
    printf("seed %u\n", seed0);
    static bool yes = true; /* in memory apart */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_group_and_size_gives_the_plain_sum),
        cmocka_unit_test_prestate(any_group_and_size_gives_the_plain_sum, &yes),
        cmocka_unit_test(what_was_started_ends_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
