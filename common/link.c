/* link.c - ROUTER and DEALER on a uv loop; with link_socket zmq.h's home for control messages
 *
 * ZeroMQ's descriptor is edge-triggered and any send or receive may eat the edge, so the events
 * are read before the loop blocks (prepare) and after it woke (check); while something is ready
 * an idle handle keeps the loop from blocking. A turn handles a bounded number of messages.
 *
 * A second socket, the monitor, tells of connections that come and go. */
#include "common/link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <uv.h>
#include <zmq.h>

#include "common/clock.h"
#include "common/link_address.h"
#include "common/link_peers.h"
#include "common/link_socket.h"
#include "common/mem.h"

#define MESSAGES_PER_TURN   256
#define QUEUE_MESSAGES_MAX  1024 /* of ours for a peer, behind ZeroMQ's */
#define QUEUE_BYTES_MAX     (2u << 20)
#define QUEUE_RETRY_MS      20
#define ROUTING_ID_BYTES    16
#define SILENT_PEER_NS      (300 * NS_PER_S) /* longer than any long poll or heartbeat interval */
#define SWEEP_AT_MIN        1024
#define ADDRESSES_MAX       8

struct link {
    uv_loop_t *loop; /* borrowed */
    struct link_handler handler;
    bool  is_server, is_up;
    struct link_socket zmq;
    uv_prepare_t prepare;
    uv_check_t   check;
    uv_idle_t    idle;
    uv_poll_t    poll, monitor_poll, door_poll;
    uv_timer_t   retry;
    int          n_open_handles;
    bool       (*admit)(void *context, const char *public_text);
    struct key   own;       /* has_keys */
    bool         has_keys, has_new_keys;
    char         servers[LINK_SERVERS_MAX][KEY_TEXT_BYTES]; /* of a client with keys */
    size_t       n_servers, server; /* which one is tried at present */
    char        *address;   /* of a client */
    struct peer_table peers;
    struct peer *waiting; /* peers with a queue */
    size_t       sweep_at;
    struct link_stats stats;
};

/* ---- peers -------------------------------------------------------------------------------- */

/* A routing id that comes with another key is somebody else. */
static bool is_another(const struct peer *p, const char *key)
{
    return p->address && strcmp(p->key, key) != 0;
}

static void peer_identify(struct peer *p, const char *peer_address, const char *key)
{
    if (p->address && !strcmp(p->address, peer_address))
        return;
    free(p->address);
    free(p->user);
    p->address = xstrdup(peer_address);
    p->user = link_address_user(peer_address);
    snprintf(p->key, sizeof p->key, "%s", key);
}

static void unlist_waiting(struct link *l, struct peer *p)
{
    struct peer **at = &l->waiting;
    while (*at && *at != p)
        at = &(*at)->next_waiting;
    if (*at)
        *at = p->next_waiting;
    p->is_waiting = false;
}

static void forget(struct link *l, struct peer *p)
{
    link_peer number = p->number;
    if (p->is_waiting)
        unlist_waiting(l, p);
    peers_remove(&l->peers, p);
    if (l->handler.peer_gone)
        l->handler.peer_gone(l->handler.context, number);
}

static void forget_silent(void *context, struct peer *p)
{
    forget(context, p);
}

static struct peer *peer_of(struct link *l, zmq_msg_t *id, uint64_t now_ns)
{
    if (!l->is_server)
        return peers_find(&l->peers, LINK_SERVER);
    struct peer *p = peers_find_id(&l->peers, zmq_msg_data(id), zmq_msg_size(id));
    if (p)
        return p;
    if (l->peers.n_peers >= l->sweep_at) {
        peers_visit_silent(&l->peers, now_ns > SILENT_PEER_NS ? now_ns - SILENT_PEER_NS : 0,
                           forget_silent, l);
        l->sweep_at = l->peers.n_peers * 2 > SWEEP_AT_MIN ? l->peers.n_peers * 2 : SWEEP_AT_MIN;
    }
    return peers_add(&l->peers, zmq_msg_data(id), zmq_msg_size(id));
}

/* ---- sending ------------------------------------------------------------------------------ */

