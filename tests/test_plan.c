/* test_plan.c - moves, rounds, price, renaming */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/plan.h"
#include "coordinator/scenario.h"

static const struct plan_costs costs = { .weight_bytes = 100, .state_bytes = 600,
                                         .link_bytes_s = 100, .node_link_bytes_s = 10 };

static struct placement from_slots(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots,
                                   const int32_t *expert)
{
    struct placement p;
    struct err err;
    assert_int_equal(placement_init(&p, n_experts, n_devices, n_slots, &err), 0);
    memcpy(p.expert, expert, n_devices * n_slots * sizeof *expert);
    placement_share_evenly(&p);
    placement_keep_homes(&p, NULL);
    return p;
}

/* The price alone is that of the moves; their rounds may wait a little more for one another. */
static void check_price(const struct plan *p, const struct placement *from,
                        const struct placement *to, uint32_t n_nodes)
{
    struct plan price;
    plan_price(&price, from, to, n_nodes, &costs);
    assert_int_equal(price.n_moves, p->n_moves);
    assert_int_equal(price.n_rounds, p->n_rounds);
    assert_int_equal(price.n_bytes, p->n_bytes);
    assert_true(price.seconds <= p->seconds + 1e-9 && price.seconds > 0.4 * p->seconds - 1e-9);
    plan_fini(&price);
}

static void moves_are_the_difference(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        int32_t  before[6], after[6]; /* 4 experts, 3 devices, 2 slots */
        uint32_t n_moves, n_rounds, n_bytes;
        double   seconds;
    } rows[] = {
        { "nothing", { 0, 1, 2, 3, -1, -1 }, { 0, 1, 2, 3, -1, -1 }, 0, 0, 0, 0 },
        { "a copy: weights alone", { 0, 1, 2, 3, -1, -1 }, { 0, 1, 2, 3, 0, -1 }, 1, 1, 100, 1 },
        { "a home: with its state", { 0, 1, 2, 3, -1, -1 }, { 0, -1, 2, 3, 1, -1 }, 1, 1, 700, 7 },
        { "a swap: both at once", { 0, 1, 2, 3, -1, -1 }, { 0, 2, 1, 3, -1, -1 }, 2, 1, 1400, 7 },
        { "two from one device: one after the other", { 0, 1, 2, 3, -1, -1 },
          { -1, -1, 2, 0, 3, 1 }, 3, 2, 2100, 14 },
        { "a copy becomes home: state alone", { 0, 1, 2, 3, 0, -1 }, { -1, 1, 2, 3, 0, -1 }, 1, 1,
          600, 6 },
        { "a copy goes: nothing travels", { 0, 1, 2, 3, 0, -1 }, { 0, 1, 2, 3, -1, -1 }, 0, 0, 0,
          0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct placement a = from_slots(4, 3, 2, rows[i].before);
        struct placement b = from_slots(4, 3, 2, rows[i].after);
        struct plan p;
        placement_keep_homes(&b, &a);
        plan_init(&p, &a, &b, 1, &costs);
        if (p.n_moves != rows[i].n_moves || p.n_rounds != rows[i].n_rounds ||
            p.n_bytes != rows[i].n_bytes || fabs(p.seconds - rows[i].seconds) > 1e-9)
            fail_msg("%s: %u moves, %u rounds, %llu bytes, %g s", rows[i].what, p.n_moves,
                     p.n_rounds, (unsigned long long)p.n_bytes, p.seconds);
        check_price(&p, &a, &b, 1);
        plan_fini(&p);
        placement_fini(&a);
        placement_fini(&b);
    }
}

static void weights_come_from_near(void **state)
{
    (void)state;
    /* Two nodes of two devices. Expert 0 is at home on device 0, with a copy on device 3. */
    static const int32_t before[] = { 0, -1, 1, -1, 2, -1, 0, -1 };
    static const int32_t after[] = { 0, -1, 1, -1, 2, 0, 0, 1 };
    struct placement a = from_slots(3, 4, 2, before), b = from_slots(3, 4, 2, after);
    struct plan p;
    plan_init(&p, &a, &b, 2, &costs);
    assert_int_equal(p.n_moves, 2);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(p.move[i].from, p.move[i].expert == 0 ? 6 : 2);
    assert_true(fabs(p.seconds - 10) < 1e-9); /* expert 1 must cross */
    plan_fini(&p);
    placement_fini(&a);
    placement_fini(&b);
}

