/* test_transfer.c - experts move between ranks, whole or not at all */
#include "tests/ranks.h"

#include "tests/staged.h"
#include "worker/shuffle.h"
#include "worker/transfer.h"

static uint64_t seed0 = 77;

/* What element i of block `part` (weights, m, v) of a tensor holds, wherever it lies. */
static float value_of(const struct tensor_entry *e, uint64_t i, uint32_t part)
{
    return (float)((e->offset * 7 + i * 3 + e->unit * 131 + (uint64_t)(e->expert + 1) * 977) %
                       65521 + 1) / (float)(3 + part);
}

static void fill(struct test_rank *r)
{
    for (size_t t = 0; t < r->map->n_entries; t++) {
        const struct tensor_entry *e = &r->map->entries[t];
        struct shard_part p;
        for (uint64_t i = 0; shard_part(r->shard, e, &p) && i < p.count; i++) {
            float x = value_of(e, p.first + i, 0);
            shard_part_write(r->shard, &p, i, 1, &x);
            if (p.m) {
                test_put(r->dev, &p.m[i], value_of(e, p.first + i, 1));
                test_put(r->dev, &p.v[i], value_of(e, p.first + i, 2));
            }
        }
    }
    RANK_CHECK(r, shard_refresh_all(r->shard, &r->err) == 0);
}

/* Every home has weights and state of its expert, every copy its weights. */
static void check_all(struct test_rank *r)
{
    for (size_t t = 0; t < r->map->n_entries; t++) {
        const struct tensor_entry *e = &r->map->entries[t];
        struct shard_part p;
        for (uint64_t i = 0; shard_part(r->shard, e, &p) && i < p.count; i++) {
            float x, expected = value_of(e, p.first + i, 0);
            shard_part_read(r->shard, &p, i, 1, &x);
            RANK_CHECK(r, x == (p.weights ? expected : test_rounded(r->dev, expected)));
            RANK_CHECK(r, !p.m || test_get(r->dev, &p.m[i]) == value_of(e, p.first + i, 1));
            RANK_CHECK(r, !p.v || test_get(r->dev, &p.v[i]) == value_of(e, p.first + i, 2));
        }
    }
    for (uint32_t l = 1; l < r->spec->n_layers; l++) {
        struct shard_experts x = {0};
        RANK_CHECK(r, shard_experts_acquire(r->shard, l, &x, &r->err) == 0);
        for (size_t t = 0; t < r->map->n_entries; t++) {
            const struct tensor_entry *e = &r->map->entries[t];
            for (uint32_t slot = 0; slot < x.n_slots; slot++)
                for (uint64_t i = 0; e->unit == l + 1 && e->expert >= 0 &&
                                     x.experts[slot] == e->expert && i < e->count; i++)
                    RANK_CHECK(r, test_value_at(r->dev, shard_at(r->dev, &x.weights[slot],
                                                                 e->offset), i) ==
                                      test_rounded(r->dev, value_of(e, i, 0)));
        }
        shard_experts_release(r->shard, l);
    }
}

static int go_ahead(struct test_rank *r, struct transfer *t)
{
    double seconds;
    int rc = 0;
    while (rc == 0 && !transfer_is_ahead(t))
        rc = transfer_ahead(t, 0, &seconds, &r->err);
    return rc;
}

static int move_to(struct test_rank *r, struct slots *to, bool ahead,
                   struct transfer_result *result)
{
    struct transfer *t = NULL;
    int rc = transfer_create(r->shard, &r->slots, to, NULL, &t, &r->err);
    if (rc == 0 && ahead)
        rc = go_ahead(r, t);
    if (rc == 0)
        rc = transfer_run(t, result, &r->err);
    transfer_destroy(t);
    return rc;
}

