/* test_optim.c - schedules, and an update that is the same on every layout */
#include <math.h>

#include "tests/ranks.h"

#include "worker/optim.h"

static void the_rate_follows_its_schedule(void **state)
{
    (void)state;
    static const struct {
        const char *what, *name;
        uint64_t step;
        double lr;
    } rows[] = {
        {"warmup starts above zero", "cosine", 1, 0.1},
        {"warmup ends at the top", "cosine", 10, 1.0},
        {"half way down", "cosine", 60, 0.55},
        {"the last step is the lowest", "cosine", 110, 0.1},
        {"constant", "constant", 100, 1.0},
        {"linear, half way", "linear", 60, 0.55},
        {"wsd stays up", "wsd", 99, 1.0},
        {"wsd falls over the last tenth", "wsd", 110, 0.1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct schedule s = {.lr = 1.0, .min_lr = 0.1, .warmup_steps = 10, .steps = 110};
        struct err err = {0};
        assert_int_equal(schedule_parse(rows[i].name, &s.kind, &err), 0);
        if (fabs(schedule_lr(&s, rows[i].step) - rows[i].lr) > 1e-12)
            fail_msg("%s: %g, expected %g", rows[i].what, schedule_lr(&s, rows[i].step),
                     rows[i].lr);
    }
    enum schedule_kind kind;
    struct err err = {0};
    assert_int_equal(schedule_parse("cosin", &kind, &err), -EINVAL);
    assert_string_equal(err.text, "train.schedule.name 'cosin': unknown, use one of constant, "
                                  "linear, cosine, wsd");
}

/* ---- one model, updated on any layout ------------------------------------------------------- */

enum { STEPS = 3, N_TOKENS = 50 };

static float noise(const struct tensor_entry *e, uint64_t i, uint32_t salt)
{
    uint32_t s = (uint32_t)(e->offset * 2654435761u + i * 40503u + e->unit * 97u + salt * 7919u) +
                 (uint32_t)(e->expert + 1) * 104729u;
    s = (s ^ s >> 15) * 2246822519u;
    s = (s ^ s >> 13) * 3266489917u;
    return (float)((int32_t)(s >> 8 & 0xffff) - 32768) / 32768.0f;
}

/* Plain AdamW in double over the whole model: user's arrays, tensor after tensor. */
struct reference {
    const struct tensor_map *map;
    uint64_t *at; /* of each tensor */
    double   *w, *m, *v;
    double    norm[STEPS];
    enum bias_rule rule;
    float    *bias; /* as the first layout left it: (n_entries * 8) */
    bool      has_bias;
};

static const struct optim_config config0 = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8,
                                            .weight_decay = 0.1, .decay = DECAY_MATRICES,
                                            .clip_grad_norm = 0.5};

static bool is_left_alone(const struct tensor_entry *e)
{
    return e->is_buffer || e->is_unreached;
}

static double gradient(const struct tensor_entry *e, uint64_t i, uint32_t step)
{
    return noise(e, i, step + 1) * N_TOKENS / 50.0f;
}

static void reference_step(struct reference *f, uint32_t step, double lr)
{
    double sum = 0, c1 = 1 - pow(0.9, step), c2 = 1 - pow(0.95, step);
    for (size_t t = 0; t < f->map->n_entries; t++)
        for (uint64_t i = 0; i < f->map->entries[t].count; i++)
            if (!is_left_alone(&f->map->entries[t]))
                sum += pow((float)gradient(&f->map->entries[t], i, step), 2);
    double norm = sqrt(sum) / N_TOKENS, clip = norm > 0.5 ? 0.5 / (norm + 1e-6) : 1;
    f->norm[step - 1] = norm;
    for (size_t t = 0; t < f->map->n_entries; t++) {
        const struct tensor_entry *e = &f->map->entries[t];
        double *w = f->w + f->at[t], *m = f->m + f->at[t], *v = f->v + f->at[t];
        for (uint64_t i = 0; i < e->count && !is_left_alone(e); i++) {
            double g = gradient(e, i, step) * clip / N_TOKENS;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            w[i] -= (e->is_matrix ? lr * 0.1 * w[i] : 0) +
                    lr * (m[i] / c1) / (sqrt(v[i] / c2) + 1e-8);
        }
    }
}

static void reference_init(struct reference *f, const struct tensor_map *map)
{
    uint64_t n = 0;
    *f = (struct reference){.map = map, .at = calloc(map->n_entries, sizeof *f->at)};
    for (size_t t = 0; t < map->n_entries; t++) {
        f->at[t] = n;
        n += map->entries[t].count;
    }
    f->w = calloc(n, sizeof *f->w);
    f->m = calloc(n, sizeof *f->m);
    f->v = calloc(n, sizeof *f->v);
    f->bias = calloc(map->n_entries * 8, sizeof *f->bias);
    for (size_t t = 0; t < map->n_entries; t++)
        for (uint64_t i = 0; i < map->entries[t].count; i++)
            f->w[f->at[t] + i] = noise(&map->entries[t], i, 0);
    for (uint32_t step = 1; step <= STEPS; step++)
        reference_step(f, step, 1e-2);
}

static void reference_fini(struct reference *f)
{
    free(f->at);
    free(f->w);
    free(f->m);
    free(f->v);
    free(f->bias);
}

/* Each rank brings a share of the gradient, as if it had seen some of the tokens. */
static void bring_gradients(struct test_rank *r, uint32_t step)
{
    for (size_t t = 0; t < r->map->n_entries; t++) {
        const struct tensor_entry *e = &r->map->entries[t];
        struct shard_part p;
        if (!shard_part(r->shard, e, &p) || !p.gradients)
            continue;
        uint32_t n = e->expert < 0 ? r->layout.fsdp_replica.n_ranks
                                   : r->layout.expert_replica.n_ranks;
        for (uint64_t i = 0; i < p.count; i++)
            p.gradients[i] = (float)gradient(e, p.first + i, step) / (float)n;
    }
}

