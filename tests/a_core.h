/* a_core.h - for tests of the coordinator's core: one, its log and its newest turn */
#ifndef TESTS_A_CORE_H
#define TESTS_A_CORE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/mem.h"
#include "coordinator/coord.h"

#define M(x)     BALLAST__METHOD__METHOD_##x
#define PHASE(x) BALLAST__RANK_PHASE__RANK_##x

#define BENCH_PEERS       32u
#define BENCH_RECORDS_MAX 512u

struct bench {
    struct coord    *c;
    struct turn      turn;
    uint64_t         now_ns;
    uint64_t         seq[BENCH_PEERS], life[BENCH_PEERS]; /* of the peers' messages */
    bool             is_limited; /* the user, to his own jobs */
    const char      *user;       /* NULL: ann */
    Ballast__Record *log[BENCH_RECORDS_MAX];
    size_t           n_log, n_before; /* n_before: as the test keeps it */
};

static inline void begin(struct bench *b)
{
    turn_fini(&b->turn);
    coord_begin(b->c, &b->turn, b->now_ns, (int64_t)b->now_ns);
}

/* What the shell does with a turn: its records are committed, which the copies stand for. */
static inline void finish(struct bench *b)
{
    coord_tick(b->c, &b->turn);
    for (size_t i = 0; i < b->turn.n_records; i++) {
        size_t n = ballast__record__get_packed_size(b->turn.records[i]);
        uint8_t *bytes = xcalloc(1, n);
        ballast__record__pack(b->turn.records[i], bytes);
        assert_true(b->n_log < BENCH_RECORDS_MAX);
        b->log[b->n_log++] = ballast__record__unpack(NULL, n, bytes);
        free(bytes);
    }
    coord_committed(b->c, coord_last_seq(b->c));
}

static inline void start(struct bench *b)
{
    struct coord_config config = coord_config_default();
    struct err err;
    config.version = "test";
    b->c = coord_create(&config);
    for (size_t i = 0; i < b->n_log; i++)
        assert_int_equal(coord_apply(b->c, b->log[i], &err), 0);
    begin(b);
    coord_start(b->c, &b->turn);
    finish(b);
}

static inline void stop(struct bench *b)
{
    turn_fini(&b->turn);
    coord_destroy(b->c);
}

static inline struct bench *bench_create(void)
{
    struct bench *b = xcalloc(1, sizeof *b);
    b->now_ns = 1000 * NS_PER_S;
    start(b);
    return b;
}

static inline int teardown(void **state)
{
    struct bench *b = *state;
    stop(b);
    for (size_t i = 0; i < b->n_log; i++)
        ballast__record__free_unpacked(b->log[i], NULL);
    free(b);
    return 0;
}

/* What the shell does before a request about a job that has ended. */
static inline void recall(struct bench *b, job_id job)
{
    Ballast__Record *records[BENCH_RECORDS_MAX];
    size_t n = 0;
    struct err err;
    for (size_t i = 0; i < b->n_log; i++)
        if (b->log[i]->job_id == job)
            records[n++] = b->log[i];
    assert_int_equal(coord_recall(b->c, records, n, &err), 0);
}

/* key: of idempotency, 0: none. */
static inline void message_with(struct bench *b, uint64_t peer, Ballast__Method method,
                                uint8_t key, const ProtobufCMessage *payload)
{
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    uint8_t bytes[IDEMPOTENCY_KEY_BYTES];
    memset(bytes, key, sizeof bytes);
    bool is_request = method < M(HEARTBEAT);
    e.kind = is_request ? BALLAST__KIND__KIND_REQUEST : BALLAST__KIND__KIND_NOTICE;
    e.method = method;
    e.request_id = 1;
    e.worker_epoch = b->life[peer];
    e.seq = ++b->seq[peer];
    if (key)
        e.idempotency_key = (ProtobufCBinaryData){.len = sizeof bytes, .data = bytes};
    begin(b);
    for (job_id job; (job = coord_wants_job(b->c, method, payload));)
        recall(b, job);
    b->turn.is_limited = b->is_limited;
    coord_message(b->c, &b->turn, peer, b->user ? b->user : "ann", &e, payload);
    finish(b);
}

/* The first message of that method to that peer in the newest turn, or NULL. */
static inline const struct outgoing *sent(const struct bench *b, uint64_t peer,
                                          Ballast__Method method)
{
    for (size_t i = 0; i < b->turn.n_out; i++)
        if (b->turn.out[i].peer == peer && b->turn.out[i].envelope.method == method)
            return &b->turn.out[i];
    return NULL;
}

#endif
