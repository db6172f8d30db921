/* test_check.c - hostile messages: each is refused with the right code, none is believed */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/check.h"
#include "tests/a_job.h"
#include "tests/seed.h"

#define M(NAME) BALLAST__METHOD__METHOD_##NAME
#define REQUEST BALLAST__KIND__KIND_REQUEST
#define NOTICE  BALLAST__KIND__KIND_NOTICE

static uint8_t key[16] = "0123456789abcde";

struct message {
    struct arena arena;
    Ballast__Envelope envelope;
    struct wire_bytes frames[4];
    size_t n_frames;
};

static void pack(struct message *m, Ballast__Kind kind, Ballast__Method method,
                 const ProtobufCMessage *payload)
{
    const struct check_method *row = check_method(method);
    ballast__envelope__init(&m->envelope);
    m->envelope.kind = kind;
    m->envelope.method = method;
    m->envelope.request_id = 7;
    if (row && row->needs_key)
        m->envelope.idempotency_key = (ProtobufCBinaryData){16, key};
    wire_pack(&m->envelope, payload, &m->arena, m->frames);
    m->n_frames = WIRE_FRAMES;
}

/* The code, or -1 if it was accepted. */
static int verdict(struct message *m, uint32_t from, const char **out_field)
{
    struct checked_message checked;
    Ballast__Status status;
    int rc = check_message(m->frames, m->n_frames, from, &m->arena, &checked, &status);
    *out_field = status.n_violations ? status.violations[0]->field : "";
    assert_true((rc == 0) == (checked.payload != NULL));
    if (rc == -EINVAL)
        assert_int_equal(checked.envelope->request_id, 7);
    if (rc < 0)
        assert_true(*status.message != 0);
    return rc == 0 ? -1 : (int)status.code;
}

static void expect(struct message *m, uint32_t from, int code, const char *field, const char *what)
{
    const char *got_field;
    int got = verdict(m, from, &got_field);
    if (got != code || strcmp(got_field, field))
        fail_msg("%s: code %d field '%s', expected %d '%s'", what, got, got_field, code, field);
    arena_fini(&m->arena);
    *m = (struct message){0};
}

/* ---- the frames ------------------------------------------------------------------------------ */

static void frames_preludes_and_envelopes(void **state)
{
    (void)state;
    struct message m = {0};
    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    enum { BAD = BALLAST__CODE__INVALID_ARGUMENT };

    pack(&m, REQUEST, M(PING), &ping.base);
    expect(&m, CHECK_CLIENT, -1, "", "a good one");
    for (size_t n = 0; n < 10; n++) {
        pack(&m, REQUEST, M(PING), &ping.base);
        m.n_frames = n == 2 ? 12 : n;
        expect(&m, CHECK_CLIENT, BAD, "", "another number of frames");
    }
    for (size_t n = 0; n < WIRE_PRELUDE_BYTES; n++) {
        pack(&m, REQUEST, M(PING), &ping.base);
        m.frames[0].n_bytes = n;
        expect(&m, CHECK_CLIENT, BAD, "", "a prelude cut short");
    }
    pack(&m, REQUEST, M(PING), &ping.base);
    ((uint8_t *)m.frames[0].bytes)[0] = 'X';
    expect(&m, CHECK_CLIENT, BAD, "", "foreign magic");
    pack(&m, REQUEST, M(PING), &ping.base);
    ((uint8_t *)m.frames[0].bytes)[4] = WIRE_MAJOR + 1;
    expect(&m, CHECK_CLIENT, BALLAST__CODE__FAILED_PRECONDITION, "", "another major version");
    pack(&m, REQUEST, M(PING), &ping.base);
    ((uint8_t *)m.frames[0].bytes)[6] = 99;
    expect(&m, CHECK_CLIENT, -1, "", "another minor version is fine");
    pack(&m, REQUEST, M(PING), &ping.base);
    m.frames[0].n_bytes = WIRE_HEAD_BYTES_MAX + 1; /* refused before it is read */
    expect(&m, CHECK_CLIENT, BAD, "", "a huge envelope");
    pack(&m, REQUEST, M(PING), &ping.base);
    m.frames[0].n_bytes -= 1;
    expect(&m, CHECK_CLIENT, BAD, "", "an envelope cut short");
    pack(&m, REQUEST, M(PING), &ping.base);
    m.frames[1] = (struct wire_bytes){key, 16};
    expect(&m, CHECK_CLIENT, BAD, "", "more payload than announced");
}

