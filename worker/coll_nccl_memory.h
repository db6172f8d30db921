/* coll_nccl_memory.h - memory that NCCL's communicators are told of
 *
 * Private to coll_nccl. From memory that a communicator knows its kernels may read and write
 * without a copy of theirs between. It must know it no longer before it is freed, and while it
 * still lives itself: an aborted one takes what it knew with it. NCCL has this since 2.19; without
 * it, and where it refuses, everything works as it would have. */
#ifndef WORKER_COLL_NCCL_MEMORY_H
#define WORKER_COLL_NCCL_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include <nccl.h>

#include "worker/coll.h"

struct nccl_known {
    void *p;
    void *handles[COLL_GROUPS_MAX]; /* of each communicator; NULL: it was not told */
};

struct nccl_memory { /* all zero: none */
    struct nccl_known *known;
    size_t n_known;
    bool   is_refused; /* it was said that there is none */
};

/* comms (COLL_GROUPS_MAX), NULL where there is none, are the same in all calls. */
void nccl_memory_add(struct nccl_memory *m, const ncclComm_t *comms, void *p, size_t n_bytes);
/* Nothing that was given to a communicator may still use it. Of another p: nothing. */
void nccl_memory_drop(struct nccl_memory *m, const ncclComm_t *comms, const void *p);
void nccl_memory_drop_all(struct nccl_memory *m, const ncclComm_t *comms);
/* The communicators have been aborted. */
void nccl_memory_forget(struct nccl_memory *m);

#endif
