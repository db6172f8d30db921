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

/* ---- the frames ------------------------------------------------------------------------------- */

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
        {"a request of a notice", REQUEST, M(GOODBYE), CHECK_WORKER, BALLAST__CODE__INVALID_ARGUMENT},
        {"a kind nobody knows", 77, M(PING), CHECK_CLIENT, BALLAST__CODE__INVALID_ARGUMENT},
        {"a client that says STOP", NOTICE, M(STOP), CHECK_CLIENT, BALLAST__CODE__PERMISSION_DENIED},
        {"a client that reports", NOTICE, M(HEARTBEAT), CHECK_CLIENT, BALLAST__CODE__PERMISSION_DENIED},
        {"a worker that lists jobs", REQUEST, M(JOB_LIST), CHECK_WORKER, BALLAST__CODE__PERMISSION_DENIED},
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

/* ---- payloads ----------------------------------------------------------------------------------- */

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
    wait.wait_ms = WAIT_MS_MAX + 1;
    pack(&m, REQUEST, M(JOB_WAIT), &wait.base);
    expect(&m, CHECK_CLIENT, BAD, "wait_ms", "a long wait");
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
    a_job_fini(&spec);
    arena_fini(&arena);
}

/* Any bytes whatever: an answer, never a crash. */
static void noise(void **state)
{
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
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
        cmocka_unit_test(answers_are_checked_too),
        cmocka_unit_test(messages_of_a_trainer),
        cmocka_unit_test(noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
