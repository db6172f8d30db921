/* test_router.c - routing, combination and balancing against definitions and reference files */
#include "tests/oracle.h"

#include "kernels/router_balance.h"

static struct random rng;
static struct device *dev;

struct routing {
    struct router_shape shape;
    float *logits, *bias, *scores, *weights, *d_weights, *d_logits;
    int32_t *ids;
};

static void setup(struct routing *r, struct router_shape shape)
{
    int64_t all = shape.n_tokens * shape.n_experts, chosen = shape.n_tokens * shape.top_k;
    *r = (struct routing){.shape = shape};
    r->logits = random_floats(&rng, all, 1);
    r->bias = random_floats(&rng, shape.n_experts, 0.1f);
    r->scores = filled(all, NAN);
    r->weights = filled(chosen, NAN);
    r->d_weights = random_floats(&rng, chosen, 1);
    r->d_logits = filled(all, NAN);
    r->ids = xcalloc((size_t)chosen, sizeof *r->ids);
}

static void teardown(struct routing *r)
{
    float *all[] = {r->logits, r->bias, r->scores, r->weights, r->d_weights, r->d_logits};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free(r->ids);
}

static void route(struct routing *r)
{
    dev->ops->router(dev, r->scores, r->ids, r->weights, r->logits, r->bias, &r->shape);
}

static void equal_sums_go_to_the_lower_expert(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        float logits[6], bias[6];
        int32_t k, ids[6];
    } rows[] = {
        {"all equal", {0}, {0}, 3, {0, 1, 2}},
        {"descending, ties in order", {1, 3, 3, 1, 2, 3}, {0}, 5, {1, 2, 5, 4, 0}},
        {"the bias decides", {0}, {0, 0, .5f, 0, .25f, 0}, 3, {2, 4, 0}},
        {"a negative bias bars", {9, 0, 0, 0, 0, 0}, {-2, 0, 0, 0, 0, 0}, 5, {1, 2, 3, 4, 5}},
        {"all experts", {0, 1, 2, 3, 4, 5}, {0}, 6, {5, 4, 3, 2, 1, 0}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct router_shape shape = {1, 6, rows[i].k, true, 1};
        float scores[6], weights[6], sum = 0;
        int32_t ids[6];
        dev->ops->router(dev, scores, ids, weights, rows[i].logits, rows[i].bias, &shape);
        for (int32_t j = 0; j < rows[i].k; j++) {
            if (ids[j] != rows[i].ids[j])
                fail_msg("%s: choice %d is expert %d, not %d", rows[i].what, j, ids[j],
                         rows[i].ids[j]);
            sum += weights[j];
        }
        assert_true(fabsf(sum - 1) < 1e-6f);
    }
}

static void groups_bar_all_but_the_best(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        float logits[6], bias[6];
        int32_t n_groups, topk_group, k, ids[6];
    } rows[] = {
        {"the two best of a group count, not the best", {3, -9, 0, 1, 0, 0}, {0}, 3, 1, 2, {3, 2}},
        {"groups of equal worth: the first", {1, 1, 1, 1, 1, 1}, {0}, 3, 2, 4, {0, 1, 2, 3}},
        {"the bias counts for a group", {0}, {0, 0, 0, 0, .5f, 0}, 3, 1, 2, {4, 5}},
        {"groups of one", {0, 1, 2, 3, 4, 5}, {0}, 6, 2, 2, {5, 4}},
        {"all below zero", {-9, -9, -1, -1, -5, -5}, {-2, -2, -2, -2, -2, -2}, 3, 2, 3, {2, 3, 4}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct router_shape shape = {1, 6, rows[i].k, true, 1, ROUTER_SIGMOID, rows[i].n_groups,
                                     rows[i].topk_group};
        float scores[6], weights[6];
        int32_t ids[6];
        dev->ops->router(dev, scores, ids, weights, rows[i].logits, rows[i].bias, &shape);
        for (int32_t j = 0; j < rows[i].k; j++)
            if (ids[j] != rows[i].ids[j])
                fail_msg("%s: choice %d is expert %d, not %d", rows[i].what, j, ids[j],
                         rows[i].ids[j]);
    }
}

