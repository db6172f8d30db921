/* test_server.c - the real coordinator and raw peers: what it answers, keeps, refuses, survives */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <uv.h>

#include "common/clock.h"
#include "common/link.h"
#include "proto/call.h"
#include "proto/check.h"
#include "tests/a_job.h"
#include "tests/patience.h"

#define M(NAME) BALLAST__METHOD__METHOD_##NAME
#define CALL_MS (2000 * PATIENCE)

/* ---- a coordinator of one's own -------------------------------------------------------------- */

struct daemon {
    char  folder[64], address[128], config[128];
    pid_t pid;
    rlim_t file_bytes_max, files_max; /* 0: no limit */
};

static void daemon_make(struct daemon *d)
{
    *d = (struct daemon){.folder = "/tmp/test_server.XXXXXX"};
    assert_non_null(mkdtemp(d->folder));
    snprintf(d->address, sizeof d->address, "ipc://%s/socket", d->folder);
    snprintf(d->config, sizeof d->config, "%s/coordinator.yaml", d->folder);
    FILE *f = fopen(d->config, "w");
    fprintf(f, "listen: [%s]\nstate_dir: state\nheartbeat_interval: 1s\nlog_level: warn\n"
               "disk_reserve: 0\n", d->address);
    fclose(f);
}

