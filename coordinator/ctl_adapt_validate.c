/* ctl_adapt_validate.c - lets ballast-worker check shrunk models of the same structure
 *
 * The client does no mathematics: it writes the shrunk configurations, runs the worker's program,
 * which lies beside it, and adds what only it knows, the prediction of the time model at the rates
 * that the worker measures. */
#include "coordinator/ctl_adapt.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/conf.h"
#include "common/file.h"

#define OUTPUT_BYTES_MAX (1u << 20)
#define TIME_LIMIT       0.25 /* of a measured step beside the predicted one */

/* ---- the worker's program ------------------------------------------------------------------- */

static char *worker_program(void)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n < 0 ? 0 : n] = '\0';
    char *slash = strrchr(self, '/');
    if (slash)
        slash[1] = '\0';
    return xasprintf("%sballast-worker", slash ? self : "");
}

static _Noreturn void be_worker(char *const *argv, int out)
{
    dup2(out, STDOUT_FILENO);
    execv(argv[0], argv);
    _exit(127);
}

/* Its output, freed with free(), and its exit code. */
static int run_worker(char *const *argv, char **out_text, int *out_code, struct err *err)
{
    int ends[2], status = 0;
    if (access(argv[0], X_OK) < 0)
        return err_set(err, -errno, "%s: %s; --validate runs the worker's program", argv[0],
                       strerror(errno));
    if (pipe(ends) < 0)
        return err_set(err, -errno, "pipe: %s", strerror(errno));
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        be_worker(argv, ends[1]);
    close(ends[1]);
    *out_text = pid < 0 ? NULL : xcalloc(1, OUTPUT_BYTES_MAX + 1);
    if (pid > 0)
        file_read(ends[0], *out_text, OUTPUT_BYTES_MAX);
    close(ends[0]);
    if (pid < 0)
        return err_set(err, -EAGAIN, "no process for %s", argv[0]);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    *out_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    return 0;
}

/* ---- checks --------------------------------------------------------------------------------- */

struct run {
    const struct adapt *a;
    struct adapt_validation *v;
    char *worker, *folder; /* a new one */
};

static void add_not_checked(struct run *r, const char *text)
{
    json_push(r->v->not_checked, json_new_string(text));
}

static void add_check(struct run *r, const char *name, bool passed, double measured, double limit,
                      const char *where)
{
    struct json *o = json_new_object();
    json_put(o, "check", json_new_string(name));
    json_put(o, "passed", json_new_bool(passed));
    json_put(o, "measured", json_new_double(measured));
    json_put(o, "limit", json_new_double(limit));
    json_put(o, "where", json_new_string(where));
    json_push(r->v->checks, o);
    r->v->passed &= passed;
}

/* Each line of text is an object: checks are kept, the last line with step_seconds is given. */
static void take_lines(struct run *r, char *text, double *out_step_s)
{
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        struct json *o;
        bool passed = false;
        if (json_parse(line, strlen(line), OUTPUT_BYTES_MAX, &o, NULL) < 0)
            continue;
        json_as_double(json_get(o, "step_seconds"), out_step_s);
        if (json_get(o, "check")) {
            json_as_bool(json_get(o, "passed"), &passed);
            r->v->passed &= passed;
            json_push(r->v->checks, json_copy(o));
        }
        json_destroy(o);
    }
}

static int make_model(struct run *r, enum shrink_size size, char **out, struct err *err)
{
    *out = xasprintf("%s/%s", r->folder, size == SHRINK_SMALL ? "small" : "wide");
    if (mkdir(*out, 0777) < 0)
        return err_set(err, -errno, "%s: %s", *out, strerror(errno));
    return adapt_shrink(r->a, size, *out, err);
}

static int check_numbers(struct run *r, struct err *err)
{
    char *model = NULL, *text = NULL;
    double step_s = NAN;
    int code = 0, rc = make_model(r, SHRINK_SMALL, &model, err);
    if (rc == 0) {
        char *argv[] = {r->worker, (char *)"validate", model, (char *)"--self", (char *)"--json",
                        NULL};
        rc = run_worker(argv, &text, &code, err);
    }
    if (rc == 0) {
        take_lines(r, text, &step_s);
        if (code > 1 || isnan(step_s))
            add_check(r, "the worker's program", false, code, 0, "it ended before its checks did");
    }
    free(text);
    free(model);
    return rc;
}

/* ---- time ----------------------------------------------------------------------------------- */

static int measure_machine(struct run *r, struct cluster *out, struct err *err)
{
    char *file = xasprintf("%s/cluster.yaml", r->folder), *text = NULL;
    char *argv[] = {r->worker, (char *)"bench", (char *)"--cluster", (char *)"--threads",
                    (char *)"1", (char *)"--out", file, NULL};
    int code = 0, rc = run_worker(argv, &text, &code, err);
    if (rc == 0)
        rc = conf_read(file, &cluster_table, out, err);
    free(text);
    free(file);
    return rc;
}

