/* search_parts.h - what the files of a search share: its state, four numbers at a time, shares */
#ifndef COORDINATOR_SEARCH_PARTS_H
#define COORDINATOR_SEARCH_PARTS_H

#include "coordinator/search.h"

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
    uint32_t n_total, n_words;
    const struct placement *start; /* kept by the caller */
    int32_t    *expert;   /* (n_total) */
    int32_t    *next;     /* (n_total) the next slot with the same expert, -1 */
    int32_t    *head;     /* (n_experts) */
    uint32_t   *n_copies; /* (n_experts) */
    uint64_t   *held;     /* (n_devices, n_words) bits: what the start has where */
    bool       *is_fixed; /* (n_total) */
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

/* Adds a copy's part to its device, or takes it off. */
static inline void search_add_part(struct search *s, uint32_t slot, float sign)
{
    struct row *d = &s->device[slot / s->p->n_slots];
    for (int i = 0; i < QUADS; i++)
        d->q[i] += sign * s->part[slot].q[i];
}

/* The best parts of one expert's copies in every scenario, the rest of their devices' load being
 * given. */
void search_fill(struct search *s, int32_t expert);

/* Everything anew from the shares' point of view; also rids sums of what rounding piled up. */
void search_refill(struct search *s, uint32_t n_sweeps);

#endif