static void daemon_start(struct daemon *d)
{
    const char *bin = getenv("BALLAST_BIN");
    char path[512];
    snprintf(path, sizeof path, "%s/ballast-coordinator", bin ? bin : "bin");
    d->pid = fork();
    if (d->pid)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nothing behind */
    if (d->file_bytes_max) {
        struct rlimit limit = {d->file_bytes_max, RLIM_INFINITY};
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    if (d->files_max) {
        struct rlimit limit = {d->files_max, d->files_max};
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    execl(path, path, "--config", d->config, (char *)NULL);
    perror(path);
    _exit(127);
}

/* The wait status. */
static int daemon_end(struct daemon *d, int signal_number)
{
    int status = 0;
    if (d->pid > 0) {
        kill(d->pid, signal_number);
        waitpid(d->pid, &status, 0);
    }
    d->pid = 0;
    return status;
}

static void daemon_remove(struct daemon *d)
{
    char command[128];
    daemon_end(d, SIGKILL);
    snprintf(command, sizeof command, "rm -rf %s", d->folder);
    assert_int_equal(system(command), 0);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static struct arena arena;
static Ballast__Status status;

static struct caller *caller_to(const struct daemon *d)
{
    struct caller_options options = {.address = d->address};
    struct caller *c;
    assert_int_equal(caller_open(&options, &c, NULL), 0);
    return c;
}

static int call_for(struct caller *c, Ballast__Method method, const ProtobufCMessage *request,
                    uint32_t timeout_ms, const void **out_reply)
{
    struct err err = {0};
    const ProtobufCMessage *reply = NULL;
    int rc = caller_call(c, method, request, timeout_ms, &arena, &reply, &status, &err);
    if (out_reply)
        *out_reply = reply;
    return rc;
}

static const void *call(struct caller *c, Ballast__Method method, const ProtobufCMessage *request)
{
    const void *reply;
    int rc = call_for(c, method, request, CALL_MS, &reply);
    if (rc < 0)
        fail_msg("%s: %d %s", check_method(method)->name, rc, status.message);
    return reply;
}

static uint64_t submit(struct caller *c)
{
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    Ballast__JobSpec spec;
    a_job_init(&spec, 1);
    request.spec = &spec;
    const Ballast__SubmitReply *reply = call(c, M(SUBMIT), &request.base);
    a_job_fini(&spec);
    return reply->job_id;
}

/* ---- raw peers ------------------------------------------------------------------------------- */

struct raw {
    uv_loop_t    loop;
    uv_timer_t   timer;
    struct link *link;
    bool         is_up;
    size_t       n_messages, n_of[64], n_exhausted;
    struct arena arena;
    struct checked_message last;  /* newest message that was checked */
    Ballast__Ack  ack;            /* newest of each field */
    Ballast__Start *start;
    uint64_t     worker_epoch;
};

static void raw_message(void *context, link_peer peer, const struct link_frame *frames,
                        size_t n_frames)
{
    struct raw *r = context;
    struct wire_bytes bytes[LINK_FRAMES_MAX];
    Ballast__Status ignored;
    (void)peer;
    for (size_t i = 0; i < n_frames && i < LINK_FRAMES_MAX; i++)
        bytes[i] = (struct wire_bytes){frames[i].bytes, frames[i].n_bytes};
    r->n_messages++;
    if (check_message(bytes, n_frames, CHECK_COORDINATOR, &r->arena, &r->last, &ignored) < 0) {
        print_message("not readable: %s\n", ignored.message);
        return;
    }
    Ballast__Method method = r->last.envelope->method;
    r->n_of[(size_t)method < 64 ? method : 0]++;
    r->n_exhausted += r->last.envelope->status &&
                      r->last.envelope->status->code == BALLAST__CODE__RESOURCE_EXHAUSTED;
    if (method == M(START))
        r->start = (Ballast__Start *)r->last.payload;
    if (method == M(ACK)) {
        const Ballast__Ack *a = (const Ballast__Ack *)r->last.payload;
        r->ack.step = a->step > r->ack.step ? a->step : r->ack.step;
        r->ack.log_offset = a->log_offset > r->ack.log_offset ? a->log_offset : r->ack.log_offset;
        r->ack.load_step = a->load_step > r->ack.load_step ? a->load_step : r->ack.load_step;
        r->ack.ended |= a->ended;
    }
}

static void raw_connection(void *context, bool is_up)
{
    ((struct raw *)context)->is_up = is_up;
}

static void raw_tick(uv_timer_t *timer)
{
    (void)timer;
}

static bool raw_until(struct raw *r, const size_t *count, size_t wanted)
{
    uint64_t end_ns = patience_end_ns(2);
    while (*count < wanted && clock_now_ns() < end_ns)
        uv_run(&r->loop, UV_RUN_ONCE);
    return *count >= wanted;
}

static void raw_open(struct raw *r, const struct daemon *d)
{
    struct link_handler h = {r, raw_message, NULL, NULL, raw_connection};
    *r = (struct raw){.worker_epoch = 1};
    uv_loop_init(&r->loop);
    uv_timer_init(&r->loop, &r->timer);
    uv_timer_start(&r->timer, raw_tick, 5, 5);
    assert_int_equal(link_connect(&r->loop, d->address, NULL, &h, &r->link, NULL), 0);
    uint64_t end_ns = patience_end_ns(2);
    while (!r->is_up && clock_now_ns() < end_ns)
        uv_run(&r->loop, UV_RUN_ONCE);
    assert_true(r->is_up);
}

static void raw_close(struct raw *r)
{
    link_close(r->link);
    uv_close((uv_handle_t *)&r->timer, NULL);
    uv_run(&r->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&r->loop), 0);
    arena_fini(&r->arena);
}

static void raw_send(struct raw *r, Ballast__Kind kind, Ballast__Method method, uint8_t *key,
                     const ProtobufCMessage *payload)
{
    static uint64_t id;
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    struct arena own = {0};
    struct wire_bytes bytes[WIRE_FRAMES];
    e.kind = kind;
    e.method = method;
    e.request_id = e.seq = ++id;
    e.worker_epoch = r->worker_epoch;
    if (key)
        e.idempotency_key = (ProtobufCBinaryData){16, key};
    wire_pack(&e, payload, &own, bytes);
    struct link_frame frames[] = {{bytes[0].bytes, bytes[0].n_bytes},
                                  {bytes[1].bytes, bytes[1].n_bytes}};
    int rc = link_send(r->link, LINK_SERVER, frames, 2);
    assert_true(rc == 0 || rc == -ENOBUFS);
    arena_fini(&own);
}

static void raw_hello(struct raw *r, char *name)
{
    Ballast__Hello hello = BALLAST__HELLO__INIT;
    hello.name = name;
    hello.node = "n0";
    hello.device = "cpu";
    hello.memory_bytes = 1ull << 34;
    hello.cores = 1;
    raw_send(r, BALLAST__KIND__KIND_REQUEST, M(HELLO), NULL, &hello.base);
    assert_true(raw_until(r, &r->n_of[M(HELLO)], 1));
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void people_ask_and_are_answered(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    daemon_start(&d);
    struct caller *c = caller_to(&d);

    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    const Ballast__PingReply *pong = call(c, M(PING), &ping.base);
    assert_int_equal(pong->coordinator_epoch, 1);
    assert_string_equal(pong->user, getenv("USER") ? getenv("USER") : pong->user);
    assert_int_equal(submit(c), 1);
    assert_int_equal(submit(c), 2);

    Ballast__JobRequest job = BALLAST__JOB_REQUEST__INIT;
    job.job_id = 2;
    const Ballast__JobShowReply *show = call(c, M(JOB_SHOW), &job.base);
    assert_int_equal(show->job->state, BALLAST__JOB_STATE__JOB_QUEUED);
    assert_non_null(strstr(show->job->reason, "needs 1 worker"));
    assert_string_equal(show->spec->model_path, "/models/tiny");
    assert_string_equal(show->events[0]->kind, "JOB_SUBMITTED");
    const Ballast__JobReply *one = call(c, M(JOB_CANCEL), &job.base);
    assert_int_equal(one->job->state, BALLAST__JOB_STATE__JOB_CANCELLED);
    one = call(c, M(JOB_CANCEL), &job.base); /* again, of an ended job: brought back to say so */
    assert_int_equal(one->job->state, BALLAST__JOB_STATE__JOB_CANCELLED);
    show = call(c, M(JOB_SHOW), &job.base);
    assert_int_equal(show->job->state, BALLAST__JOB_STATE__JOB_CANCELLED);
    one = call(c, M(JOB_REQUEUE), &job.base);
    assert_int_equal(one->job->state, BALLAST__JOB_STATE__JOB_QUEUED);
    call(c, M(JOB_CANCEL), &job.base);

    Ballast__JobListRequest list = BALLAST__JOB_LIST_REQUEST__INIT;
    const Ballast__JobListReply *jobs = call(c, M(JOB_LIST), &list.base);
    assert_int_equal(jobs->n_jobs, 1);
    list.all_states = true;
    jobs = call(c, M(JOB_LIST), &list.base);
    assert_int_equal(jobs->n_jobs, 2);
    assert_non_null(strstr(jobs->jobs[0]->reason, "needs 1 worker"));

    job.job_id = 99;
    assert_int_equal(call_for(c, M(JOB_SHOW), &job.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__NOT_FOUND);
    assert_int_equal(call_for(c, M(JOB_CANCEL), &job.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__NOT_FOUND);
    Ballast__SubmitRequest bad = BALLAST__SUBMIT_REQUEST__INIT;
    Ballast__JobSpec spec;
    a_job_init(&spec, 1);
    spec.train_steps = 0;
    bad.spec = &spec;
    assert_int_equal(call_for(c, M(SUBMIT), &bad.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__INVALID_ARGUMENT);
    assert_string_equal(status.violations[0]->field, "train.steps");
    a_job_fini(&spec);
    caller_close(c);
    int ended = daemon_end(&d, SIGTERM);
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    daemon_remove(&d);
}

static void events_come_once_and_in_order(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    daemon_start(&d);
    struct caller *c = caller_to(&d);
    submit(c);
    Ballast__EventsRequest ask = BALLAST__EVENTS_REQUEST__INIT;
    uint64_t n = 0;
    const Ballast__EventsReply *reply;
    for (int i = 0; i < 3; i++) {
        ask.limit = 1;
        reply = call(c, M(EVENTS), &ask.base);
        for (size_t k = 0; k < reply->n_events; k++)
            assert_int_equal(reply->events[k]->seq, ++n);
        ask.from_seq = reply->next_seq;
    }
    ask.limit = 0;
    ask.wait_ms = 200; /* nothing happens: an empty answer in time */
    uint64_t from_ns = clock_now_ns();
    reply = call(c, M(EVENTS), &ask.base);
    assert_int_equal(reply->n_events, 0);
    assert_int_equal(reply->next_seq, ask.from_seq);
    assert_true(clock_now_ns() - from_ns > 190 * NS_PER_MS);
    assert_true(was_soon(from_ns, 2));

    struct raw r; /* one waits while the other submits */
    raw_open(&r, &d);
    ask.wait_ms = 20000;
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(EVENTS), NULL, &ask.base);
    usleep(100000);
    uint64_t job = submit(c);
    assert_true(raw_until(&r, &r.n_of[M(EVENTS)], 1));
    reply = (const Ballast__EventsReply *)r.last.payload;
    assert_int_equal(reply->events[0]->seq, ask.from_seq);
    assert_int_equal(reply->events[0]->job_id, job);

    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(EVENTS), NULL, &(Ballast__EventsRequest){
        .base = PROTOBUF_C_MESSAGE_INIT(&ballast__events_request__descriptor),
        .from_seq = 1000, .wait_ms = 20000}.base);
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(PING), NULL, &(Ballast__PingRequest){
        PROTOBUF_C_MESSAGE_INIT(&ballast__ping_request__descriptor)}.base);
    assert_true(raw_until(&r, &r.n_of[M(PING)], 1)); /* so the other has arrived, too */
    usleep(100000);
    /* A stop answers who waits; but ZeroMQ drops what was not read when the connection ends, so
     * one who reads late hears only that. */
    kill(d.pid, SIGTERM);
    uint64_t end_ns = patience_end_ns(2);
    while (r.n_of[M(EVENTS)] < 2 && r.is_up && clock_now_ns() < end_ns)
        uv_run(&r.loop, UV_RUN_ONCE);
    if (r.n_of[M(EVENTS)] == 2) {
        assert_int_equal(r.last.envelope->status->code, BALLAST__CODE__UNAVAILABLE);
        assert_string_equal(r.last.envelope->status->reason, "STOPPING");
    } else {
        assert_false(r.is_up);
    }
    raw_close(&r);
    caller_close(c);
    daemon_remove(&d);
}

static void what_is_acknowledged_survives_kill_9(void **state)
{
    (void)state;
    struct daemon d;
    uint8_t key[16] = "the same intent";
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    Ballast__JobSpec spec;
    a_job_init(&spec, 1);
    request.spec = &spec;
    daemon_make(&d);
    daemon_start(&d);
    struct caller *c = caller_to(&d);
    assert_int_equal(submit(c), 1);
    struct raw r;
    raw_open(&r, &d);
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(SUBMIT), key, &request.base);
    assert_true(raw_until(&r, &r.n_of[M(SUBMIT)], 1));
    raw_close(&r);
    daemon_end(&d, SIGKILL);
    daemon_start(&d);
    /* The answer was lost: the same key again makes no second job. */
    raw_open(&r, &d);
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(SUBMIT), key, &request.base);
    assert_true(raw_until(&r, &r.n_of[M(SUBMIT)], 1));
    const Ballast__SubmitReply *again = (const Ballast__SubmitReply *)r.last.payload;
    assert_int_equal(again->job_id, 2);
    assert_true(again->repeated_key);
    spec.train_steps++; /* the same key for another intent */
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(SUBMIT), key, &request.base);
    assert_true(raw_until(&r, &r.n_of[M(SUBMIT)], 2));
    assert_int_not_equal(r.last.envelope->status->code, BALLAST__CODE__OK);
    raw_close(&r);
    assert_int_equal(submit(c), 3); /* the caller found its way back by itself */
    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    const Ballast__PingReply *pong = call(c, M(PING), &ping.base);
    assert_int_equal(pong->coordinator_epoch, 2);
    assert_int_equal(pong->n_jobs_live, 3);
    caller_close(c);
    a_job_fini(&spec);
    daemon_remove(&d);
}

