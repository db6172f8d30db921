/* test_store_query.c - people's SQL: what it sees, what it may not, and that it always ends */
#include "tests/a_tables.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "coordinator/store_bind.h"
#include "coordinator/store_load.h"
#include "proto/check.h"

#define S_NS ((int64_t)NS_PER_S)
#define A10  "aaaaaaaaaa"
#define A100 A10 A10 A10 A10 A10 A10 A10 A10 A10 A10
/* SQL for ten thousand times the text of x. */
#define TIMES_10000(x) "replace(replace('" A100 "', 'a', '" A100 "'), 'a', " x ")"

/* Two jobs; job 1 has steps, load, a plan that was refused and one that came about. */
struct bench {
    char folder[64];
    struct store_tables t;
    uint64_t seq;
};

static void say(struct bench *b, job_id job, Ballast__Record__WhatCase what, void *body)
{
    Ballast__Record r = BALLAST__RECORD__INIT;
    struct err err = {0};
    r.seq = ++b->seq;
    r.at_ns = 1000 * S_NS + (int64_t)b->seq;
    r.job_id = job;
    r.what_case = what;
    r.submitted = body; /* every member of the oneof is a pointer in this place */
    if (write_record(&b->t, &r, &err) < 0)
        fail_msg("%s", err.text);
}

static void say_job(struct bench *b, job_id job, const char *name)
{
    Ballast__RecordSubmitted submitted = BALLAST__RECORD_SUBMITTED__INIT;
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    spec.name = (char *)name;
    spec.train_steps = 300;
    spec.rebalance_auto = true;
    submitted.spec = &spec;
    submitted.user = "ada";
    say(b, job, BALLAST__RECORD__WHAT_SUBMITTED, &submitted);
}

static void say_plans(struct bench *b)
{
    static int32_t experts[4] = {1, -1, 0, -1};
    static double share[4] = {1, 0, 1, 0};
    static uint32_t home[2] = {2, 0};
    Ballast__PlacementLayer layer = BALLAST__PLACEMENT_LAYER__INIT, *layers[] = {&layer};
    Ballast__Placement placement = BALLAST__PLACEMENT__INIT;
    Ballast__RecordPlan plan = BALLAST__RECORD_PLAN__INIT;
    Ballast__RecordPlanEnded ended = BALLAST__RECORD_PLAN_ENDED__INIT;
    Ballast__RecordPlacement placed = BALLAST__RECORD_PLACEMENT__INIT;
    Ballast__RecordRealised realised = BALLAST__RECORD_REALISED__INIT;
    Ballast__RecordAuto off = BALLAST__RECORD_AUTO__INIT;
    layer.layer = 1;
    layer.experts = experts;
    layer.share = share;
    layer.home = home;
    layer.n_experts = layer.n_share = 4;
    layer.n_home = 2;
    placement.n_devices = placement.n_slots = 2;
    placement.layers = layers;
    placement.n_layers = 1;
    plan.placement = placed.placement = &placement;
    plan.n_moves = placed.n_moves = 2;
    plan.imbalance_before = 1.75;
    plan.cause = "layer 1 is uneven";
    plan.automatic = true;
    placement.epoch = 1;
    say(b, 1, BALLAST__RECORD__WHAT_PLAN, &plan);
    ended.epoch = 1;
    ended.reason = "rank 1 has no room";
    say(b, 1, BALLAST__RECORD__WHAT_PLAN_ENDED, &ended);
    placement.epoch = placed.epoch = realised.epoch = 2;
    say(b, 1, BALLAST__RECORD__WHAT_PLAN, &plan);
    placed.bytes = 4096;
    placed.pause_s = 0.25;
    placed.at_step = 40;
    say(b, 1, BALLAST__RECORD__WHAT_PLACEMENT, &placed);
    realised.imbalance_after = 1.25;
    realised.gain_s = -0.5;
    say(b, 1, BALLAST__RECORD__WHAT_REALISED, &realised);
    say(b, 1, BALLAST__RECORD__WHAT_REBALANCE_AUTO, &off);
    placement.epoch = 3;
    say(b, 1, BALLAST__RECORD__WHAT_PLAN, &plan);
}

