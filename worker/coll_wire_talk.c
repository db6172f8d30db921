/* coll_wire_talk.c - what is told through CURVE: secrets, ports and aborts
 *
 * A thread of its own does it, which mostly sleeps. Once something is to be sent to a rank, it
 * makes the secret of that link, tells the rank, and hears at which port its door is. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/types.h"
#include "worker/coll_wire_parts.h"

#define LOOK_MS  100
#define DRAIN_MAX 64
#define GRACE_NS (200 * NS_PER_MS) /* for word of an abort, after links have ended */

void wire_fail(struct wire *w, const char *format, ...)
{
    char text[WIRE_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    w->events.aborted(w->events.user, text);
    wire_wake(w);
}

static void say(void *socket, enum kind kind, const void *what, size_t n_bytes)
{
    struct header h = {.kind = kind};
    if (zmq_send(socket, &h, sizeof h, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(socket, what, n_bytes, ZMQ_DONTWAIT);
}

/* ---- secrets --------------------------------------------------------------------------------- */

static void tell_secret(struct wire *w, uint32_t rank)
{
    struct peer *p = &w->peers[rank];
    uint8_t secret[SEAL_SECRET_BYTES];
    struct err err = {0};
    if (!wire_dealer_to(w, rank)) {
        wire_fail(w, "rank %u cannot connect to rank %u at %s: %s", w->rank, rank, p->address,
                  zmq_strerror(errno));
    } else if (seal_make_secret(secret, &err) < 0) {
        wire_fail(w, "rank %u: %s", w->rank, err.text);
    } else {
        p->out_seal = seal_create(secret, w->rank, rank, SEAL_CLOSES);
        say(p->dealer, KIND_SECRET, secret, sizeof secret);
    }
    explicit_bzero(secret, sizeof secret);
}

static void tell_secrets(struct wire *w)
{
    for (uint32_t r = 0; r < w->world; r++)
        if (atomic_load(&w->peers[r].is_wanted) && !w->peers[r].has_tried) {
            w->peers[r].has_tried = true;
            tell_secret(w, r);
        }
}

/* And says where the door is. */
static void hear_secret(struct wire *w, uint32_t rank, zmq_msg_t *id, zmq_msg_t *secret)
{
    struct peer *p = &w->peers[rank];
    const struct header h = {.kind = KIND_PORT, .port = w->door_port};
    if (zmq_msg_size(secret) != SEAL_SECRET_BYTES || atomic_load(&p->may_greet)) {
        wire_fail(w, "rank %u: rank %u tells a secret that does not fit", w->rank, rank);
        return;
    }
    memcpy(p->in_secret, zmq_msg_data(secret), SEAL_SECRET_BYTES);
    atomic_store(&p->may_greet, true);
    zmq_send(w->listener, zmq_msg_data(id), zmq_msg_size(id), ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(w->listener, &h, sizeof h, ZMQ_DONTWAIT);
}

/* What comes back on a connection of mine. */
static void hear_answers(struct wire *w, uint32_t rank)
{
    struct peer *p = &w->peers[rank];
    struct header h;
    for (int n; p->dealer && (n = zmq_recv(p->dealer, &h, sizeof h, ZMQ_DONTWAIT)) >= 0;) {
        if (n != sizeof h || h.kind != KIND_PORT || !p->out_seal)
            continue;
        p->out_port = (uint16_t)h.port;
        int rc = wire_door_knock(w, rank, p->out_port);
        if (rc < 0)
            wire_fail(w, "rank %u cannot connect to rank %u at %s, port %u for the data: %s",
                      w->rank, rank, p->address, p->out_port, strerror(-rc));
    }
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* Who ends because all do says so, too, which may come after the end of its links. */
static void look_for_ends(struct wire *w)
{
    for (uint32_t r = 0; r < w->world; r++) {
        struct peer *p = &w->peers[r];
        uint64_t ended = atomic_load(&p->ended_ns);
        if (ended == 0 || p->is_gone || clock_now_ns() - ended < GRACE_NS)
            continue;
        p->is_gone = true;
        w->events.gone(w->events.user, r);
    }
}

static void tell_abort(struct wire *w)
{
    char text[WIRE_TEXT_BYTES];
    if (w->has_told || !w->events.is_aborted ||
        !w->events.is_aborted(w->events.user, text, sizeof text))
        return;
    w->has_told = true;
    for (uint32_t r = 0; r < w->world; r++)
        if (w->peers[r].dealer)
            say(w->peers[r].dealer, KIND_ABORT, text, strlen(text));
}

static void hear_abort(struct wire *w, zmq_msg_t *m)
{
    char text[WIRE_TEXT_BYTES];
    size_t n = zmq_msg_size(m) < sizeof text - 1 ? zmq_msg_size(m) : sizeof text - 1;
    memcpy(text, zmq_msg_data(m), n);
    text[n] = '\0';
    w->events.aborted(w->events.user, text);
}

/* ---- listening ------------------------------------------------------------------------------- */

/* Whose key it was. */
static bool rank_of(const struct wire *w, zmq_msg_t *m, uint32_t *out_rank)
{
    const char *user = zmq_msg_gets(m, "User-Id");
    char *end = NULL;
    unsigned long rank = user && *user ? strtoul(user, &end, 10) : w->world;
    *out_rank = (uint32_t)rank;
    return end && !*end && rank < w->world;
}

static void heard(struct wire *w, zmq_msg_t *id, zmq_msg_t *head, zmq_msg_t *payload)
{
    struct header h;
    uint32_t rank;
    if (zmq_msg_size(head) != sizeof h || !rank_of(w, head, &rank))
        return;
    memcpy(&h, zmq_msg_data(head), sizeof h);
    if (h.kind == KIND_SECRET)
        hear_secret(w, rank, id, payload);
    else if (h.kind == KIND_ABORT)
        hear_abort(w, payload);
    else
        wire_fail(w, "rank %u: rank %u says what does not fit", w->rank, rank);
}

/* One message, if there is one. */
static bool listen_once(struct wire *w)
{
    enum { ID, HEAD, PAYLOAD, PARTS };
    zmq_msg_t parts[PARTS], extra;
    int n = 0;
    bool more = true;
    for (; more && n < PARTS && (n > 0 || zmq_msg_init(&parts[0]) == 0); n++) {
        if (n > 0)
            zmq_msg_init(&parts[n]);
        if (zmq_msg_recv(&parts[n], w->listener, n == 0 ? ZMQ_DONTWAIT : 0) < 0) {
            zmq_msg_close(&parts[n]);
            break;
        }
        more = zmq_msg_more(&parts[n]);
    }
    bool has_any = n > 0, is_whole = n == PARTS && !more;
    while (has_any && more) { /* there are none */
        zmq_msg_init(&extra);
        more = zmq_msg_recv(&extra, w->listener, 0) >= 0 && zmq_msg_more(&extra);
        zmq_msg_close(&extra);
    }
    if (is_whole)
        heard(w, &parts[ID], &parts[HEAD], &parts[PAYLOAD]);
    while (n > 0)
        zmq_msg_close(&parts[--n]);
    return has_any;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static int fill_items(const struct wire *w, zmq_pollitem_t *items)
{
    int n = 0;
    items[n++] = (zmq_pollitem_t){.fd = w->wake, .events = ZMQ_POLLIN};
    items[n++] = (zmq_pollitem_t){.socket = w->zap, .events = ZMQ_POLLIN};
    items[n++] = (zmq_pollitem_t){.socket = w->listener, .events = ZMQ_POLLIN};
    for (uint32_t r = 0; r < w->world; r++)
        if (w->peers[r].dealer)
            items[n++] = (zmq_pollitem_t){.socket = w->peers[r].dealer, .events = ZMQ_POLLIN};
    return n;
}

static void work(struct wire *w)
{
    tell_secrets(w);
    for (int i = 0; i < DRAIN_MAX && listen_once(w); i++)
        ;
    for (uint32_t r = 0; r < w->world; r++)
        hear_answers(w, r);
    tell_abort(w);
    look_for_ends(w);
}

void *wire_talk(void *wire)
{
    struct wire *w = wire;
    zmq_pollitem_t *items = xcalloc(w->world + 3, sizeof *items);
    uint64_t count;
    while (!atomic_load(&w->is_over)) {
        work(w);
        zmq_poll(items, fill_items(w, items), LOOK_MS);
        if (items[0].revents && read(w->wake, &count, sizeof count) < 0)
            continue;
        if (items[1].revents)
            wire_admit(w);
    }
    tell_abort(w);
    free(items);
    return NULL;
}
