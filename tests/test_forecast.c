/* test_forecast.c - what is believed of the next window, and how much */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include "common/mix.h"
#include "coordinator/forecast.h"

enum { E = 32, WINDOWS = 24 };

static double noise(uint64_t x)
{
    return mix_unit(scenario_hash(x)) * 2 - 1;
}

/* Zipf-like loads; what moves them differs by case. */
static double steady(uint32_t e, uint32_t w)
{
    return 4000.0 / (e + 1) * (1 + 0.3 * noise(w * E + e));
}

static double turning(uint32_t e, uint32_t w)
{
    return 4000.0 / ((e + w) % E + 1); /* each window everybody is somebody else */
}

static double sticky(uint32_t e, uint32_t w)
{
    return 4000.0 / ((e + 7 * (w / 8)) % E + 1); /* stays for 8 windows, then jumps */
}

static double rising(uint32_t e, uint32_t w)
{
    return 500 + (e % 2 ? 40.0 * w : 40.0 * (WINDOWS - w));
}

/* What one who knows the rule says of window w, of which he sees those before. */
static double without_noise(uint32_t e, uint32_t w)
{
    (void)w;
    return 4000.0 / (e + 1);
}

static double as_before(uint32_t e, uint32_t w)
{
    return sticky(e, w - 1);
}

static double nothing_known(uint32_t e, uint32_t w)
{
    (void)e;
    double sum = 0;
    for (uint32_t i = 0; i < E; i++)
        sum += turning(i, w);
    return sum / E;
}

/* Sum of differences over the sum of y. */
static double apart(const double *x, const double *y)
{
    double sum = 0, all = 0;
    for (uint32_t e = 0; e < E; e++) {
        sum += fabs(x[e] - y[e]);
        all += y[e];
    }
    return sum / all;
}

static void the_fitting_predictor_is_believed(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        double (*load)(uint32_t expert, uint32_t window);
        double (*wise)(uint32_t expert, uint32_t window);
        double apart_max, error_max; /* from the wise at last; from what came, over all windows */
    } rows[] = {
        { "noise about a mean: the more windows the better", steady, without_noise, 0.05,
          0.2 },
        { "jumps: the last window", sticky, as_before, 0.2, 0.26 },
        { "a slope is followed", rising, rising, 0.02, 0.03 },
        { "the past misleads: near the mean expert", turning, nothing_known, 0.3, 1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct forecast *f = forecast_create(E);
        const double *said = forecast_belief(f)->mean;
        double load[E], wise[E], error = 0;
        for (uint32_t w = 0; w < WINDOWS; w++) {
            for (uint32_t e = 0; e < E; e++)
                load[e] = floor(rows[i].load(e, w));
            error += w ? apart(said, load) / (WINDOWS - 1) : 0;
            forecast_add(f, load);
        }
        for (uint32_t e = 0; e < E; e++)
            wise[e] = rows[i].wise(e, WINDOWS);
        print_message("%s: %.3f from the wise, error %.3f\n", rows[i].what, apart(said, wise),
                      error);
        assert_true(apart(said, wise) < rows[i].apart_max);
        assert_true(error < rows[i].error_max);
        forecast_destroy(f);
    }
}

static double mean_cv(const struct belief *b)
{
    double sum = 0;
    for (uint32_t e = 0; e < b->n_experts; e++)
        sum += b->sd[e] / b->mean[e] / b->n_experts;
    return sum;
}

static void errors_make_doubtful(void **state)
{
    (void)state;
    struct forecast *calm = forecast_create(E), *wild = forecast_create(E);
    double load[E];
    for (uint32_t w = 0; w < WINDOWS; w++) {
        for (uint32_t e = 0; e < E; e++)
            load[e] = floor(10000 * (1 + 0.01 * noise(w * E + e)));
        forecast_add(calm, load);
        for (uint32_t e = 0; e < E; e++)
            load[e] = floor(10000 * (1 + 0.9 * noise(w * E + e)));
        forecast_add(wild, load);
    }
    double c = mean_cv(forecast_belief(calm)), w = mean_cv(forecast_belief(wild));
    print_message("deviation over mean: calm %.3f, wild %.3f\n", c, w);
    assert_true(c < 0.1);
    assert_true(w > 0.35 && w < 1);
    forecast_destroy(calm);
    forecast_destroy(wild);
}

static void nothing_and_zeros_are_fine(void **state)
{
    (void)state;
    double zero[E] = { 0 }, one[E] = { [3] = 5 };
    struct forecast *f = forecast_create(E);
    forecast_add(f, zero);
    assert_int_equal(forecast_n_windows(f), 0);
    assert_true(forecast_last(f)[3] == 0);
    forecast_add(f, one);
    forecast_add(f, zero); /* a window in which the layer saw nothing tells nothing */
    forecast_add(f, one);
    assert_int_equal(forecast_n_windows(f), 2);
    assert_true(forecast_last(f)[3] == 5);
    for (uint32_t e = 0; e < E; e++)
        assert_true(isfinite(forecast_belief(f)->mean[e]) && isfinite(forecast_belief(f)->sd[e]));
    forecast_destroy(f);
}

static void tokens_are_kept(void **state)
{
    (void)state;
    struct forecast *f = forecast_create(E);
    for (uint32_t w = 0; w < 12; w++) {
        double load[E], sum = 0, said = 0;
        for (uint32_t e = 0; e < E; e++)
            sum += load[e] = floor(turning(e, w) * (w + 1));
        forecast_add(f, load);
        for (uint32_t e = 0; e < E; e++)
            said += forecast_belief(f)->mean[e];
        assert_true(fabs(said - sum) < 1e-6 * sum);
    }
    forecast_destroy(f);
}

static void scenarios_spread_as_believed(void **state)
{
    (void)state;
    enum { DRAWS = 400 };
    double mean[3] = { 100, 20, 0 }, sd[3] = { 30, 20, 0 }, sum = 0, square = 0;
    struct belief b = { .n_experts = 3, .mean = mean, .sd = sd };
    float out[3 * SCENARIOS];
    uint32_t n = 0;
    for (uint64_t seed = 0; seed < DRAWS; seed++) {
        scenario_draw(&b, 1, seed, out);
        for (uint32_t k = 0; k < SCENARIOS; k++) {
            float all = out[k] + out[SCENARIOS + k] + out[2 * SCENARIOS + k];
            assert_true(fabsf(all - 1) < 1e-5f); /* one device's worth */
            assert_true(out[2 * SCENARIOS + k] == 0);
            if (k == 0)
                continue; /* the mean itself */
            double ratio = (double)out[SCENARIOS + k] / (double)out[k] / 0.2;
            sum += ratio;
            square += ratio * ratio;
            n++;
        }
        assert_true(fabsf(out[0] - 100 / 120.0f) < 1e-5f);
    }
    double m = sum / n, d = sqrt(square / n - m * m);
    print_message("cold over hot: mean %.3f, deviation %.3f\n", m, d);
    assert_true(m > 0.9 && m < 1.3);
    assert_true(d > 0.8 && d < 1.6);
    float again[3 * SCENARIOS];
    scenario_draw(&b, 1, DRAWS - 1, again);
    assert_memory_equal(out, again, sizeof out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_fitting_predictor_is_believed),
        cmocka_unit_test(errors_make_doubtful),
        cmocka_unit_test(nothing_and_zeros_are_fine),
        cmocka_unit_test(tokens_are_kept),
        cmocka_unit_test(scenarios_spread_as_believed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
