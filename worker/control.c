/* control.c - feeds the agent with what happens and carries out what it decides
 *
 * Everything runs on one uv loop. Every event is one turn: inputs go in, effects come out and are
 * carried out in order. A spawn that fails is an input of the next turn, so that effects never
 * run inside effects. The GPU is looked at on another thread: a look may take long. */
#include "worker/control.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <uv.h>

#include "common/clock.h"
#include "common/folder.h"
#include "common/link_trust.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/version.h"
#include "proto/check.h"
#include "worker/attempts.h"
#include "worker/gpu_health.h"
#include "worker/spool.h"

#define GPU_LOOK_MS 5000 /* between looks at the GPU */
#define DENIED_SAY_NS (60 * NS_PER_S)
#define TOLD_ONCE_NS  (1 * NS_PER_S) /* within it a second signal is the first one's echo */

struct control {
    const struct worker_config *config; /* borrowed */
    uv_loop_t loop;
    struct link *link;
    struct agent *agent;
    uv_timer_t timer;
    uv_signal_t signals[3];
    struct attempts *attempts;
    struct gpu_health *gpu; /* NULL: none to look at */
    const Ballast__GpuHealth *gpu_said; /* by the last look */
    uv_timer_t gpu_timer;
    uv_work_t gpu_look;
    bool is_looking; /* gpu_look is under way */
    uint64_t seq; /* of the newest message, to be shown */
    uint64_t timer_due_ns; /* 0: not armed */
    uint64_t denied_said_ns, told_to_end_ns;
    int lock_fd;
    bool in_turn, is_told_to_end, is_closing;
};

/* ---- turns -------------------------------------------------------------------------------- */

static void turn_begin(void *context, struct agent_turn *t)
{
    struct control *c = context;
    assert(!c->in_turn);
    c->in_turn = true;
    memset(t, 0, sizeof *t);
    agent_begin(c->agent, t, clock_now_ns());
}

static void carry_out(struct control *c, const struct effect *e);
static void rearm(struct control *c);

static void turn_end(void *context, struct agent_turn *t)
{
    struct control *c = context;
    agent_tick(c->agent, t);
    for (size_t i = 0; i < t->n_effects; i++)
        carry_out(c, &t->effects[i]);
    agent_turn_fini(t);
    c->in_turn = false;
    rearm(c);
}

/* ---- effects -------------------------------------------------------------------------------- */

static void send_to_coordinator(void *context, const Ballast__Envelope *envelope,
                                const ProtobufCMessage *payload)
{
    struct control *c = context;
    struct arena arena = {0};
    Ballast__Envelope e = *envelope;
    c->seq = e.seq; /* the agent numbers them: it counts its lease by these numbers */
    struct wire_bytes packed[WIRE_FRAMES];
    wire_pack(&e, payload, &arena, packed);
    struct link_frame frames[WIRE_FRAMES];
    for (int i = 0; i < WIRE_FRAMES; i++)
        frames[i] = (struct link_frame){packed[i].bytes, packed[i].n_bytes};
    int rc = link_send(c->link, LINK_SERVER, frames, WIRE_FRAMES);
    if (rc < 0)
        log_debug("method=%d msg=\"not sent: %s; it will be said again\"", (int)e.method,
                  strerror(-rc));
    arena_fini(&arena);
}

static void carry_out(struct control *c, const struct effect *e)
{
    switch (e->kind) {
    case EFFECT_SEND:
        send_to_coordinator(c, &e->envelope, e->payload);
        break;
    case EFFECT_NOTE:
        log_warn("%s", e->note);
        break;
    case EFFECT_SPAWN:
    case EFFECT_FORWARD:
    case EFFECT_KILL:
    case EFFECT_SEND_LOG:
    case EFFECT_FORGET:
        attempts_carry_out(c->attempts, e);
        break;
    }
}

/* ---- the coordinator ------------------------------------------------------------------------ */

static void on_coordinator_message(void *context, link_peer peer, const struct link_frame *frames,
                                   size_t n_frames)
{
    struct control *c = context;
    (void)peer;
    struct wire_bytes bytes[LINK_FRAMES_MAX];
    for (size_t i = 0; i < n_frames && i < LINK_FRAMES_MAX; i++)
        bytes[i] = (struct wire_bytes){frames[i].bytes, frames[i].n_bytes};
    struct agent_turn t;
    turn_begin(c, &t);
    struct checked_message m = {0};
    Ballast__Status status;
    if (check_message(bytes, n_frames, CHECK_COORDINATOR, &t.arena, &m, &status) < 0) {
        log_warn("msg=\"a message of the coordinator is refused: %s\"", status.message);
    } else {
        if (m.envelope->method == BALLAST__METHOD__METHOD_ACK)
            attempts_stored(c->attempts, (const Ballast__Ack *)m.payload);
        agent_message(c->agent, &t, m.envelope, m.payload);
    }
    turn_end(c, &t);
}

