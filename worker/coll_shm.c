/* coll_shm.c - shared memory among the ranks of one machine, and waiting in it
 *
 * Waiting decides the speed of small operations. Where every rank has a core, a rank spins for
 * some microseconds before it sleeps on a futex; where ranks share cores it offers its core to the
 * others at once, because the member it waits for may need just that one. */
#include "worker/coll_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/progress.h"

#define LOOK_AROUND_NS (100 * NS_PER_MS) /* between looks at sockets and deadline while asleep */
#define LOOKS_TO_LEAVE 30u
#define SPINS 2000u
#define YIELDS 32u

enum abort_phase { ABORT_NONE, ABORT_WRITING, ABORT_SAID };

/* At the start of the memory. */
struct shm_header {
    _Atomic uint32_t abort_phase;
    _Atomic uint32_t n_gone; /* ranks of other hosts */
    char abort_text[512];
    _Atomic uint64_t cores[CPU_SETSIZE / 64]; /* a bit for each that some rank may use */
};

static struct shm_header *header_of(const struct shm *s)
{
    return (struct shm_header *)s->base;
}

struct shm_rank *shm_rank_of(const struct shm *s, uint32_t rank)
{
    return (struct shm_rank *)(s->base + s->ranks_at + rank * s->rank_stride);
}

int64_t *shm_rows_of(const struct shm *s, uint32_t rank, uint32_t group, uint32_t meeting)
{
    return (int64_t *)(shm_rank_of(s, rank) + 1) +
           (size_t)(group * COLL_OPEN_MAX + meeting) * s->world;
}

uint8_t *shm_small_of(const struct shm *s, uint32_t group, uint32_t meeting)
{
    return (uint8_t *)shm_rank_of(s, s->rank) + s->small_at +
           (size_t)(group * COLL_OPEN_MAX + meeting) * SHM_SMALL_BYTES;
}

uint32_t shm_count_here(const struct shm *s, const struct coll_group *g, uint32_t *out_first)
{
    uint32_t n = 0;
    *out_first = g->ranks[0];
    if (s->n_here == s->world)
        return g->n_ranks;
    for (uint32_t i = g->n_ranks; i-- > 0;)
        if (shm_is_here(s, g->ranks[i])) {
            *out_first = g->ranks[i];
            n++;
        }
    return n;
}

uint8_t *shm_arena_of(const struct shm *s, uint32_t rank)
{
    return s->base + s->arenas_at + s->places[rank] * s->arena_bytes;
}

void *shm_alloc(struct shm *s, size_t n_bytes)
{
    size_t rounded = (n_bytes + 63) & ~(size_t)63, used = atomic_load(&s->arena_used);
    do {
        if (rounded < n_bytes || rounded > s->arena_bytes - used)
            return NULL;
    } while (!atomic_compare_exchange_weak(&s->arena_used, &used, used + rounded));
    atomic_fetch_add(&s->n_allocs, 1);
    return shm_arena_of(s, s->rank) + used;
}

/* ---- where a rank is ------------------------------------------------------------------------ */

const char *shm_op_name(enum shm_op op)
{
    static const char *const names[] = {
        [SHM_NONE] = "nothing", [SHM_BARRIER] = "barrier", [SHM_ALL_GATHER] = "all_gather",
        [SHM_REDUCE_SCATTER] = "reduce_scatter", [SHM_ALL_REDUCE] = "all_reduce",
        [SHM_ALL_REDUCE_F64] = "all_reduce_f64", [SHM_ALL_GATHER_I32] = "all_gather_i32",
        [SHM_ALL_TO_ALL_ROWS] = "all_to_all",
    };
    return op < sizeof names / sizeof *names ? names[op] : "?";
}

