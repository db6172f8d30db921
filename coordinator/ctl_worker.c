/* ctl_worker.c - the fleet: the list, one worker and its GPU, drain and resume */
#include "coordinator/ctl_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/types.h"
#include "coordinator/ctl_hostlist.h"
#include "coordinator/event.h"
#include "coordinator/json_of.h"

static const char *state_color(Ballast__WorkerState state)
{
    switch (state) {
    case BALLAST__WORKER_STATE__WORKER_BUSY:    return "32";
    case BALLAST__WORKER_STATE__WORKER_LATE:
    case BALLAST__WORKER_STATE__WORKER_SUSPECT: return "33";
    case BALLAST__WORKER_STATE__WORKER_SICK:
    case BALLAST__WORKER_STATE__WORKER_LOST:    return "31";
    case BALLAST__WORKER_STATE__WORKER_DRAINED:
    case BALLAST__WORKER_STATE__WORKER_GONE:    return "35";
    default:                                    return NULL;
    }
}

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value worker_##NAME(const void *row, struct arena *a)                   \
    {                                                                                          \
        const Ballast__Worker *w = row;                                                        \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }
#define OF_GPU(FORMAT, X) list_real(a, FORMAT, w->gpu ? (double)(X) : (double)NAN)

static struct list_value state_of(const Ballast__Worker *w)
{
    struct list_value v = list_text(event_worker_state(w->state));
    v.color = state_color(w->state);
    return v;
}

COLUMN(name, list_text(w->name))
COLUMN(node, list_text(w->node))
COLUMN(state, state_of(w))
COLUMN(device, list_text(w->device))
COLUMN(heartbeat, list_real(a, "%.1fs", (double)w->heartbeat_age_ms / 1e3))
COLUMN(job, w->job_id ? list_count(a, w->job_id) : list_text(""))
COLUMN(rank, w->job_id ? list_count(a, w->rank) : list_text(""))
COLUMN(memory, list_bytes(a, w->memory_bytes))
COLUMN(cores, list_count(a, w->cores))
COLUMN(gpu, OF_GPU("%.0f%%", w->gpu->utilization * 100))
COLUMN(temp, OF_GPU("%.0f C", w->gpu->temperature_celsius))
COLUMN(power, OF_GPU("%.0f W", w->gpu->power_watts))
COLUMN(pid, list_count(a, w->pid))
COLUMN(version, list_text(w->version))
COLUMN(reason, list_text(w->reason))

static struct json *worker_json(const void *row)
{
    return json_of_worker(row);
}

static const struct list_column worker_columns[] = {
    {"NAME", LIST_TEXT, LIST_ALWAYS, worker_name, 0, false, NULL},
    {"NODE", LIST_TEXT, LIST_ALWAYS, worker_node, 0, false, NULL},
    {"STATE", LIST_TEXT, LIST_ALWAYS, worker_state, 0, false, ctl_worker_state_word},
    {"DEVICE", LIST_TEXT, LIST_ALWAYS, worker_device, 0, false, NULL},
    {"HB", LIST_SPAN, LIST_ALWAYS, worker_heartbeat, 0, false, NULL},
    {"JOB", LIST_NUMBER, LIST_ALWAYS, worker_job, 0, false, NULL},
    {"RANK", LIST_NUMBER, LIST_ALWAYS, worker_rank, 0, false, NULL},
    {"MEMORY", LIST_BYTES, LIST_WIDE, worker_memory, 0, false, NULL},
    {"CORES", LIST_NUMBER, LIST_WIDE, worker_cores, 0, false, NULL},
    {"GPU", LIST_NUMBER, LIST_WIDE, worker_gpu, 0, false, NULL},
    {"TEMP", LIST_NUMBER, LIST_WIDE, worker_temp, 0, false, NULL},
    {"POWER", LIST_NUMBER, LIST_WIDE, worker_power, 0, false, NULL},
    {"PID", LIST_NUMBER, LIST_WIDE, worker_pid, 0, false, NULL},
    {"VERSION", LIST_TEXT, LIST_WIDE, worker_version, 0, false, NULL},
    {"REASON", LIST_TEXT, LIST_ALWAYS, worker_reason, 0, false, NULL},
};
const struct ctl_list ctl_worker_list = {
    .kind = "WorkerList", .rows = "workers", .columns = worker_columns,
    .n_columns = sizeof worker_columns / sizeof *worker_columns, .name = "name", .order = "name",
    .count = 1000, .json = worker_json,
};

