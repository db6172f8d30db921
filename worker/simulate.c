/* simulate.c - the daemon's own core for each virtual worker, and a trainer that only counts
 *
 * So scheduling, restarts, pauses, balancing and the client can be tried at any size. */
#include "worker/simulate.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/conf.h"
#include "common/link_trust.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/version.h"
#include "proto/check.h"
#include "worker/simulate_parts.h"

#define PER_NODE     8
#define TICK_MS      20
#define LOAD_NS      (300 * NS_PER_MS)
#define MEMORY_BYTES (141ull << 30) /* of a large GPU, so that large jobs can be tried */

/* ---- checkpoints, as if on a file system ---------------------------------------------------- */

uint64_t *simulated_checkpoint(struct simulation *s, job_id job)
{
    for (size_t i = 0; i < s->n_saved; i++)
        if (s->saved[i].job == job)
            return &s->saved[i].step;
    s->saved = xrealloc(s->saved, (s->n_saved + 1) * sizeof *s->saved);
    s->saved[s->n_saved] = (struct saved){.job = job};
    return &s->saved[s->n_saved++].step;
}

/* ---- effects -------------------------------------------------------------------------------- */

/* Of a gang, the ranks that are in this process. */
static uint32_t count_here(const struct simulation *s, const Ballast__Start *start)
{
    uint32_t n = 0;
    for (size_t i = 0; i < start->n_gang; i++)
        for (uint32_t k = 0; k < s->n; k++)
            n += strcmp(start->gang[i]->worker, s->workers[k].name) == 0;
    return n;
}

static void spawn(struct virtual *v, const struct effect *e)
{
    struct simulation *s = v->all;
    uint64_t step = *simulated_checkpoint(s, e->job);
    bool is_first = !crowd_find(s->crowds, e->job, e->attempt);
    uint32_t n_here = is_first ? count_here(s, e->start) : 0;
    v->trainer = (struct counter){
        .job = e->job, .attempt = e->attempt, .rank = e->rank, .step = step,
        .resumed_from_step = step,
        .crowd = crowd_join(&s->crowds, e->start, n_here, step, &s->popularity, &s->cluster),
        .every_steps = e->start->spec->checkpoint_every_steps,
        .ready_ns = clock_now_ns() + LOAD_NS, .settings_revision = e->start->settings_revision,
    };
}

static void take_plan(struct counter *t, const Ballast__Prepare *prepare)
{
    if (!t->crowd->experts || prepare->placement->epoch <= t->arrived_epoch)
        return;
    t->arrived_epoch = prepare->placement->epoch;
    virtual_experts_prepare(t->crowd->experts, prepare);
}

static void take_settings(struct counter *t, const Ballast__Settings *settings)
{
    t->settings_revision = settings->revision;
    t->every_steps = settings->spec->checkpoint_every_steps;
    if (t->crowd->experts)
        virtual_experts_settings(t->crowd->experts, settings->spec);
}

static void forward(struct counter *t, const Ballast__TrainerMessage *m)
{
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STOP) {
        bool saves = m->stop->mode == BALLAST__STOP_MODE__STOP_CHECKPOINT &&
                     crowd_goes_on(t->crowd);
        t->crowd->ends |= saves;
        t->is_killed |= !saves;
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_PREPARE) {
        take_plan(t, m->prepare);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN && t->crowd->experts) {
        virtual_experts_abort(t->crowd->experts, m->abort_plan);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS) {
        take_settings(t, m->settings);
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

static void act(struct virtual *v)
{
    struct agent_turn t;
    turn_begin(v, &t);
    if (counter_is_due(&v->trainer, t.now_ns))
        counter_go_on(v, &t);
    turn_end(v, &t);
}

static void on_timer(uv_timer_t *timer)
{
    struct simulation *s = timer->data;
    uint64_t now_ns = clock_now_ns();
    uint32_t n_done = 0;
    for (struct crowd *c = s->crowds; c; c = c->next)
        crowd_step(c, now_ns);
    for (uint32_t i = 0; i < s->n; i++) {
        struct virtual *v = &s->workers[i];
        n_done += agent_may_exit(v->agent);
        if (counter_is_due(&v->trainer, now_ns) || now_ns >= agent_next_deadline_ns(v->agent))
            act(v);
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

static struct agent *make_agent(const struct worker_config *config, const char *name, uint32_t i)
{
    struct agent_config a = agent_config_default();
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
        s->workers[i].name = xasprintf("%.50s-%" PRIu32, config->name, i);
        s->workers[i].agent = make_agent(config, s->workers[i].name, i);
    }
    for (uint32_t i = 0; rc == 0 && i < s->n; i++) {
        struct link_handler handler = {.context = &s->workers[i], .message = on_message,
                                       .connection = on_connection};
        rc = link_connect(&s->loop, config->coordinator, keys, &handler, &s->workers[i].link,
                          err);
    }
    return rc;
}

static int open_loads(struct simulation *s, const struct simulate_options *o, struct err *err)
{
    int rc = 0;
    if (o->cluster_file)
        rc = conf_read(o->cluster_file, &cluster_table, &s->cluster, err);
    else
        fields_init(&cluster_table, &s->cluster);
    if (rc < 0)
        return rc;
    if ((rc = popularity_init(&s->popularity, o->loads_file, o->seed, err)) < 0)
        fields_fini(&cluster_table, &s->cluster);
    return rc;
}

static void close_loads(struct simulation *s)
{
    popularity_fini(&s->popularity);
    fields_fini(&cluster_table, &s->cluster);
}

static void open_loop(struct simulation *s)
{
    static const int numbers[] = {SIGTERM, SIGINT};
    uv_timer_init(&s->loop, &s->timer);
    s->timer.data = s;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        s->signals[i].data = s;
        uv_signal_start(&s->signals[i], on_signal, numbers[i]);
    }
}

static void free_all(struct simulation *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        struct virtual *v = &s->workers[i];
        if (v->trainer.job)
            crowd_leave(&s->crowds, v->trainer.crowd);
        agent_destroy(v->agent);
        free(v->name);
    }
    free(s->workers);
    free(s->saved);
    close_loads(s);
}

int simulate_run(const struct worker_config *config, const struct simulate_options *options,
                 struct err *err)
{
    struct simulation s = {.n = options->n};
    struct link_trust trust;
    int rc = open_loads(&s, options, err);
    if (rc < 0)
        return rc;
    if ((rc = link_trust_open(config->key_file, config->coordinator_key, &trust, err)) < 0) {
        close_loads(&s);
        return rc;
    }
    raise_descriptors();
    if ((rc = link_loop_init(&s.loop, err)) < 0) {
        link_trust_close(&trust);
        close_loads(&s);
        return rc;
    }
    open_loop(&s);
    if ((rc = open_workers(&s, config, link_trust_keys(&trust), err)) < 0)
        close_all(&s);
    else
        uv_timer_start(&s.timer, on_timer, 0, TICK_MS);
    link_trust_close(&trust);
    log_info("workers=%" PRIu32 " coordinator=%s loads=%s msg=\"virtual workers, which compute "
             "nothing\"", s.n, config->coordinator,
             options->loads_file ? options->loads_file : "made-up");
    uv_run(&s.loop, UV_RUN_DEFAULT);
    int left = uv_loop_close(&s.loop);
    assert(left == 0);
    free_all(&s);
    return rc;
}
