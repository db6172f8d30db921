/* shard.c - the dense units of one rank, and the blocks that hold all it owns */
#include "worker/shard.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "kernels/spans.h"
#include "worker/shard_state.h"

/* ---- memory --------------------------------------------------------------------------------- */

void *shard_alloc(struct shard *s, size_t n_bytes)
{
    return s->coll->world > 1 ? s->coll->ops->alloc(s->coll, n_bytes)
                              : s->dev->ops->alloc(s->dev, n_bytes);
}

void shard_free(struct shard *s, void *p)
{
    if (p && s->coll->world > 1)
        s->coll->ops->free(s->coll, p);
    else if (p)
        s->dev->ops->free(s->dev, p);
}

size_t shard_state_bytes(const struct shard *s)
{
    size_t n_floats = (s->master ? 3 : 2) * s->n_owned + s->n_v + s->map->n_buffers;
    return n_floats * sizeof(float) + s->n_weights * elem_size(s->dev);
}

/* ---- open and close ------------------------------------------------------------------------- */

uint64_t shard_slice(uint64_t count, uint32_t n_ranks)
{
    uint64_t lines = (count + 15) / 16;
    return (lines + n_ranks - 1) / n_ranks * 16;
}

static void plan(struct shard *s)
{
    s->units = xcalloc(s->map->n_units, sizeof *s->units);
    for (uint32_t i = 0; i < s->map->n_units; i++) {
        struct shard_unit *u = &s->units[i];
        u->slice = shard_slice(s->map->units[i].trained, s->fsdp.n_ranks);
        u->frozen = shard_slice(s->map->units[i].frozen, s->fsdp.n_ranks);
        u->at = s->n_owned;
        u->weights_at = s->n_weights;
        u->frozen_at = u->weights_at + u->slice;
        s->n_owned += u->slice;
        s->n_weights += u->slice + u->frozen;
    }
    s->n_dense = s->n_owned;
    experts_plan(s, &s->n_owned, &s->n_weights);
    shard_plan_v(s);
}

/* The longest frozen tensor that is no matrix. */
static uint64_t sink_floats(const struct tensor_map *map)
{
    uint64_t most = 0;
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (!e->is_buffer && !tensor_is_trained(e) && !e->is_matrix && e->count > most)
            most = e->count;
    }
    return most;
}

/* False when there is no more memory. */
static bool take_blocks(struct shard *s)
{
    struct device *dev = s->dev;
    bool is_own_master = dev->elem == ELEM_F32;
    size_t n_floats = s->n_owned * sizeof(float), n_buffers = s->map->n_buffers * sizeof(float);

    s->weights = shard_alloc(s, s->n_weights * elem_size(dev));
    s->gradients = shard_alloc(s, n_floats);
    s->m = dev->ops->alloc(dev, n_floats);
    s->v = dev->ops->alloc(dev, s->n_v * sizeof(float));
    s->buffers = dev->ops->alloc(dev, n_buffers);
    s->host_buffers = xcalloc(s->map->n_buffers, sizeof *s->host_buffers);
    s->sink = dev->ops->alloc(dev, sink_floats(s->map) * sizeof *s->sink);
    if (!is_own_master)
        s->master = dev->ops->alloc(dev, n_floats);
    return s->weights && s->gradients && s->m && s->v && s->buffers && s->sink &&
           (is_own_master || s->master);
}

int shard_open(const struct tensor_map *map, const struct model_spec *spec,
               const struct layout *layout, const struct slots *slots, struct coll *coll,
               struct device *dev, struct shard **out_shard, struct err *err)
{
    struct shard *s = xcalloc(1, sizeof *s);
    *s = (struct shard){
        .map = map, .spec = spec, .layout = layout, .slots = slots, .coll = coll, .dev = dev,
        .fsdp = coll_group_of(&layout->fsdp, COLL_FSDP),
        .fsdp_replica = coll_group_of(&layout->fsdp_replica, COLL_FSDP_REPLICA),
        .ep = coll_group_of(&layout->ep, COLL_EP),
        .expert_shard = coll_group_of(&layout->expert_shard, COLL_EXPERT_SHARD),
        .expert_replica = coll_group_of(&layout->expert_replica, COLL_EXPERT_REPLICA),
        .next_experts = -1,
    };
    plan(s);
    if (!take_blocks(s)) {
        size_t n_bytes = shard_state_bytes(s);
        shard_close(s);
        return err_set(err, -ENOMEM, "no memory for %zu MiB of weights, gradients and optimizer "
                       "state", n_bytes >> 20);
    }
    experts_point(s);
    *out_shard = s;
    return 0;
}

