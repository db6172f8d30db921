/* test_kda.c - KDA: chunks against the plain recurrence, the reference files, finite differences */
#include "tests/oracle.h"

static struct random rng;

#define DOCS_MAX 8

struct kda_case {
    const char *what;
    int32_t n_docs, lengths[DOCS_MAX], n_heads, d;
    float   decay;  /* g is minus this times a uniform */
    bool    states; /* given at the start, wanted at the end */
};

static const struct kda_case cases[] = {
    {"one token", 1, {1}, 1, 4, 1, true},
    {"a few tokens, odd width", 1, {5}, 2, 7, 1, true},
    {"one block", 1, {16}, 1, 16, 1, false},
    {"one more than a block", 1, {17}, 1, 8, 5, true},
    {"one chunk", 1, {64}, 2, 16, 1, true},
    {"one more than a chunk", 1, {65}, 1, 32, 2, true},
    {"several chunks and a tail", 1, {200}, 2, 20, 0.2f, true},
    {"packed documents", 5, {1, 70, 16, 128, 3}, 3, 16, 1, true},
    {"documents that begin all over the chunks", 6, {65, 1, 66, 130, 64, 67}, 2, 8, 1, true},
    {"an empty document", 3, {4, 0, 33}, 1, 8, 1, true},
    {"nothing decays", 1, {90}, 1, 16, 0, true},
    {"everything decays at once", 1, {90}, 1, 16, 200, true},
    {"decays of every size", 1, {130}, 2, 16, -1, true},
};

/* All tensors of one case. */
struct kda {
    struct kda_shape shape;
    int32_t cu[DOCS_MAX + 1];
    int64_t n, n_beta, n_state;
    float *q, *k, *v, *g, *beta, *state; /* in; state NULL for zero */
    float *o, *final_state, *saved;
    float *d_o, *d_final_state;
    float *dq, *dk, *dv, *dg, *dbeta, *d_state;
    struct device *dev;
};

static void unit_rows(float *x, int64_t n, int32_t d)
{
    for (int64_t i = 0; i < n; i += d) {
        double sum = 1e-12;
        for (int32_t j = 0; j < d; j++)
            sum += (double)x[i + j] * x[i + j];
        for (int32_t j = 0; j < d; j++)
            x[i + j] = (float)(x[i + j] / sqrt(sum));
    }
}

static float random_decay(float decay)
{
    double u = random_uniform(&rng);
    return (float)(decay < 0 ? -pow(10, 6 * u - 4) : -decay * u);
}

static void setup(struct kda *x, const struct kda_case *c, struct device *dev)
{
    *x = (struct kda){.dev = dev};
    for (int32_t i = 0; i < c->n_docs; i++)
        x->cu[i + 1] = x->cu[i] + c->lengths[i];
    int64_t tokens = x->cu[c->n_docs];
    x->shape = (struct kda_shape){
        tokens, x->cu, c->n_docs, c->n_heads, c->d, (float)(1 / sqrt(c->d)),
    };
    x->n = tokens * c->n_heads * c->d;
    x->n_beta = tokens * c->n_heads;
    x->n_state = (int64_t)c->n_docs * c->n_heads * c->d * c->d;
    x->q = random_floats(&rng, x->n, 1);
    x->k = random_floats(&rng, x->n, 1);
    unit_rows(x->q, x->n, c->d);
    unit_rows(x->k, x->n, c->d);
    x->v = random_floats(&rng, x->n, 1);
    x->g = zeros(x->n);
    for (int64_t i = 0; i < x->n; i++)
        x->g[i] = random_decay(c->decay);
    x->beta = zeros(x->n_beta);
    for (int64_t i = 0; i < x->n_beta; i++)
        x->beta[i] = (float)random_uniform(&rng);
    if (c->states)
        x->state = random_floats(&rng, x->n_state, 0.3f);
    x->o = filled(x->n, NAN);
    x->final_state = filled(x->n_state, NAN);
    x->saved = filled((int64_t)dev->ops->kda_saved_floats(dev, &x->shape), NAN);
    x->d_o = random_floats(&rng, x->n, 1);
    x->d_final_state = random_floats(&rng, x->n_state, 0.3f);
    x->dq = filled(x->n, NAN);
    x->dk = filled(x->n, NAN);
    x->dv = filled(x->n, NAN);
    x->dg = filled(x->n, NAN);
    x->dbeta = filled(x->n_beta, NAN);
    x->d_state = filled(x->n_state, NAN);
}

