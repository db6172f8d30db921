/* agent.c - the worker daemon's core: what to do on a message, a trainer's word or a time
 *
 * An attempt here:  PENDING (the one before still has to die) -> LIVE -> ENDED -> forgotten
 *
 * ENDED is said again in every heartbeat until the coordinator has recorded it; the attempt is
 * forgotten when its reports and output are stored too. A STOP for an attempt that never came
 * makes an ENDED one, and attempts up to the newest one seen of a job are refused from then on:
 * so an end that was reported stays true, however late a START arrives. */
#include "worker/agent.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "worker/outbox.h"

#define ATTEMPTS_MAX 64  /* ended ones wait here for the coordinator */
#define SEEN_MAX     256 /* jobs whose newest attempt is remembered */
#define BEATS_MAX    64  /* heartbeats whose sending time is remembered */
#define STOP_GRACE_NS (5 * NS_PER_S) /* where the agent itself decides to stop */
#define LEAVE_GRACE_NS (20 * NS_PER_S) /* the same, with time for a checkpoint of all ranks */

enum life { LIFE_PENDING, LIFE_LIVE, LIFE_ENDED };

struct attempt {
    job_id             job;
    uint32_t           attempt, rank;
    enum life          life;
    Ballast__Start    *start; /* PENDING */

    /* what is reported */
    Ballast__RankPhase phase;
    uint64_t           step, checkpoint_step, resumed_from_step;
    int32_t            exit_code, exit_signal;
    char              *text;
    bool               is_retryable;
    uint32_t           placement_epoch, prepared_epoch, rejected_epoch;
    char              *plan_text;
    uint64_t           moved_bytes;
    double             pause_s;

    /* LIVE */
    uint32_t           forwarded_epoch; /* newest plan that the trainer was asked to prepare */
    uint32_t           aborted_epoch;   /* newest plan that it was told to give up */
    bool               says_finished, says_failed;
    Ballast__StopMode  stop_mode; /* UNKNOWN: not told to stop */
    uint64_t           kill_ns;   /* UINT64_MAX: no reason to */

    bool               is_acked;  /* its end is recorded */
    bool               has_spool, is_log_closed;
    uint64_t           log_spooled, log_dropped, log_sent, log_acked, log_resend_ns;
};

struct seen {
    job_id   job;
    uint32_t attempt;
};

struct beat {
    uint64_t seq, sent_ns;
};

struct agent {
    struct agent_config config;
    struct attempt      attempts[ATTEMPTS_MAX]; /* in order of their coming */
    size_t              n_attempts;
    struct seen         seen[SEEN_MAX]; /* a ring */
    size_t              n_seen;
    struct outbox       steps, loads;
    uint64_t            steps_resend_ns, loads_resend_ns; /* 0: nothing is under way */

    uint64_t    seq, next_request_id;
    struct beat beats[BEATS_MAX]; /* a ring */
    size_t      n_beats;

    bool     is_attached;       /* the last HELLO was welcomed, and answers still come */
    uint64_t coordinator_epoch; /* highest seen */
    uint64_t interval_ns, lease_ns, fence_ns;
    uint64_t answered_ns;       /* when the last answer to a heartbeat or hello came */
    uint64_t lease_from_ns;     /* when the newest one that was answered had been sent */
    uint64_t next_beat_ns, next_hello_ns, hello_wait_ns;
    uint64_t hello_request_id, hello_sent_ns; /* of the newest hello */
    Ballast__Code refused_with; /* of the last refusal, to note it once */

    uint64_t loop_lag_ms, memory_used_bytes;
    bool     is_leaving, has_said_goodbye;
    char    *leave_reason;
};

struct agent_config agent_config_default(void)
{
    return (struct agent_config){
        .name = "", .node = "", .device = "", .version = "",
        .hello_base_ns = 200 * NS_PER_MS,
        .hello_cap_ns = 5 * NS_PER_S,
        .closed_grace_ns = 5 * NS_PER_S,
        .steps_max = 100000,
        .step_bytes_max = 16u << 20,
        .loads_max = 256,
        .load_bytes_max = 32u << 20,
        .log_window_bytes = 512u << 10,
    };
}

