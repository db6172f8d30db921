/* test_attention.c - latent attention and attention residuals: values against the definition in
 * double, gradients against finite differences */
#include "tests/gradcheck.h"

static struct random rng;
static struct device *dev;

#define DOCS_MAX 6

struct attention_case {
    const char *what;
    int32_t n_docs, lengths[DOCS_MAX], n_heads, nope, rope, v;
    float   width; /* of the queries: large ones make sharp weights */
};

static const struct attention_case cases[] = {
    {"one token", 1, {1}, 1, 4, 2, 3, 1},
    {"a few tokens, odd widths", 1, {5}, 3, 7, 5, 9, 1},
    {"one block", 1, {64}, 2, 16, 8, 16, 1},
    {"one more than a block", 1, {65}, 2, 8, 4, 8, 1},
    {"several blocks and a tail", 1, {200}, 1, 16, 8, 20, 1},
    {"packed documents, one empty", 5, {1, 70, 0, 130, 3}, 2, 8, 4, 8, 1},
    {"no shared key part", 1, {70}, 2, 8, 0, 8, 1},
    {"sharp weights", 1, {90}, 1, 16, 8, 16, 12},
};

struct attention {
    struct attention_shape shape;
    int32_t cu[DOCS_MAX + 1];
    int64_t n_q, n_kv, n_o, rope_stride;
    float *q, *kv, *k_rope, *o, *lse, *d_o, *dq, *dkv, *dk_rope;
};

static void setup(struct attention *a, const struct attention_case *c)
{
    *a = (struct attention){.rope_stride = c->rope + 3};
    for (int32_t i = 0; i < c->n_docs; i++)
        a->cu[i + 1] = a->cu[i] + c->lengths[i];
    int64_t n = a->cu[c->n_docs], rows = n * c->n_heads;
    a->shape = (struct attention_shape){
        n, a->cu, c->n_docs, c->n_heads, c->nope, c->rope, c->v,
        (float)(1 / sqrt(c->nope + c->rope)),
    };
    a->n_q = rows * (c->nope + c->rope);
    a->n_kv = rows * (c->nope + c->v);
    a->n_o = rows * c->v;
    a->q = random_floats(&rng, a->n_q, c->width);
    a->kv = random_floats(&rng, a->n_kv, 1);
    a->k_rope = random_floats(&rng, n * a->rope_stride, 1);
    a->o = filled(a->n_o, NAN);
    a->lse = filled(rows, NAN);
    a->d_o = random_floats(&rng, a->n_o, 1);
    a->dq = filled(a->n_q, NAN);
    a->dkv = filled(a->n_kv, NAN);
    a->dk_rope = filled(n * a->rope_stride, 0);
}

static void teardown(struct attention *a)
{
    float *all[] = {a->q, a->kv, a->k_rope, a->o, a->lse, a->d_o, a->dq, a->dkv, a->dk_rope};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void forward(struct attention *a)
{
    dev->ops->attention(dev, a->o, a->lse, a->q, a->kv, a->k_rope, a->rope_stride, &a->shape);
}

static double score(const struct attention *a, int64_t query, int64_t key, int32_t head)
{
    const struct attention_shape *s = &a->shape;
    const float *q = a->q + (query * s->n_heads + head) * (s->nope_dim + s->rope_dim);
    const float *k = a->kv + (key * s->n_heads + head) * (s->nope_dim + s->v_dim);
    double sum = 0;
    for (int32_t j = 0; j < s->nope_dim; j++)
        sum += (double)q[j] * k[j];
    for (int32_t j = 0; j < s->rope_dim; j++)
        sum += (double)q[s->nope_dim + j] * a->k_rope[key * a->rope_stride + j];
    return s->scale * sum;
}

/* One query of one head, in double. */
static void check_query(const struct attention *a, const char *what, int64_t begin, int64_t query,
                        int32_t head)
{
    const struct attention_shape *s = &a->shape;
    double total = 0, *o = xcalloc((size_t)s->v_dim, sizeof *o);
    for (int64_t key = begin; key <= query; key++) {
        double p = exp(score(a, query, key, head));
        const float *v = a->kv + (key * s->n_heads + head) * (s->nope_dim + s->v_dim) + s->nope_dim;
        total += p;
        for (int32_t j = 0; j < s->v_dim; j++)
            o[j] += p * v[j];
    }
    int64_t row = query * s->n_heads + head;
    if (!(fabs(a->lse[row] - log(total)) <= 1e-5 * (1 + fabs(log(total)))))
        fail_msg("%s: lse of query %d is %.9g, not %.9g", what, (int)query, a->lse[row],
                 log(total));
    for (int32_t j = 0; j < s->v_dim; j++)
        if (!(fabs(a->o[row * s->v_dim + j] - o[j] / total) <= 2e-5))
            fail_msg("%s: o of query %d is %.9g, not %.9g", what, (int)query,
                     a->o[row * s->v_dim + j], o[j] / total);
    free(o);
}

static void attention_is_its_definition(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct attention a;
        setup(&a, &cases[i]);
        forward(&a);
        for (int32_t doc = 0; doc < a.shape.n_docs; doc++)
            for (int64_t query = a.cu[doc]; query < a.cu[doc + 1]; query++)
                for (int32_t head = 0; head < a.shape.n_heads; head++)
                    check_query(&a, cases[i].what, a.cu[doc], query, head);
        teardown(&a);
    }
}

static double loss(void *ctx)
{
    struct attention *a = ctx;
    forward(a);
    return weighted_sum(a->o, a->d_o, a->n_o);
}

