/* ctl_metrics.c - steps of a job as a table, CSV, JSON or a drawing */
#include "coordinator/ctl_list.h"
#include "coordinator/ctl_phases.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/json_of.h"

#define PAGE_STEPS 1000u
#define HOLD_MS    10000u
#define STEPS_PRESET 10000u /* of a list */

/* ---- columns --------------------------------------------------------------------------------- */

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value step_##NAME(const void *row, struct arena *a)                     \
    {                                                                                          \
        const Ballast__StepReport *s = row;                                                    \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }

static struct list_value phases_of(struct arena *a, const Ballast__StepReport *s)
{
    const char *text = "";
    for (size_t i = 0; i < s->n_phases; i++)
        text = arena_printf(a, "%s%s%s %.1f", text, i ? "  " : "", s->phases[i]->name,
                            s->phases[i]->seconds * 1e3);
    return list_text(text);
}

static double epoch_of(const Ballast__StepReport *s)
{
    return s->epoch_samples ? (double)s->samples / (double)s->epoch_samples : (double)NAN;
}

COLUMN(step, list_count(a, s->step))
COLUMN(loss, list_real(a, "%.4f", s->loss))
COLUMN(valid, list_real(a, "%.4f", s->validation_loss))
COLUMN(norm, list_real(a, "%.4f", s->grad_norm))
COLUMN(lr, list_real(a, "%.3g", s->lr))
COLUMN(speed, list_real(a, "%.0f", s->tokens_per_second))
COLUMN(mfu, list_real(a, "%.3f", s->mfu > 0 ? s->mfu : (double)NAN))
COLUMN(memory, list_bytes(a, s->memory_bytes))
COLUMN(planned, list_bytes(a, s->memory_planned_bytes))
COLUMN(imbalance, list_real(a, "%.2f", s->imbalance))
COLUMN(aux, list_real(a, "%.4f", s->aux_loss))
COLUMN(z, list_real(a, "%.4f", s->z_loss))
COLUMN(index, list_real(a, "%.4f", s->index_loss))
COLUMN(rerouted, list_count(a, s->rerouted))
COLUMN(dropped, list_count(a, s->dropped))
COLUMN(skipped, list_count(a, s->skipped))
COLUMN(samples, list_count(a, s->samples))
COLUMN(epoch, list_real(a, "%.3f", epoch_of(s)))
COLUMN(attempt, list_count(a, s->attempt))
COLUMN(time, list_instant(a, s->at_ns))
COLUMN(phases, phases_of(a, s))
COLUMN(step_ms, list_real(a, "%.1f", phases_ms(s, PHASES_STEP)))
COLUMN(compute, list_real(a, "%.1f", phases_ms(s, PHASES_COMPUTE)))
COLUMN(gather, list_real(a, "%.1f", phases_ms(s, PHASES_GATHER)))
COLUMN(dispatch, list_real(a, "%.1f", phases_ms(s, PHASES_DISPATCH)))
COLUMN(reduce, list_real(a, "%.1f", phases_ms(s, PHASES_REDUCE)))
COLUMN(agree, list_real(a, "%.1f", phases_ms(s, PHASES_AGREE)))
COLUMN(data, list_real(a, "%.1f", phases_ms(s, PHASES_DATA)))
COLUMN(optimizer, list_real(a, "%.1f", phases_ms(s, PHASES_OPTIMIZER)))
COLUMN(rest, list_real(a, "%.1f", phases_ms(s, PHASES_REST)))
COLUMN(hidden, list_real(a, "%.1f", phases_ms(s, PHASES_HIDDEN)))

static struct json *step_json(const void *row)
{
    return json_of_step(row);
}

