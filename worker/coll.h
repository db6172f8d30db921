/* coll.h - collectives among the ranks of one attempt
 *
 * Two tables exist: host (coll_host.c, shared memory of a machine, and the network between
 * machines) and nccl (coll_gpu.c, ranks with a GPU each); coll_choose.h says which when.
 *
 * A group is an ordered list of ranks; every member calls the same operations in the same order.
 * Sums are taken in the group's rank order, so a result has the same bits on every member and in
 * every run; NCCL takes an order of its own, as constant, unless the device is deterministic. Each
 * call returns 0 or a negative errno (-ECANCELED after an abort or the end of a member, -ETIMEDOUT
 * when a member does not come, -EPROTO when members call different things) with a line that names
 * rank, operation and number.
 * After a failure the members no longer agree: only abort, trace and close are left.
 *
 * Tensors lie in the memory of the collectives' device: a call waits for the ops before it that
 * touch its input, and when it returns the ops after it may use its output. Words lie in host
 * memory; they are few.
 *
 * Three operations are started and finished later, so that a rank computes in between instead of
 * waiting for others; coll_all_gather and its like do all at once. Of what was started:
 * - starts, and calls that block, are in the same order on all members, over all groups;
 * - finish comes before out is used: until then nobody may read or write it. Calls may finish in
 *   any order, on each member in its own;
 * - reclaim, after finish, comes before in is written again or freed: other members may read it
 *   until then. It is late enough wherever something has been waited for that all members do after
 *   their finish, and then costs nothing;
 * - a rank has at most COLL_OPEN_MAX calls of a group that are started and not finished;
 * - with in outside the memory of alloc a start takes a copy first;
 * - what a call fails with may be said by its start, its finish or its reclaim. In errors and in
 *   the trace it has the number and the layer of its start;
 * - a table may do everything in start, as where tensors pass through a stage. */
#ifndef WORKER_COLL_H
#define WORKER_COLL_H

#include <stdatomic.h>
#include <stdio.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/types.h"
#include "kernels/device.h"

struct coll;

#define COLL_GROUPS_MAX 16u
#define COLL_OPEN_MAX   8u

struct coll_group {
    const uint32_t *ranks; /* n_ranks long, ascending; kept while the group is used */
    uint32_t n_ranks;
    uint32_t me;           /* my index in ranks */
    uint32_t id;           /* the same on all members, distinct among a rank's groups,
                            * < COLL_GROUPS_MAX */
};

/* The ids of a layout's groups. */
enum coll_group_id {
    COLL_WORLD, COLL_FSDP, COLL_FSDP_REPLICA, COLL_EP, COLL_EXPERT_SHARD, COLL_EXPERT_REPLICA
};

static inline struct coll_group coll_group_of(const struct rank_group *g, enum coll_group_id id)
{
    return (struct coll_group){.ranks = g->ranks, .n_ranks = g->n_ranks, .me = g->me, .id = id};
}

enum coll_op { COLL_SUM, COLL_MAX };

/* A call that was started; 0: one that is over, which finish and reclaim take, too. */
typedef uint64_t coll_ticket;

struct coll_ops {
    const char *name;
    /* Once something has been waited for that all ranks do last: who leaves while others wait for
     * anybody ends their calls. */
    void (*close)(struct coll *c);

    /* ---- tensors: counts are in numbers of a type; sums of bfloat16 are rounded once ---- */
    /* The device's memory, from where it travels best. Zeroed, 64-byte aligned; freed by free or,
     * all of it, by close. NULL when there is no more. */
    void *(*alloc)(struct coll *c, size_t n_bytes);
    void (*free)(struct coll *c, void *p);
    /* Of this rank's tensors how many lie in memory shared by the machine's ranks, and how often
     * such memory was taken; the rest is the device's. */
    void (*shared)(struct coll *c, uint64_t *out_bytes, uint64_t *out_n_allocs);
    /* out (n_blocks, members, n): block b of member i's in (n_blocks, n). With one block, in may
     * be the own part of out. */
    int (*start_all_gather)(struct coll *c, const struct coll_group *g, enum elem_type type,
                            const void *in, size_t n, size_t n_blocks, void *out,
                            coll_ticket *out_ticket, struct err *err);
    /* out (n_blocks, n): the sum over members of the own part of their in (n_blocks, members, n).
     * With one block, out may be the own part of in. */
    int (*start_reduce_scatter)(struct coll *c, const struct coll_group *g, enum elem_type type,
                                const void *in, size_t n, size_t n_blocks, void *out,
                                coll_ticket *out_ticket, struct err *err);
    /* Rows of row_bytes, a multiple of 2; send_rows[i] rows go to member i, packed in member order;
     * recv_rows[i] come from member i, packed in member order. Both counts lie in host memory and
     * are kept until finish. */
    int (*start_all_to_all_rows)(struct coll *c, const struct coll_group *g, const void *send,
                                 const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                 size_t row_bytes, coll_ticket *out_ticket, struct err *err);
    int (*finish)(struct coll *c, coll_ticket ticket, struct err *err);
    int (*reclaim)(struct coll *c, coll_ticket ticket, struct err *err);
    int (*all_reduce)(struct coll *c, const struct coll_group *g, enum coll_op op,
                      enum elem_type type, void *x, size_t n, struct err *err);

