/* shard_travel.c - what of the parameters is on its way: whole units that come, gradients that go
 *
 * Both are begun before they are needed and waited for when they are. A buffer that other ranks may
 * still read waits for them when it is taken again, which is a unit later; of weights nothing
 * waits before the pass is over, as nobody writes them before. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"
#include "kernels/spans.h"
#include "worker/phases.h"
#include "worker/shard_state.h"

/* ---- buffers -------------------------------------------------------------------------------- */

static bool is_better(const struct shard_buffer *a, const struct shard_buffer *b)
{
    return !b || a->n_bytes < b->n_bytes ||
           (a->n_bytes == b->n_bytes && a->returned < b->returned);
}

int shard_buffer_take(struct shard *s, size_t n_bytes, void **out, struct err *err)
{
    struct shard_buffer *best = NULL;
    for (size_t i = 0; i < s->n_gathered; i++) {
        struct shard_buffer *b = &s->gathered[i];
        /* A layer must not hold the memory of a whole vocabulary. */
        if (!b->is_used && b->n_bytes >= n_bytes && b->n_bytes / 2 <= n_bytes && is_better(b, best))
            best = b;
    }
    if (!best) {
        void *base = shard_alloc(s, n_bytes);
        if (!base)
            return err_set(err, -ENOMEM, "no memory for %zu MiB of gathered parameters",
                           n_bytes >> 20);
        s->gathered = xrealloc(s->gathered, (s->n_gathered + 1) * sizeof *s->gathered);
        best = &s->gathered[s->n_gathered++];
        *best = (struct shard_buffer){.base = base, .n_bytes = n_bytes};
    }
    /* A failure here is one of the next call, too; until then nobody reads what others write. */
    if (best->ticket) {
        spans_begin(s->dev, PHASE_REDUCE, s->coll->layer);
        s->coll->ops->reclaim(s->coll, best->ticket, NULL);
        spans_end(s->dev);
        best->ticket = 0;
    }
    best->is_used = true;
    *out = best->base;
    return 0;
}

/* Back, while other ranks may still read it. */
static void leave_buffer(struct shard *s, void *buffer, coll_ticket ticket)
{
    for (size_t i = 0; i < s->n_gathered; i++)
        if (s->gathered[i].base == buffer) {
            s->gathered[i].is_used = false;
            s->gathered[i].returned = ++s->n_returned;
            s->gathered[i].ticket = ticket;
        }
}

void shard_buffer_return(struct shard *s, void *buffer)
{
    leave_buffer(s, buffer, 0);
}

size_t shard_buffer_bytes(const struct shard *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_gathered; i++)
        n += s->gathered[i].n_bytes;
    return n;
}

/* ---- weights -------------------------------------------------------------------------------- */

static int start_part(struct shard *s, const struct coll_group *g, uint64_t from, uint64_t slice,
                      uint32_t n_blocks, elem *to, coll_ticket *out_ticket, struct err *err)
{
    *out_ticket = 0;
    if (slice == 0)
        return 0;
    int rc = s->coll->ops->start_all_gather(s->coll, g, s->dev->elem,
                                            elem_at(s->dev, s->weights, (int64_t)from), slice,
                                            n_blocks, to, out_ticket, err);
    return rc < 0 ? rc : coll_leave_open(s->coll, out_ticket, err);
}

/* The trained slices of all members, then their frozen ones. */
int gather_start(struct shard *s, const struct coll_group *g, struct shard_unit *u,
                 uint32_t n_blocks, struct err *err)
{
    uint64_t n = (uint64_t)n_blocks * g->n_ranks;
    void *whole;
    int rc = shard_buffer_take(s, n * (u->slice + u->frozen) * elem_size(s->dev), &whole, err);
    if (rc < 0)
        return rc;
    u->whole = whole;
    u->is_coming = true;
    spans_begin(s->dev, PHASE_GATHER, s->coll->layer);
    rc = start_part(s, g, u->weights_at, u->slice, n_blocks, whole, &u->tickets[0], err);
    if (rc == 0)
        rc = start_part(s, g, u->frozen_at, u->frozen, n_blocks,
                        elem_at(s->dev, whole, (int64_t)(n * u->slice)), &u->tickets[1], err);
    spans_end(s->dev);
    return rc;
}

int gather_finish(struct shard *s, struct shard_unit *u, int32_t layer, struct err *err)
{
    int rc = 0;
    if (!u->is_coming)
        return 0;
    u->is_coming = false;
    spans_begin(s->dev, PHASE_GATHER, layer);
    for (int i = 0; i < 2 && rc == 0; i++)
        rc = s->coll->ops->finish(s->coll, u->tickets[i], err);
    spans_end(s->dev);
    return rc;
}

void gather_drop(struct shard *s, struct shard_unit *u)
{
    if (u->whole)
        shard_buffer_return(s, u->whole);
    u->whole = NULL;
}

/* ---- gradients ------------------------------------------------------------------------------ */

int reduction_start(struct shard *s, const struct coll_group *g, struct shard_reduction *slot,
                    const struct shard_reduction *r, uint64_t n_blocks, struct err *err)
{
    assert(!slot->unit);
    *slot = *r;
    spans_begin(s->dev, PHASE_REDUCE, r->layer);
    int rc = s->coll->ops->start_reduce_scatter(s->coll, g, ELEM_F32, r->block, r->unit->slice,
                                                n_blocks, r->sum, &slot->ticket, err);
    if (rc == 0)
        rc = coll_leave_open(s->coll, &slot->ticket, err);
    spans_end(s->dev);
    return rc < 0 || !s->coll->is_blocking ? rc : reduction_end(s, slot, err);
}

int reduction_end(struct shard *s, struct shard_reduction *slot, struct err *err)
{
    if (!slot->unit)
        return 0;
    spans_begin(s->dev, PHASE_REDUCE, slot->layer);
    int rc = s->coll->ops->finish(s->coll, slot->ticket, err);
    if (rc == 0)
        s->dev->ops->axpy(s->dev, s->gradients + slot->unit->at, 1.0f, slot->sum,
                          (int64_t)slot->n);
    if (slot->sum_is_apart)
        shard_buffer_return(s, slot->sum);
    leave_buffer(s, slot->block, slot->ticket);
    slot->unit = NULL;
    spans_end(s->dev);
    return rc;
}

/* ---- the end of a pass ---------------------------------------------------------------------- */

static int settle_unit(struct shard *s, struct shard_unit *u, int32_t layer, struct err *err)
{
    int rc = 0;
    if (u->whole && u->n_users == 0) {
        rc = gather_finish(s, u, layer, err);
        gather_drop(s, u);
    }
    for (int i = 0; i < 2 && rc == 0; i++) {
        rc = s->coll->ops->reclaim(s->coll, u->tickets[i], err);
        u->tickets[i] = 0;
    }
    return rc;
}

int shard_settle(struct shard *s, struct err *err)
{
    int rc = reduction_end(s, &s->experts_reduction, err);
    if (rc == 0)
        rc = reduction_end(s, &s->dense_reduction, err);
    s->next_experts = -1;
    for (uint32_t i = 0; i < s->map->n_units && rc == 0; i++)
        rc = settle_unit(s, &s->units[i], -1, err);
    for (uint32_t l = 0; l < s->spec->n_layers && rc == 0; l++)
        rc = settle_unit(s, &s->layers[l], (int32_t)l, err);
    for (size_t i = 0; i < s->n_gathered && rc == 0; i++) {
        rc = s->coll->ops->reclaim(s->coll, s->gathered[i].ticket, err);
        s->gathered[i].ticket = 0;
    }
    return rc;
}
