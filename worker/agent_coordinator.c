/* agent_coordinator.c - what the worker's core says to the coordinator and hears from it */
#include "worker/agent_parts.h"

#include <assert.h>
#include <string.h>

/* ---- coordinator --------------------------------------------------------------------------- */

void agent_say_hello(struct agent *a, struct agent_turn *t)
{
    Ballast__Hello *h = arena_alloc(&t->arena, sizeof *h);
    ballast__hello__init(h);
    h->name = arena_strdup(&t->arena, a->config.name);
    h->node = arena_strdup(&t->arena, a->config.node);
    h->machine = arena_strdup(&t->arena, a->config.machine);
    h->device = arena_strdup(&t->arena, a->config.device);
    h->version = arena_strdup(&t->arena, a->config.version);
    h->memory_bytes = a->config.memory_bytes;
    h->cores = a->config.cores;
    h->pid = a->config.pid;
    h->n_ranks = agent_describe_all(a, &t->arena, &h->ranks);
    h->gpu = gpu_dup_in(&t->arena, a->gpu);
    struct effect *e = agent_say(a, t, BALLAST__KIND__KIND_REQUEST, BALLAST__METHOD__METHOD_HELLO,
                                 &h->base);
    e->envelope.request_id = a->hello_request_id = ++a->next_request_id;
    a->beats[a->n_beats++ % BEATS_MAX] = (struct beat){.seq = a->seq, .sent_ns = t->now_ns};
    a->hello_sent_ns = t->now_ns;
    a->next_hello_ns = t->now_ns + a->hello_wait_ns;
    a->hello_wait_ns *= 2;
    if (a->hello_wait_ns > a->config.hello_cap_ns)
        a->hello_wait_ns = a->config.hello_cap_ns;
}

void agent_beat(struct agent *a, struct agent_turn *t)
{
    Ballast__Heartbeat *h = arena_alloc(&t->arena, sizeof *h);
    ballast__heartbeat__init(h);
    h->n_ranks = agent_describe_all(a, &t->arena, &h->ranks);
    h->loop_lag_ms = a->loop_lag_ms;
    h->memory_used_bytes = a->memory_used_bytes;
    h->gpu = gpu_dup_in(&t->arena, a->gpu);
    agent_say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_HEARTBEAT, &h->base);
    a->beats[a->n_beats++ % BEATS_MAX] = (struct beat){.seq = a->seq, .sent_ns = t->now_ns};
    a->next_beat_ns = t->now_ns + a->interval_ns;
}

void agent_detach(struct agent *a, uint64_t now_ns)
{
    if (!a->is_attached)
        return;
    a->is_attached = false;
    a->hello_wait_ns = a->config.hello_base_ns;
    a->next_hello_ns = now_ns;
}

/* When the hello or heartbeat with that number was sent; 0: too long ago to know. */
static uint64_t sent_ns(const struct agent *a, uint64_t seq)
{
    for (size_t i = 0; i < BEATS_MAX; i++)
        if (seq && a->beats[i].seq == seq)
            return a->beats[i].sent_ns;
    return 0;
}

static void renew_lease(struct agent *a, uint64_t from_ns, uint64_t now_ns)
{
    a->answered_ns = now_ns;
    if (from_ns > a->lease_from_ns)
        a->lease_from_ns = from_ns;
}

static void set_interval(struct agent *a, uint32_t interval_ms, uint64_t now_ns)
{
    if (!interval_ms)
        return;
    a->interval_ns = interval_ms * NS_PER_MS;
    if (a->next_beat_ns > now_ns + a->interval_ns)
        a->next_beat_ns = now_ns + a->interval_ns;
}

static void resend_everything(struct agent *a)
{
    a->steps_resend_ns = a->loads_resend_ns = 0;
    for (size_t i = 0; i < a->n_attempts; i++)
        a->attempts[i].log_sent = a->attempts[i].log_acked;
}

static void on_refused(struct agent *a, struct agent_turn *t, const Ballast__Status *status)
{
    uint64_t at_ns = t->now_ns + status->retry_after_ms * NS_PER_MS;
    if (at_ns > a->next_hello_ns || status->retry_after_ms)
        a->next_hello_ns = at_ns;
    if (status->code != a->refused_with)
        agent_note(t, arena_printf(&t->arena, "worker=%s msg=\"refused by the coordinator: %s\"",
                                   a->config.name, status->message));
    a->refused_with = status->code;
}

