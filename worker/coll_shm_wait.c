/* coll_shm_wait.c - waiting for counts in shared memory
 *
 * Waiting decides the speed of small operations. Where every rank has a core, a rank spins for
 * some microseconds before it sleeps on a futex; where ranks share cores it offers its core to the
 * others at once, because the member it waits for may need just that one. */
#include "worker/coll_shm_parts.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/progress.h"

#define SPINS 2000u
#define YIELDS 32u

void shm_wake(struct shm_count *c)
{
    if (atomic_load(&c->n_sleepers) > 0)
        syscall(SYS_futex, &c->n, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* What the other members of g have done so far; false: some are on another host, unseen. */
static bool look_at_work(const struct shm *s, const struct coll_group *g, uint64_t *out)
{
    *out = 0;
    for (uint32_t i = 0; i < g->n_ranks; i++) {
        if (!shm_is_here(s, g->ranks[i]))
            return false;
        if (i != g->me)
            *out += atomic_load_explicit(&shm_rank_of(s, g->ranks[i])->progress,
                                         memory_order_relaxed);
    }
    return true;
}

bool shm_is_too_long(struct shm *s, const struct coll_group *g, struct shm_patience *p)
{
    uint64_t now = clock_now_ns(), since = now - p->looked_ns, progress;
    uint64_t timeout_ns = s->call_timeout_ns, idle_ns = s->idle_timeout_ns;
    since = since < 2 * LOOK_AROUND_NS ? since : 2 * LOOK_AROUND_NS;
    p->waited_ns += p->looked_ns ? since : 0;
    p->idle_ns += p->looked_ns ? since : 0;
    p->looked_ns = now;
    if (!look_at_work(s, g, &progress) || progress != p->progress) {
        progress_waited(); /* nor is this rank idle then */
        p->progress = progress;
        p->idle_ns = 0;
    }
    return (timeout_ns && p->waited_ns >= timeout_ns) || (idle_ns && p->idle_ns >= idle_ns);
}

bool shm_has_reached(const struct shm_count *c, uint32_t target)
{
    return (int32_t)(atomic_load_explicit(&c->n, memory_order_acquire) - target) >= 0;
}

static _Thread_local bool is_quiet;

void shm_wait_quietly(void)
{
    is_quiet = true;
}

/* A spinning rank must not keep the one that it waits for off its core. A machine may have more
 * cores than its ranks were given. */
static uint32_t count_spins(const struct shm *s)
{
    const struct shm_header *h = shm_header_of(s);
    uint32_t n_cores = 0;
    for (size_t i = 0; i < sizeof h->cores / sizeof *h->cores; i++)
        n_cores += (uint32_t)__builtin_popcountll(
            atomic_load_explicit(&h->cores[i], memory_order_relaxed));
    return n_cores >= s->n_here && !is_quiet ? SPINS : 0;
}

static bool spin(struct shm *s, const struct shm_count *c, uint32_t target)
{
    if (shm_has_reached(c, target))
        return true;
    for (uint32_t i = count_spins(s); i > 0; i--) {
        if (shm_has_reached(c, target))
            return true;
        __builtin_ia32_pause();
    }
    for (uint32_t i = 0; i < YIELDS; i++) {
        if (shm_has_reached(c, target))
            return true;
        sched_yield();
    }
    return false;
}

/* False: a slice is over, and nothing has come. */
static bool sleep_a_slice(struct shm_count *c, uint32_t target)
{
    static const struct timespec slice = {.tv_nsec = LOOK_AROUND_NS};
    long slept = 0;
    int why = 0;
    atomic_fetch_add(&c->n_sleepers, 1);
    uint32_t seen = atomic_load(&c->n);
    if ((int32_t)(seen - target) < 0)
        slept = syscall(SYS_futex, &c->n, FUTEX_WAIT, seen, &slice, NULL, 0);
    if (slept < 0)
        why = errno;
    atomic_fetch_sub(&c->n_sleepers, 1);
    return why != ETIMEDOUT || shm_has_reached(c, target);
}

static int sleep_until(struct shm *s, const struct coll_group *g, struct shm_count *c,
                       uint32_t target, struct err *err)
{
    struct shm_patience patience = {.looked_ns = clock_now_ns()};
    int rc;
    while (!shm_has_reached(c, target)) {
        if ((rc = shm_check(s, err)) < 0)
            return rc;
        if (sleep_a_slice(c, target))
            continue;
        if (!s->is_watched)
            shm_look(s);
        if (shm_is_too_long(s, g, &patience))
            return shm_has_reached(c, target) ? 0 : shm_time_out(s, g, patience.waited_ns, err);
    }
    return 0;
}

void shm_count_up(struct shm_count *c, uint32_t target)
{
    if (atomic_fetch_add(&c->n, 1) + 1 == target)
        shm_wake(c);
}

int shm_wait_for(struct shm *s, const struct coll_group *g, struct shm_count *c, uint32_t target,
                 struct err *err)
{
    /* Where all have come a call succeeds: one of them may have aborted since, for a reason that
     * the others are to find, too. */
    return spin(s, c, target) ? 0 : sleep_until(s, g, c, target, err);
}

int shm_wait_all(struct shm *s, const struct coll_group *g, struct err *err)
{
    uint32_t first, n_here = shm_count_here(s, g, &first);
    struct shm_count *c = &shm_rank_of(s, first)->groups[g->id].steps;
    uint32_t target = ++s->n_steps[g->id] * n_here;
    shm_count_up(c, target);
    return shm_wait_for(s, g, c, target, err);
}
