/* stack.h - everything one rank computes with, opened in order; and ranks as threads
 *
 * For validation and tests, which run all ranks of a layout in one process over the host
 * collective. Each rank opens the device for itself, with one thread. */
#ifndef WORKER_STACK_H
#define WORKER_STACK_H

#include "common/layout.h"
#include "common/tensor_map.h"
#include "worker/coll.h"
#include "worker/model.h"

struct stack_config { /* borrowed while the ranks run */
    const struct model_spec *spec;
    const struct tensor_map *map;
    const struct lora_config *lora; /* NULL: the map has no adapters */
    struct layout_degrees degrees;
    const char *device; /* of all ranks; NULL: cpu */
    enum elem_type elem;
    uint32_t n_spare;   /* empty slots on each rank */
    uint32_t n_nodes;   /* that the ranks are on, in a row, as evenly as it goes; 0: one */
    bool hierarchical;  /* as in dispatch.h */
    uint32_t n_chunks;  /* of dispatch; 0: as it chooses */
    int64_t tokens_max; /* per rank */
    enum recompute recompute;
    int64_t segment_rows; /* as in model.h */
    bool deterministic, count_margins;
    bool is_blocking; /* as parallel.overlap: false */
    enum index_stage index_stage;
    bool index_joint;
    struct moe_rules rules;
};

struct stack {
    const struct stack_config *config;
    uint32_t rank;
    struct layout layout;
    struct slots slots;
    struct coll *coll;
    struct device *dev;
    struct shard *shard;
    struct dispatch *dispatch;
    struct model *model;
};

/* What a rank does; the first failure aborts all others. */
typedef int (*stack_fn)(struct stack *s, void *arg, struct err *err);

/* Opens degrees.world ranks, one thread each, calls run on each and closes them. The error of the
 * rank that failed first by itself. */
int stack_run(const struct stack_config *config, stack_fn run, void *arg, struct err *err);

#endif
