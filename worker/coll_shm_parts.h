/* coll_shm_parts.h - what the coll_shm*.c files share
 *
 * coll_shm lays the memory out, coll_shm_wait waits in it, coll_shm_end ends what will never be
 * over. */
#ifndef WORKER_COLL_SHM_PARTS_H
#define WORKER_COLL_SHM_PARTS_H

#include <sched.h>

#include "common/types.h"
#include "worker/coll_shm.h"

#define LOOK_AROUND_NS (100 * NS_PER_MS) /* between looks at sockets and deadline while asleep */

enum abort_phase { ABORT_NONE, ABORT_WRITING, ABORT_SAID };

/* At the start of the memory. */
struct shm_header {
    _Atomic uint32_t abort_phase;
    _Atomic uint32_t n_gone; /* ranks of other hosts */
    char abort_text[512];
    _Atomic uint64_t cores[CPU_SETSIZE / 64]; /* a bit for each that some rank may use */
};

static inline struct shm_header *shm_header_of(const struct shm *s)
{
    return (struct shm_header *)s->base;
}

/* Wakes all that sleep for c; whoever goes to sleep meanwhile looks again before long. */
void shm_wake(struct shm_count *c);

#endif
