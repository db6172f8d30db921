/* nccl_plain.h - NCCL called as its manual says, to compare with
 *
 * Only in builds with GPU code. A failure ends the process with one line. */
#ifndef TESTS_NCCL_PLAIN_H
#define TESTS_NCCL_PLAIN_H

#include "worker/coll.h"

enum plain_op { PLAIN_ALL_GATHER, PLAIN_REDUCE_SCATTER, PLAIN_ALL_REDUCE, PLAIN_ALL_TO_ALL,
                PLAIN_MOVE };

struct plain;

/* A communicator of its own among host's ranks, on dev's stream; host carries the id. */
struct plain *plain_open(struct coll *host, struct device *dev);
void plain_close(struct plain *p);

/* n float32 of each rank: gathered, the size of a scattered part, reduced, sent to each rank, or
 * sent to the next rank alone. Returns once it is in the stream. */
void plain_call(struct plain *p, enum plain_op op, const float *in, float *out, size_t n);

#endif
