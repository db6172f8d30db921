/* coll_wire.c - one thread, a ROUTER that listens and a DEALER for each rank that is sent to
 *
 * Callers only append to a list; everything else belongs to the thread. Acknowledgements return on
 * the connection of what they are about. Over it a rank also asks now and then whether the other
 * end still exists: ROUTER says so at once when a connection has ended. */
#include "worker/coll_wire.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <zmq.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/types.h"
#include "worker/coll_wire_in.h"

#define PIECE_BYTES  ((size_t)128 << 10)
#define COPIED_BYTES 4096u /* smaller pieces are copied */
#define HWM_MESSAGES 8     /* pieces in ZeroMQ, of a connection and direction */
#define LOOK_MS      100
#define PING_NS      (500 * NS_PER_MS)
#define LINGER_MS    200   /* for a goodbye; data were acknowledged before */
#define ANSWER_LINGER_MS 2000
#define FLUSH_NS     (30 * NS_PER_S) /* for data to arrive, at the end */
#define FLUSH_MS     20
#define HANDSHAKE_MS 20000
#define HEARTBEAT_MS 5000
#define SILENCE_MS   20000
#define YIELDS       4u
#define DRAIN_MAX    64 /* messages, before it looks at what to send */
#define TEXT_BYTES   512

struct out {
    struct out *next;
    uint32_t to;
    uint64_t tag;
    const uint8_t *data;
    size_t n, at;
    struct wire_ticket *ticket;
};

struct peer {
    char     address[WIRE_ADDRESS_BYTES];
    uint8_t  key[WIRE_KEY_BYTES];
    void    *dealer; /* NULL: nothing was sent to it */
    struct out *first, **last;
    bool     is_full;      /* ZeroMQ takes no more now */
    uint64_t sent, acked, arrived; /* costs, see wire_cost; acked: it has been asked for */
    uint8_t  id[16];       /* of its connection to here */
    size_t   n_id;
    bool     is_gone, has_left;
    struct wire_in in;
};

struct wire {
    void *context, *listener, *zap, *monitor;
    char  address[WIRE_ADDRESS_BYTES];
    uint8_t key[WIRE_KEY_BYTES], secret[WIRE_KEY_BYTES];
    pthread_t thread;
    bool has_thread;
    int  wake; /* eventfd */
    atomic_bool is_ending, is_asleep;
    uint32_t rank, world;
    struct peer *peers;
    uint32_t *sent_to; /* ranks with a dealer */
    uint32_t n_sent_to;
    struct wire_events events;
    bool has_told;
    uint64_t ping_ns;
    zmq_pollitem_t *items;
    pthread_mutex_t lock; /* of what callers have posted */
    struct out *posted, **posted_last;
    struct wire_post *expected, **expected_last;
};

enum kind { KIND_DATA = 0x42570001, KIND_ACK, KIND_PING, KIND_ABORT, KIND_BYE, KIND_FLUSH };

struct header {
    uint32_t kind, unused;
    uint64_t tag, total, at; /* ACK: costs, total consumed so far and at arrived */
};

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

/* ---- addresses ------------------------------------------------------------------------------ */

/* The host's number, without brackets. */
static bool split_address(const char *address, char *out_ip, const char **out_port)
{
    const char *host = address + 6, *colon = strncmp(address, "tcp://", 6) ? NULL
                                                                           : strrchr(host, ':');
    size_t n = colon ? (size_t)(colon - host) : 0;
    bool is_v6 = n > 2 && host[0] == '[' && host[n - 1] == ']';
    if (n == 0 || n >= INET6_ADDRSTRLEN || strlen(address) >= WIRE_ADDRESS_BYTES - 6)
        return false;
    memcpy(out_ip, host + is_v6, n - 2 * is_v6);
    out_ip[n - 2 * is_v6] = '\0';
    *out_port = colon + 1;
    return true;
}

