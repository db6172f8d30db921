/* test_ctl_hands.c - what hands that know other schedulers try in the first minutes */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <signal.h>

#include "tests/a_coordinator.h"

static void groups_have_help(void **state)
{
    (void)state;
    check("job --help", 0, "\n  job cancel ID...             stop a job for good", "");
    check("help job", 0, "Usage: ballast job COMMAND", "");
    check("help job cancel", 0, "Usage: ballast job cancel ID...", "");
    check("job cancel 7 --help", 0, "Usage: ballast job cancel ID...", "");
    check("help", 0, "Exit codes:", "");
    check("help jbo", 2, "", "'jbo' is not a command; did you mean 'ballast job");
    check("help 'jobs\n7'", 2, "", "is not a command");
    check("jbos --help", 2, "", "did you mean 'ballast jobs'?");
    check("job nothing --help", 2, "", "'job nothing' is not a command");
    struct result r = run("job --help");
    assert_null(strstr(r.out, "\n  jobs"));
    assert_null(strstr(r.out, "\n  worker"));
    result_fini(&r);
    check("__complete help jo", 0, "job\n", "");
    check("__complete help job ca", 0, "cancel\tstop a job", "");
}

static void words_of_others_are_known(void **state)
{
    (void)state;
    check("squeue", 2, "", "'squeue' is not a command; did you mean 'ballast jobs'?");
    check("describe 7", 2, "", "did you mean 'ballast job show'?");
    check("delete 7", 2, "", "did you mean 'ballast cancel'?");
    check("hold 7 --json", 2, "", "did you mean 'ballast job hold'?");
}

