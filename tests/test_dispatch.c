/* test_dispatch.c - rows reach the ranks of their experts in one order, and come back */
#include "tests/ranks.h"

#include "worker/dispatch.h"
#include "worker/shuffle.h"

enum { WIDTH = 5, TOP_K = 3, TOKENS_MAX = 64 };
enum { SLOT_BYTES = TOKENS_MAX * TOP_K * WIDTH * sizeof(float) };

static uint32_t seed0 = 12345;

/* Tokens of rank in round: some ranks have none, in one round nobody has any. */
static int64_t n_tokens_of(uint32_t rank, uint32_t round)
{
    return round == 2 ? 0 : (rank + round) % 3 == 1 ? 0 : (int64_t)(7 + rank * 5 + round * 3);
}

static int32_t expert_of(uint32_t rank, uint32_t round, int64_t slot, uint32_t n_experts)
{
    uint32_t first = (uint32_t)(slot / TOP_K * 7) + rank * 3 + round + seed0;
    if (round >= 4 && (slot * 5 + rank) % 7 < round - 3) /* dropped */
        return -1;
    if (round == 1) /* everybody wants the same experts */
        return (int32_t)(slot % TOP_K);
    return (int32_t)((first + (uint32_t)(slot % TOP_K) * 3) % n_experts);
}

static float row_value(uint32_t rank, int64_t row, uint32_t i)
{
    return (float)(rank * 10000 + row * 10 + i);
}

/* The rows that a source has for an expert. */
static int64_t n_wanted(uint32_t source, uint32_t round, int32_t expert, uint32_t n_experts)
{
    int64_t n = 0;
    for (int64_t s = 0; s < n_tokens_of(source, round) * TOP_K; s++)
        n += expert_of(source, round, s, n_experts) == expert;
    return n;
}

/* Every slot sees rows of its own expert alone, sources ascending, then their pairs; all that a
 * source has for it, unless the expert has copies that may share them. */
static void check_served(struct test_rank *r, uint32_t round, const struct dispatch_plan *p,
                         const float *rows)
{
    uint32_t n_slots = r->slots.n_slots, n_experts = r->spec->n_experts, ep = r->degrees.ep;
    const int64_t *offsets = dispatch_plan_offsets(p), *blocks = dispatch_plan_blocks(p);
    const struct slots_layer *l = &r->slots.layers[1];
    int64_t at = 0;
    for (uint32_t i = 0; i < n_slots; i++) {
        int32_t e = l->map.expert[r->slots.me * n_slots + i];
        RANK_CHECK(r, offsets[i] == at);
        for (uint32_t m = 0; m < ep; m++) {
            uint32_t source = r->layout.ep.ranks[m];
            int64_t begin = blocks[i * ep + m], end = blocks[i * ep + m + 1], before = -1;
            int64_t wanted = e < 0 ? 0 : n_wanted(source, round, e, n_experts);
            bool is_whole = end - begin == wanted;
            if (e >= 0 && l->copied_at[e] >= 0)
                is_whole = r->dev->deterministic ? is_whole || end == begin
                                                 : end - begin <= wanted;
            RANK_CHECK(r, is_whole && begin == at);
            for (; at < end && r->rc == 0; at++) {
                int64_t pair = ((int64_t)rows[at * WIDTH] - source * 10000) / 10;
                RANK_CHECK(r, pair > before && pair < n_tokens_of(source, round) * TOP_K);
                RANK_CHECK(r, expert_of(source, round, pair, n_experts) == e);
                for (uint32_t k = 0; k < WIDTH; k++)
                    RANK_CHECK(r, rows[at * WIDTH + k] == row_value(source, pair, k));
                before = pair;
            }
        }
    }
    RANK_CHECK(r, offsets[n_slots] == at && dispatch_plan_rows(p) == at);
}

/* No device has more than the best split of the loads, and a row for each copy in rounding. */
static void check_even(struct test_rank *r, uint32_t round, const struct dispatch_plan *p)
{
    const struct slots_layer *l = &r->slots.layers[1];
    double load[64] = {0};
    for (uint32_t e = 0; e < r->spec->n_experts; e++)
        for (uint32_t m = 0; m < r->degrees.ep; m++)
            load[e] += (double)n_wanted(r->layout.ep.ranks[m], round, (int32_t)e,
                                        r->spec->n_experts);
    struct split *split = split_create(&l->map, NULL);
    double best = split_solve(split, load, NULL);
    split_destroy(split);
    RANK_CHECK(r, (double)dispatch_plan_rows(p) <= best + r->slots.n_slots);
}

