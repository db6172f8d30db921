/* activations.c - a stack of tensors in a few device blocks */
#include "worker/activations.h"

#include <assert.h>
#include <errno.h>

#define ALIGN_BYTES  64u
#define GROWTH_BYTES ((size_t)1 << 20) /* the least that an extra block holds */

void activations_init(struct activations *a, struct device *dev, bool is_counting)
{
    *a = (struct activations){ .dev = dev, .is_counting = is_counting };
}

void activations_fini(struct activations *a)
{
    for (uint32_t i = 0; i < a->n_blocks; i++)
        a->dev->ops->free(a->dev, a->blocks[i].base);
    *a = (struct activations){0};
}

static bool add_block(struct activations *a, size_t n_bytes)
{
    if (a->n_blocks == ACTIVATION_BLOCKS_MAX)
        return false;
    char *base = a->dev->ops->alloc(a->dev, n_bytes);
    if (!base)
        return false;
    a->blocks[a->n_blocks].base = base;
    a->blocks[a->n_blocks++].n_bytes = n_bytes;
    return true;
}

int activations_reserve(struct activations *a, size_t n_bytes, struct err *err)
{
    assert(a->n_blocks == 0);
    if (!add_block(a, n_bytes ? n_bytes : ALIGN_BYTES))
        return err_set(err, -ENOMEM, "the device has no %zu bytes for activations; lower "
                       "micro_batch or use activation_checkpointing: full", n_bytes);
    return 0;
}

/* Moves on to a later block that holds n bytes, taking a new one from the device at need. */
static bool advance(struct activations *a, size_t n)
{
    for (uint32_t i = a->block + 1; i < a->n_blocks; i++) {
        if (a->blocks[i].n_bytes >= n) {
            a->block = i;
            a->used = 0;
            return true;
        }
    }
    if (!add_block(a, n > GROWTH_BYTES ? n : GROWTH_BYTES))
        return false;
    a->block = a->n_blocks - 1;
    a->used = 0;
    return true;
}

static void *take(struct activations *a, int64_t count, size_t size)
{
    assert(count >= 0);
    size_t n = ((size_t)count * size + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;

    a->live += n;
    if (a->live > a->peak)
        a->peak = a->live;
    if (a->is_counting || a->failed)
        return NULL;
    assert(a->n_blocks > 0);
    if (a->blocks[a->block].n_bytes - a->used < n && !advance(a, n)) {
        a->failed = true;
        return NULL;
    }
    void *p = a->blocks[a->block].base + a->used;
    a->used += n;
    return p;
}

elem *activations_take(struct activations *a, int64_t n)
{
    return take(a, n, elem_size(a->dev));
}

float *activations_take_f32(struct activations *a, int64_t n)
{
    return take(a, n, sizeof(float));
}

int32_t *activations_take_i32(struct activations *a, int64_t n)
{
    return take(a, n, sizeof(int32_t));
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
                   "activation_checkpointing: full", a->peak, activations_bytes(a));
}

size_t activations_bytes(const struct activations *a)
{
    size_t n = 0;
    for (uint32_t i = 0; i < a->n_blocks; i++)
        n += a->blocks[i].n_bytes;
    return n;
}
