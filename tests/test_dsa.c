/* test_dsa.c - the lightning indexer, its choice and its loss, and attention over chosen keys */
#include "tests/oracle.h"

static struct random rng;
static struct device *dev;

static const int32_t one_document[] = {0, 33}, long_document[] = {0, 200};
static const int32_t packed[] = {0, 1, 70, 71, 150};

/* An indexer and absorbed attention over the same tokens; all gradients and outputs. */
struct dsa {
    struct index_shape index;
    struct sparse_shape core;
    float *qi, *ki, *wi, *dqi, *dki, *dwi;
    float *q, *q_rope, *latent, *k_rope, *o, *lse;
    float *d_o, *dq, *dq_rope, *d_latent, *dk_rope;
    int32_t *selected;
};

static float **floats_of(struct dsa *x, size_t i)
{
    float **all[] = {&x->qi, &x->ki, &x->wi, &x->dqi, &x->dki, &x->dwi, &x->q, &x->q_rope,
                     &x->latent, &x->k_rope, &x->o, &x->lse, &x->d_o, &x->dq, &x->dq_rope,
                     &x->d_latent, &x->dk_rope};
    return i < sizeof all / sizeof all[0] ? all[i] : NULL;
}

static void setup(struct dsa *x, struct index_shape index, struct sparse_shape core)
{
    int64_t n = index.n_tokens, rope = core.rope_dim ? core.rope_dim : 1;
    core.n_tokens = n;
    core.top_k = index.top_k;
    *x = (struct dsa){.index = index, .core = core};
    x->qi = random_floats(&rng, n * index.n_heads * index.head_dim, 1);
    x->ki = random_floats(&rng, n * index.head_dim, 1);
    x->wi = random_floats(&rng, n * index.n_heads, 1);
    x->dqi = filled(n * index.n_heads * index.head_dim, NAN);
    x->dki = filled(n * index.head_dim, NAN);
    x->dwi = filled(n * index.n_heads, NAN);
    x->q = random_floats(&rng, n * core.n_heads * core.latent_dim, 1);
    x->q_rope = random_floats(&rng, n * core.n_heads * rope, 1);
    x->latent = random_floats(&rng, n * core.latent_dim, 1);
    x->k_rope = random_floats(&rng, n * rope, 1);
    x->o = filled(n * core.n_heads * core.latent_dim, NAN);
    x->lse = filled(n * core.n_heads, NAN);
    x->d_o = random_floats(&rng, n * core.n_heads * core.latent_dim, 1);
    x->dq = filled(n * core.n_heads * core.latent_dim, NAN);
    x->dq_rope = filled(n * core.n_heads * rope, NAN);
    x->d_latent = filled(n * core.latent_dim, NAN);
    x->dk_rope = filled(n * rope, NAN);
    x->selected = xcalloc((size_t)(n * index.top_k), sizeof *x->selected);
}

static void teardown(struct dsa *x)
{
    for (size_t i = 0; floats_of(x, i); i++)
        free(*floats_of(x, i));
    free(x->selected);
}

static void choose(struct device *d, struct dsa *x)
{
    d->ops->index_select(d, x->selected, x->qi, x->ki, x->wi, &x->index);
}

static void attend(struct device *d, struct dsa *x)
{
    d->ops->sparse_attention(d, x->o, x->lse, x->q, x->q_rope, x->core.rope_dim, x->latent,
                             x->k_rope, x->core.rope_dim, x->selected, &x->core);
}

static void attend_backward(struct device *d, struct dsa *x)
{
    d->ops->sparse_attention_backward(d, x->dq, x->dq_rope, x->core.rope_dim, x->d_latent,
                                      x->dk_rope, x->core.rope_dim, x->d_o, x->o, x->lse, x->q,
                                      x->q_rope, x->core.rope_dim, x->latent, x->k_rope,
                                      x->core.rope_dim, x->selected, &x->core);
}

