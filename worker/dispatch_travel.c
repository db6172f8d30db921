/* dispatch_travel.c - the permutations and the all-to-all between tokens and their experts
 *
 * A source packs a chunk's rows by (rank, token), once each. They arrive by (source, token), or, of
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
                   size_t row_bytes, struct err *err)
{
    struct coll *c = d->config.coll;
    if (failpoint("skip-all-to-all") < 0)
        return 0;
    int rc = c->ops->start_all_to_all_rows(c, &d->ep, w->out[w->turn].p, send, w->in, recv,
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

/* n rows of in, as index says, packed and started on their way. */
static int pack(struct dispatch *d, struct way *w, const struct flow *f, uint32_t chunk,
                const_elem_ptr in, const int64_t *index, int64_t n_out, int64_t n_in,
                bool goes_back, struct err *err)
{
    size_t at = (size_t)chunk * d->ep.n_ranks;
    const int64_t *send = f->send + at, *recv = f->recv + at;
    int rc = dispatch_reserve(d, w, n_out, n_in, row_bytes_of(d), err);
    if (rc < 0)
        return rc;
    d->config.dev->ops->gather_rows(d->config.dev, (elem *)w->out[w->turn].p, in, index, NULL,
                                    n_out, d->config.width);
    return dispatch_start(d, w, goes_back ? recv : send, goes_back ? send : recv, row_bytes_of(d),
                          err);
}

/* The same for a flow that goes as it is counted. */
static int pack_chunk(struct dispatch *d, struct way *w, const struct flow *f, uint32_t chunk,
                      const_elem_ptr in, const int64_t *index, struct err *err)
{
    uint64_t *const sent = &d->traffic.sent, *const between = &d->traffic.sent_between;
    int64_t first = f->first_sent[chunk], n_in = f->first_received[chunk + 1] -
                                                 f->first_received[chunk];
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        uint64_t n = (uint64_t)f->send[chunk * d->ep.n_ranks + m];
        *sent += m == d->ep.me ? 0 : n;
        *between += dispatch_same_node(d, m, d->ep.me) ? 0 : n;
    }
    return pack(d, w, f, chunk, in, index + first, f->first_sent[chunk + 1] - first, n_in, false,
                err);
}

int dispatch_send_start(struct dispatch_plan *p, uint32_t chunk, const_elem_ptr x, struct err *err)
{
    struct dispatch *d = p->d;
    p->x = x;
    p->is_passed_on = !d->crosses;
    if (!dispatch_travels(d))
        return 0;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    int rc = d->crosses
                 ? pack_chunk(d, &d->to_relays, &p->to_relays, chunk, x, p->crossed_at.at, err)
                 : pack_chunk(d, &d->to_experts, &p->to_experts, chunk, x, p->sent_at.at, err);
    spans_end(d->config.dev);
    return rc;
}

int dispatch_send_pass_on(struct dispatch_plan *p, uint32_t chunk, struct err *err)
{
    struct dispatch *d = p->d;
    if (p->is_passed_on)
        return 0;
    p->is_passed_on = true;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    int rc = dispatch_finish(d, &d->to_relays, err);
    if (rc == 0)
        rc = pack_chunk(d, &d->to_experts, &p->to_experts, chunk, (const elem *)d->to_relays.in,
                        p->sent_at.at, err);
    spans_end(d->config.dev);
    return rc;
}

int dispatch_send_finish(struct dispatch_plan *p, uint32_t chunk, bool weighed, elem_ptr out_rows,
                         struct err *err)
{
    struct dispatch *d = p->d;
    int64_t first = p->back.first_received[chunk];
    int rc = dispatch_send_pass_on(p, chunk, err);
    if (rc < 0)
        return rc;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    const_elem_ptr from = p->x;
    if (dispatch_travels(d)) {
        rc = dispatch_finish(d, &d->to_experts, err);
        from = (const_elem_ptr){d->to_experts.in};
    }
    if (rc == 0)
        d->config.dev->ops->gather_rows(d->config.dev, out_rows, from, p->laid_at.at + first,
                                        weighed ? p->weights + first : NULL,
                                        p->back.first_received[chunk + 1] - first,
                                        d->config.width);
    spans_end(d->config.dev);
    return rc;
}

int dispatch_return_start(struct dispatch_plan *p, uint32_t chunk, const_elem_ptr rows,
                          struct err *err)
{
    struct dispatch *d = p->d;
    const struct flow *f = &p->back;
    int64_t first = f->first_received[chunk];
    p->results = rows;
    if (!dispatch_travels(d))
        return 0;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        uint64_t n = (uint64_t)f->recv[chunk * d->ep.n_ranks + m];
        d->traffic.returned += m == d->ep.me ? 0 : n;
        d->traffic.returned_between += dispatch_same_node(d, m, d->ep.me) ? 0 : n;
    }
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    int rc = pack(d, &d->back, f, chunk, rows, p->served_at.at + first,
                  f->first_received[chunk + 1] - first,
                  f->first_sent[chunk + 1] - f->first_sent[chunk], true, err);
    spans_end(d->config.dev);
    return rc;
}

int dispatch_return_finish(struct dispatch_plan *p, uint32_t chunk, elem_ptr out_slots,
                           struct err *err)
{
    struct dispatch *d = p->d;
    struct dispatch_chunk c = dispatch_chunk_of(p, chunk);
    int64_t first = c.first_token * d->config.top_k;
    int rc = 0;
    spans_begin(d->config.dev, PHASE_DISPATCH, d->config.coll->layer);
    const_elem_ptr from = p->results;
    if (dispatch_travels(d)) {
        rc = dispatch_finish(d, &d->back, err);
        from = (const_elem_ptr){d->back.in};
    }
    if (rc == 0)
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
