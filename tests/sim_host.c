/* sim_host.c - worker daemons, trainers, gangs
 *
 * A trainer is a process of its own: it outlives a killed daemon for a moment. The trainers of
 * one attempt make steps only together, whatever the control network does; that a step is never
 * made by an attempt after a later one was ready is the rule that the whole fencing is for. */
#include "tests/sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ORPHAN_MS_MAX 1500

static void wake(struct sim *s, struct sim_event *e);

static bool has_daemon(const struct sim *s, uint32_t host, uint32_t life)
{
    return s->hosts[host].agent && s->endpoints[host].life == life;
}

static struct sim_trainer *find_trainer(struct sim *s, uint64_t id)
{
    struct sim_trainer *t = s->trainers;
    while (t && t->id != id)
        t = t->next;
    return t;
}

static struct sim_trainer *live_trainer(struct sim *s, uint32_t host, job_id job,
                                        uint32_t attempt)
{
    for (struct sim_trainer *t = s->trainers; t; t = t->next)
        if (t->is_alive && t->host == host && t->job == job && t->attempt == attempt)
            return t;
    return NULL;
}

/* ---- the daemon carries out what its core says -------------------------------------------- */

static void spawn(struct sim *s, uint32_t host, const struct effect *e);
static void forward(struct sim *s, uint32_t host, const struct effect *e);
static void trainer_dies(struct sim *s, struct sim_trainer *t, int code, int signal_number,
                         uint64_t at_ns);

static void send_log(struct sim *s, uint32_t host, const struct effect *e)
{
    uint8_t *bytes = xcalloc(1, e->n_bytes);
    Ballast__LogChunk chunk = BALLAST__LOG_CHUNK__INIT;
    chunk.job_id = e->job;
    chunk.attempt = e->attempt;
    chunk.rank = e->rank;
    chunk.offset = e->offset;
    chunk.bytes = (ProtobufCBinaryData){.len = e->n_bytes, .data = bytes};
    net_to_coord(s, host, &e->envelope, &chunk.base);
    free(bytes);
}

static void forget(struct sim *s, const struct effect *e)
{
    for (struct sim_trainer *t = s->trainers; t; t = t->next)
        if (t->job == e->job && t->attempt == e->attempt && t->rank == e->rank &&
            t->attempt < SIM_ATTEMPTS_MAX &&
            s->store.output[e->job][e->attempt][e->rank] < t->output_bytes)
            sim_fail(s, "output of rank %u of job %" PRIu64 " attempt %u was forgotten before "
                     "it was stored", e->rank, e->job, e->attempt);
}

static void carry_out(struct sim *s, uint32_t host, const struct effect *e)
{
    struct sim_trainer *t;
    switch (e->kind) {
    case EFFECT_SEND:
        net_to_coord(s, host, &e->envelope, e->payload);
        break;
    case EFFECT_SPAWN:
        spawn(s, host, e);
        break;
    case EFFECT_FORWARD:
        forward(s, host, e);
        break;
    case EFFECT_KILL:
        if ((t = live_trainer(s, host, e->job, e->attempt)))
            trainer_dies(s, t, 0, 9, s->now_ns + sim_random(s, 5 * NS_PER_MS));
        break;
    case EFFECT_SEND_LOG:
        send_log(s, host, e);
        break;
    case EFFECT_FORGET:
        forget(s, e);
        break;
    case EFFECT_NOTE:
        sim_say(s, "%s: note: %s", s->hosts[host].name, e->note);
        break;
    }
}

static void begin(struct sim *s, uint32_t host, struct agent_turn *t)
{
    *t = (struct agent_turn){0};
    agent_begin(s->hosts[host].agent, t, s->now_ns);
}

static void finish(struct sim *s, uint32_t host, struct agent_turn *t)
{
    struct sim_host *h = &s->hosts[host];
    agent_tick(h->agent, t);
    for (size_t i = 0; i < t->n_effects; i++)
        carry_out(s, host, &t->effects[i]);
    agent_turn_fini(t);
    if (h->is_leaving && agent_may_exit(h->agent)) {
        sim_say(s, "%s: the daemon has ended", h->name);
        agent_destroy(h->agent);
        h->agent = NULL;
        h->is_leaving = false;
        s->endpoints[host].is_up = false;
        s->endpoints[host].peer = 0;
        return;
    }
    uint64_t next_ns = agent_next_deadline_ns(h->agent);
    if (next_ns != UINT64_MAX && next_ns != h->next_wake_ns) {
        h->next_wake_ns = next_ns;
        sim_at(s, next_ns, wake, host, s->endpoints[host].life, NULL);
    }
}