int ctl_fleet(struct ctl *c, const Ballast__WorkerListReply **out_reply)
{
    Ballast__WorkerListRequest request = BALLAST__WORKER_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_WORKER_LIST, &request.base, &message);
    if (rc == CTL_OK)
        *out_reply = (const Ballast__WorkerListReply *)message;
    return rc;
}

/* Workers that are rows of the arena or of an answer. */
static int show_workers(struct ctl *c, Ballast__Worker *const *workers, size_t n, uint64_t seq,
                        bool is_all)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    const void **rows = xcalloc(n + 1, sizeof *rows);
    bool was_cut = false;
    int rc = list_begin(c, &ctl_worker_list, q);
    for (size_t i = 0; i < n; i++)
        rows[i] = workers[i];
    if (rc == CTL_OK) {
        n = list_choose(q, rows, n, &was_cut);
        list_show(c, q, rows, n, seq, was_cut);
        if (is_all && !n && !q->n_terms)
            ctl_hint(c, "no worker has come yet: ballast-worker --config FILE");
    }
    free(rows);
    list_fini(q);
    free(q);
    return rc;
}

int ctl_workers(struct ctl *c)
{
    const Ballast__WorkerListReply *reply;
    struct list_query *q = xcalloc(1, sizeof *q);
    int rc = list_begin(c, &ctl_worker_list, q); /* mistakes are told before anything is asked */
    list_fini(q);
    free(q);
    if (rc == CTL_OK)
        rc = ctl_fleet(c, &reply);
    return rc == CTL_OK ? show_workers(c, reply->workers, reply->n_workers, reply->seq, true)
                        : rc;
}

static void show_throttling(uint64_t bits)
{
    char text[256] = "";
    const char *reason;
    for (unsigned i = 0; event_throttle_reason(i, &reason); i++)
        if (bits >> i & 1)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", *text ? ", " : "",
                     reason);
    ctl_print_line("throttled", "%s", *text ? text : "no");
}

static void show_gpu(const Ballast__GpuHealth *g)
{
    char used[32], all[32];
    ctl_bytes_text(g->memory_used_bytes, used);
    ctl_bytes_text(g->memory_bytes, all);
    ctl_print_line("gpu", "%s", g->name);
    ctl_print_line("health", "%s", g->sick[0] ? g->sick : "well");
    ctl_print_line("utilization", "%.0f%%", g->utilization * 100);
    ctl_print_line("memory", "%s of %s", used, all);
    ctl_print_line("temperature", "%" PRIu32 " C", g->temperature_celsius);
    ctl_print_line("power", "%.0f of %.0f W", g->power_watts, g->power_limit_watts);
    ctl_print_line("clocks", "%" PRIu32 " MHz, memory %" PRIu32 " MHz", g->sm_clock_mhz,
                   g->memory_clock_mhz);
    show_throttling(g->throttle_reasons);
    ctl_print_line("ecc errors", "%" PRIu64 " corrected, %" PRIu64 " not", g->ecc_corrected,
                   g->ecc_uncorrected);
    ctl_print_line("row remaps", "%" PRIu32 " corrected, %" PRIu32 " not%s%s",
                   g->rows_remapped_corrected, g->rows_remapped_uncorrected,
                   g->row_remap_pending ? ", one waits for a reset" : "",
                   g->row_remap_failed ? ", one failed" : "");
    if (g->last_xid)
        ctl_print_line("last xid", "%" PRIu64, g->last_xid);
    ctl_print_line("nvlink errors", "%" PRIu64, g->nvlink_errors);
}

static void show_one(const Ballast__Worker *w)
{
    char bytes[32];
    ctl_bytes_text(w->memory_bytes, bytes);
    ctl_print_line("name", "%s", w->name);
    ctl_print_line("node", "%s", w->node);
    ctl_print_line("state", "%s", event_worker_state(w->state));
    ctl_print_line("reason", "%s", w->reason);
    ctl_print_line("device", "%s", w->device);
    ctl_print_line("heartbeat", "%.1f s ago", (double)w->heartbeat_age_ms / 1e3);
    if (w->job_id)
        ctl_print_line("job", "%" PRIu64 ", attempt %" PRIu32 ", rank %" PRIu32, w->job_id,
                       w->attempt, w->rank);
    ctl_print_line("host", "%s, %" PRIu32 " cores", bytes, w->cores);
    ctl_print_line("process", "%" PRIu32 ", version %s", w->pid, w->version);
    if (w->gpu)
        show_gpu(w->gpu);
}

