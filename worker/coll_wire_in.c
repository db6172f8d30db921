/* coll_wire_in.c - what comes from one rank: opened where it is expected, or set aside
 *
 * Nothing is believed before it has opened: the head of a frame says how much follows it and where
 * that belongs. A piece is opened into the caller's memory, whose ticket is done when the whole
 * message has. */
#include "worker/coll_wire_in.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/mem.h"

#define AHEAD_BYTES  ((size_t)4 << 10) /* read beyond what is needed */
#define SEALED_BYTES (FRAME_MAX_BYTES + 2 * AHEAD_BYTES)
#define FRAMES_MAX   8 /* at once, or a few more: others have links, too */
#define ASIDE_COST   256 /* so that empty ones are bounded, too */

struct wire_aside {
    struct wire_aside *next;
    uint64_t tag, total, at;
    size_t  n;
    uint8_t bytes[];
};

void wire_in_init(struct wire_in *in)
{
    *in = (struct wire_in){.fd = -1};
    in->posts_last = &in->posts;
    in->aside_last = &in->aside;
}

void wire_in_fini(struct wire_in *in)
{
    for (struct wire_in_post *p = in->posts, *next; p; p = next) {
        next = p->next;
        free(p);
    }
    for (struct wire_aside *a = in->aside, *next; a; a = next) {
        next = a->next;
        free(a);
    }
    if (in->fd >= 0)
        close(in->fd);
    seal_destroy(in->seal);
    free(in->sealed);
    free(in->now);
    wire_in_init(in);
}

void wire_in_open(struct wire_in *in, int fd, struct seal *seal)
{
    in->sealed = xcalloc(1, SEALED_BYTES);
    in->seal = seal;
    in->fd = fd;
}

/* ---- what is expected ------------------------------------------------------------------------ */

static void end(struct wire_in_post *p)
{
    struct wire_ticket *t = p->ticket;
    free(p);
    wire_done(t);
}

/* Of what lies aside, the pieces of that tag. True: the message is whole. */
static bool take_aside(struct wire_in *in, struct wire_in_post *p)
{
    bool is_whole = false;
    for (struct wire_aside **at = &in->aside, *a; (a = *at);) {
        if (a->tag != p->tag) {
            at = &a->next;
            continue;
        }
        if (a->total != p->n)
            atomic_store(&p->ticket->n_wrong, 1);
        else if (a->n > 0)
            memcpy(p->data + a->at, a->bytes, a->n);
        is_whole = a->at + a->n == a->total;
        in->aside_bytes -= a->n + ASIDE_COST;
        *at = a->next;
        if (!*at)
            in->aside_last = at;
        free(a);
    }
    return is_whole;
}

void wire_in_expect(struct wire_in *in, struct wire_in_post *p)
{
    p->next = NULL;
    if (in->aside && take_aside(in, p)) {
        end(p);
    } else if (in->got < in->total && in->tag == p->tag && !in->now) {
        in->now = p;
    } else {
        *in->posts_last = p;
        in->posts_last = &p->next;
    }
}

static struct wire_in_post *find(struct wire_in *in, uint64_t tag)
{
    for (struct wire_in_post **at = &in->posts, *p; (p = *at); at = &p->next)
        if (p->tag == tag) {
            *at = p->next;
            if (!*at)
                in->posts_last = at;
            p->next = NULL;
            return p;
        }
    return NULL;
}

/* A piece that nobody has asked for. */
static int set_aside(struct wire_in *in, const struct frame *f, const uint8_t *record)
{
    struct wire_aside *a = xcalloc(1, sizeof *a + f->n);
    *a = (struct wire_aside){.tag = f->tag, .total = f->total, .at = f->at, .n = f->n};
    if (f->n > 0 && seal_open(in->seal, record, f->n, a->bytes) < 0) {
        free(a);
        return -EBADMSG;
    }
    *in->aside_last = a;
    in->aside_last = &a->next;
    in->aside_bytes += f->n + ASIDE_COST;
    return 0;
}

