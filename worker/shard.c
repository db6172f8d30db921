/* shard.c - the dense units of one rank, and the blocks that hold all it owns */
#include "worker/shard.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/shard_state.h"

/* ---- memory --------------------------------------------------------------------------------- */

float *shard_alloc(struct shard *s, size_t n)
{
    size_t n_bytes = (n > 0 ? n : 1) * sizeof(float);
    return s->coll->world > 1 ? s->coll->ops->alloc(s->coll, n_bytes)
                              : s->dev->ops->alloc(s->dev, n_bytes);
}

static void free_alloced(struct shard *s, float *p)
{
    if (p && s->coll->world > 1)
        s->coll->ops->free(s->coll, p);
    else if (p)
        s->dev->ops->free(s->dev, p);
}

int shard_buffer_take(struct shard *s, size_t n, float **out, struct err *err)
{
    struct shard_buffer *best = NULL;
    for (size_t i = 0; i < s->n_buffers; i++) {
        struct shard_buffer *b = &s->buffers[i];
        /* A layer must not hold the memory of a whole vocabulary. */
        if (!b->is_used && b->n >= n && b->n / 2 <= n && (!best || b->n < best->n))
            best = b;
    }
    if (!best) {
        float *floats = shard_alloc(s, n);
        if (!floats)
            return err_set(err, -ENOMEM, "no memory for %zu MiB of gathered parameters",
                           n * sizeof(float) >> 20);
        s->buffers = xrealloc(s->buffers, (s->n_buffers + 1) * sizeof *s->buffers);
        best = &s->buffers[s->n_buffers++];
        *best = (struct shard_buffer){.floats = floats, .n = n};
    }
    best->is_used = true;
    *out = best->floats;
    return 0;
}

void shard_buffer_return(struct shard *s, float *floats)
{
    for (size_t i = 0; i < s->n_buffers; i++)
        if (s->buffers[i].floats == floats)
            s->buffers[i].is_used = false;
}

size_t shard_state_bytes(const struct shard *s)
{
    return 4 * s->n_owned * sizeof(float);
}

size_t shard_buffer_bytes(const struct shard *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_buffers; i++)
        n += s->buffers[i].n * sizeof(float);
    return n;
}

/* ---- open and close ------------------------------------------------------------------------- */

uint64_t shard_slice(uint64_t count, uint32_t n_ranks)
{
    uint64_t lines = (count + 15) / 16;
    return (lines + n_ranks - 1) / n_ranks * 16;
}

static struct coll_group group(const struct rank_group *g, enum coll_group_id id)
{
    return (struct coll_group){.ranks = g->ranks, .n_ranks = g->n_ranks, .me = g->me, .id = id};
}

static void plan(struct shard *s)
{
    uint64_t at = 0;
    s->units = xcalloc(s->map->n_units, sizeof *s->units);
    for (uint32_t u = 0; u < s->map->n_units; u++) {
        s->units[u].slice = shard_slice(s->map->unit_count[u], s->fsdp.n_ranks);
        s->units[u].at = at;
        at += s->units[u].slice;
    }
    s->n_dense = at;
    s->n_owned = experts_plan(s, at);
}

int shard_open(const struct tensor_map *map, const struct model_spec *spec,
               const struct layout *layout, const struct slots *slots, struct coll *coll,
               struct device *dev, struct shard **out_shard, struct err *err)
{
    struct shard *s = xcalloc(1, sizeof *s);
    *s = (struct shard){
        .map = map, .spec = spec, .layout = layout, .slots = slots, .coll = coll, .dev = dev,
        .fsdp = group(&layout->fsdp, COLL_FSDP),
        .fsdp_replica = group(&layout->fsdp_replica, COLL_FSDP_REPLICA),
        .ep = group(&layout->ep, COLL_EP),
        .expert_shard = group(&layout->expert_shard, COLL_EXPERT_SHARD),
        .expert_replica = group(&layout->expert_replica, COLL_EXPERT_REPLICA),
    };
    plan(s);
    size_t n_bytes = (s->n_owned > 0 ? s->n_owned : 1) * sizeof(float);
    s->weights = shard_alloc(s, s->n_owned);
    s->gradients = shard_alloc(s, s->n_owned);
    s->m = dev->ops->alloc(dev, n_bytes);
    s->v = dev->ops->alloc(dev, n_bytes);
    if (!s->weights || !s->gradients || !s->m || !s->v) {
        shard_close(s);
        return err_set(err, -ENOMEM, "no memory for %zu MiB of weights, gradients and optimizer "
                       "state", 4 * n_bytes >> 20);
    }
    experts_point(s);
    *out_shard = s;
    return 0;
}