static int check_time(struct run *r, struct err *err)
{
    char *model = NULL, *text = NULL, where[160];
    double measured = NAN;
    struct plan_time predicted = {.total = NAN};
    struct cluster l = {0};
    int code = 0, rc = make_model(r, SHRINK_WIDE, &model, err);
    if (rc == 0 && (rc = measure_machine(r, &l, err)) == 0) {
        char *argv[] = {r->worker, (char *)"validate", model, (char *)"--self", (char *)"--speed",
                        (char *)"--json", NULL};
        if ((rc = run_worker(argv, &text, &code, err)) == 0)
            take_lines(r, text, &measured);
        if (rc == 0)
            rc = plan_time_alone(model, &l, 4, 256, &predicted, err);
    }
    if (rc == 0) {
        double off = fabs(predicted.total / measured - 1);
        snprintf(where, sizeof where, "a step of 1,024 tokens of a wider model: %.1f ms measured, "
                 "%.1f ms predicted", 1e3 * measured, 1e3 * predicted.total);
        add_check(r, "time of a step beside its prediction", off <= TIME_LIMIT,
                  isnan(off) ? 1e9 : off, TIME_LIMIT, where);
    }
    fields_fini(&cluster_table, &l);
    free(text);
    free(model);
    return rc;
}

/* ---- all of it ------------------------------------------------------------------------------ */

static void remove_folder(const char *folder)
{
    static const char *const names[] = {"small/config.json", "wide/config.json", "cluster.yaml",
                                        "small", "wide", ""};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *path = xasprintf("%s/%s", folder, names[i]);
        remove(path);
        free(path);
    }
}

static void say_what_was_not(struct run *r)
{
    add_not_checked(r, "the published weights, and the model at its own widths");
    add_not_checked(r, "other programs' results: there is no reference of this model; "
                       "ballast-worker validate --expect compares with one");
    add_not_checked(r, "GPUs, and bf16: ballast-worker validate --device and --dtype");
    add_not_checked(r, "adapters, packed base weights, and runs of more than one process");
}

int adapt_validate(const struct adapt *a, struct adapt_validation *out, struct err *err)
{
    char folder[] = "/tmp/ballast-adapt.XXXXXX", text[1200];
    struct run r = {.a = a, .v = out};
    int rc = 0;
    *out = (struct adapt_validation){json_new_array(), json_new_array(), true};
    if (!a->runs) {
        snprintf(text, sizeof text, "anything: the engine does not train this model yet (%s)",
                 a->why_not);
        add_not_checked(&r, text);
        out->passed = false;
        return 0;
    }
    if (!mkdtemp(folder))
        return err_set(err, -errno, "%s: %s", folder, strerror(errno));
    r.folder = folder;
    r.worker = worker_program();
    if ((rc = check_numbers(&r, err)) == 0)
        rc = check_time(&r, err);
    say_what_was_not(&r);
    remove_folder(folder);
    free(r.worker);
    return rc;
}

void adapt_validation_fini(struct adapt_validation *v)
{
    json_destroy(v->checks);
    json_destroy(v->not_checked);
}

struct adapt_check adapt_validation_check(const struct adapt_validation *v, size_t i)
{
    const struct json *o = json_at(v->checks, i);
    struct adapt_check c = {json_as_string(json_get(o, "check")),
                            json_as_string(json_get(o, "where")), false, NAN, NAN};
    json_as_bool(json_get(o, "passed"), &c.passed);
    json_as_double(json_get(o, "measured"), &c.measured);
    json_as_double(json_get(o, "limit"), &c.limit);
    return c;
}

void adapt_validation_print(const struct adapt *a, const struct adapt_validation *v)
{
    static const struct ctl_column columns[] = {
        {"CHECK", false}, {"RESULT", false}, {"MEASURED", true}, {"LIMIT", true},
        {"WHERE", false}};
    struct ctl_table t = {.columns = columns, .n_columns = 5};
    for (size_t i = 0; i < json_count(v->checks); i++) {
        struct adapt_check c = adapt_validation_check(v, i);
        ctl_table_cell(&t, "%s", c.name);
        ctl_table_cell(&t, "%s", c.passed ? "pass" : "FAIL");
        ctl_table_color(&t, c.passed ? "32" : "31");
        ctl_table_cell(&t, "%.3g", c.measured);
        ctl_table_cell(&t, "%.3g", c.limit);
        ctl_table_cell(&t, "%s", c.where);
    }
    putchar('\n');
    if (json_count(v->checks))
        ctl_table_print(a->c, &t);
    ctl_table_fini(&t);
    for (size_t i = 0; i < json_count(v->not_checked); i++)
        printf("not checked  %s\n", json_as_string(json_at(v->not_checked, i)));
}