/* "all_reduce 812 of layer 7 (group 1)" */
static void describe(const struct shm *s, uint32_t rank, char *out_text, size_t n_bytes)
{
    struct shm_rank *r = shm_rank_of(s, rank);
    uint32_t at = atomic_load(&r->at);
    if (at == 0) {
        snprintf(out_text, n_bytes, "before its first operation");
        return;
    }
    struct shm_record *rec = &r->ring[(at - 1) % SHM_RING];
    int32_t layer = atomic_load(&rec->layer);
    char of[32] = "";
    if (layer >= 0)
        snprintf(of, sizeof of, " of layer %d", layer);
    snprintf(out_text, n_bytes, "%s %s %u%s (group %u)",
             atomic_load(&rec->left_ns)    ? "computing after"
             : atomic_load(&rec->is_ahead) ? "computing after the start of"
                                           : "at",
             shm_op_name(atomic_load(&rec->op)), atomic_load(&rec->number), of,
             atomic_load(&rec->group));
}

/* ---- abort ---------------------------------------------------------------------------------- */

/* Whoever goes to sleep meanwhile looks again before long. */
static void wake_all(struct shm_count *c)
{
    if (atomic_load(&c->n_sleepers) > 0)
        syscall(SYS_futex, &c->n, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void wake_group(struct shm_group *g)
{
    wake_all(&g->steps);
    for (uint32_t i = 0; i < COLL_OPEN_MAX; i++) {
        wake_all(&g->meetings[i].arrived);
        wake_all(&g->meetings[i].done);
    }
}

void shm_abort(struct shm *s, const char *format, ...)
{
    struct shm_header *h = header_of(s);
    uint32_t none = ABORT_NONE;
    if (!atomic_compare_exchange_strong(&h->abort_phase, &none, ABORT_WRITING))
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(h->abort_text, sizeof h->abort_text, format, args);
    va_end(args);
    atomic_store(&h->abort_phase, ABORT_SAID);
    for (uint32_t r = 0; r < s->world; r++)
        for (uint32_t g = 0; g < COLL_GROUPS_MAX; g++)
            wake_group(&shm_rank_of(s, r)->groups[g]);
}

int shm_check(const struct shm *s, struct err *err)
{
    const struct shm_header *h = header_of(s);
    uint32_t phase = atomic_load_explicit(&h->abort_phase, memory_order_acquire);
    if (phase == ABORT_NONE)
        return 0;
    /* Whoever writes the text may itself be killed in the middle: wait, but not for long. */
    for (uint32_t i = 0; phase == ABORT_WRITING && i < 50; i++) {
        nanosleep(&(struct timespec){.tv_nsec = NS_PER_MS}, NULL);
        phase = atomic_load_explicit(&h->abort_phase, memory_order_acquire);
    }
    char at[128];
    describe(s, s->rank, at, sizeof at);
    return err_set(err, -ECANCELED, "%s; rank %u was %s",
                   phase == ABORT_SAID ? h->abort_text : "a rank gave up", s->rank, at);
}

static void tell_end(struct shm *s, uint32_t rank)
{
    char at[128];
    describe(s, rank, at, sizeof at);
    shm_abort(s, "rank %u has %s, %s", rank,
              atomic_load(&shm_rank_of(s, rank)->has_left) ? "left" : "died", at);
}

void shm_note_gone(struct shm *s, uint32_t rank)
{
    if (!atomic_exchange(&shm_rank_of(s, rank)->is_gone, 1))
        atomic_fetch_add(&header_of(s)->n_gone, 1);
}

/* One that has left in order may have left something behind that is still on its way. */
static void look_far(struct shm *s)
{
    bool is_any = atomic_load(&header_of(s)->n_gone) > 0;
    s->n_looks_gone += is_any;
    for (uint32_t r = 0; is_any && r < s->world; r++) {
        const struct shm_rank *rank = shm_rank_of(s, r);
        if (atomic_load(&rank->is_gone) &&
            (!atomic_load(&rank->has_left) || s->n_looks_gone > LOOKS_TO_LEAVE))
            tell_end(s, r);
    }
}

void shm_note_far(struct shm *s, uint32_t rank, const struct shm_head *head)
{
    struct shm_rank *r = shm_rank_of(s, rank);
    uint32_t i = atomic_load(&r->n_calls);
    struct shm_record *rec = &r->ring[i % SHM_RING];
    atomic_store(&rec->left_ns, 0);
    atomic_store(&rec->op, head->op);
    atomic_store(&rec->group, head->group);
    atomic_store(&rec->number, head->number);
    atomic_store(&rec->layer, head->layer);
    atomic_store(&rec->n, head->n);
    atomic_store(&rec->entered_ns, clock_now_ns());
    atomic_store(&rec->is_ahead, 0);
    atomic_store(&r->n_calls, i + 1);
    atomic_store(&r->at, i + 1);
}

void shm_note_far_left(struct shm *s, uint32_t rank)
{
    struct shm_rank *r = shm_rank_of(s, rank);
    uint32_t n = atomic_load(&r->n_calls);
    if (n > 0)
        atomic_store(&r->ring[(n - 1) % SHM_RING].left_ns, clock_now_ns());
}

bool shm_why(const struct shm *s, char *out_text, size_t n_bytes)
{
    if (atomic_load(&header_of(s)->abort_phase) != ABORT_SAID)
        return false;
    snprintf(out_text, n_bytes, "%s", header_of(s)->abort_text);
    return true;
}

/* The ranks whose sockets are closed have ended: say so to all. */
static void look_around(struct shm *s)
{
    for (uint32_t i = 0; i < s->n_peers; i++) {
        struct pollfd p = {.fd = s->peers[i], .events = POLLIN};
        if (p.fd < 0 || poll(&p, 1, 0) != 1)
            continue;
        tell_end(s, s->rank == s->first ? i : s->first);
    }
}

static bool is_stopped(int peer)
{
    struct ucred who;
    socklen_t n_who = sizeof who;
    char path[64], stat[512];
    if (peer < 0 || getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &who, &n_who) < 0 || who.pid <= 0)
        return false;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)who.pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, stat, sizeof stat - 1);
    if (fd >= 0)
        close(fd);
    stat[n > 0 ? n : 0] = '\0';
    const char *name_end = strrchr(stat, ')'); /* the name may hold anything */
    return name_end && !strncmp(name_end, ") T", 3);
}