static void say_reports(struct bench *b, uint32_t n)
{
    Ballast__StepReport step = BALLAST__STEP_REPORT__INIT, *steps[] = {&step};
    Ballast__StepReports reports = BALLAST__STEP_REPORTS__INIT;
    uint32_t tokens[2] = {30, 10};
    Ballast__LayerLoad layer = BALLAST__LAYER_LOAD__INIT, *layers[] = {&layer};
    Ballast__LoadReport load = BALLAST__LOAD_REPORT__INIT;
    struct err err = {0};
    layer.layer = 1;
    layer.tokens = tokens;
    layer.n_tokens = load.n_experts = 2;
    load.n_nodes = load.attempt = reports.attempt = 1;
    load.layers = layers;
    load.n_layers = 1;
    reports.steps = steps;
    reports.n_steps = 1;
    assert_int_equal(db_run(tables_statement(&b->t, S_STATS_BEGIN), &err), 0);
    for (uint32_t i = 1; i <= n; i++) {
        step.step = load.first_step = load.last_step = i;
        step.loss = 1.0 / i;
        assert_int_equal(write_steps(&b->t, &(struct turn_steps){1, &reports}, &err), 0);
        assert_int_equal(load_write(&b->t, &(struct turn_load){1, &load}, 2000 * S_NS, &err), 0);
    }
    assert_int_equal(db_run(tables_statement(&b->t, S_STATS_COMMIT), &err), 0);
}

static void bench_make(struct bench *b, uint32_t n_steps)
{
    *b = (struct bench){.folder = "/tmp/test_store_query.XXXXXX"};
    tables_make(&b->t, b->folder);
    say_job(b, 1, "hybrid");
    say_job(b, 2, "tiny\xff\x01");
    say_plans(b);
    say_reports(b, n_steps);
}

static void bench_remove(struct bench *b)
{
    tables_remove(&b->t, b->folder);
}

static struct store_read ask(struct bench *b, const char *sql, uint32_t limit)
{
    return ask_tables(&b->t, sql, limit);
}

/* With the time that a person's statement has. */
static struct store_read ask_once(struct bench *b, const char *sql, uint32_t limit)
{
    struct store_read r = {.kind = STORE_SQL, .sql = sql, .limit = limit};
    read_run(&b->t, &r);
    return r;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void tables_of_both_files_in_one_statement(void **state)
{
    (void)state;
    static const struct {
        const char *sql, *first; /* the first cell */
        size_t n_rows;
    } rows[] = {
        {"SELECT name FROM jobs WHERE id = 1", "hybrid", 1},
        {"SELECT id FROM jobs ORDER BY id DESC", "2", 2},
        {"SELECT rebalance_auto FROM jobs WHERE id = 1", "0", 1},
        {"SELECT rebalance_auto FROM jobs WHERE id = 2", "1", 1},
        {"SELECT count(*) FROM events WHERE job = 1", "8", 1},
        {"SELECT text FROM events WHERE kind = 'PLAN_ENDED'",
         "placement 1 will not come about: rank 1 has no room", 1},
        {"SELECT kind FROM events WHERE seq >= 9", "PLAN_PROPOSED", 1},
        {"SELECT group_concat(state) FROM plans WHERE job = 1", "ENDED,DONE,PREPARING", 1},
        {"SELECT reason FROM plans WHERE job = 1 AND epoch = 1", "rank 1 has no room", 1},
        {"SELECT realised_gain_s FROM placements WHERE job = 1", "-0.5", 1},
        {"SELECT p.imbalance_after || ' ' || j.name FROM placements p JOIN jobs j ON j.id = p.job",
         "1.25 hybrid", 1},
        {"SELECT 4.753435728392746", "4.753435728392746", 1}, /* as in metrics, to the last bit */
        {"SELECT 0.1", "0.1", 1},
        {"SELECT 9e999", "Inf", 1},
        {"SELECT max(step) FROM steps WHERE job = 1 AND loss > 0.5", "1", 1},
        {"SELECT step FROM steps WHERE job = 1 AND step BETWEEN 3 AND 5", "3", 3},
        {"SELECT sum(l.tokens) FROM jobs j JOIN expert_load l ON l.job = j.id "
         "WHERE j.name = 'hybrid' AND l.expert = 0", "600", 1},
        {"WITH t AS (SELECT layer, sum(tokens) s FROM expert_load GROUP BY layer) SELECT s FROM t",
         "800", 1},
        {"SELECT name FROM jobs WHERE name = 'HYBRID' COLLATE NOCASE", "hybrid", 1},
        {"SELECT id FROM jobs WHERE id IN (2, 9)", "2", 1},
        {"SELECT id FROM jobs WHERE id = '2'", "2", 1},
        {"SELECT count(*) FROM jobs WHERE id = NULL OR name > 7.5", "2", 1},
        {"SELECT value FROM json_each('[4]')", "4", 1},
        {"SELECT job FROM load_windows WHERE seconds = 0 LIMIT 1", "1", 1},
        {"SELECT rank() OVER (ORDER BY tokens) FROM expert_load WHERE window_end_step = 1", "1", 2},
        {"SELECT x'00ff'", "x'00ff'", 1},
        {"SELECT 1;  ;\n", "1", 1},
        {"SELECT count(*) FROM jobs WHERE name LIKE 'hy%'", "1", 1},
    };
    struct bench b;
    bench_make(&b, 20);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct store_read r = ask(&b, rows[i].sql, 100);
        if (r.rc < 0 || r.n_rows != rows[i].n_rows || strcmp(r.rows[0]->cells[0], rows[i].first))
            fail_msg("%s: %s%s (%zu rows), expected %s (%zu)", rows[i].sql, r.err.text,
                     r.n_rows ? r.rows[0]->cells[0] : "", r.n_rows, rows[i].first, rows[i].n_rows);
        store_read_fini(&r);
    }
    bench_remove(&b);
}

