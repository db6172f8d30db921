/* link_socket.c - one context for the process, and sockets with the options that links need */
#include "common/link_socket.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <uv.h>
#include <zmq.h>

#include "common/link.h"
#include "common/link_accept.h"

#define HIGH_WATER_MESSAGES 256 /* in ZeroMQ, per peer and direction */
#define LINGER_MS           1000
#define RECONNECT_MS        100
#define RECONNECT_MAX_MS    2000
#define HANDSHAKE_MS        5000
#define HEARTBEAT_MS        5000
#define HEARTBEAT_TIMEOUT_MS 20000
#define TCP_MAXRT_MS        20000
#define SOCKETS_MAX         16384
#define DESCRIPTORS_MIN     32 /* ZeroMQ ends the process when it gets none at its start */

/* ---- one ZeroMQ context for the process, while it has links ------------------------------- */

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static void    *context_shared;
static unsigned context_users;

static void *context_acquire(void)
{
    pthread_mutex_lock(&context_lock);
    if (!context_users++) {
        context_shared = zmq_ctx_new();
        zmq_ctx_set(context_shared, ZMQ_MAX_SOCKETS, SOCKETS_MAX);
    }
    void *context = context_shared;
    pthread_mutex_unlock(&context_lock);
    return context;
}

static void context_release(void)
{
    pthread_mutex_lock(&context_lock);
    if (!--context_users) {
        while (zmq_ctx_term(context_shared) && errno == EINTR)
            ;
        context_shared = NULL;
    }
    pthread_mutex_unlock(&context_lock);
}

/* ---- addresses ---------------------------------------------------------------------------- */

/* ZeroMQ would silently take the path away from a live server, and delete a file there. */
static int check_path_is_free(const char *path, struct err *err)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct stat st;
    if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
        return err_set(err, -EEXIST, "ipc://%s: what lies there is no socket; choose another path",
                       path);
    memcpy(a.sun_path, path, strlen(path) + 1); /* link_address_check knows that it fits */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_set(err, -errno, "socket: %s", strerror(errno));
    bool in_use = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
    close(fd);
    if (in_use)
        return err_set(err, -EADDRINUSE, "ipc://%s: another server is listening there", path);
    return 0;
}

/* ---- sockets ------------------------------------------------------------------------------ */

static void set_int(void *socket, int option, int value)
{
    zmq_setsockopt(socket, option, &value, sizeof value);
}

static void set_options(void *s, bool is_server)
{
    int64_t bytes_max = is_server ? LOAD_BYTES_MAX : BULK_BYTES_MAX;
    zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &bytes_max, sizeof bytes_max);
    set_int(s, ZMQ_LINGER, LINGER_MS);
    set_int(s, ZMQ_SNDHWM, HIGH_WATER_MESSAGES);
    set_int(s, ZMQ_RCVHWM, HIGH_WATER_MESSAGES);
    set_int(s, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    set_int(s, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    set_int(s, ZMQ_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS);
    set_int(s, ZMQ_HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS);
    set_int(s, ZMQ_TCP_MAXRT, TCP_MAXRT_MS);
    set_int(s, ZMQ_IPV6, 1);
    if (is_server) {
        set_int(s, ZMQ_ROUTER_MANDATORY, 1);
        /* A client that reconnects keeps its id, and must be heard although the old connection
         * has not been found dead yet. */
        set_int(s, ZMQ_ROUTER_HANDOVER, 1);
        set_int(s, ZMQ_BACKLOG, 1024);
        return;
    }
    set_int(s, ZMQ_IMMEDIATE, 1);
    set_int(s, ZMQ_RECONNECT_IVL, RECONNECT_MS);
    set_int(s, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS);
}

static int open_monitor(struct link_socket *s, bool is_server, void *context, struct err *err)
{
    static unsigned long n_monitors;
    char address[64];
    snprintf(address, sizeof address, "inproc://link-%lu",
             __atomic_add_fetch(&n_monitors, 1, __ATOMIC_RELAXED));
    int events = is_server ? ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_ACCEPT_FAILED |
                                ZMQ_EVENT_DISCONNECTED
                              : ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED |
                                ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                                ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL;
    if (!(s->monitor = zmq_socket(context, ZMQ_PAIR)))
        return err_set(err, -errno, "zmq_socket: %s", zmq_strerror(errno));
    /* The I/O thread blocks when the monitor is full, so let it never be full. */
    set_int(s->monitor, ZMQ_RCVHWM, 0);
    set_int(s->monitor, ZMQ_LINGER, 0);
    if (zmq_socket_monitor(s->socket, address, events) || zmq_connect(s->monitor, address))
        return err_set(err, -errno, "zmq_socket_monitor: %s", zmq_strerror(errno));
    return 0;
}

int link_socket_descriptor(void *socket)
{
    int fd = -1;
    size_t size = sizeof fd;
    zmq_getsockopt(socket, ZMQ_FD, &fd, &size);
    return fd;
}

static rlim_t descriptors_max(void)
{
    struct rlimit files;
    return getrlimit(RLIMIT_NOFILE, &files) == 0 ? files.rlim_cur : RLIM_INFINITY;
}

static int check_descriptors(struct err *err)
{
    if (descriptors_max() >= DESCRIPTORS_MIN)
        return 0;
    return err_set(err, -EMFILE, "%d files may be open at once (ulimit -n), at least %d are "
                   "needed", (int)descriptors_max(), DESCRIPTORS_MIN);
}

int link_loop_init(struct uv_loop_s *loop, struct err *err)
{
    int rc = check_descriptors(err);
    if (rc == 0 && (rc = uv_loop_init(loop)) < 0)
        err_set(err, rc, "no event loop: %s", uv_strerror(rc));
    return rc;
}

int link_socket_open(bool is_server, struct link_socket *out, struct err *err)
{
    *out = (struct link_socket){0};
    int rc = check_descriptors(err);
    if (rc < 0)
        return rc;
    void *context = context_acquire();
    out->has_context = true;
    if (!(out->socket = zmq_socket(context, is_server ? ZMQ_ROUTER : ZMQ_DEALER)))
        return err_set(err, -errno, "zmq_socket: %s", zmq_strerror(errno));
    set_options(out->socket, is_server);
    return open_monitor(out, is_server, context, err);
}

/* ---- keys ----------------------------------------------------------------------------------- */

static bool is_tcp(const char *address)
{
    return !strncmp(address, "tcp://", 6);
}

/* ZeroMQ copies these for each address; without keys they say so. */
static void set_server_keys(void *socket, const struct key *own)
{
    static const char domain[] = "ballast";
    set_int(socket, ZMQ_CURVE_SERVER, own != NULL);
    zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, domain, own ? sizeof domain - 1 : 0);
    if (own)
        zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, own->secret_text, KEY_TEXT_BYTES);
}

