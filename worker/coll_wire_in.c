/* coll_wire_in.c - what comes from one rank: met by what is expected, or set aside */
#include "worker/coll_wire_in.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

struct wire_aside {
    struct wire_aside *next;
    uint64_t tag, total, at;
    zmq_msg_t payload;
};

void wire_in_init(struct wire_in *in)
{
    *in = (struct wire_in){0};
    in->posts_last = &in->posts;
    in->aside_last = &in->aside;
}

void wire_in_fini(struct wire_in *in)
{
    for (struct wire_post *p = in->posts, *next; p; p = next) {
        next = p->next;
        free(p);
    }
    for (struct wire_aside *a = in->aside, *next; a; a = next) {
        next = a->next;
        zmq_msg_close(&a->payload);
        free(a);
    }
    free(in->now);
    wire_in_init(in);
}

/* A message of another size is read, and thrown away. */
static void put(struct wire_in *in, struct wire_post *p, uint64_t total, uint64_t at,
                zmq_msg_t *payload)
{
    size_t n = zmq_msg_size(payload);
    if (total != p->n)
        atomic_store(&p->ticket->n_wrong, 1);
    else if (n > 0)
        memcpy(p->data + at, zmq_msg_data(payload), n);
    in->consumed += wire_cost(n);
}

static void end(struct wire_post *p)
{
    struct wire_ticket *t = p->ticket;
    free(p);
    wire_done(t);
}

/* Of what lies aside, the pieces of that tag. True: the message is whole. */
static bool take_aside(struct wire_in *in, struct wire_post *p)
{
    bool is_whole = false;
    for (struct wire_aside **at = &in->aside, *a; (a = *at);) {
        if (a->tag != p->tag) {
            at = &a->next;
            continue;
        }
        put(in, p, a->total, a->at, &a->payload);
        is_whole = a->at + zmq_msg_size(&a->payload) == a->total;
        *at = a->next;
        if (!*at)
            in->aside_last = at;
        zmq_msg_close(&a->payload);
        free(a);
    }
    return is_whole;
}

void wire_in_expect(struct wire_in *in, struct wire_post *p)
{
    p->next = NULL;
    if (in->aside && take_aside(in, p)) {
        end(p);
    } else if (in->at < in->total && in->tag == p->tag && !in->now) {
        in->now = p;
    } else {
        *in->posts_last = p;
        in->posts_last = &p->next;
    }
}

static struct wire_post *find(struct wire_in *in, uint64_t tag)
{
    for (struct wire_post **at = &in->posts, *p; (p = *at); at = &p->next)
        if (p->tag == tag) {
            *at = p->next;
            if (!*at)
                in->posts_last = at;
            p->next = NULL;
            return p;
        }
    return NULL;
}

static void set_aside(struct wire_in *in, uint64_t at, zmq_msg_t *payload)
{
    struct wire_aside *a = xcalloc(1, sizeof *a);
    *a = (struct wire_aside){.tag = in->tag, .total = in->total, .at = at};
    zmq_msg_init(&a->payload);
    zmq_msg_move(&a->payload, payload);
    *in->aside_last = a;
    in->aside_last = &a->next;
}

int wire_in_take(struct wire_in *in, uint64_t tag, uint64_t total, uint64_t at, zmq_msg_t *payload)
{
    size_t n = zmq_msg_size(payload);
    bool begins = in->at == in->total;
    if (total > WIRE_BYTES_MAX || at > total || n > total - at || (n == 0 && total > 0) ||
        (begins ? at != 0 : at != in->at || tag != in->tag || total != in->total))
        return -EPROTO;
    if (begins) {
        in->tag = tag;
        in->total = total;
        in->now = find(in, tag);
    }
    in->at = at + n;
    in->arrived += wire_cost(n);
    if (in->now)
        put(in, in->now, total, at, payload);
    else
        set_aside(in, at, payload);
    if (in->at < total)
        return 0;
    struct wire_post *p = in->now;
    in->now = NULL;
    in->at = in->total = 0;
    if (p)
        end(p);
    return 0;
}

bool wire_in_owes(const struct wire_in *in)
{
    return in->consumed - in->told >= WIRE_WINDOW_BYTES / 4;
}
