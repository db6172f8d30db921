/* test_placement.c - the map of experts to slots; exact shares; rows by sender */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/placement.h"
#include "common/split.h"
#include "coordinator/scenario.h"
#include "tests/exact.h"

static struct placement make(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots)
{
    struct placement p;
    struct err err;
    assert_int_equal(placement_init(&p, n_experts, n_devices, n_slots, &err), 0);
    return p;
}

static struct placement from_slots(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots,
                                   const int32_t *expert)
{
    struct placement p = make(n_experts, n_devices, n_slots);
    memcpy(p.expert, expert, n_devices * n_slots * sizeof *expert);
    placement_share_evenly(&p);
    placement_keep_homes(&p, NULL);
    return p;
}

static void experts_start_in_order(void **state)
{
    (void)state;
    struct err err;
    struct placement p = make(5, 2, 4);
    static const int32_t expected[] = { 0, 1, 2, -1, 3, 4, -1, -1 };
    assert_memory_equal(p.expert, expected, sizeof expected);
    assert_int_equal(placement_check(&p, &err), 0);
    assert_int_equal(placement_find(&p, 1, 4), 5);
    assert_int_equal(placement_find(&p, 0, 4), -1);
    placement_fini(&p);
    assert_int_equal(placement_init(&p, 5, 2, 2, &err), -EINVAL);
    assert_string_equal(err.text, "5 experts do not fit on 2 devices with 2 slots each: give at "
                                  "least 3 slots per device");
}

static void a_broken_placement_is_told(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        uint32_t slot;
        int32_t  expert; /* put there; -2: keep */
        double   share;  /* likewise; < 0: keep */
        uint32_t home_of_0;
        const char *text;
    } rows[] = {
        { "a lost expert", 1, 0, -1, 0, "device 0 holds expert 0 twice" },
        { "an unknown one", 1, 9, -1, 0, "slot 1 holds expert 9: must be 0 to 3, or -1 for none" },
        { "nowhere", 2, -1, 0, 0, "expert 1 is in no slot" },
        { "half served", 0, -2, 0.25, 0, "shares of expert 0 sum to 0.75, not to 1" },
        { "a wrong share", 0, -2, 1.5, 0, "share of expert 0 on device 0 is 1.5: must be 0 to 1" },
        { "not a number", 0, -2, NAN, 0, "share of expert 0 on device 0 is nan: must be 0 to 1" },
        { "homeless", 0, -2, -1, 1, "home of expert 0: slot 1 does not hold it" },
    };
    static const int32_t slots[] = { 0, 3, 1, 0, 2, -1 };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct err err = { 0 };
        struct placement p = from_slots(4, 3, 2, slots);
        if (rows[i].expert != -2)
            p.expert[rows[i].slot] = rows[i].expert;
        if (!(rows[i].share < 0))
            p.share[rows[i].slot] = rows[i].share;
        p.home[0] = rows[i].home_of_0;
        assert_int_equal(placement_check(&p, &err), -EINVAL);
        assert_string_equal(err.text, rows[i].text);
        placement_fini(&p);
    }
}

static void what_stays_keeps_slot_and_home(void **state)
{
    (void)state;
    static const int32_t before[] = { 0, 1, 2, 3, 4, 0 }, after[] = { 2, 0, 4, 1, 3, 0 };
    struct placement a = from_slots(5, 2, 3, before), b = from_slots(5, 2, 3, after);
    a.home[0] = 5;
    placement_keep_slots(&b, &a);
    static const int32_t expected[] = { 0, 4, 2, 3, 1, 0 };
    assert_memory_equal(b.expert, expected, sizeof expected);
    placement_keep_homes(&b, &a);
    assert_int_equal(b.home[0], 5);
    assert_int_equal(b.home[1], 4); /* left device 0 */
    assert_int_equal(placement_moves(&a, &b), 2);
    assert_int_equal(placement_moves(&a, &a), 0);
    placement_fini(&a);
    placement_fini(&b);
}

static uint32_t below(uint64_t *random, uint32_t n)
{
    *random = scenario_hash(*random);
    return (uint32_t)((*random >> 32) * n >> 32);
}

/* Random copies on random devices; the answer must be the largest load that some set of devices
 * cannot get rid of, and the shares must reach it. */
