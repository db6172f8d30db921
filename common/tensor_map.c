/* tensor_map.c - the places of a model's tensors: in units, packed or not, and by name */
#include "common/tensor_map.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define ALIGN_NUMBERS 16u

static uint64_t align_up(uint64_t x, uint64_t multiple)
{
    return (x + multiple - 1) / multiple * multiple;
}

static int by_name(const void *a, const void *b, void *arg)
{
    const struct tensor_map *map = arg;
    return strcmp(map->entries[*(const uint32_t *)a].name, map->entries[*(const uint32_t *)b].name);
}

/* Gives the trained tensors their places, or, once those have theirs, the frozen ones. The blocks
 * of all experts are laid out alike. */
static void place(struct tensor_map *map, bool trained)
{
    const struct tensor_entry *last = NULL; /* of an expert */
    for (size_t i = 0; i < map->n_entries; i++) {
        struct tensor_entry *e = &map->entries[i];
        struct tensor_block *block = e->expert < 0 ? &map->units[e->unit] : &map->expert;
        uint64_t *used = trained ? &block->trained : &block->frozen;
        if (e->is_buffer || tensor_is_trained(e) != trained)
            continue;
        if (e->expert >= 0) {
            if (!last || last->unit != e->unit || last->expert != e->expert)
                *used = 0;
            last = e;
        }
        e->offset = *used + (trained ? 0 : block->trained);
        *used = align_up(*used + e->count, ALIGN_NUMBERS);
    }
}

static void lay_out(struct tensor_map *map)
{
    free(map->units);
    map->units = xcalloc(map->n_units, sizeof *map->units);
    map->expert = (struct tensor_block){0};
    map->n_buffers = 0;
    place(map, true);
    place(map, false);
    for (size_t i = 0; i < map->n_entries; i++)
        if (map->entries[i].is_buffer) {
            map->entries[i].offset = map->n_buffers;
            map->n_buffers = align_up(map->n_buffers + map->entries[i].count, ALIGN_NUMBERS);
        }
}

void tensor_map_index(struct tensor_map *map)
{
    lay_out(map);
    map->by_name = xrealloc(map->by_name, map->n_entries * sizeof *map->by_name);
    for (size_t i = 0; i < map->n_entries; i++)
        map->by_name[i] = (uint32_t)i;
    qsort_r(map->by_name, map->n_entries, sizeof *map->by_name, by_name, map);
}

void tensor_map_fini(struct tensor_map *map)
{
    free(map->entries);
    free(map->by_name);
    free(map->names);
    free(map->adapter_names);
    free(map->units);
    *map = (struct tensor_map){0};
}

void tensor_map_train_indexers(struct tensor_map *map, bool alone)
{
    for (size_t i = 0; i < map->n_entries; i++) {
        struct tensor_entry *e = &map->entries[i];
        bool is_of_indexer = e->role >= ROLE_INDEX_Q && e->role <= ROLE_INDEX_WEIGHTS;
        e->is_unreached = !is_of_indexer && (alone || e->is_unreached);
    }
    tensor_map_index(map);
}

static bool is_to_pack(const struct tensor_entry *e, enum packing packing)
{
    bool is_wanted = e->expert >= 0 || (packing == PACKING_FP8 && tensor_is_projection(e->role));
    return is_wanted && e->adapter == ADAPTER_NONE;
}

int tensor_map_pack(struct tensor_map *map, enum packing packing, size_t elem_bytes,
                    struct err *err)
{
    int rc = 0;
    if (packing == PACKING_NONE)
        return 0;
    for (size_t i = 0; rc == 0 && i < map->n_entries; i++)
        if (is_to_pack(&map->entries[i], packing))
            rc = packing_check(packing, map->entries[i].name, map->entries[i].dims[1], err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < map->n_entries; i++) {
        struct tensor_entry *e = &map->entries[i];
        if (!is_to_pack(e, packing))
            continue;
        assert(!tensor_is_trained(e));
        e->packing = packing;
        e->count = align_up(packing_bytes(packing, e->dims[0], e->dims[1]), elem_bytes) /
                   elem_bytes;
    }
    tensor_map_index(map);
    return 0;
}

const struct tensor_entry *tensor_map_find(const struct tensor_map *map, const char *name)
{
    size_t low = 0, high = map->n_entries;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct tensor_entry *e = &map->entries[map->by_name[middle]];
        int order = strcmp(name, e->name);
        if (order == 0)
            return e;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static bool begins_with(const char *name, const char *prefix)
{
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

bool tensor_map_is_carried(const struct tensor_map *map, const char *name)
{
    size_t n = strlen(name), tail = strlen(".rotary_emb.inv_freq");
    char *end;

    if (begins_with(name, "vision_tower.") || begins_with(name, "mm_projector."))
        return true;
    if (n > tail && strcmp(name + n - tail, ".rotary_emb.inv_freq") == 0)
        return true;
    if (!begins_with(name, map->layers) || name[strlen(map->layers)] < '0' ||
        name[strlen(map->layers)] > '9')
        return false;
    unsigned long l = strtoul(name + strlen(map->layers), &end, 10);
    return *end == '.' && l >= map->n_layers && l - map->n_layers < map->n_mtp_layers;
}