static void hostile_sql_is_refused_in_one_line(void **state)
{
    (void)state;
    static const struct {
        const char *sql, *text;
    } rows[] = {
        {"", "there is no statement"},
        {" ;", "there is no statement"},
        {"-- nothing", "there is no statement"},
        {"SELEC 1", "near \"SELEC\": syntax error"},
        {"SELECT 1; DROP TABLE jobs", "one statement at a time"},
        {"SELECT * FROM records", "no such table: records; there are jobs"},
        {"SELECT * FROM idempotency", "no such table"},
        {"SELECT * FROM main.marks", "no such table"},
        {"SELECT nonsense FROM jobs", "no such column: nonsense"},
        {"INSERT INTO jobs (id) VALUES (9)", "not allowed"},
        {"UPDATE jobs SET name = 'x'", "may not be modified"},
        {"DELETE FROM events", "may not be modified"},
        {"DROP TABLE jobs", "not allowed"},
        {"CREATE TABLE t (x)", "not allowed"},
        {"CREATE TEMP TABLE t (x)", "not allowed"},
        {"CREATE VIEW v AS SELECT 1", "not allowed"},
        {"CREATE VIRTUAL TABLE t USING fts5 (x)", "not allowed"},
        {"ATTACH '/etc/passwd' AS p", "not allowed"},
        {"ATTACH 'state.db' AS p", "not allowed"},
        {"DETACH main", "not allowed"},
        {"VACUUM", "not allowed"},
        {"VACUUM INTO '/tmp/stolen.db'", "not allowed"},
        {"PRAGMA table_info(jobs)", "not allowed"},
        {"PRAGMA writable_schema = 1", "not allowed"},
        {"SELECT * FROM pragma_database_list", "not allowed"},
        {"BEGIN", "not allowed"},
        {"BEGIN IMMEDIATE", "not allowed"},
        {"COMMIT", "not allowed"},
        {"SAVEPOINT s", "not allowed"},
        {"ANALYZE", "not allowed"},
        {"REINDEX", "not allowed"},
        {"SELECT load_extension('/tmp/x.so')", "load_extension"},
        {"SELECT readfile('/etc/passwd')", "no such function: readfile"},
        {"SELECT writefile('/tmp/x', 'y')", "no such function"},
        {"SELECT fts3_tokenizer('simple')", "fts3_tokenizer"},
        {"SELECT randomblob(1000000000)", "the function randomblob is not allowed"},
        {"SELECT printf('%.*c', 1000000000, 'x')", "the function printf is not allowed"},
        {"SELECT format('%.1000000000c', 'x')", "the function format is not allowed"},
        {"SELECT zeroblob(1000000000)", "the function zeroblob is not allowed"},
        {"SELECT sqlite_compileoption_get(1)", "not allowed"},
        {"SELECT * FROM jobs, nonsense", "no such table: nonsense"},
        {"SELECT 1 UNION SELECT 1, 2", "do not have the same number of result columns"},
        {"SELECT '\n' FROM \"jo\nbs\"", "no such table: jo bs"},
    };
    struct bench b;
    bench_make(&b, 50);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct store_read r = ask(&b, rows[i].sql, 100);
        if (r.rc != -EINVAL || !strstr(r.err.text, rows[i].text) || r.n_rows ||
            !check_is_text(r.err.text, TEXT_BYTES_MAX))
            fail_msg("%s: rc %d '%s', expected '%s'", rows[i].sql, r.rc, r.err.text, rows[i].text);
        store_read_fini(&r);
    }
    struct stat st;
    assert_int_not_equal(stat("/tmp/stolen.db", &st), 0);
    struct store_read r = ask(&b, "SELECT count(*) FROM jobs", 1); /* and all is as it was */
    assert_string_equal(r.rows[0]->cells[0], "2");
    store_read_fini(&r);
    bench_remove(&b);
}

