/* test_product.c - linears, plain and grouped, against the plain sum, from BLAS and our own */
#include "tests/gradcheck.h"

static struct random rng;

struct shape {
    const char *what;
    int64_t n, in, out;
};

static const struct shape shapes[] = {
    {"one of each", 1, 1, 1},
    {"one row", 1, 37, 50},
    {"odd", 7, 13, 11},
    {"less than a tile", 11, 31, 31},
    {"one more than a tile", 13, 33, 33},
    {"several tiles", 97, 129, 65},
    {"several blocks of the sum", 20, 600, 40},
    {"several blocks of columns", 30, 20, 550},
    {"rows for all threads", 700, 64, 48},
};

/* c[i * cs + j] = sum over l of a[i * as + l * al] b[l * bl + j * bj], in double. */
static void plain(float *c, const float *a, int64_t ai, int64_t al, const float *b, int64_t bl,
                  int64_t bj, int64_t m, int64_t n, int64_t k)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = c[i * n + j];
            for (int64_t l = 0; l < k; l++)
                sum += (double)a[i * ai + l * al] * b[l * bl + j * bj];
            c[i * n + j] = (float)sum;
        }
}

static void assert_near(const char *what, const char *name, const float *got, const float *want,
                        int64_t n)
{
    double off = distance(got, want, n);
    if (!(off < 2e-6))
        fail_msg("%s: %s is off by %.3g", what, name, off);
}

static void check_linear(struct device *dev, const struct shape *s)
{
    int64_t n = s->n, in = s->in, out = s->out;
    float *x = random_floats(&rng, n * in, 1), *w = random_floats(&rng, out * in, 1);
    float *dy = random_floats(&rng, n * out, 1), *y0 = random_floats(&rng, n * out, 1);
    float *y = filled(n * out, NAN), *dx = filled(n * in, NAN), *dw = filled(out * in, 0.5f);
    float *want_y = zeros(n * out), *want_dx = zeros(n * in), *want_dw = filled(out * in, 0.5f);

    plain(want_y, x, in, 1, w, 1, in, n, out, in);
    plain(want_dx, dy, out, 1, w, in, 1, n, in, out);
    plain(want_dw, dy, 1, out, x, in, 1, out, in, n);
    dev->ops->linear(dev, y, x, w, n, in, out, 0);
    dev->ops->linear_dx(dev, dx, dy, w, n, in, out, 0);
    dev->ops->linear_dw(dev, dw, dy, x, n, in, out);
    assert_near(s->what, "y", y, want_y, n * out);
    assert_near(s->what, "dx", dx, want_dx, n * in);
    assert_near(s->what, "dw", dw, want_dw, out * in);

    memcpy(y, y0, (size_t)(n * out) * sizeof *y);
    plain(y0, x, in, 1, w, 1, in, n, out, in);
    dev->ops->linear(dev, y, x, w, n, in, out, 1);
    assert_near(s->what, "y added to", y, y0, n * out);
    plain(want_dx, dy, out, 1, w, in, 1, n, in, out);
    dev->ops->linear_dx(dev, dx, dy, w, n, in, out, 1);
    assert_near(s->what, "dx added to", dx, want_dx, n * in);
    float *all[] = {x, w, dy, y0, y, dx, dw, want_y, want_dx, want_dw};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void linear_is_the_plain_sum(void **state)
{
    (void)state;
    static const uint32_t threads[] = {1, 2, 3, 64}; /* more than some have rows */
    for (int deterministic = 0; deterministic < 2; deterministic++)
        for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
            struct device *dev = test_device(threads[t], deterministic);
            for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
                check_linear(dev, &shapes[i]);
            dev->ops->close(dev);
        }
}

static void no_rows_change_nothing(void **state)
{
    (void)state;
    struct device *dev = test_device(2, true);
    float w[6] = {1, 2, 3, 4, 5, 6}, dw[6] = {7, 7, 7, 7, 7, 7}, none[1] = {0};
    dev->ops->linear(dev, none, none, w, 0, 3, 2, 0);
    dev->ops->linear_dx(dev, none, none, w, 0, 3, 2, 0);
    dev->ops->linear_dw(dev, dw, none, none, 0, 3, 2);
    for (int i = 0; i < 6; i++)
        assert_true(dw[i] == 7);
    dev->ops->close(dev);
}

#define GROUPS_MAX 6

static const struct {
    const char *what;
    int32_t n_groups;
    int64_t rows[GROUPS_MAX], in, out;
} group_cases[] = {
    {"one group of one row", 1, {1}, 5, 3},
    {"empty groups, first and last too", 6, {0, 3, 0, 17, 1, 0}, 20, 35},
    {"no rows at all", 3, {0, 0, 0}, 8, 8},
    {"a group of many pieces", 3, {900, 2, 61}, 130, 100},
};

