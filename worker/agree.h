/* agree.h - a failure on one rank becomes the same failure on all */
#ifndef WORKER_AGREE_H
#define WORKER_AGREE_H

#include "worker/coll.h"

/* rc and err as this rank has them. Returns 0 if all ranks have 0, else the code of the lowest
 * rank that failed, with its text in err, on all of them. Collective over the world. */
int agree(struct coll *c, int rc, struct err *err);

#endif
