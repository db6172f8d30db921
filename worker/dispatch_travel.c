/* dispatch_travel.c - the permutations and the all-to-all between tokens and their experts
 *
 * A source packs a piece's rows by (rank, token), once each. They arrive by (source, token), or, of
 * sources of other nodes, by (who passed them on, source, token), and are laid out in the order
 * (local slot, source, token) that the expert products want, as often as there are slots. What goes
 * back is packed by (source, slot, token), and the source finds each pair's row there. */
#include <stdlib.h>

#include "common/failpoint.h"
#include "kernels/spans.h"
#include "worker/dispatch_state.h"
#include "worker/phases.h"

/* ---- buffers -------------------------------------------------------------------------------- */

/* Room for n rows: what is planned for, or, where more come, half as many again. The worst case
 * seen so far stays; a step like the ones before takes no memory. */
static size_t room_for(int64_t n, int64_t planned, size_t row_bytes)
{
    return (size_t)(n > planned ? n + n / 2 : planned) * row_bytes;
}

int dispatch_reserve(struct dispatch *d, struct way *w, int64_t n_out, int64_t n_in,
                     size_t row_bytes, struct err *err)
{
    struct coll *c = d->config.coll;
    void **out = &w->out[w->turn].p;
    size_t *out_bytes = &w->out[w->turn].n_bytes;
    coll_ticket *read = &w->out[w->turn].ticket;
    if (dispatch_travels(d)) {
        int rc = c->ops->reclaim(c, *read, err);
        if (rc < 0)
            return rc;
        *read = 0;
    }
    if (dispatch_travels(d) && (size_t)n_out * row_bytes > *out_bytes) {
        size_t wanted = room_for(n_out, w->out_max, row_bytes);
        if (*out)
            c->ops->free(c, *out);
        *out_bytes = 0;
        if (!(*out = c->ops->alloc(c, wanted)))
            return dispatch_no_memory(wanted, err);
        *out_bytes = wanted;
    }
    if ((size_t)n_in * row_bytes > w->in_bytes) {
        size_t wanted = room_for(n_in, w->in_max, row_bytes);
        if (w->in)
            d->config.dev->ops->free(d->config.dev, w->in);
        w->in_bytes = 0;
        if (!(w->in = d->config.dev->ops->alloc(d->config.dev, wanted)))
            return dispatch_no_memory(wanted, err);
        w->in_bytes = wanted;
    }
    return 0;
}

/* ---- on the way ----------------------------------------------------------------------------- */

int dispatch_start(struct dispatch *d, struct way *w, const int64_t *send, const int64_t *recv,
                   int64_t in_at, size_t row_bytes, struct err *err)
{
    struct coll *c = d->config.coll;
    void *in = w->in ? (char *)w->in + (size_t)in_at * row_bytes : NULL;
    if (failpoint("skip-all-to-all") < 0)
        return 0;
    int rc = c->ops->start_all_to_all_rows(c, &d->ep, w->out[w->turn].p, send, in, recv,
                                           row_bytes, &w->ticket, err);
    if (rc < 0)
        return rc;
    w->out[w->turn].ticket = w->ticket;
    w->turn = !w->turn;
    return c->is_blocking ? dispatch_finish(d, w, err) : 0;
}

int dispatch_finish(struct dispatch *d, struct way *w, struct err *err)
{
    int rc = d->config.coll->ops->finish(d->config.coll, w->ticket, err);
    w->ticket = 0;
    return rc;
}

static size_t row_bytes_of(const struct dispatch *d)
{
    return d->config.width * elem_size(d->config.dev);
}

/* n_out rows of in, as index says, packed and started on their way; what comes lies
 * from row in_at of in_room on. */
struct parcel {
    const int64_t *index, *send, *recv;
    int64_t n_out, in_at, in_room;
};

static int pack(struct dispatch *d, struct way *w, const struct parcel *x, const_elem_ptr in,
                struct err *err)
{
    int rc = dispatch_reserve(d, w, x->n_out, x->in_room, row_bytes_of(d), err);
    if (rc < 0)
        return rc;
    d->config.dev->ops->gather_rows(d->config.dev, (elem *)w->out[w->turn].p, in, x->index, NULL,
                                    x->n_out, d->config.width);
    return dispatch_start(d, w, x->send, x->recv, x->in_at, row_bytes_of(d), err);
}

/* A piece of a flow that goes as it is counted; index: of its rows. */
static int pack_piece(struct dispatch *d, struct way *w, const struct flow *f, uint32_t piece,
                      const_elem_ptr in, const int64_t *index, struct err *err)
{
    uint64_t *const sent = &d->traffic.sent, *const between = &d->traffic.sent_between;
    size_t at = (size_t)piece * d->ep.n_ranks;
    struct parcel x = {
        .index = index, .send = f->send + at, .recv = f->recv + at,
        .n_out = f->first_sent[piece + 1] - f->first_sent[piece],
        .in_room = f->first_received[piece + 1] - f->first_received[piece],
    };
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        *sent += m == d->ep.me ? 0 : (uint64_t)x.send[m];
        *between += dispatch_same_node(d, m, d->ep.me) ? 0 : (uint64_t)x.send[m];
    }
    return pack(d, w, &x, in, err);
}

