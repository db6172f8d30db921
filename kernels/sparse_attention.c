/* sparse_attention.c - latent attention in absorbed form over the keys chosen for each query
 *
 * All heads share the keys, so a query's heads are the rows of one product with its gathered keys,
 * whose first part is also what is summed. */
#include "kernels/sparse_attention.h"

#include <math.h>

#include "kernels/ops_cpu.h"
#include "kernels/vmath.h"

struct forward {
    float *o, *lse;
    struct sparse_operands x;
    const int32_t *selected;
};

int64_t sparse_gather_floats(const struct sparse_shape *s)
{
    return (int64_t)s->top_k * (s->latent_dim + s->rope_dim);
}

struct sparse_keys sparse_gather(float *to, const struct sparse_operands *x,
                                 const struct key_list *l)
{
    const struct sparse_shape *s = x->shape;
    struct sparse_keys keys = {
        .latent = key_list_rows(l, to, x->latent, s->latent_dim, s->latent_dim)};
    if (s->rope_dim > 0)
        keys.rope = key_list_rows(l, to + l->n * s->latent_dim, x->k_rope, x->k_rope_stride,
                                  s->rope_dim);
    return keys;
}

void sparse_scores(struct cpu_thread *t, float *scores, int64_t stride,
                   const struct sparse_operands *x, const struct sparse_keys *keys, int64_t query,
                   int64_t n)
{
    const struct sparse_shape *s = x->shape;
    product(t, scores, stride, sparse_q_latent(x, query),
            transposed(keys->latent.data, keys->latent.stride), s->n_heads, n, s->latent_dim,
            s->scale, 0);
    if (s->rope_dim > 0)
        product(t, scores, stride, sparse_q_rope(x, query),
                transposed(keys->rope.data, keys->rope.stride), s->n_heads, n, s->rope_dim,
                s->scale, 1);
}

/* Scores become weights; returns their log-sum-exp. */
static float softmax_row(float *restrict x, int64_t n)
{
    float max = vm_max(x, n), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) {
        x[j] = vm_exp(x[j] - max);
        sum += x[j];
    }
    float inverse = 1 / sum;
    for (int64_t j = 0; j < n; j++)
        x[j] *= inverse;
    return max + logf(sum);
}

static void attend_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct forward *f = arg;
    const struct sparse_shape *s = f->x.shape;
    int64_t n_floats = sparse_gather_floats(s) + (int64_t)s->n_heads * s->top_k;
    float *gathered = cpu_scratch(thread, (size_t)n_floats * sizeof(float));
    float *scores = gathered + sparse_gather_floats(s);
    for (int64_t t = begin; t < end; t++) {
        struct key_list l = key_list_selected(f->selected, t, s->top_k);
        struct sparse_keys keys = sparse_gather(gathered, &f->x, &l);
        sparse_scores(thread, scores, l.n, &f->x, &keys, t, l.n);
        for (int32_t h = 0; h < s->n_heads; h++)
            f->lse[t * s->n_heads + h] = softmax_row(scores + h * l.n, l.n);
        product(thread, f->o + t * s->n_heads * s->latent_dim, s->latent_dim,
                as_is(scores, l.n), keys.latent, s->n_heads, s->latent_dim, l.n, 1, 0);
    }
}

void cpu_sparse_attention(struct device *dev, float *o, float *lse, const float *q_latent,
                          const float *q_rope, int64_t q_rope_stride, const float *latent,
                          const float *k_rope, int64_t k_rope_stride, const int32_t *selected,
                          const struct sparse_shape *shape)
{
    struct forward f = {
        o, lse, {q_latent, q_rope, q_rope_stride, latent, k_rope, k_rope_stride, shape}, selected};
    int64_t d = (int64_t)shape->n_heads * (shape->latent_dim + shape->rope_dim);
    cpu_for(dev, shape->n_tokens - shape->first,
            cpu_grain(d * min_i64(shape->n_tokens, shape->top_k)),
            attend_range, &f);
}
