/* coord.c - the coordinator's core: turns and time
 *
 * A message changes what it is about at once; what follows from the change elsewhere (who may
 * start now, who was waiting for it) is worked out once, at the end of the turn, by coord_tick. */
#include "coordinator/core.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/queue.h"

#define PRUNE_KEYS_NS (3600 * NS_PER_S)

struct coord_config coord_config_default(void)
{
    return (struct coord_config){
        .heartbeat_floor_ns = NS_PER_S,
        .heartbeats_per_s = 1000,
        .late_intervals = 2,
        .suspect_intervals = 3,
        .lost_intervals = 4,
        .lost_floor_ns = 10 * NS_PER_S,
        .restart_grace_ns = 30 * NS_PER_S,
        .fence_ns = 300 * NS_PER_S,
        .orphan_ns = 2 * NS_PER_S,
        .backoff_base_ns = NS_PER_S,
        .backoff_cap_ns = 60 * NS_PER_S,
        .start_timeout_ns = 900 * NS_PER_S,
        .stop_grace_ns = 5 * NS_PER_S,
        .checkpoint_grace_ns = 60 * NS_PER_S,
        .pause_grace_ns = 900 * NS_PER_S,
        .prepare_timeout_ns = 60 * NS_PER_S,
        .key_keep_ns = 24 * 3600 * NS_PER_S,
        .version = "",
        .commit = "",
        .dashboard = "",
    };
}

struct coord *coord_create(const struct coord_config *config)
{
    struct coord *c = xcalloc(1, sizeof *c);
    c->config = *config;
    fleet_init(&c->fleet, &(struct fleet_config){
        .heartbeat_floor_ns = config->heartbeat_floor_ns,
        .heartbeats_per_s = config->heartbeats_per_s,
        .late_intervals = config->late_intervals,
        .suspect_intervals = config->suspect_intervals,
        .lost_intervals = config->lost_intervals,
        .lost_floor_ns = config->lost_floor_ns,
        .restart_grace_ns = config->restart_grace_ns,
    });
    c->next_scan_ns = UINT64_MAX;
    return c;
}

void coord_destroy(struct coord *c)
{
    if (!c)
        return;
    job_table_fini(&c->jobs);
    fleet_fini(&c->fleet);
    keys_fini(&c->keys);
    free(c->waiting);
    free(c->waits);
    free(c->ended);
    free(c->placing);
    free(c);
}

void core_wake_at(struct coord *c, uint64_t at_ns)
{
    if (at_ns < c->next_scan_ns)
        c->next_scan_ns = at_ns;
}

/* ---- a turn ------------------------------------------------------------------------------- */

void coord_start(struct coord *c, struct turn *t)
{
    c->started_ns = c->now_ns = t->now_ns;
    c->committed_seq = c->last_seq;
    c->next_prune_ns = t->now_ns + PRUNE_KEYS_NS;
    keys_shift(&c->keys, t->now_ns);
    emit_epoch(c, t);
    t->coordinator_epoch = c->epoch;
    for (size_t i = 0; i < c->fleet.n; i++) {
        struct worker *w = c->fleet.workers[i];
        bool was_attached = w->record_state == BALLAST__WORKER_STATE__WORKER_IDLE;
        bool was_lost = w->record_state == BALLAST__WORKER_STATE__WORKER_LOST;
        w->health = was_attached ? HEALTH_EXPECTED : was_lost ? HEALTH_LOST : HEALTH_GONE;
    }
    attempt_adopt_all(c);
    for (size_t i = 0; i < c->fleet.n; i++)
        if (c->fleet.workers[i]->job)
            c->fleet.workers[i]->health = HEALTH_EXPECTED;
    fleet_renew(&c->fleet, t->now_ns);
    c->queue_is_stale = true;
    core_wake_at(c, t->now_ns);
}

void coord_begin(struct coord *c, struct turn *t, uint64_t now_ns, int64_t wall_ns)
{
    uint64_t due_ns = coord_next_deadline_ns(c);
    if (c->started_ns && due_ns != UINT64_MAX &&
        now_ns > due_ns + fleet_interval_ns(&c->fleet))
        fleet_renew(&c->fleet, now_ns);
    c->now_ns = c->started_ns ? now_ns : 0;
    t->now_ns = now_ns;
    t->wall_ns = wall_ns;
    t->coordinator_epoch = c->epoch;
    if (c->has_ended_jobs)
        c->has_ended_jobs = job_table_forget_ended(&c->jobs, c->committed_seq);
}

