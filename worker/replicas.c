/* replicas.c - hashes of what this rank owns, compared within the groups that own the same */
#include "worker/replicas.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/failpoint.h"
#include "common/hash.h"
#include "common/mem.h"
#include "worker/agree.h"
#include "worker/shard_state.h"

#define CHUNK_BYTES ((size_t)4 << 20) /* copied to the host at once */
#define RANKS_BYTES 128               /* of a list of ranks in words */

/* ---- hashes --------------------------------------------------------------------------------- */

static uint64_t hash_memory(const struct shard *s, uint64_t seed, const void *at, size_t n_bytes,
                            uint8_t *chunk)
{
    for (size_t done = 0; done < n_bytes; done += CHUNK_BYTES) {
        size_t n = n_bytes - done < CHUNK_BYTES ? n_bytes - done : CHUNK_BYTES;
        s->dev->ops->to_host(s->dev, chunk, (const char *)at + done, n);
        seed = hash_bytes(seed, chunk, n);
    }
    return seed;
}

static uint64_t hash_unit(const struct shard *s, const struct shard_unit *u, uint8_t *chunk)
{
    uint64_t n = u->slice + u->frozen;
    uint64_t h = hash_memory(s, 0, elem_at(s->dev, s->weights, (int64_t)u->weights_at),
                             n * elem_size(s->dev), chunk);
    return s->master ? hash_memory(s, h, s->master + u->at, u->slice * sizeof(float), chunk) : h;
}

static uint64_t hash_experts(const struct shard *s, uint32_t layer, uint8_t *chunk)
{
    static const enum slot_part parts[] = {SLOT_WEIGHTS, SLOT_FROZEN, SLOT_MASTER};
    uint32_t n_slots = s->slots->n_slots;
    uint64_t h = 0;
    for (uint32_t place = 0; place < n_slots; place++) {
        if (slots_homed_in(s->slots, layer, s->slots->me * n_slots + place) < 0)
            continue; /* empty, or a copy, which its home sends anew */
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            size_t n_bytes = shard_slot_bytes(s, layer, parts[i]);
            if (n_bytes > 0)
                h = hash_memory(s, h, shard_slot(s, layer, place, parts[i]), n_bytes, chunk);
        }
    }
    return h;
}

/* One bit of what lies in the first unit that has weights here. */
static void flip_bit(struct shard *s)
{
    uint8_t byte;
    s->dev->ops->to_host(s->dev, &byte, s->weights, 1);
    byte ^= 1;
    s->dev->ops->to_device(s->dev, s->weights, &byte, 1);
}

/* ---- comparing ------------------------------------------------------------------------------ */

/* How many of n have the value of i. */
static uint32_t count_same(const uint64_t *values, uint32_t n, uint32_t i)
{
    uint32_t n_same = 0;
    for (uint32_t k = 0; k < n; k++)
        n_same += values[k] == values[i];
    return n_same;
}

static void list_rank(char text[RANKS_BYTES], uint32_t rank)
{
    size_t used = strlen(text);
    snprintf(text + used, RANKS_BYTES - used, "%s%u", used ? ", " : "", rank);
}

/* values (n_ranks), of one unit. Ranks that have what more than half of them have are right. */
static int compare(const struct coll_group *g, const uint64_t *values, const char *what,
                   struct err *err)
{
    char odd[RANKS_BYTES] = "", rest[RANKS_BYTES] = "";
    uint32_t n_right = 0;
    for (uint32_t i = 0; i < g->n_ranks; i++) {
        bool is_right = 2 * count_same(values, g->n_ranks, i) > g->n_ranks;
        n_right += is_right;
        list_rank(is_right ? rest : odd, g->ranks[i]);
    }
    if (n_right == g->n_ranks)
        return 0;
    if (n_right == 0)
        return err_set(err, -EIO, "the weights of %s, the same on ranks %s, differ among them: the "
                       "memory of one of these is at fault", what, odd);
    return err_set(err, -EIO, "the weights of %s on rank %s are not those of its replicas, ranks "
                   "%s: its memory is at fault", what, odd, rest);
}

