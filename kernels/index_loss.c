/* index_loss.c - how far the indexer is from the attention it stands for, and its gradients
 *
 * For each query KL(target || softmax of I) over its keys: the selected ones, or in the warm-up all
 * that it sees. d I = softmax(I) - target; then with a = q . k: dw = sum dI relu(a), da = w dI
 * where a > 0, dq = da k, dk = da^T q; sparse.h says in what order. */
#include "kernels/index.h"

#include <math.h>

#include "kernels/attention.h"
#include "kernels/ops_cpu.h"
#include "kernels/sparse_attention.h"
#include "kernels/vmath.h"

#define BLOCK_KEYS 64 /* of the dense target */

struct index_loss {
    float *dq, *dw, *key_sums;
    float  weight;
    struct index_operands x;
    const float *lse;
    const int32_t *selected; /* NULL: dense */
    struct sparse_operands sparse;
    struct attention_operands dense;
    const struct attention_shape *dense_shape;
    float  *target; /* (block, n_keys_max): rows of one of the two */
    float  *da;     /* (block, heads, n_keys_max), rows as long as the query's list */
    double *losses; /* (block) */
    int64_t n_keys_max;
    int64_t doc_begin, begin, end, key_range; /* the block's queries, of one document */
};

static struct key_list keys_of(const struct index_loss *s, int64_t query)
{
    if (s->selected)
        return key_list_selected(s->selected, query, s->x.shape->top_k);
    return (struct key_list){.first = s->doc_begin, .n = query - s->doc_begin + 1};
}

/* ---- the target: weights of the main attention, summed over heads ---- */

static void add_weights(float *restrict target, const float *restrict scores, float lse, int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        target[j] += vm_exp(scores[j] - lse);
}

static void sparse_target(struct cpu_thread *thread, const struct index_loss *s, float *target,
                          float *gathered, float *scores, int64_t query, const struct key_list *l)
{
    const struct sparse_shape *shape = s->sparse.shape;
    struct sparse_keys keys = sparse_gather(gathered, &s->sparse, l);
    sparse_scores(thread, scores, l->n, &s->sparse, &keys, query, l->n);
    memset(target, 0, (size_t)l->n * sizeof *target);
    for (int32_t h = 0; h < shape->n_heads; h++)
        add_weights(target, scores + h * l->n, s->lse[query * shape->n_heads + h], l->n);
}

/* A block of keys for all queries of the block. */
static void dense_targets(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct index_loss *s = arg;
    const struct attention_shape *shape = s->dense_shape;
    int64_t n_queries = s->end - s->begin;
    float *scores = cpu_scratch(thread, (size_t)(n_queries * BLOCK_KEYS) * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
        int64_t key = s->doc_begin + i * BLOCK_KEYS, n_keys = min_i64(BLOCK_KEYS, s->end - key);
        float *target = s->target + i * BLOCK_KEYS;
        for (int64_t q = 0; q < n_queries; q++)
            memset(target + q * s->n_keys_max, 0, (size_t)n_keys * sizeof *target);
        for (int32_t h = 0; h < shape->n_heads; h++) {
            attention_scores(thread, scores, BLOCK_KEYS, &s->dense, shape, h, s->begin, n_queries,
                             key, n_keys);
            for (int64_t q = 0; q < n_queries; q++)
                add_weights(target + q * s->n_keys_max, scores + q * BLOCK_KEYS,
                            s->lse[(s->begin + q) * shape->n_heads + h],
                            min_i64(n_keys, s->begin + q - key + 1));
        }
    }
}

/* ---- the loss of one query ---- */

/* index becomes d I times weight. */
static double divergence(float *restrict index, const float *restrict target, int64_t n,
                         float weight)
{
    float max = vm_max(index, n);
    double sum = 0, total = 0, loss = 0;
    for (int64_t j = 0; j < n; j++) {
        sum += vm_exp(index[j] - max);
        total += target[j];
    }
    double log_sum = log(sum);
    for (int64_t j = 0; j < n; j++) {
        double p = target[j] / total, log_q = index[j] - max - log_sum;
        if (p > 0)
            loss += p * (log(p) - log_q);
        index[j] = weight * (float)(exp(log_q) - p);
    }
    return loss;
}