static void shares_are_the_best_there_are(void **state)
{
    (void)state;
    const char *text = getenv("BALLAST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1, random = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 2000; round++) {
        uint32_t g = 1 + below(&random, 7), e = 1 + below(&random, 20);
        struct err err;
        struct placement p = make(e, g, (e + g - 1) / g + below(&random, 3));
        double load[20], speed[8];
        for (uint32_t i = 0; i < 40; i++) {
            uint32_t s = below(&random, placement_n_total(&p)), x = below(&random, e);
            if (p.expert[s] == PLACEMENT_EMPTY && placement_find(&p, s / p.n_slots, x) < 0)
                p.expert[s] = (int32_t)x;
        }
        for (uint32_t i = 0; i < e; i++)
            load[i] = below(&random, 4) ? below(&random, 1000) : 0;
        for (uint32_t i = 0; i < g; i++)
            speed[i] = round % 2 ? 1 : 0.5 + below(&random, 100) / 100.0;
        struct split *s = split_create(&p, speed);
        double max = split_solve(s, load, p.share), best = oracle_split(&p, load, speed);
        assert_true(fabs(max - best) <= 1e-7 * best);
        assert_int_equal(placement_check(&p, &err), 0);
        assert_true(fabs(placement_max_load(&p, load, speed) - best) <= 1e-6 * best + 1e-12);
        split_destroy(s);
        placement_fini(&p);
    }
}

static void no_load_is_split_evenly(void **state)
{
    (void)state;
    static const int32_t slots[] = { 0, 1, 0, 2 };
    struct placement p = from_slots(3, 2, 2, slots);
    double load[3] = { 0 };
    struct split *s = split_create(&p, NULL);
    assert_true(split_solve(s, load, p.share) == 0);
    assert_true(p.share[0] == 0.5 && p.share[1] == 1 && p.share[2] == 0.5);
    split_destroy(s);
    placement_fini(&p);
}

static void locked_devices_are_named(void **state)
{
    (void)state;
    /* Devices 0 and 1 share a hot expert and cannot get rid of it; device 2 is idle. */
    static const int32_t slots[] = { 0, 1, 0, 2, 3, -1 };
    static const double load[] = { 100, 10, 10, 1 };
    struct placement p = from_slots(4, 3, 2, slots);
    struct split *s = split_create(&p, NULL);
    uint8_t locked[3];
    assert_true(fabs(split_solve(s, load, NULL) - 60) < 1e-9);
    split_locked(s, locked);
    assert_true(locked[0] && locked[1] && !locked[2]);
    assert_true(fabs(split_device_load(s)[2] - 1) < 1e-9);
    split_destroy(s);
    placement_fini(&p);
}

static void rows_stay_near(void **state)
{
    (void)state;
    /* Four devices, two nodes; copies on devices 1 and 2. */
    static const uint32_t n_rows[] = { 10, 30, 20, 40 }, device[] = { 1, 2 };
    static const double share[] = { 0.45, 0.55 };
    uint32_t out[8];
    split_rows(4, 2, n_rows, 2, device, share, out);
    static const uint32_t expected[] = { 10, 0, 30, 0, 0, 20, 5, 35 };
    assert_memory_equal(out, expected, sizeof expected);
}

static void rows_are_conserved(void **state)
{
    (void)state;
    uint64_t random = 7;
    for (int round = 0; round < 500; round++) {
        uint32_t n_rows[6], device[3] = { 0, 2, 5 }, out[18], sum = 0, column[3] = { 0 };
        double a = below(&random, 1000) / 1000.0, share[3] = { a / 2, a / 2, 1 - a };
        for (int g = 0; g < 6; g++)
            sum += n_rows[g] = below(&random, 50);
        split_rows(6, round % 4, n_rows, 3, device, share, out);
        for (int g = 0; g < 6; g++) {
            assert_int_equal(out[3 * g] + out[3 * g + 1] + out[3 * g + 2], n_rows[g]);
            for (int c = 0; c < 3; c++)
                column[c] += out[3 * g + c];
        }
        for (int c = 0; c < 3; c++)
            assert_true(fabs(column[c] - share[c] * sum) < 1.001);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_start_in_order),
        cmocka_unit_test(a_broken_placement_is_told),
        cmocka_unit_test(what_stays_keeps_slot_and_home),
        cmocka_unit_test(shares_are_the_best_there_are),
        cmocka_unit_test(no_load_is_split_evenly),
        cmocka_unit_test(locked_devices_are_named),
        cmocka_unit_test(rows_stay_near),
        cmocka_unit_test(rows_are_conserved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
