/* link_parts.h - what the parts of a link share */
#ifndef COMMON_LINK_PARTS_H
#define COMMON_LINK_PARTS_H

#include <uv.h>

#include "common/link.h"
#include "common/link_peers.h"
#include "common/link_socket.h"

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
    size_t       sweep_at; /* so many peers are a reason to look for silent ones */
    struct link_stats stats;
};

/* ---- link_send ------------------------------------------------------------------------------- */

/* What waits for p to read, as far as it goes now. 0, or the errno of ZeroMQ. */
int  link_send_queued(struct link *l, struct peer *p);
/* p does not wait to be sent to any more. */
void link_stop_waiting(struct link *l, struct peer *p);
/* Ends p, and says so. */
void link_forget(struct link *l, struct peer *p);

/* ---- link_receive ---------------------------------------------------------------------------- */

/* One message whole, handed over. False when there is none. */
bool link_receive(struct link *l, uint64_t now_ns);
/* The same for a connection that came or went. */
bool link_receive_event(struct link *l);

#endif
