/* test_dispatch.c - rows reach the ranks of their experts in one order, and come back */
#include "tests/ranks.h"

#include "worker/dispatch.h"

enum { WIDTH = 5, TOP_K = 3, TOKENS_MAX = 64 };

static uint32_t seed0 = 12345;

/* Tokens of rank in round: some ranks have none, in one round nobody has any. */
static int64_t n_tokens_of(uint32_t rank, uint32_t round)
{
    return round == 2 ? 0 : (rank + round) % 3 == 1 ? 0 : (int64_t)(7 + rank * 5 + round * 3);
}

static int32_t expert_of(uint32_t rank, uint32_t round, int64_t slot, uint32_t n_experts)
{
    uint32_t first = (uint32_t)(slot / TOP_K * 7) + rank * 3 + round + seed0;
    if (round == 1) /* everybody wants the same experts */
        return (int32_t)(slot % TOP_K);
    return (int32_t)((first + (uint32_t)(slot % TOP_K) * 3) % n_experts);
}

static float row_value(uint32_t rank, int64_t row, uint32_t i)
{
    return (float)(rank * 10000 + row * 10 + i);
}

/* The rows that a served expert must see: sources ascending, then their slots. */
static void check_served(struct test_rank *r, uint32_t round, const struct dispatch_plan *p,
                         const float *rows, bool by_slot)
{
    uint32_t n_local = r->spec->n_experts / r->degrees.ep, first = r->layout.ep.me * n_local;
    const int64_t *offsets = dispatch_plan_offsets(p);
    int64_t at = 0;
    for (uint32_t e = 0; e < n_local; e++) {
        RANK_CHECK(r, offsets[e] == at);
        for (uint32_t m = 0; m < r->degrees.ep; m++) {
            uint32_t source = r->layout.ep.ranks[m];
            for (int64_t s = 0; s < n_tokens_of(source, round) * TOP_K; s++) {
                if (expert_of(source, round, s, r->spec->n_experts) != (int32_t)(first + e))
                    continue;
                for (uint32_t i = 0; i < WIDTH; i++)
                    RANK_CHECK(r, rows[at * WIDTH + i] ==
                                      row_value(source, by_slot ? s : s / TOP_K, i));
                at++;
            }
        }
    }
    RANK_CHECK(r, offsets[n_local] == at && dispatch_plan_rows(p) == at);
}

static void one_round(struct test_rank *r, struct dispatch *d, uint32_t round)
{
    int64_t n = n_tokens_of(r->rank, round);
    int32_t ids[TOKENS_MAX * TOP_K];
    float slots[TOKENS_MAX * TOP_K * WIDTH], back[TOKENS_MAX * TOP_K * WIDTH];
    static _Thread_local float rows[TEST_RANKS_MAX * TOKENS_MAX * TOP_K * WIDTH];
    struct dispatch_plan *p = NULL;
    for (int64_t s = 0; s < n * TOP_K; s++) {
        ids[s] = expert_of(r->rank, round, s, r->spec->n_experts);
        for (uint32_t i = 0; i < WIDTH; i++)
            slots[s * WIDTH + i] = row_value(r->rank, s, i);
    }
    RANK_CHECK(r, dispatch_plan_create(d, ids, n, &p, &r->err) == 0);
    if (!p)
        return;
    RANK_CHECK(r, dispatch_send_tokens(p, slots, rows, &r->err) == 0);
    check_served(r, round, p, rows, false);
    RANK_CHECK(r, dispatch_send_slots(p, slots, rows, &r->err) == 0);
    check_served(r, round, p, rows, true);
    for (int64_t i = 0; i < dispatch_plan_rows(p) * WIDTH; i++)
        rows[i] = -rows[i];
    RANK_CHECK(r, dispatch_return(p, rows, back, &r->err) == 0);
    for (int64_t i = 0; i < n * TOP_K * WIDTH; i++)
        RANK_CHECK(r, back[i] == -slots[i]);
    dispatch_plan_destroy(p);
}

static void rounds(struct test_rank *r)
{
    struct dispatch *d = NULL;
    RANK_CHECK(r, dispatch_open(&r->layout, r->coll, r->dev, r->spec->n_experts, TOP_K, WIDTH, &d,
                                &r->err) == 0);
    for (uint32_t round = 0; round < 6 && r->rc == 0; round++)
        one_round(r, d, round);
    RANK_CHECK(r, dispatch_seconds(d) > 0);
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
    struct dispatch *d = NULL;
    struct err err = {0};
    assert_int_equal(dispatch_open(&layout, NULL, NULL, 8, 2, 4, &d, &err), -EINVAL);
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
