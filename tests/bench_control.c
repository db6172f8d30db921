/* bench_control.c - figures of the control plane against the real coordinator, one table
 *
 * bench_control [FOLDER [start|submit|clients|kill|restart]]: the folder (on the disk that
 * matters) is made and removed; without a part, all. Peers' figures and goals stand in the
 * design's performance table. Clients are plain ZeroMQ sockets here, because a thousand of them in
 * one loop would measure the loop. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <zmq.h>

#include "common/clock.h"
#include "coordinator/store.h"
#include "proto/check.h"
#include "tests/a_job.h"

#define M(NAME) BALLAST__METHOD__METHOD_##NAME
#define N_CLIENTS 1000

static char folder[200] = "/tmp/bench_control", address[300];
static void *context;
static pid_t pid;

#define MUST(condition)                                                                        \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "bench_control: line %d: %s\n", __LINE__, #condition);             \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

/* ---- the coordinator ------------------------------------------------------------------------- */

static void write_config(void)
{
    char path[600];
    snprintf(path, sizeof path, "rm -rf '%s' && mkdir -p '%s'", folder, folder);
    MUST(system(path) == 0);
    snprintf(address, sizeof address, "ipc://%s/socket", folder);
    snprintf(path, sizeof path, "%s/c.yaml", folder);
    FILE *f = fopen(path, "w");
    MUST(f);
    fprintf(f, "listen: [%s]\nstate_dir: state\nlog_level: error\nrequests_per_second: 1000000\n",
            address);
    fclose(f);
}

static void start(void)
{
    const char *bin = getenv("BALLAST_BIN");
    char path[512], config[300];
    snprintf(path, sizeof path, "%s/ballast-coordinator", bin ? bin : "build/bin");
    snprintf(config, sizeof config, "%s/c.yaml", folder);
    if ((pid = fork()))
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execl(path, path, "--config", config, (char *)NULL);
    _exit(127);
}

static void end(int number)
{
    kill(pid, number);
    waitpid(pid, NULL, 0);
}

/* ---- one client ------------------------------------------------------------------------------ */

static void *client(void)
{
    void *s = zmq_socket(context, ZMQ_DEALER);
    uint8_t id[16];
    int zero = 0, fast = 5, immediate = 1;
    MUST(s && getrandom(id, sizeof id, 0) == sizeof id);
    id[0] |= 1;
    zmq_setsockopt(s, ZMQ_ROUTING_ID, id, sizeof id);
    zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(s, ZMQ_RECONNECT_IVL, &fast, sizeof fast);
    zmq_setsockopt(s, ZMQ_IMMEDIATE, &immediate, sizeof immediate);
    MUST(zmq_connect(s, address) == 0);
    return s;
}

static uint64_t n_sent;

static void fill_key(uint8_t key[16], uint64_t intent)
{
    memset(key, 0, 16);
    memcpy(key, &intent, sizeof intent);
    key[15] = 1;
}

/* Waits until there is a connection to send on. */
static void ask(void *s, Ballast__Kind kind, Ballast__Method method, uint64_t intent,
                const ProtobufCMessage *payload)
{
    static struct arena arena;
    uint8_t key[16];
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    struct wire_bytes frames[2];
    e.kind = kind;
    e.method = method;
    e.request_id = e.seq = ++n_sent;
    e.worker_epoch = 1;
    e.trace_id = intent; /* answers carry it back */
    fill_key(key, intent);
    if (intent)
        e.idempotency_key = (ProtobufCBinaryData){16, key};
    wire_pack(&e, payload, &arena, frames);
    if (zmq_send(s, frames[0].bytes, frames[0].n_bytes, ZMQ_SNDMORE) >= 0)
        zmq_send(s, frames[1].bytes, frames[1].n_bytes, 0);
    arena_reset(&arena);
}

