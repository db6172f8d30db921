/* attach.c - workers come, beat, fall silent and go
 *
 * A worker's messages carry its life (worker_epoch) and a number that grows over that life, so a
 * message that was overtaken is known as such: what it says has ended has ended, the rest of it
 * is old news and neither renews the lease nor proves that something is missing.
 *
 * Whoever is not known (after a restart of the coordinator, or because another life has its name)
 * is asked to say hello. Of two lives of one name the one that is attached keeps it as long as it
 * speaks; after a kill -9 the connection of the dead one is found gone when it is probed, or its
 * silence tells. */
#include "coordinator/core.h"

#include <inttypes.h>
#include <string.h>

#define HELLO_RETRY_MS 250

static void send_alive(struct coord *c, struct turn *t, struct worker *w)
{
    Ballast__Ack *a = arena_alloc(&t->arena, sizeof *a);
    ballast__ack__init(a);
    a->alive = true;
    a->heartbeat_interval_ms = fleet_tell_interval(&c->fleet, w);
    a->heard_seq = w->beat_seq;
    if (w->peer)
        turn_notice(t, w->peer, w->epoch, BALLAST__METHOD__METHOD_ACK, &a->base);
}

/* The present life of a worker that this message is from, or NULL: then it is asked for a
 * HELLO. */
static struct worker *speaker(struct coord *c, struct turn *t, uint64_t peer,
                              const Ballast__Envelope *e)
{
    struct worker *w = fleet_by_peer(&c->fleet, peer);
    if (w && w->epoch == e->worker_epoch)
        return w;
    Ballast__Ack *a = arena_alloc(&t->arena, sizeof *a);
    ballast__ack__init(a);
    turn_notice(t, peer, e->worker_epoch, BALLAST__METHOD__METHOD_ACK, &a->base);
    return NULL;
}

static void record_worker(struct coord *c, struct turn *t, const struct worker *w,
                          Ballast__WorkerState state, const char *reason)
{
    Ballast__RecordWorker r = BALLAST__RECORD_WORKER__INIT;
    r.node = w->node;
    r.machine = w->machine;
    r.state = state;
    r.worker_epoch = w->epoch;
    r.drained = w->is_drained;
    r.reason = w->is_drained ? w->record_reason : arena_strdup(&t->arena, reason);
    emit_worker(c, t, w->name, &r);
}

/* True if this is the newest word of the worker; then it is alive. */
static bool is_news(struct coord *c, struct turn *t, struct worker *w, const Ballast__Envelope *e)
{
    if (e->seq <= w->last_seq)
        return false;
    w->last_seq = e->seq;
    bool was_usable = fleet_is_usable(w);
    fleet_heard(&c->fleet, w, t->now_ns);
    if (!was_usable)
        c->queue_is_stale = true;
    if (w->record_state != BALLAST__WORKER_STATE__WORKER_IDLE)
        record_worker(c, t, w, BALLAST__WORKER_STATE__WORKER_IDLE, "");
    core_wake_at(c, t->now_ns + c->config.late_intervals * fleet_interval_ns(&c->fleet));
    return true;
}

/* A report of all that a worker holds. */
static void hold(struct coord *c, struct turn *t, struct worker *w,
                 Ballast__RankState *const *states, size_t n_states, bool is_newest)
{
    job_id job = w->job;
    uint32_t attempt = w->attempt, rank = w->rank;
    bool holds_ours = false, holds_foreign = false;
    for (size_t i = 0; i < n_states; i++) {
        const Ballast__RankState *s = states[i];
        bool is_ours = job && s->job_id == job && s->attempt == attempt && s->rank == rank;
        bool has_ended = rank_phase_has_ended(s->phase);
        holds_ours |= is_ours;
        holds_foreign |= !is_ours && !has_ended;
        if (is_newest || has_ended)
            attempt_report(c, t, w, s);
    }
    if (!is_newest)
        return;
    if (job && !holds_ours && w->job == job && w->attempt == attempt)
        attempt_missing(c, t, w);
    if (w->holds_foreign && !holds_foreign)
        c->queue_is_stale = true;
    w->holds_foreign = holds_foreign;
}

/* ---- hello -------------------------------------------------------------------------------- */

static void refuse_hello(struct coord *c, struct turn *t, uint64_t peer,
                         const Ballast__Envelope *e, const Ballast__Hello *hello,
                         struct worker *w)
{
    uint64_t silent_ms = (t->now_ns - w->last_heard_ns) / NS_PER_MS;
    turn_refuse(t, peer, e, BALLAST__CODE__ALREADY_EXISTS, "WORKER_NAME_IN_USE",
                "worker %s is attached already (pid %u on node '%s', heard %" PRIu64
                " ms ago); end that one or give this one another name", hello->name, w->pid,
                w->node, silent_ms);
    t->out[t->n_out - 1].envelope.status->retry_after_ms = HELLO_RETRY_MS;
    turn_note(t, "worker=%s pid=%u msg=\"hello refused, its name is in use by pid %u\"",
              hello->name, hello->pid, w->pid);
    for (size_t i = 0; i < hello->n_ranks; i++)
        if (!rank_phase_has_ended(hello->ranks[i]->phase))
            attempt_fence(t, peer, e->worker_epoch, hello->ranks[i],
                          "another life of this worker is attached");
    /* If the connection of the attached one is dead, this send finds out. */
    send_alive(c, t, w);
}

