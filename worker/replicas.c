/* replicas.c - hashes of what this rank owns, compared within the groups that own the same
 *
 * Memory is hashed where it lies, on the device; only the hashes come here. */
#include "worker/replicas.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/failpoint.h"
#include "common/mem.h"
#include "worker/agree.h"
#include "worker/shard_state.h"

#define RANKS_BYTES 128 /* of a list of ranks in words */

/* ---- hashes --------------------------------------------------------------------------------- */

/* Sums that the device makes of what lies in it: one a unit, or a layer. */
struct hashes {
    uint64_t *sums;   /* on the device */
    uint64_t *values; /* the same, here */
};

/* Adds memory to a sum, its words counted from first; returns the count behind them. */
static uint64_t hash_memory(const struct shard *s, uint64_t *acc_sum, uint64_t first,
                            const void *at, size_t n_bytes)
{
    size_t n_words = n_bytes / sizeof(uint64_t);
    assert(n_bytes % sizeof(uint64_t) == 0); /* slices are whole half lines */
    if (n_words > 0)
        s->dev->ops->checksum(s->dev, acc_sum, at, (int64_t)n_words, first);
    return first + n_words;
}

static void hash_unit(const struct shard *s, const struct shard_unit *u, uint64_t *acc_sum)
{
    uint64_t n = u->slice + u->frozen;
    uint64_t first = hash_memory(s, acc_sum, 0, elem_at(s->dev, s->weights, (int64_t)u->weights_at),
                                 n * elem_size(s->dev));
    if (s->master)
        hash_memory(s, acc_sum, first, s->master + u->at, u->slice * sizeof(float));
}

static void hash_experts(const struct shard *s, uint32_t layer, uint64_t *acc_sum)
{
    static const enum slot_part parts[] = {SLOT_WEIGHTS, SLOT_FROZEN, SLOT_MASTER};
    uint32_t n_slots = s->slots->n_slots;
    uint64_t first = 0;
    for (uint32_t place = 0; place < n_slots; place++) {
        if (slots_homed_in(s->slots, layer, s->slots->me * n_slots + place) < 0)
            continue; /* empty, or a copy, which its home sends anew */
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            size_t n_bytes = shard_slot_bytes(s, layer, parts[i]);
            if (n_bytes > 0)
                first = hash_memory(s, acc_sum, first, shard_slot(s, layer, place, parts[i]),
                                    n_bytes);
        }
    }
}

static void hashes_begin(const struct shard *s, const struct hashes *h, uint32_t n)
{
    s->dev->ops->zero(s->dev, h->sums, n * sizeof *h->sums);
}

static void hashes_end(const struct shard *s, const struct hashes *h, uint32_t n)
{
    s->dev->ops->to_host(s->dev, h->values, h->sums, n * sizeof *h->sums);
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
static int check_units(struct shard *s, const struct hashes *h, struct err *err)
{
    uint32_t n = s->map->n_units;
    hashes_begin(s, h, n);
    for (uint32_t i = 0; s->fsdp_replica.n_ranks > 1 && i < n; i++)
        hash_unit(s, &s->units[i], &h->sums[i]);
    hashes_end(s, h, n);
    return agree(s->coll, compare_all(s, &s->fsdp_replica, h->values, n, name_unit, err), err);
}

static int check_experts(struct shard *s, const struct hashes *h, struct err *err)
{
    uint32_t n = s->spec->n_layers;
    hashes_begin(s, h, n);
    for (uint32_t l = 0; s->expert_replica.n_ranks > 1 && l < n; l++)
        if (slots_is_sparse(s->slots, l))
            hash_experts(s, l, &h->sums[l]);
    hashes_end(s, h, n);
    return agree(s->coll, compare_all(s, &s->expert_replica, h->values, n, name_experts, err),
                 err);
}

static int check_biases(struct shard *s, const struct hashes *h, struct err *err)
{
    hashes_begin(s, h, 1);
    hash_memory(s, h->sums, 0, s->buffers, s->map->n_buffers * sizeof(float));
    hashes_end(s, h, 1);
    return agree(s->coll, compare_all(s, &s->coll->world_group, h->values, 1, name_biases, err),
                 err);
}

int replicas_check(struct shard *s, struct err *err)
{
    uint32_t n = s->map->n_units > s->spec->n_layers ? s->map->n_units : s->spec->n_layers;
    struct hashes h = {.sums = s->dev->ops->alloc(s->dev, n * sizeof *h.sums),
                       .values = xcalloc(n, sizeof *h.values)};
    int rc = h.sums ? 0 : err_set(err, -ENOMEM, "no memory for %u hashes of weights", n);
    if (h.sums && failpoint("flip-weight") < 0)
        flip_bit(s);
    s->coll->layer = -1;
    if ((rc = agree(s->coll, rc, err)) == 0 && (rc = check_units(s, &h, err)) == 0 &&
        (rc = check_experts(s, &h, err)) == 0)
        rc = check_biases(s, &h, err);
    if (h.sums)
        s->dev->ops->free(s->dev, h.sums);
    free(h.values);
    return rc;
}