static void a_worker_reports(struct raw *w, struct caller *c, uint64_t job)
{
    Ballast__PhaseTime phase = BALLAST__PHASE_TIME__INIT, *phases[] = {&phase};
    Ballast__StepReport step = BALLAST__STEP_REPORT__INIT, *steps[] = {&step};
    Ballast__StepReports reports = BALLAST__STEP_REPORTS__INIT;
    phase.name = "forward";
    phase.seconds = 0.5;
    step.step = 1;
    step.loss = 5.5;
    step.validation_loss = NAN;
    step.phases = phases;
    step.n_phases = 1;
    reports.job_id = job;
    reports.attempt = 1;
    reports.steps = steps;
    reports.n_steps = 1;
    raw_send(w, BALLAST__KIND__KIND_NOTICE, M(STEPS), NULL, &reports.base);
    Ballast__LogChunk chunk = BALLAST__LOG_CHUNK__INIT;
    chunk.job_id = job;
    chunk.attempt = 1;
    chunk.bytes = (ProtobufCBinaryData){6, (uint8_t *)"hello\n"};
    raw_send(w, BALLAST__KIND__KIND_NOTICE, M(LOG), NULL, &chunk.base);
    while (w->ack.log_offset < 6 || w->ack.step < 1)
        uv_run(&w->loop, UV_RUN_ONCE);

    Ballast__MetricsRequest metrics = BALLAST__METRICS_REQUEST__INIT;
    metrics.job_id = job;
    metrics.wait_ms = 5000;
    const Ballast__MetricsReply *m = call(c, M(METRICS), &metrics.base);
    assert_int_equal(m->n_steps, 1);
    assert_true(m->steps[0]->loss == 5.5 && m->steps[0]->attempt == 1 && !m->ended);
    Ballast__LogsRequest logs = BALLAST__LOGS_REQUEST__INIT;
    logs.job_id = job;
    logs.offset = 1;
    const Ballast__LogsReply *l = call(c, M(LOGS), &logs.base);
    assert_int_equal(l->bytes.len, 5);
    assert_memory_equal(l->bytes.data, "ello\n", 5);
    assert_int_equal(l->next_offset, 6);
    assert_int_equal(l->n_ranks, 1);
    assert_false(l->ended);
    logs.rank = 5;
    assert_int_equal(call_for(c, M(LOGS), &logs.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__OUT_OF_RANGE);
}

/* Waits for it on the worker's loop, so that the worker's heart goes on. */
static void a_load_is_reported(struct raw *w, uint64_t job)
{
    uint32_t tokens[4] = {70, 10, 20, 0};
    Ballast__LayerLoad layer = BALLAST__LAYER_LOAD__INIT, *layers[] = {&layer};
    Ballast__LoadReport load = BALLAST__LOAD_REPORT__INIT;
    layer.layer = 3;
    layer.tokens = tokens;
    layer.n_tokens = load.n_experts = 4;
    load.job_id = job;
    load.attempt = load.n_nodes = load.first_step = 1;
    load.last_step = 20;
    load.layers = layers;
    load.n_layers = 1;
    load.step_s = 0.1;
    load.device_imbalance = 1;
    raw_send(w, BALLAST__KIND__KIND_NOTICE, M(LOAD), NULL, &load.base);
    while (w->ack.load_step < 20)
        uv_run(&w->loop, UV_RUN_ONCE);
}

static void people_ask_for_experts(struct caller *c, uint64_t job)
{
    Ballast__ExpertsRequest experts = BALLAST__EXPERTS_REQUEST__INIT;
    experts.job_id = job;
    experts.layer = -1;
    experts.window = "1m";
    const Ballast__ExpertsReply *e = call(c, M(EXPERTS), &experts.base);
    assert_int_equal(e->n_layers, 1);
    assert_int_equal(e->layers[0]->tokens[0], 70);
    assert_true(e->layers[0]->imbalance_experts == 2.8 && e->layers[0]->imbalance_devices == 1);
    assert_int_equal(e->last_step, 20);
    experts.layer = 2;
    assert_int_equal(call_for(c, M(EXPERTS), &experts.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__NOT_FOUND);
    Ballast__PlacementRequest placement = BALLAST__PLACEMENT_REQUEST__INIT;
    placement.job_id = job;
    const Ballast__PlacementReply *p = call(c, M(PLACEMENT), &placement.base);
    assert_int_equal(p->placement->epoch, 0);
    assert_int_equal(p->placement->n_devices, 1);
    assert_int_equal(p->placement->layers[0]->layer, 3);
    assert_int_equal(p->placement->layers[0]->experts[2], 2);
    placement.has_epoch = true;
    placement.epoch = 4;
    assert_int_equal(call_for(c, M(PLACEMENT), &placement.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__NOT_FOUND);
    Ballast__RebalanceRequest rebalance = BALLAST__REBALANCE_REQUEST__INIT;
    rebalance.job_id = job;
    const Ballast__RebalanceHistoryReply *h = call(c, M(REBALANCE_HISTORY), &rebalance.base);
    assert_int_equal(h->n_entries, 0);
    assert_true(h->auto_on);
}

static void people_ask_the_database(struct caller *c, const struct daemon *d, uint64_t job)
{
    Ballast__DbQueryRequest query = BALLAST__DB_QUERY_REQUEST__INIT;
    query.sql = arena_printf(&arena, "SELECT j.name, sum(l.tokens) FROM expert_load l JOIN jobs j "
                             "ON j.id = l.job WHERE l.job = %" PRIu64 " AND l.layer = 3", job);
    const Ballast__DbQueryReply *q = call(c, M(DB_QUERY), &query.base);
    assert_int_equal(q->n_rows, 1);
    assert_string_equal(q->rows[0]->cells[0], "a-job");
    assert_string_equal(q->rows[0]->cells[1], "100");
    query.sql = "DROP TABLE jobs";
    assert_int_equal(call_for(c, M(DB_QUERY), &query.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__INVALID_ARGUMENT);
    Ballast__DbBackupRequest backup = BALLAST__DB_BACKUP_REQUEST__INIT;
    backup.path = arena_printf(&arena, "%s/copy.db", d->folder);
    const Ballast__DbBackupReply *b = call(c, M(DB_BACKUP), &backup.base);
    struct stat st;
    assert_int_equal(stat(backup.path, &st), 0);
    assert_int_equal(st.st_size, b->bytes);
    assert_int_equal(call_for(c, M(DB_BACKUP), &backup.base, CALL_MS, NULL), -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__ALREADY_EXISTS);
}

static void a_job_runs_on_a_raw_worker(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    daemon_start(&d);
    struct caller *c = caller_to(&d);
    struct raw w;
    raw_open(&w, &d);
    raw_hello(&w, "w0");
    uint64_t job = submit(c);
    if (!raw_until(&w, &w.n_of[M(START)], 1)) {
        Ballast__JobRequest why = BALLAST__JOB_REQUEST__INIT;
        why.job_id = job;
        const Ballast__JobShowReply *stuck = call(c, M(JOB_SHOW), &why.base);
        fail_msg("no START: %s", stuck->job->reason);
    }
    assert_int_equal(w.start->job_id, job);
    assert_int_equal(w.start->n_gang, 1);
    assert_true(w.start->heard_seq > 0); /* what ranks are not told alike */
    Ballast__RankState rank = BALLAST__RANK_STATE__INIT;
    rank.job_id = job;
    rank.attempt = 1;
    for (int phase = BALLAST__RANK_PHASE__RANK_SPAWNED; phase <= BALLAST__RANK_PHASE__RANK_RUNNING;
         phase++) {
        rank.phase = (Ballast__RankPhase)phase;
        rank.step = phase == BALLAST__RANK_PHASE__RANK_RUNNING;
        raw_send(&w, BALLAST__KIND__KIND_NOTICE, M(RANK_STATE), NULL, &rank.base);
    }
    Ballast__JobWaitRequest wait = BALLAST__JOB_WAIT_REQUEST__INIT;
    Ballast__JobState running = BALLAST__JOB_STATE__JOB_RUNNING;
    wait.job_id = job;
    wait.states = &running;
    wait.n_states = 1;
    wait.wait_ms = 5000;
    uv_run(&w.loop, UV_RUN_ONCE);
    const Ballast__JobReply *one = call(c, M(JOB_WAIT), &wait.base);
    assert_int_equal(one->job->state, running);
    a_worker_reports(&w, c, job);
    a_load_is_reported(&w, job);
    people_ask_for_experts(c, job);
    people_ask_the_database(c, &d, job);

    rank.phase = BALLAST__RANK_PHASE__RANK_FINISHED;
    rank.step = 100;
    raw_send(&w, BALLAST__KIND__KIND_NOTICE, M(RANK_STATE), NULL, &rank.base);
    while (!w.ack.ended)
        uv_run(&w.loop, UV_RUN_ONCE);
    wait.n_states = 0;
    one = call(c, M(JOB_WAIT), &wait.base);
    assert_int_equal(one->job->state, BALLAST__JOB_STATE__JOB_DONE);
    Ballast__JobRequest ask = BALLAST__JOB_REQUEST__INIT;
    ask.job_id = job;
    const Ballast__JobShowReply *show = call(c, M(JOB_SHOW), &ask.base);
    assert_int_equal(show->job->step, 100);
    assert_true(show->job->loss == 5.5);
    assert_string_equal(show->job->workers[0], "w0");
    Ballast__LogsRequest logs = BALLAST__LOGS_REQUEST__INIT;
    logs.job_id = job;
    logs.offset = 6;
    logs.wait_ms = 5000; /* an ended job keeps nobody waiting */
    const Ballast__LogsReply *l = call(c, M(LOGS), &logs.base);
    assert_true(l->ended && l->bytes.len == 0);
    raw_close(&w);
    caller_close(c);
    daemon_remove(&d);
}

static void foreign_bytes_are_answered(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    daemon_start(&d);
    struct raw r;
    raw_open(&r, &d);
    struct link_frame junk = {"GET / HTTP/1.1", 14};
    struct link_frame other[] = {{"BLST\x09\x00\x00\x00", 8}, {"", 0}};
    struct link_frame many[] = {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}};
    assert_int_equal(link_send(r.link, LINK_SERVER, &junk, 1), 0);
    assert_true(raw_until(&r, &r.n_of[0], 1));
    assert_string_equal(r.last.envelope->status->reason, "BAD_FRAMES");
    assert_int_equal(link_send(r.link, LINK_SERVER, other, 2), 0);
    assert_true(raw_until(&r, &r.n_of[0], 2));
    assert_int_equal(r.last.envelope->status->code, BALLAST__CODE__FAILED_PRECONDITION);
    assert_int_equal(link_send(r.link, LINK_SERVER, many, 4), 0);
    assert_true(raw_until(&r, &r.n_of[0], 3));
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, 777, NULL, NULL);
    assert_true(raw_until(&r, &r.n_messages, 4));
    raw_send(&r, BALLAST__KIND__KIND_NOTICE, M(HEARTBEAT), NULL, NULL); /* of nobody: no answer */
    raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(PING), NULL, NULL);
    assert_true(raw_until(&r, &r.n_of[M(PING)], 1));
    raw_close(&r);
    daemon_remove(&d);
}

static void a_flood_hurts_only_itself(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    FILE *f = fopen(d.config, "a");
    fprintf(f, "requests_per_second: 500\n");
    fclose(f);
    daemon_start(&d);
    struct caller *c = caller_to(&d);
    struct raw r;
    raw_open(&r, &d);
    Ballast__JobListRequest list = BALLAST__JOB_LIST_REQUEST__INIT;
    for (int i = 0; i < 20000; i++) {
        raw_send(&r, BALLAST__KIND__KIND_REQUEST, M(JOB_LIST), NULL, &list.base);
        if (i % 64 == 0)
            uv_run(&r.loop, UV_RUN_NOWAIT);
        if (i % 4000 == 0) {
            uint64_t from_ns = clock_now_ns();
            Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
            call(c, M(PING), &ping.base);
            assert_true(was_soon(from_ns, 1));
        }
    }
    assert_true(raw_until(&r, &r.n_exhausted, 1));
    raw_close(&r);
    caller_close(c);
    daemon_remove(&d);
}

static double cpu_seconds(pid_t pid)
{
    char path[64], text[1024] = "";
    unsigned long user = 0, kernel = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    assert_non_null(fgets(text, sizeof text, f));
    fclose(f);
    sscanf(strrchr(text, ')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
           &kernel);
    return (double)(user + kernel) / (double)sysconf(_SC_CLK_TCK);
}

static void an_idle_cluster_idles(void **state)
{
    (void)state;
    struct daemon d;
    struct raw w[4];
    static char *names[] = {"w0", "w1", "w2", "w3"};
    daemon_make(&d);
    daemon_start(&d);
    for (int i = 0; i < 4; i++) {
        raw_open(&w[i], &d);
        raw_hello(&w[i], names[i]);
    }
    Ballast__Heartbeat beat = BALLAST__HEARTBEAT__INIT;
    double used = 1;
    size_t n_acks = 0;
    for (int round = 0; round < 5 && used > 0.04; round++) { /* one percent; what is at work now */
        double before = cpu_seconds(d.pid);                  /* and then for others, may use more */
        for (int second = 0; second < 4; second++) {
            for (int i = 0; i < 4; i++)
                raw_send(&w[i], BALLAST__KIND__KIND_NOTICE, M(HEARTBEAT), NULL, &beat.base);
            n_acks++;
            for (int i = 0; i < 4; i++)
                assert_true(raw_until(&w[i], &w[i].n_of[M(ACK)], n_acks));
            usleep(1000000);
        }
        used = cpu_seconds(d.pid) - before;
        print_message("idle with 4 workers: %.2f %% of a core\n", used / 4 * 100);
    }
    assert_true(used <= 0.04);
    for (int i = 0; i < 4; i++)
        raw_close(&w[i]);
    daemon_remove(&d);
}

static void one_folder_one_coordinator(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    daemon_start(&d);
    struct caller *c = caller_to(&d);
    submit(c);
    struct daemon second = d;
    daemon_start(&second);
    int ended;
    waitpid(second.pid, &ended, 0);
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 1);
    assert_int_equal(submit(c), 2);
    caller_close(c);
    daemon_remove(&d);
}

static void too_few_descriptors_are_no_place_to_start(void **state)
{
    (void)state;
    struct daemon d;
    int ended;
    daemon_make(&d);
    d.files_max = 200;
    daemon_start(&d);
    waitpid(d.pid, &ended, 0);
    d.pid = 0;
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 1);
    daemon_remove(&d);
}

