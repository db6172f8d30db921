/* test_hostile.c - the coordinator's core under well-formed messages that make no sense
 *
 * Peers that pass every check of check.h say anything in any order: of jobs that are not theirs,
 * of lives and attempts that were or never will be, with numbers at their limits. The core may
 * refuse or obey; it must not end, and its records must tell the same state again. Messages are
 * made from their own descriptions, so a new field is tried as soon as it is there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mix.h"
#include "coordinator/coord.h"
#include "proto/check.h"
#include "tests/a_job.h"

#define M(x) BALLAST__METHOD__METHOD_##x
#define N_PEERS 7u
#define METHODS 80u
#define MESSAGES_PER_SEED 1500
#define WINDOW 5u

struct bench {
    struct coord *c;
    struct turn turn;
    struct arena arena; /* of the message under way */
    uint64_t now_ns, random;
    uint64_t seq[N_PEERS];
    Ballast__Record **log;
    size_t n_log, n_sent, n_taken, n_running, n_plans;
    Ballast__RankState told[N_PEERS]; /* to start: job, attempt and rank */
    uint64_t peer; /* who speaks */
    Ballast__JobSpec spec;
};

/* ---- chance --------------------------------------------------------------------------------- */

static uint64_t draw(struct bench *b)
{
    return mix_next(&b->random);
}

static uint64_t below(struct bench *b, uint64_t n)
{
    return draw(b) % n;
}

static uint64_t a_number(struct bench *b)
{
    static const uint64_t limits[] = {UINT64_MAX, UINT32_MAX, INT32_MAX, 1u << 20, INT64_MAX, 100};
    return below(b, 12) ? below(b, 5) : limits[below(b, sizeof limits / sizeof *limits)];
}

static char *a_text(struct bench *b)
{
    static char *const texts[] = {"", "w0", "w1", "w2", "w3", "n1", "checkpoint.keep=5",
                                  "scheduling.priority=2", "because", "cpu"};
    return texts[below(b, sizeof texts / sizeof *texts)];
}

/* ---- messages ------------------------------------------------------------------------------- */

static ProtobufCMessage *make(struct bench *b, const ProtobufCMessageDescriptor *d, int depth);

static size_t width_of(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE: return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:   return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:  return 8;
    default:                      return 4;
    }
}

static void put_one(struct bench *b, const ProtobufCFieldDescriptor *f, void *at, int depth)
{
    static const double numbers[] = {0, 1, 0.5, -1, 1e300, NAN, INFINITY};
    const ProtobufCEnumDescriptor *e = f->descriptor;
    size_t width = width_of(f->type);
    uint64_t x = a_number(b);
    switch (f->type) {
    case PROTOBUF_C_TYPE_STRING:
        *(char **)at = a_text(b);
        break;
    case PROTOBUF_C_TYPE_MESSAGE:
        *(ProtobufCMessage **)at = make(b, f->descriptor, depth + 1);
        break;
    case PROTOBUF_C_TYPE_BYTES: {
        ProtobufCBinaryData *bytes = at;
        bytes->len = below(b, 4) ? 16 : below(b, 40);
        bytes->data = arena_alloc(&b->arena, 40);
        memset(bytes->data, (int)below(b, 3), 40);
        break;
    }
    case PROTOBUF_C_TYPE_DOUBLE:
        *(double *)at = numbers[below(b, sizeof numbers / sizeof *numbers)];
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        *(float *)at = (float)numbers[below(b, 4)];
        break;
    case PROTOBUF_C_TYPE_BOOL:
        *(protobuf_c_boolean *)at = below(b, 2) == 1;
        break;
    case PROTOBUF_C_TYPE_ENUM:
        *(int *)at = e->values[below(b, e->n_values)].value;
        break;
    default:
        memcpy(at, &x, width);
        break;
    }
}

static void put_list(struct bench *b, const ProtobufCFieldDescriptor *f, ProtobufCMessage *m,
                     int depth)
{
    size_t n = below(b, 4), width = width_of(f->type);
    char *list = arena_alloc(&b->arena, (n + 1) * width);
    for (size_t i = 0; i < n; i++)
        put_one(b, f, list + i * width, depth);
    *(size_t *)((char *)m + f->quantifier_offset) = n;
    *(void **)((char *)m + f->offset) = list;
}