struct agent *agent_create(const struct agent_config *config)
{
    struct agent *a = xcalloc(1, sizeof *a);
    a->config = *config;
    a->config.name = xstrdup(config->name);
    a->config.node = xstrdup(config->node);
    a->config.device = xstrdup(config->device);
    a->config.version = xstrdup(config->version);
    a->hello_wait_ns = config->hello_base_ns;
    outbox_init(&a->steps, config->steps_max, config->step_bytes_max);
    outbox_init(&a->loads, config->loads_max, config->load_bytes_max);
    return a;
}

static void attempt_fini(struct attempt *x)
{
    if (x->start)
        ballast__start__free_unpacked(x->start, NULL);
    free(x->text);
    free(x->plan_text);
}

void agent_destroy(struct agent *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->n_attempts; i++)
        attempt_fini(&a->attempts[i]);
    outbox_fini(&a->steps);
    outbox_fini(&a->loads);
    free((char *)a->config.name);
    free((char *)a->config.node);
    free((char *)a->config.device);
    free((char *)a->config.version);
    free(a->leave_reason);
    free(a);
}

/* ---- effects ------------------------------------------------------------------------------ */

void agent_turn_fini(struct agent_turn *t)
{
    arena_fini(&t->arena);
    *t = (struct agent_turn){0};
}

static struct effect *add_effect(struct agent_turn *t, enum effect_kind kind,
                                 const struct attempt *x)
{
    size_t n = t->n_effects;
    if (!(n & (n - 1))) { /* 0 or a power of two: full */
        struct effect *larger = arena_alloc(&t->arena, (n ? 2 * n : 1) * sizeof *larger);
        if (n)
            memcpy(larger, t->effects, n * sizeof *larger);
        t->effects = larger;
    }
    struct effect *e = &t->effects[t->n_effects++];
    *e = (struct effect){.kind = kind};
    if (x) {
        e->job = x->job;
        e->attempt = x->attempt;
        e->rank = x->rank;
    }
    return e;
}

static void fill_envelope(struct agent *a, Ballast__Envelope *e, Ballast__Kind kind,
                          Ballast__Method method)
{
    ballast__envelope__init(e);
    e->kind = kind;
    e->method = method;
    e->worker_epoch = a->config.worker_epoch;
    e->coordinator_epoch = a->coordinator_epoch;
    e->seq = ++a->seq;
}

static struct effect *say(struct agent *a, struct agent_turn *t, Ballast__Kind kind,
                           Ballast__Method method, const ProtobufCMessage *payload)
{
    struct effect *e = add_effect(t, EFFECT_SEND, NULL);
    fill_envelope(a, &e->envelope, kind, method);
    e->payload = payload;
    return e;
}

static void note(struct agent_turn *t, const char *text)
{
    add_effect(t, EFFECT_NOTE, NULL)->note = text;
}

/* ---- attempts ----------------------------------------------------------------------------- */

static struct attempt *find(struct agent *a, job_id job, uint32_t attempt)
{
    for (size_t i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].job == job && a->attempts[i].attempt == attempt)
            return &a->attempts[i];
    return NULL;
}

static struct attempt *in_life(struct agent *a, enum life life)
{
    for (size_t i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].life == life)
            return &a->attempts[i];
    return NULL;
}

static uint32_t newest_seen(const struct agent *a, job_id job)
{
    for (size_t i = 0; i < SEEN_MAX; i++)
        if (a->seen[i].job == job)
            return a->seen[i].attempt;
    return 0;
}

static void see(struct agent *a, job_id job, uint32_t attempt)
{
    for (size_t i = 0; i < SEEN_MAX; i++)
        if (a->seen[i].job == job) {
            if (attempt > a->seen[i].attempt)
                a->seen[i].attempt = attempt;
            return;
        }
    a->seen[a->n_seen++ % SEEN_MAX] = (struct seen){.job = job, .attempt = attempt};
}

static void forget(struct agent *a, struct agent_turn *t, struct attempt *x)
{
    if (x->has_spool)
        add_effect(t, EFFECT_FORGET, x);
    attempt_fini(x);
    size_t i = (size_t)(x - a->attempts);
    a->n_attempts--;
    memmove(x, x + 1, (a->n_attempts - i) * sizeof *x);
}