static void wake(struct sim *s, struct sim_event *e)
{
    uint32_t host = (uint32_t)e->a;
    struct sim_host *h = &s->hosts[host];
    if (!has_daemon(s, host, (uint32_t)e->b) || e->at_ns < h->next_wake_ns)
        return;
    h->next_wake_ns = 0;
    struct agent_turn t;
    begin(s, host, &t);
    finish(s, host, &t);
}

void host_receive(struct sim *s, uint32_t host, const struct sim_packet *p)
{
    struct agent_turn t;
    ProtobufCMessage *payload;
    if (!s->hosts[host].agent)
        return;
    begin(s, host, &t);
    const Ballast__Envelope *e = net_open(p, &t.arena, &payload);
    agent_message(s->hosts[host].agent, &t, e, payload);
    finish(s, host, &t);
}

/* ---- words of a trainer ------------------------------------------------------------------- */

static void say_state(struct sim *s, struct sim_trainer *t, Ballast__RankPhase phase,
                      uint64_t step, const char *text, bool retryable)
{
    if (!has_daemon(s, t->host, t->life))
        return;
    Ballast__RankState state = BALLAST__RANK_STATE__INIT;
    state.job_id = t->job;
    state.attempt = t->attempt;
    state.rank = t->rank;
    state.phase = phase;
    state.step = step;
    state.checkpoint_step = s->checkpoint[t->job];
    state.text = (char *)text;
    state.retryable = retryable;
    plans_say(t, &state);
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &state;
    struct agent_turn turn;
    begin(s, t->host, &turn);
    agent_trainer_message(s->hosts[t->host].agent, &turn, t->job, t->attempt, &m);
    finish(s, t->host, &turn);
}

static void say_step(struct sim *s, struct sim_trainer *t, uint64_t step)
{
    if (!has_daemon(s, t->host, t->life))
        return;
    Ballast__StepReport report = BALLAST__STEP_REPORT__INIT;
    report.step = step;
    report.attempt = t->attempt;
    report.loss = 5.0 / (double)(step + 1);
    report.tokens_per_second = 100;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STEP;
    m.step = &report;
    struct agent_turn turn;
    begin(s, t->host, &turn);
    agent_trainer_message(s->hosts[t->host].agent, &turn, t->job, t->attempt, &m);
    finish(s, t->host, &turn);
}

static void say_load(struct sim *s, struct sim_gang *g)
{
    struct sim_trainer *t = g->ranks[0];
    struct arena arena = {0};
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_LOAD;
    m.load = plans_load(s, g, &arena);
    if (m.load && has_daemon(s, t->host, t->life)) {
        struct agent_turn turn;
        begin(s, t->host, &turn);
        agent_trainer_message(s->hosts[t->host].agent, &turn, t->job, t->attempt, &m);
        finish(s, t->host, &turn);
    }
    arena_fini(&arena);
}

static void print(struct sim *s, struct sim_trainer *t, uint64_t n_bytes)
{
    t->output_bytes += n_bytes;
    if (!has_daemon(s, t->host, t->life))
        return;
    struct agent_turn turn;
    begin(s, t->host, &turn);
    agent_log_grown(s->hosts[t->host].agent, &turn, t->job, t->attempt, t->output_bytes, 0,
                    !t->is_alive);
    finish(s, t->host, &turn);
}

/* ---- death -------------------------------------------------------------------------------- */

