/* test_store.c - the store: what is acknowledged is there, after kill -9 and on a full disk too */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/store_db.h"
#include "coordinator/store_schema.h"
#include "tests/a_store.h"
#include "tests/seed.h"

#define HOUR_NS (3600 * (int64_t)NS_PER_S)

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_restart_loads_the_live_jobs_only(void **state)
{
    (void)state;
    struct bench b;
    struct story s = {0};
    begin_with_two_jobs(&b, &s);
    store_close(b.store);
    bench_open(&b);
    struct store_read r = do_read(&b, (struct store_read){
        .kind = STORE_RESTORE, .wall_ns = 1000 * (int64_t)NS_PER_S + HOUR_NS,
        .keep_ns = 24 * HOUR_NS});
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.restored.last_seq, s.seq);
    assert_int_equal(r.restored.last_job, 2);
    assert_int_equal(r.restored.n_keys, 2);
    assert_int_equal(r.restored.keys[0].job, 1);
    assert_string_equal(r.restored.keys[0].user, "ada");
    assert_int_equal(r.n_records, 5); /* 4 of job 2, the newest of w0 */
    for (size_t i = 0; i < r.n_records; i++) {
        assert_true(r.records[i]->job_id == 2 || r.records[i]->seq == 10);
        assert_true(i == 0 || r.records[i]->seq > r.records[i - 1]->seq);
    }
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_RESTORE, .keep_ns = 24 * HOUR_NS,
                                        .wall_ns = 1000 * (int64_t)NS_PER_S + 25 * HOUR_NS});
    assert_int_equal(r.restored.n_keys, 0);
    store_read_fini(&r);
    arena_fini(&s.arena);
    bench_remove(&b);
}

/* A number that the text tells is read from the record itself, of whatever age. */
static void events_tell_steps(void **state)
{
    (void)state;
    struct bench b;
    struct story s = {0};
    begin_with_two_jobs(&b, &s);
    say_state(&s, 2, BALLAST__JOB_STATE__JOB_RUNNING, "");
    s.records[s.n - 1]->state->attempt = 2;
    s.records[s.n - 1]->state->resumed_from_step = 7;
    Ballast__Record *r = say(&s, 2, "");
    Ballast__RecordProgress progress = BALLAST__RECORD_PROGRESS__INIT;
    r->what_case = BALLAST__RECORD__WHAT_PROGRESS;
    r->progress = &progress;
    progress.checkpoint_step = 10;
    assert_int_equal(tell(&b, &s), 0);
    struct store_read e = do_read(&b, (struct store_read){.kind = STORE_EVENTS, .limit = 99});
    assert_int_equal(e.n_events, s.seq);
    const Ballast__Event *running = e.events[e.n_events - 2], *saved = e.events[e.n_events - 1];
    assert_string_equal(running->text, "attempt 2 goes on from the checkpoint of step 7");
    assert_true(running->has_step && running->step == 7);
    assert_true(saved->has_step && saved->step == 10);
    assert_string_equal(e.events[3]->kind, "JOB_RUNNING"); /* of a coordinator that did not tell */
    assert_string_equal(e.events[3]->text, "");
    assert_false(e.events[3]->has_step);
    assert_false(e.events[4]->has_step);
    store_read_fini(&e);
    arena_fini(&s.arena);
    bench_remove(&b);
}

