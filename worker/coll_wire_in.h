/* coll_wire_in.h - what comes from one rank: opened where it is expected, or set aside
 *
 * Private to coll_wire. One thread at a time. Pieces of a message come one after another, those of
 * another message after them. What nobody has asked for yet is kept, up to WIRE_ASIDE_BYTES; then
 * the link is not read until somebody does. */
#ifndef WORKER_COLL_WIRE_IN_H
#define WORKER_COLL_WIRE_IN_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/coll_wire.h"
#include "worker/coll_wire_frame.h"

#define WIRE_ASIDE_BYTES ((uint64_t)4 << 20)

struct wire_in_post {
    struct wire_in_post *next;
    uint32_t from;
    uint64_t tag;
    uint8_t *data;
    size_t   n;
    struct wire_ticket *ticket;
};

struct wire_aside;

struct wire_in {
    int fd; /* -1: there is none yet */
    struct seal *seal;
    uint8_t *sealed;    /* what has come and is not opened: from at to end */
    size_t   at, end;
    struct frame head;  /* of the frame under way */
    bool     has_head, has_left;
    bool     is_full, has_ended; /* it is not read now; not again */
    struct wire_in_post *posts, **posts_last;
    struct wire_aside   *aside, **aside_last;
    uint64_t aside_bytes;
    struct wire_in_post *now;   /* of the message under way; NULL: it goes aside */
    uint64_t tag, total, got;   /* of that message; got == total: there is none */
};

void wire_in_init(struct wire_in *in);
void wire_in_fini(struct wire_in *in);

/* Takes fd and seal, which has opened the greeting. */
void wire_in_open(struct wire_in *in, int fd, struct seal *seal);
/* Takes p. */
void wire_in_expect(struct wire_in *in, struct wire_in_post *p);
/* Takes some of what has come. 0: there may be more. -EAGAIN: there is no more now. -ENOBUFS: what
 * comes next must be expected first. -EPIPE: all that comes has come, in order (has_left) or not.
 * -EBADMSG: a frame does not open. -EPROTO: it does, and makes no sense. */
int wire_in_pull(struct wire_in *in);

#endif
