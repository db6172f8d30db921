/* test_coll_nccl.c - collectives through NCCL, which is played by fake_nccl: what calls ask of it,
 * sums in rank order, aborts, errors */
#include <pthread.h>

#include "tests/coll_calls.h"
#include "tests/fake_nccl.h"
#include "worker/coll_gpu.h"

static bool is_deterministic; /* of the devices of the next runs */
static bool registers_memory; /* the next runs' collectives */

static int open_nccl(struct rank *r, struct device *dev, struct coll **io)
{
    static _Thread_local uint32_t ranks[4][WORLD_MAX];
    struct coll_group groups[3];
    uint32_t n_groups = r->world == 3 ? 0 : 3; /* which would not be equal in size */
    for (uint32_t i = 0; i < n_groups; i++)
        groups[i] = group_of(*io, i + 1, ranks[i + 1]);
    return coll_gpu_open(*io, dev, groups, n_groups, io, &r->err);
}

static void *rank_main(void *arg)
{
    struct rank *r = arg;
    struct coll *c = NULL;
    struct device *dev = NULL;
    struct coll_host_config config = {
        .id = r->id, .rank = r->rank, .world = r->world, .open_timeout_ns = 10 * NS_PER_S,
        .call_timeout_ns = r->call_timeout_ns, .stopped_timeout_ns = NS_PER_S,
    };
    if ((r->rc = device_cpu_open(1, is_deterministic, &dev, &r->err)) == 0) {
        dev->is_host = false;
        r->rc = coll_host_open(&config, &c, &r->err);
    }
    if (r->rc == 0)
        r->rc = open_nccl(r, dev, &c);
    if (r->rc == 0) {
        c->registers_memory = registers_memory;
        r->body(r, c);
    }
    if (c)
        c->ops->close(c);
    if (dev)
        dev->ops->close(dev);
    return NULL;
}

static void run_ranks(struct rank *ranks, uint32_t world,
                      void (*body)(struct rank *, struct coll *), uint64_t call_timeout_ns)
{
    pthread_t threads[WORLD_MAX];
    uint8_t id[16];
    make_id(id);
    for (uint32_t i = 0; i < world; i++) {
        ranks[i] = (struct rank){.rank = i, .world = world, .body = body,
                                 .call_timeout_ns = call_timeout_ns};
        memcpy(ranks[i].id, id, 16);
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++)
        pthread_join(threads[i], NULL);
}

static void all_are_well(const struct rank *ranks, uint32_t world)
{
    for (uint32_t i = 0; i < world; i++)
        if (ranks[i].rc != 0)
            fail_msg("world %u rank %u seed %u: %s", world, i, seed0, ranks[i].err.text);
}

static void any_group_and_size_gives_the_plain_sum(void **state)
{
    static const uint32_t worlds[] = {1, 2, 4, 8};
    is_deterministic = *state != NULL;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        struct rank ranks[WORLD_MAX];
        seed0 += (uint32_t)w;
        run_ranks(ranks, worlds[w], random_calls, 30 * NS_PER_S);
        all_are_well(ranks, worlds[w]);
    }
    is_deterministic = false;
}

static void what_was_started_ends_in_any_order(void **state)
{
    is_deterministic = *state != NULL;
    for (uint32_t world = 1; world <= WORLD_MAX; world *= 2) {
        struct rank ranks[WORLD_MAX];
        seed0++;
        run_ranks(ranks, world, started_calls, 30 * NS_PER_S);
        all_are_well(ranks, world);
    }
    is_deterministic = false;
}

/* More than the scratch of ordered sums holds at once. */
static void sum_much(struct rank *r, struct coll *c)
{
    const size_t n = 9000001;
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(i % 1000) + (float)c->rank;
    CHECK(r, c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, n, &r->err) == 0);
    for (size_t i = 0; i < n; i++)
        CHECK(r, x[i] == 2 * (float)(i % 1000) + 1);
    CHECK(r, c->ops->all_reduce(c, &c->world_group, COLL_MAX, ELEM_F32, x, 10, &r->err) == 0);
    free(x);
}

static void ordered_sums_come_in_pieces(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    is_deterministic = true;
    run_ranks(ranks, 2, sum_much, 60 * NS_PER_S);
    all_are_well(ranks, 2);
    is_deterministic = false;
}

/* ---- what goes wrong ------------------------------------------------------------------------ */

static void stopped_in_a_gather(struct rank *r, struct coll *c)
{
    pthread_t thread;
    float x[4] = {0};
    c->layer = 7;
    if (c->rank == 1) { /* which never comes to the sum */
        pthread_create(&thread, NULL, abort_soon, c);
        pthread_join(thread, NULL);
    } else {
        r->rc = coll_all_gather(c, &c->world_group, ELEM_F32, x, 1, 1, x, &r->err);
    }
    CHECK(r, c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 4, NULL) == -ECANCELED);
    CHECK(r, c->ops->barrier(c, &c->world_group, NULL) == -ECANCELED);
}

static void an_abort_ends_everybodys_call(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    run_ranks(ranks, 3, stopped_in_a_gather, 0);
    for (uint32_t i = 0; i < 3; i++)
        if (i != 1)
            was_stopped(&ranks[i]);
}

static void one_leaves(struct rank *r, struct coll *c)
{
    float x[4] = {0};
    if (c->rank != 1)
        r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 4, &r->err);
}