static void jobs_and_events_are_read_in_pages(void **state)
{
    (void)state;
    struct bench b;
    struct story s = {0};
    begin_with_two_jobs(&b, &s);

    struct store_read r = do_read(&b, (struct store_read){.kind = STORE_JOBS, .limit = 1});
    assert_int_equal(r.n_jobs, 1);
    assert_true(r.is_truncated);
    assert_int_equal(r.jobs[0]->state, BALLAST__JOB_STATE__JOB_DONE);
    assert_string_equal(r.jobs[0]->reason, "all steps done");
    assert_string_equal(r.jobs[0]->exit, "0");
    assert_int_equal(r.jobs[0]->n_workers, 2);
    assert_string_equal(r.jobs[0]->workers[1], "w1");
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_JOBS, .from = 1, .limit = 9, .user = "ada"});
    assert_int_equal(r.n_jobs, 1);
    assert_false(r.is_truncated);
    assert_int_equal(r.jobs[0]->attempt, 2);
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_JOBS, .limit = 9, .user = "bob"});
    assert_int_equal(r.n_jobs, 0);
    store_read_fini(&r);

    r = do_read(&b, (struct store_read){.kind = STORE_JOB, .job = 1, .limit = 2});
    assert_int_equal(r.rc, 0);
    assert_string_equal(r.spec->name, "hybrid");
    assert_int_equal(r.n_events, 2);
    assert_string_equal(r.events[1]->kind, "JOB_DONE");
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_JOB, .job = 77, .limit = 2});
    assert_int_equal(r.rc, -ENOENT);
    store_read_fini(&r);

    uint64_t from = 0, n = 0;
    do { /* gapless, whatever the page */
        r = do_read(&b, (struct store_read){.kind = STORE_EVENTS, .from = from, .limit = 3});
        for (size_t i = 0; i < r.n_events; i++)
            assert_int_equal(r.events[i]->seq, ++n);
        from = r.next;
        store_read_fini(&r);
    } while (n < s.seq);
    r = do_read(&b, (struct store_read){.kind = STORE_EVENTS, .from = from, .limit = 3});
    assert_int_equal(r.n_events, 0);
    assert_int_equal(r.next, from);
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_EVENTS, .is_newest = true, .limit = 2,
                                        .job = 2});
    assert_int_equal(r.n_events, 2);
    assert_string_equal(r.events[0]->text, "worker w0 was lost");
    assert_string_equal(r.events[1]->text, "attempt 2 on w0, w1");
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_EVENTS, .limit = 2, .job = 77});
    assert_int_equal(r.rc, -ENOENT);
    store_read_fini(&r);
    arena_fini(&s.arena);
    bench_remove(&b);
}

/* One column of a query over the closed file. */
static char *query(const struct bench *b, const char *sql)
{
    char path[96];
    snprintf(path, sizeof path, "%s/state.db", b->folder);
    sqlite3 *db;
    sqlite3_stmt *q;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &q, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(q), SQLITE_ROW);
    char *text = xstrdup((const char *)sqlite3_column_text(q, 0));
    sqlite3_finalize(q);
    sqlite3_close(db);
    return text;
}

static void query_tables_can_be_made_again(void **state)
{
    (void)state;
    static const char all[] =
        "SELECT (SELECT group_concat(j.id || j.state || j.attempt || j.workers || j.ended_at_ns) "
        "FROM jobs j) || (SELECT group_concat(a.job || a.attempt || a.ended_at_ns || a.reason) "
        "FROM attempts a) || (SELECT group_concat(w.name || w.state || w.record) FROM workers w) "
        "|| (SELECT group_concat(hex(i.key) || i.job) FROM idempotency i)";
    struct bench b;
    struct story s = {0};
    begin_with_two_jobs(&b, &s);
    store_close(b.store);
    char *before = query(&b, all);
    bench_open(&b);
    struct store_read rebuild = do_read(&b, (struct store_read){.kind = STORE_REBUILD});
    assert_int_equal(rebuild.rc, 0);
    store_close(b.store);
    char *after = query(&b, all);
    assert_string_equal(before, after);
    assert_non_null(strstr(after, "w0IDLE10"));
    free(before);
    free(after);
    b.store = NULL;
    arena_fini(&s.arena);
    bench_remove(&b);
}

/* Steps and output are read of jobs that exist. */
static void tell_jobs_until(struct bench *b, uint64_t last)
{
    struct story s = {0};
    for (uint64_t job = 1; job <= last; job++)
        say_submitted(&s, job);
    assert_int_equal(tell(b, &s), 0);
    arena_fini(&s.arena);
}

