/* coll_wire_out.h - what goes to one rank: sealed piece by piece from the callers' memory
 *
 * Private to coll_wire. One thread at a time. */
#ifndef WORKER_COLL_WIRE_OUT_H
#define WORKER_COLL_WIRE_OUT_H

#include <stdbool.h>

#include "worker/coll_wire.h"
#include "worker/coll_wire_frame.h"

struct wire_out_post {
    struct wire_out_post *next;
    uint32_t to;
    uint64_t tag;
    const uint8_t *data;
    size_t n, at;
    struct wire_ticket *ticket;
};

struct wire_out {
    int fd; /* -1: there is none yet */
    struct seal *seal;
    uint8_t *sealed; /* what waits for the kernel: from at to end */
    size_t at, end;
    bool is_up, is_full, has_ended; /* the kernel connected it; takes no more now; will not again */
    bool has_said_bye;
    struct wire_out_post *posts, **posts_last;
};

void wire_out_init(struct wire_out *o);
void wire_out_fini(struct wire_out *o);

/* Takes fd and seal; the greeting goes first. */
void wire_out_open(struct wire_out *o, int fd, struct seal *seal, uint32_t from);
/* Takes p. */
void wire_out_add(struct wire_out *o, struct wire_out_post *p);
/* All that is posted, as far as the kernel takes it now. 0: all is sent; -EAGAIN: not yet; else
 * the link has ended. A ticket is done when its bytes are sealed. */
int  wire_out_push(struct wire_out *o);
/* After all posts. */
void wire_out_say_bye(struct wire_out *o);
/* Whether the other machine has all of it. */
bool wire_out_has_arrived(const struct wire_out *o);

#endif
