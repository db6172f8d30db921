/* progress.c - counters that lose a step now and then, but cost no lock */
#include "common/progress.h"

#include <stddef.h>

static _Atomic uint64_t all;
static _Atomic(_Atomic uint64_t *) shown;

static void count(_Atomic uint64_t *at)
{
    uint64_t n = atomic_load_explicit(at, memory_order_relaxed);
    atomic_store_explicit(at, n + 1, memory_order_relaxed);
}

void progress_made(void)
{
    _Atomic uint64_t *at = atomic_load_explicit(&shown, memory_order_acquire);
    if (at)
        count(at);
    count(&all);
}

void progress_waited(void)
{
    count(&all);
}

void progress_show(_Atomic uint64_t *at)
{
    atomic_store_explicit(&shown, at, memory_order_release);
}

uint64_t progress_count(void)
{
    return atomic_load_explicit(&all, memory_order_relaxed);
}
