/* test_load.c - reports become windows: what is summed, what is ignored, what begins anew */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "coordinator/load.h"

struct given {
    uint32_t attempt, epoch;
    uint64_t first, last;
    bool     is_whole; /* expected */
    double   tokens;   /* expected of expert 1 of layer 5 in the newest window; 0: none is there */
};

/* Two layers, two experts, two nodes: each step brings expert 1 of layer 5 ten tokens of each
 * node. */
static bool add(struct load *l, const struct given *g)
{
    uint32_t n = (uint32_t)(g->last - g->first + 1);
    uint32_t tokens[2][4] = {{n, 2 * n, 3 * n, 4 * n}, {0, 10 * n, 0, 10 * n}};
    Ballast__LayerLoad layers[2] = {BALLAST__LAYER_LOAD__INIT, BALLAST__LAYER_LOAD__INIT};
    Ballast__LayerLoad *list[2] = {&layers[0], &layers[1]};
    Ballast__LoadReport r = BALLAST__LOAD_REPORT__INIT;
    double speed[2] = {1, (double)g->last};
    for (uint32_t i = 0; i < 2; i++) {
        layers[i].layer = 3 + 2 * i;
        layers[i].tokens = tokens[i];
        layers[i].n_tokens = 4;
    }
    r.attempt = g->attempt;
    r.placement_epoch = g->epoch;
    r.first_step = g->first;
    r.last_step = g->last;
    r.n_nodes = r.n_experts = 2;
    r.layers = list;
    r.n_layers = 2;
    r.speed = speed;
    r.n_speed = 2;
    r.step_s = (double)g->first;
    r.device_imbalance = 1.5;
    return load_add(l, &r);
}

static void reports_become_windows(void **state)
{
    (void)state;
    static const struct row {
        const char *what;
        struct given given[6];
    } rows[] = {
        {"two reports fill a window of ten steps",
         {{1, 0, 1, 5, false, 0}, {1, 0, 6, 10, true, 200}, {1, 0, 11, 15, false, 200}}},
        {"one that is longer is a window, too",
         {{1, 0, 1, 20, true, 400}, {1, 0, 21, 30, true, 200}}},
        {"a repeated one is ignored",
         {{1, 0, 1, 5, false, 0}, {1, 0, 1, 5, false, 0}, {1, 0, 6, 10, true, 200},
          {1, 0, 6, 10, false, 200}}},
        {"where steps are missing a window begins anew",
         {{1, 0, 1, 5, false, 0}, {1, 0, 11, 15, false, 0}, {1, 0, 16, 20, true, 200}}},
        {"a new placement begins a window, an old one is ignored",
         {{1, 0, 1, 5, false, 0}, {1, 1, 6, 10, false, 0}, {1, 0, 6, 12, false, 0},
          {1, 1, 11, 15, true, 200}}},
        {"a new attempt does steps again, an old one is ignored",
         {{1, 2, 1, 10, true, 200}, {2, 2, 6, 10, false, 200}, {1, 2, 11, 20, false, 200},
          {2, 2, 11, 16, true, 220}}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct load *l = load_create(10);
        print_message("%s\n", rows[i].what);
        for (const struct given *g = rows[i].given; g->last; g++) {
            assert_int_equal(add(l, g), g->is_whole);
            const struct load_window *w = load_newest(l);
            assert_true(w ? w->tokens[3] == g->tokens : g->tokens == 0);
            assert_true(!w || (w->layer[1] == 5 && w->tokens[2] == 0));
        }
        load_destroy(l);
    }
}

static void figures_are_means_over_steps(void **state)
{
    (void)state;
    struct load *l = load_create(10);
    add(l, &(struct given){1, 0, 1, 4, false, 0});
    add(l, &(struct given){1, 0, 5, 10, false, 0});
    const struct load_window *w = load_newest(l);
    assert_float_equal(w->step_s, (4 * 1 + 6 * 5) / 10.0, 1e-12);
    assert_float_equal(w->speed[1], (4 * 4 + 6 * 10) / 10.0, 1e-12);
    assert_float_equal(w->imbalance, 1.5, 1e-12);
    assert_int_equal(w->first_step, 1);
    assert_int_equal(w->last_step, 10);
    assert_float_equal(w->tokens[0], 40, 1e-12); /* both nodes together */
    assert_float_equal(w->tokens[1], 60, 1e-12);
    load_destroy(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reports_become_windows),
        cmocka_unit_test(figures_are_means_over_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
