/* ctl_submit.c - a job file, checked and planned here, handed over in one call */
#include "coordinator/ctl.h"

#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "proto/job_file.h"
#include "proto/job_fit.h"
#include "proto/job_map.h"
#include "proto/job_memory.h"

static int refuse_key(const struct ctl *c, const struct job_file_places *places, const char *key,
                      const char *text, const char *hint)
{
    struct problems p = {0};
    problems_add(&p, job_file_place(places, key), key, "%s%s", text, hint);
    int rc = ctl_fail_problems(c, &p);
    problems_fini(&p);
    return rc;
}

/* Of a rank whose expert group lies on several nodes, the most over how many they may be: which
 * they are the coordinator finds. */
static uint64_t spread_memory(const Ballast__JobSpec *spec, const struct model_spec *model,
                              struct layout_degrees degrees)
{
    uint64_t most = 0;
    for (uint32_t n = 2; n < degrees.ep; n += (n + 1) / 2) {
        struct job_machine on = {.on_gpu = !strcmp(spec->train_precision, "bf16"),
                                 .n_threads = 1, .n_nodes = n};
        struct memory_plan memory;
        const char *key;
        if (job_memory(spec, model, degrees, &on, &memory, &key, NULL) == 0 && memory.total > most)
            most = memory.total;
    }
    return most;
}

/* The most of these workers that are on one node. */
static uint32_t most_on_a_node(Ballast__Worker *const *workers, size_t n)
{
    size_t most = 1;
    for (size_t i = 0; i < n; i++) {
        size_t here = 0;
        for (size_t k = 0; k < n; k++)
            here += !strcmp(workers[i]->node, workers[k]->node);
        most = here > most ? here : most;
    }
    return (uint32_t)most;
}

/* What only the model can say: whether it is one, whether the experts can be cut so, and how much
 * memory a rank needs. Fills the spec's two derived fields. */
static int read_model(const struct ctl *c, Ballast__JobSpec *spec,
                      const struct job_file_places *places)
{
    struct model_spec *model = xcalloc(1, sizeof *model);
    struct layout layout = {0};
    struct memory_plan memory = {0};
    const char *key;
    struct err err;
    int rc = hf_config_read(spec->model_path, model, &err);
    if (rc < 0) {
        rc = refuse_key(c, places, "model.path", err.text,
                        rc == -ENOENT ? "; expected a HuggingFace folder with a config.json" : "");
    } else if (layout_init(job_spec_degrees(spec), model->n_experts, 0, &layout, &err) < 0) {
        rc = refuse_key(c, places, "parallel.expert_parallel_degree", err.text, "");
    } else if (!strcmp(spec->train_mode, "indexer") && !model->index_top_k) {
        rc = refuse_key(c, places, "train.mode", "indexer, but the model has no indexer",
                        "; expected full");
    } else if (job_memory(spec, model, layout.degrees, NULL, &memory, &key, &err) < 0) {
        rc = refuse_key(c, places, key, err.text, "");
    } else if (!job_trains_adapters(spec) && !strcmp(spec->moe_bias_update, "quantile") &&
               model->n_expert_groups > 1) {
        rc = refuse_key(c, places, "moe.bias_update",
                        "quantile does not go with a model that chooses experts in groups",
                        "; expected sign or off");
    } else {
        spec->memory_bytes_per_rank = memory.total;
        spec->memory_bytes_spread = spread_memory(spec, model, layout.degrees);
        spec->model_parameters = model_spec_count(model).total;
        rc = CTL_OK;
    }
    layout_fini(&layout);
    free(model);
    return rc;
}

static int by_memory(const void *a, const void *b)
{
    uint64_t x = (*(Ballast__Worker *const *)a)->memory_bytes;
    uint64_t y = (*(Ballast__Worker *const *)b)->memory_bytes;
    return (x < y) - (x > y);
}

/* What would make a job fit that was refused for its size, on stderr. */
static void tell_changes(struct ctl *c, const Ballast__JobSpec *spec)
{
    Ballast__WorkerListRequest request = BALLAST__WORKER_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    if (ctl_call(c, BALLAST__METHOD__METHOD_WORKER_LIST, &request.base, &message) != CTL_OK)
        return;
    const Ballast__WorkerListReply *reply = (const Ballast__WorkerListReply *)message;
    if (reply->n_workers < spec->parallel_workers)
        return;
    qsort(reply->workers, reply->n_workers, sizeof *reply->workers, by_memory);
    const Ballast__Worker *last = reply->workers[spec->parallel_workers - 1];
    uint32_t ep = spec->parallel_expert_parallel_degree;
    uint32_t node_ranks = most_on_a_node(reply->workers, reply->n_workers);
    uint32_t n_nodes = (ep + node_ranks - 1) / node_ranks;
    uint64_t needs = n_nodes > 1 && spec->memory_bytes_spread ? spec->memory_bytes_spread
                                                              : spec->memory_bytes_per_rank;
    if (last->memory_bytes >= needs)
        return;
    struct model_spec *model = xcalloc(1, sizeof *model);
    struct job_machine on = {.on_gpu = strncmp(last->device, "cpu", 3) != 0, .n_threads = 1,
                             .n_nodes = n_nodes > 1 ? n_nodes : 0, .node_ranks = node_ranks};
    char changes[JOB_FIT_TEXT_MAX], has[32];
    struct err err;
    if (hf_config_read(spec->model_path, model, &err) == 0) {
        job_fit_text(spec, model, &on, last->memory_bytes, changes);
        ctl_bytes_text(last->memory_bytes, has);
        ctl_hint(c, "into %s %s", has, changes);
    }
    free(model);
}

