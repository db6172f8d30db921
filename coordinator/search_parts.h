/* search_parts.h - what the files of a search share: its state, four numbers at a time, shares */
#ifndef COORDINATOR_SEARCH_PARTS_H
#define COORDINATOR_SEARCH_PARTS_H

#include "coordinator/search.h"
#include "coordinator/search_slots.h"

#define QUADS (SCENARIOS / 4)

typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_mask __attribute__((vector_size(16)));

struct row {
    quad q[QUADS];
};

/* One copy while its expert's shares are being found. */
struct lane {
    quad base, speed; /* the rest of its device's load; 0 where it stands above the level */
};

struct change {
    uint32_t slot;
    int32_t  before, after; /* experts */
};

struct search {
    const struct search_problem *p;
    const struct placement *start; /* kept by the caller */
    struct search_slots at;
    struct row *load;     /* (n_experts) */
    struct row *part;     /* (n_total) */
    struct row *device;   /* (n_devices) sum of the parts */
    float      *slowness; /* (n_devices) 1 / speed */
    float      *cost;     /* (n_devices) */
    uint32_t   *aside;    /* (n_devices) the step at which it could not be relieved, else 0 */
    struct lane *lane;    /* (n_devices) scratch */
    struct row  weight;   /* of each scenario's 8th powers */
    uint64_t    random;
    int64_t     effort;
    uint32_t    n_moves;
    struct change *change;
    uint32_t    n_changes, change_cap;
    struct search_step *step;
    uint32_t   *step_change; /* changes made before each step */
    uint32_t    n_steps, step_cap;
};

static inline float quad_sum(quad a)
{
    return (a[0] + a[1]) + (a[2] + a[3]);
}

static inline quad quad_max(quad a, quad b)
{
    quad_mask m = a > b;
    return (quad)((m & (quad_mask)a) | (~m & (quad_mask)b));
}

static inline quad quad_min(quad a, quad b)
{
    quad_mask m = a < b;
    return (quad)((m & (quad_mask)a) | (~m & (quad_mask)b));
}

/* What the first of two copies serves of w where both devices are to take the same time:
 * (base_a + x) * slow_a = (base_b + w - x) * slow_b. to_a: slow_b / (slow_a + slow_b). */
static inline quad quad_even(quad base_a, quad base_b, quad w, float to_a, float to_b)
{
    const quad zero = { 0 };
    return quad_min(quad_max((base_b + w) * to_a - base_a * to_b, zero), w);
}

/* The level to which a load fills copies; lanes of copies above it get speed 0. */
quad search_level(struct lane *lane, uint32_t n, quad load);

static inline quad lane_part(const struct lane *lane, quad level)
{
    quad x = level * lane->speed - lane->base;
    return (quad)((quad_mask)x & (lane->speed > 0));
}

/* Adds a copy's part to its device, or takes it off. */
static inline void search_add_part(struct search *s, uint32_t slot, float sign)
{
    struct row *d = &s->device[search_slots_device(&s->at, slot)];
    for (int i = 0; i < QUADS; i++)
        d->q[i] += sign * s->part[slot].q[i];
}

/* What an expert gains by having copies on several nodes: rows that need not cross; as if one slot
 * did not have it, another did (-1: none). mean_load: in units of a device's mean. */
float search_node_value(const struct search_problem *p, const struct search_slots *at, int32_t e,
                        float mean_load, int32_t without, int32_t with_slot);

/* The best parts of one expert's copies in every scenario, the rest of their devices' load being
 * given. */
void search_fill(struct search *s, int32_t expert);

/* Everything anew from the shares' point of view; also rids sums of what rounding piled up. */
void search_refill(struct search *s, uint32_t n_sweeps);

#endif
