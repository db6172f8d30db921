/* metrics.c - counting, and Prometheus' text form (version 0.0.4) */
#include "coordinator/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/event.h"
#include "proto/check.h"

/* Of each: the first bucket's bound, and the factor from one to the next. */
static const struct {
    const char *name, *help;
    double first_s, factor;
} timings[METRICS_TIMINGS] = {
    [METRICS_TURN]   = {"turn_seconds", "From a turn's first message until its answers leave.",
                        1e-4, 3},
    [METRICS_COMMIT] = {"commit_seconds", "One commit of the databases.", 1e-4, 3},
    [METRICS_QUERY]  = {"query_seconds", "A read of the databases with its wait.", 1e-4, 3},
    [METRICS_LAG]    = {"loop_lag_seconds", "How late the event loop's pulse came.", 1e-4, 3},
    [METRICS_QUEUE_WAIT] = {"job_queue_seconds", "From submit until workers are assigned first.",
                            1, 4},
    [METRICS_JOB_RUN] = {"job_run_seconds", "RUNNING, over all attempts, of jobs that ended.", 1,
                         4},
    [METRICS_PAUSE]  = {"rebalance_pause_seconds", "A step held up by experts that move, the "
                        "longest rank's.", 1e-3, 3},
};

static double bound_s(enum metrics_timing t, size_t bucket)
{
    double x = timings[t].first_s;
    for (size_t i = 0; i < bucket; i++)
        x *= timings[t].factor;
    return x;
}

/* ---- counting -------------------------------------------------------------------------------- */

void metrics_observe(struct metrics *m, enum metrics_timing timing, uint64_t ns)
{
    struct metrics_histogram *h = &m->timings[timing];
    double s = (double)ns / 1e9;
    size_t i = 0;
    while (i < METRICS_BUCKETS && s > bound_s(timing, i))
        i++;
    h->counts[i]++;
    h->n++;
    h->sum_s += s;
}

void metrics_answer(struct metrics *m, Ballast__Method method, Ballast__Code code)
{
    size_t i = (size_t)method < METRICS_METHODS ? (size_t)method : 0;
    size_t k = (size_t)code < METRICS_CODES ? (size_t)code : (size_t)BALLAST__CODE__UNKNOWN;
    m->n_answers[i][k]++;
}

static void count_state(struct metrics *m, const Ballast__RecordState *s)
{
    m->n_restarts += s->counts_as_restart;
    if (!job_state_is_ended(s->state))
        return;
    m->n_jobs_ended[s->state]++;
    if (s->ran_ms)
        metrics_observe(m, METRICS_JOB_RUN, s->ran_ms * NS_PER_MS);
}

void metrics_record(struct metrics *m, const Ballast__Record *r, const Ballast__Job *job)
{
    m->n_records++;
    switch (r->what_case) {
    case BALLAST__RECORD__WHAT_SUBMITTED:
        m->n_jobs_submitted++;
        break;
    case BALLAST__RECORD__WHAT_ASSIGNED:
        if (r->assigned->attempt == 1 && job && r->at_ns >= job->submitted_at_ns)
            metrics_observe(m, METRICS_QUEUE_WAIT, (uint64_t)(r->at_ns - job->submitted_at_ns));
        break;
    case BALLAST__RECORD__WHAT_STATE:
        count_state(m, r->state);
        break;
    case BALLAST__RECORD__WHAT_PLAN:
        m->n_plans[r->plan->automatic != 0]++;
        break;
    case BALLAST__RECORD__WHAT_PLAN_ENDED:
        m->n_plans_given_up++;
        break;
    case BALLAST__RECORD__WHAT_PLACEMENT:
        m->n_plans_done++;
        m->n_moves += r->placement->n_moves;
        m->moved_bytes += r->placement->bytes;
        metrics_observe(m, METRICS_PAUSE, (uint64_t)(r->placement->pause_s * 1e9));
        break;
    default:
        break;
    }
}

/* ---- the text -------------------------------------------------------------------------------- */

