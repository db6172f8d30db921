/* test_plans.c - a plan's life on one rank: what arrives, what is refused, what is carried out
 *
 * Its transfers only take time, at rates that make the sums plain. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "common/mem.h"
#include "tests/prepare.h"
#include "tests/staged.h"
#include "worker/plans.h"
#include "worker/shuffle.h"
#include "worker/virtual_transfer.h"

#define DEVICES 2u
#define JOB     7u
#define ATTEMPT 1u

struct rank {
    struct plans *plans;
    struct slots  slots;
    struct cluster cluster;
    uint32_t node[DEVICES];
    uint64_t sent[DEVICES];
    struct virtual_place place;
    bool is_full; /* no transfer can be made */
};

/* 1 GB/s and no latency; an expert is 2 MB, half of it frozen. */
static void setup(struct rank *r)
{
    uint32_t ranks[DEVICES] = {0, 1};
    struct layout layout = {.ep = {ranks, DEVICES, 0}};
    struct err err = {0};
    struct model_spec *m = xcalloc(1, sizeof *m);
    m->n_layers = 2;
    m->n_experts = 8;
    m->layers[1].mlp = MLP_MOE;
    *r = (struct rank){.plans = plans_create()};
    assert_int_equal(slots_init(&r->slots, m, &layout, 1, &err), 0);
    r->cluster = (struct cluster){.node_gb_per_s = 1};
    r->place = (struct virtual_place){r->node, &r->cluster, .sent_bytes = r->sent};
    r->place.part_bytes[SLOT_FROZEN] = r->place.part_bytes[SLOT_WEIGHTS] = 1000000;
    free(m);
}

static void teardown(struct rank *r)
{
    plans_destroy(r->plans);
    slots_fini(&r->slots);
}

static int make(void *rank, struct slots *slots, struct slots *to, uint32_t *const *stage,
                struct transfer **out, struct err *err)
{
    struct rank *r = rank;
    if (r->is_full)
        return err_set(err, -ENOMEM, "no memory");
    return virtual_transfer_create(&r->place, slots, to, stage, out);
}

static void take(struct rank *r)
{
    plans_take(r->plans, JOB, ATTEMPT, make, r, &r->slots);
}

/* Experts 0 and 1 of device 0 change places with 4 and 5 of device 1. */
static void swap_two(const struct rank *r, struct slots *to, uint32_t epoch)
{
    slots_init_like(to, &r->slots);
    struct placement *map = &to->layers[1].map;
    for (uint32_t e = 0; e < 2; e++) {
        uint32_t here = map->home[e], there = map->home[e + 4];
        map->expert[here] = (int32_t)e + 4;
        map->expert[there] = (int32_t)e;
        map->home[e] = there;
        map->home[e + 4] = here;
    }
    to->epoch = epoch;
    slots_index(to);
}

static void arrive(struct rank *r, uint32_t epoch, uint32_t base)
{
    struct slots to;
    swap_two(r, &to, epoch);
    plans_prepare(r->plans, prepare_of(&to, base, NULL));
    slots_fini(&to);
}

static void abort_plan(struct rank *r, uint32_t epoch)
{
    Ballast__AbortPlan m = BALLAST__ABORT_PLAN__INIT;
    m.epoch = epoch;
    plans_abort(r->plans, &m);
}

/* ---- what is refused ------------------------------------------------------------------------ */

