/* bench.c - times every op of a device beside the floor that the machine sets */
#include "worker/bench.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/bf16.h"
#include "common/clock.h"
#include "common/mem.h"
#include "worker/bench_cases.h"

#define TIMED_NS    (250 * NS_PER_MS) /* of one case */
#define BEST_NS     (100 * NS_PER_MS) /* where the best of all calls is asked for */
#define REPEATS_MIN 5u
#define REPEATS_MAX 2000u

struct rates {
    double flops_per_s, bytes_per_s;
};

/* One device's buffers of a case, and its outputs on the host. */
struct run {
    struct device *dev;
    float *in[BENCH_TENSORS_MAX], *out[BENCH_TENSORS_MAX], *host[BENCH_TENSORS_MAX];
};

static void run_free(struct run *r)
{
    for (int i = 0; i < BENCH_TENSORS_MAX; i++) {
        r->dev->ops->free(r->dev, r->in[i]);
        r->dev->ops->free(r->dev, r->out[i]);
        free(r->host[i]);
    }
}

/* The same numbers on every machine. Both halves of a float are the same, so that it is two
 * bfloat16 of about its value, too. */
static float next_random(uint64_t *state, float width)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    uint16_t half = bf16_of(width * ((float)(*state >> 40) * 0x1p-23f - 1));
    uint32_t both = (uint32_t)half << 16 | half;
    float x;
    memcpy(&x, &both, sizeof x);
    return x;
}

static int make_input(struct run *r, const struct bench_case *c, int i, uint64_t *seed,
                      struct err *err)
{
    size_t n_bytes = (size_t)c->n_in[i] * sizeof(float);
    if (!(r->in[i] = r->dev->ops->alloc(r->dev, n_bytes)))
        return err_set(err, -ENOMEM, "bench %s: no memory for %zu bytes", c->op, n_bytes);
    float *host = xcalloc(1, n_bytes);
    for (int64_t j = 0; j < c->n_in[i]; j++)
        host[j] = next_random(seed, c->width[i]);
    r->dev->ops->to_device(r->dev, r->in[i], host, n_bytes);
    free(host);
    return 0;
}

static int run_make(struct run *r, const struct bench_case *c, struct err *err)
{
    uint64_t seed = 1;
    int rc = 0;
    for (int i = 0; rc == 0 && i < BENCH_TENSORS_MAX; i++) {
        size_t n_bytes = (size_t)c->n_out[i] * sizeof(float);
        if (c->n_in[i] > 0)
            rc = make_input(r, c, i, &seed, err);
        if (rc == 0 && !(r->out[i] = r->dev->ops->alloc(r->dev, n_bytes)))
            rc = err_set(err, -ENOMEM, "bench %s: no memory for %zu bytes", c->op, n_bytes);
    }
    return rc;
}