/* dots (heads, n) become da; dw of the query is assigned. */
static void backward_of_dots(const struct index_loss *s, float *dots, const float *d_index,
                             int64_t query, int64_t n)
{
    const struct index_shape *shape = s->x.shape;
    for (int32_t h = 0; h < shape->n_heads; h++) {
        float *restrict dot = dots + h * n;
        float w = s->x.w[query * shape->n_heads + h] * shape->scale, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) {
            float d = d_index[j];
            sum += d * (dot[j] > 0 ? dot[j] : 0);
            dot[j] = dot[j] > 0 ? w * d : 0;
        }
        s->dw[query * shape->n_heads + h] = shape->scale * sum;
    }
}

/* Of one query: its scores; of chosen keys also the keys of both kinds and the main scores. */
static int64_t scratch_floats(const struct index_loss *s)
{
    const struct sparse_shape *core = s->sparse.shape;
    int64_t n = s->n_keys_max;
    if (s->selected)
        n += n * (s->x.shape->head_dim + core->n_heads) + sparse_gather_floats(core);
    return n;
}

static void query_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct index_loss *s = arg;
    const struct index_shape *shape = s->x.shape;
    int64_t d = shape->head_dim, n_heads = shape->n_heads;
    float *index = cpu_scratch(thread, (size_t)scratch_floats(s) * sizeof(float));
    float *keys = index + s->n_keys_max, *gathered = keys + s->n_keys_max * d;
    for (int64_t i = begin; i < end; i++) {
        int64_t t = s->begin + i;
        struct key_list l = keys_of(s, t);
        float *target = s->target + i * s->n_keys_max, *da = s->da + i * n_heads * s->n_keys_max;
        if (s->selected)
            sparse_target(thread, s, target, gathered,
                          gathered + sparse_gather_floats(s->sparse.shape), t, &l);
        struct matrix k = key_list_rows(&l, keys, s->x.k, d, d);
        product(thread, da, l.n, as_is(s->x.q + t * n_heads * d, d), transposed(k.data, k.stride),
                n_heads, l.n, d, 1, 0);
        index_combine(index, da, l.n, s->x.w + t * n_heads, l.n, shape);
        s->losses[i] = divergence(index, target, l.n, s->weight);
        backward_of_dots(s, da, index, t, l.n);
        product(thread, s->dq + t * n_heads * d, d, as_is(da, l.n), k, n_heads, d, l.n, 1, 0);
    }
}

/* ---- the keys' gradients ---- */

static void key_ranges(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct index_loss *s = arg;
    const struct index_shape *shape = s->x.shape;
    int64_t d = shape->head_dim, n_heads = shape->n_heads;
    float *sums = cpu_scratch(thread, (size_t)(s->key_range * d) * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
        int64_t first = s->doc_begin + i * s->key_range;
        for (int64_t t = s->begin; t < s->end; t++) {
            struct key_list l = keys_of(s, t);
            int64_t from = key_list_below(&l, first);
            int64_t to = key_list_below(&l, first + s->key_range);
            if (from >= to)
                continue;
            const float *da = s->da + (t - s->begin) * n_heads * s->n_keys_max + from;
            product(thread, sums, d, transposed(da, l.n), as_is(s->x.q + t * n_heads * d, d),
                    to - from, d, n_heads, 1, 0);
            key_list_add(&l, from, to, s->key_sums, d, sums, d);
        }
    }
}