static void on_welcome(struct agent *a, struct agent_turn *t, const Ballast__Envelope *e,
                       const Ballast__Welcome *w)
{
    if (e->request_id != a->hello_request_id)
        return; /* of an earlier hello: what was said there is old */
    if (e->status && e->status->code != BALLAST__CODE__OK) {
        on_refused(a, t, e->status);
        return;
    }
    if (!w)
        return;
    a->is_attached = true;
    a->refused_with = BALLAST__CODE__OK;
    a->hello_wait_ns = a->config.hello_base_ns;
    a->lease_ns = w->lease_ms * NS_PER_MS;
    a->fence_ns = w->fence_ms * NS_PER_MS;
    renew_lease(a, a->hello_sent_ns, t->now_ns);
    a->interval_ns = w->heartbeat_interval_ms * NS_PER_MS;
    a->next_beat_ns = t->now_ns + a->interval_ns;
    resend_everything(a);
    /* What has changed since that hello was said. */
    for (size_t i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].life != LIFE_PENDING && !a->attempts[i].is_acked)
            agent_report(a, t, &a->attempts[i]);
}

/* Whether this START may still be carried out. */
static bool start_is_valid(const struct agent *a, const Ballast__Start *s, uint64_t now_ns)
{
    uint64_t heard_ns = sent_ns(a, s->heard_seq);
    bool is_fresh = !a->fence_ns || (heard_ns && heard_ns + a->fence_ns > now_ns);
    return a->is_attached && !a->is_leaving && is_fresh && s->spec &&
        s->attempt > agent_newest_seen(a, s->job_id);
}

static void on_start(struct agent *a, struct agent_turn *t, const Ballast__Start *s)
{
    const struct attempt *known = agent_find(a, s->job_id, s->attempt);
    if (known && known->life != LIFE_PENDING) {
        agent_report(a, t, known); /* said again because our answer was lost */
        return;
    }
    if (known || !start_is_valid(a, s, t->now_ns))
        return;
    struct attempt *waiting = agent_in_life(a, LIFE_PENDING);
    if (waiting)
        agent_end(a, t, waiting, BALLAST__RANK_PHASE__RANK_STOPPED, "another attempt came first",
                  true);
    struct attempt *live = agent_in_life(a, LIFE_LIVE);
    if (live) {
        agent_stop(a, t, live, BALLAST__STOP_MODE__STOP_NOW, 0, "another attempt was started");
        agent_kill(t, live);
    }
    struct attempt *x = agent_add(a, t, s->job_id, s->attempt, s->rank, LIFE_PENDING);
    size_t n_bytes = ballast__start__get_packed_size(s);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__start__pack(s, bytes);
    x->start = ballast__start__unpack(NULL, n_bytes, bytes);
    assert(x->start);
    x->settings_revision = s->settings_revision;
    agent_spawn_pending(a, t);
}

static void on_stop(struct agent *a, struct agent_turn *t, const Ballast__Stop *s)
{
    struct attempt *x = agent_find(a, s->job_id, s->attempt);
    if (!x) {
        x = agent_add(a, t, s->job_id, s->attempt, s->rank, LIFE_ENDED);
        x->is_log_closed = true;
        agent_end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, "it does not run here", true);
        return;
    }
    switch (x->life) {
    case LIFE_PENDING:
        agent_end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, s->reason, true);
        x->is_log_closed = true;
        break;
    case LIFE_LIVE:
        agent_stop(a, t, x, s->mode, s->grace_ms * NS_PER_MS, s->reason);
        break;
    case LIFE_ENDED:
        agent_report(a, t, x);
        break;
    }
}

/* A plan that this rank has answered, or was told to give up, is not prepared (again). */
static bool plan_is_over(const struct attempt *x, uint32_t epoch)
{
    return epoch <= x->placement_epoch || epoch <= x->rejected_epoch || epoch <= x->aborted_epoch;
}

static void on_prepare(struct agent *a, struct agent_turn *t, const Ballast__Prepare *p)
{
    struct attempt *x = agent_find(a, p->job_id, p->attempt);
    if (!x || x->life != LIFE_LIVE || x->stop_mode)
        return;
    uint32_t epoch = p->placement->epoch;
    if (epoch <= x->forwarded_epoch || plan_is_over(x, epoch)) {
        agent_report(a, t, x); /* said again because our answer was lost, or is still to come */
        return;
    }
    Ballast__TrainerMessage *m = agent_forward(t, x);
    m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_PREPARE;
    m->prepare = (Ballast__Prepare *)p;
    x->forwarded_epoch = epoch;
}

