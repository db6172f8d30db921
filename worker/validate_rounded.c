/* validate_rounded.c - what rounding the weights alone does to a fixture's quantities
 *
 * Tiny models of random weights amplify roundings: a token near two experts goes to the other one.
 * How far a bfloat16 run may be off therefore has no one answer. These runs give it: float32 on the
 * CPU from weights rounded to bfloat16, the first to the nearest, the others up or down by chance.
 * Without what bfloat16 does to activations, they are nearer to the fixture than a right run in
 * bfloat16 can hope to be. */
#include <stdlib.h>
#include <string.h>

#include "common/bf16.h"
#include "common/mem.h"
#include "common/mix.h"
#include "worker/validate.h"

/* Up with the probability of the distance to what lies below, so right on average. */
static float rounded(float x, uint64_t chance)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bf16_value((uint16_t)((bits + (uint32_t)(chance & 0xffff)) >> 16));
}

void validation_round_start(struct stack *s, uint32_t rounding)
{
    const struct tensor_map *map = s->config->map;

    for (size_t i = 0; i < map->n_entries; i++) {
        struct shard_part p;
        if (map->entries[i].is_buffer || !shard_part(s->shard, &map->entries[i], &p))
            continue;
        float *w = xcalloc(p.count, sizeof *w);
        shard_part_read(s->shard, &p, 0, p.count, w);
        for (uint64_t k = 0; k < p.count; k++)
            w[k] = rounding == 1 ? bf16_value(bf16_of(w[k]))
                                 : rounded(w[k], mix_word(mix_word(i + 1) ^
                                                                (p.first + k + 1) << 8 ^ rounding));
        shard_part_write(s->shard, &p, 0, p.count, w);
        free(w);
    }
}

int validation_add_rounded(const struct stack_config *config, const char *adapter,
                           struct validation *v, struct err *err)
{
    struct stack_config with = {
        .spec = config->spec, .map = config->map, .degrees = { 1, 1, 1, 0 },
        .tokens_max = config->tokens_max,
    };
    int rc = 0;

    v->rounded = xcalloc(ROUNDED_RUNS, sizeof *v->rounded);
    while (v->n_rounded < ROUNDED_RUNS && rc == 0) {
        struct validation *to = &v->rounded[v->n_rounded];
        rc = validation_run(&with, v->model_path, v->fixture, v->n_steps,
                            (struct validation_moves){0}, v->n_rounded + 1, to, err);
        v->n_rounded += rc == 0;
        if (rc == 0 && adapter)
            rc = validation_lora(&with, adapter, to, err);
    }
    return rc;
}
