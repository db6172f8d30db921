/* cuda_ops_rows.c - cases of ops that move and add rows, of routes, and of the two ends */
#include "tests/cuda_ops.h"

static void count(struct trial *t, int64_t n, int n_elems)
{
    t->bytes = (double)n * (double)elem_size(t->dev) * n_elems;
}

/* ---- combine: d: n, top_k, d, the weights alone ---- */

static void combine(struct trial *t)
{
    int64_t n = t->d[0], k = t->d[1], d = t->d[2];
    const elem *slots = in_elems(t, n * k * d, 1);
    const float *weights = in_floats(t, n * k, 1);
    elem *y = out_elems(t, "y", n * d);
    count(t, n * d, (int)k + 1);
    TRIAL_RUN(t)
        t->dev->ops->combine(t->dev, y, slots, weights, n, (int32_t)k, d);
}

static void combine_backward(struct trial *t)
{
    int64_t n = t->d[0], k = t->d[1], d = t->d[2];
    const elem *slots = in_elems(t, n * k * d, 1), *dy = in_elems(t, n * d, 1);
    const float *weights = in_floats(t, n * k, 1);
    elem *d_slots = t->d[3] ? NULL : out_elems(t, "d_slots", n * k * d);
    float *d_weights = out_floats(t, "d_weights", n * k);
    count(t, n * d, 2 * (int)k + 1);
    TRIAL_RUN(t)
        t->dev->ops->combine_backward(t->dev, d_slots, d_weights, dy, slots, weights, n,
                                      (int32_t)k, d);
}

/* ---- rows by index: d: n, rows, d, scaled ---- */

/* Half of them among the first tenth of the rows, so that some come often. */
static int64_t *some_rows(struct trial *t, int64_t n, int64_t n_rows)
{
    int64_t *index = trial_host(t, (size_t)n * sizeof *index);
    for (int64_t i = 0; i < n; i++)
        index[i] = trial_below(t, i % 2 ? n_rows : 1 + n_rows / 10);
    return index;
}

static void gather_rows(struct trial *t)
{
    int64_t n = t->d[0], n_rows = t->d[1], d = t->d[2], *host = some_rows(t, n, n_rows);
    for (int64_t i = 2; i < n; i += 5)
        host[i] = -1;
    const int64_t *index = in_bytes(t, host, (size_t)n * sizeof *index);
    const elem *in = in_elems(t, n_rows * d, 1);
    const float *scale = t->d[3] ? in_floats(t, n, 1) : NULL;
    elem *out = out_elems(t, "out", n * d);
    count(t, n * d, 2);
    TRIAL_RUN(t)
        t->dev->ops->gather_rows(t->dev, out, in, index, scale, n, d);
}

static void scatter_add_rows(struct trial *t)
{
    int64_t n = t->d[0], n_rows = t->d[1], d = t->d[2];
    const int64_t *index = in_bytes(t, some_rows(t, n, n_rows), (size_t)n * sizeof *index);
    const elem *in = in_elems(t, n * d, 1);
    elem *acc = inout_elems(t, "acc", n_rows * d, 1);
    count(t, n * d, 3);
    TRIAL_RUN(t)
        t->dev->ops->scatter_add_rows(t->dev, acc, in, index, n, d);
}