static int hand_over(struct ctl *c, Ballast__JobSpec *spec, uint64_t *out_id)
{
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.spec = spec;
    request.hold = c->hold;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_SUBMIT, &request.base, &message);
    if (rc == CTL_OK)
        *out_id = ((const Ballast__SubmitReply *)message)->job_id;
    return rc;
}

static void tell_id(const struct ctl *c, uint64_t id)
{
    if (ctl_is_json(c)) {
        char text[24];
        struct json *o = json_new_object();
        snprintf(text, sizeof text, "%" PRIu64, id);
        json_put(o, "id", json_new_string(text));
        ctl_json_one(c, "Job", 0, o);
    } else {
        printf("%" PRIu64 "\n", id);
    }
    fflush(stdout);
    if (c->hold)
        ctl_hint(c, "  ballast job release %" PRIu64, id);
    else if (!c->follow && !c->wait)
        ctl_hint(c, "  ballast metrics %" PRIu64 " -f\n  ballast logs %" PRIu64 " -f", id, id);
}

static bool matches_a_file(const char *pattern)
{
    glob_t found = {0};
    bool any = glob(pattern, GLOB_NOSORT, NULL, &found) == 0;
    globfree(&found);
    return any;
}

/* The workers may see other files than this machine does, so it is a hint. With --dry-run data are
 * counted, which tells. */
static void tell_absent(struct ctl *c, const Ballast__JobSpec *spec)
{
    const char *ending = strcmp(spec->data_format, "megatron") ? "" : ".idx";
    for (size_t i = 0; i < spec->n_data_train + spec->n_data_validation && !c->dry_run; i++) {
        bool is_train = i < spec->n_data_train;
        const char *path = is_train ? spec->data_train[i]
                                    : spec->data_validation[i - spec->n_data_train];
        char *pattern = xasprintf("%s%s", path, ending);
        if (!matches_a_file(pattern))
            ctl_hint(c, "on this machine no file matches %s of data.%s", pattern,
                     is_train ? "train" : "validation");
        free(pattern);
    }
    char *weights = xasprintf("%s/*.safetensors", spec->model_path);
    if (job_trains_adapters(spec) && !matches_a_file(weights))
        ctl_hint(c, "on this machine %s holds no weights, beside which adapters are trained",
                 spec->model_path);
    free(weights);
}

static int submit(struct ctl *c, Ballast__JobSpec *spec, const struct job_file_places *places)
{
    uint64_t id = 0;
    int rc = read_model(c, spec, places);
    if (rc == CTL_OK)
        tell_absent(c, spec);
    if (rc == CTL_OK && c->dry_run)
        return ctl_plan(c, spec);
    if (rc == CTL_OK)
        rc = hand_over(c, spec, &id);
    if (rc == CTL_LIMIT)
        tell_changes(c, spec);
    if (rc != CTL_OK)
        return rc;
    tell_id(c, id);
    if (c->follow)
        return ctl_follow(c, id);
    return c->wait ? ctl_wait_for(c, &id, 1, BALLAST__JOB_STATE__JOB_UNKNOWN) : CTL_OK;
}

static int explain(void)
{
    char *page = job_file_explain();
    fputs(page, stdout);
    free(page);
    return CTL_OK;
}

/* Options that would be passed over in silence. */
static int check_options(struct ctl *c)
{
    const char *idle = c->follow ? "--follow" : c->wait ? "--wait" : c->hold ? "--hold" : NULL;
    if (c->dry_run && idle)
        return ctl_fail(c, CTL_USAGE, "%s does not go with --dry-run, which submits nothing", idle);
    if (c->cluster && !c->dry_run)
        return ctl_fail(c, CTL_USAGE, "--cluster goes with --dry-run, which plans for it");
    return CTL_OK;
}

int ctl_submit(struct ctl *c)
{
    Ballast__JobSpec *spec = NULL;
    struct problems problems = {0};
    struct job_file_places places = {0};
    if (c->explain)
        return explain();
    if (!c->n_args)
        return ctl_fail(c, CTL_USAGE, "missing arguments; usage: ballast submit JOB.yaml");
    int rc = check_options(c);
    if (rc != CTL_OK)
        return rc;
    rc = job_file_read(c->args[0], c->sets, c->n_sets, &spec, &places, &problems);
    if (rc < 0)
        rc = ctl_fail_problems(c, &problems);
    else
        rc = submit(c, spec, &places);
    problems_fini(&problems);
    job_file_places_fini(&places);
    job_file_free(spec);
    return rc;
}
