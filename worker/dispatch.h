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
 * Tokens go in chunks, as many on all ranks, and a chunk in one piece, or, where more of its rows
 * would meet on one rank than that takes at once, in several: each source then cuts the rows that
 * it has for a slot evenly, in their order. All ranks know all counts, so all cut into as many, and
 * a piece brings no rank more rows than were planned for, however tokens are routed. Pieces travel
 * by themselves: while the experts compute one, the next is on its way, and the results of the one
 * before. A token whose choices fall into several pieces of a chunk goes with each of them.
 *
 * Where an expert has copies, each source divides a chunk's rows over them as shares.h says; in
 * deterministic mode a source's rows for an expert stay together, and in how many pieces they go
 * does not depend on who serves them. At the expert side a piece's rows are ordered by (local slot,
 * source rank, source row), so the order is the same in every run. With one rank it is a
 * permutation.
 *
 * Rows are elements. They and the ids lie in the device's memory, where they are also permuted; of
 * a plan only counts come to the host: of choices, then of rows. Those are the two times that it
 * waits for the device. What ranks tell each other of rows they tell of as many pieces at once as
 * there is room for. */
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
    uint32_t n_chunks;     /* of tokens, the same on all ranks; 0: dispatch_limit chooses */
    uint64_t chunk_tokens; /* if so: the fewest of a chunk, see memory_chunk_tokens */
};

struct dispatch *dispatch_open(const struct dispatch_config *config);
void dispatch_close(struct dispatch *d);

/* From now on a piece brings a rank no more rows than memory_piece_rows makes of rows_max, which is
 * how many are told of at once; buffers for that and for tokens_max tokens of this rank are taken
 * now, if they are needed. The same on all ranks. A batch of more tokens goes in more pieces.
 * -ENOMEM. */
int dispatch_limit(struct dispatch *d, int64_t tokens_max, int64_t rows_max, struct err *err);

int64_t dispatch_piece_rows(const struct dispatch *d);

/* Of the device's and of shared memory, now. */
size_t dispatch_bytes(const struct dispatch *d);

/* Rows of `width` elements that left this rank since it was opened: of tokens and gradients, also
 * those passed on for others, and of what came back; of each, those that left the node. */
struct dispatch_traffic {
    uint64_t sent, sent_between, returned, returned_between;
};
struct dispatch_traffic dispatch_traffic(const struct dispatch *d);

/* ---- plans -------------------------------------------------------------------------------- */

/* Exchanges the counts of a sparse layer. expert_ids and weights: (n_tokens, top_k) on the device,
 * the weights kept; an id of -1: that choice goes nowhere. Gives a plan, ended with
 * dispatch_plan_destroy, which keeps its memory for the next one. Collective over the expert group.
 * -ENOMEM. */
int  dispatch_plan_create(struct dispatch *d, uint32_t layer, const int32_t *expert_ids,
                          const float *weights, int64_t n_tokens, struct dispatch_plan **out_plan,
                          struct err *err);
void dispatch_plan_destroy(struct dispatch_plan *p);

uint32_t dispatch_plan_pieces(const struct dispatch_plan *p);
int64_t  dispatch_plan_rows(const struct dispatch_plan *p); /* that arrive here, of all pieces */
/* Whether of all pieces no rank gets more than n rows; the same on all ranks. */
bool dispatch_plan_is_within(const struct dispatch_plan *p, int64_t n);
/* Whether its pieces can be sent again, also from the first one on: of a plan with more rows than
 * are told of at once, until the next one is made. The same on all ranks. */
bool dispatch_plan_is_whole(const struct dispatch_plan *p);

struct dispatch_piece { /* lives until the plan's end */
    int64_t first_token, n_tokens; /* of this rank's, of the chunk */
    int64_t first_row, n_rows;     /* of those that arrive here */
    /* Where each local slot's begin, from 0: n_slots + 1; and those of each source, by (slot,
     * source): n_slots * devices + 1. */
    const int64_t *offsets, *blocks;
    /* (n_copied, devices): the slot that serves a source's rows for each copied expert, -1 where
     * it has none. Deterministic mode only. */
    const int32_t *servers;
};
struct dispatch_piece dispatch_piece_of(const struct dispatch_plan *p, uint32_t piece);

/* ---- rows --------------------------------------------------------------------------------- */

/* All but those that say so are collective over the expert group. One piece is on its way to the
 * experts at a time, and one back: what was started is finished before the next one is started.
 * They return in their order.
 *
 * x (n_tokens, width), of all pieces, kept until finish. */
int dispatch_send_start(struct dispatch_plan *p, uint32_t piece, const_elem_ptr x,
                        struct err *err);
/* At any time between start and finish, and at the latest there: what arrived here for others of
 * the node goes on. */
int dispatch_send_pass_on(struct dispatch_plan *p, uint32_t piece, struct err *err);
/* out_rows (the piece's rows, width): each token's row once per slot, times the choice's weight
 * where weighed. */
int dispatch_send_finish(struct dispatch_plan *p, uint32_t piece, bool weighed, elem_ptr out_rows,
                         struct err *err);

/* rows (the piece's rows, width); free again afterwards, but with one rank kept until finish. */
int dispatch_return_start(struct dispatch_plan *p, uint32_t piece, const_elem_ptr rows,
                          struct err *err);
/* out_slots (n_tokens * top_k, width), of all chunks; with a chunk's last piece those of its tokens
 * are written, zeros for what went nowhere. */
int dispatch_return_finish(struct dispatch_plan *p, uint32_t piece, elem_ptr out_slots,
                           struct err *err);

#endif