static void both_versions_are_named(void **state)
{
    (void)state;
    struct message m = {0};
    struct checked_message checked;
    Ballast__Status status;
    pack(&m, REQUEST, M(PING), NULL);
    ((uint8_t *)m.frames[0].bytes)[4] = 9;
    assert_int_equal(check_message(m.frames, 2, CHECK_CLIENT, &m.arena, &checked, &status),
                     -EPROTO);
    assert_non_null(strstr(status.message, "protocol 9.0"));
    assert_non_null(strstr(status.message, "this side 1.0"));
    arena_fini(&m.arena);
}

static void methods_senders_and_keys(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        Ballast__Kind kind;
        Ballast__Method method;
        uint32_t from;
        int code;
    } rows[] = {
        {"a method nobody knows", REQUEST, 999, CHECK_CLIENT, BALLAST__CODE__UNIMPLEMENTED},
        {"no method", REQUEST, M(UNKNOWN), CHECK_CLIENT, BALLAST__CODE__UNIMPLEMENTED},
        {"a notice of a request", NOTICE, M(PING), CHECK_CLIENT, BALLAST__CODE__INVALID_ARGUMENT},
        {"a request of a notice", REQUEST, M(GOODBYE), CHECK_WORKER,
         BALLAST__CODE__INVALID_ARGUMENT},
        {"a kind nobody knows", 77, M(PING), CHECK_CLIENT, BALLAST__CODE__INVALID_ARGUMENT},
        {"a client that says STOP", NOTICE, M(STOP), CHECK_CLIENT,
         BALLAST__CODE__PERMISSION_DENIED},
        {"a client that reports", NOTICE, M(HEARTBEAT), CHECK_CLIENT,
         BALLAST__CODE__PERMISSION_DENIED},
        {"a worker that lists jobs", REQUEST, M(JOB_LIST), CHECK_WORKER,
         BALLAST__CODE__PERMISSION_DENIED},
        {"a worker that pings", REQUEST, M(PING), CHECK_WORKER, -1},
    };
    struct message m = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        pack(&m, rows[i].kind, rows[i].method, NULL);
        expect(&m, rows[i].from, rows[i].code, "", rows[i].what);
    }
    Ballast__JobRequest job = BALLAST__JOB_REQUEST__INIT;
    job.job_id = 1;
    for (size_t n = 0; n < 20; n++) {
        pack(&m, REQUEST, M(JOB_CANCEL), NULL);
        uint8_t longer[20] = {0};
        m.envelope.idempotency_key = (ProtobufCBinaryData){n, longer};
        wire_pack(&m.envelope, &job.base, &m.arena, m.frames);
        expect(&m, CHECK_CLIENT, n == 16 ? -1 : BALLAST__CODE__INVALID_ARGUMENT,
               n == 16 ? "" : "idempotency_key", "keys of all lengths");
    }
    pack(&m, REQUEST, M(PING), NULL);
    m.envelope.deadline_ms = DEADLINE_MS_MAX + 1;
    wire_pack(&m.envelope, NULL, &m.arena, m.frames);
    expect(&m, CHECK_CLIENT, BALLAST__CODE__INVALID_ARGUMENT, "deadline_ms", "a long deadline");
}

/* ---- payloads -------------------------------------------------------------------------------- */

