/* dispatch.c - the permutations and the all-to-all between tokens and their experts
 *
 * A source packs its rows by (expert, token): experts lie on ascending ranks, so that is also by
 * (rank, local expert, token). They arrive packed by (source, local expert, token) and are put in
 * the order (local expert, source, token) that the expert products want. Everything goes back the
 * same ways, inverted. Only the exchange of counts decides sizes, so a rank without tokens, or
 * without rows to serve, does the same calls. */
#include "worker/dispatch.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"

struct dispatch {
    struct coll   *coll; /* kept from open */
    struct device *dev;  /* kept from open */
    struct coll_group ep;
    uint32_t n_experts, n_local, top_k, width;
    float  *send, *recv; /* rows on their way; send travels */
    size_t  n_send, n_recv; /* floats */
    struct dispatch_plan *idle; /* plans that were destroyed, with their memory */
    uint64_t spent_ns;
};

struct dispatch_plan {
    struct dispatch *d;
    struct dispatch_plan *next; /* among the idle */
    int64_t n_slots, n_rows;    /* (token, slot) pairs here; rows that arrive here */
    /* Packed position p holds slot slot_at[p] of token token_at[p]; slot s lies at packed_at[s]. */
    int64_t *slot_at, *token_at, *packed_at;
    /* Served row r arrived at arrived_at[r]; arrived row a is served at served_at[a]. */
    int64_t *arrived_at, *served_at;
    size_t   n_slots_alloc, n_rows_alloc;
    int64_t *send_rows, *recv_rows; /* per member */
    int64_t *offsets;               /* n_local + 1 */
    int64_t *counts, *arrived;      /* (n_experts); (members, n_local) */
};

int dispatch_open(const struct layout *layout, struct coll *coll, struct device *dev,
                  uint32_t n_experts, uint32_t top_k, uint32_t width, struct dispatch **out,
                  struct err *err)
{
    const struct rank_group *ep = &layout->ep;
    if (n_experts == 0 || n_experts % ep->n_ranks != 0)
        return err_set(err, -EINVAL, "%u experts do not lie evenly over %u ranks", n_experts,
                       ep->n_ranks);
    struct dispatch *d = xcalloc(1, sizeof *d);
    *d = (struct dispatch){
        .coll = coll, .dev = dev, .n_experts = n_experts, .n_local = n_experts / ep->n_ranks,
        .top_k = top_k, .width = width,
        .ep = {.ranks = ep->ranks, .n_ranks = ep->n_ranks, .me = ep->me, .id = COLL_EP},
    };
    *out = d;
    return 0;
}

static void free_plan(struct dispatch_plan *p)
{
    int64_t *const all[] = {p->slot_at, p->token_at, p->packed_at, p->arrived_at, p->served_at,
                            p->send_rows, p->recv_rows, p->offsets, p->counts, p->arrived};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
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
    p->offsets = xcalloc(d->n_local + 1, sizeof *p->offsets);
    p->counts = xcalloc(d->n_experts, sizeof *p->counts);
    p->arrived = xcalloc(d->n_experts, sizeof *p->arrived);
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

/* Sorts my slots by expert, stably. */
static void pack_slots(struct dispatch_plan *p, const int32_t *expert_ids)
{
    const struct dispatch *d = p->d;
    int64_t *next = xcalloc(d->n_experts, sizeof *next), at = 0;
    int64_t **arrays[] = {&p->slot_at, &p->token_at, &p->packed_at};
    grow((size_t)p->n_slots, &p->n_slots_alloc, arrays, 3);
    memset(p->counts, 0, d->n_experts * sizeof *p->counts);
    for (int64_t s = 0; s < p->n_slots; s++) {
        assert(expert_ids[s] >= 0 && (uint32_t)expert_ids[s] < d->n_experts);
        p->counts[expert_ids[s]]++;
    }
    for (uint32_t e = 0; e < d->n_experts; e++) {
        next[e] = at;
        at += p->counts[e];
    }
    for (int64_t s = 0; s < p->n_slots; s++) {
        int64_t to = next[expert_ids[s]]++;
        p->slot_at[to] = s;
        p->token_at[to] = s / d->top_k;
        p->packed_at[s] = to;
    }
    free(next);
}

static void count_rows(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    p->n_rows = 0;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
        p->send_rows[m] = p->recv_rows[m] = 0;
        for (uint32_t e = 0; e < d->n_local; e++) {
            p->send_rows[m] += p->counts[m * d->n_local + e];
            p->recv_rows[m] += p->arrived[m * d->n_local + e];
        }
        p->n_rows += p->recv_rows[m];
    }
}

/* From (source, local expert, row) to (local expert, source, row). */
static void order_rows(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    int64_t *first = xcalloc(d->n_experts, sizeof *first), at = 0;
    int64_t **arrays[] = {&p->arrived_at, &p->served_at};
    grow((size_t)p->n_rows, &p->n_rows_alloc, arrays, 2);
    for (uint32_t i = 0; i < d->n_experts; i++) {
        first[i] = at;
        at += p->arrived[i];
    }
    at = 0;
    for (uint32_t e = 0; e < d->n_local; e++) {
        p->offsets[e] = at;
        for (uint32_t m = 0; m < d->ep.n_ranks; m++) {
            uint32_t i = m * d->n_local + e;
            for (int64_t k = 0; k < p->arrived[i]; k++, at++) {
                p->arrived_at[at] = first[i] + k;
                p->served_at[first[i] + k] = at;
            }
        }
    }
    p->offsets[d->n_local] = at;
    free(first);
}

int dispatch_plan_create(struct dispatch *d, const int32_t *expert_ids, int64_t n_tokens,
                         struct dispatch_plan **out_plan, struct err *err)
{
    uint64_t began = clock_now_ns();
    struct dispatch_plan *p = take_plan(d);
    int rc = 0;
    p->n_slots = n_tokens * d->top_k;
    pack_slots(p, expert_ids);
    if (d->ep.n_ranks == 1)
        memcpy(p->arrived, p->counts, d->n_experts * sizeof *p->counts);
    else
        rc = d->coll->ops->all_to_all_i64(d->coll, &d->ep, p->counts, d->n_local, p->arrived, err);
    if (rc < 0) {
        dispatch_plan_destroy(p);
        return rc;
    }
    count_rows(p);
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
        d->dev->ops->gather_rows(d->dev, out, in, index, p->n_slots, d->width);
    } else {
        if ((rc = reserve(d, p->n_slots, p->n_rows, err)) < 0)
            return rc;
        d->dev->ops->gather_rows(d->dev, d->send, in, index, p->n_slots, d->width);
        rc = d->coll->ops->all_to_all_rows(d->coll, &d->ep, d->send, p->send_rows, d->recv,
                                           p->recv_rows, d->width, err);
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
        if ((rc = reserve(d, p->n_rows, p->n_slots, err)) < 0)
            return rc;
        d->dev->ops->gather_rows(d->dev, d->send, rows, p->served_at, p->n_rows, d->width);
        rc = d->coll->ops->all_to_all_rows(d->coll, &d->ep, d->send, p->recv_rows, d->recv,
                                           p->send_rows, d->width, err);
        packed = d->recv;
    }
    if (rc == 0)
        d->dev->ops->gather_rows(d->dev, out_slots, packed, p->packed_at, p->n_slots, d->width);
    d->spent_ns += clock_now_ns() - began;
    return rc;
}
