/* shard_state.h - what shard.c (dense units) and experts.c (routed experts) share
 *
 * The owned trained slices lie one after another in the blocks of float32 (gradients, m, v and,
 * where elements are not float32, master weights) at the same offsets: first those of all dense
 * units, then for each sparse layer those of its local slots. Where Muon takes the matrices, v has
 * what is left of the dense units, one tensor after another. So a sum over replicas is one call
 * for each of the two parts. The block of elements has the frozen slices too: of a unit behind its
 * trained slice, of a layer's slots behind those of all its slots. */
#ifndef WORKER_SHARD_STATE_H
#define WORKER_SHARD_STATE_H

#include "worker/shard.h"

/* Whole units and layers of experts while they are in use; taken again, never freed before the
 * end. */
struct shard_buffer {
    void  *base;
    size_t n_bytes;
    bool   is_used;
    uint64_t    returned; /* counts: of equal ones the first that came back is taken */
    coll_ticket ticket;   /* of the call that other ranks may still read it for; 0: none */
};

/* Gradients on their way to their owners. */
struct shard_reduction {
    coll_ticket ticket;
    struct shard_unit *unit; /* NULL: none is on its way */
    int32_t  layer;
    void    *block, *sum; /* of all; mine in it, or apart from it */
    bool     sum_is_apart;
    uint64_t n; /* numbers of the sum */
};

/* A unit, or the local slots of a layer. */
struct shard_unit {
    uint64_t slice, frozen;         /* numbers of my trained slice and of the frozen one: of the
                                     * unit, or of one slot */
    uint64_t at;                    /* of the trained slices in the blocks of float32 */
    uint64_t weights_at, frozen_at; /* of both in the block of elements */
    elem    *whole;                 /* gathered; NULL: not in use, or my own memory */
    float   *gradient;              /* the same */
    uint32_t n_users;
    bool     is_coming;  /* whole is not there before its two calls have finished */
    coll_ticket tickets[2]; /* of the trained part and of the frozen one: other ranks may still read
                             * what is mine for them */
    struct shard_weights *weights_of; /* slots: n_slots */
    float               **gradient_of;
};

struct shard {
    const struct tensor_map *map;     /* kept from open */
    const struct model_spec *spec;    /* kept from open */
    const struct layout     *layout;  /* kept from open */
    struct coll   *coll;              /* kept from open */
    struct device *dev;               /* kept from open */
    const struct slots *slots;        /* kept from open */
    struct coll_group fsdp, fsdp_replica, ep, expert_shard, expert_replica;
    elem    *weights;
    float   *master; /* NULL where weights are float32 */
    float   *gradients, *m, *v;
    uint64_t n_owned, n_dense; /* trained numbers in all; of dense slices */
    uint64_t n_v;              /* numbers of v */
    uint64_t *v_at;            /* by entry; NULL: v lies as m */
    uint64_t n_weights;        /* elements */
    float   *buffers, *host_buffers; /* map->n_buffers */
    float   *sink;
    struct shard_unit *units;  /* n_units */
    struct shard_unit *layers; /* n_layers: the routed experts */
    void    *copy_send, *copy_recv; /* slices of copies on their way; copy_send travels */
    size_t   n_copy_send, n_copy_recv; /* bytes */
    struct shard_buffer *gathered;
    size_t n_gathered;
    uint64_t n_returned;
    struct shard_reduction dense_reduction, experts_reduction;
    int64_t  next_experts; /* once the present ones are let go; -1: none */
    float   *file_chunk; /* shard_file_chunk */
    double  *acc; /* shard_accumulators */
    size_t n_acc;
};

/* Memory that travels where there is somebody to travel to. */
void *shard_alloc(struct shard *s, size_t n_bytes);
void  shard_free(struct shard *s, void *p);

/* A buffer of n_bytes or somewhat more; -ENOMEM when there is no memory. */
int  shard_buffer_take(struct shard *s, size_t n_bytes, void **out, struct err *err);
void shard_buffer_return(struct shard *s, void *buffer);

/* What units and layers of experts have in common: a buffer for the whole of n_blocks, and two
 * calls that fill it; the end of those; the buffer back. */
int  gather_start(struct shard *s, const struct coll_group *g, struct shard_unit *u,
                  uint32_t n_blocks, struct err *err);
int  gather_finish(struct shard *s, struct shard_unit *u, int32_t layer, struct err *err);
void gather_drop(struct shard *s, struct shard_unit *u);

/* Ends the reduction before r's, if one is on its way, and begins r's, which is kept until it has
 * ended. */
int reduction_start(struct shard *s, const struct coll_group *g, struct shard_reduction *slot,
                    const struct shard_reduction *r, uint64_t n_blocks, struct err *err);
int reduction_end(struct shard *s, struct shard_reduction *slot, struct err *err);

/* The numbers of a slice: count of them cut over n ranks, each a multiple of 16. */
uint64_t shard_slice(uint64_t count, uint32_t n_ranks);

/* What there is of a local slot: of its trained slice the elements, the float32 master weights
 * where those are not the elements themselves, the gradient, m and v; and the frozen elements. */
enum slot_part {
    SLOT_WEIGHTS, SLOT_FROZEN, SLOT_MASTER, SLOT_GRADIENT, SLOT_M, SLOT_V, SLOT_PARTS
};
/* 0: there is no such part. */
size_t shard_slot_bytes(const struct shard *s, uint32_t layer, enum slot_part part);
void  *shard_slot(const struct shard *s, uint32_t layer, uint32_t place, enum slot_part part);

/* Where in v every tensor's part begins that has one. */
void shard_plan_v(struct shard *s);

/* Lays the slots' slices out from *at in the blocks of float32 and *weights_at in that of elements
 * on; moves both to the end. */
void experts_plan(struct shard *s, uint64_t *at, uint64_t *weights_at);
void experts_point(struct shard *s); /* once the blocks exist */
void experts_fini(struct shard *s);

/* Parts of all copies' slots go from the experts' homes to them; and the gradient sums of all
 * copies are added to those of the homes. Collective. */
int copies_send_part(struct shard *s, enum slot_part part, struct err *err);
int copies_send_gradients(struct shard *s, struct err *err);

#endif