static double loss(void *ctx)
{
    struct routing *r = ctx;
    route(r);
    return weighted_sum(r->weights, r->d_weights, r->shape.n_tokens * r->shape.top_k);
}

static void router_gradients(void **state)
{
    (void)state;
    static const struct router_shape shapes[] = {
        {1, 1, 1, true, 1},     {3, 5, 2, true, 2.5f},  {3, 5, 1, false, 1},
        {70, 32, 4, true, 1},   {9, 33, 8, false, 1.5f},
        {9, 33, 8, false, 1.5f, ROUTER_SOFTMAX},
        {70, 32, 4, true, 2, ROUTER_SOFTMAX},
        {70, 32, 4, true, 2, ROUTER_SIGMOID, 8, 3},
        {5, 12, 5, false, 2, ROUTER_SOFTMAX, 4, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct routing r;
        setup(&r, shapes[i]);
        /* Selections clear of each other, so that no difference crosses a boundary. */
        for (int32_t e = 0; e < shapes[i].n_experts; e++)
            r.bias[e] = (float)((e * 7) % shapes[i].n_experts);
        route(&r);
        dev->ops->router_backward(dev, r.d_logits, r.d_weights, r.scores, r.ids, &r.shape);
        struct gradient g = {"logits", r.logits, r.d_logits,
                             shapes[i].n_tokens * shapes[i].n_experts, 0};
        gradcheck("router", &rng, loss, &r, &g, 1, 1e-2);
        teardown(&r);
    }
}

/* ---- combine ---- */

struct combine {
    int64_t n, d;
    int32_t k;
    float *slots, *weights, *y, *dy, *d_slots, *d_weights;
};

static double combine_loss(void *ctx)
{
    struct combine *c = ctx;
    dev->ops->combine(dev, c->y, c->slots, c->weights, c->n, c->k, c->d);
    return weighted_sum(c->y, c->dy, c->n * c->d);
}

static void combine_and_its_gradients(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{1, 1, 1}, {5, 3, 17}, {300, 4, 33}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct combine c = {.n = shapes[i][0], .k = (int32_t)shapes[i][1], .d = shapes[i][2]};
        int64_t n_slots = c.n * c.k;
        c.slots = random_floats(&rng, n_slots * c.d, 1);
        c.weights = random_floats(&rng, n_slots, 1);
        c.y = filled(c.n * c.d, NAN);
        c.dy = random_floats(&rng, c.n * c.d, 1);
        c.d_slots = filled(n_slots * c.d, NAN);
        c.d_weights = filled(n_slots, NAN);
        combine_loss(&c);
        for (int64_t j = 0; j < c.n * c.d; j++) {
            double y = 0;
            for (int64_t k = 0; k < c.k; k++) {
                int64_t slot = j / c.d * c.k + k;
                y += (double)c.weights[slot] * c.slots[slot * c.d + j % c.d];
            }
            assert_true(fabs(c.y[j] - y) < 1e-5);
        }
        dev->ops->combine_backward(dev, c.d_slots, c.d_weights, c.dy, c.slots, c.weights, c.n, c.k,
                                   c.d);
        struct gradient gradients[] = {
            {"slots", c.slots, c.d_slots, n_slots * c.d, 0},
            {"weights", c.weights, c.d_weights, n_slots, 0},
        };
        gradcheck("combine", &rng, combine_loss, &c, gradients, 2, 1e-2);
        float *all[] = {c.slots, c.weights, c.y, c.dy, c.d_slots, c.d_weights};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            free(all[k]);
    }
}

/* ---- reference files ---- */

