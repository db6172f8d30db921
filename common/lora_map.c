/* lora_map.c - adds adapters to a tensor map, under PEFT's names */
#include "common/lora_map.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

static const char ending[] = ".weight", experts_word[] = "experts", experts_part[] = ".experts.";
static const char *const part_names[] = { [ADAPTER_A] = ".lora_A", [ADAPTER_B] = ".lora_B" };

/* Whether an adapter goes beside a matrix of this role: all that are multiplied with, so not the
 * embedding, which is looked up, nor the queries of residuals, of which only a product with their
 * norm is used. */
static bool takes_adapter(enum tensor_role role)
{
    switch (role) {
    case ROLE_INDEX_Q: case ROLE_INDEX_K: case ROLE_INDEX_WEIGHTS:
    case ROLE_ROUTER: case ROLE_HEAD:
        return true;
    default:
        return tensor_is_projection(role);
    }
}

/* ---- names ---------------------------------------------------------------------------------- */

/* "model.layers.1.mlp.experts.7.up_proj" becomes "model.layers.1.mlp.experts.up_proj". */
static void drop_expert(char *path)
{
    char *at = strstr(path, experts_part);
    if (!at)
        return;
    char *number = at + strlen(experts_part), *rest = number + strspn(number, "0123456789");
    if (rest > number && *rest == '.')
        memmove(number, rest + 1, strlen(rest + 1) + 1);
}

/* The path of a matrix' module, an expert's number left out. */
static void path_of(const struct tensor_entry *e, char out[LORA_NAME_BYTES])
{
    size_t n = strlen(e->name), tail = sizeof ending - 1;
    if (n > tail && strcmp(e->name + n - tail, ending) == 0)
        n -= tail;
    snprintf(out, LORA_NAME_BYTES, "%.*s", (int)n, e->name);
    if (e->expert >= 0)
        drop_expert(out);
}

static void adapter_name(const struct tensor_entry *base, enum adapter_part part,
                         char out[LORA_NAME_BYTES])
{
    size_t n = strlen(base->name) - (sizeof ending - 1);
    int used = snprintf(out, LORA_NAME_BYTES, LORA_NAME_PREFIX "%.*s%s%s", (int)n, base->name,
                        part_names[part], ending);
    assert(used > 0 && used < LORA_NAME_BYTES);
}

static bool set_expert(const char *name, uint32_t e, char out[LORA_NAME_BYTES])
{
    const char *at = strstr(name, experts_part);
    if (!at)
        return false;
    const char *number = at + strlen(experts_part), *rest = number + strspn(number, "0123456789");
    int used = snprintf(out, LORA_NAME_BYTES, "%.*s%u%s", (int)(number - name), name, e, rest);
    return rest > number && used < LORA_NAME_BYTES;
}

void lora_name_of_expert(const struct tensor_entry *shared, uint32_t e, char out[LORA_NAME_BYTES])
{
    bool ok = set_expert(shared->name, e, out);
    assert(shared->n_same && ok);
}

int64_t lora_expert_of_name(const char *name, char out[LORA_NAME_BYTES])
{
    if (!set_expert(name, 0, out))
        return -1;
    return (int64_t)strtoul(strstr(name, experts_part) + strlen(experts_part), NULL, 10);
}

bool lora_is_copy(const char *name, char out[LORA_NAME_BYTES])
{
    static const char copy[] = ".base_layer.weight";
    size_t n = strlen(name), head = strlen(LORA_NAME_PREFIX), tail = sizeof copy - 1;
    if (n <= head + tail || n >= LORA_NAME_BYTES || strncmp(name, LORA_NAME_PREFIX, head) != 0 ||
        strcmp(name + n - tail, copy) != 0)
        return false;
    snprintf(out, LORA_NAME_BYTES, "%.*s%s", (int)(n - head - tail), name + head, ending);
    return true;
}

