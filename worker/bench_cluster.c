/* bench_cluster.c - measures a machine as plans see it: a cluster.yaml
 *
 * Ranks are processes, and measure at the same time, as they compute when they train: on a CPU
 * they share its memory. Products are timed with wide and narrow matrices and with many and few
 * rows, from which follow the rate of large ones and the sizes at which half of it is reached. On
 * a GPU recurrences and attention keep the shares of products that they have on the GPU on which
 * they were tuned, as the shapes of bench are too small for one. */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/cluster.h"
#include "common/host_memory.h"
#include "common/mem.h"
#include "worker/bench.h"
#include "worker/bench_cases.h"
#include "worker/coll_choose.h"

#define MEET_NS      (60 * NS_PER_S)
#define CALLS        15
#define TUNED        700.0 /* TFLOP/s of products of the GPU that the presets are of */
#define RESERVE_CPU  (64ull << 20)
#define SHARE_BYTES  (4u << 20) /* that a rank sends to another in one call */

struct bed {
    struct device *dev;
    struct coll *coll; /* NULL: one rank */
    bool is_gpu;
    int  scale;        /* of shapes */
};

/* ---- ops ------------------------------------------------------------------------------------ */

static int meet(struct bed *b, struct err *err)
{
    return b->coll ? b->coll->ops->barrier(b->coll, &b->coll->world_group, err) : 0;
}

/* Seconds of a call of a case at another shape, the mean over the ranks; 0 dims keep their own. */
static int time_op(struct bed *b, const char *op, int64_t n, int64_t d, int64_t m, double *out,
                   struct bench_case *out_case, struct err *err)
{
    struct bench_case c = *bench_case_of(op);
    c.n = n ? n : c.n;
    c.d = d ? d : c.d;
    c.m = m ? m : c.m;
    c.declare(&c, b->dev);
    int rc = meet(b, err);
    if (rc == 0)
        rc = bench_time(&c, b->dev, out, err);
    if (rc == 0 && b->coll)
        rc = b->coll->ops->all_reduce_f64(b->coll, &b->coll->world_group, COLL_SUM, out, 1, err);
    if (rc == 0 && b->coll)
        *out /= b->coll->world;
    if (out_case)
        *out_case = c;
    return rc;
}

/* A product with its two gradients, as a layer computes it: operations a second. */
static int time_products(struct bed *b, const char *const ops[3], int64_t n, int64_t d, int64_t m,
                         double *out_rate, struct err *err)
{
    struct bench_case c;
    double all = 0, one, flops = 0;
    for (int i = 0; i < 3; i++) {
        int rc = time_op(b, ops[i], n, d, m, &one, &c, err);
        if (rc < 0)
            return rc;
        all += one;
        flops += c.flops;
    }
    *out_rate = flops / all;
    return 0;
}

/* Rates at sizes a < b of what is reached by 1 / (1 + half / size). */
static double half_of(double rate_a, double a, double rate_b, double b)
{
    double ratio = rate_b / rate_a;
    double half = (ratio - 1) / (1 / a - ratio / b);
    return ratio <= 1 ? 0 : half > 0 && half < b ? half : b;
}

static int measure_products(struct bed *b, struct cluster *l, struct err *err)
{
    static const char *const dense[] = {"linear", "linear_dx", "linear_dw"};
    static const char *const grouped[] = {"grouped_linear", "grouped_linear_dx",
                                          "grouped_linear_dw"};
    const int64_t many = 2048 * b->scale, few = 16 * b->scale;
    const int64_t wide = b->is_gpu ? 4096 : 768, narrow = b->is_gpu ? 1024 : 32;
    const int64_t slots = many * 4, in = b->is_gpu ? 2048 : 256, inter = in / 2;
    double large, slim, low, experts, of_slots = (double)slots / 32;
    int rc;
    if ((rc = time_products(b, dense, many, wide, wide, &large, err)) < 0 ||
        (rc = time_products(b, dense, many, narrow, narrow, &slim, err)) < 0 ||
        (rc = time_products(b, dense, few, wide, wide, &low, err)) < 0 ||
        (rc = time_products(b, grouped, slots, in, inter, &experts, err)) < 0)
        return rc;
    l->half_width = half_of(slim, (double)narrow, large, (double)wide);
    l->half_rows = half_of(low, (double)few, large, (double)many);
    l->product_tflops = large * (1 + l->half_width / (double)wide) *
                        (1 + l->half_rows / (double)many) / 1e12;
    l->grouped_tflops = experts * (1 + l->half_width / sqrt((double)(in * inter))) *
                        (1 + l->half_rows / of_slots) / 1e12;
    if (!b->is_gpu) {
        l->product_f32_tflops = l->product_tflops;
        l->peak_tflops = large / 1e12;
    }
    return 0;
}

