/* sim_coord.c - the coordinator's shell and its store
 *
 * As the real shell it makes turns of the messages that have come, commits them in order, some
 * time later, and only then sends. A crash loses what is not committed; it may also come between
 * a commit and its messages. */
#include "tests/sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/event.h"
#include "coordinator/job.h"
#include "proto/message.h"

static void run_turn(struct sim *s, struct sim_event *e);

static void schedule_turn(struct sim *s, uint64_t at_ns)
{
    if (s->has_turn_event && s->next_tick_ns <= at_ns)
        return;
    s->has_turn_event = true;
    s->next_tick_ns = at_ns;
    sim_at(s, at_ns, run_turn, s->coord_life, at_ns, NULL);
}

static int64_t wall_ns(const struct sim *s)
{
    return 1700000000 * (int64_t)NS_PER_S + (int64_t)s->now_ns;
}

/* ---- store -------------------------------------------------------------------------------- */

static void say_record(struct sim *s, const Ballast__Record *r)
{
    if (!s->keeps_trace)
        return;
    switch (r->what_case) {
    case BALLAST__RECORD__WHAT_SUBMITTED:
        sim_say(s, "coordinator: job %" PRIu64 " QUEUED", r->job_id);
        break;
    case BALLAST__RECORD__WHAT_ASSIGNED: {
        char gang[128] = "";
        for (size_t i = 0; i < r->assigned->n_workers; i++)
            snprintf(gang + strlen(gang), sizeof gang - strlen(gang), " %s",
                     r->assigned->workers[i]);
        sim_say(s, "coordinator: job %" PRIu64 " STARTING attempt %u on%s", r->job_id,
                r->assigned->attempt, gang);
        break;
    }
    case BALLAST__RECORD__WHAT_STATE:
        sim_say(s, "coordinator: job %" PRIu64 " %s%s%s", r->job_id,
                event_job_state(r->state->state), *r->state->reason ? ": " : "",
                r->state->reason);
        break;
    case BALLAST__RECORD__WHAT_PROGRESS:
        sim_say(s, "coordinator: job %" PRIu64 " checkpoint at step %" PRIu64, r->job_id,
                r->progress->checkpoint_step);
        break;
    case BALLAST__RECORD__WHAT_HELD:
        sim_say(s, "coordinator: job %" PRIu64 " %s", r->job_id,
                r->held->held ? "held" : "released");
        break;
    case BALLAST__RECORD__WHAT_WORKER_CHANGED:
        sim_say(s, "coordinator: worker %s %s%s%s%s", r->worker,
                r->worker_changed->state == BALLAST__WORKER_STATE__WORKER_IDLE ? "attached" :
                r->worker_changed->state == BALLAST__WORKER_STATE__WORKER_LOST ? "lost" : "gone",
                r->worker_changed->drained ? ", drained" : "",
                *r->worker_changed->reason ? ": " : "", r->worker_changed->reason);
        break;
    case BALLAST__RECORD__WHAT_PLAN:
        sim_say(s, "coordinator: job %" PRIu64 " plan %u", r->job_id,
                r->plan->placement->epoch);
        break;
    case BALLAST__RECORD__WHAT_PLAN_ENDED:
        sim_say(s, "coordinator: job %" PRIu64 " plan %u ended: %s", r->job_id,
                r->plan_ended->epoch, r->plan_ended->reason);
        break;
    case BALLAST__RECORD__WHAT_PLACEMENT:
        sim_say(s, "coordinator: job %" PRIu64 " placement %u in force, %" PRIu64 " bytes moved",
                r->job_id, r->placement->epoch, r->placement->bytes);
        break;
    case BALLAST__RECORD__WHAT_REBALANCE_AUTO:
        sim_say(s, "coordinator: job %" PRIu64 " rebalances %s", r->job_id,
                r->rebalance_auto->on ? "by itself" : "when told to");
        break;
    case BALLAST__RECORD__WHAT_EPOCH:
        sim_say(s, "coordinator: epoch %" PRIu64, r->epoch->coordinator_epoch);
        break;
    default:
        break;
    }
}

static void store_commit(struct sim *s, const struct turn *t)
{
    struct sim_store *store = &s->store;
    for (size_t i = 0; i < t->n_records; i++) {
        store->log = xgrow(store->log, store->n_log, &store->n_alloc, sizeof *store->log);
        Ballast__Record *r = store->log[store->n_log++] = message_copy(t->records[i], NULL);
        struct err err = {0};
        s->counts.n_records++;
        say_record(s, r);
        check_record(s, r);
        if (coord_apply(store->shadow, r, &err) < 0)
            sim_fail(s, "a committed record does not apply: %s", err.text);
    }
    for (size_t i = 0; i < t->n_steps; i++) {
        const Ballast__StepReports *reports = t->steps[i].reports;
        job_id job = t->steps[i].job;
        if (job >= SIM_JOBS_MAX)
            continue;
        for (size_t k = 0; k < reports->n_steps; k++) {
            uint64_t step = reports->steps[k]->step;
            if (step >= store->n_steps[job]) {
                store->steps[job] = xrealloc(store->steps[job], step + 1);
                memset(store->steps[job] + store->n_steps[job], 0,
                       step + 1 - store->n_steps[job]);
                store->n_steps[job] = step + 1;
            }
            if (reports->attempt > store->steps[job][step])
                store->steps[job][step] = (uint8_t)reports->attempt;
        }
    }
}

