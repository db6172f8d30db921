/* coll_stage.h - the same operations over memory of a device that the host cannot reach
 *
 * Private to coll_host; called where host_reaches_tensors says no. Arguments are as in coll.h. */
#ifndef WORKER_COLL_STAGE_H
#define WORKER_COLL_STAGE_H

#include "worker/coll_call.h"

/* Takes the stage; before anything else takes memory that travels. */
int  stage_init(struct host *h, size_t n_bytes, struct err *err);
void stage_fini(struct host *h);

int stage_all_gather(struct host *h, const struct coll_group *g, enum elem_type type,
                     const void *in, size_t n, size_t n_blocks, void *out, struct err *err);
int stage_reduce_scatter(struct host *h, const struct coll_group *g, enum elem_type type,
                         const void *in, size_t n, size_t n_blocks, void *out, struct err *err);
int stage_all_reduce(struct host *h, const struct coll_group *g, enum coll_op op,
                     enum elem_type type, void *x, size_t n, struct err *err);
int stage_all_to_all_rows(struct host *h, const struct coll_group *g, const void *send,
                          const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                          size_t row_bytes, struct err *err);

#endif
