/* ctl_adapt.c - `ballast adapt`: from a model's folder to a plan and a job
 *
 * The folder is foreign. Links in it may lead to a hub's own store of files, and nowhere else. */
#include "coordinator/ctl_adapt.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/conf.h"
#include "common/hf_config.h"
#include "common/outline_config.h"
#include "common/outline_infer.h"

#define FILES_MAX    100000u
#define TOKENS_STEP  (4ull << 20) /* of one optimizer step */
#define TOKENS_CPU   (4ull << 10)  /* of one rank, on a cpu */
#define WORD_OF_A_SHELL \
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-./:=@%,"
#define LORA_RANK    16u
#define SEQUENCE     4096u

/* ---- the folder ----------------------------------------------------------------------------- */

static bool is_under(const char *path, const char *folder)
{
    size_t n = strlen(folder);
    return !strncmp(path, folder, n) && (path[n] == '/' || path[n] == '\0');
}

/* A hub keeps models--X/snapshots/REVISION/file as links to models--X/blobs/HASH. */
static int check_link(const char *folder, const char *file, struct err *err)
{
    char *path = xasprintf("%s/%s", folder, file);
    char *blobs = xasprintf("%s/../../blobs", folder);
    char *store = realpath(blobs, NULL), *real = realpath(path, NULL);
    int rc = 0;
    if (!real)
        rc = err_set(err, -errno, "%s: a link that leads nowhere (%s)", path, strerror(errno));
    else if (!is_under(real, folder) && !(store && is_under(real, store)))
        rc = err_set(err, -EACCES, "%s: a link to %.300s, outside of the model's folder; copy the "
                     "file there", path, real);
    free(path);
    free(blobs);
    free(real);
    free(store);
    return rc;
}

static int check_links(const char *folder, struct err *err)
{
    DIR *d = opendir(folder);
    struct dirent *e;
    size_t n = 0;
    int rc = 0;
    if (!d)
        return err_set(err, -errno, "%s: %s", folder, strerror(errno));
    while (rc == 0 && (e = readdir(d))) {
        char *path = xasprintf("%s/%s", folder, e->d_name);
        struct stat s;
        if (++n > FILES_MAX)
            rc = err_set(err, -EFBIG, "%s: more than %u files", folder, FILES_MAX);
        else if (lstat(path, &s) == 0 && S_ISLNK(s.st_mode))
            rc = check_link(folder, e->d_name, err);
        free(path);
    }
    closedir(d);
    return rc;
}

/* The folder's last name, as a job may be called. */
static char *name_of(const char *folder)
{
    const char *slash = strrchr(folder, '/');
    char *name = xstrdup(slash && slash[1] ? slash + 1 : "model");
    for (char *p = name; *p; p++)
        if (!isalnum((unsigned char)*p) && !strchr("._-", *p))
            *p = '-';
    if (strlen(name) >= NAME_BYTES_MAX)
        name[NAME_BYTES_MAX - 1] = '\0';
    return name;
}

/* ---- parse ---------------------------------------------------------------------------------- */

/* What the tensors say goes before what the keys imply. */
static void count(struct adapt *a)
{
    const struct outline *o = a->outline;
    a->counts = outline_count(o);
    a->knows_mtp = o->n_mtp_layers == 0;
    a->knows_vision = !o->has_vision;
    if (a->tensors.source == TENSORS_NONE)
        return;
    outline_check(o, &a->tensors, &a->check);
    if (!a->check.has_shapes)
        return;
    a->knows_mtp = a->knows_vision = true;
    a->mtp = a->check.mtp;
    a->vision = a->check.vision;
    if (a->check.text == a->counts.total)
        return;
    double share = a->costs.n_experts ? (double)a->costs.top_k / a->costs.n_experts : 1;
    uint64_t idle = (uint64_t)((double)a->check.text_experts * (1 - share));
    a->counts.live -= a->counts.total - a->check.text;
    a->counts.total = a->check.text;
    a->counts.active = a->check.text - idle;
    outline_note(a->outline, "totals are those of the tensors, which differ from the keys'");
}

bool adapt_tensors_refused(const struct adapt *a)
{
    return a->tensors.source == TENSORS_SAFETENSORS && (a->check.n_lines || a->check.n_unknown);
}

