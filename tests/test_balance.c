/* test_balance.c - the decision: what must hold for any loads, and the cases people know
 *
 * BALLAST_CASES and BALLAST_SEED make the random test longer, or repeat one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/split.h"
#include "coordinator/arrange.h"
#include "coordinator/balance.h"
#include "coordinator/bound.h"
#include "coordinator/pack.h"
#include "tests/eplb.h"
#include "tests/exact.h"

static uint32_t below(uint64_t *random, uint32_t n)
{
    *random = scenario_hash(*random);
    return (uint32_t)((*random >> 32) * n >> 32);
}

static struct placement in_order(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots)
{
    struct placement p;
    struct err err;
    assert_int_equal(placement_init(&p, n_experts, n_devices, n_slots, &err), 0);
    return p;
}

static double resplit(const struct placement *p, const double *load, const double *speed)
{
    struct split *s = split_create(p, speed);
    double sum = 0, fast = 0, max = split_solve(s, load, NULL);
    for (uint32_t e = 0; e < p->n_experts; e++)
        sum += load[e];
    for (uint32_t g = 0; g < p->n_devices; g++)
        fast += speed ? speed[g] : 1;
    split_destroy(s);
    return sum > 0 ? max / (sum / fast) : 1;
}

/* ---- random loads ---------------------------------------------------------------------------- */

enum { E_MAX = 48, G_MAX = 12, WINDOWS_MAX = 5 };

struct task {
    uint32_t n_experts, n_devices, n_slots, n_windows;
    double   load[WINDOWS_MAX][E_MAX];
    double   speed[G_MAX];
    bool     is_free;
    struct balance_policy policy;
    struct placement in_force;
};

static double random_load(uint64_t *random, uint32_t shape, uint32_t e)
{
    double u = (below(random, 1000) + 1) / 1000.0;
    switch (shape) {
    case 0:  return floor(1000 * u);
    case 1:  return floor(10000 * u / (e + 1));          /* a few hot ones */
    case 2:  return below(random, 3);                    /* hardly any tokens */
    case 3:  return e == 0 ? 1e6 : 0;                    /* one expert only */
    case 4:  return 0;
    case 5:  return u;                                   /* shares, not counts */
    case 6:  return 1e12 * u;
    default: return below(random, 4) ? 0 : floor(100 * exp(8 * u - 4));
    }
}

static void random_task(struct task *t, uint64_t *random)
{
    *t = (struct task){ .policy = balance_defaults() };
    t->n_devices = 1 + below(random, G_MAX);
    t->n_experts = 1 + below(random, E_MAX);
    t->n_slots = (t->n_experts + t->n_devices - 1) / t->n_devices + below(random, 3);
    t->n_windows = 1 + below(random, WINDOWS_MAX);
    t->is_free = below(random, 2);
    t->policy.is_known = below(random, 3) == 0;
    t->policy.effort_us = below(random, 16) ? 50 : 2000; /* in haste, or with care */
    t->policy.seed = below(random, 1000);
    t->policy.n_nodes = t->n_devices % 2 == 0 && below(random, 3) == 0 ? 2 : 1;
    if (below(random, 4) == 0) {
        for (uint32_t g = 0; g < t->n_devices; g++)
            t->speed[g] = 0.5 + below(random, 100) / 100.0;
        t->policy.speed = t->speed;
    }
    for (uint32_t w = 0, shape = below(random, 8); w < t->n_windows; w++) {
        shape = below(random, 4) ? shape : below(random, 8);
        for (uint32_t e = 0; e < t->n_experts; e++)
            t->load[w][e] = random_load(random, shape, e);
    }
    t->in_force = in_order(t->n_experts, t->n_devices, t->n_slots);
    for (uint32_t i = 0; i < 3 * t->n_experts; i++) {
        struct placement *p = &t->in_force;
        uint32_t a = below(random, placement_n_total(p)), e = below(random, t->n_experts);
        if (p->expert[a] == PLACEMENT_EMPTY && placement_find(p, a / p->n_slots, e) < 0)
            p->expert[a] = (int32_t)e;
    }
    placement_share_evenly(&t->in_force);
}

