/* run.c - opens what one rank needs to train, in the order in which things can be wrong
 *
 * What a rank finds by itself (paths, data, model) is agreed on, so that all ranks say the same
 * and none waits for one that has given up. */
#include "worker/run.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/hf_config.h"
#include "common/mem.h"
#include "common/progress.h"
#include "kernels/spans.h"
#include "proto/job_data.h"
#include "proto/job_fit.h"
#include "proto/job_map.h"
#include "proto/job_memory.h"
#include "proto/job_spec.h"
#include "worker/agree.h"
#include "worker/coll_choose.h"
#include "worker/paths.h"
#include "worker/rate.h"
#include "worker/run_hosts.h"
#include "worker/run_nodes.h"
#include "worker/run_words.h"
#include "worker/same_build.h"

#define OPEN_TIMEOUT_NS (120 * NS_PER_S) /* from the first rank's START to the last one's */
#define STOPPED_TIMEOUT_NS (30 * NS_PER_S) /* one that a signal has stopped */
#define LOCK_PATIENCE_NS (10 * NS_PER_S) /* for the run that this one follows to end */

/* ---- what the rank sees by itself ----------------------------------------------------------- */

static const char *device_name(const Ballast__Start *s)
{
    return s->device && s->device[0] ? s->device : "cpu";
}

static int check_start(const Ballast__Start *s, struct err *err)
{
    struct problems problems = {0};
    if (!s->spec || s->coll_id.len != 16 || s->n_gang == 0 || s->rank >= s->n_gang)
        return err_set(err, -EPROTO, "START of job %llu is incomplete",
                       (unsigned long long)s->job_id);
    int rc = job_spec_check(s->spec, &problems);
    if (rc < 0)
        problems_err(&problems, err);
    problems_fini(&problems);
    if (rc == 0 && s->spec->parallel_workers != s->n_gang)
        rc = err_set(err, -EPROTO, "START has a gang of %zu for parallel.workers %u", s->n_gang,
                     s->spec->parallel_workers);
    return rc == 0 ? device_check(device_name(s), err) : rc;
}

/* The cores of this process, shared with the ranks of its node, unless the daemon says. */
static uint32_t count_threads(const Ballast__Start *s)
{
    cpu_set_t cores;
    uint32_t n_same = run_node_ranks(s, s->rank), n_cores = 1;
    if (s->n_threads > 0)
        return s->n_threads;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0)
        n_cores = (uint32_t)CPU_COUNT(&cores);
    return n_cores > n_same ? n_cores / n_same : 1;
}

static int open_texts(struct run *run, struct err *err)
{
    uint32_t vocab = run->model_spec.vocab;
    struct data_config train, validation;
    int rc;
    if ((rc = job_data_config(run->spec, JOB_TRAIN, vocab, &train, err)) < 0 ||
        (rc = job_data_config(run->spec, JOB_VALIDATION, vocab, &validation, err)) < 0 ||
        (rc = data_open(&train, &run->train, err)) < 0 || validation.n_patterns == 0)
        return rc;
    return data_open(&validation, &run->validation, err);
}

/* The placement in force, as the coordinator has it. */
static int open_slots(struct run *run, struct err *err)
{
    struct slots in_order;
    int rc = slots_init(&in_order, &run->model_spec, &run->layout,
                        run->spec->rebalance_spare_slots_per_rank, err);
    if (rc < 0)
        return rc;
    in_order.devices_per_node = run_node_rows(run->start, &run->layout.ep);
    if (!run->start->placement || run->start->placement->n_layers == 0) {
        run->slots = in_order;
        return 0;
    }
    rc = slots_from(&in_order, run->start->placement, &run->slots, err);
    slots_fini(&in_order);
    if (rc < 0 && err)
        err->code = -EPROTO; /* another START may carry another one */
    return rc < 0 ? -EPROTO : 0;
}

