/* simulate.c - the daemon's own core for each virtual worker, and a trainer that only counts
 *
 * So scheduling, restarts, pauses and the client can be tried at any size. Ranks of a job step by
 * their own clocks, as nothing travels between them; experts have no loads and do not move. */
#include "worker/simulate.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <uv.h>

#include "common/clock.h"
#include "common/link_trust.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/version.h"
#include "proto/check.h"
#include "worker/agent.h"

#define PER_NODE     8
#define TICK_MS      20
#define LOAD_NS      (300 * NS_PER_MS)
#define STEP_NS      (200 * NS_PER_MS)
#define MEMORY_BYTES (141ull << 30) /* of a large GPU, so that large jobs can be tried */

/* A trainer that only counts; job 0: there is none. */
struct counter {
    job_id   job;
    uint32_t attempt, rank;
    uint64_t step, n_steps, every_steps, n_tokens, next_ns;
    uint32_t rejected_epoch, settings_revision;
    bool     is_ready, saves_and_stops, is_killed;
};

struct virtual {
    struct simulation *all;
    struct agent  *agent;
    struct link   *link;
    struct counter trainer;
};

struct saved {
    job_id   job;
    uint64_t step;
};

struct simulation {
    uv_loop_t       loop;
    uv_timer_t      timer;
    uv_signal_t     signals[2];
    struct virtual *workers;
    uint32_t        n;
    struct saved   *saved; /* the newest checkpoint of each job */
    size_t          n_saved;
    bool            is_ending;
};

/* ---- checkpoints, as if on a file system ---------------------------------------------------- */

static uint64_t *checkpoint_of(struct simulation *s, job_id job)
{
    for (size_t i = 0; i < s->n_saved; i++)
        if (s->saved[i].job == job)
            return &s->saved[i].step;
    s->saved = xrealloc(s->saved, (s->n_saved + 1) * sizeof *s->saved);
    s->saved[s->n_saved] = (struct saved){.job = job};
    return &s->saved[s->n_saved++].step;
}

/* ---- effects -------------------------------------------------------------------------------- */

static void spawn(struct virtual *v, const struct effect *e)
{
    const Ballast__JobSpec *spec = e->start->spec;
    v->trainer = (struct counter){
        .job = e->job, .attempt = e->attempt, .rank = e->rank, .n_steps = spec->train_steps,
        .every_steps = spec->checkpoint_every_steps,
        .n_tokens = (uint64_t)spec->train_global_batch * spec->data_sequence_length,
        .step = *checkpoint_of(v->all, e->job), .next_ns = clock_now_ns() + LOAD_NS,
        .settings_revision = e->start->settings_revision,
    };
}

static void forward(struct counter *t, const Ballast__TrainerMessage *m)
{
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STOP) {
        bool saves = m->stop->mode == BALLAST__STOP_MODE__STOP_CHECKPOINT && t->is_ready;
        t->saves_and_stops |= saves;
        t->is_killed |= !saves;
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_PREPARE) {
        t->rejected_epoch = m->prepare->placement->epoch;
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS) {
        t->settings_revision = m->settings->revision;
        t->every_steps = m->settings->spec->checkpoint_every_steps;
    }
}

static void send_frames(struct virtual *v, const struct effect *e)
{
    struct arena arena = {0};
    Ballast__Envelope envelope = e->envelope;
    struct wire_bytes packed[WIRE_FRAMES];
    struct link_frame frames[WIRE_FRAMES];
    wire_pack(&envelope, e->payload, &arena, packed);
    for (int i = 0; i < WIRE_FRAMES; i++)
        frames[i] = (struct link_frame){packed[i].bytes, packed[i].n_bytes};
    link_send(v->link, LINK_SERVER, frames, WIRE_FRAMES); /* what is lost is said again */
    arena_fini(&arena);
}

static void turn_end(struct virtual *v, struct agent_turn *t)
{
    agent_tick(v->agent, t);
    for (size_t i = 0; i < t->n_effects; i++) {
        const struct effect *e = &t->effects[i];
        bool is_live = v->trainer.job && v->trainer.job == e->job &&
                       v->trainer.attempt == e->attempt;
        if (e->kind == EFFECT_SEND)
            send_frames(v, e);
        else if (e->kind == EFFECT_SPAWN)
            spawn(v, e);
        else if (e->kind == EFFECT_FORWARD && is_live)
            forward(&v->trainer, e->message);
        else if (e->kind == EFFECT_KILL && is_live)
            v->trainer.is_killed = true;
        else if (e->kind == EFFECT_NOTE)
            log_warn("%s", e->note);
    }
    agent_turn_fini(t);
}

