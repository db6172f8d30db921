/* shard.h - the parameters of one rank: its slices, gathered just in time, gradients sent home
 *
 * Dense units are cut over the fsdp group and replicated over the rest of the world; routed
 * experts lie in the slots of the expert group's ranks and each is cut over the expert-shard
 * group. The owner of a slice holds the fp32 master weight, the gradient sum and the optimizer
 * state of that slice; of an expert that is its home, and the other copies follow its weights.
 * With one rank in a group nothing is copied: the pointers are the owner's own memory.
 *
 * Gradients are sums over tokens, over all micro-batches since shard_zero_gradients; the optimizer
 * divides once by the global number of tokens. */
#ifndef WORKER_SHARD_H
#define WORKER_SHARD_H

#include "common/layout.h"
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

/* The whole unit (unit_count elements). Lives until shard_release of the same unit; a unit may be
 * acquired again before that. Collective. */
int  shard_acquire(struct shard *s, uint32_t unit, const elem **out_weights, struct err *err);
void shard_release(struct shard *s, uint32_t unit);

/* The unit's gradient block, to be added to (+=); zeroed where it is not the owner's own sum. The
 * same pointer until shard_reduce. */
float *shard_gradient(struct shard *s, uint32_t unit);
/* Adds the block into the owners' sums and frees it. Collective. */
int shard_reduce(struct shard *s, uint32_t unit, struct err *err);

/* ---- routed experts, for the model -------------------------------------------------------- */

/* The slots of layer that this rank serves, up to the last one that is filled: n_slots blocks of
 * stride elements or floats, of which an expert's are the first expert_count. */
struct shard_experts {
    uint32_t n_slots;
    const int32_t *experts; /* n_slots: which one is there; -1: an empty slot */
    uint64_t stride;
    const elem *const *weights; /* n_slots pointers */
    float *const *gradients;    /* n_slots pointers; NULL until shard_experts_gradient */
};
int  shard_experts_acquire(struct shard *s, uint32_t layer, struct shard_experts *out,
                           struct err *err);
void shard_experts_gradient(struct shard *s, uint32_t layer, struct shard_experts *inout);
void shard_experts_release(struct shard *s, uint32_t layer);
int  shard_experts_reduce(struct shard *s, uint32_t layer, struct err *err);

/* ---- what this rank owns, for optim and ckpt ---------------------------------------------- */

/* The part of one tensor that this rank owns: its floats first .. first + count. */
struct shard_part {
    uint64_t first, count;
    float *weights, *gradients, *m, *v; /* count each; live until shard_close */
    bool is_first; /* this rank is the first of those that own this part: it counts and writes */
};
/* Where the parts lie: what the host reads or writes goes through its copies. */
struct device *shard_device(const struct shard *s);
/* False if this rank owns nothing of the tensor. */
bool shard_part(const struct shard *s, const struct tensor_entry *entry, struct shard_part *out);

/* After a step's last shard_reduce: copies' gradients go home (in deterministic mode they have
 * gone, see partials.h), then owners sum theirs over their replicas. Collective. */
int  shard_sum_replicas(struct shard *s, struct err *err);
/* Once the owners' weights have changed: the copies of experts get them. Collective. */
int  shard_refresh_copies(struct shard *s, struct err *err);
void shard_zero_gradients(struct shard *s);
void shard_zero_optimizer(struct shard *s);

/* Device memory for what ops add up over parameters, n doubles, all 0; lives until the next call,
 * which takes new memory only for a larger n. NULL when there is none. */
double *shard_accumulators(struct shard *s, size_t n);

/* Seconds spent in gathering and in reducing since the last call; zeroes both. */
void shard_times(struct shard *s, double *out_gather_s, double *out_reduce_s);

/* Bytes of weights, gradients and optimizer state, and of the gather buffers, on this rank. */
size_t shard_state_bytes(const struct shard *s);
size_t shard_buffer_bytes(const struct shard *s);

#endif
