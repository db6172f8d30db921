/* coll_call.h - one call of the host collectives: recorded, entered, agreed on, left
 *
 * Private to coll_host. */
#ifndef WORKER_COLL_CALL_H
#define WORKER_COLL_CALL_H

#include "worker/coll.h"
#include "worker/coll_shm.h"

struct host {
    struct coll coll;
    struct shm  shm;
    uint32_t *world_ranks;
    uint32_t  numbers[COLL_GROUPS_MAX]; /* calls of each group so far */
    uint8_t  *copy; /* in my arena: input that was not there */
    size_t    copy_bytes;
    const uint8_t **inputs; /* (world) scratch of one call */
    uint8_t       **outputs;
    /* Where a device's tensors pass through: the first bytes of every rank's arena. */
    size_t stage_bytes;
    bool   is_pinned;
    void **allocs; /* taken from the device by alloc, and not freed */
    size_t n_allocs;
};

struct call {
    struct host *h;
    const struct coll_group *g;
    struct shm_rank *mine;
    uint32_t note;
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

/* After it every member's input may be read, until leave. n, n_blocks and op_word must be the same
 * on all members. */
int call_enter(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
               const void *in, size_t in_bytes, size_t n, size_t n_blocks, struct call *out,
               struct err *err);
int call_leave(struct call *c, struct err *err);

/* Member i's input, where it lies or its copy. */
uint8_t *call_input_of(const struct call *c, uint32_t i);

/* Before enter: shows what I send to each member. */
void call_show_rows(struct host *h, const struct coll_group *g, const int64_t *send_rows);
/* After it: rows of member i that come before mine; -EPROTO where it does not send n_rows to me. */
int call_rows_before(const struct call *c, uint32_t i, int64_t n_rows, int64_t *out_before,
                     struct err *err);

#endif
