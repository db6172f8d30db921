/* coll_shm.h - the shared memory of the host collectives: rendezvous, arenas, barriers, abort
 *
 * Private to coll_host. Rank 0 makes one memfd and hands it to the others over an abstract unix
 * socket that is named by the id, so nothing lies in /dev/shm or any folder: a run that is killed
 * leaves nothing, and the size of /dev/shm does not matter. The sockets stay open: the end of a
 * member closes its own, which is how the others learn of it. */
#ifndef WORKER_COLL_SHM_H
#define WORKER_COLL_SHM_H

#include <stdatomic.h>

#include "worker/coll.h"

#define SHM_RING 16u /* operations a rank remembers */

enum shm_op {
    SHM_NONE, SHM_BARRIER, SHM_ALL_GATHER, SHM_REDUCE_SCATTER, SHM_ALL_REDUCE,
    SHM_ALL_REDUCE_F64, SHM_ALL_GATHER_I32, SHM_ALL_TO_ALL_ROWS
};

/* An operation as the flight recorder has it; atomics, because others read while it changes. */
struct shm_record {
    _Atomic uint32_t op, group, number;
    _Atomic int32_t  layer;
    _Atomic uint64_t n, entered_ns, left_ns; /* left_ns 0: still inside */
};

/* Of one group, in the control block of its first rank. */
struct shm_barrier {
    _Atomic uint32_t arrived, generation, n_sleepers;
    uint32_t pad[13];
};

/* What one rank shows the others. Its counts (world int64) and arena lie outside. */
struct shm_rank {
    struct shm_barrier barriers[COLL_GROUPS_MAX];
    struct shm_record  ring[SHM_RING];
    _Atomic uint32_t   n_calls; /* the newest record is ring[(n_calls - 1) % SHM_RING] */
    _Atomic uint32_t   has_left;
    /* The present call; written before its first barrier, read between first and last. */
    uint32_t op, number, op_word;
    uint64_t n, n_blocks;
    uint64_t in_at; /* in the rank's arena */
} __attribute__((aligned(64)));

struct shm {
    uint8_t *base;
    size_t   map_bytes, arena_bytes, arenas_at, ranks_at, rank_stride, arena_used;
    uint64_t n_allocs; /* in the arena */
    uint32_t rank, world;
    uint32_t n_spins; /* before a waiting rank gives its core away */
    _Atomic uint64_t call_timeout_ns; /* a thread of its own may watch */
    uint64_t stopped_timeout_ns;
    uint64_t looked_ns, stopped_ns; /* the last look; how long stopped_peer was seen stopped */
    uint32_t stopped_peer;
    bool     is_watched; /* a thread of its own looks; set by the thread that waits */
    int     *peers; /* sockets: rank 0 has one to each rank, the others one to rank 0; -1: none */
    uint32_t n_peers;
};

/* The sizes of everything, from the ranks' number and one arena's size, which all must agree on. */
void shm_plan(struct shm *s, size_t arena_bytes);
int  shm_map(struct shm *s, int fd, struct err *err);
/* Ends sockets and mapping; half-opened is fine. */
void shm_close(struct shm *s);

struct shm_rank *shm_rank_of(const struct shm *s, uint32_t rank);
int64_t *shm_counts_of(const struct shm *s, uint32_t rank);
uint8_t *shm_arena_of(const struct shm *s, uint32_t rank);
/* NULL when the arena, as large as the machine's memory, is full. */
void *shm_alloc(struct shm *s, size_t n_bytes);

/* Waits for all members. On failure the whole run is aborted. */
int shm_wait_all(struct shm *s, const struct coll_group *g, struct err *err);

/* Looks whether a rank has ended or was stopped, and aborts if so. One thread of a process does it:
 * the one that waits, every 100 ms, unless is_watched. */
void shm_look(struct shm *s);
/* Aborts because the other members of g do not come. */
void shm_give_up(struct shm *s, const struct coll_group *g);

/* Tells every member why; the first reason stays. */
void shm_abort(struct shm *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* -ECANCELED with the reason if anybody aborted. */
int shm_check(const struct shm *s, struct err *err);

const char *shm_op_name(enum shm_op op);
/* "all_reduce 812 of layer 7 (group 1)" */
void shm_describe(const struct shm *s, uint32_t rank, char *out_text, size_t n_bytes);

#endif
