/* ctl_worker.c - the fleet: the list, one worker and its GPU, drain and resume */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/types.h"

static const struct ctl_column columns[] = {
    {"NAME", false}, {"NODE", false}, {"STATE", false}, {"DEVICE", false}, {"HB", true},
    {"JOB", true}, {"RANK", true}, {"REASON", false},
};
static const struct ctl_column wide_columns[] = {
    {"NAME", false}, {"NODE", false}, {"STATE", false}, {"DEVICE", false}, {"HB", true},
    {"JOB", true}, {"RANK", true}, {"MEMORY", true}, {"CORES", true}, {"GPU", true},
    {"TEMP", true}, {"POWER", true}, {"PID", true}, {"VERSION", false}, {"REASON", false},
};

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

static void add_gpu(struct ctl_table *t, const Ballast__GpuHealth *g)
{
    if (!g) {
        for (int i = 0; i < 3; i++)
            ctl_table_cell(t, "-");
        return;
    }
    ctl_table_cell(t, "%.0f%%", g->utilization * 100);
    ctl_table_cell(t, "%" PRIu32 " C", g->temperature_celsius);
    ctl_table_cell(t, "%.0f W", g->power_watts);
}

static void add_worker(struct ctl_table *t, const Ballast__Worker *w, bool is_wide)
{
    char bytes[32];
    ctl_table_cell(t, "%s", w->name);
    ctl_table_cell(t, "%s", w->node);
    ctl_table_cell(t, "%s", ctl_worker_state_name(w->state));
    ctl_table_color(t, state_color(w->state));
    ctl_table_cell(t, "%s", w->device);
    ctl_table_cell(t, "%.1fs", (double)w->heartbeat_age_ms / 1e3);
    if (w->job_id) {
        ctl_table_cell(t, "%" PRIu64, w->job_id);
        ctl_table_cell(t, "%" PRIu32, w->rank);
    } else {
        ctl_table_cell(t, "-");
        ctl_table_cell(t, "-");
    }
    if (is_wide) {
        ctl_bytes_text(w->memory_bytes, bytes);
        ctl_table_cell(t, "%s", bytes);
        ctl_table_cell(t, "%" PRIu32, w->cores);
        add_gpu(t, w->gpu);
        ctl_table_cell(t, "%" PRIu32, w->pid);
        ctl_table_cell(t, "%s", w->version);
    }
    ctl_table_cell(t, "%s", w->reason);
}

static void show_table(const struct ctl *c, Ballast__Worker *const *workers, size_t n)
{
    bool is_wide = c->format == CTL_WIDE;
    struct ctl_table t = {.columns = is_wide ? wide_columns : columns,
                          .n_columns = is_wide ? sizeof wide_columns / sizeof *wide_columns
                                               : sizeof columns / sizeof *columns};
    for (size_t i = 0; i < n; i++)
        add_worker(&t, workers[i], is_wide);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

/* w2 before w10. */
static int by_name(const void *a, const void *b)
{
    return strverscmp((*(Ballast__Worker *const *)a)->name, (*(Ballast__Worker *const *)b)->name);
}

static int list(struct ctl *c, const Ballast__WorkerListReply **out_reply)
{
    Ballast__WorkerListRequest request = BALLAST__WORKER_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_WORKER_LIST, &request.base, &message);
    if (rc == CTL_OK)
        *out_reply = (const Ballast__WorkerListReply *)message;
    return rc;
}

int ctl_workers(struct ctl *c)
{
    const Ballast__WorkerListReply *reply;
    int rc = list(c, &reply);
    if (rc != CTL_OK)
        return rc;
    qsort(reply->workers, reply->n_workers, sizeof *reply->workers, by_name);
    if (ctl_is_json(c)) {
        struct json *items = json_new_array();
        for (size_t i = 0; i < reply->n_workers; i++)
            json_push(items, ctl_json_worker(reply->workers[i]));
        ctl_json_list(c, "WorkerList", reply->seq, false, items);
    } else if (c->format == CTL_NAME) {
        for (size_t i = 0; i < reply->n_workers; i++)
            printf("%s\n", reply->workers[i]->name);
    } else {
        show_table(c, reply->workers, reply->n_workers);
        if (!reply->n_workers)
            ctl_hint(c, "no worker has come yet: ballast-worker --config FILE");
    }
    return CTL_OK;
}

static void show_throttling(uint64_t bits)
{
    char text[256] = "";
    const char *reason;
    for (unsigned i = 0; ctl_throttle_reason(i, &reason); i++)
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
    ctl_print_line("state", "%s", ctl_worker_state_name(w->state));
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
    int rc = list(c, &reply);
    if (rc != CTL_OK)
        return rc;
    for (size_t i = 0; i < reply->n_workers; i++)
        if (!strcmp(reply->workers[i]->name, c->args[0]))
            found = reply->workers[i];
    if (!found)
        return ctl_fail(c, CTL_NOT_FOUND, "there is no worker '%s'; ballast workers lists them",
                        c->args[0]);
    if (ctl_is_json(c))
        ctl_json_one(c, "Worker", reply->seq, ctl_json_worker(found));
    else if (c->format == CTL_NAME)
        printf("%s\n", found->name);
    else
        show_one(found);
    return CTL_OK;
}

static int act(struct ctl *c, Ballast__Method method)
{
    Ballast__WorkerDrainRequest request = BALLAST__WORKER_DRAIN_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.name = c->args[0];
    request.reason = c->reason ? (char *)c->reason : request.reason;
    int rc = ctl_call(c, method, &request.base, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__WorkerReply *reply = (const Ballast__WorkerReply *)message;
    if (!reply->worker)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no worker");
    if (ctl_is_json(c))
        ctl_json_one(c, "Worker", reply->seq, ctl_json_worker(reply->worker));
    else if (c->format == CTL_NAME)
        printf("%s\n", reply->worker->name);
    else
        show_table(c, &(Ballast__Worker *){reply->worker}, 1);
    return CTL_OK;
}

int ctl_worker_drain(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_WORKER_DRAIN);
}

int ctl_worker_resume(struct ctl *c)
{
    return act(c, BALLAST__METHOD__METHOD_WORKER_RESUME);
}