/* 0, or the errno of ZeroMQ; after the first part went the rest cannot fail. */
static int send_now(struct link *l, struct peer *p, const struct link_frame *frames,
                    size_t n_frames)
{
    if (l->is_server && zmq_send(l->zmq.socket, p->id, p->n_id, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return errno;
    for (size_t i = 0; i < n_frames; i++) {
        int more = i + 1 < n_frames ? ZMQ_SNDMORE : 0;
        if (zmq_send(l->zmq.socket, frames[i].bytes, frames[i].n_bytes, more | ZMQ_DONTWAIT) < 0)
            return errno;
    }
    l->stats.n_sent++;
    return 0;
}

static int send_queued(struct link *l, struct peer *p)
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
        int rc = send_queued(l, p);
        if (rc == EAGAIN)
            continue;
        if (rc == 0) {
            unlist_waiting(l, p);
        } else {
            l->stats.n_unreachable++;
            forget(l, p);
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
        forget(l, p);
        return -EHOSTUNREACH;
    }
    if (!l->is_server && !l->is_up)
        return -EAGAIN;
    if (p->n_queued >= QUEUE_MESSAGES_MAX || p->queued_bytes >= QUEUE_BYTES_MAX) {
        l->stats.n_dropped_slow++;
        if (l->is_server)
            forget(l, p);
        return -ENOBUFS;
    }
    enqueue(l, p, frames, n_frames);
    return 0;
}

const char *link_peer_user(const struct link *l, link_peer peer)
{
    const struct peer *p = peers_find(&l->peers, peer);
    return p && p->user ? p->user : "anonymous";
}

const char *link_peer_key(const struct link *l, link_peer peer)
{
    const struct peer *p = peers_find(&l->peers, peer);
    return p ? p->key : "";
}

struct key_check {
    struct link *link;
    bool (*is_good)(void *context, const char *public_text);
    void *context;
};

static void forget_bad_key(void *context, struct peer *p)
{
    struct key_check *check = context;
    if (*p->key && !check->is_good(check->context, p->key))
        forget(check->link, p);
}

void link_forget_keys(struct link *l, bool (*is_good)(void *context, const char *public_text),
                      void *context)
{
    struct key_check check = {l, is_good, context};
    peers_visit_silent(&l->peers, UINT64_MAX, forget_bad_key, &check);
}

void **link_peer_slot(struct link *l, link_peer peer)
{
    struct peer *p = peers_find(&l->peers, peer);
    return p ? &p->slot : NULL;
}

/* ---- receiving ---------------------------------------------------------------------------- */

/* Reads one message whole. False when there is none. */
static bool receive_one(struct link *l, uint64_t now_ns)
{
    zmq_msg_t id, parts[LINK_FRAMES_MAX], extra;
    struct link_frame frames[LINK_FRAMES_MAX];
    size_t n_kept = 0, n_frames = 0;

    zmq_msg_init(&id);
    bool more = true;
    if (l->is_server) {
        if (zmq_msg_recv(&id, l->zmq.socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&id);
            return false;
        }
        more = zmq_msg_more(&id);
    }
    while (more) {
        zmq_msg_t *part = n_kept < LINK_FRAMES_MAX ? &parts[n_kept] : &extra;
        zmq_msg_init(part);
        if (zmq_msg_recv(part, l->zmq.socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(part);
            break; /* a client's empty socket; a message once begun is there whole */
        }
        more = zmq_msg_more(part);
        n_frames++;
        if (part == &extra) {
            zmq_msg_close(part);
            continue;
        }
        frames[n_kept++] = (struct link_frame){zmq_msg_data(part), zmq_msg_size(part)};
    }
    bool any = l->is_server || n_frames > 0;
    if (any) {
        struct peer *p = peer_of(l, &id, now_ns);
        const char *from = n_kept ? zmq_msg_gets(&parts[0], "Peer-Address") : NULL;
        const char *key = n_kept && l->is_server ? zmq_msg_gets(&parts[0], "User-Id") : NULL;
        if (l->is_server && is_another(p, key ? key : "")) {
            forget(l, p);
            p = peer_of(l, &id, now_ns);
        }
        p->heard_ns = now_ns;
        peer_identify(p, from ? from : "", key ? key : "");
        l->stats.n_received++;
        l->stats.n_bad_frames += n_frames > LINK_FRAMES_MAX;
        l->handler.message(l->handler.context, p->number, frames, n_frames);
    }
    for (size_t i = 0; i < n_kept; i++)
        zmq_msg_close(&parts[i]);
    zmq_msg_close(&id);
    return any;
}

static void set_connection(struct link *l, bool is_up)
{
    if (l->is_up == is_up)
        return;
    l->is_up = is_up;
    if (!is_up) {
        struct peer *p = peers_find(&l->peers, LINK_SERVER);
        peer_clear(p);
        if (p->is_waiting)
            unlist_waiting(l, p);
    }
    if (l->handler.connection)
        l->handler.connection(l->handler.context, is_up);
}

/* The next server that is trusted may be the one that is there. */
static void on_denial(struct link *l, enum link_denial why)
{
    if (l->handler.denied)
        l->handler.denied(l->handler.context, why);
    if (l->has_new_keys || (l->n_servers > 1 && why == LINK_NO_HANDSHAKE)) {
        l->server = (l->server + 1) % l->n_servers;
        l->has_new_keys = false;
        link_socket_disconnect(&l->zmq, l->address);
        link_socket_connect(&l->zmq, l->address, &l->own, l->servers[l->server], NULL);
    }
}

/* An event is two frames: u16 event, u32 value; and the address. False when there is none. */
static bool receive_event(struct link *l)
{
    uint8_t bytes[6];
    char address[256];
    if (zmq_recv(l->zmq.monitor, bytes, sizeof bytes, ZMQ_DONTWAIT) < 0)
        return false;
    zmq_recv(l->zmq.monitor, address, sizeof address, ZMQ_DONTWAIT);
    uint16_t event;
    uint32_t value;
    memcpy(&event, bytes, sizeof event);
    memcpy(&value, bytes + sizeof event, sizeof value);
    if (event == ZMQ_EVENT_ACCEPTED)
        l->stats.n_connections++;
    else if (event == ZMQ_EVENT_DISCONNECTED && l->is_server && l->stats.n_connections)
        l->stats.n_connections--;
    else if (event == ZMQ_EVENT_ACCEPT_FAILED && l->handler.refused)
        l->handler.refused(l->handler.context);
    else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED && !l->is_server)
        set_connection(l, true);
    else if (event == ZMQ_EVENT_DISCONNECTED && !l->is_server)
        set_connection(l, false);
    else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)
        on_denial(l, LINK_NOT_ADMITTED);
    else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL && !l->is_server)
        on_denial(l, value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH ? LINK_OTHER_SECURITY
                                                                         : LINK_NO_HANDSHAKE);
    else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        on_denial(l, LINK_NO_HANDSHAKE);
    return true;
}