/* A stopped member holds its sockets open and computes nothing: it is not waited for as long as
 * one that works. Only time between looks counts, because this rank may have been stopped, too. */
static void look_for_stopped(struct shm *s)
{
    uint64_t now = clock_now_ns(), since = now - s->looked_ns;
    uint32_t i = s->stopped_peer;
    s->looked_ns = now;
    if (!s->stopped_timeout_ns)
        return;
    if (i >= s->n_peers || !is_stopped(s->peers[i])) {
        for (i = 0; i < s->n_peers && !is_stopped(s->peers[i]);)
            i++;
        s->stopped_peer = i;
        s->stopped_ns = 0;
        return;
    }
    s->stopped_ns += since < 2 * LOOK_AROUND_NS ? since : 2 * LOOK_AROUND_NS;
    if (s->stopped_ns < s->stopped_timeout_ns)
        return;
    uint32_t rank = s->rank == s->first ? i : s->first;
    char at[128];
    describe(s, rank, at, sizeof at);
    shm_abort(s, "rank %u has been stopped by a signal for %.0f s, %s", rank,
              (double)s->stopped_ns / NS_PER_S, at);
}

void shm_look(struct shm *s)
{
    if (s->cancelled && atomic_load(s->cancelled))
        shm_abort(s, "rank %u was stopped while the ranks gathered", s->rank);
    if (atomic_exchange(&s->is_looking, true))
        return;
    if (clock_now_ns() - s->looked_ns >= LOOK_AROUND_NS / 2) {
        look_around(s);
        look_far(s);
        look_for_stopped(s);
    }
    atomic_store(&s->is_looking, false);
}

/* ---- waiting -------------------------------------------------------------------------------- */

/* "rank 3 at all_to_all 812 of layer 7, rank 2 at ..." of the members that are elsewhere. */
static void describe_others(const struct shm *s, const struct coll_group *g, char *out_text,
                            size_t n_bytes)
{
    char mine[128], at[128];
    describe(s, s->rank, mine, sizeof mine);
    size_t n = 0, n_named = 0;
    out_text[0] = '\0';
    for (uint32_t i = 0; i < g->n_ranks && n < n_bytes; i++) {
        describe(s, g->ranks[i], at, sizeof at);
        if (strcmp(at, mine) == 0)
            continue;
        if (n_named++ == 4) {
            snprintf(out_text + n, n_bytes - n, ", ...");
            break;
        }
        n += (size_t)snprintf(out_text + n, n_bytes - n, "%srank %u %s", n > 0 ? ", " : "",
                              g->ranks[i], at);
    }
    if (!n_named) /* one of them has stopped in the midst of it */
        snprintf(out_text, n_bytes, "the others, which came to it, too");
}