static void turn_begin(struct virtual *v, struct agent_turn *t)
{
    *t = (struct agent_turn){0};
    agent_begin(v->agent, t, clock_now_ns());
}

/* ---- a trainer's words ---------------------------------------------------------------------- */

static void say_state(struct virtual *v, struct agent_turn *t, Ballast__RankPhase phase)
{
    const struct counter *c = &v->trainer;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    s.job_id = c->job;
    s.attempt = c->attempt;
    s.rank = c->rank;
    s.phase = phase;
    s.step = c->step;
    s.checkpoint_step = *checkpoint_of(v->all, c->job);
    s.rejected_epoch = c->rejected_epoch;
    s.plan_text = c->rejected_epoch ? "a virtual worker has no experts" : s.plan_text;
    s.settings_revision = c->settings_revision;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &s;
    agent_trainer_message(v->agent, t, c->job, c->attempt, &m);
}

static void say_step(struct virtual *v, struct agent_turn *t)
{
    const struct counter *c = &v->trainer;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__StepReport r = BALLAST__STEP_REPORT__INIT;
    r.step = c->step;
    r.attempt = c->attempt;
    r.loss = 2 + 4 / sqrt((double)c->step);
    r.validation_loss = r.aux_loss = r.z_loss = r.index_loss = NAN;
    r.tokens_per_second = (double)c->n_tokens * NS_PER_S / STEP_NS;
    r.imbalance = 1;
    r.at_ns = clock_wall_ns();
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STEP;
    m.step = &r;
    agent_trainer_message(v->agent, t, c->job, c->attempt, &m);
}

static void end_trainer(struct virtual *v, struct agent_turn *t, int signal_number)
{
    struct counter ended = v->trainer;
    v->trainer = (struct counter){0};
    agent_log_grown(v->agent, t, ended.job, ended.attempt, 0, 0, true);
    agent_trainer_exited(v->agent, t, ended.job, ended.attempt, 0, signal_number, NULL);
}

/* What the trainer does now. */
static void count_on(struct virtual *v, struct agent_turn *t)
{
    struct counter *c = &v->trainer;
    c->next_ns += STEP_NS;
    if (c->is_killed) {
        end_trainer(v, t, SIGKILL);
        return;
    }
    if (!c->is_ready) {
        c->is_ready = true;
        say_state(v, t, BALLAST__RANK_PHASE__RANK_READY);
        return;
    }
    bool is_last = ++c->step >= c->n_steps;
    uint64_t *saved = checkpoint_of(v->all, c->job);
    bool saves = is_last || c->saves_and_stops ||
                 (c->every_steps && c->step % c->every_steps == 0);
    if (saves && c->step > *saved)
        *saved = c->step;
    if (c->rank == 0)
        say_step(v, t);
    say_state(v, t, BALLAST__RANK_PHASE__RANK_RUNNING);
    if (!is_last && !c->saves_and_stops)
        return;
    say_state(v, t, is_last ? BALLAST__RANK_PHASE__RANK_FINISHED
                            : BALLAST__RANK_PHASE__RANK_STOPPED);
    end_trainer(v, t, 0);
}

/* ---- the loop ------------------------------------------------------------------------------- */

static void on_message(void *context, link_peer peer, const struct link_frame *frames,
                       size_t n_frames)
{
    struct virtual *v = context;
    struct wire_bytes bytes[LINK_FRAMES_MAX];
    struct checked_message m;
    Ballast__Status status;
    struct agent_turn t;
    (void)peer;
    for (size_t i = 0; i < n_frames && i < LINK_FRAMES_MAX; i++)
        bytes[i] = (struct wire_bytes){frames[i].bytes, frames[i].n_bytes};
    turn_begin(v, &t);
    if (check_message(bytes, n_frames, CHECK_COORDINATOR, &t.arena, &m, &status) == 0)
        agent_message(v->agent, &t, m.envelope, m.payload);
    turn_end(v, &t);
}

static void on_connection(void *context, bool is_up)
{
    struct virtual *v = context;
    struct agent_turn t;
    if (!is_up)
        return;
    turn_begin(v, &t);
    agent_connected(v->agent, &t);
    turn_end(v, &t);
}