    /* ---- words ---- */
    int (*barrier)(struct coll *c, const struct coll_group *g, struct err *err);
    int (*all_reduce_f64)(struct coll *c, const struct coll_group *g, enum coll_op op, double *x,
                          size_t n, struct err *err);
    /* out (members, n); in may be the own part of out. */
    int (*all_gather_i32)(struct coll *c, const struct coll_group *g, const int32_t *in, size_t n,
                          int32_t *out, struct err *err);

    /* How long later calls wait for a member, in place of call_timeout_ns; and how long while no
     * member gets anything done (progress), 0: as long. */
    void (*set_patience)(struct coll *c, uint64_t timeout_ns, uint64_t idle_ns);
    /* Where this rank counts what it gets done (common/progress.h), for the others to see. Lives
     * until close. */
    _Atomic uint64_t *(*progress)(struct coll *c);
    /* The flight recorder: the last operations of every rank, a line each. */
    void (*trace)(struct coll *c, FILE *out);
    /* The only one another thread may call: every blocked and later call returns -ECANCELED. */
    void (*abort)(struct coll *c);
};

struct coll {
    const struct coll_ops *ops;
    struct device *dev; /* of the tensors; kept until close, NULL: they lie in host memory. Set by
                         * whoever opened it, before the first call that takes some */
    uint32_t rank, world;
    int32_t  layer; /* said in errors and in the trace; -1: none. Set by whoever computes one */
    bool     is_at_once; /* finish follows the present start, which hides nothing; coll.c's */
    bool     is_blocking; /* parallel.overlap: false; whoever starts a call ends it at once. Set by
                           * whoever opened it */
    bool     registers_memory; /* parallel.register_buffers: NCCL is told of what alloc gives. Set
                                * as is_blocking, before the first alloc */
    struct coll_group world_group;
};

/* Start, finish and reclaim; what they take is above. */
int coll_all_gather(struct coll *c, const struct coll_group *g, enum elem_type type,
                    const void *in, size_t n, size_t n_blocks, void *out, struct err *err);
int coll_reduce_scatter(struct coll *c, const struct coll_group *g, enum elem_type type,
                        const void *in, size_t n, size_t n_blocks, void *out, struct err *err);
int coll_all_to_all_rows(struct coll *c, const struct coll_group *g, const void *send,
                         const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                         size_t row_bytes, struct err *err);
/* After a start: ends the call at once where c is blocking. */
int coll_leave_open(struct coll *c, coll_ticket *io_ticket, struct err *err);

struct wire;
struct wire_peer;

/* Ranks on several hosts, see coll_wire.h. */
struct coll_hosts {
    const uint32_t *hosts;         /* (world) equal where ranks share memory */
    const struct wire_peer *peers; /* (world) what each has told of itself */
    struct wire *wire;             /* this rank's; taken, also by an open that fails */
};

struct coll_host_config {
    const uint8_t *id; /* 16 bytes, names the rendezvous; the same on all ranks */
    uint32_t rank, world;
    size_t   stage_bytes; /* of the pieces in which tensors pass through host memory, where the
                           * device's is another; a multiple of 64, the same on all ranks;
                           * 0: 8 MiB */
    uint64_t open_timeout_ns; /* for all ranks to arrive */
    uint64_t call_timeout_ns; /* for a member to come to a call; 0: wait for ever */
    uint64_t stopped_timeout_ns; /* for one that a signal has stopped; 0: as long as others */
    const atomic_bool *cancelled; /* once true, opening gives up with -ECANCELED; may be NULL */
    const struct coll_hosts *hosts; /* where ranks are; NULL: all on this machine */
};

/* Ranks, processes or threads, through the shared memory of their machine and, between machines,
 * through the network. Gives *out_coll, ended with ops->close. */
int coll_host_open(const struct coll_host_config *config, struct coll **out_coll, struct err *err);

#endif
