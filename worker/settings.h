/* settings.h - changed settings of the job on one rank: they arrive, and are taken at a boundary
 *
 * What arrives is only kept; the training thread looks at it just before the boundary word. The
 * revision only grows, so a message may be lost, repeated or late. */
#ifndef WORKER_SETTINGS_H
#define WORKER_SETTINGS_H

#include <pthread.h>

#include "common/types.h"
#include "proto/ballast.pb-c.h"

struct settings {
    pthread_mutex_t  lock;
    uint32_t         arrived_revision; /* 0: none */
    Ballast__JobSpec arrived;          /* only what may change is set */
    uint32_t         revision;         /* of the training thread: the newest it has looked at */
    Ballast__JobSpec spec;
};

void settings_init(struct settings *s);
void settings_fini(struct settings *s);

/* Keeps a newer revision; by any thread. */
void settings_arrive(struct settings *s, const Ballast__Settings *message);

/* Looks at what has arrived; gives the newest revision, 0 if none has. */
uint32_t settings_look(struct settings *s);

/* What settings_look found, into spec. */
void settings_take(const struct settings *s, Ballast__JobSpec *spec);

#endif
