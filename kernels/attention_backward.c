/* attention_backward.c - gradients of latent attention
 *
 * The weights come back from the scores and the forward's log-sum-exp, a block of keys against a
 * block of queries at a time. With D = o . dO per query: dS = scale P (dO V^T - D). The shared key
 * part collects over heads, each in its own buffer, added in head order. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/attention.h"
#include "kernels/vmath.h"

#define BLOCK 64

struct attention_backward {
    float *dq, *dkv, *dk_rope;
    int64_t dk_rope_stride;
    float *dk_rope_heads; /* (n_heads, n, rope) */
    const float *d_o, *o, *lse;
    struct attention_operands x;
    const struct attention_shape *shape;
};

/* One head of one document. */
struct head {
    int32_t index;
    int64_t begin, end;
    float  *along; /* (end - begin) D */
    float  *p, *ds; /* (BLOCK, BLOCK) */
};

/* ds = o . dO for each query of the document. */
static void output_dots(const struct attention_backward *a, const struct head *h)
{
    int64_t stride = attention_o_stride(a->shape), v_dim = a->shape->v_dim;
    for (int64_t i = h->begin; i < h->end; i++) {
        const float *o = a->o + i * stride + h->index * v_dim;
        const float *d_o = a->d_o + i * stride + h->index * v_dim;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < v_dim; j++)
            sum += o[j] * d_o[j];
        h->along[i - h->begin] = sum;
    }
}

/* p from scores, ds from dP; both (n_queries, n_keys) with rows BLOCK apart. */
static void score_gradients(const struct attention_backward *a, const struct head *h,
                            int64_t query, int64_t n_queries, int64_t key, int64_t n_keys)
{
    const struct attention_shape *s = a->shape;
    for (int64_t i = 0; i < n_queries; i++) {
        float *restrict p = h->p + i * BLOCK, *restrict ds = h->ds + i * BLOCK;
        int64_t n_visible = min_i64(n_keys, query + i - key + 1);
        float lse = a->lse[(query + i) * s->n_heads + h->index];
        float along = h->along[query + i - h->begin], scale = s->scale;
        for (int64_t j = 0; j < n_visible; j++) {
            p[j] = vm_exp(p[j] - lse);
            ds[j] = scale * p[j] * (ds[j] - along);
        }
        for (int64_t j = n_visible; j < n_keys; j++)
            p[j] = ds[j] = 0;
    }
}

static void block_pair(struct cpu_thread *t, const struct attention_backward *a,
                       const struct head *h, int64_t query, int64_t n_queries, int64_t key,
                       int64_t n_keys)
{
    const struct attention_shape *s = a->shape;
    int64_t q_stride = attention_q_stride(s), kv_stride = attention_kv_stride(s);
    int64_t o_stride = attention_o_stride(s);
    int64_t q_head = (int64_t)h->index * (s->nope_dim + s->rope_dim);
    int64_t kv_head = (int64_t)h->index * (s->nope_dim + s->v_dim), v_head = kv_head + s->nope_dim;
    struct matrix d_o = as_is(a->d_o + query * o_stride + h->index * s->v_dim, o_stride);
    struct matrix p_t = transposed(h->p, BLOCK);
    struct matrix ds = as_is(h->ds, BLOCK), ds_t = transposed(h->ds, BLOCK);
    struct matrix q = as_is(a->x.q + query * q_stride + q_head, q_stride);
    struct matrix k = as_is(a->x.kv + key * kv_stride + kv_head, kv_stride);
    struct matrix v_t = transposed(a->x.kv + key * kv_stride + v_head, kv_stride);
    float *dq = a->dq + query * q_stride + q_head;
    float *dk = a->dkv + key * kv_stride + kv_head, *dv = a->dkv + key * kv_stride + v_head;
    float beta_q = key == h->begin ? 0 : 1, beta_k = query == key ? 0 : 1;

    attention_scores(t, h->p, BLOCK, &a->x, s, h->index, query, n_queries, key, n_keys);
    product(t, h->ds, BLOCK, d_o, v_t, n_queries, n_keys, s->v_dim, 1, 0);
    score_gradients(a, h, query, n_queries, key, n_keys);
    product(t, dv, kv_stride, p_t, d_o, n_keys, s->v_dim, n_queries, 1, beta_k);
    product(t, dk, kv_stride, ds_t, q, n_keys, s->nope_dim, n_queries, 1, beta_k);
    product(t, dq, q_stride, ds, k, n_queries, s->nope_dim, n_keys, 1, beta_q);
    if (s->rope_dim == 0)
        return;
    float *dk_rope = a->dk_rope_heads + (h->index * s->n_tokens + key) * s->rope_dim;
    struct matrix k_rope = as_is(a->x.k_rope + key * a->x.k_rope_stride, a->x.k_rope_stride);
    product(t, dk_rope, s->rope_dim, ds_t, matrix_from(q, 0, s->nope_dim), n_keys, s->rope_dim,
            n_queries, 1, beta_k);
    product(t, dq + s->nope_dim, q_stride, ds, k_rope, n_queries, s->rope_dim, n_keys, 1, beta_q);
}

