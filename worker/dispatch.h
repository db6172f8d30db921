/* dispatch.h - tokens travel to the ranks that serve their experts, and back
 *
 * A token's row travels once to each rank that serves one of its choices, however many it serves,
 * and is laid out there once for each of them; the gradient of what came back travels the same way
 * and is multiplied with the choice's weight where it is laid out, which gives the bits that it
 * would have at its source. What comes back is one row per (token, choice), of outputs and of
 * gradients alike, which the source sums in the router's order: ranks add nothing up on the way, so
 * it changes no bit who serves an expert.
 *
 * Hierarchical: a row crosses to another node once, to one rank there, which passes it on inside.
 * Who passes on what for whom follows from the layout alone: the rank of a node at the source's
 * place within its own node, modulo the node's ranks. Rows arrive as they do otherwise, so results
 * have the same bits. What comes back has been asked for by its source and comes straight.
 *
 * Tokens go in chunks, as many on all ranks and each by itself: while the experts compute one, the
 * next travels, and the results of the one before. Where an expert has copies, each source divides
 * a chunk's rows over them as shares.h says; in deterministic mode a source's rows for an expert
 * stay together. At the expert side a chunk's rows are ordered by (local slot, source rank, source
 * row), so the order is the same in every run. With one rank it is a permutation.
 *
 * Rows are elements. They and the ids lie in the device's memory, where they are also permuted; of
 * a plan only counts come to the host: of choices, then of rows. Those are the two times that it
 * waits for the device. */
#ifndef WORKER_DISPATCH_H
#define WORKER_DISPATCH_H

#include "common/layout.h"
#include "common/memory_model.h"
#include "kernels/device.h"
#include "worker/coll.h"
#include "worker/slots.h"

#define DISPATCH_CHUNKS_MAX MEMORY_CHUNKS_MAX

struct dispatch; /* buffers of one rank, reused by all layers */
struct dispatch_plan; /* where the rows of one layer and micro-batch go */

struct dispatch_config { /* pointers are kept until dispatch_close, unless said */
    const struct layout *layout;
    const struct slots  *slots; /* a change of its maps is seen by the next plan */
    struct coll   *coll;
    struct device *dev;
    uint32_t top_k, width;
    const uint32_t *nodes; /* of the expert group's ranks, copied; NULL: all are on one */
    bool hierarchical;     /* where they are on several */
    uint32_t n_chunks;     /* the same on all ranks; 0: dispatch_limit chooses */
};

struct dispatch *dispatch_open(const struct dispatch_config *config);
void dispatch_close(struct dispatch *d);

/* From now on no plan brings more than rows_max rows to a rank, nor a chunk more than a part of
 * them, and buffers for that and for tokens_max tokens of this rank are taken at once, if they are
 * needed. The same on all ranks. No limit of rows in deterministic mode, where sums of gradients
 * must not depend on who serves an expert. -ENOMEM. */
int dispatch_limit(struct dispatch *d, int64_t tokens_max, int64_t rows_max, struct err *err);

/* How many tokens of each rank can be sent at once, however they are routed; and in how many parts
 * the ranks then send theirs, those with fewer tokens too. */
int64_t dispatch_safe_tokens(const struct dispatch *d);
int64_t dispatch_n_parts(const struct dispatch *d);

/* Of the device's and of shared memory, now. */
size_t dispatch_bytes(const struct dispatch *d);

/* Rows of `width` elements that left this rank since it was opened: of tokens and gradients, also
 * those passed on for others, and of what came back; of each, those that left the node. */
struct dispatch_traffic {
    uint64_t sent, sent_between, returned, returned_between;
};
struct dispatch_traffic dispatch_traffic(const struct dispatch *d);

/* ---- plans -------------------------------------------------------------------------------- */

/* Exchanges the counts of a sparse layer. expert_ids and weights: (n_tokens, top_k) on the device;
 * an id of -1: that choice goes nowhere. Gives a plan, ended with dispatch_plan_destroy, which
 * keeps its memory for the next one; NULL, on all ranks of the group, where some rank would get
 * more rows than the limit: plan fewer tokens at once then. Collective over the expert group.
 * -ENOMEM. */
int  dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                          const float *weights, int64_t n_tokens, struct dispatch_plan **out_plan,
                          struct err *err);
/* The same for a part of the tokens, at most dispatch_safe_tokens, in one chunk; never NULL. */
int  dispatch_plan_part(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                        const float *weights, int64_t n_tokens, struct dispatch_plan **out_plan,
                        struct err *err);
void dispatch_plan_destroy(struct dispatch_plan *p);

uint32_t dispatch_plan_chunks(const struct dispatch_plan *p);
int64_t  dispatch_plan_rows(const struct dispatch_plan *p); /* that arrive here, of all chunks */

struct dispatch_chunk { /* lives until the plan's end */
    int64_t first_token, n_tokens; /* of this rank's */
    int64_t first_row, n_rows;     /* of those that arrive here */
    /* Where each local slot's begin, from 0: n_slots + 1; and those of each source, by (slot,
     * source): n_slots * devices + 1. */
    const int64_t *offsets, *blocks;
    /* (n_copied, devices): the slot that serves a source's rows for each copied expert, -1 where
     * it has none. Deterministic mode only. */
    const int32_t *servers;
};
struct dispatch_chunk dispatch_chunk_of(const struct dispatch_plan *p, uint32_t chunk);

/* ---- rows --------------------------------------------------------------------------------- */

/* All but those that say so are collective over the expert group. One chunk is on its way to the
 * experts at a time, and one back: what was started is finished before the next one is started.
 *
 * x (n_tokens, width), of all chunks, kept until finish. */
int dispatch_send_start(struct dispatch_plan *p, uint32_t chunk, const_elem_ptr x,
                        struct err *err);
/* At any time between start and finish, and at the latest there: what arrived here for others of
 * the node goes on. */
int dispatch_send_pass_on(struct dispatch_plan *p, uint32_t chunk, struct err *err);
/* out_rows (the chunk's rows, width): each token's row once per slot, times the choice's weight
 * where weighed. */
int dispatch_send_finish(struct dispatch_plan *p, uint32_t chunk, bool weighed, elem_ptr out_rows,
                         struct err *err);

/* rows (the chunk's rows, width); free again afterwards, but with one rank kept until finish. */
int dispatch_return_start(struct dispatch_plan *p, uint32_t chunk, const_elem_ptr rows,
                          struct err *err);
/* out_slots (n_tokens * top_k, width), of all chunks, of which this one's are written; zeros for
 * what went nowhere. */
int dispatch_return_finish(struct dispatch_plan *p, uint32_t chunk, elem_ptr out_slots,
                           struct err *err);

#endif