static double index_loss(struct device *d, struct dsa *x, float weight)
{
    double loss = 0;
    d->ops->index_loss(d, &loss, x->dqi, x->dki, x->dwi, weight, x->qi, x->ki, x->wi, x->selected,
                       x->q, x->q_rope, x->core.rope_dim, x->latent, x->k_rope, x->core.rope_dim,
                       x->lse, &x->index, &x->core);
    return loss;
}

/* ---- selection ---- */

static void equal_scores_go_to_the_lower_key(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        float scores[6]; /* of the last query's keys */
        int32_t k, selected[6];
    } rows[] = {
        {"all zero", {0}, 3, {0, 1, 2}},
        {"negative sums count as they are", {-1, -3, -2, -3, -5, -4}, 3, {0, 1, 2}},
        {"ascending keys, whatever the scores", {1, 5, 2, 4, 3, 0}, 3, {1, 3, 4}},
        {"the first of equals", {1, 2, 2, 1, 2, 2}, 3, {1, 2, 4}},
        {"the rest of equals below a larger one", {1, 1, 9, 1, 1, 1}, 3, {0, 1, 2}},
        {"minus zero is zero", {-0.0f, 0, -0.0f, 0, 1, 0}, 2, {0, 4}},
        {"fewer visible than wanted", {1, 2, 3, 4, 5, 6}, 6, {0, 1, 2, 3, 4, 5}},
    };
    static const int32_t cu[] = {0, 6};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct index_shape shape = {6, cu, 1, 2, 1, 1, rows[i].k};
        float q[12], k[6], w[12];
        int32_t selected[36];
        for (int j = 0; j < 6; j++) { /* k s's part is w+ relu(s) - relu(-s) */
            q[2 * j] = 1;
            q[2 * j + 1] = -1;
            w[2 * j] = 1;
            w[2 * j + 1] = -1;
            k[j] = rows[i].scores[j];
        }
        dev->ops->index_select(dev, selected, q, k, w, &shape);
        for (int32_t j = 0; j < rows[i].k; j++)
            if (selected[5 * rows[i].k + j] != rows[i].selected[j])
                fail_msg("%s: choice %d is key %d, not %d", rows[i].what, j,
                         selected[5 * rows[i].k + j], rows[i].selected[j]);
        for (int32_t j = 1; j < rows[i].k; j++)
            assert_int_equal(selected[j], -1); /* the first query sees itself alone */
    }
}

/* By counting, against the scores that the op itself gives. */
static void choices_are_the_largest_scores(void **state)
{
    (void)state;
    static const struct index_shape shapes[] = {
        {33, one_document, 1, 3, 16, 0.25f, 8},
        {200, long_document, 1, 64, 16, 0.25f, 50},
        {150, packed, 4, 2, 20, 0.25f, 16},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct dsa x;
        int64_t n = shapes[i].n_tokens;
        setup(&x, shapes[i], (struct sparse_shape){.n_heads = 1, .latent_dim = 4});
        float *scores = filled(n * n, NAN);
        dev->ops->index_scores(dev, scores, 0, 20, x.qi, x.ki, x.wi, &x.index);
        dev->ops->index_scores(dev, scores + 20 * n, 20, n, x.qi, x.ki, x.wi, &x.index);
        choose(dev, &x);
        for (int64_t t = 0; t < n; t++) {
            const float *row = scores + t * n;
            const int32_t *chosen = x.selected + t * shapes[i].top_k;
            int32_t n_chosen = 0;
            for (int32_t s = 0; s < n; s++) {
                int32_t ahead = 0;
                for (int32_t u = 0; u < n; u++)
                    ahead += row[u] > row[s] || (row[u] == row[s] && u < s);
                if (row[s] > -INFINITY && ahead < shapes[i].top_k)
                    assert_int_equal(chosen[n_chosen++], s);
            }
            for (; n_chosen < shapes[i].top_k; n_chosen++)
                assert_int_equal(chosen[n_chosen], -1);
        }
        free(scores);
        teardown(&x);
    }
}

/* ---- gradients ---- */