static void a_member_that_leaves_is_named(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    run_ranks(ranks, 3, one_leaves, 300 * NS_PER_MS);
    for (uint32_t i = 0; i < 3; i += 2) {
        assert_true(ranks[i].rc < 0);
        if (!strstr(ranks[i].err.text, "at all_reduce ") || !strstr(ranks[i].err.text, "rank 1"))
            fail_msg("rank %u: %s", i, ranks[i].err.text);
    }
}

static void one_breaks(struct rank *r, struct coll *c)
{
    float x[4] = {0};
    CHECK(r, c->ops->barrier(c, &c->world_group, &r->err) == 0);
    if (c->rank == 2)
        fake_nccl_break(2);
    for (int k = 0; k < 100 && r->rc == 0; k++) {
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
        r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, 4, &r->err);
    }
}

static void an_error_of_nccl_ends_everybodys_call(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    run_ranks(ranks, 4, one_breaks, 10 * NS_PER_S);
    fake_nccl_break(-1);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(ranks[i].rc, -ECANCELED);
        assert_non_null(strstr(ranks[i].err.text, "rank 2: NCCL: "));
        assert_non_null(strstr(ranks[i].err.text, "a remote rank failed"));
    }
}

/* ---- memory that NCCL is told of ------------------------------------------------------------ */

/* Three pieces, of which one is given back before the end, as are pieces that NCCL never knew. */
static void use_memory(struct rank *r, struct coll *c)
{
    float *a = c->ops->alloc(c, sizeof *a), *b = c->ops->alloc(c, WORLD_MAX * sizeof *b);
    float one = 1.0f + (float)c->rank, all[WORLD_MAX];
    c->dev->ops->to_device(c->dev, a, &one, sizeof one);
    r->rc = coll_all_gather(c, &c->world_group, ELEM_F32, a, 1, 1, b, &r->err);
    c->dev->ops->to_host(c->dev, all, b, c->world * sizeof *b);
    for (uint32_t i = 0; i < c->world; i++)
        CHECK(r, all[i] == 1.0f + (float)i);
    c->ops->free(c, a);
    CHECK(r, c->ops->alloc(c, 100) != NULL);
    c->registers_memory = false;
    a = c->ops->alloc(c, sizeof *a);
    c->ops->free(c, a);
}

/* With the communicators of all ranks and, of four or more, of halves and the like. */
static void all_that_is_registered_is_given_back(void **state)
{
    (void)state;
    for (uint32_t world = 1; world <= WORLD_MAX; world *= 2)
        for (int does = 0; does < 2; does++) {
            struct rank ranks[WORLD_MAX];
            registers_memory = does;
            run_ranks(ranks, world, use_memory, 30 * NS_PER_S);
            all_are_well(ranks, world);
            struct fake_nccl_memory m = fake_nccl_memory();
            assert_true(does ? m.n_registered >= 3 * (int)world : m.n_registered == 0);
            assert_true(world < 4 || !does || m.n_registered > 3 * (int)world);
            assert_int_equal(m.n_deregistered, m.n_registered);
            assert_int_equal(m.n_aborted, 0);
        }
    registers_memory = false;
}

static void stopped_with_memory(struct rank *r, struct coll *c)
{
    float *a = c->ops->alloc(c, 4 * sizeof *a), *b = c->ops->alloc(c, 4 * sizeof *b);
    CHECK(r, c->ops->barrier(c, &c->world_group, &r->err) == 0);
    c->ops->free(c, a);
    if (c->rank == 1)
        c->ops->abort(c);
    else
        r->rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, b, 4, &r->err);
    c->ops->free(c, b);
    CHECK(r, c->ops->alloc(c, 8) != NULL);
}

/* What a communicator knows when it is aborted goes with it: nobody gives it back afterwards, or
 * while something may hang in it. */
static void what_is_registered_ends_with_an_aborted_one(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    registers_memory = true;
    run_ranks(ranks, 3, stopped_with_memory, 0);
    registers_memory = false;
    struct fake_nccl_memory m = fake_nccl_memory();
    assert_true(m.n_registered >= 6 && m.n_deregistered >= 3);
    assert_int_equal(m.n_deregistered + m.n_aborted, m.n_registered);
    assert_int_equal(ranks[0].rc, -ECANCELED);
    assert_int_equal(ranks[2].rc, -ECANCELED);
}

static void a_library_that_refuses_is_no_obstacle(void **state)
{
    struct rank ranks[WORLD_MAX];
    (void)state;
    registers_memory = true;
    fake_nccl_refuse(true);
    run_ranks(ranks, 2, use_memory, 30 * NS_PER_S);
    fake_nccl_refuse(false);
    registers_memory = false;
    all_are_well(ranks, 2);
    assert_int_equal(fake_nccl_memory().n_registered, 0);
}

int main(void)
{
    seed0 = (uint32_t)test_seed();
    static bool yes = true; /* deterministic */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_group_and_size_gives_the_plain_sum),
        cmocka_unit_test_prestate(any_group_and_size_gives_the_plain_sum, &yes),
        cmocka_unit_test(what_was_started_ends_in_any_order),
        cmocka_unit_test_prestate(what_was_started_ends_in_any_order, &yes),
        cmocka_unit_test(ordered_sums_come_in_pieces),
        cmocka_unit_test(an_abort_ends_everybodys_call),
        cmocka_unit_test(a_member_that_leaves_is_named),
        cmocka_unit_test(an_error_of_nccl_ends_everybodys_call),
        cmocka_unit_test(all_that_is_registered_is_given_back),
        cmocka_unit_test(what_is_registered_ends_with_an_aborted_one),
        cmocka_unit_test(a_library_that_refuses_is_no_obstacle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