static void die(struct sim *s, struct sim_event *e)
{
    struct sim_trainer *t = find_trainer(s, e->a);
    if (!t || !t->is_alive)
        return;
    int code = (int)(e->b >> 32), signal_number = (int)(e->b & 0xffffffff);
    t->is_alive = false;
    if (!has_daemon(s, t->host, t->life))
        return; /* an orphan: nobody waits for it */
    sim_say(s, "%s: trainer of job %" PRIu64 " attempt %u ended, %d:%d", s->hosts[t->host].name,
            t->job, t->attempt, code, signal_number);
    print(s, t, 100);
    struct agent_turn turn;
    begin(s, t->host, &turn);
    agent_trainer_exited(s->hosts[t->host].agent, &turn, t->job, t->attempt, code, signal_number,
                         NULL);
    finish(s, t->host, &turn);
}

static void trainer_dies(struct sim *s, struct sim_trainer *t, int code, int signal_number,
                         uint64_t at_ns)
{
    sim_at(s, at_ns, die, t->id, (uint64_t)code << 32 | (uint32_t)signal_number, NULL);
}

bool host_kill_trainer(struct sim *s, uint32_t host, int signal_number)
{
    for (struct sim_trainer *t = s->trainers; t; t = t->next)
        if (t->is_alive && t->host == host) {
            trainer_dies(s, t, 0, signal_number, s->now_ns);
            return true;
        }
    return false;
}

static void fail(struct sim *s, struct sim_trainer *t, const char *text, bool retryable)
{
    t->is_closing = true;
    say_state(s, t, BALLAST__RANK_PHASE__RANK_FAILED, 0, text, retryable);
    trainer_dies(s, t, 1, 0, s->now_ns + sim_random(s, 100 * NS_PER_MS));
}

static void forward(struct sim *s, uint32_t host, const struct effect *e)
{
    struct sim_trainer *t = live_trainer(s, host, e->job, e->attempt);
    if (!t || t->is_closing)
        return;
    if (e->message->what_case != BALLAST__TRAINER_MESSAGE__WHAT_STOP) {
        plans_receive(t, e->message);
        return;
    }
    if (e->message->stop->mode == BALLAST__STOP_MODE__STOP_CHECKPOINT) {
        t->wants_stop = true;
        return;
    }
    if (sim_chance(s, s->hangs))
        return; /* only SIGKILL helps */
    t->is_closing = true;
    trainer_dies(s, t, 1, 0, s->now_ns + sim_random(s, NS_PER_S));
}

/* ---- gangs -------------------------------------------------------------------------------- */

static struct sim_gang *gang_of(struct sim *s, const struct sim_trainer *t)
{
    for (struct sim_gang *g = s->gangs; g; g = g->next)
        if (g->job == t->job && g->attempt == t->attempt)
            return g;
    struct sim_gang *g = xcalloc(1, sizeof *g);
    *g = (struct sim_gang){.next = s->gangs, .job = t->job, .attempt = t->attempt,
                           .n_ranks = t->n_ranks, .total_steps = t->total_steps,
                           .every_steps = t->every_steps, .step = s->checkpoint[t->job]};
    s->gangs = g;
    return g;
}

static bool is_whole(const struct sim_gang *g)
{
    for (uint32_t r = 0; r < g->n_ranks; r++)
        if (!g->ranks[r] || !g->ranks[r]->is_alive || g->ranks[r]->is_closing)
            return false;
    return true;
}

/* The others notice, some time after one is gone: their collective fails. */
static void collective_fails(struct sim *s, struct sim_event *e)
{
    struct sim_trainer *t = find_trainer(s, e->a);
    if (t && t->is_alive && !t->is_closing)
        fail(s, t, "a collective failed", true);
}

static void break_gang(struct sim *s, struct sim_gang *g)
{
    g->is_broken = true;
    for (uint32_t r = 0; r < g->n_ranks; r++)
        if (g->ranks[r] && g->ranks[r]->is_alive && sim_chance(s, s->hangs > 0 ? 0.5 : 1))
            sim_at(s, s->now_ns + NS_PER_S + sim_random(s, 2 * NS_PER_S), collective_fails,
                   g->ranks[r]->id, 0, NULL);
}

static void end_gang(struct sim *s, struct sim_gang *g, Ballast__RankPhase phase)
{
    g->is_ended = true;
    for (uint32_t r = 0; r < g->n_ranks; r++) {
        struct sim_trainer *t = g->ranks[r];
        t->is_closing = true;
        say_state(s, t, phase, g->step, "", false);
        trainer_dies(s, t, 0, 0, s->now_ns + 1 + sim_random(s, 100 * NS_PER_MS));
    }
}

