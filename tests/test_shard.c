/* test_shard.c - slices of units and experts: gathered whole, gradients summed home, parts owned */
#include "tests/ranks.h"

#include "common/mem.h"
#include "worker/shuffle.h"

/* A value for each element of a tensor, the same on all ranks. */
static float weight_of(const struct tensor_entry *e, uint64_t i)
{
    return (float)((e->offset * 7 + i * 3 + e->unit * 131 + (uint64_t)(e->expert + 1) * 977) %
                   65521);
}

static void fill_weights(struct test_rank *r)
{
    for (size_t t = 0; t < r->map->n_entries; t++) {
        struct shard_part part;
        if (!shard_part(r->shard, &r->map->entries[t], &part))
            continue;
        RANK_CHECK(r, !part.gradients == !tensor_is_trained(&r->map->entries[t]));
        float *x = xcalloc(2 * part.count, sizeof *x), *back = x + part.count;
        for (uint64_t i = 0; i < part.count; i++)
            x[i] = weight_of(&r->map->entries[t], part.first + i);
        shard_part_write(r->shard, &part, 0, part.count, x);
        shard_part_read(r->shard, &part, 0, part.count, back);
        for (uint64_t i = 0; i < part.count; i++)
            RANK_CHECK(r, back[i] == (part.weights ? x[i] : test_rounded(r->dev, x[i])));
        free(x);
    }
}

/* The local slot that holds the tensor's expert, or -1. */
static int32_t slot_of(const struct tensor_entry *e, uint32_t layer, const struct shard_experts *x)
{
    for (uint32_t i = 0; i < x->n_slots && e->expert >= 0 && e->unit == layer + 1; i++)
        if (x->experts[i] == e->expert)
            return (int32_t)i;
    return -1;
}

static bool is_element(const struct test_rank *r, const struct shard_weights *w,
                       const struct tensor_entry *e, uint64_t i)
{
    return test_value_at(r->dev, shard_at(r->dev, w, e->offset), i) ==
           test_rounded(r->dev, weight_of(e, i));
}

static void check_gathered(struct test_rank *r)
{
    uint32_t n_held = 0;
    fill_weights(r);
    RANK_CHECK(r, shard_refresh_all(r->shard, &r->err) == 0);
    RANK_CHECK(r, r->coll->ops->barrier(r->coll, &r->coll->world_group, &r->err) == 0);
    for (uint32_t u = 0; u < r->map->n_units; u++) {
        struct shard_weights whole = {0}, again = {0};
        RANK_CHECK(r, shard_acquire(r->shard, u, &whole, &r->err) == 0);
        RANK_CHECK(r, shard_acquire(r->shard, u, &again, &r->err) == 0 &&
                          again.trained == whole.trained && again.frozen == whole.frozen);
        shard_release(r->shard, u);
        for (size_t t = 0; t < r->map->n_entries && whole.trained; t++) {
            const struct tensor_entry *e = &r->map->entries[t];
            for (uint64_t i = 0; e->unit == u && e->expert < 0 && i < e->count; i++)
                RANK_CHECK(r, e->is_buffer
                                  ? test_get(r->dev, shard_buffers(r->shard) + e->offset + i) ==
                                            weight_of(e, i) &&
                                        shard_host_buffers(r->shard)[e->offset + i] ==
                                            weight_of(e, i)
                                  : is_element(r, &whole, e, i));
        }
        shard_release(r->shard, u);
    }
    for (uint32_t l = 1; l < r->spec->n_layers; l++) {
        struct shard_experts x = {0};
        RANK_CHECK(r, shard_experts_acquire(r->shard, l, &x, &r->err) == 0);
        for (size_t t = 0; t < r->map->n_entries; t++) {
            const struct tensor_entry *e = &r->map->entries[t];
            int32_t slot = slot_of(e, l, &x);
            n_held += slot >= 0;
            for (uint64_t i = 0; slot >= 0 && i < e->count; i++)
                RANK_CHECK(r, is_element(r, &x.weights[slot], e, i));
        }
        shard_experts_release(r->shard, l);
    }
    RANK_CHECK(r, shard_settle(r->shard, &r->err) == 0);
    uint32_t n_filled = 0;
    for (uint32_t i = r->slots.me * r->slots.n_slots, l = 1; l < r->spec->n_layers; l++)
        for (uint32_t k = 0; k < r->slots.n_slots; k++)
            n_filled += r->slots.layers[l].map.expert[i + k] >= 0;
    RANK_CHECK(r, n_held == 3 * n_filled); /* tensors of an expert */
}

/* What a rank adds in micro-batch k: small whole numbers, so that any order of sums is exact. */
static float gradient_of(const struct tensor_entry *e, uint64_t i, uint32_t rank, uint32_t k)
{
    return (float)((weight_of(e, i) > 999 ? 3 : 5) * (int)(rank + 1) + (int)(i % 11) + (int)k);
}

static void add_to(struct device *dev, float *x, float value)
{
    test_put(dev, x, test_get(dev, x) + value);
}