static void propose(const struct task *t, const struct placement *in_force, bool is_free,
                    struct placement *out, struct balance_verdict *v)
{
    struct balance *b = balance_create(t->n_experts, t->n_devices, t->n_slots, &t->policy);
    for (uint32_t w = 0; w < t->n_windows; w++)
        balance_observe(b, t->load[w], in_force);
    balance_propose(b, in_force, is_free, out, v);
    balance_destroy(b);
}

static void check_task(const struct task *t)
{
    struct err err = { 0 };
    struct balance_verdict v, again;
    struct placement out, other;
    const double *last = NULL;
    double sum = 0;
    placement_init_like(&out, &t->in_force);
    placement_init_like(&other, &t->in_force);
    propose(t, &t->in_force, t->is_free, &out, &v);
    if (placement_check(&out, &err) < 0)
        fail_msg("%s", err.text);
    propose(t, &t->in_force, t->is_free, &other, &again);
    assert_memory_equal(&v, &again, sizeof v);
    assert_memory_equal(out.expert, other.expert, placement_n_total(&out) * sizeof *out.expert);
    assert_memory_equal(out.share, other.share, placement_n_total(&out) * sizeof *out.share);
    assert_true(*v.reason);
    if (v.kind == BALANCE_STAY) {
        assert_memory_equal(out.expert, t->in_force.expert,
                            placement_n_total(&out) * sizeof *out.expert);
    } else {
        /* What is sure of the gain is worth the price. */
        assert_true(v.n_moves > 0 && v.gain - v.risk > v.cost);
        assert_true(v.ratio_after < v.ratio_before);
    }
    for (uint32_t w = 0; w < t->n_windows; w++) {
        double tokens = 0;
        for (uint32_t e = 0; e < t->n_experts; e++)
            tokens += t->load[w][e];
        if (tokens > 0) {
            last = t->load[w];
            sum = tokens;
        }
    }
    if (t->policy.is_known && sum > 0)
        assert_true(resplit(&out, last, t->policy.speed) <=
                    resplit(&t->in_force, last, t->policy.speed) * (1 + 1e-6));
    /* A plan of the plan is empty. */
    propose(t, &out, false, &other, &again);
    if (again.kind != BALANCE_STAY)
        fail_msg("first: %s; then: %s", v.reason, again.reason);
    placement_fini(&out);
    placement_fini(&other);
}

static void any_loads_are_planned_soundly(void **state)
{
    (void)state;
    const char *cases = getenv("BALLAST_CASES"), *seed = getenv("BALLAST_SEED");
    uint64_t n = cases ? strtoull(cases, NULL, 10) : 3000;
    uint64_t first = seed ? strtoull(seed, NULL, 10) : 1;
    for (uint64_t i = first; i < first + n; i++) {
        struct task t;
        uint64_t random = scenario_hash(i);
        random_task(&t, &random);
        if (getenv("BALLAST_VERBOSE"))
            print_message("seed %llu: %u experts, %u devices, %u slots\n", (unsigned long long)i,
                          t.n_experts, t.n_devices, t.n_slots);
        check_task(&t);
        placement_fini(&t.in_force);
    }
    print_message("%llu cases from seed %llu\n", (unsigned long long)n, (unsigned long long)first);
}

