/* coll_wire_socket.c - addresses, keys, sockets, and who is let in */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/coll_wire_parts.h"

#define HWM_MESSAGES     32 /* in ZeroMQ, of a connection and direction */
#define ANSWER_LINGER_MS 2000
#define HANDSHAKE_MS     20000
#define HEARTBEAT_MS     5000
#define SILENCE_MS       20000

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

int wire_socket_address(const char *address, uint16_t port, void *out, uint32_t *out_bytes)
{
    char ip[INET6_ADDRSTRLEN];
    const char *ignored;
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    if (!split_address(address, ip, &ignored))
        return -EINVAL;
    if (inet_pton(AF_INET, ip, &v4.sin_addr) == 1) {
        memcpy(out, &v4, sizeof v4);
        *out_bytes = sizeof v4;
    } else if (inet_pton(AF_INET6, ip, &v6.sin6_addr) == 1) {
        memcpy(out, &v6, sizeof v6);
        *out_bytes = sizeof v6;
    } else {
        return -EINVAL;
    }
    return 0;
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
    if (strcmp(port, "*") != 0 && (!end || *end || number > 65534))
        return err_set(err, -EINVAL, "address '%.90s': expected a port of 1 to 65534, whose next "
                       "is free, too, or *", address);
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
    set(s, ZMQ_LINGER, WIRE_LINGER_MS);
    set(s, ZMQ_SNDHWM, HWM_MESSAGES);
    set(s, ZMQ_RCVHWM, HWM_MESSAGES);
    set(s, ZMQ_IPV6, 1);
    set(s, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    set(s, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    set(s, ZMQ_HEARTBEAT_TIMEOUT, SILENCE_MS);
    set(s, ZMQ_HEARTBEAT_TTL, SILENCE_MS);
    zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &(int64_t){2 * WIRE_TEXT_BYTES}, sizeof(int64_t));
    zmq_setsockopt(s, ZMQ_CURVE_PUBLICKEY, w->key, WIRE_KEY_BYTES);
    zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, w->secret, WIRE_KEY_BYTES);
    return s;
}

void *wire_dealer_to(struct wire *w, uint32_t rank)
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
    return p->dealer;
}

int wire_make_keys(struct wire *w, struct err *err)
{
    char public_text[41], secret_text[41];
    if (!zmq_has("curve") || zmq_curve_keypair(public_text, secret_text) < 0)
        return err_set(err, -ENOTSUP, "this libzmq has no CURVE, which the network between hosts "
                       "needs");
    zmq_z85_decode(w->key, public_text);
    zmq_z85_decode(w->secret, secret_text);
    return 0;
}

int wire_listen_at(struct wire *w, const char *address, struct err *err)
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
    zmq_setsockopt(w->listener, ZMQ_ZAP_DOMAIN, domain, sizeof domain - 1);
    if (zmq_bind(w->listener, address) < 0 ||
        zmq_getsockopt(w->listener, ZMQ_LAST_ENDPOINT, w->address, &n) < 0)
        return err_set(err, -errno, "data_address %s: %s", address, zmq_strerror(errno));
    const char *port;
    char ip[INET6_ADDRSTRLEN];
    bool is_any = split_address(address, ip, &port) && strcmp(port, "*") == 0;
    return wire_door_open(w, is_any ? 0 : (uint16_t)(atoi(port) + 1), err);
}

/* ---- admission ------------------------------------------------------------------------------ */

static int find_key(const struct wire *w, const void *key, size_t n)
{
    for (uint32_t r = 0; r < w->world && n == WIRE_KEY_BYTES; r++)
        if (r != w->rank && memcmp(w->peers[r].key, key, n) == 0)
            return (int)r;
    return -1;
}

void wire_admit(struct wire *w)
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
        const zmq_msg_t *key = &parts[KEY];
        int rank = is_curve ? find_key(w, zmq_msg_data((zmq_msg_t *)key), zmq_msg_size(key)) : -1;
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
