/* dispatch_plan.c - from the choices of a layer's tokens to the places of all rows
 *
 * Two exchanges of counts decide all sizes: how many choices each source has for each expert, from
 * which follows who serves how many of them; then how many distinct tokens each has for each rank.
 * So a rank without tokens, or without rows to serve, does the same calls. Of rows ranks then tell
 * each other where they lie, from device to device. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "kernels/spans.h"
#include "worker/dispatch_state.h"
#include "worker/phases.h"

/* ---- memory --------------------------------------------------------------------------------- */

static void make_flow(struct flow *f, uint32_t n_chunks, uint32_t n_ranks)
{
    size_t n = (size_t)n_chunks * n_ranks;
    f->send = xcalloc(n, sizeof *f->send);
    f->recv = xcalloc(n, sizeof *f->recv);
    f->first_sent = xcalloc(n_chunks + 1, sizeof *f->first_sent);
    f->first_received = xcalloc(n_chunks + 1, sizeof *f->first_received);
}

static struct dispatch_plan *take_plan(struct dispatch *d)
{
    struct dispatch_plan *p = d->idle;
    size_t n = DISPATCH_CHUNKS_MAX;
    if (p) {
        d->idle = p->next;
        return p;
    }
    p = xcalloc(1, sizeof *p);
    p->d = d;
    make_flow(&p->to_relays, DISPATCH_CHUNKS_MAX, d->ep.n_ranks);
    make_flow(&p->to_experts, DISPATCH_CHUNKS_MAX, d->ep.n_ranks);
    make_flow(&p->back, DISPATCH_CHUNKS_MAX, d->ep.n_ranks);
    p->to_slot = xcalloc(n * d->n_total, sizeof *p->to_slot);
    p->arrived = xcalloc(n * d->n_total, sizeof *p->arrived);
    p->blocks = xcalloc(n * (d->n_total + 1), sizeof *p->blocks);
    p->offsets = xcalloc(n * (d->n_slots + 1), sizeof *p->offsets);
    return p;
}

void dispatch_plan_destroy(struct dispatch_plan *p)
{
    if (!p)
        return;
    p->next = p->d->idle;
    p->d->idle = p;
}

static int grow_weights(struct dispatch_plan *p, int64_t n, struct err *err)
{
    const struct dispatch *d = p->d;
    size_t wanted = (size_t)(n > d->rows_max ? n : d->rows_max);
    if ((size_t)n <= p->n_weights)
        return 0;
    if (p->weights)
        d->config.dev->ops->free(d->config.dev, p->weights);
    p->n_weights = 0;
    if (!(p->weights = d->config.dev->ops->alloc(d->config.dev, wanted * sizeof *p->weights)))
        return dispatch_no_memory(wanted * sizeof *p->weights, err);
    p->n_weights = wanted;
    return 0;
}

/* ---- choices -------------------------------------------------------------------------------- */

static struct route counted_route(const struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    int64_t top_k = d->config.top_k;
    return (struct route){.n_pairs = p->n_tokens * top_k, .pairs_each = p->tokens_each * top_k,
                          .n_chunks = (int32_t)p->n_chunks, .n_experts = (int32_t)d->n_experts,
                          .top_k = (int32_t)top_k};
}

/* What the device counted of mine, n numbers, goes to all: out (devices, n). */
static int gather_counts(struct dispatch *d, size_t n, int32_t *out, struct err *err)
{
    struct device *dev = d->config.dev;
    int32_t *mine = out + d->ep.me * n;
    dev->ops->to_host(dev, mine, d->dev_counts, n * sizeof *mine);
    if (!dispatch_travels(d))
        return 0;
    return d->config.coll->ops->all_gather_i32(d->config.coll, &d->ep, mine, n, out, err);
}

/* My counts go to all, because who serves what follows from everybody's. */
static int exchange_choices(struct dispatch_plan *p, const int32_t *expert_ids, struct err *err)
{
    struct dispatch *d = p->d;
    struct route route = counted_route(p);
    size_t per_chunk = d->n_experts > 2 * d->ep.n_ranks ? d->n_experts : 2 * d->ep.n_ranks;
    size_t n_bytes = DISPATCH_CHUNKS_MAX * per_chunk * sizeof *d->dev_counts;
    if (!d->dev_counts && !(d->dev_counts = d->config.dev->ops->alloc(d->config.dev, n_bytes)))
        return dispatch_no_memory(n_bytes, err);
    d->config.dev->ops->route_counts(d->config.dev, d->dev_counts, expert_ids, &route);
    return gather_counts(d, (size_t)p->n_chunks * d->n_experts, d->counts, err);
}