/* Few tokens, much noise: tried out with care, changes win on draws that no search has seen. */
static void care_pays(void **state)
{
    (void)state;
    enum { E = 128, G = 16, LAYERS = 12, DRAWS = 8 };
    double quick = 0, careful = 0;
    for (uint64_t layer = 0; layer < LAYERS; layer++) {
        double mean[E], sd[E];
        struct belief belief = { .n_experts = E, .mean = mean, .sd = sd };
        struct placement start = in_order(E, G, E / G + 1), p;
        uint64_t random = 77 + layer;
        placement_init_like(&p, &start);
        for (uint32_t e = 0; e < E; e++) {
            mean[e] = 0.5 + 30.0 / (1 + below(&random, 40));
            sd[e] = sqrt(4 * mean[e]);
        }
        for (int is_careful = 0; is_careful < 2; is_careful++) {
            struct search_problem problem = { .n_experts = E, .n_devices = G, .n_nodes = 1,
                                              .n_slots = start.n_slots, .seed = layer };
            struct arrange a;
            struct err err;
            arrange_init(&a, &problem, &belief, is_careful ? 2000 : 500);
            assert_true(is_careful ? a.n_tries > 0 : a.n_tries == 0);
            arrange_fresh(&a, &start, &p);
            arrange_fini(&a);
            assert_int_equal(placement_check(&p, &err), 0);
            for (uint64_t i = 0; i < DRAWS; i++) {
                float load[E * SCENARIOS];
                scenario_draw(&belief, G, 4711 + layer * DRAWS + i, load);
                for (uint32_t k = 1; k < SCENARIOS; k++) {
                    double one[E];
                    for (uint32_t e = 0; e < E; e++)
                        one[e] = (double)load[e * SCENARIOS + k];
                    *(is_careful ? &careful : &quick) += resplit(&p, one, NULL);
                }
            }
        }
        placement_fini(&p);
        placement_fini(&start);
    }
    double n = LAYERS * DRAWS * (SCENARIOS - 1);
    print_message("quick %.4f, with care %.4f\n", quick / n, careful / n);
    assert_true(careful / n - 1 < 0.97 * (quick / n - 1));
}

/* ---- against exact answers ------------------------------------------------------------------- */

static void known_loads_reach_the_optimum(void **state)
{
    (void)state;
    uint64_t random = 5;
    double excess = 0, worst = 0;
    int n = 0;
    for (int round = 0; round < 60; round++) {
        uint32_t g = 2 + below(&random, 2), e = 2 + below(&random, 4);
        uint32_t n_slots = (e + g - 1) / g + below(&random, 2);
        double load[8], sum = 0;
        for (uint32_t i = 0; i < e; i++)
            sum += load[i] = 1 + below(&random, 100);
        double best = oracle_copies(load, e, g, n_slots) / (sum / g);
        assert_true(bound_ratio(load, e, g, n_slots) <= best + 1e-9);
        struct task t = { .n_experts = e, .n_devices = g, .n_slots = n_slots, .n_windows = 1,
                          .policy = balance_defaults() };
        memcpy(t.load[0], load, sizeof load);
        t.policy.is_known = true;
        struct placement start = in_order(e, g, n_slots), out;
        struct balance_verdict v;
        placement_init_like(&out, &start);
        propose(&t, &start, true, &out, &v);
        double ours = resplit(&out, load, NULL);
        assert_true(ours >= best - 1e-9);
        excess += ours - best;
        worst = fmax(worst, ours - best);
        n++;
        placement_fini(&start);
        placement_fini(&out);
    }
    print_message("above the optimum: %.4f on average, %.4f at worst\n", excess / n, worst);
    assert_true(excess / n < 0.01);
}

static void bounds_are_below_everything(void **state)
{
    (void)state;
    uint64_t random = 9;
    for (int round = 0; round < 200; round++) {
        uint32_t g = 2 + below(&random, 3), per = 1 + below(&random, 3), e = g * per;
        double load[16], sum = 0;
        for (uint32_t i = 0; i < e; i++)
            sum += load[i] = 1 + below(&random, 1000) / (i + 1);
        double best = oracle_single(load, e, g, per) / (sum / g);
        assert_true(bound_ratio(load, e, g, per) <= best + 1e-9);
        assert_true(bound_ratio(load, e, g, per + 1) <= bound_ratio(load, e, g, per) + 1e-9);
    }
}

/* The authors' example: twelve experts, eight devices on two nodes, sixteen slots. Their plan has
 * 1.208 and 1.242 with even shares; the best that was found with even shares is 1.053 and 1.190. */
