/* dispatch.c - the permutations and the all-to-all between tokens and their experts
 *
 * A source packs its rows by (slot, token), slots counted through all ranks, so that is also by
 * (rank, local slot, token). They arrive packed by (source, local slot, token) and are put in the
 * order (local slot, source, token) that the expert products want. Everything goes back the same
 * ways, inverted. Only the exchange of counts decides sizes, so a rank without tokens, or without
 * rows to serve, does the same calls. From the counts follows where every block of rows lies; the
 * device finds the place of each row in it. */
#include "worker/dispatch.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/failpoint.h"
#include "common/mem.h"
#include "kernels/spans.h"
#include "worker/phases.h"
#include "worker/shares.h"

struct dispatch {
    struct coll   *coll; /* kept from open */
    struct device *dev;  /* kept from open */
    const struct slots *slots; /* kept from open */
    struct shares *shares;
    struct coll_group ep;
    uint32_t n_experts, n_slots, n_total, top_k, width; /* n_total: slots of all devices */
    int32_t *counts;    /* (devices, n_experts): rows for each expert, by source */
    int32_t *my_counts; /* (n_experts), on the device */
    int32_t *first;       /* (n_experts + 1) of a route, whose parts are at most the slots */
    int64_t *end, *place; /* (n_total) */
    int64_t *from, *to;   /* (n_total + 1) and (n_total) of blocks */
    void   *send, *recv;  /* rows on their way; send travels */
    size_t  send_bytes, recv_bytes;
    int64_t tokens_max, pairs_max, rows_max; /* that are planned for; rows_max 0: no limit */
    struct dispatch_plan *idle; /* plans that were destroyed, with their memory */
};

/* Indices on the device, by pair, packed row, or row that arrives. */
struct index {
    int64_t *at;
    size_t   n; /* that there is room for */
};

struct dispatch_plan {
    struct dispatch *d;
    struct dispatch_plan *next; /* among the idle */
    int64_t n_pairs;  /* (token, slot of top-k) pairs here */
    int64_t n_packed; /* of which go somewhere */
    int64_t n_rows;   /* that arrive here */
    /* Packed row p holds pair pair_at[p] of token token_at[p]; pair s lies at place_of[s]. */
    struct index pair_at, token_at, place_of;
    /* Served row r arrived at arrived_at[r]; arrived row a is served at served_at[a]. */
    struct index arrived_at, served_at;
    int64_t *send_rows, *recv_rows; /* per member */
    int64_t *to_slot, *arrived;     /* (n_total); (members, n_slots) */
    int64_t *blocks, *offsets;      /* n_slots * members + 1; n_slots + 1 */
    int32_t *servers;               /* (n_experts, members) at most */
};

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

struct dispatch *dispatch_open(const struct layout *layout, const struct slots *slots,
                               struct coll *coll, struct device *dev, uint32_t top_k,
                               uint32_t width)
{
    const struct rank_group *ep = &layout->ep;
    struct dispatch *d = xcalloc(1, sizeof *d);
    assert(slots->n_devices == ep->n_ranks && slots->n_experts > 0);
    *d = (struct dispatch){
        .coll = coll, .dev = dev, .slots = slots, .n_experts = slots->n_experts,
        .n_slots = slots->n_slots, .n_total = slots->n_slots * slots->n_devices,
        .top_k = top_k, .width = width,
        .ep = coll_group_of(ep, COLL_EP),
    };
    d->shares = shares_create(slots);
    d->counts = xcalloc((size_t)ep->n_ranks * d->n_experts, sizeof *d->counts);
    d->first = xcalloc(d->n_experts + 1, sizeof *d->first);
    d->end = xcalloc(d->n_total, sizeof *d->end);
    d->place = xcalloc(d->n_total, sizeof *d->place);
    d->from = xcalloc(d->n_total + 1, sizeof *d->from);
    d->to = xcalloc(d->n_total, sizeof *d->to);
    return d;
}

