/* bench_coll.c - all_reduce of the ranks of one machine: bench_coll [ranks], one line per size
 *
 * Ranks are processes; the array lies in memory that travels, as gradients do. Each time is the
 * median over calls that begin together. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "worker/coll.h"

#define CALLS 51

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct coll *c, float *x, size_t n_bytes)
{
    double ms[CALLS];
    struct err err = {0};
    size_t n = n_bytes / sizeof *x;
    for (int k = 0; k < CALLS; k++) {
        for (size_t i = 0; i < n; i++)
            x[i] = (float)(i % 1000) * 1e-3f + (float)c->rank;
        int rc = c->ops->barrier(c, &c->world_group, &err);
        uint64_t began = clock_now_ns();
        if (rc == 0)
            rc = c->ops->all_reduce(c, &c->world_group, COLL_SUM, ELEM_F32, x, n, &err);
        ms[k] = (double)(clock_now_ns() - began) / 1e6;
        if (rc < 0) {
            fprintf(stderr, "bench_coll: %s\n", err.text);
            exit(1);
        }
    }
    qsort(ms, CALLS, sizeof *ms, by_value);
    if (c->rank == 0)
        printf("all_reduce ranks=%u MB=%.3f median_ms=%.3f best_ms=%.3f\n", c->world,
               (double)n_bytes / 1e6, ms[CALLS / 2], ms[0]);
}

static int bench_rank(const uint8_t *id, uint32_t rank, uint32_t world)
{
    static const size_t sizes[] = {64, 64000, 1000000, 8000000, 64000000};
    struct coll_host_config config = {.id = id, .rank = rank, .world = world,
                                      .open_timeout_ns = 10 * NS_PER_S};
    struct coll *c = NULL;
    struct err err = {0};
    if (coll_host_open(&config, &c, &err) < 0) {
        fprintf(stderr, "bench_coll: %s\n", err.text);
        return 1;
    }
    float *x = c->ops->alloc(c, sizes[4]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        measure(c, x, sizes[i]);
    c->ops->close(c);
    return 0;
}

int main(int argc, char **argv)
{
    uint32_t world = argc > 1 ? (uint32_t)atoi(argv[1]) : 4;
    uint8_t id[16] = "bench";
    uint32_t pid = (uint32_t)getpid();
    if (world < 1 || world > 64) {
        fprintf(stderr, "usage: bench_coll [ranks, 1 to 64]\n");
        return 2;
    }
    memcpy(id + 8, &pid, sizeof pid);
    for (uint32_t r = 1; r < world; r++)
        if (fork() == 0)
            _exit(bench_rank(id, r, world));
    int rc = bench_rank(id, 0, world);
    for (int status; wait(&status) > 0;)
        rc |= status != 0;
    return rc;
}
