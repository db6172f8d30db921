/* ctl_data.c - files, documents, tokens and epochs of a job, before it runs and after
 *
 * Sizes and indexes tell most. Lines of tasks must be parsed to be counted, and tokens be read to
 * be known as such, so of large files only the beginning is, and the rest is estimated or left
 * out. */
#include "coordinator/ctl_data.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"

#define LINES_BYTES  (64ull << 20)  /* that are parsed: a second or two */
#define TOKENS_BYTES (256ull << 20) /* that are looked at */

/* ---- counting -------------------------------------------------------------------------------- */

static bool is_estimate(const struct data_told *t)
{
    return t->n.n_read < t->n.n_bytes;
}

/* What lines that were not read hold, if they are as those that were. */
static void scale(struct data_counts *n)
{
    double by = (double)n->n_bytes / (double)n->n_read;
    n->n_documents = (uint64_t)((double)n->n_documents * by);
    n->n_tokens = (uint64_t)((double)n->n_tokens * by);
    n->n_labels = (uint64_t)((double)n->n_labels * by);
    n->n_windows = (uint64_t)((double)n->n_windows * by);
}

static void count(const Ballast__JobSpec *spec, enum job_data which, uint32_t vocab,
                  struct data_told *out)
{
    struct data_config config;
    struct data *d = NULL;
    int rc = job_data_config(spec, which, vocab ? vocab : INT32_MAX, &config, &out->problem);
    out->is_given = rc == 0 && config.n_patterns > 0;
    config.lines_bytes_max = LINES_BYTES;
    if (!out->is_given || data_open(&config, &d, &out->problem) < 0)
        return;
    out->is_counted = true;
    out->n = data_count(d);
    if (vocab && data_check(d, TOKENS_BYTES, &out->n_checked, &out->problem) < 0)
        err_prefix(&out->problem, "%s", config.what);
    if (is_estimate(out))
        scale(&out->n);
    data_close(d);
}

void ctl_data_count(const Ballast__JobSpec *spec, uint32_t vocab, struct ctl_data *out)
{
    *out = (struct ctl_data){.spec = spec};
    count(spec, JOB_TRAIN, vocab, &out->train);
    count(spec, JOB_VALIDATION, vocab, &out->validation);
}

static double epochs_of(const struct ctl_data *d)
{
    return (double)d->spec->train_steps * d->spec->train_global_batch /
           (double)d->train.n.n_windows;
}

static uint64_t validated(const struct ctl_data *d)
{
    uint64_t most = d->spec->train_validation_sequences, n = d->validation.n.n_windows;
    return n < most ? n : most;
}

/* ---- text ------------------------------------------------------------------------------------ */

#define INDENT "                 "

static const char *ending(uint64_t n)
{
    return n == 1 ? "" : "s";
}

static void print_counts(const struct data_told *t, const Ballast__JobSpec *spec)
{
    const struct data_counts *n = &t->n;
    const char *about = is_estimate(t) ? "about " : "";
    printf("%" PRIu64 " file%s, %s%" PRIu64 " document%s, %s%" PRIu64 " tokens", n->n_files,
           ending(n->n_files), about, n->n_documents, ending(n->n_documents), about, n->n_tokens);
    if (!strcmp(spec->data_format, "jsonl"))
        printf(", %s%" PRIu64 " of them learned", about, n->n_labels);
    putchar('\n');
}

/* Of how much of the files it is. */
static void print_bounds(const struct data_told *t)
{
    char part[32], all[32];
    ctl_bytes_text(t->n.n_bytes, all);
    ctl_bytes_text(is_estimate(t) ? t->n.n_read : t->n_checked, part);
    if (is_estimate(t))
        printf(INDENT "estimated: the first %s of %s were read\n", part, all);
    else if (t->n_checked && t->n_checked < t->n.n_bytes)
        printf(INDENT "the tokens of %s of %s were looked at: all are in the vocabulary\n", part,
               all);
}

/* True: there are counts to go on with. */
static bool print_begun(const char *key, const struct data_told *t, const Ballast__JobSpec *spec)
{
    if (!t->is_given)
        return false;
    printf("%-17s", key);
    if (t->is_counted)
        print_counts(t, spec);
    else
        printf("not counted on this machine\n");
    return t->is_counted;
}

void ctl_data_print(const struct ctl_data *d)
{
    const Ballast__JobSpec *s = d->spec;
    if (print_begun("data.train", &d->train, s)) {
        printf(INDENT "%s%" PRIu64 " sequence%s an epoch; %" PRIu64 " steps are %.3g epoch%s\n",
               is_estimate(&d->train) ? "about " : "", d->train.n.n_windows,
               ending(d->train.n.n_windows), s->train_steps, epochs_of(d),
               epochs_of(d) == 1 ? "" : "s");
        print_bounds(&d->train);
    }
    if (print_begun("data.validation", &d->validation, s)) {
        printf(INDENT "%s%" PRIu64 " sequence%s, of which a validation reads %" PRIu64 "\n",
               is_estimate(&d->validation) ? "about " : "", d->validation.n.n_windows,
               ending(d->validation.n.n_windows), validated(d));
        print_bounds(&d->validation);
    }
}

