/* cuda_ops_attention.c - cases of attention, dense and over chosen keys, and of the indexer
 *
 * Backward ops get what the device's own forward left. Choices are compared where all sums are
 * exact: small whole numbers, so that equal scores are common. */
#include "tests/cuda_ops.h"

#include <math.h>

static void *scratch_elems(struct trial *t, int64_t n)
{
    return scratch_bytes(t, (size_t)n * elem_size(t->dev));
}

static float *scratch_floats(struct trial *t, int64_t n)
{
    return scratch_bytes(t, (size_t)n * sizeof(float));
}

/* Pairs of a query and a key that it sees. */
static double visible(const int32_t *cu, int64_t n_docs)
{
    double sum = 0;
    for (int64_t i = 0; i < n_docs; i++) {
        double n = cu[i + 1] - cu[i];
        sum += n * (n + 1) / 2;
    }
    return sum;
}

/* ---- dense: n, documents, heads, nope, rope, v, extra width of shared key rows ---- */

struct dense {
    struct attention_shape shape;
    int64_t rope_stride;
    const elem *q, *kv, *k_rope;
};

static struct dense dense_of(struct trial *t)
{
    int64_t n = t->d[0], heads = t->d[2], nope = t->d[3], rope = t->d[4], v = t->d[5];
    struct dense x = {
        .shape = {.n_tokens = n, .cu_seqlens = trial_documents(t, n, (int32_t)t->d[1]),
                  .n_docs = (int32_t)t->d[1], .n_heads = (int32_t)heads, .nope_dim = (int32_t)nope,
                  .rope_dim = (int32_t)rope, .v_dim = (int32_t)v,
                  .scale = 1 / sqrtf((float)(nope + rope))},
        .rope_stride = rope + t->d[6],
    };
    x.q = in_elems(t, n * heads * (nope + rope), 1);
    x.kv = in_elems(t, n * heads * (nope + v), 1);
    x.k_rope = in_elems(t, n * x.rope_stride + 1, 1);
    return x;
}

static double dense_flops(const struct dense *x, double n_products)
{
    const struct attention_shape *s = &x->shape;
    return n_products * visible(s->cu_seqlens, s->n_docs) * s->n_heads *
           (s->nope_dim + s->rope_dim + s->v_dim);
}

static void attend(struct trial *t, const struct dense *x, elem *o, float *lse)
{
    t->dev->ops->attention(t->dev, o, lse, x->q, x->kv, x->k_rope, x->rope_stride, &x->shape);
}

static void attention(struct trial *t)
{
    struct dense x = dense_of(t);
    int64_t n_rows = t->d[0] * t->d[2];
    elem *o = out_elems(t, "o", n_rows * t->d[5]);
    float *lse = out_floats(t, "lse", n_rows);
    t->flops = dense_flops(&x, 2);
    TRIAL_RUN(t)
        attend(t, &x, o, lse);
}

/* Of the gradients of queries and of rotary keys: over one key the softmax is constant, and what
 * remains of them is the rounding of d_o . v, which is of this size before it cancels. */
static double cancelled(int64_t n, int64_t n_docs, float scale, int64_t n_values)
{
    return n == n_docs ? scale * sqrt((double)n_values) : 0;
}

static void attention_backward(struct trial *t)
{
    struct dense x = dense_of(t);
    int64_t n = t->d[0], n_rows = n * t->d[2];
    const elem *d_o = in_elems(t, n_rows * t->d[5], 1);
    elem *o = scratch_elems(t, n_rows * t->d[5]);
    float *lse = scratch_floats(t, n_rows);
    elem *dq = out_elems(t, "dq", n_rows * (t->d[3] + t->d[4]));
    elem *dkv = out_elems(t, "dkv", n_rows * (t->d[3] + t->d[5]));
    elem *dk_rope = inout_elems(t, "dk_rope", n * x.rope_stride + 1, 1);
    double scale = cancelled(n, t->d[1], x.shape.scale, t->d[5]);
    out_scale(t, dq, scale);
    out_scale(t, dk_rope, scale);
    t->flops = dense_flops(&x, 5); /* five products; q k twice counts once */
    attend(t, &x, o, lse);
    TRIAL_RUN(t)
        t->dev->ops->attention_backward(t->dev, dq, dkv, dk_rope, x.rope_stride, d_o, o, lse, x.q,
                                        x.kv, x.k_rope, x.rope_stride, &x.shape);
}