void shard_close(struct shard *s)
{
    if (!s)
        return;
    free_alloced(s, s->weights);
    free_alloced(s, s->gradients);
    free_alloced(s, s->copy_send);
    if (s->copy_recv)
        s->dev->ops->free(s->dev, s->copy_recv);
    for (size_t i = 0; i < s->n_buffers; i++)
        free_alloced(s, s->buffers[i].floats);
    if (s->m)
        s->dev->ops->free(s->dev, s->m);
    if (s->v)
        s->dev->ops->free(s->dev, s->v);
    if (s->acc)
        s->dev->ops->free(s->dev, s->acc);
    experts_fini(s);
    free(s->buffers);
    free(s->units);
    free(s);
}

/* ---- units ---------------------------------------------------------------------------------- */

/* Errors and the flight recorder speak of decoder layers. */
static void set_layer(struct shard *s, uint32_t unit)
{
    bool is_layer = unit > 0 && unit + 1 < s->map->n_units;
    s->coll->layer = is_layer ? (int32_t)unit - 1 : -1;
}

int shard_acquire(struct shard *s, uint32_t unit, const elem **out_weights, struct err *err)
{
    struct shard_unit *u = &s->units[unit];
    const float *own = s->weights + u->at;
    int rc;
    assert(unit < s->map->n_units);
    set_layer(s, unit);
    if (s->fsdp.n_ranks == 1) {
        *out_weights = (const elem *)own;
        return 0;
    }
    if (u->n_users == 0) {
        uint64_t began = clock_now_ns();
        if ((rc = shard_buffer_take(s, u->slice * s->fsdp.n_ranks, &u->whole, err)) < 0)
            return rc;
        rc = s->coll->ops->all_gather(s->coll, &s->fsdp, ELEM_F32, own, u->slice, 1, u->whole,
                                      err);
        s->gather_ns += clock_now_ns() - began;
        if (rc < 0)
            return rc;
    }
    u->n_users++;
    *out_weights = (const elem *)u->whole;
    return 0;
}

void shard_release(struct shard *s, uint32_t unit)
{
    struct shard_unit *u = &s->units[unit];
    if (s->fsdp.n_ranks == 1)
        return;
    assert(u->n_users > 0);
    if (--u->n_users == 0) {
        shard_buffer_return(s, u->whole);
        u->whole = NULL;
    }
}

float *shard_gradient(struct shard *s, uint32_t unit)
{
    struct shard_unit *u = &s->units[unit];
    assert(unit < s->map->n_units);
    if (s->fsdp.n_ranks == 1)
        return s->gradients + u->at;
    if (!u->gradient) {
        size_t n = u->slice * s->fsdp.n_ranks;
        struct err err = {0};
        int rc = shard_buffer_take(s, n, &u->gradient, &err);
        assert(rc == 0); /* address space as large as the machine's memory is used up */
        s->dev->ops->zero(s->dev, u->gradient, n * sizeof(float));
    }
    return u->gradient;
}

