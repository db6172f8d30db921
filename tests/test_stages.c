/* test_stages.c - a plan's moves over several boundaries: each stage a placement, none too large */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/split.h"
#include "coordinator/arrange.h"
#include "coordinator/scenario.h"
#include "coordinator/plan.h"
#include "coordinator/stages.h"

static const struct stages_budget costs = {.weight_bytes = 1, .state_bytes = 6,
                                           .n_max = STAGES_MAX};

static struct placement from_slots(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots,
                                   const int32_t *expert)
{
    struct placement p;
    assert_int_equal(placement_init(&p, n_experts, n_devices, n_slots, NULL), 0);
    memcpy(p.expert, expert, n_devices * n_slots * sizeof *expert);
    placement_share_evenly(&p);
    placement_keep_homes(&p, NULL);
    return p;
}

static void what_depends_on_what_comes_after_it(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        int32_t  before[6], after[6]; /* 4 experts, 3 devices, 2 slots */
        uint32_t n_stages, stage[6];
    } rows[] = {
        { "nothing", { 0, 1, 2, 3, -1, -1 }, { 0, 1, 2, 3, -1, -1 }, 1, { 0 } },
        { "a swap goes at once", { 0, 1, 2, 3, -1, -1 }, { 0, 2, 1, 3, -1, -1 }, 1, { 0 } },
        { "two swaps of the same devices are two stages",
          { 1, 0, 2, 3, -1, -1 }, { 3, 2, 0, 1, -1, -1 }, 2, { 0, 1, 1, 0, 0, 0 } },
        { "a slot is free once its expert has gone on: 1 to the empty slot, then 2 after it",
          { 0, 1, 2, 3, -1, -1 }, { 0, 2, -1, 3, 1, -1 }, 1, { 0 } },
        { "two copies to one device", { 0, 1, 2, 3, -1, -1 }, { 0, 1, 2, 3, 0, 1 }, 2,
          { 0, 0, 0, 0, 0, 1 } },
    };
    static const double load[] = { 9, 4, 1, 1 };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct placement a = from_slots(4, 3, 2, rows[i].before);
        struct placement b = from_slots(4, 3, 2, rows[i].after);
        uint32_t stage[6];
        placement_keep_homes(&b, &a);
        struct stages_layer l = {.from = &a, .to = &b, .load = load, .worth = 1, .stage = stage};
        struct stages_budget budget = costs;
        budget.layer_moves = 1;
        uint32_t n = stages_assign(&l, 1, &budget);
        if (n != rows[i].n_stages || memcmp(stage, rows[i].stage, sizeof stage))
            fail_msg("%s: %u stages, %u %u %u %u %u %u", rows[i].what, n, stage[0], stage[1],
                     stage[2], stage[3], stage[4], stage[5]);
        placement_fini(&a);
        placement_fini(&b);
    }
}

/* ---- large plans ----------------------------------------------------------------------------- */

enum { E = 256, G = 16, LAYERS = 3 };

struct world {
    struct placement from[LAYERS], to[LAYERS];
    double           load[LAYERS][E];
    uint32_t        *stage[LAYERS];
    struct stages_layer layers[LAYERS];
};

/* Placed for some loads, then anew for others. */
static void make_world(struct world *w, uint64_t seed)
{
    for (uint32_t k = 0; k < LAYERS; k++) {
        double sd[E] = { 0 };
        struct placement *from = &w->from[k], *to = &w->to[k];
        assert_int_equal(placement_init(from, E, G, E / G + 1, NULL), 0);
        placement_init_like(to, from);
        for (int pass = 0; pass < 2; pass++) {
            struct arrange a;
            struct search_problem problem = {.n_experts = E, .n_devices = G, .n_nodes = 1,
                                             .n_slots = from->n_slots, .seed = seed};
            struct belief belief = {.n_experts = E, .mean = w->load[k], .sd = sd};
            for (uint32_t e = 0; e < E; e++)
                w->load[k][e] = 10 + (double)(scenario_hash(seed++) % 1000);
            arrange_init(&a, &problem, &belief, 300);
            arrange_fresh(&a, from, to);
            arrange_fini(&a);
            plan_align(to, from, 1);
            placement_keep_slots(to, from);
            placement_share_evenly(to);
            placement_keep_homes(to, from);
            if (pass == 0)
                placement_copy(from, to);
        }
        w->stage[k] = xcalloc(placement_n_total(to), sizeof *w->stage[k]);
        w->layers[k] = (struct stages_layer){.from = from, .to = to, .load = w->load[k],
                                             .worth = 1, .stage = w->stage[k]};
    }
}

