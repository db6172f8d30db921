/* test_fleet.c - leases in virtual time, intervals that grow with the fleet, the two indexes */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/fleet.h"

static const struct fleet_config config = {
    .heartbeat_floor_ns = NS_PER_S, .heartbeats_per_s = 1000, .late_intervals = 2,
    .suspect_intervals = 3, .lost_intervals = 4, .lost_floor_ns = 10 * NS_PER_S,
    .restart_grace_ns = 30 * NS_PER_S,
};

static struct worker *attached(struct fleet *f, const char *name, uint64_t now_ns)
{
    struct worker *w = fleet_add(f, name);
    w->epoch = 1;
    fleet_set_peer(f, w, w->index + 100);
    fleet_heard(f, w, now_ns);
    fleet_tell_interval(f, w);
    return w;
}

static size_t tick(struct fleet *f, uint64_t at_ns, uint64_t *out_next_ns)
{
    struct arena arena = {0};
    struct worker **lost;
    size_t n_lost;
    *out_next_ns = fleet_tick(f, at_ns, &arena, &lost, &n_lost);
    arena_fini(&arena);
    return n_lost;
}

static void silence_is_late_then_suspect_then_lost(void **state)
{
    (void)state;
    static const struct { uint64_t at_s; enum health health; uint64_t next_s; } rows[] = {
        {1, HEALTH_ALIVE, 2},  {2, HEALTH_LATE, 3},     {3, HEALTH_SUSPECT, 10},
        {9, HEALTH_SUSPECT, 10}, {10, HEALTH_LOST, 0},
    };
    struct fleet f;
    uint64_t next_ns;
    fleet_init(&f, &config);
    struct worker *w = attached(&f, "w", 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t n_lost = tick(&f, rows[i].at_s * NS_PER_S, &next_ns);
        assert_int_equal(w->health, rows[i].health);
        assert_int_equal(n_lost, rows[i].health == HEALTH_LOST);
        assert_true(next_ns == (rows[i].next_s ? rows[i].next_s * NS_PER_S : UINT64_MAX));
        assert_int_equal(fleet_is_free(w, 0), rows[i].health <= HEALTH_LATE);
    }
    assert_int_equal(f.n_attached, 0);
    assert_int_equal(tick(&f, 99 * NS_PER_S, &next_ns), 0); /* told once */
    fleet_heard(&f, w, 100 * NS_PER_S);
    assert_int_equal(w->health, HEALTH_ALIVE);
    fleet_fini(&f);
}

static void a_renewed_lease_is_a_full_one(void **state)
{
    (void)state;
    struct fleet f;
    uint64_t next_ns;
    fleet_init(&f, &config);
    struct worker *w = attached(&f, "w", 0);
    fleet_renew(&f, 500 * NS_PER_S);
    assert_int_equal(tick(&f, 501 * NS_PER_S, &next_ns), 0);
    assert_int_equal(w->health, HEALTH_ALIVE);
    fleet_fini(&f);
}

static void the_expected_have_the_grace_of_a_restart(void **state)
{
    (void)state;
    struct fleet f;
    uint64_t next_ns;
    fleet_init(&f, &config);
    fleet_add(&f, "w");
    assert_int_equal(tick(&f, 29 * NS_PER_S, &next_ns), 0);
    assert_int_equal(tick(&f, 30 * NS_PER_S, &next_ns), 1);
    fleet_fini(&f);
}

static void the_interval_grows_with_the_fleet(void **state)
{
    (void)state;
    struct fleet f;
    uint64_t next_ns;
    char name[32];
    fleet_init(&f, &config);
    struct worker *first = attached(&f, "first", 0);
    for (int i = 0; i < 9999; i++) {
        snprintf(name, sizeof name, "worker-%d", i);
        attached(&f, name, 0);
    }
    assert_int_equal(fleet_interval_ns(&f), 10 * NS_PER_S);
    assert_int_equal(first->interval_ns, NS_PER_S);
    fleet_tell_interval(&f, first);
    tick(&f, 15 * NS_PER_S, &next_ns);
    assert_int_equal(first->health, HEALTH_ALIVE); /* judged by what it was told */
    assert_ptr_equal(fleet_by_name(&f, "first"), first);
    assert_string_equal(fleet_by_peer(&f, 5100)->name, "worker-4999");
    fleet_fini(&f);
}

static void a_connection_speaks_for_one_worker(void **state)
{
    (void)state;
    struct fleet f;
    fleet_init(&f, &config);
    struct worker *a = attached(&f, "a", 0), *b = attached(&f, "b", 0);
    fleet_set_peer(&f, b, a->peer);
    assert_int_equal(a->peer, 0);
    assert_ptr_equal(fleet_by_peer(&f, 100), b);
    assert_null(fleet_by_peer(&f, 101));
    for (uint64_t peer = 1000; peer < 3000; peer++)
        fleet_set_peer(&f, a, peer); /* reconnects do not fill the index */
    assert_ptr_equal(fleet_by_peer(&f, 2999), a);
    assert_null(fleet_by_peer(&f, 2998));
    assert_true(f.by_peer.n_slots <= 128);
    fleet_fini(&f);
}

static void a_full_fleet_forgets_only_who_is_gone(void **state)
{
    (void)state;
    struct fleet f;
    char name[32];
    fleet_init(&f, &config);
    for (uint32_t i = 0; i < WORKERS_MAX; i++) {
        snprintf(name, sizeof name, "worker-%u", i);
        assert_non_null(attached(&f, name, 0));
    }
    assert_null(fleet_add(&f, "one-more"));
    fleet_set_health(&f, fleet_by_name(&f, "worker-77"), HEALTH_GONE);
    assert_non_null(fleet_add(&f, "one-more"));
    assert_null(fleet_by_name(&f, "worker-77"));
    assert_non_null(fleet_by_name(&f, "worker-78"));
    fleet_fini(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(silence_is_late_then_suspect_then_lost),
        cmocka_unit_test(a_renewed_lease_is_a_full_one),
        cmocka_unit_test(the_expected_have_the_grace_of_a_restart),
        cmocka_unit_test(the_interval_grows_with_the_fleet),
        cmocka_unit_test(a_connection_speaks_for_one_worker),
        cmocka_unit_test(a_full_fleet_forgets_only_who_is_gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
