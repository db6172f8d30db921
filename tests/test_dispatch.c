/* test_dispatch.c - rows reach the ranks of their experts in one order, and come back, whatever the
 * way; no row is sent twice, and no rank gets more at once than it takes */
#include "tests/ranks.h"

#include <stdatomic.h>

#include "worker/dispatch.h"
#include "worker/shuffle.h"

enum { WIDTH = 5, TOP_K = 3, TOKENS_MAX = 64, CHUNKS = 3, FEW_ROWS = 48 };
enum { ROWS_MAX = TEST_RANKS_MAX * TOKENS_MAX * TOP_K };

static uint32_t seed0 = 12345;

/* How the ranks of a group lie on nodes, and how rows travel. */
static const struct way_row {
    const char *shows;
    uint32_t n_chunks;
    bool     hierarchical, overlap;
    uint32_t nodes[TEST_RANKS_MAX]; /* by place in the group */
    int64_t  rows_max; /* 0: no limit */
} ways[] = {
    {"one after another", CHUNKS, false, false, {0}},
    {"overlapped", CHUNKS, false, true, {0}},
    {"two nodes", CHUNKS, true, false, {0, 0, 0, 0, 1, 1, 1, 1}},
    {"two nodes of few ranks, overlapped", CHUNKS, true, true, {0, 0, 1, 1, 1, 1, 1, 1}},
    {"four nodes", CHUNKS, true, true, {5, 5, 2, 2, 7, 7, 1, 1}},
    {"nodes in no order, one of one rank", CHUNKS, true, true, {3, 1, 3, 1, 1, 3, 3, 9}},
    {"two nodes, each row straight", CHUNKS, false, true, {0, 0, 0, 0, 1, 1, 1, 1}},
    {"in one chunk", 1, false, false, {0}},
    {"few rows at once", CHUNKS, false, true, {0}, FEW_ROWS},
    {"few rows at once, one after another", CHUNKS, false, false, {0}, FEW_ROWS},
    {"few rows at once, two nodes", CHUNKS, true, true, {0, 0, 0, 0, 1, 1, 1, 1}, FEW_ROWS},
};
enum { N_WAYS = sizeof ways / sizeof *ways };

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

static float token_value(uint32_t rank, int64_t token, uint32_t i)
{
    return (float)(rank * 10000 + token * 10 + i);
}

/* Of a pair; no two are alike. */
static float weight_of(uint32_t rank, int64_t pair)
{
    return (float)(rank * 1000 + pair + 1);
}

static int64_t chunk_of(int64_t token, int64_t n_tokens, uint32_t n_chunks)
{
    return token / ((n_tokens + n_chunks - 1) / n_chunks);
}

/* The rows that a source has for an expert in a chunk. */
static int64_t n_wanted(uint32_t source, uint32_t round, int64_t chunk, uint32_t n_chunks,
                        int32_t expert, uint32_t n_experts)
{
    int64_t n = 0, n_tokens = n_tokens_of(source, round);
    for (int64_t s = 0; s < n_tokens * TOP_K; s++)
        n += expert_of(source, round, s, n_experts) == expert &&
             chunk_of(s / TOP_K, n_tokens, n_chunks) == chunk;
    return n;
}

/* ---- what all ranks have seen --------------------------------------------------------------- */

static struct seen {
    atomic_bool rank[TEST_RANKS_MAX][TEST_RANKS_MAX][TOKENS_MAX]; /* dest, source, token */
    atomic_bool node[TEST_RANKS_MAX][TEST_RANKS_MAX][TOKENS_MAX];
    _Atomic uint64_t to_ranks, to_nodes; /* distinct tokens for others, for other nodes' */
    _Atomic uint64_t between_ranks;      /* of to_ranks, those to another node */
    _Atomic uint64_t sent, sent_between;
} seen;
static _Atomic uint64_t n_cut; /* plans with more pieces than chunks */

/* By atomics, too: who looks for races does not see that ranks have met. */
static void forget_seen(void)
{
    atomic_bool *flags[] = {&seen.rank[0][0][0], &seen.node[0][0][0]};
    _Atomic uint64_t *sums[] = {&seen.to_ranks, &seen.to_nodes, &seen.between_ranks, &seen.sent,
                                &seen.sent_between};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        for (size_t k = 0; k < sizeof seen.rank / sizeof(atomic_bool); k++)
            atomic_store(&flags[i][k], false);
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        atomic_store(sums[i], 0);
}

