/* dispatch_state.h - what the files of dispatch share: buffers, plans, and who sends how much where
 *
 * Private to dispatch*.c. Tables by chunk and rank count the expert group's places. */
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
    uint32_t n_chunks;  /* of a plan of all tokens */
    bool     crosses;   /* hierarchical, and there is more than one node */
    int32_t *relay;     /* (devices, devices): who passes on what a source has for a rank */

    /* Host scratch of a plan. */
    int32_t *counts;    /* (devices, n_chunks, n_experts): choices of each source */
    int32_t *rows;      /* (devices, 2, n_chunks, devices): rows by (source; to whom, by whom;
                         * chunk; rank); the second of them only where it crosses */
    int64_t *device_rows; /* (devices) */
    int32_t *first;     /* (n_chunks n_experts + 1) of a route */
    int64_t *end, *place, *chunk_at; /* (n_chunks n_total) twice, (n_chunks) */
    int64_t *target_at; /* (n_chunks, devices + 1) */
    int32_t *target;    /* (devices) */
    int64_t *from, *to, *add; /* blocks: (n_chunks n_total devices + 1) of the largest table */
    int64_t *note_send, *note_recv; /* (devices) */

    /* On the device: counts, and by pair or row. */
    int32_t *dev_counts;
    struct index pair_at, row_of, row_pair_at, cross_row_of, cross_pair_at, tokens;

    struct way to_relays, to_experts, back, notes;
    struct dispatch_traffic traffic;
    int64_t tokens_max, pairs_max, rows_max; /* that are planned for; rows_max 0: no limit */
    int64_t chunk_rows_max;
    struct dispatch_plan *idle; /* plans that were destroyed, with their memory */
};

/* (n_chunks, devices), by destination and by source, and where each chunk's begin: n_chunks + 1. */
struct flow {
    int64_t *send, *recv, *first_sent, *first_received;
};

struct dispatch_plan {
    struct dispatch *d;
    struct dispatch_plan *next; /* among the idle */
    uint32_t n_chunks;
    int64_t  n_tokens, tokens_each; /* each: of a chunk */
    struct flow to_relays, to_experts, back; /* back: as the pairs go, not as they come back */
    int64_t *to_slot;  /* (n_chunks, n_total): my pairs for each slot */
    int64_t *arrived;  /* (n_chunks, devices, n_slots): pairs for my slots */
    int64_t *blocks, *offsets; /* (n_chunks, n_total + 1), (n_chunks, n_slots + 1) */
    int32_t *servers;  /* (n_chunks, n_experts, devices) at most */
    /* On the device, all counted within their chunk: where each packed row is taken from, of the
     * tokens or of what came to pass on; where each served row has arrived and how much it weighs;
     * where each row that goes back was served; where each pair's has come back. */
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
/* What lies in the way's out goes to the others, what they have for me to its in. */
int dispatch_start(struct dispatch *d, struct way *w, const int64_t *send, const int64_t *recv,
                   size_t row_bytes, struct err *err);
int dispatch_finish(struct dispatch *d, struct way *w, struct err *err);
int dispatch_no_memory(size_t n_bytes, struct err *err);

/* ---- the plan's arithmetic (dispatch_flow.c) ---- */

/* From to_slot and arrived: flows of pairs, blocks and offsets. */
void dispatch_count_pairs(struct dispatch_plan *p);
/* From d->rows: flows of rows. */
void dispatch_count_rows(struct dispatch_plan *p);

/* What ranks tell each other of pairs and, where it crosses, of rows: the notes' blocks in d->from,
 * to and add, and how many go where in d->note_send and note_recv. */
struct route_notes dispatch_pair_notes(struct dispatch_plan *p);
struct route_notes dispatch_row_notes(struct dispatch_plan *p);
/* How they arrive, and where they are read to; returns how many blocks. */
int32_t dispatch_pair_blocks(struct dispatch_plan *p);
int32_t dispatch_row_blocks(struct dispatch_plan *p);
/* Where pairs that arrived are served, for what goes back. */
int32_t dispatch_served_blocks(struct dispatch_plan *p);

#endif