static void fields_of_notices(void **state)
{
    (void)state;
    enum { BAD = BALLAST__CODE__INVALID_ARGUMENT };
    struct message m = {0};
    Ballast__RankState rank = BALLAST__RANK_STATE__INIT, *ranks[] = {&rank};
    Ballast__Hello hello = BALLAST__HELLO__INIT;
    hello.name = "w0";
    hello.ranks = ranks;
    hello.n_ranks = 1;
    rank.job_id = 1;
    rank.attempt = 1;
    rank.phase = BALLAST__RANK_PHASE__RANK_READY;
    char longest[TEXT_BYTES_MAX + 2];
    memset(longest, 'x', sizeof longest);
    longest[TEXT_BYTES_MAX + 1] = 0;

    pack(&m, REQUEST, M(HELLO), &hello.base);
    expect(&m, CHECK_WORKER, -1, "", "a good hello");
    static char *const names[] = {"", "a b", "w\n", "../w", "-w", "\xff", "w;rm"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        hello.name = names[i];
        pack(&m, REQUEST, M(HELLO), &hello.base);
        expect(&m, CHECK_WORKER, BAD, "name", names[i]);
    }
    hello.name = "w0";
    static char *const texts[] = {"a\x1b[2J", "tab\t", "\xc0\xaf", "\xed\xa0\x80", "\xc2\x9b",
                                  "\xf4\x90\x80\x80", "cut \xe2\x82", "\x7f"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        rank.text = texts[i];
        pack(&m, REQUEST, M(HELLO), &hello.base);
        expect(&m, CHECK_WORKER, BAD, "ranks[0].text", "a text that steers terminals");
    }
    rank.text = "\xe2\x82\xac fine";
    pack(&m, REQUEST, M(HELLO), &hello.base);
    expect(&m, CHECK_WORKER, -1, "", "UTF-8");
    rank.text = longest;
    pack(&m, REQUEST, M(HELLO), &hello.base);
    expect(&m, CHECK_WORKER, BAD, "ranks[0].text", "a long text");
    rank.text = "";
    rank.phase = 44;
    pack(&m, REQUEST, M(HELLO), &hello.base);
    expect(&m, CHECK_WORKER, BAD, "ranks[0].phase", "an unknown phase");
    rank.phase = 0;
    pack(&m, REQUEST, M(HELLO), &hello.base);
    expect(&m, CHECK_WORKER, BAD, "ranks[0].phase", "no phase");
    rank.phase = BALLAST__RANK_PHASE__RANK_READY;
    rank.data_address = "tcp://10.0.0.1:5000";
    pack(&m, REQUEST, M(HELLO), &hello.base);
    expect(&m, CHECK_WORKER, BAD, "ranks[0].data_key", "an address without its key, nested");
    pack(&m, NOTICE, M(RANK_STATE), &rank.base);
    expect(&m, CHECK_WORKER, BAD, "data_key", "an address without its key");
    rank.data_address = "";
    rank.rank = RANKS_MAX;
    pack(&m, NOTICE, M(RANK_STATE), &rank.base);
    expect(&m, CHECK_WORKER, BAD, "rank", "a rank beyond all");
    rank.rank = 0;
    rank.job_id = 0;
    pack(&m, NOTICE, M(RANK_STATE), &rank.base);
    expect(&m, CHECK_WORKER, BAD, "job_id", "no job");

    Ballast__RankState *many[2000];
    rank.job_id = 1;
    for (size_t i = 0; i < 2000; i++)
        many[i] = &rank;
    Ballast__Heartbeat beat = BALLAST__HEARTBEAT__INIT;
    beat.ranks = many;
    beat.n_ranks = 2000;
    pack(&m, NOTICE, M(HEARTBEAT), &beat.base);
    expect(&m, CHECK_WORKER, BAD, "ranks", "too many ranks");

    static uint8_t bytes[LOG_CHUNK_BYTES_MAX + 1];
    Ballast__LogChunk chunk = BALLAST__LOG_CHUNK__INIT;
    chunk.job_id = chunk.attempt = 1;
    chunk.bytes = (ProtobufCBinaryData){sizeof bytes, bytes};
    pack(&m, NOTICE, M(LOG), &chunk.base);
    expect(&m, CHECK_WORKER, BAD, "bytes", "a long chunk");
    chunk.bytes.len = LOG_CHUNK_BYTES_MAX;
    chunk.offset = UINT64_MAX;
    pack(&m, NOTICE, M(LOG), &chunk.base);
    expect(&m, CHECK_WORKER, BAD, "offset", "an offset that would overflow");
    chunk.offset = 0;
    pack(&m, NOTICE, M(LOG), &chunk.base);
    expect(&m, CHECK_WORKER, -1, "", "the longest chunk");
}

