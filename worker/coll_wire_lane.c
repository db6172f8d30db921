/* coll_wire_lane.c - the threads that carry data
 *
 * A lane has some of a rank's links, each of which belongs to one lane alone: what goes to a rank,
 * or what comes from it. It seals and opens, and waits for the kernel, never for a caller. Callers
 * append to a list of the lane's; everything else of a link is its lane's, from when the lane first
 * hears of it. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/types.h"
#include "worker/coll_wire_parts.h"
#include "worker/short_turns.h"

#define EVENTS_MAX 32
#define FLUSH_NS   (30 * NS_PER_S) /* for data to leave, at the end */
#define ARRIVE_NS  (2 * NS_PER_S)  /* and to be acknowledged by the other machine */
#define FLUSH_MS   10

struct lane *wire_lane_out(struct wire *w, uint32_t rank)
{
    return &w->lanes[2 * rank % w->n_lanes];
}

struct lane *wire_lane_in(struct wire *w, uint32_t rank)
{
    return &w->lanes[(2 * rank + 1) % w->n_lanes];
}

/* ---- what is waited for ---------------------------------------------------------------------- */

static void watch(struct lane *l, int op, int fd, enum link_kind kind, uint32_t index,
                  uint32_t events)
{
    struct epoll_event e = {.events = events, .data.u64 = (uint64_t)kind << 32 | index};
    epoll_ctl(l->epoll, op, fd, &e);
}

void wire_lane_watch(struct lane *l, int fd, enum link_kind kind, uint32_t index, uint32_t events)
{
    watch(l, EPOLL_CTL_ADD, fd, kind, index, events);
}

void wire_lane_wake(struct lane *l)
{
    uint64_t one = 1;
    if (write(l->wake, &one, sizeof one) < 0)
        return; /* it is awake, or will be */
}

/* ---- links ----------------------------------------------------------------------------------- */

/* The talker says so, in time. */
static void end_link(struct lane *l, int fd, struct peer *p, bool *out_has_ended)
{
    *out_has_ended = true;
    epoll_ctl(l->epoll, EPOLL_CTL_DEL, fd, NULL);
    if (atomic_load(&p->ended_ns) == 0)
        atomic_store(&p->ended_ns, clock_now_ns());
}

static void send_to(struct lane *l, uint32_t rank)
{
    struct peer *p = &l->wire->peers[rank];
    struct wire_out *o = &p->out;
    if (!o->is_up || o->has_ended)
        return;
    int rc = wire_out_push(o);
    bool is_full = rc == -EAGAIN;
    if (rc < 0 && !is_full) {
        end_link(l, o->fd, p, &o->has_ended);
    } else if (is_full != o->is_full) {
        o->is_full = is_full;
        watch(l, EPOLL_CTL_MOD, o->fd, LINK_OUT, rank, is_full ? EPOLLOUT : 0);
    }
}

/* False: there is no connection. */
static bool has_connected(struct lane *l, uint32_t rank)
{
    struct peer *p = &l->wire->peers[rank];
    int error = 0;
    socklen_t n = sizeof error;
    getsockopt(p->out.fd, SOL_SOCKET, SO_ERROR, &error, &n);
    if (error == 0)
        return true;
    p->out.has_ended = true;
    epoll_ctl(l->epoll, EPOLL_CTL_DEL, p->out.fd, NULL);
    wire_fail(l->wire, "rank %u cannot connect to rank %u at %s, port %u for the data: %s",
              l->wire->rank, rank, p->address, p->out_port, strerror(error));
    return false;
}

/* The connection is there, the kernel takes more, or all has ended. */
static void hear_out(struct lane *l, uint32_t rank, uint32_t events)
{
    struct peer *p = &l->wire->peers[rank];
    if (!p->out.is_up && !has_connected(l, rank))
        return;
    if (p->out.is_up && (events & (EPOLLERR | EPOLLHUP))) {
        end_link(l, p->out.fd, p, &p->out.has_ended);
        return;
    }
    if (!p->out.is_up)
        p->out.is_up = p->out.is_full = true;
    send_to(l, rank);
}

