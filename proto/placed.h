/* placed.h - a placement as messages and records carry it, and back */
#ifndef PROTO_PLACED_H
#define PROTO_PLACED_H

#include "common/mem.h"
#include "common/placement.h"
#include "proto/ballast.pb-c.h"

/* The i-th layer of a message that passed check_placement. Gives *out, ended with
 * placement_fini. */
void placed_layer(const Ballast__Placement *m, size_t i, struct placement *out);

/* The layer of that number, or -1. */
long placed_find(const Ballast__Placement *m, uint32_t layer);

/* In the arena. */
Ballast__PlacementLayer *placed_pack(const struct placement *p, uint32_t layer,
                                     struct arena *arena);

/* What holds after `changes` to base (NULL: nothing): its own layers, and those of base that it
 * does not name. In the arena; layers are shared with both. */
Ballast__Placement *placed_merge(const Ballast__Placement *base,
                                 const Ballast__Placement *changes, struct arena *arena);

#endif
