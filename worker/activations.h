/* activations.h - the memory plan of a step: one stack on the device
 *
 * A step carves what it keeps for its backward from the stack and gives it back in reverse order.
 * The same carving code runs once without memory to find how much a step needs, so plan and use
 * cannot differ. What no plan can know, how many rows the router sends here, may exceed it; then
 * another block is taken and stays. Sizes are bytes where not said. */
#ifndef WORKER_ACTIVATIONS_H
#define WORKER_ACTIVATIONS_H

#include "kernels/device.h"

#define ACTIVATION_BLOCKS_MAX 64

struct activations {
    struct device *dev;
    bool   is_counting;       /* no memory is taken */
    struct { char *base; size_t n_bytes; } blocks[ACTIVATION_BLOCKS_MAX];
    uint32_t n_blocks, block; /* block: the one that is carved now */
    size_t used;              /* of it */
    size_t live, peak;        /* over all, now and at most since init */
    bool   failed;            /* the device had no more since init */
};

struct activations_mark {
    uint32_t block;
    size_t   used, live;
};

/* is_counting: only sizes are wanted. */
void activations_init(struct activations *a, struct device *dev, bool is_counting);
void activations_fini(struct activations *a);

/* Takes the first block. -ENOMEM with the bytes. */
int activations_reserve(struct activations *a, size_t n_bytes, struct err *err);

/* n elements, float32 or words: 64-byte aligned, contents undefined; live until a release to an
 * earlier mark. NULL while counting or when the device has no more: see activations_check. */
elem    *activations_take(struct activations *a, int64_t n);
float   *activations_take_f32(struct activations *a, int64_t n);
int32_t *activations_take_i32(struct activations *a, int64_t n);

struct activations_mark activations_mark(const struct activations *a);
void activations_release(struct activations *a, struct activations_mark mark);

/* -ENOMEM with the bytes if any take since init has failed. */
int activations_check(const struct activations *a, struct err *err);

size_t activations_bytes(const struct activations *a);

#endif
