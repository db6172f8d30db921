/* dispatch.c - who passes on whose rows, and the memory of one rank's dispatch */
#include "worker/dispatch.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"
#include "worker/dispatch_state.h"

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- open and close ------------------------------------------------------------------------- */

static uint32_t count_on_node(const struct dispatch *d, uint32_t end, uint32_t like)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < end; i++)
        n += dispatch_same_node(d, i, like);
    return n;
}

/* The rank of dest's node that is at the place that source has in its own. */
static uint32_t find_relay(const struct dispatch *d, uint32_t source, uint32_t dest)
{
    uint32_t place = count_on_node(d, source, source) % count_on_node(d, d->ep.n_ranks, dest);
    uint32_t r = 0;
    if (dispatch_same_node(d, source, dest))
        return source;
    while (!dispatch_same_node(d, r, dest) || place-- > 0)
        r++;
    return r;
}

static void find_relays(struct dispatch *d)
{
    uint32_t n = d->ep.n_ranks;
    bool is_shared = false; /* else who passes a row on is whom it is for */
    for (uint32_t i = 0; i < n; i++)
        is_shared = is_shared || count_on_node(d, n, i) > 1;
    d->crosses = d->config.hierarchical && is_shared && count_on_node(d, n, d->ep.me) < n;
    if (!d->crosses)
        return;
    d->relay = xcalloc((size_t)n * n, sizeof *d->relay);
    for (uint32_t s = 0; s < n; s++)
        for (uint32_t r = 0; r < n; r++)
            d->relay[s * n + r] = (int32_t)find_relay(d, s, r);
}

struct dispatch *dispatch_open(const struct dispatch_config *config)
{
    const struct rank_group *ep = &config->layout->ep;
    const struct slots *slots = config->slots;
    struct dispatch *d = xcalloc(1, sizeof *d);
    size_t n = ep->n_ranks, n_total = (size_t)slots->n_slots * n, n_chunks = DISPATCH_CHUNKS_MAX;
    assert(slots->n_devices == n && slots->n_experts > 0);
    assert(config->n_chunks <= DISPATCH_CHUNKS_MAX);
    *d = (struct dispatch){
        .config = *config, .ep = coll_group_of(ep, COLL_EP), .shares = shares_create(slots),
        .n_experts = slots->n_experts, .n_slots = slots->n_slots, .n_total = (uint32_t)n_total,
        .n_chunks = n > 1 && config->n_chunks > 0 ? config->n_chunks : 1,
    };
    if (config->nodes)
        d->config.nodes = xmemdup(config->nodes, n * sizeof *config->nodes);
    find_relays(d);
    d->counts = xcalloc(n * n_chunks * d->n_experts, sizeof *d->counts);
    d->loads = xcalloc(d->n_experts, sizeof *d->loads);
    d->chunk_slots = xcalloc(n_chunks * n_total, sizeof *d->chunk_slots);
    d->chunk_arrived = xcalloc(n_chunks * n_total, sizeof *d->chunk_arrived);
    d->device_rows = xcalloc(n, sizeof *d->device_rows);
    d->first = xcalloc(n_chunks * d->n_experts + 1, sizeof *d->first);
    d->chunk_at = xcalloc(n_chunks, sizeof *d->chunk_at);
    d->note_send = xcalloc(n, sizeof *d->note_send);
    d->note_recv = xcalloc(n, sizeof *d->note_recv);
    return d;
}

static void free_flow(struct flow *f)
{
    free(f->send);
    free(f->recv);
    free(f->first_sent);
    free(f->first_received);
}

static void free_index(const struct dispatch *d, struct index *x)
{
    if (x->at)
        d->config.dev->ops->free(d->config.dev, x->at);
    *x = (struct index){0};
}

static void free_plan(struct dispatch_plan *p)
{
    struct dispatch *d = p->d;
    free_index(d, &p->crossed_at);
    free_index(d, &p->sent_at);
    free_index(d, &p->laid_at);
    free_index(d, &p->served_at);
    free_index(d, &p->place_of);
    if (p->weights)
        d->config.dev->ops->free(d->config.dev, p->weights);
    free_flow(&p->to_relays);
    free_flow(&p->to_experts);
    free_flow(&p->back);
    free(p->to_slot);
    free(p->arrived);
    free(p->blocks);
    free(p->offsets);
    free(p->servers);
    free(p);
}

static void free_way(struct dispatch *d, struct way *w)
{
    for (int i = 0; i < 2; i++)
        if (w->out[i].p)
            d->config.coll->ops->free(d->config.coll, w->out[i].p);
    if (w->in)
        d->config.dev->ops->free(d->config.dev, w->in);
}

