/* link_send.c - messages to peers: at once, or from a bounded queue while a peer does not read */
#include "common/link_parts.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <zmq.h>

#include "common/mem.h"

#define QUEUE_MESSAGES_MAX 1024 /* of ours for a peer, behind ZeroMQ's */
#define QUEUE_BYTES_MAX    (2u << 20)
#define QUEUE_RETRY_MS     20

struct link_body {
    _Atomic uint32_t n_holders; /* messages on their way, and who made it */
    uint8_t bytes[];
};

struct link_body *link_body_create(size_t n_bytes)
{
    struct link_body *b = xcalloc(1, sizeof *b + n_bytes);
    atomic_store(&b->n_holders, 1);
    return b;
}

uint8_t *link_body_bytes(struct link_body *body)
{
    return body->bytes;
}

void link_body_release(struct link_body *body)
{
    if (body && atomic_fetch_sub(&body->n_holders, 1) == 1)
        free(body);
}

/* On a thread of ZeroMQ. */
static void on_gone(void *bytes, void *body)
{
    (void)bytes;
    link_body_release(body);
}

void link_stop_waiting(struct link *l, struct peer *p)
{
    struct peer **at = &l->waiting;
    while (*at && *at != p)
        at = &(*at)->next_waiting;
    if (*at)
        *at = p->next_waiting;
    p->is_waiting = false;
}

void link_forget(struct link *l, struct peer *p)
{
    link_peer number = p->number;
    if (p->is_waiting)
        link_stop_waiting(l, p);
    peers_remove(&l->peers, p);
    if (l->handler.peer_gone)
        l->handler.peer_gone(l->handler.context, number);
}

static int send_frame(struct link *l, const struct link_frame *f, int flags)
{
    if (!f->body)
        return zmq_send(l->zmq.socket, f->bytes, f->n_bytes, flags);
    zmq_msg_t m;
    atomic_fetch_add(&f->body->n_holders, 1);
    if (zmq_msg_init_data(&m, (void *)f->bytes, f->n_bytes, on_gone, f->body) < 0) {
        link_body_release(f->body);
        return -1;
    }
    int rc = zmq_msg_send(&m, l->zmq.socket, flags);
    int why = errno;
    if (rc < 0)
        zmq_msg_close(&m);
    errno = why;
    return rc;
}

/* 0, or the errno of ZeroMQ; after the first part went the rest cannot fail. */
static int send_now(struct link *l, struct peer *p, const struct link_frame *frames,
                    size_t n_frames)
{
    if (l->is_server && zmq_send(l->zmq.socket, p->id, p->n_id, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return errno;
    for (size_t i = 0; i < n_frames; i++) {
        int more = i + 1 < n_frames ? ZMQ_SNDMORE : 0;
        if (send_frame(l, &frames[i], more | ZMQ_DONTWAIT) < 0)
            return errno;
    }
    l->stats.n_sent++;
    return 0;
}

int link_send_queued(struct link *l, struct peer *p)
{
    while (p->first) {
        struct link_frame frames[LINK_FRAMES_MAX];
        const uint8_t *at = p->first->bytes;
        for (size_t i = 0; i < p->first->n_frames; i++) {
            frames[i] = (struct link_frame){at, p->first->frame_bytes[i]};
            at += p->first->frame_bytes[i];
        }
        int rc = send_now(l, p, frames, p->first->n_frames);
        if (rc)
            return rc;
        peer_pop(p);
    }
    return 0;
}

static void on_retry(uv_timer_t *timer)
{
    struct link *l = timer->data;
    for (struct peer *p = l->waiting, *next; p; p = next) {
        next = p->next_waiting;
        int rc = link_send_queued(l, p);
        if (rc == EAGAIN)
            continue;
        if (rc == 0) {
            link_stop_waiting(l, p);
        } else {
            l->stats.n_unreachable++;
            link_forget(l, p);
        }
    }
    if (!l->waiting)
        uv_timer_stop(timer);
}

static void enqueue(struct link *l, struct peer *p, const struct link_frame *frames,
                    size_t n_frames)
{
    peer_push(p, frames, n_frames);
    if (!p->is_waiting) {
        p->is_waiting = true;
        p->next_waiting = l->waiting;
        l->waiting = p;
    }
    if (!uv_is_active((uv_handle_t *)&l->retry))
        uv_timer_start(&l->retry, on_retry, QUEUE_RETRY_MS, QUEUE_RETRY_MS);
}

int link_send(struct link *l, link_peer peer, const struct link_frame *frames, size_t n_frames)
{
    struct peer *p = peers_find(&l->peers, peer);
    if (!p)
        return -EHOSTUNREACH;
    int rc = p->first ? EAGAIN : send_now(l, p, frames, n_frames);
    if (rc == 0)
        return 0;
    if (rc != EAGAIN) {
        l->stats.n_unreachable++;
        link_forget(l, p);
        return -EHOSTUNREACH;
    }
    if (!l->is_server && !l->is_up)
        return -EAGAIN;
    if (p->n_queued >= QUEUE_MESSAGES_MAX || p->queued_bytes >= QUEUE_BYTES_MAX) {
        l->stats.n_dropped_slow++;
        if (l->is_server)
            link_forget(l, p);
        return -ENOBUFS;
    }
    enqueue(l, p, frames, n_frames);
    return 0;
}