void coord_committed(struct coord *c, record_seq seq)
{
    if (seq > c->committed_seq)
        c->committed_seq = seq;
}

static void dispatch(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                     const Ballast__Envelope *e, const ProtobufCMessage *payload)
{
    switch (e->method) {
    case BALLAST__METHOD__METHOD_PING:
        call_ping(c, t, peer, user, e);
        break;
    case BALLAST__METHOD__METHOD_SUBMIT:
        call_submit(c, t, peer, user, e, (const Ballast__SubmitRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_JOB_LIST:
        call_job_list(c, t, peer, e, (const Ballast__JobListRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_JOB_CANCEL:
    case BALLAST__METHOD__METHOD_JOB_HOLD:
    case BALLAST__METHOD__METHOD_JOB_RELEASE:
        call_job(c, t, peer, e, (const Ballast__JobRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_JOB_PAUSE:
    case BALLAST__METHOD__METHOD_JOB_RESUME:
    case BALLAST__METHOD__METHOD_JOB_REQUEUE:
        call_job_pause(c, t, peer, user, e, (const Ballast__JobRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_JOB_SET:
        call_job_set(c, t, peer, user, e, (const Ballast__JobSetRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_JOB_WAIT:
        call_job_wait(c, t, peer, e, (const Ballast__JobWaitRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_WORKER_LIST:
        call_worker_list(c, t, peer, e);
        break;
    case BALLAST__METHOD__METHOD_WORKER_DRAIN:
    case BALLAST__METHOD__METHOD_WORKER_RESUME:
        call_worker(c, t, peer, e, (const Ballast__WorkerDrainRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_REBALANCE_PLAN:
    case BALLAST__METHOD__METHOD_REBALANCE_APPLY:
    case BALLAST__METHOD__METHOD_REBALANCE_AUTO:
        call_rebalance(c, t, peer, user, e, (const Ballast__RebalanceRequest *)payload);
        break;
    case BALLAST__METHOD__METHOD_HELLO:
        attach_hello(c, t, peer, e, (const Ballast__Hello *)payload);
        break;
    case BALLAST__METHOD__METHOD_HEARTBEAT:
        attach_heartbeat(c, t, peer, e, (const Ballast__Heartbeat *)payload);
        break;
    case BALLAST__METHOD__METHOD_RANK_STATE:
        attach_rank_state(c, t, peer, e, (const Ballast__RankState *)payload);
        break;
    case BALLAST__METHOD__METHOD_STEPS:
        attach_steps(c, t, peer, e, (const Ballast__StepReports *)payload);
        break;
    case BALLAST__METHOD__METHOD_LOAD:
        attach_load(c, t, peer, e, (const Ballast__LoadReport *)payload);
        break;
    case BALLAST__METHOD__METHOD_GOODBYE:
        attach_goodbye(c, t, peer, e, (const Ballast__Goodbye *)payload);
        break;
    default:
        if (e->kind == BALLAST__KIND__KIND_REQUEST)
            turn_refuse(t, peer, e, BALLAST__CODE__UNIMPLEMENTED, "METHOD",
                        "the coordinator does not know method %d", (int)e->method);
    }
}

/* The job that a message of people's names to change it, or NULL. */
static const job_id *named_job(Ballast__Method method, const ProtobufCMessage *payload)
{
    switch (method) {
    case BALLAST__METHOD__METHOD_JOB_CANCEL:
    case BALLAST__METHOD__METHOD_JOB_HOLD:
    case BALLAST__METHOD__METHOD_JOB_RELEASE:
    case BALLAST__METHOD__METHOD_JOB_REQUEUE:
    case BALLAST__METHOD__METHOD_JOB_PAUSE:
    case BALLAST__METHOD__METHOD_JOB_RESUME:
        return &((const Ballast__JobRequest *)payload)->job_id;
    case BALLAST__METHOD__METHOD_JOB_SET:
        return &((const Ballast__JobSetRequest *)payload)->job_id;
    default:
        return NULL;
    }
}

job_id coord_wants_job(const struct coord *c, Ballast__Method method,
                       const ProtobufCMessage *payload)
{
    const job_id *ids = named_job(method, payload);
    size_t n_ids = ids ? 1 : 0;
    switch (method) {
    case BALLAST__METHOD__METHOD_JOB_WAIT:
        ids = &((const Ballast__JobWaitRequest *)payload)->job_id;
        n_ids = 1;
        break;
    case BALLAST__METHOD__METHOD_SUBMIT: {
        const Ballast__JobSpec *spec = ((const Ballast__SubmitRequest *)payload)->spec;
        ids = spec ? spec->scheduling_after : NULL;
        n_ids = spec ? spec->n_scheduling_after : 0;
        break;
    }
    default:
        break;
    }
    for (size_t i = 0; i < n_ids; i++)
        if (ids[i] && ids[i] <= c->last_job_id && !job_table_find(&c->jobs, ids[i]))
            return ids[i];
    return 0;
}

/* The job that the message would change, or 0. */
static job_id changed_job(Ballast__Method method, const ProtobufCMessage *payload)
{
    const job_id *named = named_job(method, payload);
    if (method == BALLAST__METHOD__METHOD_REBALANCE_APPLY ||
        method == BALLAST__METHOD__METHOD_REBALANCE_AUTO)
        return ((const Ballast__RebalanceRequest *)payload)->job_id;
    return named ? *named : 0;
}

void coord_message(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                   const Ballast__Envelope *e, const ProtobufCMessage *payload)
{
    job_id id = changed_job(e->method, payload);
    const struct job *j = id ? job_table_find(&c->jobs, id) : NULL;
    if (t->is_limited && j && strcmp(j->user, user)) {
        turn_refuse(t, peer, e, BALLAST__CODE__PERMISSION_DENIED, "NOT_OWNER",
                    "job %" PRIu64 " belongs to %s; %s may change no jobs but his own", id,
                    j->user, user);
        return;
    }
    bool is_workers = e->method >= BALLAST__METHOD__METHOD_HELLO;
    t->by = is_workers ? NULL : user;
    t->worker_by = is_workers ? user : NULL;
    dispatch(c, t, peer, user, e, payload);
    t->by = t->worker_by = NULL;
}

void coord_peer_gone(struct coord *c, struct turn *t, uint64_t peer)
{
    (void)t;
    struct worker *w = fleet_by_peer(&c->fleet, peer);
    if (w)
        fleet_set_peer(&c->fleet, w, 0);
    size_t n = 0;
    for (size_t i = 0; i < c->n_waits; i++)
        if (c->waits[i].peer != peer)
            c->waits[n++] = c->waits[i];
    c->n_waits = n;
}

/* ---- the end of a turn -------------------------------------------------------------------- */

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Looks at everybody's time. */
static void scan(struct coord *c, struct turn *t)
{
    c->next_scan_ns = UINT64_MAX;
    c->queue_is_stale = true; /* a restarted worker may be free by now, a backoff over */
    uint64_t next_ns = attach_tick(c, t);
    for (size_t i = 0; i < c->jobs.n; i++)
        next_ns = min_u64(next_ns, attempt_tick(c, t, c->jobs.jobs[i]));
    if (t->now_ns >= c->next_prune_ns) {
        keys_prune(&c->keys, t->now_ns);
        c->next_prune_ns = t->now_ns + PRUNE_KEYS_NS;
    }
    /* What was done just now may have something due at once: that is the next turn's. */
    core_wake_at(c, next_ns > t->now_ns ? next_ns : t->now_ns + 1);
}

/* Jobs that come after one that has ended: free to go, or cancelled, and so on down the line. */
static void settle_after(struct coord *c, struct turn *t)
{
    for (size_t i = 0; i < c->n_ended; i++) {
        job_id id = c->ended[i];
        const struct job *ended = job_table_find(&c->jobs, id);
        for (size_t k = 0; k < c->jobs.n; k++) {
            struct job *j = c->jobs.jobs[k];
            bool waits = false;
            for (size_t a = 0; a < j->n_after; a++)
                waits |= j->after[a] == id;
            if (!waits || job_has_ended(j))
                continue;
            if (ended->state == BALLAST__JOB_STATE__JOB_DONE)
                emit_after(c, t, j, id);
            else
                attempt_end(c, t, j, BALLAST__JOB_STATE__JOB_CANCELLED,
                            BALLAST__STOP_MODE__STOP_NOW,
                            arena_printf(&t->arena, "job %llu of scheduling.after is %s",
                                         (unsigned long long)id, event_job_state(ended->state)),
                            "");
        }
    }
    c->n_ended = 0;
}

/* What keeps a waiting job from being looked at for workers; WAIT_NONE: nothing. */
static struct wait_reason obstacle(const struct job *j, uint64_t now_ns)
{
    if (j->ranks)
        return (struct wait_reason){.kind = WAIT_GANG};
    if (j->held)
        return (struct wait_reason){.kind = WAIT_HELD};
    if (j->n_after)
        return (struct wait_reason){.kind = WAIT_AFTER, .a = j->after[0]};
    if (j->state == BALLAST__JOB_STATE__JOB_RECOVERING && now_ns < j->not_before_ns)
        return (struct wait_reason){.kind = WAIT_BACKOFF};
    return (struct wait_reason){0};
}

size_t core_workers(const struct fleet *f, uint64_t now_ns, struct arena *arena,
                    struct queue_worker **out_workers)
{
    struct queue_worker *workers = arena_alloc(arena, f->n * sizeof *workers);
    size_t n = 0;
    for (size_t i = 0; i < f->n; i++) {
        const struct worker *w = f->workers[i];
        if (fleet_is_usable(w))
            workers[n++] = (struct queue_worker){.index = w->index, .name = w->name,
                .is_free = fleet_is_free(w, now_ns), .memory_bytes = w->memory_bytes,
                .node = w->node};
    }
    *out_workers = workers;
    return n;
}

struct queue_job core_queue_job(job_id id, const Ballast__JobSpec *spec)
{
    return (struct queue_job){
        .id = id, .priority = spec->scheduling_priority, .n_workers = spec->parallel_workers,
        .memory_bytes = spec->memory_bytes_per_rank,
        .memory_bytes_spread = spec->memory_bytes_spread,
        .n_together = spec->parallel_expert_parallel_degree};
}

static void run_queue(struct coord *c, struct turn *t)
{
    struct arena *arena = &t->arena;
    struct job **jobs = arena_alloc(arena, c->n_waiting * sizeof *jobs);
    struct queue_job *asked = arena_alloc(arena, c->n_waiting * sizeof *asked);
    size_t n_jobs = 0;
    c->queue_is_stale = false;
    for (size_t i = 0; i < c->n_waiting; i++) {
        struct job *j = c->waiting[i];
        j->wait = obstacle(j, t->now_ns);
        if (j->wait.kind != WAIT_NONE)
            continue;
        asked[n_jobs] = core_queue_job(j->id, j->spec);
        jobs[n_jobs++] = j;
    }
    if (!n_jobs)
        return;
    struct queue_worker *workers;
    size_t n_workers = core_workers(&c->fleet, t->now_ns, arena, &workers);
    struct queue_decision *decisions = arena_alloc(arena, n_jobs * sizeof *decisions);
    queue_decide(asked, n_jobs, workers, n_workers, arena, decisions);
    for (size_t i = 0; i < n_jobs; i++) {
        jobs[i]->wait = decisions[i].wait;
        if (decisions[i].workers)
            attempt_start(c, t, jobs[i], decisions[i].workers);
    }
    c->queue_is_stale = false; /* it is as it was decided; starting changed no answer */
}

void coord_tick(struct coord *c, struct turn *t)
{
    if (t->now_ns >= c->next_scan_ns)
        scan(c, t);
    if (c->n_ended)
        settle_after(c, t);
    if (c->queue_is_stale)
        run_queue(c, t);
    if (c->n_placing)
        placing_think(c, t);
    if (c->n_waits)
        core_wake_at(c, calls_answer_waits(c, t));
}

uint64_t coord_next_deadline_ns(const struct coord *c)
{
    return c->next_scan_ns;
}
