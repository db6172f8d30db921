/* pool.h - the one pool of compute threads
 *
 * The caller takes part. Idle threads spin for some microseconds, because the next op of a step
 * follows at once, and then sleep, so that a trainer that waits takes no CPU. Which thread runs a
 * task depends on timing, so a task's result must depend on its number alone. */
#ifndef KERNELS_POOL_H
#define KERNELS_POOL_H

#include <stdint.h>

struct pool;

/* thread counts from 0 (the caller) and is for scratch only. */
typedef void (*pool_fn)(void *arg, uint32_t task, uint32_t thread);

/* n_threads 0: as many as this process may run on. Never NULL: threads the system refuses are
 * left out. */
struct pool *pool_create(uint32_t n_threads);
void pool_destroy(struct pool *p);

/* Calls fn for every task below n_tasks and returns when all are done. One caller at a time. */
void pool_run(struct pool *p, uint32_t n_tasks, pool_fn fn, void *arg);

/* Threads including the caller. */
uint32_t pool_n_threads(const struct pool *p);

#endif
