/* test_pool.c - the thread pool under stress, and ops whose bits do not depend on the threads */
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "tests/gradcheck.h"

#include "kernels/pool.h"
#include "tests/patience.h"

static struct random rng;

struct tally {
    uint32_t n_threads;
    _Atomic uint32_t done[64];
    uint64_t plain[64]; /* written by tasks without atomics: a race if two ran one task */
};

static void count_task(void *arg, uint32_t task, uint32_t thread)
{
    struct tally *t = arg;
    assert(thread < t->n_threads); /* cmocka reports from its own thread only */
    t->plain[task] += task + 1;
    atomic_fetch_add(&t->done[task], 1);
}

static void every_task_runs_once(void **state)
{
    (void)state;
    for (uint32_t n_threads = 1; n_threads <= 5; n_threads++) {
        struct pool *p = pool_create(n_threads);
        assert_int_equal(pool_n_threads(p), n_threads);
        for (int round = 0; round < 3000; round++) {
            struct tally t = {.n_threads = n_threads};
            uint32_t n_tasks = (uint32_t)(random_bits(&rng) % 65);
            pool_run(p, n_tasks, count_task, &t);
            for (uint32_t i = 0; i < 64; i++) {
                assert_int_equal(t.done[i], i < n_tasks);
                assert_int_equal(t.plain[i], i < n_tasks ? i + 1 : 0);
            }
            if (round % 500 == 0)
                usleep(2000); /* long enough that the threads sleep */
        }
        pool_destroy(p);
    }
}

static void a_pool_that_never_ran_ends(void **state)
{
    (void)state;
    for (int i = 0; i < 50; i++)
        pool_destroy(pool_create(4));
    pool_destroy(NULL);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void idle_threads_take_no_cpu(void **state)
{
    (void)state;
    struct tally t = {.n_threads = 4};
    struct pool *p = pool_create(4);
    pool_run(p, 16, count_task, &t);
    /* On a busy machine it takes a while until all of them sleep. */
    uint64_t end_ns = patience_end_ns(1);
    for (double used = 1; used >= 0.02;) {
        assert_true(clock_now_ns() < end_ns);
        double before = cpu_seconds();
        usleep(300000);
        used = cpu_seconds() - before;
    }
    pool_destroy(p);
}

/* Each of several threads has a device of its own, as ranks that share a process have. */
static void *own_device(void *arg)
{
    float *x = arg, y[40 * 30];
    struct device *dev = NULL;
    if (device_cpu_open(2, false, &dev, NULL) < 0)
        return NULL;
    for (int i = 0; i < 100; i++)
        dev->ops->linear(dev, y, x, x, 40, 20, 30, 0);
    dev->ops->close(dev);
    return arg;
}

static void devices_of_several_threads_do_not_disturb_each_other(void **state)
{
    (void)state;
    float *x = random_floats(&rng, 40 * 30, 1);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, own_device, x), 0);
    for (int i = 0; i < 3; i++) {
        void *result;
        pthread_join(threads[i], &result);
        assert_ptr_equal(result, x);
    }
    free(x);
}

/* ---- a step's ops, their outputs one after another in one buffer ---- */

#define TOKENS  333
#define HEADS   3
#define DIM     20
#define WIDTH   (HEADS * DIM)
#define EXPERTS 12
#define TOP_K   3

struct step {
    float *x, *y, *w, *g, *beta, *small; /* inputs */
    float *out;
    int64_t n_out, used;
};

static float *next(struct step *s, int64_t n)
{
    float *p = s->out + s->used;
    s->used += n;
    assert_true(s->used <= s->n_out);
    return p;
}

