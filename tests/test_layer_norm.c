/* test_layer_norm.c - layer norm with a bias, and its gradients */
#include "tests/gradcheck.h"

static struct random rng;
static struct device *dev;

struct norm {
    int64_t n, d;
    float *x, *w, *b, *y, *stats, *c, *dx, *dw, *db;
};

static double loss(void *ctx)
{
    struct norm *s = ctx;
    dev->ops->layer_norm(dev, s->y, s->stats, s->x, s->w, s->b, s->n, s->d, 1e-6f);
    return weighted_sum(s->y, s->c, s->n * s->d);
}

static void check_values(const struct norm *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        const float *x = s->x + i * s->d;
        double mean = 0, var = 0;
        for (int64_t j = 0; j < s->d; j++)
            mean += x[j] / (double)s->d;
        for (int64_t j = 0; j < s->d; j++)
            var += (x[j] - mean) * (x[j] - mean) / (double)s->d;
        for (int64_t j = 0; j < s->d; j++) {
            double want = s->w[j] * (x[j] - mean) / sqrt(var + 1e-6) + s->b[j];
            assert_true(fabs(s->y[i * s->d + j] - want) < 2e-5);
        }
    }
}

static void values_and_gradients(void **state)
{
    (void)state;
    static const struct {
        int64_t n, d;
        float   mean, beta;
    } cases[] = {{1, 2, 0, 0}, {3, 17, 0, 1}, {300, 128, 0, 0}, {140, 33, 8, 0.5f}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct norm s = {.n = cases[i].n, .d = cases[i].d};
        int64_t n_all = s.n * s.d;
        s.x = random_floats(&rng, n_all, 1);
        for (int64_t j = 0; j < n_all; j++)
            s.x[j] += cases[i].mean + (float)(j % 2 ? 3 : -3);
        s.w = random_floats(&rng, s.d, 1);
        s.b = random_floats(&rng, s.d, 1);
        s.c = random_floats(&rng, n_all, 1);
        s.y = filled(n_all, NAN);
        s.stats = filled(2 * s.n, NAN);
        s.dx = cases[i].beta == 0 ? filled(n_all, NAN) : filled(n_all, 2);
        s.dw = filled(s.d, 0.5f);
        s.db = filled(s.d, -0.5f);
        loss(&s);
        check_values(&s);
        dev->ops->layer_norm_backward(dev, s.dx, s.dw, s.db, s.c, s.x, s.w, s.stats, s.n, s.d,
                                      cases[i].beta);
        struct gradient gradients[] = {
            {"x", s.x, s.dx, n_all, 2 * cases[i].beta},
            {"w", s.w, s.dw, s.d, 0.5f},
            {"b", s.b, s.db, s.d, -0.5f},
        };
        gradcheck("layer norm", &rng, loss, &s, gradients, 3, 1e-1);
        float *all[] = {s.x, s.w, s.b, s.c, s.y, s.stats, s.dx, s.dw, s.db};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            free(all[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_and_gradients),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
