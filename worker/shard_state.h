/* shard_state.h - what shard.c (dense units) and experts.c (routed experts) share
 *
 * The owned slices lie one after another in four blocks (weights, gradients, m, v) at the same
 * offsets: first the slices of all dense units, then for each sparse layer those of its local
 * slots. So a sum over replicas is one call for each of the two parts. */
#ifndef WORKER_SHARD_STATE_H
#define WORKER_SHARD_STATE_H

#include "worker/shard.h"

/* Whole units and layers of experts while they are in use; taken again, never freed before the
 * end. */
struct shard_buffer {
    float *floats;
    size_t n;
    bool   is_used;
};

/* A unit, or the local slots of a layer. */
struct shard_unit {
    uint64_t at;       /* of my slice, in the four blocks */
    uint64_t slice;    /* floats of one member's slice of a unit, or of one slot */
    float   *whole;    /* gathered; NULL: not in use, or my own memory */
    float   *gradient; /* the same */
    uint32_t n_users;
    const elem  **weight_of; /* slots: n_slots pointers */
    float       **gradient_of;
};

struct shard {
    const struct tensor_map *map;     /* kept from open */
    const struct model_spec *spec;    /* kept from open */
    const struct layout     *layout;  /* kept from open */
    struct coll   *coll;              /* kept from open */
    struct device *dev;               /* kept from open */
    const struct slots *slots;        /* kept from open */
    struct coll_group fsdp, fsdp_replica, ep, expert_shard, expert_replica;
    float   *weights, *gradients, *m, *v;
    uint64_t n_owned, n_dense; /* floats in all; of dense slices */
    struct shard_unit *units;  /* n_units */
    struct shard_unit *layers; /* n_layers: the routed experts */
    float   *copy_send, *copy_recv; /* slices of copies on their way; copy_send travels */
    size_t   n_copy_send, n_copy_recv; /* floats */
    struct shard_buffer *buffers;
    size_t n_buffers;
    double  *acc; /* shard_accumulators */
    size_t n_acc;
    uint64_t gather_ns, reduce_ns;
};

/* Memory that travels where there is somebody to travel to. */
float *shard_alloc(struct shard *s, size_t n);

/* A buffer of n floats or somewhat more; -ENOMEM when there is no memory. */
int  shard_buffer_take(struct shard *s, size_t n, float **out, struct err *err);
void shard_buffer_return(struct shard *s, float *floats);

/* The floats of a slice: a unit of count floats cut over n ranks, each a multiple of 16. */
uint64_t shard_slice(uint64_t count, uint32_t n_ranks);

/* Where the slice of a local slot begins in the four blocks. */
static inline uint64_t shard_slot_at(const struct shard *s, uint32_t layer, uint32_t place)
{
    return s->layers[layer].at + place * s->layers[layer].slice;
}

/* Lays the slots' slices out from float at on; returns where they end. */
uint64_t experts_plan(struct shard *s, uint64_t at);
void     experts_point(struct shard *s); /* once the blocks exist */
void     experts_fini(struct shard *s);

/* The gradient sums of all copies are added to those of the experts' homes. Collective. */
int copies_send_gradients(struct shard *s, struct err *err);

#endif