static void fields_of_requests(void **state)
{
    (void)state;
    enum { BAD = BALLAST__CODE__INVALID_ARGUMENT };
    struct message m = {0};
    Ballast__SubmitRequest submit = BALLAST__SUBMIT_REQUEST__INIT;
    Ballast__JobSpec spec;
    a_job_init(&spec, 4);
    pack(&m, REQUEST, M(SUBMIT), &submit.base);
    expect(&m, CHECK_CLIENT, BAD, "spec", "a submit of nothing");
    submit.spec = &spec;
    pack(&m, REQUEST, M(SUBMIT), &submit.base);
    expect(&m, CHECK_CLIENT, -1, "", "a good job");
    spec.optimizer_lr = -1;
    pack(&m, REQUEST, M(SUBMIT), &submit.base);
    expect(&m, CHECK_CLIENT, BAD, "train.optimizer.lr", "a range of the job file");
    spec.optimizer_lr = 0.001;
    spec.parallel_fsdp_shard_degree = 3;
    pack(&m, REQUEST, M(SUBMIT), &submit.base);
    expect(&m, CHECK_CLIENT, BAD, "parallel.fsdp_shard_degree", "a degree that does not divide");
    spec.parallel_fsdp_shard_degree = 2;
    free(spec.model_path);
    spec.model_path = xstrdup("models/tiny");
    pack(&m, REQUEST, M(SUBMIT), &submit.base);
    expect(&m, CHECK_CLIENT, BAD, "model.path", "a relative path");
    free(spec.model_path);
    spec.model_path = xstrdup("/models/\x1b[31m");
    pack(&m, REQUEST, M(SUBMIT), &submit.base);
    expect(&m, CHECK_CLIENT, BAD, "spec.model_path", "a path that steers terminals");
    a_job_fini(&spec);

    Ballast__JobWaitRequest wait = BALLAST__JOB_WAIT_REQUEST__INIT;
    Ballast__JobState states[] = {BALLAST__JOB_STATE__JOB_RUNNING, 200};
    wait.job_id = 1;
    wait.states = states;
    wait.n_states = 2;
    pack(&m, REQUEST, M(JOB_WAIT), &wait.base);
    expect(&m, CHECK_CLIENT, BAD, "states[1]", "an unknown state in a list");
    wait.n_states = 1;
    char *assignments[] = {"checkpoint.keep=5", "checkpoint.keep=\x1b"};
    Ballast__JobSetRequest set = BALLAST__JOB_SET_REQUEST__INIT;
    set.assignments = assignments;
    set.n_assignments = 1;
    pack(&m, REQUEST, M(JOB_SET), &set.base);
    expect(&m, CHECK_CLIENT, BAD, "job_id", "settings of no job");
    set.job_id = 1;
    pack(&m, REQUEST, M(JOB_SET), &set.base);
    expect(&m, CHECK_CLIENT, -1, "", "good settings");
    set.n_assignments = 2;
    pack(&m, REQUEST, M(JOB_SET), &set.base);
    expect(&m, CHECK_CLIENT, BAD, "assignments[1]", "settings that steer terminals");
    set.n_assignments = 0;
    pack(&m, REQUEST, M(JOB_SET), &set.base);
    expect(&m, CHECK_CLIENT, BAD, "assignments", "no settings");

    wait.wait_ms = WAIT_MS_MAX + 1;
    pack(&m, REQUEST, M(JOB_WAIT), &wait.base);
    expect(&m, CHECK_CLIENT, BAD, "wait_ms", "a long wait");
}

/* ---- load, placements, the database ---------------------------------------------------------- */

/* 2 nodes x 3 experts in layers 1 and 3; 2 devices x 2 slots. */
struct balance {
    uint32_t tokens[2][6];
    Ballast__LayerLoad load[2], *loads[2];
    Ballast__LoadReport report;
    int32_t  experts[2][4];
    double   share[2][4];
    uint32_t home[2][3];
    Ballast__PlacementLayer layer[2], *layers[2];
    Ballast__Placement placement;
    Ballast__Prepare prepare;
};

static void balance_make(struct balance *b)
{
    static const int32_t experts[4] = {0, 1, 2, 0};
    static const double share[4] = {0.25, 1, 1, 0.75};
    static const uint32_t home[3] = {3, 1, 2};
    *b = (struct balance){0};
    ballast__load_report__init(&b->report);
    ballast__placement__init(&b->placement);
    ballast__prepare__init(&b->prepare);
    for (uint32_t i = 0; i < 2; i++) {
        ballast__layer_load__init(&b->load[i]);
        ballast__placement_layer__init(&b->layer[i]);
        memcpy(b->experts[i], experts, sizeof experts);
        memcpy(b->share[i], share, sizeof share);
        memcpy(b->home[i], home, sizeof home);
        b->load[i].layer = b->layer[i].layer = 1 + 2 * i;
        b->load[i].tokens = b->tokens[i];
        b->load[i].n_tokens = 6;
        b->layer[i].experts = b->experts[i];
        b->layer[i].share = b->share[i];
        b->layer[i].n_experts = b->layer[i].n_share = 4;
        b->layer[i].home = b->home[i];
        b->layer[i].n_home = 3;
        b->loads[i] = &b->load[i];
        b->layers[i] = &b->layer[i];
    }
    b->report.job_id = b->report.attempt = b->report.first_step = 1;
    b->report.last_step = 20;
    b->report.n_nodes = 2;
    b->report.n_experts = 3;
    b->report.layers = b->loads;
    b->report.n_layers = 2;
    b->placement.epoch = 2;
    b->placement.n_devices = b->placement.n_slots = 2;
    b->placement.layers = b->layers;
    b->placement.n_layers = 2;
    b->prepare.job_id = b->prepare.attempt = b->prepare.base_epoch = 1;
    b->prepare.placement = &b->placement;
}

