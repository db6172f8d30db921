/* gang.h - what the ranks of an attempt on several machines have told of themselves
 *
 * It arrives once. The channel's thread keeps it, the training one waits for it. */
#ifndef WORKER_GANG_H
#define WORKER_GANG_H

#include <pthread.h>
#include <stdatomic.h>

#include "common/err.h"
#include "proto/ballast.pb-c.h"

struct gang {
    pthread_mutex_t lock;
    pthread_cond_t  changed;
    Ballast__Peers *all; /* NULL: it has not come */
};

void gang_init(struct gang *g);
void gang_fini(struct gang *g);

/* Keeps a copy of the first; by any thread. */
void gang_arrive(struct gang *g, const Ballast__Peers *message);

/* Waits for it; it lives until gang_fini. -ETIMEDOUT, or -ECANCELED once cancelled is true. */
int gang_wait(struct gang *g, const atomic_bool *cancelled, uint64_t timeout_ns,
               const Ballast__Peers **out_all, struct err *err);

#endif
