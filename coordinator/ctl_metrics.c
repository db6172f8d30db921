/* ctl_metrics.c - steps of a job as a table, CSV, JSON or a drawing */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"

#define PAGE_STEPS 1000u
#define HOLD_MS    10000u

/* ---- collecting ----------------------------------------------------------------------------- */

typedef void step_function(const struct ctl *c, const Ballast__StepReport *step, void *context);

/* With --count N: the step after which the newest N begin. */
static int first_step(struct ctl *c, job_id id, uint64_t *out_after)
{
    Ballast__JobWaitRequest request = BALLAST__JOB_WAIT_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.job_id = id;
    int rc = ctl_poll(c, BALLAST__METHOD__METHOD_JOB_WAIT, &request.base, 0, &message);
    const Ballast__Job *job = rc == CTL_OK ? ((const Ballast__JobReply *)message)->job : NULL;
    *out_after = job && job->step > c->count ? job->step - c->count : 0;
    return rc;
}

/* Calls each step in order; goes on with -f until the job has ended. */
static int each_step(struct ctl *c, job_id id, step_function *each, void *context)
{
    Ballast__MetricsRequest request = BALLAST__METRICS_REQUEST__INIT;
    request.job_id = id;
    request.limit = PAGE_STEPS;
    int rc = c->count ? first_step(c, id, &request.after_step) : CTL_OK;
    while (rc == CTL_OK) {
        const ProtobufCMessage *message;
        request.wait_ms = c->follow ? HOLD_MS : 0;
        arena_reset(&c->arena);
        rc = ctl_poll(c, BALLAST__METHOD__METHOD_METRICS, &request.base, request.wait_ms,
                      &message);
        if (rc != CTL_OK)
            break;
        const Ballast__MetricsReply *reply = (const Ballast__MetricsReply *)message;
        for (size_t i = 0; i < reply->n_steps; i++) {
            each(c, reply->steps[i], context);
            request.after_step = reply->steps[i]->step;
        }
        fflush(stdout);
        if (!reply->n_steps && (reply->ended || !c->follow))
            break;
    }
    return rc;
}

/* ---- CSV and lines -------------------------------------------------------------------------- */

static void print_csv_number(double x)
{
    if (isfinite(x))
        printf("%.9g", x);
}

static void print_csv(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    bool *has_header = context;
    char at[CLOCK_STAMP_BYTES];
    if (!*has_header && !c->no_header) {
        printf("step,loss,validation_loss,grad_norm,lr,tokens_per_second,mfu,memory_bytes,"
               "imbalance,aux_loss,z_loss,index_loss,rerouted,dropped,skipped,attempt,at,"
               "memory_planned_bytes");
        for (size_t i = 0; c->phases && i < s->n_phases; i++) {
            printf(",seconds_");
            ctl_print_escaped(stdout, s->phases[i]->name, strlen(s->phases[i]->name), false);
        }
        putchar('\n');
    }
    *has_header = true;
    const double numbers[] = {s->loss, s->validation_loss, s->grad_norm, s->lr,
                              s->tokens_per_second, s->mfu};
    printf("%" PRIu64, s->step);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        putchar(',');
        print_csv_number(numbers[i]);
    }
    printf(",%" PRIu64 ",", s->memory_bytes);
    print_csv_number(s->imbalance);
    putchar(',');
    print_csv_number(s->aux_loss);
    putchar(',');
    print_csv_number(s->z_loss);
    putchar(',');
    print_csv_number(s->index_loss);
    clock_stamp(s->at_ns, at);
    printf(",%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu32 ",%s,%" PRIu64, s->rerouted,
           s->dropped, s->skipped, s->attempt, at, s->memory_planned_bytes);
    for (size_t i = 0; c->phases && i < s->n_phases; i++) {
        putchar(',');
        print_csv_number(s->phases[i]->seconds);
    }
    putchar('\n');
}

static void print_number(int digits, int decimals, double x)
{
    if (isfinite(x))
        printf(" %*.*f", digits, decimals, x);
    else
        printf(" %*s", digits, "-");
}