static void routing_agrees_with_the_reference_files(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t top_k;
        bool    renormalize;
        float   scale;
        enum router_kind kind;
        int32_t n_groups, topk_group;
    } files[] = {
        {"select-k3", 4, true, 1},
        {"select-all-but-one", 7, true, 1},
        {"select-one", 1, false, 1},
        {"select-ties", 4, true, 1},
        {"select-automodel-k3", 6, true, 1, ROUTER_SIGMOID, 1, 1},
        {"select-grouped", 8, true, 2.5f, ROUTER_SIGMOID, 8, 4},
        {"select-automodel-grouped", 6, true, 1.7f, ROUTER_SIGMOID, 4, 2},
        {"select-softmax-before", 4, false, 1, ROUTER_SOFTMAX},
    };
    struct safetensors *st = oracle_open("router");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *name = files[i].name;
        const struct st_view *logits = oracle_view(st, name, "logits");
        const struct st_view *map = oracle_view(st, name, "map");
        assert_non_null(logits);
        struct routing r;
        setup(&r, (struct router_shape){(int64_t)logits->tensor.dims[0],
                                        (int32_t)logits->tensor.dims[1], files[i].top_k,
                                        files[i].renormalize, files[i].scale, files[i].kind,
                                        files[i].n_groups, files[i].topk_group});
        int64_t all = r.shape.n_tokens * r.shape.n_experts;
        free(r.logits);
        free(r.bias);
        r.logits = oracle_floats(st, name, "logits", NULL);
        r.bias = oracle_floats(st, name, "bias", NULL);
        float *probs = oracle_floats(st, name, "probs", NULL);
        float *d_probs = oracle_floats(st, name, "dprobs", NULL);
        float *d_logits = oracle_floats(st, name, "dlogits", NULL);
        float *got = zeros(all);
        route(&r);
        for (int64_t j = 0; j < r.shape.n_tokens * r.shape.top_k; j++) {
            int64_t at = j / r.shape.top_k * r.shape.n_experts + r.ids[j];
            got[at] = r.weights[j];
            if (map && map->data[at] != 1)
                fail_msg("%s: token %d chose expert %d, the reference did not", name,
                         (int)(j / r.shape.top_k), r.ids[j]);
            if (d_probs)
                r.d_weights[j] = d_probs[at];
        }
        if (probs)
            oracle_compare(name, "probs", got, probs, all, 1e-5, 0);
        if (d_probs && d_logits) {
            dev->ops->router_backward(dev, r.d_logits, r.d_weights, r.scores, r.ids, &r.shape);
            oracle_compare(name, "dlogits", r.d_logits, d_logits, all, 1e-5, 0);
        }
        free(probs);
        free(d_probs);
        free(d_logits);
        free(got);
        teardown(&r);
    }
    safetensors_close(st);
}

static void sign_rule_agrees_with_the_reference_file(void **state)
{
    (void)state;
    struct safetensors *st = oracle_open("router");
    int64_t n;
    float *bias = oracle_floats(st, "bias-sign", "bias", &n);
    float *want = oracle_floats(st, "bias-sign", "new_bias", NULL);
    int32_t *counts32 = oracle_ints(st, "bias-sign", "counts", NULL);
    int64_t *counts = xcalloc((size_t)n, sizeof *counts);
    for (int64_t i = 0; i < n; i++)
        counts[i] = counts32[i];
    router_balance_sign(bias, counts, (int32_t)n, 1e-3f);
    oracle_compare("bias-sign", "new_bias", bias, want, n, 1e-6, 0);
    free(bias);
    free(want);
    free(counts32);
    free(counts);
    safetensors_close(st);
}

#define BINS 1000

