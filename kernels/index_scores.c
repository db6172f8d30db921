/* index_scores.c - what the lightning indexer thinks of each key, and the keys it chooses
 *
 * The heads of some queries are the rows of one product with a block of keys. A choice is exact:
 * the k-th largest score is found digit by digit, keys above it are taken, and of those equal to
 * it the first ones. Scores of 0 are common, so that rule is needed. */
#include "kernels/index.h"

#include <math.h>

#include "kernels/ops_cpu.h"
#include "kernels/vmath.h"

#define BLOCK_QUERIES 16
#define BLOCK_KEYS    256
#define DIGIT_BITS    8

/* Floats of index_block's dots for n_queries. */
static int64_t index_dots(const struct index_shape *s, int64_t n_queries)
{
    return n_queries * s->n_heads * BLOCK_KEYS;
}

void index_combine(float *restrict to, const float *restrict dots, int64_t stride, const float *w,
                   int64_t n, const struct index_shape *s)
{
    memset(to, 0, (size_t)n * sizeof *to);
    for (int32_t h = 0; h < s->n_heads; h++) {
        const float *restrict dot = dots + h * stride;
        float weight = w[h] * s->scale;
        for (int64_t j = 0; j < n; j++)
            to[j] += weight * (dot[j] > 0 ? dot[j] : 0);
    }
}

/* scores (n_queries, n_keys), rows stride apart, masked nowhere. */
static void index_block(struct cpu_thread *t, float *scores, int64_t stride, float *dots,
                        const struct index_operands *x, int64_t query, int64_t n_queries,
                        int64_t key, int64_t n_keys)
{
    const struct index_shape *s = x->shape;
    int64_t d = s->head_dim, n_heads = s->n_heads;
    for (int64_t first = 0; first < n_keys; first += BLOCK_KEYS) {
        int64_t n = min_i64(BLOCK_KEYS, n_keys - first);
        product(t, dots, BLOCK_KEYS, as_is(x->q + query * n_heads * d, d),
                transposed(x->k + (key + first) * d, d), n_queries * n_heads, n, d, 1, 0);
        for (int64_t i = 0; i < n_queries; i++)
            index_combine(scores + i * stride + first, dots + i * n_heads * BLOCK_KEYS, BLOCK_KEYS,
                          x->w + (query + i) * n_heads, n, s);
    }
}

/* Queries of one document. */
struct query_block {
    int64_t doc_begin, begin, end;
};

struct select {
    float *scores;
    int32_t *selected;
    struct index_operands x;
    int64_t begin, end; /* the queries that are asked for */
    const struct query_block *blocks;
};

/* The blocks of queries begin .. end of all documents; blocks NULL: counts only. */
static int64_t cut_queries(struct query_block *blocks, const struct index_shape *s, int64_t begin,
                           int64_t end)
{
    int64_t n_blocks = 0;
    for (int32_t doc = 0; doc < s->n_docs; doc++) {
        int64_t first = s->cu_seqlens[doc], last = min_i64(end, s->cu_seqlens[doc + 1]);
        for (int64_t i = max_i64(begin, first); i < last; i += BLOCK_QUERIES, n_blocks++)
            if (blocks)
                blocks[n_blocks] =
                    (struct query_block){first, i, min_i64(i + BLOCK_QUERIES, last)};
    }
    return n_blocks;
}

static void score_blocks(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct select *s = arg;
    int64_t n = s->x.shape->n_tokens;
    int64_t n_dots = index_dots(s->x.shape, BLOCK_QUERIES);
    float *dots = cpu_scratch(thread, (size_t)n_dots * sizeof *dots);
    for (int64_t i = begin; i < end; i++) {
        struct query_block b = s->blocks[i];
        float *rows = s->scores + (b.begin - s->begin) * n;
        index_block(thread, rows + b.doc_begin, n, dots, &s->x, b.begin, b.end - b.begin,
                    b.doc_begin, b.end - b.doc_begin);
        for (int64_t t = b.begin; t < b.end; t++, rows += n)
            for (int64_t key = 0; key < n; key++)
                if (key < b.doc_begin || key > t)
                    rows[key] = -INFINITY;
    }
}