static struct attempt *add_attempt(struct agent *a, struct agent_turn *t, job_id job,
                                   uint32_t attempt, uint32_t rank, enum life life)
{
    for (size_t i = 0; a->n_attempts == ATTEMPTS_MAX; i++) {
        assert(i < ATTEMPTS_MAX); /* at most two have not ended */
        if (a->attempts[i].life == LIFE_ENDED) {
            note(t, arena_printf(&t->arena, "job=%" PRIu64 " attempt=%u msg=\"forgotten before "
                                 "the coordinator knew its end\"", a->attempts[i].job,
                                 a->attempts[i].attempt));
            forget(a, t, &a->attempts[i]);
        }
    }
    struct attempt *x = &a->attempts[a->n_attempts++];
    *x = (struct attempt){.job = job, .attempt = attempt, .rank = rank, .life = life,
                          .kill_ns = UINT64_MAX, .text = xstrdup(""), .plan_text = xstrdup("")};
    see(a, job, attempt);
    return x;
}

static Ballast__RankState *describe(const struct attempt *x, struct arena *arena)
{
    Ballast__RankState *s = arena_alloc(arena, sizeof *s);
    ballast__rank_state__init(s);
    s->job_id = x->job;
    s->attempt = x->attempt;
    s->rank = x->rank;
    s->phase = x->phase;
    s->step = x->step;
    s->checkpoint_step = x->checkpoint_step;
    s->resumed_from_step = x->resumed_from_step;
    s->exit_code = x->exit_code;
    s->exit_signal = x->exit_signal;
    s->text = arena_strdup(arena, x->text);
    s->retryable = x->is_retryable;
    s->placement_epoch = x->placement_epoch;
    s->prepared_epoch = x->prepared_epoch;
    s->rejected_epoch = x->rejected_epoch;
    s->plan_text = arena_strdup(arena, x->plan_text);
    s->moved_bytes = x->moved_bytes;
    s->pause_s = x->pause_s;
    return s;
}

/* While nobody listens the next hello carries it. */
static void report(struct agent *a, struct agent_turn *t, const struct attempt *x)
{
    if (a->is_attached)
        say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_RANK_STATE,
             &describe(x, &t->arena)->base);
}

static size_t describe_all(struct agent *a, struct arena *arena, Ballast__RankState ***out)
{
    size_t n = 0;
    *out = arena_alloc(arena, a->n_attempts * sizeof **out);
    for (size_t i = 0; i < a->n_attempts; i++) {
        const struct attempt *x = &a->attempts[i];
        if (x->life != LIFE_PENDING && !(x->life == LIFE_ENDED && x->is_acked))
            (*out)[n++] = describe(x, arena);
    }
    return n;
}

static void set_line(char **line, const char *text)
{
    char *copy = xstrdup(text);
    copy[strnlen(copy, REASON_BYTES_MAX - 1)] = '\0';
    free(*line);
    *line = copy;
}

static void set_text(struct attempt *x, const char *text)
{
    set_line(&x->text, text);
}

static void end(struct agent *a, struct agent_turn *t, struct attempt *x,
                Ballast__RankPhase phase, const char *text, bool retryable)
{
    x->life = LIFE_ENDED;
    x->phase = phase;
    x->is_retryable = retryable;
    x->kill_ns = UINT64_MAX;
    set_text(x, text);
    report(a, t, x);
}

static void spawn(struct agent *a, struct agent_turn *t, struct attempt *x, Ballast__Start *start)
{
    x->life = LIFE_LIVE;
    x->phase = BALLAST__RANK_PHASE__RANK_SPAWNED;
    x->has_spool = true;
    add_effect(t, EFFECT_SPAWN, x)->start = start;
    report(a, t, x);
}

/* Nothing lives any more: the one that waited for that goes. */
static void spawn_pending(struct agent *a, struct agent_turn *t)
{
    struct attempt *x = in_life(a, LIFE_PENDING);
    if (!x || in_life(a, LIFE_LIVE))
        return;
    size_t n_bytes = ballast__start__get_packed_size(x->start);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__start__pack(x->start, bytes);
    ballast__start__free_unpacked(x->start, NULL);
    x->start = NULL;
    spawn(a, t, x, ballast__start__unpack(arena_pb(&t->arena), n_bytes, bytes));
}

