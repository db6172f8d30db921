/* agent_attempt.c - the attempts that a worker holds, and the effects of what it decides */
#include "worker/agent_parts.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- effects ------------------------------------------------------------------------------- */

void agent_turn_fini(struct agent_turn *t)
{
    arena_fini(&t->arena);
    *t = (struct agent_turn){0};
}

struct effect *agent_effect(struct agent_turn *t, enum effect_kind kind,
                            const struct attempt *x)
{
    t->effects = arena_grow(&t->arena, t->effects, t->n_effects, sizeof *t->effects);
    struct effect *e = &t->effects[t->n_effects++];
    *e = (struct effect){.kind = kind};
    if (x) {
        e->job = x->job;
        e->attempt = x->attempt;
        e->rank = x->rank;
    }
    return e;
}

void agent_fill_envelope(struct agent *a, Ballast__Envelope *e, Ballast__Kind kind,
                         Ballast__Method method)
{
    ballast__envelope__init(e);
    e->kind = kind;
    e->method = method;
    e->worker_epoch = a->config.worker_epoch;
    e->coordinator_epoch = a->coordinator_epoch;
    e->seq = ++a->seq;
}

struct effect *agent_say(struct agent *a, struct agent_turn *t, Ballast__Kind kind,
                           Ballast__Method method, const ProtobufCMessage *payload)
{
    struct effect *e = agent_effect(t, EFFECT_SEND, NULL);
    agent_fill_envelope(a, &e->envelope, kind, method);
    e->payload = payload;
    return e;
}

void agent_note(struct agent_turn *t, const char *text)
{
    agent_effect(t, EFFECT_NOTE, NULL)->note = text;
}

/* ---- attempts ------------------------------------------------------------------------------ */

struct attempt *agent_find(struct agent *a, job_id job, uint32_t attempt)
{
    for (size_t i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].job == job && a->attempts[i].attempt == attempt)
            return &a->attempts[i];
    return NULL;
}

struct attempt *agent_in_life(struct agent *a, enum life life)
{
    for (size_t i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].life == life)
            return &a->attempts[i];
    return NULL;
}

uint32_t agent_newest_seen(const struct agent *a, job_id job)
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

void agent_attempt_fini(struct attempt *x)
{
    if (x->start)
        ballast__start__free_unpacked(x->start, NULL);
    free(x->text);
    free(x->plan_text);
    free(x->warning);
    free(x->data_address);
}

void agent_forget(struct agent *a, struct agent_turn *t, struct attempt *x)
{
    if (x->has_spool)
        agent_effect(t, EFFECT_FORGET, x);
    agent_attempt_fini(x);
    size_t i = (size_t)(x - a->attempts);
    a->n_attempts--;
    memmove(x, x + 1, (a->n_attempts - i) * sizeof *x);
}

struct attempt *agent_add(struct agent *a, struct agent_turn *t, job_id job,
                          uint32_t attempt, uint32_t rank, enum life life)
{
    for (size_t i = 0; a->n_attempts == ATTEMPTS_MAX; i++) {
        assert(i < ATTEMPTS_MAX); /* at most two have not ended */
        if (a->attempts[i].life == LIFE_ENDED) {
            agent_note(t, arena_printf(&t->arena, "job=%" PRIu64 " attempt=%u msg=\"forgotten "
                                       "before the coordinator knew its end\"",
                                       a->attempts[i].job, a->attempts[i].attempt));
            agent_forget(a, t, &a->attempts[i]);
        }
    }
    struct attempt *x = &a->attempts[a->n_attempts++];
    *x = (struct attempt){.job = job, .attempt = attempt, .rank = rank, .life = life,
                          .kill_ns = UINT64_MAX, .late_ns = UINT64_MAX, .text = xstrdup(""),
                          .plan_text = xstrdup(""), .warning = xstrdup(""),
                          .data_address = xstrdup("")};
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
    s->text = arena_strdup(arena, !*x->text && x->phase == BALLAST__RANK_PHASE__RANK_RUNNING
                                      ? x->warning : x->text);
    s->retryable = x->is_retryable;
    s->placement_epoch = x->placement_epoch;
    s->prepared_epoch = x->prepared_epoch;
    s->rejected_epoch = x->rejected_epoch;
    s->plan_text = arena_strdup(arena, x->plan_text);
    s->moved_bytes = x->moved_bytes;
    s->pause_s = x->pause_s;
    s->settings_revision = x->settings_revision;
    s->data_address = arena_strdup(arena, x->data_address);
    if (*x->data_address)
        s->data_key = (ProtobufCBinaryData){
            .len = DATA_KEY_BYTES, .data = arena_memdup(arena, x->data_key, DATA_KEY_BYTES)};
    return s;
}