void shm_give_up(struct shm *s, const struct coll_group *g, uint64_t waited_ns)
{
    char mine[128], others[384];
    describe(s, s->rank, mine, sizeof mine);
    describe_others(s, g, others, sizeof others);
    shm_abort(s, "rank %u waited %.1f s %s for: %s", s->rank, (double)waited_ns / NS_PER_S, mine,
              others);
}

int shm_time_out(struct shm *s, const struct coll_group *g, uint64_t waited_ns, struct err *err)
{
    shm_give_up(s, g, waited_ns);
    shm_check(s, err);
    if (err)
        err->code = -ETIMEDOUT;
    return -ETIMEDOUT;
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
    const struct shm_header *h = header_of(s);
    uint32_t n_cores = 0;
    for (size_t i = 0; i < sizeof h->cores / sizeof *h->cores; i++)
        n_cores += (uint32_t)__builtin_popcountll(
            atomic_load_explicit(&h->cores[i], memory_order_relaxed));
    return n_cores >= s->n_here && !is_quiet ? SPINS : 0;
}

static void tell_cores(struct shm *s)
{
    cpu_set_t mine;
    if (sched_getaffinity(0, sizeof mine, &mine) < 0)
        return;
    for (uint32_t i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &mine))
            atomic_fetch_or(&header_of(s)->cores[i / 64], 1ull << i % 64);
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
        wake_all(c);
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

/* ---- the mapping; coll_meet brings the ranks together --------------------------------------- */

void shm_close(struct shm *s)
{
    if (s->base) {
        atomic_store(&shm_rank_of(s, s->rank)->has_left, 1);
        munmap(s->base, s->map_bytes);
    }
    for (uint32_t i = 0; i < s->n_peers; i++)
        if (s->peers[i] >= 0)
            close(s->peers[i]);
    free(s->peers);
    free(s->places);
    *s = (struct shm){0};
}

void shm_place(struct shm *s, const uint32_t *hosts)
{
    s->places = xcalloc(s->world, sizeof *s->places);
    for (uint32_t r = s->world; r-- > 0;)
        if (!hosts || hosts[r] == hosts[s->rank]) {
            s->first = r;
            s->n_here++;
        } else {
            s->places[r] = SHM_ELSEWHERE;
        }
    for (uint32_t r = 0, n = 0; r < s->world; r++)
        if (shm_is_here(s, r))
            s->places[r] = n++;
}

void shm_plan(struct shm *s, size_t arena_bytes)
{
    const size_t page = 4096;
    s->arena_bytes = arena_bytes;
    s->ranks_at = page;
    size_t n_meetings = (size_t)COLL_GROUPS_MAX * COLL_OPEN_MAX;
    size_t rank_bytes = sizeof(struct shm_rank) + n_meetings * s->world * sizeof(int64_t);
    s->small_at = (rank_bytes + page - 1) & ~(page - 1);
    s->rank_stride = s->small_at + n_meetings * SHM_SMALL_BYTES;
    s->arenas_at = s->ranks_at + s->world * s->rank_stride;
    s->map_bytes = s->arenas_at + s->n_here * arena_bytes;
}

int shm_map(struct shm *s, int fd, struct err *err)
{
    void *p = mmap(NULL, s->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED)
        return err_set(err, -errno, "mapping %zu GiB of address space for the collectives: %s",
                       s->map_bytes >> 30, strerror(errno));
    s->base = p;
    tell_cores(s);
    madvise(shm_arena_of(s, s->rank), s->arena_bytes, MADV_HUGEPAGE);
    madvise(s->base, s->map_bytes, MADV_DONTDUMP);
    return 0;
}