static void open_dispatch(struct run *run)
{
    const Ballast__JobSpec *s = run->spec;
    uint32_t *nodes = xcalloc(run->layout.ep.n_ranks, sizeof *nodes);
    run_find_nodes(run->start, &run->layout.ep, nodes);
    run->dispatch = dispatch_open(&(struct dispatch_config){
        .layout = &run->layout, .slots = &run->slots, .coll = run->coll, .dev = run->dev,
        .top_k = run->model_spec.top_k, .width = run->model_spec.latent, .nodes = nodes,
        .hierarchical = strcmp(s->parallel_hierarchical_all_to_all, "off") != 0,
        .chunk_tokens = memory_chunk_tokens(
            model_spec_expert_flops(&run->model_spec), !run->dev->is_host,
            recompute_of(s->parallel_activation_checkpointing)),
    });
    free(nodes);
}

static int open_model(struct run *run, struct err *err)
{
    const Ballast__JobSpec *s = run->spec;
    const struct model_spec *m = &run->model_spec;
    int rc;
    if ((rc = open_slots(run, err)) < 0 ||
        (rc = shard_open(&run->map, m, &run->layout, &run->slots, run->coll, run->dev, &run->shard,
                         err)) < 0)
        return rc;
    if (m->n_experts > 0)
        open_dispatch(run);
    struct model_config c = {
        .spec = m, .map = &run->map, .lora = run->lora, .layout = &run->layout,
        .slots = &run->slots, .shard = run->shard, .dispatch = run->dispatch, .dev = run->dev,
        .tokens_max = (int64_t)s->train_micro_batch * s->data_sequence_length,
        .recompute = recompute_of(s->parallel_activation_checkpointing),
        .segment_rows = s->parallel_segment_tokens,
        .count_margins = run->bias_rule == BIAS_QUANTILE, .rules = run->rules,
        .index_stage = run->index_stage, .index_joint = run->index_joint,
        .index_weight = (float)s->indexer_loss_coefficient,
    };
    return model_open(&c, &run->model, err);
}

static int open_map(struct run *run, struct err *err)
{
    const char *key;
    int rc = job_map_init(run->spec, &run->model_spec, &run->map, &key, err);
    return rc < 0 ? err_prefix(err, "%s", key) : 0;
}

static int open_device(struct run *run, struct err *err)
{
    const Ballast__JobSpec *spec = run->spec;
    enum elem_type type = strcmp(spec->train_precision, "bf16") == 0 ? ELEM_BF16 : ELEM_F32;
    return device_open(device_name(run->start), type, count_threads(run->start),
                       spec->train_deterministic, &run->dev, err);
}

/* All at once, as they share a machine when they train. */
static int open_measures(struct run *run, struct err *err)
{
    const Ballast__Start *s = run->start;
    char *folder = xasprintf("%s/trace", run->spec->checkpoint_path);
    run->rate = rate_measure(run->dev);
    spans_open(run->dev);
    run->trace = trace_create(folder, s->rank, s->gang[s->rank]->node, run->spec->trace_first_step,
                              run->spec->trace_steps);
    free(folder);
    return run->coll->ops->all_reduce_f64(run->coll, &run->coll->world_group, COLL_SUM, &run->rate,
                                          1, err);
}

static int open_forms(struct run *run, struct err *err)
{
    const char *path = run->spec->model_path;
    enum ckpt_dtype choice;
    if (run->lora)
        return 0; /* adapters alone are written */
    int rc = ckpt_dtype_parse(run->spec->checkpoint_dtype, &choice, err);
    return rc < 0 ? rc : ckpt_forms_open(path, ckpt_has_weights(path), &run->map, choice,
                                         &run->forms, err);
}

