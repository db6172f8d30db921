/* cpu.h - what the CPU ops share: threads, scratch, the split of work
 *
 * Work is cut into tasks by shape alone, never by the number of threads, and sums across tasks
 * are taken in task order; so results do not depend on the threads. */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include <assert.h>

#include "kernels/device.h"

#define CACHE_LINE_BYTES 64

struct cpu_thread {
    float *pack; /* product.c's panels */
    void  *scratch;
    size_t scratch_bytes;
    uint64_t n_grown; /* how often scratch was taken anew */
};

/* Rows begin <= i < end of an op, on one thread. */
typedef void (*cpu_task)(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread);

/* Calls task over [0, n) in pieces of grain (the last one shorter), spread over the threads. */
void cpu_for(struct device *dev, int64_t n, int64_t grain, cpu_task task, void *arg);

/* Rows of d elements a task should have so that starting it costs little beside it. */
int64_t cpu_grain(int64_t d);

/* The calling task's scratch, 64-byte aligned, contents undefined; lives until its next call. */
void *cpu_scratch(struct cpu_thread *thread, size_t n_bytes);

/* The op's scratch, for what its tasks hand to each other; lives until its next call. */
void *cpu_shared(struct device *dev, size_t n_bytes);

/* to[j] += the sum over parts, in order, of from[part * d + j]. */
void cpu_add_parts(struct device *dev, float *to, const float *from, int64_t n_parts, int64_t d);

/* How many pieces of grain n has. */
static inline int64_t cpu_n_tasks(int64_t n, int64_t grain)
{
    return (n + grain - 1) / grain;
}

static inline int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