/* Files may not grow: submits are refused and say why, reads are served; with space again all
 * goes on by itself and nothing acknowledged is missing. */
/* That a submission is tried again: long enough for a slow machine to answer within it. */
#define TRIES_MS 3000

static void a_full_disk_and_then_space(void **state)
{
    (void)state;
    struct daemon d;
    daemon_make(&d);
    d.file_bytes_max = 512 << 10;
    daemon_start(&d);
    struct caller *c = caller_to(&d);
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    Ballast__JobSpec spec;
    a_job_init(&spec, 1);
    request.spec = &spec;
    size_t n_acknowledged = 0;
    int rc = 0;
    while (n_acknowledged < 5000 &&
           (rc = call_for(c, M(SUBMIT), &request.base, TRIES_MS, NULL)) == 0) {
        n_acknowledged++;
        arena_reset(&arena);
    }
    assert_int_equal(rc, -EREMOTEIO);
    assert_int_equal(status.code, BALLAST__CODE__UNAVAILABLE);
    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    rc = call_for(c, M(PING), &ping.base, TRIES_MS, NULL);
    while (rc == 0) /* it was served between two commits that failed */
        rc = call_for(c, M(SUBMIT), &request.base, TRIES_MS, NULL);
    assert_int_equal(rc, -EREMOTEIO);
    if (!strstr(status.message, "store"))
        fail_msg("of a full disk is said: %s", status.message);
    Ballast__JobListRequest list = BALLAST__JOB_LIST_REQUEST__INIT;
    list.all_states = true;
    list.limit = 10000;
    const Ballast__JobListReply *jobs = call(c, M(JOB_LIST), &list.base);
    assert_int_equal(jobs->n_jobs, n_acknowledged);
    struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY};
    assert_int_equal(prlimit(d.pid, RLIMIT_FSIZE, &none, NULL), 0);
    call(c, M(SUBMIT), &request.base);
    jobs = call(c, M(JOB_LIST), &list.base);
    assert_in_range(jobs->n_jobs, n_acknowledged + 1, n_acknowledged + 1);
    a_job_fini(&spec);
    caller_close(c);
    daemon_remove(&d);
}