static void kill_live(struct agent_turn *t, struct attempt *x)
{
    x->kill_ns = UINT64_MAX;
    add_effect(t, EFFECT_KILL, x);
}

static void kill_by(struct attempt *x, uint64_t at_ns)
{
    if (at_ns < x->kill_ns)
        x->kill_ns = at_ns;
}

static Ballast__TrainerMessage *forward(struct agent_turn *t, const struct attempt *x)
{
    Ballast__TrainerMessage *m = arena_alloc(&t->arena, sizeof *m);
    ballast__trainer_message__init(m);
    add_effect(t, EFFECT_FORWARD, x)->message = m;
    return m;
}

static void stop_live(struct agent *a, struct agent_turn *t, struct attempt *x,
                      Ballast__StopMode mode, uint64_t grace_ns, const char *reason)
{
    if (x->stop_mode >= mode)
        return; /* a repetition */
    x->stop_mode = mode;
    Ballast__Stop *s = arena_alloc(&t->arena, sizeof *s);
    ballast__stop__init(s);
    s->job_id = x->job;
    s->attempt = x->attempt;
    s->rank = x->rank;
    s->mode = mode;
    s->grace_ms = (uint32_t)(grace_ns / NS_PER_MS);
    s->reason = arena_strdup(&t->arena, reason);
    x->phase = BALLAST__RANK_PHASE__RANK_STOPPING;
    set_text(x, reason);
    kill_by(x, t->now_ns + grace_ns);
    Ballast__TrainerMessage *m = forward(t, x);
    m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_STOP;
    m->stop = s;
    report(a, t, x);
}

/* ---- coordinator -------------------------------------------------------------------------- */

static void say_hello(struct agent *a, struct agent_turn *t)
{
    Ballast__Hello *h = arena_alloc(&t->arena, sizeof *h);
    ballast__hello__init(h);
    h->name = arena_strdup(&t->arena, a->config.name);
    h->node = arena_strdup(&t->arena, a->config.node);
    h->device = arena_strdup(&t->arena, a->config.device);
    h->version = arena_strdup(&t->arena, a->config.version);
    h->memory_bytes = a->config.memory_bytes;
    h->cores = a->config.cores;
    h->pid = a->config.pid;
    h->n_ranks = describe_all(a, &t->arena, &h->ranks);
    struct effect *e = say(a, t, BALLAST__KIND__KIND_REQUEST, BALLAST__METHOD__METHOD_HELLO,
                           &h->base);
    e->envelope.request_id = a->hello_request_id = ++a->next_request_id;
    a->beats[a->n_beats++ % BEATS_MAX] = (struct beat){.seq = a->seq, .sent_ns = t->now_ns};
    a->hello_sent_ns = t->now_ns;
    a->next_hello_ns = t->now_ns + a->hello_wait_ns;
    a->hello_wait_ns *= 2;
    if (a->hello_wait_ns > a->config.hello_cap_ns)
        a->hello_wait_ns = a->config.hello_cap_ns;
}

static void beat(struct agent *a, struct agent_turn *t)
{
    Ballast__Heartbeat *h = arena_alloc(&t->arena, sizeof *h);
    ballast__heartbeat__init(h);
    h->n_ranks = describe_all(a, &t->arena, &h->ranks);
    h->loop_lag_ms = a->loop_lag_ms;
    h->memory_used_bytes = a->memory_used_bytes;
    say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_HEARTBEAT, &h->base);
    a->beats[a->n_beats++ % BEATS_MAX] = (struct beat){.seq = a->seq, .sent_ns = t->now_ns};
    a->next_beat_ns = t->now_ns + a->interval_ns;
}