enum balance_mistake {
    NO_MISTAKE, NO_JOB, NO_STEP, BACKWARDS, NO_EXPERTS, MANY_EXPERTS, FEWER_COUNTS, LAYER_TWICE,
    LAYER_BEYOND, NO_LAYERS, NOT_A_TIME, NOT_A_SPEED,
    SLOT_MISSING, SHARE_MISSING, EXPERT_BEYOND, EXPERT_NOWHERE, EXPERT_TWICE, HOME_ELSEWHERE,
    HOME_BEYOND, SHARE_NEGATIVE, SHARES_SHORT, MANY_SLOTS, PLAN_OLD, PLAN_EMPTY, OTHER_EXPERTS,
};

static void make_mistake(struct balance *b, enum balance_mistake which)
{
    static double speeds[2] = {1, 0};
    switch (which) {
    case NO_MISTAKE:    break;
    case NO_JOB:        b->report.job_id = 0; b->prepare.job_id = 0; break;
    case NO_STEP:       b->report.first_step = 0; break;
    case BACKWARDS:     b->report.first_step = 21; break;
    case NO_EXPERTS:    b->report.n_experts = 0; break;
    case MANY_EXPERTS:  b->report.n_experts = EXPERTS_MAX + 1; break;
    case FEWER_COUNTS:  b->load[1].n_tokens = 5; break;
    case LAYER_TWICE:   b->load[1].layer = 1; b->layer[1].layer = 1; break;
    case LAYER_BEYOND:  b->load[1].layer = LAYERS_MAX; b->layer[1].layer = LAYERS_MAX; break;
    case NO_LAYERS:     b->report.n_layers = 0; break;
    case NOT_A_TIME:    b->report.step_s = -1; break;
    case NOT_A_SPEED:   b->report.speed = speeds; b->report.n_speed = 2; break;
    case SLOT_MISSING:  b->layer[0].n_experts = 3; break;
    case SHARE_MISSING: b->layer[0].n_share = 3; break;
    case EXPERT_BEYOND: b->experts[0][2] = 3; break;
    case EXPERT_NOWHERE: b->experts[0][2] = -1; b->share[0][2] = 0; break;
    case EXPERT_TWICE:  b->experts[0][1] = 0; break;
    case HOME_ELSEWHERE: b->home[0][1] = 0; break;
    case HOME_BEYOND:   b->home[0][1] = 4; break;
    case SHARE_NEGATIVE: b->share[0][0] = -0.25; break;
    case SHARES_SHORT:  b->share[0][0] = 0.2; break;
    case MANY_SLOTS:
        b->placement.n_devices = RANKS_MAX;
        b->placement.n_slots = EXPERTS_MAX;
        break;
    case PLAN_OLD:      b->prepare.base_epoch = 2; break;
    case PLAN_EMPTY:    b->placement.n_layers = 0; break;
    case OTHER_EXPERTS: b->experts[1][1] = b->experts[1][3] = -1; b->share[1][0] = 1;
                        b->share[1][1] = b->share[1][3] = 0; b->layer[1].n_home = 1;
                        b->experts[1][2] = -1; b->share[1][2] = 0; b->home[1][0] = 0; break;
    }
}

