/* ctl_given.c - a job's placement to a file, and back as one to have */
#include "coordinator/ctl_given.h"

#include <stdlib.h>

#include "coordinator/ctl_places.h"
#include "proto/placed.h"

/* The layers of p that is_wanted, or all where it is NULL; what placements are read and written by.
 * Ended with loads_fini. */
static struct loads layers_of(const Ballast__Placement *p, const bool *is_wanted)
{
    struct loads l = {.n_experts = p->n_layers ? (uint32_t)p->layers[0]->n_home : 0};
    l.layer = xcalloc(p->n_layers + 1, sizeof *l.layer);
    for (size_t i = 0; i < p->n_layers; i++)
        if (!is_wanted || is_wanted[p->layers[i]->layer])
            l.layer[l.n_layers++] = p->layers[i]->layer;
    return l;
}

int ctl_given_write(const struct ctl *c, const Ballast__Placement *p)
{
    struct loads l = layers_of(p, NULL);
    struct placement *map = xcalloc(p->n_layers + 1, sizeof *map);
    struct err err;
    for (size_t i = 0; i < p->n_layers; i++)
        placed_layer(p, i, &map[i]);
    int rc = placements_write(c->placement_out, &l, map, &err);
    placements_free(map, l.n_layers);
    loads_fini(&l);
    return rc < 0 ? ctl_fail(c, CTL_FAILED, "%s", err.text) : CTL_OK;
}

static Ballast__Placement *pack(const struct loads *l, const struct placement *map,
                                const Ballast__Placement *have, struct arena *arena)
{
    Ballast__Placement *p = arena_alloc(arena, sizeof *p);
    ballast__placement__init(p);
    p->n_devices = have->n_devices;
    p->n_slots = have->n_slots;
    p->layers = arena_alloc(arena, (l->n_layers + 1) * sizeof *p->layers);
    for (uint32_t k = 0; k < l->n_layers; k++)
        p->layers[p->n_layers++] = placed_pack(&map[k], l->layer[k], arena);
    return p;
}

int ctl_given_read(struct ctl *c, uint64_t job, Ballast__Placement **out)
{
    Ballast__PlacementRequest request = BALLAST__PLACEMENT_REQUEST__INIT;
    const ProtobufCMessage *message;
    struct placement *map = NULL;
    struct err err;
    request.job_id = job;
    int code = ctl_call(c, BALLAST__METHOD__METHOD_PLACEMENT, &request.base, &message);
    if (code != CTL_OK)
        return code;
    const Ballast__Placement *have = ((const Ballast__PlacementReply *)message)->placement;
    if (!have || !have->n_layers)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no placement");
    bool is_named[LAYERS_MAX] = {false};
    int rc = placements_layers(c->placement, is_named, &err);
    struct loads l = layers_of(have, is_named);
    if (rc == 0)
        rc = placements_read(c->placement, &l, have->n_devices, have->n_slots, &map, &err);
    if (rc == 0)
        *out = pack(&l, map, have, &c->arena);
    placements_free(map, l.n_layers);
    loads_fini(&l);
    return rc < 0 ? ctl_fail(c, CTL_USAGE, "%s", err.text) : CTL_OK;
}