int shard_reduce(struct shard *s, uint32_t unit, struct err *err)
{
    struct shard_unit *u = &s->units[unit];
    if (s->fsdp.n_ranks == 1)
        return 0;
    uint64_t began = clock_now_ns();
    float *block = shard_gradient(s, unit), *mine = block + s->fsdp.me * u->slice;
    set_layer(s, unit);
    int rc = s->coll->ops->reduce_scatter(s->coll, &s->fsdp, ELEM_F32, block, u->slice, 1, mine,
                                          err);
    if (rc == 0)
        s->dev->ops->axpy(s->dev, s->gradients + u->at, 1.0f, mine, (int64_t)u->slice);
    shard_buffer_return(s, block);
    u->gradient = NULL;
    s->reduce_ns += clock_now_ns() - began;
    return rc;
}

/* ---- the owner's view ----------------------------------------------------------------------- */

struct device *shard_device(const struct shard *s)
{
    return s->dev;
}

bool shard_part(const struct shard *s, const struct tensor_entry *entry, struct shard_part *out)
{
    bool is_expert = entry->expert >= 0;
    const struct shard_unit *u = is_expert ? &s->layers[entry->unit - 1] : &s->units[entry->unit];
    const struct coll_group *cut = is_expert ? &s->expert_shard : &s->fsdp;
    uint64_t at = u->at;
    if (is_expert) {
        uint32_t layer = entry->unit - 1, e = (uint32_t)entry->expert;
        if (slots_home(s->slots, layer, e) != s->slots->me)
            return false;
        at = shard_slot_at(s, layer, s->slots->layers[layer].map.home[e] % s->slots->n_slots);
    }
    uint64_t begin = cut->me * u->slice, end = begin + u->slice;
    uint64_t first = entry->offset > begin ? entry->offset : begin;
    uint64_t last = entry->offset + entry->count < end ? entry->offset + entry->count : end;
    if (first >= last)
        return false;
    at += first - begin;
    *out = (struct shard_part){
        .first = first - entry->offset, .count = last - first,
        .weights = s->weights + at, .gradients = s->gradients + at, .m = s->m + at, .v = s->v + at,
        .is_first = (is_expert ? s->expert_replica.me : s->fsdp_replica.me) == 0,
    };
    return true;
}

int shard_sum_replicas(struct shard *s, struct err *err)
{
    uint64_t began = clock_now_ns();
    int rc = s->dev->deterministic ? 0 : copies_send_gradients(s, err);
    s->coll->layer = -1;
    if (rc == 0 && s->fsdp_replica.n_ranks > 1)
        rc = s->coll->ops->all_reduce(s->coll, &s->fsdp_replica, COLL_SUM, ELEM_F32,
                                      s->gradients, s->n_dense, err);
    if (rc == 0 && s->expert_replica.n_ranks > 1)
        rc = s->coll->ops->all_reduce(s->coll, &s->expert_replica, COLL_SUM, ELEM_F32,
                                      s->gradients + s->n_dense, s->n_owned - s->n_dense, err);
    s->reduce_ns += clock_now_ns() - began;
    return rc;
}

void shard_zero_gradients(struct shard *s)
{
    s->dev->ops->zero(s->dev, s->gradients, s->n_owned * sizeof(float));
}

void shard_zero_optimizer(struct shard *s)
{
    s->dev->ops->zero(s->dev, s->m, s->n_owned * sizeof(float));
    s->dev->ops->zero(s->dev, s->v, s->n_owned * sizeof(float));
}

double *shard_accumulators(struct shard *s, size_t n)
{
    if (n > s->n_acc) {
        if (s->acc)
            s->dev->ops->free(s->dev, s->acc);
        s->acc = s->dev->ops->alloc(s->dev, n * sizeof *s->acc);
        s->n_acc = s->acc ? n : 0;
    }
    if (s->acc)
        s->dev->ops->zero(s->dev, s->acc, n * sizeof *s->acc);
    return s->acc;
}

void shard_times(struct shard *s, double *out_gather_s, double *out_reduce_s)
{
    *out_gather_s = (double)s->gather_ns / NS_PER_S;
    *out_reduce_s = (double)s->reduce_ns / NS_PER_S;
    s->gather_ns = s->reduce_ns = 0;
}