bool wire_is_loopback(const char *address)
{
    char ip[INET6_ADDRSTRLEN];
    const char *port;
    struct in_addr v4;
    if (!split_address(address, ip, &port))
        return false;
    return strcmp(ip, "::1") == 0 ||
           (inet_pton(AF_INET, ip, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127);
}

int wire_address_check(const char *address, struct err *err)
{
    char ip[INET6_ADDRSTRLEN];
    const char *port = "";
    uint8_t bytes[16], none[16] = {0};
    int family = AF_INET;
    if (!split_address(address, ip, &port))
        return err_set(err, -EINVAL, "address '%.90s': expected tcp://IP:* or tcp://IP:PORT",
                       address);
    if (strchr(ip, ':'))
        family = AF_INET6;
    if (inet_pton(family, ip, bytes) != 1)
        return err_set(err, -EINVAL, "address '%.90s': '%s' is no number of an address, as in "
                       "tcp://10.0.0.7:*", address, ip);
    if (memcmp(bytes, none, family == AF_INET ? 4 : 16) == 0)
        return err_set(err, -EINVAL, "address '%.90s': other machines must be able to reach it; "
                       "expected one of this machine's own addresses", address);
    char *end = NULL;
    unsigned long number = port[0] >= '1' && port[0] <= '9' ? strtoul(port, &end, 10) : 0;
    if (strcmp(port, "*") != 0 && (!end || *end || number > 65535))
        return err_set(err, -EINVAL, "address '%.90s': expected a port of 1 to 65535, or *",
                       address);
    return 0;
}

/* ---- sockets -------------------------------------------------------------------------------- */

static void set(void *socket, int option, int value)
{
    zmq_setsockopt(socket, option, &value, sizeof value);
}

static void *new_socket(struct wire *w, int type)
{
    void *s = zmq_socket(w->context, type);
    if (!s)
        return NULL;
    set(s, ZMQ_LINGER, LINGER_MS);
    set(s, ZMQ_SNDHWM, HWM_MESSAGES);
    set(s, ZMQ_RCVHWM, HWM_MESSAGES);
    set(s, ZMQ_IPV6, 1);
    set(s, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    set(s, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    set(s, ZMQ_HEARTBEAT_TIMEOUT, SILENCE_MS);
    set(s, ZMQ_HEARTBEAT_TTL, SILENCE_MS);
    zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &(int64_t){PIECE_BYTES + TEXT_BYTES}, sizeof(int64_t));
    zmq_setsockopt(s, ZMQ_CURVE_PUBLICKEY, w->key, WIRE_KEY_BYTES);
    zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, w->secret, WIRE_KEY_BYTES);
    return s;
}

static void *dealer_to(struct wire *w, uint32_t rank)
{
    struct peer *p = &w->peers[rank];
    if (p->dealer || !(p->dealer = new_socket(w, ZMQ_DEALER)))
        return p->dealer;
    zmq_setsockopt(p->dealer, ZMQ_CURVE_SERVERKEY, p->key, WIRE_KEY_BYTES);
    if (zmq_connect(p->dealer, p->address) < 0) {
        zmq_close(p->dealer);
        p->dealer = NULL;
        return NULL;
    }
    w->sent_to[w->n_sent_to++] = rank;
    return p->dealer;
}

static int make_keys(struct wire *w, struct err *err)
{
    char public_text[41], secret_text[41];
    if (!zmq_has("curve") || zmq_curve_keypair(public_text, secret_text) < 0)
        return err_set(err, -ENOTSUP, "this libzmq has no CURVE, which the network between hosts "
                       "needs");
    zmq_z85_decode(w->key, public_text);
    zmq_z85_decode(w->secret, secret_text);
    return 0;
}

static int listen_at(struct wire *w, const char *address, struct err *err)
{
    size_t n = sizeof w->address;
    static const char domain[] = "ballast";
    /* Whoever asks for admission finds the door before the listener exists. */
    if (!(w->zap = zmq_socket(w->context, ZMQ_REP)) ||
        zmq_bind(w->zap, "inproc://zeromq.zap.01") < 0 ||
        !(w->listener = new_socket(w, ZMQ_ROUTER)))
        return err_set(err, -errno, "ZeroMQ: %s", zmq_strerror(errno));
    set(w->zap, ZMQ_LINGER, 0);
    set(w->listener, ZMQ_LINGER, ANSWER_LINGER_MS);
    set(w->listener, ZMQ_CURVE_SERVER, 1);
    set(w->listener, ZMQ_ROUTER_MANDATORY, 1);
    zmq_setsockopt(w->listener, ZMQ_ZAP_DOMAIN, domain, sizeof domain - 1);
    if (zmq_socket_monitor(w->listener, "inproc://ends", ZMQ_EVENT_DISCONNECTED) < 0 ||
        !(w->monitor = zmq_socket(w->context, ZMQ_PAIR)) ||
        zmq_connect(w->monitor, "inproc://ends") < 0)
        return err_set(err, -errno, "ZeroMQ: %s", zmq_strerror(errno));
    set(w->monitor, ZMQ_LINGER, 0);
    if (zmq_bind(w->listener, address) < 0 ||
        zmq_getsockopt(w->listener, ZMQ_LAST_ENDPOINT, w->address, &n) < 0)
        return err_set(err, -errno, "data_address %s: %s", address, zmq_strerror(errno));
    return 0;
}

/* ---- admission ------------------------------------------------------------------------------ */

static int find_key(const struct wire *w, const void *key, size_t n)
{
    for (uint32_t r = 0; r < w->world && n == WIRE_KEY_BYTES; r++)
        if (r != w->rank && memcmp(w->peers[r].key, key, n) == 0)
            return (int)r;
    return -1;
}

static void admit(struct wire *w)
{
    enum { REQUEST = 1, MECHANISM = 5, KEY = 6, PARTS = 16 };
    zmq_msg_t parts[PARTS];
    int n = 0;
    for (bool more = true; more && n < PARTS; n++) {
        zmq_msg_init(&parts[n]);
        if (zmq_msg_recv(&parts[n], w->zap, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&parts[n]);
            break;
        }
        more = zmq_msg_more(&parts[n]);
    }
    if (n > KEY) {
        bool is_curve = zmq_msg_size(&parts[MECHANISM]) == 5 &&
                        !memcmp(zmq_msg_data(&parts[MECHANISM]), "CURVE", 5);
        int rank = is_curve ? find_key(w, zmq_msg_data(&parts[KEY]), zmq_msg_size(&parts[KEY]))
                            : -1;
        char user[16] = "";
        if (rank >= 0)
            snprintf(user, sizeof user, "%d", rank);
        zmq_send(w->zap, "1.0", 3, ZMQ_SNDMORE); /* libzmq itself is who asks, and in full */
        zmq_send(w->zap, zmq_msg_data(&parts[REQUEST]), zmq_msg_size(&parts[REQUEST]),
                 ZMQ_SNDMORE);
        zmq_send(w->zap, rank >= 0 ? "200" : "400", 3, ZMQ_SNDMORE);
        zmq_send(w->zap, rank >= 0 ? "OK" : "No", 2, ZMQ_SNDMORE);
        zmq_send(w->zap, user, strlen(user), ZMQ_SNDMORE);
        zmq_send(w->zap, "", 0, 0);
    }
    while (n > 0)
        zmq_msg_close(&parts[--n]);
}

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

static void send_waiting(struct wire *w, uint32_t rank)
{
    struct peer *p = &w->peers[rank];
    while (p->first && !p->is_full) {
        struct out *o = p->first;
        size_t left = o->n - o->at, n = left < PIECE_BYTES ? left : PIECE_BYTES;
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

static void say(void *socket, enum kind kind, const char *text)
{
    struct header h = {.kind = kind};
    if (zmq_send(socket, &h, sizeof h, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(socket, text, strlen(text), ZMQ_DONTWAIT);
}

static void say_all(struct wire *w, enum kind kind, const char *text)
{
    for (uint32_t i = 0; i < w->n_sent_to; i++)
        say(w->peers[w->sent_to[i]].dealer, kind, text);
}

/* Back on the connection from it. -EAGAIN: not now, -EHOSTUNREACH: that has ended. */
static int answer(struct wire *w, struct peer *p, enum kind kind)
{
    struct header h = {.kind = kind, .total = p->in.consumed, .at = p->in.arrived};
    if (p->n_id == 0)
        return -EAGAIN;
    if (zmq_send(w->listener, p->id, p->n_id, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return -errno;
    zmq_send(w->listener, &h, sizeof h, ZMQ_DONTWAIT);
    return 0;
}

static void acknowledge(struct wire *w, struct peer *p)
{
    if (wire_in_owes(&p->in) && answer(w, p, KIND_ACK) == 0)
        p->in.told = p->in.consumed;
}

static void look_for_ends(struct wire *w)
{
    w->ping_ns = clock_now_ns() + PING_NS;
    for (uint32_t r = 0; r < w->world; r++) {
        struct peer *p = &w->peers[r];
        acknowledge(w, p);
        if (!p->is_gone && answer(w, p, KIND_PING) == -EHOSTUNREACH) {
            p->is_gone = true;
            w->events.gone(w->events.user, r);
        }
    }
}

static void tell_abort(struct wire *w)
{
    char text[TEXT_BYTES];
    if (w->has_told || !w->events.is_aborted ||
        !w->events.is_aborted(w->events.user, text, sizeof text))
        return;
    w->has_told = true;
    say_all(w, KIND_ABORT, text);
}

/* ---- receiving ------------------------------------------------------------------------------ */

static void heard_abort(struct wire *w, zmq_msg_t *m)
{
    char text[TEXT_BYTES];
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
        answer(w, p, KIND_ACK);
    } else if (h->kind != KIND_DATA ||
               wire_in_take(&p->in, h->tag, h->total, h->at, payload) < 0) {
        char text[128];
        snprintf(text, sizeof text, "rank %u: rank %u sends what does not fit", w->rank, rank);
        w->events.aborted(w->events.user, text);
    }
    acknowledge(w, p);
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

static bool listen_once(struct wire *w)
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
static void hear_answers(struct wire *w, uint32_t rank)
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
        acknowledge(w, p);
    }
    for (struct out *next; outs; outs = next) {
        next = outs->next;
        struct peer *p = &w->peers[outs->to];
        outs->next = NULL;
        *p->last = outs;
        p->last = &outs->next;
        if (!dealer_to(w, outs->to)) {
            char text[TEXT_BYTES];
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
    while (n < DRAIN_MAX && listen_once(w))
        n++;
    for (uint32_t i = 0; i < w->n_sent_to; i++) {
        hear_answers(w, w->sent_to[i]);
        w->peers[w->sent_to[i]].is_full = false;
        send_waiting(w, w->sent_to[i]);
    }
    if (have_ends(w) || clock_now_ns() >= w->ping_ns)
        look_for_ends(w);
    tell_abort(w);
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
        say(p->dealer, KIND_FLUSH, "");
        all = false;
    }
    return all;
}

/* At the end. Who leaves before has told what it got; so does this rank. */
static void flush(struct wire *w)
{
    uint64_t end = clock_now_ns() + FLUSH_NS;
    look_for_ends(w);
    while (!has_arrived(w) && !w->has_told && clock_now_ns() < end) {
        zmq_poll(w->items, (int)fill_items(w, true), FLUSH_MS);
        work(w);
        look_for_ends(w);
    }
    for (uint32_t r = 0; r < w->world; r++)
        answer(w, &w->peers[r], KIND_ACK);
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
            admit(w);
    }
    tell_abort(w);
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
    size_t n_pieces = n_bytes ? (n_bytes + PIECE_BYTES - 1) / PIECE_BYTES : 1;
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
    zmq_ctx_set(w->context, ZMQ_MAX_SOCKETS, zmq_ctx_get(w->context, ZMQ_SOCKET_LIMIT));
    if ((w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
        rc = err_set(err, -errno, "eventfd: %s", strerror(errno));
        goto fail;
    }
    if ((rc = make_keys(w, err)) < 0 || (rc = listen_at(w, address, err)) < 0)
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
            set(p->dealer, ZMQ_LINGER, 0); /* nobody is there to take it */
        else
            say(p->dealer, KIND_BYE, "");
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