static bool is_readable(void *socket)
{
    int events = 0;
    size_t size = sizeof events;
    return zmq_getsockopt(socket, ZMQ_EVENTS, &events, &size) == 0 && events & ZMQ_POLLIN;
}

static void on_idle(uv_idle_t *idle)
{
    (void)idle; /* its being active keeps the loop from blocking */
}

static void on_prepare(uv_prepare_t *prepare)
{
    struct link *l = prepare->data;
    bool socket_ready = is_readable(l->zmq.socket), monitor_ready = is_readable(l->zmq.monitor);
    bool door_ready = l->zmq.door && is_readable(l->zmq.door);
    if (socket_ready || monitor_ready || door_ready)
        uv_idle_start(&l->idle, on_idle);
    else
        uv_idle_stop(&l->idle);
}

static void on_check(uv_check_t *check)
{
    struct link *l = check->data;
    for (int i = 0; i < MESSAGES_PER_TURN && is_readable(l->zmq.monitor) && receive_event(l); i++)
        ;
    for (int i = 0; l->zmq.door && i < MESSAGES_PER_TURN && is_readable(l->zmq.door) &&
         link_socket_answer(&l->zmq, l->admit, l->handler.context); i++)
        ;
    uint64_t now_ns = clock_now_ns();
    int n = 0;
    if (is_readable(l->zmq.socket))
        while (n < MESSAGES_PER_TURN && receive_one(l, now_ns))
            n++;
    if (n && l->handler.turn_end)
        l->handler.turn_end(l->handler.context);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    (void)poll; /* waking the loop was all: prepare and check do the work */
    (void)status;
    (void)events;
}

/* ---- opening and closing ------------------------------------------------------------------ */

static void open_handles(struct link *l)
{
    uv_prepare_init(l->loop, &l->prepare);
    uv_check_init(l->loop, &l->check);
    uv_idle_init(l->loop, &l->idle);
    uv_timer_init(l->loop, &l->retry);
    uv_poll_init(l->loop, &l->poll, link_socket_descriptor(l->zmq.socket));
    uv_poll_init(l->loop, &l->monitor_poll, link_socket_descriptor(l->zmq.monitor));
    l->prepare.data = l->check.data = l->idle.data = l->retry.data = l;
    l->poll.data = l->monitor_poll.data = l;
    l->n_open_handles = 6;
    if (l->zmq.door) {
        uv_poll_init(l->loop, &l->door_poll, link_socket_descriptor(l->zmq.door));
        l->door_poll.data = l;
        l->n_open_handles++;
        uv_poll_start(&l->door_poll, UV_READABLE, on_poll);
    }
    uv_prepare_start(&l->prepare, on_prepare);
    uv_check_start(&l->check, on_check);
    uv_poll_start(&l->poll, UV_READABLE, on_poll);
    uv_poll_start(&l->monitor_poll, UV_READABLE, on_poll);
}

static void destroy(struct link *l)
{
    link_socket_close(&l->zmq);
    peers_fini(&l->peers);
    explicit_bzero(&l->own, sizeof l->own);
    free(l->address);
    free(l);
}