static struct query_block *blocks_of(struct device *dev, struct select *s, int64_t *out_n)
{
    *out_n = cut_queries(NULL, s->x.shape, s->begin, s->end);
    struct query_block *blocks = cpu_shared(dev, (size_t)*out_n * sizeof *blocks);
    cut_queries(blocks, s->x.shape, s->begin, s->end);
    return blocks;
}

void cpu_index_scores(struct device *dev, float *scores, int64_t begin, int64_t end, const float *q,
                      const float *k, const float *w, const struct index_shape *shape)
{
    assert(begin >= 0 && end <= shape->n_tokens);
    struct select s = {.scores = scores, .x = {q, k, w, shape}, .begin = begin, .end = end};
    int64_t n_blocks;
    s.blocks = blocks_of(dev, &s, &n_blocks);
    cpu_for(dev, n_blocks, 1, score_blocks, &s);
}

/* A number whose order as an integer is the score's; -0 is 0. */
static uint32_t ordered(float score)
{
    uint32_t bits = vm_bits(score + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The k-th largest of n > k keys, and in *out_above how many are larger. */
static uint32_t kth_largest(const uint32_t *keys, int64_t n, int64_t k, int64_t *out_above)
{
    uint32_t prefix = 0, mask = 0;
    int64_t above = 0;
    for (int shift = 32 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        int64_t counts[1 << DIGIT_BITS] = {0};
        for (int64_t j = 0; j < n; j++)
            if ((keys[j] & mask) == prefix)
                counts[keys[j] >> shift & ((1u << DIGIT_BITS) - 1)]++;
        uint32_t digit = (1u << DIGIT_BITS) - 1;
        for (; above + counts[digit] < k; digit--)
            above += counts[digit];
        prefix |= digit << shift;
        mask |= ((1u << DIGIT_BITS) - 1) << shift;
    }
    *out_above = above;
    return prefix;
}

static void select_row(int32_t *selected, uint32_t *keys, const float *scores, int64_t first,
                       int64_t n, int64_t k)
{
    int64_t above = 0, n_selected = 0;
    uint32_t least = 0;
    if (n > k) {
        for (int64_t j = 0; j < n; j++)
            keys[j] = ordered(scores[j]);
        least = kth_largest(keys, n, k, &above);
    }
    int64_t equal = k - above; /* of the least that are taken */
    for (int64_t j = 0; j < n && n_selected < k; j++)
        if (n <= k || keys[j] > least || (keys[j] == least && equal-- > 0))
            selected[n_selected++] = (int32_t)(first + j);
    for (int64_t j = n_selected; j < k; j++)
        selected[j] = -1;
}

static void select_blocks(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct select *s = arg;
    const struct index_shape *shape = s->x.shape;
    /* Of a whole block that sees all tokens, so that no later step takes more. */
    int64_t n_floats = (BLOCK_QUERIES + 1) * shape->n_tokens + index_dots(shape, BLOCK_QUERIES);
    for (int64_t i = begin; i < end; i++) {
        struct query_block b = s->blocks[i];
        int64_t n_queries = b.end - b.begin, n_keys = b.end - b.doc_begin;
        float *scores = cpu_scratch(thread, sizeof(float) * (size_t)n_floats);
        uint32_t *keys = (uint32_t *)(scores + n_queries * n_keys);
        if (n_keys > shape->top_k)
            index_block(thread, scores, n_keys, scores + (n_queries + 1) * n_keys, &s->x,
                        b.begin - shape->first, n_queries, b.doc_begin, n_keys);
        for (int64_t t = b.begin; t < b.end; t++)
            select_row(s->selected + (t - shape->first) * shape->top_k, keys,
                       scores + (t - b.begin) * n_keys, b.doc_begin, t - b.doc_begin + 1,
                       shape->top_k);
    }
}

void cpu_index_select(struct device *dev, int32_t *selected, const float *q, const float *k,
                      const float *w, const struct index_shape *shape)
{
    assert(shape->top_k > 0);
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    assert(shape->first == 0 || shape->first < shape->cu_seqlens[1]);
    struct select s = {.selected = selected, .x = {q, k, w, shape}, .begin = shape->first,
                       .end = shape->n_tokens};
    int64_t n_blocks;
    s.blocks = blocks_of(dev, &s, &n_blocks);
    cpu_for(dev, n_blocks, 1, select_blocks, &s);
}