static void detach(struct agent *a, uint64_t now_ns)
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
        note(t, arena_printf(&t->arena, "worker=%s msg=\"refused by the coordinator: %s\"",
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
            report(a, t, &a->attempts[i]);
}

/* Whether this START may still be carried out. */
static bool start_is_valid(const struct agent *a, const Ballast__Start *s, uint64_t now_ns)
{
    uint64_t heard_ns = sent_ns(a, s->heard_seq);
    bool is_fresh = !a->fence_ns || (heard_ns && heard_ns + a->fence_ns > now_ns);
    return a->is_attached && !a->is_leaving && is_fresh && s->spec &&
        s->attempt > newest_seen(a, s->job_id);
}

static void on_start(struct agent *a, struct agent_turn *t, const Ballast__Start *s)
{
    const struct attempt *known = find(a, s->job_id, s->attempt);
    if (known && known->life != LIFE_PENDING) {
        report(a, t, known); /* said again because our answer was lost */
        return;
    }
    if (known || !start_is_valid(a, s, t->now_ns))
        return;
    struct attempt *waiting = in_life(a, LIFE_PENDING);
    if (waiting)
        end(a, t, waiting, BALLAST__RANK_PHASE__RANK_STOPPED, "another attempt came first", true);
    struct attempt *live = in_life(a, LIFE_LIVE);
    if (live) {
        stop_live(a, t, live, BALLAST__STOP_MODE__STOP_NOW, 0, "another attempt was started");
        kill_live(t, live);
    }
    struct attempt *x = add_attempt(a, t, s->job_id, s->attempt, s->rank, LIFE_PENDING);
    size_t n_bytes = ballast__start__get_packed_size(s);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__start__pack(s, bytes);
    x->start = ballast__start__unpack(NULL, n_bytes, bytes);
    assert(x->start);
    spawn_pending(a, t);
}

static void on_stop(struct agent *a, struct agent_turn *t, const Ballast__Stop *s)
{
    struct attempt *x = find(a, s->job_id, s->attempt);
    if (!x) {
        x = add_attempt(a, t, s->job_id, s->attempt, s->rank, LIFE_ENDED);
        x->is_log_closed = true;
        end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, "it does not run here", true);
        return;
    }
    switch (x->life) {
    case LIFE_PENDING:
        end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, s->reason, true);
        x->is_log_closed = true;
        break;
    case LIFE_LIVE:
        stop_live(a, t, x, s->mode, s->grace_ms * NS_PER_MS, s->reason);
        break;
    case LIFE_ENDED:
        report(a, t, x);
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
    struct attempt *x = find(a, p->job_id, p->attempt);
    if (!x || x->life != LIFE_LIVE || x->stop_mode)
        return;
    uint32_t epoch = p->placement->epoch;
    if (epoch <= x->forwarded_epoch || plan_is_over(x, epoch)) {
        report(a, t, x); /* said again because our answer was lost, or is still to come */
        return;
    }
    Ballast__TrainerMessage *m = forward(t, x);
    m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_PREPARE;
    m->prepare = (Ballast__Prepare *)p;
    x->forwarded_epoch = epoch;
}

