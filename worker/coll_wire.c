/* coll_wire.c - what callers post and wait for, and the life of it all */
#include "worker/coll_wire.h"

#include <assert.h>
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/types.h"
#include "worker/coll_wire_parts.h"

#define YIELDS    4u

/* ---- tickets -------------------------------------------------------------------------------- */

void wire_done(struct wire_ticket *t)
{
    atomic_store(&t->done_ns, clock_now_ns());
    if (atomic_fetch_sub(&t->n_open, 1) == 1)
        syscall(SYS_futex, &t->n_open, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

bool wire_wait(struct wire_ticket *t, uint64_t timeout_ns)
{
    uint32_t n = atomic_load(&t->n_open);
    for (uint32_t i = 0; i < YIELDS && n > 0 && timeout_ns > 0; i++) {
        sched_yield();
        n = atomic_load(&t->n_open);
    }
    uint64_t now = clock_now_ns(), end = now + timeout_ns;
    while (n > 0 && now < end) {
        struct timespec left = {.tv_sec = (time_t)((end - now) / NS_PER_S),
                                .tv_nsec = (long)((end - now) % NS_PER_S)};
        syscall(SYS_futex, &t->n_open, FUTEX_WAIT_PRIVATE, n, &left, NULL, 0);
        n = atomic_load(&t->n_open);
        now = clock_now_ns();
    }
    return n == 0;
}

/* ---- posts ---------------------------------------------------------------------------------- */

void wire_wake(struct wire *w)
{
    uint64_t one = 1;
    if (write(w->wake, &one, sizeof one) < 0)
        return; /* it is awake, or will be */
}

void wire_go(struct wire *w)
{
    for (uint32_t i = 0; i < w->n_lanes; i++)
        if (atomic_load(&w->lanes[i].has_posts) && atomic_exchange(&w->lanes[i].is_asleep, false))
            wire_lane_wake(&w->lanes[i]);
}

void wire_send(struct wire *w, uint32_t to, uint64_t tag, const void *data, size_t n_bytes,
               struct wire_ticket *t)
{
    if (!w->has_talker)
        return;
    assert(to < w->world && to != w->rank);
    atomic_fetch_add(&t->n_open, 1);
    struct wire_out_post *p = xcalloc(1, sizeof *p);
    *p = (struct wire_out_post){.to = to, .tag = tag, .data = data, .n = n_bytes, .ticket = t};
    struct lane *l = wire_lane_out(w, to);
    pthread_mutex_lock(&l->lock);
    *l->outs_last = p;
    l->outs_last = &p->next;
    atomic_store(&l->has_posts, true);
    pthread_mutex_unlock(&l->lock);
    if (!atomic_exchange(&w->peers[to].is_wanted, true))
        wire_wake(w);
}

void wire_recv(struct wire *w, uint32_t from, uint64_t tag, void *data, size_t n_bytes,
               struct wire_ticket *t)
{
    if (!w->has_talker)
        return;
    assert(from < w->world && from != w->rank);
    atomic_fetch_add(&t->n_open, 1);
    struct wire_in_post *p = xcalloc(1, sizeof *p);
    *p = (struct wire_in_post){.from = from, .tag = tag, .data = data, .n = n_bytes, .ticket = t};
    struct lane *l = wire_lane_in(w, from);
    pthread_mutex_lock(&l->lock);
    *l->ins_last = p;
    l->ins_last = &p->next;
    atomic_store(&l->has_posts, true);
    pthread_mutex_unlock(&l->lock);
}

/* ---- life ----------------------------------------------------------------------------------- */

/* Of a rank, which has some of a machine's ranks beside it. */
static uint32_t count_lanes(void)
{
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) / 4 : 1;
    return n < 1 ? 1 : n > WIRE_LANES_MAX ? WIRE_LANES_MAX : (uint32_t)n;
}

int wire_open(const char *address, struct wire **out_wire, struct err *err)
{
    struct wire *w = xcalloc(1, sizeof *w);
    int rc = wire_address_check(address, err);
    w->wake = w->door = -1;
    w->n_lanes = count_lanes();
    for (uint32_t i = 0; i < WIRE_GUESTS_MAX; i++)
        w->guests[i].fd = -1;
    if (rc < 0)
        goto fail;
    w->context = zmq_ctx_new();
    zmq_ctx_set(w->context, ZMQ_MAX_SOCKETS, zmq_ctx_get(w->context, ZMQ_SOCKET_LIMIT));
    if ((w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
        rc = err_set(err, -errno, "eventfd: %s", strerror(errno));
        goto fail;
    }
    if ((rc = wire_make_keys(w, err)) < 0 || (rc = wire_listen_at(w, address, err)) < 0)
        goto fail;
    *out_wire = w;
    return 0;
fail:
    wire_close(w);
    return rc;
}

const char *wire_address(const struct wire *w)
{
    return w->address;
}

const uint8_t *wire_key(const struct wire *w)
{
    return w->key;
}

void wire_join(struct wire *w, uint32_t rank, uint32_t world, const struct wire_peer *peers,
               const struct wire_events *events)
{
    w->rank = rank;
    w->world = world;
    w->events = *events;
    w->peers = xcalloc(world, sizeof *w->peers);
    for (uint32_t r = 0; r < world; r++) {
        struct peer *p = &w->peers[r];
        snprintf(p->address, sizeof p->address, "%s", peers[r].address);
        memcpy(p->key, peers[r].key, WIRE_KEY_BYTES);
        wire_out_init(&p->out);
        wire_in_init(&p->in);
    }
    wire_lanes_open(w);
    w->has_talker = pthread_create(&w->talker, NULL, wire_talk, w) == 0;
    assert(w->has_talker);
}

/* Word of an abort leaves before the links end. */
static void end_sockets(struct wire *w)
{
    void *const sockets[] = {w->listener, w->zap};
    for (uint32_t r = 0; r < w->world; r++) {
        if (w->peers[r].dealer)
            zmq_close(w->peers[r].dealer);
        w->peers[r].dealer = NULL;
    }
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++)
        if (sockets[i])
            zmq_close(sockets[i]);
    while (w->context && zmq_ctx_term(w->context) < 0 && errno == EINTR)
        ;
    w->context = w->listener = w->zap = NULL;
}

void wire_stop(struct wire *w)
{
    if (!w->has_talker)
        return;
    wire_lanes_end(w);
    atomic_store(&w->is_over, true);
    wire_wake(w);
    pthread_join(w->talker, NULL);
    w->has_talker = false;
    end_sockets(w);
    for (uint32_t r = 0; r < w->world; r++) {
        wire_out_fini(&w->peers[r].out);
        wire_in_fini(&w->peers[r].in);
        seal_destroy(w->peers[r].out_seal);
        explicit_bzero(w->peers[r].in_secret, SEAL_SECRET_BYTES);
    }
}

void wire_close(struct wire *w)
{
    if (!w)
        return;
    wire_stop(w);
    end_sockets(w);
    wire_door_close(w);
    wire_lanes_close(w);
    if (w->wake >= 0)
        close(w->wake);
    free(w->peers);
    explicit_bzero(w->secret, sizeof w->secret);
    free(w);
}
