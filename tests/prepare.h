/* prepare.h - the PREPARE that says what a placement is, as the coordinator would send it */
#ifndef TESTS_PREPARE_H
#define TESTS_PREPARE_H

#include "proto/ballast.pb-c.h"
#include "worker/slots.h"

/* Job 7, attempt 1, from the placement of epoch `base` to that of s. stage: per layer, or NULL.
 * Borrows the arrays of both; the rest lives until the next call. */
static inline Ballast__Prepare *prepare_of(const struct slots *s, uint32_t base,
                                           uint32_t *const *stage)
{
    static Ballast__PlacementLayer layers[8], *pointers[8];
    static Ballast__Placement placement;
    static Ballast__Prepare prepare;
    placement = (Ballast__Placement)BALLAST__PLACEMENT__INIT;
    prepare = (Ballast__Prepare)BALLAST__PREPARE__INIT;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        const struct placement *map = &s->layers[l].map;
        if (!slots_is_sparse(s, l))
            continue;
        Ballast__PlacementLayer *p = &layers[placement.n_layers];
        *p = (Ballast__PlacementLayer)BALLAST__PLACEMENT_LAYER__INIT;
        p->layer = l;
        p->n_experts = p->n_share = placement_n_total(map);
        p->experts = map->expert;
        p->share = map->share;
        p->n_home = map->n_experts;
        p->home = map->home;
        p->stage = stage ? stage[l] : NULL;
        p->n_stage = p->stage ? p->n_experts : 0;
        pointers[placement.n_layers++] = p;
    }
    placement.layers = pointers;
    placement.epoch = s->epoch;
    placement.n_devices = s->n_devices;
    placement.n_slots = s->n_slots;
    prepare.job_id = 7;
    prepare.attempt = 1;
    prepare.base_epoch = base;
    prepare.placement = &placement;
    return &prepare;
}

#endif