static void what_takes_too_much_is_ended(void **state)
{
    (void)state;
    static const struct {
        const char *sql;
        int rc;
    } rows[] = {
        {"WITH RECURSIVE t (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT max(x) FROM t",
         -ETIMEDOUT},
        {"SELECT count(*) FROM steps a, steps b, steps c, steps d", -ETIMEDOUT},
        {"SELECT count(*) FROM expert_load a, expert_load b, expert_load c", -ETIMEDOUT},
        {"WITH RECURSIVE t (x) AS (SELECT 1 UNION SELECT x + 1 FROM t) "
         "SELECT count(DISTINCT replace('" A100 "', 'a', x || '" A10 A10 A10 A10 "')) FROM t",
         -ENOMEM},
        {"SELECT group_concat(" TIMES_10000("12345678") ") FROM steps, steps",
         -EINVAL}, /* too big */
        {"SELECT max(instr(" TIMES_10000("'aaaaaaaaaaaa'") ", " TIMES_10000("'aaaaaa'")
         " || b.step)) FROM steps a, steps b", -ETIMEDOUT},
        {"SELECT max(replace(" TIMES_10000("'aaaaaaaaaaaa'") ", " TIMES_10000("'aaaaaa'")
         " || b.step, 'x')) FROM steps a, steps b", -ETIMEDOUT},
        {"SELECT count(*) FROM (SELECT DISTINCT " TIMES_10000("(1000000 + a.step * 1000 + b.step)")
         " FROM "
         "steps a, steps b)", -ENOMEM},
    };
    struct bench b;
    bench_make(&b, 1000);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint64_t from_ns = clock_now_ns();
        struct store_read r = ask_once(&b, rows[i].sql, 100);
        /* A slow machine runs out of time first, one with a sanitizer out of memory. */
        if (r.rc != rows[i].rc && r.rc != -ETIMEDOUT && r.rc != -ENOMEM)
            fail_msg("%s: rc %d '%s'", rows[i].sql, r.rc, r.err.text);
        assert_true(was_soon(from_ns, 6));
        store_read_fini(&r);
    }
    /* One operation without an end in sight: patterns that match in many ways. */
    uint64_t from_ns = clock_now_ns();
    struct store_read r = ask(&b, "SELECT count(*) FROM steps WHERE "
                              TIMES_10000("' '") " || '1' LIKE "
                              "'% % % % % % % % % % %2'", 100);
    assert_int_equal(r.rc, 0);
    assert_true(was_soon(from_ns, 4));
    store_read_fini(&r);
    r = ask(&b, "SELECT count(*) FROM steps", 1); /* the next is not hurt */
    assert_string_equal(r.rows[0]->cells[0], "1000");
    store_read_fini(&r);
    bench_remove(&b);
}