/* ---- what is wrong --------------------------------------------------------------------------- */

/* Whether that is no more than a machine that has other files. */
static bool is_unseen(const struct data_told *t)
{
    return t->problem.code == -ENOENT || t->problem.code == -EACCES;
}

/* A line, or NULL; gives, freed with free(). */
static char *problem_text(const struct data_told *t)
{
    if (!t->problem.code)
        return NULL;
    return is_unseen(t) ? xasprintf("on this machine %s; the workers look for their own",
                                    t->problem.text)
                        : xstrdup(t->problem.text);
}

static char *too_few_text(const struct ctl_data *d)
{
    uint64_t n = d->train.n.n_windows;
    uint32_t batch = d->spec->train_global_batch;
    if (!d->train.is_counted || n >= batch)
        return NULL;
    return xasprintf("data.train: %s%" PRIu64 " sequence%s do%s not fill one step of "
                     "train.global_batch %" PRIu32 ": a step reads some more than once",
                     is_estimate(&d->train) ? "about " : "", n, ending(n), n == 1 ? "es" : "",
                     batch);
}

#define WARNINGS_MAX 3
static void warnings(const struct ctl_data *d, char *out[WARNINGS_MAX])
{
    out[0] = problem_text(&d->train);
    out[1] = too_few_text(d);
    out[2] = problem_text(&d->validation);
}

void ctl_data_warn(const struct ctl *c, const struct ctl_data *d)
{
    char *texts[WARNINGS_MAX];
    warnings(d, texts);
    for (size_t i = 0; i < WARNINGS_MAX; i++) {
        if (texts[i])
            ctl_hint(c, "%s", texts[i]);
        free(texts[i]);
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static struct json *told_json(const struct data_told *t, const Ballast__JobSpec *spec)
{
    const struct data_counts *n = &t->n;
    struct json *o = t->is_given ? json_new_object() : NULL;
    if (!o)
        return NULL;
    bool has_labels = !strcmp(spec->data_format, "jsonl");
    struct { const char *key; uint64_t n; bool is_known; } rows[] = {
        {"files", n->n_files, true}, {"bytes", n->n_bytes, true},
        {"bytes_read", n->n_read, true}, {"bytes_checked", t->n_checked, true},
        {"documents", n->n_documents, true}, {"tokens", n->n_tokens, true},
        {"labels", n->n_labels, has_labels}, {"sequences", n->n_windows, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        json_put(o, rows[i].key, t->is_counted && rows[i].is_known ? json_new_u64(rows[i].n)
                                                                   : NULL);
    json_put(o, "estimated", json_new_bool(is_estimate(t)));
    return o;
}

struct json *ctl_data_json(const struct ctl_data *d)
{
    struct json *o = json_new_object(), *train = told_json(&d->train, d->spec);
    struct json *validation = told_json(&d->validation, d->spec), *list = json_new_array();
    char *texts[WARNINGS_MAX];
    if (train)
        json_put(train, "epochs", d->train.is_counted ? json_new_double(epochs_of(d)) : NULL);
    if (validation)
        json_put(validation, "sequences_read", d->validation.is_counted
                                                   ? json_new_u64(validated(d)) : NULL);
    json_put(o, "train", train);
    json_put(o, "validation", validation);
    warnings(d, texts);
    for (size_t i = 0; i < WARNINGS_MAX; i++) {
        if (texts[i])
            json_push(list, json_new_string(texts[i]));
        free(texts[i]);
    }
    json_put(o, "warnings", list);
    return o;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* The model's folder may be elsewhere: then tokens are not held against its vocabulary. */
static uint32_t vocab_of(const char *path)
{
    struct model_spec *model = xcalloc(1, sizeof *model);
    uint32_t vocab = hf_config_read(path, model, &(struct err){0}) == 0 ? model->vocab : 0;
    free(model);
    return vocab;
}

static int show_counts(const struct ctl *c, const Ballast__JobSpec *spec)
{
    struct ctl_data d;
    bool of_lists = c->count || c->sort || c->n_filters || c->no_header ||
                    (c->format != CTL_TABLE && !ctl_is_json(c));
    if (of_lists)
        return ctl_fail(c, CTL_USAGE, "-c, --sort, --filter, --no-header and -o wide, name or "
                        "columns are of the list that --step makes");
    ctl_data_count(spec, vocab_of(spec->model_path), &d);
    if (ctl_is_json(c))
        ctl_json_one(c, "Data", 0, ctl_data_json(&d));
    else
        ctl_data_print(&d);
    ctl_data_warn(c, &d);
    return d.train.is_counted ? CTL_OK : CTL_FAILED;
}

int ctl_data(struct ctl *c)
{
    const Ballast__JobShowReply *reply;
    int rc = ctl_ask_job(c, &reply);
    if (rc != CTL_OK)
        return rc;
    if (!reply->spec)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job file");
    return c->last_step ? ctl_data_steps(c, reply->job->id, reply->spec)
                        : show_counts(c, reply->spec);
}
