/* dispatch.h - tokens travel to the ranks that serve their experts, and back
 *
 * One row per (token, slot of its top-k). Where an expert has copies, each source divides its rows
 * over them as shares.h says; in deterministic mode a source's rows for an expert stay together.
 * At the expert side rows are ordered by (local slot, source rank, source row), so the order is
 * the same in every run. What comes back is one row per (token, slot); the source sums them in the
 * router's order. With one rank it is a permutation.
 *
 * Rows are elements. They and the ids lie in the device's memory, where they are also permuted; of
 * a plan only counts come to the host, which is the one time that it waits for the device. */
#ifndef WORKER_DISPATCH_H
#define WORKER_DISPATCH_H

#include "common/layout.h"
#include "kernels/device.h"
#include "worker/coll.h"
#include "worker/slots.h"

struct dispatch; /* buffers of one rank, reused by all layers */
struct dispatch_plan; /* where the rows of one layer and micro-batch go */

/* All are kept until dispatch_close; a change of slots (of its maps) is seen by the next plan. */
struct dispatch *dispatch_open(const struct layout *layout, const struct slots *slots,
                               struct coll *coll, struct device *dev, uint32_t top_k,
                               uint32_t width);
void dispatch_close(struct dispatch *d);

/* From now on no plan brings more than rows_max rows to a rank, and buffers for that and for
 * tokens_max tokens of this rank are taken at once, if they are needed. The same on all ranks. Not
 * in deterministic mode, where sums of gradients must not depend on who serves an expert.
 * -ENOMEM. */
int dispatch_limit(struct dispatch *d, int64_t tokens_max, int64_t rows_max, struct err *err);

/* How many tokens of each rank can be sent at once, however they are routed; and in how many parts
 * the ranks then send theirs, those with fewer tokens too. */
int64_t dispatch_safe_tokens(const struct dispatch *d);
int64_t dispatch_n_parts(const struct dispatch *d);

/* Of the device's and of shared memory, now. */
size_t dispatch_bytes(const struct dispatch *d);

/* Exchanges the counts of a sparse layer. expert_ids: (n_tokens, top_k) on the device; -1: that
 * choice goes nowhere. Gives a plan, ended with dispatch_plan_destroy, which keeps its memory for
 * the next one; NULL, on all ranks of the group, where some rank would get more rows than the
 * limit: plan fewer tokens at once then. Collective over the expert group. -ENOMEM. */
int  dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                          int64_t n_tokens, struct dispatch_plan **out_plan, struct err *err);
/* The same for a part of the tokens, at most dispatch_safe_tokens; never NULL. */
int  dispatch_plan_part(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                        int64_t n_tokens, struct dispatch_plan **out_plan, struct err *err);
void dispatch_plan_destroy(struct dispatch_plan *p);

/* Rows that arrive here, and where each local slot's begin: n_slots + 1 numbers. */
int64_t        dispatch_plan_rows(const struct dispatch_plan *p);
const int64_t *dispatch_plan_offsets(const struct dispatch_plan *p);
/* Where the rows of one source begin in a slot: n_slots * devices + 1 numbers, by (slot,
 * source). */
const int64_t *dispatch_plan_blocks(const struct dispatch_plan *p);
/* (n_copied, devices): the slot that serves a source's rows for each copied expert, -1 where it
 * has none. Deterministic mode only. */
const int32_t *dispatch_plan_servers(const struct dispatch_plan *p);

/* All three are collective over the expert group.
 * x (n_tokens, width) -> out_rows (plan rows, width): each token's row once per slot. */
int dispatch_send_tokens(struct dispatch_plan *p, const_elem_ptr x, elem_ptr out_rows,
                         struct err *err);
/* rows (plan rows, width) -> out_slots (n_tokens * top_k, width); zeros for what went nowhere. */
int dispatch_return(struct dispatch_plan *p, const_elem_ptr rows, elem_ptr out_slots,
                    struct err *err);
/* slots (n_tokens * top_k, width) -> out_rows (plan rows, width): the backward of return. */
int dispatch_send_slots(struct dispatch_plan *p, const_elem_ptr slots, elem_ptr out_rows,
                        struct err *err);

#endif