static void grouped_linear_is_linear_per_group(void **state)
{
    (void)state;
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        struct device *dev = test_device(2, deterministic);
        for (size_t c = 0; c < sizeof group_cases / sizeof group_cases[0]; c++) {
            int32_t n_groups = group_cases[c].n_groups;
            int64_t in = group_cases[c].in, out = group_cases[c].out;
            int64_t offsets[GROUPS_MAX + 1] = {0};
            const float *w[GROUPS_MAX], *w2[GROUPS_MAX];
            float *dw[GROUPS_MAX], *want_dw[GROUPS_MAX];
            for (int32_t g = 0; g < n_groups; g++) {
                offsets[g + 1] = offsets[g] + group_cases[c].rows[g];
                w[g] = random_floats(&rng, in * out, 1);
                w2[g] = random_floats(&rng, in * out, 1);
                dw[g] = filled(in * out, 0.25f);
                want_dw[g] = filled(in * out, 0.25f);
            }
            int64_t n = offsets[n_groups];
            float *x = random_floats(&rng, n * in, 1), *dy = random_floats(&rng, n * out, 1);
            float *y = filled(n * out, NAN), *want_y = zeros(n * out);
            float *dx = filled(n * in, 0.5f), *want_dx = filled(n * in, 0.5f);
            float *dy2 = random_floats(&rng, n * out, 1), *pair = filled(n * in, NAN);
            float *want_pair = zeros(n * in);
            for (int32_t g = 0; g < n_groups; g++) {
                int64_t row = offsets[g], rows = offsets[g + 1] - row;
                const float *xg = x + row * in, *dyg = dy + row * out;
                plain(want_y + row * out, xg, in, 1, w[g], 1, in, rows, out, in);
                plain(want_dx + row * in, dyg, out, 1, w[g], in, 1, rows, in, out);
                plain(want_dw[g], dyg, 1, out, xg, in, 1, out, in, rows);
                plain(want_pair + row * in, dyg, out, 1, w[g], in, 1, rows, in, out);
                plain(want_pair + row * in, dy2 + row * out, out, 1, w2[g], in, 1, rows, in, out);
            }
            dev->ops->grouped_linear(dev, y, x, w, offsets, n_groups, in, out);
            dev->ops->grouped_linear_dx(dev, dx, dy, w, offsets, n_groups, in, out, 1);
            dev->ops->grouped_linear_dw(dev, dw, dy, x, offsets, n_groups, in, out);
            dev->ops->grouped_linear_dx_pair(dev, pair, dy, w, dy2, w2, offsets, n_groups, in,
                                             out);
            assert_near(group_cases[c].what, "y", y, want_y, n * out);
            assert_near(group_cases[c].what, "dx", dx, want_dx, n * in);
            assert_near(group_cases[c].what, "dx of a pair", pair, want_pair, n * in);
            for (int32_t g = 0; g < n_groups; g++) {
                assert_near(group_cases[c].what, "dw", dw[g], want_dw[g], in * out);
                free((float *)w[g]);
                free((float *)w2[g]);
                free(dw[g]);
                free(want_dw[g]);
            }
            float *all[] = {x, dy, y, want_y, dx, want_dx, dy2, pair, want_pair};
            for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
                free(all[i]);
        }
        dev->ops->close(dev);
    }
}

/* A row's bits are the same alone, among others, and under any number of threads. */
static void deterministic_rows_do_not_depend_on_their_number(void **state)
{
    (void)state;
    enum { N = 301, IN = 300, OUT = 270 };
    float *x = random_floats(&rng, N * IN, 1), *w = random_floats(&rng, OUT * IN, 1);
    float *whole = zeros(N * OUT), *parts = zeros(N * OUT);
    struct device *one = test_device(1, true);
    one->ops->linear(one, whole, x, w, N, IN, OUT, 0);
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) {
        struct device *dev = test_device(n_threads, true);
        for (int64_t step = 1; step < N; step = step * 3 + 1) {
            memset(parts, 0, sizeof(float) * N * OUT);
            for (int64_t row = 0; row < N; row += step) {
                int64_t rows = N - row < step ? N - row : step;
                dev->ops->linear(dev, parts + row * OUT, x + row * IN, w, rows, IN, OUT, 0);
            }
            assert_memory_equal(parts, whole, sizeof(float) * N * OUT);
        }
        dev->ops->close(dev);
    }
    one->ops->close(one);
    free(x);
    free(w);
    free(whole);
    free(parts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_is_the_plain_sum),
        cmocka_unit_test(no_rows_change_nothing),
        cmocka_unit_test(grouped_linear_is_linear_per_group),
        cmocka_unit_test(deterministic_rows_do_not_depend_on_their_number),
    };
    rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
