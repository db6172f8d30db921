/* pool.c - the one pool of compute threads
 *
 * Everything a thread needs to take a task is one 64-bit word, the ticket: the number of the job
 * above, the tasks not yet taken below. A thread takes one by lowering it with compare-and-swap,
 * so a thread that wakes late finds no task left or a newer job, never a stale one; and while it
 * holds a task the job cannot end, so fn and arg stay. */
#include "kernels/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/progress.h"

#define THREADS_MAX 256u
#define SPINS       1000 /* pauses of 40 to 50 ns each */

struct pool {
    _Atomic uint64_t ticket;
    _Atomic uint32_t job;     /* futex of the threads: the ticket's upper half */
    _Atomic uint32_t n_left;  /* futex of the caller: tasks not yet finished */
    _Atomic uint32_t sleepers;
    _Atomic bool     ending;
    uint32_t n_tasks;
    pool_fn  fn;
    void    *arg;
    uint32_t n_threads; /* with the caller */
    struct pool_thread {
        struct pool *pool;
        pthread_t    handle;
        uint32_t     index;
    } threads[];
};

static void futex_wait(_Atomic uint32_t *word, uint32_t while_value)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, while_value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Takes tasks of the current job until none is left. */
static void work(struct pool *p, uint32_t thread)
{
    uint64_t ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    while ((uint32_t)ticket > 0) {
        if (!atomic_compare_exchange_weak_explicit(&p->ticket, &ticket, ticket - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        p->fn(p->arg, p->n_tasks - (uint32_t)ticket, thread);
        progress_made();
        if (atomic_fetch_sub_explicit(&p->n_left, 1, memory_order_acq_rel) == 1)
            futex_wake_all(&p->n_left);
        ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    }
}

/* Returns when the job is no longer seen, spinning first. */
static void wait_for_job(struct pool *p, uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&p->job, memory_order_acquire) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->job) == seen)
        futex_wait(&p->job, seen);
    atomic_fetch_sub(&p->sleepers, 1);
}

static void *thread_main(void *arg)
{
    struct pool_thread *t = arg;
    struct pool *p = t->pool;
    uint32_t seen = 0;
    for (;;) {
        wait_for_job(p, seen);
        seen = atomic_load_explicit(&p->job, memory_order_acquire);
        if (atomic_load_explicit(&p->ending, memory_order_acquire))
            return NULL;
        work(p, t->index);
    }
}

/* Publishes the next job and wakes who sleeps. */
static void announce(struct pool *p, uint32_t n_tasks)
{
    uint32_t job = atomic_load_explicit(&p->job, memory_order_relaxed) + 1;
    atomic_store_explicit(&p->ticket, (uint64_t)job << 32 | n_tasks, memory_order_release);
    atomic_store(&p->job, job);
    if (atomic_load(&p->sleepers) > 0)
        futex_wake_all(&p->job);
}

static uint32_t cores_allowed(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (uint32_t)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

struct pool *pool_create(uint32_t n_threads)
{
    if (n_threads == 0)
        n_threads = cores_allowed();
    if (n_threads > THREADS_MAX)
        n_threads = THREADS_MAX;
    struct pool *p = xcalloc(1, sizeof *p + n_threads * sizeof p->threads[0]);
    p->n_threads = 1;
    for (uint32_t i = 1; i < n_threads; i++) {
        struct pool_thread *t = &p->threads[i];
        t->pool = p;
        t->index = i;
        if (pthread_create(&t->handle, NULL, thread_main, t) != 0)
            break;
        p->n_threads = i + 1;
    }
    return p;
}

void pool_destroy(struct pool *p)
{
    if (!p)
        return;
    atomic_store(&p->ending, true);
    announce(p, 0);
    for (uint32_t i = 1; i < p->n_threads; i++)
        pthread_join(p->threads[i].handle, NULL);
    free(p);
}

void pool_run(struct pool *p, uint32_t n_tasks, pool_fn fn, void *arg)
{
    if (n_tasks == 1 || p->n_threads == 1) {
        for (uint32_t task = 0; task < n_tasks; task++) {
            fn(arg, task, 0);
            progress_made();
        }
        return;
    }
    if (n_tasks == 0)
        return;
    p->fn = fn;
    p->arg = arg;
    p->n_tasks = n_tasks;
    atomic_store_explicit(&p->n_left, n_tasks, memory_order_relaxed);
    announce(p, n_tasks);
    work(p, 0);
    uint32_t left;
    for (int i = 0; (left = atomic_load_explicit(&p->n_left, memory_order_acquire)) > 0; i++) {
        if (i < SPINS)
            relax();
        else
            futex_wait(&p->n_left, left);
    }
}

uint32_t pool_n_threads(const struct pool *p)
{
    return p->n_threads;
}
