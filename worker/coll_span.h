/* coll_span.h - calls of groups with members on several hosts
 *
 * Private to the host collectives. A call has two levels. Inside a host its members meet in shared
 * memory as ever; the lowest of them, the group's leader there, tells the leaders on other hosts
 * what they call, and learns what those call, so that disagreement is found in every build and no
 * data leaves before all have come. Small inputs travel with that word. Large ones go straight
 * between the ranks that have and need them, through the wire:
 *
 *   all_gather      each input once to each host, in windows, where all members copy it;
 *   all_to_all      each row once, from the sender's memory into the receiver's;
 *   sums            members are runs of ranks in a row that share a host. A run adds its inputs to
 *                   the partial sum of the runs before it, in rank order, and hands that on. So a
 *                   host's inputs are added up before they leave it *and* the order of additions,
 *                   thus every bit, is that of one machine. A bfloat16 sum travels in float32 until
 *                   its last member rounds it. In pieces, which different members of a run take in
 *                   turns: all of them work, all links at once.
 *
 * What is started is handed to a thread of the rank's, the courier, which carries out one call
 * after another, in the order of their starts, as the rank would: a window waits for who copies
 * from it, a sum for who adds. Of rows it posts what goes and what comes, and leaves that to the
 * wire. Calls that block wait until it has nothing left to do; so one thread at a time makes calls
 * that cross, in the order that all members keep, and nothing waits for what comes later. After a
 * failure the wire is stopped, so no memory of the caller's is touched any more. */
#ifndef WORKER_COLL_SPAN_H
#define WORKER_COLL_SPAN_H

#include "worker/coll_call.h"
#include "worker/coll_fold.h"
#include "worker/coll_wire.h"

#define SPAN_SMALL_BYTES ((size_t)8 << 10) /* of an input that travels with the word */
#define SPAN_STAGE_BYTES ((size_t)8 << 20) /* of windows on others' inputs, of a rank */

/* A group as its calls need it. Members are also numbered by place: those of its first host in
 * rank order, then those of the next. */
struct span_group {
    uint32_t  n_ranks, n_hosts, n_here, n_far;
    uint32_t  my_host, me_here;  /* this host among the group's; my place within it */
    uint32_t *ranks;             /* copy, to know the group again */
    uint32_t *place;             /* (n_ranks) of each member */
    uint32_t *member;            /* (n_ranks) at each place */
    uint32_t *host;              /* (n_ranks) of each member */
    uint32_t *start;             /* (n_hosts + 1) first places */
    uint32_t *run, n_runs;       /* (n_runs + 1) first members */
    uint8_t  *board;             /* mine, in the arena */
    uint8_t  *words;             /* what a leader sends */
};

/* Of a group what was started, by its number, until another call has its place. */
struct span_open;
struct span_courier;

struct span_state {
    struct wire *wire;
    uint32_t    *hosts; /* (world) */
    struct span_group groups[COLL_GROUPS_MAX];
    struct span_open *open; /* (COLL_GROUPS_MAX, COLL_OPEN_MAX) */
    uint32_t n_started[COLL_GROUPS_MAX];
    struct span_courier *courier; /* NULL: nothing was handed over yet */
    uint8_t *copy, *stage, *down; /* in my arena: input, windows, tensors of a device */
    size_t   copy_bytes, stage_bytes, down_bytes;
};

struct span_call {
    struct host *h;
    const struct coll_group *g;
    enum shm_op op;
    uint32_t note, number;
    int32_t  layer;
    struct span_group *s;
    struct wire_ticket ticket, heads; /* of all that is posted; of leaders' first words */
    const uint8_t *shown; /* my input, where others see it */
    bool has_inputs; /* of all members: they are small */
};

/* Takes wire, which is not joined yet; peers and hosts are (world). */
void span_open(struct host *h, struct wire *wire, const uint32_t *hosts,
               const struct wire_peer *peers);
void span_close(struct host *h);

/* Whether the members of this host read p where it is: in the memory of alloc. */
bool span_shares(const struct host *h, const void *p);
/* Whether g has members on other hosts. */
bool span_crosses(const struct host *h, const struct coll_group *g);

/* The rank's thread calls, of n; g is kept. One that blocks first waits until the courier has done
 * all before it. */
struct span_call span_note(struct host *h, const struct coll_group *g, enum shm_op op, size_t n);
struct span_call span_begin(struct host *h, const struct coll_group *g, enum shm_op op, size_t n);
/* As call_wait. shares: members of this host read in. send_rows: of an all_to_all, else NULL. */
int span_enter(struct span_call *c, uint32_t op_word, const void *in, size_t in_bytes, bool shares,
               size_t n, size_t n_blocks, const int64_t *send_rows, struct err *err);
/* When all that was posted is done and no member here reads my input any more. */
int span_leave(struct span_call *c, struct err *err);
/* A leader notes that the members elsewhere have done theirs. */
void span_note_far_left(const struct span_call *c);
/* Ends the wire's traffic if rc is a failure; returns rc. */
int span_end(struct host *h, int rc);

