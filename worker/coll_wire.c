/* coll_wire.c - one thread, a ROUTER that listens and a DEALER for each rank that is sent to
 *
 * Callers only append to a list; everything else belongs to the thread. Acknowledgements return on
 * the connection of what they are about. Over it a rank also asks now and then whether the other
 * end still exists: ROUTER says so at once when a connection has ended. */
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

#define LOOK_MS   100
#define FLUSH_NS  (30 * NS_PER_S) /* for data to arrive, at the end */
#define FLUSH_MS  20
#define YIELDS    4u
#define DRAIN_MAX 64 /* messages, before it looks at what to send */
#define IO_MAX    4  /* threads of ZeroMQ's, which encrypt; a connection belongs to one of them */

/* ---- tickets -------------------------------------------------------------------------------- */

void wire_done(struct wire_ticket *t)
{
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

/* ---- the thread ----------------------------------------------------------------------------- */

static void take_posts(struct wire *w)
{
    pthread_mutex_lock(&w->lock);
    struct out *outs = w->posted;
    struct wire_post *posts = w->expected;
    w->posted = NULL;
    w->posted_last = &w->posted;
    w->expected = NULL;
    w->expected_last = &w->expected;
    pthread_mutex_unlock(&w->lock);
    for (struct wire_post *next; posts; posts = next) {
        next = posts->next;
        struct peer *p = &w->peers[posts->from];
        wire_in_expect(&p->in, posts);
        wire_acknowledge(w, p);
    }
    for (struct out *next; outs; outs = next) {
        next = outs->next;
        struct peer *p = &w->peers[outs->to];
        outs->next = NULL;
        *p->last = outs;
        p->last = &outs->next;
        if (!wire_dealer_to(w, outs->to)) {
            char text[WIRE_TEXT_BYTES];
            snprintf(text, sizeof text, "rank %u cannot connect to rank %u at %s: %s", w->rank,
                     outs->to, p->address, zmq_strerror(errno));
            w->events.aborted(w->events.user, text);
        }
    }
}

static size_t fill_items(struct wire *w, bool is_joined)
{
    size_t n = 0;
    w->items[n++] = (zmq_pollitem_t){.fd = w->wake, .events = ZMQ_POLLIN};
    w->items[n++] = (zmq_pollitem_t){.socket = w->monitor, .events = ZMQ_POLLIN};
    if (!is_joined)
        return n;
    w->items[n++] = (zmq_pollitem_t){.socket = w->zap, .events = ZMQ_POLLIN};
    w->items[n++] = (zmq_pollitem_t){.socket = w->listener, .events = ZMQ_POLLIN};
    for (uint32_t i = 0; i < w->n_sent_to; i++) {
        const struct peer *p = &w->peers[w->sent_to[i]];
        w->items[n++] = (zmq_pollitem_t){
            .socket = p->dealer, .events = (short)(ZMQ_POLLIN | (p->is_full ? ZMQ_POLLOUT : 0))};
    }
    return n;
}

static bool have_ends(struct wire *w)
{
    bool any = false;
    char event[64], where[256];
    while (zmq_recv(w->monitor, event, sizeof event, ZMQ_DONTWAIT) >= 0) {
        zmq_recv(w->monitor, where, sizeof where, ZMQ_DONTWAIT);
        any = true;
    }
    return any;
}

/* All that can be done without waiting; false: there is more. */
static bool work(struct wire *w)
{
    int n = 0;
    take_posts(w);
    while (n < DRAIN_MAX && wire_listen_once(w))
        n++;
    for (uint32_t i = 0; i < w->n_sent_to; i++) {
        wire_hear_answers(w, w->sent_to[i]);
        w->peers[w->sent_to[i]].is_full = false;
        wire_send_waiting(w, w->sent_to[i]);
    }
    if (have_ends(w) || clock_now_ns() >= w->ping_ns)
        wire_look_for_ends(w);
    wire_tell_abort(w);
    return n < DRAIN_MAX;
}

static bool has_posts(struct wire *w)
{
    pthread_mutex_lock(&w->lock);
    bool has = w->posted || w->expected;
    pthread_mutex_unlock(&w->lock);
    return has;
}

/* Whether all that was sent has arrived where somebody is left to take it; asks those who owe the
 * answer. */
static bool has_arrived(struct wire *w)
{
    bool all = true;
    for (uint32_t i = 0; i < w->n_sent_to; i++) {
        struct peer *p = &w->peers[w->sent_to[i]];
        if (p->arrived >= p->sent || p->has_left || p->is_gone)
            continue;
        wire_say(p->dealer, KIND_FLUSH, "");
        all = false;
    }
    return all;
}

/* At the end. Who leaves before has told what it got; so does this rank. */
static void flush(struct wire *w)
{
    uint64_t end = clock_now_ns() + FLUSH_NS;
    wire_look_for_ends(w);
    while (!has_arrived(w) && !w->has_told && clock_now_ns() < end) {
        zmq_poll(w->items, (int)fill_items(w, true), FLUSH_MS);
        work(w);
        wire_look_for_ends(w);
    }
    for (uint32_t r = 0; r < w->world; r++)
        wire_answer(w, &w->peers[r], KIND_ACK);
}

static void *wire_main(void *arg)
{
    struct wire *w = arg;
    uint64_t count;
    while (!atomic_load(&w->is_ending)) {
        bool is_idle = work(w);
        size_t n = fill_items(w, true);
        atomic_store(&w->is_asleep, true);
        bool may_sleep = is_idle && !has_posts(w) && !atomic_load(&w->is_ending);
        zmq_poll(w->items, (int)n, may_sleep ? LOOK_MS : 0);
        atomic_store(&w->is_asleep, false);
        if (w->items[0].revents && read(w->wake, &count, sizeof count) < 0)
            continue;
        if (w->items[2].revents)
            wire_admit(w);
    }
    wire_tell_abort(w);
    if (!w->has_told)
        flush(w);
    return NULL;
}

void wire_wake(struct wire *w)
{
    uint64_t one = 1;
    if (write(w->wake, &one, sizeof one) < 0)
        return; /* it is awake, or will be */
}

void wire_go(struct wire *w)
{
    if (atomic_load(&w->is_asleep))
        wire_wake(w);
}

/* ---- posts ---------------------------------------------------------------------------------- */

void wire_send(struct wire *w, uint32_t to, uint64_t tag, const void *data, size_t n_bytes,
               struct wire_ticket *t)
{
    size_t n_pieces = n_bytes ? (n_bytes + WIRE_PIECE_BYTES - 1) / WIRE_PIECE_BYTES : 1;
    if (!w->has_thread)
        return;
    assert(to < w->world && to != w->rank);
    atomic_fetch_add(&t->n_open, (uint32_t)n_pieces);
    struct out *o = xcalloc(1, sizeof *o);
    *o = (struct out){.to = to, .tag = tag, .data = data, .n = n_bytes, .ticket = t};
    pthread_mutex_lock(&w->lock);
    *w->posted_last = o;
    w->posted_last = &o->next;
    pthread_mutex_unlock(&w->lock);
}

void wire_recv(struct wire *w, uint32_t from, uint64_t tag, void *data, size_t n_bytes,
               struct wire_ticket *t)
{
    if (!w->has_thread)
        return;
    assert(from < w->world && from != w->rank);
    atomic_fetch_add(&t->n_open, 1);
    struct wire_post *p = xcalloc(1, sizeof *p);
    *p = (struct wire_post){.from = from, .tag = tag, .data = data, .n = n_bytes, .ticket = t};
    pthread_mutex_lock(&w->lock);
    *w->expected_last = p;
    w->expected_last = &p->next;
    pthread_mutex_unlock(&w->lock);
}

/* ---- life ----------------------------------------------------------------------------------- */

/* Of a rank, which has some of a machine's ranks beside it. */
static int count_io_threads(void)
{
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) / 4 : 1;
    return n < 1 ? 1 : n > IO_MAX ? IO_MAX : n;
}

