/* shuffle.c - a placement as bad as any, but a valid one */
#include "worker/shuffle.h"

#include <stdlib.h>

#include "common/mem.h"
#include "common/mix.h"

static uint32_t draw(uint64_t *state, uint32_t below)
{
    return (uint32_t)(mix_next(state) % below);
}

static void shuffle_layer(struct placement *map, uint64_t *state)
{
    uint32_t n_total = placement_n_total(map);
    uint32_t *order = xcalloc(n_total, sizeof *order);
    for (uint32_t i = 0; i < n_total; i++) {
        uint32_t j = draw(state, i + 1);
        order[i] = order[j];
        order[j] = i;
        map->expert[i] = PLACEMENT_EMPTY;
    }
    for (uint32_t e = 0; e < map->n_experts; e++) {
        map->expert[order[e]] = (int32_t)e;
        map->home[e] = order[e];
    }
    for (uint32_t i = map->n_experts; i < n_total; i++) {
        uint32_t e = draw(state, map->n_experts);
        if (draw(state, 2) || placement_find(map, order[i] / map->n_slots, e) >= 0)
            continue;
        map->expert[order[i]] = (int32_t)e;
        if (draw(state, 2))
            map->home[e] = order[i];
    }
    placement_share_evenly(map);
    free(order);
}

void slots_shuffle(struct slots *s, uint64_t seed)
{
    uint64_t state = seed;
    for (uint32_t l = 0; l < s->n_layers; l++)
        if (slots_is_sparse(s, l))
            shuffle_layer(&s->layers[l].map, &state);
    s->epoch++;
    slots_index(s);
}
