/* coll_wire_in.h - what comes from one rank: met by what is expected, or set aside
 *
 * Private to coll_wire. Pieces of a message come one after another, those of another message
 * after them. */
#ifndef WORKER_COLL_WIRE_IN_H
#define WORKER_COLL_WIRE_IN_H

#include <stdbool.h>
#include <stdint.h>

#include <zmq.h>

#include "worker/coll_wire.h"

#define WIRE_WINDOW_BYTES ((uint64_t)4 << 20)
#define WIRE_BYTES_MAX    ((uint64_t)1 << 42) /* of a message */

struct wire_post {
    struct wire_post *next;
    uint32_t from;
    uint64_t tag;
    uint8_t *data;
    size_t   n;
    struct wire_ticket *ticket;
};

struct wire_aside;

struct wire_in {
    struct wire_post  *posts, **posts_last;
    struct wire_aside *aside, **aside_last;
    struct wire_post  *now;   /* of the message under way; NULL: it goes aside */
    uint64_t tag, total, at;  /* of that message; at == total: there is none */
    uint64_t arrived;         /* costs of all pieces so far */
    uint64_t consumed, told;  /* and of those that take no memory here any more */
};

/* What a piece counts in the window, so that empty ones are bounded, too. */
static inline uint64_t wire_cost(size_t n_bytes)
{
    return n_bytes + 256;
}

void wire_in_init(struct wire_in *in);
void wire_in_fini(struct wire_in *in);

/* Takes p. */
void wire_in_expect(struct wire_in *in, struct wire_post *p);
/* A piece; may take what is in payload, which stays the caller's to close. -EPROTO where it does
 * not follow the one before. */
int wire_in_take(struct wire_in *in, uint64_t tag, uint64_t total, uint64_t at,
                 zmq_msg_t *payload);

/* Whether so much was consumed that the sender should know. */
bool wire_in_owes(const struct wire_in *in);

/* One of the ticket's is done. */
void wire_done(struct wire_ticket *t);

#endif
