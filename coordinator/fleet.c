/* fleet.c - the workers: who is attached, since when each is silent, what each is doing */
#include "coordinator/fleet.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "proto/gpu.h"

void fleet_init(struct fleet *f, const struct fleet_config *config)
{
    *f = (struct fleet){.config = *config};
}

static void worker_destroy(struct worker *w)
{
    free(w->name);
    free(w->node);
    free(w->machine);
    free(w->record_reason);
    fleet_set_gpu(w, NULL);
    free(w->device);
    free(w->version);
    free(w);
}

void fleet_fini(struct fleet *f)
{
    for (size_t i = 0; i < f->n; i++)
        worker_destroy(f->workers[i]);
    free(f->workers);
    free(f->by_name.slots);
    free(f->by_peer.slots);
    *f = (struct fleet){0};
}

/* ---- two indexes -----------------------------------------------------------------------------
 * Entries are never removed: one whose worker has another name or peer by now does not match. A
 * full index is built anew from the workers, which drops those. */

static uint64_t hash_name(const char *name)
{
    uint64_t h = hash_fnv(HASH_FNV, name, strlen(name));
    return h ^ h >> 29;
}

static uint64_t hash_peer(uint64_t peer)
{
    uint64_t h = peer * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

static void index_put(struct fleet_index *ix, uint64_t hash, uint32_t worker)
{
    size_t i = hash & (ix->n_slots - 1);
    while (ix->slots[i])
        i = (i + 1) & (ix->n_slots - 1);
    ix->slots[i] = worker + 1;
    ix->n_used++;
}

static uint64_t hash_of(const struct fleet *f, const struct fleet_index *ix,
                        const struct worker *w)
{
    return ix == &f->by_name ? hash_name(w->name) : hash_peer(w->peer);
}

static void index_add(struct fleet *f, struct fleet_index *ix, const struct worker *w)
{
    if (4 * (ix->n_used + 1) <= 3 * ix->n_slots) {
        index_put(ix, hash_of(f, ix, w), w->index);
        return;
    }
    free(ix->slots);
    ix->n_slots = 64;
    while (ix->n_slots < 4 * f->n)
        ix->n_slots *= 2;
    ix->slots = xcalloc(ix->n_slots, sizeof *ix->slots);
    ix->n_used = 0;
    for (size_t i = 0; i < f->n; i++)
        if (ix == &f->by_name || f->workers[i]->peer)
            index_put(ix, hash_of(f, ix, f->workers[i]), f->workers[i]->index);
}

struct worker *fleet_by_name(const struct fleet *f, const char *name)
{
    const struct fleet_index *ix = &f->by_name;
    if (!ix->n_slots)
        return NULL;
    for (size_t i = hash_name(name) & (ix->n_slots - 1); ix->slots[i];
         i = (i + 1) & (ix->n_slots - 1)) {
        struct worker *w = f->workers[ix->slots[i] - 1];
        if (!strcmp(w->name, name))
            return w;
    }
    return NULL;
}

struct worker *fleet_by_peer(const struct fleet *f, uint64_t peer)
{
    const struct fleet_index *ix = &f->by_peer;
    if (!ix->n_slots || !peer)
        return NULL;
    for (size_t i = hash_peer(peer) & (ix->n_slots - 1); ix->slots[i];
         i = (i + 1) & (ix->n_slots - 1)) {
        struct worker *w = f->workers[ix->slots[i] - 1];
        if (w->peer == peer)
            return w;
    }
    return NULL;
}

/* ---- members ------------------------------------------------------------------------------ */

static bool may_be_forgotten(const struct worker *w)
{
    return (w->health == HEALTH_LOST || w->health == HEALTH_GONE) && !w->is_drained && !w->job;
}

static struct worker *fresh_worker(const char *name, uint32_t index)
{
    struct worker *w = xcalloc(1, sizeof *w);
    w->name = xstrdup(name);
    w->index = index;
    w->node = xstrdup("");
    w->machine = xstrdup("");
    w->record_reason = xstrdup("");
    w->device = xstrdup("");
    w->version = xstrdup("");
    return w;
}

struct worker *fleet_add(struct fleet *f, const char *name)
{
    size_t i = f->n;
    if (f->n == WORKERS_MAX) {
        for (i = 0; i < f->n && !may_be_forgotten(f->workers[i]); i++)
            ;
        if (i == f->n)
            return NULL;
        worker_destroy(f->workers[i]);
    } else {
        f->workers = xgrow(f->workers, f->n, &f->n_alloc, sizeof *f->workers);
        f->n++;
    }
    f->workers[i] = fresh_worker(name, (uint32_t)i);
    index_add(f, &f->by_name, f->workers[i]);
    return f->workers[i];
}

void fleet_set_peer(struct fleet *f, struct worker *w, uint64_t peer)
{
    if (w->peer == peer)
        return;
    struct worker *other = fleet_by_peer(f, peer);
    if (other)
        other->peer = 0; /* one connection speaks for one worker */
    w->peer = peer;
    if (peer)
        index_add(f, &f->by_peer, w);
}

bool fleet_is_attached(const struct worker *w)
{
    return w->health >= HEALTH_ALIVE && w->health <= HEALTH_SUSPECT;
}

void fleet_set_health(struct fleet *f, struct worker *w, enum health health)
{
    bool was_attached = fleet_is_attached(w);
    w->health = health;
    if (fleet_is_attached(w) && !was_attached)
        f->n_attached++;
    if (!fleet_is_attached(w) && was_attached)
        f->n_attached--;
}

void fleet_heard(struct fleet *f, struct worker *w, uint64_t now_ns)
{
    w->last_heard_ns = now_ns;
    fleet_set_health(f, w, HEALTH_ALIVE);
}

static bool is_sick(const struct worker *w)
{
    return w->gpu && w->gpu->sick[0];
}

bool fleet_is_usable(const struct worker *w)
{
    return (w->health == HEALTH_ALIVE || w->health == HEALTH_LATE) && w->peer && !w->is_drained &&
           !is_sick(w);
}

void fleet_set_gpu(struct worker *w, const Ballast__GpuHealth *gpu)
{
    gpu_free(w->gpu);
    w->gpu = gpu_dup(gpu);
}

bool fleet_is_free(const struct worker *w, uint64_t now_ns)
{
    return fleet_is_usable(w) && !w->job && !w->holds_foreign && now_ns >= w->free_from_ns;
}

/* ---- leases ------------------------------------------------------------------------------- */

uint64_t fleet_interval_ns(const struct fleet *f)
{
    uint64_t scaled_ns = f->n_attached * NS_PER_S / f->config.heartbeats_per_s;
    return scaled_ns > f->config.heartbeat_floor_ns ? scaled_ns : f->config.heartbeat_floor_ns;
}

uint32_t fleet_tell_interval(struct fleet *f, struct worker *w)
{
    w->interval_before_ns = w->interval_ns;
    w->interval_ns = fleet_interval_ns(f);
    return (uint32_t)(w->interval_ns / NS_PER_MS);
}

/* A worker that did not get the newest word still beats at the interval before. */
static uint64_t lease_interval_ns(const struct worker *w)
{
    return w->interval_ns > w->interval_before_ns ? w->interval_ns : w->interval_before_ns;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Health at now_ns; *out_until_ns: the moment up to which that holds without a word. */
static enum health judge(const struct fleet *f, const struct worker *w, uint64_t now_ns,
                         uint64_t *out_until_ns)
{
    const struct fleet_config *c = &f->config;
    if (w->health == HEALTH_EXPECTED) {
        *out_until_ns = w->last_heard_ns + c->restart_grace_ns;
        return now_ns >= *out_until_ns ? HEALTH_LOST : HEALTH_EXPECTED;
    }
    uint64_t interval_ns = lease_interval_ns(w);
    uint64_t late_ns = w->last_heard_ns + c->late_intervals * interval_ns;
    uint64_t suspect_ns = w->last_heard_ns + c->suspect_intervals * interval_ns;
    uint64_t lost_ns = w->last_heard_ns +
        max_u64(c->lost_intervals * interval_ns, c->lost_floor_ns);
    *out_until_ns = now_ns < late_ns ? late_ns : now_ns < suspect_ns ? suspect_ns : lost_ns;
    return now_ns < late_ns ? HEALTH_ALIVE : now_ns < suspect_ns ? HEALTH_LATE
         : now_ns < lost_ns ? HEALTH_SUSPECT : HEALTH_LOST;
}

uint64_t fleet_tick(struct fleet *f, uint64_t now_ns, struct arena *arena,
                    struct worker ***out_lost, size_t *out_n_lost)
{
    uint64_t next_ns = UINT64_MAX;
    size_t n_lost = 0;
    struct worker **lost = NULL;
    for (size_t i = 0; i < f->n; i++) {
        struct worker *w = f->workers[i];
        if (w->health == HEALTH_LOST || w->health == HEALTH_GONE)
            continue;
        uint64_t until_ns;
        enum health health = judge(f, w, now_ns, &until_ns);
        fleet_set_health(f, w, health);
        if (health == HEALTH_LOST) {
            if (!lost)
                lost = arena_alloc(arena, f->n * sizeof *lost);
            lost[n_lost++] = w;
        } else if (until_ns < next_ns) {
            next_ns = until_ns;
        }
    }
    *out_lost = lost;
    *out_n_lost = n_lost;
    return next_ns;
}

void fleet_renew(struct fleet *f, uint64_t now_ns)
{
    for (size_t i = 0; i < f->n; i++) {
        struct worker *w = f->workers[i];
        w->last_heard_ns = now_ns;
        if (fleet_is_attached(w))
            fleet_set_health(f, w, HEALTH_ALIVE);
    }
}

/* ---- for people --------------------------------------------------------------------------- */

Ballast__WorkerState fleet_state(const struct worker *w)
{
    switch (w->health) {
    case HEALTH_EXPECTED: return BALLAST__WORKER_STATE__WORKER_SUSPECT;
    case HEALTH_LATE:     return BALLAST__WORKER_STATE__WORKER_LATE;
    case HEALTH_SUSPECT:  return BALLAST__WORKER_STATE__WORKER_SUSPECT;
    case HEALTH_LOST:     return BALLAST__WORKER_STATE__WORKER_LOST;
    case HEALTH_GONE:     return BALLAST__WORKER_STATE__WORKER_GONE;
    case HEALTH_ALIVE:    break;
    }
    if (w->is_drained)
        return BALLAST__WORKER_STATE__WORKER_DRAINED;
    if (is_sick(w))
        return BALLAST__WORKER_STATE__WORKER_SICK;
    return w->job || w->holds_foreign ? BALLAST__WORKER_STATE__WORKER_BUSY
                                      : BALLAST__WORKER_STATE__WORKER_IDLE;
}

static const char *reason_of(const struct worker *w)
{
    if (w->health == HEALTH_EXPECTED)
        return "has not come back since the coordinator started";
    if (w->health == HEALTH_ALIVE && !w->is_drained && is_sick(w))
        return w->gpu->sick;
    if (w->health == HEALTH_ALIVE && !w->is_drained && w->holds_foreign && !w->job)
        return "ends an attempt that is not wanted any more";
    return w->record_reason;
}

Ballast__Worker *fleet_describe(const struct worker *w, uint64_t now_ns, struct arena *arena)
{
    Ballast__Worker *out = arena_alloc(arena, sizeof *out);
    ballast__worker__init(out);
    out->name = arena_strdup(arena, w->name);
    out->node = arena_strdup(arena, w->node);
    out->state = fleet_state(w);
    out->device = arena_strdup(arena, w->device);
    out->memory_bytes = w->memory_bytes;
    out->cores = w->cores;
    out->worker_epoch = w->epoch;
    out->heartbeat_age_ms = now_ns > w->last_heard_ns ? (now_ns - w->last_heard_ns) / NS_PER_MS
                                                      : 0;
    out->job_id = w->job;
    out->attempt = w->attempt;
    out->rank = w->rank;
    out->reason = arena_strdup(arena, reason_of(w));
    out->version = arena_strdup(arena, w->version);
    out->pid = w->pid;
    out->gpu = gpu_dup_in(arena, w->gpu);
    return out;
}
