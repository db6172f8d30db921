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

#define RENEW(p, n) ((p) = renew((p), (n), sizeof *(p)))

/* Another array in p's place; what p holds is of no use any more. */
static void *renew(void *p, size_t n, size_t size)
{
    free(p);
    return xcalloc(n, size);
}

static void renew_flow(struct flow *f, size_t n_pieces, size_t n_ranks)
{
    RENEW(f->send, n_pieces * n_ranks);
    RENEW(f->recv, n_pieces * n_ranks);
    RENEW(f->first_sent, n_pieces + 1);
    RENEW(f->first_received, n_pieces + 1);
}

static uint32_t room_for(uint32_t n_pieces)
{
    return n_pieces <= DISPATCH_CHUNKS_MAX ? DISPATCH_CHUNKS_MAX : n_pieces + n_pieces / 2;
}

/* The tables by piece: the plan's own. */
static void renew_plan(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    size_t n = room_for(p->n_pieces), n_ranks = d->ep.n_ranks;
    if (p->n_pieces <= p->pieces_max)
        return;
    p->pieces_max = (uint32_t)n;
    renew_flow(&p->to_relays, n, n_ranks);
    renew_flow(&p->to_experts, n, n_ranks);
    renew_flow(&p->back, n, n_ranks);
    RENEW(p->to_slot, n * d->n_total);
    RENEW(p->arrived, n * d->n_total);
    RENEW(p->blocks, n * (d->n_total + 1));
    RENEW(p->offsets, n * (d->n_slots + 1));
}

/* And the scratch. */
static void renew_scratch(struct dispatch *d, uint32_t n_pieces)
{
    size_t n = room_for(n_pieces), n_ranks = d->ep.n_ranks;
    size_t n_blocks = n * n_ranks * (d->n_slots > n_ranks ? d->n_slots : n_ranks) + 1;
    if (n_pieces <= d->pieces_max)
        return;
    d->pieces_max = (uint32_t)n;
    RENEW(d->rows, n_ranks * 2 * n * n_ranks);
    RENEW(d->end, n * d->n_total);
    RENEW(d->place, n * d->n_total);
    RENEW(d->begin, n * d->n_total);
    RENEW(d->target_at, n * n_ranks + DISPATCH_CHUNKS_MAX);
    RENEW(d->target, n * n_ranks);
    RENEW(d->from, n_blocks);
    RENEW(d->to, n_blocks);
    RENEW(d->add, n_blocks);
}

static struct dispatch_plan *take_plan(struct dispatch *d)
{
    struct dispatch_plan *p = d->idle;
    if (p)
        d->idle = p->next;
    else
        p = xcalloc(1, sizeof *p);
    p->d = d;
    d->newest = p;
    return p;
}

void dispatch_plan_destroy(struct dispatch_plan *p)
{
    if (!p)
        return;
    p->next = p->d->idle;
    p->d->idle = p;
    if (p->d->newest == p)
        p->d->newest = NULL;
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

/* Counts on the device: of choices of each chunk, or of rows of each piece. */
static int grow_counts(struct dispatch *d, size_t n, struct err *err)
{
    size_t first = (size_t)DISPATCH_CHUNKS_MAX *
                   (d->n_experts > 16 * d->ep.n_ranks ? d->n_experts : 16 * d->ep.n_ranks);
    size_t wanted = n > first ? 2 * n : first;
    if (n <= d->n_dev_counts)
        return 0;
    if (d->dev_counts)
        d->config.dev->ops->free(d->config.dev, d->dev_counts);
    d->n_dev_counts = 0;
    d->dev_counts = d->config.dev->ops->alloc(d->config.dev, wanted * sizeof *d->dev_counts);
    if (!d->dev_counts)
        return dispatch_no_memory(wanted * sizeof *d->dev_counts, err);
    d->n_dev_counts = wanted;
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
    size_t n = (size_t)p->n_chunks * d->n_experts;
    int rc = grow_counts(d, n, err);
    if (rc < 0)
        return rc;
    d->config.dev->ops->route_counts(d->config.dev, d->dev_counts, expert_ids, &route);
    return gather_counts(d, n, d->counts, err);
}

/* ---- places --------------------------------------------------------------------------------- */

/* Where the pairs of one chunk and expert are packed; the first copies get the first, and of theirs
 * the first pieces. begin: of the chunk. */
static int32_t route_expert(const struct dispatch_plan *p, const struct slots_layer *l,
                            uint32_t chunk, uint32_t e, const int64_t *begin, int32_t n_parts)
{
    const struct dispatch *d = p->d;
    const int64_t *to_slot = p->to_slot + (size_t)chunk * p->n_cuts * d->n_total;
    int32_t k = l->copied_at[e];
    const uint32_t *slots = k >= 0 ? l->copies + l->first_copy[k] : &l->map.home[e];
    uint32_t n = k >= 0 ? l->first_copy[k + 1] - l->first_copy[k] : 1;
    int64_t before = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < p->n_cuts; j++) {
            size_t at = (size_t)j * d->n_total + slots[i];
            if (to_slot[at] == 0) /* most, where one expert's rows make many pieces */
                continue;
            d->place[n_parts] = begin[at] - before;
            d->end[n_parts++] = before += to_slot[at];
        }
    return n_parts;
}

