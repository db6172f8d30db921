/* test_route.c - pairs find their places, in order, and blocks of rows change order */
#include "tests/gradcheck.h"

static struct random rng = {1};

enum { EXPERTS_HERE = 40, PAIRS_MAX = 400, PARTS_MAX = 4 * EXPERTS_HERE };

struct setup {
    int32_t ids[PAIRS_MAX], first[EXPERTS_HERE + 1];
    int64_t end[PARTS_MAX], place[PARTS_MAX];
    struct route route;
    int64_t n_packed; /* rows with a place */
};

/* Random ids, a few of them -1; each expert's rows cut into one to four parts, some of them empty,
 * parts packed in a random order. */
static void make_setup(struct setup *s, int32_t n_experts, int32_t top_k, int64_t n_tokens)
{
    int64_t n_of[EXPERTS_HERE] = {0};
    int32_t order[PARTS_MAX], n_parts = 0;
    s->route = (struct route){n_tokens * top_k, n_experts, top_k, s->first, s->end, s->place};
    s->n_packed = 0;
    for (int64_t i = 0; i < s->route.n_pairs; i++) {
        s->ids[i] = (int32_t)(random_bits(&rng) % (uint32_t)(n_experts + 1)) - 1;
        if (s->ids[i] >= 0) {
            n_of[s->ids[i]]++;
            s->n_packed++;
        }
    }
    for (int32_t e = 0; e < n_experts; e++) {
        int32_t n = 1 + (int32_t)(random_bits(&rng) % 4);
        int64_t left = n_of[e], end = 0;
        s->first[e] = n_parts;
        for (int32_t i = 0; i < n; i++) {
            int64_t take = i + 1 == n ? left : (int64_t)(random_bits(&rng) % (uint64_t)(left + 1));
            left -= take;
            s->end[n_parts] = end += take;
            order[n_parts] = n_parts;
            n_parts++;
        }
    }
    s->first[n_experts] = n_parts;
    for (int32_t i = n_parts; i-- > 1;) {
        int32_t k = (int32_t)(random_bits(&rng) % (uint32_t)(i + 1)), was = order[i];
        order[i] = order[k];
        order[k] = was;
    }
    int64_t at = 0;
    for (int32_t i = 0; i < n_parts; i++) {
        int32_t e = 0, part = order[i];
        while (s->first[e + 1] <= part)
            e++;
        int64_t before = part == s->first[e] ? 0 : s->end[part - 1];
        s->place[part] = at - before;
        at += s->end[part] - before;
    }
    assert_int_equal(at, s->n_packed);
}

static void check_pairs(struct device *dev, const struct setup *s)
{
    int64_t place_of[PAIRS_MAX], pair_at[PAIRS_MAX], token_at[PAIRS_MAX];
    int64_t n_before[EXPERTS_HERE] = {0};
    int32_t counts[EXPERTS_HERE];
    memset(place_of, 0xee, sizeof place_of);
    memset(pair_at, 0xee, sizeof pair_at);
    memset(token_at, 0xee, sizeof token_at);
    memset(counts, 0xee, sizeof counts);
    dev->ops->route_counts(dev, counts, s->ids, s->route.n_pairs, s->route.n_experts);
    dev->ops->route_pairs(dev, place_of, pair_at, token_at, s->ids, &s->route);
    for (int64_t i = 0; i < s->route.n_pairs; i++) {
        int32_t e = s->ids[i];
        if (e < 0) {
            assert_int_equal(place_of[i], -1);
            continue;
        }
        int64_t r = n_before[e]++;
        int32_t part = s->first[e];
        while (r >= s->end[part])
            part++;
        assert_int_equal(place_of[i], s->place[part] + r);
        assert_int_equal(pair_at[place_of[i]], i);
        assert_int_equal(token_at[place_of[i]], i / s->route.top_k);
    }
    for (int32_t e = 0; e < s->route.n_experts; e++)
        assert_int_equal(counts[e], n_before[e]);
}

static void pairs_lie_by_part_in_their_order(void **state)
{
    (void)state;
    static const struct {
        int32_t n_experts, top_k;
        int64_t n_tokens;
    } rows[] = {{1, 1, 1}, {1, 1, 0}, {8, 2, 50}, {40, 8, 50}, {3, 3, 133}, {40, 1, 7}};
    static struct setup s;
    struct device *dev = test_device(1, true);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int turn = 0; turn < 20; turn++) {
            make_setup(&s, rows[i].n_experts, rows[i].top_k, rows[i].n_tokens);
            check_pairs(dev, &s);
        }
    dev->ops->close(dev);
}

static void blocks_change_order(void **state)
{
    (void)state;
    struct device *dev = test_device(1, true);
    static const int64_t from[] = {0, 2, 2, 5, 6}, to[] = {4, 4, 0, 3};
    static const int64_t to_expected[] = {4, 5, 0, 1, 2, 3}, from_expected[] = {2, 3, 4, 5, 0, 1};
    int64_t to_of[6], from_of[6];
    memset(to_of, 0xee, sizeof to_of);
    memset(from_of, 0xee, sizeof from_of);
    dev->ops->route_blocks(dev, to_of, from_of, from, to, 4);
    assert_memory_equal(to_of, to_expected, sizeof to_of);
    assert_memory_equal(from_of, from_expected, sizeof from_of);
    dev->ops->route_blocks(dev, NULL, NULL, from, to, 0);
    dev->ops->close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_lie_by_part_in_their_order),
        cmocka_unit_test(blocks_change_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
