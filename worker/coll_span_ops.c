/* coll_span_ops.c - inputs of all to all hosts, and calls that move nothing */
#include <errno.h>
#include <string.h>

#include "worker/coll_copy.h"
#include "worker/coll_span.h"
#include "worker/phases.h"

#define LINE_BYTES 64u

int span_barrier(struct host *h, const struct coll_group *g, struct err *err)
{
    struct span_call c = span_begin(h, g, SHM_BARRIER, 0);
    int rc = span_enter(&c, 0, NULL, 0, false, 0, 0, NULL, err);
    return span_end(h, rc == 0 ? span_leave(&c, err) : rc);
}

/* ---- inputs to all --------------------------------------------------------------------------- */

struct gather {
    struct span_call c;
    const uint8_t *in;
    uint8_t *out;
    size_t part, n_blocks, all; /* bytes of a block, and of a member's whole input */
    size_t window;              /* of each input that comes to me */
    uint32_t n_mine;            /* such inputs */
};

/* Which of the inputs that come to host to are whose there: a number among them. */
static uint32_t far_index(const struct span_group *s, uint32_t member, uint32_t to)
{
    uint32_t p = s->place[member];
    return p < s->start[to] ? p : p - (s->start[to + 1] - s->start[to]);
}

static uint32_t n_on(const struct span_group *s, uint32_t host)
{
    return s->start[host + 1] - s->start[host];
}

/* Of an input, on that host; a rank there has two of each input that comes to it. */
static size_t window_on(const struct span_group *s, uint32_t host)
{
    uint32_t n_far = s->n_ranks - n_on(s, host), n_each = (n_far + n_on(s, host) - 1) /
                                                          n_on(s, host);
    size_t window = SPAN_STAGE_BYTES / 2 / n_each / LINE_BYTES * LINE_BYTES;
    const size_t least = 64 * 1024;
    return window > least ? window : least;
}

static size_t n_windows(size_t all, size_t window)
{
    return (all + window - 1) / window;
}

/* Bytes at .. at + n of member i's input go where its blocks lie in the output. */
static void place_bytes(const struct gather *x, uint32_t i, const uint8_t *from, size_t at,
                        size_t n)
{
    for (size_t end = at + n; at < end;) {
        size_t b = at / x->part, in_block = at % x->part;
        size_t some = x->part - in_block < end - at ? x->part - in_block : end - at;
        uint8_t *to = x->out + (b * x->c.g->n_ranks + i) * x->part + in_block;
        if (to != from)
            copy_piece(to, from, some, x->all * x->c.g->n_ranks);
        from += some;
        at += some;
    }
}

static void send_input(struct gather *x)
{
    const struct span_group *s = x->c.s;
    for (uint32_t d = 0; d < s->n_hosts; d++) {
        size_t window = window_on(s, d);
        uint32_t who = s->member[s->start[d] + far_index(s, x->c.g->me, d) % n_on(s, d)];
        for (size_t w = 0; d != s->my_host && w < n_windows(x->all, window); w++) {
            size_t at = w * window, n = x->all - at < window ? x->all - at : window;
            wire_send(x->c.h->span->wire, x->c.g->ranks[who],
                      span_tag(&x->c, SPAN_SLOTS + (uint32_t)w), x->c.shown + at, n,
                      &x->c.ticket);
        }
    }
}

static size_t window_bytes(const struct gather *x, size_t w)
{
    size_t at = w * x->window;
    return x->all - at < x->window ? x->all - at : x->window;
}

static void expect_window(struct gather *x, size_t w, struct wire_ticket *t)
{
    const struct span_group *s = x->c.s;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        uint32_t f = far_index(s, i, s->my_host);
        if (s->host[i] == s->my_host || f % s->n_here != s->me_here)
            continue;
        uint8_t *to = x->c.h->span->stage + (w % 2 * x->n_mine + f / s->n_here) * x->window;
        wire_recv(x->c.h->span->wire, x->c.g->ranks[i],
                  span_tag(&x->c, SPAN_SLOTS + (uint32_t)w), to, window_bytes(x, w), t);
    }
}

/* Of every member elsewhere, from the stage of whom it came to. */
static void take_window(struct gather *x, size_t w)
{
    const struct span_group *s = x->c.s;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        uint32_t f = far_index(s, i, s->my_host), holder = f % s->n_here;
        if (s->host[i] == s->my_host)
            continue;
        uint32_t member = s->member[s->start[s->my_host] + holder];
        uint32_t n_held = (s->n_far - holder + s->n_here - 1) / s->n_here;
        const uint8_t *from = x->c.h->shm.base + span_head_of(&x->c, member)->stage_at +
                              (w % 2 * n_held + f / s->n_here) * x->window;
        place_bytes(x, i, from, w * x->window, window_bytes(x, w));
    }
}