static void a_later_attempt_replaces_steps(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    bench_open(&b);
    tell_jobs_until(&b, 7);
    static const struct {
        uint32_t attempt;
        uint64_t step;
        double loss, validation_loss;
    } rows[] = {{1, 1, 5.0, NAN}, {1, 2, 4.0, 4.5}, {2, 2, 3.0, 3.5}, {1, 2, 9.0, NAN},
                {2, 3, 2.0, NAN}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Ballast__PhaseTime phase = BALLAST__PHASE_TIME__INIT, *phases[] = {&phase};
        Ballast__StepReport step = BALLAST__STEP_REPORT__INIT, *list[] = {&step};
        Ballast__StepReports reports = BALLAST__STEP_REPORTS__INIT;
        phase.name = "forward";
        phase.seconds = 0.25;
        step.step = rows[i].step;
        step.loss = rows[i].loss;
        step.validation_loss = rows[i].validation_loss;
        step.phases = phases;
        step.n_phases = 1;
        reports.job_id = 7;
        reports.attempt = rows[i].attempt;
        reports.steps = list;
        reports.n_steps = 1;
        struct turn_steps steps = {7, &reports};
        struct store_batch batch = {.steps = &steps, .n_steps = 1};
        assert_int_equal(do_batch(&b, &batch), 0);
    }
    struct store_read r = do_read(&b, (struct store_read){.kind = STORE_STEPS, .job = 7, .from = 1,
                                                          .limit = 10});
    assert_int_equal(r.n_steps, 2);
    assert_int_equal(r.next, 3);
    assert_int_equal(r.steps[0]->attempt, 2);
    assert_true(r.steps[0]->loss == 3.0 && r.steps[0]->validation_loss == 3.5);
    assert_true(isnan(r.steps[1]->validation_loss));
    assert_int_equal(r.steps[0]->n_phases, 1);
    assert_string_equal(r.steps[0]->phases[0]->name, "forward");
    assert_true(r.steps[0]->phases[0]->seconds == 0.25);
    store_read_fini(&r);
    bench_remove(&b);
}

static int64_t output_ns; /* when the coordinator gets it */

static uint64_t output(struct bench *b, uint32_t attempt, uint64_t offset, const char *text)
{
    Ballast__LogChunk chunk = BALLAST__LOG_CHUNK__INIT;
    chunk.job_id = 3;
    chunk.attempt = attempt;
    chunk.rank = 1;
    chunk.offset = offset;
    chunk.bytes = (ProtobufCBinaryData){strlen(text), (uint8_t *)text};
    struct store_log log = {.chunk = &chunk};
    struct store_batch batch = {.logs = &log, .n_logs = 1, .wall_ns = output_ns};
    assert_int_equal(do_batch(b, &batch), 0);
    return log.stored_offset;
}

static void expect_output(struct bench *b, uint64_t from, const char *text)
{
    struct store_read r = do_read(b, (struct store_read){.kind = STORE_OUTPUT, .job = 3, .rank = 1,
                                                         .from = from, .limit = 4096});
    char *got = strndup((const char *)r.bytes, r.n_bytes);
    assert_int_equal(r.rc, 0);
    assert_string_equal(got, text);
    assert_int_equal(r.next, from + strlen(text));
    free(got);
    store_read_fini(&r);
}

static void expect_last(struct bench *b, uint32_t n_bytes, uint64_t from, const char *text)
{
    struct store_read r = do_read(b, (struct store_read){.kind = STORE_OUTPUT, .job = 3, .rank = 1,
                                                         .from = 3, .last = n_bytes,
                                                         .limit = 4096});
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.n_bytes, strlen(text));
    assert_memory_equal(r.bytes, text, r.n_bytes);
    assert_int_equal(r.next, from + r.n_bytes);
    store_read_fini(&r);
}

