/* boundary.h - the word on which all ranks agree at the end of every step
 *
 * Whatever must happen at one step on all ranks rides on it: a new placement, changed settings, a
 * stop with its checkpoint; and numbers of which the largest counts. What it grants is done in this
 * order: optimizer (before the word), settings, migration, checkpoint, stop. */
#ifndef WORKER_BOUNDARY_H
#define WORKER_BOUNDARY_H

#include "worker/bad.h"

struct boundary_word {
    enum run_wish wish;    /* the strongest of all ranks is granted */
    uint32_t epoch;        /* of the plan that this rank is ready for; granted, if all are ready for
                            * the same; 0: none */
    uint32_t ahead;        /* of the plan of which this rank has all that may go ahead; granted, if
                            * all have; 0: none */
    uint32_t settings;     /* the newest revision that this rank has; granted, if all have the
                            * same; 0: none */
    uint64_t memory_bytes; /* the largest */
    double   busy_s;       /* of this rank; granted: the largest */
    double   least_busy_s; /* granted: the smallest */
    uint32_t busiest;      /* granted: whose the largest is */
    struct bad bad;        /* the first output of the forward, the first tensor of the backward */
};

/* Collective over the world. */
int boundary_agree(struct run *run, const struct boundary_word *mine, struct boundary_word *out,
                   struct err *err);

#endif