static bool is_same_map(const struct slots *a, const struct slots *b)
{
    bool same = true;
    for (uint32_t l = 0; l < a->n_layers; l++)
        for (uint32_t i = 0; slots_is_sparse(a, l) && i < a->n_devices * a->n_slots; i++)
            same = same && a->layers[l].map.expert[i] == b->layers[l].map.expert[i] &&
                   slots_homed_in(a, l, i) == slots_homed_in(b, l, i);
    return same;
}

/* From in order over random placements, and back. */
static void there_and_back(struct test_rank *r)
{
    struct slots first, to;
    struct transfer_result result = {0};
    fill(r);
    slots_init_like(&first, &r->slots);
    for (uint32_t i = 0; i < 6 && r->rc == 0; i++) {
        struct slots wanted;
        slots_init_like(&to, i == 5 ? &first : &r->slots);
        if (i < 5)
            slots_shuffle(&to, seed0 + i);
        to.epoch = i + 1;
        slots_init_like(&wanted, &to);
        RANK_CHECK(r, move_to(r, &to, i % 2, &result) == 0);
        RANK_CHECK(r, r->slots.epoch == i + 1 && is_same_map(&r->slots, &wanted));
        check_all(r);
        slots_fini(&wanted);
    }
    RANK_CHECK(r, is_same_map(&r->slots, &first));
    slots_fini(&first);
}

/* After each stage every expert is where its map says, whole. */
static void stage_by_stage(struct test_rank *r)
{
    struct transfer_result result = {0};
    fill(r);
    for (uint32_t i = 0; i < 5 && r->rc == 0; i++) {
        struct slots to, wanted;
        struct transfer *t = NULL;
        uint32_t *stage[16] = {NULL}, n = 0;
        slots_init_like(&to, &r->slots);
        slots_shuffle(&to, seed0 + 20 + i);
        to.epoch = i + 1;
        staged(&r->slots, &to, stage);
        slots_init_like(&wanted, &to);
        RANK_CHECK(r, transfer_create(r->shard, &r->slots, &to, stage, &t, &r->err) == 0);
        RANK_CHECK(r, i % 2 || go_ahead(r, t) == 0);
        do {
            RANK_CHECK(r, transfer_run(t, &result, &r->err) == 0);
            RANK_CHECK(r, transfer_has_begun(t));
            RANK_CHECK(r, r->slots.epoch == (result.is_last ? i + 1 : i));
            for (uint32_t l = 1; l < r->spec->n_layers; l++)
                RANK_CHECK(r, placement_check(&r->slots.layers[l].map, &r->err) == 0);
            check_all(r);
            n++;
        } while (r->rc == 0 && !result.is_last);
        RANK_CHECK(r, n > 1 || r->slots.n_devices == 1);
        RANK_CHECK(r, is_same_map(&r->slots, &wanted));
        transfer_destroy(t);
        slots_fini(&wanted);
        for (uint32_t l = 0; l < 16; l++)
            free(stage[l]);
    }
}

/* A part arrives with a wrong bit: all ranks say so, and nothing has changed. */
static void a_turned_bit(struct test_rank *r)
{
    struct slots first, to;
    struct transfer_result result = {0};
    fill(r);
    slots_init_like(&first, &r->slots);
    slots_init_like(&to, &r->slots);
    slots_shuffle(&to, seed0);
    RANK_CHECK(r, move_to(r, &to, false, &result) == -EBADMSG);
    RANK_CHECK(r, strstr(r->err.text, "arrived damaged at rank"));
    RANK_CHECK(r, r->slots.epoch == 0 && is_same_map(&r->slots, &first));
    check_all(r);
    slots_init_like(&to, &r->slots); /* the next try is sound */
    slots_shuffle(&to, seed0);
    RANK_CHECK(r, move_to(r, &to, false, &result) == 0 && r->slots.epoch == 1);
    check_all(r);
    slots_fini(&first);
}