/* Whether what comes to any rank is within the limits. */
static bool share_pairs(struct dispatch_plan *p, uint32_t layer)
{
    struct dispatch *d = p->d;
    const struct slots *slots = d->config.slots;
    bool whole = d->config.dev->deterministic && slots->layers[layer].n_copied > 0, fits = true;
    size_t n_servers = (size_t)d->ep.n_ranks * d->n_experts;
    if (whole && !p->servers)
        p->servers = xcalloc(DISPATCH_CHUNKS_MAX * n_servers, sizeof *p->servers);
    memset(d->device_rows, 0, d->ep.n_ranks * sizeof *d->device_rows);
    for (uint32_t c = 0; c < p->n_chunks; c++) {
        struct shares_counts counts = {d->counts + (size_t)c * d->n_experts,
                                       (size_t)p->n_chunks * d->n_experts};
        int64_t most = shares_rows(d->shares, slots, layer, &counts, whole,
                                   p->to_slot + (size_t)c * d->n_total,
                                   p->arrived + (size_t)c * d->n_total, d->device_rows,
                                   whole ? p->servers + c * n_servers : NULL);
        fits = fits && most <= d->chunk_rows_max;
    }
    for (uint32_t m = 0; m < d->ep.n_ranks; m++)
        fits = fits && d->device_rows[m] <= d->rows_max;
    return fits || d->rows_max == 0;
}

/* Where the pairs of one chunk and expert are packed; the first copies get the first. */
static int32_t route_expert(const struct dispatch_plan *p, const struct slots_layer *l,
                            uint32_t chunk, uint32_t e, const int64_t *begin, int32_t n_parts)
{
    const struct dispatch *d = p->d;
    const int64_t *to_slot = p->to_slot + (size_t)chunk * d->n_total;
    int32_t k = l->copied_at[e];
    const uint32_t *slots = k >= 0 ? l->copies + l->first_copy[k] : &l->map.home[e];
    uint32_t n = k >= 0 ? l->first_copy[k + 1] - l->first_copy[k] : 1;
    int64_t before = 0;
    for (uint32_t i = 0; i < n; i++) {
        d->place[n_parts] = begin[slots[i]] - before;
        d->end[n_parts++] = before += to_slot[slots[i]];
    }
    return n_parts;
}

static struct route route_of(struct dispatch_plan *p, uint32_t layer)
{
    const struct dispatch *d = p->d;
    const struct slots_layer *l = &d->config.slots->layers[layer];
    struct route route = counted_route(p);
    int64_t *begin = d->from, at = 0; /* where each slot's pairs are packed */
    int32_t n_parts = 0;
    for (uint32_t c = 0; c < p->n_chunks; c++) {
        d->chunk_at[c] = at;
        for (uint32_t slot = 0; slot < d->n_total; slot++) {
            begin[slot] = at;
            at += p->to_slot[(size_t)c * d->n_total + slot];
        }
        for (uint32_t e = 0; e < d->n_experts; e++) {
            d->first[c * d->n_experts + e] = n_parts;
            n_parts = route_expert(p, l, c, e, begin, n_parts);
        }
    }
    d->first[p->n_chunks * d->n_experts] = n_parts;
    route.first = d->first;
    route.end = d->end;
    route.place = d->place;
    route.chunk_at = d->chunk_at;
    return route;
}

