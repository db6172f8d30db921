/* experts.c - the routed experts that one rank serves: gathered from their shards, and back
 *
 * Every expert is cut by itself over the expert-shard group, so that an expert can have its home
 * elsewhere one day without touching its neighbours. The slices of a layer's local experts lie one
 * after another; one collective of n_local blocks makes them whole. */
#include <assert.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/shard_state.h"

static bool is_sparse(const struct shard *s, uint32_t layer)
{
    return layer < s->spec->n_layers && s->spec->layers[layer].mlp == MLP_MOE;
}

uint64_t experts_plan(struct shard *s, uint64_t at)
{
    s->n_local = s->spec->n_experts / s->layout->ep.n_ranks;
    s->first_expert = s->layout->ep.me * s->n_local;
    s->layers = xcalloc(s->spec->n_layers, sizeof *s->layers);
    for (uint32_t l = 0; l < s->spec->n_layers; l++) {
        if (!is_sparse(s, l))
            continue;
        struct shard_unit *u = &s->layers[l];
        u->slice = shard_slice(s->map->expert_count, s->expert_shard.n_ranks);
        u->at = at;
        u->weight_of = xcalloc(s->n_local, sizeof *u->weight_of);
        u->gradient_of = xcalloc(s->n_local, sizeof *u->gradient_of);
        at += u->slice * s->n_local;
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

static size_t whole_count(const struct shard *s, const struct shard_unit *u)
{
    return u->slice * s->expert_shard.n_ranks * s->n_local;
}

static void point(struct shard *s, struct shard_unit *u, const float *weights, float *gradients)
{
    uint64_t stride = u->slice * s->expert_shard.n_ranks;
    for (uint32_t e = 0; e < s->n_local; e++) {
        if (weights)
            u->weight_of[e] = weights + e * stride;
        if (gradients)
            u->gradient_of[e] = gradients + e * stride;
    }
}

void experts_point(struct shard *s)
{
    for (uint32_t l = 0; l < s->spec->n_layers; l++)
        if (is_sparse(s, l) && s->expert_shard.n_ranks == 1)
            point(s, &s->layers[l], s->weights + s->layers[l].at, s->gradients + s->layers[l].at);
}

int shard_experts_acquire(struct shard *s, uint32_t layer, struct shard_experts *out,
                          struct err *err)
{
    struct shard_unit *u = &s->layers[layer];
    int rc;
    assert(is_sparse(s, layer));
    s->coll->layer = (int32_t)layer;
    if (s->expert_shard.n_ranks > 1 && u->n_users == 0) {
        uint64_t began = clock_now_ns();
        if ((rc = shard_buffer_take(s, whole_count(s, u), &u->whole, err)) < 0)
            return rc;
        rc = s->coll->ops->all_gather(s->coll, &s->expert_shard, s->weights + u->at, u->slice,
                                      s->n_local, u->whole, err);
        s->gather_ns += clock_now_ns() - began;
        if (rc < 0)
            return rc;
        point(s, u, u->whole, NULL);
    }
    u->n_users++;
    *out = (struct shard_experts){.first_expert = s->first_expert, .n_local = s->n_local,
                                  .weights = u->weight_of};
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
        size_t n = whole_count(s, u);
        struct err err = {0};
        int rc = shard_buffer_take(s, n, &u->gradient, &err);
        assert(rc == 0); /* address space as large as the machine's memory is used up */
        s->dev->ops->zero(s->dev, u->gradient, n * sizeof(float));
        point(s, u, NULL, u->gradient);
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
    size_t n = u->slice * s->n_local;
    if ((rc = shard_buffer_take(s, n, &sum, err)) < 0)
        return rc;
    rc = s->coll->ops->reduce_scatter(s->coll, &s->expert_shard, u->gradient, u->slice, s->n_local,
                                      sum, err);
    if (rc == 0)
        s->dev->ops->axpy(s->dev, s->gradients + u->at, 1.0f, sum, (int64_t)n);
    shard_buffer_return(s, sum);
    shard_buffer_return(s, u->gradient);
    u->gradient = NULL;
    s->reduce_ns += clock_now_ns() - began;
    return rc;
}
