/* coll_wire_door.c - links begin: who connects, and must greet first
 *
 * Anybody may connect. A guest has a place and room for one greeting, whatever it sends; with all
 * places taken the oldest has to go. The greeting of a rank opens with the secret that this rank
 * told through CURVE, once; whatever else comes is refused, counted, and changes nothing. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/types.h"
#include "worker/coll_wire_parts.h"

#define BACKLOG 256
#define SILENCE_S 5 /* then the other machine is asked whether it still is there, three times */

/* ---- the door -------------------------------------------------------------------------------- */

static void set(int fd, int level, int option, int value)
{
    setsockopt(fd, level, option, &value, sizeof value); /* best effort */
}

static void set_up(int fd)
{
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, SILENCE_S);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, SILENCE_S);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

int wire_door_open(struct wire *w, uint16_t port, struct err *err)
{
    struct sockaddr_storage at;
    uint32_t n = 0;
    int rc = wire_socket_address(w->address, port, &at, &n);
    if (rc < 0)
        return err_set(err, rc, "address %s", w->address);
    w->door = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (w->door >= 0)
        set(w->door, SOL_SOCKET, SO_REUSEADDR, 1);
    socklen_t size = n;
    if (w->door < 0 || bind(w->door, (struct sockaddr *)&at, n) < 0 ||
        listen(w->door, BACKLOG) < 0 || getsockname(w->door, (struct sockaddr *)&at, &size) < 0)
        return err_set(err, -errno, "data_address %s, port %u for the data: %s", w->address, port,
                       strerror(errno));
    w->door_port = ntohs(at.ss_family == AF_INET ? ((struct sockaddr_in *)&at)->sin_port
                                                 : ((struct sockaddr_in6 *)&at)->sin6_port);
    return 0;
}

void wire_door_close(struct wire *w)
{
    if (w->door >= 0)
        close(w->door);
    for (uint32_t i = 0; i < WIRE_GUESTS_MAX; i++)
        if (w->guests[i].fd >= 0)
            close(w->guests[i].fd);
}

/* ---- guests ---------------------------------------------------------------------------------- */

static void leave(struct guest *g)
{
    if (g->fd >= 0)
        close(g->fd);
    g->fd = -1;
}

/* The first few are named, then one of every so many. */
static void refuse(struct wire *w, struct guest *g, const char *why)
{
    uint64_t n = ++w->n_refused;
    struct sockaddr_storage from = {0};
    socklen_t size = sizeof from;
    char ip[INET6_ADDRSTRLEN] = "?";
    if (getpeername(g->fd, (struct sockaddr *)&from, &size) == 0 && from.ss_family == AF_INET)
        inet_ntop(AF_INET, &((struct sockaddr_in *)&from)->sin_addr, ip, sizeof ip);
    else if (from.ss_family == AF_INET6)
        inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&from)->sin6_addr, ip, sizeof ip);
    if ((n & (n - 1)) == 0)
        log_warn("rank=%u from=%s refused=%llu msg=\"a connection is refused: %s\"", w->rank, ip,
                 (unsigned long long)n, why);
    leave(g);
}

void wire_door_answer(struct wire *w)
{
    for (int i = 0; i < 64; i++) {
        int fd = accept4(w->door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct guest *g = &w->guests[w->next_guest % WIRE_GUESTS_MAX];
        if (fd < 0 && (errno == EMFILE || errno == ENFILE))
            leave(g); /* there is one for the next */
        if (fd < 0)
            return;
        uint32_t index = w->next_guest++ % WIRE_GUESTS_MAX;
        if (g->fd >= 0)
            refuse(w, g, "it says nothing, and others wait");
        g->fd = fd;
        g->n = 0;
        wire_lane_watch(&w->lanes[0], fd, LINK_GUEST, index, EPOLLIN);
        wire_door_hear(w, index);
    }
}

/* What a greeting that is none leaves behind is of its own. */
static struct seal *open_greeting(const struct wire *w, const struct guest *g)
{
    const struct peer *p = &w->peers[g->greeting.rank];
    struct frame hello;
    struct seal *s = seal_create(p->in_secret, g->greeting.rank, w->rank, SEAL_OPENS);
    if (seal_open(s, g->greeting.hello, sizeof hello, &hello) == 0 && hello.kind == FRAME_HELLO)
        return s;
    seal_destroy(s);
    return NULL;
}

/* It has greeted. NULL, or what is wrong. */
static const char *let_in(struct wire *w, struct guest *g)
{
    uint32_t rank = g->greeting.rank;
    if (g->greeting.magic != GREETING_MAGIC || rank >= w->world || rank == w->rank)
        return "that is no greeting";
    struct peer *p = &w->peers[rank];
    if (!atomic_load(&p->may_greet))
        return "its rank has told no secret";
    if (p->has_greeted)
        return "its rank is here already";
    struct seal *seal = open_greeting(w, g);
    if (!seal)
        return "its greeting does not open with the secret of that rank";
    p->has_greeted = true;
    explicit_bzero(p->in_secret, sizeof p->in_secret);
    set_up(g->fd);
    epoll_ctl(w->lanes[0].epoll, EPOLL_CTL_DEL, g->fd, NULL);
    wire_in_open(&p->in, g->fd, seal);
    wire_lane_watch(wire_lane_in(w, rank), g->fd, LINK_IN, rank, EPOLLIN);
    g->fd = -1;
    return NULL;
}

void wire_door_hear(struct wire *w, uint32_t guest)
{
    struct guest *g = &w->guests[guest];
    if (g->fd < 0)
        return;
    ssize_t n = recv(g->fd, (uint8_t *)&g->greeting + g->n, sizeof g->greeting - g->n,
                     MSG_DONTWAIT);
    if (n < 0 && (errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (n <= 0) {
        refuse(w, g, "it ended before it greeted");
        return;
    }
    g->n += (size_t)n;
    if (g->n < sizeof g->greeting)
        return;
    const char *why = let_in(w, g);
    if (why)
        refuse(w, g, why);
}

/* ---- the other side -------------------------------------------------------------------------- */

int wire_door_knock(struct wire *w, uint32_t rank, uint16_t port)
{
    struct peer *p = &w->peers[rank];
    struct sockaddr_storage at;
    uint32_t n = 0;
    int rc = wire_socket_address(p->address, port, &at, &n);
    int fd = rc < 0 ? -1 : socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return rc < 0 ? rc : -errno;
    set_up(fd);
    if (connect(fd, (struct sockaddr *)&at, n) < 0 && errno != EINPROGRESS) {
        rc = -errno;
        close(fd);
        return rc;
    }
    wire_out_open(&p->out, fd, p->out_seal, w->rank);
    p->out_seal = NULL;
    wire_lane_watch(wire_lane_out(w, rank), fd, LINK_OUT, rank, EPOLLOUT);
    return 0;
}
