/* sparse_attention_backward.c - gradients of attention over chosen keys
 *
 * sparse.h says in what order they are summed.
 * The weights come back from the scores and the forward's log-sum-exp. With D = o . dO per query
 * and head: dS = scale P (dO V^T - D), dq = dS K, and each chosen key gets dS^T q, as a value also
 * P^T dO. */
#include "kernels/sparse_attention.h"

#include "kernels/ops_cpu.h"
#include "kernels/vmath.h"

/* Sums of keys, a row each. */
struct key_sums {
    float *rows;
    int64_t stride;
};

struct backward {
    float *dq_latent, *dq_rope;
    int64_t dq_rope_stride;
    struct key_sums latent, rope;
    const float *d_o, *o, *lse;
    struct sparse_operands x;
    const int32_t *selected;
    float *p, *ds; /* (block, heads, top_k); rows are as long as the query's list */
    int64_t begin, end, key_range; /* the block's queries */
};

static int64_t weights_of_query(const struct sparse_shape *s)
{
    return (int64_t)s->n_heads * s->top_k;
}

static float dot(const float *restrict a, const float *restrict b, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++)
        sum += a[j] * b[j];
    return sum;
}

static void score_gradients(const struct backward *b, float *p_rows, float *ds_rows, int64_t query,
                            int64_t n)
{
    const struct sparse_shape *s = b->x.shape;
    for (int32_t h = 0; h < s->n_heads; h++) {
        float *restrict p = p_rows + h * n, *restrict ds = ds_rows + h * n;
        int64_t row = query * s->n_heads + h;
        float along = dot(b->o + row * s->latent_dim, b->d_o + row * s->latent_dim, s->latent_dim);
        float lse = b->lse[row], scale = s->scale;
        for (int64_t j = 0; j < n; j++) {
            p[j] = vm_exp(p[j] - lse);
            ds[j] = scale * p[j] * (ds[j] - along);
        }
    }
}

static void query_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct backward *b = arg;
    const struct sparse_shape *s = b->x.shape;
    float *gathered = cpu_scratch(thread, (size_t)sparse_gather_floats(s) * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
        int64_t t = b->begin + i, latent_row = t * s->n_heads * s->latent_dim;
        float *p = b->p + i * weights_of_query(s), *ds = b->ds + i * weights_of_query(s);
        struct key_list l = key_list_selected(b->selected, t, s->top_k);
        struct sparse_keys keys = sparse_gather(gathered, &b->x, &l);
        sparse_scores(thread, p, l.n, &b->x, &keys, t, l.n);
        product(thread, ds, l.n, as_is(b->d_o + latent_row, s->latent_dim),
                transposed(keys.latent.data, keys.latent.stride), s->n_heads, l.n, s->latent_dim, 1,
                0);
        score_gradients(b, p, ds, t, l.n);
        product(thread, b->dq_latent + latent_row, s->latent_dim, as_is(ds, l.n), keys.latent,
                s->n_heads, s->latent_dim, l.n, 1, 0);
        if (s->rope_dim > 0)
            product(thread, b->dq_rope + t * s->n_heads * b->dq_rope_stride, b->dq_rope_stride,
                    as_is(ds, l.n), keys.rope, s->n_heads, s->rope_dim, l.n, 1, 0);
    }
}

/* What query t gives to its keys from .. to. */
static void add_query(struct cpu_thread *thread, const struct backward *b, float *sums, int64_t t,
                      const struct key_list *l, int64_t from, int64_t to)
{
    const struct sparse_shape *s = b->x.shape;
    int64_t at = (t - b->begin) * weights_of_query(s) + from, n = to - from;
    struct matrix ds = transposed(b->ds + at, l->n), p = transposed(b->p + at, l->n);
    product(thread, sums, s->latent_dim, ds, sparse_q_latent(&b->x, t), n, s->latent_dim,
            s->n_heads, 1, 0);
    product(thread, sums, s->latent_dim, p,
            as_is(b->d_o + t * s->n_heads * s->latent_dim, s->latent_dim), n, s->latent_dim,
            s->n_heads, 1, 1);
    key_list_add(l, from, to, b->latent.rows, b->latent.stride, sums, s->latent_dim);
    if (s->rope_dim == 0)
        return;
    product(thread, sums, s->rope_dim, ds, sparse_q_rope(&b->x, t), n, s->rope_dim, s->n_heads, 1,
            0);
    key_list_add(l, from, to, b->rope.rows, b->rope.stride, sums, s->rope_dim);
}

