/* coll_nccl.h - NCCL's communicators of one rank
 *
 * Private to coll_gpu. Launches are on a stream of their own, behind the ops that the device was
 * given before, and return once they are in it; ops that are given later wait for one by
 * nccl_finish. A launch carries the note of its call (call_note), which is marked as left when the
 * device is done. They fail with -ECANCELED and the reason when any rank has aborted, died, or met
 * an error of NCCL. */
#ifndef WORKER_COLL_NCCL_H
#define WORKER_COLL_NCCL_H

#include "worker/coll_call.h"

struct nccl;

/* Over the ranks of host, which is kept until close, and aborted on failure. Collective. */
int  nccl_open(struct host *host, struct device *dev, const struct coll_group *groups,
               uint32_t n_groups, struct nccl **out, struct err *err);
/* Whoever still waits in it is aborted. */
void nccl_close(struct nccl *x);

struct nccl_blocks {
    const uint8_t *in;
    uint8_t *out;
    size_t n, n_blocks, in_stride, out_stride; /* bytes from one block to the next */
    enum elem_type type;
    enum coll_op op; /* of reduce, which takes one block; scatter sums */
};

/* Launches are numbered from 1; 0: there was nothing to launch. */
int nccl_gather(struct nccl *x, const struct coll_group *g, const struct nccl_blocks *blocks,
                uint32_t note, uint32_t *out_launch, struct err *err);
int nccl_scatter(struct nccl *x, const struct coll_group *g, const struct nccl_blocks *blocks,
                 uint32_t note, uint32_t *out_launch, struct err *err);
int nccl_reduce(struct nccl *x, const struct coll_group *g, const struct nccl_blocks *block,
                uint32_t note, uint32_t *out_launch, struct err *err);

/* Bytes to and from one member; the own ones are copied. */
struct nccl_part {
    const void *send;
    void *recv;
    size_t n_send, n_recv;
};

/* parts: one for each member. */
int nccl_exchange(struct nccl *x, const struct coll_group *g, const struct nccl_part *parts,
                  uint32_t note, uint32_t *out_launch, struct err *err);

/* The device's next ops wait for the launch. */
void nccl_finish(struct nccl *x, uint32_t launch);

/* Tells the communicators of memory that tensors will travel from and to; and, before it is freed
 * and after all that uses it is finished, that it goes. Of what they were not told: nothing. */
void nccl_know(struct nccl *x, void *p, size_t n_bytes);
void nccl_forget(struct nccl *x, const void *p);
/* All of it, once the devices of all ranks are done. What is left at the close, as after an abort,
 * goes with the communicators. */
void nccl_forget_all(struct nccl *x);

#endif
