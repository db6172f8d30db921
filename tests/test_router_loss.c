/* test_router_loss.c - balancing losses of a router against definitions and the reference file */
#include "tests/oracle.h"

static struct random rng;
static struct device *dev;

enum which { AUX, Z };

struct losses {
    enum which which;
    struct router_shape shape;
    const int32_t *cu_rows;
    int32_t n_segments;
    float *logits, *scores, *d_logits, *weights;
    int32_t *ids;
    int64_t *counts;
};

static void setup(struct losses *l, struct router_shape shape, const int32_t *cu_rows,
                  int32_t n_segments)
{
    int64_t n_all = shape.n_tokens * shape.n_experts, n_chosen = shape.n_tokens * shape.top_k;
    *l = (struct losses){.shape = shape, .cu_rows = cu_rows, .n_segments = n_segments};
    l->logits = random_floats(&rng, n_all, 1);
    l->scores = filled(n_all, NAN);
    l->d_logits = filled(n_all, 0.5f);
    l->weights = zeros(n_chosen);
    l->ids = xcalloc((size_t)n_chosen, sizeof *l->ids);
    l->counts = xcalloc((size_t)n_segments * (size_t)shape.n_experts, sizeof *l->counts);
}

static void teardown(struct losses *l)
{
    free(l->logits);
    free(l->scores);
    free(l->d_logits);
    free(l->weights);
    free(l->ids);
    free(l->counts);
}

static void score(struct losses *l)
{
    dev->ops->router(dev, l->scores, l->ids, l->weights, l->logits, NULL, &l->shape);
}

static double aux_loss(struct losses *l, float *acc_d_logits, float weight)
{
    double sum = 0;
    dev->ops->router_aux_loss(dev, &sum, acc_d_logits, weight, l->scores, l->counts, l->cu_rows,
                              l->n_segments, &l->shape);
    return sum;
}

static double z_loss(struct losses *l, float *acc_d_logits, float weight)
{
    double sum = 0;
    dev->ops->router_z_loss(dev, &sum, acc_d_logits, weight, l->logits, &l->shape);
    return sum;
}

static double loss(void *ctx)
{
    struct losses *l = ctx;
    if (l->which == Z)
        return z_loss(l, NULL, 0);
    score(l);
    return aux_loss(l, NULL, 0);
}

static const int32_t whole5[] = {0, 5}, whole60[] = {0, 60}, packed[] = {0, 1, 20, 20, 60};

