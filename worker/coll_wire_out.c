/* coll_wire_out.c - what goes to one rank: sealed piece by piece from the callers' memory
 *
 * The cipher's pass is the only copy made here, into a buffer that stays in the core's cache until
 * the kernel has taken it. */
#include "worker/coll_wire_out.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/mem.h"

#define SEALED_BYTES (FRAME_MAX_BYTES + ((size_t)4 << 10)) /* a piece, with small ones beside it */

void wire_out_init(struct wire_out *o)
{
    *o = (struct wire_out){.fd = -1};
    o->posts_last = &o->posts;
}

void wire_out_fini(struct wire_out *o)
{
    for (struct wire_out_post *p = o->posts, *next; p; p = next) {
        next = p->next;
        free(p);
    }
    if (o->fd >= 0)
        close(o->fd);
    seal_destroy(o->seal);
    free(o->sealed);
    wire_out_init(o);
}

static void seal_head(struct wire_out *o, const struct frame *f)
{
    seal_close(o->seal, f, sizeof *f, o->sealed + o->end);
    o->end += FRAME_HEAD_BYTES;
}

void wire_out_open(struct wire_out *o, int fd, struct seal *seal, uint32_t from)
{
    const struct frame hello = {.kind = FRAME_HELLO};
    struct greeting g = {.magic = GREETING_MAGIC, .rank = from};
    o->fd = fd;
    o->seal = seal;
    o->sealed = xcalloc(1, SEALED_BYTES);
    seal_close(seal, &hello, sizeof hello, g.hello);
    memcpy(o->sealed, &g, sizeof g);
    o->end = sizeof g;
}

void wire_out_add(struct wire_out *o, struct wire_out_post *p)
{
    p->next = NULL;
    *o->posts_last = p;
    o->posts_last = &p->next;
}

/* As many pieces as there is room for. */
static void seal_pieces(struct wire_out *o)
{
    for (struct wire_out_post *p; (p = o->posts);) {
        size_t left = p->n - p->at, n = left < WIRE_PIECE_BYTES ? left : WIRE_PIECE_BYTES;
        if (o->end + FRAME_HEAD_BYTES + n + SEAL_TAG_BYTES > SEALED_BYTES)
            return;
        const struct frame f = {.kind = FRAME_DATA, .n = (uint32_t)n, .tag = p->tag,
                                .total = p->n, .at = p->at};
        seal_head(o, &f);
        if (n > 0) {
            seal_close(o->seal, p->data + p->at, n, o->sealed + o->end);
            o->end += n + SEAL_TAG_BYTES;
        }
        p->at += n;
        if (p->at < p->n)
            continue;
        o->posts = p->next;
        if (!o->posts)
            o->posts_last = &o->posts;
        wire_done(p->ticket);
        free(p);
    }
}

int wire_out_push(struct wire_out *o)
{
    for (;;) {
        while (o->at < o->end) {
            ssize_t n = send(o->fd, o->sealed + o->at, o->end - o->at, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR)
                continue;
            if (n < 0)
                return errno == EWOULDBLOCK ? -EAGAIN : -errno;
            o->at += (size_t)n;
        }
        o->at = o->end = 0;
        if (!o->posts)
            return 0;
        seal_pieces(o);
    }
}

void wire_out_say_bye(struct wire_out *o)
{
    const struct frame bye = {.kind = FRAME_BYE};
    seal_head(o, &bye);
    o->has_said_bye = true;
}

bool wire_out_has_arrived(const struct wire_out *o)
{
    int n = 0;
    return o->at == o->end && (ioctl(o->fd, SIOCOUTQ, &n) < 0 || n == 0);
}
