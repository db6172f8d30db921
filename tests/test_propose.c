/* test_propose.c - the verdicts on all layers of a job as one plan */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "coordinator/propose.h"
#include "proto/check.h"
#include "proto/placed.h"

enum { N_EXPERTS = 8, N_DEVICES = 4, WINDOW = 20 };

static const struct propose_policy policy = {
    .n_devices = N_DEVICES, .n_ranks = N_DEVICES, .n_spare = 1, .n_nodes = 1,
    .horizon_steps = 200, .min_gain = 0.1};

/* Layer 1 as given, layer 2 flat. Moves are cheap. */
static void observe(struct propose *p, uint64_t last_step, uint32_t epoch,
                    const double hot[N_EXPERTS], const Ballast__Placement *in_force)
{
    uint32_t layers[] = {1, 2};
    double tokens[2 * N_EXPERTS];
    for (int e = 0; e < N_EXPERTS; e++) {
        tokens[e] = 1e4 * hot[e];
        tokens[N_EXPERTS + e] = 1e6;
    }
    struct load_window w = {
        .epoch = epoch, .first_step = last_step - WINDOW + 1, .last_step = last_step,
        .n_steps = WINDOW, .n_layers = 2, .n_experts = N_EXPERTS, .layer = layers,
        .tokens = tokens, .step_s = 0.1, .row_s = 1e-7, .link_bytes_per_s = 1e9,
        .expert_bytes = 1000, .state_bytes = 6000};
    propose_observe(p, &w, in_force);
}

/* Windows enough to be fairly sure that the load stays as it is; the last ends at step 200. */
static void observe_ten(struct propose *p, const double hot[N_EXPERTS])
{
    for (uint64_t step = WINDOW; step <= 200; step += WINDOW)
        observe(p, step, 0, hot, NULL);
}

static const double flat[N_EXPERTS] = {100, 100, 100, 100, 100, 100, 100, 100};
static const double skewed[N_EXPERTS] = {900, 900, 100, 100, 100, 100, 100, 100};

static void an_even_load_moves_nothing(void **state)
{
    (void)state;
    struct propose *p = propose_create(&policy);
    observe_ten(p, flat);
    const struct proposal *s = propose_now(p);
    assert_int_equal(s->n_changed, 0);
    assert_int_equal(s->n_moves, 0);
    assert_true(s->revision != 0);
    assert_memory_equal(s->reason, "nothing to do; layer 1", 22);
    propose_destroy(p);
}

static void the_layer_that_is_uneven_changes(void **state)
{
    (void)state;
    struct arena arena = {0};
    struct err err;
    struct propose *p = propose_create(&policy);
    observe_ten(p, skewed);
    const struct proposal *s = propose_now(p);
    assert_int_equal(s->n_changed, 1);
    assert_true(s->n_moves > 0 && s->gain_s > 0 && s->n_bytes > 0);
    assert_true(s->gain_s * policy.horizon_steps > s->cost_s);
    assert_true(s->imbalance_predicted < s->imbalance_before);
    uint64_t revision = s->revision;

    Ballast__Placement *changed = propose_placement(p, 1, false, &arena);
    Ballast__Placement *whole = propose_placement(p, 1, true, &arena);
    assert_int_equal(changed->n_layers, 1);
    assert_int_equal(changed->layers[0]->layer, 1);
    assert_int_equal(whole->n_layers, 2);
    assert_int_equal(whole->n_slots, 3);
    assert_int_equal(check_placement(whole, &err), 0);
    Ballast__PlanMove **moves;
    assert_int_equal(propose_moves(p, &arena, &moves), s->n_moves);
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < s->n_moves; i++)
        n_bytes += moves[i]->bytes;
    assert_int_equal(n_bytes, s->n_bytes);

    observe(p, 220, 0, skewed, NULL); /* a later window is another revision */
    assert_true(propose_now(p)->revision != revision);
    propose_destroy(p);
    arena_fini(&arena);
}

static void what_is_in_force_is_the_next_start(void **state)
{
    (void)state;
    struct arena arena = {0};
    struct propose *p = propose_create(&policy), *restarted = propose_create(&policy);
    observe_ten(p, skewed);
    assert_int_equal(propose_now(p)->n_changed, 1);
    Ballast__Placement *whole = propose_placement(p, 1, true, &arena);
    double before = propose_now(p)->imbalance_before;
    propose_applied(p);
    observe(p, 220, 1, skewed, whole);
    assert_int_equal(propose_now(p)->n_changed, 0);
    assert_true(propose_now(p)->imbalance_before < before);
    observe(restarted, 220, 1, skewed, whole); /* knows the placement from the record only */
    assert_true(propose_now(restarted)->imbalance_before < before - 0.3);
    propose_destroy(restarted);
    propose_destroy(p);
    arena_fini(&arena);
}

/* 92 layers of 896 experts on 64 devices: bounded, so that the coordinator stays quick. */
static void a_large_model_is_thought_through_in_parts(void **state)
{
    (void)state;
    enum { LAYERS = 92, EXPERTS = 896, DEVICES = 64 };
    static double tokens[LAYERS * EXPERTS];
    uint32_t layers[LAYERS];
    struct propose *p = propose_create(&(struct propose_policy){
        .n_devices = DEVICES, .n_ranks = DEVICES, .n_spare = 1, .n_nodes = 8,
        .horizon_steps = 200, .min_gain = 0.02});
    uint64_t random = 1;
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (uint32_t)i;
    for (int window = 1; window < 4; window++) {
        for (int i = 0; i < LAYERS * EXPERTS; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            tokens[i] = (double)((i % EXPERTS * 7919) % 1000) * (0.5 + (double)(random >> 40) /
                                                                 (1 << 24));
        }
        struct load_window w = {
            .first_step = 1, .last_step = 20 * (uint64_t)window, .n_steps = 20,
            .n_layers = LAYERS, .n_experts = EXPERTS, .layer = layers, .tokens = tokens,
            .step_s = 1, .row_s = 1e-6, .link_bytes_per_s = 50e9, .expert_bytes = 66 << 20,
            .state_bytes = 396 << 20};
        clock_t from = clock();
        propose_observe(p, &w, NULL);
        clock_t observed = clock();
        int n_parts = 1;
        while (!propose_think(p))
            n_parts++;
        double proposed_ms = 1e3 * (double)(clock() - observed) / CLOCKS_PER_SEC;
        assert_true(n_parts > 3);
        print_message("window %d: observed in %.1f ms, proposed in %d parts, %.1f ms each: %s\n",
                      window, 1e3 * (double)(observed - from) / CLOCKS_PER_SEC, n_parts,
                      proposed_ms / n_parts, propose_now(p)->reason);
    }
    propose_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_even_load_moves_nothing),
        cmocka_unit_test(the_layer_that_is_uneven_changes),
        cmocka_unit_test(what_is_in_force_is_the_next_start),
        cmocka_unit_test(a_large_model_is_thought_through_in_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
