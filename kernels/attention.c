/* attention.c - latent attention in expanded form: causal softmax attention in each document
 *
 * A block of queries walks over blocks of keys with a running maximum and sum (online softmax),
 * so memory does not grow with the document. */
#include "kernels/ops_cpu.h"

#include <math.h>

#include "kernels/attention.h"
#include "kernels/vmath.h"

#define BLOCK_QUERIES 64
#define BLOCK_KEYS    64

struct query_block {
    int32_t doc_begin;
    int32_t begin, end;
};

struct attention {
    float *o, *lse;
    struct attention_operands x;
    const struct attention_shape *shape;
    const struct query_block *blocks;
};

void attention_scores(struct cpu_thread *t, float *scores, int64_t stride,
                      const struct attention_operands *x, const struct attention_shape *s,
                      int32_t head, int64_t query, int64_t n_queries, int64_t key, int64_t n_keys)
{
    int64_t q_stride = attention_q_stride(s), kv_stride = attention_kv_stride(s);
    const float *q = x->q + query * q_stride + (int64_t)head * (s->nope_dim + s->rope_dim);
    const float *k = x->kv + key * kv_stride + (int64_t)head * (s->nope_dim + s->v_dim);
    product(t, scores, stride, as_is(q, q_stride), transposed(k, kv_stride), n_queries, n_keys,
            s->nope_dim, s->scale, 0);
    if (s->rope_dim > 0)
        product(t, scores, stride, as_is(q + s->nope_dim, q_stride),
                transposed(x->k_rope + key * x->k_rope_stride, x->k_rope_stride), n_queries, n_keys,
                s->rope_dim, s->scale, 1);
}

/* x <- exp(x - max); returns the sum. */
static float row_exp(float *restrict x, int64_t n, float max)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) {
        x[j] = vm_exp(x[j] - max);
        sum += x[j];
    }
    return sum;
}

/* Scores become weights under the running maximum; o's row is brought to the new one. */
static void softmax_row(float *score, int64_t n_visible, int64_t n_keys, float *max, float *sum,
                        float *restrict o, int64_t v_dim)
{
    float new_max = fmaxf(*max, vm_max(score, n_visible));
    float correction = vm_exp(*max - new_max);
    *sum = *sum * correction + row_exp(score, n_visible, new_max);
    *max = new_max;
    for (int64_t j = n_visible; j < n_keys; j++)
        score[j] = 0;
    for (int64_t j = 0; j < v_dim; j++)
        o[j] *= correction;
}

static void attend(struct cpu_thread *t, const struct attention *a, struct query_block b,
                   int32_t head)
{
    const struct attention_shape *s = a->shape;
    int64_t o_stride = attention_o_stride(s), kv_stride = attention_kv_stride(s);
    int64_t n_queries = b.end - b.begin, v_dim = s->v_dim;
    float *scores = cpu_scratch(t, sizeof(float) * BLOCK_QUERIES * BLOCK_KEYS);
    float *o = a->o + b.begin * o_stride + head * v_dim;
    const float *v = a->x.kv + (int64_t)head * (s->nope_dim + v_dim) + s->nope_dim;
    float max[BLOCK_QUERIES], sum[BLOCK_QUERIES];
    for (int64_t i = 0; i < n_queries; i++) {
        max[i] = -INFINITY;
        sum[i] = 0;
        for (int64_t j = 0; j < v_dim; j++)
            o[i * o_stride + j] = 0;
    }
    for (int64_t key = b.doc_begin; key < b.end; key += BLOCK_KEYS) {
        int64_t n_keys = min_i64(BLOCK_KEYS, b.end - key);
        attention_scores(t, scores, BLOCK_KEYS, &a->x, s, head, b.begin, n_queries, key, n_keys);
        for (int64_t i = 0; i < n_queries; i++) {
            int64_t n_visible = min_i64(n_keys, b.begin + i - key + 1);
            softmax_row(scores + i * BLOCK_KEYS, n_visible, n_keys, &max[i], &sum[i],
                        o + i * o_stride, v_dim);
        }
        product(t, o, o_stride, as_is(scores, BLOCK_KEYS), as_is(v + key * kv_stride, kv_stride),
                n_queries, v_dim, n_keys, 1, 1);
    }
    for (int64_t i = 0; i < n_queries; i++) {
        for (int64_t j = 0; j < v_dim; j++)
            o[i * o_stride + j] /= sum[i];
        a->lse[(b.begin + i) * s->n_heads + head] = max[i] + logf(sum[i]);
    }
}

static void attend_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct attention *a = arg;
    for (int64_t i = begin; i < end; i++)
        attend(thread, a, a->blocks[i / a->shape->n_heads], (int32_t)(i % a->shape->n_heads));
}

/* The blocks of queries of all documents; returns how many. blocks NULL: counts only. */
static int64_t cut_queries(struct query_block *blocks, const struct attention_shape *s)
{
    int64_t n_blocks = 0;
    for (int32_t doc = 0; doc < s->n_docs; doc++) {
        int32_t first = s->cu_seqlens[doc], last = s->cu_seqlens[doc + 1];
        for (int32_t begin = first; begin < last; begin += BLOCK_QUERIES, n_blocks++)
            if (blocks)
                blocks[n_blocks] = (struct query_block){
                    first, begin, (int32_t)min_i64(begin + BLOCK_QUERIES, last)};
    }
    return n_blocks;
}

void cpu_attention(struct device *dev, float *o, float *lse, const float *q, const float *kv,
                   const float *k_rope, int64_t k_rope_stride, const struct attention_shape *shape)
{
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    int64_t n_blocks = cut_queries(NULL, shape);
    struct query_block *blocks = cpu_shared(dev, (size_t)n_blocks * sizeof *blocks);
    cut_queries(blocks, shape);
    struct attention a = {o, lse, {q, kv, k_rope, k_rope_stride}, shape, blocks};
    cpu_for(dev, n_blocks * shape->n_heads, 1, attend_range, &a);
}
