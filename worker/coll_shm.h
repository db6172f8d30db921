/* coll_shm.h - the shared memory of the host collectives: rendezvous, arenas, counts, abort
 *
 * Private to coll_host. The lowest rank of a host makes one memfd and hands it to the others over
 * an abstract unix socket that is named by the id, so nothing lies in /dev/shm or any folder: a run
 * that is killed leaves nothing, and the size of /dev/shm does not matter. The sockets stay open:
 * the end of a member closes its own, which is how the others learn of it. */
#ifndef WORKER_COLL_SHM_H
#define WORKER_COLL_SHM_H

#include <stdatomic.h>

#include "worker/coll.h"

#define SHM_RING 32u /* operations a rank remembers */
#define SHM_SMALL_BYTES 4096u /* of input that has a place at every meeting */
#define SHM_ELSEWHERE UINT32_MAX

enum shm_op {
    SHM_NONE, SHM_BARRIER, SHM_ALL_GATHER, SHM_REDUCE_SCATTER, SHM_ALL_REDUCE,
    SHM_ALL_REDUCE_F64, SHM_ALL_GATHER_I32, SHM_ALL_TO_ALL_ROWS
};

/* An operation as the flight recorder has it; atomics, because others read while it changes. */
struct shm_record {
    _Atomic uint32_t op, group, number;
    _Atomic int32_t  layer;
    _Atomic uint64_t n, entered_ns, left_ns; /* left_ns 0: not over */
    _Atomic uint32_t is_ahead; /* started, and its rank computes */
};

/* What members count together, each by one; it only grows, and wraps. A line of its own, because
 * whoever waits looks at it all the time. */
struct shm_count {
    _Atomic uint32_t n, n_sleepers;
    uint32_t pad[14];
};

/* Of one group, in the control block of its first rank here. The calls of a group take turns at the
 * meetings. */
struct shm_meeting {
    struct shm_count arrived, done;
};
struct shm_group {
    struct shm_count   steps; /* of shm_wait_all */
    struct shm_meeting meetings[COLL_OPEN_MAX];
};

/* A call as its rank shows it: written before that arrives, read until all are done. */
struct shm_call {
    uint32_t op, number, op_word;
    uint64_t n, n_blocks;
    uint64_t in_at; /* from the start of the memory */
    uint64_t arrived_ns;
};

/* A call as members on other hosts are told of it (coll_span). */
struct shm_head {
    uint32_t op, op_word, number, group;
    int32_t  layer;
    uint64_t n, n_blocks, in_bytes;
    uint64_t in_at;    /* as above */
    uint64_t stage_at; /* windows on others' inputs, too */
};

/* What one rank shows the others. Outside lie, by group and meeting, how many rows it sends to each
 * member and small input; and its arena. Ranks of other hosts have one, too: what has come of
 * theirs through the network (coll_span). */
struct shm_rank {
    struct shm_group  groups[COLL_GROUPS_MAX];
    struct shm_call   calls[COLL_GROUPS_MAX][COLL_OPEN_MAX];
    struct shm_record ring[SHM_RING];
    _Atomic uint32_t  n_calls; /* the newest record is ring[(n_calls - 1) % SHM_RING] */
    _Atomic uint32_t  at;      /* what the rank was at last: record at - 1; 0: none yet */
    _Atomic uint64_t  progress; /* that this rank makes */
    _Atomic uint32_t  has_left;
    _Atomic uint32_t  is_gone; /* of a rank of another host: its connection has ended */
    struct shm_head   head;    /* of a call with members on other hosts */
    uint64_t          board_at[COLL_GROUPS_MAX]; /* see coll_span */
} __attribute__((aligned(64)));

struct shm {
    uint8_t *base;
    size_t   map_bytes, arena_bytes, arenas_at, ranks_at, rank_stride, small_at;
    _Atomic size_t arena_used;
    _Atomic uint64_t n_allocs; /* in the arena */
    uint32_t n_steps[COLL_GROUPS_MAX]; /* of shm_wait_all */
    uint32_t rank, world;
    uint32_t *places; /* (world) index of a rank's arena; SHM_ELSEWHERE: it is on another host */
    uint32_t first, n_here; /* the lowest rank of this host; how many it has */
    _Atomic uint64_t call_timeout_ns; /* a thread of its own may watch */
    _Atomic uint64_t idle_timeout_ns; /* while nobody gets anything done; 0: call_timeout_ns */
    uint64_t stopped_timeout_ns;
    uint64_t looked_ns, stopped_ns; /* the last look; how long stopped_peer was seen stopped */
    uint32_t stopped_peer;
    bool     is_watched; /* a thread of its own looks; set by the thread that waits */
    atomic_bool is_looking; /* some thread does */
    uint32_t n_looks_gone; /* since a rank of another host has gone */
    int     *peers; /* sockets: first has one to each rank here, the others one to it; -1: none */
    uint32_t n_peers;
    const atomic_bool *cancelled; /* while the ranks gather; NULL: nothing to look at */
};