static void output_is_stored_once_in_order(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    bench_open(&b);
    tell_jobs_until(&b, 3);
    assert_int_equal(output(&b, 1, 0, "hello "), 6);
    assert_int_equal(output(&b, 1, 6, "world\n"), 12);
    assert_int_equal(output(&b, 1, 0, "hello world\n"), 12); /* said again */
    assert_int_equal(output(&b, 1, 6, "world\nmore\n"), 17); /* partly new */
    store_close(b.store);
    bench_open(&b);
    assert_int_equal(output(&b, 2, 0, "second\n"), 7);
    assert_int_equal(output(&b, 1, 17, "late\n"), 22); /* an older attempt has no place any more */
    assert_int_equal(output(&b, 2, 0, "second\nagain\n"), 13);
    expect_output(&b, 0, "hello world\nmore\nsecond\nagain\n");
    expect_output(&b, 12, "more\nsecond\nagain\n");
    expect_last(&b, 6, 24, "again\n");
    expect_last(&b, 100, 0, "hello world\nmore\nsecond\nagain\n");
    assert_int_equal(output(&b, 2, 23, "x\n"), 25);
    assert_int_equal(output(&b, 2, 23, "x\ny\n"), 27);
    expect_output(&b, 17, "second\nagain\n[ballast: 10 bytes of output are missing here]\nx\ny\n");
    bench_remove(&b);
}

static void expect_times(struct bench *b, uint64_t from, uint32_t limit, const char *text)
{
    struct store_read r = do_read(b, (struct store_read){.kind = STORE_OUTPUT, .job = 3, .rank = 1,
                                                         .from = from, .limit = limit,
                                                         .with_times = true});
    char got[256] = "";
    for (size_t i = 0; i < r.n_times; i++)
        sprintf(got + strlen(got), " %d@%d", (int)r.times[i]->offset,
                (int)(r.times[i]->at_ns / NS_PER_MS));
    assert_string_equal(got, text);
    store_read_fini(&r);
}

static void output_is_stored_with_its_time(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    bench_open(&b);
    tell_jobs_until(&b, 3);
    static const struct { uint32_t attempt, ms; uint64_t offset; const char *text; } rows[] = {
        {1, 5000, 0, "one\n"},
        {1, 5249, 4, "two\n"},            /* about the same time */
        {1, 5250, 8, "three\n"},
        {1, 9000, 8, "three\n"},          /* said again: it came before */
        {1, 4000, 14, "four\n"},          /* the clock was set back */
        {2, 4100, 0, "one\n"},            /* an attempt begins a segment whenever it comes */
        {2, 6000, 2, "e\ntwo\nthree\n"}, /* partly new */
        {2, 9000, 18, "end\n"},           /* the gap is told in the log */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        output_ns = rows[i].ms * (int64_t)NS_PER_MS;
        output(&b, rows[i].attempt, rows[i].offset, rows[i].text);
        if (i == 4) { /* it is not lost with the process */
            store_close(b.store);
            bench_open(&b);
        }
    }
    output_ns = 0;
    expect_output(&b, 0, "one\ntwo\nthree\nfour\none\ntwo\nthree\n"
                  "[ballast: 4 bytes of output are missing here]\nend\n");
    expect_times(&b, 0, 4096, " 0@5000 8@5250 14@4000 19@4100 23@6000 79@9000");
    expect_times(&b, 10, 10, " 10@5250 14@4000 19@4100"); /* the first byte's, too */
    expect_times(&b, 83, 10, "");
    bench_remove(&b);
}

static void endless_output_is_capped(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    bench_open(&b);
    char *block = xcalloc(1, (1 << 20) + 1);
    memset(block, 'x', 1 << 20);
    for (uint64_t i = 0; i < 70; i++)
        assert_int_equal(output(&b, 1, i << 20, block), (i + 1) << 20);
    struct stat st;
    char path[96];
    snprintf(path, sizeof path, "%s/logs/3/1.log", b.folder);
    assert_int_equal(stat(path, &st), 0);
    assert_in_range(st.st_size, 64 << 20, (64 << 20) + 100);
    free(block);
    bench_remove(&b);
}

