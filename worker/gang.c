/* gang.c - one slot, filled by the channel's thread */
#include "worker/gang.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/types.h"

#define SLICE_NS (50 * NS_PER_MS) /* between looks at cancelled */

void gang_init(struct gang *g)
{
    pthread_condattr_t attr;
    *g = (struct gang){0};
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &attr);
    pthread_condattr_destroy(&attr);
}

void gang_fini(struct gang *g)
{
    if (g->all)
        ballast__peers__free_unpacked(g->all, NULL);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
}

void gang_arrive(struct gang *g, const Ballast__Peers *message)
{
    size_t n = ballast__peers__get_packed_size(message);
    uint8_t *bytes = xcalloc(1, n + 1);
    ballast__peers__pack(message, bytes);
    pthread_mutex_lock(&g->lock);
    if (!g->all)
        g->all = ballast__peers__unpack(NULL, n, bytes);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    free(bytes);
}

static struct timespec in_a_slice(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t ns = (uint64_t)t.tv_nsec + SLICE_NS;
    return (struct timespec){.tv_sec = t.tv_sec + (time_t)(ns / NS_PER_S),
                             .tv_nsec = (long)(ns % NS_PER_S)};
}

int gang_wait(struct gang *g, const atomic_bool *cancelled, uint64_t timeout_ns,
               const Ballast__Peers **out_all, struct err *err)
{
    uint64_t end_ns = clock_now_ns() + timeout_ns;
    pthread_mutex_lock(&g->lock);
    while (!g->all && !atomic_load(cancelled) && clock_now_ns() < end_ns) {
        struct timespec until = in_a_slice();
        pthread_cond_timedwait(&g->changed, &g->lock, &until);
    }
    const Ballast__Peers *all = g->all;
    pthread_mutex_unlock(&g->lock);
    if (atomic_load(cancelled))
        return err_set(err, -ECANCELED, "stopped while the ranks gathered");
    if (!all)
        return err_set(err, -ETIMEDOUT, "after %.1f s not all ranks have told where they listen",
                       (double)timeout_ns / NS_PER_S);
    *out_all = all;
    return 0;
}