int lora_target_of(const char *name, char out[LORA_NAME_BYTES], struct err *err)
{
    size_t n = strlen(name), head = strlen(LORA_NAME_PREFIX), tail = sizeof ending - 1;
    for (int part = ADAPTER_A; part <= ADAPTER_B; part++) {
        size_t whole = strlen(part_names[part]) + tail;
        if (n <= head + whole || n - head >= LORA_NAME_BYTES ||
            strncmp(name, LORA_NAME_PREFIX, head) != 0 ||
            strncmp(name + n - whole, part_names[part], strlen(part_names[part])) != 0 ||
            strcmp(name + n - tail, ending) != 0)
            continue;
        snprintf(out, LORA_NAME_BYTES, "%.*s", (int)(n - head - whole), name + head);
        drop_expert(out);
        return 0;
    }
    if (strstr(name, ".lora_embedding_"))
        return err_set(err, -EINVAL, "tensor '%.200s' is an adapter of an embedding; adapters are "
                       "beside matrices that are multiplied with here", name);
    return err_set(err, -EINVAL, "tensor '%.200s' is no adapter: expected " LORA_NAME_PREFIX
                   "<module>.lora_A.weight or .lora_B.weight", name);
}

const struct tensor_entry *lora_base_of(const struct tensor_map *map,
                                        const struct tensor_entry *adapter)
{
    char name[LORA_NAME_BYTES];
    const char *from = adapter->name + strlen(LORA_NAME_PREFIX);
    size_t n = strlen(from) - strlen(part_names[adapter->adapter]) - (sizeof ending - 1);
    assert(adapter->adapter != ADAPTER_NONE);
    snprintf(name, sizeof name, "%.*s%s", (int)n, from, ending);
    return tensor_map_find(map, name);
}

/* ---- targets -------------------------------------------------------------------------------- */

static bool is_expert(enum tensor_role role)
{
    return role >= ROLE_EXPERT_GATE && role <= ROLE_EXPERT_DOWN;
}

static bool is_of_indexer(enum tensor_role role)
{
    return role >= ROLE_INDEX_Q && role <= ROLE_INDEX_WEIGHTS;
}

static bool fits(const char *target, const char *path, enum tensor_role role)
{
    size_t n = strlen(path), tail = strlen(target);
    if (is_expert(role) && strcmp(target, experts_word) == 0)
        return true;
    return tail > 0 && n >= tail && strcmp(path + n - tail, target) == 0 &&
           (n == tail || path[n - tail - 1] == '.');
}

static void add_word(const char *word, char *out, size_t n_bytes)
{
    char whole[LORA_NAME_BYTES + 2];
    size_t used = strlen(out), n = (size_t)snprintf(whole, sizeof whole, " %s,", word);
    if (used + n < n_bytes && !strstr(out, whole))
        memcpy(out + used, whole, n + 1);
}

/* The words that would do, each once: the ends of the paths of all that take adapters. */
static void list_words(const struct tensor_map *map, char *out, size_t n_bytes)
{
    bool has_experts = false;
    for (size_t i = 0; i < map->n_entries; i++) {
        char path[LORA_NAME_BYTES];
        if (!takes_adapter(map->entries[i].role))
            continue;
        has_experts = has_experts || is_expert(map->entries[i].role);
        path_of(&map->entries[i], path);
        add_word(strrchr(path, '.') ? strrchr(path, '.') + 1 : path, out, n_bytes);
    }
    if (has_experts)
        add_word(experts_word, out, n_bytes);
    if (*out)
        out[strlen(out) - 1] = '\0';
}

static int check_target(const struct tensor_map *map, const char *target, struct err *err)
{
    char known[512] = "";
    const struct tensor_entry *refused = NULL;
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        char path[LORA_NAME_BYTES];
        path_of(e, path);
        if (!fits(target, path, e->role))
            continue;
        if (takes_adapter(e->role))
            return 0;
        refused = e;
    }
    list_words(map, known, sizeof known);
    if (refused)
        return err_set(err, -EINVAL, "LoRA target '%.100s': %s takes no adapter; use some of%s",
                       target, refused->name, known);
    return err_set(err, -EINVAL, "LoRA target '%.100s' is no matrix of this model; use some of%s",
                   target, known);
}

static bool is_wanted(const struct lora_config *c, const struct tensor_entry *e)
{
    char path[LORA_NAME_BYTES];
    if (!takes_adapter(e->role))
        return false;
    path_of(e, path);
    for (size_t i = 0; i < c->n_targets; i++)
        if (fits(c->targets[i], path, e->role))
            return true;
    return false;
}

/* ---- the map -------------------------------------------------------------------------------- */

struct builder {
    struct tensor_map *map;
    const struct lora_config *config;
    struct tensor_entry *entries; /* the new list */
    size_t   n, names_used, names_cap;
    uint32_t n_experts;
    bool     wants_expert[3]; /* gate, up, down: every expert's block is laid out alike */
};