static int place_pairs(struct dispatch_plan *p, uint32_t layer, const int32_t *expert_ids,
                       struct err *err)
{
    struct dispatch *d = p->d;
    struct route route = route_of(p, layer);
    int rc;
    if ((rc = dispatch_grow(d, &p->place_of, route.n_pairs, d->pairs_max, err)) < 0 ||
        (rc = dispatch_grow(d, &d->pair_at, route.n_pairs, d->pairs_max, err)) < 0)
        return rc;
    d->config.dev->ops->route_pairs(d->config.dev, p->place_of.at, d->pair_at.at, expert_ids,
                                    &route);
    return 0;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Of each chunk and rank, or of who passes on to it, the distinct tokens; counts go to the place of
 * their kind on the device. */
static int find_rows(struct dispatch_plan *p, bool by_relay, struct index *row_of,
                     struct index *pair_at, struct index *token_at, struct err *err)
{
    struct dispatch *d = p->d;
    struct route route = counted_route(p);
    uint32_t n = d->ep.n_ranks;
    struct route_targets targets = {(int32_t)n, d->target_at, d->target};
    int rc;
    if ((rc = dispatch_grow(d, row_of, route.n_pairs, d->pairs_max, err)) < 0 ||
        (rc = dispatch_grow(d, pair_at, route.n_pairs, d->pairs_max, err)) < 0 ||
        (rc = dispatch_grow(d, token_at, route.n_pairs, d->pairs_max, err)) < 0)
        return rc;
    for (uint32_t c = 0; c < p->n_chunks; c++) {
        int64_t at = 0, *begin = d->target_at + c * (n + 1);
        for (uint32_t r = 0; r < n; r++) {
            begin[r] = at;
            at += p->back.send[c * n + r];
        }
        begin[n] = at;
    }
    for (uint32_t r = 0; r < n; r++)
        d->target[r] = (int32_t)(by_relay ? dispatch_relay(d, d->ep.me, r) : r);
    int32_t *counts = d->dev_counts + (by_relay ? (size_t)p->n_chunks * n : 0);
    d->config.dev->ops->route_rows(d->config.dev, counts, row_of->at, pair_at->at, token_at->at,
                                   p->place_of.at, &targets, &route);
    return 0;
}

static int exchange_rows(struct dispatch_plan *p, struct err *err)
{
    struct dispatch *d = p->d;
    int rc = find_rows(p, false, &d->row_of, &d->row_pair_at,
                       d->crosses ? &d->tokens : &p->sent_at, err);
    if (rc == 0 && d->crosses)
        rc = find_rows(p, true, &d->cross_row_of, &d->cross_pair_at, &p->crossed_at, err);
    return rc < 0 ? rc : gather_counts(d, (size_t)p->n_chunks * d->ep.n_ranks *
                                              (d->crosses ? 2 : 1), d->rows, err);
}

/* ---- notes ---------------------------------------------------------------------------------- */

/* Sends the notes of one kind to those they are for. */
static int tell(struct dispatch_plan *p, const int64_t *pair_at, const int64_t *row_of,
                const float *weights, const struct route_notes *notes, struct err *err)
{
    struct dispatch *d = p->d;
    struct way *w = &d->notes;
    int64_t n_recv = 0;
    int rc;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++)
        n_recv += d->note_recv[m];
    if ((rc = dispatch_reserve(d, w, notes->begin[notes->n_blocks], n_recv,
                               sizeof(struct route_note), err)) < 0)
        return rc;
    struct route_note *to = dispatch_travels(d) ? w->out[w->turn].p : w->in;
    d->config.dev->ops->route_write(d->config.dev, to, pair_at, row_of, weights,
                                    (int32_t)d->config.top_k, notes);
    if (!dispatch_travels(d))
        return 0;
    rc = dispatch_start(d, w, d->note_send, d->note_recv, sizeof(struct route_note), err);
    return rc < 0 ? rc : dispatch_finish(d, w, err);
}

/* To who serves them: where each pair's row arrives, and what it weighs. */
static int tell_pairs(struct dispatch_plan *p, const float *weights, struct err *err)
{
    struct dispatch *d = p->d;
    struct route_notes notes = dispatch_pair_notes(p);
    int64_t n_rows = dispatch_plan_rows(p);
    int rc = tell(p, d->pair_at.at, dispatch_travels(d) ? d->row_of.at : NULL, weights, &notes,
                  err);
    if (rc < 0 || (rc = dispatch_grow(d, &p->laid_at, n_rows, d->rows_max, err)) < 0 ||
        (rc = grow_weights(p, n_rows, err)) < 0)
        return rc;
    int32_t n_blocks = dispatch_pair_blocks(p);
    d->config.dev->ops->route_read(d->config.dev, p->laid_at.at, p->weights, d->notes.in, d->from,
                                   d->to, n_blocks);
    return 0;
}