static const struct list_column step_columns[] = {
    {"STEP", LIST_NUMBER, LIST_ALWAYS, step_step, 8, false, NULL},
    {"LOSS", LIST_NUMBER, LIST_ALWAYS, step_loss, 8, false, NULL},
    {"VALID", LIST_NUMBER, LIST_ALWAYS, step_valid, 8, false, NULL},
    {"GRADNORM", LIST_NUMBER, LIST_ALWAYS, step_norm, 8, false, NULL},
    {"LR", LIST_NUMBER, LIST_ALWAYS, step_lr, 8, false, NULL},
    {"TOKENS/S", LIST_NUMBER, LIST_ALWAYS, step_speed, 9, false, NULL},
    {"MFU", LIST_NUMBER, LIST_ALWAYS, step_mfu, 5, false, NULL},
    {"MEMORY", LIST_BYTES, LIST_ALWAYS, step_memory, 10, false, NULL},
    {"PLANNED", LIST_BYTES, LIST_ALWAYS, step_planned, 10, false, NULL},
    {"IMBAL", LIST_NUMBER, LIST_ALWAYS, step_imbalance, 5, false, NULL},
    {"AUX", LIST_NUMBER, LIST_IF_ANY, step_aux, 7, false, NULL},
    {"Z", LIST_NUMBER, LIST_IF_ANY, step_z, 7, false, NULL},
    {"INDEX", LIST_NUMBER, LIST_IF_ANY, step_index, 7, false, NULL},
    {"REROUTED", LIST_NUMBER, LIST_IF_ANY, step_rerouted, 0, false, NULL},
    {"DROPPED", LIST_NUMBER, LIST_IF_ANY, step_dropped, 0, false, NULL},
    {"SKIPPED", LIST_NUMBER, LIST_IF_ANY, step_skipped, 0, false, NULL},
    {"EPOCH", LIST_NUMBER, LIST_WIDE, step_epoch, 7, false, NULL},
    {"SAMPLES", LIST_NUMBER, LIST_ASKED, step_samples, 9, false, NULL},
    {"ATTEMPT", LIST_NUMBER, LIST_WIDE, step_attempt, 0, false, NULL},
    {"TIME", LIST_INSTANT, LIST_WIDE, step_time, 24, false, NULL},
    {"PHASES", LIST_TEXT, LIST_ASKED, step_phases, 0, false, NULL},
    {"STEP-MS", LIST_NUMBER, LIST_PHASES, step_step_ms, 8, false, NULL},
    {"COMPUTE", LIST_NUMBER, LIST_PHASES, step_compute, 8, false, NULL},
    {"GATHER", LIST_NUMBER, LIST_PHASES, step_gather, 7, false, NULL},
    {"DISPATCH", LIST_NUMBER, LIST_PHASES, step_dispatch, 8, false, NULL},
    {"REDUCE", LIST_NUMBER, LIST_PHASES, step_reduce, 7, false, NULL},
    {"AGREE", LIST_NUMBER, LIST_PHASES, step_agree, 7, false, NULL},
    {"DATA", LIST_NUMBER, LIST_PHASES, step_data, 6, false, NULL},
    {"OPTIM", LIST_NUMBER, LIST_PHASES, step_optimizer, 7, false, NULL},
    {"REST", LIST_NUMBER, LIST_PHASES, step_rest, 7, false, NULL},
    {"HIDDEN", LIST_NUMBER, LIST_PHASES, step_hidden, 7, false, NULL},
};
const struct ctl_list ctl_step_list = {
    .kind = "StepList", .rows = "steps", .columns = step_columns,
    .n_columns = sizeof step_columns / sizeof *step_columns, .name = "step", .since = "time",
    .count = STEPS_PRESET, .json = step_json,
};

/* ---- collecting ----------------------------------------------------------------------------- */

typedef void step_function(const struct ctl *c, const Ballast__StepReport *step, void *context);

/* A list that is shown at its end, or the lines of one that is followed. */
struct metrics {
    struct list_query *q;
    struct arena arena; /* of the rows */
    const void **rows;
    size_t n;
};

static void collect(const struct ctl *c, const Ballast__StepReport *s, void *context);

/* Calls each step in order, with -c the newest of them; goes on with -f until the job has ended. */
static int each_step(struct ctl *c, job_id id, const struct list_query *q, step_function *each,
                     void *context)
{
    Ballast__MetricsRequest request = BALLAST__METRICS_REQUEST__INIT;
    bool all_count = !q->n_terms && !c->sort; /* what is left out need not come */
    int rc = CTL_OK;
    request.job_id = id;
    request.limit = PAGE_STEPS;
    if (c->since && !list_time(c->since, &request.since_ns))
        return CTL_USAGE;
    all_count = all_count || (c->since && q->n_terms == 1 && !c->sort);
    if (all_count && q->count < STEPS_LAST_MAX && (c->count || !(c->csv || c->plot || c->follow)))
        request.last = (uint32_t)q->count + (each == collect); /* one more: are there more? */
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
        request.last = 0;
        request.since_ns = 0;
        fflush(stdout);
        if (!reply->n_steps && (reply->ended || !c->follow))
            break;
    }
    return rc;
}