/* While nobody listens the next hello carries it. */
void agent_report(struct agent *a, struct agent_turn *t, const struct attempt *x)
{
    if (a->is_attached)
        agent_say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_RANK_STATE,
             &describe(x, &t->arena)->base);
}

size_t agent_describe_all(struct agent *a, struct arena *arena, Ballast__RankState ***out)
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

void agent_set_line(char **line, const char *text)
{
    char *copy = xstrdup(text);
    copy[strnlen(copy, REASON_BYTES_MAX - 1)] = '\0';
    free(*line);
    *line = copy;
}

void agent_set_text(struct attempt *x, const char *text)
{
    agent_set_line(&x->text, text);
}

void agent_end(struct agent *a, struct agent_turn *t, struct attempt *x,
               Ballast__RankPhase phase, const char *text, bool retryable)
{
    x->life = LIFE_ENDED;
    x->phase = phase;
    x->is_retryable = retryable;
    x->kill_ns = UINT64_MAX;
    agent_set_text(x, text);
    agent_report(a, t, x);
}

static void spawn(struct agent *a, struct agent_turn *t, struct attempt *x, Ballast__Start *start)
{
    x->life = LIFE_LIVE;
    x->phase = BALLAST__RANK_PHASE__RANK_SPAWNED;
    x->has_spool = true;
    agent_effect(t, EFFECT_SPAWN, x)->start = start;
    agent_report(a, t, x);
}

/* Nothing lives any more: the one that waited for that goes. */
void agent_spawn_pending(struct agent *a, struct agent_turn *t)
{
    struct attempt *x = agent_in_life(a, LIFE_PENDING);
    if (!x || agent_in_life(a, LIFE_LIVE))
        return;
    size_t n_bytes = ballast__start__get_packed_size(x->start);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__start__pack(x->start, bytes);
    ballast__start__free_unpacked(x->start, NULL);
    x->start = NULL;
    spawn(a, t, x, ballast__start__unpack(arena_pb(&t->arena), n_bytes, bytes));
}

void agent_kill(struct agent_turn *t, struct attempt *x)
{
    x->kill_ns = UINT64_MAX;
    agent_effect(t, EFFECT_KILL, x);
}

void agent_kill_by(struct attempt *x, uint64_t at_ns)
{
    if (at_ns < x->kill_ns)
        x->kill_ns = at_ns;
}

Ballast__TrainerMessage *agent_forward(struct agent_turn *t, const struct attempt *x)
{
    Ballast__TrainerMessage *m = arena_alloc(&t->arena, sizeof *m);
    ballast__trainer_message__init(m);
    agent_effect(t, EFFECT_FORWARD, x)->message = m;
    return m;
}

void agent_stop(struct agent *a, struct agent_turn *t, struct attempt *x,
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
    agent_set_text(x, reason);
    agent_kill_by(x, t->now_ns + grace_ns);
    Ballast__TrainerMessage *m = agent_forward(t, x);
    m->what_case = BALLAST__TRAINER_MESSAGE__WHAT_STOP;
    m->stop = s;
    agent_report(a, t, x);
}