static int read_model(struct adapt *a, struct err *err)
{
    char *config = xasprintf("%s/config.json", a->model_dir);
    struct json *asked = json_new_object();
    struct err own = {0};
    int rc = check_links(a->model_dir, err);
    json_note_keys(asked);
    if (rc == 0 && (rc = outline_read(config, &a->outline, &own)) < 0)
        err_set(err, rc, "%s%s", own.text,
                rc == -ENOENT ? "; expected a model's folder, with its config.json" : "");
    /* A broken or missing file stays one; keys that do not tell enough may be made up for. */
    if (rc == 0 || rc == -EINVAL || rc == -ENOTSUP) {
        int keys = rc;
        rc = tensor_list_read(a->model_dir, &a->tensors, keys < 0 ? &own : err);
        if (keys < 0 && (rc < 0 || outline_infer(config, &a->tensors, own.text, &a->outline,
                                                 &(struct err){0}) < 0))
            rc = keys;
    }
    if (rc == 0) {
        a->runs = hf_config_read(config, a->spec, &own) == 0;
        snprintf(a->why_not, sizeof a->why_not, "%s", own.text);
    }
    json_note_keys(NULL);
    if (a->runs) /* else the engine's reader stopped early */
        a->keys_not_read = adapt_keys_not_read(config, asked);
    json_destroy(asked);
    free(config);
    return rc;
}

/* ---- search --------------------------------------------------------------------------------- */

/* Weights are frozen as they are published, or unpacked. */
static void limit_base(const struct adapt *a, struct strategy_limits *l)
{
    const char *method = a->outline->quant.method;
    bool is_mxfp4 = strstr(method, "mxfp4") != NULL, is_fp8 = strstr(method, "fp8") != NULL;
    l->base[BASE_MXFP4] &= is_mxfp4;
    l->base[BASE_FP8] &= is_fp8;
}

static void find_fewest(struct adapt *a, const struct strategy_limits *limits)
{
    for (int base = 0; base < BASE_PRECISIONS; base++) {
        struct strategy_limits l = *limits;
        struct adapt_fewest *f = &a->fewest[a->n_fewest];
        if (!limits->base[base] || (!a->job.is_lora && base != BASE_BF16 && base != BASE_F32))
            continue;
        memset(l.base, 0, sizeof l.base);
        l.base[base] = true;
        f->base = (enum base_precision)base;
        f->world = strategy_fewest(&a->job, &l, RANKS_MAX, &f->plan);
        a->n_fewest++;
    }
}

static void search(struct adapt *a)
{
    struct strategy_limits all = strategy_all();
    uint32_t world = a->cluster.nodes * a->cluster.gpus_per_node;
    a->engine = adapt_engine();
    if (cluster_is_cpu(&a->cluster)) { /* which computes in f32 */
        all.bf16 = a->engine.bf16 = false;
        all.f32 = all.base[BASE_F32] = true;
        all.base[BASE_BF16] = false;
    }
    struct strategy_limits today = a->engine;
    limit_base(a, &all);
    limit_base(a, &today);
    if (!today.bf16) /* f32 weights are what f32 training has */
        today.base[BASE_BF16] &= a->job.is_lora;
    strategy_search(&a->job, &all, world, a->all);
    a->job_today = a->job;
    strategy_search(&a->job_today, &today, world, a->today);
    if (!a->today->n_seen) { /* without sequence ranks every rank needs a sequence */
        a->job_today.global_batch = world;
        strategy_search(&a->job_today, &today, world, a->today);
    }
    adapt_choose_today(a);
    if (a->runs && !a->today_fits)
        adapt_find_fewest_today(a, &today);
    if (a->all->n_plans)
        a->n_neighbours = strategy_neighbours(&a->job, &a->all->plans[0], a->neighbours);
    find_fewest(a, &all);
}

static int read_cluster(struct adapt *a, struct err *err)
{
    if (!a->c->cluster) {
        fields_init(&cluster_table, &a->cluster);
        return 0;
    }
    int rc = conf_read(a->c->cluster, &cluster_table, &a->cluster, err);
    if (rc == 0 && (uint64_t)a->cluster.nodes * a->cluster.gpus_per_node > RANKS_MAX)
        rc = err_set(err, -EINVAL, "%s: nodes x gpus_per_node is above %u", a->c->cluster,
                     RANKS_MAX);
    if (rc == 0 && a->cluster.gpu_memory <= a->cluster.gpu_reserve)
        rc = err_set(err, -EINVAL, "%s: gpu_reserve (%.1f GB, 4 unless the file says so) leaves "
                     "nothing of gpu_memory (%.1f GB)", a->c->cluster,
                     (double)a->cluster.gpu_reserve / 1e9, (double)a->cluster.gpu_memory / 1e9);
    return rc;
}

