/* ctl_data_step.c - which documents a step read, sequence by sequence
 *
 * The order is a function of the seed and of the number of a step's first sample. That number is
 * what the step reported; before it is read, what follows from the newest report. The rest is
 * worked out by the trainers' own reader from the files, which must be those that they read. */
#include "coordinator/ctl_data.h"
#include "coordinator/ctl_list.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/clock.h"

#define PAGE_STEPS     1000u
#define SEQUENCES_MOST 1000000u /* of one list */

/* ---- columns --------------------------------------------------------------------------------- */

/* What a list holds of a row. */
struct row {
    struct data_read read;
    bool has_lines;
};

static uint64_t line_of(const struct row *r)
{
    return r->has_lines ? r->read.piece.number + 1 : 0;
}

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value read_##NAME(const void *row, struct arena *a)                     \
    {                                                                                          \
        const struct row *r = row;                                                             \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }

COLUMN(step, list_count(a, r->read.step))
COLUMN(sequence, list_count(a, r->read.sequence))
COLUMN(rank, list_count(a, r->read.rank))
COLUMN(pass, list_count(a, r->read.pass))
COLUMN(sample, list_count(a, r->read.sample))
COLUMN(epoch, list_count(a, r->read.epoch))
COLUMN(window, list_count(a, r->read.window))
COLUMN(document, list_count(a, r->read.piece.number))
COLUMN(line, r->has_lines ? list_count(a, line_of(r)) : list_text(""))
COLUMN(byte, list_count(a, r->read.piece.at))
COLUMN(from, list_count(a, r->read.piece.first))
COLUMN(tokens, list_count(a, r->read.piece.n_tokens))
COLUMN(labels, list_count(a, r->read.n_labels))
COLUMN(file, list_text(r->read.piece.path))

static struct json *read_json(const void *row)
{
    const struct row *r = row;
    const struct { const char *key; uint64_t n; } numbers[] = {
        {"step", r->read.step}, {"sequence", r->read.sequence}, {"rank", r->read.rank},
        {"pass", r->read.pass}, {"sample", r->read.sample}, {"epoch", r->read.epoch},
        {"window", r->read.window}, {"document", r->read.piece.number},
        {"byte", r->read.piece.at}, {"first_token", r->read.piece.first},
        {"tokens", r->read.piece.n_tokens}, {"labels", r->read.n_labels},
    };
    struct json *o = json_new_object();
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        json_put(o, numbers[i].key, json_new_u64(numbers[i].n));
    json_put(o, "line", r->has_lines ? json_new_u64(line_of(r)) : NULL);
    json_put(o, "file", json_new_string(r->read.piece.path));
    return o;
}

static const struct list_column read_columns[] = {
    {"STEP", LIST_NUMBER, LIST_ALWAYS, read_step, 0, false, NULL},
    {"SEQ", LIST_NUMBER, LIST_ALWAYS, read_sequence, 0, false, NULL},
    {"RANK", LIST_NUMBER, LIST_ALWAYS, read_rank, 0, false, NULL},
    {"PASS", LIST_NUMBER, LIST_WIDE, read_pass, 0, false, NULL},
    {"SAMPLE", LIST_NUMBER, LIST_WIDE, read_sample, 0, false, NULL},
    {"EPOCH", LIST_NUMBER, LIST_WIDE, read_epoch, 0, false, NULL},
    {"WINDOW", LIST_NUMBER, LIST_WIDE, read_window, 0, false, NULL},
    {"DOC", LIST_NUMBER, LIST_ALWAYS, read_document, 0, false, NULL},
    {"LINE", LIST_NUMBER, LIST_IF_ANY, read_line, 0, false, NULL},
    {"BYTE", LIST_NUMBER, LIST_ALWAYS, read_byte, 0, false, NULL},
    {"FROM", LIST_NUMBER, LIST_ALWAYS, read_from, 0, false, NULL},
    {"TOKENS", LIST_NUMBER, LIST_ALWAYS, read_tokens, 0, false, NULL},
    {"LABELS", LIST_NUMBER, LIST_ALWAYS, read_labels, 0, false, NULL},
    {"FILE", LIST_TEXT, LIST_ALWAYS, read_file, 0, false, NULL},
};
const struct ctl_list ctl_read_list = {
    .kind = "ReadList", .rows = "documents", .columns = read_columns,
    .n_columns = sizeof read_columns / sizeof *read_columns, .name = "file", .json = read_json,
};