static void close_all(struct simulation *s)
{
    if (uv_is_closing((uv_handle_t *)&s->timer))
        return;
    for (uint32_t i = 0; i < s->n; i++) {
        link_close(s->workers[i].link);
        s->workers[i].link = NULL;
    }
    uv_close((uv_handle_t *)&s->timer, NULL);
    for (size_t i = 0; i < sizeof s->signals / sizeof *s->signals; i++)
        uv_close((uv_handle_t *)&s->signals[i], NULL);
}

static void on_timer(uv_timer_t *timer)
{
    struct simulation *s = timer->data;
    uint32_t n_done = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        struct virtual *v = &s->workers[i];
        uint64_t now_ns = clock_now_ns();
        bool acts = v->trainer.job && (now_ns >= v->trainer.next_ns || v->trainer.is_killed);
        n_done += agent_may_exit(v->agent);
        if (!acts && now_ns < agent_next_deadline_ns(v->agent))
            continue;
        struct agent_turn t;
        turn_begin(v, &t);
        if (acts)
            count_on(v, &t);
        turn_end(v, &t);
    }
    if (s->is_ending && n_done == s->n)
        close_all(s);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct simulation *s = handle->data;
    log_info("signal=%d msg=\"ending: once more ends at once\"", number);
    if (s->is_ending) {
        close_all(s);
        return;
    }
    s->is_ending = true;
    for (uint32_t i = 0; i < s->n; i++) {
        struct agent_turn t;
        turn_begin(&s->workers[i], &t);
        agent_shut_down(s->workers[i].agent, &t, "the simulation ends");
        turn_end(&s->workers[i], &t);
    }
}

static struct agent *make_agent(const struct worker_config *config, uint32_t i)
{
    struct agent_config a = agent_config_default();
    char *name = xasprintf("%.50s-%" PRIu32, config->name, i);
    char *node = xasprintf("%.50s-%" PRIu32, config->node, i / PER_NODE);
    a.name = name;
    a.node = node;
    a.machine = config->machine;
    a.device = "virtual";
    a.version = BALLAST_VERSION;
    a.memory_bytes = MEMORY_BYTES;
    a.cores = 1;
    a.pid = (uint32_t)getpid();
    a.worker_epoch = (uint64_t)clock_wall_ns();
    struct agent *agent = agent_create(&a);
    free(name);
    free(node);
    return agent;
}

/* Each connection takes a few files. */
static void raise_descriptors(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int open_workers(struct simulation *s, const struct worker_config *config,
                        const struct link_keys *keys, struct err *err)
{
    int rc = 0;
    s->workers = xcalloc(s->n, sizeof *s->workers);
    for (uint32_t i = 0; i < s->n; i++) {
        s->workers[i].all = s;
        s->workers[i].agent = make_agent(config, i);
    }
    for (uint32_t i = 0; rc == 0 && i < s->n; i++) {
        struct link_handler handler = {.context = &s->workers[i], .message = on_message,
                                       .connection = on_connection};
        rc = link_connect(&s->loop, config->coordinator, keys, &handler, &s->workers[i].link,
                          err);
    }
    return rc;
}

int simulate_run(const struct worker_config *config, uint32_t n, struct err *err)
{
    static const int numbers[] = {SIGTERM, SIGINT};
    struct simulation s = {.n = n};
    struct link_trust trust;
    int rc = link_trust_open(config->key_file, config->coordinator_key, &trust, err);
    if (rc < 0)
        return rc;
    raise_descriptors();
    if ((rc = link_loop_init(&s.loop, err)) < 0) {
        link_trust_close(&trust);
        return rc;
    }
    uv_timer_init(&s.loop, &s.timer);
    s.timer.data = &s;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uv_signal_init(&s.loop, &s.signals[i]);
        s.signals[i].data = &s;
        uv_signal_start(&s.signals[i], on_signal, numbers[i]);
    }
    if ((rc = open_workers(&s, config, link_trust_keys(&trust), err)) < 0)
        close_all(&s);
    else
        uv_timer_start(&s.timer, on_timer, 0, TICK_MS);
    link_trust_close(&trust);
    log_info("workers=%" PRIu32 " coordinator=%s msg=\"virtual workers, which compute nothing\"", n,
             config->coordinator);
    uv_run(&s.loop, UV_RUN_DEFAULT);
    int left = uv_loop_close(&s.loop);
    assert(left == 0);
    for (uint32_t i = 0; i < s.n; i++)
        agent_destroy(s.workers[i].agent);
    free(s.workers);
    free(s.saved);
    return rc;
}