static void teardown(struct kda *x)
{
    float *all[] = {x->q, x->k, x->v, x->g, x->beta, x->state, x->o, x->final_state, x->saved,
                    x->d_o, x->d_final_state, x->dq, x->dk, x->dv, x->dg, x->dbeta, x->d_state};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void forward(struct kda *x)
{
    x->dev->ops->kda_forward(x->dev, x->o, x->final_state, x->saved, x->q, x->k, x->v, x->g,
                             x->beta, x->state, &x->shape);
}

static void backward(struct kda *x)
{
    x->dev->ops->kda_backward(x->dev, x->dq, x->dk, x->dv, x->dg, x->dbeta, x->d_state, x->d_o,
                              x->d_final_state, x->q, x->k, x->v, x->g, x->beta, x->state, x->saved,
                              &x->shape);
}

/* One head of one document, token by token, in double. */
static void recur(const struct kda *x, int32_t doc, int32_t head, float *o, float *final_state)
{
    int32_t d = x->shape.head_dim, heads = x->shape.n_heads;
    int64_t at = ((int64_t)doc * heads + head) * d * d;
    double *s = xcalloc((size_t)d * d, sizeof *s), *seen = xcalloc((size_t)d, sizeof *seen);
    for (int32_t i = 0; x->state && i < d * d; i++)
        s[i] = x->state[at + i];
    for (int64_t t = x->cu[doc]; t < x->cu[doc + 1]; t++) {
        int64_t row = (t * heads + head) * d;
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j < d; j++)
                s[i * d + j] *= exp(x->g[row + i]);
        for (int32_t j = 0; j < d; j++) {
            seen[j] = 0;
            for (int32_t i = 0; i < d; i++)
                seen[j] += s[i * d + j] * x->k[row + i];
        }
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j < d; j++)
                s[i * d + j] += (double)x->beta[t * heads + head] * x->k[row + i] *
                                (x->v[row + j] - seen[j]);
        for (int32_t j = 0; j < d; j++) {
            double sum = 0;
            for (int32_t i = 0; i < d; i++)
                sum += s[i * d + j] * x->q[row + i];
            o[row + j] = (float)(x->shape.scale * sum);
        }
    }
    for (int32_t i = 0; i < d * d; i++)
        final_state[at + i] = (float)s[i];
    free(s);
    free(seen);
}

static void chunks_are_the_recurrence(void **state)
{
    (void)state;
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        struct device *dev = test_device(2, deterministic);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            struct kda x;
            setup(&x, &cases[i], dev);
            float *o = zeros(x.n), *final_state = zeros(x.n_state);
            forward(&x);
            for (int32_t doc = 0; doc < x.shape.n_docs; doc++)
                for (int32_t head = 0; head < x.shape.n_heads; head++)
                    recur(&x, doc, head, o, final_state);
            oracle_compare(cases[i].what, "o", x.o, o, x.n, 2e-6, 0);
            oracle_compare(cases[i].what, "S", x.final_state, final_state, x.n_state, 2e-6, 0);
            free(o);
            free(final_state);
            teardown(&x);
        }
        dev->ops->close(dev);
    }
}

static double loss(void *ctx)
{
    struct kda *x = ctx;
    forward(x);
    return weighted_sum(x->o, x->d_o, x->n) +
           weighted_sum(x->final_state, x->d_final_state, x->n_state);
}

static void backward_is_the_derivative(void **state)
{
    (void)state;
    struct device *dev = test_device(2, false);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kda x;
        setup(&x, &cases[i], dev);
        forward(&x);
        backward(&x);
        struct gradient gradients[] = {
            {"q", x.q, x.dq, x.n, 0},          {"k", x.k, x.dk, x.n, 0},
            {"v", x.v, x.dv, x.n, 0},          {"g", x.g, x.dg, x.n, 0},
            {"beta", x.beta, x.dbeta, x.n_beta, 0}, {"state", x.state, x.d_state, x.n_state, 0},
        };
        gradcheck(cases[i].what, &rng, loss, &x, gradients, cases[i].states ? 6 : 5, 1e-2);
        teardown(&x);
    }
    dev->ops->close(dev);
}