/* ---- where each step began ------------------------------------------------------------------- */

struct reports {
    job_id id;
    const Ballast__JobSpec *spec;
    struct data_step *steps; /* step 0: was not reported */
    size_t   n;
    uint64_t newest_step, newest_samples, epoch_samples; /* 0: nothing was reported, or not that */
    int64_t  at_ns;    /* of the first of the steps that was reported; 0: none was */
    bool     has_blind; /* a report without its samples: of an older worker */
};

static uint64_t first_of(const struct reports *r, uint64_t step, uint64_t samples)
{
    uint64_t batch = r->spec->train_global_batch;
    return samples >= batch ? samples - batch : (step - 1) * batch;
}

static void take_report(struct reports *r, const Ballast__StepReport *s, uint64_t first_step)
{
    uint64_t first = first_of(r, s->step, s->samples);
    if (s->step >= first_step && s->step - first_step < r->n) {
        r->steps[s->step - first_step] = job_data_step(r->spec, s->step, first);
        r->has_blind = r->has_blind || !s->samples;
        r->at_ns = r->at_ns ? r->at_ns : s->at_ns;
    }
    r->newest_step = s->step;
    r->newest_samples = first + r->spec->train_global_batch;
    r->epoch_samples = s->epoch_samples;
}

static int ask(struct ctl *c, const Ballast__MetricsRequest *request,
               const Ballast__MetricsReply **out)
{
    const ProtobufCMessage *message;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_METRICS, &request->base, &message);
    if (rc == CTL_OK)
        *out = (const Ballast__MetricsReply *)message;
    return rc;
}

static int fetch(struct ctl *c, struct reports *r)
{
    Ballast__MetricsRequest request = BALLAST__METRICS_REQUEST__INIT;
    const Ballast__MetricsReply *reply;
    int rc = CTL_OK;
    request.job_id = r->id;
    request.after_step = c->first_step - 1;
    do {
        request.limit = r->n < PAGE_STEPS ? (uint32_t)r->n : PAGE_STEPS;
        if ((rc = ask(c, &request, &reply)) != CTL_OK)
            return rc;
        for (size_t i = 0; i < reply->n_steps; i++)
            take_report(r, reply->steps[i], c->first_step);
        request.after_step = r->newest_step;
    } while (reply->n_steps && r->newest_step < c->last_step);
    if (r->newest_step) /* at or behind the first that was asked for */
        return CTL_OK;
    request.after_step = 0;
    request.last = 1;
    if ((rc = ask(c, &request, &reply)) == CTL_OK && reply->n_steps)
        take_report(r, reply->steps[0], c->first_step);
    return rc;
}

/* Steps that were not reported: those to come go on from the newest one. */
static int fill_rest(struct ctl *c, struct reports *r)
{
    uint64_t batch = r->spec->train_global_batch, n_ahead = 0;
    for (size_t i = 0; i < r->n; i++) {
        uint64_t step = c->first_step + i;
        if (r->steps[i].step)
            continue;
        if (step < r->newest_step)
            return ctl_fail(c, CTL_NOT_FOUND, "job %" PRIu64 " has not reported step %" PRIu64
                            ", but later ones: another job made it, from whose checkpoint it "
                            "went on", r->id, step);
        uint64_t first = r->newest_samples + (step - r->newest_step - 1) * batch;
        r->steps[i] = job_data_step(r->spec, step, first);
        n_ahead++;
    }
    if (n_ahead)
        ctl_hint(c, "step %" PRIu64 "%s not been reported; listed is what comes after %s%" PRIu64,
                 c->last_step - n_ahead + 1, n_ahead > 1 ? " and later ones have" : " has",
                 r->newest_step ? "step " : "a beginning without a checkpoint, step ",
                 r->newest_step);
    if (r->has_blind)
        ctl_hint(c, "the job has not told how far it had read; listed is what it read if it began "
                 "with step 1 and left nothing out");
    return CTL_OK;
}

/* ---- the files ------------------------------------------------------------------------------- */