static int gather_windows(struct gather *x, struct err *err)
{
    struct wire_ticket tickets[2] = {0};
    size_t n = n_windows(x->all, x->window);
    int rc = 0;
    send_input(x);
    expect_window(x, 0, &tickets[0]);
    wire_go(x->c.h->span->wire);
    for (uint32_t i = 0; i < x->c.g->n_ranks; i++)
        if (x->c.s->host[i] == x->c.s->my_host)
            place_bytes(x, i, i == x->c.g->me ? x->in : span_input_of(&x->c, i), 0, x->all);
    for (size_t w = 0; w < n && rc == 0; w++) {
        rc = span_wait(&x->c, &tickets[w % 2], err);
        /* Once all are here, nobody copies from the other half any more. */
        if (rc == 0)
            rc = shm_wait_all(&x->c.h->shm, x->c.g, err);
        if (rc == 0 && w + 1 < n)
            expect_window(x, w + 1, &tickets[(w + 1) % 2]);
        wire_go(x->c.h->span->wire);
        if (rc == 0)
            take_window(x, w);
    }
    return span_end(x->c.h, rc); /* before the tickets go */
}

static int take_stage(struct host *h, struct err *err)
{
    /* Enough for any group: the least window of each rank may be more than what is shared out. */
    size_t least = (size_t)2 * 64 * 1024 * h->coll.world;
    size_t n_bytes = least > SPAN_STAGE_BYTES ? least : SPAN_STAGE_BYTES;
    return span_room(h, &h->span->stage, &h->span->stage_bytes, n_bytes, err) ? 0 : -ENOMEM;
}

static int gather(const struct span_call *begun, size_t width, const void *in, size_t n,
                  size_t n_blocks, void *out, struct err *err)
{
    struct gather x = {.c = *begun, .in = in, .out = out, .part = n * width,
                       .n_blocks = n_blocks, .all = n * width * n_blocks};
    struct host *h = begun->h;
    int rc = take_stage(h, err);
    if (rc == 0)
        rc = span_enter(&x.c, (uint32_t)width, in, x.all, true, n, n_blocks, NULL, err);
    if (rc < 0)
        return span_end(h, rc);
    const struct span_group *s = x.c.s;
    x.window = window_on(s, s->my_host);
    x.n_mine = s->n_far > s->me_here ? (s->n_far - s->me_here + s->n_here - 1) / s->n_here : 0;
    if (x.all == 0)
        rc = 0;
    else if (!x.c.has_inputs)
        rc = gather_windows(&x, err);
    else
        for (uint32_t i = 0; i < x.c.g->n_ranks; i++)
            place_bytes(&x, i, i == x.c.g->me ? x.in : span_input_of(&x.c, i), 0, x.all);
    return span_end(h, rc == 0 ? span_leave(&x.c, err) : rc);
}

int span_gather(struct host *h, const struct coll_group *g, enum shm_op op, size_t width,
                const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    const struct span_call c = span_begin(h, g, op, n);
    return gather(&c, width, in, n, n_blocks, out, err);
}

static int run_gather(struct span_open *o, struct err *err)
{
    return gather(&o->call, o->width, o->in, o->n, o->n_blocks, o->out, err);
}

int span_start_gather(struct host *h, const struct coll_group *g, size_t width, const void *in,
                      size_t n, size_t n_blocks, void *out, coll_ticket *out_ticket,
                      struct err *err)
{
    const struct span_open what = {.run = run_gather, .op = SHM_ALL_GATHER,
                                   .hidden = PHASE_GATHER_HIDDEN, .in = in, .out = out, .n = n,
                                   .n_blocks = n_blocks, .width = width};
    return span_start(h, g, &what, out_ticket, err);
}

/* ---- nothing --------------------------------------------------------------------------------- */

int span_agree(struct host *h, const struct coll_group *g, const struct call_what *what,
               const int64_t *recv_rows, struct err *err)
{
    struct span_call c = span_begin(h, g, what->op, what->n);
    int rc = span_enter(&c, what->word, NULL, 0, false, what->n, what->n_blocks, what->send_rows,
                        err);
    if (rc == 0 && recv_rows)
        rc = span_check_rows(&c, recv_rows, err);
    return span_end(h, rc == 0 ? span_leave(&c, err) : rc);
}