static void quantile_rule_agrees_with_the_reference_files(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t top_k;
        int64_t part; /* tokens of one micro-batch */
    } files[] = {
        {"quantile-histogram", 4, 128},
        {"quantile-histogram-parts", 6, 50},
    };
    struct safetensors *st = oracle_open("router");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *name = files[i].name;
        const struct st_view *logits = oracle_view(st, name, "logits");
        int64_t n = (int64_t)logits->tensor.dims[0];
        int32_t n_experts = (int32_t)logits->tensor.dims[1];
        struct routing r;
        setup(&r, (struct router_shape){n, n_experts, files[i].top_k, true, 1});
        free(r.logits);
        free(r.bias);
        r.logits = oracle_floats(st, name, "logits", NULL);
        r.bias = oracle_floats(st, name, "bias", NULL);
        float *want = oracle_floats(st, name, "new_bias", NULL), lo, hi;
        int32_t *want_bins = oracle_ints(st, name, "histogram", NULL);
        int64_t *bins = xcalloc((size_t)n_experts * BINS, sizeof *bins);
        int64_t *counts = xcalloc((size_t)n_experts, sizeof *counts), total = 0;
        route(&r);
        router_balance_range(r.bias, n_experts, &lo, &hi);
        for (int64_t row = 0; row < n; row += files[i].part) {
            struct router_shape part = r.shape;
            part.n_tokens = files[i].part;
            dev->ops->router_histogram(dev, counts, bins, r.scores + row * n_experts,
                                       r.ids + row * r.shape.top_k, r.bias, lo, hi, BINS, &part);
        }
        for (int32_t e = 0; e < n_experts; e++)
            total += counts[e];
        assert_int_equal(total, n * r.shape.top_k);
        for (int64_t j = 0; j < (int64_t)n_experts * BINS; j++)
            if (bins[j] != want_bins[j])
                fail_msg("%s: bin %d of expert %d holds %d, not %d", name, (int)(j % BINS),
                         (int)(j / BINS), (int)bins[j], want_bins[j]);
        router_balance_quantile(r.bias, bins, n, n_experts, r.shape.top_k, BINS, lo, hi);
        oracle_compare(name, "new_bias", r.bias, want, n_experts, 1e-5, 0);
        free(want);
        free(want_bins);
        free(bins);
        free(counts);
        teardown(&r);
    }
    safetensors_close(st);
}

static void an_uneven_router_is_evened_out(void **state)
{
    (void)state;
    struct routing r;
    int64_t counts[16] = {0}, *bins = xcalloc(16 * BINS, sizeof *bins), most = 0;
    setup(&r, (struct router_shape){2000, 16, 2, true, 1});
    for (int64_t i = 0; i < 2000 * 16; i++)
        r.logits[i] += (float)(i % 16) * 0.2f;
    memset(r.bias, 0, 16 * sizeof(float));
    for (int step = 0; step < 20; step++) {
        float lo, hi;
        memset(counts, 0, sizeof counts);
        memset(bins, 0, 16 * BINS * sizeof *bins);
        route(&r);
        router_balance_range(r.bias, 16, &lo, &hi);
        dev->ops->router_histogram(dev, counts, bins, r.scores, r.ids, r.bias, lo, hi, BINS,
                                   &r.shape);
        router_balance_quantile(r.bias, bins, 2000, 16, 2, BINS, lo, hi);
    }
    for (int e = 0; e < 16; e++)
        most = counts[e] > most ? counts[e] : most;
    assert_true(most < 275); /* 250 is even */
    free(bins);
    teardown(&r);
}

static void without_tokens_the_bias_stays(void **state)
{
    (void)state;
    float bias[2] = {0.25f, -0.25f};
    int64_t bins[2 * BINS] = {0}, counts[2] = {0};
    router_balance_quantile(bias, bins, 0, 2, 1, BINS, -1, 1);
    router_balance_sign(bias, counts, 2, 1);
    assert_true(bias[0] == 0.25f && bias[1] == -0.25f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_sums_go_to_the_lower_expert),
        cmocka_unit_test(groups_bar_all_but_the_best),
        cmocka_unit_test(router_gradients),
        cmocka_unit_test(combine_and_its_gradients),
        cmocka_unit_test(routing_agrees_with_the_reference_files),
        cmocka_unit_test(sign_rule_agrees_with_the_reference_file),
        cmocka_unit_test(quantile_rule_agrees_with_the_reference_files),
        cmocka_unit_test(an_uneven_router_is_evened_out),
        cmocka_unit_test(without_tokens_the_bias_stays),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