static struct route route_of(struct dispatch_plan *p, uint32_t layer)
{
    const struct dispatch *d = p->d;
    const struct slots_layer *l = &d->config.slots->layers[layer];
    struct route route = counted_route(p);
    size_t of_chunk = (size_t)p->n_cuts * d->n_total;
    int64_t at = 0;
    int32_t n_parts = 0;
    for (uint32_t c = 0; c < p->n_chunks; c++) {
        d->chunk_at[c] = at;
        for (size_t i = c * of_chunk; i < (c + 1) * of_chunk; i++) {
            d->begin[i] = at; /* where each slot's pairs are packed */
            at += p->to_slot[i];
        }
        for (uint32_t e = 0; e < d->n_experts; e++) {
            d->first[c * d->n_experts + e] = n_parts;
            n_parts = route_expert(p, l, c, e, d->begin + c * of_chunk, n_parts);
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

/* Of each piece and rank, or of who passes on to it, the distinct tokens; counts go to the place of
 * their kind on the device. Each piece of a chunk has targets of its own. */
static int find_rows(struct dispatch_plan *p, bool by_relay, struct index *row_of,
                     struct index *pair_at, struct index *token_at, struct err *err)
{
    struct dispatch *d = p->d;
    struct route route = counted_route(p);
    uint32_t n = d->ep.n_ranks, n_targets = p->n_cuts * n;
    struct route_targets targets = {(int32_t)n_targets, d->target_at, d->target};
    int rc;
    if ((rc = dispatch_grow(d, row_of, route.n_pairs, d->pairs_max, err)) < 0 ||
        (rc = dispatch_grow(d, pair_at, route.n_pairs, d->pairs_max, err)) < 0 ||
        (rc = dispatch_grow(d, token_at, route.n_pairs, d->pairs_max, err)) < 0)
        return rc;
    for (uint32_t c = 0; c < p->n_chunks; c++) {
        int64_t at = 0, *begin = d->target_at + c * (n_targets + 1);
        for (uint32_t i = 0; i < n_targets; i++) {
            begin[i] = at;
            at += p->back.send[c * n_targets + i];
        }
        begin[n_targets] = at;
    }
    for (uint32_t i = 0; i < n_targets; i++)
        d->target[i] = (int32_t)(by_relay ? i / n * n + dispatch_relay(d, d->ep.me, i % n) : i);
    int32_t *counts = d->dev_counts + (by_relay ? (size_t)p->n_pieces * n : 0);
    d->config.dev->ops->route_rows(d->config.dev, counts, row_of->at, pair_at->at, token_at->at,
                                   p->place_of.at, &targets, &route);
    return 0;
}

static int exchange_rows(struct dispatch_plan *p, struct err *err)
{
    struct dispatch *d = p->d;
    size_t n_counts = (size_t)p->n_pieces * d->ep.n_ranks * (d->crosses ? 2 : 1);
    int rc = grow_counts(d, n_counts, err);
    if (rc == 0)
        rc = find_rows(p, false, &d->row_of, &d->row_pair_at,
                       d->crosses ? &d->tokens : &p->sent_at, err);
    if (rc == 0 && d->crosses)
        rc = find_rows(p, true, &d->cross_row_of, &d->cross_pair_at, &p->crossed_at, err);
    return rc < 0 ? rc : gather_counts(d, n_counts, d->rows, err);
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
    rc = dispatch_start(d, w, d->note_send, d->note_recv, 0, sizeof(struct route_note), err);
    return rc < 0 ? rc : dispatch_finish(d, w, err);
}

static int64_t received(const struct dispatch_plan *p, struct told t)
{
    return p->back.first_received[t.end] - p->back.first_received[t.first];
}

/* To who serves them: where each pair's row arrives, and what it weighs. */
static int tell_pairs(struct dispatch_plan *p, struct told t, struct err *err)
{
    struct dispatch *d = p->d;
    struct route_notes notes = dispatch_pair_notes(p, t);
    int64_t n_rows = received(p, t);
    int rc = tell(p, d->pair_at.at + p->back.first_sent[t.first],
                  dispatch_travels(d) ? d->row_of.at : NULL, p->pair_weights, &notes, err);
    if (rc < 0 || (rc = dispatch_grow(d, &p->laid_at, n_rows, d->rows_max, err)) < 0 ||
        (rc = grow_weights(p, n_rows, err)) < 0)
        return rc;
    int32_t n_blocks = dispatch_pair_blocks(p, t);
    d->config.dev->ops->route_read(d->config.dev, p->laid_at.at, p->weights, d->notes.in, d->from,
                                   d->to, n_blocks);
    return 0;
}

/* To who passes them on: where each row arrives there. */
static int tell_rows(struct dispatch_plan *p, struct told t, struct err *err)
{
    struct dispatch *d = p->d;
    struct route_notes notes = dispatch_row_notes(p, t);
    int64_t n = p->to_experts.first_sent[t.end] - p->to_experts.first_sent[t.first];
    int rc = tell(p, d->row_pair_at.at + dispatch_rows_before(p, t.first), d->cross_row_of.at,
                  NULL, &notes, err);
    if (rc < 0 || (rc = dispatch_grow(d, &p->sent_at, n, d->notes.in_max, err)) < 0)
        return rc;
    int32_t n_blocks = dispatch_row_blocks(p, t);
    d->config.dev->ops->route_read(d->config.dev, p->sent_at.at, NULL, d->notes.in, d->from, d->to,
                                   n_blocks);
    return 0;
}

static int find_served(struct dispatch_plan *p, struct told t, struct err *err)
{
    struct dispatch *d = p->d;
    int rc = dispatch_grow(d, &p->served_at, received(p, t), d->rows_max, err);
    if (rc < 0)
        return rc;
    int32_t n_blocks = dispatch_served_blocks(p, t);
    d->config.dev->ops->route_blocks(d->config.dev, p->served_at.at, d->from, d->to, n_blocks);
    return 0;
}

static bool is_told(struct told t, uint32_t piece)
{
    return piece >= t.first && piece < t.end;
}

static struct told told_with(const struct dispatch_plan *p, uint32_t piece)
{
    uint32_t first = piece / p->n_told * p->n_told, end = first + p->n_told;
    return (struct told){first, end < p->n_pieces ? end : p->n_pieces};
}

int dispatch_tell_pairs(struct dispatch_plan *p, uint32_t piece, struct err *err)
{
    struct told t = told_with(p, piece);
    if (is_told(p->pairs, piece))
        return 0;
    assert(p->d->newest == p);
    p->pairs = t;
    int rc = tell_pairs(p, t, err);
    return rc < 0 || !dispatch_travels(p->d) ? rc : find_served(p, t, err);
}

int dispatch_tell_rows(struct dispatch_plan *p, uint32_t piece, struct err *err)
{
    if (!p->d->crosses || is_told(p->rows, piece))
        return 0;
    p->rows = told_with(p, piece);
    return tell_rows(p, p->rows, err);
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int place_rows(struct dispatch_plan *p, uint32_t layer, const int32_t *expert_ids,
                      struct err *err)
{
    struct dispatch *d = p->d;
    int rc;
    dispatch_count_pairs(p);
    if ((rc = place_pairs(p, layer, expert_ids, err)) < 0)
        return rc;
    if (dispatch_travels(d)) {
        if ((rc = exchange_rows(p, err)) < 0)
            return rc;
        dispatch_count_rows(p);
    }
    rc = dispatch_tell_pairs(p, 0, err);
    return rc < 0 ? rc : dispatch_tell_rows(p, 0, err);
}

int dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                         const float *weights, int64_t n_tokens, struct dispatch_plan **out_plan,
                         struct err *err)
{
    struct dispatch_plan *p = take_plan(d);
    p->n_chunks = d->n_chunks;
    p->n_tokens = n_tokens;
    p->tokens_each = n_tokens > 0 ? (n_tokens + p->n_chunks - 1) / p->n_chunks : 1;
    p->pair_weights = weights;
    p->pairs = p->rows = (struct told){0};
    spans_begin(d->config.dev, PHASE_DISPATCH, (int32_t)layer);
    int rc = exchange_choices(p, expert_ids, err);
    if (rc == 0) {
        dispatch_count_pieces(p, layer);
        renew_plan(p);
        renew_scratch(d, p->n_pieces);
        dispatch_cut_pairs(p);
        rc = place_rows(p, layer, expert_ids, err);
    }
    spans_end(d->config.dev);
    if (rc < 0)
        dispatch_plan_destroy(p);
    else
        *out_plan = p;
    return rc;
}

uint32_t dispatch_plan_pieces(const struct dispatch_plan *p)
{
    return p->n_pieces;
}

int64_t dispatch_plan_rows(const struct dispatch_plan *p)
{
    return p->back.first_received[p->n_pieces];
}

bool dispatch_plan_is_within(const struct dispatch_plan *p, int64_t n)
{
    return p->most_rows <= n;
}

bool dispatch_plan_is_whole(const struct dispatch_plan *p)
{
    return p->n_told >= p->n_pieces || p->d->newest == p;
}

struct dispatch_piece dispatch_piece_of(const struct dispatch_plan *p, uint32_t i)
{
    const struct dispatch *d = p->d;
    int64_t c = i / p->n_cuts, n_servers = (int64_t)d->ep.n_ranks * d->n_experts;
    int64_t first = c * p->tokens_each < p->n_tokens ? c * p->tokens_each : p->n_tokens;
    int64_t rest = p->n_tokens - first;
    return (struct dispatch_piece){
        .first_token = first, .n_tokens = rest < p->tokens_each ? rest : p->tokens_each,
        .first_row = p->back.first_received[i],
        .n_rows = p->back.first_received[i + 1] - p->back.first_received[i],
        .offsets = p->offsets + (size_t)i * (d->n_slots + 1),
        .blocks = p->blocks + (size_t)i * (d->n_total + 1),
        .servers = p->servers ? p->servers + c * n_servers : NULL,
    };
}