int dispatch_send_start(struct dispatch_plan *p, uint32_t piece, const_elem_ptr x, struct err *err)
{
    struct dispatch *d = p->d;
    p->x = x;
    p->is_passed_on = !d->crosses;
    if (!dispatch_travels(d))
        return 0;
    const struct flow *f = d->crosses ? &p->to_relays : &p->to_experts;
    const struct index *index = d->crosses ? &p->crossed_at : &p->sent_at;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    int rc = pack_piece(d, d->crosses ? &d->to_relays : &d->to_experts, f, piece, x,
                        index->at + f->first_sent[piece], err);
    spans_end(d->config.dev);
    return rc;
}

int dispatch_send_pass_on(struct dispatch_plan *p, uint32_t piece, struct err *err)
{
    struct dispatch *d = p->d;
    const int64_t *first = p->to_experts.first_sent;
    if (p->is_passed_on)
        return 0;
    p->is_passed_on = true;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    int rc = dispatch_finish(d, &d->to_relays, err);
    if (rc == 0)
        rc = dispatch_tell_rows(p, piece, err);
    if (rc == 0)
        rc = pack_piece(d, &d->to_experts, &p->to_experts, piece, (const elem *)d->to_relays.in,
                        p->sent_at.at + first[piece] - first[p->rows.first], err);
    spans_end(d->config.dev);
    return rc;
}

/* Where a piece's rows begin among those that were told of. */
static int64_t first_told(const struct dispatch_plan *p, uint32_t piece)
{
    return p->back.first_received[piece] - p->back.first_received[p->pairs.first];
}

int dispatch_send_finish(struct dispatch_plan *p, uint32_t piece, bool weighed, elem_ptr out_rows,
                         struct err *err)
{
    struct dispatch *d = p->d;
    int rc = dispatch_send_pass_on(p, piece, err);
    if (rc < 0)
        return rc;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    const_elem_ptr from = p->x;
    if (dispatch_travels(d)) {
        rc = dispatch_finish(d, &d->to_experts, err);
        from = (const_elem_ptr){d->to_experts.in};
    }
    if (rc == 0 && (rc = dispatch_tell_pairs(p, piece, err)) == 0) {
        int64_t first = first_told(p, piece);
        d->config.dev->ops->gather_rows(d->config.dev, out_rows, from, p->laid_at.at + first,
                                        weighed ? p->weights + first : NULL,
                                        dispatch_piece_of(p, piece).n_rows, d->config.width);
    }
    spans_end(d->config.dev);
    return rc;
}

int dispatch_return_start(struct dispatch_plan *p, uint32_t piece, const_elem_ptr rows,
                          struct err *err)
{
    struct dispatch *d = p->d;
    const struct flow *f = &p->back;
    uint32_t of_chunk = piece - piece % p->n_cuts; /* its first piece */
    size_t at = (size_t)piece * d->ep.n_ranks;
    p->results = rows;
    if (!dispatch_travels(d))
        return 0;
    int rc = dispatch_tell_pairs(p, piece, err);
    if (rc < 0)
        return rc;
    struct parcel x = { /* as the pairs went, backwards */
        .index = p->served_at.at + first_told(p, piece), .send = f->recv + at, .recv = f->send + at,
        .n_out = f->first_received[piece + 1] - f->first_received[piece],
        .in_at = f->first_sent[piece] - f->first_sent[of_chunk],
        .in_room = f->first_sent[of_chunk + p->n_cuts] - f->first_sent[of_chunk],
    };
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        d->traffic.returned += m == d->ep.me ? 0 : (uint64_t)x.send[m];
        d->traffic.returned_between += dispatch_same_node(d, m, d->ep.me) ? 0
                                                                          : (uint64_t)x.send[m];
    }
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    rc = pack(d, &d->back, &x, rows, err);
    spans_end(d->config.dev);
    return rc;
}

int dispatch_return_finish(struct dispatch_plan *p, uint32_t piece, elem_ptr out_slots,
                           struct err *err)
{
    struct dispatch *d = p->d;
    struct dispatch_piece c = dispatch_piece_of(p, piece);
    int64_t first = c.first_token * d->config.top_k;
    bool is_last = piece % p->n_cuts + 1 == p->n_cuts;
    int rc = 0;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    const_elem_ptr from = p->results;
    if (dispatch_travels(d)) {
        rc = dispatch_finish(d, &d->back, err);
        from = (const_elem_ptr){d->back.in};
    }
    if (rc == 0 && is_last)
        d->config.dev->ops->gather_rows(d->config.dev,
                                        elem_at(d->config.dev, out_slots.p,
                                                first * d->config.width),
                                        from, p->place_of.at + first, NULL,
                                        c.n_tokens * d->config.top_k, d->config.width);
    spans_end(d->config.dev);
    return rc;
}

struct dispatch_traffic dispatch_traffic(const struct dispatch *d)
{
    return d->traffic;
}