int link_socket_open_door(struct link_socket *s, struct err *err)
{
    if (!(s->door = zmq_socket(context_shared, ZMQ_REP)) ||
        zmq_bind(s->door, "inproc://zeromq.zap.01") < 0)
        return err_set(err, -errno, "who may come in cannot be asked: %s", zmq_strerror(errno));
    set_int(s->door, ZMQ_LINGER, 0);
    return 0;
}

/* The key of a CURVE client in a question of n parts, as text. */
static bool key_of_question(zmq_msg_t *parts, int n, char out_text[KEY_TEXT_BYTES])
{
    enum { MECHANISM = 5, KEY = 6 };
    return n > KEY && zmq_msg_size(&parts[MECHANISM]) == 5 &&
           !memcmp(zmq_msg_data(&parts[MECHANISM]), "CURVE", 5) &&
           zmq_msg_size(&parts[KEY]) == 32 &&
           zmq_z85_encode(out_text, zmq_msg_data(&parts[KEY]), 32);
}

/* The answer's user id, which ZeroMQ then gives with every message, is the key. */
bool link_socket_answer(const struct link_socket *s,
                        bool (*admit)(void *context, const char *public_text), void *context)
{
    enum { REQUEST = 1, PARTS = 16 };
    zmq_msg_t parts[PARTS];
    char key[KEY_TEXT_BYTES] = "";
    int n = 0;
    for (bool more = true; more && n < PARTS; n++) {
        zmq_msg_init(&parts[n]);
        if (zmq_msg_recv(&parts[n], s->door, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&parts[n]);
            break;
        }
        more = zmq_msg_more(&parts[n]);
    }
    if (n > REQUEST) {
        bool may = key_of_question(parts, n, key) && admit(context, key);
        zmq_send(s->door, "1.0", 3, ZMQ_SNDMORE);
        zmq_send(s->door, zmq_msg_data(&parts[REQUEST]), zmq_msg_size(&parts[REQUEST]),
                 ZMQ_SNDMORE);
        zmq_send(s->door, may ? "200" : "400", 3, ZMQ_SNDMORE);
        zmq_send(s->door, may ? "OK" : "No", 2, ZMQ_SNDMORE);
        zmq_send(s->door, key, may ? strlen(key) : 0, ZMQ_SNDMORE);
        zmq_send(s->door, "", 0, 0);
    }
    bool any = n > 0;
    while (n > 0)
        zmq_msg_close(&parts[--n]);
    return any;
}

int link_socket_connect(const struct link_socket *s, const char *address, const struct key *own,
                        const char *server_public, struct err *err)
{
    if (own && is_tcp(address)) {
        zmq_setsockopt(s->socket, ZMQ_CURVE_PUBLICKEY, own->public_text, KEY_TEXT_BYTES);
        zmq_setsockopt(s->socket, ZMQ_CURVE_SECRETKEY, own->secret_text, KEY_TEXT_BYTES);
        zmq_setsockopt(s->socket, ZMQ_CURVE_SERVERKEY, server_public, KEY_TEXT_BYTES);
    }
    if (zmq_connect(s->socket, address))
        return err_set(err, -errno, "cannot connect to %s: %s", address, zmq_strerror(errno));
    return 0;
}

void link_socket_disconnect(const struct link_socket *s, const char *address)
{
    zmq_disconnect(s->socket, address);
}

/* ---- listening ------------------------------------------------------------------------------ */

int link_socket_bind(const struct link_socket *s, const char *address, const struct key *own,
                     struct err *err)
{
    int rc;
    if ((rc = link_address_check(address, own != NULL, err)) < 0)
        return rc;
    if (!strncmp(address, "ipc://", 6) && (rc = check_path_is_free(address + 6, err)) < 0)
        return rc;
    if (descriptors_max() < INT_MAX)
        link_accept_limit((int)descriptors_max() - LINK_DESCRIPTORS_KEPT);
    set_server_keys(s->socket, is_tcp(address) ? own : NULL);
    if (zmq_bind(s->socket, address))
        return err_set(err, -errno, "cannot listen on %s: %s", address, zmq_strerror(errno));
    return 0;
}

void link_socket_close(struct link_socket *s)
{
    if (s->monitor) {
        zmq_socket_monitor(s->socket, NULL, 0);
        zmq_close(s->monitor);
    }
    if (s->socket)
        zmq_close(s->socket);
    if (s->door)
        zmq_close(s->door);
    if (s->has_context)
        context_release();
}