/* A plan that the trainer never had is given up here, and refused from now on. */
static void on_abort(struct agent *a, struct agent_turn *t, const Ballast__AbortPlan *p)
{
    struct attempt *x = find(a, p->job_id, p->attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    if (p->epoch > x->forwarded_epoch && p->epoch > x->rejected_epoch) {
        x->rejected_epoch = p->epoch;
        set_line(&x->plan_text, "given up before it came");
    } else if (p->epoch > x->aborted_epoch && !plan_is_over(x, p->epoch)) {
        Ballast__TrainerMessage *m = forward(t, x);
        m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN;
        m->abort_plan = (Ballast__AbortPlan *)p;
    }
    if (p->epoch > x->aborted_epoch)
        x->aborted_epoch = p->epoch;
    report(a, t, x);
}

static void on_ack(struct agent *a, struct agent_turn *t, const Ballast__Ack *ack)
{
    if (!ack->job_id && !ack->alive) {
        detach(a, t->now_ns);
        return;
    }
    if (ack->alive && a->is_attached) {
        renew_lease(a, sent_ns(a, ack->heard_seq), t->now_ns);
        set_interval(a, ack->heartbeat_interval_ms, t->now_ns);
    }
    if (ack->step && outbox_ack(&a->steps, ack->job_id, ack->attempt, ack->step))
        a->steps_resend_ns = 0;
    if (ack->load_step && outbox_ack(&a->loads, ack->job_id, ack->attempt, ack->load_step))
        a->loads_resend_ns = 0;
    struct attempt *x = find(a, ack->job_id, ack->attempt);
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
            detach(a, t->now_ns);
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

/* ---- trainer ------------------------------------------------------------------------------ */

/* What a trainer says of plans only grows. True if it is news. */
static bool merge_plan(struct attempt *x, const Ballast__RankState *s)
{
    bool is_news = false;
    if (s->prepared_epoch > x->prepared_epoch) {
        x->prepared_epoch = s->prepared_epoch;
        is_news = true;
    }
    if (s->rejected_epoch > x->rejected_epoch) {
        x->rejected_epoch = s->rejected_epoch;
        set_line(&x->plan_text, s->plan_text);
        is_news = true;
    }
    if (s->placement_epoch > x->placement_epoch) {
        x->placement_epoch = s->placement_epoch;
        x->moved_bytes = s->moved_bytes;
        x->pause_s = s->pause_s;
        is_news = true;
    }
    return is_news;
}

static void on_trainer_state(struct agent *a, struct agent_turn *t, struct attempt *x,
                             const Ballast__RankState *s)
{
    bool is_news = s->checkpoint_step > x->checkpoint_step;
    is_news |= merge_plan(x, s);
    if (s->step > x->step)
        x->step = s->step;
    if (s->checkpoint_step > x->checkpoint_step)
        x->checkpoint_step = s->checkpoint_step;
    if (s->resumed_from_step)
        x->resumed_from_step = s->resumed_from_step;
    switch (s->phase) {
    case BALLAST__RANK_PHASE__RANK_READY:
    case BALLAST__RANK_PHASE__RANK_RUNNING:
        if (s->phase > x->phase) {
            x->phase = s->phase;
            is_news = true;
        }
        break;
    case BALLAST__RANK_PHASE__RANK_FINISHED: /* true once it has exited with 0 */
    case BALLAST__RANK_PHASE__RANK_STOPPED:
        x->says_finished = s->phase == BALLAST__RANK_PHASE__RANK_FINISHED;
        kill_by(x, t->now_ns + a->config.closed_grace_ns);
        break;
    case BALLAST__RANK_PHASE__RANK_FAILED:
        x->says_failed = true;
        x->is_retryable = s->retryable;
        if (!x->stop_mode)
            set_text(x, s->text);
        kill_by(x, t->now_ns + a->config.closed_grace_ns);
        break;
    default:
        break;
    }
    if (is_news)
        report(a, t, x);
}

void agent_trainer_message(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                           const Ballast__TrainerMessage *m)
{
    struct attempt *x = find(a, job, attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STATE) {
        on_trainer_state(a, t, x, m->state);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP) {
        if (m->step->step > x->step)
            x->step = m->step->step;
        outbox_add(&a->steps, job, attempt, m->step->step, &m->step->base);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_LOAD && m->load->job_id == job &&
               m->load->attempt == attempt) {
        outbox_add(&a->loads, job, attempt, m->load->last_step, &m->load->base);
    }
}

void agent_trainer_closed(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          const char *why)
{
    struct attempt *x = find(a, job, attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    kill_by(x, t->now_ns + a->config.closed_grace_ns);
    if (why && !x->says_failed && !x->stop_mode)
        set_text(x, why);
}

static const char *failure_text(struct agent_turn *t, const struct attempt *x)
{
    if (x->says_failed || *x->text)
        return arena_strdup(&t->arena, x->text);
    const char *when = x->says_finished ? "after its last step" : "before it had finished";
    if (x->exit_signal)
        return arena_printf(&t->arena, "the trainer was killed by signal %d %s", x->exit_signal,
                            when);
    return arena_printf(&t->arena, "the trainer exited with %d %s", x->exit_code, when);
}

void agent_trainer_exited(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                          int exit_code, int exit_signal, const char *text)
{
    struct attempt *x = find(a, job, attempt);
    if (!x || x->life != LIFE_LIVE)
        return;
    x->exit_code = exit_code;
    x->exit_signal = exit_signal;
    bool is_clean = !exit_code && !exit_signal && !text;
    if (text)
        set_text(x, text);
    if (x->says_finished && is_clean)
        end(a, t, x, BALLAST__RANK_PHASE__RANK_FINISHED, "", false);
    else if (x->stop_mode)
        end(a, t, x, BALLAST__RANK_PHASE__RANK_STOPPED, x->text, true);
    else
        end(a, t, x, BALLAST__RANK_PHASE__RANK_FAILED, failure_text(t, x),
            x->says_failed ? x->is_retryable : true);
    spawn_pending(a, t);
}

void agent_log_grown(struct agent *a, struct agent_turn *t, job_id job, uint32_t attempt,
                     uint64_t spool_bytes, uint64_t dropped_bytes, bool is_closed)
{
    (void)t;
    struct attempt *x = find(a, job, attempt);
    if (!x)
        return;
    if (spool_bytes > x->log_spooled)
        x->log_spooled = spool_bytes;
    x->log_dropped = dropped_bytes;
    x->is_log_closed |= is_closed;
}

void agent_measured(struct agent *a, uint64_t loop_lag_ms, uint64_t memory_used_bytes)
{
    a->loop_lag_ms = loop_lag_ms;
    a->memory_used_bytes = memory_used_bytes;
}

/* ---- time --------------------------------------------------------------------------------- */

void agent_begin(struct agent *a, struct agent_turn *t, uint64_t now_ns)
{
    (void)a;
    t->now_ns = now_ns;
}

void agent_shut_down(struct agent *a, struct agent_turn *t, const char *reason)
{
    if (a->is_leaving)
        return;
    a->is_leaving = true;
    a->leave_reason = xstrdup(reason);
    struct attempt *waiting = in_life(a, LIFE_PENDING);
    if (waiting) {
        end(a, t, waiting, BALLAST__RANK_PHASE__RANK_STOPPED, reason, true);
        waiting->is_log_closed = true;
    }
    struct attempt *live = in_life(a, LIFE_LIVE);
    if (live)
        stop_live(a, t, live, BALLAST__STOP_MODE__STOP_CHECKPOINT, LEAVE_GRACE_NS, reason);
}

bool agent_may_exit(const struct agent *a)
{
    return a->has_said_goodbye;
}

static void tick_trainers(struct agent *a, struct agent_turn *t)
{
    struct attempt *x = in_life(a, LIFE_LIVE);
    if (!x)
        return;
    /* From here on the coordinator may count on it that this trainer is gone. */
    if (a->fence_ns && t->now_ns >= a->lease_from_ns + a->fence_ns &&
        x->stop_mode < BALLAST__STOP_MODE__STOP_NOW) {
        char *why = arena_printf(&t->arena, "no word from the coordinator for %" PRIu64 " s",
                                 (t->now_ns - a->lease_from_ns) / (uint64_t)NS_PER_S);
        note(t, arena_printf(&t->arena, "job=%" PRIu64 " attempt=%u msg=\"%s, stopping the "
                             "trainer\"", x->job, x->attempt, why));
        stop_live(a, t, x, BALLAST__STOP_MODE__STOP_NOW, STOP_GRACE_NS, why);
    }
    if (t->now_ns >= x->kill_ns)
        kill_live(t, x);
}

static void tick_coordinator(struct agent *a, struct agent_turn *t)
{
    if (a->is_attached && t->now_ns >= a->answered_ns + a->lease_ns)
        detach(a, t->now_ns);
    if (!a->is_attached && t->now_ns >= a->next_hello_ns)
        say_hello(a, t);
    else if (a->is_attached && t->now_ns >= a->next_beat_ns)
        beat(a, t);
}

static void tick_steps(struct agent *a, struct agent_turn *t)
{
    if (!a->is_attached || !a->steps.n || (a->steps_resend_ns && t->now_ns < a->steps_resend_ns))
        return;
    Ballast__StepReports *batch = outbox_batch(&a->steps, &t->arena);
    say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_STEPS, &batch->base);
    a->steps_resend_ns = t->now_ns + 2 * a->interval_ns;
}

static void tick_loads(struct agent *a, struct agent_turn *t)
{
    if (!a->is_attached || !a->loads.n || (a->loads_resend_ns && t->now_ns < a->loads_resend_ns))
        return;
    say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_LOAD,
        &outbox_load(&a->loads, &t->arena)->base);
    a->loads_resend_ns = t->now_ns + 2 * a->interval_ns;
}

static void tick_log(struct agent *a, struct agent_turn *t, struct attempt *x)
{
    if (x->log_sent > x->log_acked && t->now_ns >= x->log_resend_ns)
        x->log_sent = x->log_acked;
    if (x->log_sent == x->log_acked)
        x->log_resend_ns = t->now_ns + 2 * a->interval_ns;
    while (x->log_sent < x->log_spooled &&
           x->log_sent - x->log_acked < a->config.log_window_bytes) {
        uint64_t left = x->log_spooled - x->log_sent;
        struct effect *e = add_effect(t, EFFECT_SEND_LOG, x);
        fill_envelope(a, &e->envelope, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_LOG);
        e->offset = x->log_sent;
        e->n_bytes = left < LOG_CHUNK_BYTES_MAX ? (uint32_t)left : LOG_CHUNK_BYTES_MAX;
        e->dropped_bytes = x->log_dropped;
        x->log_sent += e->n_bytes;
    }
}

static void tick_logs(struct agent *a, struct agent_turn *t)
{
    for (size_t i = 0; a->is_attached && i < a->n_attempts; i++)
        if (a->attempts[i].life != LIFE_PENDING)
            tick_log(a, t, &a->attempts[i]);
}

static void forget_settled(struct agent *a, struct agent_turn *t)
{
    for (size_t i = a->n_attempts; i-- > 0;) {
        struct attempt *x = &a->attempts[i];
        bool is_log_stored = !x->has_spool || (x->is_log_closed && x->log_acked == x->log_spooled);
        if (x->life == LIFE_ENDED && x->is_acked && is_log_stored &&
            !outbox_has(&a->steps, x->job, x->attempt) &&
            !outbox_has(&a->loads, x->job, x->attempt))
            forget(a, t, x);
    }
}

void agent_tick(struct agent *a, struct agent_turn *t)
{
    if (a->has_said_goodbye)
        return;
    tick_trainers(a, t);
    tick_coordinator(a, t);
    tick_steps(a, t);
    tick_loads(a, t);
    tick_logs(a, t);
    forget_settled(a, t);
    if (a->is_leaving && !in_life(a, LIFE_LIVE)) {
        Ballast__Goodbye *g = arena_alloc(&t->arena, sizeof *g);
        ballast__goodbye__init(g);
        g->reason = arena_strdup(&t->arena, a->leave_reason);
        say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_GOODBYE, &g->base);
        a->has_said_goodbye = true;
    }
}