static void one_round(struct test_rank *r, struct dispatch *d, uint32_t round)
{
    int64_t n = n_tokens_of(r->rank, round);
    int32_t ids[TOKENS_MAX * TOP_K];
    float slots[TOKENS_MAX * TOP_K * WIDTH], back[TOKENS_MAX * TOP_K * WIDTH];
    static _Thread_local float rows[TEST_RANKS_MAX * TOKENS_MAX * TOP_K * WIDTH];
    static _Thread_local float tokens[TEST_RANKS_MAX * TOKENS_MAX * TOP_K * WIDTH];
    struct dispatch_plan *p = NULL;
    const struct device_ops *ops = r->dev->ops;
    for (int64_t s = 0; s < n * TOP_K; s++) {
        ids[s] = expert_of(r->rank, round, s, r->spec->n_experts);
        for (uint32_t i = 0; i < WIDTH; i++)
            slots[s * WIDTH + i] = row_value(r->rank, s, i);
    }
    int32_t *dev_ids = test_upload(r->dev, ids, sizeof ids);
    float *dev_slots = test_upload(r->dev, slots, SLOT_BYTES);
    float *dev_rows = test_upload(r->dev, NULL, sizeof rows);
    RANK_CHECK(r, dispatch_plan_create(d, 1, dev_ids, n, &p, &r->err) == 0);
    if (!p)
        return;
    RANK_CHECK(r, dispatch_send_slots(p, dev_slots, dev_rows, &r->err) == 0);
    ops->to_host(r->dev, rows, dev_rows, sizeof rows);
    check_served(r, round, p, rows);
    if (!r->dev->deterministic)
        check_even(r, round, p);
    RANK_CHECK(r, dispatch_send_tokens(p, dev_slots, dev_rows, &r->err) == 0);
    ops->to_host(r->dev, tokens, dev_rows, sizeof tokens);
    for (int64_t i = 0; i < dispatch_plan_rows(p) && r->rc == 0; i++) {
        int64_t pair = (int64_t)rows[i * WIDTH] % 10000 / 10;
        RANK_CHECK(r, tokens[i * WIDTH] == rows[i * WIDTH] - (float)((pair - pair / TOP_K) * 10));
    }
    for (int64_t i = 0; i < dispatch_plan_rows(p) * WIDTH; i++)
        rows[i] = -rows[i];
    ops->to_device(r->dev, dev_rows, rows, sizeof rows);
    RANK_CHECK(r, dispatch_return(p, dev_rows, dev_slots, &r->err) == 0);
    ops->to_host(r->dev, back, dev_slots, SLOT_BYTES);
    for (int64_t i = 0; i < n * TOP_K * WIDTH; i++)
        RANK_CHECK(r, back[i] == (ids[i / WIDTH] < 0 ? 0 : -slots[i]));
    dispatch_plan_destroy(p);
    ops->free(r->dev, dev_ids);
    ops->free(r->dev, dev_slots);
    ops->free(r->dev, dev_rows);
}

/* Experts in order, then placements with homes and copies anywhere. */
static void rounds(struct test_rank *r)
{
    struct dispatch *d = dispatch_open(&r->layout, &r->slots, r->coll, r->dev, TOP_K, WIDTH);
    for (uint32_t round = 0; round < 12 && r->rc == 0; round++) {
        r->dev->deterministic = round % 2;
        if (round >= 4)
            slots_shuffle(&r->slots, seed0 + round / 2);
        one_round(r, d, round % 6);
    }
    dispatch_close(d);
}

static void rows_travel_and_return_on_any_layout(void **state)
{
    (void)state;
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    for (size_t i = 0; i < N_TEST_LAYOUTS; i++)
        test_ranks_run(test_layouts[i], &spec, &map, rounds, NULL);
    tensor_map_fini(&map);
}

static void uneven_experts_are_refused(void **state)
{
    (void)state;
    uint32_t ranks[] = {0, 1, 2};
    struct layout layout = {.ep = {ranks, 3, 0}};
    struct model_spec spec = test_spec();
    struct slots slots;
    struct err err = {0};
    assert_int_equal(slots_init(&slots, &spec, &layout, 1, &err), -EINVAL);
    assert_string_equal(err.text, "8 experts do not lie evenly over 3 ranks");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_travel_and_return_on_any_layout),
        cmocka_unit_test(uneven_experts_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
