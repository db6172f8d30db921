/* slots.c - the maps of all sparse layers, and where an expert has copies */
#include "worker/slots.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

int slots_init(struct slots *s, const struct model_spec *spec, const struct layout *layout,
               uint32_t n_spare, struct err *err)
{
    const struct rank_group *ep = &layout->ep;
    struct slots made = {.n_layers = spec->n_layers, .n_experts = spec->n_experts,
                         .n_devices = ep->n_ranks, .me = ep->me};
    int rc = 0;
    if (spec->n_experts % ep->n_ranks != 0)
        return err_set(err, -EINVAL, "%u experts do not lie evenly over %u ranks",
                       spec->n_experts, ep->n_ranks);
    made.n_slots = spec->n_experts > 0 ? spec->n_experts / ep->n_ranks + n_spare : 0;
    made.layers = xcalloc(spec->n_layers, sizeof *made.layers);
    for (uint32_t l = 0; l < spec->n_layers && rc == 0; l++)
        if (spec->n_experts > 0 && spec->layers[l].mlp == MLP_MOE)
            rc = placement_init(&made.layers[l].map, spec->n_experts, ep->n_ranks, made.n_slots,
                                err);
    if (rc < 0) {
        slots_fini(&made);
        return rc;
    }
    slots_index(&made);
    *s = made;
    return 0;
}

static void forget_copies(struct slots_layer *l)
{
    split_destroy(l->split);
    free(l->copied);
    free(l->first_copy);
    free(l->copies);
    free(l->copied_at);
    *l = (struct slots_layer){.map = l->map};
}

void slots_init_like(struct slots *s, const struct slots *from)
{
    *s = *from;
    s->layers = xcalloc(from->n_layers, sizeof *s->layers);
    s->speed = from->speed ? xmemdup(from->speed, s->n_devices * sizeof *s->speed) : NULL;
    for (uint32_t l = 0; l < from->n_layers; l++)
        if (slots_is_sparse(from, l))
            placement_init_like(&s->layers[l].map, &from->layers[l].map);
    slots_index(s);
}

void slots_fini(struct slots *s)
{
    for (uint32_t l = 0; s->layers && l < s->n_layers; l++) {
        forget_copies(&s->layers[l]);
        placement_fini(&s->layers[l].map);
    }
    free(s->layers);
    free(s->speed);
    *s = (struct slots){0};
}

/* ---- copies --------------------------------------------------------------------------------- */

static uint32_t index_layer(struct slots_layer *l, uint32_t me, const double *speed)
{
    const struct placement *map = &l->map;
#ifdef BALLAST_CHECKS
    assert(placement_check(map, NULL) == 0);
#endif
    uint32_t n_total = placement_n_total(map), n_filled = 0, n_copies = 0;
    uint32_t *n = xcalloc(map->n_experts, sizeof *n);
    for (uint32_t slot = 0; slot < n_total; slot++)
        if (map->expert[slot] >= 0) {
            n[map->expert[slot]]++;
            n_filled++;
            if (slot / map->n_slots == me)
                l->n_used = slot % map->n_slots + 1;
        }
    l->copied = xcalloc(map->n_experts, sizeof *l->copied);
    l->first_copy = xcalloc(map->n_experts + 1, sizeof *l->first_copy);
    l->copies = xcalloc(n_filled, sizeof *l->copies);
    l->copied_at = xcalloc(map->n_experts, sizeof *l->copied_at);
    for (uint32_t e = 0; e < map->n_experts; e++) {
        l->copied_at[e] = -1;
        if (n[e] < 2)
            continue;
        l->copied_at[e] = (int32_t)l->n_copied;
        l->copied[l->n_copied] = e;
        l->first_copy[l->n_copied++] = n_copies;
        n_copies += n[e];
    }
    l->first_copy[l->n_copied] = n_copies;
    memset(n, 0, map->n_experts * sizeof *n); /* from here on, of those that are listed */
    for (uint32_t slot = 0; slot < n_total; slot++) {
        int32_t k = map->expert[slot] < 0 ? -1 : l->copied_at[map->expert[slot]];
        if (k >= 0)
            l->copies[l->first_copy[k] + n[map->expert[slot]]++] = slot;
    }
    if (l->n_copied > 0)
        l->split = split_create(map, speed);
    free(n);
    return n_filled - map->n_experts;
}