static int reset(void **state)
{
    (void)state;
    arena_fini(&arena);
    return 0;
}

static void a_wrong_command_line_is_one_line(void **state)
{
    (void)state;
    static const struct {
        const char *arguments, *says;
    } rows[] = {
        {"coordinator", "--config FILE is missing; see ballast-coordinator --help"},
        {"coordinator --fast", "'--fast' is unknown, or lacks its value"},
        {"coordinator --config", "'--config' is unknown, or lacks its value"},
        {"coordinator --config x y", "'y' is no option"},
        {"worker", "--config FILE is missing; see ballast-worker --help"},
        {"worker --fast", "'--fast' is unknown, or lacks its value"},
        {"worker --simulate 0 --config x", "--simulate takes a whole number from 1 to 4096"},
        {"worker --config x --simulate-seed 0", "go with --simulate N"},
        {"worker bench --fast", "see ballast-worker bench --help"},
        {"worker export m", "--lora ADAPTER_DIR and --out DIR are needed"},
    };
    const char *bin = getenv("BALLAST_BIN");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char command[600], said[512] = "";
        snprintf(command, sizeof command, "%s/ballast-%s 2>&1", bin ? bin : "bin",
                 rows[i].arguments);
        FILE *f = popen(command, "r");
        assert_non_null(f);
        size_t n = fread(said, 1, sizeof said - 1, f);
        int ended = pclose(f);
        if (!WIFEXITED(ended) || WEXITSTATUS(ended) != 2 || !strstr(said, rows[i].says) ||
            strchr(said, '\n') != said + n - 1)
            fail_msg("%s: %d %s", rows[i].arguments, ended, said);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wrong_command_line_is_one_line),
        cmocka_unit_test_teardown(people_ask_and_are_answered, reset),
        cmocka_unit_test_teardown(events_come_once_and_in_order, reset),
        cmocka_unit_test_teardown(what_is_acknowledged_survives_kill_9, reset),
        cmocka_unit_test_teardown(a_job_runs_on_a_raw_worker, reset),
        cmocka_unit_test_teardown(foreign_bytes_are_answered, reset),
        cmocka_unit_test_teardown(a_flood_hurts_only_itself, reset),
        cmocka_unit_test_teardown(an_idle_cluster_idles, reset),
        cmocka_unit_test_teardown(one_folder_one_coordinator, reset),
        cmocka_unit_test_teardown(too_few_descriptors_are_no_place_to_start, reset),
        cmocka_unit_test_teardown(a_full_disk_and_then_space, reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
