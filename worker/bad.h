/* bad.h - a step whose loss or gradient is not a number: where that began */
#ifndef WORKER_BAD_H
#define WORKER_BAD_H

#include "worker/run.h"

/* What this rank saw; the first of all ranks is what counts (boundary.h). */
struct bad {
    int64_t output; /* the first that is not finite: 0 the embedding's, 1 + l of layer l, 1 +
                     * n_layers the loss; -1: none, computed once more */
    int64_t tensor; /* the entry of the map that the backward met first with such a gradient; -1 */
};

#define BAD_NOTHING ((struct bad){-1, -1})

/* The forwards of micro-batches 0 .. n - 1 of the step once more, and a look at the gradients.
 * Collective. */
int bad_find(struct run *run, uint64_t n_micro, struct bad *out, struct err *err);

/* "the output of layer 3 (mla+moe)"; lives until the next call with the same buffer. */
#define BAD_TEXT_BYTES 320
const char *bad_text(const struct run *run, const struct bad *bad, char out_text[BAD_TEXT_BYTES]);

#endif
