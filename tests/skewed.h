/* skewed.h - routers that send every token to the same experts, for tests */
#ifndef TESTS_SKEWED_H
#define TESTS_SKEWED_H

#include "worker/stack.h"

/* The first top_k experts win, whatever the scores, once the shard is refreshed. */
static inline void prefer_the_first(struct stack *s)
{
    const struct tensor_map *map = s->config->map;
    for (size_t i = 0; i < map->n_entries; i++) {
        struct shard_part p;
        if (map->entries[i].role != ROLE_ROUTER_BIAS || !shard_part(s->shard, &map->entries[i], &p))
            continue;
        for (uint64_t e = 0; e < p.count; e++) {
            float bias = e < s->config->spec->top_k ? 100 : 0;
            shard_part_write(s->shard, &p, e, 1, &bias);
        }
    }
}

#endif
