/* coll_call.h - one call of the host collectives: recorded, shown, waited for, done with
 *
 * Private to coll_host. The calls of a group take turns at COLL_OPEN_MAX meetings. At a meeting
 * every member shows what it calls and where its input lies, and arrives; once all have, each reads
 * what it needs and is done; once all are, the inputs are their ranks' again and the meeting is
 * free for another call. So a rank may be ahead of others by as many calls as there are
 * meetings. */
#ifndef WORKER_COLL_CALL_H
#define WORKER_COLL_CALL_H

#include "worker/coll.h"
#include "worker/coll_shm.h"

/* In my arena: input that was not there. */
struct call_copy {
    uint8_t *p;
    size_t   n_bytes;
    struct shm_count *done; /* of who reads it, up to target */
    uint32_t target;
};

struct call {
    struct host *h;
    struct coll_group g;
    uint32_t at;      /* numbers the meetings of the group, from 1 */
    uint32_t meeting; /* at - 1, over and over */
    struct shm_meeting *counts;
    uint32_t target;  /* of the counts */
    uint32_t note, number;
    int32_t  layer;
    uint64_t started_ns;
    bool     is_read; /* others read what I may want to write, until all are done */
};

/* What was started, by its meeting, until another call has it. */
struct open_call {
    struct call call;
    bool is_over;    /* finished */
    uint32_t hidden; /* the phase of what is waited for meanwhile */
    uint8_t *out;
    size_t n, n_blocks, width; /* bytes of a number, or of a row */
    const struct fold *fold;
    const int64_t *recv_rows;
    int (*take)(struct open_call *o, struct err *err); /* reads the inputs */
};

struct host {
    struct coll coll;
    struct shm  shm;
    uint32_t *world_ranks;
    uint32_t  numbers[COLL_GROUPS_MAX]; /* calls of each group so far */
    uint32_t  met[COLL_GROUPS_MAX];     /* of which at a meeting */
    struct open_call (*open)[COLL_OPEN_MAX]; /* COLL_GROUPS_MAX */
    struct call_copy *copies;
    size_t    n_copies;
    uint64_t  hidden_until_ns; /* when what was hidden last had arrived */
    const uint8_t **inputs; /* (world) scratch of one call */
    uint8_t       **outputs;
    /* Where a device's tensors pass through: the first bytes of every rank's arena. */
    size_t stage_bytes;
    bool   is_pinned;
    struct span_state *span; /* NULL: all ranks are on this host */
    void **allocs; /* taken from the device by alloc, and not freed */
    size_t n_allocs;
};

static inline struct host *host_of(struct coll *c)
{
    return (struct host *)c;
}

/* Whether tensors lie where this process may read and write them. */
static inline bool host_reaches_tensors(const struct host *h)
{
    return !h->coll.dev || h->coll.dev->is_host;
}

/* What members must agree on besides the counts. */
static inline uint32_t call_word(enum elem_type type, enum coll_op op)
{
    return (uint32_t)type << 1 | (uint32_t)op;
}

/* Records an operation that is not waited for, and its end. The rank's calls are made by one
 * thread, ends may be noted by another. */
uint32_t call_note(struct host *h, const struct coll_group *g, enum shm_op op, uint64_t n);
void call_note_left(struct host *h, uint32_t note);
/* The rank computes while what it has started goes on; and waits in it again. False: the recorder
 * has forgotten it. */
void call_note_ahead(struct host *h, uint32_t note);
bool call_note_back(struct host *h, uint32_t note);
/* Others were waited for from begin on while this rank computed, until they had arrived or it
 * waited, too; what calls that were open together waited for counts once. */
void call_note_hidden(struct host *h, uint32_t phase, int32_t layer, uint64_t begin_ns,
                      uint64_t arrived_ns, uint64_t finish_ns);

/* What is called; n, n_blocks and word must be the same on all members. */
struct call_what {
    enum shm_op op;
    uint32_t word;
    size_t n, n_blocks;
    const void *in;
    size_t in_bytes;
    bool copies;              /* in is read from a copy, wherever it lies: words */
    const int64_t *send_rows; /* shown to the members; NULL: none are */
};
/* Waits for a meeting that is free, shows the call there and arrives. */
int call_start(struct host *h, const struct coll_group *g, const struct call_what *what,
               struct call *out, struct err *err);
/* Waits for all members; after it every input may be read, until done. */
int call_wait(struct call *c, struct err *err);
/* The inputs are not read here any more; and the call is over, too. */
void call_met(struct call *c);
void call_done(struct call *c);
/* Waits until all are done, if others read my input. */
int call_reclaim(struct call *c, struct err *err);
/* Both. */
int call_end(struct call *c, struct err *err);
/* When the last member arrived; after wait. */
uint64_t call_arrived_ns(const struct call *c);

/* Member i's input, where it lies or its copy. */
uint8_t *call_input_of(const struct call *c, uint32_t i);
/* What member i sends to each. */
const int64_t *call_rows_of(const struct call *c, uint32_t i);
/* Rows of member i that come before mine; -EPROTO where it does not send n_rows to me. */
int call_rows_before(const struct call *c, uint32_t i, int64_t n_rows, int64_t *out_before,
                     struct err *err);

#endif