/* On a CPU at the shapes of bench: 2,048 tokens, 4 heads of 64. */
static int measure_sequences(struct bed *b, struct cluster *l, struct err *err)
{
    double forward, both;
    struct bench_case c;
    int rc;
    if (b->is_gpu) {
        double share = l->product_tflops / TUNED;
        l->attention_tflops *= share;
        l->attention_back_tflops *= share;
        l->scan_ns /= share;
        l->scan_back_ns /= share;
        return 0;
    }
    if ((rc = time_op(b, "attention", 0, 0, 0, &forward, &c, err)) < 0 ||
        (rc = time_op(b, "attention+backward", 0, 0, 0, &both, NULL, err)) < 0)
        return rc;
    const double dims = CLUSTER_TIMED_DIMS; /* of a key and a value */
    assert(dims == (double)(2 * c.d + c.m));
    l->attention_tflops = c.flops * (1 + CLUSTER_SOFTMAX_DIMS / dims) / forward / 1e12;
    l->attention_back_tflops = 2.5 * c.flops * (1 + CLUSTER_SOFTMAX_BACK_DIMS / dims) /
                               fmax(both - forward, forward) / 1e12;
    if ((rc = time_op(b, "kda_forward", 0, 0, 0, &forward, &c, err)) < 0 ||
        (rc = time_op(b, "kda_forward+backward", 0, 0, 0, &both, NULL, err)) < 0)
        return rc;
    double d = (double)c.d, head = cluster_scan_work(d, d) / cluster_scan_work(128, 128);
    double units = (double)c.n * 4 * head;
    l->scan_ns = forward / units * 1e9;
    l->scan_back_ns = fmax(both - forward, forward) / units * 1e9;
    return 0;
}

static int measure_memory(struct bed *b, struct cluster *l, struct err *err)
{
    static const struct { const char *op; bool is_free; } between[] = { /* free: of documents */
        {"rms_norm", true}, {"rms_norm_backward", true}, {"swiglu", true},
        {"swiglu_backward", true}, {"sigmoid_gate", true}, {"sigmoid_gate_backward", true},
        {"situ", true}, {"situ_backward", true}, {"combine", true}, {"kda_gate", true},
        {"kda_gate_backward", true}, {"short_conv", false}, {"short_conv_backward", false},
    };
    double seconds, all = 0, bytes = 0;
    struct bench_case c;
    int rc;
    for (size_t i = 0; i < sizeof between / sizeof *between; i++) {
        int64_t n = between[i].is_free ? 8192 * b->scale : 0;
        if ((rc = time_op(b, between[i].op, n, 0, 0, &seconds, &c, err)) < 0)
            return rc;
        all += seconds;
        bytes += c.bytes * (double)elem_size(b->dev) / sizeof(float);
    }
    l->pointwise_tb_per_s = bytes / all / 1e12;
    if ((rc = time_op(b, "adamw", 0, 0, 0, &seconds, &c, err)) < 0)
        return rc;
    l->optimizer_tb_per_s = c.bytes / seconds / 1e12;
    if ((rc = time_op(b, "axpy", 1, 16, 0, &seconds, NULL, err)) < 0)
        return rc;
    l->launch_us = seconds * 1e6;
    return 0;
}

/* ---- links ---------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of sending n_bytes to each of all ranks. */
static int time_exchange(struct bed *b, void *send, void *recv, size_t n_bytes, double *out,
                         struct err *err)
{
    struct coll *c = b->coll;
    int64_t *rows = xcalloc(c->world, sizeof *rows);
    double seconds[CALLS];
    int rc = 0;
    for (uint32_t i = 0; i < c->world; i++)
        rows[i] = 1;
    for (int i = 0; rc == 0 && i < CALLS; i++) {
        if ((rc = meet(b, err)) < 0)
            break;
        uint64_t began = clock_now_ns();
        rc = coll_all_to_all_rows(c, &c->world_group, send, rows, recv, rows, n_bytes, err);
        b->dev->ops->synchronize(b->dev);
        seconds[i] = (double)(clock_now_ns() - began) / NS_PER_S;
    }
    free(rows);
    if (rc < 0)
        return rc;
    qsort(seconds, CALLS, sizeof *seconds, by_value);
    *out = seconds[CALLS / 2];
    return c->ops->all_reduce_f64(c, &c->world_group, COLL_MAX, out, 1, err);
}

static int measure_links(struct bed *b, struct cluster *l, struct err *err)
{
    struct coll *c = b->coll;
    double large, small;
    if (!c)
        return 0;
    void *send = c->ops->alloc(c, (size_t)SHARE_BYTES * c->world);
    void *recv = c->ops->alloc(c, (size_t)SHARE_BYTES * c->world);
    int rc = send && recv ? 0 : err_set(err, -ENOMEM, "bench: no memory for exchanged rows");
    if (rc == 0 && (rc = time_exchange(b, send, recv, 64, &small, err)) == 0 &&
        (rc = time_exchange(b, send, recv, SHARE_BYTES, &large, err)) == 0) {
        double bytes = (double)SHARE_BYTES * (c->world - 1);
        l->call_us = small * 1e6;
        l->node_gb_per_s = bytes / fmax(large - small, large / 4) / 1e9;
    }
    c->ops->free(c, send);
    c->ops->free(c, recv);
    return rc;
}