static void a_second_process_is_refused(void **state)
{
    (void)state;
    struct bench b;
    bench_make(&b);
    bench_open(&b);
    struct store *second;
    struct err err = {0};
    assert_int_equal(store_open(b.folder, notify, &b, &second, &err), -EBUSY);
    char pid[64];
    snprintf(pid, sizeof pid, "in use by another coordinator, process %d", (int)getpid());
    assert_non_null(strstr(err.text, pid));
    bench_remove(&b);
}

static void files_of_other_versions(void **state)
{
    (void)state;
    static const char one[] = "CREATE TABLE a (x INTEGER) STRICT; INSERT INTO a VALUES (7);";
    static const char two[] = "ALTER TABLE a ADD COLUMN y INTEGER; UPDATE a SET y = x + 1;";
    static const char bad[] = "UPDATE a SET x = 0; INSERT INTO missing VALUES (1);";
    static const char *const steps[] = {one, two}, *const broken[] = {one, bad};
    const struct schema v1 = {"test", 77, steps, 1}, v2 = {"test", 77, steps, 2},
                        v2_broken = {"test", 77, broken, 2}, other = {"other", 78, steps, 1};
    struct bench b;
    sqlite3 *db;
    char path[96], backup[128];
    struct err err = {0};
    bench_make(&b);
    snprintf(path, sizeof path, "%s/x.db", b.folder);
    snprintf(backup, sizeof backup, "%s.v1.backup", path);

    assert_int_equal(db_open(path, &v1, true, &db, &err), 0);
    db_close(db);
    assert_true(db_open(path, &v2_broken, true, &db, &err) < 0); /* changes nothing */
    assert_int_equal(db_open(path, &v1, true, &db, &err), 0);
    assert_int_equal(db_exec(db, "UPDATE a SET x = x / (x = 7)", &err), 0);
    db_close(db);
    assert_int_equal(db_open(path, &v2, true, &db, &err), 0);
    sqlite3_stmt *q;
    assert_int_equal(db_prepare(db, "SELECT y FROM a", &q, &err), 0);
    assert_int_equal(db_next(q, &err), 1);
    assert_int_equal(sqlite3_column_int(q, 0), 8);
    db_close(db);
    assert_int_equal(db_open(backup, &v1, true, &db, &err), 0); /* a whole database */
    db_close(db);

    assert_int_equal(db_open(path, &v1, true, &db, &err), -EPROTO);
    assert_non_null(strstr(err.text, "newer ballast (version 2, this one knows 1)"));
    assert_int_equal(db_open(path, &other, true, &db, &err), -EBADMSG);
    FILE *f = fopen(path, "w");
    fprintf(f, "this is no database, and long enough to be looked at: ........................\n");
    fclose(f);
    assert_int_equal(db_open(path, &v2, true, &db, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "x.db: is damaged, or no SQLite database: put a backup"));

    /* The same of damage that opening does not see. */
    unlink(path);
    assert_int_equal(db_open(path, &v1, true, &db, &err), 0);
    db_close(db);
    assert_non_null(f = fopen(path, "r+"));
    fseek(f, 4096, SEEK_SET);
    for (int i = 0; i < 4096; i++)
        fputc(0xff, f);
    fclose(f);
    assert_int_equal(db_open(path, &v1, true, &db, &err), 0);
    assert_int_equal(db_prepare(db, "SELECT x FROM a", &q, &err), 0);
    assert_int_equal(db_next(q, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "x.db: is damaged, or no SQLite database: put a backup"));
    sqlite3_finalize(q);
    db_close(db);
    bench_remove(&b);
}

