/* test_rotary.c - angles, YaRN, and turning rows forth and back */
#include "tests/gradcheck.h"

#include "common/rotary.h"

static struct random rng;
static struct device *dev;

/* DeepSeek-V3's: 64 dims, base 1e4, 4096 positions stretched 40 times. */
static const struct rotary_config deepseek = {
    .dim = 64, .theta = 1e4, .yarn = true, .factor = 40, .original_positions = 4096,
    .beta_fast = 32, .beta_slow = 1, .truncate = true, .mscale = 1, .mscale_all_dim = 1,
};

static void yarn_ramps_between_two_pairs(void **state)
{
    (void)state;
    double f[32];
    rotary_frequencies(&deepseek, f);
    for (int i = 0; i < 32; i++) {
        double plain = pow(1e4, -2.0 * i / 64), ramp = (i - 10) / 13.0;
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        double want = plain * (1 - ramp) + plain / 40 * ramp;
        if (!(fabs(f[i] - want) <= 1e-12 * want))
            fail_msg("pair %d turns by %.12g a position, not %.12g", i, f[i], want);
    }
}

static void a_ramp_that_is_not_rounded(void **state)
{
    (void)state;
    struct rotary_config c = deepseek;
    double f[32], lo = 8.092779, hi = 17.398024;
    c.theta = 150000;
    c.factor = 32;
    c.truncate = false;
    c.mscale = c.mscale_all_dim = 0;
    rotary_frequencies(&c, f);
    for (int i = 0; i < 32; i++) {
        double plain = pow(150000, -2.0 * i / 64), ramp = (i - lo) / (hi - lo);
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        double want = plain * (1 - ramp) + plain / 32 * ramp;
        assert_true(fabs(f[i] - want) <= 1e-6 * want);
    }
    assert_true(fabs(rotary_attention_factor(&c) - 1.346574) < 1e-6);
    assert_true(rotary_score_factor(&c) == 1);
}

static void factors_follow_the_settings(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        bool   yarn;
        double factor, mscale, all_dim, given, attention, score;
    } rows[] = {
        {"no YaRN", false, 40, 1, 1, 7, 1, 1},
        {"equal mscales cancel", true, 40, 1, 1, 0, 1, 1.873854},
        {"a given factor wins", true, 40, 1, 1, 1.25, 1.25, 1.873854},
        {"unequal mscales", true, 40, 0.707, 1, 0, 0.921042, 1.873854},
        {"one mscale alone", true, 32, 0.5, 0, 0, 1.346574, 1},
        {"no stretching", true, 1, 1, 1, 0, 1, 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct rotary_config c = deepseek;
        c.yarn = rows[i].yarn;
        c.factor = rows[i].factor;
        c.mscale = rows[i].mscale;
        c.mscale_all_dim = rows[i].all_dim;
        c.attention_factor = rows[i].given;
        double attention = rotary_attention_factor(&c), score = rotary_score_factor(&c);
        if (!(fabs(attention - rows[i].attention) < 2e-6 && fabs(score - rows[i].score) < 2e-6))
            fail_msg("%s: factors %.7g and %.7g, not %.7g and %.7g", rows[i].what, attention,
                     score, rows[i].attention, rows[i].score);
    }
}

struct rows {
    struct rotary_shape shape;
    int32_t n_heads;
    int64_t stride, n;
    float *table, *x, *turned, *c;
};

static double loss(void *ctx)
{
    struct rows *r = ctx;
    memcpy(r->turned, r->x, (size_t)r->n * sizeof *r->x);
    dev->ops->rotary(dev, r->turned, r->n_heads, r->stride, r->table, &r->shape);
    return weighted_sum(r->turned, r->c, r->n);
}

static void check_values(const struct rows *r, const struct rotary_config *config)
{
    double f[32];
    rotary_frequencies(config, f);
    int32_t half = r->shape.dim / 2, doc = 0;
    for (int64_t t = 0; t < r->shape.n_tokens; t++) {
        doc += t >= r->shape.cu_seqlens[doc + 1];
        for (int64_t j = 0; j < r->n_heads * r->stride; j++) {
            int64_t row = t * r->n_heads * r->stride + j / r->stride * r->stride;
            int32_t at = (int32_t)(j % r->stride), pair, other;
            double want = r->x[row + at];
            if (at < r->shape.dim) {
                pair = r->shape.interleaved ? at / 2 : at % half;
                other = r->shape.interleaved ? at ^ 1 : (at + half) % r->shape.dim;
                bool second = r->shape.interleaved ? at % 2 : at >= half;
                double angle = f[pair] * (double)(t - r->shape.cu_seqlens[doc]);
                want = cos(angle) * want + (second ? 1 : -1) * sin(angle) * r->x[row + other];
                want *= rotary_attention_factor(config);
            }
            assert_true(fabs(r->turned[row + at] - want) < 1e-5);
        }
    }
}

static void rows_turn_by_their_position(void **state)
{
    (void)state;
    static const int32_t one[] = {0, 7}, packed[] = {0, 1, 40, 41, 300};
    static const struct {
        int32_t n_docs, dim, n_heads;
        int64_t stride;
        const int32_t *cu;
        bool interleaved;
    } cases[] = {
        {1, 2, 1, 2, one, true},      {1, 8, 3, 11, one, false},   {1, 8, 3, 11, one, true},
        {4, 64, 2, 96, packed, true}, {4, 64, 2, 96, packed, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct rotary_config config = deepseek;
        config.dim = (uint32_t)cases[i].dim;
        config.mscale = 0.5;
        int32_t n_tokens = cases[i].cu[cases[i].n_docs];
        struct rows r = {
            .shape = {n_tokens, cases[i].cu, cases[i].n_docs, cases[i].dim, cases[i].interleaved},
            .n_heads = cases[i].n_heads, .stride = cases[i].stride,
            .n = n_tokens * cases[i].n_heads * cases[i].stride,
        };
        r.table = zeros((int64_t)n_tokens * cases[i].dim);
        rotary_table(&config, n_tokens, r.table);
        r.x = random_floats(&rng, r.n, 1);
        r.c = random_floats(&rng, r.n, 1);
        r.turned = zeros(r.n);
        loss(&r);
        check_values(&r, &config);
        float *dx = xmemdup(r.c, (size_t)r.n * sizeof *dx);
        dev->ops->rotary_backward(dev, dx, r.n_heads, r.stride, r.table, &r.shape);
        struct gradient g = {"x", r.x, dx, r.n, 0};
        gradcheck("rotary", &rng, loss, &r, &g, 1, 1e-2);
        float *all[] = {r.table, r.x, r.c, r.turned, dx};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            free(all[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yarn_ramps_between_two_pairs),
        cmocka_unit_test(a_ramp_that_is_not_rounded),
        cmocka_unit_test(factors_follow_the_settings),
        cmocka_unit_test(rows_turn_by_their_position),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
