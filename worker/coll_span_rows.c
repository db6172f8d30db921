/* coll_span_rows.c - rows between hosts, each from its sender's memory into its receiver's
 *
 * A call is finished when the rows that come are here, and reclaimed when those that go have gone.
 * A member agrees with all others, and copies from those of its host, before its start returns, so
 * that finishes and reclaims wait for nobody but the wire, in any order. */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/coll_copy.h"
#include "worker/coll_span.h"
#include "worker/phases.h"

struct span_open {
    struct span_call call;
    struct coll_group g;
    uint32_t at; /* numbers those of the group, from 1 */
    int32_t  layer;
    uint64_t started_ns;
    bool     is_over; /* finished */
    struct wire_ticket in, out;
};

/* ---- what is open ---------------------------------------------------------------------------- */

static struct span_open *place_of(struct host *h, uint32_t group, uint32_t at)
{
    struct span_state *s = h->span;
    if (!s->open)
        s->open = xcalloc((size_t)COLL_GROUPS_MAX * COLL_OPEN_MAX, sizeof *s->open);
    return &s->open[group * COLL_OPEN_MAX + (at - 1) % COLL_OPEN_MAX];
}

static struct span_open *open_of(struct host *h, coll_ticket ticket)
{
    struct span_open *o = place_of(h, ticket & 0x7f, (uint32_t)(ticket >> 8));
    return o->at == ticket >> 8 ? o : NULL;
}

/* The next one's place, once what left from there has gone. */
static int take_place(struct host *h, const struct coll_group *g, struct span_open **out,
                      struct err *err)
{
    uint32_t at = ++h->span->n_started[g->id];
    struct span_open *o = *out = place_of(h, g->id, at);
    assert(o->at == 0 || o->is_over);
    int rc = o->at == 0 ? 0 : span_wait(&o->call, &o->out, err);
    if (rc == 0)
        *o = (struct span_open){.g = *g, .at = at, .layer = h->coll.layer};
    return rc;
}

/* ---- rows ------------------------------------------------------------------------------------ */

int span_check_rows(struct span_call *c, const int64_t *recv_rows, struct err *err)
{
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        int64_t n = span_rows_of(c, i, c->g->me);
        if (n == recv_rows[i])
            continue;
        shm_abort(&c->h->shm, "all_to_all %u: rank %u sends %lld rows to rank %u, which expects "
                  "%lld", c->h->numbers[c->g->id], c->g->ranks[i], (long long)n, c->h->coll.rank,
                  (long long)recv_rows[i]);
        shm_check(&c->h->shm, err);
        return -EPROTO;
    }
    return 0;
}

static void post_rows(struct span_open *o, const uint8_t *send, const int64_t *send_rows,
                      uint8_t *recv, const int64_t *recv_rows, size_t row_bytes)
{
    struct span_call *c = &o->call;
    struct wire *w = c->h->span->wire;
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        size_t n_out = (size_t)send_rows[i] * row_bytes, n_in = (size_t)recv_rows[i] * row_bytes;
        bool is_far = c->s->host[i] != c->s->my_host;
        if (is_far && n_in > 0)
            wire_recv(w, c->g->ranks[i], span_tag(c, SPAN_SLOTS), recv, n_in, &o->in);
        if (is_far && n_out > 0)
            wire_send(w, c->g->ranks[i], span_tag(c, SPAN_SLOTS), send, n_out, &o->out);
        send += n_out;
        recv += n_in;
    }
    wire_go(w);
}

static void copy_rows(struct span_call *c, uint8_t *recv, const int64_t *recv_rows,
                      size_t row_bytes)
{
    size_t all = 0;
    for (uint32_t i = 0; i < c->g->n_ranks; i++)
        all += (size_t)recv_rows[i] * row_bytes;
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        size_t n = (size_t)recv_rows[i] * row_bytes, before = 0;
        for (uint32_t j = 0; c->s->host[i] == c->s->my_host && j < c->g->me; j++)
            before += (size_t)span_rows_of(c, i, j);
        if (c->s->host[i] == c->s->my_host)
            copy_piece(recv, span_input_of(c, i) + before * row_bytes, n, all);
        recv += n;
    }
}

/* Boards and inputs of members here are theirs again when it returns. */
static int start(struct host *h, struct span_open *o, const void *send, const int64_t *send_rows,
                 void *recv, const int64_t *recv_rows, size_t row_bytes, struct err *err)
{
    struct span_call *c = &o->call;
    size_t n_rows = 0;
    for (uint32_t i = 0; i < o->g.n_ranks; i++)
        n_rows += (size_t)send_rows[i];
    int rc = span_enter(h, &o->g, SHM_ALL_TO_ALL_ROWS, 0, send, n_rows * row_bytes, true,
                        row_bytes, 1, send_rows, c, err);
    if (rc == 0)
        rc = span_check_rows(c, recv_rows, err);
    if (rc < 0)
        return rc;
    o->started_ns = clock_now_ns();
    post_rows(o, c->shown, send_rows, recv, recv_rows, row_bytes);
    copy_rows(c, recv, recv_rows, row_bytes);
    rc = shm_wait_all(&h->shm, c->g, err);
    if (rc == 0)
        span_note_far_left(c);
    call_note_ahead(h, c->note);
    return rc;
}

int span_start_rows(struct host *h, const struct coll_group *g, const void *send,
                    const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                    size_t row_bytes, coll_ticket *out_ticket, struct err *err)
{
    struct span_open *o;
    int rc = take_place(h, g, &o, err);
    if (rc == 0)
        rc = start(h, o, send, send_rows, recv, recv_rows, row_bytes, err);
    if (rc < 0)
        return span_end(h, rc);
    coll_ticket ticket = (coll_ticket)o->at << 8 | 0x80 | g->id;
    if (o->call.shown == send) {
        *out_ticket = ticket;
        return 0;
    }
    /* The next call needs the copy's place. */
    rc = span_finish(h, ticket, err);
    return rc == 0 ? span_reclaim(h, ticket, err) : rc;
}

int span_finish(struct host *h, coll_ticket ticket, struct err *err)
{
    struct span_open *o = open_of(h, ticket);
    assert(o && !o->is_over);
    uint64_t began_ns = clock_now_ns();
    bool has_come = wire_wait(&o->in, 0);
    call_note_back(h, o->call.note);
    int rc = span_wait(&o->call, &o->in, err);
    if (rc < 0)
        return span_end(h, rc);
    o->is_over = true;
    call_note_left(h, o->call.note);
    call_note_hidden(h, PHASE_DISPATCH_HIDDEN, o->layer, o->started_ns,
                     has_come ? atomic_load(&o->in.done_ns) : began_ns, began_ns);
    return 0;
}

int span_reclaim(struct host *h, coll_ticket ticket, struct err *err)
{
    struct span_open *o = open_of(h, ticket);
    if (!o || wire_wait(&o->out, 0))
        return 0;
    assert(o->is_over);
    call_note_back(h, o->call.note);
    int rc = span_wait(&o->call, &o->out, err);
    if (rc == 0)
        call_note_left(h, o->call.note);
    return span_end(h, rc);
}