static void loads_and_placements(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        enum balance_mistake mistake;
        const char *load_field, *prepare_field; /* NULL: accepted */
    } rows[] = {
        {"a good one", NO_MISTAKE, NULL, NULL},
        {"no job", NO_JOB, "job_id", "job_id"},
        {"no first step", NO_STEP, "first_step", NULL},
        {"a window that ends before it begins", BACKWARDS, "layers", NULL},
        {"no experts", NO_EXPERTS, "n_experts", NULL},
        {"more experts than any model has", MANY_EXPERTS, "n_experts", NULL},
        {"counts that do not fill the array", FEWER_COUNTS, "layers", NULL},
        {"a layer twice", LAYER_TWICE, "layers", "placement"},
        {"a layer beyond all", LAYER_BEYOND, "layers[1].layer", "placement.layers[1].layer"},
        {"no layer", NO_LAYERS, "layers", NULL},
        {"a time below 0", NOT_A_TIME, "layers", NULL},
        {"a device that stands still", NOT_A_SPEED, "layers", NULL},
        {"a slot too few", SLOT_MISSING, NULL, "placement"},
        {"a share too few", SHARE_MISSING, NULL, "placement"},
        {"an expert that is none", EXPERT_BEYOND, NULL, "placement"},
        {"an expert in no slot", EXPERT_NOWHERE, NULL, "placement"},
        {"an expert twice on a device", EXPERT_TWICE, NULL, "placement"},
        {"a home without its expert", HOME_ELSEWHERE, NULL, "placement"},
        {"a home beyond the slots", HOME_BEYOND, NULL, "placement"},
        {"a share below 0", SHARE_NEGATIVE, NULL, "placement"},
        {"shares that do not sum to 1", SHARES_SHORT, NULL, "placement"},
        {"more slots than any cluster has", MANY_SLOTS, NULL, "placement"},
        {"a plan that is not newer", PLAN_OLD, NULL, "placement"},
        {"a plan of nothing", PLAN_EMPTY, NULL, "placement"},
        {"layers of different experts", OTHER_EXPERTS, NULL, "placement"},
    };
    struct message m = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char *field[2] = {rows[i].load_field, rows[i].prepare_field};
        struct balance b;
        balance_make(&b);
        make_mistake(&b, rows[i].mistake);
        pack(&m, NOTICE, M(LOAD), &b.report.base);
        expect(&m, CHECK_WORKER, field[0] ? BALLAST__CODE__INVALID_ARGUMENT : -1,
               field[0] ? field[0] : "", rows[i].what);
        pack(&m, NOTICE, M(PREPARE), &b.prepare.base);
        expect(&m, CHECK_COORDINATOR, field[1] ? BALLAST__CODE__INVALID_ARGUMENT : -1,
               field[1] ? field[1] : "", rows[i].what);
    }
}

/* 92 layers of 896 experts on 8 nodes, every count of three bytes. */
static void the_largest_load_fits(void **state)
{
    (void)state;
    enum { LAYERS = 92, COUNTS = 896 };
    struct message m = {0};
    Ballast__LoadReport r = BALLAST__LOAD_REPORT__INIT;
    Ballast__LayerLoad layers[LAYERS], *pointers[LAYERS];
    static uint32_t tokens[8 * COUNTS];
    for (size_t i = 0; i < 8 * COUNTS; i++)
        tokens[i] = 1u << 20;
    for (uint32_t i = 0; i < LAYERS; i++) {
        ballast__layer_load__init(&layers[i]);
        layers[i].layer = i;
        layers[i].tokens = tokens;
        layers[i].n_tokens = 8 * COUNTS;
        pointers[i] = &layers[i];
    }
    r.job_id = r.attempt = r.first_step = r.last_step = 1;
    r.n_nodes = 8;
    r.n_experts = COUNTS;
    r.layers = pointers;
    r.n_layers = LAYERS;
    pack(&m, NOTICE, M(LOAD), &r.base);
    assert_true(m.frames[1].n_bytes > 1u << 20 && m.frames[1].n_bytes <= LOAD_BYTES_MAX);
    expect(&m, CHECK_WORKER, -1, "", "a large load");
}

