/* dispatch.c - the permutations and the all-to-all between tokens and their experts
 *
 * A source packs its rows by (slot, token), slots counted through all ranks, so that is also by
 * (rank, local slot, token). They arrive packed by (source, local slot, token) and are put in the
 * order (local slot, source, token) that the expert products want. Everything goes back the same
 * ways, inverted. Only the exchange of counts decides sizes, so a rank without tokens, or without
 * rows to serve, does the same calls. */
#include "worker/dispatch.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/shares.h"

struct dispatch {
    struct coll   *coll; /* kept from open */
    struct device *dev;  /* kept from open */
    const struct slots *slots; /* kept from open */
    struct shares *shares;
    struct coll_group ep;
    uint32_t n_experts, n_slots, n_total, top_k, width; /* n_total: slots of all devices */
    int32_t *counts;    /* (devices, n_experts): rows for each expert, by source */
    int64_t *next;      /* (n_total) where the slot's next row is packed */
    float  *send, *recv; /* rows on their way; send travels */
    size_t  n_send, n_recv; /* floats */
    struct dispatch_plan *idle; /* plans that were destroyed, with their memory */
    uint64_t spent_ns;
};

struct dispatch_plan {
    struct dispatch *d;
    struct dispatch_plan *next; /* among the idle */
    int64_t n_pairs, n_rows;    /* (token, slot of top-k) pairs here; rows that arrive here */
    /* Packed position p holds pair slot_at[p] of token token_at[p]; pair s lies at packed_at[s]. */
    int64_t *slot_at, *token_at, *packed_at;
    /* Served row r arrived at arrived_at[r]; arrived row a is served at served_at[a]. */
    int64_t *arrived_at, *served_at;
    size_t   n_pairs_alloc, n_rows_alloc;
    int64_t *send_rows, *recv_rows; /* per member */
    int64_t *to_slot, *arrived;     /* (n_total); (members, n_slots) */
    int64_t *blocks, *offsets;      /* n_slots * members + 1; n_slots + 1 */
    int32_t *servers;               /* (n_experts, members) at most */
};

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
        .ep = {.ranks = ep->ranks, .n_ranks = ep->n_ranks, .me = ep->me, .id = COLL_EP},
    };
    d->shares = shares_create(slots);
    d->counts = xcalloc((size_t)ep->n_ranks * d->n_experts, sizeof *d->counts);
    d->next = xcalloc(d->n_total, sizeof *d->next);
    return d;
}

static void free_plan(struct dispatch_plan *p)
{
    int64_t *const all[] = {p->slot_at, p->token_at, p->packed_at, p->arrived_at, p->served_at,
                            p->send_rows, p->recv_rows, p->to_slot, p->arrived, p->blocks,
                            p->offsets};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
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
    if (d->recv)
        d->dev->ops->free(d->dev, d->recv);
    shares_destroy(d->shares);
    free(d->counts);
    free(d->next);
    free(d); /* send is the collective's */
}

