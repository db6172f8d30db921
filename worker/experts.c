/* experts.c - the routed experts that one rank serves: gathered from their shards, and back
 *
 * Every slot is cut by itself over the expert-shard group, so that an expert can move without
 * touching its neighbours; the ranks of that group have the same place in their expert groups and
 * so the same experts in the same slots. The slices of a layer's local slots lie one after
 * another, trained ones and then frozen ones; one collective for either makes all that are in use
 * whole. */
#include <assert.h>
#include <stdlib.h>

#include "common/mem.h"
#include "worker/shard_state.h"

void experts_plan(struct shard *s, uint64_t *at, uint64_t *weights_at)
{
    uint32_t n = s->slots->n_slots;
    s->layers = xcalloc(s->spec->n_layers, sizeof *s->layers);
    for (uint32_t l = 0; l < s->spec->n_layers; l++) {
        if (!slots_is_sparse(s->slots, l))
            continue;
        struct shard_unit *u = &s->layers[l];
        u->slice = shard_slice(s->map->expert.trained, s->expert_shard.n_ranks);
        u->frozen = shard_slice(s->map->expert.frozen, s->expert_shard.n_ranks);
        u->at = *at;
        u->weights_at = *weights_at;
        u->frozen_at = u->weights_at + n * u->slice;
        u->weights_of = xcalloc(n, sizeof *u->weights_of);
        u->gradient_of = xcalloc(n, sizeof *u->gradient_of);
        *at += n * u->slice;
        *weights_at += n * (u->slice + u->frozen);
    }
}

void experts_fini(struct shard *s)
{
    for (uint32_t l = 0; s->layers && l < s->spec->n_layers; l++) {
        free(s->layers[l].weights_of);
        free(s->layers[l].gradient_of);
    }
    free(s->layers);
}

/* ---- slots ---------------------------------------------------------------------------------- */

size_t shard_slot_bytes(const struct shard *s, uint32_t layer, enum slot_part part)
{
    const struct shard_unit *u = &s->layers[layer];
    switch (part) {
    case SLOT_WEIGHTS:
        return u->slice * elem_size(s->dev);
    case SLOT_FROZEN:
        return u->frozen * elem_size(s->dev);
    case SLOT_MASTER:
        return s->master ? u->slice * sizeof(float) : 0;
    case SLOT_V:
        return s->v_at ? 0 : u->slice * sizeof(float);
    default:
        return u->slice * sizeof(float);
    }
}

void *shard_slot(const struct shard *s, uint32_t layer, uint32_t place, enum slot_part part)
{
    const struct shard_unit *u = &s->layers[layer];
    uint64_t at = u->at + place * u->slice;
    switch (part) {
    case SLOT_WEIGHTS:
        return elem_at(s->dev, s->weights, (int64_t)(u->weights_at + place * u->slice));
    case SLOT_FROZEN:
        return elem_at(s->dev, s->weights, (int64_t)(u->frozen_at + place * u->frozen));
    case SLOT_MASTER:
        return s->master + at;
    case SLOT_GRADIENT:
        return s->gradients + at;
    case SLOT_M:
        return s->m + at;
    default:
        assert(part == SLOT_V && !s->v_at);
        return s->v + at;
    }
}

/* ---- gathered ------------------------------------------------------------------------------- */

static uint64_t stride_of(const struct shard *s, const struct shard_unit *u)
{
    return u->slice * s->expert_shard.n_ranks;
}

static uint32_t n_used(const struct shard *s, uint32_t layer)
{
    return s->slots->layers[layer].n_used;
}

static void point_weights(struct shard *s, struct shard_unit *u, uint32_t n, const elem *trained,
                          const elem *frozen)
{
    uint64_t n_ranks = s->expert_shard.n_ranks;
    for (uint32_t i = 0; i < n; i++)
        u->weights_of[i] = (struct shard_weights){
            const_elem_at(s->dev, trained, (int64_t)(i * n_ranks * u->slice)),
            const_elem_at(s->dev, frozen, (int64_t)(i * n_ranks * u->frozen)),
            s->map->expert.trained,
        };
}

static void point_gradients(struct shard *s, struct shard_unit *u, uint32_t n, float *gradients)
{
    for (uint32_t i = 0; i < n; i++)
        u->gradient_of[i] = gradients + i * stride_of(s, u);
}

void experts_point(struct shard *s)
{
    for (uint32_t l = 0; l < s->spec->n_layers; l++) {
        if (!slots_is_sparse(s->slots, l) || s->expert_shard.n_ranks > 1)
            continue;
        point_weights(s, &s->layers[l], s->slots->n_slots, shard_slot(s, l, 0, SLOT_WEIGHTS),
                      shard_slot(s, l, 0, SLOT_FROZEN));
        point_gradients(s, &s->layers[l], s->slots->n_slots, s->gradients + s->layers[l].at);
    }
}

