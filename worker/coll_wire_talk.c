/* coll_wire_talk.c - what is said and heard on the wire's sockets; on its thread alone */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/types.h"
#include "worker/coll_wire_parts.h"

#define COPIED_BYTES 4096u /* smaller pieces are copied */
#define PING_NS      (500 * NS_PER_MS)

/* ---- sending -------------------------------------------------------------------------------- */

static void sent(void *data, void *ticket)
{
    (void)data;
    wire_done(ticket);
}

/* One piece; false: not now. */
static bool send_piece(struct peer *p, struct out *o, size_t n)
{
    struct header h = {.kind = KIND_DATA, .tag = o->tag, .total = o->n, .at = o->at};
    zmq_msg_t m;
    if (zmq_send(p->dealer, &h, sizeof h, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return false;
    if (n <= COPIED_BYTES) {
        zmq_msg_init_size(&m, n);
        if (n > 0)
            memcpy(zmq_msg_data(&m), o->data + o->at, n);
    } else {
        zmq_msg_init_data(&m, (void *)(o->data + o->at), n, sent, o->ticket);
    }
    if (zmq_msg_send(&m, p->dealer, ZMQ_DONTWAIT) < 0)
        zmq_msg_close(&m); /* says that it is sent */
    if (n <= COPIED_BYTES)
        wire_done(o->ticket);
    return true;
}

void wire_send_waiting(struct wire *w, uint32_t rank)
{
    struct peer *p = &w->peers[rank];
    while (p->first && !p->is_full) {
        struct out *o = p->first;
        size_t left = o->n - o->at, n = left < WIRE_PIECE_BYTES ? left : WIRE_PIECE_BYTES;
        if (p->sent - p->acked + wire_cost(n) > WIRE_WINDOW_BYTES)
            return;
        if (!send_piece(p, o, n)) {
            p->is_full = true;
            return;
        }
        p->sent += wire_cost(n);
        o->at += n;
        if (o->at < o->n)
            continue;
        p->first = o->next;
        if (!p->first)
            p->last = &p->first;
        free(o);
    }
}

void wire_say(void *socket, enum kind kind, const char *text)
{
    struct header h = {.kind = kind};
    if (zmq_send(socket, &h, sizeof h, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(socket, text, strlen(text), ZMQ_DONTWAIT);
}

static void say_all(struct wire *w, enum kind kind, const char *text)
{
    for (uint32_t i = 0; i < w->n_sent_to; i++)
        wire_say(w->peers[w->sent_to[i]].dealer, kind, text);
}

/* Back on the connection from it. -EAGAIN: not now, -EHOSTUNREACH: that has ended. */
int wire_answer(struct wire *w, struct peer *p, enum kind kind)
{
    struct header h = {.kind = kind, .total = p->in.consumed, .at = p->in.arrived};
    if (p->n_id == 0)
        return -EAGAIN;
    if (zmq_send(w->listener, p->id, p->n_id, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return -errno;
    zmq_send(w->listener, &h, sizeof h, ZMQ_DONTWAIT);
    return 0;
}

void wire_acknowledge(struct wire *w, struct peer *p)
{
    if (wire_in_owes(&p->in) && wire_answer(w, p, KIND_ACK) == 0)
        p->in.told = p->in.consumed;
}

void wire_look_for_ends(struct wire *w)
{
    w->ping_ns = clock_now_ns() + PING_NS;
    for (uint32_t r = 0; r < w->world; r++) {
        struct peer *p = &w->peers[r];
        wire_acknowledge(w, p);
        if (!p->is_gone && wire_answer(w, p, KIND_PING) == -EHOSTUNREACH) {
            p->is_gone = true;
            w->events.gone(w->events.user, r);
        }
    }
}

void wire_tell_abort(struct wire *w)
{
    char text[WIRE_TEXT_BYTES];
    if (w->has_told || !w->events.is_aborted ||
        !w->events.is_aborted(w->events.user, text, sizeof text))
        return;
    w->has_told = true;
    say_all(w, KIND_ABORT, text);
}

/* ---- receiving ------------------------------------------------------------------------------ */

static void heard_abort(struct wire *w, zmq_msg_t *m)
{
    char text[WIRE_TEXT_BYTES];
    size_t n = zmq_msg_size(m) < sizeof text - 1 ? zmq_msg_size(m) : sizeof text - 1;
    memcpy(text, zmq_msg_data(m), n);
    text[n] = '\0';
    w->events.aborted(w->events.user, text);
}

static void heard(struct wire *w, uint32_t rank, const struct header *h, zmq_msg_t *payload)
{
    struct peer *p = &w->peers[rank];
    if (h->kind == KIND_BYE) {
        p->has_left = true;
        w->events.left(w->events.user, rank);
    } else if (h->kind == KIND_ABORT) {
        heard_abort(w, payload);
    } else if (h->kind == KIND_FLUSH) {
        wire_answer(w, p, KIND_ACK);
    } else if (h->kind != KIND_DATA ||
               wire_in_take(&p->in, h->tag, h->total, h->at, payload) < 0) {
        char text[128];
        snprintf(text, sizeof text, "rank %u: rank %u sends what does not fit", w->rank, rank);
        w->events.aborted(w->events.user, text);
    }
    wire_acknowledge(w, p);
}

/* Whose key it was. */
static bool rank_of(const struct wire *w, zmq_msg_t *m, uint32_t *out_rank)
{
    const char *user = zmq_msg_gets(m, "User-Id");
    char *end = NULL;
    unsigned long rank = user && *user ? strtoul(user, &end, 10) : w->world;
    *out_rank = (uint32_t)rank;
    return end && !*end && rank < w->world;
}

bool wire_listen_once(struct wire *w)
{
    zmq_msg_t id, head, payload;
    zmq_msg_init(&id);
    zmq_msg_init(&head);
    zmq_msg_init(&payload);
    bool has_any = zmq_msg_recv(&id, w->listener, ZMQ_DONTWAIT) >= 0;
    bool has_head = has_any && zmq_msg_more(&id) && zmq_msg_recv(&head, w->listener, 0) >= 0;
    bool is_whole = has_head && zmq_msg_more(&head) && zmq_msg_recv(&payload, w->listener, 0) >= 0;
    uint32_t rank;
    for (bool more = is_whole && zmq_msg_more(&payload); more; is_whole = false) {
        zmq_msg_t extra; /* there are none */
        zmq_msg_init(&extra);
        more = zmq_msg_recv(&extra, w->listener, 0) >= 0 && zmq_msg_more(&extra);
        zmq_msg_close(&extra);
    }
    if (is_whole && zmq_msg_size(&head) == sizeof(struct header) && rank_of(w, &head, &rank)) {
        struct peer *p = &w->peers[rank];
        p->n_id = zmq_msg_size(&id) <= sizeof p->id ? zmq_msg_size(&id) : 0;
        memcpy(p->id, zmq_msg_data(&id), p->n_id);
        struct header h;
        memcpy(&h, zmq_msg_data(&head), sizeof h);
        heard(w, rank, &h, &payload);
    }
    zmq_msg_close(&id);
    zmq_msg_close(&head);
    zmq_msg_close(&payload);
    return has_any;
}

/* What comes back on a connection of mine. */
void wire_hear_answers(struct wire *w, uint32_t rank)
{
    struct peer *p = &w->peers[rank];
    struct header h;
    for (int n; (n = zmq_recv(p->dealer, &h, sizeof h, ZMQ_DONTWAIT)) >= 0;)
        if (n == sizeof h && h.kind == KIND_ACK && h.total >= p->acked && h.total <= p->sent &&
            h.at <= p->sent) {
            p->acked = h.total;
            p->arrived = h.at > p->arrived ? h.at : p->arrived;
        }
}