/* ---- ranks ---------------------------------------------------------------------------------- */

static int measure(struct bed *b, struct cluster *l, struct err *err)
{
    int rc;
    if ((rc = measure_products(b, l, err)) < 0 || (rc = measure_sequences(b, l, err)) < 0 ||
        (rc = measure_memory(b, l, err)) < 0)
        return rc;
    return measure_links(b, l, err);
}

static void describe(const struct bench_options *o, const struct bed *b, struct cluster *l)
{
    uint32_t world = b->coll ? b->coll->world : 1;
    struct device_memory m = {0};
    b->dev->ops->memory(b->dev, &m);
    free(l->name);
    free(l->device);
    l->name = xstrdup(b->is_gpu ? "measured-gpus" : "measured-cpus");
    l->device = xstrdup(b->is_gpu ? "cuda" : "cpu");
    l->nodes = 1;
    l->gpus_per_node = world;
    l->host_memory = host_memory().total;
    l->gpu_memory = b->is_gpu ? m.total : l->host_memory / world;
    if (!b->is_gpu)
        l->gpu_reserve = RESERVE_CPU;
    (void)o;
}

static int open_bed(const struct bench_options *o, const uint8_t id[16], uint32_t rank,
                    struct bed *b, struct err *err)
{
    uint32_t world = o->n_ranks;
    char name[32], said[COLL_SAID_BYTES];
    struct layout layout = {0};
    int rc;
    b->is_gpu = o->device && !strncmp(o->device, "cuda", 4);
    b->scale = b->is_gpu ? 16 : 1;
    snprintf(name, sizeof name, "cpu");
    if (b->is_gpu)
        snprintf(name, sizeof name, "cuda:%u", rank);
    struct coll_host_config config = {.id = id, .rank = rank, .world = world,
                                      .open_timeout_ns = MEET_NS, .call_timeout_ns = MEET_NS};
    if (world > 1 && (rc = coll_host_open(&config, &b->coll, err)) < 0)
        return rc;
    if ((rc = device_open(name, b->is_gpu ? ELEM_BF16 : ELEM_F32, o->n_threads, false, &b->dev,
                          err)) < 0 || !b->coll)
        return rc;
    b->coll->dev = b->dev;
    rc = layout_init((struct layout_degrees){world, 1, 1, 0}, 1, rank, &layout, err);
    if (rc == 0)
        rc = coll_choose(&b->coll, b->dev, COLL_WISH_AUTO, &layout, said, err);
    layout_fini(&layout);
    return rc;
}

static int run_rank(const struct bench_options *o, const uint8_t id[16], uint32_t rank, FILE *out,
                    struct err *err)
{
    struct bed b = {0};
    struct cluster l;
    fields_init(&cluster_table, &l);
    int rc = open_bed(o, id, rank, &b, err);
    if (rc == 0)
        rc = measure(&b, &l, err);
    if (rc == 0 && rank == 0) {
        describe(o, &b, &l);
        fprintf(out, "# Measured by ballast-worker bench --cluster%s\n",
                b.coll ? ", all ranks at the same time." : " with one rank: node_gb_per_s and "
                "call_us are presets.");
        fprintf(out, "# network_gb_per_s, latency_us and host_gb_per_s are presets%s.\n",
                b.is_gpu ? ", and what attention and recurrences reach is in proportion" : "");
        fields_print_yaml(&cluster_table, &l, out);
    }
    fields_fini(&cluster_table, &l);
    if (b.coll)
        b.coll->ops->close(b.coll);
    if (b.dev)
        b.dev->ops->close(b.dev);
    return rc;
}

/* Of a rank other than the first: its error goes to the terminal. */
static _Noreturn void be_rank(const struct bench_options *o, const uint8_t id[16], uint32_t rank)
{
    struct err err = {0};
    int rc = run_rank(o, id, rank, NULL, &err);
    if (rc < 0)
        fprintf(stderr, "ballast-worker: rank %u: %s\n", rank, err.text);
    _exit(rc < 0);
}

int bench_cluster(const struct bench_options *o, FILE *out, struct err *err)
{
    uint8_t id[16];
    pid_t ranks[RANKS_HERE_MAX];
    int rc, status;
    if (getrandom(id, sizeof id, 0) != sizeof id)
        return err_set(err, -EIO, "bench: no random numbers");
    fflush(NULL);
    for (uint32_t r = 1; r < o->n_ranks; r++)
        if ((ranks[r] = fork()) == 0)
            be_rank(o, id, r);
    rc = run_rank(o, id, 0, out, err);
    for (uint32_t r = 1; r < o->n_ranks; r++)
        if (ranks[r] > 0 && waitpid(ranks[r], &status, 0) == ranks[r] && status != 0 && rc == 0)
            rc = err_set(err, -EIO, "bench: rank %u failed", r);
    return rc;
}
