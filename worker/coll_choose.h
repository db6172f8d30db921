/* coll_choose.h - how the tensors of a job travel: through NCCL, or through host memory */
#ifndef WORKER_COLL_CHOOSE_H
#define WORKER_COLL_CHOOSE_H

#include "common/layout.h"
#include "worker/coll.h"

/* What a worker's configuration says. */
enum coll_wish { COLL_WISH_AUTO, COLL_WISH_HOST, COLL_WISH_NCCL };

/* NULL and "": auto. -EINVAL */
int coll_wish_parse(const char *word, enum coll_wish *out_wish, struct err *err);

#define COLL_SAID_BYTES 96

/* Once the ranks have met in host and each has opened its device: through NCCL where every rank
 * has a GPU of its own and there are several; through the host where ranks share a GPU or compute
 * on the cpu, and where one of them wishes it. A wish for NCCL that cannot be is -EINVAL, on all
 * ranks alike. Collective. *io_coll is what coll_host_open gave and becomes what tensors travel
 * through; it stays what the caller closes. out_said: which it is and why, as in "host memory,
 * ranks 0 and 1 share a GPU". */
int coll_choose(struct coll **io_coll, struct device *dev, enum coll_wish wish,
                const struct layout *layout, char out_said[COLL_SAID_BYTES], struct err *err);

#endif