/* ---- the indexer: n, documents, heads, d, top_k, begin, end ---- */

static struct index_shape index_of(struct trial *t, const int32_t *cu, int64_t heads, int64_t d,
                                   int64_t top_k)
{
    return (struct index_shape){.n_tokens = t->d[0], .cu_seqlens = cu, .n_docs = (int32_t)t->d[1],
                                .n_heads = (int32_t)heads, .head_dim = (int32_t)d,
                                .scale = 0.125f, .top_k = (int32_t)top_k};
}

static void index_scores(struct trial *t)
{
    int64_t n = t->d[0], heads = t->d[2], d = t->d[3], begin = t->d[5], end = t->d[6];
    const int32_t *cu = trial_documents(t, n, (int32_t)t->d[1]);
    struct index_shape s = index_of(t, cu, heads, d, t->d[4]);
    const elem *q = in_elems(t, n * heads * d, 1), *k = in_elems(t, n * d, 1);
    const elem *w = in_elems(t, n * heads, 1);
    float *scores = out_floats(t, "scores", (end - begin) * n);
    double n_pairs = 0;
    for (int64_t i = begin, doc = 0; i < end; i++) {
        while (cu[doc + 1] <= i)
            doc++;
        n_pairs += (double)(i - cu[doc] + 1);
    }
    t->flops = 2 * n_pairs * (double)(heads * d);
    t->tolerance_bf16 = 1e-4;
    TRIAL_RUN(t)
        t->dev->ops->index_scores(t->dev, scores, begin, end, q, k, w, &s);
}