static void free_on_device(struct shard *s, void *p)
{
    if (p)
        s->dev->ops->free(s->dev, p);
}

void shard_close(struct shard *s)
{
    if (!s)
        return;
    void *const on_device[] = {s->master, s->m, s->v, s->buffers, s->sink, s->copy_recv, s->acc};
    shard_free(s, s->weights);
    shard_free(s, s->gradients);
    shard_free(s, s->copy_send);
    for (size_t i = 0; i < s->n_gathered; i++)
        shard_free(s, s->gathered[i].base);
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++)
        free_on_device(s, on_device[i]);
    experts_fini(s);
    free(s->host_buffers);
    free(s->v_at);
    free(s->file_chunk);
    free(s->gathered);
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

/* In the name of unit; the layer that is computed stays as it is. */
static int start_gather(struct shard *s, uint32_t unit, struct err *err)
{
    int32_t layer = s->coll->layer;
    set_layer(s, unit);
    int rc = gather_start(s, &s->fsdp, &s->units[unit], 1, err);
    s->coll->layer = layer;
    return rc;
}

int shard_prefetch(struct shard *s, uint32_t unit, struct err *err)
{
    assert(unit < s->map->n_units);
    if (s->fsdp.n_ranks == 1 || s->coll->is_blocking || s->units[unit].whole)
        return 0;
    return start_gather(s, unit, err);
}

int shard_acquire(struct shard *s, uint32_t unit, struct shard_weights *out, struct err *err)
{
    struct shard_unit *u = &s->units[unit];
    assert(unit < s->map->n_units);
    bool is_whole = s->fsdp.n_ranks == 1;
    int rc = 0;
    set_layer(s, unit);
    if (!is_whole && !u->whole)
        rc = start_gather(s, unit, err);
    if (rc < 0 || (rc = gather_finish(s, u, s->coll->layer, err)) < 0)
        return rc;
    u->n_users++;
    const elem *base = is_whole ? elem_at(s->dev, s->weights, (int64_t)u->weights_at) : u->whole;
    *out = (struct shard_weights){
        .trained = base, .n_trained = s->map->units[unit].trained,
        .frozen = const_elem_at(s->dev, base, (int64_t)(s->fsdp.n_ranks * u->slice)),
    };
    return 0;
}

void shard_release(struct shard *s, uint32_t unit)
{
    struct shard_unit *u = &s->units[unit];
    assert(u->n_users > 0);
    if (--u->n_users == 0)
        gather_drop(s, u);
}

float *shard_gradient(struct shard *s, uint32_t unit)
{
    struct shard_unit *u = &s->units[unit];
    assert(unit < s->map->n_units);
    if (u->slice == 0)
        return NULL;
    if (s->fsdp.n_ranks == 1)
        return s->gradients + u->at;
    if (!u->gradient) {
        size_t n_bytes = u->slice * s->fsdp.n_ranks * sizeof(float);
        void *block;
        struct err err = {0};
        int rc = shard_buffer_take(s, n_bytes, &block, &err);
        assert(rc == 0); /* address space as large as the machine's memory is used up */
        s->dev->ops->zero(s->dev, block, n_bytes);
        u->gradient = block;
    }
    return u->gradient;
}

int shard_reduce(struct shard *s, uint32_t unit, struct err *err)
{
    struct shard_unit *u = &s->units[unit];
    if (s->fsdp.n_ranks == 1 || u->slice == 0)
        return 0;
    float *block = shard_gradient(s, unit);
    set_layer(s, unit);
    struct shard_reduction r = {.unit = u, .layer = s->coll->layer, .block = block,
                                .sum = block + s->fsdp.me * u->slice, .n = u->slice};
    u->gradient = NULL;
    int rc = reduction_end(s, &s->dense_reduction, err);
    return rc < 0 ? rc : reduction_start(s, &s->fsdp, &s->dense_reduction, &r, 1, err);
}

float *shard_sink(const struct shard *s)
{
    return s->sink;
}

const float *shard_buffers(const struct shard *s)
{
    return s->buffers;
}

const float *shard_host_buffers(const struct shard *s)
{
    return s->host_buffers;
}