/* The next message, or NULL after timeout_ms; lives until the next call. */
static struct checked_message *hear(void *s, long timeout_ms)
{
    static struct arena arena;
    static struct checked_message m;
    static zmq_msg_t parts[2];
    static bool is_used;
    zmq_pollitem_t item = {s, 0, ZMQ_POLLIN, 0};
    if (zmq_poll(&item, 1, timeout_ms) <= 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        if (is_used)
            zmq_msg_close(&parts[i]);
        zmq_msg_init(&parts[i]);
        MUST(zmq_msg_recv(&parts[i], s, 0) >= 0);
    }
    is_used = true;
    arena_reset(&arena);
    struct wire_bytes frames[2] = {{zmq_msg_data(&parts[0]), zmq_msg_size(&parts[0])},
                                   {zmq_msg_data(&parts[1]), zmq_msg_size(&parts[1])}};
    Ballast__Status status;
    if (check_message(frames, 2, CHECK_COORDINATOR, &arena, &m, &status) < 0) {
        fprintf(stderr, "bench_control: %s\n", status.message);
        exit(1);
    }
    return &m;
}

static struct checked_message *call(void *s, Ballast__Method method, uint64_t intent,
                                    const ProtobufCMessage *payload)
{
    ask(s, BALLAST__KIND__KIND_REQUEST, method, intent, payload);
    struct checked_message *m = hear(s, 30000);
    MUST(m);
    if (!m->payload)
        fprintf(stderr, "refused: %s\n", m->envelope->status->message);
    MUST(m->payload);
    return m;
}