static void gang_step(struct sim *s, struct sim_event *e)
{
    struct sim_gang *g = s->gangs;
    while (g && !(g->job == e->a && g->attempt == e->b))
        g = g->next;
    if (!g || g->is_broken || g->is_ended)
        return;
    if (!is_whole(g)) {
        break_gang(s, g);
        return;
    }
    if (g->attempt < s->ready_attempt[g->job])
        sim_fail(s, "job %" PRIu64 ": attempt %u made a step after attempt %u was ready", g->job,
                 g->attempt, s->ready_attempt[g->job]);
    struct sim_trainer *t = g->ranks[sim_random(s, g->n_ranks)];
    if (sim_chance(s, s->trainer_fails)) {
        bool retryable = sim_chance(s, 0.8);
        fail(s, t, retryable ? "out of memory" : "data.train: no such file", retryable);
        break_gang(s, g);
        return;
    }
    bool wants_stop = false;
    for (uint32_t r = 0; r < g->n_ranks; r++)
        wants_stop |= g->ranks[r]->wants_stop;
    if (g->step < g->total_steps)
        g->step++;
    if (g->step % g->every_steps == 0 || g->step == g->total_steps || wants_stop)
        s->checkpoint[g->job] = g->step;
    uint32_t dies = g->agreed_epoch && sim_chance(s, 4 * s->trainer_fails)
        ? (uint32_t)sim_random(s, g->n_ranks) : g->n_ranks;
    plans_boundary(s, g, dies);
    say_step(s, g->ranks[0], g->step);
    say_load(s, g);
    for (uint32_t r = 0; r < g->n_ranks; r++) {
        say_state(s, g->ranks[r], BALLAST__RANK_PHASE__RANK_RUNNING, g->step, "", false);
        print(s, g->ranks[r], 1 + sim_random(s, 100));
    }
    if (dies < g->n_ranks) {
        trainer_dies(s, g->ranks[dies], 0, 11, s->now_ns + 1);
        break_gang(s, g);
        return;
    }
    if (g->step == g->total_steps)
        end_gang(s, g, BALLAST__RANK_PHASE__RANK_FINISHED);
    else if (wants_stop)
        end_gang(s, g, BALLAST__RANK_PHASE__RANK_STOPPED);
    else
        sim_at(s, s->now_ns + s->step_ns, gang_step, g->job, g->attempt, NULL);
}

static void ready(struct sim *s, struct sim_event *e)
{
    struct sim_trainer *t = find_trainer(s, e->a);
    if (!t || !t->is_alive || t->is_closing)
        return;
    if (sim_chance(s, s->trainer_fails)) {
        fail(s, t, "the device is busy", true);
        return;
    }
    struct sim_gang *g = gang_of(s, t);
    t->is_ready = true;
    g->ranks[t->rank] = t;
    g->n_ready++;
    if (t->attempt > s->ready_attempt[t->job])
        s->ready_attempt[t->job] = t->attempt;
    say_state(s, t, BALLAST__RANK_PHASE__RANK_READY, s->checkpoint[t->job], "", false);
    if (g->n_ready != g->n_ranks)
        return;
    if (!is_whole(g)) {
        break_gang(s, g);
        return;
    }
    g->step = g->window_step = s->checkpoint[t->job];
    sim_at(s, s->now_ns + s->step_ns, gang_step, g->job, g->attempt, NULL);
}

/* ---- life --------------------------------------------------------------------------------- */

static void spawn_fails(struct sim *s, struct sim_event *e)
{
    struct sim_trainer *t = find_trainer(s, e->a);
    t->is_alive = false;
    if (!has_daemon(s, t->host, t->life))
        return;
    struct agent_turn turn;
    begin(s, t->host, &turn);
    agent_log_grown(s->hosts[t->host].agent, &turn, t->job, t->attempt, 0, 0, true);
    agent_trainer_exited(s->hosts[t->host].agent, &turn, t->job, t->attempt, 127, 0,
                         "the trainer could not be started");
    finish(s, t->host, &turn);
}