static void see(struct test_rank *r, const struct way_row *w, uint32_t source, int64_t token)
{
    uint32_t me = r->layout.ep.me;
    uint32_t first = 0; /* of my node */
    if (r->degrees.ep != r->degrees.world)
        return;
    while (w->nodes[first] != w->nodes[me])
        first++;
    bool is_other = w->nodes[source] != w->nodes[me];
    if (!atomic_exchange(&seen.rank[me][source][token], true) && source != me) {
        atomic_fetch_add(&seen.to_ranks, 1);
        atomic_fetch_add(&seen.between_ranks, is_other);
    }
    if (!atomic_exchange(&seen.node[first][source][token], true) && is_other)
        atomic_fetch_add(&seen.to_nodes, 1);
}

static void barrier(struct test_rank *r)
{
    RANK_CHECK(r, r->coll->ops->barrier(r->coll, &r->coll->world_group, &r->err) == 0);
}

/* Layouts with one expert group only, of which all ranks tell what they saw. */
static void check_traffic(struct test_rank *r, const struct way_row *w,
                          const struct dispatch_traffic *was, const struct dispatch *d)
{
    struct dispatch_traffic now = dispatch_traffic(d);
    uint64_t sent = now.sent - was->sent, between = now.sent_between - was->sent_between;
    if (r->degrees.ep != r->degrees.world)
        return;
    atomic_fetch_add(&seen.sent, sent);
    atomic_fetch_add(&seen.sent_between, between);
    barrier(r);
    if (w->rows_max) { /* a token may go once with each piece */
        RANK_CHECK(r, atomic_load(&seen.sent) >= atomic_load(&seen.to_ranks));
    } else if (!w->hierarchical) {
        RANK_CHECK(r, atomic_load(&seen.sent) == atomic_load(&seen.to_ranks));
        RANK_CHECK(r, atomic_load(&seen.sent_between) == atomic_load(&seen.between_ranks));
    } else {
        RANK_CHECK(r, atomic_load(&seen.sent_between) == atomic_load(&seen.to_nodes));
    }
    barrier(r);
    if (r->rank == 0)
        forget_seen();
    barrier(r);
}

/* ---- one piece ------------------------------------------------------------------------------ */

/* Which part of what a chunk has a piece brings. */
struct part {
    uint32_t chunk, i, n;
};

static struct part part_of(const struct test_rank *r, const struct way_row *w,
                           const struct dispatch_plan *p, uint32_t piece)
{
    uint32_t n = dispatch_plan_pieces(p) / (r->degrees.ep > 1 ? w->n_chunks : 1);
    return (struct part){piece / n, piece % n, n};
}

static int64_t in_part(const struct part *x, int64_t n)
{
    return n * (x->i + 1) / x->n - n * x->i / x->n;
}

/* Every slot sees rows of its own expert alone, sources ascending, then their pairs; all that a
 * source has for it, unless the expert has copies that may share them. rows: weights. */
static void check_served(struct test_rank *r, const struct way_row *w, uint32_t round,
                         const struct part *x, const struct dispatch_piece *c, const float *rows,
                         const float *tokens)
{
    uint32_t n_slots = r->slots.n_slots, n_experts = r->spec->n_experts, ep = r->degrees.ep;
    uint32_t n_chunks = ep > 1 ? w->n_chunks : 1;
    const struct slots_layer *l = &r->slots.layers[1];
    int64_t at = 0;
    for (uint32_t i = 0; i < n_slots; i++) {
        int32_t e = l->map.expert[r->slots.me * n_slots + i];
        RANK_CHECK(r, c->offsets[i] == at);
        for (uint32_t m = 0; m < ep; m++) {
            uint32_t source = r->layout.ep.ranks[m];
            int64_t begin = c->blocks[i * ep + m], end = c->blocks[i * ep + m + 1], before = -1;
            int64_t wanted = e < 0 ? 0 : n_wanted(source, round, x->chunk, n_chunks, e, n_experts);
            bool is_whole = end - begin == in_part(x, wanted);
            if (e >= 0 && l->copied_at[e] >= 0)
                is_whole = r->dev->deterministic ? is_whole || end == begin
                                                 : end - begin <= wanted / x->n + 1;
            RANK_CHECK(r, is_whole && begin == at);
            for (; at < end && r->rc == 0; at++) {
                int64_t pair = (int64_t)rows[at * WIDTH] - source * 1000 - 1;
                int64_t token = pair / TOP_K;
                RANK_CHECK(r, pair > before && pair < n_tokens_of(source, round) * TOP_K);
                RANK_CHECK(r, expert_of(source, round, pair, n_experts) == e);
                for (uint32_t k = 0; k < WIDTH; k++) {
                    RANK_CHECK(r, rows[at * WIDTH + k] == weight_of(source, pair) * (float)(k + 1));
                    RANK_CHECK(r, tokens[at * WIDTH + k] == token_value(source, token, k));
                }
                see(r, w, m, token);
                before = pair;
            }
        }
    }
    RANK_CHECK(r, c->offsets[n_slots] == at && c->n_rows == at);
}