/* Names the first that was changed after the step. */
static void warn_of_changes(const struct ctl *c, const struct data *d, int64_t at_ns)
{
    uint64_t n = data_count(d).n_files;
    for (uint64_t i = 0; i < n && at_ns; i++) {
        struct stat st;
        if (stat(data_file(d, i), &st) < 0 ||
            st.st_mtim.tv_sec * (int64_t)NS_PER_S + st.st_mtim.tv_nsec <= at_ns)
            continue;
        ctl_hint(c, "%s was changed after the job had read it; listed is what it holds now",
                 data_file(d, i));
        return;
    }
}

static int open_files(struct ctl *c, const struct reports *r, struct data **out)
{
    struct data_config config;
    struct err err = {0};
    int rc = job_data_config(r->spec, JOB_TRAIN, INT32_MAX, &config, &err);
    if (rc == 0)
        rc = data_open(&config, out, &err);
    if (rc == -ENOENT || rc == -EACCES)
        return ctl_fail(c, CTL_FAILED, "on this machine %s; ask on one that has the files which "
                        "the workers read", err.text);
    if (rc < 0)
        return ctl_fail(c, CTL_FAILED, "%s", err.text);
    if (r->epoch_samples && r->epoch_samples != data_windows(*out))
        return ctl_fail(c, CTL_CONFLICT, "the files of data.train make %" PRIu64 " sequences on "
                        "this machine, those that job %" PRIu64 " read made %" PRIu64 ": they are "
                        "others, or were changed", data_windows(*out), r->id, r->epoch_samples);
    warn_of_changes(c, *out, r->at_ns);
    return CTL_OK;
}

/* ---- all ------------------------------------------------------------------------------------- */

static void show(const struct ctl *c, struct list_query *q, const struct data_read *reads,
                 size_t n, bool has_lines)
{
    const void **rows = arena_alloc(&q->arena, (n + 1) * sizeof *rows);
    struct row *all = arena_alloc(&q->arena, (n + 1) * sizeof *all);
    bool was_cut;
    for (size_t i = 0; i < n; i++) {
        all[i] = (struct row){reads[i], has_lines};
        rows[i] = &all[i];
    }
    q->is_ordered = true; /* of more than -c the first are shown */
    n = list_choose(q, rows, n, &was_cut);
    list_show(c, q, rows, n, 0, was_cut);
}

static int list_reads(struct ctl *c, struct list_query *q, const struct reports *r)
{
    struct data *d = NULL;
    struct data_read *reads = NULL;
    struct err err;
    size_t n = 0;
    int code = open_files(c, r, &d), rc = 0;
    for (size_t i = 0; i < r->n && code == CTL_OK && rc == 0; i++)
        rc = data_step_reads(d, &r->steps[i], &reads, &n, &err);
    if (rc < 0)
        code = ctl_fail(c, CTL_FAILED, "%s", err.text);
    else if (code == CTL_OK)
        show(c, q, reads, n, !strcmp(r->spec->data_format, "jsonl"));
    free(reads);
    data_close(d);
    return code;
}

int ctl_data_steps(struct ctl *c, job_id id, const Ballast__JobSpec *spec)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    struct reports r = {.id = id, .spec = spec};
    int rc = list_begin(c, &ctl_read_list, q);
    uint64_t n = c->last_step - c->first_step + 1;
    if (rc == CTL_OK && c->last_step > spec->train_steps)
        rc = ctl_fail(c, CTL_NOT_FOUND, "job %" PRIu64 " has no step %" PRIu64 ": train.steps is %"
                      PRIu64, id, c->last_step, spec->train_steps);
    if (rc == CTL_OK && n > SEQUENCES_MOST / spec->train_global_batch + 1)
        rc = ctl_fail(c, CTL_USAGE, "--step: these are more than %u sequences; ask for fewer steps",
                      SEQUENCES_MOST);
    if (rc == CTL_OK) {
        r.n = n;
        r.steps = xcalloc(n, sizeof *r.steps);
        rc = fetch(c, &r);
    }
    if (rc == CTL_OK && (rc = fill_rest(c, &r)) == CTL_OK)
        rc = list_reads(c, q, &r);
    free(r.steps);
    list_fini(q);
    free(q);
    return rc;
}
