/* server.c - the loop: time, signals, the end */
#include "coordinator/server_parts.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/version.h"
#include "coordinator/http.h"

#define DESCRIPTORS_MAX 65536u
#define DESCRIPTORS_MIN 256u

/* ---- time ------------------------------------------------------------------------------------ */

static void on_time(uv_timer_t *timer)
{
    struct server *s = timer->data;
    uint64_t now_ns = clock_now_ns();
    if (s->state == SERVER_WAITING && now_ns >= s->retry_ns)
        server_restore(s);
    if (s->core && (s->n_gone || now_ns >= coord_next_deadline_ns(s->core)) &&
        s->state == SERVER_SERVING)
        turn_get(s);
    query_expire(s, now_ns);
    if (s->open)
        turn_end(s);
    server_arm_timer(s);
}

void server_arm_timer(struct server *s)
{
    if (uv_is_closing((uv_handle_t *)&s->timer))
        return;
    uint64_t at_ns = s->poll_deadline_ns, now_ns = clock_now_ns();
    if (s->state == SERVER_WAITING && s->retry_ns < at_ns)
        at_ns = s->retry_ns;
    if (s->state == SERVER_SERVING) {
        uint64_t core_ns = s->n_gone ? now_ns : coord_next_deadline_ns(s->core);
        at_ns = core_ns < at_ns ? core_ns : at_ns;
    }
    if (at_ns == UINT64_MAX) {
        uv_timer_stop(&s->timer);
        return;
    }
    uv_update_time(&s->loop);
    uv_timer_start(&s->timer, on_time,
                   at_ns > now_ns ? (at_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS : 0, 0);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void close_all(struct server *s)
{
    if (uv_is_closing((uv_handle_t *)&s->timer))
        return;
    link_close(s->link);
    s->link = NULL;
    http_close(s->http);
    s->http = NULL;
    uv_close((uv_handle_t *)&s->pulse, NULL);
    uv_close((uv_handle_t *)&s->timer, NULL);
    uv_close((uv_handle_t *)&s->done, NULL);
    for (size_t i = 0; i < sizeof s->signals / sizeof s->signals[0]; i++)
        uv_close((uv_handle_t *)&s->signals[i], NULL);
}

/* Accepted work is finished before the end: what is with the store comes back first. */
static void stop(struct server *s)
{
    if (s->state != SERVER_STOPPING)
        log_info("msg=\"stopping\" batches=%zu", s->n_out);
    if (s->open)
        turn_end(s);
    s->state = SERVER_STOPPING;
    if (s->link)
        query_stop_all(s);
    if (s->n_out == 0)
        close_all(s);
}

void server_fail(struct server *s, int rc, const char *text)
{
    log_error("msg=\"%s\"", text);
    s->rc = err_set(s->err, rc, "%s", text);
    stop(s);
}

/* ---- signals --------------------------------------------------------------------------------- */

static void log_state(struct server *s)
{
    struct link_stats l = s->link ? link_stats(s->link) : (struct link_stats){0};
    log_info("state=%d batches=%zu parked=%zu peers=%u connections=%u received=%" PRIu64
             " sent=%" PRIu64 " refused=%" PRIu64 " limited=%" PRIu64 " foreign=%" PRIu64
             " unreachable=%" PRIu64 " slow=%" PRIu64 " turned_away=%" PRIu64,
             (int)s->state, s->n_out, s->n_parked, l.n_peers, l.n_connections, l.n_received,
             l.n_sent, s->n_refused, s->n_limited, s->n_foreign, l.n_unreachable,
             l.n_dropped_slow, s->n_turned_away);
    char *text = s->core ? coord_dump(s->core) : NULL;
    for (char *save, *line = text ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save))
        log_info("dump msg=\"%s\"", line);
    free(text);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct server *s = handle->data;
    if (number == SIGHUP) {
        if (s->reload)
            s->reload(s->reload_context);
        server_reload_keys(s);
        return;
    }
    if (number == SIGUSR1) {
        log_state(s);
        return;
    }
    if (s->state == SERVER_STOPPING) {
        log_warn("msg=\"asked to stop twice: leaving at once\"");
        _exit(1); /* a crash at any point is as good as a clean stop */
    }
    stop(s);
}

static void catch_signals(struct server *s)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is a full disk, not an end */
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        s->signals[i].data = s;
        uv_signal_start(&s->signals[i], on_signal, numbers[i]);
    }
}

