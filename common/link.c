/* link.c - ROUTER and DEALER on a uv loop; the link*.c are zmq.h's home for control messages
 *
 * ZeroMQ's descriptor is edge-triggered and any send or receive may eat the edge, so the events
 * are read before the loop blocks (prepare) and after it woke (check); while something is ready
 * an idle handle keeps the loop from blocking. A turn handles a bounded number of messages.
 *
 * A second socket, the monitor, tells of connections that come and go. */
#include "common/link_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <zmq.h>

#include "common/clock.h"
#include "common/mem.h"

#define MESSAGES_PER_TURN 256
#define ROUTING_ID_BYTES  16
#define ADDRESSES_MAX     8

/* ---- peers -------------------------------------------------------------------------------- */

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
        link_forget(check->link, p);
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

/* ---- turns of the loop -------------------------------------------------------------------- */

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
    for (int i = 0; i < MESSAGES_PER_TURN && is_readable(l->zmq.monitor) &&
         link_receive_event(l); i++)
        ;
    for (int i = 0; l->zmq.door && i < MESSAGES_PER_TURN && is_readable(l->zmq.door) &&
         link_socket_answer(&l->zmq, l->admit, l->handler.context); i++)
        ;
    uint64_t now_ns = clock_now_ns();
    int n = 0;
    if (is_readable(l->zmq.socket))
        while (n < MESSAGES_PER_TURN && link_receive(l, now_ns))
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
        link_send_queued(l, p);
    uv_handle_t *handles[] = {(uv_handle_t *)&l->prepare, (uv_handle_t *)&l->check,
                              (uv_handle_t *)&l->idle, (uv_handle_t *)&l->retry,
                              (uv_handle_t *)&l->poll, (uv_handle_t *)&l->monitor_poll};
    for (size_t i = 0; i < sizeof handles / sizeof handles[0]; i++)
        uv_close(handles[i], on_closed);
    if (l->zmq.door)
        uv_close((uv_handle_t *)&l->door_poll, on_closed);
}