static void print_line(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    bool *has_header = context;
    char bytes[32], planned[32];
    if (!*has_header && !c->no_header)
        printf("%8s %9s %9s %9s %9s %10s %6s %11s %11s %6s%s\n", "STEP", "LOSS", "VALID",
               "GRADNORM", "LR", "TOKENS/S", "MFU", "MEMORY", "PLANNED", "IMBAL",
               c->phases ? "  PHASES (ms)" : "");
    *has_header = true;
    ctl_bytes_text(s->memory_bytes, bytes);
    ctl_bytes_text(s->memory_planned_bytes, planned);
    printf("%8" PRIu64, s->step);
    print_number(9, 4, s->loss);
    print_number(9, 4, s->validation_loss);
    print_number(9, 4, s->grad_norm);
    printf(" %9.3g", s->lr);
    print_number(10, 0, s->tokens_per_second);
    print_number(6, 3, s->mfu > 0 ? s->mfu : (double)NAN);
    printf(" %11s %11s", bytes, s->memory_planned_bytes ? planned : "-");
    print_number(6, 2, s->imbalance);
    if (isfinite(s->aux_loss))
        printf("  aux %.4f", s->aux_loss);
    if (isfinite(s->z_loss))
        printf("  z %.4f", s->z_loss);
    if (isfinite(s->index_loss) && s->index_loss > 0)
        printf("  index %.4f", s->index_loss);
    if (s->rerouted + s->dropped > 0)
        printf("  rerouted %" PRIu64 " dropped %" PRIu64, s->rerouted, s->dropped);
    if (s->skipped > 0)
        printf("  skipped %" PRIu64, s->skipped);
    for (size_t i = 0; c->phases && i < s->n_phases; i++) {
        printf("  ");
        ctl_print_escaped(stdout, s->phases[i]->name, strlen(s->phases[i]->name), false);
        printf(" %.1f", s->phases[i]->seconds * 1e3);
    }
    putchar('\n');
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static void print_json(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    (void)c;
    (void)context;
    ctl_json_line(ctl_json_step(s));
}

static void collect_json(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    (void)c;
    json_push(context, ctl_json_step(s));
}

static int list_json(struct ctl *c, job_id id)
{
    struct json *items = json_new_array();
    int rc = each_step(c, id, collect_json, items);
    if (rc == CTL_OK)
        ctl_json_list(c, "StepList", 0, false, items);
    else
        json_destroy(items);
    return rc;
}

/* ---- drawing -------------------------------------------------------------------------------- */

struct drawing {
    FILE  *loss, *validation, *speed, *imbalance;
    char  *loss_text, *validation_text, *speed_text, *imbalance_text;
    size_t n_loss, n_validation, n_speed, n_imbalance, n_points, n_validations, n_imbalances;
};

static void collect_points(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    struct drawing *d = context;
    (void)c;
    if (isfinite(s->loss)) {
        fprintf(d->loss, "%" PRIu64 " %.9g\n", s->step, s->loss);
        d->n_points++;
    }
    if (isfinite(s->validation_loss)) {
        fprintf(d->validation, "%" PRIu64 " %.9g\n", s->step, s->validation_loss);
        d->n_validations++;
    }
    if (isfinite(s->tokens_per_second))
        fprintf(d->speed, "%" PRIu64 " %.9g\n", s->step, s->tokens_per_second);
    if (isfinite(s->imbalance)) {
        fprintf(d->imbalance, "%" PRIu64 " %.9g\n", s->step, s->imbalance);
        d->n_imbalances++;
    }
}

/* gnuplot's points come after its commands, each set ended by a line with e. */
static int draw(const struct ctl *c, const struct drawing *d)
{
    fflush(stdout);
    signal(SIGPIPE, SIG_IGN); /* its end is told by its status */
    FILE *gnuplot = popen("gnuplot", "w");
    if (!gnuplot)
        return ctl_fail(c, CTL_FAILED, "cannot start gnuplot");
    fprintf(gnuplot, "set term dumb size 79, 22\nset key top right\nset xlabel 'step'\n"
            "plot '-' with lines title 'loss'%s\n%se\n",
            d->n_validations ? ", '-' with points title 'validation'" : "", d->loss_text);
    if (d->n_validations)
        fprintf(gnuplot, "%se\n", d->validation_text);
    fprintf(gnuplot, "set term dumb size 79, 14\nplot '-' with lines title 'tokens/s'\n%se\n",
            d->speed_text);
    if (d->n_imbalances)
        fprintf(gnuplot, "set term dumb size 79, 14\nplot '-' with lines title 'imbalance of "
                "ranks, max over mean'\n%se\n", d->imbalance_text);
    int status = pclose(gnuplot);
    return status == 0 ? CTL_OK : ctl_fail(c, CTL_FAILED, "gnuplot failed");
}

static bool is_installed(const char *program)
{
    char *path = xstrdup(getenv("PATH") ? getenv("PATH") : "/usr/bin:/bin"), *rest = path, *folder;
    bool found = false;
    while (!found && (folder = strsep(&rest, ":")) != NULL) {
        char *file = xasprintf("%s/%s", folder, program);
        found = access(file, X_OK) == 0;
        free(file);
    }
    free(path);
    return found;
}

static int plot(struct ctl *c, job_id id)
{
    struct drawing d = {0};
    if (!is_installed("gnuplot"))
        return ctl_fail(c, CTL_FAILED, "--plot needs gnuplot, which is not installed: "
                        "apt install gnuplot-nox, or use --csv");
    d.loss = open_memstream(&d.loss_text, &d.n_loss);
    d.validation = open_memstream(&d.validation_text, &d.n_validation);
    d.speed = open_memstream(&d.speed_text, &d.n_speed);
    d.imbalance = open_memstream(&d.imbalance_text, &d.n_imbalance);
    if (!d.loss || !d.validation || !d.speed || !d.imbalance)
        abort();
    int rc = each_step(c, id, collect_points, &d);
    fclose(d.loss);
    fclose(d.validation);
    fclose(d.speed);
    fclose(d.imbalance);
    if (rc == CTL_OK)
        rc = d.n_points ? draw(c, &d)
                        : ctl_fail(c, CTL_FAILED, "job %" PRIu64 " has no steps to draw yet",
                                   id);
    free(d.loss_text);
    free(d.validation_text);
    free(d.speed_text);
    free(d.imbalance_text);
    return rc;
}

int ctl_metrics(struct ctl *c)
{
    bool has_header = false;
    job_id id = ctl_job_id(c, c->args[0]);
    if (!id)
        return CTL_USAGE;
    if (c->plot + c->csv + ctl_is_json(c) > 1 || (c->plot && c->follow))
        return ctl_fail(c, CTL_USAGE, "--plot, --csv and --json exclude each other, and --plot "
                        "cannot follow");
    ctl_catch_interrupt();
    if (c->plot)
        return plot(c, id);
    if (ctl_is_json(c) && !c->follow)
        return list_json(c, id);
    return each_step(c, id, ctl_is_json(c) ? print_json : c->csv ? print_csv : print_line,
                     &has_header);
}