static void requests_about_balancing_and_the_database(void **state)
{
    (void)state;
    enum { BAD = BALLAST__CODE__INVALID_ARGUMENT };
    struct message m = {0};
    static const struct {
        char *window;
        int32_t layer;
        const char *field;
    } rows[] = {
        {"1m", -1, ""}, {"1h", 0, ""}, {"all", 7, ""}, {"last", LAYERS_MAX - 1, ""}, {"", -1, ""},
        {"1d", -1, "window"}, {"1m ", -1, "window"}, {"1m", -2, "layer"},
        {"1m", LAYERS_MAX, "layer"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Ballast__ExpertsRequest r = BALLAST__EXPERTS_REQUEST__INIT;
        r.job_id = 1;
        r.window = rows[i].window;
        r.layer = rows[i].layer;
        pack(&m, REQUEST, M(EXPERTS), &r.base);
        expect(&m, CHECK_CLIENT, *rows[i].field ? BAD : -1, rows[i].field, rows[i].window);
    }
    char *longest = xcalloc(1, SQL_BYTES_MAX + 2);
    memset(longest, ' ', SQL_BYTES_MAX + 1);
    Ballast__DbQueryRequest query = BALLAST__DB_QUERY_REQUEST__INIT;
    pack(&m, REQUEST, M(DB_QUERY), &query.base);
    expect(&m, CHECK_CLIENT, BAD, "sql", "no SQL");
    query.sql = longest;
    pack(&m, REQUEST, M(DB_QUERY), &query.base);
    expect(&m, CHECK_CLIENT, BAD, "sql", "long SQL");
    query.sql = "SELECT '\x1b'";
    pack(&m, REQUEST, M(DB_QUERY), &query.base);
    expect(&m, CHECK_CLIENT, BAD, "sql", "SQL that steers terminals");
    query.sql = "SELECT 1\n\tFROM jobs";
    pack(&m, REQUEST, M(DB_QUERY), &query.base);
    expect(&m, CHECK_CLIENT, -1, "", "SQL of several lines");
    free(longest);

    Ballast__DbBackupRequest backup = BALLAST__DB_BACKUP_REQUEST__INIT;
    static char *const paths[] = {"", "backup.db", "../b", "~/b"};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        backup.path = paths[i];
        pack(&m, REQUEST, M(DB_BACKUP), &backup.base);
        expect(&m, CHECK_CLIENT, BAD, "path", paths[i]);
    }
    backup.path = "/backups/b.db";
    pack(&m, REQUEST, M(DB_BACKUP), &backup.base);
    expect(&m, CHECK_CLIENT, -1, "", "a good path");

    Ballast__RebalanceRequest rebalance = BALLAST__REBALANCE_REQUEST__INIT;
    pack(&m, REQUEST, M(REBALANCE_PLAN), &rebalance.base);
    expect(&m, CHECK_CLIENT, BAD, "job_id", "a plan for no job");
    rebalance.job_id = 1;
    pack(&m, REQUEST, M(REBALANCE_APPLY), &rebalance.base);
    expect(&m, CHECK_CLIENT, -1, "", "a good apply");
}

static void answers_are_checked_too(void **state)
{
    (void)state;
    struct message m = {0};
    Ballast__Status ok = BALLAST__STATUS__INIT;
    Ballast__Job job = BALLAST__JOB__INIT;
    Ballast__JobReply reply = BALLAST__JOB_REPLY__INIT;
    reply.job = &job;
    job.state = 88; /* a newer coordinator's word */
    pack(&m, BALLAST__KIND__KIND_RESPONSE, M(JOB_WAIT), &reply.base);
    expect(&m, CHECK_COORDINATOR, BALLAST__CODE__INVALID_ARGUMENT, "", "no status");
    m.envelope = (Ballast__Envelope)BALLAST__ENVELOPE__INIT;
    m.envelope.kind = BALLAST__KIND__KIND_RESPONSE;
    m.envelope.method = M(JOB_WAIT);
    m.envelope.request_id = 7;
    m.envelope.status = &ok;
    wire_pack(&m.envelope, &reply.base, &m.arena, m.frames);
    m.n_frames = 2;
    struct checked_message checked;
    Ballast__Status status;
    assert_int_equal(check_message(m.frames, 2, CHECK_COORDINATOR, &m.arena, &checked, &status), 0);
    assert_int_equal(((Ballast__JobReply *)checked.payload)->job->state, 0);
    /* A payload in two frames, of the coordinator alone. */
    size_t n = m.frames[1].n_bytes, half = n / 2;
    struct wire_bytes parts[] = {m.frames[0], {m.frames[1].bytes, half},
                                 {m.frames[1].bytes + half, n - half}};
    assert_true(half > 0);
    assert_int_equal(check_message(parts, 3, CHECK_COORDINATOR, &m.arena, &checked, &status), 0);
    assert_int_equal(((Ballast__JobReply *)checked.payload)->job->state, 0);
    assert_int_equal(check_message(parts, 3, CHECK_WORKER, &m.arena, &checked, &status), -EPROTO);
    parts[2].n_bytes--;
    assert_int_equal(check_message(parts, 3, CHECK_COORDINATOR, &m.arena, &checked, &status),
                     -EINVAL);
    job.name = "\x1b]0;owned\x07";
    wire_pack(&m.envelope, &reply.base, &m.arena, m.frames);
    expect(&m, CHECK_COORDINATOR, BALLAST__CODE__INVALID_ARGUMENT, "job.name", "a hostile answer");
}

