/* placed.c - a placement as messages and records carry it, and back */
#include "proto/placed.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* The layer as a placement whose arrays are the message's. */
static int view(const Ballast__Placement *m, size_t i, struct placement *out, struct err *err)
{
    const Ballast__PlacementLayer *l = m->layers[i];
    uint64_t n_total = (uint64_t)m->n_devices * m->n_slots;
    if (!n_total || n_total > PLACEMENT_SLOTS_MAX)
        return err_set(err, -EINVAL, "%u devices with %u slots each: must be 1 to %u slots",
                       m->n_devices, m->n_slots, PLACEMENT_SLOTS_MAX);
    if (l->n_experts != n_total || l->n_share != n_total)
        return err_set(err, -EINVAL, "layer %u: %zu experts and %zu shares for %u devices with "
                       "%u slots each", l->layer, l->n_experts, l->n_share, m->n_devices,
                       m->n_slots);
    if (!l->n_home || l->n_home > EXPERTS_MAX)
        return err_set(err, -EINVAL, "layer %u: %zu homes, expected 1 to %u", l->layer, l->n_home,
                       EXPERTS_MAX);
    *out = (struct placement){
        .n_experts = (uint32_t)l->n_home, .n_devices = m->n_devices, .n_slots = m->n_slots,
        .expert = l->experts, .share = l->share, .home = l->home};
    if (placement_check(out, err) < 0)
        return err_prefix(err, "layer %u", l->layer);
    return 0;
}

int placed_layer(const Ballast__Placement *m, size_t i, struct placement *out, struct err *err)
{
    struct placement p;
    int rc = view(m, i, &p, err);
    if (rc == 0)
        placement_init_like(out, &p);
    return rc;
}

int placed_check(const Ballast__Placement *m, struct err *err)
{
    for (size_t i = 0; i < m->n_layers; i++) {
        struct placement p;
        if (i && m->layers[i]->layer <= m->layers[i - 1]->layer)
            return err_set(err, -EINVAL, "layer %u comes after layer %u", m->layers[i]->layer,
                           m->layers[i - 1]->layer);
        int rc = view(m, i, &p, err);
        if (rc < 0)
            return rc;
    }
    return 0;
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

Ballast__Placement *placed_copy(const Ballast__Placement *m)
{
    size_t n_bytes = ballast__placement__get_packed_size(m);
    uint8_t *bytes = xcalloc(1, n_bytes);
    ballast__placement__pack(m, bytes);
    Ballast__Placement *copy = ballast__placement__unpack(NULL, n_bytes, bytes);
    free(bytes);
    assert(copy);
    return copy;
}