static void run_norms(struct device *dev, struct step *s)
{
    int64_t n = TOKENS * WIDTH;
    float *rstd = next(s, TOKENS * HEADS);
    dev->ops->rms_norm(dev, next(s, n), rstd, s->x, s->small, TOKENS, WIDTH, 1e-5f);
    dev->ops->rms_norm_backward(dev, next(s, n), next(s, WIDTH), s->y, s->x, s->small, rstd, TOKENS,
                                WIDTH, 0);
    dev->ops->gated_rms_norm(dev, next(s, n), rstd, s->x, s->y, s->small, TOKENS * HEADS, DIM,
                             1e-5f);
    dev->ops->gated_rms_norm_backward(dev, next(s, n), next(s, n), next(s, DIM), s->g, s->x, s->y,
                                      s->small, rstd, TOKENS * HEADS, DIM);
    *next(s, 1) = (float)sum_squares(dev, s->x, n);
}

static void run_kda(struct device *dev, struct step *s, const int32_t *cu, int32_t n_docs)
{
    struct kda_shape shape = {TOKENS, cu, n_docs, HEADS, DIM, 0.2f};
    int64_t n = TOKENS * WIDTH;
    float *rstd = next(s, TOKENS * HEADS), *q = next(s, n), *k = next(s, n), *g = next(s, n);
    float *saved = zeros((int64_t)dev->ops->kda_saved_floats(dev, &shape)), *pre = next(s, n);
    dev->ops->short_conv(dev, next(s, n), pre, s->x, s->w, cu, n_docs, WIDTH, 4);
    dev->ops->short_conv_backward(dev, next(s, n), next(s, 4 * WIDTH), s->y, pre, s->x, s->w, cu,
                                  n_docs, WIDTH, 4);
    dev->ops->l2_norm(dev, q, rstd, s->x, TOKENS * HEADS, DIM, 1e-6f);
    dev->ops->l2_norm(dev, k, rstd, s->y, TOKENS * HEADS, DIM, 1e-6f);
    dev->ops->kda_gate(dev, g, s->g, s->small, s->small, TOKENS, HEADS, DIM, true, -5);
    dev->ops->kda_forward(dev, next(s, n), NULL, saved, q, k, s->x, g, s->beta, NULL, &shape);
    float *dg = next(s, n);
    dev->ops->kda_backward(dev, next(s, n), next(s, n), next(s, n), dg, next(s, TOKENS * HEADS),
                           NULL, s->y, NULL, q, k, s->x, g, s->beta, NULL, saved, &shape);
    dev->ops->kda_gate_backward(dev, next(s, n), next(s, WIDTH), next(s, HEADS), dg, s->g, s->small,
                                s->small, TOKENS, HEADS, DIM, true, -5);
    free(saved);
}

static void run_attention(struct device *dev, struct step *s, const int32_t *cu, int32_t n_docs)
{
    struct attention_shape shape = {TOKENS, cu, n_docs, HEADS, 12, 8, 8, 0.2f};
    int64_t n = TOKENS * WIDTH, n_o = TOKENS * HEADS * 8;
    float *o = next(s, n_o), *lse = next(s, TOKENS * HEADS);
    dev->ops->attention(dev, o, lse, s->x, s->y, s->g, 8, &shape);
    dev->ops->attention_backward(dev, next(s, n), next(s, n), next(s, TOKENS * 8), 8, s->g, o, lse,
                                 s->x, s->y, s->g, 8, &shape);
    const float *rows[] = {s->x, s->y, s->g};
    float *acc[] = {next(s, n), next(s, n), next(s, n)}, *weights = next(s, 3 * TOKENS);
    dev->ops->attn_res(dev, next(s, n), weights, rows, 3, s->small, s->w, TOKENS, WIDTH, 1e-5f);
    dev->ops->attn_res_backward(dev, acc, next(s, WIDTH), next(s, WIDTH), s->y, rows, weights, 3,
                                s->small, s->w, TOKENS, WIDTH, 1e-5f);
}