/* ---- CSV -------------------------------------------------------------------------- */

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
               "memory_planned_bytes,samples,epoch");
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
    printf(",%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu32 ",%s,%" PRIu64 ",%" PRIu64 ",",
           s->rerouted, s->dropped, s->skipped, s->attempt, at, s->memory_planned_bytes,
           s->samples);
    print_csv_number(epoch_of(s));
    for (size_t i = 0; c->phases && i < s->n_phases; i++) {
        putchar(',');
        print_csv_number(s->phases[i]->seconds);
    }
    putchar('\n');
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void collect(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    struct metrics *m = context;
    size_t n = ballast__step_report__get_packed_size(s);
    uint8_t *bytes = arena_alloc(&m->arena, n);
    (void)c;
    ballast__step_report__pack(s, bytes); /* the answer does not live long enough */
    m->rows = xrealloc(m->rows, (m->n + 1) * sizeof *m->rows);
    m->rows[m->n++] = ballast__step_report__unpack(arena_pb(&m->arena), n, bytes);
}

static int list_steps(struct ctl *c, job_id id, struct metrics *m)
{
    bool was_cut;
    int rc = each_step(c, id, m->q, collect, m);
    if (rc == CTL_OK) {
        m->n = list_choose(m->q, m->rows, m->n, &was_cut);
        list_show(c, m->q, m->rows, m->n, 0, was_cut);
        if (c->phases && m->n && (c->format == CTL_TABLE || c->format == CTL_WIDE))
            ctl_print_phases(c, m->rows, m->n);
    }
    free(m->rows);
    arena_fini(&m->arena);
    return rc;
}

/* The columns are those that the first line needs. */
static void print_line(const struct ctl *c, const Ballast__StepReport *s, void *context)
{
    struct metrics *m = context;
    const void *row = s;
    if (!list_matches(m->q, row))
        return;
    if (c->format == CTL_JSON)
        ctl_json_line(json_of_step(s));
    else
        list_print(c, m->q, &row, 1, m->n++ == 0);
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

static int plot(struct ctl *c, job_id id, const struct list_query *q)
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
    int rc = each_step(c, id, q, collect_points, &d);
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

static int check_forms(const struct ctl *c)
{
    bool is_list = c->format != CTL_TABLE || c->sort || c->n_filters;
    if ((c->plot && c->csv) || ((c->plot || c->csv) && is_list))
        return ctl_fail(c, CTL_USAGE, "--plot, --csv and the options of lists (-o, --json, --sort, "
                        "--filter) exclude each other");
    if (c->follow && (c->plot || c->sort || c->format == CTL_YAML || c->format == CTL_NAME))
        return ctl_fail(c, CTL_USAGE, "--follow prints steps as they come: none of --plot, --sort "
                        "and -o yaml or name goes with it");
    return CTL_OK;
}

int ctl_metrics(struct ctl *c)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    struct metrics m = {.q = q};
    bool has_header = false;
    job_id id = ctl_job_id(c, c->args[0]);
    int rc = id ? check_forms(c) : CTL_USAGE;
    if (rc == CTL_OK)
        rc = list_begin(c, &ctl_step_list, q);
    ctl_catch_interrupt();
    if (rc != CTL_OK)
        ;
    else if (c->plot)
        rc = plot(c, id, q);
    else if (c->csv)
        rc = each_step(c, id, q, print_csv, &has_header);
    else if (c->follow)
        rc = each_step(c, id, q, print_line, &m);
    else
        rc = list_steps(c, id, &m);
    list_fini(q);
    free(q);
    return c->follow ? ctl_detached(c, rc, "job %" PRIu64 " goes on", id) : rc;
}