/* One expert goes from device 0 to device 1. */
static void plan_one_home(struct test_rank *r, struct slots *to)
{
    slots_init_like(to, &r->slots);
    struct placement *map = &to->layers[1].map;
    uint32_t slot = map->n_slots + 4; /* an empty one: 8 experts over 2 ranks, 2 spare */
    map->expert[map->home[0]] = PLACEMENT_EMPTY;
    map->share[map->home[0]] = 0;
    map->expert[slot] = 0;
    map->share[slot] = 1;
    map->home[0] = slot;
    RANK_CHECK(r, placement_check(map, &r->err) == 0);
    to->epoch = 1;
    slots_index(to);
}

/* What is sent is what was said. */
static void one_home(struct test_rank *r)
{
    struct slots to;
    struct transfer_result result = {0};
    uint64_t slice = 4 * r->map->expert.trained;
    fill(r);
    plan_one_home(r, &to);
    RANK_CHECK(r, move_to(r, &to, false, &result) == 0);
    RANK_CHECK(r, result.sent_bytes == (r->rank == 0 ? 3 * slice : 0));
    check_all(r);
}

/* Frozen weights go before the boundary, which changes nothing until the rest has come. */
static void one_home_ahead(struct test_rank *r)
{
    struct slots to;
    struct transfer *t = NULL;
    struct transfer_result result = {0};
    uint64_t trained = r->map->expert.trained, frozen = r->map->expert.frozen;
    fill(r);
    plan_one_home(r, &to);
    RANK_CHECK(r, transfer_create(r->shard, &r->slots, &to, NULL, &t, &r->err) == 0);
    RANK_CHECK(r, t && !transfer_is_ahead(t) && go_ahead(r, t) == 0 && transfer_is_ahead(t));
    check_all(r);
    RANK_CHECK(r, r->slots.epoch == 0 && transfer_run(t, &result, &r->err) == 0);
    RANK_CHECK(r, result.sent_bytes == (r->rank == 0 ? 4 * (3 * trained + frozen) : 0));
    RANK_CHECK(r, r->slots.epoch == 1);
    check_all(r);
    transfer_destroy(t);
}

static void run(const struct layout_degrees *layouts, size_t n, bool some_frozen,
                void (*body)(struct test_rank *))
{
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    if (some_frozen)
        test_freeze_some(&map);
    for (size_t i = 0; i < n; i++)
        test_ranks_run(layouts[i], &spec, &map, body, NULL);
    tensor_map_fini(&map);
}

static void a_damaged_part_stops_all_and_changes_nothing(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = {{4, 2, 4, 0}};
    setenv("BALLAST_FAILPOINT", "move-checksum:7:error", 1);
    run(layouts, 1, false, a_turned_bit);
    unsetenv("BALLAST_FAILPOINT");
}

static void state_is_the_same_bits_after_a_round_trip_on_any_layout(void **state)
{
    (void)state;
    printf("seed %llu\n", (unsigned long long)seed0);
    run(test_layouts, N_TEST_LAYOUTS, false, there_and_back);
    test_elem = ELEM_BF16;
    run(test_layouts, N_TEST_LAYOUTS, true, there_and_back);
    test_elem = ELEM_F32;
}

static void each_stage_is_whole_on_any_layout(void **state)
{
    (void)state;
    run(test_layouts, N_TEST_LAYOUTS, false, stage_by_stage);
    test_elem = ELEM_BF16;
    run(test_layouts, N_TEST_LAYOUTS, true, stage_by_stage);
    test_elem = ELEM_F32;
}

static void a_moved_home_costs_weights_and_state(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = {{2, 1, 2, 0}};
    run(layouts, 1, false, one_home);
    run(layouts, 1, true, one_home_ahead);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_damaged_part_stops_all_and_changes_nothing),
        cmocka_unit_test(state_is_the_same_bits_after_a_round_trip_on_any_layout),
        cmocka_unit_test(each_stage_is_whole_on_any_layout),
        cmocka_unit_test(a_moved_home_costs_weights_and_state),
    };
    if (argc > 1)
        seed0 = strtoull(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