/* What a lean restart reads: live jobs, the newest word on each worker, keys of all jobs. */
static void restore_lean(struct sim *s, struct coord *c)
{
    struct arena arena = {0};
    struct err err = {0};
    job_id last_job = 0;
    uint64_t epoch = 0;
    for (size_t i = 0; i < s->store.n_log; i++) {
        const Ballast__Record *r = s->store.log[i];
        if (r->what_case == BALLAST__RECORD__WHAT_EPOCH)
            epoch = r->epoch->coordinator_epoch;
        if (r->what_case == BALLAST__RECORD__WHAT_SUBMITTED) {
            last_job = r->job_id;
            coord_restore_key(c, r->submitted->user, r->submitted->idempotency_key.data,
                              r->submitted->request_digest.data, r->job_id, NS_PER_S);
        }
    }
    coord_restore_epoch(c, epoch, s->store.n_log, last_job);
    for (size_t i = 0; i < s->store.n_log; i++) {
        const Ballast__Record *r = s->store.log[i];
        bool is_wanted = r->what_case == BALLAST__RECORD__WHAT_WORKER_CHANGED ||
            (r->job_id && coord_job(s->store.shadow, r->job_id, &arena));
        if (is_wanted && coord_apply(c, r, &err) < 0)
            sim_fail(s, "lean replay: %s", err.text);
    }
    arena_fini(&arena);
}

static void restore_all(struct sim *s, struct coord *c)
{
    struct err err = {0};
    for (size_t i = 0; i < s->store.n_log; i++)
        if (coord_apply(c, s->store.log[i], &err) < 0)
            sim_fail(s, "replay: %s", err.text);
}

static void recall(struct sim *s, job_id job)
{
    Ballast__Record **records = xcalloc(s->store.n_log, sizeof *records);
    size_t n = 0;
    struct err err = {0};
    for (size_t i = 0; i < s->store.n_log; i++)
        if (s->store.log[i]->job_id == job)
            records[n++] = s->store.log[i];
    if (!n)
        sim_fail(s, "job %" PRIu64 " was forgotten but is not in the store", job);
    else if (coord_recall(s->coord, records, n, &err) < 0)
        sim_fail(s, "recall: %s", err.text);
    free(records);
}

/* ---- turns -------------------------------------------------------------------------------- */

static void send_out(struct sim *s, const struct turn *t)
{
    for (size_t i = 0; i < t->n_out && s->coord; i++)
        net_to_peer(s, t->out[i].peer, &t->out[i].envelope, t->out[i].payload);
}

static void free_pending(struct sim_pending *p)
{
    turn_fini(&p->turn);
    free(p);
}

static void drop_pending(struct sim *s)
{
    for (size_t i = 0; i < s->n_pending; i++)
        free_pending(s->pending[i]);
    s->n_pending = 0;
}

static struct sim_pending *take_pending(struct sim *s)
{
    struct sim_pending *p = s->pending[0];
    s->n_pending--;
    memmove(s->pending, s->pending + 1, s->n_pending * sizeof *s->pending);
    return p;
}

static void commit(struct sim *s, struct sim_event *e)
{
    if (e->a != s->coord_life || !s->n_pending)
        return;
    if (sim_chance(s, s->commit_fails)) {
        sim_say(s, "coordinator: a commit failed, the core is built again");
        coord_sim_crash(s, 0);
        coord_sim_start(s);
        return;
    }
    struct sim_pending *p = take_pending(s);
    store_commit(s, &p->turn);
    coord_committed(s->coord, s->store.n_log);
    send_out(s, &p->turn);
    free_pending(p);
    if (sim_chance(s, 1.0 / 16))
        check_replay(s);
}

static void finish_turn(struct sim *s, struct sim_pending *p)
{
    coord_tick(s->coord, &p->turn);
    for (size_t i = 0; i < p->turn.n_notes; i++)
        sim_say(s, "coordinator: note: %s", p->turn.notes[i]);
    uint64_t next_ns = coord_next_deadline_ns(s->coord);
    if (next_ns != UINT64_MAX)
        schedule_turn(s, next_ns);
    if (!p->turn.n_records && !p->turn.n_out && !p->turn.n_steps && !p->turn.n_loads) {
        free_pending(p);
        return;
    }
    s->pending = xgrow(s->pending, s->n_pending, &s->n_pending_alloc, sizeof *s->pending);
    s->pending[s->n_pending++] = p;
    uint64_t at_ns = s->now_ns + 1 + (s->net.slow > 0 ? sim_random(s, s->commit_delay_ns)
                                                      : s->commit_delay_ns);
    if (at_ns < s->commit_free_ns)
        at_ns = s->commit_free_ns;
    s->commit_free_ns = at_ns;
    sim_at(s, at_ns, commit, s->coord_life, 0, NULL);
}

