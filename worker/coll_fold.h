/* coll_fold.h - many arrays become one, element by element, in the order in which they are given */
#ifndef WORKER_COLL_FOLD_H
#define WORKER_COLL_FOLD_H

#include "worker/coll.h"

struct fold {
    size_t width;     /* bytes of an element */
    size_t sum_width; /* of what it is summed in */
    /* n elements from byte at on of each of in are added to sum, which begins with them or holds
     * those before. It has n of sum_width, and is stored in the end. */
    void (*add)(void *sum, bool begins, const uint8_t *const *in, uint32_t n_in, size_t at,
                size_t n);
    void (*store)(void *x, const void *sum, size_t n);
};

const struct fold *fold_of(enum elem_type type, enum coll_op op);
const struct fold *fold_of_f64(enum coll_op op);

/* n elements from byte at on of each of in, into all of out; these may be the same elements. */
void fold_run(const struct fold *f, const uint8_t *const *in, uint32_t n_in, size_t at, size_t n,
              uint8_t *const *out, uint32_t n_out);

#endif