/* A plan that the trainer never had is given up here, and refused from now on. */
static void on_abort(struct agent *a, struct agent_turn *t, const Ballast__AbortPlan *p)
{
    struct attempt *x = agent_find(a, p->job_id, p->attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    if (p->epoch > x->forwarded_epoch && p->epoch > x->rejected_epoch) {
        x->rejected_epoch = p->epoch;
        agent_set_line(&x->plan_text, "given up before it came");
    } else if (p->epoch > x->aborted_epoch && !plan_is_over(x, p->epoch)) {
        Ballast__TrainerMessage *m = agent_forward(t, x);
        m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN;
        m->abort_plan = (Ballast__AbortPlan *)p;
    }
    if (p->epoch > x->aborted_epoch)
        x->aborted_epoch = p->epoch;
    agent_report(a, t, x);
}

static void on_settings(struct agent *a, struct agent_turn *t, const Ballast__Settings *s)
{
    struct attempt *x = agent_find(a, s->job_id, s->attempt);
    if (!x || x->life != LIFE_LIVE || x->stop_mode)
        return;
    if (s->revision <= x->forwarded_revision || s->revision <= x->settings_revision) {
        agent_report(a, t, x); /* said again because our answer was lost, or is still to come */
        return;
    }
    Ballast__TrainerMessage *m = agent_forward(t, x);
    m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS;
    m->settings = (Ballast__Settings *)s;
    x->forwarded_revision = s->revision;
}

static void on_peers(struct agent *a, struct agent_turn *t, const Ballast__Peers *p)
{
    struct attempt *x = agent_find(a, p->job_id, p->attempt);
    if (!x || x->life != LIFE_LIVE || x->stop_mode || x->has_peers)
        return;
    Ballast__TrainerMessage *m = agent_forward(t, x);
    m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_PEERS;
    m->peers = (Ballast__Peers *)p;
    x->has_peers = true;
}

static void on_ack(struct agent *a, struct agent_turn *t, const Ballast__Ack *ack)
{
    if (!ack->job_id && !ack->alive) {
        agent_detach(a, t->now_ns);
        return;
    }
    if (ack->alive && a->is_attached) {
        renew_lease(a, sent_ns(a, ack->heard_seq), t->now_ns);
        set_interval(a, ack->heartbeat_interval_ms, t->now_ns);
    }
    if (ack->step && outbox_ack(&a->steps, ack->job_id, ack->attempt, ack->step,
                                ack->step_samples))
        a->steps_resend_ns = 0;
    if (ack->load_step && outbox_ack(&a->loads, ack->job_id, ack->attempt, ack->load_step, 0))
        a->loads_resend_ns = 0;
    struct attempt *x = agent_find(a, ack->job_id, ack->attempt);
    if (!x)
        return;
    if (ack->ended && x->life == LIFE_ENDED)
        x->is_acked = true;
    if (ack->log_offset > x->log_acked && ack->log_offset <= x->log_spooled) {
        x->log_acked = ack->log_offset;
        if (x->log_sent < x->log_acked)
            x->log_sent = x->log_acked;
        x->log_resend_ns = t->now_ns + 2 * a->interval_ns;
    }
}

void agent_message(struct agent *a, struct agent_turn *t, const Ballast__Envelope *e,
                   const ProtobufCMessage *payload)
{
    if (e->worker_epoch != a->config.worker_epoch || e->coordinator_epoch < a->coordinator_epoch)
        return;
    if (e->coordinator_epoch > a->coordinator_epoch) {
        a->coordinator_epoch = e->coordinator_epoch;
        if (e->method != BALLAST__METHOD__METHOD_HELLO)
            agent_detach(a, t->now_ns);
    }
    switch (e->method) {
    case BALLAST__METHOD__METHOD_HELLO:
        on_welcome(a, t, e, (const Ballast__Welcome *)payload);
        break;
    case BALLAST__METHOD__METHOD_START:
        on_start(a, t, (const Ballast__Start *)payload);
        break;
    case BALLAST__METHOD__METHOD_STOP:
        on_stop(a, t, (const Ballast__Stop *)payload);
        break;
    case BALLAST__METHOD__METHOD_PREPARE:
        on_prepare(a, t, (const Ballast__Prepare *)payload);
        break;
    case BALLAST__METHOD__METHOD_ABORT_PLAN:
        on_abort(a, t, (const Ballast__AbortPlan *)payload);
        break;
    case BALLAST__METHOD__METHOD_SETTINGS:
        on_settings(a, t, (const Ballast__Settings *)payload);
        break;
    case BALLAST__METHOD__METHOD_PEERS:
        on_peers(a, t, (const Ballast__Peers *)payload);
        break;
    case BALLAST__METHOD__METHOD_ACK:
        on_ack(a, t, (const Ballast__Ack *)payload);
        break;
    default:
        break;
    }
}

void agent_connected(struct agent *a, struct agent_turn *t)
{
    a->is_attached = false;
    a->hello_wait_ns = a->config.hello_base_ns;
    a->next_hello_ns = t->now_ns;
}