static double attention_loss(void *ctx)
{
    struct dsa *x = ctx;
    attend(dev, x);
    return weighted_sum(x->o, x->d_o, x->core.n_tokens * x->core.n_heads * x->core.latent_dim);
}

static double divergence_loss(void *ctx)
{
    return index_loss(dev, ctx, 0);
}

static const struct {
    struct index_shape index;
    struct sparse_shape core;
} gradient_cases[] = {
    {{33, one_document, 1, 1, 1, 1, 40}, {.n_heads = 1, .latent_dim = 1, .scale = 1}},
    {{33, one_document, 1, 3, 16, 0.1f, 8},
     {.n_heads = 2, .latent_dim = 16, .rope_dim = 4, .scale = 0.2f}},
    {{150, packed, 4, 2, 20, 0.1f, 16},
     {.n_heads = 3, .latent_dim = 24, .rope_dim = 8, .scale = 0.2f}},
    {{200, long_document, 1, 4, 33, 0.1f, 64},
     {.n_heads = 5, .latent_dim = 40, .scale = 0.2f}},
};

static void gradients_of_chosen_keys(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof gradient_cases / sizeof gradient_cases[0]; i++) {
        struct dsa x;
        setup(&x, gradient_cases[i].index, gradient_cases[i].core);
        int64_t n = x.core.n_tokens, heads = x.core.n_heads;
        choose(dev, &x);
        attend(dev, &x);
        attend_backward(dev, &x);
        struct gradient gradients[] = {
            {"q_latent", x.q, x.dq, n * heads * x.core.latent_dim, 0},
            {"latent", x.latent, x.d_latent, n * x.core.latent_dim, 0},
            {"q_rope", x.q_rope, x.dq_rope, n * heads * x.core.rope_dim, 0},
            {"k_rope", x.k_rope, x.dk_rope, n * x.core.rope_dim, 0},
        };
        gradcheck("sparse attention", &rng, attention_loss, &x, gradients,
                  x.core.rope_dim ? 4 : 2, 1e-2);
        teardown(&x);
    }
}

/* The loss bends where a dot product passes 0, so all are kept away from it. */
static void away_from_zero(struct dsa *x)
{
    int64_t d = x->index.head_dim, n_q = x->index.n_tokens * x->index.n_heads;
    dev->ops->scale(dev, x->qi, 0.25f, n_q * d);
    dev->ops->scale(dev, x->ki, 0.5f, x->index.n_tokens * d);
    for (int64_t t = 0; t < n_q; t++)
        x->qi[t * d] = t % 2 ? 3 : -3;
    for (int64_t t = 0; t < x->index.n_tokens; t++)
        x->ki[t * d] += 3;
}

static void gradients_of_the_indexer(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof gradient_cases / sizeof gradient_cases[0]; i++) {
        struct dsa x;
        setup(&x, gradient_cases[i].index, gradient_cases[i].core);
        int64_t n = x.index.n_tokens, heads = x.index.n_heads, d = x.index.head_dim;
        away_from_zero(&x);
        choose(dev, &x);
        attend(dev, &x);
        assert_true(index_loss(dev, &x, 1) > 0);
        float *dq = xmemdup(x.dqi, (size_t)(n * heads * d) * sizeof *dq);
        float *dk = xmemdup(x.dki, (size_t)(n * d) * sizeof *dk);
        float *dw = xmemdup(x.dwi, (size_t)(n * heads) * sizeof *dw);
        struct gradient gradients[] = {
            {"q", x.qi, dq, n * heads * d, 0},
            {"k", x.ki, dk, n * d, 0},
            {"w", x.wi, dw, n * heads, 0},
        };
        gradcheck("index loss", &rng, divergence_loss, &x, gradients, 3, 1e-1);
        free(dq);
        free(dk);
        free(dw);
        teardown(&x);
    }
}

/* ---- chosen keys against all of them ---- */

/* Expanded keys and values from latents, and queries in both forms. */
struct expanded {
    struct attention_shape shape;
    float *w, *q, *kv, *o, *lse, *absorbed_o;
};

