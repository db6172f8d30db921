/* replicas.h - whether ranks that hold the same weights hold the same bits
 *
 * Replicas compute the same update from the same sums, so their bits never part; where they do, a
 * memory or a transfer was at fault. Compared are, of every dense unit and every layer's experts at
 * home, what is read in a step and the master weights behind it, and the routers' biases. */
#ifndef WORKER_REPLICAS_H
#define WORKER_REPLICAS_H

#include "worker/shard.h"

/* Hashes them all and compares. The same result on all ranks: -EIO names the ranks that differ from
 * most of their replicas, and the unit. Collective over the world. */
int replicas_check(struct shard *s, struct err *err);

#endif
