/* test_router_capacity.c - who stays when an expert is full, and where the others go */
#include "tests/oracle.h"

static struct random rng;
static struct device *dev;

struct capacity {
    struct router_shape shape;
    float *scores, *weights;
    int32_t *ids, *sent;
    int64_t n_rerouted, n_dropped;
};

static void setup(struct capacity *c, struct router_shape shape)
{
    size_t n_choices = (size_t)(shape.n_tokens * shape.top_k);
    *c = (struct capacity){.shape = shape};
    c->scores = filled(shape.n_tokens * shape.n_experts, NAN);
    c->weights = zeros((int64_t)n_choices);
    c->ids = xcalloc(n_choices, sizeof *c->ids);
    c->sent = xcalloc(n_choices, sizeof *c->sent);
}

static void teardown(struct capacity *c)
{
    free(c->scores);
    free(c->weights);
    free(c->ids);
    free(c->sent);
}

static void route(struct capacity *c, const float *logits, const float *bias)
{
    dev->ops->router(dev, c->scores, c->ids, c->weights, logits, bias, &c->shape);
}

static void limit(struct capacity *c, const float *bias, struct capacity_config config)
{
    c->n_rerouted = c->n_dropped = 0;
    dev->ops->router_capacity(dev, c->ids, c->weights, c->sent, &c->n_rerouted, &c->n_dropped,
                              c->scores, bias, &config, &c->shape);
}

/* Four tokens of three experts, one choice each; logits in tenths. */
static void overflow_by_rule(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        int logits[12];
        struct capacity_config config;
        int32_t sent[4];
        int64_t n_rerouted, n_dropped;
    } rows[] = {
        {"room for all", {9, 0, 0, 9, 0, 0, 9, 0, 0, 9, 0, 0}, {4, OVERFLOW_DROP}, {0, 0, 0, 0},
         0, 0},
        {"the first tokens stay", {1, 0, 0, 2, 0, 0, 3, 0, 0, 4, 0, 0},
         {2, OVERFLOW_DROP, KEEP_FIRST_TOKENS}, {0, 0, -1, -1}, 0, 2},
        {"the largest weights stay", {1, 0, 0, 2, 0, 0, 3, 0, 0, 4, 0, 0},
         {2, OVERFLOW_DROP, KEEP_LARGEST_WEIGHTS}, {-1, -1, 0, 0}, 0, 2},
        {"of equal weights the first", {5, 0, 0, 7, 0, 0, 5, 0, 0, 5, 0, 0},
         {2, OVERFLOW_DROP, KEEP_LARGEST_WEIGHTS}, {0, 0, -1, -1}, 0, 2},
        {"to the next best with room", {9, 1, 2, 9, 2, 1, 9, 1, 2, 9, 2, 1},
         {1, OVERFLOW_REROUTE, KEEP_FIRST_TOKENS}, {0, 1, 2, -1}, 2, 1},
        {"the next best may be full already", {9, 1, 2, 1, 2, 9, 9, 1, 2, 9, 1, 2},
         {1, OVERFLOW_REROUTE, KEEP_FIRST_TOKENS}, {0, 2, 1, -1}, 1, 1},
        {"no capacity at all", {9, 1, 2, 1, 2, 9, 9, 1, 2, 9, 1, 2},
         {0, OVERFLOW_REROUTE, KEEP_FIRST_TOKENS}, {-1, -1, -1, -1}, 0, 4},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct capacity c;
        float logits[12];
        for (int j = 0; j < 12; j++)
            logits[j] = 0.1f * (float)rows[i].logits[j];
        setup(&c, (struct router_shape){4, 3, 1, false, 1});
        route(&c, logits, NULL);
        limit(&c, NULL, rows[i].config);
        for (int t = 0; t < 4; t++) {
            if (c.sent[t] != rows[i].sent[t])
                fail_msg("%s: token %d goes to %d, not %d", rows[i].what, t, c.sent[t],
                         rows[i].sent[t]);
            float want = c.sent[t] < 0 ? 0 : c.scores[3 * t + c.sent[t]];
            assert_true(c.weights[t] == want);
        }
        assert_int_equal(c.n_rerouted, rows[i].n_rerouted);
        assert_int_equal(c.n_dropped, rows[i].n_dropped);
        teardown(&c);
    }
}

