/* slots.h - which expert is in which slot of which rank: the placement in force, the same on all
 *
 * One map per sparse layer; its devices are the places in the expert group. An expert's home owns
 * master weight and optimizer state; its other copies are weights only. The epoch counts the
 * placements of a job. */
#ifndef WORKER_SLOTS_H
#define WORKER_SLOTS_H

#include "common/layout.h"
#include "common/model_spec.h"
#include "common/placement.h"
#include "common/split.h"
#include "proto/ballast.pb-c.h"

struct slots_layer {
    struct placement map; /* n_experts 0: a dense layer */
    uint32_t  n_used;     /* slots of this device up to the last one that holds an expert */
    uint32_t  n_copied;   /* experts with more than one slot */
    uint32_t *copied;     /* (n_copied) their ids, ascending */
    /* Slots that hold copied[k], ascending: copies[first_copy[k] .. first_copy[k + 1]). */
    uint32_t *first_copy, *copies;
    int32_t  *copied_at;  /* (n_experts) k, or -1 */
    struct split *split;
};

struct slots {
    uint32_t epoch;
    uint32_t n_layers, n_experts, n_devices, n_slots, me; /* n_slots of each device; me: a device */
    uint32_t devices_per_node; /* consecutive devices of one node; 0: no such order */
    uint32_t n_copies;         /* in all layers: slots with an expert that has its home elsewhere */
    double  *speed;            /* (n_devices) relative, that shares follow; NULL: equal ones */
    struct slots_layer *layers;
};

/* Experts in order, epoch 0, with n_spare empty slots on each rank. Ended with slots_fini. -EINVAL
 * where the experts do not lie evenly over the expert group. */
int  slots_init(struct slots *s, const struct model_spec *spec, const struct layout *layout,
                uint32_t n_spare, struct err *err);
void slots_init_like(struct slots *s, const struct slots *from);
void slots_fini(struct slots *s);

/* The placement that p makes of `from`: its layers replaced, its epoch. Gives *out, ended with
 * slots_fini. -EINVAL, and what is wrong in words, for other shapes, layers without experts or
 * a map that is none. */
int slots_from(const struct slots *from, const Ballast__Placement *p, struct slots *out,
               struct err *err);

/* What is in force once a plan's stages up to that one are: see placement_at_stage. stage: per
 * layer, or NULL for a layer that is whole at stage 0. Its epoch is still that of now. Gives
 * *out. */
void slots_at_stage(const struct slots *now, const struct slots *to, uint32_t *const *stage,
                    uint32_t last, struct slots *out);

/* What devices are measured to do, (n_devices), or NULL. Must be the same on all ranks from the
 * same step on: shares depend on it. */
void slots_set_speed(struct slots *s, const double *speed);

/* After the maps were changed: the copies of each layer anew. */
void slots_index(struct slots *s);

static inline bool slots_is_sparse(const struct slots *s, uint32_t layer)
{
    return layer < s->n_layers && s->layers[layer].map.n_experts > 0;
}

/* The device that owns an expert. */
static inline uint32_t slots_home(const struct slots *s, uint32_t layer, uint32_t expert)
{
    return s->layers[layer].map.home[expert] / s->n_slots;
}

/* The expert in a slot, counted through all devices, that has its home there; -1 otherwise. */
static inline int32_t slots_homed_in(const struct slots *s, uint32_t layer, uint32_t slot)
{
    const struct placement *map = &s->layers[layer].map;
    int32_t e = map->expert[slot];
    return e >= 0 && map->home[e] == slot ? e : PLACEMENT_EMPTY;
}

#endif
