/* dispatch_state.h - what the files of dispatch share: buffers, plans, and who sends how much where
 *
 * Private to dispatch*.c. Tables by piece and rank count the expert group's places; the pieces of a
 * chunk follow one another, and all chunks are cut into as many. */
#ifndef WORKER_DISPATCH_STATE_H
#define WORKER_DISPATCH_STATE_H

#include "worker/dispatch.h"
#include "worker/shares.h"

/* One direction of travel; sends alternate, so that a rank need not wait until all have read its
 * last one. */
struct way {
    struct {
        void  *p; /* travels */
        size_t n_bytes;
        coll_ticket ticket; /* that read it last */
    } out[2];
    uint32_t turn;      /* which of them is filled next */
    void    *in;
    size_t   in_bytes;
    int64_t  out_max, in_max; /* rows that are planned for, 0: nobody knows */
    coll_ticket ticket; /* of what is on its way here */
};

/* Of the device; n: how many there is room for. */
struct index {
    int64_t *at;
    size_t   n;
};

struct dispatch {
    struct dispatch_config config; /* nodes: its own */
    struct coll_group ep;
    struct shares *shares;
    uint32_t n_experts, n_slots, n_total; /* n_total: slots of all devices */
    uint32_t n_chunks;  /* of the tokens of a plan */
    bool     crosses;   /* hierarchical, and there is more than one node */
    int32_t *relay;     /* (devices, devices): who passes on what a source has for a rank */

    /* Host scratch of a plan, by chunk and expert. */
    int32_t *counts;      /* (devices, n_chunks, n_experts): choices of each source */
    int64_t *loads;       /* (n_experts) */
    int64_t *chunk_slots, *chunk_arrived; /* (n_chunks, n_total): to_slot and arrived, uncut */
    int64_t *device_rows; /* (devices) */
    int32_t *first;       /* (n_chunks n_experts + 1) of a route */
    int64_t *chunk_at;    /* (n_chunks) */
    int64_t *note_send, *note_recv; /* (devices) */
    /* And by piece, with room for pieces_max of them. */
    uint32_t pieces_max;
    int32_t *rows;      /* (devices, 2, n_pieces, devices): rows by (source; to whom, by whom;
                         * piece; rank); the second of them only where it crosses */
    int64_t *end, *place, *begin; /* (n_pieces n_total) */
    int64_t *target_at; /* (n_chunks, pieces of it devices + 1) */
    int32_t *target;    /* (pieces of a chunk, devices) */
    int64_t *from, *to, *add; /* blocks: (n_pieces devices slots or devices + 1) */

    /* On the device: counts, and by pair or row, of the newest plan. */
    int32_t *dev_counts;
    size_t   n_dev_counts;
    struct index pair_at, row_of, row_pair_at, cross_row_of, cross_pair_at, tokens;

    struct way to_relays, to_experts, back, notes;
    struct dispatch_traffic traffic;
    int64_t tokens_max, pairs_max, rows_max; /* that are planned for; 0: nobody knows */
    int64_t piece_rows; /* that come to a rank at once; 0: no limit */
    struct dispatch_plan *idle; /* plans that were destroyed, with their memory */
    const struct dispatch_plan *newest;
};

/* (n_pieces, devices), by destination and by source, and where each piece's begin: n_pieces + 1. */
struct flow {
    int64_t *send, *recv, *first_sent, *first_received;
};

/* Pieces that ranks have told each other of. */
struct told {
    uint32_t first, end;
};

struct dispatch_plan {
    struct dispatch *d;
    struct dispatch_plan *next; /* among the idle */
    uint32_t n_chunks, n_cuts, n_pieces; /* cuts: pieces of a chunk */
    uint32_t pieces_max; /* for which the tables have room */
    uint32_t n_told;     /* pieces at once */
    struct told pairs, rows;
    int64_t  n_tokens, tokens_each; /* each: of a chunk */
    int64_t  most_rows; /* that come to any rank, of all pieces */
    struct flow to_relays, to_experts, back; /* back: as the pairs go, not as they come back */
    int64_t *to_slot;  /* (n_pieces, n_total): my pairs for each slot */
    int64_t *arrived;  /* (n_pieces, devices, n_slots): pairs for my slots */
    int64_t *blocks, *offsets; /* (n_pieces, n_total + 1), (n_pieces, n_slots + 1) */
    int32_t *servers;  /* (n_chunks, n_experts, devices) at most */
    const float *pair_weights; /* borrowed */
    /* On the device, all counted within their piece: where each packed row is taken from, of the
     * tokens or of what came to pass on; where each served row has arrived and how much it weighs;
     * where each row that goes back was served. Within its chunk: where each pair's has come back.
     * Of sent_at, where it crosses, and of served rows there are those of the pieces told of. */
    struct index crossed_at, sent_at, laid_at, served_at, place_of;
    float *weights;
    size_t n_weights;
    const_elem_ptr x, results; /* between start and finish, where nothing travels */
    bool    is_passed_on;
};

