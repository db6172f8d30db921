/* test_optim_ops.c - Muon and AdamW against the reference file and their definitions */
#include "tests/oracle.h"

static struct random rng;
static struct device *dev;

static void orthogonal_images_agree_with_the_reference_file(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t n_blocks;
        int64_t rows, cols;
        double  tolerance;
    } files[] = {
        {"newton-schulz-wide", 1, 48, 96, 1e-4},
        {"newton-schulz-tall", 1, 96, 40, 1e-4},
        {"newton-schulz-rank-one", 1, 24, 40, 1e-3},
        {"newton-schulz-heads", 3, 16, 40, 1e-4},
    };
    struct safetensors *st = oracle_open("optim");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        int64_t n = files[i].n_blocks * files[i].rows * files[i].cols;
        float *x = oracle_floats(st, files[i].name, "G", NULL);
        float *want = oracle_floats(st, files[i].name, "NS", NULL);
        dev->ops->newton_schulz(dev, x, files[i].n_blocks, files[i].rows, files[i].cols, 5);
        oracle_compare(files[i].name, "NS", x, want, n, files[i].tolerance, 0);
        free(x);
        free(want);
    }
    safetensors_close(st);
}

/* step's tensor, as in "g1". */
static float *of_step(const struct safetensors *st, const char *name, char letter, int step)
{
    char tensor[] = {letter, (char)('0' + step), 0};
    return oracle_floats(st, name, tensor, NULL);
}

static void compare_step(const struct safetensors *st, const char *name, char letter, int step,
                         const float *got, int64_t n, double tolerance)
{
    char tensor[] = {letter, (char)('0' + step), 0};
    float *want = of_step(st, name, letter, step);
    oracle_compare(name, tensor, got, want, n, tolerance, 0);
    free(want);
}

static void muon_agrees_with_the_reference_file(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t n_heads;
        int64_t rows, cols;
    } files[] = {{"muon-wide", 1, 48, 96}, {"muon-heads", 3, 16, 40}};
    struct safetensors *st = oracle_open("optim");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *name = files[i].name;
        int64_t n = files[i].n_heads * files[i].rows * files[i].cols;
        struct muon_config config = {
            .lr = 0.02f, .momentum = 0.95f, .weight_decay = 0.1f, .grad_scale = 0.25f,
            .rms = 0.2f, .nesterov = true,
        };
        float *w = of_step(st, name, 'w', 0), *m = zeros(n);
        for (int step = 1; step <= 3; step++) {
            float *g = of_step(st, name, 'g', step);
            dev->ops->scale(dev, g, 4, n); /* what grad_scale takes back */
            dev->ops->muon(dev, w, m, g, files[i].n_heads, files[i].rows, files[i].cols, &config);
            compare_step(st, name, 'm', step, m, n, 1e-5);
            compare_step(st, name, 'w', step, w, n, 1e-5);
            free(g);
        }
        free(w);
        free(m);
    }
    safetensors_close(st);
}

static void adamw_agrees_with_the_reference_file(void **state)
{
    (void)state;
    struct safetensors *st = oracle_open("optim");
    int64_t n = 37 * 20;
    float *w = of_step(st, "adamw", 'w', 0), *m = zeros(n), *v = zeros(n);
    for (int step = 1; step <= 4; step++) {
        float *g = of_step(st, "adamw", 'g', step);
        dev->ops->scale(dev, g, 4, n); /* what grad_scale takes back */
        struct adamw_config config = {
            .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f,
            .grad_scale = 0.25f, .correction1 = (float)(1 - pow(0.9, step)),
            .correction2 = (float)(1 - pow(0.95, step)),
        };
        dev->ops->adamw(dev, w, m, v, NULL, g, n, &config);
        compare_step(st, "adamw", 'm', step, m, n, 1e-6);
        compare_step(st, "adamw", 'v', step, v, n, 1e-6);
        compare_step(st, "adamw", 'w', step, w, n, 1e-6);
        free(g);
    }
    free(w);
    free(m);
    free(v);
    safetensors_close(st);
}

static void clipping_agrees_with_the_reference_file(void **state)
{
    (void)state;
    struct safetensors *st = oracle_open("optim");
    double sum = 0;
    for (int i = 0; i < 3; i++) {
        char tensor[] = {'g', (char)('0' + i), 0};
        int64_t n = 0;
        float *g = oracle_floats(st, "clip", tensor, &n);
        sum += sum_squares(dev, g, n);
        free(g);
    }
    float norm = (float)sqrt(sum), *want = oracle_floats(st, "clip", "norm", NULL);
    oracle_compare("clip", "norm", &norm, want, 1, 1e-6, 0);
    free(want);
    for (int i = 0; i < 3; i++) {
        char from[] = {'g', (char)('0' + i), 0}, to[] = {'c', (char)('0' + i), 0};
        int64_t n = 0;
        float *g = oracle_floats(st, "clip", from, &n);
        float *clipped = oracle_floats(st, "clip", to, NULL);
        dev->ops->scale(dev, g, (float)fmin(1, 1 / (sqrt(sum) + 1e-6)), n);
        oracle_compare("clip", to, g, clipped, n, 1e-6, 0);
        free(g);
        free(clipped);
    }
    safetensors_close(st);
}

/* Singular values end between 0.6 and 1.3, so |X|^2 is about the lesser side. */
static void singular_values_come_near_one(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {1, 40}, {33, 1}, {70, 300}, {300, 70}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        int64_t n = shapes[i][0] * shapes[i][1];
        int64_t least = shapes[i][0] < shapes[i][1] ? shapes[i][0] : shapes[i][1];
        float *x = random_floats(&rng, n, 1);
        dev->ops->newton_schulz(dev, x, 1, shapes[i][0], shapes[i][1], 5);
        double mean = sum_squares(dev, x, n) / (double)least;
        if (!(mean > 0.4 && mean < 1.6))
            fail_msg("%d by %d: mean squared singular value %g", (int)shapes[i][0],
                     (int)shapes[i][1], mean);
        free(x);
    }
}

static void zeros_stay_zeros(void **state)
{
    (void)state;
    float x[12] = {0};
    dev->ops->newton_schulz(dev, x, 1, 3, 4, 5);
    for (int i = 0; i < 12; i++)
        assert_true(x[i] == 0);
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    struct device *other = test_device(3, false);
    int64_t n = 300 * 200;
    struct muon_config config = {.lr = 0.02f, .momentum = 0.95f, .grad_scale = 1, .rms = 0.2f};
    float *w = random_floats(&rng, n, 1), *g = random_floats(&rng, n, 1), *m = zeros(n);
    float *w2 = xmemdup(w, (size_t)n * sizeof *w), *m2 = zeros(n);
    dev->ops->muon(dev, w, m, g, 2, 150, 200, &config);
    other->ops->muon(other, w2, m2, g, 2, 150, 200, &config);
    assert_memory_equal(w, w2, (size_t)n * sizeof *w);
    float *all[] = {w, g, m, w2, m2};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    other->ops->close(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orthogonal_images_agree_with_the_reference_file),
        cmocka_unit_test(muon_agrees_with_the_reference_file),
        cmocka_unit_test(adamw_agrees_with_the_reference_file),
        cmocka_unit_test(clipping_agrees_with_the_reference_file),
        cmocka_unit_test(singular_values_come_near_one),
        cmocka_unit_test(zeros_stay_zeros),
        cmocka_unit_test(threads_do_not_change_a_bit),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