static void answers_are_bounded_and_clean(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b, 1000);
    struct store_read r = ask(&b, "SELECT step FROM steps", 10);
    assert_int_equal(r.n_rows, 10);
    assert_true(r.is_truncated);
    store_read_fini(&r);
    r = ask(&b, "SELECT step FROM steps LIMIT 10", 10);
    assert_false(r.is_truncated);
    store_read_fini(&r);
    r = ask(&b, "SELECT " TIMES_10000("'123456'") " FROM steps", 10000);
    assert_true(r.is_truncated && r.n_rows > 10 && r.n_rows < 300);
    store_read_fini(&r);
    r = ask(&b, "SELECT name, char(27) || '[2J' || char(10) AS \"a\nb\", NULL, '', "
            TIMES_10000("1234567890") " FROM jobs WHERE id = 2", 10);
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.n_columns, 5);
    for (int i = 0; i < 5; i++)
        assert_true(check_is_lines(r.rows[0]->cells[i], SQL_CELL_BYTES_MAX));
    assert_true(check_is_text(r.columns[1], NAME_BYTES_MAX));
    assert_string_equal(r.rows[0]->cells[0], "tiny??");
    assert_string_equal(r.rows[0]->cells[1], "?[2J\n");
    assert_true(r.rows[0]->is_null[2] && !r.rows[0]->is_null[3]);
    assert_int_equal(strlen(r.rows[0]->cells[4]), SQL_CELL_BYTES_MAX);
    store_read_fini(&r);
    bench_remove(&b);
}

/* A plan does not outlive its attempt. */
static void an_attempt_takes_its_plan_along(void **state)
{
    (void)state;
    struct bench b;
    Ballast__RecordState recovering = BALLAST__RECORD_STATE__INIT;
    bench_make(&b, 1);
    recovering.state = BALLAST__JOB_STATE__JOB_RECOVERING;
    recovering.reason = "worker w1 was lost";
    say(&b, 1, BALLAST__RECORD__WHAT_STATE, &recovering);
    struct store_read r = ask(&b, "SELECT group_concat(state), max(reason) FROM plans", 1);
    assert_string_equal(r.rows[0]->cells[0], "ENDED,DONE,ENDED");
    assert_string_equal(r.rows[0]->cells[1], "the attempt is over: worker w1 was lost");
    store_read_fini(&r);
    bench_remove(&b);
}

static void plans_and_placements_are_read_and_made_again(void **state)
{
    (void)state;
    struct bench b;
    struct err err = {0};
    bench_make(&b, 20);
    for (int round = 0; round < 2; round++) {
        struct store_read r = {.kind = STORE_PLANS, .job = 1, .limit = 2};
        read_run(&b.t, &r);
        assert_int_equal(r.rc, 0);
        assert_int_equal(r.n_entries, 2); /* the newest, newest last */
        assert_int_equal(r.entries[0]->epoch, 2);
        assert_string_equal(r.entries[0]->state, "DONE");
        assert_true(r.entries[0]->pause_s == 0.25 && r.entries[0]->imbalance_after == 1.25);
        assert_int_equal(r.entries[0]->bytes, 4096);
        assert_string_equal(r.entries[1]->state, "PREPARING");
        assert_true(isnan(r.entries[1]->imbalance_after));
        assert_false(r.is_auto_on);
        store_read_fini(&r);
        r = (struct store_read){.kind = STORE_PLACEMENT, .job = 1, .is_newest = true, .limit = 9};
        read_run(&b.t, &r);
        assert_int_equal(r.rc, 0);
        assert_int_equal(r.placement->epoch, 2);
        assert_int_equal(r.placement->layers[0]->experts[1], -1);
        assert_int_equal(r.n_entries, 3);
        assert_int_equal(r.loads.n_experts, 2);
        store_read_fini(&r);
        r = (struct store_read){.kind = STORE_PLACEMENT, .job = 1, .from = 1, .limit = 9};
        read_run(&b.t, &r);
        assert_int_equal(r.rc, -ENOENT); /* that plan never came about */
        store_read_fini(&r);
        r = (struct store_read){.kind = STORE_PLACEMENT, .job = 2, .is_newest = true, .limit = 9};
        read_run(&b.t, &r);
        assert_int_equal(r.rc, 0);
        assert_null(r.placement);
        store_read_fini(&r);
        assert_int_equal(write_rebuild(&b.t, &err), 0);
    }
    bench_remove(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_of_both_files_in_one_statement),
        cmocka_unit_test(hostile_sql_is_refused_in_one_line),
        cmocka_unit_test(what_takes_too_much_is_ended),
        cmocka_unit_test(answers_are_bounded_and_clean),
        cmocka_unit_test(an_attempt_takes_its_plan_along),
        cmocka_unit_test(plans_and_placements_are_read_and_made_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