/* To who passes them on: where each row arrives there. */
static int tell_rows(struct dispatch_plan *p, struct err *err)
{
    struct dispatch *d = p->d;
    struct route_notes notes = dispatch_row_notes(p);
    int64_t n = p->to_experts.first_sent[p->n_chunks];
    int rc = tell(p, d->row_pair_at.at, d->cross_row_of.at, NULL, &notes, err);
    if (rc < 0 || (rc = dispatch_grow(d, &p->sent_at, n, d->notes.in_max, err)) < 0)
        return rc;
    int32_t n_blocks = dispatch_row_blocks(p);
    d->config.dev->ops->route_read(d->config.dev, p->sent_at.at, NULL, d->notes.in, d->from, d->to,
                                   n_blocks);
    return 0;
}

static int find_served(struct dispatch_plan *p, struct err *err)
{
    struct dispatch *d = p->d;
    int rc = dispatch_grow(d, &p->served_at, dispatch_plan_rows(p), d->rows_max, err);
    if (rc < 0)
        return rc;
    int32_t n_blocks = dispatch_served_blocks(p);
    d->config.dev->ops->route_blocks(d->config.dev, p->served_at.at, d->from, d->to, n_blocks);
    return 0;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int place_rows(struct dispatch_plan *p, uint32_t layer, const int32_t *expert_ids,
                      const float *weights, struct err *err)
{
    struct dispatch *d = p->d;
    int rc;
    dispatch_count_pairs(p);
    if ((rc = place_pairs(p, layer, expert_ids, err)) < 0 || !dispatch_travels(d))
        return rc < 0 ? rc : tell_pairs(p, weights, err);
    if ((rc = exchange_rows(p, err)) < 0)
        return rc;
    dispatch_count_rows(p);
    if ((rc = tell_pairs(p, weights, err)) < 0 || (rc = find_served(p, err)) < 0)
        return rc;
    return d->crosses ? tell_rows(p, err) : 0;
}

static int create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                  const float *weights, int64_t n_tokens, bool is_part,
                  struct dispatch_plan **out_plan, struct err *err)
{
    struct dispatch_plan *p = take_plan(d);
    p->n_chunks = is_part ? 1 : d->n_chunks;
    p->n_tokens = n_tokens;
    p->tokens_each = n_tokens > 0 ? (n_tokens + p->n_chunks - 1) / p->n_chunks : 1;
    spans_begin(d->config.dev, PHASE_DISPATCH, (int32_t)layer);
    int rc = exchange_choices(p, expert_ids, err);
    bool fits = rc < 0 || share_pairs(p, layer) || is_part;
    if (rc == 0 && fits)
        rc = place_rows(p, layer, expert_ids, weights, err);
    spans_end(d->config.dev);
    if (rc < 0 || !fits) {
        dispatch_plan_destroy(p);
        p = NULL;
    }
    if (rc == 0)
        *out_plan = p;
    return rc;
}

int dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                         const float *weights, int64_t n_tokens, struct dispatch_plan **out_plan,
                         struct err *err)
{
    return create(d, layer, expert_ids, weights, n_tokens, false, out_plan, err);
}

int dispatch_plan_part(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                       const float *weights, int64_t n_tokens, struct dispatch_plan **out_plan,
                       struct err *err)
{
    return create(d, layer, expert_ids, weights, n_tokens, true, out_plan, err);
}

uint32_t dispatch_plan_chunks(const struct dispatch_plan *p)
{
    return p->n_chunks;
}

int64_t dispatch_plan_rows(const struct dispatch_plan *p)
{
    return p->back.first_received[p->n_chunks];
}

struct dispatch_chunk dispatch_chunk_of(const struct dispatch_plan *p, uint32_t c)
{
    const struct dispatch *d = p->d;
    int64_t first = c * p->tokens_each < p->n_tokens ? c * p->tokens_each : p->n_tokens;
    int64_t rest = p->n_tokens - first;
    return (struct dispatch_chunk){
        .first_token = first, .n_tokens = rest < p->tokens_each ? rest : p->tokens_each,
        .first_row = p->back.first_received[c],
        .n_rows = p->back.first_received[c + 1] - p->back.first_received[c],
        .offsets = p->offsets + (size_t)c * (d->n_slots + 1),
        .blocks = p->blocks + (size_t)c * (d->n_total + 1),
        .servers = p->servers ? p->servers + (size_t)c * d->ep.n_ranks * d->n_experts : NULL,
    };
}
