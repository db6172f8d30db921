/* experts.c - the routed experts that one rank serves: gathered from their shards, and back
 *
 * Every slot is cut by itself over the expert-shard group, so that an expert can move without
 * touching its neighbours; the ranks of that group have the same place in their expert groups and
 * so the same experts in the same slots. The slices of a layer's local slots lie one after
 * another; one collective makes all that are in use whole. */
#include <assert.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/shard_state.h"

uint64_t experts_plan(struct shard *s, uint64_t at)
{
    s->layers = xcalloc(s->spec->n_layers, sizeof *s->layers);
    for (uint32_t l = 0; l < s->spec->n_layers; l++) {
        if (!slots_is_sparse(s->slots, l))
            continue;
        struct shard_unit *u = &s->layers[l];
        u->slice = shard_slice(s->map->expert_count, s->expert_shard.n_ranks);
        u->at = at;
        u->weight_of = xcalloc(s->slots->n_slots, sizeof *u->weight_of);
        u->gradient_of = xcalloc(s->slots->n_slots, sizeof *u->gradient_of);
        at += u->slice * s->slots->n_slots;
    }
    return at;
}

void experts_fini(struct shard *s)
{
    for (uint32_t l = 0; s->layers && l < s->spec->n_layers; l++) {
        free(s->layers[l].weight_of);
        free(s->layers[l].gradient_of);
    }
    free(s->layers);
}

static uint64_t stride_of(const struct shard *s, const struct shard_unit *u)
{
    return u->slice * s->expert_shard.n_ranks;
}

static uint32_t n_used(const struct shard *s, uint32_t layer)
{
    return s->slots->layers[layer].n_used;
}

static void point(struct shard *s, struct shard_unit *u, uint32_t n, const float *weights,
                  float *gradients)
{
    for (uint32_t i = 0; i < n; i++) {
        if (weights)
            u->weight_of[i] = (const elem *)(weights + i * stride_of(s, u));
        if (gradients)
            u->gradient_of[i] = gradients + i * stride_of(s, u);
    }
}

void experts_point(struct shard *s)
{
    for (uint32_t l = 0; l < s->spec->n_layers; l++)
        if (slots_is_sparse(s->slots, l) && s->expert_shard.n_ranks == 1)
            point(s, &s->layers[l], s->slots->n_slots, s->weights + s->layers[l].at,
                  s->gradients + s->layers[l].at);
}

int shard_experts_acquire(struct shard *s, uint32_t layer, struct shard_experts *out,
                          struct err *err)
{
    struct shard_unit *u = &s->layers[layer];
    int rc;
    assert(slots_is_sparse(s->slots, layer));
    s->coll->layer = (int32_t)layer;
    if (s->expert_shard.n_ranks > 1 && u->n_users == 0) {
        uint64_t began = clock_now_ns();
        if ((rc = shard_buffer_take(s, n_used(s, layer) * stride_of(s, u), &u->whole, err)) < 0)
            return rc;
        rc = s->coll->ops->all_gather(s->coll, &s->expert_shard, ELEM_F32, s->weights + u->at,
                                      u->slice, n_used(s, layer), u->whole, err);
        s->gather_ns += clock_now_ns() - began;
        if (rc < 0)
            return rc;
        point(s, u, n_used(s, layer), u->whole, NULL);
    }
    u->n_users++;
    *out = (struct shard_experts){
        .n_slots = n_used(s, layer),
        .experts = s->slots->layers[layer].map.expert + s->slots->me * s->slots->n_slots,
        .stride = stride_of(s, u), .weights = u->weight_of,
    };
    return 0;
}

void shard_experts_release(struct shard *s, uint32_t layer)
{
    struct shard_unit *u = &s->layers[layer];
    assert(u->n_users > 0);
    if (--u->n_users == 0 && u->whole) {
        shard_buffer_return(s, u->whole);
        u->whole = NULL;
    }
}

void shard_experts_gradient(struct shard *s, uint32_t layer, struct shard_experts *inout)
{
    struct shard_unit *u = &s->layers[layer];
    if (s->expert_shard.n_ranks > 1 && !u->gradient) {
        size_t n = n_used(s, layer) * stride_of(s, u);
        struct err err = {0};
        int rc = shard_buffer_take(s, n, &u->gradient, &err);
        assert(rc == 0); /* address space as large as the machine's memory is used up */
        s->dev->ops->zero(s->dev, u->gradient, n * sizeof(float));
        point(s, u, n_used(s, layer), NULL, u->gradient);
    }
    inout->gradients = u->gradient_of;
}

int shard_experts_reduce(struct shard *s, uint32_t layer, struct err *err)
{
    struct shard_unit *u = &s->layers[layer];
    struct shard_experts e = {0};
    float *sum;
    int rc;
    if (s->expert_shard.n_ranks == 1)
        return 0;
    uint64_t began = clock_now_ns();
    s->coll->layer = (int32_t)layer;
    shard_experts_gradient(s, layer, &e); /* zeros, if no token came here */
    size_t n = u->slice * n_used(s, layer);
    if ((rc = shard_buffer_take(s, n, &sum, err)) < 0)
        return rc;
    rc = s->coll->ops->reduce_scatter(s->coll, &s->expert_shard, ELEM_F32, u->gradient,
                                      u->slice, n_used(s, layer), sum, err);
    if (rc == 0)
        s->dev->ops->axpy(s->dev, s->gradients + u->at, 1.0f, sum, (int64_t)n);
    shard_buffer_return(s, sum);
    shard_buffer_return(s, u->gradient);
    u->gradient = NULL;
    s->reduce_ns += clock_now_ns() - began;
    return rc;
}
