/* refine_parts.h - what the files of a refinement share: its state, shares, taking back */
#ifndef COORDINATOR_REFINE_PARTS_H
#define COORDINATOR_REFINE_PARTS_H

#include "coordinator/refine.h"
#include "coordinator/search_parts.h"

#define WIDE (REFINE_SCENARIOS / 4)

struct wide {
    quad q[WIDE];
};

struct refine {
    const struct search_problem *p;
    struct search_slots at;
    struct wide *load;     /* (n_experts) */
    struct wide *part;     /* (n_total) */
    struct wide *device;   /* (n_devices) sum of the parts */
    struct wide *price;    /* (n_devices) of a row more */
    float       *slowness; /* (n_devices) 1 / speed */
    float       *turn;     /* (n_devices) how much it counts in all scenarios */
    float       *chance;   /* (n_devices) of a turn, times that */
    float       *value;    /* (n_slots, n_devices) of a device's parts at others' prices; scratch */
    struct lane *lane;     /* (n_devices) scratch */
    struct wide  scale, sum, norm; /* over devices: of (time * scale) ^ 8, and its root */
    uint64_t     random;
    /* What a change that is tried out has touched, as it was. */
    uint32_t     n_slots_kept, n_devices_kept;
    uint32_t    *slot_kept, *device_kept;         /* (n_total), (n_devices) */
    bool        *slot_is_kept, *device_is_kept;   /* (n_total), (n_devices) */
    struct wide *slot_was, *device_was;           /* (n_total), (n_devices) */
};

/* What a change is about to touch is kept as it was, until it is taken back or forgotten. */
void refine_keep_slot(struct refine *r, uint32_t slot);
void refine_keep_device(struct refine *r, uint32_t device);
void refine_take_back(struct refine *r);
void refine_forget(struct refine *r);

/* Adds a copy's part to its device, or takes it off. */
void refine_add_part(struct refine *r, uint32_t slot, float sign);

/* All shares anew: even ones, then a few sweeps. */
void refine_fill_all(struct refine *r);

/* The best parts of all copied experts of a device, one after the other, the rest being given;
 * each leans on the others, so they are done once there and once back. */
void refine_fill_device(struct refine *r, uint32_t device, bool is_back);

#endif
