/* test_store_load.c - expert load over virtual weeks: every token is covered once, old ones go */
#include "tests/a_tables.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/mem.h"
#include "coordinator/store_bind.h"
#include "coordinator/store_counts.h"
#include "coordinator/store_load.h"
#include "tests/seed.h"

#define S_NS ((int64_t)NS_PER_S)
#define HOUR_NS (3600 * S_NS)

enum { LAYERS = 2, EXPERTS = 5, JOB = 7 };

struct bench {
    char folder[64];
    struct store_tables t;
    uint64_t step;    /* of the last report */
    int64_t  now_ns;
    uint64_t sent[LAYERS][EXPERTS]; /* in all */
    uint64_t rerouted[LAYERS], dropped[LAYERS];
};

static void bench_make(struct bench *b)
{
    *b = (struct bench){.folder = "/tmp/test_store_load.XXXXXX", .now_ns = 1000 * HOUR_NS};
    tables_make(&b->t, b->folder);
}

static void bench_remove(struct bench *b)
{
    tables_remove(&b->t, b->folder);
}

struct report {
    uint32_t tokens[LAYERS][2 * EXPERTS];
    Ballast__LayerLoad layer[LAYERS], *layers[LAYERS];
    Ballast__LoadReport message;
};

/* Layers 1 and 3, steps of `n_steps` after the last ones. */
static void report_make(struct report *r, struct bench *b, uint32_t n_nodes, uint32_t base)
{
    *r = (struct report){0};
    ballast__load_report__init(&r->message);
    r->message.job_id = JOB;
    r->message.attempt = 1;
    r->message.first_step = b->step + 1;
    r->message.last_step = b->step += 20;
    r->message.n_nodes = n_nodes;
    r->message.n_experts = EXPERTS;
    r->message.device_imbalance = 1.5;
    r->message.layers = r->layers;
    r->message.n_layers = LAYERS;
    for (uint32_t l = 0; l < LAYERS; l++) {
        ballast__layer_load__init(&r->layer[l]);
        r->layer[l].layer = 1 + 2 * l;
        r->layer[l].tokens = r->tokens[l];
        r->layer[l].n_tokens = n_nodes * EXPERTS;
        r->layer[l].rerouted = l * (b->step % 7);
        r->layer[l].dropped = b->step / 20;
        r->layers[l] = &r->layer[l];
        for (uint32_t i = 0; i < n_nodes * EXPERTS; i++)
            r->tokens[l][i] = base * (l + 1) + i;
    }
}

