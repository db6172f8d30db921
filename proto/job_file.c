/* job_file.c - conf's walk over the job's table, then the checks of the whole job */
#include "proto/job_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/mem.h"

/* Of the job's model; a folder that cannot be read yet is told about later. */
static uint32_t experts_of(const Ballast__JobSpec *spec)
{
    struct model_spec *model = xcalloc(1, sizeof *model);
    bool is_known = hf_config_read(spec->model_path, model, NULL) == 0;
    uint32_t n = is_known ? model->n_experts : JOB_EXPERTS_UNKNOWN;
    free(model);
    return n;
}

/* Puts the problems of c and, if there are none, those of the whole job into out; each of the
 * latter gets the place where its key was written. */
static int finish(struct conf *c, const Ballast__JobSpec *spec, struct problems *out)
{
    struct problems together = {0};
    int rc = conf_finish(c);
    if (rc < 0) {
        *out = c->problems;
        c->problems = (struct problems){0};
        return rc;
    }
    rc = job_spec_check_together(spec, experts_of(spec), &together);
    for (size_t i = 0; i < together.n; i++) {
        struct problem *p = &together.items[i];
        free(p->where);
        p->where = xstrdup(conf_where(c, p->key));
    }
    *out = together;
    return rc;
}

/* The table covers every text and list of the message, so that each is the message's own. */
static Ballast__JobSpec *spec_create(struct conf *c)
{
    Ballast__JobSpec *spec = xcalloc(1, sizeof *spec);
    ballast__job_spec__init(spec);
    conf_init(c, &job_spec_table, spec);
    return spec;
}

static int deliver(struct conf *c, Ballast__JobSpec *spec, Ballast__JobSpec **out,
                   struct job_file_places *out_places, struct problems *problems)
{
    int rc = finish(c, spec, problems);
    if (rc == 0 && out_places) {
        *out_places = (struct job_file_places){c->where, c->file};
        c->where = NULL; /* moved */
        c->file = NULL;
    }
    conf_fini(c);
    if (rc < 0)
        job_file_free(spec);
    else
        *out = spec;
    return rc;
}

const char *job_file_place(const struct job_file_places *p, const char *key)
{
    const struct field *f = field_find(&job_spec_table, key);
    const char *where = f && p->where ? p->where[f - job_spec_table.fields] : NULL;
    return where ? where : p->file ? p->file : "";
}

void job_file_places_fini(struct job_file_places *p)
{
    for (size_t i = 0; p->where && i < job_spec_table.n_fields; i++)
        free(p->where[i]);
    free(p->where);
    free(p->file);
    *p = (struct job_file_places){0};
}

int job_file_read(const char *file, const char *const *sets, size_t n_sets,
                  Ballast__JobSpec **out, struct job_file_places *out_places,
                  struct problems *problems)
{
    struct conf c;
    Ballast__JobSpec *spec = spec_create(&c);
    conf_read_file(&c, file);
    for (size_t i = 0; i < n_sets; i++)
        conf_set(&c, sets[i]);
    return deliver(&c, spec, out, out_places, problems);
}

int job_file_read_text(const char *name, const char *folder, const char *text, size_t n_bytes,
                       Ballast__JobSpec **out, struct problems *problems)
{
    struct conf c;
    Ballast__JobSpec *spec = spec_create(&c);
    conf_read_text(&c, name, folder, text, n_bytes);
    return deliver(&c, spec, out, NULL, problems);
}

void job_file_free(Ballast__JobSpec *spec)
{
    if (!spec)
        return;
    fields_fini(&job_spec_table, spec);
    free(spec);
}

char *job_file_text(const Ballast__JobSpec *spec)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out)
        abort();
    fields_print_yaml(&job_spec_table, spec, out);
    fclose(out);
    return text;
}

static const char intro[] =
    "# The job file\n"
    "\n"
    "`ballast submit JOB.yaml` reads a job file; `--set key=value` changes a key by its path, as\n"
    "in `--set train.optimizer.lr=1e-3`. Keys that are not written have their default. A wrong\n"
    "key, type, range or word, or a key written twice, is refused with file, line and what is\n"
    "allowed; nothing is submitted. `ballast submit JOB.yaml --dry-run` says the same and prints\n"
    "what the [data](cli.md#data) hold, the groups of ranks, who owns what, the memory of a rank\n"
    "part by part, and the time that a step would take on a cluster (`--cluster FILE`; else nodes\n"
    "of 8 H200).\n"
    "\n"
    "`ballast submit -` reads what is piped in. Another name must be a regular file's; a pipe is\n"
    "refused. Relative paths are taken against the job file's folder (piped in, they must be\n"
    "absolute). Globs must be in quotes where they\n"
    "begin with `*`. Durations are written `90s`, `1h30m`, `2h` or `1-12:00:00`; a bare number is\n"
    "seconds.\n"
    "\n"
    "This page is printed by `ballast submit --explain` from the table that the parser uses.\n"
    "\n"
    "## A small one\n"
    "\n"
    "```yaml\n"
    "name: small\n"
    "model: {path: models/small}\n"
    "data: {train: [text/*.txt], validation: [text/held-out.txt]}\n"
    "train: {steps: 300, optimizer: {lr: 3e-3}}\n"
    "parallel: {workers: 4, fsdp_shard_degree: 2, expert_parallel_degree: 4}\n"
    "checkpoint: {path: checkpoints/small}\n"
    "```\n"
    "\n"
    "## Data\n"
    "\n"
    "| `data.format` | a file holds | a document is |\n"
    "|---|---|---|\n"
    "| `bytes`, `u16`, `u32` | nothing but tokens, little-endian | the file |\n"
    "| `megatron` | `PREFIX.idx` and `PREFIX.bin` of an indexed dataset (`MMIDIDX`, version 1), "
    "any dtype | as the index says |\n"
    "| `jsonl` | a line for each task: `{\"input_ids\": [...], \"labels\": [...]}`, equally long "
    "| the line |\n"
    "\n"
    "A label stands at the token that it is: position i learns to say `labels[i + 1]`, and -100\n"
    "is no label. With `data.pack` a sequence holds several documents, which never see each\n"
    "other: raw and indexed documents are cut where a sequence is full, tasks are packed whole,\n"
    "as many as fit, and only one that is longer than a sequence is cut. Without it each\n"
    "sequence is (a part of) one document. A rank's memory is planned, and taken, for\n"
    "`train.micro_batch` full sequences, however many documents they hold. The order is\n"
    "another one each epoch, a function of `train.seed` alone. A line of tasks has at most\n"
    "64 MiB, and a file of them one label or more.\n"
    "\n"
    "## Every key\n"
    "\n";

static const char not_yet[] =
    "\n"
    "## Not yet\n"
    "\n"
    "Other values of these keys are refused with a line that says so:\n"
    "\n"
    "| key | this version runs |\n"
    "|---|---|\n";

char *job_file_explain(void)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out)
        abort();
    fputs(intro, out);
    fields_print_markdown(&job_spec_table, out);
    fputs(not_yet, out);
    job_spec_print_unsupported(out);
    fclose(out);
    return text;
}
