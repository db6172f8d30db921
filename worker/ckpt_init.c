/* ckpt_init.c - initial weights, each a function of (seed, tensor, element) and of no layout */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "common/mix.h"
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

static void init_tensor(struct shard *s, const struct tensor_entry *e,
                        const struct model_spec *spec, uint64_t seed)
{
    uint64_t key = key_of(seed, e->name);
    struct shard_part p;
    if (e->packing != PACKING_NONE || !shard_part(s, e, &p))
        return;
    float *x = xcalloc(p.count, sizeof *x);
    for (uint64_t i = 0; i < p.count; i++)
        x[i] = (float)value(e, spec, key, p.first + i);
    shard_part_write(s, &p, 0, p.count, x);
    free(x);
}

void ckpt_init_weights(struct shard *s, const struct tensor_map *map,
                       const struct model_spec *spec, uint64_t seed)
{
    for (size_t t = 0; t < map->n_entries; t++)
        if (map->entries[t].adapter == ADAPTER_NONE)
            init_tensor(s, &map->entries[t], spec, seed);
}

void ckpt_init_adapters(struct shard *s, const struct tensor_map *map, uint64_t seed)
{
    for (size_t t = 0; t < map->n_entries; t++)
        if (map->entries[t].adapter != ADAPTER_NONE)
            init_tensor(s, &map->entries[t], NULL, seed);
}