static void add_gradients(struct test_rank *r, uint32_t k)
{
    for (uint32_t u = 0; u < r->map->n_units; u++) {
        float *block = shard_gradient(r->shard, u);
        for (size_t t = 0; t < r->map->n_entries; t++) {
            const struct tensor_entry *e = &r->map->entries[t];
            bool is_here = e->unit == u && e->expert < 0 && tensor_is_trained(e);
            for (uint64_t i = 0; is_here && i < e->count; i++)
                add_to(r->dev, &block[e->offset + i], gradient_of(e, i, r->rank, k));
        }
        RANK_CHECK(r, block == shard_gradient(r->shard, u));
        RANK_CHECK(r, shard_reduce(r->shard, u, &r->err) == 0);
    }
    for (uint32_t l = 1; l < r->spec->n_layers; l++) {
        struct shard_experts x = {0};
        RANK_CHECK(r, shard_experts_acquire(r->shard, l, &x, &r->err) == 0);
        RANK_CHECK(r, x.gradients == NULL);
        shard_experts_gradient(r->shard, l, &x);
        for (size_t t = 0; t < r->map->n_entries; t++) {
            const struct tensor_entry *e = &r->map->entries[t];
            int32_t slot = tensor_is_trained(e) ? slot_of(e, l, &x) : -1;
            for (uint64_t i = 0; slot >= 0 && i < e->count; i++)
                add_to(r->dev, &x.gradients[slot][e->offset + i], gradient_of(e, i, r->rank, k));
        }
        shard_experts_release(r->shard, l);
        RANK_CHECK(r, shard_experts_reduce(r->shard, l, &r->err) == 0);
    }
    RANK_CHECK(r, shard_settle(r->shard, &r->err) == 0);
}

/* Dense gradients come from all ranks; an expert's from those that serve it. */
static float expected_sum(const struct test_rank *r, const struct tensor_entry *e, uint64_t i)
{
    const struct placement *map = e->expert < 0 ? NULL : &r->slots.layers[e->unit - 1].map;
    float sum = 0;
    for (uint32_t rank = 0; rank < r->degrees.world; rank++)
        for (uint32_t k = 0; k < 2; k++)
            if (!map || placement_find(map, rank % r->degrees.ep, (uint32_t)e->expert) >= 0)
                sum += gradient_of(e, i, rank, k);
    return sum;
}

static void check_summed(struct test_rank *r)
{
    for (uint32_t step = 0; step < 2; step++) {
        for (uint32_t k = 0; k < 2; k++)
            add_gradients(r, k);
        RANK_CHECK(r, shard_sum_replicas(r->shard, &r->err) == 0);
        for (size_t t = 0; t < r->map->n_entries; t++) {
            const struct tensor_entry *e = &r->map->entries[t];
            struct shard_part part;
            if (shard_part(r->shard, e, &part) && part.gradients)
                for (uint64_t i = 0; i < part.count; i++)
                    RANK_CHECK(r, test_get(r->dev, &part.gradients[i]) ==
                                      expected_sum(r, e, part.first + i));
        }
        shard_zero_gradients(r->shard);
    }
}

/* user: per rank, for each tensor the floats of which it is the first owner. */
static void count_owned(struct test_rank *r)
{
    uint64_t *owned = (uint64_t *)r->user + r->rank * r->map->n_entries;
    for (size_t t = 0; t < r->map->n_entries; t++) {
        struct shard_part part;
        owned[t] = 0;
        if (shard_part(r->shard, &r->map->entries[t], &part) && part.is_first)
            owned[t] = part.count;
    }
}

static void check_gathered_shuffled(struct test_rank *r)
{
    for (uint64_t seed = 1; seed < 4; seed++) {
        slots_shuffle(&r->slots, seed);
        check_gathered(r);
    }
}

static void check_summed_shuffled(struct test_rank *r)
{
    r->dev->deterministic = false; /* else copies' gradients go home as partials */
    for (uint64_t seed = 1; seed < 4; seed++) {
        slots_shuffle(&r->slots, seed);
        check_summed(r);
    }
}

/* In float32 all trained, and in bfloat16 with some frozen; the other two on some layouts. */
static void run_all(void (*body)(struct test_rank *))
{
    struct model_spec spec = test_spec();
    struct err err = {0};
    for (int some_frozen = 0; some_frozen < 2; some_frozen++) {
        struct tensor_map map;
        assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
        if (some_frozen)
            test_freeze_some(&map);
        for (size_t i = 0; i < N_TEST_LAYOUTS; i++)
            for (test_elem = ELEM_F32; test_elem <= ELEM_BF16; test_elem++)
                if (!some_frozen == (test_elem == ELEM_F32) || i % 4 == 1)
                    test_ranks_run(test_layouts[i], &spec, &map, body, NULL);
        tensor_map_fini(&map);
    }
    test_elem = ELEM_F32;
}

static void whole_units_and_experts_on_any_layout(void **state)
{
    (void)state;
    run_all(check_gathered);
    run_all(check_gathered_shuffled);
}

static void gradients_come_home_on_any_layout(void **state)
{
    (void)state;
    run_all(check_summed);
    run_all(check_summed_shuffled);
}

static void every_float_has_one_first_owner(void **state)
{
    (void)state;
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    uint64_t *owned = calloc(TEST_RANKS_MAX * map.n_entries, sizeof *owned);
    for (size_t i = 0; i < N_TEST_LAYOUTS; i++) {
        test_ranks_run(test_layouts[i], &spec, &map, count_owned, owned);
        for (size_t t = 0; t < map.n_entries; t++) {
            uint64_t n = 0;
            for (uint32_t r = 0; r < test_layouts[i].world; r++)
                n += owned[r * map.n_entries + t];
            assert_int_equal(n, map.entries[t].count);
        }
    }
    free(owned);
    tensor_map_fini(&map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_units_and_experts_on_any_layout),
        cmocka_unit_test(gradients_come_home_on_any_layout),
        cmocka_unit_test(every_float_has_one_first_owner),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