static void messages_of_a_trainer(void **state)
{
    (void)state;
    struct arena arena = {0};
    struct err err = {0};
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT, *out;
    Ballast__Start start = BALLAST__START__INIT;
    Ballast__JobSpec spec;
    Ballast__GangMember member = BALLAST__GANG_MEMBER__INIT, *gang[] = {&member};
    uint8_t bytes[4096] = {0};
    assert_int_equal(check_trainer_message(bytes, 0, &arena, &out, &err), -EPROTO);
    a_job_init(&spec, 1);
    member.worker = "w0";
    start.job_id = start.attempt = 1;
    start.gang = gang;
    start.n_gang = 1;
    start.spec = &spec;
    start.coll_id = (ProtobufCBinaryData){16, key};
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &start;
    size_t n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), 0);
    start.rank = 1;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), -EINVAL);
    assert_non_null(strstr(err.text, "rank"));

    Ballast__RankState rank = BALLAST__RANK_STATE__INIT;
    rank.job_id = rank.attempt = 1;
    rank.phase = BALLAST__RANK_PHASE__RANK_SPAWNED;
    rank.data_address = "tcp://10.0.0.1:5000"; /* without its key */
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &rank;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), -EINVAL);
    assert_non_null(strstr(err.text, "data_key"));

    Ballast__Settings settings = BALLAST__SETTINGS__INIT;
    settings.job_id = settings.attempt = settings.revision = 1;
    settings.spec = &spec;
    ballast__trainer_message__init(&m);
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS;
    m.settings = &settings;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), 0);
    settings.revision = 0;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), -EINVAL);
    assert_non_null(strstr(err.text, "revision"));
    settings.revision = 1;
    spec.checkpoint_every_steps = 0;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), -EINVAL);
    assert_non_null(strstr(err.text, "checkpoint.every_steps"));

    struct balance b;
    balance_make(&b);
    b.share[1][0] = 0.5;
    ballast__trainer_message__init(&m);
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_PREPARE;
    m.prepare = &b.prepare;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), -EINVAL);
    assert_non_null(strstr(err.text, "layer 3"));
    b.share[1][0] = 0.25;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), 0);
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_LOAD;
    m.load = &b.report;
    b.load[0].n_tokens = 1;
    n = ballast__trainer_message__pack(&m, bytes);
    assert_int_equal(check_trainer_message(bytes, n, &arena, &out, &err), -EINVAL);
    a_job_fini(&spec);
    arena_fini(&arena);
}

/* Any bytes whatever: an answer, never a crash. */
static void noise(void **state)
{
    (void)state;
    unsigned seed = (unsigned)test_seed();
    struct message m = {0};
    Ballast__SubmitRequest submit = BALLAST__SUBMIT_REQUEST__INIT;
    Ballast__JobSpec spec;
    a_job_init(&spec, 2);
    submit.spec = &spec;
    for (int i = 0; i < 20000; i++) {
        pack(&m, REQUEST, M(SUBMIT), &submit.base);
        for (int k = 0; k < 1 + i % 8; k++) {
            struct wire_bytes *f = &m.frames[rand_r(&seed) % 2];
            if (f->n_bytes > WIRE_PRELUDE_BYTES)
                ((uint8_t *)f->bytes)[rand_r(&seed) % f->n_bytes] = (uint8_t)rand_r(&seed);
        }
        struct checked_message checked;
        Ballast__Status status;
        check_message(m.frames, 2, CHECK_CLIENT | CHECK_WORKER, &m.arena, &checked, &status);
        arena_reset(&m.arena);
    }
    a_job_fini(&spec);
    arena_fini(&m.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frames_preludes_and_envelopes),
        cmocka_unit_test(both_versions_are_named),
        cmocka_unit_test(methods_senders_and_keys),
        cmocka_unit_test(fields_of_notices),
        cmocka_unit_test(fields_of_requests),
        cmocka_unit_test(loads_and_placements),
        cmocka_unit_test(the_largest_load_fits),
        cmocka_unit_test(requests_about_balancing_and_the_database),
        cmocka_unit_test(answers_are_checked_too),
        cmocka_unit_test(messages_of_a_trainer),
        cmocka_unit_test(noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