static bool is_taken(const struct coord *c, const struct worker *w, const Ballast__Envelope *e,
                     uint64_t now_ns)
{
    if (!fleet_is_attached(w) || !w->epoch || w->epoch == e->worker_epoch)
        return false;
    uint64_t silent_ns = now_ns - w->last_heard_ns;
    bool speaks = w->peer && silent_ns <= c->config.late_intervals * fleet_interval_ns(&c->fleet);
    return speaks || e->worker_epoch < w->epoch;
}

static void reply_welcome(struct coord *c, struct turn *t, uint64_t peer,
                          const Ballast__Envelope *e, struct worker *w)
{
    Ballast__Welcome *welcome = arena_alloc(&t->arena, sizeof *welcome);
    ballast__welcome__init(welcome);
    welcome->coordinator_epoch = c->epoch;
    welcome->heartbeat_interval_ms = fleet_tell_interval(&c->fleet, w);
    welcome->lease_ms = c->config.suspect_intervals * welcome->heartbeat_interval_ms;
    welcome->fence_ms = (uint32_t)(c->config.fence_ns / NS_PER_MS);
    welcome->version = arena_strdup(&t->arena, c->config.version);
    turn_reply(t, peer, e, &welcome->base);
}

/* The worker is another process than the one that was known. */
static void begin_life(struct coord *c, struct turn *t, struct worker *w, uint64_t epoch)
{
    const struct job *j = w->job ? job_table_find(&c->jobs, w->job) : NULL;
    bool is_first_word = !w->epoch; /* since the coordinator started */
    if (j && !(is_first_word && j->gang_epochs[w->rank] == epoch))
        attempt_rank_lost(c, t, w, RANK_ORPHAN,
                          arena_printf(&t->arena, "worker %s was restarted", w->name));
    bool was_seen = w->epoch || w->record_state;
    if (was_seen && w->health != HEALTH_GONE && !(is_first_word && w->record_epoch == epoch)) {
        w->free_from_ns = t->now_ns + c->config.orphan_ns;
        core_wake_at(c, w->free_from_ns);
    }
    w->epoch = epoch;
    w->last_seq = w->beat_seq = 0;
    w->interval_ns = w->interval_before_ns = 0;
}

void attach_hello(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                  const Ballast__Hello *hello)
{
    if (!e->worker_epoch) {
        turn_refuse(t, peer, e, BALLAST__CODE__INVALID_ARGUMENT, "NO_WORKER_EPOCH",
                    "worker %s: the hello has no worker_epoch", hello->name);
        return;
    }
    struct worker *w = fleet_by_name(&c->fleet, hello->name);
    if (w && is_taken(c, w, e, t->now_ns)) {
        refuse_hello(c, t, peer, e, hello, w);
        return;
    }
    if (!w && !(w = fleet_add(&c->fleet, hello->name))) {
        turn_refuse(t, peer, e, BALLAST__CODE__RESOURCE_EXHAUSTED, "TOO_MANY_WORKERS",
                    "%u workers are attached, the most there may be", WORKERS_MAX);
        return;
    }
    bool is_new_life = w->epoch != e->worker_epoch;
    if (is_new_life)
        begin_life(c, t, w, e->worker_epoch);
    if (e->seq <= w->last_seq) {
        reply_welcome(c, t, peer, e, w); /* overtaken by a newer word */
        return;
    }
    job_text(&w->device, hello->device);
    job_text(&w->version, hello->version);
    w->memory_bytes = hello->memory_bytes;
    w->cores = hello->cores;
    w->pid = hello->pid;
    fleet_set_gpu(w, hello->gpu);
    fleet_set_peer(&c->fleet, w, peer);
    fleet_heard(&c->fleet, w, t->now_ns);
    if (w->record_state != BALLAST__WORKER_STATE__WORKER_IDLE ||
        w->record_epoch != w->epoch || strcmp(w->node, hello->node) ||
        strcmp(w->machine, hello->machine)) {
        struct worker seen = *w;
        seen.node = hello->node;
        seen.machine = hello->machine;
        record_worker(c, t, &seen, BALLAST__WORKER_STATE__WORKER_IDLE, "");
    }
    is_news(c, t, w, e);
    w->beat_seq = e->seq;
    c->queue_is_stale = true;
    reply_welcome(c, t, peer, e, w);
    hold(c, t, w, hello->ranks, hello->n_ranks, true);
}