static void a_configuration_is_checked_in_json(void **state)
{
    (void)state;
    struct json *v = run_json("--check-config --json");
    bool ok = false;
    assert_true(json_as_bool(json_get(v, "ok"), &ok) && ok);
    assert_string_equal(json_as_string(json_get(json_get(v, "address"), "source")),
                        "BALLAST_ADDRESS");
    json_destroy(v);
    check("--check-config --json --address tcp://8.8.8.8:1", 2, "",
          "\"code\":\"INVALID_ARGUMENT\"");
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void say_jobs(Ballast__JobReply *first, Ballast__JobReply *then)
{
    fake_forget();
    will_say_then(BALLAST__METHOD__METHOD_JOB_WAIT, &first->base, &then->base);
}

/* The first answer is about the first of them, the others are about all. */
static void several_jobs_are_waited_for(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        Ballast__JobState first, then;
        const char *exit, *line;
        int code;
        const char *out, *err;
    } rows[] = {
        {"all end well", BALLAST__JOB_STATE__JOB_RUNNING, BALLAST__JOB_STATE__JOB_DONE, "0",
         "wait 7 8 9", 0, "", ""},
        {"the first that does not, in their order", BALLAST__JOB_STATE__JOB_FAILED,
         BALLAST__JOB_STATE__JOB_DONE, "0:9", "wait 7 8 9", 137, "", "job 7 is FAILED"},
        {"or a later one", BALLAST__JOB_STATE__JOB_DONE, BALLAST__JOB_STATE__JOB_CANCELLED, "",
         "wait 7 8", 1, "", "is CANCELLED"},
        {"the same twice", BALLAST__JOB_STATE__JOB_DONE, BALLAST__JOB_STATE__JOB_DONE, "0",
         "wait 7 7", 0, "", ""},
        {"any is the one that is there first", BALLAST__JOB_STATE__JOB_RUNNING,
         BALLAST__JOB_STATE__JOB_DONE, "0", "wait --any 7 8 9", 0, "8\n", ""},
        {"and its end is the command's", BALLAST__JOB_STATE__JOB_RUNNING,
         BALLAST__JOB_STATE__JOB_FAILED, "1", "wait --any 7 8", 1, "8\n", "is FAILED"},
        {"one that will never be there is no answer", BALLAST__JOB_STATE__JOB_FAILED,
         BALLAST__JOB_STATE__JOB_RUNNING, "1", "wait 7 8 --any --for=state=RUNNING", 0, "8\n",
         "job 7 will not be RUNNING"},
        {"unless all are such", BALLAST__JOB_STATE__JOB_FAILED, BALLAST__JOB_STATE__JOB_FAILED,
         "1", "wait 7 8 --any --for=state=RUNNING", 1, "", "will not be RUNNING: it is FAILED ("},
        {"all are to run", BALLAST__JOB_STATE__JOB_QUEUED, BALLAST__JOB_STATE__JOB_RUNNING, "",
         "wait 7 8 --for=state=RUNNING", 0, "", ""},
        {"those that are late", BALLAST__JOB_STATE__JOB_DONE, BALLAST__JOB_STATE__JOB_QUEUED, "0",
         "wait 7 8 9 --timeout 0.3", 124, "", "jobs 8, 9: the time to wait is over"},
        {"none is there in time", BALLAST__JOB_STATE__JOB_QUEUED, BALLAST__JOB_STATE__JOB_QUEUED,
         "0", "wait 7 --any --timeout 0.3", 124, "", "job 7: the time to wait is over"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Ballast__Job first = BALLAST__JOB__INIT, then = BALLAST__JOB__INIT;
        Ballast__JobReply a = BALLAST__JOB_REPLY__INIT, b = BALLAST__JOB_REPLY__INIT;
        first.id = 7;
        then.id = 8;
        first.state = rows[i].first;
        then.state = rows[i].then;
        first.exit = then.exit = (char *)rows[i].exit;
        first.reason = then.reason = "because";
        a.job = &first;
        b.job = &then;
        say_jobs(&a, &b);
        struct result r = run(rows[i].line);
        bool is_silent = !*rows[i].err && *r.err;
        if (r.code != rows[i].code || strcmp(r.out, rows[i].out) || is_silent ||
            !strstr(r.err, rows[i].err))
            fail_msg("%s: exit %d, '%s', '%s'", rows[i].shows, r.code, r.out, r.err);
        result_fini(&r);
    }
    fake_forget();
}

static void what_was_waited_for_is_told_in_json(void **state)
{
    (void)state;
    Ballast__Job job = BALLAST__JOB__INIT;
    Ballast__JobReply reply = BALLAST__JOB_REPLY__INIT;
    job.id = 7;
    job.state = BALLAST__JOB_STATE__JOB_DONE;
    reply.job = &job;
    say_jobs(&reply, &reply);
    struct json *v = run_json("wait 7 8 --json");
    assert_string_equal(json_as_string(json_get(v, "kind")), "JobList");
    assert_int_equal(json_count(json_get(v, "items")), 2);
    json_destroy(v);
    v = run_json("wait 7 8 --any --json");
    assert_string_equal(json_as_string(json_get(v, "id")), "7");
    json_destroy(v);
    will_refuse(BALLAST__METHOD__METHOD_JOB_WAIT, BALLAST__CODE__NOT_FOUND, "NO_JOB", "no job 9");
    check("wait 7 9", 3, "", "no job 9");
    check("wait 7 x", 2, "", "'x' is not a job id");
    check("wait", 2, "", "missing arguments; usage: ballast wait ID...");
}

/* ---- where the time goes --------------------------------------------------------------------- */

static size_t longest_line(const char *text)
{
    size_t longest = 0;
    for (; *text; text += strcspn(text, "\n") + (text[strcspn(text, "\n")] != '\0'))
        longest = strcspn(text, "\n") > longest ? strcspn(text, "\n") : longest;
    return longest;
}

static void phases_fit_a_screen(void **state)
{
    (void)state;
    static char *const names[] = {
        "data", "embedding", "kda", "mla", "mlp", "moe", "experts", "head", "other", "gather",
        "dispatch", "reduce", "agree", "optimizer", "migration", "validation", "checkpoint",
        "gather_hidden", "dispatch_hidden", "reduce_hidden",
    };
    enum { N = sizeof names / sizeof *names, STEPS = 2 };
    Ballast__PhaseTime phases[STEPS][N], *of[STEPS][N];
    Ballast__StepReport step[STEPS], *steps[STEPS];
    Ballast__MetricsReply reply = BALLAST__METRICS_REPLY__INIT, no_more = reply;
    for (size_t s = 0; s < STEPS; s++) {
        ballast__step_report__init(&step[s]);
        step[s].step = s + 1;
        steps[s] = &step[s];
        for (size_t i = 0; i < N; i++) {
            ballast__phase_time__init(&phases[s][i]);
            phases[s][i].name = names[i];
            phases[s][i].seconds = s ? 3 : 1; /* the second step takes as long again, and more */
            of[s][i] = &phases[s][i];
        }
        step[s].phases = of[s];
        step[s].n_phases = N;
    }
    reply.steps = steps;
    reply.n_steps = STEPS;
    fake_forget();
    will_say_then(BALLAST__METHOD__METHOD_METRICS, &reply.base, &no_more.base);
    struct result r = run("metrics 7 --phases");
    assert_int_equal(r.code, 0);
    if (longest_line(r.out) > 100)
        fail_msg("%zu columns: %s", longest_line(r.out), r.out);
    static const char *const lines[] = {
        "    STEP   STEP-MS   COMPUTE   GATHER  DISPATCH   REDUCE    AGREE    DATA    OPTIM"
        "     REST   HIDDEN\n",
        "       1   17000.0    8000.0   1000.0    1000.0   1000.0   1000.0  1000.0   1000.0"
        "   3000.0   3000.0\n",
        "PHASE              MEAN-MS    SHARE     MAX-MS   IN-STEP\n",
        "kda                2000.00    5.9 %    3000.00         2\n",
        "gather_hidden      2000.00        -    3000.00         2\n",
        "step              34000.00  100.0 %   51000.00         2\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(r.out, lines[i]))
            fail_msg("no '%s' in %s", lines[i], r.out);
    result_fini(&r);
    will_say_then(BALLAST__METHOD__METHOD_METRICS, &reply.base, &no_more.base);
    check("metrics 7 --phases -o step,kda", 2, "", "'kda' is not a column");
    will_say_then(BALLAST__METHOD__METHOD_METRICS, &reply.base, &no_more.base);
    check("metrics 7 -o step,gather,phases -c 1", 0, "   3000.0  data 3000.0  embedding", NULL);
}

/* ---- logs ------------------------------------------------------------------------------------ */

static void the_last_lines_are_printed(void **state)
{
    (void)state;
    static const char text[] = "one\ntwo\nthree\n";
    static const struct {
        const char *line, *out;
        uint64_t offset; /* of what is asked for then */
    } rows[] = {
        {"logs 7 --tail 1", "three\n", 8}, {"logs 7 -n 2", "two\nthree\n", 4},
        {"logs 7 --tail 3", "one\ntwo\nthree\n", 0}, {"logs 7 --tail 9", "one\ntwo\nthree\n", 0},
        {"logs 7 --tail 0", "", 14},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Ballast__LogsReply all = BALLAST__LOGS_REPLY__INIT, rest = all;
        all.bytes = (ProtobufCBinaryData){sizeof text - 1, (uint8_t *)text};
        all.next_offset = rest.next_offset = sizeof text - 1;
        all.ended = rest.ended = true;
        fake_forget();
        will_say_then(BALLAST__METHOD__METHOD_LOGS, &all.base, &rest.base);
        check(rows[i].line, 0, "", "");
        Ballast__LogsRequest *asked = (Ballast__LogsRequest *)last_request(
            BALLAST__METHOD__METHOD_LOGS, &ballast__logs_request__descriptor);
        if (asked->offset != rows[i].offset || asked->last_bytes)
            fail_msg("%s: from %llu on", rows[i].line, (unsigned long long)asked->offset);
        protobuf_c_message_free_unpacked(&asked->base, NULL);
    }
    check("logs 7 --tail -1", 2, "", "--tail: '-1' is not a whole number");
}

/* ---- letters of all widths ------------------------------------------------------------------- */

static void columns_stand_below_each_other(void **state)
{
    (void)state;
    Ballast__Job jobs[2] = {BALLAST__JOB__INIT, BALLAST__JOB__INIT}, *of[2] = {&jobs[0], &jobs[1]};
    Ballast__JobListReply reply = BALLAST__JOB_LIST_REPLY__INIT;
    jobs[0].id = jobs[1].id = 7;
    jobs[0].name = "\xe6\xa8\xa1\xe5\x9e\x8b"; /* two letters of two cells each */
    jobs[1].name = "e\xcc\x81" "bcdef"; /* one of no cell */
    jobs[0].user = jobs[1].user = "x";
    reply.jobs = of;
    reply.n_jobs = 2;
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_JOB_LIST, &reply.base);
    check("jobs -o name,user", 0, "NAME    USER\n"
          "\xe6\xa8\xa1\xe5\x9e\x8b    x\n"
          "e\xcc\x81" "bcdef  x\n", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_have_help),
        cmocka_unit_test(words_of_others_are_known),
        cmocka_unit_test(a_configuration_is_checked_in_json),
        cmocka_unit_test(several_jobs_are_waited_for),
        cmocka_unit_test(what_was_waited_for_is_told_in_json),
        cmocka_unit_test(phases_fit_a_screen),
        cmocka_unit_test(the_last_lines_are_printed),
        cmocka_unit_test(columns_stand_below_each_other),
    };
    return cmocka_run_group_tests(tests, fake_start, fake_stop);
}
