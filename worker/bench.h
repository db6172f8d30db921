/* bench.h - times every op of a device beside the floor that the machine sets
 *
 * floor_ms is the larger of operations over the best rate of a large product and least bytes over
 * the best rate of a large update, both measured first on the same device. Small tensors live in
 * the caches, so a ratio below 1 is possible there. */
#ifndef WORKER_BENCH_H
#define WORKER_BENCH_H

#include <stdio.h>

#include "common/err.h"
#include "common/types.h"

struct bench_options {
    const char *op;        /* only ops of this name; NULL: all */
    const char *device;    /* "cpu" or "cuda:N"; NULL: cpu */
    uint32_t    n_threads; /* 0: all cores */
    bool        json;      /* one object a line, else a table */
    uint32_t    n_ranks;   /* of bench_cluster: processes of this machine, 1 to RANKS_HERE_MAX */
};

#define RANKS_HERE_MAX 64u

/* Writes one line per op and shape to out. error_vs_reference is the relative distance of the
 * outputs from those of the CPU definitions on one thread with products in fixed order.
 * -EINVAL for an unknown op or device. */
int bench_run(const struct bench_options *o, FILE *out, struct err *err);

/* Measures the machine with n_ranks ranks at once, each with n_threads threads or, where device is
 * "cuda", a GPU of its own, and writes a cluster.yaml to out. */
int bench_cluster(const struct bench_options *o, FILE *out, struct err *err);

/* The command; argv[0] is "bench". Returns the exit code. */
int bench_main(int argc, char **argv);

struct bench_case;
struct device;

/* Least seconds of one call of a declared case; of a CPU with one thread, of that thread.
 * -ENOMEM */
int bench_time(const struct bench_case *c, struct device *dev, double *out_seconds,
               struct err *err);

#endif