static void take_keys(struct link *l, const struct link_keys *keys)
{
    l->has_keys = true;
    l->own = *keys->own;
    l->admit = keys->admit;
    l->n_servers = keys->n_servers < LINK_SERVERS_MAX ? keys->n_servers : LINK_SERVERS_MAX;
    memset(l->servers, 0, sizeof l->servers);
    for (size_t i = 0; i < l->n_servers; i++)
        memcpy(l->servers[i], keys->servers[i].public_text, KEY_TEXT_BYTES);
}

void link_change_keys(struct link *l, const struct link_keys *keys)
{
    struct key own = l->own;
    char servers[LINK_SERVERS_MAX][KEY_TEXT_BYTES];
    size_t n_servers = l->n_servers;
    memcpy(servers, l->servers, sizeof servers);
    take_keys(l, keys);
    l->has_new_keys |= n_servers != l->n_servers || memcmp(&own, &l->own, sizeof own) ||
                       memcmp(servers, l->servers, sizeof servers);
    explicit_bzero(&own, sizeof own);
}

static int create(uv_loop_t *loop, bool is_server, const struct link_keys *keys,
                  const struct link_handler *handler, struct link **out_link, struct err *err)
{
    struct link *l = xcalloc(1, sizeof *l);
    if (keys)
        take_keys(l, keys);
    l->loop = loop;
    l->handler = *handler;
    l->is_server = is_server;
    l->sweep_at = SWEEP_AT_MIN;
    int rc = link_socket_open(is_server, &l->zmq, err);
    if (rc == 0 && is_server && keys)
        rc = link_socket_open_door(&l->zmq, err);
    if (rc < 0) {
        destroy(l);
        return rc;
    }
    *out_link = l;
    return 0;
}

int link_listen(struct uv_loop_s *loop, const char *const *addresses, size_t n_addresses,
                const struct link_keys *keys, const struct link_handler *handler,
                struct link **out_link, struct err *err)
{
    struct link *l;
    if (n_addresses == 0 || n_addresses > ADDRESSES_MAX)
        return err_set(err, -EINVAL, "a server listens on 1 to %d addresses, not %zu",
                       ADDRESSES_MAX, n_addresses);
    int rc = create(loop, true, keys, handler, &l, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n_addresses; i++)
        if ((rc = link_socket_bind(&l->zmq, addresses[i], keys ? &l->own : NULL, err)) < 0) {
            destroy(l);
            return rc;
        }
    open_handles(l);
    *out_link = l;
    return 0;
}

int link_connect(struct uv_loop_s *loop, const char *address, const struct link_keys *keys,
                 const struct link_handler *handler, struct link **out_link, struct err *err)
{
    struct link *l;
    int rc = link_address_check(address, keys != NULL, err);
    if (rc < 0 || (rc = create(loop, false, keys, handler, &l, err)) < 0)
        return rc;
    l->address = xstrdup(address);
    uint8_t id[ROUTING_ID_BYTES];
    if (getrandom(id, sizeof id, 0) != sizeof id) {
        destroy(l);
        return err_set(err, -EIO, "getrandom: %s", strerror(errno));
    }
    id[0] |= 1; /* a first byte of zero is ZeroMQ's own */
    zmq_setsockopt(l->zmq.socket, ZMQ_ROUTING_ID, id, sizeof id);
    if ((rc = link_socket_connect(&l->zmq, address, keys ? &l->own : NULL, l->servers[0],
                                  err)) < 0) {
        destroy(l);
        return rc;
    }
    peers_add(&l->peers, id, sizeof id); /* gets the number LINK_SERVER */
    open_handles(l);
    *out_link = l;
    return 0;
}

struct link_stats link_stats(const struct link *l)
{
    struct link_stats stats = l->stats;
    stats.n_peers = (uint32_t)l->peers.n_peers;
    return stats;
}

static void on_closed(uv_handle_t *handle)
{
    struct link *l = handle->data;
    if (--l->n_open_handles == 0)
        destroy(l); /* only now: the descriptors must outlive their poll handles */
}

void link_close(struct link *l)
{
    if (!l)
        return;
    for (struct peer *p = l->waiting; p; p = p->next_waiting)
        send_queued(l, p);
    uv_handle_t *handles[] = {(uv_handle_t *)&l->prepare, (uv_handle_t *)&l->check,
                              (uv_handle_t *)&l->idle, (uv_handle_t *)&l->retry,
                              (uv_handle_t *)&l->poll, (uv_handle_t *)&l->monitor_poll};
    for (size_t i = 0; i < sizeof handles / sizeof handles[0]; i++)
        uv_close(handles[i], on_closed);
    if (l->zmq.door)
        uv_close((uv_handle_t *)&l->door_poll, on_closed);
}
