/* link_peers.h - the peers of a link by routing id and by number, and what waits to be sent to each
 *
 * Part of link; a table of its own because a peer is looked up both ways and must be forgotten
 * when it has long been silent (a ROUTER never says that a peer has left). */
#ifndef COMMON_LINK_PEERS_H
#define COMMON_LINK_PEERS_H

#include "common/link.h"

#define ROUTING_ID_BYTES_MAX 255

struct queued_message {
    struct queued_message *next;
    size_t   n_frames, n_bytes;
    uint32_t frame_bytes[LINK_FRAMES_MAX];
    uint8_t  bytes[]; /* the frames, one after the other */
};

struct peer {
    link_peer number;
    char      key[KEY_TEXT_BYTES]; /* the public one it came in with; "": none */
    char     *address; /* as ZeroMQ tells it, with the kernel's uid:gid:pid on ipc; owned */
    char     *user;    /* owned */
    void     *slot;    /* the caller's, owned by the peer */
    uint64_t  heard_ns;
    struct queued_message *first, *last; /* owned */
    size_t    n_queued, queued_bytes;
    struct peer *next_by_id, *next_by_number, *next_waiting;
    bool      is_waiting; /* in the list of peers with a queue */
    uint8_t   n_id;
    uint8_t   id[];
};

/* All zero is an empty table. */
struct peer_table {
    struct peer **by_id, **by_number; /* n_buckets chains each */
    size_t        n_buckets, n_peers;
    link_peer     last_number;
};

struct peer *peers_find(const struct peer_table *t, link_peer number);
struct peer *peers_find_id(const struct peer_table *t, const uint8_t *id, size_t n_id);

/* The table owns it. The id must be new and within ROUTING_ID_BYTES_MAX. */
struct peer *peers_add(struct peer_table *t, const uint8_t *id, size_t n_id);
void peers_remove(struct peer_table *t, struct peer *p);
void peers_fini(struct peer_table *t);

/* Calls visit with every peer not heard of since before_ns; visit may remove that one. */
void peers_visit_silent(struct peer_table *t, uint64_t before_ns,
                        void (*visit)(void *context, struct peer *p), void *context);

/* Copies the frames to the end of the queue. */
void peer_push(struct peer *p, const struct link_frame *frames, size_t n_frames);
void peer_pop(struct peer *p); /* frees the first */
void peer_clear(struct peer *p);

#endif