/* ---- all ------------------------------------------------------------------------------------- */

static struct coord_config core_config(const struct server_config *c)
{
    struct coord_config core = coord_config_default();
    core.heartbeat_floor_ns = c->heartbeat_interval_ns;
    core.heartbeats_per_s = c->heartbeats_per_second;
    core.lost_floor_ns = c->lost_after_ns;
    core.restart_grace_ns = c->restart_grace_ns;
    core.fence_ns = c->fence_after_ns;
    core.backoff_base_ns = c->backoff_base_ns;
    core.backoff_cap_ns = c->backoff_max_ns;
    core.start_timeout_ns = c->start_timeout_ns;
    core.stop_grace_ns = c->stop_grace_ns;
    core.checkpoint_grace_ns = c->checkpoint_grace_ns;
    core.pause_grace_ns = c->pause_grace_ns;
    core.key_keep_ns = c->idempotency_keep_ns;
    core.version = BALLAST_VERSION;
    core.commit = BALLAST_COMMIT;
    if (getrandom(&core.seed, sizeof core.seed, 0) != sizeof core.seed)
        core.seed = (uint64_t)clock_wall_ns() ^ (uint64_t)getpid();
    return core;
}

/* Each worker and each client takes a descriptor. */
static int raise_descriptors(uint32_t *out, struct err *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit))
        return err_set(err, -errno, "getrlimit: %s", strerror(errno));
    rlim_t wanted = limit.rlim_max < DESCRIPTORS_MAX ? limit.rlim_max : DESCRIPTORS_MAX;
    if (limit.rlim_cur < wanted) {
        limit.rlim_cur = wanted;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur < DESCRIPTORS_MIN)
        return err_set(err, -EMFILE, "%llu files may be open at once (ulimit -n), but a "
                       "coordinator needs %u, and one more for each worker and client",
                       (unsigned long long)limit.rlim_cur, DESCRIPTORS_MIN);
    *out = limit.rlim_cur < DESCRIPTORS_MAX ? (uint32_t)limit.rlim_cur : DESCRIPTORS_MAX;
    return 0;
}

/* On the writer's thread. */
static void notify(void *context)
{
    struct server *s = context;
    uv_async_send(&s->done);
}

static void on_done(uv_async_t *async)
{
    struct server *s = async->data;
    server_take_stored(s);
    if (s->state == SERVER_STOPPING)
        stop(s);
    else
        server_arm_timer(s);
}

int server_run(const struct server_config *config, void (*reload)(void *context), void *context,
               struct err *err)
{
    struct server s = {
        .config = config, .core_config = core_config(config), .reload = reload,
        .reload_context = context, .state = SERVER_RESTORING, .poll_deadline_ns = UINT64_MAX,
        .started_wall_ns = clock_wall_ns(), .err = err,
    };
    int raised = raise_descriptors(&s.n_descriptors_max, err);
    if (raised < 0)
        return raised;
    for (size_t i = 0; i < config->n_listen; i++) {
        int rc = link_address_check(config->listen[i], *config->key_file, err);
        if (rc < 0)
            return rc;
    }
    int opened = auth_open(config->key_file, config->authorized_keys, &s.auth, err);
    if (opened == 0)
        opened = link_loop_init(&s.loop, err);
    if (opened < 0) {
        auth_fini(&s.auth);
        return opened;
    }
    uv_async_init(&s.loop, &s.done, on_done);
    uv_timer_init(&s.loop, &s.timer);
    uv_timer_init(&s.loop, &s.pulse);
    s.done.data = s.timer.data = s.pulse.data = &s;
    catch_signals(&s);
    if ((s.rc = store_open(config->state_dir, notify, &s, &s.store, err)) < 0 ||
        (s.rc = server_http_open(&s)) < 0)
        close_all(&s);
    else
        server_restore(&s);
    uv_run(&s.loop, UV_RUN_DEFAULT);
    store_close(s.store);
    coord_destroy(s.core);
    arena_fini(&s.scratch);
    auth_fini(&s.auth);
    free(s.gone);
    int left = uv_loop_close(&s.loop);
    assert(left == 0);
    return s.rc;
}