/* Of the rank that the peer was told to start: so that jobs come to run at all. */
static void make_true(Ballast__RankState *s, const Ballast__RankState *told)
{
    s->job_id = told->job_id;
    s->attempt = told->attempt;
    s->rank = told->rank;
    s->placement_epoch %= 3;
    s->data_address = (char *)"";
    s->data_key.len = 0;
    if (s->phase > BALLAST__RANK_PHASE__RANK_RUNNING && s->exit_code % 4)
        s->phase = BALLAST__RANK_PHASE__RANK_RUNNING;
}

static ProtobufCMessage *make(struct bench *b, const ProtobufCMessageDescriptor *d, int depth)
{
    if (d == &ballast__job_spec__descriptor)
        return &b->spec.base;
    ProtobufCMessage *m = arena_alloc(&b->arena, d->sizeof_message);
    protobuf_c_message_init(d, m);
    for (unsigned i = 0; i < d->n_fields && depth < 4; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF || !below(b, 4))
            continue;
        if (f->label == PROTOBUF_C_LABEL_REPEATED)
            put_list(b, f, m, depth);
        else
            put_one(b, f, (char *)m + f->offset, depth);
    }
    if (d == &ballast__rank_state__descriptor && below(b, 4))
        make_true((Ballast__RankState *)m, &b->told[b->peer]);
    return m;
}

/* Loads that fit each other, as random ones hardly do. */
static ProtobufCMessage *make_load(struct bench *b)
{
    Ballast__LoadReport *r = (Ballast__LoadReport *)make(b, &ballast__load_report__descriptor, 3);
    Ballast__LayerLoad *layer = arena_alloc(&b->arena, sizeof *layer);
    ballast__layer_load__init(layer);
    r->n_nodes = 1;
    r->n_experts = below(b, 8) ? 4 : 1 + (uint32_t)below(b, 5);
    if (below(b, 8)) { /* a window like those of the jobs */
        r->first_step = 1 + WINDOW * below(b, 6);
        r->last_step = r->first_step + WINDOW - 1;
        r->step_s = 0.1;
        r->row_s = 1e-8;
        r->expert_bytes = 1000;
        r->state_bytes = 0;
        r->link_bytes_per_s = 0;
        r->device_imbalance = 1.5;
    }
    r->layers = arena_alloc(&b->arena, sizeof *r->layers);
    r->layers[0] = layer;
    r->n_layers = 1;
    r->n_speed = 0;
    if (below(b, 4)) {
        r->job_id = b->told[b->peer].job_id;
        r->attempt = b->told[b->peer].attempt;
        r->placement_epoch %= 3;
    }
    layer->layer = 1 + (uint32_t)below(b, 2);
    layer->n_tokens = r->n_experts;
    layer->tokens = arena_alloc(&b->arena, r->n_experts * sizeof *layer->tokens);
    for (uint32_t e = 0; e < r->n_experts; e++)
        layer->tokens[e] = below(b, 4) ? 1000000 * (1 + (uint32_t)e % 3) : (uint32_t)a_number(b);
    return &r->base;
}

/* ---- turns ---------------------------------------------------------------------------------- */

static void keep_records(struct bench *b)
{
    for (size_t i = 0; i < b->turn.n_records; i++) {
        size_t n = ballast__record__get_packed_size(b->turn.records[i]);
        uint8_t *bytes = xcalloc(1, n);
        ballast__record__pack(b->turn.records[i], bytes);
        if (!(b->n_log & (b->n_log - 1)))
            b->log = xrealloc(b->log, (b->n_log ? 2 * b->n_log : 1) * sizeof *b->log);
        b->log[b->n_log++] = ballast__record__unpack(NULL, n, bytes);
        const Ballast__Record *r = b->log[b->n_log - 1];
        assert_non_null(r);
        b->n_running += r->what_case == BALLAST__RECORD__WHAT_STATE &&
                        r->state->state == BALLAST__JOB_STATE__JOB_RUNNING;
        b->n_plans += r->what_case == BALLAST__RECORD__WHAT_PLAN;
        free(bytes);
    }
    coord_committed(b->c, coord_last_seq(b->c));
}