static void the_known_example_is_balanced(void **state)
{
    (void)state;
    static const double load[2][12] = {
        { 90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86 },
        { 20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27 },
    };
    for (int layer = 0; layer < 2; layer++)
        for (uint32_t n_nodes = 1; n_nodes <= 2; n_nodes++) {
            struct task t = { .n_experts = 12, .n_devices = 8, .n_slots = 2, .n_windows = 1,
                              .policy = balance_defaults() };
            memcpy(t.load[0], load[layer], sizeof load[layer]);
            t.policy.is_known = true;
            t.policy.n_nodes = n_nodes;
            struct placement start = in_order(12, 8, 2), out;
            struct balance_verdict v;
            placement_init_like(&out, &start);
            propose(&t, &start, true, &out, &v);
            double ratio = resplit(&out, load[layer], NULL);
            print_message("layer %d, %u nodes: %.4f\n", layer, n_nodes, ratio);
            assert_true(ratio < 1.02);
            placement_fini(&start);
            placement_fini(&out);
        }
}

static void copies_go_to_who_carries_most(void **state)
{
    (void)state;
    static const double load[] = { 90, 30, 10, 0 };
    uint32_t copies[4];
    pack_copies(4, 3, 8, load, copies);
    assert_int_equal(copies[0], 3); /* no more than there are devices */
    assert_int_equal(copies[1], 3);
    assert_int_equal(copies[2], 1);
    assert_int_equal(copies[3], 1);
}

static void a_throttled_device_gets_less(void **state)
{
    (void)state;
    static const double speed[4] = { 1, 1, 0.5, 1 };
    struct task t = { .n_experts = 16, .n_devices = 4, .n_slots = 5, .n_windows = 1,
                      .policy = balance_defaults() };
    for (uint32_t e = 0; e < 16; e++)
        t.load[0][e] = 100;
    t.policy.speed = speed;
    t.policy.is_known = true;
    struct placement start = in_order(16, 4, 5), out;
    struct balance_verdict v;
    placement_init_like(&out, &start);
    propose(&t, &start, false, &out, &v);
    double device = 0;
    for (uint32_t s = 10; s < 15; s++)
        device += out.expert[s] < 0 ? 0 : 100 * out.share[s];
    print_message("%s; the slow one gets %.0f of 1600\n", v.reason, device);
    assert_true(v.kind != BALANCE_STAY);
    assert_true(device < 235 && device > 220); /* 1600 / 7 */
    placement_fini(&start);
    placement_fini(&out);
}

/* ---- a story --------------------------------------------------------------------------------- */

static void fill_window(double *load, uint32_t hot, uint64_t window)
{
    for (uint32_t e = 0; e < 32; e++)
        load[e] = (e / 8 == hot ? 900 : 100) + (double)(scenario_hash(window * 32 + e) % 20);
}

static void live(bool is_brief)
{
    struct balance_policy policy = balance_defaults();
    struct placement now = in_order(32, 4, 9), next;
    struct balance_verdict v;
    double load[32], realised, predicted;
    policy.cooldown_windows = 2;
    policy.is_brief = is_brief;
    placement_init_like(&next, &now);
    struct balance *b = balance_create(32, 4, 9, &policy);

    balance_propose(b, &now, false, &next, &v);
    assert_string_equal(v.reason, "stay: no load was seen yet");

    fill_window(load, 1, 0); /* device 1 has all the hot ones */
    balance_observe(b, load, &now);
    balance_propose(b, &now, false, &next, &v);
    print_message("%s\n", v.reason);
    assert_true(v.kind != BALANCE_STAY && v.ratio_before > 2 && v.ratio_after < 1.2);
    balance_applied(b, &now, &v);
    placement_copy(&now, &next);

    fill_window(load, 1, 1);
    balance_observe(b, load, &now);
    assert_true(balance_realised(b, &realised, &predicted) && realised > 1);
    balance_propose(b, &now, false, &next, &v);
    assert_string_equal(v.reason, "stay: 1 windows of cooldown after the last change");

    for (uint64_t w = 2; w < 6; w++) { /* nothing new: nothing moves */
        fill_window(load, 1, w);
        balance_observe(b, load, &now);
        balance_propose(b, &now, false, &next, &v);
        assert_int_equal(v.kind, BALANCE_STAY);
    }

    for (uint64_t w = 6; w < 10; w++) { /* the text turns: other experts are hot, for good */
        fill_window(load, 2, w);
        balance_observe(b, load, &now);
        balance_propose(b, &now, false, &next, &v);
        print_message("%s\n", v.reason);
        balance_applied(b, &now, &v);
        placement_copy(&now, &next);
    }
    fill_window(load, 2, 10);
    assert_true(resplit(&now, load, NULL) < 1.1);
    balance_destroy(b);
    placement_fini(&now);
    placement_fini(&next);
}