static void run_experts(struct device *dev, struct step *s)
{
    struct router_shape shape = {TOKENS, EXPERTS, TOP_K, true, 1};
    int64_t offsets[EXPERTS + 1] = {0}, n = TOKENS * WIDTH;
    const float *w[EXPERTS];
    float *dw[EXPERTS], *logits = next(s, TOKENS * EXPERTS), *scores = next(s, TOKENS * EXPERTS);
    float *weights = next(s, TOKENS * TOP_K);
    int32_t *ids = xcalloc(TOKENS * TOP_K, sizeof *ids), labels[TOKENS];
    for (int e = 0; e < EXPERTS; e++) {
        offsets[e + 1] = e == EXPERTS - 1 ? TOKENS : offsets[e] + e * 4;
        w[e] = s->w + e;
        dw[e] = next(s, WIDTH * WIDTH);
    }
    for (int i = 0; i < TOKENS; i++)
        labels[i] = i % EXPERTS;
    dev->ops->linear(dev, logits, s->x, s->w, TOKENS, WIDTH, EXPERTS, 0);
    dev->ops->router(dev, scores, ids, weights, logits, s->small, &shape);
    dev->ops->grouped_linear(dev, next(s, n), s->x, w, offsets, EXPERTS, WIDTH, WIDTH);
    dev->ops->grouped_linear_dx(dev, next(s, n), s->y, w, offsets, EXPERTS, WIDTH, WIDTH, 0);
    dev->ops->grouped_linear_dw(dev, dw, s->y, s->x, offsets, EXPERTS, WIDTH, WIDTH);
    double loss = 0;
    dev->ops->linear_cross_entropy(dev, &loss, next(s, n), next(s, EXPERTS * WIDTH), s->x, s->w,
                                   NULL, labels, TOKENS, WIDTH, EXPERTS);
    *next(s, 1) = (float)loss;
    free(ids);
}

/* Everything a step computes, n_out floats. */
static void run_step(struct device *dev, struct step *s)
{
    static const int32_t cu[] = {0, 1, 130, 200, TOKENS};
    s->used = 0;
    memset(s->out, 0, (size_t)s->n_out * sizeof *s->out);
    run_norms(dev, s);
    run_kda(dev, s, cu, 4);
    run_attention(dev, s, cu, 4);
    run_experts(dev, s);
}

static void deterministic_bits_do_not_depend_on_the_threads(void **state)
{
    (void)state;
    int64_t n = TOKENS * WIDTH;
    struct step s = {.n_out = 40 * n + EXPERTS * WIDTH * WIDTH};
    s.x = random_floats(&rng, n, 1);
    s.y = random_floats(&rng, n, 1);
    s.g = random_floats(&rng, n, 1);
    s.w = random_floats(&rng, WIDTH * WIDTH + EXPERTS, 1);
    s.beta = random_floats(&rng, TOKENS * HEADS, 0.1f);
    s.small = random_floats(&rng, WIDTH, 0.3f);
    s.out = zeros(s.n_out);
    float *first = NULL;
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++)
        for (int repeat = 0; repeat < 3; repeat++) {
            struct device *dev = test_device(n_threads, true);
            run_step(dev, &s);
            assert_true(all_finite(dev, s.out, s.used));
            if (!first)
                first = xmemdup(s.out, (size_t)s.n_out * sizeof *first);
            for (int64_t i = 0; i < s.used; i++)
                if (memcmp(&first[i], &s.out[i], sizeof(float)) != 0)
                    fail_msg("float %d of the step: %.9g with one thread, %.9g with %u", (int)i,
                             first[i], s.out[i], n_threads);
            dev->ops->close(dev);
        }
    float *all[] = {s.x, s.y, s.g, s.w, s.beta, s.small, s.out, first};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_once),
        cmocka_unit_test(a_pool_that_never_ran_ends),
        cmocka_unit_test(idle_threads_take_no_cpu),
        cmocka_unit_test(devices_of_several_threads_do_not_disturb_each_other),
        cmocka_unit_test(deterministic_bits_do_not_depend_on_the_threads),
    };
    rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
