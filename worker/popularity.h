/* popularity.h - how popular each expert is: what virtual workers route their tokens by
 *
 * From a file of recorded loads, whose windows come round again after the last one, or made up: the
 * logarithm of an expert's share is normal, so that a few experts are hot and many cold, and each
 * wanders slowly by a wave of its own, so that a placement that fits ceases to. */
#ifndef WORKER_POPULARITY_H
#define WORKER_POPULARITY_H

#include "common/loads.h"

struct popularity {
    uint64_t     seed;
    const char  *path;  /* NULL: made up; kept from init */
    struct loads loads; /* of that file */
};

int  popularity_init(struct popularity *p, const char *path, uint64_t seed, struct err *err);
void popularity_fini(struct popularity *p);

/* -EINVAL where the file has another number of experts. */
int  popularity_check(const struct popularity *p, uint32_t n_experts, struct err *err);

/* What part of a layer's rows goes to each expert in the window of steps that begins after `step`:
 * (n_experts), not negative, sums to 1. nth: which of the layers with experts it is, from 0; a file
 * that has other layers than that gives its own in turn. n_steps: of a window. */
void popularity_shares(const struct popularity *p, uint32_t layer, uint32_t nth, uint64_t step,
                       uint32_t n_steps, uint32_t n_experts, double *out);

#endif