static void begin(struct bench *b)
{
    coord_begin(b->c, &b->turn, b->now_ns, (int64_t)b->now_ns);
}

static void finish(struct bench *b)
{
    coord_tick(b->c, &b->turn);
    keep_records(b);
    for (size_t i = 0; i < b->turn.n_out; i++) {
        const struct outgoing *o = &b->turn.out[i];
        const Ballast__Start *start = (const Ballast__Start *)o->payload;
        if (o->envelope.method == M(START) && o->peer < N_PEERS) {
            b->told[o->peer].job_id = start->job_id;
            b->told[o->peer].attempt = start->attempt;
            b->told[o->peer].rank = start->rank;
        }
    }
    turn_fini(&b->turn);
}

/* What the shell does not give to the core, and what it does before it does. */
static bool is_read_from_the_store(const Ballast__Envelope *e, const ProtobufCMessage *payload)
{
    static const Ballast__Method reads[] = {
        M(JOB_SHOW), M(EVENTS), M(LOGS), M(METRICS), M(EXPERTS), M(PLACEMENT),
        M(REBALANCE_HISTORY), M(DB_QUERY), M(DB_BACKUP),
    };
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++)
        if (e->method == reads[i])
            return true;
    return e->method == M(JOB_LIST) && ((const Ballast__JobListRequest *)payload)->all_states;
}

static bool recall(struct bench *b, job_id job)
{
    Ballast__Record **records = xcalloc(b->n_log + 1, sizeof *records);
    size_t n = 0;
    struct err err;
    for (size_t i = 0; i < b->n_log; i++)
        if (b->log[i]->job_id == job)
            records[n++] = b->log[i];
    if (n && coord_recall(b->c, records, n, &err) < 0)
        fail_msg("job %llu: %s", (unsigned long long)job, err.text);
    free(records);
    return n > 0;
}

static void deliver(struct bench *b, uint64_t peer, const struct checked_message *m)
{
    begin(b);
    if (m->method->method == M(LOG)) {
        const Ballast__LogChunk *chunk = (const Ballast__LogChunk *)m->payload;
        if (coord_accepts_log(b->c, peer, chunk))
            coord_ack_log(b->c, &b->turn, peer, chunk, chunk->offset);
    } else {
        for (job_id job; (job = coord_wants_job(b->c, m->method->method, m->payload));)
            if (!recall(b, job))
                break;
        coord_message(b->c, &b->turn, peer, "ann", m->envelope, m->payload);
    }
    finish(b);
}

/* Workers speak most, of their own life mostly; a hello begins another one now and then. */
static void say_something(struct bench *b)
{
    static const Ballast__Method often[] = {M(RANK_STATE), M(HEARTBEAT), M(HELLO), M(SUBMIT),
                                            M(RANK_STATE), M(LOAD), M(STEPS), M(JOB_REQUEUE)};
    uint64_t peer = b->peer = below(b, N_PEERS);
    Ballast__Method method = (Ballast__Method)below(b, METHODS);
    if (below(b, 3))
        method = often[below(b, sizeof often / sizeof *often)];
    const struct check_method *row = check_method(method);
    if (!row)
        return;
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    uint8_t key[IDEMPOTENCY_KEY_BYTES];
    memset(key, (int)below(b, 200), sizeof key);
    e.kind = row->kind;
    e.method = method;
    e.request_id = 1 + below(b, 3);
    e.worker_epoch = below(b, 5) ? 1 : a_number(b);
    e.coordinator_epoch = below(b, 3) ? coord_epoch(b->c) : a_number(b);
    e.seq = below(b, 5) ? ++b->seq[peer] : a_number(b);
    if (row->needs_key)
        e.idempotency_key = (ProtobufCBinaryData){.len = sizeof key, .data = key};
    a_job_init(&b->spec, 1 + (uint32_t)below(b, 3));
    b->spec.scheduling_priority = (int32_t)below(b, 3);
    b->spec.parallel_expert_parallel_degree = b->spec.parallel_workers;
    b->spec.rebalance_window_steps = WINDOW;
    if (!below(b, 4))
        b->spec.scheduling_time_limit_s = 1 + below(b, 20);
    ProtobufCMessage *payload = method == M(LOAD) && below(b, 4) ? make_load(b)
                                                                 : make(b, row->request, 0);
    struct wire_bytes frames[WIRE_FRAMES];
    struct checked_message m;
    Ballast__Status status;
    wire_pack(&e, payload, &b->arena, frames);
    b->n_sent++;
    if (check_message(frames, WIRE_FRAMES, CHECK_CLIENT | CHECK_WORKER, &b->arena, &m,
                      &status) == 0 && !is_read_from_the_store(m.envelope, m.payload)) {
        b->n_taken++;
        deliver(b, peer, &m);
    }
    a_job_fini(&b->spec);
}