/* What a file of version 2 has, and tables that refer to jobs, survive the new constraint. */
static void jobs_of_an_older_version_may_pause(void **state)
{
    (void)state;
    struct schema v2 = schema_state;
    struct bench b;
    struct story s = {0};
    sqlite3 *db;
    char path[96];
    struct err err = {0};
    v2.n_steps = 2;
    bench_make(&b);
    snprintf(path, sizeof path, "%s/state.db", b.folder);
    assert_int_equal(db_open(path, &v2, true, &db, &err), 0);
    assert_int_equal(db_exec(db, "INSERT INTO jobs (id, name, user, state, priority, gang_size, "
                             "steps, attempt, submitted_at_ns, started_at_ns) VALUES "
                             "(9, 'old', 'ada', 'RUNNING', 0, 2, 5, 1, 7, 8);"
                             "INSERT INTO attempts VALUES (9, 1, 'w0 w1', 8, 0, '')", &err), 0);
    db_close(db);
    bench_open(&b);
    say_state(&s, 9, BALLAST__JOB_STATE__JOB_STOPPING, "paused by ada");
    say_state(&s, 9, BALLAST__JOB_STATE__JOB_PAUSED, "paused by ada");
    say_state(&s, 9, BALLAST__JOB_STATE__JOB_QUEUED, "resumed by ada");
    assert_int_equal(tell(&b, &s), 0);
    store_close(b.store);
    b.store = NULL;
    char *text = query(&b, "SELECT j.state || j.started_at_ns || a.reason FROM jobs j "
                       "JOIN attempts a ON a.job = j.id WHERE a.ended_at_ns > 0");
    assert_string_equal(text, "QUEUED8paused by ada"); /* it goes on: no new start */
    free(text);
    arena_fini(&s.arena);
    bench_remove(&b);
}

/* The child acknowledges each commit through a pipe and is killed in the middle of things. */
static void kill_one_round(struct bench *b, unsigned *seed, uint64_t *last_seq)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        struct story s = {.seq = *last_seq};
        bench_open(b);
        for (;;) {
            uint64_t job = s.seq + 1;
            say_submitted(&s, job);
            say_assigned(&s, job, 1);
            if (tell(b, &s) < 0 || write(ends[1], &s.seq, sizeof s.seq) < 0)
                _exit(1);
            arena_reset(&s.arena);
        }
    }
    close(ends[1]);
    uint64_t acknowledged = *last_seq, seq;
    if (read(ends[0], &seq, sizeof seq) == sizeof seq)
        acknowledged = seq;
    usleep((useconds_t)(rand_r(seed) % 20000));
    kill(child, SIGKILL);
    while (read(ends[0], &seq, sizeof seq) == sizeof seq)
        acknowledged = seq;
    waitpid(child, NULL, 0);
    close(ends[0]);

    bench_open(b);
    struct store_read r = do_read(b, (struct store_read){.kind = STORE_RESTORE});
    assert_int_equal(r.rc, 0);
    assert_true(r.restored.last_seq >= acknowledged);
    assert_int_equal(r.n_records, r.restored.last_seq); /* all live: none lost, none half */
    assert_int_equal(r.restored.last_seq % 2, 0);
    *last_seq = r.restored.last_seq;
    store_read_fini(&r);
    store_close(b->store);
    b->store = NULL;
}

static void kill_9_loses_nothing_acknowledged(void **state)
{
    (void)state;
    struct bench b;
    unsigned seed = (unsigned)test_seed();
    uint64_t last_seq = 0;
    bench_make(&b);
    for (int round = 0; round < 20; round++)
        kill_one_round(&b, &seed, &last_seq);
    bench_remove(&b);
}

/* Files may not grow beyond a limit: SQLite sees a full disk. Nothing is acknowledged, reads are
 * served, and with space again all goes on. */
static void a_full_disk_is_survived(void **state)
{
    (void)state;
    struct bench b;
    struct story s = {0};
    begin_with_two_jobs(&b, &s);
    struct rlimit old, small = {256 << 10, RLIM_INFINITY};
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    small.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);
    uint64_t good = s.seq;
    int rc = 0;
    for (uint64_t job = 10; rc == 0 && job < 10000; job++) {
        good = s.seq;
        say_submitted(&s, job);
        rc = tell(&b, &s);
    }
    setrlimit(RLIMIT_FSIZE, &old);
    assert_true(rc < 0);
    say_submitted(&s, 20000);
    assert_int_equal(tell(&b, &s), -ECANCELED);
    struct store_read r = do_read(&b, (struct store_read){.kind = STORE_RESTORE});
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.restored.last_seq, good);
    store_read_fini(&r);
    store_resume(b.store);
    s.seq = good;
    say_submitted(&s, 30000);
    assert_int_equal(tell(&b, &s), 0);
    arena_fini(&s.arena);
    bench_remove(&b);
}