static void free_plan(struct dispatch_plan *p)
{
    int64_t *const indices[] = {p->pair_at.at, p->token_at.at, p->place_of.at, p->arrived_at.at,
                                p->served_at.at};
    int64_t *const counts[] = {p->send_rows, p->recv_rows, p->to_slot, p->arrived, p->blocks,
                               p->offsets};
    for (size_t i = 0; i < sizeof indices / sizeof *indices; i++)
        if (indices[i])
            p->d->dev->ops->free(p->d->dev, indices[i]);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        free(counts[i]);
    free(p->servers);
    free(p);
}

void dispatch_close(struct dispatch *d)
{
    if (!d)
        return;
    for (struct dispatch_plan *p = d->idle, *next; p; p = next) {
        next = p->next;
        free_plan(p);
    }
    if (d->send)
        d->coll->ops->free(d->coll, d->send);
    if (d->recv)
        d->dev->ops->free(d->dev, d->recv);
    if (d->my_counts)
        d->dev->ops->free(d->dev, d->my_counts);
    shares_destroy(d->shares);
    free(d->counts);
    free(d->first);
    free(d->end);
    free(d->place);
    free(d->from);
    free(d->to);
    free(d);
}

static size_t plan_bytes(const struct dispatch_plan *p)
{
    const struct index *const indices[] = {&p->pair_at, &p->token_at, &p->place_of,
                                           &p->arrived_at, &p->served_at};
    size_t n = 0;
    for (size_t i = 0; i < sizeof indices / sizeof *indices; i++)
        n += indices[i]->n * sizeof *indices[i]->at;
    return n;
}

size_t dispatch_bytes(const struct dispatch *d)
{
    size_t n = d->send_bytes + d->recv_bytes;
    for (const struct dispatch_plan *p = d->idle; p; p = p->next)
        n += plan_bytes(p);
    return n;
}

/* ---- plans ---------------------------------------------------------------------------------- */

static struct dispatch_plan *take_plan(struct dispatch *d)
{
    struct dispatch_plan *p = d->idle;
    if (p) {
        d->idle = p->next;
        return p;
    }
    p = xcalloc(1, sizeof *p);
    p->d = d;
    p->send_rows = xcalloc(d->ep.n_ranks, sizeof *p->send_rows);
    p->recv_rows = xcalloc(d->ep.n_ranks, sizeof *p->recv_rows);
    p->to_slot = xcalloc(d->n_total, sizeof *p->to_slot);
    p->arrived = xcalloc(d->n_total, sizeof *p->arrived);
    p->blocks = xcalloc(d->n_total + 1, sizeof *p->blocks);
    p->offsets = xcalloc(d->n_slots + 1, sizeof *p->offsets);
    return p;
}

void dispatch_plan_destroy(struct dispatch_plan *p)
{
    if (!p)
        return;
    p->next = p->d->idle;
    p->d->idle = p;
}

static int no_memory(size_t n_bytes, struct err *err)
{
    return err_set(err, -ENOMEM, "no memory for %zu MiB of rows on their way to experts",
                   n_bytes >> 20);
}

/* planned: what n is at most in a step as it was planned for. Contents need not survive. */
static int grow(const struct dispatch *d, struct index *x, int64_t n, int64_t planned,
                struct err *err)
{
    if ((size_t)n <= x->n)
        return 0;
    size_t wanted = (size_t)(n > planned ? larger(n, 2 * (int64_t)x->n) : planned);
    if (x->at)
        d->dev->ops->free(d->dev, x->at);
    *x = (struct index){d->dev->ops->alloc(d->dev, wanted * sizeof *x->at), wanted};
    if (x->at)
        return 0;
    x->n = 0;
    return no_memory(wanted * sizeof *x->at, err);
}