static inline bool dispatch_travels(const struct dispatch *d)
{
    return d->ep.n_ranks > 1;
}

/* How many slots of a rank there are for the balance of bits: without those for copies, which a
 * deterministic sum must not depend on; and blocks of (source, slot), whose rows are cut apart. */
static inline int64_t dispatch_cut_slots(const struct dispatch *d)
{
    return d->config.dev->deterministic ? d->n_experts / d->ep.n_ranks : d->n_slots;
}

static inline int64_t dispatch_n_blocks(const struct dispatch *d)
{
    return d->ep.n_ranks * dispatch_cut_slots(d);
}

static inline bool dispatch_same_node(const struct dispatch *d, uint32_t a, uint32_t b)
{
    return !d->config.nodes || d->config.nodes[a] == d->config.nodes[b];
}

static inline uint32_t dispatch_relay(const struct dispatch *d, uint32_t source, uint32_t dest)
{
    return d->relay ? (uint32_t)d->relay[source * d->ep.n_ranks + dest] : source;
}

/* planned: what n is at most in a step as it was planned for. Contents need not survive. -ENOMEM */
int dispatch_grow(const struct dispatch *d, struct index *x, int64_t n, int64_t planned,
                  struct err *err);
/* Room for so many rows of row_bytes each, and an `out` that may be written. */
int dispatch_reserve(struct dispatch *d, struct way *w, int64_t n_out, int64_t n_in,
                     size_t row_bytes, struct err *err);
/* What lies in the way's out goes to the others, what they have for me to its in, from row in_at
 * on. */
int dispatch_start(struct dispatch *d, struct way *w, const int64_t *send, const int64_t *recv,
                   int64_t in_at, size_t row_bytes, struct err *err);
int dispatch_finish(struct dispatch *d, struct way *w, struct err *err);
int dispatch_no_memory(size_t n_bytes, struct err *err);

/* Of pairs, and of rows that this rank passes on: the piece and those after it are told of, if it
 * was not yet. Collective. */
int dispatch_tell_pairs(struct dispatch_plan *p, uint32_t piece, struct err *err);
int dispatch_tell_rows(struct dispatch_plan *p, uint32_t piece, struct err *err);

/* ---- how a plan is cut (dispatch_cut.c) ---- */

/* From d->counts: n_cuts, n_pieces and n_told; then, with tables for as many, to_slot and
 * arrived. */
void dispatch_count_pieces(struct dispatch_plan *p, uint32_t layer);
void dispatch_cut_pairs(struct dispatch_plan *p);

/* ---- the plan's arithmetic (dispatch_flow.c) ---- */

/* From to_slot and arrived: flows of pairs, blocks and offsets. */
void dispatch_count_pairs(struct dispatch_plan *p);
/* From d->rows: flows of rows. */
void dispatch_count_rows(struct dispatch_plan *p);

/* How many rows this rank has for all, before those of a piece. */
int64_t dispatch_rows_before(const struct dispatch_plan *p, uint32_t piece);

/* What ranks tell each other of pairs and, where it crosses, of rows of some pieces: the notes'
 * blocks in d->from, to and add, and how many go where in d->note_send and note_recv. */
struct route_notes dispatch_pair_notes(struct dispatch_plan *p, struct told t);
struct route_notes dispatch_row_notes(struct dispatch_plan *p, struct told t);
/* How they arrive, and where they are read to; returns how many blocks. */
int32_t dispatch_pair_blocks(struct dispatch_plan *p, struct told t);
int32_t dispatch_row_blocks(struct dispatch_plan *p, struct told t);
/* Where pairs that arrived are served, for what goes back. */
int32_t dispatch_served_blocks(struct dispatch_plan *p, struct told t);

#endif
