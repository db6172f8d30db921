/* test_rounds.c - as few rounds as the busiest device has moves, and no device twice in one */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "worker/rounds.h"

enum { DEVICES_MAX = 16, MOVES_MAX = 200 };

static uint32_t most_of(uint32_t n, const uint32_t *from, const uint32_t *to)
{
    uint32_t most = 0, count[2][DEVICES_MAX] = {{0}};
    for (uint32_t i = 0; i < n; i++) {
        if (from[i] == to[i])
            continue;
        count[0][from[i]]++;
        count[1][to[i]]++;
    }
    for (int side = 0; side < 2; side++)
        for (uint32_t g = 0; g < DEVICES_MAX; g++)
            most = count[side][g] > most ? count[side][g] : most;
    return most;
}

static void check(uint32_t n_devices, uint32_t n, const uint32_t *from, const uint32_t *to)
{
    static uint8_t is_busy[2][DEVICES_MAX][MOVES_MAX];
    uint32_t round[MOVES_MAX];
    uint32_t n_rounds = rounds_plan(n_devices, n, from, to, round);
    memset(is_busy, 0, sizeof is_busy);
    assert_int_equal(n_rounds, most_of(n, from, to));
    for (uint32_t i = 0; i < n; i++) {
        if (from[i] == to[i]) {
            assert_int_equal(round[i], ROUND_NONE);
            continue;
        }
        assert_true(round[i] < n_rounds);
        assert_false(is_busy[0][from[i]][round[i]]++);
        assert_false(is_busy[1][to[i]][round[i]]++);
    }
}

static void known_cases(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        uint32_t n, from[6], to[6];
    } rows[] = {
        {"nothing to do", 0, {0}, {0}},
        {"what stays needs no round", 2, {1, 2}, {1, 2}},
        {"a ring goes at once", 3, {0, 1, 2}, {1, 2, 0}},
        {"one sender, one after the other", 3, {0, 0, 0}, {1, 2, 1}},
        {"an early choice is mended", 4, {0, 1, 0, 1}, {2, 3, 3, 2}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check(4, rows[i].n, rows[i].from, rows[i].to);
}

static void random_moves(void **state)
{
    (void)state;
    uint32_t seed = 1;
    for (uint32_t round = 0; round < 3000; round++) {
        uint32_t from[MOVES_MAX], to[MOVES_MAX], n_devices, n;
#define DRAW(below) (seed = seed * 1664525u + 1013904223u, (seed >> 8) % (below))
        n_devices = 2 + DRAW(DEVICES_MAX - 1);
        n = DRAW(MOVES_MAX);
        for (uint32_t i = 0; i < n; i++) {
            from[i] = DRAW(n_devices);
            to[i] = DRAW(4) ? DRAW(n_devices) : 0; /* one is wanted most */
        }
        check(n_devices, n, from, to);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_cases),
        cmocka_unit_test(random_moves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