static void family(FILE *f, const char *name, const char *type, const char *help)
{
    fprintf(f, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void print_number(FILE *f, double x)
{
    if (isnan(x))
        fputs(" NaN\n", f);
    else if (isinf(x))
        fputs(x > 0 ? " +Inf\n" : " -Inf\n", f);
    else
        fprintf(f, " %.15g\n", x);
}

/* labels: name, value, ..., NULL. */
static void value(FILE *f, const char *name, double x, ...)
{
    const char *label;
    char before = '{';
    va_list labels;
    fputs(name, f);
    va_start(labels, x);
    while ((label = va_arg(labels, const char *)) != NULL) {
        fprintf(f, "%c%s=\"", before, label);
        for (const char *c = va_arg(labels, const char *); *c; c++)
            if (*c == '\n')
                fputs("\\n", f);
            else
                fprintf(f, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
        fputc('"', f);
        before = ',';
    }
    va_end(labels);
    if (before == ',')
        fputc('}', f);
    print_number(f, x);
}

static void single(FILE *f, const char *name, const char *type, const char *help, double x)
{
    family(f, name, type, help);
    value(f, name, x, NULL);
}

static void histogram(FILE *f, enum metrics_timing t, const struct metrics_histogram *h)
{
    char name[64], bucket[80], bound[32];
    uint64_t n = 0;
    snprintf(name, sizeof name, "ballast_%s", timings[t].name);
    snprintf(bucket, sizeof bucket, "%s_bucket", name);
    family(f, name, "histogram", timings[t].help);
    for (size_t i = 0; i <= METRICS_BUCKETS; i++) {
        n += h->counts[i];
        snprintf(bound, sizeof bound, i < METRICS_BUCKETS ? "%g" : "+Inf", bound_s(t, i));
        value(f, bucket, (double)n, "le", bound, NULL);
    }
    snprintf(bucket, sizeof bucket, "%s_sum", name);
    value(f, bucket, h->sum_s, NULL);
    snprintf(bucket, sizeof bucket, "%s_count", name);
    value(f, bucket, (double)h->n, NULL);
}

static void tell_answers(FILE *f, const struct metrics *m)
{
    static const char name[] = "ballast_requests_total";
    family(f, name, "counter", "Requests that were answered, by method and code.");
    for (size_t i = 0; i < METRICS_METHODS; i++) {
        const struct check_method *method = check_method((Ballast__Method)i);
        for (size_t k = 0; k < METRICS_CODES; k++)
            if (m->n_answers[i][k])
                value(f, name, (double)m->n_answers[i][k], "method",
                      method ? method->name : "UNKNOWN", "code",
                      check_code_name((Ballast__Code)k), NULL);
    }
}

static void tell_jobs(FILE *f, const struct metrics *m, const struct metrics_now *now)
{
    family(f, "ballast_jobs", "gauge", "Jobs that have not ended, by state.");
    for (int s = BALLAST__JOB_STATE__JOB_QUEUED; s <= (int)JOB_STATE_MAX; s++)
        if (!job_state_is_ended((Ballast__JobState)s))
            value(f, "ballast_jobs", now->n_jobs[s], "state",
                  event_job_state((Ballast__JobState)s), NULL);
    single(f, "ballast_jobs_submitted_total", "counter", "Jobs that were accepted.",
           (double)m->n_jobs_submitted);
    family(f, "ballast_jobs_ended_total", "counter", "Jobs that ended, by state.");
    for (int s = BALLAST__JOB_STATE__JOB_QUEUED; s <= (int)JOB_STATE_MAX; s++)
        if (job_state_is_ended((Ballast__JobState)s))
            value(f, "ballast_jobs_ended_total", (double)m->n_jobs_ended[s], "state",
                  event_job_state((Ballast__JobState)s), NULL);
    single(f, "ballast_job_restarts_total", "counter", "Attempts lost to a failure.",
           (double)m->n_restarts);
}

static void tell_fleet(FILE *f, const struct coord_fleet_counts *fleet)
{
    family(f, "ballast_workers", "gauge", "Workers, by state.");
    for (int s = BALLAST__WORKER_STATE__WORKER_IDLE; s <= (int)WORKER_STATE_MAX; s++)
        value(f, "ballast_workers", fleet->n[s], "state",
              event_worker_state((Ballast__WorkerState)s), NULL);
    single(f, "ballast_heartbeat_age_max_seconds", "gauge",
           "The longest silence of a worker that is attached.",
           (double)fleet->heartbeat_age_max_ns / 1e9);
}

static void tell_rebalances(FILE *f, const struct metrics *m)
{
    family(f, "ballast_rebalance_plans_total", "counter", "Plans to move experts, by who made "
           "them.");
    value(f, "ballast_rebalance_plans_total", (double)m->n_plans[1], "by", "auto", NULL);
    value(f, "ballast_rebalance_plans_total", (double)m->n_plans[0], "by", "person", NULL);
    family(f, "ballast_rebalances_total", "counter", "What became of them.");
    value(f, "ballast_rebalances_total", (double)m->n_plans_done, "result", "done", NULL);
    value(f, "ballast_rebalances_total", (double)m->n_plans_given_up, "result", "given_up", NULL);
    single(f, "ballast_rebalance_moves_total", "counter", "Experts that moved.",
           (double)m->n_moves);
    single(f, "ballast_rebalance_bytes_total", "counter", "Bytes that moved with them.",
           (double)m->moved_bytes);
}

static void tell_messages(FILE *f, const struct metrics_now *now)
{
    static const char name[] = "ballast_messages_dropped_total";
    single(f, "ballast_messages_received_total", "counter", "Messages that came in.",
           (double)now->n_received);
    single(f, "ballast_messages_sent_total", "counter", "Messages that left.",
           (double)now->n_sent);
    family(f, name, "counter", "Messages that were not read or did not arrive, by why.");
    const struct {
        const char *why;
        uint64_t n;
    } rows[] = {
        {"unreachable", now->n_unreachable}, {"slow_reader", now->n_dropped_slow},
        {"bad_frames", now->n_bad_frames},   {"foreign", now->n_foreign},
        {"rate", now->n_limited},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        value(f, name, (double)rows[i].n, "reason", rows[i].why, NULL);
    single(f, "ballast_requests_refused_total", "counter", "Requests that were refused.",
           (double)now->n_refused);
    family(f, "ballast_connections_refused_total", "counter", "Connections closed at once.");
    value(f, "ballast_connections_refused_total", (double)now->n_turned_away, "reason",
          "descriptors", NULL);
    value(f, "ballast_connections_refused_total", (double)now->n_unknown_keys, "reason", "key",
          NULL);
}

static void tell_gauges(FILE *f, const struct metrics *m, const struct metrics_now *now)
{
    const struct {
        const char *name, *type, *help;
        double x;
    } rows[] = {
        {"ballast_serving", "gauge", "1 while requests are served, 0 while state is read.",
         now->is_serving},
        {"ballast_coordinator_epoch", "gauge", "Incarnation of the coordinator.",
         (double)now->coordinator_epoch},
        {"ballast_records_total", "counter", "Records that were committed.",
         (double)m->n_records},
        {"ballast_batches_in_flight", "gauge", "Turns and reads with the store.",
         (double)now->n_batches},
        {"ballast_watches", "gauge", "Long polls that wait for news.", (double)now->n_watches},
        {"ballast_peers", "gauge", "Clients and workers that are known.", (double)now->n_peers},
        {"ballast_connections", "gauge", "Open connections.", (double)now->n_connections},
        {"ballast_disk_free_bytes", "gauge", "Free space under state_dir.",
         (double)now->free_bytes},
        {"process_cpu_seconds_total", "counter", "CPU time, user and system.", now->cpu_s},
        {"process_start_time_seconds", "gauge", "When the process started, Unix time.",
         now->start_s},
        {"process_resident_memory_bytes", "gauge", "Resident memory, files left out.",
         (double)now->resident_bytes},
        {"process_open_fds", "gauge", "Open file descriptors.", (double)now->n_descriptors},
        {"process_max_fds", "gauge", "How many may be open.", (double)now->n_descriptors_max},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        single(f, rows[i].name, rows[i].type, rows[i].help, rows[i].x);
    if (now->backup_s >= 0)
        single(f, "ballast_backup_age_seconds", "gauge", "Since the last backup of this process.",
               now->backup_s);
}

static void tell_store(FILE *f, const struct metrics_now *now)
{
    family(f, "ballast_database_bytes", "gauge", "Size of a database.");
    value(f, "ballast_database_bytes", (double)now->state_bytes, "database", "state", NULL);
    value(f, "ballast_database_bytes", (double)now->stats_bytes, "database", "stats", NULL);
    family(f, "ballast_wal_bytes", "gauge", "Size of its write-ahead log.");
    value(f, "ballast_wal_bytes", (double)now->state_wal_bytes, "database", "state", NULL);
    value(f, "ballast_wal_bytes", (double)now->stats_wal_bytes, "database", "stats", NULL);
}

static FILE *text_begin(char **out_text, size_t *out_n)
{
    FILE *f = open_memstream(out_text, out_n);
    if (!f)
        abort();
    return f;
}

char *metrics_text(const struct metrics *m, const struct metrics_now *now)
{
    char *text;
    size_t n;
    FILE *f = text_begin(&text, &n);
    family(f, "ballast_build_info", "gauge", "1, with what was built.");
    value(f, "ballast_build_info", 1, "version", now->version, "commit", now->commit, NULL);
    tell_jobs(f, m, now);
    tell_fleet(f, &now->fleet);
    tell_rebalances(f, m);
    tell_answers(f, m);
    tell_messages(f, now);
    tell_store(f, now);
    tell_gauges(f, m, now);
    for (int t = 0; t < METRICS_TIMINGS; t++)
        histogram(f, (enum metrics_timing)t, &m->timings[t]);
    fclose(f);
    return text;
}

/* ---- per job, per worker --------------------------------------------------------------------- */

char *metrics_jobs_text(Ballast__Job *const *jobs, size_t n_jobs)
{
    enum { RUNNING, STEP, STEPS, CHECKPOINT, LOSS, VALIDATION, SPEED, IMBALANCE, MEMORY, PLANNED,
           RESTARTS, N };
    static const struct {
        const char *name, *help;
    } rows[N] = {
        [RUNNING] = {"ballast_job_running", "1 while it trains."},
        [STEP] = {"ballast_job_step", "The last step that all ranks finished."},
        [STEPS] = {"ballast_job_steps", "Steps that it is to train."},
        [CHECKPOINT] = {"ballast_job_checkpoint_step", "Step of the newest checkpoint."},
        [LOSS] = {"ballast_job_loss", "Loss of that step, nats a token."},
        [VALIDATION] = {"ballast_job_validation_loss", "Newest validation loss."},
        [SPEED] = {"ballast_job_tokens_per_second", "Tokens a second."},
        [IMBALANCE] = {"ballast_job_imbalance_ratio", "Tokens of the busiest device over the "
                       "mean."},
        [MEMORY] = {"ballast_job_memory_bytes", "Memory of the largest rank."},
        [PLANNED] = {"ballast_job_memory_planned_bytes", "The same as it was planned."},
        [RESTARTS] = {"ballast_job_restarts", "Attempts lost to a failure."},
    };
    char *text;
    size_t n;
    FILE *f = text_begin(&text, &n);
    for (int k = 0; k < N; k++) {
        family(f, rows[k].name, "gauge", rows[k].help);
        for (size_t i = 0; i < n_jobs; i++) {
            const Ballast__Job *j = jobs[i];
            const double x[N] = {
                [RUNNING] = j->state == BALLAST__JOB_STATE__JOB_RUNNING,
                [STEP] = (double)j->step, [STEPS] = (double)j->steps,
                [CHECKPOINT] = (double)j->checkpoint_step, [LOSS] = j->loss,
                [VALIDATION] = j->validation_loss, [SPEED] = j->tokens_per_second,
                [IMBALANCE] = j->imbalance, [MEMORY] = (double)j->memory_bytes,
                [PLANNED] = (double)j->memory_planned_bytes, [RESTARTS] = j->n_restarts,
            };
            char id[24];
            snprintf(id, sizeof id, "%" PRIu64, j->id);
            value(f, rows[k].name, x[k], "job", id, "name", j->name, "user", j->user, NULL);
        }
    }
    fclose(f);
    return text;
}

char *metrics_workers_text(Ballast__Worker *const *workers, size_t n_workers)
{
    enum { UP, AGE, USE, USED, MEMORY, HEAT, POWER, SM, ECC, ROWS, XID, NVLINK, SICK, N };
    static const struct {
        const char *name, *type, *help;
        bool is_of_gpu;
    } rows[N] = {
        [UP] = {"ballast_worker_up", "gauge", "1 if work may be given to it or is.", false},
        [AGE] = {"ballast_worker_heartbeat_age_seconds", "gauge", "Since it was heard.", false},
        [USE] = {"ballast_gpu_utilization_ratio", "gauge", "Busy time of the GPU.", true},
        [USED] = {"ballast_gpu_memory_used_bytes", "gauge", "Memory in use.", true},
        [MEMORY] = {"ballast_gpu_memory_bytes", "gauge", "Memory that it has.", true},
        [HEAT] = {"ballast_gpu_temperature_celsius", "gauge", "Temperature.", true},
        [POWER] = {"ballast_gpu_power_watts", "gauge", "Power draw.", true},
        [SM] = {"ballast_gpu_sm_clock_hertz", "gauge", "Clock of the multiprocessors.", true},
        [ECC] = {"ballast_gpu_ecc_uncorrected_total", "counter", "Uncorrected memory errors "
                 "since the driver was loaded.", true},
        [ROWS] = {"ballast_gpu_rows_remapped", "gauge", "Memory rows replaced in its life.",
                  true},
        [XID] = {"ballast_gpu_last_xid", "gauge", "The driver's last error, 0: none.", true},
        [NVLINK] = {"ballast_gpu_nvlink_errors_total", "counter", "Errors of its links.", true},
        [SICK] = {"ballast_gpu_sick", "gauge", "1 if it gets no new work for its health.", true},
    };
    char *text;
    size_t n;
    FILE *f = text_begin(&text, &n);
    static const Ballast__GpuHealth none = BALLAST__GPU_HEALTH__INIT;
    for (int k = 0; k < N; k++) {
        family(f, rows[k].name, rows[k].type, rows[k].help);
        for (size_t i = 0; i < n_workers; i++) {
            const Ballast__Worker *w = workers[i];
            const Ballast__GpuHealth *g = w->gpu ? w->gpu : &none;
            const double x[N] = {
                [UP] = w->state == BALLAST__WORKER_STATE__WORKER_IDLE ||
                       w->state == BALLAST__WORKER_STATE__WORKER_BUSY,
                [AGE] = (double)w->heartbeat_age_ms / 1e3, [USE] = g->utilization,
                [USED] = (double)g->memory_used_bytes, [MEMORY] = (double)g->memory_bytes,
                [HEAT] = g->temperature_celsius, [POWER] = g->power_watts,
                [SM] = g->sm_clock_mhz * 1e6, [ECC] = (double)g->ecc_uncorrected,
                [ROWS] = (double)g->rows_remapped_corrected + g->rows_remapped_uncorrected,
                [XID] = (double)g->last_xid, [NVLINK] = (double)g->nvlink_errors,
                [SICK] = *g->sick != 0,
            };
            if (w->gpu || !rows[k].is_of_gpu)
                value(f, rows[k].name, x[k], "worker", w->name, "node", w->node, NULL);
        }
    }
    fclose(f);
    return text;
}
