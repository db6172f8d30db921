/* placed.c - a placement as messages and records carry it, and back */
#include "proto/placed.h"

#include <assert.h>

void placed_layer(const Ballast__Placement *m, size_t i, struct placement *out)
{
    const Ballast__PlacementLayer *l = m->layers[i];
    assert(l->n_experts == (size_t)m->n_devices * m->n_slots && l->n_share == l->n_experts);
    placement_init_like(out, &(struct placement){
        .n_experts = (uint32_t)l->n_home, .n_devices = m->n_devices, .n_slots = m->n_slots,
        .expert = l->experts, .share = l->share, .home = l->home});
}

long placed_find(const Ballast__Placement *m, uint32_t layer)
{
    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i]->layer == layer)
            return (long)i;
    return -1;
}

Ballast__PlacementLayer *placed_pack(const struct placement *p, uint32_t layer,
                                     struct arena *arena)
{
    size_t n_total = placement_n_total(p);
    Ballast__PlacementLayer *l = arena_alloc(arena, sizeof *l);
    ballast__placement_layer__init(l);
    l->layer = layer;
    l->n_experts = l->n_share = n_total;
    l->experts = arena_memdup(arena, p->expert, n_total * sizeof *p->expert);
    l->share = arena_memdup(arena, p->share, n_total * sizeof *p->share);
    l->n_home = p->n_experts;
    l->home = arena_memdup(arena, p->home, p->n_experts * sizeof *p->home);
    return l;
}

Ballast__Placement *placed_merge(const Ballast__Placement *base,
                                 const Ballast__Placement *changes, struct arena *arena)
{
    size_t n_base = base ? base->n_layers : 0, b = 0, c = 0;
    Ballast__Placement *m = arena_memdup(arena, changes, sizeof *changes);
    m->layers = arena_alloc(arena, (n_base + changes->n_layers) * sizeof *m->layers);
    m->n_layers = 0;
    while (b < n_base || c < changes->n_layers) {
        bool is_base = c == changes->n_layers ||
            (b < n_base && base->layers[b]->layer < changes->layers[c]->layer);
        if (!is_base && b < n_base && base->layers[b]->layer == changes->layers[c]->layer)
            b++;
        m->layers[m->n_layers++] = is_base ? base->layers[b++] : changes->layers[c++];
    }
    return m;
}