static uintptr_t name_add(struct builder *b, const char *name)
{
    size_t n = strlen(name) + 1, at = b->names_used;
    if (at + n > b->names_cap) {
        b->names_cap = 2 * (at + n);
        b->map->adapter_names = xrealloc(b->map->adapter_names, b->names_cap);
    }
    memcpy(b->map->adapter_names + at, name, n);
    b->names_used += n;
    return at;
}

static void add_part(struct builder *b, const struct tensor_entry *base, enum adapter_part part,
                     bool is_shared)
{
    char name[LORA_NAME_BYTES];
    uint64_t r = b->config->r;
    adapter_name(base, part, name);
    struct tensor_entry *e = &b->entries[b->n++];
    *e = (struct tensor_entry){
        .name = (const char *)name_add(b, name), .role = base->role, .adapter = part,
        .n_same = is_shared ? b->n_experts : 0, .unit = base->unit,
        .expert = is_shared ? -1 : base->expert, .n_dims = 2,
        .dims = { part == ADAPTER_A ? r : base->dims[0], part == ADAPTER_A ? base->dims[1] : r },
        .init = part == ADAPTER_A ? INIT_LORA_A : INIT_ZEROS, .is_matrix = true,
        .is_unreached = is_of_indexer(base->role) && !b->config->indexers,
    };
    e->count = e->stored_count = e->dims[0] * e->dims[1];
}

/* Those of one matrix. A shared A is added with expert 0, to the layer's unit. */
static void add_adapter(struct builder *b, const struct tensor_entry *base)
{
    if (base->expert >= 0 && !b->wants_expert[base->role - ROLE_EXPERT_GATE])
        return;
    bool is_shared = base->expert >= 0 && b->config->shared_a;
    if (!is_shared || base->expert == 0)
        add_part(b, base, ADAPTER_A, is_shared);
    add_part(b, base, ADAPTER_B, false);
}

static void look_around(struct builder *b)
{
    for (size_t i = 0; i < b->map->n_entries; i++) {
        const struct tensor_entry *e = &b->map->entries[i];
        if (e->expert >= (int32_t)b->n_experts)
            b->n_experts = (uint32_t)e->expert + 1;
        if (is_expert(e->role) && e->expert == 0 && is_wanted(b->config, e))
            b->wants_expert[e->role - ROLE_EXPERT_GATE] = true;
    }
}

/* That the loss reaches one of them. */
static int check_reached(const struct tensor_map *map, const struct lora_config *c,
                         struct err *err)
{
    for (size_t i = 0; i < map->n_entries; i++)
        if (is_wanted(c, &map->entries[i]) &&
            (c->indexers || !is_of_indexer(map->entries[i].role)))
            return 0;
    return err_set(err, -EINVAL, "LoRA targets of indexers alone, which rest unless "
                   "train.indexer.with_model is true; add others, or set that");
}

int lora_map_add(struct tensor_map *map, const struct lora_config *c, struct err *err)
{
    struct builder b = { .map = map, .config = c };

    assert(c->r >= 1 && c->r <= LORA_RANK_MAX && !map->adapter_names);
    if (c->n_targets == 0)
        return err_set(err, -EINVAL, "LoRA without a target has nothing to train");
    for (size_t i = 0; i < c->n_targets; i++) {
        int rc = check_target(map, c->targets[i], err);
        if (rc < 0)
            return rc;
    }
    int rc = check_reached(map, c, err);
    if (rc < 0)
        return rc;
    look_around(&b);
    b.entries = xcalloc(3 * map->n_entries, sizeof *b.entries);
    for (size_t i = 0; i < map->n_entries; i++) {
        struct tensor_entry *e = &b.entries[b.n++];
        *e = map->entries[i];
        e->is_unreached = true;
        if (e->expert >= 0 ? is_expert(e->role) : is_wanted(c, e))
            add_adapter(&b, &map->entries[i]);
    }
    for (size_t i = 0; i < b.n; i++)
        if (b.entries[i].adapter != ADAPTER_NONE)
            b.entries[i].name = map->adapter_names + (uintptr_t)b.entries[i].name;
    free(map->entries);
    map->entries = b.entries;
    map->n_entries = b.n;
    tensor_map_index(map);
    return 0;
}