static struct sim_pending *new_pending(struct sim *s)
{
    struct sim_pending *p = xcalloc(1, sizeof *p);
    p->coord_life = s->coord_life;
    coord_begin(s->coord, &p->turn, s->now_ns, wall_ns(s));
    return p;
}

/* Output is appended where it fits; what is there already is only acknowledged again. */
static void store_output(struct sim *s, struct turn *t, uint64_t peer,
                         const Ballast__LogChunk *chunk)
{
    uint64_t end = chunk->offset + chunk->bytes.len, other = end, *stored = &other;
    if (!coord_accepts_log(s->coord, peer, chunk))
        return;
    if (chunk->job_id < SIM_JOBS_MAX && chunk->attempt < SIM_ATTEMPTS_MAX)
        stored = &s->store.output[chunk->job_id][chunk->attempt][chunk->rank];
    if (chunk->offset <= *stored && end > *stored)
        *stored = end;
    coord_ack_log(s->coord, t, peer, chunk, *stored);
}

static void handle(struct sim *s, struct sim_pending *p, const struct sim_packet *packet)
{
    struct sim_endpoint *from = &s->endpoints[packet->endpoint];
    if (from->life != packet->life)
        return; /* its connection died with it */
    if (!from->peer)
        from->peer = s->next_peer++;
    ProtobufCMessage *payload;
    Ballast__Envelope *e = net_open(packet, &p->turn.arena, &payload);
    if (e->method == BALLAST__METHOD__METHOD_LOG) {
        store_output(s, &p->turn, from->peer, (Ballast__LogChunk *)payload);
        return;
    }
    for (job_id job; !*s->failure && (job = coord_wants_job(s->coord, e->method, payload));)
        recall(s, job);
    coord_message(s->coord, &p->turn, from->peer, "user", e, payload);
}

static void run_turn(struct sim *s, struct sim_event *e)
{
    if (!s->coord || e->a != s->coord_life || e->b != s->next_tick_ns || !s->has_turn_event)
        return;
    s->has_turn_event = false;
    if (s->now_ns < s->stalled_until_ns) {
        schedule_turn(s, s->stalled_until_ns);
        return;
    }
    struct sim_pending *p = new_pending(s);
    for (size_t i = 0; i < s->n_inbox; i++) {
        handle(s, p, s->inbox[i]);
        free(s->inbox[i]);
    }
    s->n_inbox = 0;
    finish_turn(s, p);
}

void coord_sim_receive(struct sim *s, struct sim_packet *p)
{
    s->inbox = xgrow(s->inbox, s->n_inbox, &s->n_inbox_alloc, sizeof *s->inbox);
    s->inbox[s->n_inbox++] = p;
    schedule_turn(s, s->now_ns + (s->net.slow > 0 ? sim_random(s, 3 * NS_PER_MS) : 0));
}

void coord_sim_peer_gone(struct sim *s, uint64_t peer)
{
    if (!s->coord)
        return;
    struct sim_pending *p = new_pending(s);
    coord_peer_gone(s->coord, &p->turn, peer);
    finish_turn(s, p);
}

/* ---- life --------------------------------------------------------------------------------- */

void coord_sim_start(struct sim *s)
{
    struct arena arena = {0};
    s->coord_life++;
    s->commit_free_ns = 0;
    s->config.seed = sim_random(s, 0);
    s->coord = coord_create(&s->config);
    if (sim_chance(s, 0.5))
        restore_lean(s, s->coord);
    else
        restore_all(s, s->coord);
    check_replay(s);
    struct sim_pending *p = new_pending(s);
    coord_start(s->coord, &p->turn);
    finish_turn(s, p);
    arena_fini(&arena);
}

void coord_sim_crash(struct sim *s, size_t n_durable)
{
    if (!s->coord)
        return;
    for (size_t i = 0; i < n_durable && s->n_pending; i++) {
        struct sim_pending *p = take_pending(s);
        store_commit(s, &p->turn);
        free_pending(p);
    }
    drop_pending(s);
    for (size_t i = 0; i < s->n_inbox; i++)
        free(s->inbox[i]);
    s->n_inbox = 0;
    coord_destroy(s->coord);
    s->coord = NULL;
    s->coord_life++;
    s->has_turn_event = false;
    s->stalled_until_ns = 0;
    s->counts.n_crashes++;
    for (uint32_t i = 0; i < SIM_HOSTS_MAX + SIM_CLIENTS_MAX; i++)
        s->endpoints[i].peer = 0;
}

void coord_sim_fini(struct sim *s)
{
    coord_sim_crash(s, 0);
    for (size_t i = 0; i < s->store.n_log; i++)
        ballast__record__free_unpacked(s->store.log[i], NULL);
    for (size_t i = 0; i < SIM_JOBS_MAX; i++)
        free(s->store.steps[i]);
    coord_destroy(s->store.shadow);
    free(s->store.log);
    free(s->inbox);
    free(s->pending);
}