/* In the name of layer; the one that is computed stays as it is. */
static int start_gather(struct shard *s, uint32_t layer, struct err *err)
{
    int32_t present = s->coll->layer;
    s->coll->layer = (int32_t)layer;
    int rc = gather_start(s, &s->expert_shard, &s->layers[layer], n_used(s, layer), err);
    s->coll->layer = present;
    return rc;
}

int shard_experts_prefetch(struct shard *s, uint32_t layer, struct err *err)
{
    assert(slots_is_sparse(s->slots, layer));
    if (s->expert_shard.n_ranks == 1 || s->coll->is_blocking || s->layers[layer].whole)
        return 0;
    return start_gather(s, layer, err);
}

int shard_experts_hold(struct shard *s, uint32_t layer, struct err *err)
{
    int rc = shard_experts_prefetch(s, layer, err);
    if (rc == 0)
        s->layers[layer].n_users++;
    return rc;
}

void shard_experts_then(struct shard *s, int64_t next)
{
    s->next_experts = next;
}

int shard_experts_acquire(struct shard *s, uint32_t layer, struct shard_experts *out,
                          struct err *err)
{
    struct shard_unit *u = &s->layers[layer];
    uint32_t n_ranks = s->expert_shard.n_ranks;
    int rc = 0;
    assert(slots_is_sparse(s->slots, layer));
    s->coll->layer = (int32_t)layer;
    if (n_ranks > 1 && !u->whole)
        rc = start_gather(s, layer, err);
    if (rc < 0 || (rc = gather_finish(s, u, (int32_t)layer, err)) < 0)
        return rc;
    if (n_ranks > 1)
        point_weights(s, u, n_used(s, layer), u->whole,
                      elem_at(s->dev, u->whole, (int64_t)(n_used(s, layer) * n_ranks * u->slice)));
    u->n_users++;
    *out = (struct shard_experts){
        .n_slots = n_used(s, layer),
        .experts = s->slots->layers[layer].map.expert + s->slots->me * s->slots->n_slots,
        .stride = stride_of(s, u), .weights = u->weights_of,
    };
    return 0;
}

void shard_experts_release(struct shard *s, uint32_t layer)
{
    struct shard_unit *u = &s->layers[layer];
    int64_t next = s->next_experts;
    assert(u->n_users > 0);
    if (--u->n_users > 0)
        return;
    s->next_experts = -1;
    if (next != (int64_t)layer || s->coll->is_blocking)
        gather_drop(s, u);
    /* What fails here fails again where they are acquired. */
    if (next >= 0)
        shard_experts_prefetch(s, (uint32_t)next, NULL);
}

/* ---- gradients ------------------------------------------------------------------------------ */

void shard_experts_gradient(struct shard *s, uint32_t layer, struct shard_experts *inout)
{
    struct shard_unit *u = &s->layers[layer];
    if (s->expert_shard.n_ranks > 1 && !u->gradient) {
        size_t n_bytes = n_used(s, layer) * stride_of(s, u) * sizeof(float);
        void *block;
        struct err err = {0};
        int rc = shard_buffer_take(s, n_bytes, &block, &err);
        assert(rc == 0); /* address space as large as the machine's memory is used up */
        s->dev->ops->zero(s->dev, block, n_bytes);
        u->gradient = block;
        point_gradients(s, u, n_used(s, layer), u->gradient);
    }
    inout->gradients = u->gradient_of;
}

int shard_experts_reduce(struct shard *s, uint32_t layer, struct err *err)
{
    struct shard_unit *u = &s->layers[layer];
    struct shard_experts e = {0};
    void *sum;
    /* All ranks have been through this layer's exchange of rows, so the dense gradients that went
     * before it have come; the sooner they are read, the sooner their block is free. */
    int rc = reduction_end(s, &s->dense_reduction, err);
    if (rc < 0 || s->expert_shard.n_ranks == 1 || u->slice == 0)
        return rc;
    s->coll->layer = (int32_t)layer;
    if ((rc = reduction_end(s, &s->experts_reduction, err)) < 0)
        return rc;
    shard_experts_gradient(s, layer, &e); /* zeros, if no token came here */
    size_t n = u->slice * n_used(s, layer);
    if ((rc = shard_buffer_take(s, n * sizeof(float), &sum, err)) < 0)
        return rc;
    struct shard_reduction r = {.unit = u, .layer = (int32_t)layer, .block = u->gradient,
                                .sum = sum, .sum_is_apart = true, .n = n};
    u->gradient = NULL;
    return reduction_start(s, &s->expert_shard, &s->experts_reduction, &r, n_used(s, layer), err);
}
