/* link.h - a ZeroMQ socket on a uv loop: messages of a few frames, to and from numbered peers
 *
 * A server link is a ROUTER that refuses to drop silently, a client link is a DEALER with a fresh
 * random routing id per life. Nothing here ever blocks: a peer that does not read gets a bounded
 * queue, then loses messages and is counted. One thread, the loop's, owns a link.
 *
 * Without keys addresses are ipc://PATH and tcp:// on loopback (127.0.0.0/8, [::1], localhost);
 * any other is refused. With keys every tcp address is allowed and encrypted (CURVE), and a server
 * lets in only whom its owner admits. Who comes over ipc is known to the kernel and needs none. */
#ifndef COMMON_LINK_H
#define COMMON_LINK_H

#include "common/err.h"
#include "common/keyring.h"
#include "common/types.h"

struct uv_loop_s; /* uv_loop_t */
struct link;

/* Numbers are never used again. A client link has one peer, LINK_SERVER. */
typedef uint64_t link_peer;
#define LINK_SERVER ((link_peer)1)

#define LINK_FRAMES_MAX 4 /* frames handed over; more are counted and thrown away */

/* Bytes that many messages carry at once, without a copy of each. */
struct link_body;

struct link_frame {
    const void *bytes;
    size_t      n_bytes;
    struct link_body *body; /* whose bytes they are; NULL: nobody's, and they are copied */
};

enum link_denial {
    LINK_NOT_ADMITTED,  /* the server does not know our key */
    LINK_OTHER_SECURITY, /* one side has keys, the other has not */
    LINK_NO_HANDSHAKE,  /* it hangs up in the middle: most probably it has another key */
};

/* All called on the loop's thread; NULL where a caller does not care. */
struct link_handler {
    void *context; /* borrowed */

    /* One message without its routing id. n_frames may be larger than LINK_FRAMES_MAX: then only
     * the first LINK_FRAMES_MAX are there. Frames live until it returns. It must not close the
     * link. */
    void (*message)(void *context, link_peer peer, const struct link_frame *frames,
                    size_t n_frames);

    /* After the messages of one turn: what they made may now be handed on as one batch. */
    void (*turn_end)(void *context);

    /* Server link: this peer was found unreachable or was dropped for not reading; its number
     * will not come back. */
    void (*peer_gone)(void *context, link_peer peer);

    /* Client link: the connection is up (again), or was lost. What was sent before a loss may or
     * may not have arrived. */
    void (*connection)(void *context, bool is_up);

    /* Server link: a connection was closed at once, because few descriptors are left. */
    void (*refused)(void *context);

    /* Client link: the server is there and does not take us; it is tried again. It may call
     * link_change_keys, but must not close the link. */
    void (*denied)(void *context, enum link_denial why);
};

#define LINK_SERVERS_MAX 8

/* Copied when a link is made. NULL instead of it: there are none. */
struct link_keys {
    const struct key *own; /* with its secret */

    /* Server link: may the holder of this public key (Z85 text) come in? On the loop's thread. */
    bool (*admit)(void *context, const char *public_text);

    /* Client link: the servers that it trusts, tried one after the other; with two of them the
     * server may change its key under way. */
    const struct key *servers;
    size_t n_servers;
};

struct link_stats {
    uint64_t n_received, n_sent, n_unreachable, n_dropped_slow, n_bad_frames;
    uint32_t n_peers, n_connections;
};

/* 0 if a daemon may listen on (or connect to) that address, else -EINVAL and why. */
int link_address_check(const char *address, bool has_keys, struct err *err);

/* A loop for links, ended with uv_loop_close. -EMFILE where the process may have too few
 * descriptors for it and a link; then there is none. */
int link_loop_init(struct uv_loop_s *loop, struct err *err);

/* Descriptors that connections leave to the rest of the process. */
#define LINK_DESCRIPTORS_KEPT 64

/* A server on all the addresses; gives *out_link, ended with link_close. An ipc path that a dead
 * server left behind is taken over; one that is in use is -EADDRINUSE. As many connections are
 * taken as the limit of open files (RLIMIT_NOFILE) has room for at this moment. In one process one
 * server may have keys. */
int link_listen(struct uv_loop_s *loop, const char *const *addresses, size_t n_addresses,
                const struct link_keys *keys, const struct link_handler *handler,
                struct link **out_link, struct err *err);

/* A client; returns at once, connects and reconnects by itself (100 ms, doubling to 2 s). Gives
 * *out_link, ended with link_close. */
int link_connect(struct uv_loop_s *loop, const char *address, const struct link_keys *keys,
                 const struct link_handler *handler, struct link **out_link, struct err *err);

/* Client link with keys: from its next try on it has these. */
void link_change_keys(struct link *l, const struct link_keys *keys);

/* Gives n_bytes to be filled, ended with link_body_release: they go with the last message. */
struct link_body *link_body_create(size_t n_bytes);
uint8_t *link_body_bytes(struct link_body *body);
/* NULL is fine. */
void link_body_release(struct link_body *body);

/* Sends one message; copies the frames that have no body. 0: sent or queued. -EHOSTUNREACH: a
 * server does not know the peer any more. -EAGAIN: a client link is not connected, nothing was
 * kept. -ENOBUFS: the peer does not read and its queue is full; a server has forgotten it. */
int link_send(struct link *l, link_peer peer, const struct link_frame *frames, size_t n_frames);

/* The public key with which the peer came in, as Z85 text; "" for one without. Lives as long as the
 * peer. */
const char *link_peer_key(const struct link *l, link_peer peer);

/* Nothing goes any more to those that came in with a key that is not good any more. What they say
 * later comes from a new number. */
void link_forget_keys(struct link *l, bool (*is_good)(void *context, const char *public_text),
                      void *context);

/* The Unix user at the other end of an ipc connection, as its kernel says; "anonymous" over tcp.
 * Lives as long as the peer. */
const char *link_peer_user(const struct link *l, link_peer peer);

/* This process's own user, named in the same way. Gives, freed with free(). */
char *link_own_user(void);

/* A place for the caller's own memory about a peer, NULL at first; what is put there must come
 * from malloc and is freed with the peer. NULL if there is no such peer. */
void **link_peer_slot(struct link *l, link_peer peer);

struct link_stats link_stats(const struct link *l);

/* Gives what is queued a bounded time to leave (1 s), then closes. The memory goes when the loop
 * has run its close callbacks, so run the loop to its end afterwards. NULL is fine. */
void link_close(struct link *l);

#endif