/* One call from zeroed outputs, and what it left in them. */
static void run_once(struct run *r, const struct bench_case *c)
{
    c->run(c, r->dev, r->in, r->out);
    r->dev->ops->synchronize(r->dev);
    for (int i = 0; i < BENCH_TENSORS_MAX; i++) {
        r->host[i] = xcalloc((size_t)c->n_out[i], sizeof(float));
        r->dev->ops->to_host(r->dev, r->host[i], r->out[i], (size_t)c->n_out[i] * sizeof(float));
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of one call. */
static double run_timed(struct run *r, const struct bench_case *c)
{
    static double seconds[REPEATS_MAX];
    uint64_t start = clock_now_ns(), before = start;
    uint32_t n = 0;
    while (n < REPEATS_MAX && (n < REPEATS_MIN || before - start < TIMED_NS)) {
        c->run(c, r->dev, r->in, r->out);
        r->dev->ops->synchronize(r->dev);
        uint64_t now = clock_now_ns();
        seconds[n++] = (double)(now - before) / NS_PER_S;
        before = now;
    }
    qsort(seconds, n, sizeof seconds[0], by_value);
    return seconds[n / 2];
}

/* One thread of a CPU is timed by its own clock, which other programs do not slow down. */
static uint64_t now_of(const struct device *dev)
{
    struct timespec t;
    if (!dev->is_host || dev->n_threads != 1)
        return clock_now_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static double run_best(struct run *r, const struct bench_case *c)
{
    uint64_t start = clock_now_ns();
    double best = INFINITY;
    for (uint32_t n = 0; n < REPEATS_MIN || clock_now_ns() - start < BEST_NS; n++) {
        uint64_t before = now_of(r->dev);
        c->run(c, r->dev, r->in, r->out);
        r->dev->ops->synchronize(r->dev);
        best = fmin(best, (double)(now_of(r->dev) - before) / NS_PER_S);
    }
    return best;
}

int bench_time(const struct bench_case *c, struct device *dev, double *out_seconds, struct err *err)
{
    struct run r = {.dev = dev};
    int rc = run_make(&r, c, err);
    if (rc == 0) {
        c->run(c, dev, r.in, r.out);
        dev->ops->synchronize(dev);
        *out_seconds = run_best(&r, c);
    }
    run_free(&r);
    return rc;
}

/* |a - b| / |b| over all outputs; NaN where one has a number that is not finite. */
static double relative_distance(const struct run *a, const struct run *b,
                                const struct bench_case *c)
{
    double difference = 0, norm = 0;
    for (int i = 0; i < BENCH_TENSORS_MAX; i++)
        for (int64_t j = 0; j < c->n_out[i] && !c->is_own[i]; j++) {
            double x = a->host[i][j], y = b->host[i][j];
            difference += (x - y) * (x - y);
            norm += y * y;
        }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static void print_case(FILE *out, const struct bench_case *c, bool json, double seconds,
                       double floor_s, double error)
{
    if (json) {
        fprintf(out,
                "{\"op\": \"%s\", \"shape\": \"%s\", \"dtype\": \"f32\", \"ms\": %.4f, "
                "\"flops\": %.0f, \"bytes\": %.0f, \"floor_ms\": %.4f, \"floor_ratio\": %.2f, "
                "\"error_vs_reference\": ",
                c->op, c->shape, seconds * 1e3, c->flops, c->bytes, floor_s * 1e3,
                seconds / floor_s);
        if (isfinite(error))
            fprintf(out, "%.2g}\n", error);
        else
            fputs("null}\n", out);
    } else {
        fprintf(out, "%-24s %-30s %9.3f ms %7.1f GFLOP/s %6.1f GB/s  floor %8.3f ms  "
                "x%-6.2f %.1g\n",
                c->op, c->shape, seconds * 1e3, c->flops / seconds / 1e9, c->bytes / seconds / 1e9,
                floor_s * 1e3, seconds / floor_s, error);
    }
    fflush(out);
}

static int bench_case(const struct bench_case *declared, struct device *dev,
                      struct device *reference, const struct rates *rates, bool json, FILE *out,
                      struct err *err)
{
    struct bench_case c = *declared, defined = *declared;
    struct run fast = {.dev = dev}, slow = {.dev = reference};
    int rc;
    c.declare(&c, dev);
    defined.declare(&defined, reference);
    if ((rc = run_make(&fast, &c, err)) == 0 && (rc = run_make(&slow, &defined, err)) == 0) {
        run_once(&fast, &c);
        run_once(&slow, &defined);
        double floor_s = fmax(c.flops / rates->flops_per_s, c.bytes / rates->bytes_per_s);
        print_case(out, &c, json, run_timed(&fast, &c), floor_s,
                   relative_distance(&fast, &slow, &c));
    }
    run_free(&fast);
    run_free(&slow);
    return rc;
}

/* A product of 1536^3 and an update of 16 M floats. */
static int measure_rates(struct device *dev, struct rates *out, struct err *err)
{
    enum { SIDE = 1536, LENGTH = 16 << 20 };
    const size_t square = (size_t)SIDE * SIDE * sizeof(float), length = sizeof(float) * LENGTH;
    float *a = dev->ops->alloc(dev, square), *b = dev->ops->alloc(dev, square);
    float *c = dev->ops->alloc(dev, square);
    float *x = dev->ops->alloc(dev, length), *y = dev->ops->alloc(dev, length);
    int rc = 0;
    if (!a || !b || !c || !x || !y)
        rc = err_set(err, -ENOMEM, "bench: no memory to measure the machine's rates");
    double product_s = INFINITY, update_s = INFINITY;
    for (int i = 0; rc == 0 && i < 5; i++) {
        uint64_t start = clock_now_ns();
        dev->ops->linear(dev, c, a, b, SIDE, SIDE, SIDE, 0);
        dev->ops->synchronize(dev);
        uint64_t middle = clock_now_ns();
        dev->ops->axpy(dev, y, 0.5f, x, LENGTH);
        dev->ops->synchronize(dev);
        product_s = fmin(product_s, (double)(middle - start) / NS_PER_S);
        update_s = fmin(update_s, (double)(clock_now_ns() - middle) / NS_PER_S);
    }
    out->flops_per_s = 2.0 * SIDE * SIDE * SIDE / product_s;
    out->bytes_per_s = 3.0 * (double)length / update_s;
    float *all[] = {a, b, c, x, y};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        dev->ops->free(dev, all[i]);
    return rc;
}

static int bench_all(const struct bench_options *o, struct device *dev, struct device *reference,
                     FILE *out, struct err *err)
{
    struct rates rates;
    const struct bench_case *c;
    int rc = measure_rates(dev, &rates, err);
    if (rc == 0 && !o->json)
        fprintf(out, "%s, %u threads: products %.1f GFLOP/s, memory %.1f GB/s\n", dev->ops->name,
                dev->n_threads, rates.flops_per_s / 1e9, rates.bytes_per_s / 1e9);
    for (size_t i = 0; rc == 0 && (c = bench_case_at(i)); i++)
        if (!o->op || strcmp(o->op, c->op) == 0)
            rc = bench_case(c, dev, reference, &rates, o->json, out, err);
    return rc;
}

int bench_run(const struct bench_options *o, FILE *out, struct err *err)
{
    struct device *dev = NULL, *reference = NULL;
    int rc;
    const char *device = o->device ? o->device : "cpu";
    if (o->op && !bench_case_of(o->op))
        return err_set(err, -EINVAL, "op '%s': unknown; without --op all are timed and named",
                       o->op);
    if ((rc = device_open(device, ELEM_F32, o->n_threads, false, &dev, err)) == 0 &&
        (rc = device_cpu_open(1, true, &reference, err)) == 0)
        rc = bench_all(o, dev, reference, out, err);
    if (dev)
        dev->ops->close(dev);
    if (reference)
        reference->ops->close(reference);
    return rc;
}