static void what_cannot_be_is_refused(void **state)
{
    static const struct {
        const char *what;
        uint32_t in_force, epoch, base, aborted;
        bool is_full;
        const char *text;
    } rows[] = {
        {"another placement is in force", 2, 3, 1, 0, false,
         "plan 3 starts from placement 1, in force is 2"},
        {"its abort came first", 0, 3, 0, 4, false, "plan 3 was aborted"},
        {"no room for what comes here", 0, 1, 0, 0, true, "no memory"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct rank r;
        setup(&r);
        r.slots.epoch = rows[i].in_force;
        r.is_full = rows[i].is_full;
        abort_plan(&r, rows[i].aborted);
        arrive(&r, rows[i].epoch, rows[i].base);
        take(&r);
        struct plans_facts f = plans_facts(r.plans);
        if (plans_ready(r.plans) != 0 || f.rejected_epoch != rows[i].epoch ||
            strcmp(f.text, rows[i].text) != 0)
            fail_msg("%s: ready %u, rejected %u: %s", rows[i].what, plans_ready(r.plans),
                     f.rejected_epoch, f.text);
        teardown(&r);
    }
}

static void others_plans_are_none(void **state)
{
    struct rank r;
    (void)state;
    setup(&r);
    arrive(&r, 1, 0);
    plans_take(r.plans, JOB, ATTEMPT + 1, make, &r, &r.slots);
    struct plans_facts f = plans_facts(r.plans);
    assert_int_equal(plans_ready(r.plans) + f.prepared_epoch + f.rejected_epoch, 0);
    teardown(&r);
}

/* ---- which one counts ----------------------------------------------------------------------- */

static void the_newest_counts(void **state)
{
    struct rank r;
    (void)state;
    setup(&r);
    arrive(&r, 2, 0);
    arrive(&r, 1, 0); /* late */
    take(&r);
    assert_int_equal(plans_ready(r.plans), 2);
    arrive(&r, 2, 0); /* said again */
    arrive(&r, 3, 0);
    take(&r);
    assert_int_equal(plans_ready(r.plans), 3);
    assert_int_equal(plans_facts(r.plans).prepared_epoch, 3);
    abort_plan(&r, 2); /* that one has gone */
    take(&r);
    assert_int_equal(plans_ready(r.plans), 3);
    abort_plan(&r, 3);
    take(&r);
    assert_int_equal(plans_ready(r.plans), 0);
    assert_string_equal(plans_facts(r.plans).text, "plan 3 was aborted");
    teardown(&r);
}

/* ---- what is carried out -------------------------------------------------------------------- */

/* Four experts change places, in rounds of one each way: two rounds of 1 ms go ahead, one at each
 * boundary, two more are the plan's only stage. */
static void pauses_and_bytes_add_up(void **state)
{
    struct rank r;
    struct transfer_result moved;
    double s;
    (void)state;
    setup(&r);
    arrive(&r, 1, 0);
    take(&r);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(plans_ahead(r.plans), 0);
        assert_int_equal(plans_go_ahead(r.plans, 1000000, &s, NULL), 0);
        assert_float_equal(s, 0.001, 1e-9);
    }
    assert_int_equal(plans_ahead(r.plans), 1);
    assert_int_equal(r.slots.epoch, 0);
    assert_int_equal(plans_carry_out(r.plans, &moved, NULL), 0);
    assert_true(moved.is_last);
    assert_float_equal(moved.seconds, 0.002, 1e-9);
    assert_int_equal(moved.sent_bytes, 8000000); /* of both devices, with what went ahead */
    assert_int_equal(r.slots.epoch, 1);
    assert_int_equal(slots_home(&r.slots, 1, 0), 1);
    struct plans_facts f = plans_facts(r.plans);
    assert_int_equal(f.moved_bytes, 8000000);
    assert_float_equal(f.pause_s, 0.002, 1e-9);
    assert_int_equal(r.sent[0], 4000000);
    teardown(&r);
}

/* A boundary is held up by what moves there, the plan by the longest of its boundaries. */
static void what_goes_ahead_may_be_the_longest(void **state)
{
    struct rank r;
    struct transfer_result moved;
    double s;
    (void)state;
    setup(&r);
    r.place.part_bytes[SLOT_FROZEN] = 9000000;
    arrive(&r, 1, 0);
    take(&r);
    assert_int_equal(plans_go_ahead(r.plans, 0, &s, NULL), 0);
    assert_float_equal(s, 0.018, 1e-9);
    assert_int_equal(plans_carry_out(r.plans, &moved, NULL), 0);
    assert_float_equal(moved.seconds, 0.002, 1e-9);
    assert_float_equal(plans_facts(r.plans).pause_s, 0.018, 1e-9);
    teardown(&r);
}

static void nothing_stops_a_plan_between_its_stages(void **state)
{
    struct rank r;
    struct slots to;
    struct transfer_result moved;
    uint32_t *stage[2] = {NULL}, n = 1;
    (void)state;
    setup(&r);
    slots_init_like(&to, &r.slots);
    slots_shuffle(&to, 5);
    to.epoch = 1;
    staged(&r.slots, &to, stage);
    plans_prepare(r.plans, prepare_of(&to, 0, stage));
    take(&r);
    assert_int_equal(plans_carry_out(r.plans, &moved, NULL), 0);
    assert_false(moved.is_last);
    assert_true(plans_has_begun(r.plans));
    abort_plan(&r, 1);
    arrive(&r, 2, 0);
    for (; !moved.is_last; n++) {
        take(&r);
        assert_int_equal(plans_ready(r.plans), 1);
        assert_int_equal(r.slots.epoch, 0);
        assert_int_equal(plans_carry_out(r.plans, &moved, NULL), 0);
    }
    assert_true(n > 1 && n <= STAGES_MAX);
    assert_int_equal(r.slots.epoch, 1);
    assert_memory_equal(r.slots.layers[1].map.expert, to.layers[1].map.expert,
                        placement_n_total(&to.layers[1].map) * sizeof(int32_t));
    take(&r);
    assert_string_equal(plans_facts(r.plans).text,
                        "plan 2 starts from placement 0, in force is 1");
    for (uint32_t l = 0; l < 2; l++)
        free(stage[l]);
    slots_fini(&to);
    teardown(&r);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(others_plans_are_none),
        cmocka_unit_test(the_newest_counts),
        cmocka_unit_test(pauses_and_bytes_add_up),
        cmocka_unit_test(what_goes_ahead_may_be_the_longest),
        cmocka_unit_test(nothing_stops_a_plan_between_its_stages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
