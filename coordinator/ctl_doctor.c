/* ctl_doctor.c - ping, version, and the one screen that says what is wrong */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/link.h"
#include "common/types.h"
#include "common/version.h"
#include "common/versions.h"
#include "coordinator/event.h"

#define DOCTOR_TIMEOUT_MS 2000
#define JOBS_SHOWN 5

int ctl_version(struct ctl *c)
{
    if (!ctl_is_json(c)) {
        version_print("ballast");
        return CTL_OK;
    }
    struct json *o = json_new_object();
    for (size_t i = 0; i < n_version_rows; i++)
        json_put(o, version_rows[i].name, json_new_string(version_rows[i].text));
    ctl_json_one(c, "Version", 0, o);
    return CTL_OK;
}

static void show_good_config(const struct ctl *c, const struct ctl_place *p, bool has_keys)
{
    struct json *o = json_new_object(), *address = json_new_object();
    json_put(address, "value", json_new_string(p->address));
    json_put(address, "source", json_new_string(p->source));
    json_put(o, "ok", json_new_bool(true));
    json_put(o, "address", address);
    json_put(o, "key_of", has_keys ? json_new_string(p->trust.own.name) : NULL);
    ctl_json_one(c, "ConfigCheck", 0, o);
}

int ctl_check_config(struct ctl *c)
{
    struct ctl_place p;
    struct err err;
    if (!ctl_find_place(c, &p))
        return CTL_USAGE;
    bool has_keys = link_trust_keys(&p.trust) != NULL;
    int rc = link_address_check(p.address, has_keys, &err) < 0
                 ? ctl_fail(c, CTL_USAGE, "%s (from %s)", err.text, p.source) : CTL_OK;
    if (rc == CTL_OK && ctl_is_json(c))
        show_good_config(c, &p, has_keys);
    else if (rc == CTL_OK)
        printf("ok: address %s (from %s)%s%s\n", p.address, p.source,
               has_keys ? ", key of " : "", has_keys ? p.trust.own.name : "");
    ctl_place_fini(&p);
    return rc;
}

static int ping(struct ctl *c, const Ballast__PingReply **out_reply, uint64_t *out_ns)
{
    Ballast__PingRequest request = BALLAST__PING_REQUEST__INIT;
    const ProtobufCMessage *message;
    uint64_t start_ns = clock_now_ns();
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_PING, &request.base, &message);
    *out_ns = clock_now_ns() - start_ns;
    if (rc == CTL_OK)
        *out_reply = (const Ballast__PingReply *)message;
    return rc;
}

static struct json *ping_json(const Ballast__PingReply *p, uint64_t took_ns)
{
    struct json *o = json_new_object();
    json_put(o, "version", json_new_string(p->version));
    json_put(o, "commit", json_new_string(p->commit));
    json_put(o, "coordinator_epoch", json_new_u64(p->coordinator_epoch));
    json_put(o, "uptime_seconds", json_new_double((double)p->uptime_ms / 1e3));
    json_put(o, "workers", json_new_u64(p->n_workers));
    json_put(o, "workers_alive", json_new_u64(p->n_workers_alive));
    json_put(o, "jobs_live", json_new_u64(p->n_jobs_live));
    json_put(o, "user", json_new_string(p->user));
    json_put(o, "dashboard", *p->dashboard ? json_new_string(p->dashboard) : NULL);
    json_put(o, "round_trip_seconds", json_new_double((double)took_ns / 1e9));
    return o;
}

int ctl_ping(struct ctl *c)
{
    const Ballast__PingReply *p;
    uint64_t took_ns;
    char up[CLOCK_STAMP_BYTES];
    int rc = ping(c, &p, &took_ns);
    if (rc != CTL_OK)
        return rc;
    if (ctl_is_json(c)) {
        ctl_json_one(c, "Ping", p->seq, ping_json(p, took_ns));
        return CTL_OK;
    }
    clock_duration(p->uptime_ms * NS_PER_MS, up);
    printf("%s is up: version %s (%s), incarnation %" PRIu64 ", for %s, %.2f ms\n",
           c->connected_to, p->version, p->commit, p->coordinator_epoch, up,
           (double)took_ns / 1e6);
    return CTL_OK;
}

/* ---- doctor --------------------------------------------------------------------------------- */