static void expand(struct expanded *e, struct dsa *x, int32_t nope, int32_t v)
{
    int64_t n = x->core.n_tokens, heads = x->core.n_heads, latent = x->core.latent_dim;
    int64_t rope = x->core.rope_dim, rows = nope + v;
    *e = (struct expanded){.shape = {
        n, x->index.cu_seqlens, x->index.n_docs, (int32_t)heads, nope, (int32_t)rope, v,
        x->core.scale}};
    e->w = random_floats(&rng, heads * rows * latent, 0.3f);
    e->q = random_floats(&rng, n * heads * (nope + rope), 1);
    e->kv = zeros(n * heads * rows);
    e->o = filled(n * heads * v, NAN);
    e->absorbed_o = filled(n * heads * v, NAN);
    e->lse = filled(n * heads, NAN);
    dev->ops->linear(dev, e->kv, x->latent, e->w, n, latent, heads * rows, 0);
    dev->ops->heads_linear_dx(dev, x->q, latent, e->q, nope + rope, e->w, rows * latent, n,
                              (int32_t)heads, latent, nope, 0);
    dev->ops->attention(dev, e->o, e->lse, e->q, e->kv, x->k_rope, rope, &e->shape);
}

static void teardown_expanded(struct expanded *e)
{
    float *all[] = {e->w, e->q, e->kv, e->o, e->lse, e->absorbed_o};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void with_all_keys_it_is_dense_attention(void **state)
{
    (void)state;
    static const struct index_shape shapes[] = {
        {33, one_document, 1, 2, 16, 0.1f, 40},
        {150, packed, 4, 2, 16, 0.1f, 128},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct dsa x;
        struct expanded e;
        setup(&x, shapes[i], (struct sparse_shape){
            .n_heads = 3, .latent_dim = 24, .rope_dim = 8, .scale = 0.2f});
        int64_t n = x.core.n_tokens, n_q = n * x.index.n_heads * x.index.head_dim;
        int64_t n_k = n * x.index.head_dim;
        expand(&e, &x, 20, 12);
        choose(dev, &x);
        dev->ops->sparse_attention(dev, x.o, x.lse, x.q, e.q + 20, 28, x.latent, x.k_rope, 8,
                                   x.selected, &x.core);
        dev->ops->heads_linear(dev, e.absorbed_o, 12, x.o, 24, e.w + 20 * 24, 32 * 24, n, 3, 24, 12,
                               0);
        assert_true(distance(e.absorbed_o, e.o, n * 3 * 12) < 2e-6);
        assert_true(distance(x.lse, e.lse, n * 3) < 2e-6);

        double sparse = 0, dense = 0;
        dev->ops->index_loss(dev, &sparse, x.dqi, x.dki, x.dwi, 0.5f, x.qi, x.ki, x.wi, x.selected,
                             x.q, e.q + 20, 28, x.latent, x.k_rope, 8, x.lse, &x.index, &x.core);
        float *dq = xmemdup(x.dqi, (size_t)n_q * sizeof *dq);
        float *dk = xmemdup(x.dki, (size_t)n_k * sizeof *dk);
        float *dw = xmemdup(x.dwi, (size_t)(n * x.index.n_heads) * sizeof *dw);
        dev->ops->index_loss_dense(dev, &dense, x.dqi, x.dki, x.dwi, 0.5f, x.qi, x.ki, x.wi, e.q,
                                   e.kv, x.k_rope, 8, e.lse, &x.index, &e.shape);
        assert_true(fabs(sparse - dense) < 1e-5 * dense);
        assert_true(distance(x.dqi, dq, n_q) < 1e-5);
        assert_true(distance(x.dki, dk, n_k) < 1e-5);
        assert_true(distance(x.dwi, dw, n * x.index.n_heads) < 1e-5);
        free(dq);
        free(dk);
        free(dw);
        teardown_expanded(&e);
        teardown(&x);
    }
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    static const struct index_shape shape = {150, packed, 4, 4, 20, 0.1f, 16};
    static const struct sparse_shape core = {
        .n_heads = 3, .latent_dim = 24, .rope_dim = 8, .scale = 0.2f};
    struct device *other = test_device(3, false);
    struct random start = rng;
    struct dsa x, y;
    setup(&x, shape, core);
    rng = start;
    setup(&y, shape, core);
    struct device *devices[] = {dev, other};
    struct dsa *both[] = {&x, &y};
    double loss[2];
    for (int i = 0; i < 2; i++) {
        choose(devices[i], both[i]);
        attend(devices[i], both[i]);
        attend_backward(devices[i], both[i]);
        loss[i] = index_loss(devices[i], both[i], 1);
    }
    assert_true(loss[0] == loss[1]);
    assert_memory_equal(x.selected, y.selected, 150 * 16 * sizeof *x.selected);
    assert_memory_equal(x.o, y.o, 150 * 3 * 24 * sizeof(float));
    assert_memory_equal(x.dq, y.dq, 150 * 3 * 24 * sizeof(float));
    assert_memory_equal(x.d_latent, y.d_latent, 150 * 24 * sizeof(float));
    assert_memory_equal(x.dk_rope, y.dk_rope, 150 * 8 * sizeof(float));
    assert_memory_equal(x.dqi, y.dqi, 150 * 4 * 20 * sizeof(float));
    assert_memory_equal(x.dki, y.dki, 150 * 20 * sizeof(float));
    teardown(&x);
    teardown(&y);
    other->ops->close(other);
}

/* ---- reference file ---- */

struct reference {
    const char *name;
    struct safetensors *st;
    int64_t n, heads, dk, dv;
};

static float *part(const float *x, int64_t n_rows, int64_t d, int64_t from, int64_t width)
{
    float *y = zeros(n_rows * width);
    for (int64_t i = 0; i < n_rows; i++)
        memcpy(y + i * width, x + i * d + from, (size_t)width * sizeof *y);
    return y;
}

/* Rows of the latent part and the rope part against rows of both. */
static void compare_parts(const struct reference *r, const char *tensor, const float *latent,
                          const float *rope, int64_t n_rows)
{
    float *want = oracle_floats(r->st, r->name, tensor, NULL);
    float *got = zeros(n_rows * r->dk);
    for (int64_t i = 0; i < n_rows; i++) {
        memcpy(got + i * r->dk, latent + i * r->dv, (size_t)r->dv * sizeof *got);
        memcpy(got + i * r->dk + r->dv, rope + i * (r->dk - r->dv),
               (size_t)(r->dk - r->dv) * sizeof *got);
    }
    oracle_compare(r->name, tensor, got, want, n_rows * r->dk, 1e-5, 1e-7);
    free(want);
    free(got);
}

static void compare(const struct reference *r, const char *tensor, const float *got)
{
    int64_t n = 0;
    float *want = oracle_floats(r->st, r->name, tensor, &n);
    oracle_compare(r->name, tensor, got, want, n, 1e-5, 1e-7);
    free(want);
}

/* Finite scores; where not visible, both are -inf. */
static void compare_scores(const struct reference *r, struct dsa *x)
{
    float *want = oracle_floats(r->st, r->name, "index_scores", NULL);
    float *got = zeros(r->n * r->n);
    dev->ops->index_scores(dev, got, 0, r->n, x->qi, x->ki, x->wi, &x->index);
    for (int64_t i = 0; i < r->n * r->n; i++) {
        assert_true((got[i] == -INFINITY) == (want[i] == -INFINITY));
        if (want[i] == -INFINITY)
            got[i] = want[i] = 0;
    }
    oracle_compare(r->name, "index_scores", got, want, r->n * r->n, 1e-5, 0);
    free(want);
    free(got);
}

static void run_case(struct reference *r)
{
    const struct st_view *q = oracle_view(r->st, r->name, "q");
    const struct st_view *qi = oracle_view(r->st, r->name, "qI");
    const struct st_view *want_ids = oracle_view(r->st, r->name, "topk_indices");
    int64_t n_cu = 0;
    int32_t *cu = oracle_ints(r->st, r->name, "cu_seqlens", &n_cu);
    r->n = (int64_t)q->tensor.dims[0];
    r->heads = (int64_t)q->tensor.dims[1];
    r->dk = (int64_t)q->tensor.dims[2];
    r->dv = (int64_t)oracle_view(r->st, r->name, "do")->tensor.dims[2];
    int32_t di = (int32_t)qi->tensor.dims[2];
    struct dsa x;
    setup(&x, (struct index_shape){r->n, cu, (int32_t)n_cu - 1, (int32_t)qi->tensor.dims[1], di,
                                   1 / sqrtf((float)di), (int32_t)want_ids->tensor.dims[1]},
          (struct sparse_shape){.n_heads = (int32_t)r->heads, .latent_dim = (int32_t)r->dv,
                                .rope_dim = (int32_t)(r->dk - r->dv),
                                .scale = 1 / sqrtf((float)r->dk)});
    float **inputs[] = {&x.qi, &x.ki, &x.wi, &x.q, &x.q_rope, &x.latent, &x.k_rope, &x.d_o};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        free(*inputs[i]);
    float *all_q = oracle_floats(r->st, r->name, "q", NULL);
    float *all_kv = oracle_floats(r->st, r->name, "kv", NULL);
    x.qi = oracle_floats(r->st, r->name, "qI", NULL);
    x.ki = oracle_floats(r->st, r->name, "kI", NULL);
    x.wi = oracle_floats(r->st, r->name, "wI", NULL);
    x.d_o = oracle_floats(r->st, r->name, "do", NULL);
    x.q = part(all_q, r->n * r->heads, r->dk, 0, r->dv);
    x.q_rope = part(all_q, r->n * r->heads, r->dk, r->dv, r->dk - r->dv);
    x.latent = part(all_kv, r->n, r->dk, 0, r->dv);
    x.k_rope = part(all_kv, r->n, r->dk, r->dv, r->dk - r->dv);

    compare_scores(r, &x);
    choose(dev, &x);
    int32_t *ids = oracle_ints(r->st, r->name, "topk_indices", NULL);
    for (int64_t i = 0; i < r->n * x.index.top_k; i++)
        if (ids[i] != x.selected[i])
            fail_msg("%s: choice %d of query %d is %d, not %d", r->name,
                     (int)(i % x.index.top_k), (int)(i / x.index.top_k), x.selected[i], ids[i]);
    attend(dev, &x);
    compare(r, "o", x.o);
    compare(r, "lse", x.lse);
    attend_backward(dev, &x);
    compare_parts(r, "dq", x.dq, x.dq_rope, r->n * r->heads);
    compare_parts(r, "dkv", x.d_latent, x.dk_rope, r->n);
    float loss = (float)index_loss(dev, &x, 1);
    compare(r, "kl_loss", &loss);
    compare(r, "dqI", x.dqi);
    compare(r, "dkI", x.dki);
    compare(r, "dwI", x.dwi);
    free(ids);
    free(all_q);
    free(all_kv);
    free(cu);
    teardown(&x);
}

static void agrees_with_the_reference_file(void **state)
{
    (void)state;
    static const char *const names[] = {
        "t1-k16-h2", "t1-k16-h3", "t1-k64-h3", "t40-k16-h2", "t40-k64-h2",
        "t40-k64-h3", "t130-k16-h3", "t130-k64-h2", "docs", "twin-keys",
    };
    struct reference r = {.st = oracle_open("dsa")};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        r.name = names[i];
        run_case(&r);
    }
    safetensors_close(r.st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_scores_go_to_the_lower_key),
        cmocka_unit_test(choices_are_the_largest_scores),
        cmocka_unit_test(gradients_of_chosen_keys),
        cmocka_unit_test(gradients_of_the_indexer),
        cmocka_unit_test(with_all_keys_it_is_dense_attention),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(agrees_with_the_reference_file),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