static void on_connection(void *context, bool is_up)
{
    struct control *c = context;
    log_info("coordinator=%s msg=\"connection %s\"", c->config->coordinator,
             is_up ? "is up" : "lost, trying again");
    if (!is_up)
        return;
    struct agent_turn t;
    turn_begin(c, &t);
    agent_connected(c->agent, &t);
    turn_end(c, &t);
}

static void on_denied(void *context, enum link_denial why)
{
    static const char *const reasons[] = {
        [LINK_NOT_ADMITTED] = "it does not know this worker's key: the line of its .pub must be "
                              "in authorized_keys there",
        [LINK_OTHER_SECURITY] = "one side has keys and the other has not: see 'key' and "
                                "'coordinator_key' here, 'key' there",
        [LINK_NO_HANDSHAKE] = "it broke the handshake off; if that goes on it has another key "
                              "than coordinator_key says",
    };
    struct control *c = context;
    uint64_t now_ns = clock_now_ns();
    struct link_trust trust;
    struct err err = {0};
    /* Keys change while it runs; a job need not notice. */
    if (link_trust_open(c->config->key_file, c->config->coordinator_key, &trust, &err) == 0) {
        if (link_trust_keys(&trust))
            link_change_keys(c->link, link_trust_keys(&trust));
        link_trust_close(&trust);
    }
    if (c->denied_said_ns && now_ns - c->denied_said_ns < DENIED_SAY_NS)
        return;
    c->denied_said_ns = now_ns;
    log_warn("coordinator=%s msg=\"not connected: %s\"", c->config->coordinator, reasons[why]);
}

/* ---- time, signals -------------------------------------------------------------------------- */

static void on_timer(uv_timer_t *timer);

static bool is_done(const struct control *c)
{
    return c->is_told_to_end && agent_may_exit(c->agent);
}

static void rearm(struct control *c)
{
    if (c->is_closing)
        return;
    uint64_t due_ns = agent_next_deadline_ns(c->agent);
    if (is_done(c) || attempts_has_failed(c->attempts))
        due_ns = 0;
    if (due_ns == UINT64_MAX) {
        uv_timer_stop(&c->timer);
        return;
    }
    uint64_t now_ns = clock_now_ns();
    uint64_t wait_ns = due_ns > now_ns ? due_ns - now_ns : 0;
    c->timer_due_ns = now_ns + wait_ns;
    uv_update_time(&c->loop);
    /* Rounded up, so that a turn never comes just before what it was for. */
    uv_timer_start(&c->timer, on_timer, (wait_ns + NS_PER_MS - 1) / NS_PER_MS, 0);
}

static void dump(const struct control *c)
{
    log_info("attached=%d seq=%" PRIu64 " reports_dropped=%" PRIu64 " msg=\"state asked for\"",
             agent_is_attached(c->agent), c->seq, agent_n_reports_dropped(c->agent));
    attempts_log(c->attempts);
}

static void close_all(struct control *c)
{
    c->is_closing = true;
    link_close(c->link);
    c->link = NULL;
    attempts_destroy(c->attempts);
    c->attempts = NULL;
    uv_close((uv_handle_t *)&c->timer, NULL);
    uv_close((uv_handle_t *)&c->gpu_timer, NULL);
    for (size_t i = 0; i < sizeof c->signals / sizeof *c->signals; i++)
        uv_close((uv_handle_t *)&c->signals[i], NULL);
}

/* Only here may the link be closed: its own callbacks may not. */
static void on_timer(uv_timer_t *timer)
{
    struct control *c = timer->data;
    if (is_done(c)) {
        close_all(c);
        return;
    }
    struct agent_turn t;
    turn_begin(c, &t);
    uint64_t lag_ns = t.now_ns > c->timer_due_ns ? t.now_ns - c->timer_due_ns : 0;
    agent_measured(c->agent, lag_ns / NS_PER_MS, attempts_resident_bytes(c->attempts));
    attempts_tell_failed(c->attempts, &t);
    turn_end(c, &t);
}

/* ---- the GPU -------------------------------------------------------------------------------- */

static void look_at_gpu(uv_work_t *look)
{
    struct control *c = look->data;
    c->gpu_said = gpu_health_look(c->gpu);
}

static void on_looked(uv_work_t *look, int status)
{
    struct control *c = look->data;
    c->is_looking = false;
    if (status < 0 || c->is_closing)
        return;
    struct agent_turn t;
    turn_begin(c, &t);
    agent_gpu(c->agent, &t, c->gpu_said);
    turn_end(c, &t);
}

