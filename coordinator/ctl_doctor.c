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

#define DOCTOR_TIMEOUT_MS 2000

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

int ctl_check_config(struct ctl *c)
{
    struct ctl_place p;
    struct err err;
    if (!ctl_find_place(c, &p))
        return CTL_USAGE;
    bool has_keys = link_trust_keys(&p.trust) != NULL;
    int rc = link_address_check(p.address, has_keys, &err) < 0
                 ? ctl_fail(c, CTL_USAGE, "%s (from %s)", err.text, p.source) : CTL_OK;
    if (rc == CTL_OK)
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
    struct json *o = json_new_object(), *features = json_new_array();
    for (size_t i = 0; i < p->n_features; i++)
        json_push(features, json_new_string(p->features[i]));
    json_put(o, "version", json_new_string(p->version));
    json_put(o, "commit", json_new_string(p->commit));
    json_put(o, "coordinator_epoch", json_new_u64(p->coordinator_epoch));
    json_put(o, "uptime_seconds", json_new_double((double)p->uptime_ms / 1e3));
    json_put(o, "workers", json_new_u64(p->n_workers));
    json_put(o, "workers_alive", json_new_u64(p->n_workers_alive));
    json_put(o, "jobs_live", json_new_u64(p->n_jobs_live));
    json_put(o, "user", json_new_string(p->user));
    json_put(o, "features", features);
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
};

static void report(const char *what, const char *mark, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void report(const char *what, const char *mark, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
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

static void look_at_address(const char *address, const char *source, struct findings *f)
{
    const char *path = strncmp(address, "ipc://", 6) ? NULL : address + 6;
    report("address", "ok", "%s (from %s)", address, source);
    if (path && access(path, F_OK) != 0) {
        report("socket", "WRONG", "%s does not exist: no coordinator has listened there", path);
        found(f, xstrdup("ballast-coordinator --config FILE   (or deploy/quickstart)"));
    } else if (path && access(path, R_OK | W_OK) != 0) {
        report("socket", "WRONG", "%s may not be opened by you", path);
        found(f, xasprintf("ls -l %s", path));
    }
}

static void look_at_version(const Ballast__PingReply *p, struct findings *f)
{
    char up[CLOCK_STAMP_BYTES];
    clock_duration(p->uptime_ms * NS_PER_MS, up);
    report("coordinator", "ok", "up for %s, incarnation %" PRIu64 ", takes you for %s", up,
           p->coordinator_epoch, p->user);
    if (!strcmp(p->version, BALLAST_VERSION)) {
        report("version", "ok", "%s (coordinator %s, client %s)", p->version, p->commit,
               BALLAST_COMMIT);
        return;
    }
    report("version", "WRONG", "the coordinator is %s, this client %s", p->version,
           BALLAST_VERSION);
    found(f, xstrdup("install the same version on both sides"));
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
        report("worker", "LOOK", "%s is %s%s%s", w->name, ctl_worker_state_name(w->state),
               *w->reason ? ": " : "", w->reason);
    }
    report("workers", reply->n_workers ? "ok" : "WRONG", "%zu: %zu idle, %zu busy, %zu other",
           reply->n_workers, n_free, n_busy, n_bad);
    if (!reply->n_workers)
        found(f, xstrdup("ballast-worker --config FILE"));
    else if (n_bad)
        found(f, xstrdup("ballast workers"));
}

static void look_at_jobs(struct ctl *c, struct findings *f)
{
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    size_t n_shown = 0;
    if (ctl_call(c, BALLAST__METHOD__METHOD_JOB_LIST, &request.base, &message) != CTL_OK)
        return;
    const Ballast__JobListReply *reply = (const Ballast__JobListReply *)message;
    report("jobs", "ok", "%zu%s queued or running", reply->n_jobs, reply->truncated ? "+" : "");
    for (size_t i = 0; i < reply->n_jobs; i++) {
        const Ballast__Job *j = reply->jobs[i];
        bool waits = j->state == BALLAST__JOB_STATE__JOB_QUEUED ||
                     j->state == BALLAST__JOB_STATE__JOB_RECOVERING;
        bool warns = j->state == BALLAST__JOB_STATE__JOB_RUNNING && *j->reason;
        if ((!waits && !warns) || ++n_shown > 5)
            continue;
        report("job", "LOOK", "%" PRIu64 " (%s) is %s: %s", j->id, j->name,
               ctl_state_name(j->state), j->reason);
        found(f, xasprintf("ballast job show %" PRIu64, j->id));
    }
}

int ctl_doctor(struct ctl *c)
{
    struct findings f = {0};
    const Ballast__PingReply *p;
    struct ctl_place place;
    uint64_t took_ns;
    if (!ctl_find_place(c, &place))
        return CTL_USAGE;
    c->timeout_ms = c->timeout_ms ? c->timeout_ms : DOCTOR_TIMEOUT_MS;
    report("client", "ok", "version %s (%s)", BALLAST_VERSION, BALLAST_COMMIT);
    look_at_address(place.address, place.source, &f);
    if (place.trust.servers.n)
        report("key", "ok", "of %s (%s)", place.trust.own.name, place.key_file);
    ctl_place_fini(&place);
    fflush(stdout);
    c->quiet = c->is_silent = true; /* what is wrong is said here */
    int rc = ping(c, &p, &took_ns);
    if (rc == CTL_OK) {
        look_at_version(p, &f);
        look_at_workers(c, &f);
        look_at_jobs(c, &f);
    } else {
        report("coordinator", "WRONG", "%s", c->failure ? c->failure : "does not answer there");
        found(&f, xstrdup(c->failure ? "ballast version" : "ballast-coordinator --config FILE"));
    }
    if (f.next)
        printf("\n%zu thing%s to look at. Next: %s\n", f.n_wrong, f.n_wrong == 1 ? "" : "s",
               f.next);
    else
        printf("\nAll is well. Next: ballast submit JOB.yaml --follow\n");
    free(f.next);
    return rc;
}