int wire_open(const char *address, struct wire **out_wire, struct err *err)
{
    struct wire *w = xcalloc(1, sizeof *w);
    int rc = wire_address_check(address, err);
    w->wake = -1;
    pthread_mutex_init(&w->lock, NULL);
    w->posted_last = &w->posted;
    w->expected_last = &w->expected;
    if (rc < 0)
        goto fail;
    w->context = zmq_ctx_new();
    zmq_ctx_set(w->context, ZMQ_IO_THREADS, count_io_threads());
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
    w->sent_to = xcalloc(world, sizeof *w->sent_to);
    w->items = xcalloc(world + 8, sizeof *w->items);
    for (uint32_t r = 0; r < world; r++) {
        struct peer *p = &w->peers[r];
        snprintf(p->address, sizeof p->address, "%s", peers[r].address);
        memcpy(p->key, peers[r].key, WIRE_KEY_BYTES);
        p->last = &p->first;
        wire_in_init(&p->in);
    }
    w->has_thread = pthread_create(&w->thread, NULL, wire_main, w) == 0;
    assert(w->has_thread);
}

static void end_sockets(struct wire *w)
{
    void *const sockets[] = {w->listener, w->zap, w->monitor};
    for (uint32_t i = 0; i < w->n_sent_to; i++) {
        struct peer *p = &w->peers[w->sent_to[i]];
        if (p->has_left || p->is_gone)
            wire_set(p->dealer, ZMQ_LINGER, 0); /* nobody is there to take it */
        else
            wire_say(p->dealer, KIND_BYE, "");
        zmq_close(p->dealer);
        p->dealer = NULL;
    }
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++)
        if (sockets[i])
            zmq_close(sockets[i]);
    while (w->context && zmq_ctx_term(w->context) < 0 && errno == EINTR)
        ;
    w->context = w->listener = w->zap = w->monitor = NULL;
    w->n_sent_to = 0;
}

static void forget_posts(struct wire *w)
{
    for (struct out *o = w->posted, *next; o; o = next) {
        next = o->next;
        free(o);
    }
    for (struct wire_post *p = w->expected, *next; p; p = next) {
        next = p->next;
        free(p);
    }
    for (uint32_t r = 0; r < w->world; r++) {
        for (struct out *o = w->peers[r].first, *next; o; o = next) {
            next = o->next;
            free(o);
        }
        wire_in_fini(&w->peers[r].in);
    }
}

void wire_stop(struct wire *w)
{
    if (!w->has_thread)
        return;
    atomic_store(&w->is_ending, true);
    wire_wake(w);
    pthread_join(w->thread, NULL);
    w->has_thread = false;
    forget_posts(w);
    end_sockets(w);
}

void wire_close(struct wire *w)
{
    if (!w)
        return;
    wire_stop(w);
    end_sockets(w);
    if (w->wake >= 0)
        close(w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w->peers);
    free(w->sent_to);
    free(w->items);
    explicit_bzero(w->secret, sizeof w->secret);
    free(w);
}