struct findings {
    char  *next;   /* the command to type; the first one found counts */
    size_t n_wrong;
    struct json *items; /* NULL: they are printed */
};

static void report(struct findings *f, const char *what, const char *mark, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void report(struct findings *f, const char *what, const char *mark, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (f->items) {
        struct json *o = json_new_object();
        json_put(o, "what", json_new_string(what));
        json_put(o, "state", json_new_string(mark));
        json_put(o, "text", json_new_string(text));
        json_push(f->items, o);
        return;
    }
    printf("%-12s %-6s ", what, mark);
    ctl_print_escaped(stdout, text, strlen(text), false);
    putchar('\n');
}

static void found(struct findings *f, char *next)
{
    f->n_wrong++;
    if (f->next)
        free(next);
    else
        f->next = next;
}

/* False where nothing can be asked there. */
static bool look_at_address(const struct ctl_place *p, struct findings *f)
{
    const char *address = p->address, *source = p->source;
    const char *path = strncmp(address, "ipc://", 6) ? NULL : address + 6;
    struct err err;
    if (link_address_check(address, p->trust.servers.n > 0, &err) < 0) {
        report(f, "address", "WRONG", "%s (from %s)", err.text, source);
        found(f, xstrdup(strncmp(address, "tcp://", 6) ? "ballast doctor --address ADDRESS"
                                                       : "ballast keygen --help"));
        return false;
    }
    report(f, "address", "ok", "%s (from %s)", address, source);
    if (path && access(path, F_OK) != 0) {
        report(f, "socket", "WRONG", "%s does not exist: no coordinator has listened there", path);
        found(f, xstrdup("ballast-coordinator --config FILE   (or deploy/quickstart)"));
    } else if (path && access(path, R_OK | W_OK) != 0) {
        report(f, "socket", "WRONG", "%s may not be opened by you", path);
        found(f, xasprintf("ls -l %s", path));
    }
    if (p->trust.servers.n)
        report(f, "key", "ok", "of %s (%s)", p->trust.own.name, p->key_file);
    return true;
}

static void look_at_version(const Ballast__PingReply *p, struct findings *f)
{
    char up[CLOCK_STAMP_BYTES];
    clock_duration(p->uptime_ms * NS_PER_MS, up);
    report(f, "coordinator", "ok", "up for %s, incarnation %" PRIu64 ", takes you for %s", up,
           p->coordinator_epoch, p->user);
    if (*p->dashboard)
        report(f, "dashboard", "ok", "http://%s, on the coordinator's machine", p->dashboard);
    if (!strcmp(p->version, BALLAST_VERSION)) {
        report(f, "version", "ok", "%s (coordinator %s, client %s)", p->version, p->commit,
               BALLAST_COMMIT);
        return;
    }
    report(f, "version", "WRONG", "the coordinator is %s, this client %s", p->version,
           BALLAST_VERSION);
    found(f, xstrdup("ballast version   (and ballast-coordinator --version there: install the "
                     "same)"));
}

static char *next_for_worker(const Ballast__Worker *w)
{
    switch (w->state) {
    case BALLAST__WORKER_STATE__WORKER_DRAINED:
        return xasprintf("ballast worker resume %s", w->name);
    case BALLAST__WORKER_STATE__WORKER_LOST:
    case BALLAST__WORKER_STATE__WORKER_GONE:
        return xasprintf("ballast-worker --config FILE   (on %s, for %s)", w->node, w->name);
    default:
        return xasprintf("ballast worker show %s", w->name);
    }
}

static void look_at_workers(struct ctl *c, struct findings *f)
{
    Ballast__WorkerListRequest request = BALLAST__WORKER_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    size_t n_free = 0, n_busy = 0, n_bad = 0;
    if (ctl_call(c, BALLAST__METHOD__METHOD_WORKER_LIST, &request.base, &message) != CTL_OK)
        return;
    const Ballast__WorkerListReply *reply = (const Ballast__WorkerListReply *)message;
    for (size_t i = 0; i < reply->n_workers; i++) {
        const Ballast__Worker *w = reply->workers[i];
        n_free += w->state == BALLAST__WORKER_STATE__WORKER_IDLE;
        n_busy += w->state == BALLAST__WORKER_STATE__WORKER_BUSY;
        if (w->state == BALLAST__WORKER_STATE__WORKER_IDLE ||
            w->state == BALLAST__WORKER_STATE__WORKER_BUSY)
            continue;
        n_bad++;
        report(f, "worker", "LOOK", "%s is %s%s%s", w->name, event_worker_state(w->state),
               *w->reason ? ": " : "", w->reason);
        found(f, next_for_worker(w));
    }
    report(f, "workers", reply->n_workers ? "ok" : "WRONG", "%zu: %zu idle, %zu busy, %zu other",
           reply->n_workers, n_free, n_busy, n_bad);
    if (!reply->n_workers)
        found(f, xstrdup("ballast-worker --config FILE"));
}

/* NULL: it needs nobody. */
static char *next_for_job(const Ballast__Job *j)
{
    bool waits = j->state == BALLAST__JOB_STATE__JOB_QUEUED ||
                 j->state == BALLAST__JOB_STATE__JOB_RECOVERING;
    if (j->state == BALLAST__JOB_STATE__JOB_PAUSED)
        return xasprintf("ballast job resume %" PRIu64, j->id);
    if (waits && j->held)
        return xasprintf("ballast job release %" PRIu64, j->id);
    if (waits || (j->state == BALLAST__JOB_STATE__JOB_RUNNING && *j->reason))
        return xasprintf("ballast job show %" PRIu64, j->id);
    return NULL;
}

static void look_at_jobs(struct ctl *c, struct findings *f)
{
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    size_t n_shown = 0;
    if (ctl_call(c, BALLAST__METHOD__METHOD_JOB_LIST, &request.base, &message) != CTL_OK)
        return;
    const Ballast__JobListReply *reply = (const Ballast__JobListReply *)message;
    report(f, "jobs", "ok", "%zu%s queued or running", reply->n_jobs, reply->truncated ? "+" : "");
    for (size_t i = 0; i < reply->n_jobs && n_shown < JOBS_SHOWN; i++) {
        const Ballast__Job *j = reply->jobs[i];
        char *next = next_for_job(j);
        if (!next)
            continue;
        n_shown++;
        report(f, "job", "LOOK", "%" PRIu64 " (%s) is %s: %s", j->id, j->name,
               event_job_state(j->state), j->reason);
        found(f, next);
    }
}

/* Nobody there, or somebody who does not take us. */
static void look_at_silence(const struct ctl *c, struct findings *f)
{
    bool is_denied = c->failure && strstr(c->failure, "key");
    report(f, "coordinator", "WRONG", "%s", c->failure ? c->failure : "does not answer there");
    found(f, xstrdup(is_denied ? "ballast keygen --help"
                     : c->failure ? "ballast version" : "ballast-coordinator --config FILE"));
}

static void tell_next(const struct ctl *c, struct findings *f)
{
    const char *next = f->next ? f->next : "ballast submit JOB.yaml --follow";
    if (f->items) {
        struct json *o = json_new_object();
        json_put(o, "wrong", json_new_u64(f->n_wrong));
        json_put(o, "next", json_new_string(next));
        json_put(o, "findings", f->items);
        ctl_json_one(c, "Doctor", 0, o);
    } else if (f->next) {
        printf("\n%zu thing%s to look at. Next: %s\n", f->n_wrong, f->n_wrong == 1 ? "" : "s",
               next);
    } else {
        printf("\nAll is well. Next: %s\n", next);
    }
}

int ctl_doctor(struct ctl *c)
{
    struct findings f = {.items = ctl_is_json(c) ? json_new_array() : NULL};
    const Ballast__PingReply *p;
    struct ctl_place place;
    uint64_t took_ns;
    if (!ctl_find_place(c, &place))
        return CTL_USAGE;
    c->timeout_ms = c->timeout_ms ? c->timeout_ms : DOCTOR_TIMEOUT_MS;
    report(&f, "client", "ok", "version %s (%s)", BALLAST_VERSION, BALLAST_COMMIT);
    bool may_ask = look_at_address(&place, &f);
    ctl_place_fini(&place);
    fflush(stdout);
    c->quiet = c->is_silent = true; /* what is wrong is said here */
    int rc = may_ask ? ping(c, &p, &took_ns) : CTL_USAGE;
    if (rc == CTL_OK) {
        look_at_version(p, &f);
        look_at_workers(c, &f);
        look_at_jobs(c, &f);
    } else if (may_ask) {
        look_at_silence(c, &f);
    }
    tell_next(c, &f);
    free(f.next);
    return rc;
}
