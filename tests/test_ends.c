/* test_ends.c - embedding and rows, the head with its loss, and sums */
#include "tests/oracle.h"

static struct random rng;
static struct device *dev;

static void rows_move_by_index(void **state)
{
    (void)state;
    enum { N = 500, ROWS = 37, D = 150 };
    float *table = random_floats(&rng, ROWS * D, 1), *y = filled(N * D, NAN);
    float *acc = filled(ROWS * D, 0.5f), *want = filled(ROWS * D, 0.5f);
    float *acc2 = filled(ROWS * D, 0.5f), *y2 = filled(N * D, NAN);
    int64_t index[N];
    int32_t tokens[N];
    for (int i = 0; i < N; i++)
        tokens[i] = (int32_t)(index[i] = (int64_t)(random_bits(&rng) % ROWS));
    dev->ops->gather_rows(dev, y, table, index, NULL, N, D);
    dev->ops->embedding(dev, y2, table, tokens, N, D);
    for (int i = 0; i < N; i++)
        assert_memory_equal(y + i * D, table + index[i] * D, D * sizeof(float));
    assert_memory_equal(y, y2, N * D * sizeof(float));
    index[N - 1] = -1;
    dev->ops->gather_rows(dev, y2, table, index, NULL, N, D);
    assert_memory_equal(y2, y, (N - 1) * D * sizeof(float));
    for (int j = 0; j < D; j++)
        assert_true(y2[(N - 1) * D + j] == 0);
    index[N - 1] = tokens[N - 1];
    dev->ops->scatter_add_rows(dev, acc, y, index, N, D);
    dev->ops->embedding_backward(dev, acc2, y, tokens, N, D);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < D; j++)
            want[index[i] * D + j] += y[i * D + j];
    assert_memory_equal(acc, want, ROWS * D * sizeof(float));
    assert_memory_equal(acc2, want, ROWS * D * sizeof(float));
    float *all[] = {table, y, acc, want, acc2, y2};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* ---- head and loss ---- */

struct head {
    int64_t n, d, vocab, r; /* r 0: nothing beside */
    float *x, *w, *dx, *dw, *z, *b, *dz, *db;
    int32_t *labels;
};

static struct low_rank beside_of(const struct head *h)
{
    return (struct low_rank){h->r, (elem *)(void *)h->z, (elem *)(void *)h->b,
                             (elem *)(void *)h->dz, h->db};
}

static double head_loss(void *ctx)
{
    struct head *h = ctx;
    double loss = 0;
    struct low_rank beside = beside_of(h);
    dev->ops->linear_cross_entropy(dev, &loss, NULL, NULL, h->x, h->w, h->r ? &beside : NULL,
                                   h->labels, h->n, h->d, h->vocab);
    return loss;
}

static double head_truth(const struct head *h)
{
    double loss = 0;
    for (int64_t i = 0; i < h->n; i++) {
        double total = 0, of_label = 0;
        for (int64_t v = 0; v < h->vocab; v++) {
            double logit = 0;
            for (int64_t j = 0; j < h->d; j++)
                logit += (double)h->x[i * h->d + j] * h->w[v * h->d + j];
            for (int64_t j = 0; j < h->r; j++)
                logit += (double)h->z[i * h->r + j] * h->b[v * h->r + j];
            total += exp(logit);
            if (v == h->labels[i])
                of_label = logit;
        }
        if (h->labels[i] >= 0)
            loss += log(total) - of_label;
    }
    return loss;
}

