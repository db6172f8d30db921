/* dispatch_flow.c - how many rows go from whom to whom, and where every block of them lies
 *
 * All follows from counts that all ranks have, so that a source can tell a rank where its rows will
 * arrive there. Orders: pairs are packed by (piece, rank, slot, token) and arrive by (piece,
 * source, slot, token); rows are packed by (piece, rank, source, token), where sources are more
 * than one only at a rank that passes on for others, and arrive by (piece, who passed it on,
 * source, token). Where one message holds several pieces, the rank comes before the piece. */
#include "worker/dispatch_state.h"

#include <string.h>

static int64_t sum_of(const int64_t *n, uint32_t count)
{
    int64_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += n[i];
    return sum;
}

static void find_firsts(struct flow *f, uint32_t n_pieces, uint32_t n_ranks)
{
    f->first_sent[0] = f->first_received[0] = 0;
    for (uint32_t c = 0; c < n_pieces; c++) {
        size_t at = (size_t)c * n_ranks;
        f->first_sent[c + 1] = f->first_sent[c] + sum_of(f->send + at, n_ranks);
        f->first_received[c + 1] = f->first_received[c] + sum_of(f->recv + at, n_ranks);
    }
}

/* ---- pairs ---------------------------------------------------------------------------------- */

/* From (source, local slot, row) to (local slot, source, row). */
static void order_piece(struct dispatch_plan *p, uint32_t piece)
{
    const struct dispatch *d = p->d;
    uint32_t n_ranks = d->ep.n_ranks;
    const int64_t *arrived = p->arrived + (size_t)piece * d->n_total;
    int64_t *blocks = p->blocks + (size_t)piece * (d->n_total + 1);
    int64_t *offsets = p->offsets + (size_t)piece * (d->n_slots + 1);
    int64_t at = 0;
    for (uint32_t slot = 0; slot < d->n_slots; slot++) {
        offsets[slot] = at;
        for (uint32_t m = 0; m < n_ranks; m++) {
            blocks[slot * n_ranks + m] = at;
            at += arrived[m * d->n_slots + slot];
        }
    }
    offsets[d->n_slots] = blocks[d->n_total] = at;
}