static int read_all(struct adapt *a, struct err *err)
{
    const struct ctl *c = a->c;
    int rc;
    a->model_dir = realpath(c->args[0], NULL);
    if (!a->model_dir)
        return err_set(err, -errno, "%s: %s; expected a model's folder", c->args[0],
                       strerror(errno));
    a->name = name_of(a->model_dir);
    if ((rc = read_model(a, err)) < 0 || (rc = read_cluster(a, err)) < 0)
        return rc;
    uint32_t length = c->sequence_length ? (uint32_t)c->sequence_length : SEQUENCE;
    costs_init(a->outline, length, &a->costs);
    count(a);
    uint32_t world = a->cluster.nodes * a->cluster.gpus_per_node;
    a->job = (struct job_shape){
        .costs = &a->costs, .cluster = &a->cluster, .lora_rank = LORA_RANK,
        .is_lora = c->train && !strcmp(c->train, "lora"), .sequence_length = length,
        .global_batch = strategy_batch(cluster_is_cpu(&a->cluster) ? TOKENS_CPU * world
                                                                   : TOKENS_STEP, length, world)};
    search(a);
    return 0;
}

static void adapt_free(struct adapt *a)
{
    tensor_list_fini(&a->tensors);
    fields_fini(&cluster_table, &a->cluster);
    json_destroy(a->keys_not_read);
    free(a->outline);
    free(a->all);
    free(a->today);
    free(a->spec);
    free(a->model_dir);
    free(a->name);
    free(a);
}

static int check_shrunk(struct adapt *a, struct adapt_validation *out, struct err *err)
{
    if (a->runs)
        ctl_hint(a->c, "ballast-worker checks a shrunk model: about ten seconds of a free core");
    return adapt_validate(a, out, err);
}

/* Lines to be typed: a folder with spaces or the like is one word all the same. */
static void tell_next(const struct adapt *a, struct ctl *c)
{
    const char *quote = strspn(c->out, WORD_OF_A_SHELL) == strlen(c->out) ? "" : "'";
    ctl_hint(c, "  less %s%s/REPORT.md%s", quote, c->out, quote);
    if (a->runs)
        ctl_hint(c, "  ballast submit %s%s/job.yaml%s --dry-run --cluster %s%s/cluster.yaml%s",
                 quote, c->out, quote, quote, c->out, quote);
    else
        ctl_hint(c, "  less %s%s/operators-missing.md%s", quote, c->out, quote);
}

int ctl_adapt(struct ctl *c)
{
    struct adapt *a = xcalloc(1, sizeof *a);
    struct adapt_validation validation = {0};
    struct err err = {0};
    char why_not[ADAPT_TEXT_MAX];
    int code = CTL_OK;
    a->c = c;
    a->all = xcalloc(1, sizeof *a->all);
    a->today = xcalloc(1, sizeof *a->today);
    a->spec = xcalloc(1, sizeof *a->spec);
    if (c->train && strcmp(c->train, "full") && strcmp(c->train, "lora"))
        code = ctl_fail(c, CTL_USAGE, "--train: expected full or lora");
    else if (c->sequence_length && (c->sequence_length < 64 || c->sequence_length > 10000000))
        code = ctl_fail(c, CTL_USAGE, "--sequence-length: expected 64 to 10000000");
    else if (read_all(a, &err) < 0)
        code = ctl_fail(c, CTL_USAGE, "%s", err.text);
    else if (c->out && !c->force && adapt_files_check(a, c->out, &err) < 0)
        code = ctl_fail(c, CTL_CONFLICT, "%s", err.text);
    else if (c->validate && check_shrunk(a, &validation, &err) < 0)
        code = ctl_fail(c, CTL_FAILED, "%s", err.text);
    if (code == CTL_OK && c->validate)
        a->validation = &validation;
    if (code == CTL_OK && c->out && adapt_files(a, c->out, &err) < 0)
        code = ctl_fail(c, CTL_FAILED, "%s", err.text);
    if (code == CTL_OK && ctl_is_json(c))
        ctl_json_value(c, adapt_json(a));
    else if (code == CTL_OK)
        adapt_print(a);
    if (code == CTL_OK && c->out)
        tell_next(a, c);
    if (code == CTL_OK && a->validation && !validation.passed)
        code = CTL_FAILED;
    fflush(stdout);
    if (code == CTL_OK && c->cluster && !adapt_fits(a, why_not))
        code = ctl_fail(c, CTL_LIMIT, "%s", why_not);
    adapt_validation_fini(&validation);
    adapt_free(a);
    return code;
}
