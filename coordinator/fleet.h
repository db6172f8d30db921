/* fleet.h - the workers: who is attached, since when each is silent, what each is doing
 *
 * A worker is a name; its life is a worker_epoch; its connection is a peer. Its health follows
 * from silence on the monotonic clock, in heartbeat intervals that grow with the fleet:
 *
 *   ALIVE ──2 intervals──▶ LATE ──3──▶ SUSPECT ──4, not before 10 s──▶ LOST
 *     ▲  any newer word       │           │                             │
 *     └───────────────────────┴───────────┴─────────────────────────────┘
 *
 * EXPECTED is a worker known from the records that has not come back since the coordinator
 * started; it becomes LOST after the restart grace. GONE said goodbye. Drained is a person's
 * wish beside all of that, and so is the health of its GPU: one that is sick gets no new work. */
#ifndef COORDINATOR_FLEET_H
#define COORDINATOR_FLEET_H

#include "common/mem.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

enum health { HEALTH_EXPECTED, HEALTH_ALIVE, HEALTH_LATE, HEALTH_SUSPECT, HEALTH_LOST,
              HEALTH_GONE };

struct worker {
    char    *name;
    uint32_t index; /* in the fleet, for ever */

    /* durable: changed by coord_apply only */
    char                *node, *machine, *record_reason;
    Ballast__WorkerState record_state; /* IDLE, LOST or GONE */
    uint64_t             record_epoch;
    bool                 is_drained;

    /* of this life of the coordinator */
    char       *device, *version;
    uint64_t    memory_bytes;
    uint32_t    cores, pid;
    enum health health;
    uint64_t    epoch; /* 0: has not said hello */
    uint64_t    peer;  /* 0: no connection */
    uint64_t    last_seq, last_heard_ns;
    uint64_t    beat_seq; /* of its newest hello or heartbeat */
    uint64_t    interval_ns, interval_before_ns; /* told last, and the time before */
    job_id      job;   /* the gang it belongs to; 0: none */
    uint32_t    attempt, rank;
    record_seq  claim_seq;      /* of the record that assigned it, while state is rebuilt */
    uint64_t    free_from_ns;   /* trainers of a life before may live until then */
    bool        holds_foreign;  /* its last report had a live attempt that is not wanted */
    Ballast__GpuHealth *gpu;    /* its last word about it; NULL: none */
    uint8_t     resume_key[IDEMPOTENCY_KEY_BYTES]; /* of the last resume */
};

struct fleet_config {
    uint64_t heartbeat_floor_ns;
    uint32_t heartbeats_per_s;
    uint32_t late_intervals, suspect_intervals, lost_intervals;
    uint64_t lost_floor_ns, restart_grace_ns;
};

struct fleet_index {
    uint32_t *slots; /* index + 1; 0: empty */
    size_t    n_slots, n_used;
};

struct fleet {
    struct fleet_config config;
    struct worker     **workers;
    size_t              n, n_alloc;
    struct fleet_index  by_name, by_peer;
    uint32_t            n_attached; /* ALIVE, LATE or SUSPECT */
};

void fleet_init(struct fleet *f, const struct fleet_config *config);
void fleet_fini(struct fleet *f);

/* NULL if there is none. */
struct worker *fleet_by_name(const struct fleet *f, const char *name);
struct worker *fleet_by_peer(const struct fleet *f, uint64_t peer);

/* Makes one that is EXPECTED. When WORKERS_MAX are known it takes the place of one that is lost
 * or gone, not drained and in no gang; NULL if there is no such either. */
struct worker *fleet_add(struct fleet *f, const char *name);

/* The peer that speaks for it from now on, 0: none. */
void fleet_set_peer(struct fleet *f, struct worker *w, uint64_t peer);

/* The one function that changes health. */
void fleet_set_health(struct fleet *f, struct worker *w, enum health health);

/* A newer word of its present life: alive, with a full lease. */
void fleet_heard(struct fleet *f, struct worker *w, uint64_t now_ns);

/* What it says about its GPU, copied; NULL: nothing. */
void fleet_set_gpu(struct worker *w, const Ballast__GpuHealth *gpu);

uint64_t fleet_interval_ns(const struct fleet *f);

/* Notes that it has been told the present interval; returns it in milliseconds. */
uint32_t fleet_tell_interval(struct fleet *f, struct worker *w);

/* Judges everybody's silence. Gives those that are lost now, in the arena; returns when to come
 * again (UINT64_MAX: never). */
uint64_t fleet_tick(struct fleet *f, uint64_t now_ns, struct arena *arena,
                    struct worker ***out_lost, size_t *out_n_lost);

/* A full lease for everybody: nobody is blamed for the time in which nobody listened. */
void fleet_renew(struct fleet *f, uint64_t now_ns);

/* Attached and not suspect, drained or sick: something may be started there. */
bool fleet_is_usable(const struct worker *w);
bool fleet_is_free(const struct worker *w, uint64_t now_ns);
bool fleet_is_attached(const struct worker *w);

/* As people see it. */
Ballast__WorkerState fleet_state(const struct worker *w);
Ballast__Worker *fleet_describe(const struct worker *w, uint64_t now_ns, struct arena *arena);

#endif