static void key_ranges(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct backward *b = arg;
    const struct sparse_shape *s = b->x.shape;
    int64_t n_rows = min_i64(s->top_k, b->key_range), width = max_i64(s->latent_dim, s->rope_dim);
    float *sums = cpu_scratch(thread, (size_t)(n_rows * width) * sizeof(float));
    for (int64_t i = begin; i < end; i++)
        for (int64_t t = b->begin; t < b->end; t++) {
            struct key_list l = key_list_selected(b->selected, t, s->top_k);
            int64_t from = key_list_below(&l, i * b->key_range);
            int64_t to = key_list_below(&l, (i + 1) * b->key_range);
            if (from < to)
                add_query(thread, b, sums, t, &l, from, to);
        }
}

static void zero_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct backward *b = arg;
    const struct sparse_shape *s = b->x.shape;
    for (int64_t i = begin; i < end; i++) {
        memset(b->latent.rows + i * b->latent.stride, 0, (size_t)s->latent_dim * sizeof(float));
        if (s->rope_dim > 0)
            memset(b->rope.rows + i * b->rope.stride, 0, (size_t)s->rope_dim * sizeof(float));
    }
}

/* The sums of the shape's own keys, n of d numbers. */
static void store_sums(float *to, int64_t to_stride, struct key_sums sums, int64_t first,
                       int64_t n, int64_t d)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(to + i * to_stride, sums.rows + (first + i) * sums.stride,
               (size_t)d * sizeof(float));
}

void cpu_sparse_attention_backward(struct device *dev, float *dq_latent, float *dq_rope,
                                   int64_t dq_rope_stride, float *d_latent, float *dk_rope,
                                   int64_t dk_rope_stride, const float *d_o, const float *o,
                                   const float *lse, const float *q_latent, const float *q_rope,
                                   int64_t q_rope_stride, const float *latent, const float *k_rope,
                                   int64_t k_rope_stride, const int32_t *selected,
                                   const struct sparse_shape *shape)
{
    int64_t n = shape->n_tokens - shape->first, width = shape->latent_dim + shape->rope_dim;
    int64_t block = min_i64(n, sparse_block(2 * weights_of_query(shape)));
    float *later = shape->later;
    struct backward b = {
        .dq_latent = dq_latent, .dq_rope = dq_rope, .dq_rope_stride = dq_rope_stride,
        .latent = {d_latent, shape->latent_dim}, .rope = {dk_rope, dk_rope_stride}, .d_o = d_o,
        .o = o, .lse = lse,
        .x = {q_latent, q_rope, q_rope_stride, latent, k_rope, k_rope_stride, shape},
        .selected = selected, .key_range = sparse_key_range(shape->n_tokens),
    };
    assert(later || shape->first == 0);
    if (later) {
        b.latent = (struct key_sums){later, width};
        b.rope = (struct key_sums){later + shape->latent_dim, width};
    }
    b.p = cpu_shared(dev, (size_t)(2 * block * weights_of_query(shape)) * sizeof(float));
    b.ds = b.p + block * weights_of_query(shape);
    if (!later)
        cpu_for(dev, n, cpu_grain(width), zero_rows, &b);
    for (b.begin = 0; b.begin < n; b.begin = b.end) {
        b.end = min_i64(n, b.begin + block);
        cpu_for(dev, b.end - b.begin, 1, query_range, &b);
        cpu_for(dev, cpu_n_tasks(shape->first + b.end, b.key_range), 1, key_ranges, &b);
    }
    if (!later)
        return;
    store_sums(d_latent, shape->latent_dim, b.latent, shape->first, n, shape->latent_dim);
    store_sums(dk_rope, dk_rope_stride, b.rope, shape->first, n, shape->rope_dim);
}
