/* link_receive.c - messages from peers, and connections that come and go */
#include "common/link_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <zmq.h>

#include "common/link_address.h"
#include "common/mem.h"

#define SILENT_PEER_NS (300 * NS_PER_S) /* longer than any long poll or heartbeat interval */
#define SWEEP_AT_MIN   1024

/* ---- who it is from ------------------------------------------------------------------------ */

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

static void forget_silent(void *context, struct peer *p)
{
    link_forget(context, p);
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

/* ---- messages ------------------------------------------------------------------------------ */

bool link_receive(struct link *l, uint64_t now_ns)
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
            link_forget(l, p);
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

/* ---- connections --------------------------------------------------------------------------- */

static void set_connection(struct link *l, bool is_up)
{
    if (l->is_up == is_up)
        return;
    l->is_up = is_up;
    if (!is_up) {
        struct peer *p = peers_find(&l->peers, LINK_SERVER);
        peer_clear(p);
        if (p->is_waiting)
            link_stop_waiting(l, p);
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

/* An event is two frames: u16 event, u32 value; and the address. */
bool link_receive_event(struct link *l)
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
