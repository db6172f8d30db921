/* ckpt_init.c - initial weights, each a function of (seed, tensor, element) and of no layout */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "common/mix.h"
#include "kernels/pool.h"
#include "worker/ckpt.h"

static uint64_t key_of(uint64_t seed, const char *name)
{
    return mix_word(hash_fnv(HASH_FNV, name, strlen(name)) ^ mix_word(seed + 0x9e3779b97f4a7c15u));
}

/* In (0, 1), number k of element i. */
static double uniform(uint64_t key, uint64_t i, uint64_t k)
{
    uint64_t x = mix_word(key + (i * 64 + k) * 0x9e3779b97f4a7c15u);
    return ((double)(x >> 11) + 0.5) * 0x1p-53;
}

static double normal(uint64_t key, uint64_t i, uint64_t k)
{
    return sqrt(-2 * log(uniform(key, i, 2 * k))) * cos(2 * M_PI * uniform(key, i, 2 * k + 1));
}

/* Cut at 3: another draw for the one in 370 that lies beyond. */
static double cut_normal(uint64_t key, uint64_t i)
{
    for (uint64_t k = 0; k < 31; k++) {
        double x = normal(key, i, k);
        if (fabs(x) <= 3)
            return x;
    }
    return 0;
}

static double dt_bias(uint64_t key, uint64_t i)
{
    double dt = exp(log(1e-3) + uniform(key, i, 0) * (log(0.1) - log(1e-3)));
    return dt + log(-expm1(-dt)); /* softplus of it is dt */
}

static double value(const struct tensor_entry *e, const struct model_spec *spec, uint64_t key,
                    uint64_t i)
{
    switch (e->init) {
    case INIT_NORMAL:
        return spec->init_std * normal(key, i, 0);
    case INIT_ONES:
        return 1;
    case INIT_ZEROS:
        return 0;
    case INIT_A_LOG:
        return log(1 + 15 * uniform(key, i, 0));
    case INIT_DT_BIAS:
        return dt_bias(key, i);
    case INIT_CONV:
        return (2 * uniform(key, i, 0) - 1) / sqrt(spec->conv_kernel);
    case INIT_LORA_A:
        return (2 * uniform(key, i, 0) - 1) / sqrt((double)e->dims[1]);
    case INIT_HEAD:
        break;
    }
    return cut_normal(key, i) / sqrt(spec->hidden);
}

/* ---- by all threads ---- */

#define PIECE ((uint64_t)1 << 16) /* elements of a task */

struct init {
    struct shard *shard;
    struct pool  *pool;
    const struct model_spec *spec; /* NULL: of adapters */
    uint64_t seed;
};

struct fill {
    const struct init *init;
    const struct tensor_entry *e;
    uint64_t key, first, count; /* of the tensor: the elements that are filled in */
    float   *x;
};

static void fill_piece(void *arg, uint32_t task, uint32_t thread)
{
    const struct fill *f = arg;
    uint64_t begin = task * PIECE, end = begin + PIECE < f->count ? begin + PIECE : f->count;
    (void)thread;
    for (uint64_t i = begin; i < end; i++)
        f->x[i] = (float)value(f->e, f->init->spec, f->key, f->first + i);
}

static void init_tensor(const struct init *init, const struct tensor_entry *e)
{
    struct shard_part p;
    if (e->packing != PACKING_NONE || !shard_part(init->shard, e, &p))
        return;
    struct fill f = {.init = init, .e = e, .key = key_of(init->seed, e->name), .first = p.first,
                     .count = p.count, .x = xcalloc(p.count, sizeof *f.x)};
    pool_run(init->pool, (uint32_t)((p.count + PIECE - 1) / PIECE), fill_piece, &f);
    shard_part_write(init->shard, &p, 0, p.count, f.x);
    free(f.x);
}

static void init_tensors(struct init init, const struct tensor_map *map, bool adapters)
{
    init.pool = pool_create(shard_device(init.shard)->n_threads);
    for (size_t t = 0; t < map->n_entries; t++)
        if ((map->entries[t].adapter != ADAPTER_NONE) == adapters)
            init_tensor(&init, &map->entries[t]);
    pool_destroy(init.pool);
}

void ckpt_init_weights(struct shard *s, const struct tensor_map *map,
                       const struct model_spec *spec, uint64_t seed)
{
    init_tensors((struct init){.shard = s, .spec = spec, .seed = seed}, map, false);
}

void ckpt_init_adapters(struct shard *s, const struct tensor_map *map, uint64_t seed)
{
    init_tensors((struct init){.shard = s, .seed = seed}, map, true);
}
