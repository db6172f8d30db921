/* activations.c - a stack of floats in a few device blocks */
#include "worker/activations.h"

#include <assert.h>
#include <errno.h>

#define ALIGN_FLOATS 16u                   /* 64 bytes */
#define GROWTH_FLOATS ((size_t)4 << 20)    /* the least that an extra block holds */

void activations_init(struct activations *a, struct device *dev)
{
    *a = (struct activations){ .dev = dev };
}

void activations_fini(struct activations *a)
{
    for (uint32_t i = 0; i < a->n_blocks; i++)
        a->dev->ops->free(a->dev, a->blocks[i].base);
    *a = (struct activations){0};
}

static bool add_block(struct activations *a, size_t n_floats)
{
    if (a->n_blocks == ACTIVATION_BLOCKS_MAX)
        return false;
    float *base = a->dev->ops->alloc(a->dev, n_floats * sizeof *base);
    if (!base)
        return false;
    a->blocks[a->n_blocks].base = base;
    a->blocks[a->n_blocks++].n_floats = n_floats;
    return true;
}

int activations_reserve(struct activations *a, size_t n_floats, struct err *err)
{
    assert(a->n_blocks == 0);
    if (!add_block(a, n_floats ? n_floats : ALIGN_FLOATS))
        return err_set(err, -ENOMEM, "the device has no %zu bytes for activations; lower "
                       "micro_batch or use activation_checkpointing: full",
                       n_floats * sizeof(float));
    return 0;
}

/* Moves on to a later block that holds n floats, taking a new one from the device at need. */
static bool advance(struct activations *a, size_t n)
{
    for (uint32_t i = a->block + 1; i < a->n_blocks; i++) {
        if (a->blocks[i].n_floats >= n) {
            a->block = i;
            a->used = 0;
            return true;
        }
    }
    if (!add_block(a, n > GROWTH_FLOATS ? n : GROWTH_FLOATS))
        return false;
    a->block = a->n_blocks - 1;
    a->used = 0;
    return true;
}

float *activations_take(struct activations *a, int64_t n_floats)
{
    assert(n_floats >= 0);
    size_t n = ((size_t)n_floats + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;

    a->live += n;
    if (a->live > a->peak)
        a->peak = a->live;
    if (!a->dev || a->failed)
        return NULL;
    assert(a->n_blocks > 0);
    if (a->blocks[a->block].n_floats - a->used < n && !advance(a, n)) {
        a->failed = true;
        return NULL;
    }
    float *p = a->blocks[a->block].base + a->used;
    a->used += n;
    return p;
}

struct activations_mark activations_mark(const struct activations *a)
{
    return (struct activations_mark){ a->block, a->used, a->live };
}

void activations_release(struct activations *a, struct activations_mark mark)
{
    assert(mark.live <= a->live);
    a->block = mark.block;
    a->used = mark.used;
    a->live = mark.live;
}

int activations_check(const struct activations *a, struct err *err)
{
    if (!a->failed)
        return 0;
    return err_set(err, -ENOMEM, "the device has no more memory: this step's activations need at "
                   "least %zu bytes, %zu are taken; lower micro_batch or use "
                   "activation_checkpointing: full", a->peak * sizeof(float),
                   activations_bytes(a));
}

size_t activations_bytes(const struct activations *a)
{
    size_t n = 0;
    for (uint32_t i = 0; i < a->n_blocks; i++)
        n += a->blocks[i].n_floats;
    return n * sizeof(float);
}