static uint64_t min_u64(uint64_t x, uint64_t y)
{
    return x < y ? x : y;
}

uint64_t agent_next_deadline_ns(const struct agent *a)
{
    uint64_t next_ns = a->is_attached ? min_u64(a->next_beat_ns, a->answered_ns + a->lease_ns)
                                      : a->next_hello_ns;
    if (a->has_said_goodbye)
        next_ns = UINT64_MAX;
    for (size_t i = 0; i < a->n_attempts; i++) {
        const struct attempt *x = &a->attempts[i];
        if (x->life == LIFE_LIVE) {
            next_ns = min_u64(next_ns, x->kill_ns);
            if (a->fence_ns && x->stop_mode < BALLAST__STOP_MODE__STOP_NOW)
                next_ns = min_u64(next_ns, a->lease_from_ns + a->fence_ns);
        }
        if (a->is_attached && x->log_sent > x->log_acked)
            next_ns = min_u64(next_ns, x->log_resend_ns);
    }
    if (a->is_attached && a->steps.n)
        next_ns = min_u64(next_ns, a->steps_resend_ns);
    if (a->is_attached && a->loads.n)
        next_ns = min_u64(next_ns, a->loads_resend_ns);
    return next_ns;
}

uint64_t agent_n_reports_dropped(const struct agent *a)
{
    return a->steps.n_dropped + a->loads.n_dropped;
}

bool agent_is_idle(const struct agent *a)
{
    return !a->n_attempts && !a->steps.n && !a->loads.n;
}

bool agent_is_attached(const struct agent *a)
{
    return a->is_attached;
}
