/* test_route.c - pairs find their places, in order, tokens their rows, and ranks tell where */
#include "tests/gradcheck.h"

static struct random rng = {1};

enum { EXPERTS_HERE = 40, PAIRS_MAX = 400, CHUNKS_MAX = 4, X_MAX = EXPERTS_HERE * CHUNKS_MAX };
enum { PARTS_MAX = 4 * X_MAX, RANKS_HERE = 8 };

struct setup {
    int32_t ids[PAIRS_MAX], first[X_MAX + 1];
    int64_t end[PARTS_MAX], place[PARTS_MAX], chunk_at[CHUNKS_MAX + 1];
    struct route route;
};

static int32_t x_of(const struct setup *s, int64_t pair)
{
    return (int32_t)(pair / s->route.pairs_each) * s->route.n_experts + s->ids[pair];
}

static int64_t begin_of(const struct setup *s, int32_t x, int32_t part)
{
    return part == s->first[x] ? 0 : s->end[part - 1];
}

/* A chunk's parts in a random order, one after another from its place on. */
static void place_parts(struct setup *s, int32_t chunk)
{
    int32_t first = s->first[chunk * s->route.n_experts], order[PARTS_MAX];
    int32_t n = s->first[(chunk + 1) * s->route.n_experts] - first;
    int64_t at = s->chunk_at[chunk];
    for (int32_t i = 0; i < n; i++)
        order[i] = first + i;
    for (int32_t i = n; i-- > 1;) {
        int32_t k = (int32_t)(random_bits(&rng) % (uint32_t)(i + 1)), was = order[i];
        order[i] = order[k];
        order[k] = was;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t x = chunk * s->route.n_experts, part = order[i];
        while (s->first[x + 1] <= part)
            x++;
        s->place[part] = at - begin_of(s, x, part);
        at += s->end[part] - begin_of(s, x, part);
    }
    s->chunk_at[chunk + 1] = at;
}

/* Random ids, a few of them -1; what each chunk has for an expert cut into one to four parts, some
 * of them empty. */
static void make_setup(struct setup *s, int32_t n_experts, int32_t top_k, int64_t n_tokens,
                       int32_t n_chunks)
{
    int64_t n_of[X_MAX] = {0}, each = (n_tokens + n_chunks - 1) / n_chunks;
    int32_t n_parts = 0;
    s->route = (struct route){.n_pairs = n_tokens * top_k,
                              .pairs_each = (each > 0 ? each : 1) * top_k, .n_chunks = n_chunks,
                              .n_experts = n_experts, .top_k = top_k, .first = s->first,
                              .end = s->end, .place = s->place, .chunk_at = s->chunk_at};
    for (int64_t i = 0; i < s->route.n_pairs; i++) {
        s->ids[i] = (int32_t)(random_bits(&rng) % (uint32_t)(n_experts + 1)) - 1;
        if (s->ids[i] >= 0)
            n_of[x_of(s, i)]++;
    }
    for (int32_t x = 0; x < n_chunks * n_experts; x++) {
        int32_t n = 1 + (int32_t)(random_bits(&rng) % 4);
        int64_t left = n_of[x], end = 0;
        s->first[x] = n_parts;
        for (int32_t i = 0; i < n; i++) {
            int64_t take = i + 1 == n ? left : (int64_t)(random_bits(&rng) % (uint64_t)(left + 1));
            left -= take;
            s->end[n_parts++] = end += take;
        }
    }
    s->first[n_chunks * n_experts] = n_parts;
    s->chunk_at[0] = 0;
    for (int32_t c = 0; c < n_chunks; c++)
        place_parts(s, c);
}

static void check_pairs(struct device *dev, const struct setup *s)
{
    int64_t place_of[PAIRS_MAX], pair_at[PAIRS_MAX];
    int64_t n_before[X_MAX] = {0};
    int32_t counts[X_MAX], n_x = s->route.n_chunks * s->route.n_experts;
    memset(place_of, 0xee, sizeof place_of);
    memset(pair_at, 0xee, sizeof pair_at);
    memset(counts, 0xee, sizeof counts);
    dev->ops->route_counts(dev, counts, s->ids, &s->route);
    dev->ops->route_pairs(dev, place_of, pair_at, s->ids, &s->route);
    for (int64_t i = 0; i < s->route.n_pairs; i++) {
        if (s->ids[i] < 0) {
            assert_int_equal(place_of[i], -1);
            continue;
        }
        int32_t x = x_of(s, i), part = s->first[x];
        int64_t r = n_before[x]++, chunk_at = s->chunk_at[i / s->route.pairs_each];
        while (r >= s->end[part])
            part++;
        assert_int_equal(chunk_at + place_of[i], s->place[part] + r);
        assert_int_equal(pair_at[s->place[part] + r], i);
    }
    for (int32_t x = 0; x < n_x; x++)
        assert_int_equal(counts[x], n_before[x]);
}

static const struct {
    int32_t n_experts, top_k;
    int64_t n_tokens;
    int32_t n_chunks;
} shapes[] = {{1, 1, 1, 1},  {1, 1, 0, 1},   {8, 2, 50, 1}, {40, 8, 50, 1}, {3, 3, 133, 1},
              {40, 1, 7, 1}, {40, 8, 50, 4}, {8, 2, 5, 4},  {5, 3, 0, 3},   {3, 4, 99, 2}};