static void on_gpu_timer(uv_timer_t *timer)
{
    struct control *c = timer->data;
    if (!c->is_looking)
        c->is_looking = uv_queue_work(&c->loop, &c->gpu_look, look_at_gpu, on_looked) == 0;
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct control *c = handle->data;
    if (number == SIGUSR1) {
        dump(c);
        return;
    }
    if (c->is_told_to_end) {
        /* A process group gets it whole, and then a script passes it on. */
        if (clock_now_ns() - c->told_to_end_ns < TOLD_ONCE_NS)
            return;
        log_warn("msg=\"told twice to end: the trainer is killed\"");
        if (!c->is_closing)
            close_all(c);
        return;
    }
    log_info("signal=%d msg=\"ending: the trainer is stopped first; once more ends at once\"",
             number);
    c->is_told_to_end = true;
    c->told_to_end_ns = clock_now_ns();
    struct agent_turn t;
    turn_begin(c, &t);
    agent_shut_down(c->agent, &t, "the worker was told to end");
    turn_end(c, &t);
}

/* ---- start and end -------------------------------------------------------------------------- */

/* An earlier life that was killed left the output of trainers that died with it. */
static void remove_old_output(const char *dir)
{
    char *pattern = xasprintf("%s/" SPOOL_PREFIX "*", dir);
    glob_t found;
    if (glob(pattern, GLOB_NOSORT, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++)
            unlink(found.gl_pathv[i]);
        globfree(&found);
    }
    free(pattern);
}

static int make_state_dir(struct control *c, struct err *err)
{
    const char *dir = c->config->state_dir;
    if (folder_make(dir, 0700, err) < 0)
        return err_prefix(err, "cannot make state_dir '%s'", dir);
    char *path = xasprintf("%s/lock", dir);
    c->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int code = c->lock_fd < 0 ? -errno : 0;
    free(path);
    if (code < 0)
        return err_set(err, code, "cannot write in state_dir '%s': %s", dir, strerror(-code));
    if (flock(c->lock_fd, LOCK_EX | LOCK_NB) < 0)
        return err_set(err, -EBUSY, "state_dir '%s' is in use by another worker; each needs its "
                       "own", dir);
    remove_old_output(dir);
    return 0;
}

static struct agent *make_agent(const struct worker_config *config)
{
    struct agent_config a = agent_config_default();
    a.name = config->name;
    a.node = config->node;
    a.machine = config->machine;
    a.device = config->device;
    a.version = BALLAST_VERSION;
    a.memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    a.cores = config->cores ? config->cores : (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    a.pid = (uint32_t)getpid();
    a.worker_epoch = (uint64_t)clock_wall_ns();
    return agent_create(&a);
}

static int start_signals(struct control *c, struct err *err)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1};
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        c->signals[i].data = c;
        int rc = uv_signal_start(&c->signals[i], on_signal, numbers[i]);
        if (rc < 0)
            return err_set(err, rc, "cannot wait for signal %d: %s", numbers[i], uv_strerror(rc));
    }
    return 0;
}

int control_run(const struct worker_config *config, struct err *err)
{
    static const struct link_handler templ = {
        .message = on_coordinator_message, .connection = on_connection, .denied = on_denied};
    struct control c = {.config = config, .lock_fd = -1};
    struct link_handler handler = templ;
    handler.context = &c;
    struct link_trust trust;
    int rc = link_trust_open(config->key_file, config->coordinator_key, &trust, err);
    if (rc < 0)
        return rc;
    if ((rc = make_state_dir(&c, err)) < 0)
        goto out_lock;
    rc = link_loop_init(&c.loop, err);
    if (rc < 0)
        goto out_lock;
    uv_timer_init(&c.loop, &c.timer);
    c.timer.data = &c;
    uv_timer_init(&c.loop, &c.gpu_timer);
    c.gpu_timer.data = c.gpu_look.data = &c;
    if ((c.gpu = gpu_health_create(config->device)))
        uv_timer_start(&c.gpu_timer, on_gpu_timer, 0, GPU_LOOK_MS);
    for (size_t i = 0; i < sizeof c.signals / sizeof *c.signals; i++)
        uv_signal_init(&c.loop, &c.signals[i]);
    c.agent = make_agent(config);
    c.attempts = attempts_create(&(struct attempts_shell){
        .loop = &c.loop, .config = config, .agent = c.agent, .context = &c,
        .turn_begin = turn_begin, .turn_end = turn_end, .send = send_to_coordinator});
    rc = start_signals(&c, err);
    if (rc == 0)
        rc = link_connect(&c.loop, config->coordinator, link_trust_keys(&trust), &handler,
                          &c.link, err);
    if (rc == 0) {
        log_info("name=%s node=%s device=%s coordinator=%s pid=%d msg=\"worker started\"",
                 config->name, config->node, config->device, config->coordinator, (int)getpid());
        rearm(&c);
    } else {
        close_all(&c);
    }
    uv_run(&c.loop, UV_RUN_DEFAULT);
    assert(uv_loop_close(&c.loop) == 0);
    gpu_health_destroy(c.gpu);
    agent_destroy(c.agent);
    log_info("msg=\"worker ended\"");
out_lock:
    link_trust_close(&trust);
    if (c.lock_fd >= 0)
        close(c.lock_fd);
    return rc;
}