/* ---- figures --------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void print_latencies(const char *what, uint64_t *ns, size_t n, double seconds, double cpu)
{
    qsort(ns, n, sizeof *ns, compare);
    printf("%-58s p50 %8.2f ms  p99 %8.2f ms", what, (double)ns[n / 2] / 1e6,
           (double)ns[n * 99 / 100] / 1e6);
    if (cpu > 0)
        printf("  cpu %6.1f us each", cpu * 1e6 / (double)n);
    if (seconds > 0)
        printf("  %8.0f/s", (double)n / seconds);
    printf("\n");
    fflush(stdout);
}

/* What the coordinator has used so far: load on the machine changes latencies, hardly this. */
static double cpu_seconds(void)
{
    char path[64], text[1024] = "";
    unsigned long user = 0, kernel = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    MUST(f && fgets(text, sizeof text, f));
    fclose(f);
    sscanf(strrchr(text, ')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
           &kernel);
    return (double)(user + kernel) / (double)sysconf(_SC_CLK_TCK);
}

static Ballast__JobSpec spec;
static Ballast__SubmitRequest submit_request = BALLAST__SUBMIT_REQUEST__INIT;
static uint64_t n_intents;

static void measure_submit(void)
{
    enum { N = 2000 };
    static uint64_t ns[N];
    double cpu = cpu_seconds();
    void *s = client();
    for (int i = 0; i < N; i++) {
        uint64_t from_ns = clock_now_ns();
        call(s, M(SUBMIT), ++n_intents, &submit_request.base);
        ns[i] = clock_now_ns() - from_ns;
    }
    print_latencies("durable submit, RPC, one client", ns, N, 0, cpu_seconds() - cpu);
    zmq_close(s);
}

static void measure_list(void)
{
    enum { N = 50 };
    static uint64_t ns[N];
    double cpu = cpu_seconds();
    Ballast__JobListRequest list = BALLAST__JOB_LIST_REQUEST__INIT;
    void *s = client();
    size_t n = 0;
    list.limit = 1000;
    for (int i = 0; i < N; i++) {
        uint64_t from_ns = clock_now_ns();
        struct checked_message *m = call(s, M(JOB_LIST), 0, &list.base);
        ns[i] = clock_now_ns() - from_ns;
        n = ((Ballast__JobListReply *)m->payload)->n_jobs;
    }
    MUST(n == 1000);
    print_latencies("list of 1,000 live jobs, RPC", ns, N, 0, cpu_seconds() - cpu);
    zmq_close(s);
}

/* rate_max 0: each client asks again as soon as it is answered. */
static void measure_clients(const char *what, Ballast__Method method, double seconds,
                            double rate_max)
{
    static void *sockets[N_CLIENTS];
    static zmq_pollitem_t items[N_CLIENTS];
    static uint64_t asked_ns[N_CLIENTS];
    size_t n = 0, n_alloc = 1 << 20, n_asked = 0;
    uint64_t *ns = xcalloc(n_alloc, sizeof *ns);
    const ProtobufCMessage *payload = method == M(SUBMIT) ? &submit_request.base : NULL;
    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    for (int i = 0; i < N_CLIENTS; i++) {
        sockets[i] = client();
        items[i] = (zmq_pollitem_t){sockets[i], 0, ZMQ_POLLIN, 0};
        call(sockets[i], M(PING), 0, &ping.base);
    }
    double cpu = cpu_seconds();
    uint64_t from_ns = clock_now_ns(), now_ns = from_ns;
    while ((double)(now_ns - from_ns) / 1e9 < seconds) {
        size_t allowed = rate_max > 0 ? (size_t)((double)(now_ns - from_ns) / 1e9 * rate_max)
                                      : SIZE_MAX;
        for (int i = 0; i < N_CLIENTS; i++) {
            static int turn; /* another client each time, when paced */
            int k = rate_max > 0 ? turn : i;
            if (n_asked >= allowed)
                break;
            turn = (turn + 1) % N_CLIENTS;
            if (asked_ns[k])
                continue;
            asked_ns[k] = clock_now_ns();
            ask(sockets[k], BALLAST__KIND__KIND_REQUEST, method,
                method == M(SUBMIT) ? ++n_intents : 0, payload);
            n_asked++;
        }
        zmq_poll(items, N_CLIENTS, 1);
        now_ns = clock_now_ns();
        for (int i = 0; i < N_CLIENTS; i++) {
            if (!(items[i].revents & ZMQ_POLLIN))
                continue;
            struct checked_message *m = hear(sockets[i], 0);
            MUST(m && m->payload && n < n_alloc);
            ns[n++] = clock_now_ns() - asked_ns[i];
            asked_ns[i] = 0;
        }
    }
    print_latencies(what, ns, n, (double)(now_ns - from_ns) / 1e9,
                    cpu_seconds() - cpu);
    free(ns);
    for (int i = 0; i < N_CLIENTS; i++) {
        zmq_close(sockets[i]);
        asked_ns[i] = 0;
    }
}

/* From the submit to START at an idle worker: what the control plane adds before the trainer. */
static void measure_start(void)
{
    enum { N = 200 };
    static uint64_t ns[N];
    double cpu = cpu_seconds();
    void *worker = client(), *s = client();
    Ballast__Hello hello = BALLAST__HELLO__INIT;
    hello.name = "w0";
    hello.node = "n0";
    hello.device = "cpu";
    hello.memory_bytes = 1ull << 40;
    call(worker, M(HELLO), 0, &hello.base);
    for (int i = 0; i < N; i++) {
        uint64_t from_ns = clock_now_ns();
        call(s, M(SUBMIT), ++n_intents, &submit_request.base);
        struct checked_message *m;
        do
            MUST(m = hear(worker, 10000));
        while (m->envelope->method != M(START));
        ns[i] = clock_now_ns() - from_ns;
        const Ballast__Start *start = (const Ballast__Start *)m->payload;
        Ballast__RankState rank = BALLAST__RANK_STATE__INIT;
        rank.job_id = start->job_id;
        rank.attempt = start->attempt;
        rank.phase = BALLAST__RANK_PHASE__RANK_RUNNING;
        rank.step = 1;
        ask(worker, BALLAST__KIND__KIND_NOTICE, M(RANK_STATE), 0, &rank.base);
        rank.phase = BALLAST__RANK_PHASE__RANK_FINISHED;
        ask(worker, BALLAST__KIND__KIND_NOTICE, M(RANK_STATE), 0, &rank.base);
        do
            MUST(m = hear(worker, 10000));
        while (m->envelope->method != M(ACK) || !((Ballast__Ack *)m->payload)->ended);
    }
    print_latencies("submit to START at an idle worker", ns, N, 0, cpu_seconds() - cpu);
    zmq_close(worker);
    zmq_close(s);
}

/* ---- kill -9 under a stream of submissions --------------------------------------------------- */

static void measure_kills(void)
{
    enum { ROUNDS = 200, WINDOW = 16, JOBS_MAX = 400000 };
    uint64_t *job_of = xcalloc(JOBS_MAX, sizeof *job_of); /* per intent */
    uint64_t first = n_intents + 1, next = first, oldest = first, n_repeated = 0, n_changed = 0;
    unsigned seed = (unsigned)time(NULL);
    void *s = client();
    for (int round = 0; round <= ROUNDS; round++) {
        uint64_t stop_ns = clock_now_ns() + (20 + (uint64_t)rand_r(&seed) % 60) * NS_PER_MS;
        if (round == ROUNDS)
            stop_ns = UINT64_MAX; /* the last one answers all that is open, then asks no more */
        /* What was not answered is asked again, with its own key. */
        for (uint64_t i = oldest; i < next; i++)
            if (!job_of[i - first])
                ask(s, BALLAST__KIND__KIND_REQUEST, M(SUBMIT), i, &submit_request.base);
        while (clock_now_ns() < stop_ns) {
            while (oldest < next && job_of[oldest - first])
                oldest++;
            if (round == ROUNDS && oldest == next)
                break;
            for (; round < ROUNDS && next < oldest + WINDOW && next - first < JOBS_MAX; next++)
                ask(s, BALLAST__KIND__KIND_REQUEST, M(SUBMIT), next, &submit_request.base);
            struct checked_message *m = hear(s, 10);
            if (!m || m->envelope->method != M(SUBMIT) || !m->payload)
                continue;
            const Ballast__SubmitReply *reply = (const Ballast__SubmitReply *)m->payload;
            uint64_t *job = &job_of[m->envelope->trace_id - first];
            n_repeated += reply->repeated_key;
            n_changed += *job && *job != reply->job_id;
            *job = reply->job_id;
        }
        if (round < ROUNDS) {
            end(SIGKILL);
            zmq_close(s);
            start();
            s = client();
        }
    }
    /* Every acknowledged id is there, and no id was given to two intents. */
    uint64_t n = next - first, n_twice = 0, n_lost = 0;
    qsort(job_of, n, sizeof *job_of, compare);
    for (uint64_t i = 1; i < n; i++)
        n_twice += job_of[i] == job_of[i - 1];
    Ballast__JobListRequest list = BALLAST__JOB_LIST_REQUEST__INIT;
    list.limit = 10000;
    uint64_t at = 0, n_listed = 0;
    list.after_id = job_of[0] - 1;
    for (;;) {
        const Ballast__JobListReply *jobs =
            (const Ballast__JobListReply *)call(s, M(JOB_LIST), 0, &list.base)->payload;
        for (size_t i = 0; i < jobs->n_jobs; i++) {
            while (at < n && job_of[at] < jobs->jobs[i]->id) {
                n_lost++;
                at++;
            }
            at += at < n && job_of[at] == jobs->jobs[i]->id;
        }
        n_listed += jobs->n_jobs;
        if (!jobs->n_jobs)
            break;
        list.after_id = jobs->jobs[jobs->n_jobs - 1]->id;
    }
    n_lost += n - at;
    n_intents = next;
    printf("%-58s %" PRIu64 " jobs, lost %" PRIu64 ", ids twice %" PRIu64 ", two jobs of "
           "one key %" PRId64 ", keys found again %" PRIu64 " (seed %u)\n",
           "kill -9 under a stream of submissions, 200 rounds", n, n_lost, n_twice,
           (int64_t)(n_listed - n + n_changed), n_repeated, seed);
    fflush(stdout);
    free(job_of);
    zmq_close(s);
}

/* ---- restart --------------------------------------------------------------------------------- */

static void on_stored(void *context_)
{
    (void)context_;
}

static Ballast__Record *record_of(struct arena *a, uint64_t seq, uint64_t job)
{
    Ballast__Record *r = arena_alloc(a, sizeof *r);
    ballast__record__init(r);
    r->seq = seq;
    r->at_ns = clock_wall_ns();
    r->job_id = job;
    return r;
}

static void fill_job(struct arena *a, Ballast__Record **records, size_t *n, uint64_t *seq,
                     uint64_t job, bool is_finished)
{
    static char *names[] = {"w0"};
    static uint64_t epochs[] = {1};
    Ballast__Record *r = records[(*n)++] = record_of(a, ++*seq, job);
    uint8_t *key = arena_alloc(a, 16);
    fill_key(key, job);
    r->what_case = BALLAST__RECORD__WHAT_SUBMITTED;
    r->submitted = arena_alloc(a, sizeof *r->submitted);
    ballast__record_submitted__init(r->submitted);
    r->submitted->spec = &spec;
    r->submitted->user = "root";
    r->submitted->idempotency_key = r->submitted->request_digest = (ProtobufCBinaryData){16, key};
    if (!is_finished)
        return;
    r = records[(*n)++] = record_of(a, ++*seq, job);
    r->what_case = BALLAST__RECORD__WHAT_ASSIGNED;
    r->assigned = arena_alloc(a, sizeof *r->assigned);
    ballast__record_assigned__init(r->assigned);
    r->assigned->attempt = 1;
    r->assigned->workers = names;
    r->assigned->n_workers = 1;
    r->assigned->worker_epochs = epochs;
    r->assigned->n_worker_epochs = 1;
    r->assigned->coll_id = (ProtobufCBinaryData){16, key};
    for (int i = 0; i < 2; i++) {
        r = records[(*n)++] = record_of(a, ++*seq, job);
        r->what_case = BALLAST__RECORD__WHAT_STATE;
        r->state = arena_alloc(a, sizeof *r->state);
        ballast__record_state__init(r->state);
        r->state->state = i ? BALLAST__JOB_STATE__JOB_DONE : BALLAST__JOB_STATE__JOB_RUNNING;
    }
}

static void measure_restart(void)
{
    enum { FINISHED = 100000, LIVE = 1000, CHUNK = 500 };
    char state_dir[300];
    struct store *store;
    struct err err = {0};
    struct arena arena = {0};
    static Ballast__Record *records[4 * CHUNK];
    uint64_t seq = 0, ns[5];
    double cpu = 0;
    end(SIGKILL); /* the folder is filled behind its back */
    write_config();
    snprintf(state_dir, sizeof state_dir, "%s/state", folder);
    MUST(store_open(state_dir, on_stored, NULL, &store, &err) == 0);
    for (uint64_t job = 1; job <= FINISHED + LIVE;) {
        size_t n = 0;
        for (int i = 0; i < CHUNK; i++, job++)
            fill_job(&arena, records, &n, &seq, job, job <= FINISHED);
        struct store_batch b = {.records = records, .n_records = n};
        store_submit(store, &b);
        while (store_take_done(store) != &b)
            usleep(100);
        MUST(b.rc == 0);
        arena_reset(&arena);
    }
    store_close(store);
    arena_fini(&arena);
    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    for (size_t i = 0; i < 5; i++) {
        uint64_t from_ns = clock_now_ns();
        start();
        void *s = client();
        const Ballast__PingReply *pong =
            (const Ballast__PingReply *)call(s, M(PING), 0, &ping.base)->payload;
        ns[i] = clock_now_ns() - from_ns;
        cpu = cpu_seconds();
        MUST(pong->n_jobs_live == LIVE);
        zmq_close(s);
        if (i < 4)
            end(SIGKILL);
    }
    qsort(ns, 5, sizeof *ns, compare);
    printf("%-58s median %.3f s, worst %.3f s, cpu %.2f s\n",
           "restart with 100,000 finished and 1,000 live, first answer", (double)ns[2] / 1e9,
           (double)ns[4] / 1e9, cpu);
    fflush(stdout);
}

static void measure_one_client(void)
{
    measure_submit();
    measure_list();
}

static void measure_many_clients(void)
{
    measure_clients("1,000 clients, PING, as fast as answered", M(PING), 3, 0);
    measure_clients("1,000 clients, PING, 5,000 a second", M(PING), 3, 5000);
    measure_clients("1,000 clients, durable submit, 5,000 a second", M(SUBMIT), 1, 5000);
    measure_clients("1,000 clients, durable submit, as fast as answered", M(SUBMIT), 1, 0);
}

static const struct {
    const char *name;
    void (*measure)(void);
} parts[] = {
    {"start", measure_start},   {"submit", measure_one_client}, {"clients", measure_many_clients},
    {"kill", measure_kills},    {"restart", measure_restart},
};

int main(int argc, char **argv)
{
    char command[300];
    if (argc > 1)
        snprintf(folder, sizeof folder, "%s", argv[1]);
    a_job_init(&spec, 1);
    submit_request.spec = &spec;
    context = zmq_ctx_new();
    zmq_ctx_set(context, ZMQ_MAX_SOCKETS, 4096);

    const char *part = argc > 2 ? argv[2] : "all";
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (strcmp(part, "all") && strcmp(part, parts[i].name))
            continue;
        write_config();
        start();
        parts[i].measure();
        end(SIGTERM);
    }
    a_job_fini(&spec);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}