static void free_host(struct dispatch *d)
{
    void *const all[] = {d->relay, d->counts, d->loads, d->chunk_slots, d->chunk_arrived, d->rows,
                         d->device_rows, d->first, d->end, d->place, d->begin, d->chunk_at,
                         d->target_at, d->target, d->from, d->to, d->add, d->note_send,
                         d->note_recv, (void *)d->config.nodes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

void dispatch_close(struct dispatch *d)
{
    if (!d)
        return;
    for (struct dispatch_plan *p = d->idle, *next; p; p = next) {
        next = p->next;
        free_plan(p);
    }
    free_way(d, &d->to_relays);
    free_way(d, &d->to_experts);
    free_way(d, &d->back);
    free_way(d, &d->notes);
    free_index(d, &d->pair_at);
    free_index(d, &d->row_of);
    free_index(d, &d->row_pair_at);
    free_index(d, &d->cross_row_of);
    free_index(d, &d->cross_pair_at);
    free_index(d, &d->tokens);
    if (d->dev_counts)
        d->config.dev->ops->free(d->config.dev, d->dev_counts);
    shares_destroy(d->shares);
    free_host(d);
    free(d);
}

/* ---- buffers -------------------------------------------------------------------------------- */

static size_t way_bytes(const struct way *w)
{
    return w->out[0].n_bytes + w->out[1].n_bytes + w->in_bytes;
}

size_t dispatch_bytes(const struct dispatch *d)
{
    const struct index *const shared[] = {&d->pair_at, &d->row_of, &d->row_pair_at,
                                          &d->cross_row_of, &d->cross_pair_at, &d->tokens};
    size_t n = way_bytes(&d->to_relays) + way_bytes(&d->to_experts) + way_bytes(&d->back) +
               way_bytes(&d->notes);
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        n += shared[i]->n * sizeof *shared[i]->at;
    for (const struct dispatch_plan *p = d->idle; p; p = p->next)
        n += (p->crossed_at.n + p->sent_at.n + p->laid_at.n + p->served_at.n + p->place_of.n) *
                 sizeof *p->place_of.at + p->n_weights * sizeof *p->weights;
    return n;
}

int dispatch_no_memory(size_t n_bytes, struct err *err)
{
    return err_set(err, -ENOMEM, "no memory for %zu MiB of rows on their way to experts",
                   n_bytes >> 20);
}

int dispatch_grow(const struct dispatch *d, struct index *x, int64_t n, int64_t planned,
                  struct err *err)
{
    if ((size_t)n <= x->n)
        return 0;
    size_t wanted = (size_t)(n > planned ? larger(n, 2 * (int64_t)x->n) : planned);
    free_index(d, x);
    x->at = d->config.dev->ops->alloc(d->config.dev, wanted * sizeof *x->at);
    if (!x->at)
        return dispatch_no_memory(wanted * sizeof *x->at, err);
    x->n = wanted;
    return 0;
}

/* ---- the limit ------------------------------------------------------------------------------ */

/* Ranks whose rows this one passes on, itself among them. */
static int64_t count_sources(const struct dispatch *d)
{
    int64_t n = 0;
    for (uint32_t s = 0; s < d->ep.n_ranks; s++) {
        bool mine = false;
        for (uint32_t r = 0; r < d->ep.n_ranks; r++)
            mine = mine || dispatch_relay(d, s, r) == d->ep.me;
        n += mine;
    }
    return n;
}

static uint32_t count_nodes(const struct dispatch *d)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < d->ep.n_ranks; i++)
        n += count_on_node(d, i, i) == 0;
    return n;
}

/* What each way takes of a chunk or piece at most, and of notes of the pieces told of at once. */
static void plan_ways(struct dispatch *d)
{
    int64_t n_ranks = d->ep.n_ranks, top_k = d->config.top_k;
    int64_t n = (d->tokens_max + d->n_chunks - 1) / d->n_chunks;
    int64_t n_here = n_ranks, n_passed = 0;
    if (d->crosses) {
        int64_t n_sources = count_sources(d);
        n_here = count_on_node(d, d->ep.n_ranks, d->ep.me);
        n_passed = n_sources * d->tokens_max * smaller(top_k, n_here);
        d->to_relays.out_max = n * smaller(top_k, count_nodes(d));
        d->to_relays.in_max = n_sources * n;
        d->to_experts.out_max = n_sources * n * smaller(top_k, n_here);
    } else {
        d->to_experts.out_max = n * smaller(top_k, n_ranks);
    }
    d->to_experts.in_max = d->back.out_max = d->piece_rows;
    d->back.in_max = n * top_k;
    d->notes.out_max = d->pairs_max;
    d->notes.in_max = larger(larger(d->rows_max, d->pairs_max), n_passed);
}

static int reserve_ways(struct dispatch *d, struct err *err)
{
    struct way *const ways[] = {&d->to_relays, &d->to_experts, &d->back, &d->notes};
    int rc = 0;
    for (size_t i = 0; i < 2 * sizeof ways / sizeof *ways && rc == 0; i++) {
        struct way *w = ways[i / 2];
        size_t row_bytes = w == &d->notes ? sizeof(struct route_note)
                                          : d->config.width * elem_size(d->config.dev);
        rc = dispatch_reserve(d, w, w->out_max, w->in_max, row_bytes, err);
        w->turn = !w->turn;
    }
    return rc;
}

int dispatch_limit(struct dispatch *d, int64_t tokens_max, int64_t rows_max, struct err *err)
{
    if (d->config.n_chunks == 0)
        d->n_chunks = memory_chunks((uint64_t)tokens_max, d->ep.n_ranks, d->config.chunk_tokens);
    d->pairs_max = tokens_max * d->config.top_k;
    d->tokens_max = tokens_max;
    d->rows_max = rows_max;
    d->piece_rows = (int64_t)memory_piece_rows((uint64_t)rows_max, d->n_chunks,
                                               (uint64_t)dispatch_n_blocks(d));
    plan_ways(d);
    return dispatch_travels(d) ? reserve_ways(d, err) : 0;
}

int64_t dispatch_piece_rows(const struct dispatch *d)
{
    return d->piece_rows;
}