static struct coord *replay(const struct bench *b)
{
    struct coord_config config = coord_config_default();
    struct coord *c = coord_create(&config);
    struct err err;
    for (size_t i = 0; i < b->n_log; i++)
        if (coord_apply(c, b->log[i], &err) < 0)
            fail_msg("record %zu of %zu does not follow: %s", i, b->n_log, err.text);
    return c;
}

/* A new coordinator from the records of the one before. */
static void restart(struct bench *b)
{
    coord_destroy(b->c);
    b->c = replay(b);
    begin(b);
    coord_start(b->c, &b->turn);
    finish(b);
}

static void converse(struct bench *b, uint64_t seed)
{
    *b = (struct bench){.random = seed, .now_ns = 1000 * NS_PER_S};
    restart(b);
    for (int i = 0; i < MESSAGES_PER_SEED; i++) {
        b->now_ns += below(b, 8) ? below(b, NS_PER_S) : below(b, 30 * NS_PER_S);
        arena_reset(&b->arena);
        if (below(b, 50)) {
            say_something(b);
        } else if (below(b, 4)) {
            begin(b);
            coord_peer_gone(b->c, &b->turn, below(b, N_PEERS));
            finish(b);
        } else {
            restart(b);
        }
    }
    struct coord *again = replay(b);
    char *dump = coord_dump(b->c), *dump_again = coord_dump(again);
    assert_string_equal(dump, dump_again);
    free(dump);
    free(dump_again);
    coord_destroy(again);
}

static void bench_fini(struct bench *b)
{
    coord_destroy(b->c);
    for (size_t i = 0; i < b->n_log; i++)
        ballast__record__free_unpacked(b->log[i], NULL);
    free(b->log);
    arena_fini(&b->arena);
}

static void nothing_that_peers_say_ends_the_core(void **state)
{
    (void)state;
    const char *text = getenv("HOSTILE_SEEDS"), *from = getenv("HOSTILE_FROM");
    uint64_t n_seeds = text ? strtoull(text, NULL, 10) : 40, n_sent = 0, n_taken = 0;
    uint64_t n_log = 0, n_running = 0, n_plans = 0;
    uint64_t first = from ? strtoull(from, NULL, 10) : 1;
    for (uint64_t seed = first; seed < first + n_seeds; seed++) {
        struct bench b;
        if (text)
            fprintf(stderr, "seed %llu\r", (unsigned long long)seed);
        converse(&b, seed);
        n_sent += b.n_sent;
        n_taken += b.n_taken;
        n_log += b.n_log;
        n_running += b.n_running;
        n_plans += b.n_plans;
        bench_fini(&b);
    }
    print_message("%llu seeds: %llu messages, %llu of them taken, %llu records, %llu jobs that "
                  "ran, %llu plans\n",
                  (unsigned long long)n_seeds, (unsigned long long)n_sent,
                  (unsigned long long)n_taken, (unsigned long long)n_log,
                  (unsigned long long)n_running, (unsigned long long)n_plans);
    assert_true(n_taken > n_sent / 4 && n_running > n_seeds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_that_peers_say_ends_the_core),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