/* Before anything is taken: better no start than an end in the first step. */
static int plan_memory(struct run *run, struct err *err)
{
    struct job_machine on = {!run->dev->is_host && strcmp(run->dev->ops->name, "cpu") != 0,
                             run->dev->n_threads, 0, run_node_ranks_max(run->start)};
    uint32_t *nodes = xcalloc(run->layout.ep.n_ranks, sizeof *nodes);
    struct device_memory m;
    const char *key;
    char changes[JOB_FIT_TEXT_MAX];
    on.n_nodes = run_find_nodes(run->start, &run->layout.ep, nodes);
    free(nodes);
    int rc = job_memory(run->spec, &run->model_spec, run->layout.degrees, &on, &run->plan, &key,
                        err);
    if (rc < 0)
        return err_prefix(err, "%s", key);
    run->dev->ops->memory(run->dev, &m);
    uint64_t most = on.on_gpu ? m.available + run->plan.process : m.total;
    if (run->plan.total <= most || most == 0)
        return 0;
    job_fit_text(run->spec, &run->model_spec, &on, most, changes);
    return err_set(err, -ENOMEM, "the job needs %" PRIu64 " MiB a rank, device %s has %" PRIu64
                   " MiB; %s", run->plan.total >> 20, device_name(run->start), most >> 20, changes);
}

/* Everything that needs no other rank. */
static int open_local(struct run *run, struct err *err)
{
    const Ballast__Start *s = run->start;
    int rc;
    if ((rc = paths_check(run->spec, s->allowed_roots, s->n_allowed_roots, err)) < 0 ||
        (rc = run_words(run, err)) < 0 ||
        (rc = hf_config_read(run->spec->model_path, &run->model_spec, err)) < 0 ||
        (rc = run_words_check(run, err)) < 0 ||
        (rc = open_map(run, err)) < 0 ||
        (rc = layout_init(job_spec_degrees(run->spec), run->model_spec.n_experts, s->rank,
                          &run->layout, err)) < 0 ||
        (rc = open_device(run, err)) < 0 || (rc = plan_memory(run, err)) < 0)
        return rc;
    return open_texts(run, err);
}

/* The same, where tensors travel. */
static int open_parts(struct run *run, struct err *err)
{
    int rc;
    run->sums = xcalloc(RUN_SUMS + (size_t)run->model_spec.n_layers * run->layout.ep.n_ranks,
                        sizeof *run->sums);
    data_batch_reserve(&run->batch, (int64_t)run->spec->train_micro_batch *
                                        run->spec->data_sequence_length);
    run->dev->ops->reserve(run->dev, run->plan.op_scratch);
    if ((rc = open_forms(run, err)) == 0 && (rc = open_model(run, err)) == 0)
        window_init(&run->window, &run->slots, run->spec->rebalance_window_steps, run->start);
    return rc;
}

/* ---- all together --------------------------------------------------------------------------- */

static int open_coll(struct run *run, struct err *err)
{
    struct coll_host_config c = {
        .id = run->start->coll_id.data, .rank = run->start->rank,
        .world = (uint32_t)run->start->n_gang, .open_timeout_ns = OPEN_TIMEOUT_NS,
        .call_timeout_ns = RUN_PATIENCE_NS, .stopped_timeout_ns = STOPPED_TIMEOUT_NS,
        .cancelled = &run->wishes->cancelled,
    };
    struct run_hosts hosts;
    int rc = run_hosts_open(run, OPEN_TIMEOUT_NS, &hosts, err);
    if (rc == 0) {
        c.hosts = hosts.n_hosts > 1 ? &hosts.coll : NULL;
        rc = coll_host_open(&c, &run->coll, err);
    }
    if (rc == 0 && hosts.n_hosts > 1 && run->start->rank == 0)
        printf("the ranks are on %u hosts, between which all travels through the network\n",
               hosts.n_hosts);
    run_hosts_fini(&hosts);
    if (rc < 0)
        return rc;
    atomic_store(&run->wishes->coll, run->coll);
    progress_show(run->coll->ops->progress(run->coll));
    if (atomic_load(&run->wishes->cancelled)) /* said between the two lines above */
        run->coll->ops->abort(run->coll);
    return 0;
}