/* No device has more than the best split of the loads, and a row for each copy in rounding. */
static void check_even(struct test_rank *r, const struct way_row *w, uint32_t round, uint32_t chunk,
                       int64_t n_rows)
{
    const struct slots_layer *l = &r->slots.layers[1];
    uint32_t n_chunks = r->degrees.ep > 1 ? w->n_chunks : 1;
    double load[64] = {0};
    for (uint32_t e = 0; e < r->spec->n_experts; e++)
        for (uint32_t m = 0; m < r->degrees.ep; m++)
            load[e] += (double)n_wanted(r->layout.ep.ranks[m], round, chunk, n_chunks, (int32_t)e,
                                        r->spec->n_experts);
    struct split *split = split_create(&l->map, NULL);
    double best = split_solve(split, load, NULL);
    split_destroy(split);
    RANK_CHECK(r, (double)n_rows <= best + r->slots.n_slots);
}

/* ---- one plan ------------------------------------------------------------------------------- */

struct buffers { /* of a rank */
    float *x, *ones, *slots, *rows; /* on the device */
    float *weights;
    int32_t *ids;
    float host[ROWS_MAX * WIDTH], tokens[ROWS_MAX * WIDTH];
    float reference[ROWS_MAX * WIDTH]; /* of the first way */
    float back[TOKENS_MAX * TOP_K * WIDTH];
};

static void upload(struct test_rank *r, struct buffers *b, uint32_t round)
{
    float x[TOKENS_MAX * WIDTH], ones[TOKENS_MAX * WIDTH], weights[TOKENS_MAX * TOP_K];
    int32_t ids[TOKENS_MAX * TOP_K];
    for (int64_t i = 0; i < TOKENS_MAX * WIDTH; i++) {
        x[i] = token_value(r->rank, i / WIDTH, (uint32_t)(i % WIDTH));
        ones[i] = (float)(i % WIDTH + 1);
    }
    for (int64_t s = 0; s < TOKENS_MAX * TOP_K; s++) {
        ids[s] = expert_of(r->rank, round, s, r->spec->n_experts);
        weights[s] = weight_of(r->rank, s);
    }
    b->x = test_upload(r->dev, x, sizeof x);
    b->ones = test_upload(r->dev, ones, sizeof ones);
    b->weights = test_upload(r->dev, weights, sizeof weights);
    b->ids = test_upload(r->dev, ids, sizeof ids);
    b->slots = test_upload(r->dev, NULL, sizeof b->back);
    b->rows = test_upload(r->dev, NULL, sizeof b->host);
}