int ctl_worker_show(struct ctl *c)
{
    const Ballast__WorkerListReply *reply;
    const Ballast__Worker *found = NULL;
    int rc = ctl_fleet(c, &reply);
    if (rc != CTL_OK)
        return rc;
    for (size_t i = 0; i < reply->n_workers; i++)
        if (!strcmp(reply->workers[i]->name, c->args[0]))
            found = reply->workers[i];
    if (!found)
        return ctl_fail(c, CTL_NOT_FOUND, "there is no worker '%s'; ballast workers lists them",
                        c->args[0]);
    if (ctl_is_json(c))
        ctl_json_one(c, "Worker", reply->seq, json_of_worker(found));
    else if (c->format == CTL_NAME)
        printf("%s\n", found->name);
    else
        show_one(found);
    return CTL_OK;
}

struct names {
    char **names; /* in the arena of the call */
    size_t n;
};

static void push(struct names *l, char *name)
{
    l->names = xrealloc(l->names, (l->n + 1) * sizeof *l->names);
    l->names[l->n++] = name;
}

/* The workers of a node; NULL for the fleet: name is a worker's. */
static int add_named(struct ctl *c, const Ballast__WorkerListReply *fleet, char *name,
                     struct names *out)
{
    size_t before = out->n;
    if (!fleet)
        push(out, name);
    for (size_t i = 0; fleet && i < fleet->n_workers; i++)
        if (!strcmp(fleet->workers[i]->node, name))
            push(out, fleet->workers[i]->name);
    return out->n > before ? CTL_OK
                           : ctl_fail(c, CTL_NOT_FOUND, "there is no node '%s'; ballast nodes "
                                      "lists them", name);
}

/* The workers that the arguments name, as lists of their names or of those of nodes. */
static int named_workers(struct ctl *c, bool of_nodes, struct names *out)
{
    const Ballast__WorkerListReply *fleet = NULL;
    int rc = CTL_OK;
    for (size_t i = 0; i < c->n_args && rc == CTL_OK; i++) {
        struct err err;
        char **names;
        size_t n;
        if (hostlist_expand(&c->arena, c->args[i], &names, &n, &err) < 0)
            return ctl_fail(c, CTL_USAGE, "%s", err.text);
        if (of_nodes && !fleet)
            rc = ctl_fleet(c, &fleet);
        for (size_t k = 0; k < n && rc == CTL_OK; k++)
            rc = add_named(c, fleet, names[k], out);
    }
    return rc;
}

/* Each in turn; one that is refused does not keep the others from it. */
static int act(struct ctl *c, Ballast__Method method, bool of_nodes)
{
    struct names names = {0};
    size_t n_done = 0;
    uint64_t seq = 0;
    int rc = named_workers(c, of_nodes, &names), named = rc;
    Ballast__Worker **done = xcalloc(names.n + 1, sizeof *done);
    for (size_t i = 0; named == CTL_OK && rc != CTL_UNREACHABLE && i < names.n; i++) {
        Ballast__WorkerDrainRequest request = BALLAST__WORKER_DRAIN_REQUEST__INIT;
        const ProtobufCMessage *message;
        request.name = names.names[i];
        request.reason = c->reason ? (char *)c->reason : request.reason;
        int code = ctl_call(c, method, &request.base, &message);
        const Ballast__WorkerReply *reply = (const Ballast__WorkerReply *)message;
        if (code == CTL_OK && !reply->worker)
            code = ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no worker");
        if (code == CTL_OK) {
            done[n_done++] = reply->worker;
            seq = reply->seq;
        }
        rc = rc == CTL_OK ? code : rc;
    }
    if (names.n == 1 && n_done == 1)
        rc = list_show_one(c, &ctl_worker_list, "Worker", done[0], seq);
    else if (n_done)
        show_workers(c, done, n_done, seq, false);
    free(done);
    free(names.names);
    return rc;
}

int ctl_node_drain(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_WORKER_DRAIN, true);
}

int ctl_node_resume(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_WORKER_RESUME, true);
}

int ctl_worker_drain(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_WORKER_DRAIN, false);
}

int ctl_worker_resume(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_WORKER_RESUME, false);
}
