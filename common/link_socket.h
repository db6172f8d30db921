/* link_socket.h - the ZeroMQ sockets of a link: made, set, bound; part of link */
#ifndef COMMON_LINK_SOCKET_H
#define COMMON_LINK_SOCKET_H

#include "common/err.h"
#include "common/keyring.h"
#include "common/types.h"

struct link_socket {
    void *socket, *monitor; /* ZeroMQ's; the monitor tells of connections */
    void *door;             /* of a server with keys: libzmq asks there who may come in (ZAP) */
    bool  has_context;
};

/* A ROUTER for a server, a DEALER for a client, with a monitor of its own. Ended with
 * link_socket_close, also after a failure. */
int link_socket_open(bool is_server, struct link_socket *out, struct err *err);

/* Asks for admission from now on; before the first address. -EADDRINUSE: another server of this
 * process has keys. */
int link_socket_open_door(struct link_socket *s, struct err *err);

/* One question, answered by admit. False when there is none. */
bool link_socket_answer(const struct link_socket *s,
                        bool (*admit)(void *context, const char *public_text), void *context);

/* own: NULL without keys. The first address of a client, or the next server that it trusts. */
int link_socket_connect(const struct link_socket *s, const char *address, const struct key *own,
                        const char *server_public, struct err *err);
void link_socket_disconnect(const struct link_socket *s, const char *address);

/* Listens on one more address; from now on connections leave LINK_DESCRIPTORS_KEPT of the files
 * that the process may open. -EADDRINUSE, -EEXIST: the path is another's. */
int link_socket_bind(const struct link_socket *s, const char *address, const struct key *own,
                     struct err *err);

/* What poll may watch; edge-triggered. */
int link_socket_descriptor(void *socket);

void link_socket_close(struct link_socket *s);

#endif