/* Weights after rerouting are those that the router gives to the new ids. */
static void check_token(const struct capacity *c, int64_t token)
{
    const int32_t *ids = c->ids + token * c->shape.top_k, *sent = c->sent + token * c->shape.top_k;
    const float *scores = c->scores + token * c->shape.n_experts;
    double sum = 0;
    for (int32_t j = 0; j < c->shape.top_k; j++) {
        sum += scores[ids[j]];
        for (int32_t i = 0; i < j; i++)
            assert_true(ids[i] != ids[j]);
    }
    for (int32_t j = 0; j < c->shape.top_k; j++) {
        double want = sent[j] < 0 ? 0 : c->shape.routed_scale * scores[ids[j]] / sum;
        assert_true(sent[j] < 0 || sent[j] == ids[j]);
        assert_true(fabs(c->weights[token * c->shape.top_k + j] - want) < 1e-5);
    }
}

static void nothing_is_lost_while_there_is_room(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        struct router_shape shape = {100, 16, 3, true, 2.5f};
        struct capacity c;
        int64_t counts[16] = {0};
        float *logits = random_floats(&rng, 1600, 1), *bias = random_floats(&rng, 16, 0.3f);
        int64_t room = 19 + round; /* 18.75 is even */
        setup(&c, shape);
        route(&c, logits, bias);
        limit(&c, bias, (struct capacity_config){room, OVERFLOW_REROUTE,
                                                 round % 2 ? KEEP_FIRST_TOKENS
                                                           : KEEP_LARGEST_WEIGHTS});
        for (int64_t t = 0; t < 100; t++)
            check_token(&c, t);
        int64_t n_sent = 0;
        for (int i = 0; i < 300; i++)
            if (c.sent[i] >= 0) {
                counts[c.sent[i]]++;
                n_sent++;
            }
        for (int e = 0; e < 16; e++)
            assert_true(counts[e] <= room);
        assert_int_equal(n_sent + c.n_dropped, 300);
        /* A token may find only experts full that it did not choose. */
        assert_true(c.n_dropped < 20);
        assert_true(c.n_rerouted > 0 || room > 30);
        free(logits);
        free(bias);
        teardown(&c);
    }
}

static void agrees_with_the_reference_file(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        struct router_shape shape;
        int64_t capacity;
        enum overflow_order order;
        bool    padded; /* with tokens of no weight, which only a layout of fixed size needs */
    } files[] = {
        {"capacity-probs", {96, 16, 4, true, 1}, 24, KEEP_LARGEST_WEIGHTS, false},
        {"capacity-position", {96, 16, 4, true, 1}, 24, KEEP_FIRST_TOKENS, false},
        {"capacity-loose", {40, 8, 2, true, 1}, 45, KEEP_LARGEST_WEIGHTS, false},
        {"capacity-padded", {64, 16, 2, true, 1}, 10, KEEP_LARGEST_WEIGHTS, true},
    };
    struct safetensors *st = oracle_open("router");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *name = files[i].name;
        int32_t n_experts = files[i].shape.n_experts, k = files[i].shape.top_k;
        int64_t n_all = files[i].shape.n_tokens * n_experts;
        struct capacity c;
        setup(&c, files[i].shape);
        float *logits = oracle_floats(st, name, "logits", NULL);
        float *bias = oracle_floats(st, name, "bias", NULL);
        float *want = oracle_floats(st, name, "final_probs", NULL), *got = zeros(n_all);
        const struct st_view *map = oracle_view(st, name, "final_map");
        uint8_t *got_map = xcalloc((size_t)n_all, 1);
        route(&c, logits, bias);
        limit(&c, bias, (struct capacity_config){files[i].capacity, OVERFLOW_DROP,
                                                 files[i].order});
        for (int64_t j = 0; j < files[i].shape.n_tokens * k; j++)
            if (c.sent[j] >= 0) {
                got[j / k * n_experts + c.sent[j]] = c.weights[j];
                got_map[j / k * n_experts + c.sent[j]] = 1;
            }
        oracle_compare(name, "final_probs", got, want, n_all, 1e-5, 0);
        for (int64_t j = 0; j < n_all; j++)
            if (got_map[j] != (map->data[j] && (!files[i].padded || want[j] > 0)))
                fail_msg("%s: token %d and expert %d", name, (int)(j / n_experts),
                         (int)(j % n_experts));
        free(logits);
        free(bias);
        free(want);
        free(got);
        free(got_map);
        teardown(&c);
    }
    safetensors_close(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overflow_by_rule),
        cmocka_unit_test(nothing_is_lost_while_there_is_room),
        cmocka_unit_test(agrees_with_the_reference_file),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