static void loss_and_its_gradients(void **state)
{
    (void)state;
    static const int64_t shapes[][4] = {
        {1, 1, 1}, {1, 5, 3}, {7, 16, 33}, {70, 24, 256}, {40, 8, 150000},
        {1, 1, 1, 1}, {7, 16, 33, 3}, {70, 24, 256, 8}, {40, 8, 150000, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct head h = {.n = shapes[i][0], .d = shapes[i][1], .vocab = shapes[i][2],
                         .r = shapes[i][3]};
        h.x = random_floats(&rng, h.n * h.d, 1);
        h.w = random_floats(&rng, h.vocab * h.d, 0.5f);
        h.z = random_floats(&rng, h.n * h.r + 1, 1);
        h.b = random_floats(&rng, h.vocab * h.r + 1, 0.5f);
        h.dx = filled(h.n * h.d, NAN);
        h.dw = filled(h.vocab * h.d, 0.5f);
        h.dz = filled(h.n * h.r + 1, NAN);
        h.db = filled(h.vocab * h.r + 1, 0.5f);
        h.labels = xcalloc((size_t)h.n, sizeof *h.labels);
        for (int64_t j = 0; j < h.n; j++)
            h.labels[j] = j % 5 == 2 ? -100 : (int32_t)(random_bits(&rng) % (uint64_t)h.vocab);
        double truth = head_truth(&h), alone = head_loss(&h), loss = 0;
        struct low_rank beside = beside_of(&h);
        dev->ops->linear_cross_entropy(dev, &loss, h.dx, h.dw, h.x, h.w, h.r ? &beside : NULL,
                                       h.labels, h.n, h.d, h.vocab);
        assert_true(loss == alone);
        assert_true(fabs(loss - truth) <= 1e-6 * (fabs(truth) + 0.1));
        struct gradient gradients[] = {
            {"x", h.x, h.dx, h.n * h.d, 0},
            {"w", h.w, h.dw, h.vocab * h.d, 0.5f},
            {"z", h.z, h.dz, h.n * h.r, 0},
            {"b", h.b, h.db, h.vocab * h.r, 0.5f},
        };
        /* The gradient of w is held beside 0.5, so it is known to 6e-8 an element. */
        gradcheck("linear_cross_entropy", &rng, head_loss, &h, gradients, h.r ? 4 : 2, 5e-2);
        for (int64_t j = 0; j < h.n; j++)
            for (int64_t k = 0; h.labels[j] < 0 && k < h.d; k++)
                assert_true(h.dx[j * h.d + k] == 0);
        float *all[] = {h.x, h.w, h.dx, h.dw, h.z, h.b, h.dz, h.db};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            free(all[k]);
        free(h.labels);
    }
}

static void large_logits_stay_finite(void **state)
{
    (void)state;
    float x[2] = {1000, -1000}, w[3] = {1, -1, 0}, dx[2], dw[3] = {0};
    int32_t labels[2] = {1, 1};
    double loss = 1; /* added to */
    dev->ops->linear_cross_entropy(dev, &loss, dx, dw, x, w, NULL, labels, 2, 1, 3);
    assert_true(loss == 2001);
    assert_true(dx[0] == 2 && dx[1] == 0);
    assert_true(dw[0] == 1000 && dw[1] == -1000 && dw[2] == 0);
}

/* ---- sums ---- */

static void sums_and_updates(void **state)
{
    (void)state;
    static const int64_t lengths[] = {0, 1, 17, 8192, 8193, 100000};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        int64_t n = lengths[i];
        float *x = random_floats(&rng, n, 1), *y = random_floats(&rng, n, 1);
        float *was = xmemdup(y, (size_t)n * sizeof *y);
        double squares = 0;
        for (int64_t j = 0; j < n; j++)
            squares += (double)x[j] * x[j];
        assert_true(fabs(sum_squares(dev, x, n) - squares) <= 1e-12 * squares);
        assert_true(all_finite(dev, x, n));
        dev->ops->axpy(dev, y, 0.5f, x, n);
        for (int64_t j = 0; j < n; j++)
            assert_true(y[j] == was[j] + 0.5f * x[j]);
        dev->ops->scale(dev, y, -2, n);
        for (int64_t j = 0; j < n; j++)
            assert_true(y[j] == -2 * (was[j] + 0.5f * x[j]));
        dev->ops->to_elem(dev, y, x, n);
        dev->ops->add(dev, y, was, n);
        for (int64_t j = 0; j < n; j++)
            assert_true(y[j] == x[j] + was[j]);
        for (int bad = 0; n > 0 && bad < 3; bad++) {
            int64_t at = (int64_t)(random_bits(&rng) % (uint64_t)n);
            float good = x[at];
            x[at] = bad == 0 ? NAN : bad == 1 ? INFINITY : -INFINITY;
            assert_false(all_finite(dev, x, n));
            x[at] = good;
        }
        free(x);
        free(y);
        free(was);
    }
}

static void memory_is_zeroed_and_aligned(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 63, 4096, (size_t)5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *p = dev->ops->alloc(dev, sizes[i]);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t j = 0; j < sizes[i]; j++)
            assert_int_equal(p[j], 0);
        dev->ops->free(dev, p);
    }
    assert_null(dev->ops->alloc(dev, SIZE_MAX - 8));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_move_by_index),
        cmocka_unit_test(loss_and_its_gradients),
        cmocka_unit_test(large_logits_stay_finite),
        cmocka_unit_test(sums_and_updates),
        cmocka_unit_test(memory_is_zeroed_and_aligned),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
