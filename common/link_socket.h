/* link_socket.h - the ZeroMQ sockets of a link: made, set, bound; part of link */
#ifndef COMMON_LINK_SOCKET_H
#define COMMON_LINK_SOCKET_H

#include "common/err.h"
#include "common/types.h"

struct link_socket {
    void *socket, *monitor; /* ZeroMQ's; the monitor tells of connections */
    bool  has_context;
};

/* A ROUTER for a server, a DEALER for a client, with a monitor of its own. Ended with
 * link_socket_close, also after a failure. */
int link_socket_open(bool is_server, struct link_socket *out, struct err *err);

/* Listens on one more address; from now on connections leave LINK_DESCRIPTORS_KEPT of the files
 * that the process may open. -EADDRINUSE, -EEXIST: the path is another's. */
int link_socket_bind(const struct link_socket *s, const char *address, struct err *err);

/* What poll may watch; edge-triggered. */
int link_socket_descriptor(void *socket);

void link_socket_close(struct link_socket *s);

#endif
