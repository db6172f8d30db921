/* test_ctl_data.c - the client about what a step read, reported or not */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/a_coordinator.h"
#include "tests/a_job.h"

#define M(NAME) BALLAST__METHOD__METHOD_##NAME

/* ---- what it is told ------------------------------------------------------------------------- */

static Ballast__JobSpec spec;
static Ballast__Job the_job;
static Ballast__JobShowReply shown;

/* Six sequences an epoch, two a step. */
static void tell_job(void)
{
    char *path = xasprintf("%s/a.txt", fake.folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("abcdefghijklmnopqrstuvwxyz", f);
    fclose(f);
    a_job_init(&spec, 1);
    free(spec.data_train[0]);
    spec.data_train[0] = path;
    spec.data_sequence_length = 4;
    spec.train_global_batch = 2;
    ballast__job__init(&the_job);
    the_job.id = 7;
    ballast__job_show_reply__init(&shown);
    shown.job = &the_job;
    shown.spec = &spec;
    fake_forget();
    will_say(M(JOB_SHOW), &shown.base);
}

static Ballast__StepReport report, *reports[] = {&report};
static Ballast__MetricsReply one_report, no_report;

static void make_reports(uint64_t step, uint64_t samples, uint64_t epoch_samples)
{
    ballast__step_report__init(&report);
    report.step = step;
    report.samples = samples;
    report.epoch_samples = epoch_samples;
    report.at_ns = INT64_MAX; /* no file was changed since */
    ballast__metrics_reply__init(&one_report);
    ballast__metrics_reply__init(&no_report);
    one_report.steps = reports;
    one_report.n_steps = 1;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static const struct {
    const char *shows;
    uint64_t step, samples, epoch_samples;
    bool is_newest; /* the report is not of the step that is asked for */
    const char *line;
    int code;
    const char *out, *err;
} rows[] = {
    {"a step as it was reported", 3, 6, 6, false, "data 7 --step 3 -o step,sample,epoch", 0,
     "   3       4      0\n   3       5      0\n", ""},
    {"after a rollback", 3, 16, 6, false, "data 7 --step 3 -o sample,epoch,from", 0,
     "    14      2", ""},
    {"the step after the newest", 3, 16, 6, true, "data 7 --step 4 -o sample --no-header", 0,
     "16\n17\n", "step 4 has not been reported; listed is what comes after step 3"},
    {"steps far ahead", 3, 16, 6, true, "data 7 --step 5..6 -o sample --no-header", 0,
     "18\n19\n20\n21\n", "step 5 and later ones have not been reported"},
    {"a worker that does not tell", 3, 0, 0, false, "data 7 --step 3 -o sample --no-header", 0,
     "4\n5\n", "the job has not told how far it had read"},
    {"what another job made", 9, 40, 6, false, "data 7 --step 3", 3, "",
     "job 7 has not reported step 3, but later ones"},
    {"other files", 3, 6, 5, false, "data 7 --step 3", 5, "",
     "make 6 sequences on this machine, those that job 7 read made 5"},
    {"more steps than the job has", 3, 6, 6, false, "data 7 --step 101", 3, "",
     "job 7 has no step 101: train.steps is 100"},
    {"the first of more", 3, 6, 6, false, "data 7 --step 3 -c 1 -o sample --no-header", 0, "4\n",
     "only the first 1 documents are listed"},
};

static void steps_begin_where_they_were_reported(void **state)
{
    (void)state;
    tell_job();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        make_reports(rows[i].step, rows[i].samples, rows[i].epoch_samples);
        if (rows[i].is_newest)
            will_say_then(M(METRICS), &no_report.base, &one_report.base);
        else
            will_say_then(M(METRICS), &one_report.base, &no_report.base);
        check(rows[i].line, rows[i].code, rows[i].out, rows[i].err);
    }
    make_reports(0, 0, 0);
    will_say(M(METRICS), &no_report.base);
    check("data 7 --step 2 -o sample --no-header", 0, "2\n3\n",
          "listed is what comes after a beginning without a checkpoint, step 0");
    a_job_fini(&spec);
}

static void what_a_job_reads_in_all(void **state)
{
    (void)state;
    tell_job();
    check("data 7", 0, "data.train       1 file, 1 document, 26 tokens\n"
          "                 6 sequences an epoch; 100 steps are 33.3 epochs\n", "");
    check("data 7 -c 3", 2, "", "of the list that --step makes");
    check("data 7 -o wide", 2, "", "of the list that --step makes");
    check("data 7 --step 5..4", 2, "", "--step: '5..4' is not a step");
    check("data 7 --step 0", 2, "", "--step: '0' is not a step");
    check("data 7 --step 1..", 2, "", "--step: '1..' is not a step");
    free(spec.data_train[0]);
    spec.data_train[0] = xstrdup("/nowhere/*.txt");
    check("data 7", 1, "not counted on this machine", "on this machine data.train: no file matches "
          "'/nowhere/*.txt'; the workers look for their own");
    make_reports(3, 6, 6);
    will_say_then(M(METRICS), &one_report.base, &no_report.base);
    check("data 7 --step 3", 1, "", "on this machine data.train: no file matches '/nowhere/*.txt'; "
          "ask on one that has the files");
    will_refuse(M(JOB_SHOW), BALLAST__CODE__NOT_FOUND, "", "no job 7");
    check("data 7", 3, "", "no job 7");
    a_job_fini(&spec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_begin_where_they_were_reported),
        cmocka_unit_test(what_a_job_reads_in_all),
    };
    return cmocka_run_group_tests(tests, fake_start, fake_stop);
}