static void pairs_lie_by_part_in_their_order(void **state)
{
    (void)state;
    static struct setup s;
    struct device *dev = test_device(1, true);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int turn = 0; turn < 20; turn++) {
            make_setup(&s, shapes[i].n_experts, shapes[i].top_k, shapes[i].n_tokens,
                       shapes[i].n_chunks);
            check_pairs(dev, &s);
        }
    dev->ops->close(dev);
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Ranks have the same number of a chunk's places each, the last ones fewer. */
static int32_t rank_at(const struct setup *s, int64_t *begin, const int64_t *place_of, int64_t pair,
                       int32_t n_ranks)
{
    int32_t c = (int32_t)(pair / s->route.pairs_each), rank = 0;
    while (rank + 1 < n_ranks && begin[c * (n_ranks + 1) + rank + 1] <= place_of[pair])
        rank++;
    return rank;
}

static void check_rows(struct device *dev, const struct setup *s, int32_t n_ranks, bool joins)
{
    int64_t place_of[PAIRS_MAX], at[PAIRS_MAX], row_of[PAIRS_MAX], pair_at[PAIRS_MAX],
        token_at[PAIRS_MAX], begin[CHUNKS_MAX * (RANKS_HERE + 1)], row = 0;
    int32_t target[RANKS_HERE], counts[CHUNKS_MAX * RANKS_HERE];
    for (int32_t r = 0; r < n_ranks; r++)
        target[r] = joins ? r / 3 * 3 : r;
    for (int32_t c = 0; c < s->route.n_chunks; c++) {
        int64_t n = s->chunk_at[c + 1] - s->chunk_at[c], each = (n + n_ranks - 1) / n_ranks;
        for (int32_t r = 0; r <= n_ranks; r++)
            begin[c * (n_ranks + 1) + r] = r * each < n ? r * each : n;
    }
    struct route_targets targets = {n_ranks, begin, target};
    dev->ops->route_pairs(dev, place_of, at, s->ids, &s->route);
    dev->ops->route_rows(dev, counts, row_of, pair_at, token_at, place_of, &targets, &s->route);
    for (int32_t c = 0; c < s->route.n_chunks; c++)
        for (int32_t to = 0; to < n_ranks; to++) {
            int64_t before = row;
            for (int64_t pair = 0; pair < s->route.n_pairs; pair++) {
                int64_t token = pair / s->route.top_k;
                if (pair / s->route.pairs_each != c || place_of[pair] < 0 ||
                    target[rank_at(s, begin, place_of, pair, n_ranks)] != to)
                    continue;
                if (row == before || token_at[row - 1] != token) { /* the first of its token */
                    assert_int_equal(pair_at[row], pair);
                    assert_int_equal(token_at[row++], token);
                }
                assert_int_equal(row_of[pair], row - 1);
            }
            assert_int_equal(counts[c * n_ranks + to], row - before);
        }
    for (int64_t pair = 0; pair < s->route.n_pairs; pair++)
        assert_true(place_of[pair] >= 0 || row_of[pair] == -1);
}

static void a_token_has_one_row_for_each_target(void **state)
{
    (void)state;
    static struct setup s;
    struct device *dev = test_device(1, true);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int32_t n_ranks = 1; n_ranks <= RANKS_HERE; n_ranks += 3) {
            make_setup(&s, shapes[i].n_experts, shapes[i].top_k, shapes[i].n_tokens,
                       shapes[i].n_chunks);
            check_rows(dev, &s, n_ranks, false);
            check_rows(dev, &s, n_ranks, true);
        }
    dev->ops->close(dev);
}

/* ---- notes and blocks ----------------------------------------------------------------------- */

static void notes_are_written_and_read_by_blocks(void **state)
{
    (void)state;
    struct device *dev = test_device(1, true);
    static const int64_t begin[] = {0, 2, 2, 5}, to[] = {3, 0, 0}, add[] = {100, 7, -10};
    static const int64_t pair_at[] = {4, 0, 9, 2, 3};
    static const int64_t row_of[] = {11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
    static const float weights[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    static const int32_t expected[] = {10, 3, 4, 115, 111};
    static const float weighs[] = {9, 2, 3, 4, 0};
    struct route_notes layout = {3, begin, to, add};
    struct route_note notes[5];
    int64_t at[5];
    float read[5];
    dev->ops->route_write(dev, notes, pair_at, row_of, weights, 2, &layout);
    for (int i = 0; i < 5; i++)
        assert_true(notes[i].at == expected[i] && notes[i].weight == weighs[i]);
    static const int64_t from[] = {0, 1, 5}, back[] = {4, 0};
    dev->ops->route_read(dev, at, read, notes, from, back, 2);
    for (int i = 0; i < 5; i++)
        assert_true(at[i] == expected[(i + 1) % 5] && read[i] == weighs[(i + 1) % 5]);
    static const int64_t of_tokens[] = {100, 0, 0}; /* 2 and 0; 4, 1 and 1 */
    layout.add = of_tokens;
    dev->ops->route_write(dev, notes, pair_at, NULL, NULL, 2, &layout);
    assert_true(notes[0].at == 4 && notes[1].at == 1 && notes[3].at == 102 && notes[4].at == 100);
    assert_true(notes[0].weight == 0 && notes[4].weight == 0);
    dev->ops->close(dev);
}

static void blocks_change_order(void **state)
{
    (void)state;
    struct device *dev = test_device(1, true);
    static const int64_t from[] = {0, 2, 2, 5, 6}, to[] = {4, 4, 0, 3};
    static const int64_t expected[] = {4, 5, 0, 1, 2, 3};
    int64_t to_of[6];
    memset(to_of, 0xee, sizeof to_of);
    dev->ops->route_blocks(dev, to_of, from, to, 4);
    assert_memory_equal(to_of, expected, sizeof to_of);
    dev->ops->route_blocks(dev, NULL, from, to, 0);
    dev->ops->close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_lie_by_part_in_their_order),
        cmocka_unit_test(a_token_has_one_row_for_each_target),
        cmocka_unit_test(notes_are_written_and_read_by_blocks),
        cmocka_unit_test(blocks_change_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