/* Of a message of another size it is thrown away. */
static int put(struct wire_in *in, const struct frame *f, uint8_t *record)
{
    bool fits = f->total == in->now->n;
    if (!fits)
        atomic_store(&in->now->ticket->n_wrong, 1);
    return f->n > 0 ? seal_open(in->seal, record, f->n, fits ? in->now->data + f->at : record) : 0;
}

/* ---- frames ---------------------------------------------------------------------------------- */

/* Until n_bytes of what has come are there. */
static int read_until(struct wire_in *in, size_t n_bytes)
{
    while (in->end - in->at < n_bytes) {
        if (in->at == in->end || in->at + n_bytes > SEALED_BYTES) {
            memmove(in->sealed, in->sealed + in->at, in->end - in->at);
            in->end -= in->at;
            in->at = 0;
        }
        size_t most = in->at + n_bytes + AHEAD_BYTES;
        most = most < SEALED_BYTES ? most : SEALED_BYTES;
        ssize_t n = recv(in->fd, in->sealed + in->end, most - in->end, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EWOULDBLOCK)
            return -EAGAIN;
        if (n <= 0)
            return -EPIPE;
        in->end += (size_t)n;
    }
    return 0;
}

static bool makes_sense(const struct wire_in *in, const struct frame *f)
{
    bool begins = in->got == in->total;
    if (in->has_left || f->kind != FRAME_DATA)
        return !in->has_left && f->kind == FRAME_BYE && begins && f->n == 0;
    return f->total <= WIRE_BYTES_MAX && f->at <= f->total && f->n <= f->total - f->at &&
           f->n <= WIRE_PIECE_BYTES && (f->n > 0 || f->total == 0) &&
           (begins ? f->at == 0
                   : f->at == in->got && f->tag == in->tag && f->total == in->total);
}

static int take_head(struct wire_in *in)
{
    struct frame *f = &in->head;
    int rc = read_until(in, FRAME_HEAD_BYTES);
    if (rc < 0)
        return rc;
    if (seal_open(in->seal, in->sealed + in->at, sizeof *f, f) < 0)
        return -EBADMSG;
    in->at += FRAME_HEAD_BYTES;
    if (!makes_sense(in, f))
        return -EPROTO;
    in->has_head = true;
    return 0;
}

static void end_piece(struct wire_in *in, const struct frame *f)
{
    in->got += f->n;
    in->has_head = false;
    if (in->got < in->total)
        return;
    struct wire_in_post *p = in->now;
    in->now = NULL;
    in->got = in->total = 0;
    if (p)
        end(p);
}

static int take_piece(struct wire_in *in)
{
    const struct frame *f = &in->head;
    size_t n_sealed = f->n > 0 ? f->n + SEAL_TAG_BYTES : 0;
    int rc = read_until(in, n_sealed);
    if (rc < 0)
        return rc;
    if (f->at == 0) {
        in->tag = f->tag;
        in->total = f->total;
        in->got = 0;
        if (!in->now)
            in->now = find(in, f->tag);
    }
    if (!in->now && in->aside_bytes >= WIRE_ASIDE_BYTES)
        return -ENOBUFS;
    uint8_t *record = in->sealed + in->at;
    if ((rc = in->now ? put(in, f, record) : set_aside(in, f, record)) < 0)
        return rc;
    in->at += n_sealed;
    end_piece(in, f);
    return 0;
}

/* Whether what is here does not do for the next step. */
static bool needs_more(const struct wire_in *in)
{
    size_t n_sealed = in->head.n > 0 ? in->head.n + SEAL_TAG_BYTES : 0;
    return in->end - in->at < (in->has_head ? n_sealed : FRAME_HEAD_BYTES);
}

int wire_in_pull(struct wire_in *in)
{
    int rc = 0;
    /* What has been read already nobody would tell of again. */
    for (int i = 0; rc == 0 && (i < FRAMES_MAX || !needs_more(in)); i++) {
        rc = in->has_head ? 0 : take_head(in);
        if (rc < 0)
            break;
        if (in->head.kind == FRAME_DATA) {
            rc = take_piece(in);
        } else {
            in->has_left = true;
            in->has_head = false;
        }
    }
    return rc;
}