/* ---- backups --------------------------------------------------------------------------------- */

/* Waits for that one among what else comes back; counts the others. */
static size_t wait_for(struct bench *b, const struct store_batch *batch)
{
    size_t n_others = 0;
    for (;;) {
        bool found = false;
        for (struct store_batch *d = next_done(b); d; d = d->next) {
            n_others += d != batch;
            found |= d == batch;
        }
        if (found)
            return n_others;
    }
}

static void copy_path(const struct bench *b, const char *name, char out_path[96])
{
    snprintf(out_path, 96, "%s.%s", b->folder, name);
}

/* While records go on being committed; the copy opens, is whole, and a store starts from it. */
static void a_backup_under_load_opens_and_checks(void **state)
{
    (void)state;
    enum { N = 400 };
    struct bench b, restored;
    struct story s = {0}, more[N];
    static struct store_batch batches[N];
    char path[96], command[256];
    bench_make(&b);
    bench_open(&b);
    copy_path(&b, "copy", path);
    for (int job = 1; job <= 40; job++) { /* some pages to copy */
        for (int i = 0; i < 60; i++) {
            if (i == 0)
                say_submitted(&s, (uint64_t)job);
            else
                say_state(&s, (uint64_t)job, BALLAST__JOB_STATE__JOB_QUEUED,
                          "a reason that takes some room in the log, again and again and again");
        }
        assert_int_equal(tell(&b, &s), 0);
    }
    uint64_t n_before = s.seq;
    struct store_read read = {.kind = STORE_BACKUP, .path = path};
    struct store_batch backup = {.reads = &read, .n_reads = 1};
    store_submit(b.store, &backup);
    for (int i = 0; i < N; i++) {
        more[i] = (struct story){.seq = s.seq};
        say_state(&more[i], 1, BALLAST__JOB_STATE__JOB_QUEUED, "while the copy is made");
        s.seq = more[i].seq;
        batches[i] = (struct store_batch){.records = more[i].records, .n_records = 1};
        store_submit(b.store, &batches[i]);
    }
    wait_for(&b, &backup);
    if (read.rc < 0)
        fail_msg("%s", read.err.text);
    assert_true(read.total > 100000);
    store_close(b.store); /* finishes what was handed over */
    for (int i = 0; i < N; i++)
        assert_int_equal(batches[i].rc, 0);

    bench_make(&restored);
    snprintf(command, sizeof command, "ls %s.copy*; cp %s %s/state.db", b.folder, path,
             restored.folder);
    assert_int_equal(system(command), 0);
    bench_open(&restored); /* it stands alone, and its newest record is the last of its log */
    struct store_read r = do_read(&restored, (struct store_read){.kind = STORE_RESTORE});
    if (r.rc < 0)
        fail_msg("%s", r.err.text);
    assert_in_range(r.restored.last_seq, n_before, n_before + N);
    assert_int_equal(r.restored.last_job, 40);
    store_read_fini(&r);
    bench_remove(&restored);
    for (int i = 0; i < N; i++)
        arena_fini(&more[i].arena);
    arena_fini(&s.arena);
    b.store = NULL;
    unlink(path);
    bench_remove(&b);
}