/* hosts: (world) equal where ranks share memory; NULL: all do. Sets places, first and n_here. */
void shm_place(struct shm *s, const uint32_t *hosts);
/* The sizes of everything, from the ranks' number and one arena's size, which all must agree on. */
void shm_plan(struct shm *s, size_t arena_bytes);
int  shm_map(struct shm *s, int fd, struct err *err);
/* Ends sockets and mapping; half-opened is fine. */
void shm_close(struct shm *s);

struct shm_rank *shm_rank_of(const struct shm *s, uint32_t rank);
/* Rows that rank sends to each member in a call of group, world long. */
int64_t *shm_rows_of(const struct shm *s, uint32_t rank, uint32_t group, uint32_t meeting);
/* Room for small input of this rank. */
uint8_t *shm_small_of(const struct shm *s, uint32_t group, uint32_t meeting);
uint8_t *shm_arena_of(const struct shm *s, uint32_t rank);
/* By any thread. NULL when the arena, as large as the machine's memory, is full. */
void *shm_alloc(struct shm *s, size_t n_bytes);

static inline bool shm_is_here(const struct shm *s, uint32_t rank)
{
    return s->places[rank] != SHM_ELSEWHERE;
}
/* The members of g that are on this host, and the lowest of them. */
uint32_t shm_count_here(const struct shm *s, const struct coll_group *g, uint32_t *out_first);

/* Wakes whoever waits for target if this reaches it. */
void shm_count_up(struct shm_count *c, uint32_t target);
bool shm_has_reached(const struct shm_count *c, uint32_t target);
/* Waits until a count of g has reached target. On failure the whole run is aborted. */
int shm_wait_for(struct shm *s, const struct coll_group *g, struct shm_count *c, uint32_t target,
                 struct err *err);
/* From now on the calling thread waits without keeping a core busy: its rank computes beside. */
void shm_wait_quietly(void);
/* Waits until all members that are on this host wait. */
int shm_wait_all(struct shm *s, const struct coll_group *g, struct err *err);

/* Looks whether a rank has ended or was stopped, and aborts if so. Who waits does it every 100 ms,
 * unless is_watched; of several threads the first. */
void shm_look(struct shm *s);
/* Aborts because the other members of g do not come. */
void shm_give_up(struct shm *s, const struct coll_group *g, uint64_t waited_ns);

/* What one wait has seen of the others, look by look; all zero: it begins. */
struct shm_patience {
    uint64_t looked_ns, waited_ns, idle_ns, progress;
};
/* Whether the other members of g are given up: they do not come for longer than call_timeout_ns, or
 * for longer than idle_timeout_ns none of them gets anything done. Only time between looks counts,
 * because this rank may have been stopped, too. */
bool shm_is_too_long(struct shm *s, const struct coll_group *g, struct shm_patience *p);

/* Tells every member why; the first reason stays. */
void shm_abort(struct shm *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* -ECANCELED with the reason if anybody aborted. */
int shm_check(const struct shm *s, struct err *err);
/* The same with -ETIMEDOUT, after giving up because the other members of g do not come. */
int shm_time_out(struct shm *s, const struct coll_group *g, uint64_t waited_ns, struct err *err);
/* A rank of another host has ended: whoever looks says so. */
void shm_note_gone(struct shm *s, uint32_t rank);
/* A rank of another host has entered a call, or left its newest. */
void shm_note_far(struct shm *s, uint32_t rank, const struct shm_head *head);
void shm_note_far_left(struct shm *s, uint32_t rank);
/* Why all ended; false: nobody aborted. */
bool shm_why(const struct shm *s, char *out_text, size_t n_bytes);

const char *shm_op_name(enum shm_op op);

#endif