typedef void name_fn(const struct shard *s, uint32_t unit, char out_name[64]);

static void name_unit(const struct shard *s, uint32_t unit, char out_name[64])
{
    if (unit == 0 || unit + 1 == s->map->n_units)
        snprintf(out_name, 64, "%s", unit == 0 ? "the embedding" : "the head");
    else
        snprintf(out_name, 64, "layer %u", unit - 1);
}

static void name_experts(const struct shard *s, uint32_t layer, char out_name[64])
{
    (void)s;
    snprintf(out_name, 64, "the experts of layer %u", layer);
}

static void name_biases(const struct shard *s, uint32_t unit, char out_name[64])
{
    (void)s;
    (void)unit;
    snprintf(out_name, 64, "the routers' biases");
}

/* mine: n hashes. The first unit that differs. Collective over g. */
static int compare_all(const struct shard *s, const struct coll_group *g, const uint64_t *mine,
                       uint32_t n, name_fn *name, struct err *err)
{
    if (g->n_ranks == 1 || n == 0)
        return 0;
    uint64_t *all = xcalloc((size_t)n * g->n_ranks, sizeof *all);
    uint64_t *values = xcalloc(g->n_ranks, sizeof *values);
    int rc = s->coll->ops->all_gather_i32(s->coll, g, (const int32_t *)mine,
                                          2 * (size_t)n, (int32_t *)all, err);
    for (uint32_t unit = 0; unit < n && rc == 0; unit++) {
        char what[64];
        for (uint32_t i = 0; i < g->n_ranks; i++)
            values[i] = all[(size_t)i * n + unit];
        name(s, unit, what);
        rc = compare(g, values, what, err);
    }
    free(values);
    free(all);
    return rc;
}

/* ---- all ------------------------------------------------------------------------------------ */

/* What a rank has found is said by all, after each kind, so that none leaves the others. */
static int check_units(struct shard *s, uint64_t *hashes, uint8_t *chunk, struct err *err)
{
    bool has_others = s->fsdp_replica.n_ranks > 1;
    for (uint32_t i = 0; has_others && i < s->map->n_units; i++)
        hashes[i] = hash_unit(s, &s->units[i], chunk);
    return agree(s->coll, compare_all(s, &s->fsdp_replica, hashes, s->map->n_units, name_unit,
                                      err), err);
}

static int check_experts(struct shard *s, uint64_t *hashes, uint8_t *chunk, struct err *err)
{
    bool has_others = s->expert_replica.n_ranks > 1;
    for (uint32_t l = 0; has_others && l < s->spec->n_layers; l++)
        hashes[l] = slots_is_sparse(s->slots, l) ? hash_experts(s, l, chunk) : 0;
    return agree(s->coll, compare_all(s, &s->expert_replica, hashes, s->spec->n_layers,
                                      name_experts, err), err);
}

static int check_biases(struct shard *s, uint8_t *chunk, struct err *err)
{
    uint64_t hash = hash_memory(s, 0, s->buffers, s->map->n_buffers * sizeof(float), chunk);
    return agree(s->coll, compare_all(s, &s->coll->world_group, &hash, 1, name_biases, err), err);
}

int replicas_check(struct shard *s, struct err *err)
{
    uint32_t n = s->map->n_units > s->spec->n_layers ? s->map->n_units : s->spec->n_layers;
    uint64_t *hashes = xcalloc(n, sizeof *hashes);
    uint8_t *chunk = xcalloc(CHUNK_BYTES, 1);
    int rc;
    if (failpoint("flip-weight") < 0)
        flip_bit(s);
    s->coll->layer = -1;
    if ((rc = check_units(s, hashes, chunk, err)) == 0 &&
        (rc = check_experts(s, hashes, chunk, err)) == 0)
        rc = check_biases(s, chunk, err);
    free(chunk);
    free(hashes);
    return rc;
}