/* Until nothing of t is open. */
int span_wait(const struct span_call *c, struct wire_ticket *t, struct err *err);
uint64_t span_tag(const struct span_call *c, uint32_t slot);
/* Slots below are taken. */
#define SPAN_SLOTS 8u

/* Member i's head, and its input: of members here, and of all if has_inputs. */
const struct shm_head *span_head_of(const struct span_call *c, uint32_t i);
uint8_t *span_input_of(const struct span_call *c, uint32_t i);
/* What member i sends to member to, one of this host. */
int64_t span_rows_of(const struct span_call *c, uint32_t i, uint32_t to);
/* In my arena, *io_bytes large, grown as needed. NULL and a line in err if there is no more. */
uint8_t *span_room(struct host *h, uint8_t **io_room, size_t *io_bytes, size_t n_bytes,
                   struct err *err);

/* ---- coll_span_ops.c: as in coll.h, of groups that cross; width is of an element ------------- */

int span_barrier(struct host *h, const struct coll_group *g, struct err *err);
int span_gather(struct host *h, const struct coll_group *g, enum shm_op op, size_t width,
                const void *in, size_t n, size_t n_blocks, void *out, struct err *err);
/* Enters, compares rows if there are some, and leaves: of a call that travels another way. */
int span_agree(struct host *h, const struct coll_group *g, const struct call_what *what,
               const int64_t *recv_rows, struct err *err);

int span_start_gather(struct host *h, const struct coll_group *g, size_t width, const void *in,
                      size_t n, size_t n_blocks, void *out, coll_ticket *out_ticket,
                      struct err *err);

/* ---- coll_span_open.c: what is started and finished later ------------------------------------ */

struct span_open {
    /* What is called; run carries it out, on the courier's thread or at once. */
    int (*run)(struct span_open *o, struct err *err);
    enum shm_op op;
    uint32_t hidden, op_word; /* the phase of what goes on meanwhile */
    const void *in;
    void  *out;
    size_t n, n_blocks, width; /* bytes of an element, or of a row */
    const struct fold *fold;
    const int64_t *send_rows, *recv_rows;
    /* What becomes of it. */
    struct coll_group g;
    uint32_t at; /* numbers those of the group, from 1 */
    bool     is_over; /* finished */
    struct span_call call;
    struct wire_ticket comes, goes; /* rows, which the wire has */
    uint64_t started_ns, ran_ns;
    struct span_open *next; /* of what the courier has to do */
    bool     has_run;
    int      rc;
    struct err err;
};

/* Whether a ticket is of a call that crosses. */
static inline bool span_has(coll_ticket ticket)
{
    return ticket & 0x80;
}

/* what: its first part. */
int span_start(struct host *h, const struct coll_group *g, const struct span_open *what,
               coll_ticket *out_ticket, struct err *err);
int span_finish(struct host *h, coll_ticket ticket, struct err *err);
int span_reclaim(struct host *h, coll_ticket ticket, struct err *err);
/* Until the courier has done all that was handed to it; by another thread than its. */
void span_settle(struct host *h);
/* Ends the courier; if it is in the midst of something, all ends. */
void span_courier_close(struct host *h);

/* ---- coll_span_rows.c ------------------------------------------------------------------------ */

int span_start_rows(struct host *h, const struct coll_group *g, const void *send,
                    const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                    size_t row_bytes, coll_ticket *out_ticket, struct err *err);
/* -EPROTO where a member does not send as many as are expected. */
int span_check_rows(struct span_call *c, const int64_t *recv_rows, struct err *err);

/* ---- coll_span_down.c: of tensors in memory of a device that the host cannot reach. They come
 * down whole and go up again: between hosts GPUs have NCCL ------------------------------------- */

int span_down_gather(struct host *h, const struct coll_group *g, enum shm_op op, size_t width,
                     const void *in, size_t n, size_t n_blocks, void *out, struct err *err);
int span_down_rows(struct host *h, const struct coll_group *g, const void *send,
                   const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                   size_t row_bytes, struct err *err);
int span_down_reduce(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
                     const struct fold *fold, void *x, size_t n, struct err *err);
int span_down_scatter(struct host *h, const struct coll_group *g, uint32_t op_word,
                      const struct fold *fold, const void *in, size_t n, size_t n_blocks,
                      void *out, struct err *err);

/* ---- coll_span_sum.c ------------------------------------------------------------------------- */

int span_reduce(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
                const struct fold *fold, void *x, size_t n, struct err *err);
int span_scatter(struct host *h, const struct coll_group *g, uint32_t op_word,
                 const struct fold *fold, const void *in, size_t n, size_t n_blocks, void *out,
                 struct err *err);
int span_start_scatter(struct host *h, const struct coll_group *g, uint32_t op_word,
                       const struct fold *fold, const void *in, size_t n, size_t n_blocks,
                       void *out, coll_ticket *out_ticket, struct err *err);

#endif