/* NULL for states that nobody gave or wants changes nothing else. */
static void states_are_optional(void **state)
{
    (void)state;
    struct device *dev = test_device(1, true);
    struct kda_case c = {"", 2, {70, 9}, 2, 16, 1, false};
    struct kda x;
    setup(&x, &c, dev);
    forward(&x);
    memset(x.d_final_state, 0, (size_t)x.n_state * sizeof(float));
    backward(&x);
    float *o = xmemdup(x.o, (size_t)x.n * sizeof *o), *dg = xmemdup(x.dg, (size_t)x.n * sizeof *dg);
    dev->ops->kda_forward(dev, x.o, NULL, x.saved, x.q, x.k, x.v, x.g, x.beta, NULL, &x.shape);
    dev->ops->kda_backward(dev, x.dq, x.dk, x.dv, x.dg, x.dbeta, NULL, x.d_o, NULL, x.q, x.k, x.v,
                           x.g, x.beta, NULL, x.saved, &x.shape);
    assert_memory_equal(o, x.o, (size_t)x.n * sizeof *o);
    assert_memory_equal(dg, x.dg, (size_t)x.n * sizeof *dg);
    free(o);
    free(dg);
    teardown(&x);
    dev->ops->close(dev);
}

/* So that a plan of tokens holds for all documents; where they lie the other tests see. */
static void what_is_kept_follows_from_the_tokens(void **state)
{
    (void)state;
    struct device *dev = test_device(1, true);
    int32_t cu[201];
    for (int32_t n = 1; n <= 200; n++) {
        struct kda_shape shape = {n, cu, 1, 3, 16, 0.25f, false};
        for (int32_t i = 0; i <= n; i++)
            cu[i] = i;
        shape.n_docs = n; /* of a token each */
        size_t n_floats = dev->ops->kda_saved_floats(dev, &shape);
        shape.n_docs = 1;
        cu[1] = n;
        assert_int_equal(dev->ops->kda_saved_floats(dev, &shape), n_floats);
    }
    dev->ops->close(dev);
}

/* ---- the reference files ---- */

static const struct {
    const char *name;
    bool bounded;
} references[] = {
    {"t1-h1-d16", true},      {"t1-h3-d16", false},    {"t15-h1-d16", false},
    {"t15-h1-d64", false},    {"t16-h3-d16", false},   {"t16-h3-d64", true},
    {"t17-h1-d16", false},    {"t17-h3-d16", true},    {"t63-h1-d16", true},
    {"t63-h1-d64", true},     {"t64-h3-d16", true},    {"t64-h1-d64", false},
    {"t65-h1-d16", true},     {"t65-h3-d16", false},   {"t65-h3-d64", false},
    {"t65-h1-d128", true},    {"t200-h1-d16", false},  {"t200-h1-d64", false},
    {"docs-a", true},         {"docs-b", false},       {"fast-bounded", true},
    {"fast-softplus", false}, {"slow-softplus", false}, {"mixed-bounded", true},
    {"beta0-bounded", true},  {"beta0-softplus", false}, {"beta1-softplus", false},
    {"large-bounded", true},  {"tiny-bounded", true},  {"tiny-softplus", false},
};

/* The layer's core as the file has it: L2 norm, gate, recurrence, and all gradients. */
struct reference {
    const struct safetensors *st;
    const char *name;
    bool bounded;
    struct kda x;
    float *q_raw, *k_raw, *z, *a_log, *dt_bias, *q_rstd, *k_rstd;
    float *dz, *d_a_log, *d_dt_bias;
};

static void reference_read(struct reference *r, struct device *dev)
{
    int64_t n_cu = 0;
    const struct st_view *q = oracle_view(r->st, r->name, "q");
    assert_non_null(q);
    struct kda *x = &r->x;
    int32_t heads = (int32_t)q->tensor.dims[1], d = (int32_t)q->tensor.dims[2];
    int64_t tokens = (int64_t)q->tensor.dims[0];
    int32_t *cu = oracle_ints(r->st, r->name, "cu_seqlens", &n_cu);
    *x = (struct kda){.dev = dev, .cu = {0, (int32_t)tokens}};
    if (cu)
        memcpy(x->cu, cu, (size_t)n_cu * sizeof *cu);
    free(cu);
    x->shape = (struct kda_shape){
        tokens, x->cu, n_cu ? (int32_t)n_cu - 1 : 1, heads, d, (float)(1 / sqrt(d)),
    };
    x->n = tokens * heads * d;
    x->n_beta = tokens * heads;
    x->n_state = (int64_t)x->shape.n_docs * heads * d * d;
    r->q_raw = oracle_floats(r->st, r->name, "q", NULL);
    r->k_raw = oracle_floats(r->st, r->name, "k", NULL);
    r->z = oracle_floats(r->st, r->name, "z", NULL);
    r->a_log = oracle_floats(r->st, r->name, "A_log", NULL);
    r->dt_bias = oracle_floats(r->st, r->name, "dt_bias", NULL);
    x->v = oracle_floats(r->st, r->name, "v", NULL);
    x->beta = oracle_floats(r->st, r->name, "beta", NULL);
    x->state = oracle_floats(r->st, r->name, "S0", NULL);
    x->d_o = oracle_floats(r->st, r->name, "do", NULL);
    x->d_final_state = oracle_floats(r->st, r->name, "dS", NULL);
    float **outputs[] = {&x->q, &x->k, &x->g, &x->o, &x->dq, &x->dk, &x->dv, &x->dg, &r->dz};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++)
        *outputs[i] = filled(x->n, NAN);
    x->dbeta = filled(x->n_beta, NAN);
    x->d_state = filled(x->n_state, NAN);
    x->final_state = filled(x->n_state, NAN);
    r->q_rstd = zeros(x->n_beta);
    r->k_rstd = zeros(x->n_beta);
    r->d_a_log = zeros(heads);
    r->d_dt_bias = zeros((int64_t)heads * d);
    x->saved = filled((int64_t)dev->ops->kda_saved_floats(dev, &x->shape), NAN);
}