static void spawn(struct sim *s, uint32_t host, const struct effect *e)
{
    for (struct sim_trainer *t = s->trainers; t; t = t->next)
        if (t->is_alive && t->host == host)
            sim_fail(s, "%s: trainer of job %" PRIu64 " started while that of job %" PRIu64
                     " lives", s->hosts[host].name, e->job, t->job);
    struct sim_trainer *t = xcalloc(1, sizeof *t);
    *t = (struct sim_trainer){
        .next = s->trainers, .host = host, .life = s->endpoints[host].life, .rank = e->rank,
        .n_ranks = (uint32_t)e->start->n_gang, .job = e->job, .attempt = e->attempt,
        .is_alive = true, .id = ++s->next_trainer_id,
        .total_steps = e->start->spec->train_steps,
        .every_steps = e->start->spec->checkpoint_every_steps};
    plans_init(t, e->start);
    s->trainers = t;
    s->counts.n_attempts++;
    sim_say(s, "%s: trainer of job %" PRIu64 " attempt %u rank %u started", s->hosts[host].name,
            t->job, t->attempt, t->rank);
    if (sim_chance(s, s->spawn_fails)) {
        sim_at(s, s->now_ns, spawn_fails, t->id, 0, NULL);
        return;
    }
    uint64_t load_ns = s->net.slow > 0 ? 1 + sim_random(s, 2 * s->load_ns) : s->load_ns;
    sim_at(s, s->now_ns + load_ns, ready, t->id, 0, NULL);
}

void host_start(struct sim *s, uint32_t host)
{
    struct sim_host *h = &s->hosts[host];
    if (h->agent)
        return;
    struct agent_config c = agent_config_default();
    c.name = h->name;
    c.node = h->node;
    c.device = "cpu";
    c.version = "sim";
    c.memory_bytes = 8ull << 30;
    c.cores = 1;
    c.pid = (uint32_t)s->next_epoch;
    c.worker_epoch = h->epoch = s->next_epoch++;
    c.closed_grace_ns = NS_PER_S;
    h->agent = agent_create(&c);
    h->next_wake_ns = 0;
    s->endpoints[host].is_up = true;
    s->endpoints[host].life++;
    s->endpoints[host].peer = 0;
    struct agent_turn t;
    begin(s, host, &t);
    agent_connected(h->agent, &t);
    finish(s, host, &t);
}

void host_kill(struct sim *s, uint32_t host)
{
    struct sim_host *h = &s->hosts[host];
    if (!h->agent)
        return;
    sim_say(s, "%s: the daemon was killed", h->name);
    agent_destroy(h->agent);
    h->agent = NULL;
    h->is_leaving = false;
    s->had_daemon_kill = true;
    s->counts.n_kills++;
    s->endpoints[host].is_up = false;
    s->endpoints[host].peer = 0;
    for (struct sim_trainer *t = s->trainers; t; t = t->next)
        if (t->is_alive && t->host == host && t->life == s->endpoints[host].life)
            trainer_dies(s, t, 1, 0, s->now_ns + sim_random(s, ORPHAN_MS_MAX * NS_PER_MS));
}

void host_shut_down(struct sim *s, uint32_t host)
{
    struct sim_host *h = &s->hosts[host];
    if (!h->agent || h->is_leaving)
        return;
    sim_say(s, "%s: the daemon is told to end", h->name);
    h->is_leaving = true;
    s->had_daemon_kill = true;
    struct agent_turn t;
    begin(s, host, &t);
    agent_shut_down(h->agent, &t, "shut down");
    finish(s, host, &t);
}

bool host_is_idle(const struct sim *s, uint32_t host)
{
    for (const struct sim_trainer *t = s->trainers; t; t = t->next)
        if (t->is_alive && t->host == host)
            return false;
    return s->hosts[host].agent && agent_is_idle(s->hosts[host].agent);
}

void host_sim_fini(struct sim *s)
{
    for (uint32_t i = 0; i < s->n_hosts; i++)
        agent_destroy(s->hosts[i].agent);
    for (struct sim_trainer *t = s->trainers, *next; t; t = next) {
        next = t->next;
        plans_fini(t);
        free(t);
    }
    for (struct sim_gang *g = s->gangs, *next; g; g = next) {
        next = g->next;
        free(g);
    }
}
