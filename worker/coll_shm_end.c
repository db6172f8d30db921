/* coll_shm_end.c - how ranks learn that a call will never be over, and why
 *
 * The first reason is kept and told to all: a rank that has ended, was stopped by a signal, does
 * not come, or was told to abort. Each rank's flight record says where it was. */
#include "worker/coll_shm_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"

#define LOOKS_TO_LEAVE 30u

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

static void wake_group(struct shm_group *g)
{
    shm_wake(&g->steps);
    for (uint32_t i = 0; i < COLL_OPEN_MAX; i++) {
        shm_wake(&g->meetings[i].arrived);
        shm_wake(&g->meetings[i].done);
    }
}

void shm_abort(struct shm *s, const char *format, ...)
{
    struct shm_header *h = shm_header_of(s);
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
    const struct shm_header *h = shm_header_of(s);
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

bool shm_why(const struct shm *s, char *out_text, size_t n_bytes)
{
    if (atomic_load(&shm_header_of(s)->abort_phase) != ABORT_SAID)
        return false;
    snprintf(out_text, n_bytes, "%s", shm_header_of(s)->abort_text);
    return true;
}

/* ---- who has ended, or was stopped ---------------------------------------------------------- */

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
        atomic_fetch_add(&shm_header_of(s)->n_gone, 1);
}

/* One that has left in order may have left something behind that is still on its way. */
static void look_far(struct shm *s)
{
    bool is_any = atomic_load(&shm_header_of(s)->n_gone) > 0;
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

/* ---- who does not come ---------------------------------------------------------------------- */

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