/* Now that all have their devices. Who aborts the host's collectives aborts these. */
static int open_travel(struct run *run, struct err *err)
{
    char said[COLL_SAID_BYTES];
    enum coll_wish wish;
    int rc = coll_wish_parse(run->start->collectives, &wish, err);
    if ((rc = agree(run->coll, rc, err)) < 0 ||
        (rc = coll_choose(&run->coll, run->dev, wish, &run->layout, said, err)) < 0)
        return rc;
    run->coll->is_blocking = !run->spec->parallel_overlap;
    run->coll->registers_memory = run->spec->parallel_register_buffers;
    atomic_store(&run->wishes->coll, run->coll);
    if (run->coll->rank == 0)
        printf("tensors travel through %s\n", said);
    return 0;
}

int run_open(struct run *run, const Ballast__Start *start, struct run_wishes *wishes,
             struct plans *plans, struct settings *settings, struct err *err)
{
    int rc;
    *run = (struct run){.start = start, .spec = start->spec, .wishes = wishes, .plans = plans,
                        .settings = settings, .settings_revision = start->settings_revision,
                        .ckpt_lock = -1};
    if ((rc = check_start(start, err)) < 0)
        return rc;
    run->live_spec = *start->spec;
    run->spec = &run->live_spec;
    struct build_id build = build_id_own();
    if ((rc = open_coll(run, err)) < 0 ||
        (rc = same_build(run->coll, &build, start->gang, err)) < 0)
        return rc;
    rc = open_local(run, err);
    if ((rc = agree(run->coll, rc, err)) < 0 || (rc = open_travel(run, err)) < 0)
        return rc;
    if ((rc = open_measures(run, err)) < 0)
        return rc;
    rc = open_parts(run, err);
    if ((rc = agree(run->coll, rc, err)) < 0)
        return rc;
    run->ckpt = (struct ckpt_config){
        .path = run->spec->checkpoint_path, .model_path = run->spec->model_path,
        .keep = run->spec->checkpoint_keep, .spec = &run->model_spec, .map = &run->map,
        .forms = run->lora ? NULL : &run->forms, .lora = run->lora,
        .shard = run->shard, .coll = run->coll,
    };
    if ((rc = ckpt_find(&run->ckpt, LOCK_PATIENCE_NS, &run->ckpt_lock, &run->checkpoint_step,
                        err)) < 0)
        return rc;
    run->resumed_from_step = run->checkpoint_step;
    rc = run_restore(run, err);
    malloc_trim(0); /* headers of many tensors were read, and are gone */
    return rc;
}

void run_change_settings(struct run *run)
{
    struct window *w = &run->window;
    settings_take(run->settings, &run->live_spec);
    run->settings_revision = run->settings->revision;
    run->ckpt.keep = run->spec->checkpoint_keep;
    if (w->n_steps == run->spec->rebalance_window_steps)
        return;
    w->n_steps = run->spec->rebalance_window_steps;
    window_break(w); /* the next one begins at a multiple of the new length */
}

void run_close(struct run *run)
{
    model_close(run->model);
    dispatch_close(run->dispatch);
    shard_close(run->shard);
    if (run->wishes)
        atomic_store(&run->wishes->coll, NULL);
    progress_show(NULL);
    if (run->coll)
        run->coll->ops->close(run->coll);
    spans_close(run->dev);
    if (run->dev)
        run->dev->ops->close(run->dev);
    trace_destroy(run->trace);
    if (run->ckpt_lock >= 0)
        close(run->ckpt_lock);
    data_close(run->train);
    data_close(run->validation);
    data_batch_fini(&run->batch);
    ckpt_forms_close(&run->forms);
    tensor_map_fini(&run->map);
    window_fini(&run->window);
    slots_fini(&run->slots);
    layout_fini(&run->layout);
    free(run->sums);
}