static const int32_t *in_tokens(struct trial *t, int64_t n, int64_t vocab)
{
    int64_t *rows = some_rows(t, n, vocab);
    int32_t *tokens = trial_host(t, (size_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++)
        tokens[i] = (int32_t)rows[i];
    return in_bytes(t, tokens, (size_t)n * sizeof *tokens);
}

static void embedding(struct trial *t)
{
    int64_t n = t->d[0], vocab = t->d[1], d = t->d[2];
    const int32_t *tokens = in_tokens(t, n, vocab);
    const elem *table = in_elems(t, vocab * d, 1);
    elem *y = out_elems(t, "y", n * d);
    count(t, n * d, 2);
    TRIAL_RUN(t)
        t->dev->ops->embedding(t->dev, y, table, tokens, n, d);
}

static void embedding_backward(struct trial *t)
{
    int64_t n = t->d[0], vocab = t->d[1], d = t->d[2];
    const int32_t *tokens = in_tokens(t, n, vocab);
    const elem *dy = in_elems(t, n * d, 1);
    float *acc_table = inout_floats(t, "acc_table", vocab * d, 1);
    t->bytes = (double)(n * d) * ((double)elem_size(t->dev) + 8);
    TRIAL_RUN(t)
        t->dev->ops->embedding_backward(t->dev, acc_table, dy, tokens, n, d);
}

/* ---- routes: d: pairs, experts, top_k, rows of a part at most, chunks ---- */

static int32_t *some_ids(struct trial *t, int64_t n_pairs, int32_t n_experts)
{
    int32_t *ids = trial_host(t, (size_t)n_pairs * sizeof *ids);
    for (int64_t i = 0; i < n_pairs; i++) {
        double u = trial_uniform(t);
        ids[i] = trial_below(t, 20) == 0 ? -1 : (int32_t)(u * u * n_experts);
    }
    return ids;
}

static struct route some_route(struct trial *t)
{
    int64_t n = t->d[0], top_k = t->d[2], n_chunks = t->d[4] ? t->d[4] : 1;
    int64_t n_tokens = n / top_k, each = (n_tokens + n_chunks - 1) / n_chunks;
    return (struct route){.n_pairs = n, .pairs_each = (each > 0 ? each : 1) * top_k,
                          .n_chunks = (int32_t)n_chunks, .n_experts = (int32_t)t->d[1],
                          .top_k = (int32_t)top_k};
}

static void route_counts(struct trial *t)
{
    struct route route = some_route(t);
    int32_t *host = some_ids(t, route.n_pairs, route.n_experts);
    const int32_t *ids = in_bytes(t, host, (size_t)route.n_pairs * sizeof *ids);
    int32_t *counts = out_i32(t, "counts", (int64_t)route.n_chunks * route.n_experts, 0);
    TRIAL_RUN(t)
        t->dev->ops->route_counts(t->dev, counts, ids, &route);
}

/* What each chunk has for each expert in parts of at most d[3], and a chunk's parts in reverse
 * order. Returns how many pairs go somewhere. */
static int64_t make_parts(struct trial *t, struct route *route, const int32_t *ids)
{
    int64_t part_rows = t->d[3] > 0 ? t->d[3] : 1, at = 0;
    int32_t n_experts = route->n_experts, n = route->n_chunks * n_experts;
    int64_t *counts = trial_host(t, (size_t)n * sizeof *counts);
    int64_t *chunk_at = trial_host(t, (size_t)(route->n_chunks + 1) * sizeof *chunk_at);
    int32_t *first = trial_host(t, (size_t)(n + 1) * sizeof *first);
    for (int64_t i = 0; i < route->n_pairs; i++)
        if (ids[i] >= 0) {
            counts[i / route->pairs_each * n_experts + ids[i]]++;
            chunk_at[i / route->pairs_each + 1]++;
        }
    for (int32_t c = 0; c < route->n_chunks; c++)
        chunk_at[c + 1] += chunk_at[c];
    for (int32_t x = 0; x < n; x++)
        first[x + 1] = first[x] + (int32_t)((counts[x] + part_rows - 1) / part_rows);
    int64_t *end = trial_host(t, (size_t)(first[n] + 1) * sizeof *end);
    int64_t *place = trial_host(t, (size_t)(first[n] + 1) * sizeof *place);
    for (int32_t x = 0; x < n; x++) {
        if (x % n_experts == 0)
            at = 0;
        for (int32_t p = first[x]; p < first[x + 1]; p++) {
            int64_t begin = (p - first[x]) * part_rows;
            end[p] = begin + part_rows < counts[x] ? begin + part_rows : counts[x];
            at += end[p] - begin;
            place[p] = chunk_at[x / n_experts + 1] - at - begin;
        }
    }
    route->first = first;
    route->end = end;
    route->place = place;
    route->chunk_at = chunk_at;
    return chunk_at[route->n_chunks];
}

static void route_pairs(struct trial *t)
{
    struct route route = some_route(t);
    int32_t *host = some_ids(t, route.n_pairs, route.n_experts);
    int64_t n_rows = make_parts(t, &route, host);
    const int32_t *ids = in_bytes(t, host, (size_t)route.n_pairs * sizeof *ids);
    int64_t *place_of = out_i64(t, "place_of", route.n_pairs, 0);
    int64_t *pair_at = out_i64(t, "pair_at", n_rows, 0);
    TRIAL_RUN(t)
        t->dev->ops->route_pairs(t->dev, place_of, pair_at, ids, &route);
}

/* Ranks serve even shares of each chunk's places; every third one takes rows for the next two. */
static struct route_targets some_targets(struct trial *t, const struct route *route, int32_t n)
{
    int64_t *begin = trial_host(t, (size_t)(route->n_chunks * (n + 1)) * sizeof *begin);
    int32_t *target = trial_host(t, (size_t)n * sizeof *target);
    for (int32_t c = 0; c < route->n_chunks; c++)
        for (int32_t r = 0; r <= n; r++)
            begin[c * (n + 1) + r] = (route->chunk_at[c + 1] - route->chunk_at[c]) * r / n;
    for (int32_t r = 0; r < n; r++)
        target[r] = r / 3 * 3;
    return (struct route_targets){n, begin, target};
}

/* d[3]: ranks. Each pair's place is one of its chunk's. */
static void route_rows(struct trial *t)
{
    struct route route = some_route(t);
    int64_t n = route.n_pairs, n_rows = 0;
    int32_t n_ranks = (int32_t)t->d[3], *ids = some_ids(t, n, route.n_experts);
    int64_t n_packed = make_parts(t, &route, ids);
    int64_t *host = trial_host(t, (size_t)n * sizeof *host);
    int64_t *pair_at = trial_host(t, (size_t)(n_packed + 1) * sizeof *pair_at);
    struct device *cpu;
    if (device_cpu_open(1, true, &cpu, NULL) < 0)
        return;
    cpu->ops->route_pairs(cpu, host, pair_at, ids, &route);
    struct route_targets targets = some_targets(t, &route, n_ranks);
    int64_t *rows = trial_host(t, 3 * (size_t)(n + 1) * sizeof *rows);
    int32_t *n_of = trial_host(t, (size_t)(route.n_chunks * n_ranks) * sizeof *n_of);
    cpu->ops->route_rows(cpu, n_of, rows, rows + n, rows + 2 * n, host, &targets, &route);
    for (int32_t i = 0; i < route.n_chunks * n_ranks; i++)
        n_rows += n_of[i];
    cpu->ops->close(cpu);
    const int64_t *place_of = in_bytes(t, host, (size_t)n * sizeof *place_of);
    int32_t *counts = out_i32(t, "counts", (int64_t)route.n_chunks * n_ranks, 0);
    int64_t *row_of = out_i64(t, "row_of", n, 0), *first = out_i64(t, "pair_at", n_rows, 0);
    int64_t *token_at = out_i64(t, "token_at", n_rows, 0);
    TRIAL_RUN(t)
        t->dev->ops->route_rows(t->dev, counts, row_of, first, token_at, place_of, &targets,
                                &route);
}

/* ---- notes and blocks: d: blocks, things of one at most, top_k or 0: with rows ---- */

/* from (n_blocks + 1) ascending; to: the last one first. Returns how many there are. */
static int64_t some_blocks(struct trial *t, int64_t **out_from, int64_t **out_to)
{
    int32_t n_blocks = (int32_t)t->d[0];
    int64_t *from = trial_host(t, (size_t)(n_blocks + 1) * sizeof *from);
    int64_t *to = trial_host(t, (size_t)n_blocks * sizeof *to);
    for (int32_t b = 0; b < n_blocks; b++)
        from[b + 1] = from[b] + trial_below(t, t->d[1] + 1);
    for (int32_t b = 0; b < n_blocks; b++)
        to[b] = from[n_blocks] - from[b + 1];
    *out_from = from;
    *out_to = to;
    return from[n_blocks];
}

/* As integers: a note is two. */
static void route_write(struct trial *t)
{
    int64_t *from, *to, n = some_blocks(t, &from, &to);
    int64_t *add = trial_host(t, (size_t)t->d[0] * sizeof *add);
    int64_t *pairs = trial_host(t, (size_t)(n + 1) * sizeof *pairs);
    int64_t *rows = trial_host(t, (size_t)(n + 1) * sizeof *rows);
    for (int64_t b = 0; b < t->d[0]; b++)
        add[b] = 3 * b;
    for (int64_t i = 0; i < n; i++) {
        pairs[i] = n - 1 - i;
        rows[i] = trial_below(t, 1000000);
    }
    struct route_notes notes = {(int32_t)t->d[0], from, to, add};
    const int64_t *pair_at = in_bytes(t, pairs, (size_t)n * sizeof *pair_at);
    const int64_t *row_of = t->d[2] ? NULL : in_bytes(t, rows, (size_t)n * sizeof *row_of);
    const float *weights = t->d[2] ? in_floats(t, n, 1) : NULL;
    int32_t *out = out_i32(t, "notes", 2 * n, 0);
    TRIAL_RUN(t)
        t->dev->ops->route_write(t->dev, (struct route_note *)out, pair_at, row_of, weights,
                                 t->d[2] ? (int32_t)t->d[2] : 1, &notes);
}

static void route_read(struct trial *t)
{
    int64_t *from, *to, n = some_blocks(t, &from, &to);
    struct route_note *host = trial_host(t, (size_t)(n + 1) * sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = (struct route_note){(int32_t)trial_below(t, 1000000), (float)trial_uniform(t)};
    const struct route_note *notes = in_bytes(t, host, (size_t)n * sizeof *notes);
    int64_t *at = out_i64(t, "at", n, 0);
    float *weights = t->d[2] ? out_floats(t, "weights", n) : NULL;
    TRIAL_RUN(t)
        t->dev->ops->route_read(t->dev, at, weights, notes, from, to, (int32_t)t->d[0]);
}

static void route_blocks(struct trial *t)
{
    int64_t *from, *to, n = some_blocks(t, &from, &to);
    int64_t *to_of = out_i64(t, "to_of", n, 0);
    TRIAL_RUN(t)
        t->dev->ops->route_blocks(t->dev, to_of, from, to, (int32_t)t->d[0]);
}

/* ---- the head: d: n, d, vocab, the loss alone, the width of what is beside ---- */

static void linear_cross_entropy(struct trial *t)
{
    int64_t n = t->d[0], d = t->d[1], vocab = t->d[2];
    bool is_loss_alone = t->d[3];
    const elem *x = in_elems(t, n * d, 1), *w = in_elems(t, vocab * d, 0.1f);
    int32_t *host = trial_host(t, (size_t)n * sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = i % 7 == 3 ? -1 : (int32_t)trial_below(t, vocab);
    const int32_t *labels = in_bytes(t, host, (size_t)n * sizeof *labels);
    elem *dx = is_loss_alone ? NULL : out_elems(t, "dx", n * d);
    float *acc_dw = is_loss_alone ? NULL : inout_floats(t, "acc_dw", vocab * d, 0.01f);
    double *acc_loss = inout_double(t, "acc_loss", 1.5);
    struct low_rank beside = {.r = t->d[4]};
    if (beside.r) {
        beside.z = in_elems(t, n * beside.r, 1);
        beside.b = in_elems(t, vocab * beside.r, 0.1f);
        beside.dz = is_loss_alone ? NULL : out_elems(t, "dz", n * beside.r);
        beside.acc_db = is_loss_alone ? NULL : inout_floats(t, "acc_db", vocab * beside.r, 0.01f);
    }
    t->flops = 2.0 * (double)(n * d) * (double)vocab * (is_loss_alone ? 1 : 3);
    TRIAL_RUN(t)
        t->dev->ops->linear_cross_entropy(t->dev, acc_loss, dx, acc_dw, x, w,
                                          beside.r ? &beside : NULL, labels, n, d, vocab);
}

#define COMBINATIONS(op)                                                                           \
    {#op, op, {0, 2, 8}}, {#op, op, {1, 1, 1}}, {#op, op, {5, 3, 7}}, {#op, op, {9, 4, 64}},       \
        {#op, op, {33, 2, 129}}, {#op, op, {20, 16, 1032}},                                        \
        {#op, op, {200, 16, 3584}, CASE_LARGE}, {#op, op, {8192, 16, 3584}, CASE_BENCH},           \
        {#op, op, {16384, 8, 512}, CASE_BENCH}

#define ROWS(op)                                                                                   \
    {#op, op, {0, 4, 8}}, {#op, op, {1, 1, 1}}, {#op, op, {9, 4, 5}}, {#op, op, {100, 30, 8}},     \
        {#op, op, {77, 200, 33}}, {#op, op, {3000, 7, 64}}, {#op, op, {50, 20, 2056}},             \
        {#op, op, {3000, 5000, 7168}, CASE_LARGE}

static const struct op_case cases[] = {
    COMBINATIONS(combine),
    COMBINATIONS(combine_backward),
    {"combine_backward", combine_backward, {9, 4, 64, 1}},
    ROWS(gather_rows),
    {"gather_rows", gather_rows, {100, 30, 8, 1}},
    {"gather_rows", gather_rows, {77, 200, 33, 1}},
    {"gather_rows", gather_rows, {131072, 8192, 3584}, CASE_BENCH},
    ROWS(scatter_add_rows),
    {"scatter_add_rows", scatter_add_rows, {65536, 8192, 3584}, CASE_BENCH},
    ROWS(embedding),
    {"embedding", embedding, {16384, 32768, 7168}, CASE_BENCH},
    ROWS(embedding_backward),
    {"embedding_backward", embedding_backward, {16384, 32768, 7168}, CASE_BENCH},
    {"route_counts", route_counts, {0, 5, 1}},
    {"route_counts", route_counts, {1, 1, 1}},
    {"route_counts", route_counts, {1000, 7, 1}},
    {"route_counts", route_counts, {1000, 7, 2, 0, 4}},
    {"route_counts", route_counts, {131072, 896, 16}, CASE_BENCH},
    {"route_pairs", route_pairs, {0, 5, 1, 1}},
    {"route_pairs", route_pairs, {1, 1, 1, 1}},
    {"route_pairs", route_pairs, {60, 5, 3, 4}},
    {"route_pairs", route_pairs, {60, 5, 3, 4, 3}},
    {"route_pairs", route_pairs, {4000, 64, 8, 1000000}},
    {"route_pairs", route_pairs, {16000, 896, 16, 7, 4}},
    {"route_pairs", route_pairs, {131072, 896, 16, 64, 4}, CASE_BENCH},
    {"route_rows", route_rows, {0, 5, 1, 2}},
    {"route_rows", route_rows, {1, 1, 1, 1}},
    {"route_rows", route_rows, {60, 5, 3, 4}},
    {"route_rows", route_rows, {60, 5, 3, 4, 3}},
    {"route_rows", route_rows, {4000, 64, 8, 64, 4}},
    {"route_rows", route_rows, {131072, 896, 16, 64, 4}, CASE_BENCH},
    {"route_write", route_write, {1, 0, 1}},
    {"route_write", route_write, {40, 9, 3}},
    {"route_write", route_write, {40, 9}},
    {"route_write", route_write, {896, 300, 8}, CASE_BENCH},
    {"route_read", route_read, {1, 0, 1}},
    {"route_read", route_read, {40, 9, 1}},
    {"route_read", route_read, {40, 9}},
    {"route_read", route_read, {896, 300, 1}, CASE_BENCH},
    {"route_blocks", route_blocks, {1, 0}},
    {"route_blocks", route_blocks, {1, 3}},
    {"route_blocks", route_blocks, {40, 9}},
    {"route_blocks", route_blocks, {3000, 2}},
    {"route_blocks", route_blocks, {896, 300}, CASE_BENCH},
    {"linear_cross_entropy", linear_cross_entropy, {0, 8, 16}},
    {"linear_cross_entropy", linear_cross_entropy, {1, 1, 1}},
    {"linear_cross_entropy", linear_cross_entropy, {5, 8, 3}},
    {"linear_cross_entropy", linear_cross_entropy, {33, 40, 257}},
    {"linear_cross_entropy", linear_cross_entropy, {33, 40, 264, 1}},
    {"linear_cross_entropy", linear_cross_entropy, {33, 40, 257, 0, 3}},
    {"linear_cross_entropy", linear_cross_entropy, {33, 40, 264, 1, 8}},
    {"linear_cross_entropy", linear_cross_entropy, {64, 96, 1000}},
    {"linear_cross_entropy", linear_cross_entropy, {64, 96, 1000, 0, 16}},
    {"linear_cross_entropy", linear_cross_entropy, {200, 64, 4096}},
    {"linear_cross_entropy", linear_cross_entropy, {1700, 64, 163840}, CASE_LARGE},
    {"linear_cross_entropy", linear_cross_entropy, {8192, 4096, 131072}, CASE_BENCH},
    {"linear_cross_entropy", linear_cross_entropy, {16384, 1024, 32768}, CASE_BENCH},
};
OP_FAMILY(rows, cases)
