/* layer.h - what every kind of layer is given: the pass, and the parameters of its unit
 *
 * A layer kind has: carve, which takes what its backward will need from the activations; forward,
 * which fills that; again, which fills what selective recomputation does not keep; backward, which
 * adds weight gradients and assigns the gradient of its input.
 * Layers fetch nothing themselves: the model has gathered the unit. A forward or backward takes its
 * scratch first and ends early when it gets none: activations are only counted, or have failed. */
#ifndef WORKER_LAYER_H
#define WORKER_LAYER_H

#include "common/model_spec.h"
#include "common/recompute.h"
#include "common/tensor_map.h"
#include "kernels/device.h"
#include "worker/activations.h"
#include "worker/shard.h"

struct segments;
struct segment;
struct kda_cut;
struct mla_saved;

/* Whether indexers learn, from what the main attention sees of all keys, or of the chosen ones.
 * They learn in a forward, from inputs that are constants to them. */
enum index_stage { INDEX_FROZEN, INDEX_DENSE, INDEX_SPARSE };

/* Low-rank adapters beside projections; lora.h. */
struct lora_pass {
    int64_t r;       /* 0: there are none, and all weights are trained */
    float   scale;   /* alpha / r */
    enum packing packing; /* of what is packed: experts' matrices, and what unit_view says */
    int64_t unpacked_max; /* numbers of the largest of those that are unpacked */
    bool    on_experts, shared_a; /* routed ones; those of a layer have one A, in its unit */
    elem   *z, *dz;  /* scratch of (the rows of a product, r) */
    elem   *unpacked; /* of unpacked_max */
    float  *floats;  /* the same */
};

/* One micro-batch on its way through the model. */
struct pass {
    struct device *dev;
    const struct model_spec *spec;
    struct activations *act;
    int64_t n;                 /* tokens */
    const int32_t *cu_seqlens; /* n_docs + 1, host */
    int32_t n_docs;
    const struct segments *segments; /* in which layers take the rows; NULL: all at once */
    const struct segment *segment;   /* that these rows are, segments.h; NULL: of nothing */
    struct kda_cut *kda_cut;         /* what the segments of the layer share; with segment */
    struct mla_saved *mla_cut;
    const elem *ones;    /* (n), where the model has biases */
    const float *rotary; /* the device's table of angles, where the model turns its queries */
    enum index_stage index_stage;
    float  index_weight; /* of the indexers' gradients */
    struct lora_pass lora;
    double *acc_loss; /* on the device: the sum over tokens */
    double *acc_index_loss; /* the same of indexers, over layers */
};

/* Where the adapters of a unit lie, or those in an expert's block. */
#define NO_ADAPTER UINT64_MAX
struct adapters_at {
    uint64_t a[TENSOR_ROLES], b[TENSOR_ROLES]; /* offsets, by role; NO_ADAPTER */
};

/* What is carved of a layer: all; or what common/recompute.h keeps; or the rest of it, which leaves
 * what was carved before as it is. */
enum carve { CARVE_ALL, CARVE_KEPT, CARVE_AGAIN };

struct unit_view {
    const struct device *dev;
    struct shard_weights weights;
    const float *buffers;
    float *gradients;   /* of the trained part; NULL in a forward and where nothing is trained */
    float *sink;        /* where the gradients of frozen vectors go */
    const uint64_t *at; /* offsets, by role */
    const uint32_t *packed_rows; /* by role: of a matrix that is packed how many it has, else 0 */
    const struct adapters_at *adapters; /* NULL: there are none */
};

static inline const elem *weight_of(const struct unit_view *u, enum tensor_role role)
{
    return shard_at(u->dev, &u->weights, u->at[role]);
}

/* From a row of a matrix on. */
static inline const elem *weight_rows(const struct unit_view *u, enum tensor_role role,
                                      int64_t first, int64_t in)
{
    return shard_at(u->dev, &u->weights, u->at[role] + (uint64_t)(first * in));
}

/* The router's selection bias. */
static inline const float *bias_of(const struct unit_view *u)
{
    return u->buffers + u->at[ROLE_ROUTER_BIAS];
}

static inline bool unit_trains(const struct unit_view *u, enum tensor_role role)
{
    return u->at[role] < u->weights.n_trained;
}

/* Of a vector, or of a matrix that is trained. */
static inline float *gradient_of(const struct unit_view *u, enum tensor_role role)
{
    return unit_trains(u, role) ? u->gradients + u->at[role] : u->sink;
}

#endif
