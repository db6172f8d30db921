/* server_http.c - what is answered over HTTP: health, metrics, the pages of the dashboard */
#include "coordinator/server_parts.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/clock.h"
#include "common/host_memory.h"
#include "common/keyring.h"
#include "common/log.h"
#include "common/version.h"
#include "coordinator/dashboard/dashboard.h"
#include "coordinator/http.h"

#define PULSE_MS        1000
#define SERIES_JOBS_MAX 1000u /* jobs with series of their own */
#define LIBRARY_AGE_S   86400u

#define TEXT "text/plain; charset=utf-8"
#define EXPOSITION "text/plain; version=0.0.4; charset=utf-8"

static void say(struct http_request *r, unsigned status, const char *text)
{
    http_answer(r, status, TEXT, text, strlen(text), 0);
}

/* Takes text. */
static void say_own(struct http_request *r, const char *type, char *text)
{
    http_answer(r, 200, type, text, strlen(text), 0);
    free(text);
}

/* ---- health ---------------------------------------------------------------------------------- */

static void say_ready(struct server *s, struct http_request *r)
{
    Ballast__Status status;
    if (s->state == SERVER_SERVING) {
        say(r, 200, "ok\n");
        return;
    }
    if (s->state == SERVER_STOPPING) {
        say(r, 503, "stopping\n");
        return;
    }
    say_not_serving(s, &s->scratch, &status);
    say(r, 503, status.message);
    arena_reset(&s->scratch);
}

/* ---- metrics --------------------------------------------------------------------------------- */

static double cpu_s(void)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

static uint64_t count_descriptors(void)
{
    uint64_t n = 0;
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *e; folder && (e = readdir(folder));)
        n += e->d_name[0] != '.';
    if (folder)
        closedir(folder);
    return n ? n - 1 : 0; /* without the folder's own */
}

void http_look_around(const struct server *s, struct metrics_now *out)
{
    struct link_stats l = s->link ? link_stats(s->link) : (struct link_stats){0};
    struct store_sizes sizes = store_sizes(s->store);
    struct process_memory memory = process_memory();
    uint64_t now_ns = clock_now_ns();
    *out = (struct metrics_now){
        .version = BALLAST_VERSION, .commit = BALLAST_COMMIT,
        .is_serving = s->state == SERVER_SERVING,
        .coordinator_epoch = s->core ? coord_epoch(s->core) : 0,
        .n_batches = s->n_out, .n_watches = s->n_parked, .n_peers = l.n_peers,
        .n_connections = l.n_connections, .n_received = l.n_received, .n_sent = l.n_sent,
        .n_unreachable = l.n_unreachable, .n_dropped_slow = l.n_dropped_slow,
        .n_bad_frames = l.n_bad_frames, .n_refused = s->n_refused, .n_limited = s->n_limited,
        .n_foreign = s->n_foreign, .n_turned_away = s->n_turned_away,
        .n_unknown_keys = s->n_unknown,
        .state_bytes = sizes.state_bytes, .state_wal_bytes = sizes.state_wal_bytes,
        .stats_bytes = sizes.stats_bytes, .stats_wal_bytes = sizes.stats_wal_bytes,
        .free_bytes = store_free_bytes(s->store),
        .backup_s = s->backup_ns ? (double)(now_ns - s->backup_ns) / 1e9 : -1,
        .cpu_s = cpu_s(), .start_s = (double)s->started_wall_ns / 1e9,
        .resident_bytes = memory.anonymous + memory.shared, .n_descriptors = count_descriptors(),
        .n_descriptors_max = s->n_descriptors_max,
    };
    if (s->core)
        coord_count(s->core, now_ns, out->n_jobs, &out->fleet);
}

static void say_metrics(struct server *s, struct http_request *r)
{
    struct metrics_now now;
    http_look_around(s, &now);
    say_own(r, EXPOSITION, metrics_text(&s->metrics, &now));
}

static void say_job_metrics(struct server *s, struct http_request *r)
{
    struct arena a = {0};
    Ballast__Job **jobs = NULL;
    size_t n = s->core ? coord_jobs(s->core, 0, NULL, SERIES_JOBS_MAX, &a, &jobs) : 0;
    say_own(r, EXPOSITION, metrics_jobs_text(jobs, n));
    arena_fini(&a);
}

static void say_worker_metrics(struct server *s, struct http_request *r)
{
    struct arena a = {0};
    Ballast__Worker **workers = NULL;
    size_t n = s->core ? coord_workers(s->core, clock_now_ns(), &a, &workers) : 0;
    say_own(r, EXPOSITION, metrics_workers_text(workers, n));
    arena_fini(&a);
}

/* ---- routes ---------------------------------------------------------------------------------- */

static bool say_page(struct http_request *r, const char *path)
{
    const char *name = strcmp(path, "/") ? path + 1 : "index.html";
    for (size_t i = 0; i < dashboard_n_files; i++) {
        const struct dashboard_file *f = &dashboard_files[i];
        if (!strcmp(name, f->name)) {
            http_answer(r, 200, f->type, f->bytes, f->n_bytes,
                        strstr(name, ".min.") ? LIBRARY_AGE_S : 0);
            return true;
        }
    }
    return false;
}

static void on_get(void *context, struct http_request *r)
{
    static const char api[] = "/api/v1/";
    static const struct {
        const char *path;
        void (*say)(struct server *s, struct http_request *r);
    } rows[] = {
        {"/metrics", say_metrics},
        {"/metrics/jobs", say_job_metrics},
        {"/metrics/workers", say_worker_metrics},
    };
    struct server *s = context;
    const char *path = http_path(r);
    unsigned status;
    if (!strcmp(path, "/livez")) {
        say(r, 200, "ok\n");
        return;
    }
    if (!strcmp(path, "/readyz")) {
        say_ready(s, r);
        return;
    }
    if (!http_may_read(r, &status)) {
        say(r, status, status == 401 ? "a token is needed: as a bearer token, or as a password\n"
                                     : "ask by this machine's address or as localhost\n");
        return;
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strcmp(path, rows[i].path)) {
            rows[i].say(s, r);
            return;
        }
    if (!strncmp(path, api, sizeof api - 1))
        http_api(s, r, path + sizeof api - 1);
    else if (!say_page(r, path))
        say(r, 404, "there is /, /metrics, /metrics/jobs, /metrics/workers, /livez, /readyz\n");
}

/* ---- life ------------------------------------------------------------------------------------ */

static void on_pulse(uv_timer_t *timer)
{
    struct server *s = timer->data;
    uint64_t now_ns = clock_now_ns();
    metrics_observe(&s->metrics, METRICS_LAG, now_ns > s->pulse_ns ? now_ns - s->pulse_ns : 0);
    s->pulse_ns = now_ns + PULSE_MS * NS_PER_MS;
}

int server_http_open(struct server *s)
{
    const struct server_config *c = s->config;
    char token[TOKEN_BYTES_MAX + 1] = "";
    if (!*c->http_listen)
        return 0;
    int rc = *c->http_token ? token_read(c->http_token, token, s->err) : 0;
    if (rc == 0)
        rc = http_listen(&s->loop, c->http_listen, *token ? token : NULL, on_get, s, &s->http,
                         s->err);
    explicit_bzero(token, sizeof token);
    if (rc < 0)
        return rc;
    s->core_config.dashboard = http_address(s->http);
    log_info("address=http://%s msg=\"dashboard and metrics\"", http_address(s->http));
    s->pulse_ns = clock_now_ns() + PULSE_MS * NS_PER_MS;
    uv_timer_start(&s->pulse, on_pulse, PULSE_MS, PULSE_MS);
    return 0;
}