/* My counts go to all, because who serves what follows from everybody's. */
static int exchange_counts(struct dispatch *d, const int32_t *expert_ids, int64_t n_pairs,
                           struct err *err)
{
    int32_t *mine = d->counts + (size_t)d->ep.me * d->n_experts;
    size_t n_bytes = d->n_experts * sizeof *mine;
    if (!d->my_counts && !(d->my_counts = d->dev->ops->alloc(d->dev, n_bytes)))
        return no_memory(n_bytes, err);
    d->dev->ops->route_counts(d->dev, d->my_counts, expert_ids, n_pairs, (int32_t)d->n_experts);
    d->dev->ops->to_host(d->dev, mine, d->my_counts, n_bytes);
    if (d->ep.n_ranks == 1)
        return 0;
    return d->coll->ops->all_gather_i32(d->coll, &d->ep, mine, d->n_experts, d->counts, err);
}

/* Returns the most rows of any rank. */
static int64_t share_rows(struct dispatch_plan *p, uint32_t layer)
{
    struct dispatch *d = p->d;
    bool whole = d->dev->deterministic && d->slots->layers[layer].n_copied > 0;
    if (whole && !p->servers)
        p->servers = xcalloc((size_t)d->ep.n_ranks * d->n_experts, sizeof *p->servers);
    return shares_rows(d->shares, d->slots, layer, d->counts, whole, p->to_slot, p->arrived,
                       whole ? p->servers : NULL);
}

/* Where my rows for each expert are packed; the first copies get the first rows. */
static struct route route_of(struct dispatch_plan *p, uint32_t layer)
{
    const struct dispatch *d = p->d;
    const struct slots_layer *l = &d->slots->layers[layer];
    int64_t *begin = d->from; /* where each slot's rows are packed */
    int32_t n_parts = 0;
    p->n_packed = 0;
    for (uint32_t slot = 0; slot < d->n_total; slot++) {
        begin[slot] = p->n_packed;
        p->n_packed += p->to_slot[slot];
    }
    for (uint32_t e = 0; e < d->n_experts; e++) {
        int32_t k = l->copied_at[e];
        const uint32_t *slots = k >= 0 ? l->copies + l->first_copy[k] : &l->map.home[e];
        uint32_t n = k >= 0 ? l->first_copy[k + 1] - l->first_copy[k] : 1;
        int64_t before = 0;
        d->first[e] = n_parts;
        for (uint32_t i = 0; i < n; i++) {
            d->place[n_parts] = begin[slots[i]] - before;
            d->end[n_parts++] = before += p->to_slot[slots[i]];
        }
    }
    d->first[d->n_experts] = n_parts;
    return (struct route){p->n_pairs, (int32_t)d->n_experts, (int32_t)d->top_k, d->first, d->end,
                          d->place};
}

static int pack_pairs(struct dispatch_plan *p, uint32_t layer, const int32_t *expert_ids,
                      struct err *err)
{
    const struct dispatch *d = p->d;
    int rc;
    struct route route = route_of(p, layer);
    if ((rc = grow(d, &p->place_of, p->n_pairs, d->pairs_max, err)) < 0 ||
        (rc = grow(d, &p->pair_at, p->n_packed, d->pairs_max, err)) < 0 ||
        (rc = grow(d, &p->token_at, p->n_packed, d->pairs_max, err)) < 0)
        return rc;
    d->dev->ops->route_pairs(d->dev, p->place_of.at, p->pair_at.at, p->token_at.at, expert_ids,
                             &route);
    return 0;
}

static void count_rows(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    p->n_rows = 0;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        p->send_rows[m] = p->recv_rows[m] = 0;
        for (uint32_t i = m * d->n_slots; i < (m + 1) * d->n_slots; i++) {
            p->send_rows[m] += p->to_slot[i];
            p->recv_rows[m] += p->arrived[i];
        }
        p->n_rows += p->recv_rows[m];
    }
}

