/* shard.h - the parameters of one rank: its slices, gathered just in time, gradients sent home
 *
 * Dense units are cut over the fsdp group and replicated over the rest of the world; routed
 * experts lie in the slots of the expert group's ranks and each is cut over the expert-shard
 * group. The owner of a trained slice holds the float32 master weight, the gradient sum and the
 * optimizer state of that slice; of an expert that is its home, and the other copies follow its
 * weights. Frozen tensors have weights alone.
 *
 * What forward and backward read are elements. Where these are float32 they are the master weights
 * themselves; else they are made from them whenever those have changed. With one rank in a group
 * nothing is gathered: the pointers are the owner's own memory. Buffers are float32, whole on every
 * rank.
 *
 * Gradients are sums over tokens, over all micro-batches since shard_zero_gradients; the optimizer
 * divides once by the global number of tokens. */
#ifndef WORKER_SHARD_H
#define WORKER_SHARD_H

#include "common/layout.h"
#include "common/memory_model.h"
#include "common/tensor_map.h"
#include "kernels/device.h"
#include "worker/coll.h"
#include "worker/slots.h"

struct shard;

/* Everything is kept until shard_close. Weights are zero until loaded or initialised (ckpt). */
int  shard_open(const struct tensor_map *map, const struct model_spec *spec,
                const struct layout *layout, const struct slots *slots, struct coll *coll,
                struct device *dev, struct shard **out_shard, struct err *err);
void shard_close(struct shard *s);

/* ---- dense units, for the model ----------------------------------------------------------- */

/* A unit or an expert as it is read: the first n_trained elements, and those after. */
struct shard_weights {
    const elem *trained, *frozen;
    uint64_t n_trained;
};

/* Element at of it, by a tensor's offset. */
static inline const elem *shard_at(const struct device *dev, const struct shard_weights *w,
                                   uint64_t at)
{
    return at < w->n_trained ? const_elem_at(dev, w->trained, (int64_t)at)
                             : const_elem_at(dev, w->frozen, (int64_t)(at - w->n_trained));
}

/* Begins to gather what will be acquired next, so that it comes while others are computed with:
 * one unit ahead, whose buffer it takes. Nothing where the collectives are blocking. Collective, as
 * are acquire and reduce: in the same order on all ranks. */
int  shard_prefetch(struct shard *s, uint32_t unit, struct err *err);
/* The whole unit. Lives until shard_release of the same unit; a unit may be acquired again before
 * that. */
int  shard_acquire(struct shard *s, uint32_t unit, struct shard_weights *out, struct err *err);
void shard_release(struct shard *s, uint32_t unit);

/* The gradient block of the unit's trained part, to be added to (+=); zeroed where it is not the
 * owner's own sum. The same pointer until shard_reduce. NULL where nothing is trained. */
float *shard_gradient(struct shard *s, uint32_t unit);
/* Adds the block into the owners' sums, where it is by the next shard_reduce or shard_settle, and
 * frees it. */
int shard_reduce(struct shard *s, uint32_t unit, struct err *err);

/* The end of a pass: waits for all that was begun, of experts too, drops what was not acquired, and
 * lets the owned weights be written. Collective. */
int shard_settle(struct shard *s, struct err *err);

/* Room for the gradient of any frozen tensor that is no matrix: layers add it up there, and nobody
 * reads it. */
float *shard_sink(const struct shard *s);

/* All buffers, on the device and as the host saw them last; live until shard_close. */
const float *shard_buffers(const struct shard *s);
const float *shard_host_buffers(const struct shard *s);

/* ---- routed experts, for the model -------------------------------------------------------- */

/* The slots of layer that this rank serves, up to the last one that is filled. */
struct shard_experts {
    uint32_t n_slots;
    const int32_t *experts; /* n_slots: which one is there; -1: an empty slot */
    const struct shard_weights *weights; /* n_slots */
    float *const *gradients; /* n_slots blocks of stride floats, of the trained part; NULL until
                              * shard_experts_gradient */
    uint64_t stride;
};
/* Begins to gather; held, they stay whole until shard_experts_release, whoever else acquires and
 * releases them. */
int  shard_experts_prefetch(struct shard *s, uint32_t layer, struct err *err);
int  shard_experts_hold(struct shard *s, uint32_t layer, struct err *err);
/* Once the layer that is acquired or held is let go, next is gathered in its place; it may be the
 * same layer, which then stays. -1: none. */
void shard_experts_then(struct shard *s, int64_t next);
int  shard_experts_acquire(struct shard *s, uint32_t layer, struct shard_experts *out,
                           struct err *err);
void shard_experts_gradient(struct shard *s, uint32_t layer, struct shard_experts *inout);
void shard_experts_release(struct shard *s, uint32_t layer);
int  shard_experts_reduce(struct shard *s, uint32_t layer, struct err *err);

/* ---- what this rank owns, for optim and ckpt ---------------------------------------------- */

/* The part of one tensor that this rank owns: its numbers first .. first + count. */
struct shard_part {
    uint64_t first, count;
    float *weights;  /* float32: master weights, buffers, frozen ones if elements are; else NULL */
    elem  *elements; /* what is read of them; NULL for a buffer */
    float *gradients, *m, *v; /* NULL where nothing is trained; v also where tensor_has_v says so */
    bool is_first; /* this rank is the first of those that own this part: it counts and writes */
}; /* count each; live until shard_close */
/* Where the parts lie: what the host reads or writes goes through its copies. */
struct device *shard_device(const struct shard *s);
/* False if this rank owns nothing of the tensor. */
bool shard_part(const struct shard *s, const struct tensor_entry *entry, struct shard_part *out);

/* Weights at .. at + n of a part, between device and host, whatever they lie as. */
void shard_part_read(const struct shard *s, const struct shard_part *p, uint64_t at, uint64_t n,
                     float *out);
void shard_part_write(struct shard *s, const struct shard_part *p, uint64_t at, uint64_t n,
                      const float *from);

/* After a step's last shard_reduce: copies' gradients go home (in deterministic mode they have
 * gone, see partials.h), then owners sum theirs over their replicas. Collective. */
int  shard_sum_replicas(struct shard *s, struct err *err);
/* Once the owners' trained weights and the buffers have changed: all that is read of them follows,
 * here and in the copies of experts. Collective. */
int  shard_refresh(struct shard *s, struct err *err);
/* The same where the elements have followed already, as optim_step lets them. */
int  shard_refresh_copies(struct shard *s, struct err *err);
/* The same once all weights have, as after a checkpoint was read. */
int  shard_refresh_all(struct shard *s, struct err *err);
void shard_zero_gradients(struct shard *s);
void shard_zero_optimizer(struct shard *s);

/* Device memory for what ops add up over parameters, n doubles, all 0; lives until the next call,
 * which takes new memory only for a larger n. NULL when there is none. */
double *shard_accumulators(struct shard *s, size_t n);

/* Host memory for SHARD_FILE_FLOATS numbers on their way between device and file: taken once, lives
 * until shard_close. */
#define SHARD_FILE_FLOATS (MEMORY_CHECKPOINT_BYTES / sizeof(float))
float *shard_file_chunk(struct shard *s);

/* What goes to a copy of an expert, and, besides, to a new home. */
struct shard_expert_bytes {
    uint64_t weights, state;
    uint64_t frozen; /* of weights */
};
struct shard_expert_bytes shard_expert_bytes(const struct shard *s);

/* Bytes of weights, gradients and optimizer state, and of the gather buffers, on this rank. */
size_t shard_state_bytes(const struct shard *s);
size_t shard_buffer_bytes(const struct shard *s);

#endif