double dispatch_seconds(struct dispatch *d)
{
    double s = (double)d->spent_ns / NS_PER_S;
    d->spent_ns = 0;
    return s;
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

/* Contents need not survive. */
static void grow(size_t n, size_t *alloc, int64_t **arrays[], size_t n_arrays)
{
    if (n <= *alloc)
        return;
    *alloc = n > 2 * *alloc ? n : 2 * *alloc;
    for (size_t i = 0; i < n_arrays; i++) {
        free(*arrays[i]);
        *arrays[i] = xcalloc(*alloc, sizeof **arrays[i]);
    }
}

/* My counts go to all, because who serves what follows from everybody's. */
static int exchange_counts(struct dispatch *d, const int32_t *expert_ids, int64_t n_pairs,
                           struct err *err)
{
    int32_t *mine = d->counts + (size_t)d->ep.me * d->n_experts;
    memset(mine, 0, d->n_experts * sizeof *mine);
    for (int64_t s = 0; s < n_pairs; s++) {
        assert(expert_ids[s] >= 0 && (uint32_t)expert_ids[s] < d->n_experts);
        mine[expert_ids[s]]++;
    }
    if (d->ep.n_ranks == 1)
        return 0;
    return d->coll->ops->all_gather_i32(d->coll, &d->ep, mine, d->n_experts, d->counts, err);
}

static void share_rows(struct dispatch_plan *p, uint32_t layer)
{
    struct dispatch *d = p->d;
    bool whole = d->dev->deterministic && d->slots->layers[layer].n_copied > 0;
    if (whole && !p->servers)
        p->servers = xcalloc((size_t)d->ep.n_ranks * d->n_experts, sizeof *p->servers);
    shares_rows(d->shares, d->slots, layer, d->counts, whole, p->to_slot, p->arrived,
                whole ? p->servers : NULL);
}

/* Sorts my pairs by slot, stably. */
static void pack_pairs(struct dispatch_plan *p, uint32_t layer, const int32_t *expert_ids)
{
    const struct dispatch *d = p->d;
    const struct slots_layer *l = &d->slots->layers[layer];
    uint32_t *copy = xmemdup(l->first_copy, (l->n_copied + 1) * sizeof *copy);
    int64_t at = 0;
    int64_t **arrays[] = {&p->slot_at, &p->token_at, &p->packed_at};
    grow((size_t)p->n_pairs, &p->n_pairs_alloc, arrays, 3);
    for (uint32_t slot = 0; slot < d->n_total; slot++) {
        d->next[slot] = at;
        at += p->to_slot[slot];
    }
    assert(at == p->n_pairs);
    for (int64_t s = 0; s < p->n_pairs; s++) {
        uint32_t e = (uint32_t)expert_ids[s], slot = l->map.home[e];
        int32_t k = l->copied_at[e];
        if (k >= 0) { /* the first copies get the first rows */
            while (p->to_slot[l->copies[copy[k]]] == 0)
                copy[k]++;
            slot = l->copies[copy[k]];
            p->to_slot[slot]--;
        }
        int64_t to = d->next[slot]++;
        p->slot_at[to] = s;
        p->token_at[to] = s / d->top_k;
        p->packed_at[s] = to;
    }
    free(copy);
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
static void order_rows(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    uint32_t n_members = d->ep.n_ranks;
    int64_t *first = xcalloc(d->n_total, sizeof *first), at = 0;
    int64_t **arrays[] = {&p->arrived_at, &p->served_at};
    grow((size_t)p->n_rows, &p->n_rows_alloc, arrays, 2);
    for (uint32_t i = 0; i < d->n_total; i++) {
        first[i] = at;
        at += p->arrived[i];
    }
    at = 0;
    for (uint32_t slot = 0; slot < d->n_slots; slot++) {
        p->offsets[slot] = at;
        for (uint32_t m = 0; m < n_members; m++) {
            uint32_t i = m * d->n_slots + slot;
            p->blocks[slot * n_members + m] = at;
            for (int64_t k = 0; k < p->arrived[i]; k++, at++) {
                p->arrived_at[at] = first[i] + k;
                p->served_at[first[i] + k] = at;
            }
        }
    }
    p->offsets[d->n_slots] = p->blocks[d->n_total] = at;
    free(first);
}

int dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                         int64_t n_tokens, struct dispatch_plan **out_plan, struct err *err)
{
    uint64_t began = clock_now_ns();
    int rc = exchange_counts(d, expert_ids, n_tokens * d->top_k, err);
    if (rc < 0)
        return rc;
    struct dispatch_plan *p = take_plan(d);
    p->n_pairs = n_tokens * d->top_k;
    share_rows(p, layer);
    count_rows(p);
    pack_pairs(p, layer, expert_ids);
    order_rows(p);
    d->spent_ns += clock_now_ns() - began;
    *out_plan = p;
    return 0;
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

/* The worst case seen so far stays; a step like the ones before takes no memory. */
static int reserve(struct dispatch *d, int64_t n_send, int64_t n_recv, struct err *err)
{
    size_t wanted = (size_t)n_send * d->width, room = (size_t)n_recv * d->width;
    if (wanted > d->n_send) {
        wanted += wanted / 2;
        if (!(d->send = d->coll->ops->alloc(d->coll, wanted * sizeof(float))))
            goto full;
        d->n_send = wanted;
    }
    if (room > d->n_recv) {
        room += room / 2;
        if (d->recv)
            d->dev->ops->free(d->dev, d->recv);
        d->n_recv = 0;
        if (!(d->recv = d->dev->ops->alloc(d->dev, room * sizeof(float))))
            goto full;
        d->n_recv = room;
    }
    return 0;
full:
    return err_set(err, -ENOMEM, "no memory for %lld + %lld rows on their way to experts",
                   (long long)n_send, (long long)n_recv);
}

/* rows_of[index] packed, over the network, and out in served order. */
static int send_packed(struct dispatch_plan *p, const float *in, const int64_t *index, float *out,
                       struct err *err)
{
    struct dispatch *d = p->d;
    uint64_t began = clock_now_ns();
    int rc = 0;
    if (d->ep.n_ranks == 1) { /* packed order is served order */
        d->dev->ops->gather_rows(d->dev, out, in, index, p->n_pairs, d->width);
    } else {
        if ((rc = reserve(d, p->n_pairs, p->n_rows, err)) < 0)
            return rc;
        d->dev->ops->gather_rows(d->dev, d->send, in, index, p->n_pairs, d->width);
        rc = d->coll->ops->all_to_all_rows(d->coll, &d->ep, d->send, p->send_rows, d->recv,
                                           p->recv_rows, d->width * sizeof(float), err);
        if (rc == 0)
            d->dev->ops->gather_rows(d->dev, out, d->recv, p->arrived_at, p->n_rows, d->width);
    }
    d->spent_ns += clock_now_ns() - began;
    return rc;
}

int dispatch_send_tokens(struct dispatch_plan *p, const float *x, float *out_rows,
                         struct err *err)
{
    return send_packed(p, x, p->token_at, out_rows, err);
}

int dispatch_send_slots(struct dispatch_plan *p, const float *slots, float *out_rows,
                        struct err *err)
{
    return send_packed(p, slots, p->slot_at, out_rows, err);
}

int dispatch_return(struct dispatch_plan *p, const float *rows, float *out_slots, struct err *err)
{
    struct dispatch *d = p->d;
    uint64_t began = clock_now_ns();
    int rc = 0;
    const float *packed = rows;
    if (d->ep.n_ranks > 1) {
        if ((rc = reserve(d, p->n_rows, p->n_pairs, err)) < 0)
            return rc;
        d->dev->ops->gather_rows(d->dev, d->send, rows, p->served_at, p->n_rows, d->width);
        rc = d->coll->ops->all_to_all_rows(d->coll, &d->ep, d->send, p->recv_rows, d->recv,
                                           p->send_rows, d->width * sizeof(float), err);
        packed = d->recv;
    }
    if (rc == 0)
        d->dev->ops->gather_rows(d->dev, out_slots, packed, p->packed_at, p->n_pairs, d->width);
    d->spent_ns += clock_now_ns() - began;
    return rc;
}