void dispatch_count_pairs(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    uint32_t n_ranks = d->ep.n_ranks;
    for (uint32_t i = 0; i < p->n_pieces * n_ranks; i++) {
        p->back.send[i] = sum_of(p->to_slot + (size_t)i * d->n_slots, d->n_slots);
        p->back.recv[i] = sum_of(p->arrived + (size_t)i * d->n_slots, d->n_slots);
    }
    find_firsts(&p->back, p->n_pieces, n_ranks);
    for (uint32_t c = 0; c < p->n_pieces; c++)
        order_piece(p, c);
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* What source has for a rank, in distinct tokens; and what it sends to one that passes it on. */
static int64_t rows_for(const struct dispatch_plan *p, uint32_t source, uint32_t piece,
                        uint32_t rank)
{
    const struct dispatch *d = p->d;
    uint32_t n_kinds = d->crosses ? 2 : 1;
    return d->rows[((size_t)source * n_kinds * p->n_pieces + piece) * d->ep.n_ranks + rank];
}

static int64_t rows_by(const struct dispatch_plan *p, uint32_t source, uint32_t piece,
                       uint32_t rank)
{
    const struct dispatch *d = p->d;
    return d->rows[((size_t)(source * 2 + 1) * p->n_pieces + piece) * d->ep.n_ranks + rank];
}

static void count_piece_rows(struct dispatch_plan *p, uint32_t c)
{
    const struct dispatch *d = p->d;
    uint32_t n = d->ep.n_ranks, me = d->ep.me;
    int64_t *send = p->to_experts.send + (size_t)c * n, *recv = p->to_experts.recv + (size_t)c * n;
    memset(send, 0, n * sizeof *send);
    memset(recv, 0, n * sizeof *recv);
    for (uint32_t s = 0; s < n; s++) {
        recv[dispatch_relay(d, s, me)] += rows_for(p, s, c, me);
        for (uint32_t r = 0; r < n; r++)
            if (dispatch_relay(d, s, r) == me)
                send[r] += rows_for(p, s, c, r);
        if (!d->crosses)
            continue;
        p->to_relays.send[c * n + s] = rows_by(p, me, c, s);
        p->to_relays.recv[c * n + s] = rows_by(p, s, c, me);
    }
}

void dispatch_count_rows(struct dispatch_plan *p)
{
    for (uint32_t c = 0; c < p->n_pieces; c++)
        count_piece_rows(p, c);
    find_firsts(&p->to_experts, p->n_pieces, p->d->ep.n_ranks);
    if (p->d->crosses)
        find_firsts(&p->to_relays, p->n_pieces, p->d->ep.n_ranks);
}

/* Where my rows begin among those of a piece that arrive at a rank. */
static int64_t arrives_at(const struct dispatch_plan *p, uint32_t piece, uint32_t rank)
{
    const struct dispatch *d = p->d;
    uint32_t me = d->ep.me, by = dispatch_relay(d, me, rank);
    int64_t at = 0;
    for (uint32_t s = 0; s < d->ep.n_ranks; s++) {
        uint32_t other = dispatch_relay(d, s, rank);
        if (other < by || (other == by && s < me))
            at += rows_for(p, s, piece, rank);
    }
    return at;
}

static int64_t crosses_to(const struct dispatch_plan *p, uint32_t piece, uint32_t rank)
{
    int64_t at = 0;
    for (uint32_t s = 0; s < p->d->ep.me; s++)
        at += rows_by(p, s, piece, rank);
    return at;
}

/* ---- notes ---------------------------------------------------------------------------------- */

int64_t dispatch_rows_before(const struct dispatch_plan *p, uint32_t piece)
{
    int64_t n = 0;
    for (uint32_t c = 0; c < piece; c++)
        for (uint32_t r = 0; r < p->d->ep.n_ranks; r++)
            n += rows_for(p, p->d->ep.me, c, r);
    return n;
}

static void sum_notes(struct dispatch_plan *p, const struct flow *f, struct told t)
{
    struct dispatch *d = p->d;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        d->note_send[m] = d->note_recv[m] = 0;
        for (uint32_t c = t.first; c < t.end; c++) {
            d->note_send[m] += f->send[c * d->ep.n_ranks + m];
            d->note_recv[m] += f->recv[c * d->ep.n_ranks + m];
        }
    }
}

struct route_notes dispatch_pair_notes(struct dispatch_plan *p, struct told t)
{
    struct dispatch *d = p->d;
    uint32_t n = d->ep.n_ranks, n_blocks = (t.end - t.first) * n;
    int64_t at = 0, first_row = dispatch_travels(d) ? dispatch_rows_before(p, t.first) : 0;
    for (uint32_t c = t.first; c < t.end; c++)
        for (uint32_t r = 0; r < n; r++) {
            uint32_t b = (c - t.first) * n + r;
            d->from[b] = at;
            at += p->back.send[c * n + r];
            d->add[b] = 0;
            if (!dispatch_travels(d)) /* notes are of tokens, not of rows */
                continue;
            d->add[b] = arrives_at(p, c, r) - first_row;
            first_row += rows_for(p, d->ep.me, c, r);
        }
    d->from[n_blocks] = at;
    at = 0;
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t c = t.first; c < t.end; c++) {
            d->to[(c - t.first) * n + r] = at;
            at += p->back.send[c * n + r];
        }
    sum_notes(p, &p->back, t);
    return (struct route_notes){(int32_t)n_blocks, d->from, d->to, d->add};
}

int32_t dispatch_pair_blocks(struct dispatch_plan *p, struct told t)
{
    struct dispatch *d = p->d;
    int64_t at = 0;
    int32_t b = 0;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++)
        for (uint32_t c = t.first; c < t.end; c++)
            for (uint32_t slot = 0; slot < d->n_slots; slot++) {
                d->from[b] = at;
                d->to[b++] = p->back.first_received[c] - p->back.first_received[t.first] +
                             p->blocks[c * (d->n_total + 1) + slot * d->ep.n_ranks + m];
                at += p->arrived[((size_t)c * d->ep.n_ranks + m) * d->n_slots + slot];
            }
    d->from[b] = at;
    return b;
}

