/* placement.h - which expert is in which slot of which device, and what part of its tokens a slot
 * serves
 *
 * One layer. A slot is counted through all devices: slot = device * n_slots + place. A device
 * never holds an expert twice. An expert's home is the slot that owns its fp32 master weight and
 * optimizer state; the other copies are weights only. */
#ifndef COMMON_PLACEMENT_H
#define COMMON_PLACEMENT_H

#include "common/err.h"
#include "common/types.h"

#define PLACEMENT_EMPTY (-1)
#define PLACEMENT_SLOTS_MAX (1u << 20) /* of one layer, over all devices */

struct placement {
    uint32_t  n_experts, n_devices;
    uint32_t  n_slots; /* per device */
    int32_t  *expert;  /* (n_devices, n_slots), PLACEMENT_EMPTY where nothing is */
    double   *share;   /* (n_devices, n_slots), sums to 1 over an expert's copies, 0 if empty */
    uint32_t *home;    /* (n_experts), a slot that holds the expert */
};

/* Experts in order: device g holds experts g*c .. g*c+c-1 with c = ceil(n_experts / n_devices).
 * Ended with placement_fini. -EINVAL if they do not fit or a number is beyond its limit. */
int  placement_init(struct placement *p, uint32_t n_experts, uint32_t n_devices,
                    uint32_t n_slots, struct err *err);
/* A copy of another one. */
void placement_init_like(struct placement *p, const struct placement *from);
void placement_fini(struct placement *p);
void placement_copy(struct placement *to, const struct placement *from); /* of one shape */

static inline uint32_t placement_n_total(const struct placement *p)
{
    return p->n_devices * p->n_slots;
}

/* -EINVAL, and what is wrong in words, unless every expert has a slot and a home among its slots,
 * no device holds one twice, and shares are in 0..1 and sum to 1 over each expert's copies. */
int placement_check(const struct placement *p, struct err *err);

/* The slot of an expert on a device, or -1. */
int32_t placement_find(const struct placement *p, uint32_t device, uint32_t expert);

/* Every copy serves the same part. */
void placement_share_evenly(struct placement *p);

/* Homes as in `before` where that device still holds the expert, else at the copy with the lowest
 * slot. NULL: the latter for all. */
void placement_keep_homes(struct placement *p, const struct placement *before);

/* Order within each device only: an expert that `before` has on the device too takes its slot
 * there, the others what is left. Shares are not carried along. */
void placement_keep_slots(struct placement *p, const struct placement *before);

/* What is in force once the slots up to stage `last` have what `to` has in them, homes included,
 * and the others what `from` has. stage: (n_devices, n_slots); out: of the same shape, its shares
 * are even. Whether that is a placement is for placement_check to say. */
void placement_at_stage(const struct placement *from, const struct placement *to,
                        const uint32_t *stage, uint32_t last, struct placement *out);

/* -EINVAL, and why in words, unless there are at most STAGES_MAX stages, each of which is a
 * placement, and what a device has before and after stays in its slot. */
int  placement_check_stages(const struct placement *from, const struct placement *to,
                            const uint32_t *stage, struct err *err);

/* (device, expert) pairs of `to` that `from` does not have: weights that must travel. */
uint32_t placement_moves(const struct placement *from, const struct placement *to);

/* The heaviest device's load over its speed, with the shares as they are. load: (n_experts);
 * speed: (n_devices), NULL for equal ones. */
double placement_max_load(const struct placement *p, const double *load, const double *speed);

#endif