/* From (source, local slot, row) to (local slot, source, row). */
static int order_rows(struct dispatch_plan *p, struct err *err)
{
    const struct dispatch *d = p->d;
    uint32_t n_members = d->ep.n_ranks;
    int64_t at = 0;
    int rc;
    for (uint32_t i = 0; i < d->n_total; i++) {
        d->from[i] = at;
        at += p->arrived[i];
    }
    d->from[d->n_total] = at;
    at = 0;
    for (uint32_t slot = 0; slot < d->n_slots; slot++) {
        p->offsets[slot] = at;
        for (uint32_t m = 0; m < n_members; m++) {
            uint32_t i = m * d->n_slots + slot;
            p->blocks[slot * n_members + m] = d->to[i] = at;
            at += p->arrived[i];
        }
    }
    p->offsets[d->n_slots] = p->blocks[d->n_total] = at;
    if (n_members == 1) /* packed order is served order */
        return 0;
    if ((rc = grow(d, &p->served_at, p->n_rows, d->rows_max, err)) < 0 ||
        (rc = grow(d, &p->arrived_at, p->n_rows, d->rows_max, err)) < 0)
        return rc;
    d->dev->ops->route_blocks(d->dev, p->served_at.at, p->arrived_at.at, d->from, d->to,
                              (int32_t)d->n_total);
    return 0;
}

static int create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids, int64_t n_tokens,
                  int64_t rows_max, struct dispatch_plan **out_plan, struct err *err)
{
    spans_begin(d->dev, PHASE_DISPATCH, (int32_t)layer);
    int rc = exchange_counts(d, expert_ids, n_tokens * d->top_k, err);
    if (rc < 0)
        return rc;
    struct dispatch_plan *p = take_plan(d);
    p->n_pairs = n_tokens * d->top_k;
    int64_t most = share_rows(p, layer);
    if (rows_max > 0 && most > rows_max) {
        dispatch_plan_destroy(p);
        spans_end(d->dev);
        *out_plan = NULL;
        return 0;
    }
    count_rows(p);
    if ((rc = pack_pairs(p, layer, expert_ids, err)) < 0 || (rc = order_rows(p, err)) < 0) {
        dispatch_plan_destroy(p);
        return rc;
    }
    spans_end(d->dev);
    *out_plan = p;
    return 0;
}

int dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                         int64_t n_tokens, struct dispatch_plan **out_plan, struct err *err)
{
    return create(d, layer, expert_ids, n_tokens, d->rows_max, out_plan, err);
}

int dispatch_plan_part(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                       int64_t n_tokens, struct dispatch_plan **out_plan, struct err *err)
{
    return create(d, layer, expert_ids, n_tokens, 0, out_plan, err);
}

int64_t dispatch_plan_rows(const struct dispatch_plan *p)
{
    return p->n_rows;
}

const int64_t *dispatch_plan_offsets(const struct dispatch_plan *p)
{
    return p->offsets;
}

const int64_t *dispatch_plan_blocks(const struct dispatch_plan *p)
{
    return p->blocks;
}