int32_t dispatch_served_blocks(struct dispatch_plan *p, struct told t)
{
    struct dispatch *d = p->d;
    int64_t at = 0;
    int32_t b = 0;
    for (uint32_t c = t.first; c < t.end; c++)
        for (uint32_t m = 0; m < d->ep.n_ranks; m++)
            for (uint32_t slot = 0; slot < d->n_slots; slot++) {
                d->from[b] = at;
                d->to[b++] = p->blocks[c * (d->n_total + 1) + slot * d->ep.n_ranks + m];
                at += p->arrived[((size_t)c * d->ep.n_ranks + m) * d->n_slots + slot];
            }
    d->from[b] = at;
    return b;
}

/* Rows of a source that this rank passes on to another, or keeps. */
static int64_t passed_on(const struct dispatch_plan *p, uint32_t source, uint32_t piece,
                         uint32_t rank)
{
    return dispatch_relay(p->d, source, rank) == p->d->ep.me ? rows_for(p, source, piece, rank) : 0;
}

static void sum_row_notes(struct dispatch_plan *p, struct told t)
{
    struct dispatch *d = p->d;
    uint32_t n = d->ep.n_ranks, me = d->ep.me;
    memset(d->note_send, 0, n * sizeof *d->note_send);
    memset(d->note_recv, 0, n * sizeof *d->note_recv);
    for (uint32_t c = t.first; c < t.end; c++)
        for (uint32_t r = 0; r < n; r++) {
            d->note_send[dispatch_relay(d, me, r)] += rows_for(p, me, c, r);
            for (uint32_t s = 0; s < n; s++)
                d->note_recv[s] += passed_on(p, s, c, r);
        }
}

struct route_notes dispatch_row_notes(struct dispatch_plan *p, struct told t)
{
    struct dispatch *d = p->d;
    uint32_t n = d->ep.n_ranks, me = d->ep.me, n_blocks = (t.end - t.first) * n;
    int64_t at = 0;
    for (uint32_t c = t.first; c < t.end; c++) {
        int64_t first = p->to_relays.first_sent[c], *add = d->add + (c - t.first) * n;
        for (uint32_t by = 0; by < n; by++) {
            for (uint32_t r = 0; r < n; r++)
                if (dispatch_relay(d, me, r) == by)
                    add[r] = crosses_to(p, c, by) - first;
            first += rows_by(p, me, c, by);
        }
        for (uint32_t r = 0; r < n; r++) {
            d->from[(c - t.first) * n + r] = at;
            at += rows_for(p, me, c, r);
        }
    }
    d->from[n_blocks] = at;
    at = 0;
    for (uint32_t by = 0; by < n; by++)
        for (uint32_t c = t.first; c < t.end; c++)
            for (uint32_t r = 0; r < n; r++)
                if (dispatch_relay(d, me, r) == by) {
                    d->to[(c - t.first) * n + r] = at;
                    at += rows_for(p, me, c, r);
                }
    sum_row_notes(p, t);
    return (struct route_notes){(int32_t)n_blocks, d->from, d->to, d->add};
}

int32_t dispatch_row_blocks(struct dispatch_plan *p, struct told t)
{
    struct dispatch *d = p->d;
    uint32_t n = d->ep.n_ranks, n_told = t.end - t.first;
    int64_t at = 0;
    int32_t b = 0;
    for (uint32_t c = t.first; c < t.end; c++)
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t s = 0; s < n; s++) {
                d->to[((size_t)s * n_told + c - t.first) * n + r] = at;
                at += passed_on(p, s, c, r);
            }
    at = 0;
    for (uint32_t s = 0; s < n; s++)
        for (uint32_t c = t.first; c < t.end; c++)
            for (uint32_t r = 0; r < n; r++) {
                d->from[b++] = at;
                at += passed_on(p, s, c, r);
            }
    d->from[b] = at;
    return b;
}