static void a_backup_that_cannot_be_leaves_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *path; /* with %s for the state folder */
        int rc;
        const char *text;
    } rows[] = {
        {"%s/copy.db", -EINVAL, "lies in state_dir"},
        {"%s/logs/../copy.db", -EINVAL, "lies in state_dir"},
        {"%s/state.db-journal", -EINVAL, "lies in state_dir"},
        {"%s.exists", -EEXIST, "exists; choose another name"},
        {"%s.link", -EEXIST, "exists; choose another name"},
        {"%s.nowhere/copy.db", -ENOENT, "its folder: No such file"},
        {"/proc/copy.db", -ENOENT, "cannot be made"},
    };
    struct bench b;
    char command[256], path[128];
    bench_make(&b);
    bench_open(&b);
    snprintf(command, sizeof command, "touch %s.exists; ln -s %s/other %s.link", b.folder,
             b.folder, b.folder);
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(path, sizeof path, rows[i].path, b.folder);
#pragma GCC diagnostic pop
        struct store_read r = do_read(&b, (struct store_read){.kind = STORE_BACKUP, .path = path});
        if (r.rc != rows[i].rc || !strstr(r.err.text, rows[i].text))
            fail_msg("%s: rc %d '%s'", path, r.rc, r.err.text);
        store_read_fini(&r);
    }
    snprintf(command, sizeof command, "rm %s.exists %s.link; ! ls %s.*part* %s/*part* 2>/dev/null",
             b.folder, b.folder, b.folder, b.folder);
    assert_int_equal(system(command), 0);
    bench_remove(&b);
}

/* Loads travel with their turn's records, and are there for who asks after it. */
static void loads_are_stored_with_their_turn(void **state)
{
    (void)state;
    struct bench b;
    uint32_t tokens[3] = {5, 1, 0};
    Ballast__LayerLoad layer = BALLAST__LAYER_LOAD__INIT, *layers[] = {&layer};
    Ballast__LoadReport report = BALLAST__LOAD_REPORT__INIT;
    layer.layer = 4;
    layer.tokens = tokens;
    layer.n_tokens = report.n_experts = 3;
    report.n_nodes = report.attempt = report.first_step = 1;
    report.last_step = 20;
    report.layers = layers;
    report.n_layers = 1;
    bench_make(&b);
    bench_open(&b);
    tell_jobs_until(&b, 2);
    struct turn_load load = {2, &report};
    struct store_batch batch = {.loads = &load, .n_loads = 1, .wall_ns = clock_wall_ns()};
    assert_int_equal(do_batch(&b, &batch), 0);
    struct store_read r = do_read(&b, (struct store_read){
        .kind = STORE_LOADS, .job = 2, .window = STORE_1M, .layer = -1});
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.loads.n_layers, 1);
    assert_int_equal(r.loads.layers[0]->tokens[0], 5);
    assert_true(r.loads.layers[0]->imbalance_experts == 2.5);
    assert_non_null(r.spec);
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_LOADS, .job = 1, .layer = -1});
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.loads.n_layers, 0);
    store_read_fini(&r);
    r = do_read(&b, (struct store_read){.kind = STORE_LOADS, .job = 77, .layer = -1});
    assert_int_equal(r.rc, -ENOENT);
    store_read_fini(&r);
    bench_remove(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restart_loads_the_live_jobs_only),
        cmocka_unit_test(jobs_and_events_are_read_in_pages),
        cmocka_unit_test(events_tell_steps),
        cmocka_unit_test(query_tables_can_be_made_again),
        cmocka_unit_test(a_later_attempt_replaces_steps),
        cmocka_unit_test(output_is_stored_once_in_order),
        cmocka_unit_test(output_is_stored_with_its_time),
        cmocka_unit_test(endless_output_is_capped),
        cmocka_unit_test(a_second_process_is_refused),
        cmocka_unit_test(files_of_other_versions),
        cmocka_unit_test(jobs_of_an_older_version_may_pause),
        cmocka_unit_test(kill_9_loses_nothing_acknowledged),
        cmocka_unit_test(a_full_disk_is_survived),
        cmocka_unit_test(a_backup_under_load_opens_and_checks),
        cmocka_unit_test(a_backup_that_cannot_be_leaves_nothing),
        cmocka_unit_test(loads_are_stored_with_their_turn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