const int32_t *dispatch_plan_servers(const struct dispatch_plan *p)
{
    return p->servers;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Room for that many rows each. The worst case seen so far stays; a step like the ones before takes
 * no memory. */
static int reserve(struct dispatch *d, int64_t n_send, int64_t n_recv, struct err *err)
{
    size_t row = d->width * elem_size(d->dev), planned = (size_t)larger(d->pairs_max, d->rows_max);
    size_t send_bytes = (size_t)n_send * row, recv_bytes = (size_t)n_recv * row;
    if (send_bytes > d->send_bytes) {
        if (d->send)
            d->coll->ops->free(d->coll, d->send);
        send_bytes = (size_t)n_send > planned ? send_bytes + send_bytes / 2 : planned * row;
        d->send_bytes = 0;
        if (!(d->send = d->coll->ops->alloc(d->coll, send_bytes)))
            return no_memory(send_bytes, err);
        d->send_bytes = send_bytes;
    }
    if (recv_bytes > d->recv_bytes) {
        if (d->recv)
            d->dev->ops->free(d->dev, d->recv);
        recv_bytes = (size_t)n_recv > planned ? recv_bytes + recv_bytes / 2 : planned * row;
        d->recv_bytes = 0;
        if (!(d->recv = d->dev->ops->alloc(d->dev, recv_bytes)))
            return no_memory(recv_bytes, err);
        d->recv_bytes = recv_bytes;
    }
    return 0;
}

/* ---- the limit ------------------------------------------------------------------------------ */

int dispatch_limit(struct dispatch *d, int64_t tokens_max, int64_t rows_max, struct err *err)
{
    d->pairs_max = tokens_max * d->top_k;
    d->tokens_max = tokens_max;
    if (!d->dev->deterministic)
        d->rows_max = rows_max;
    return d->ep.n_ranks > 1 ? reserve(d, 1, 1, err) : 0;
}

/* A token goes to as many slots of one rank as it has choices, at most. */
int64_t dispatch_safe_tokens(const struct dispatch *d)
{
    int64_t n_chosen = d->top_k < d->n_slots ? d->top_k : d->n_slots;
    return d->rows_max > 0 ? larger(1, d->rows_max / (d->ep.n_ranks * n_chosen)) : d->tokens_max;
}

int64_t dispatch_n_parts(const struct dispatch *d)
{
    int64_t n = dispatch_safe_tokens(d);
    return (d->tokens_max + n - 1) / n;
}

/* ---- on the way ----------------------------------------------------------------------------- */

/* What lies in send goes to the others, what they have for me comes to recv. */
static int exchange_rows(struct dispatch *d, const int64_t *send_rows, const int64_t *recv_rows,
                         struct err *err)
{
    if (failpoint("skip-all-to-all") < 0)
        return 0;
    return coll_all_to_all_rows(d->coll, &d->ep, d->send, send_rows, d->recv, recv_rows,
                                d->width * elem_size(d->dev), err);
}

/* Rows of index packed, over the network, and out in served order. */
static int send_packed(struct dispatch_plan *p, const_elem_ptr in, const struct index *index,
                       elem_ptr out, struct err *err)
{
    struct dispatch *d = p->d;
    const struct device_ops *ops = d->dev->ops;
    spans_begin(d->dev, PHASE_DISPATCH, d->coll->layer);
    int rc = 0;
    if (d->ep.n_ranks == 1) { /* packed order is served order */
        ops->gather_rows(d->dev, out, in, index->at, p->n_packed, d->width);
    } else {
        if ((rc = reserve(d, p->n_packed, p->n_rows, err)) < 0)
            return rc;
        ops->gather_rows(d->dev, (elem *)d->send, in, index->at, p->n_packed, d->width);
        if ((rc = exchange_rows(d, p->send_rows, p->recv_rows, err)) == 0)
            ops->gather_rows(d->dev, out, (const elem *)d->recv, p->arrived_at.at, p->n_rows,
                             d->width);
    }
    spans_end(d->dev);
    return rc;
}

int dispatch_send_tokens(struct dispatch_plan *p, const_elem_ptr x, elem_ptr out_rows,
                         struct err *err)
{
    return send_packed(p, x, &p->token_at, out_rows, err);
}

int dispatch_send_slots(struct dispatch_plan *p, const_elem_ptr slots, elem_ptr out_rows,
                        struct err *err)
{
    return send_packed(p, slots, &p->pair_at, out_rows, err);
}

int dispatch_return(struct dispatch_plan *p, const_elem_ptr rows, elem_ptr out_slots,
                    struct err *err)
{
    struct dispatch *d = p->d;
    const struct device_ops *ops = d->dev->ops;
    spans_begin(d->dev, PHASE_DISPATCH, d->coll->layer);
    int rc = 0;
    const_elem_ptr packed = rows;
    if (d->ep.n_ranks > 1) {
        if ((rc = reserve(d, p->n_rows, p->n_packed, err)) < 0)
            return rc;
        ops->gather_rows(d->dev, (elem *)d->send, rows, p->served_at.at, p->n_rows, d->width);
        rc = exchange_rows(d, p->recv_rows, p->send_rows, err);
        packed = (const_elem_ptr){d->recv};
    }
    if (rc == 0)
        ops->gather_rows(d->dev, out_slots, packed, p->place_of.at, p->n_pairs, d->width);
    spans_end(d->dev);
    return rc;
}