/* Small whole numbers, so that no sum is rounded. */
static const elem *whole_elems(struct trial *t, int64_t n)
{
    float *host = trial_host(t, (size_t)n * sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = roundf(1.2f * trial_normal(t));
    return in_elems_of(t, host, n);
}

/* n, documents, heads, d, top_k, first query, whether numbers are whole in large ones, too. */
static void index_select(struct trial *t)
{
    int64_t n = t->d[0], heads = t->d[2], d = t->d[3], top_k = t->d[4], m = n - t->d[5];
    const int32_t *cu = trial_documents(t, n, (int32_t)t->d[1]);
    struct index_shape s = index_of(t, cu, heads, d, top_k);
    bool is_timed = n > 4096 && !t->d[6]; /* ties by the thousand would be another case */
    const elem *q = is_timed ? in_elems(t, m * heads * d, 1) : whole_elems(t, m * heads * d);
    const elem *k = is_timed ? in_elems(t, n * d, 1) : whole_elems(t, n * d);
    const elem *w = is_timed ? in_elems(t, m * heads, 1) : whole_elems(t, m * heads);
    int32_t *selected = out_i32(t, "selected", m * top_k, 0);
    s.first = t->d[5];
    t->flops = 2 * visible(cu, t->d[1]) * (double)(heads * d);
    TRIAL_RUN(t)
        t->dev->ops->index_select(t->dev, selected, q, k, w, &s);
}

/* ---- over chosen keys: n, documents, heads, latent, rope, top_k, extra width of rope rows, first
 * query ---- */

/* At random and spread over what a query sees; all of it where that is not more. Of the queries
 * from first on. */
static const int32_t *random_choice(struct trial *t, const int32_t *cu, int64_t first, int64_t n,
                                    int64_t top_k)
{
    int32_t *selected = trial_host(t, (size_t)(n * top_k) * sizeof *selected);
    for (int64_t i = 0, doc = 0; i < n; i++) {
        while (cu[doc + 1] <= i)
            doc++;
        int64_t n_seen = i - cu[doc] + 1, n_chosen = n_seen < top_k ? n_seen : top_k, next = 0;
        for (int64_t j = 0; j < top_k; j++) {
            int64_t at = (int64_t)(((double)j + trial_uniform(t)) * (double)n_seen /
                                   (double)n_chosen);
            int64_t most = n_seen - (n_chosen - j);
            at = at > most ? most : at;
            at = at < next ? next : at;
            selected[i * top_k + j] = j < n_chosen ? (int32_t)(cu[doc] + at) : -1;
            next = at + 1;
        }
    }
    return in_bytes(t, selected + first * top_k, (size_t)((n - first) * top_k) * sizeof *selected);
}

struct sparse {
    struct sparse_shape shape;
    const elem *q, *q_rope, *latent, *k_rope;
    int64_t rope_stride;
    const int32_t *cu, *selected;
};

static struct sparse sparse_of(struct trial *t, int64_t heads, int64_t latent, int64_t rope,
                               int64_t top_k, int64_t extra, int64_t first)
{
    int64_t n = t->d[0], m = n - first, stride = rope + extra;
    struct sparse x = {
        .shape = {.n_tokens = n, .n_heads = (int32_t)heads, .latent_dim = (int32_t)latent,
                  .rope_dim = (int32_t)rope, .scale = 1 / sqrtf((float)(latent + rope)),
                  .top_k = (int32_t)top_k, .first = first},
        .rope_stride = stride,
        .cu = trial_documents(t, n, (int32_t)t->d[1]),
    };
    x.q = in_elems(t, m * heads * latent, 1);
    x.q_rope = in_elems(t, m * heads * stride + 1, 1);
    x.latent = in_elems(t, n * latent, 1);
    x.k_rope = in_elems(t, n * stride + 1, 1);
    x.selected = random_choice(t, x.cu, first, n, top_k);
    return x;
}

/* Of products over the width of keys, and over that of values. */
static double sparse_flops(const struct sparse *x, int64_t n_docs, double n_keys, double n_values)
{
    double n_pairs = 0, k = x->shape.top_k;
    for (int64_t i = 0; i < n_docs; i++) {
        double n = x->cu[i + 1] - x->cu[i], m = n < k ? n : k;
        n_pairs += m * (m + 1) / 2 + (n - m) * k;
    }
    return 2 * n_pairs * x->shape.n_heads *
           (n_keys * (x->shape.latent_dim + x->shape.rope_dim) + n_values * x->shape.latent_dim);
}

static void attend_sparse(struct trial *t, const struct sparse *x, elem *o, float *lse)
{
    t->dev->ops->sparse_attention(t->dev, o, lse, x->q, x->q_rope, x->rope_stride, x->latent,
                                  x->k_rope, x->rope_stride, x->selected, &x->shape);
}

static void sparse_attention(struct trial *t)
{
    struct sparse x = sparse_of(t, t->d[2], t->d[3], t->d[4], t->d[5], t->d[6], t->d[7]);
    int64_t n_rows = (t->d[0] - t->d[7]) * t->d[2];
    elem *o = out_elems(t, "o", n_rows * t->d[3]);
    float *lse = out_floats(t, "lse", n_rows);
    t->flops = sparse_flops(&x, t->d[1], 1, 1);
    TRIAL_RUN(t)
        attend_sparse(t, &x, o, lse);
}

static void sparse_attention_backward(struct trial *t)
{
    struct sparse x = sparse_of(t, t->d[2], t->d[3], t->d[4], t->d[5], t->d[6], t->d[7]);
    int64_t n = t->d[0], m = n - t->d[7], n_rows = m * t->d[2], latent = t->d[3];
    const elem *d_o = in_elems(t, n_rows * latent, 1);
    elem *o = scratch_elems(t, n_rows * latent);
    float *lse = scratch_floats(t, n_rows);
    elem *dq = out_elems(t, "dq_latent", n_rows * latent);
    elem *dq_rope = inout_elems(t, "dq_rope", n_rows * x.rope_stride + 1, 1);
    elem *d_latent = out_elems(t, "d_latent", m * latent);
    elem *dk_rope = inout_elems(t, "dk_rope", m * x.rope_stride + 1, 1);
    double scale = cancelled(n, t->d[1], x.shape.scale, latent);
    out_scale(t, dq, scale);
    out_scale(t, dq_rope, scale);
    out_scale(t, dk_rope, scale);
    if (t->d[7] > 0) {
        x.shape.later = inout_floats(t, "later", n * (latent + t->d[4]), 1);
        out_scale(t, x.shape.later, scale);
    }
    t->flops = sparse_flops(&x, t->d[1], 3, 2);
    attend_sparse(t, &x, o, lse);
    TRIAL_RUN(t)
        t->dev->ops->sparse_attention_backward(
            t->dev, dq, dq_rope, x.rope_stride, d_latent, dk_rope, x.rope_stride, d_o, o, lse, x.q,
            x.q_rope, x.rope_stride, x.latent, x.k_rope, x.rope_stride, x.selected, &x.shape);
}

/* ---- the indexer's loss ---- */

struct indexer {
    const elem *q, *k, *w;
    elem *dq, *dk, *dw;
    double *acc_loss;
};

static struct indexer indexer_of(struct trial *t, int64_t heads, int64_t d, int64_t first)
{
    int64_t n = t->d[0], m = n - first;
    return (struct indexer){
        .q = in_elems(t, m * heads * d, 1), .k = in_elems(t, n * d, 1),
        .w = in_elems(t, m * heads, 1), .dq = out_elems(t, "dq", m * heads * d),
        .dk = out_elems(t, "dk", m * d), .dw = out_elems(t, "dw", m * heads),
        .acc_loss = inout_double(t, "acc_loss", 0.5),
    };
}

/* n, documents, index heads, index d, top_k, heads, latent, rope, first query. The smallest widths
 * of scores need no care: what is compared is a difference of two distributions. */
static void index_loss(struct trial *t)
{
    int64_t n = t->d[0], heads = t->d[5], latent = t->d[6], rope = t->d[7], m = n - t->d[8];
    struct sparse x = sparse_of(t, heads, latent, rope, t->d[4], 0, t->d[8]);
    struct index_shape s = index_of(t, x.cu, t->d[2], t->d[3], t->d[4]);
    struct indexer i = indexer_of(t, t->d[2], t->d[3], t->d[8]);
    elem *o = scratch_elems(t, m * heads * latent);
    float *lse = scratch_floats(t, m * heads);
    s.first = t->d[8];
    if (s.first > 0)
        s.later = inout_floats(t, "later", n * t->d[3], 1);
    t->flops = sparse_flops(&x, t->d[1], 1, 0);
    attend_sparse(t, &x, o, lse);
    TRIAL_RUN(t)
        t->dev->ops->index_loss(t->dev, i.acc_loss, i.dq, i.dk, i.dw, 0.25f, i.q, i.k, i.w,
                                x.selected, x.q, x.q_rope, x.rope_stride, x.latent, x.k_rope,
                                x.rope_stride, lse, &s, &x.shape);
}

/* n, documents, index heads, index d, heads, nope, rope, v. */
static void index_loss_dense(struct trial *t)
{
    int64_t n = t->d[0], heads = t->d[4], nope = t->d[5], rope = t->d[6], v = t->d[7];
    struct dense x = {
        .shape = {.n_tokens = n, .cu_seqlens = trial_documents(t, n, (int32_t)t->d[1]),
                  .n_docs = (int32_t)t->d[1], .n_heads = (int32_t)heads, .nope_dim = (int32_t)nope,
                  .rope_dim = (int32_t)rope, .v_dim = (int32_t)v,
                  .scale = 1 / sqrtf((float)(nope + rope))},
        .rope_stride = rope,
    };
    x.q = in_elems(t, n * heads * (nope + rope), 1);
    x.kv = in_elems(t, n * heads * (nope + v), 1);
    x.k_rope = in_elems(t, n * rope + 1, 1);
    struct index_shape s = index_of(t, x.shape.cu_seqlens, t->d[2], t->d[3], 1);
    struct indexer i = indexer_of(t, t->d[2], t->d[3], 0);
    elem *o = scratch_elems(t, n * heads * v);
    float *lse = scratch_floats(t, n * heads);
    t->flops = 2 * visible(x.shape.cu_seqlens, t->d[1]) * (double)(heads * (nope + rope));
    attend(t, &x, o, lse);
    TRIAL_RUN(t)
        t->dev->ops->index_loss_dense(t->dev, i.acc_loss, i.dq, i.dk, i.dw, 0.25f, i.q, i.k, i.w,
                                      x.q, x.kv, x.k_rope, x.rope_stride, lse, &s, &x.shape);
}

static const struct op_case cases[] = {
    /* n, documents, heads, nope, rope, v, extra */
    {"attention", attention, {1, 1, 1, 1, 0, 1}},
    {"attention", attention, {33, 1, 2, 16, 8, 24}},
    {"attention", attention, {150, 4, 3, 20, 4, 70, 4}},
    {"attention", attention, {65, 65, 2, 16, 0, 16}},
    {"attention", attention, {1, 1, 1, 128, 64, 128}},
    {"attention", attention, {129, 1, 1, 128, 64, 128}},
    {"attention", attention, {300, 5, 2, 128, 64, 128, 8}},
    {"attention", attention, {257, 3, 1, 128, 0, 128}},
    {"attention", attention, {512, 1, 96, 128, 64, 128}, CASE_LARGE},
    {"attention", attention, {2000, 7, 8, 128, 64, 128, 512}, CASE_LARGE},
    {"attention", attention, {8192, 1, 64, 128, 0, 128}, CASE_BENCH},
    {"attention", attention, {8192, 1, 96, 128, 64, 128}, CASE_BENCH},
    {"attention", attention, {16384, 4, 8, 128, 64, 128}, CASE_BENCH},

    {"attention_backward", attention_backward, {1, 1, 1, 1, 0, 1}},
    {"attention_backward", attention_backward, {33, 1, 2, 16, 8, 24}},
    {"attention_backward", attention_backward, {150, 4, 3, 20, 4, 70, 4}},
    {"attention_backward", attention_backward, {65, 65, 2, 16, 0, 16}},
    {"attention_backward", attention_backward, {1, 1, 1, 128, 64, 128}},
    {"attention_backward", attention_backward, {129, 1, 1, 128, 64, 128}},
    {"attention_backward", attention_backward, {300, 5, 2, 128, 64, 128, 8}},
    {"attention_backward", attention_backward, {257, 3, 1, 128, 0, 128}},
    {"attention_backward", attention_backward, {512, 1, 96, 128, 64, 128}, CASE_LARGE},
    {"attention_backward", attention_backward, {2000, 7, 8, 128, 64, 128, 512}, CASE_LARGE},
    {"attention_backward", attention_backward, {8192, 1, 64, 128, 0, 128}, CASE_BENCH},
    {"attention_backward", attention_backward, {8192, 1, 96, 128, 64, 128}, CASE_BENCH},
    {"attention_backward", attention_backward, {16384, 4, 8, 128, 64, 128}, CASE_BENCH},

    /* n, documents, heads, d, top_k, begin, end */
    {"index_scores", index_scores, {1, 1, 1, 1, 1, 0, 1}},
    {"index_scores", index_scores, {33, 1, 3, 16, 8, 5, 33}},
    {"index_scores", index_scores, {150, 4, 2, 20, 8, 0, 149}},
    {"index_scores", index_scores, {70, 3, 70, 33, 8, 1, 70}},
    {"index_scores", index_scores, {270, 1, 64, 128, 8, 0, 270}},
    {"index_scores", index_scores, {270, 6, 32, 128, 8, 3, 268}},
    {"index_scores", index_scores, {3000, 3, 64, 128, 8, 1100, 2100}, CASE_LARGE},
    {"index_scores", index_scores, {8192, 1, 64, 128, 8, 0, 8192}, CASE_BENCH},
    {"index_scores", index_scores, {8192, 1, 32, 128, 8, 0, 8192}, CASE_BENCH},
    {"index_scores", index_scores, {65536, 1, 64, 128, 8, 57344, 65536}, CASE_BENCH},
    {"index_scores", index_scores, {65536, 1, 64, 128, 8, 0, 65536}, CASE_BENCH},

    {"index_select", index_select, {1, 1, 1, 1, 3}},
    {"index_select", index_select, {33, 1, 3, 16, 8}},
    {"index_select", index_select, {150, 4, 2, 20, 16}},
    {"index_select", index_select, {90, 1, 70, 33, 100}},
    {"index_select", index_select, {300, 1, 4, 8, 7}},
    {"index_select", index_select, {260, 1, 64, 128, 64}},
    {"index_select", index_select, {190, 3, 32, 128, 1}},
    {"index_select", index_select, {90, 1, 70, 33, 20, 50}},
    {"index_select", index_select, {700, 1, 64, 128, 64, 512}},
    {"index_select", index_select, {4096, 1, 32, 128, 2048}, CASE_LARGE},
    {"index_select", index_select, {4096, 1, 64, 128, 500, 3500}, CASE_LARGE},
    {"index_select", index_select, {4000, 3, 64, 128, 500}, CASE_LARGE},
    {"index_select", index_select, {11000, 1, 16, 128, 2048, 9000, 1}, CASE_LARGE},
    {"index_select", index_select, {24000, 1, 16, 128, 2048, 23700, 1}, CASE_LARGE},
    {"index_select", index_select, {40000, 1, 16, 128, 2048, 39800, 1}, CASE_LARGE},
    {"index_select", index_select, {8192, 1, 64, 128, 2048}, CASE_BENCH},
    {"index_select", index_select, {8192, 1, 32, 128, 2048}, CASE_BENCH},
    {"index_select", index_select, {65536, 1, 64, 128, 2048}, CASE_BENCH},

    /* n, documents, heads, latent, rope, top_k, extra */
    {"sparse_attention", sparse_attention, {1, 1, 1, 1, 0, 4}},
    {"sparse_attention", sparse_attention, {33, 1, 2, 16, 4, 8}},
    {"sparse_attention", sparse_attention, {150, 4, 3, 24, 8, 16, 3}},
    {"sparse_attention", sparse_attention, {100, 1, 70, 72, 8, 300}},
    {"sparse_attention", sparse_attention, {70, 1, 16, 512, 64, 33}},
    {"sparse_attention", sparse_attention, {101, 3, 64, 512, 64, 64}},
    {"sparse_attention", sparse_attention, {70, 1, 128, 512, 64, 65, 8}},
    {"sparse_attention", sparse_attention, {60, 1, 96, 512, 64, 128}},
    {"sparse_attention", sparse_attention, {100, 1, 3, 24, 8, 16, 0, 64}},
    {"sparse_attention", sparse_attention, {100, 1, 96, 512, 64, 65, 0, 40}},
    {"sparse_attention", sparse_attention, {700, 2, 64, 512, 64, 256}, CASE_LARGE},
    {"sparse_attention", sparse_attention, {8192, 1, 64, 512, 64, 2048}, CASE_BENCH},
    {"sparse_attention", sparse_attention, {8192, 1, 128, 512, 64, 2048}, CASE_BENCH},
    {"sparse_attention", sparse_attention, {65536, 1, 64, 512, 64, 2048}, CASE_BENCH},
    {"sparse_attention", sparse_attention, {65536, 1, 128, 512, 64, 2048}, CASE_BENCH},

    {"sparse_attention_backward", sparse_attention_backward, {1, 1, 1, 1, 0, 4}},
    {"sparse_attention_backward", sparse_attention_backward, {33, 1, 2, 16, 4, 8}},
    {"sparse_attention_backward", sparse_attention_backward, {150, 4, 3, 24, 8, 16, 3}},
    {"sparse_attention_backward", sparse_attention_backward, {100, 1, 70, 72, 8, 300}},
    {"sparse_attention_backward", sparse_attention_backward, {12, 2, 64, 512, 64, 20}},
    {"sparse_attention_backward", sparse_attention_backward, {70, 1, 16, 512, 64, 33}},
    {"sparse_attention_backward", sparse_attention_backward, {101, 3, 64, 512, 64, 64}},
    {"sparse_attention_backward", sparse_attention_backward, {70, 1, 128, 512, 64, 65, 8}},
    {"sparse_attention_backward", sparse_attention_backward, {60, 1, 96, 512, 64, 128}},
    {"sparse_attention_backward", sparse_attention_backward, {100, 1, 3, 24, 8, 16, 0, 64}},
    {"sparse_attention_backward", sparse_attention_backward, {100, 1, 96, 512, 64, 65, 0, 40}},
    {"sparse_attention_backward", sparse_attention_backward, {700, 2, 64, 512, 64, 256},
     CASE_LARGE},
    {"sparse_attention_backward", sparse_attention_backward, {8192, 1, 64, 512, 64, 2048},
     CASE_BENCH},
    {"sparse_attention_backward", sparse_attention_backward, {8192, 1, 128, 512, 64, 2048},
     CASE_BENCH},

    /* n, documents, index heads, index d, top_k, heads, latent, rope */
    {"index_loss", index_loss, {1, 1, 1, 1, 4, 1, 1, 0}},
    {"index_loss", index_loss, {33, 1, 3, 16, 8, 2, 16, 4}},
    {"index_loss", index_loss, {150, 4, 2, 20, 16, 3, 24, 8}},
    {"index_loss", index_loss, {100, 1, 70, 20, 300, 70, 72, 8}},
    {"index_loss", index_loss, {12, 2, 32, 128, 20, 16, 512, 64}},
    {"index_loss", index_loss, {101, 2, 32, 128, 64, 16, 512, 64}},
    {"index_loss", index_loss, {100, 1, 3, 16, 8, 2, 16, 4, 64}},
    {"index_loss", index_loss, {120, 1, 64, 128, 64, 96, 512, 64, 50}},
    {"index_loss", index_loss, {1000, 2, 32, 128, 256, 96, 512, 64}, CASE_LARGE},
    {"index_loss", index_loss, {8192, 1, 32, 128, 2048, 64, 512, 64}, CASE_BENCH},

    /* n, documents, index heads, index d, heads, nope, rope, v */
    {"index_loss_dense", index_loss_dense, {1, 1, 1, 1, 1, 1, 0, 1}},
    {"index_loss_dense", index_loss_dense, {33, 1, 3, 16, 2, 16, 4, 16}},
    {"index_loss_dense", index_loss_dense, {150, 4, 2, 20, 3, 24, 8, 16}},
    {"index_loss_dense", index_loss_dense, {130, 2, 32, 128, 2, 128, 64, 128}},
    {"index_loss_dense", index_loss_dense, {1000, 2, 32, 128, 8, 128, 64, 128}, CASE_LARGE},
    {"index_loss_dense", index_loss_dense, {4096, 1, 32, 128, 64, 128, 64, 128}, CASE_BENCH},
};

OP_FAMILY(attention, cases)