static void a_job_moves_when_it_pays_and_learns(void **state)
{
    (void)state;
    live(false);
    live(true); /* it rests in between, and wakes */
}

static void put_together(struct placement *p, const int32_t *expert, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = 0;
        while (p->expert[at] != expert[i])
            at++;
        int32_t other = p->expert[i];
        p->expert[i] = expert[i];
        p->expert[at] = other;
    }
    placement_share_evenly(p);
    placement_keep_homes(p, NULL);
}

/* A plan whose gain turns out negative bars its kind for a while. */
static void what_lost_is_not_repeated_soon(void **state)
{
    (void)state;
    static const int32_t hot[] = { 0, 9, 18, 27 };
    static const struct balance_verdict lost = { .kind = BALANCE_FRESH, .ratio_before = 2,
                                                 .ratio_after = 1 };
    struct balance_policy policy = balance_defaults();
    struct placement before = in_order(32, 4, 9), now, next;
    struct balance_verdict v;
    double load[32], realised, predicted;
    for (uint32_t e = 0; e < 32; e++)
        load[e] = e % 9 == 0 ? 1000 : 10;
    policy.cooldown_windows = 0;
    placement_init_like(&now, &before);
    placement_init_like(&next, &before);
    put_together(&now, hot, 4); /* before, they stood on four devices */
    struct balance *b = balance_create(32, 4, 9, &policy);
    balance_applied(b, &before, &lost);
    for (int w = 0; w < 3; w++)
        balance_observe(b, load, &now);
    assert_true(balance_realised(b, &realised, &predicted));
    print_message("realised %.2f, predicted %.2f windows\n", realised, predicted);
    assert_true(realised < 0 && predicted > 0);
    balance_propose(b, &now, false, &next, &v);
    print_message("%s\n", v.reason);
    assert_true(v.kind != BALANCE_STAY && v.kind != BALANCE_FRESH);
    balance_destroy(b);
    placement_fini(&before);
    placement_fini(&now);
    placement_fini(&next);
}

static void the_peer_is_as_described(void **state)
{
    (void)state;
    static const double load[] = { 90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86 };
    struct placement p = in_order(12, 8, 2);
    struct err err;
    eplb_place(load, &p);
    assert_int_equal(placement_check(&p, &err), 0);
    double ratio = placement_max_load(&p, load, NULL) / (1033 / 8.0);
    print_message("EPLB, global: %.3f\n", ratio);
    assert_true(ratio > 1 && ratio < 1.25);
    placement_fini(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_loads_are_planned_soundly),
        cmocka_unit_test(care_pays),
        cmocka_unit_test(known_loads_reach_the_optimum),
        cmocka_unit_test(bounds_are_below_everything),
        cmocka_unit_test(the_known_example_is_balanced),
        cmocka_unit_test(copies_go_to_who_carries_most),
        cmocka_unit_test(a_throttled_device_gets_less),
        cmocka_unit_test(a_job_moves_when_it_pays_and_learns),
        cmocka_unit_test(what_lost_is_not_repeated_soon),
        cmocka_unit_test(the_peer_is_as_described),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