static void reference_free(struct reference *r)
{
    float *all[] = {r->q_raw, r->k_raw, r->z, r->a_log, r->dt_bias, r->q_rstd, r->k_rstd, r->dz,
                    r->d_a_log, r->d_dt_bias};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    teardown(&r->x);
}

static void reference_run(struct reference *r)
{
    struct kda *x = &r->x;
    struct device *dev = x->dev;
    int32_t heads = x->shape.n_heads, d = x->shape.head_dim;
    int64_t tokens = x->shape.n_tokens;
    dev->ops->l2_norm(dev, x->q, r->q_rstd, r->q_raw, x->n_beta, d, 1e-6f);
    dev->ops->l2_norm(dev, x->k, r->k_rstd, r->k_raw, x->n_beta, d, 1e-6f);
    dev->ops->kda_gate(dev, x->g, r->z, r->dt_bias, r->a_log, tokens, heads, d, r->bounded, -5);
    forward(x);
    backward(x);
    dev->ops->kda_gate_backward(dev, r->dz, r->d_dt_bias, r->d_a_log, x->dg, r->z, r->dt_bias,
                                r->a_log, tokens, heads, d, r->bounded, -5);
    float *dq = zeros(x->n), *dk = zeros(x->n);
    dev->ops->l2_norm_backward(dev, dq, x->dq, x->q, r->q_rstd, x->n_beta, d);
    dev->ops->l2_norm_backward(dev, dk, x->dk, x->k, r->k_rstd, x->n_beta, d);
    memcpy(x->dq, dq, (size_t)x->n * sizeof *dq);
    memcpy(x->dk, dk, (size_t)x->n * sizeof *dk);
    free(dq);
    free(dk);
}

static void reference_check(struct reference *r, const char *tensor, const float *got,
                            double tolerance)
{
    int64_t n;
    float *want = oracle_floats(r->st, r->name, tensor, &n);
    if (!want)
        return;
    oracle_compare(r->name, tensor, got, want, n, tolerance, 1e-6);
    free(want);
}

static void agrees_with_the_reference_files(void **state)
{
    (void)state;
    struct safetensors *st = oracle_open("kda");
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        struct device *dev = test_device(2, deterministic);
        for (size_t i = 0; i < sizeof references / sizeof references[0]; i++) {
            struct reference r = {
                .st = st, .name = references[i].name, .bounded = references[i].bounded,
            };
            reference_read(&r, dev);
            reference_run(&r);
            reference_check(&r, "g", r.x.g, 1e-5);
            reference_check(&r, "o", r.x.o, 1e-5);
            reference_check(&r, "S", r.x.final_state, 1e-5);
            reference_check(&r, "dq", r.x.dq, 1e-5);
            reference_check(&r, "dk", r.x.dk, 1e-5);
            reference_check(&r, "dv", r.x.dv, 1e-5);
            reference_check(&r, "dbeta", r.x.dbeta, 1e-5);
            reference_check(&r, "dS0", r.x.d_state, 1e-5);
            reference_check(&r, "dg", r.x.dg, 1e-4);
            reference_check(&r, "dz", r.dz, 1e-4);
            reference_check(&r, "dA_log", r.d_a_log, 1e-4);
            reference_check(&r, "ddt_bias", r.d_dt_bias, 1e-4);
            reference_free(&r);
        }
        dev->ops->close(dev);
    }
    safetensors_close(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_are_the_recurrence),
        cmocka_unit_test(backward_is_the_derivative),
        cmocka_unit_test(states_are_optional),
        cmocka_unit_test(what_is_kept_follows_from_the_tokens),
        cmocka_unit_test(agrees_with_the_reference_files),
    };
    rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