static void listen_to(struct lane *l, uint32_t rank)
{
    struct wire *w = l->wire;
    struct peer *p = &w->peers[rank];
    struct wire_in *in = &p->in;
    int rc = wire_in_pull(in);
    if (in->has_left && !atomic_exchange(&p->has_left, true))
        w->events.left(w->events.user, rank);
    if (rc == -EBADMSG)
        wire_fail(w, "rank %u: what comes from rank %u was changed on its way, or is not its: "
                  "refused", w->rank, rank);
    else if (rc == -EPROTO)
        wire_fail(w, "rank %u: rank %u sends what does not fit", w->rank, rank);
    bool is_full = rc == -ENOBUFS;
    if (rc < 0 && rc != -EAGAIN && !is_full) {
        end_link(l, in->fd, p, &in->has_ended);
    } else if (is_full != in->is_full) {
        in->is_full = is_full;
        watch(l, EPOLL_CTL_MOD, in->fd, LINK_IN, rank, is_full ? 0 : EPOLLIN);
    }
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void take_posts(struct lane *l)
{
    struct wire *w = l->wire;
    pthread_mutex_lock(&l->lock);
    struct wire_out_post *outs = l->outs;
    struct wire_in_post *ins = l->ins;
    l->outs = NULL;
    l->outs_last = &l->outs;
    l->ins = NULL;
    l->ins_last = &l->ins;
    atomic_store(&l->has_posts, false);
    pthread_mutex_unlock(&l->lock);
    for (struct wire_in_post *next; ins; ins = next) {
        next = ins->next;
        uint32_t from = ins->from;
        wire_in_expect(&w->peers[from].in, ins);
        if (w->peers[from].in.is_full && !w->peers[from].in.has_ended)
            listen_to(l, from);
    }
    for (struct wire_out_post *next; outs; outs = next) {
        next = outs->next;
        uint32_t to = outs->to;
        wire_out_add(&w->peers[to].out, outs);
        if (!next || next->to != to)
            send_to(l, to);
    }
}

static void hear(struct lane *l, const struct epoll_event *e)
{
    uint32_t index = (uint32_t)e->data.u64;
    uint64_t count;
    switch ((enum link_kind)(e->data.u64 >> 32)) {
    case LINK_WAKE:
        if (read(l->wake, &count, sizeof count) < 0)
            return;
        break;
    case LINK_DOOR:
        wire_door_answer(l->wire);
        break;
    case LINK_GUEST:
        wire_door_hear(l->wire, index);
        break;
    case LINK_OUT:
        hear_out(l, index, e->events);
        break;
    case LINK_IN:
        listen_to(l, index);
        break;
    }
}

static void work(struct lane *l, int timeout_ms)
{
    struct epoll_event events[EVENTS_MAX];
    take_posts(l);
    atomic_store(&l->is_asleep, true);
    int n = epoll_wait(l->epoll, events, EVENTS_MAX, atomic_load(&l->has_posts) ? 0 : timeout_ms);
    atomic_store(&l->is_asleep, false);
    for (int i = 0; i < n; i++)
        hear(l, &events[i]);
}

/* Whether a link has nothing left to carry; once it has not, it says goodbye. */
static bool has_gone(struct wire *w, uint32_t rank, uint64_t *io_arrive_end_ns)
{
    struct peer *p = &w->peers[rank];
    struct wire_out *o = &p->out;
    if (!atomic_load(&p->is_wanted) || o->has_ended || atomic_load(&p->has_left) ||
        atomic_load(&p->ended_ns) > 0)
        return true;
    if (!o->is_up || o->posts || o->at < o->end)
        return false;
    if (!o->has_said_bye) {
        wire_out_say_bye(o);
        *io_arrive_end_ns = clock_now_ns() + ARRIVE_NS;
        return false;
    }
    return wire_out_has_arrived(o) || clock_now_ns() > *io_arrive_end_ns;
}

static void flush(struct lane *l)
{
    struct wire *w = l->wire;
    char text[WIRE_TEXT_BYTES];
    uint64_t end = clock_now_ns() + FLUSH_NS, arrive_end = end;
    for (bool all = false; !all && clock_now_ns() < end;) {
        if (w->events.is_aborted && w->events.is_aborted(w->events.user, text, sizeof text))
            return;
        take_posts(l);
        all = true;
        for (uint32_t r = 0; r < w->world; r++)
            if (wire_lane_out(w, r) == l && !has_gone(w, r, &arrive_end)) {
                all = false;
                send_to(l, r);
            }
        if (!all)
            work(l, FLUSH_MS);
    }
}

static void *lane_main(void *arg)
{
    struct lane *l = arg;
    short_turns_ask();
    while (!atomic_load(&l->wire->is_ending))
        work(l, -1);
    flush(l);
    atomic_fetch_add(&l->wire->n_flushed, 1);
    while (atomic_load(&l->wire->n_flushed) < l->wire->n_lanes)
        work(l, FLUSH_MS); /* what comes still has a taker */
    return NULL;
}

/* ---- life ------------------------------------------------------------------------------------ */

void wire_lanes_open(struct wire *w)
{
    for (uint32_t i = 0; i < w->n_lanes; i++) {
        struct lane *l = &w->lanes[i];
        l->wire = w;
        pthread_mutex_init(&l->lock, NULL);
        l->outs_last = &l->outs;
        l->ins_last = &l->ins;
        l->epoll = epoll_create1(EPOLL_CLOEXEC);
        l->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        assert(l->epoll >= 0 && l->wake >= 0);
        wire_lane_watch(l, l->wake, LINK_WAKE, 0, EPOLLIN);
    }
    wire_lane_watch(&w->lanes[0], w->door, LINK_DOOR, 0, EPOLLIN);
    for (uint32_t i = 0; i < w->n_lanes; i++) {
        struct lane *l = &w->lanes[i];
        l->has_thread = pthread_create(&l->thread, NULL, lane_main, l) == 0;
        assert(l->has_thread);
    }
}

void wire_lanes_end(struct wire *w)
{
    atomic_store(&w->is_ending, true);
    for (uint32_t i = 0; i < w->n_lanes; i++) {
        struct lane *l = &w->lanes[i];
        if (!l->has_thread)
            continue;
        wire_lane_wake(l);
        pthread_join(l->thread, NULL);
        l->has_thread = false;
        for (struct wire_out_post *p = l->outs, *next; p; p = next) {
            next = p->next;
            free(p);
        }
        for (struct wire_in_post *p = l->ins, *next; p; p = next) {
            next = p->next;
            free(p);
        }
    }
}

void wire_lanes_close(struct wire *w)
{
    for (uint32_t i = 0; i < w->n_lanes && w->lanes[i].wire; i++) {
        close(w->lanes[i].epoll);
        close(w->lanes[i].wake);
        pthread_mutex_destroy(&w->lanes[i].lock);
    }
}