static double loss_of_block(struct device *dev, struct index_loss *s)
{
    int64_t n_queries = s->end - s->begin;
    int64_t n_keys = s->x.shape->first + s->end - s->doc_begin;
    double loss = 0;
    if (!s->selected)
        cpu_for(dev, cpu_n_tasks(n_keys, BLOCK_KEYS), 1, dense_targets, s);
    cpu_for(dev, n_queries, 1, query_range, s);
    cpu_for(dev, cpu_n_tasks(n_keys, s->key_range), 1, key_ranges, s);
    for (int64_t i = 0; i < n_queries; i++)
        loss += s->losses[i];
    return loss;
}

static double loss_of_documents(struct device *dev, struct index_loss *s)
{
    const struct index_shape *shape = s->x.shape;
    int64_t longest = 0;
    double loss = 0;
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    for (int32_t doc = 0; doc < shape->n_docs; doc++)
        longest = max_i64(longest, shape->cu_seqlens[doc + 1] - shape->cu_seqlens[doc]);
    s->n_keys_max = s->selected ? shape->top_k : longest;
    int64_t n_floats = s->n_keys_max * (1 + shape->n_heads), block = sparse_block(n_floats);
    size_t query_bytes = sizeof(double) + (size_t)n_floats * sizeof(float);
    s->losses = cpu_shared(dev, (size_t)block * query_bytes);
    s->target = (float *)(s->losses + block);
    s->da = s->target + block * s->n_keys_max;
    if (!shape->later)
        memset(s->key_sums, 0, (size_t)(shape->n_tokens * shape->head_dim) * sizeof(float));
    for (int32_t doc = 0; doc < shape->n_docs; doc++) {
        int64_t end = shape->cu_seqlens[doc + 1] - shape->first;
        s->doc_begin = shape->cu_seqlens[doc];
        s->key_range = sparse_key_range(shape->cu_seqlens[doc + 1] - s->doc_begin);
        for (s->begin = max_i64(0, s->doc_begin - shape->first); s->begin < end;
             s->begin = s->end) {
            s->end = min_i64(end, s->begin + block);
            loss += loss_of_block(dev, s);
        }
    }
    return loss;
}

void cpu_index_loss(struct device *dev, double *acc_loss, float *dq, float *dk, float *dw,
                    float weight, const float *q, const float *k, const float *w,
                    const int32_t *selected, const float *q_latent, const float *q_rope,
                    int64_t q_rope_stride, const float *latent, const float *k_rope,
                    int64_t k_rope_stride, const float *lse, const struct index_shape *shape,
                    const struct sparse_shape *core)
{
    assert(shape->n_tokens == core->n_tokens && shape->top_k == core->top_k);
    assert(shape->first == core->first);
    assert(shape->later || shape->first == 0);
    int64_t n = shape->n_tokens - shape->first, d = shape->head_dim;
    struct index_loss s = {
        .dq = dq, .dw = dw, .key_sums = shape->later ? shape->later : dk, .weight = weight,
        .x = {q, k, w, shape}, .lse = lse,
        .selected = selected,
        .sparse = {q_latent, q_rope, q_rope_stride, latent, k_rope, k_rope_stride, core},
    };
    *acc_loss += loss_of_documents(dev, &s);
    if (shape->later)
        memcpy(dk, shape->later + shape->first * d, (size_t)(n * d) * sizeof(float));
}

void cpu_index_loss_dense(struct device *dev, double *acc_loss, float *dq, float *dk, float *dw,
                          float weight, const float *q, const float *k, const float *w,
                          const float *core_q, const float *core_kv, const float *k_rope,
                          int64_t k_rope_stride, const float *lse, const struct index_shape *shape,
                          const struct attention_shape *core)
{
    assert(shape->n_tokens == core->n_tokens && shape->first == 0 && !shape->later);
    struct index_loss s = {
        .dq = dq, .dw = dw, .key_sums = dk, .weight = weight, .x = {q, k, w, shape}, .lse = lse,
        .dense = {core_q, core_kv, k_rope, k_rope_stride}, .dense_shape = core,
    };
    *acc_loss += loss_of_documents(dev, &s);
}