/* ---- the rest ----------------------------------------------------------------------------- */

void attach_heartbeat(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                      const Ballast__Heartbeat *beat)
{
    struct worker *w = speaker(c, t, peer, e);
    if (!w)
        return;
    bool is_newest = is_news(c, t, w, e);
    if (is_newest) {
        w->beat_seq = e->seq;
        fleet_set_gpu(w, beat->gpu);
        send_alive(c, t, w);
    }
    hold(c, t, w, beat->ranks, beat->n_ranks, is_newest);
}

void attach_rank_state(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                       const Ballast__RankState *state)
{
    struct worker *w = speaker(c, t, peer, e);
    if (w && (is_news(c, t, w, e) || rank_phase_has_ended(state->phase)))
        attempt_report(c, t, w, state);
}

void attach_steps(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                  const Ballast__StepReports *reports)
{
    struct worker *w = speaker(c, t, peer, e);
    if (!w)
        return;
    is_news(c, t, w, e);
    struct job *j = job_table_find(&c->jobs, reports->job_id);
    bool exists = reports->job_id && reports->job_id <= c->last_job_id;
    if (exists && !(j && reports->attempt > j->attempt))
        turn_store_steps(t, reports->job_id, reports);
    else
        turn_note(t, "worker=%s job=%" PRIu64 " attempt=%u msg=\"steps of an attempt that never "
                  "was, thrown away\"", w->name, reports->job_id, reports->attempt);
    if (j)
        job_fold(j, reports->attempt, reports);
    Ballast__Ack *a = arena_alloc(&t->arena, sizeof *a);
    ballast__ack__init(a);
    a->job_id = reports->job_id;
    a->attempt = reports->attempt;
    for (size_t i = 0; i < reports->n_steps; i++) {
        const Ballast__StepReport *r = reports->steps[i];
        a->step = r->step > a->step ? r->step : a->step;
        a->step_samples = r->samples > a->step_samples ? r->samples : a->step_samples;
    }
    turn_notice(t, peer, w->epoch, BALLAST__METHOD__METHOD_ACK, &a->base);
}

void attach_load(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                 const Ballast__LoadReport *report)
{
    struct worker *w = speaker(c, t, peer, e);
    if (!w)
        return;
    is_news(c, t, w, e);
    struct job *j = job_table_find(&c->jobs, report->job_id);
    bool exists = report->job_id && report->job_id <= c->last_job_id;
    if (exists && !(j && report->attempt > j->attempt))
        turn_store_load(t, report->job_id, report);
    else
        turn_note(t, "worker=%s job=%" PRIu64 " attempt=%u msg=\"loads of an attempt that never "
                  "was, thrown away\"", w->name, report->job_id, report->attempt);
    if (j && report->attempt == j->attempt)
        placing_load(c, j, report);
    Ballast__Ack *a = arena_alloc(&t->arena, sizeof *a);
    ballast__ack__init(a);
    a->job_id = report->job_id;
    a->attempt = report->attempt;
    a->load_step = report->last_step;
    turn_notice(t, peer, w->epoch, BALLAST__METHOD__METHOD_ACK, &a->base);
}

void attach_goodbye(struct coord *c, struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                    const Ballast__Goodbye *goodbye)
{
    struct worker *w = fleet_by_peer(&c->fleet, peer);
    if (!w || w->epoch != e->worker_epoch || e->seq <= w->last_seq)
        return;
    w->last_seq = e->seq;
    fleet_set_health(&c->fleet, w, HEALTH_GONE);
    fleet_set_peer(&c->fleet, w, 0);
    w->holds_foreign = false;
    c->queue_is_stale = true;
    record_worker(c, t, w, BALLAST__WORKER_STATE__WORKER_GONE, goodbye->reason);
    attempt_rank_lost(c, t, w, RANK_ENDED,
                      arena_printf(&t->arena, "worker %s left: %s", w->name, goodbye->reason));
}

uint64_t attach_tick(struct coord *c, struct turn *t)
{
    struct worker **lost;
    size_t n_lost;
    uint64_t next_ns = fleet_tick(&c->fleet, t->now_ns, &t->arena, &lost, &n_lost);
    for (size_t i = 0; i < n_lost; i++) {
        struct worker *w = lost[i];
        const char *silent = arena_printf(&t->arena, "silent for %.1f s",
                                          (double)(t->now_ns - w->last_heard_ns) / NS_PER_S);
        w->holds_foreign = true; /* until it says what it holds */
        c->queue_is_stale = true;
        record_worker(c, t, w, BALLAST__WORKER_STATE__WORKER_LOST, silent);
        attempt_rank_lost(c, t, w, RANK_SILENT, arena_printf(&t->arena, "worker %s is lost: %s",
                                                             w->name, silent));
    }
    return next_ns;
}