static void update(struct test_rank *r)
{
    struct reference *f = r->user;
    for (size_t t = 0; t < r->map->n_entries; t++) {
        struct shard_part p;
        if (shard_part(r->shard, &r->map->entries[t], &p))
            for (uint64_t i = 0; i < p.count; i++)
                p.weights[i] = noise(&r->map->entries[t], p.first + i, 0);
    }
    for (uint32_t step = 1; step <= STEPS; step++) {
        double norm = 0;
        bring_gradients(r, step);
        RANK_CHECK(r, optim_norm(r->shard, r->map, r->coll, r->dev, N_TOKENS, &norm, &r->err) == 0);
        RANK_CHECK(r, fabs(norm / f->norm[step - 1] - 1) < 1e-6);
        optim_step(r->shard, r->map, r->dev, &config0, step, 1e-2, N_TOKENS, norm);
        shard_zero_gradients(r->shard);
    }
    for (size_t t = 0; t < r->map->n_entries; t++) {
        const struct tensor_entry *e = &r->map->entries[t];
        struct shard_part p;
        if (shard_part(r->shard, e, &p))
            for (uint64_t i = 0; i < p.count; i++)
                RANK_CHECK(r, fabs(p.weights[i] - f->w[f->at[t] + p.first + i]) <
                                  (is_left_alone(e) ? 1e-12 : 2e-6));
    }
}

static void adamw_is_the_same_on_any_layout(void **state)
{
    (void)state;
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct reference f;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    reference_init(&f, &map);
    for (size_t i = 0; i < N_TEST_LAYOUTS; i++)
        test_ranks_run(test_layouts[i], &spec, &map, update, &f);
    reference_fini(&f);
    tensor_map_fini(&map);
}

static void a_bad_gradient_shows_in_the_norm(struct test_rank *r)
{
    struct shard_part p;
    double norm = 0;
    const struct tensor_entry *e = tensor_map_find(
        r->map, "language_model.model.layers.1.block_sparse_moe.experts.5.w2.weight");
    if (shard_part(r->shard, e, &p) && p.first == 0)
        p.gradients[0] = NAN;
    RANK_CHECK(r, optim_norm(r->shard, r->map, r->coll, r->dev, 1, &norm, &r->err) == 0);
    RANK_CHECK(r, !isfinite(norm));
}

static void all_ranks_see_a_nan(void **state)
{
    (void)state;
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    test_ranks_run((struct layout_degrees){4, 2, 2, 0}, &spec, &map,
                   a_bad_gradient_shows_in_the_norm, NULL);
    tensor_map_fini(&map);
}

/* ---- the correction bias -------------------------------------------------------------------- */

/* Rank r brings every world-th count of one fixed set, so that the sum is the same on any world. */
static void balance(struct test_rank *r)
{
    struct reference *f = r->user;
    uint32_t n = r->spec->n_experts, layers = r->spec->n_layers;
    int64_t *tokens = calloc((size_t)layers * n, sizeof *tokens);
    int64_t *margins = calloc((size_t)layers * n * MARGIN_BINS, sizeof *margins);
    for (size_t i = 0; i < (size_t)layers * n; i++)
        for (uint32_t k = 0; k < 64; k++)
            if (k % r->degrees.world == r->rank) {
                tokens[i] += (int64_t)(i * k % 5);
                margins[i * MARGIN_BINS + (i * 37 + k * 11) % MARGIN_BINS] += (int64_t)(k % 3);
            }
    struct model_counters counters = {.tokens = tokens, .margins = margins};
    for (uint32_t step = 0; step < 2; step++)
        RANK_CHECK(r, optim_balance(r->shard, r->map, r->spec, r->coll, r->dev, &counters, f->rule,
                                    1e-3, &r->err) == 0);
    for (size_t t = 0; t < r->map->n_entries; t++) {
        struct shard_part p;
        if (r->map->entries[t].role != ROLE_ROUTER_BIAS ||
            !shard_part(r->shard, &r->map->entries[t], &p))
            continue;
        for (uint64_t i = 0; i < p.count; i++) {
            float *kept = &f->bias[t * 8 + p.first + i];
            if (!f->has_bias)
                *kept = p.weights[i];
            RANK_CHECK(r, *kept == p.weights[i]);
        }
    }
    free(tokens);
    free(margins);
}

static void the_bias_is_the_same_on_any_layout(void **state)
{
    (void)state;
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    static const enum bias_rule rules[] = {BIAS_SIGN, BIAS_QUANTILE};
    for (size_t k = 0; k < 2; k++) {
        struct reference f = {.rule = rules[k],
                              .bias = calloc(map.n_entries * 8, sizeof *f.bias)};
        for (size_t i = 0; i < N_TEST_LAYOUTS; i++) {
            test_ranks_run(test_layouts[i], &spec, &map, balance, &f); /* the first has one rank */
            f.has_bias = true;
        }
        float spread = 0;
        for (size_t i = 0; i < map.n_entries * 8; i++)
            spread += fabsf(f.bias[i]);
        assert_true(spread > 1e-3f);
        free(f.bias);
    }
    tensor_map_fini(&map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_rate_follows_its_schedule),
        cmocka_unit_test(adamw_is_the_same_on_any_layout),
        cmocka_unit_test(all_ranks_see_a_nan),
        cmocka_unit_test(the_bias_is_the_same_on_any_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