static void backward_head(struct cpu_thread *t, const struct attention_backward *a, int32_t doc,
                          int32_t head)
{
    const int32_t *cu = a->shape->cu_seqlens;
    struct head h = {.index = head, .begin = cu[doc], .end = cu[doc + 1]};
    /* As much as one document of all tokens needs, so that no later step takes more. */
    h.p = cpu_scratch(t, sizeof(float) * (size_t)(2 * BLOCK * BLOCK + a->shape->n_tokens));
    h.ds = h.p + BLOCK * BLOCK;
    h.along = h.ds + BLOCK * BLOCK;
    output_dots(a, &h);
    for (int64_t key = h.begin; key < h.end; key += BLOCK)
        for (int64_t query = key; query < h.end; query += BLOCK)
            block_pair(t, a, &h, query, min_i64(BLOCK, h.end - query), key,
                       min_i64(BLOCK, h.end - key));
}

static void backward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct attention_backward *a = arg;
    for (int64_t i = begin; i < end; i++)
        backward_head(thread, a, (int32_t)(i / a->shape->n_heads),
                      (int32_t)(i % a->shape->n_heads));
}

static void add_heads(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct attention_backward *a = arg;
    int64_t rope = a->shape->rope_dim, head_size = a->shape->n_tokens * rope;
    for (int64_t i = begin; i < end; i++) {
        float *restrict to = a->dk_rope + i * a->dk_rope_stride;
        memset(to, 0, (size_t)rope * sizeof *to);
        for (int32_t h = 0; h < a->shape->n_heads; h++) {
            const float *restrict from = a->dk_rope_heads + h * head_size + i * rope;
            for (int64_t j = 0; j < rope; j++)
                to[j] += from[j];
        }
    }
}

void cpu_attention_backward(struct device *dev, float *dq, float *dkv, float *dk_rope,
                            int64_t dk_rope_stride, const float *d_o, const float *o,
                            const float *lse, const float *q, const float *kv, const float *k_rope,
                            int64_t k_rope_stride, const struct attention_shape *shape)
{
    int64_t rope_floats = (int64_t)shape->n_heads * shape->rope_dim;
    struct attention_backward a = {
        .dq = dq, .dkv = dkv, .dk_rope = dk_rope, .dk_rope_stride = dk_rope_stride,
        .dk_rope_heads = cpu_shared(dev, (size_t)(shape->n_tokens * rope_floats) * sizeof(float)),
        .d_o = d_o, .o = o, .lse = lse, .x = {q, kv, k_rope, k_rope_stride}, .shape = shape,
    };
    cpu_for(dev, (int64_t)shape->n_docs * shape->n_heads, 1, backward_range, &a);
    if (shape->rope_dim > 0)
        cpu_for(dev, shape->n_tokens, cpu_grain(rope_floats), add_heads, &a);
}