static uint32_t below(uint64_t *random, uint32_t n)
{
    *random = scenario_hash(*random);
    return (uint32_t)((*random >> 32) * n >> 32);
}

static struct placement any(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots,
                            uint64_t *random)
{
    struct placement p;
    struct err err;
    assert_int_equal(placement_init(&p, n_experts, n_devices, n_slots, &err), 0);
    for (uint32_t i = 0; i < 4 * placement_n_total(&p); i++) {
        uint32_t a = below(random, placement_n_total(&p)), b = below(random, placement_n_total(&p));
        int32_t ea = p.expert[a], eb = p.expert[b];
        if ((ea >= 0 && placement_find(&p, b / n_slots, (uint32_t)ea) >= 0) ||
            (eb >= 0 && placement_find(&p, a / n_slots, (uint32_t)eb) >= 0))
            continue;
        p.expert[a] = eb;
        p.expert[b] = ea;
        uint32_t e = below(random, n_experts);
        if (p.expert[a] < 0 && placement_find(&p, a / n_slots, e) < 0)
            p.expert[a] = (int32_t)e;
    }
    placement_share_evenly(&p);
    placement_keep_homes(&p, NULL);
    return p;
}

/* In each round a device sends one and receives one; no fewer rounds would do; the moves lead from
 * one placement to the other; renaming never makes more of them. */
static void rounds_are_legal_and_few(void **state)
{
    (void)state;
    uint64_t random = 11;
    for (int round = 0; round < 400; round++) {
        uint32_t g = 2 + below(&random, 15), e = g + below(&random, 60);
        uint32_t n_slots = (e + g - 1) / g + 1;
        struct placement a = any(e, g, n_slots, &random), b = any(e, g, n_slots, &random);
        struct err err;
        struct plan p;
        uint32_t n_nodes = g % 2 ? 1 : 2, busiest = 0;
        placement_keep_homes(&b, &a);
        uint32_t n_before = placement_moves(&a, &b);
        plan_align(&b, &a, n_nodes);
        assert_int_equal(placement_check(&b, &err), 0);
        assert_true(n_nodes > 1 || placement_moves(&a, &b) <= n_before);
        plan_init(&p, &a, &b, n_nodes, &costs);
        uint32_t *sends = xcalloc((size_t)g * (p.n_rounds + 1), sizeof *sends);
        uint32_t *receives = xcalloc((size_t)g * (p.n_rounds + 1), sizeof *receives);
        for (uint32_t i = 0; i < p.n_moves; i++) {
            const struct plan_move *m = &p.move[i];
            uint32_t from = m->from / n_slots, to = m->to / n_slots;
            assert_true(m->round < p.n_rounds && from != to);
            assert_int_equal(a.expert[m->from], m->expert);
            assert_int_equal(b.expert[m->to], m->expert);
            assert_int_equal(++sends[from * (p.n_rounds + 1) + m->round], 1);
            assert_int_equal(++receives[to * (p.n_rounds + 1) + m->round], 1);
            uint32_t s = ++sends[from * (p.n_rounds + 1) + p.n_rounds];
            uint32_t r = ++receives[to * (p.n_rounds + 1) + p.n_rounds];
            busiest = s > busiest ? s : busiest;
            busiest = r > busiest ? r : busiest;
        }
        assert_int_equal(busiest, p.n_rounds);
        check_price(&p, &a, &b, n_nodes);
        free(receives);
        free(sends);
        plan_fini(&p);
        placement_fini(&a);
        placement_fini(&b);
    }
}

static void a_renamed_placement_comes_back(void **state)
{
    (void)state;
    uint64_t random = 3;
    enum { G = 16, S = 5 };
    struct placement a = any(64, G, S, &random), b;
    placement_init_like(&b, &a);
    for (uint32_t g = 0; g < G; g++)
        memcpy(b.expert + ((g * 5 + 3) % G) * S, a.expert + g * S, S * sizeof *b.expert);
    placement_share_evenly(&b);
    placement_keep_homes(&b, NULL);
    plan_align(&b, &a, 1);
    assert_memory_equal(b.expert, a.expert, G * S * sizeof *a.expert);
    assert_memory_equal(b.home, a.home, 64 * sizeof *a.home);
    placement_fini(&a);
    placement_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moves_are_the_difference),
        cmocka_unit_test(weights_come_from_near),
        cmocka_unit_test(rounds_are_legal_and_few),
        cmocka_unit_test(a_renamed_placement_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