static void store(struct bench *b, const struct report *r)
{
    struct turn_load load = {JOB, &r->message};
    struct err err = {0};
    assert_int_equal(db_run(tables_statement(&b->t, S_STATS_BEGIN), &err), 0);
    if (load_write(&b->t, &load, b->now_ns, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(db_run(tables_statement(&b->t, S_STATS_COMMIT), &err), 0);
}

static void send(struct bench *b, uint32_t n_nodes, uint32_t base)
{
    struct report r;
    report_make(&r, b, n_nodes, base);
    store(b, &r);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t i = 0; i < n_nodes * EXPERTS; i++)
            b->sent[l][i % EXPERTS] += r.tokens[l][i];
    for (uint32_t l = 0; l < LAYERS; l++) {
        b->rerouted[l] += r.layer[l].rerouted;
        b->dropped[l] += r.layer[l].dropped;
    }
}

/* How many rounds it took. */
static int tend(struct bench *b)
{
    struct err err = {0};
    bool more = true, any;
    int n = 0;
    for (; more; n++)
        if (load_tend(&b->t, b->now_ns, &more, &any, &err) < 0)
            fail_msg("%s", err.text);
    return n;
}

/* The first cell of a person's query. */
static char *ask(struct bench *b, const char *format, ...)
{
    char sql[512];
    va_list args;
    va_start(args, format);
    vsnprintf(sql, sizeof sql, format, args);
    va_end(args);
    struct store_read r = ask_tables(&b->t, sql, 1000);
    if (r.rc < 0)
        fail_msg("%s: %s", sql, r.err.text);
    assert_true(r.n_rows > 0);
    char *cell = xstrdup(r.rows[0]->is_null[0] ? "NULL" : r.rows[0]->cells[0]);
    store_read_fini(&r);
    return cell;
}

static void expect(struct bench *b, const char *expected, const char *sql)
{
    char *got = ask(b, "%s", sql);
    if (strcmp(got, expected))
        fail_msg("%s: %s, expected %s", sql, got, expected);
    free(got);
}

static uint64_t ask_number(struct bench *b, const char *sql)
{
    char *got = ask(b, "%s", sql);
    uint64_t x = strtoull(got, NULL, 10);
    free(got);
    return x;
}

static void say_job(struct bench *b)
{
    Ballast__Record r = BALLAST__RECORD__INIT;
    Ballast__RecordSubmitted submitted = BALLAST__RECORD_SUBMITTED__INIT;
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    struct err err = {0};
    r.seq = 1;
    r.at_ns = b->now_ns;
    r.job_id = JOB;
    r.what_case = BALLAST__RECORD__WHAT_SUBMITTED;
    r.submitted = &submitted;
    submitted.spec = &spec;
    spec.name = "hybrid";
    spec.rebalance_auto = true;
    spec.parallel_expert_parallel_degree = 2;
    if (write_record(&b->t, &r, &err) < 0)
        fail_msg("%s", err.text);
}

static struct store_read read_loads_of(struct bench *b, enum store_window window, int32_t layer)
{
    struct store_read r = {.kind = STORE_LOADS, .job = JOB, .window = window, .layer = layer};
    read_run(&b->t, &r);
    if (r.rc < 0)
        fail_msg("%s", r.err.text);
    return r;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void counts_are_as_narrow_as_they_can_be(void **state)
{
    (void)state;
    static const struct {
        uint64_t most;
        uint32_t width;
    } rows[] = {{0, 1}, {255, 1}, {256, 2}, {65535, 2}, {65536, 4}, {UINT32_MAX, 4},
                {(uint64_t)UINT32_MAX + 1, 8}, {UINT64_MAX, 8}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint64_t counts[3] = {1, rows[i].most, 0}, sums[3] = {0};
        uint8_t bytes[24];
        assert_int_equal(counts_width(counts, 3), rows[i].width);
        counts_pack(counts, 3, rows[i].width, bytes);
        assert_true(counts_at(bytes, rows[i].width, 1) == rows[i].most);
        counts_add(bytes, rows[i].width, 1, 3, sums);
        assert_memory_equal(sums, counts, sizeof sums);
    }
    assert_true(counts_imbalance((uint64_t[]){0, 0}, 2) == 1);
    assert_true(counts_imbalance((uint64_t[]){3, 1}, 2) == 1.5);
}

static void one_row_per_layer_window_and_expert(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    send(&b, 1, 100);
    b.now_ns += S_NS;
    send(&b, 2, 70000);
    expect(&b, "30", "SELECT count(*) FROM expert_load"); /* 2 x 5, then 2 x 2 x 5 */
    expect(&b, "10", "SELECT count(*) FROM expert_load WHERE node = 1");
    expect(&b, "203", "SELECT tokens FROM expert_load WHERE job = 7 AND layer = 3 AND "
                      "expert = 3 AND window_end_step = 20");
    expect(&b, "70008", "SELECT tokens FROM expert_load WHERE layer = 1 AND expert = 3 AND "
                        "node = 1 AND window_start_step = 21");
    expect(&b, "0", "SELECT count(*) FROM expert_load WHERE layer = 2");
    expect(&b, "0", "SELECT count(*) FROM expert_load WHERE expert = 5 OR expert = -1");
    expect(&b, "1970-02-11T16:00:00.000Z", "SELECT at FROM expert_load");
    expect(&b, "3", "SELECT expert FROM expert_load WHERE expert = '3' AND layer = '1'");
    expect(&b, "2", "SELECT count(*) FROM load_windows WHERE job = 7 AND device_imbalance = 1.5");
    bench_remove(&b);
}

static void a_report_that_comes_again_counts_once(void **state)
{
    (void)state;
    struct bench b;
    struct report first, second;
    bench_make(&b);
    report_make(&first, &b, 1, 10);
    report_make(&second, &b, 1, 10);
    store(&b, &first);
    store(&b, &first);
    store(&b, &second);
    store(&b, &first); /* late */
    expect(&b, "20", "SELECT count(*) FROM expert_load");
    second.message.attempt = 2; /* the same steps again, after a recovery */
    store(&b, &second);
    store(&b, &second);
    first.message.last_step = 1000; /* of an attempt that is over */
    store(&b, &first);
    expect(&b, "30", "SELECT count(*) FROM expert_load");
    bench_remove(&b);
}

/* Three hours of a report every 4 s or so; what is sent is found at any time, and in every
 * resolution once. */
static void windows_cover_every_token_once(void **state)
{
    (void)state;
    struct bench b;
    unsigned seed = (unsigned)test_seed();
    bench_make(&b);
    say_job(&b);
    int64_t end_ns = b.now_ns + 3 * HOUR_NS;
    for (int i = 1; b.now_ns < end_ns; i++) {
        b.now_ns += (1 + rand_r(&seed) % 7) * S_NS;
        send(&b, 1 + i % 2, (uint32_t)rand_r(&seed) % 100000);
        if (i % 7 == 0)
            tend(&b);
        if (i % 200 == 0) {
            uint64_t sum = 0;
            for (int l = 0; l < LAYERS; l++)
                for (int e = 0; e < EXPERTS; e++)
                    sum += b.sent[l][e];
            assert_int_equal(ask_number(&b, "SELECT sum(tokens) FROM expert_load"), sum);
            assert_int_equal(ask_number(&b, "SELECT sum(n_steps) FROM load_windows"), 20 * i);
        }
    }
    tend(&b);
    struct store_read r = read_loads_of(&b, STORE_ALL, -1);
    assert_int_equal(r.loads.n_layers, LAYERS);
    assert_int_equal(r.loads.first_step, 1);
    assert_int_equal(r.loads.last_step, b.step);
    for (int l = 0; l < LAYERS; l++) {
        assert_int_equal(r.loads.layers[l]->layer, 1 + 2 * l);
        assert_int_equal(r.loads.layers[l]->window_steps, b.step);
        for (int e = 0; e < EXPERTS; e++)
            assert_int_equal(r.loads.layers[l]->tokens[e], b.sent[l][e]);
        assert_int_equal(r.loads.layers[l]->rerouted, b.rerouted[l]);
        assert_int_equal(r.loads.layers[l]->dropped, b.dropped[l]);
        assert_true(b.dropped[l] > 0 && (l == 0 || b.rerouted[l] > 0));
    }
    store_read_fini(&r);
    r = read_loads_of(&b, STORE_LAST, 3);
    assert_int_equal(r.loads.n_layers, 1);
    assert_int_equal(r.loads.layers[0]->window_steps, 20);
    store_read_fini(&r);
    r = read_loads_of(&b, STORE_1H, -1);
    uint64_t hour_steps = r.loads.layers[0]->window_steps;
    store_read_fini(&r);
    r = read_loads_of(&b, STORE_1M, -1);
    assert_in_range(r.loads.layers[0]->window_steps, 20 * 60 / 8, 20 * 60);
    assert_in_range(hour_steps, 20 * 3600 / 5, 20 * 3600 / 3);
    store_read_fini(&r);
    bench_remove(&b);
}

static void old_windows_go(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    say_job(&b);
    for (int hour = 0; hour < 100 * 24; hour++) { /* a report every 20 min, 100 days */
        for (int i = 0; i < 3; i++) {
            b.now_ns += HOUR_NS / 3;
            send(&b, 1, 1);
        }
        tend(&b);
    }
    b.now_ns += 2 * S_NS;
    tend(&b);
    expect(&b, "0", "SELECT count(*) FROM load_windows WHERE seconds = 0 AND "
                    "at_ns < (SELECT max(at_ns) FROM load_windows) - 610 * 1000000000");
    expect(&b, "0", "SELECT count(*) FROM load_windows WHERE seconds = 10 AND "
                    "at_ns < (SELECT max(at_ns) FROM load_windows) - 3660 * 1000000000");
    expect(&b, "0", "SELECT count(*) FROM load_windows WHERE seconds = 60 AND "
                    "at_ns < (SELECT max(at_ns) FROM load_windows) - 90000 * 1000000000");
    uint64_t n_hours = ask_number(&b, "SELECT count(*) FROM load_windows WHERE seconds = 3600");
    assert_in_range(n_hours, 88 * 24, 90 * 24);
    struct store_read r = read_loads_of(&b, STORE_ALL, 1);
    assert_int_equal(r.loads.layers[0]->tokens[4], b.sent[0][4]); /* the job's sum outlives them */
    store_read_fini(&r);
    sqlite3_stmt *s;
    assert_int_equal(db_prepare(b.t.stats, "SELECT count(*) FROM load_counts WHERE key / 1024 NOT "
                                "IN (SELECT id FROM load_windows)", &s, NULL), 0);
    assert_int_equal(db_next(s, NULL), 1);
    assert_int_equal(sqlite3_column_int(s, 0), 0); /* no counts without their window */
    sqlite3_finalize(s);
    bench_remove(&b);
}

/* A coordinator that was away for a day with everything untidied does it piece by piece. */
static void a_backlog_is_tidied_in_bounded_steps(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    for (int i = 0; i < 8000; i++) {
        b.now_ns += S_NS;
        send(&b, 1, 9);
    }
    b.now_ns += 24 * HOUR_NS;
    assert_true(tend(&b) > 50);
    assert_int_equal(ask_number(&b, "SELECT count(*) FROM load_windows WHERE seconds < 60"), 0);
    assert_int_equal(ask_number(&b, "SELECT sum(tokens) FROM expert_load WHERE layer = 1"),
                     b.sent[0][0] + b.sent[0][1] + b.sent[0][2] + b.sent[0][3] + b.sent[0][4]);
    bench_remove(&b);
}

static void times_are_kept_in_order(void **state)
{
    (void)state;
    struct bench b;
    struct report r;
    bench_make(&b);
    static const int64_t at_ns[] = {5 * S_NS, INT64_MAX, -3, 0};
    for (size_t i = 0; i < sizeof at_ns / sizeof at_ns[0]; i++) {
        report_make(&r, &b, 1, 1);
        r.message.at_ns = at_ns[i];
        store(&b, &r);
        tend(&b);
    }
    char want[32];
    snprintf(want, sizeof want, "%lld", (long long)b.now_ns);
    expect(&b, "5000000000", "SELECT min(at_ns) FROM load_windows"); /* said late, believed */
    expect(&b, want, "SELECT max(at_ns) FROM load_windows");
    expect(&b, "4", "SELECT sum(n_reports) FROM load_windows");
    bench_remove(&b);
}

/* ---- history --------------------------------------------------------------------------------- */

/* Epoch 1: experts 0 and 3 on the first of two devices, the others on the second. */
static void say_placement(struct bench *b)
{
    static int32_t experts[6] = {0, 3, -1, 1, 2, 4};
    static double share[6] = {1, 1, 0, 1, 1, 1};
    static uint32_t home[EXPERTS] = {0, 3, 4, 1, 5};
    Ballast__PlacementLayer layer[LAYERS], *layers[LAYERS];
    Ballast__Placement placement = BALLAST__PLACEMENT__INIT;
    Ballast__RecordPlacement placed = BALLAST__RECORD_PLACEMENT__INIT;
    Ballast__Record r = BALLAST__RECORD__INIT;
    struct err err = {0};
    for (uint32_t l = 0; l < LAYERS; l++) {
        ballast__placement_layer__init(layers[l] = &layer[l]);
        layer[l].layer = 1 + 2 * l;
        layer[l].experts = experts;
        layer[l].share = share;
        layer[l].home = home;
        layer[l].n_experts = layer[l].n_share = 6;
        layer[l].n_home = EXPERTS;
    }
    placement.epoch = placed.epoch = 1;
    placement.n_devices = 2;
    placement.n_slots = 3;
    placement.layers = layers;
    placement.n_layers = LAYERS;
    placed.placement = &placement;
    r.seq = 2;
    r.at_ns = b->now_ns;
    r.job_id = JOB;
    r.what_case = BALLAST__RECORD__WHAT_PLACEMENT;
    r.placement = &placed;
    if (write_record(&b->t, &r, &err) < 0)
        fail_msg("%s", err.text);
}

static void say_aux_loss(struct bench *b, double aux_loss)
{
    Ballast__StepReport step = BALLAST__STEP_REPORT__INIT, *steps[] = {&step};
    Ballast__StepReports reports = BALLAST__STEP_REPORTS__INIT;
    struct err err = {0};
    step.step = b->step;
    step.aux_loss = aux_loss;
    reports.attempt = 1;
    reports.steps = steps;
    reports.n_steps = 1;
    assert_int_equal(db_run(tables_statement(&b->t, S_STATS_BEGIN), &err), 0);
    assert_int_equal(write_steps(&b->t, &(struct turn_steps){JOB, &reports}, &err), 0);
    assert_int_equal(db_run(tables_statement(&b->t, S_STATS_COMMIT), &err), 0);
}

/* Layer 1 is even on devices while all are in order; layer 3 never is. */
static void send_known(struct bench *b, uint32_t epoch)
{
    static const uint32_t known[LAYERS][EXPERTS] = {{60, 20, 20, 50, 50}, {100, 0, 0, 0, 0}};
    struct report r;
    report_make(&r, b, 1, 0);
    memcpy(r.tokens[0], known[0], sizeof known[0]);
    memcpy(r.tokens[1], known[1], sizeof known[1]);
    r.message.placement_epoch = epoch;
    store(b, &r);
    b->now_ns += S_NS;
}

static struct store_read history_of(struct bench *b, enum store_window window, int32_t layer,
                                    uint32_t limit)
{
    struct store_read r = {.kind = STORE_LOAD_HISTORY, .job = JOB, .window = window,
                           .layer = layer, .limit = limit};
    read_run(&b->t, &r);
    if (r.rc < 0)
        fail_msg("%s", r.err.text);
    return r;
}

static void near(double x, double expected)
{
    if (!(x > expected - 1e-9 && x < expected + 1e-9))
        fail_msg("%.9g, expected %.9g", x, expected);
}

static void each_window_has_the_placement_of_its_time(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    say_job(&b);
    struct store_read r = history_of(&b, STORE_1H, -1, 9);
    assert_int_equal(r.n_windows, 0);
    store_read_fini(&r);
    send_known(&b, 0);
    say_aux_loss(&b, 0.25);
    say_placement(&b);
    send_known(&b, 1);
    r = history_of(&b, STORE_1H, -1, 9);
    assert_int_equal(r.n_windows, 2);
    assert_false(r.is_truncated);
    for (uint32_t i = 0; i < 2; i++) {
        const Ballast__LoadWindow *w = r.windows[i];
        assert_int_equal(w->first_step, 20 * i + 1);
        assert_int_equal(w->last_step, 20 * i + 20);
        assert_int_equal(w->placement_epoch, i);
        assert_int_equal(w->n_layers, 2);
        assert_int_equal(w->layers[1], 3);
        near(w->measured, 1.5);
        near(w->experts[0], 1.5);
        near(w->experts[1], 5);
        near(w->devices[0], i ? 1.1 : 1);
        near(w->devices[1], 2);
        assert_int_equal(w->n_device_load, 2);
        near(w->device_load[0], (i ? 210 : 200) / 150.0);
        near(w->device_load[1], (i ? 90 : 100) / 150.0);
    }
    near(r.windows[0]->aux_loss, 0.25);
    assert_true(isnan(r.windows[1]->aux_loss));
    store_read_fini(&r);
    r = history_of(&b, STORE_1M, 1, 1);
    assert_int_equal(r.n_windows, 1);
    assert_true(r.is_truncated);
    assert_int_equal(r.windows[0]->last_step, 40);
    assert_int_equal(r.windows[0]->n_layers, 1);
    near(r.windows[0]->device_load[0], 1.1);
    store_read_fini(&r);
    r = history_of(&b, STORE_ALL, 2, 9);
    assert_int_equal(r.n_windows, 0);
    store_read_fini(&r);
    bench_remove(&b);
}

/* Coarser windows where there are some, every step once, the newest limit. */
static void a_long_history_is_of_coarse_windows(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    say_job(&b);
    for (int i = 0; i < 5000; i++) { /* an hour, 23 minutes and 20 seconds */
        send_known(&b, 0);
        if (i % 60 == 0)
            tend(&b);
    }
    tend(&b);
    struct store_read r = history_of(&b, STORE_ALL, -1, LOAD_WINDOWS_MAX);
    assert_in_range(r.n_windows, 1 + 22 + 1, 1 + 23 + 12);
    assert_false(r.is_truncated);
    uint64_t n_steps = 0;
    for (size_t i = 0; i < r.n_windows; i++) {
        assert_int_equal(r.windows[i]->first_step, n_steps + 1);
        n_steps += r.windows[i]->n_steps;
        near(r.windows[i]->experts[0], 1.5);
    }
    assert_int_equal(n_steps, b.step);
    store_read_fini(&r);
    r = history_of(&b, STORE_1H, -1, 10);
    assert_int_equal(r.n_windows, 10);
    assert_true(r.is_truncated);
    assert_int_equal(r.windows[9]->last_step, b.step);
    store_read_fini(&r);
    r = history_of(&b, STORE_LAST, -1, 10);
    assert_int_equal(r.n_windows, 1);
    assert_int_equal(r.windows[0]->n_steps, 20);
    store_read_fini(&r);
    bench_remove(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_are_as_narrow_as_they_can_be),
        cmocka_unit_test(one_row_per_layer_window_and_expert),
        cmocka_unit_test(a_report_that_comes_again_counts_once),
        cmocka_unit_test(windows_cover_every_token_once),
        cmocka_unit_test(old_windows_go),
        cmocka_unit_test(a_backlog_is_tidied_in_bounded_steps),
        cmocka_unit_test(times_are_kept_in_order),
        cmocka_unit_test(each_window_has_the_placement_of_its_time),
        cmocka_unit_test(a_long_history_is_of_coarse_windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