void slots_index(struct slots *s)
{
    s->n_copies = 0;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        forget_copies(&s->layers[l]);
        if (slots_is_sparse(s, l))
            s->n_copies += index_layer(&s->layers[l], s->me, s->speed);
    }
}

void slots_at_stage(const struct slots *now, const struct slots *to, uint32_t *const *stage,
                    uint32_t last, struct slots *out)
{
    *out = *now;
    out->speed = NULL;
    out->layers = xcalloc(now->n_layers, sizeof *out->layers);
    for (uint32_t l = 0; l < now->n_layers; l++) {
        struct placement *map = &out->layers[l].map;
        if (!slots_is_sparse(now, l))
            continue;
        placement_init_like(map, &to->layers[l].map);
        if (stage[l])
            placement_at_stage(&now->layers[l].map, &to->layers[l].map, stage[l], last, map);
    }
    slots_index(out);
}

void slots_set_speed(struct slots *s, const double *speed)
{
    double *mine = speed ? xmemdup(speed, s->n_devices * sizeof *mine) : NULL;
    free(s->speed);
    s->speed = mine;
    for (uint32_t l = 0; l < s->n_layers; l++)
        if (s->layers[l].split)
            split_set_speed(s->layers[l].split, speed);
}

/* ---- from a message ------------------------------------------------------------------------- */

static int take_layer(struct placement *map, const Ballast__PlacementLayer *p, struct err *err)
{
    uint32_t n_total = placement_n_total(map);
    if (p->n_experts != n_total || p->n_home != map->n_experts)
        return err_set(err, -EINVAL, "%zu slots and %zu homes, expected %u and %u", p->n_experts,
                       p->n_home, n_total, map->n_experts);
    if (p->n_share != n_total && p->n_share != 0)
        return err_set(err, -EINVAL, "%zu shares for %u slots", p->n_share, n_total);
    for (uint32_t e = 0; e < map->n_experts; e++)
        map->home[e] = p->home[e];
    for (uint32_t slot = 0; slot < n_total; slot++) {
        map->expert[slot] = p->experts[slot];
        map->share[slot] = p->n_share > 0 ? p->share[slot] : 0;
        if (p->experts[slot] >= (int32_t)map->n_experts || p->experts[slot] < PLACEMENT_EMPTY)
            return err_set(err, -EINVAL, "slot %u holds expert %d: must be 0 to %u, or -1", slot,
                           p->experts[slot], map->n_experts - 1);
    }
    if (p->n_share == 0)
        placement_share_evenly(map);
    return placement_check(map, err);
}

int slots_from(const struct slots *from, const Ballast__Placement *p, struct slots *out,
               struct err *err)
{
    struct slots s;
    int rc = 0;
    if (p->n_layers > 0 && (p->n_devices != from->n_devices || p->n_slots != from->n_slots))
        return err_set(err, -EINVAL, "placement %u is of %u devices with %u slots, this job has "
                       "%u with %u", p->epoch, p->n_devices, p->n_slots, from->n_devices,
                       from->n_slots);
    slots_init_like(&s, from);
    for (size_t i = 0; i < p->n_layers && rc == 0; i++) {
        uint32_t layer = p->layers[i]->layer;
        if (!slots_is_sparse(&s, layer))
            rc = err_set(err, -EINVAL, "placement %u: layer %u has no experts", p->epoch, layer);
        else if ((rc = take_layer(&s.layers[layer].map, p->layers[i], err)) < 0)
            err_prefix(err, "placement %u, layer %u", p->epoch, layer);
    }
    if (rc < 0) {
        slots_fini(&s);
        return rc;
    }
    s.epoch = p->epoch;
    slots_index(&s);
    *out = s;
    return 0;
}
