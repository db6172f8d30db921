/* base_hash.h - one number for a folder of weights, so that adapters never meet another base */
#ifndef WORKER_BASE_HASH_H
#define WORKER_BASE_HASH_H

#include <stdint.h>

#include "worker/coll.h"

/* Of config.json and of every tensor: name, type, shape and bytes, in whatever files they lie. Each
 * rank reads its share of the tensors. Collective. */
int base_hash(const char *model_path, struct coll *coll, uint64_t *out, struct err *err);

/* The same by one process. */
int base_hash_alone(const char *model_path, uint64_t *out, struct err *err);

#endif