static void attention_gradients(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct attention a;
        setup(&a, &cases[i]);
        forward(&a);
        dev->ops->attention_backward(dev, a.dq, a.dkv, a.dk_rope, a.rope_stride, a.d_o, a.o, a.lse,
                                     a.q, a.kv, a.k_rope, a.rope_stride, &a.shape);
        struct gradient gradients[] = {
            {"q", a.q, a.dq, a.n_q, 0},
            {"kv", a.kv, a.dkv, a.n_kv, 0},
            {"k_rope", a.k_rope, a.dk_rope, a.shape.n_tokens * a.rope_stride, 0},
        };
        gradcheck(cases[i].what, &rng, loss, &a, gradients, 3, 1e-2);
        teardown(&a);
    }
}

/* ---- attention residuals ---- */

#define ROWS_MAX 9
#define EPS      1e-5f

static const struct {
    const char *what;
    int32_t n_rows;
    int64_t n, d;
} mixes[] = {
    {"one row is itself", 1, 3, 5},
    {"two rows", 2, 1, 16},
    {"nine rows", 9, 70, 33},
    {"several tasks", 3, 200, 64},
};

struct mix {
    int32_t n_rows;
    int64_t n, d;
    float *r[ROWS_MAX], *dr[ROWS_MAX];
    float *g, *w, *dg, *dw, *y, *weights, *dy;
};

static void mix_setup(struct mix *m, int32_t n_rows, int64_t n, int64_t d)
{
    *m = (struct mix){.n_rows = n_rows, .n = n, .d = d};
    for (int32_t i = 0; i < n_rows; i++) {
        m->r[i] = random_floats(&rng, n * d, 1 + (float)i);
        m->dr[i] = filled(n * d, 0.5f);
    }
    m->g = random_floats(&rng, d, 1);
    m->w = random_floats(&rng, d, 1);
    m->dg = filled(d, 0.25f);
    m->dw = filled(d, 0.25f);
    m->y = filled(n * d, NAN);
    m->weights = filled(n * n_rows, NAN);
    m->dy = random_floats(&rng, n * d, 1);
}

static void mix_teardown(struct mix *m)
{
    for (int32_t i = 0; i < m->n_rows; i++) {
        free(m->r[i]);
        free(m->dr[i]);
    }
    float *all[] = {m->g, m->w, m->dg, m->dw, m->y, m->weights, m->dy};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static double mix_loss(void *ctx)
{
    struct mix *m = ctx;
    dev->ops->attn_res(dev, m->y, m->weights, (const float *const *)m->r, m->n_rows, m->g, m->w,
                       m->n, m->d, EPS);
    return weighted_sum(m->y, m->dy, m->n * m->d);
}

static void mix_is_its_definition(const struct mix *m, const char *what)
{
    for (int64_t i = 0; i < m->n; i++) {
        double a[ROWS_MAX], total = 0;
        for (int32_t n = 0; n < m->n_rows; n++) {
            double squares = 0, dot = 0;
            for (int64_t j = 0; j < m->d; j++) {
                double x = m->r[n][i * m->d + j];
                squares += x * x;
                dot += x * m->g[j] * m->w[j];
            }
            total += a[n] = exp(dot / sqrt(squares / (double)m->d + EPS));
        }
        for (int64_t j = 0; j < m->d; j++) {
            double y = 0;
            for (int32_t n = 0; n < m->n_rows; n++)
                y += a[n] / total * m->r[n][i * m->d + j];
            if (!(fabs(m->y[i * m->d + j] - y) <= 2e-5))
                fail_msg("%s: y of row %d is %.9g, not %.9g", what, (int)i, m->y[i * m->d + j], y);
        }
    }
}

static void attention_residuals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof mixes / sizeof mixes[0]; i++) {
        struct mix m;
        struct gradient gradients[ROWS_MAX + 2];
        mix_setup(&m, mixes[i].n_rows, mixes[i].n, mixes[i].d);
        mix_loss(&m);
        mix_is_its_definition(&m, mixes[i].what);
        dev->ops->attn_res_backward(dev, m.dr, m.dg, m.dw, m.dy, (const float *const *)m.r,
                                    m.weights, m.n_rows, m.g, m.w, m.n, m.d, EPS);
        for (int32_t n = 0; n < m.n_rows; n++)
            gradients[n] = (struct gradient){"row", m.r[n], m.dr[n], m.n * m.d, 0.5f};
        gradients[m.n_rows] = (struct gradient){"g", m.g, m.dg, m.d, 0.25f};
        gradients[m.n_rows + 1] = (struct gradient){"w", m.w, m.dw, m.d, 0.25f};
        gradcheck(mixes[i].what, &rng, mix_loss, &m, gradients, (size_t)m.n_rows + 2, 5e-2);
        mix_teardown(&m);
    }
}

static void the_mix_may_overwrite_one_of_its_rows(void **state)
{
    (void)state;
    struct mix m;
    mix_setup(&m, 3, 40, 20);
    mix_loss(&m);
    dev->ops->attn_res(dev, m.r[2], m.weights, (const float *const *)m.r, 3, m.g, m.w, m.n, m.d,
                       EPS);
    assert_memory_equal(m.r[2], m.y, (size_t)(m.n * m.d) * sizeof(float));
    mix_teardown(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_its_definition),
        cmocka_unit_test(attention_gradients),
        cmocka_unit_test(attention_residuals),
        cmocka_unit_test(the_mix_may_overwrite_one_of_its_rows),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
