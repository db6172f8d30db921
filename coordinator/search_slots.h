/* search_slots.h - which expert is in which slot while a search changes it, and what was there
 * before */
#ifndef COORDINATOR_SEARCH_SLOTS_H
#define COORDINATOR_SEARCH_SLOTS_H

#include "common/placement.h"

struct search_slots {
    uint32_t  n_total, per_device, n_words;
    int32_t  *expert;   /* (n_total) PLACEMENT_EMPTY where nothing is */
    int32_t  *next;     /* (n_total) the next slot with the same expert, -1 */
    int32_t  *head;     /* (n_experts) */
    uint32_t *n_copies; /* (n_experts) */
    uint64_t *held;     /* (n_devices, n_words) bits: what the placement in force has where */
    bool     *is_fixed; /* (n_total) */
};

/* Memory for placements of p's shape; what is in it comes with search_slots_start. */
void search_slots_init(struct search_slots *s, const struct placement *p);
void search_slots_fini(struct search_slots *s);

/* Of p; moves are counted against in_force, whose homes do not move if keep_homes. */
void search_slots_start(struct search_slots *s, const struct placement *p,
                        const struct placement *in_force, bool keep_homes);

static inline uint32_t search_slots_device(const struct search_slots *s, uint32_t slot)
{
    return slot / s->per_device;
}

/* Whether the device has that expert in the placement in force; also of PLACEMENT_EMPTY. */
static inline bool search_slots_was_held(const struct search_slots *s, uint32_t device,
                                         int32_t expert)
{
    return expert < 0 || s->held[(size_t)device * s->n_words + (uint32_t)expert / 64] >>
                         ((uint32_t)expert % 64) & 1;
}

/* The slot in which a device has a copy of the expert, -1 if it has none. */
static inline int32_t search_slots_find(const struct search_slots *s, uint32_t device,
                                        int32_t expert)
{
    for (int32_t c = s->head[expert]; c >= 0; c = s->next[c])
        if (search_slots_device(s, (uint32_t)c) == device)
            return c;
    return -1;
}

static inline void search_slots_unlink(struct search_slots *s, uint32_t slot)
{
    int32_t e = s->expert[slot], *at = &s->head[e];
    while (*at != (int32_t)slot)
        at = &s->next[*at];
    *at = s->next[slot];
    s->n_copies[e]--;
    s->expert[slot] = PLACEMENT_EMPTY;
}

static inline void search_slots_link(struct search_slots *s, uint32_t slot, int32_t e)
{
    s->expert[slot] = e;
    s->next[slot] = s->head[e];
    s->head[e] = (int32_t)slot;
    s->n_copies[e]++;
}

#endif