static void gradients_are_added(void **state)
{
    (void)state;
    static const struct {
        enum which which;
        struct router_shape shape;
        const int32_t *cu;
        int32_t n_segments;
    } cases[] = {
        {AUX, {5, 3, 1, true, 1, ROUTER_SIGMOID}, whole5, 1},
        {AUX, {60, 16, 4, true, 1, ROUTER_SIGMOID}, whole60, 1},
        {AUX, {60, 16, 4, true, 1, ROUTER_SOFTMAX}, whole60, 1},
        {AUX, {60, 16, 4, true, 1, ROUTER_SIGMOID}, packed, 4},
        {AUX, {60, 33, 2, true, 1, ROUTER_SOFTMAX}, packed, 4},
        {Z, {5, 3, 1, true, 1}, whole5, 1},
        {Z, {60, 33, 4, true, 1}, whole60, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct losses l;
        setup(&l, cases[i].shape, cases[i].cu, cases[i].n_segments);
        l.which = cases[i].which;
        int64_t n_all = l.shape.n_tokens * l.shape.n_experts;
        score(&l);
        if (l.which == Z) {
            z_loss(&l, l.d_logits, 1);
        } else {
            dev->ops->router_segment_counts(dev, l.counts, l.scores, l.cu_rows, l.n_segments,
                                            &l.shape);
            aux_loss(&l, l.d_logits, 1);
        }
        struct gradient g = {"logits", l.logits, l.d_logits, n_all, 0.5f};
        gradcheck(l.which == Z ? "z-loss" : "aux loss", &rng, loss, &l, &g, 1, 1e-2);
        teardown(&l);
    }
}

static void an_even_load_costs_one(void **state)
{
    (void)state;
    struct losses l;
    setup(&l, (struct router_shape){60, 16, 4, true, 1, ROUTER_SOFTMAX}, packed, 4);
    for (int64_t i = 0; i < 60 * 16; i++)
        l.logits[i] = 0;
    for (int64_t i = 0; i < 4 * 16; i++)
        l.counts[i] = 7;
    score(&l);
    assert_true(fabs(aux_loss(&l, NULL, 0) - 1) < 1e-5);
    teardown(&l);
}

/* Two micro-batches under the counts of both: the mean of their losses is the loss of one batch. */
static void counts_may_come_from_a_larger_batch(void **state)
{
    (void)state;
    static const int32_t half[] = {0, 30};
    struct losses l;
    setup(&l, (struct router_shape){60, 16, 4, true, 1, ROUTER_SIGMOID}, whole60, 1);
    score(&l);
    dev->ops->router_segment_counts(dev, l.counts, l.scores, l.cu_rows, 1, &l.shape);
    double whole = aux_loss(&l, NULL, 0), parts = 0;
    struct router_shape shape = l.shape;
    shape.n_tokens = 30;
    for (int64_t row = 0; row < 60; row += 30)
        dev->ops->router_aux_loss(dev, &parts, NULL, 0, l.scores + row * 16, l.counts, half, 1,
                                  &shape);
    assert_true(fabs(whole - parts / 2) < 1e-6);
    teardown(&l);
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    struct device *other = test_device(3, false);
    struct losses l;
    setup(&l, (struct router_shape){60, 16, 4, true, 1, ROUTER_SIGMOID}, packed, 4);
    score(&l);
    dev->ops->router_segment_counts(dev, l.counts, l.scores, packed, 4, &l.shape);
    float *d_logits = filled(60 * 16, 0.5f);
    double a = aux_loss(&l, l.d_logits, 1), b = 0;
    other->ops->router_aux_loss(other, &b, d_logits, 1, l.scores, l.counts, packed, 4, &l.shape);
    assert_true(a == b);
    assert_memory_equal(d_logits, l.d_logits, 60 * 16 * sizeof *d_logits);
    free(d_logits);
    teardown(&l);
    other->ops->close(other);
}

static void check_counts(const struct losses *l, const char *name, const struct st_view *map)
{
    int32_t n_experts = l->shape.n_experts;
    for (int32_t s = 0; s < l->n_segments; s++)
        for (int32_t e = 0; e < n_experts; e++) {
            int64_t want = 0;
            for (int32_t i = l->cu_rows[s]; i < l->cu_rows[s + 1]; i++)
                want += map->data[i * n_experts + e];
            if (l->counts[s * n_experts + e] != want)
                fail_msg("%s: expert %d was chosen %d times, not %d", name, e,
                         (int)l->counts[s * n_experts + e], (int)want);
        }
}

static void agrees_with_the_reference_file(void **state)
{
    (void)state;
    static const int32_t whole64[] = {0, 64}, whole50[] = {0, 50}, three[] = {0, 20, 40, 60};
    static const struct {
        const char *name;
        enum which which;
        struct router_shape shape;
        const int32_t *cu;
        int32_t n_segments;
        float   weight;
    } cases[] = {
        {"aux-softmax", AUX, {64, 16, 4, true, 1, ROUTER_SOFTMAX}, whole64, 1, 0.01f},
        {"aux-sigmoid", AUX, {64, 16, 4, true, 1, ROUTER_SIGMOID}, whole64, 1, 0.01f},
        {"seq-aux", AUX, {60, 16, 4, true, 1, ROUTER_SIGMOID}, three, 3, 0.01f},
        {"z-loss", Z, {50, 16, 4, true, 1}, whole50, 1, 0.001f},
    };
    struct safetensors *st = oracle_open("router");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *name = cases[i].name;
        struct losses l;
        setup(&l, cases[i].shape, cases[i].cu, cases[i].n_segments);
        int64_t n_all = l.shape.n_tokens * l.shape.n_experts;
        free(l.logits);
        l.logits = oracle_floats(st, name, "logits", NULL);
        float *want = oracle_floats(st, name, "dlogits", NULL);
        float *want_loss = oracle_floats(st, name, "loss", NULL), got_loss;
        memset(l.d_logits, 0, (size_t)n_all * sizeof *l.d_logits);
        score(&l);
        if (cases[i].which == Z) {
            got_loss = (float)(cases[i].weight * z_loss(&l, l.d_logits, cases[i].weight));
        } else {
            dev->ops->router_segment_counts(dev, l.counts, l.scores, l.cu_rows, l.n_segments,
                                            &l.shape);
            check_counts(&l, name, oracle_view(st, name, "map"));
            got_loss = (float)(cases[i].weight * aux_loss(&l, l.d_logits, cases[i].weight));
        }
        oracle_compare(name, "loss", &got_loss, want_loss, 1, 1e-5, 0);
        oracle_compare(name, "dlogits", l.d_logits, want, n_all, 1e-5, 0);
        free(want);
        free(want_loss);
        teardown(&l);
    }
    safetensors_close(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_added),
        cmocka_unit_test(an_even_load_costs_one),
        cmocka_unit_test(counts_may_come_from_a_larger_batch),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(agrees_with_the_reference_file),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