static void drop(struct test_rank *r, struct buffers *b)
{
    void *const all[] = {b->x, b->ones, b->weights, b->ids, b->slots, b->rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        r->dev->ops->free(r->dev, all[i]);
}

/* All pieces of x, the next one on its way while one is read; to host (rows of all pieces). */
static void send_all(struct test_rank *r, struct dispatch_plan *p, const float *x, bool weighed,
                     struct buffers *b, float *host)
{
    uint32_t n = dispatch_plan_pieces(p);
    if (r->rc == 0)
        RANK_CHECK(r, dispatch_send_start(p, 0, x, &r->err) == 0);
    for (uint32_t c = 0; c < n && r->rc == 0; c++) {
        struct dispatch_piece at = dispatch_piece_of(p, c);
        RANK_CHECK(r, dispatch_send_finish(p, c, weighed, b->rows, &r->err) == 0);
        if (c + 1 < n && r->rc == 0)
            RANK_CHECK(r, dispatch_send_start(p, c + 1, x, &r->err) == 0);
        r->dev->ops->to_host(r->dev, host + at.first_row * WIDTH, b->rows,
                             (size_t)at.n_rows * WIDTH * sizeof *host);
        if (c + 1 < n && c % 2 && r->rc == 0)
            RANK_CHECK(r, dispatch_send_pass_on(p, c + 1, &r->err) == 0);
    }
}

/* What was served goes back, negative. */
static void return_all(struct test_rank *r, struct dispatch_plan *p, struct buffers *b)
{
    uint32_t n = dispatch_plan_pieces(p);
    for (int64_t i = 0; i < dispatch_plan_rows(p) * WIDTH; i++)
        b->host[i] = -b->host[i];
    for (uint32_t c = 0; c < n && r->rc == 0; c++) {
        struct dispatch_piece at = dispatch_piece_of(p, c);
        r->dev->ops->to_device(r->dev, b->rows, b->host + at.first_row * WIDTH,
                               (size_t)at.n_rows * WIDTH * sizeof *b->host);
        if (c > 0)
            RANK_CHECK(r, dispatch_return_finish(p, c - 1, b->slots, &r->err) == 0);
        if (r->rc == 0)
            RANK_CHECK(r, dispatch_return_start(p, c, b->rows, &r->err) == 0);
    }
    if (r->rc == 0)
        RANK_CHECK(r, dispatch_return_finish(p, n - 1, b->slots, &r->err) == 0);
    r->dev->ops->to_host(r->dev, b->back, b->slots, sizeof b->back);
}

static void one_plan(struct test_rank *r, struct dispatch *d, const struct way_row *w,
                     uint32_t round, struct buffers *b)
{
    int64_t n = n_tokens_of(r->rank, round), n_seen = 0;
    struct dispatch_traffic before = dispatch_traffic(d);
    struct dispatch_plan *p = NULL;
    RANK_CHECK(r, dispatch_plan_create(d, 1, b->ids, b->weights, n, &p, &r->err) == 0);
    if (!p)
        return;
    send_all(r, p, b->x, false, b, b->tokens);
    struct dispatch_traffic once = dispatch_traffic(d);
    RANK_CHECK(r, once.returned == before.returned);
    for (uint32_t c = 0; c < dispatch_plan_pieces(p) && r->rc == 0; c++)
        n_seen += part_of(r, w, p, c).i ? 0 : dispatch_piece_of(p, c).n_tokens;
    RANK_CHECK(r, n_seen == n);
    send_all(r, p, b->ones, true, b, b->host);
    for (uint32_t c = 0; c < dispatch_plan_pieces(p) && r->rc == 0; c++) {
        struct dispatch_piece at = dispatch_piece_of(p, c);
        struct part x = part_of(r, w, p, c);
        check_served(r, w, round, &x, &at, b->host + at.first_row * WIDTH,
                     b->tokens + at.first_row * WIDTH);
        if (!r->dev->deterministic && !w->rows_max)
            check_even(r, w, round, c, at.n_rows);
        if (!r->dev->deterministic && w->rows_max && r->degrees.ep > 1)
            RANK_CHECK(r, at.n_rows <= dispatch_piece_rows(d));
    }
    if (!r->dev->deterministic)
        RANK_CHECK(r, !dispatch_plan_is_within(p, dispatch_plan_rows(p) - 1));
    if (w->rows_max && dispatch_plan_pieces(p) > w->n_chunks)
        atomic_fetch_add(&n_cut, 1);
    check_traffic(r, w, &once, d);
    if (w == ways || (w->rows_max && !w[-1].rows_max)) /* the first of its kind */
        memcpy(b->reference, b->host, sizeof b->host);
    else if (w->n_chunks == ways->n_chunks)
        RANK_CHECK(r, memcmp(b->reference, b->host,
                             (size_t)dispatch_plan_rows(p) * WIDTH * sizeof *b->host) == 0);
    return_all(r, p, b);
    for (int64_t s = 0; s < n * TOP_K; s++)
        for (int k = 0; k < WIDTH && r->rc == 0; k++)
            RANK_CHECK(r, b->back[s * WIDTH + k] ==
                              (expert_of(r->rank, round, s, r->spec->n_experts) < 0
                                   ? 0 : -weight_of(r->rank, s) * (float)(k + 1)));
    dispatch_plan_destroy(p);
}

/* Experts in order, then placements with homes and copies anywhere. */
static void rounds(struct test_rank *r)
{
    struct dispatch *d[N_WAYS];
    struct buffers *b = calloc(1, sizeof *b);
    for (int i = 0; i < N_WAYS; i++)
        d[i] = dispatch_open(&(struct dispatch_config){
            .layout = &r->layout, .slots = &r->slots, .coll = r->coll, .dev = r->dev,
            .top_k = TOP_K, .width = WIDTH, .nodes = ways[i].nodes,
            .hierarchical = ways[i].hierarchical, .n_chunks = ways[i].n_chunks});
    for (int i = 0; i < N_WAYS && r->rc == 0; i++)
        if (ways[i].rows_max)
            RANK_CHECK(r, dispatch_limit(d[i], TOKENS_MAX, ways[i].rows_max, &r->err) == 0);
    for (uint32_t round = 0; round < 12 && r->rc == 0; round++) {
        r->dev->deterministic = round % 2;
        if (round >= 4)
            slots_shuffle(&r->slots, seed0 + round / 2);
        upload(r, b, round % 6);
        for (int i = 0; i < N_WAYS && r->rc == 0; i++) {
            r->coll->is_blocking = !ways[i].overlap;
            one_plan(r, d[i], &ways[i], round % 6, b);
            if (r->rc != 0 && r->rc != -ECANCELED)
                fprintf(stderr, "%s, round %u\n", ways[i].shows, round);
        }
        drop(r, b);
    }
    for (int i = 0; i < N_WAYS; i++)
        dispatch_close(d[i]);
    free(b);
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
    assert_true(atomic_load(&n_cut) > 100);
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