static void drop_world(struct world *w)
{
    for (uint32_t k = 0; k < LAYERS; k++) {
        placement_fini(&w->from[k]);
        placement_fini(&w->to[k]);
        free(w->stage[k]);
    }
}

static double heaviest(const struct placement *p, const double *load)
{
    struct split *s = split_create(p, NULL);
    double max = split_solve(s, load, NULL);
    split_destroy(s);
    return max;
}

/* What one stage of a layer sends: no device more than the budgets say. */
static void add_stage(const struct placement *old, const struct placement *new, uint64_t *sent,
                      uint64_t *received, uint32_t layer_moves)
{
    struct plan plan;
    static const struct plan_costs each = {1, 6, 1, 1};
    uint32_t out[G] = { 0 }, in[G] = { 0 };
    plan_init(&plan, old, new, 1, &each);
    for (uint32_t i = 0; i < plan.n_moves; i++) {
        uint32_t a = plan.move[i].with_state ? plan.move[i].from / old->n_slots
                                             : old->home[plan.move[i].expert] / old->n_slots;
        uint32_t b = plan.move[i].to / old->n_slots;
        sent[a] += plan.move[i].n_bytes;
        received[b] += plan.move[i].n_bytes;
        assert_true(++out[a] <= layer_moves && ++in[b] <= layer_moves);
    }
    plan_fini(&plan);
}

static void each_stage_is_a_placement_within_its_budget(void **state)
{
    (void)state;
    static const struct { uint64_t bytes; uint32_t moves, n_least; } budgets[] = {
        { 14, 2, 4 }, { 21, 1, 4 }, { 35, 3, 4 },
    };
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
        struct world w;
        struct stages_budget budget = costs;
        double best = 0, total = 0;
        uint64_t (*sent)[2][G] = xcalloc(STAGES_MAX, sizeof *sent);
        budget.boundary_bytes = budgets[i].bytes;
        budget.layer_moves = budgets[i].moves;
        make_world(&w, 1000 * i);
        uint32_t n = stages_assign(w.layers, LAYERS, &budget);
        assert_in_range(n, budgets[i].n_least, STAGES_MAX);
        for (uint32_t k = 0; k < LAYERS; k++) {
            struct placement old, new;
            placement_init_like(&old, &w.from[k]);
            placement_init_like(&new, &w.from[k]);
            assert_int_equal(placement_check_stages(&w.from[k], &w.to[k], w.stage[k], NULL), 0);
            double first = heaviest(&old, w.load[k]), last = heaviest(&w.to[k], w.load[k]);
            for (uint32_t stage = 0; stage < n; stage++) {
                placement_at_stage(&w.from[k], &w.to[k], w.stage[k], stage, &new);
                add_stage(&old, &new, sent[stage][0], sent[stage][1], budgets[i].moves);
                placement_copy(&old, &new);
                best += (first - heaviest(&new, w.load[k])) / (first - last);
                total++;
            }
            assert_memory_equal(new.expert, w.to[k].expert,
                                placement_n_total(&new) * sizeof *new.expert);
            assert_memory_equal(new.home, w.to[k].home, E * sizeof *new.home);
            placement_fini(&old);
            placement_fini(&new);
        }
        for (uint32_t stage = 0; stage < n; stage++)
            for (uint32_t g = 0; g < G; g++)
                if (sent[stage][0][g] > budgets[i].bytes || sent[stage][1][g] > budgets[i].bytes)
                    fail_msg("stage %u: device %u sends %llu and receives %llu", stage, g,
                             (unsigned long long)sent[stage][0][g],
                             (unsigned long long)sent[stage][1][g]);
        printf("%llu bytes, %u moves of a layer: %u stages; on the way %.2f of the gain\n",
               (unsigned long long)budgets[i].bytes, budgets[i].moves, n, best / total);
        free(sent);
        drop_world(&w);
    }
}

static void with_too_many_stages_the_budget_grows(void **state)
{
    (void)state;
    struct world w;
    struct stages_budget budget = costs;
    budget.boundary_bytes = 7;
    budget.layer_moves = 1;
    budget.n_max = 3;
    make_world(&w, 5);
    assert_in_range(stages_assign(w.layers, LAYERS, &budget), 2, 3);
    budget.n_max = 1;
    assert_int_equal(stages_assign(w.layers, LAYERS, &budget), 1);
    budget = costs; /* no limit */
    assert_int_equal(stages_assign(w.layers, LAYERS, &budget), 1);
    for (uint32_t s = 0; s < placement_n_total(&w.to[0]); s++)
        assert_int_equal(w.stage[0][s], 0);
    drop_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_depends_on_what_comes_after_it),
        cmocka_unit_test(each_stage_is_a_placement_within_its_budget),
        cmocka_unit_test(with_too_many_stages_the_budget_grows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
