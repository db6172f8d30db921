/* test_popularity.c - loads of virtual workers: recorded ones come round, made up ones wander */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/folder.h"
#include "worker/popularity.h"

#define EXPERTS 896u
#define RANKS   16u

static void shares_of(uint64_t seed, uint32_t layer, uint64_t step, double *out)
{
    struct popularity p;
    struct err err = {0};
    assert_int_equal(popularity_init(&p, NULL, seed, &err), 0);
    popularity_shares(&p, layer, 0, step, 10, EXPERTS, out);
    popularity_fini(&p);
}

/* Half of the sum of differences: the part of the rows that changes its expert. */
static double distance(const double *a, const double *b)
{
    double sum = 0;
    for (uint32_t e = 0; e < EXPERTS; e++)
        sum += fabs(a[e] - b[e]) / 2;
    return sum;
}

static void made_up_loads_are_skewed(void **state)
{
    static double s[EXPERTS];
    (void)state;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        double sum = 0, hottest = 0, busiest = 0;
        shares_of(seed, 3, 0, s);
        for (uint32_t g = 0; g < RANKS; g++) {
            double rank = 0;
            for (uint32_t e = g * EXPERTS / RANKS; e < (g + 1) * EXPERTS / RANKS; e++) {
                assert_true(s[e] > 0);
                hottest = fmax(hottest, s[e]);
                rank += s[e];
            }
            sum += rank;
            busiest = fmax(busiest, rank);
        }
        assert_float_equal(sum, 1, 1e-9);
        assert_true(hottest * EXPERTS > 5 && hottest * EXPERTS < 200);
        assert_true(busiest * RANKS > 1.15 && busiest * RANKS < 2.5);
    }
}

static void made_up_loads_wander(void **state)
{
    static double now[EXPERTS], same[EXPERTS], soon[EXPERTS], late[EXPERTS], other[EXPERTS];
    (void)state;
    shares_of(7, 1, 100, now);
    shares_of(7, 1, 100, same);
    shares_of(7, 1, 110, soon);
    shares_of(7, 1, 1000, late);
    shares_of(7, 2, 100, other);
    assert_memory_equal(now, same, sizeof now);
    assert_true(distance(now, soon) < 0.06);
    assert_true(distance(now, late) > 0.15);
    assert_true(distance(now, other) > 0.3);
}

static char *write_loads(void)
{
    char *path = xasprintf("%s/loads.csv", folder);
    FILE *f = fopen(path, "w");
    fputs("window,layer,expert,load\n"
          "4,1,0,1\n4,1,1,3\n4,5,0,2\n4,5,1,2\n"
          "9,1,0,1\n9,1,1,1\n9,5,0,0\n9,5,1,8\n", f);
    fclose(f);
    return path;
}

static void recorded_loads_come_round(void **state)
{
    static const struct {
        const char *what;
        uint32_t layer, nth;
        uint64_t step;
        double   first;
    } row[] = {
        {"the first window", 1, 0, 0, 0.25},
        {"the second one", 1, 0, 10, 0.5},
        {"the first one again", 1, 0, 20, 0.25},
        {"a layer by its number", 5, 0, 10, 0},
        {"one in turn where the file has no such layer", 3, 1, 0, 0.5},
        {"and the next one", 4, 2, 0, 0.25},
    };
    struct popularity p;
    struct err err = {0};
    char *path = write_loads();
    (void)state;
    assert_int_equal(popularity_init(&p, path, 1, &err), 0);
    assert_int_equal(popularity_check(&p, 2, &err), 0);
    assert_int_equal(popularity_check(&p, 3, &err), -EINVAL);
    assert_non_null(strstr(err.text, "loads of 2 experts a layer, the job's model has 3"));
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        double out[2];
        popularity_shares(&p, row[i].layer, row[i].nth, row[i].step, 10, 2, out);
        print_message("%s\n", row[i].what);
        assert_float_equal(out[0], row[i].first, 1e-12);
        assert_float_equal(out[0] + out[1], 1, 1e-12);
    }
    popularity_fini(&p);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(made_up_loads_are_skewed),
        cmocka_unit_test(made_up_loads_wander),
        cmocka_unit_test(recorded_loads_come_round),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
