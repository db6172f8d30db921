/* ctl_plan.c - what --dry-run prints: the model, the groups, the memory of a rank, the work */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "proto/job_memory.h"
#include "proto/job_spec.h"

struct plan {
    const Ballast__JobSpec *spec;
    struct model_spec   model;
    struct model_counts counts;
    struct layout       layout; /* of rank 0 */
    struct memory_plan  memory;
    uint64_t n_tokens_step, n_passes;
    double   step_flops;
};

static int plan_init(const struct ctl *c, const Ballast__JobSpec *spec, struct plan *p)
{
    const char *key;
    struct err err;
    p->spec = spec;
    if (hf_config_read(spec->model_path, &p->model, &err) < 0 ||
        layout_init(job_spec_degrees(spec), p->model.n_experts, 0, &p->layout, &err) < 0 ||
        job_memory(spec, &p->model, p->layout.degrees, NULL, &p->memory, &key, &err) < 0)
        return ctl_fail(c, CTL_USAGE, "%s", err.text);
    enum recompute how = recompute_of(spec->parallel_activation_checkpointing);
    p->counts = model_spec_count(&p->model);
    p->n_tokens_step = (uint64_t)spec->train_global_batch * spec->data_sequence_length;
    p->n_passes = spec->train_global_batch / (spec->train_micro_batch * spec->parallel_workers);
    p->step_flops = (model_spec_flops(&p->counts) + recompute_flops(&p->model, how)) *
                    (double)p->n_tokens_step;
    return CTL_OK;
}

static void print_group(const char *name, const struct rank_group *g, const char *meaning)
{
    printf("  %-15s %" PRIu32 " rank%s (", name, g->n_ranks, g->n_ranks == 1 ? "" : "s");
    for (uint32_t i = 0; i < g->n_ranks && i < 8; i++)
        printf("%s%" PRIu32, i ? " " : "", g->ranks[i]);
    printf("%s)  %s\n", g->n_ranks > 8 ? " ..." : "", meaning);
}

static void add_row(struct ctl_table *t, const char *what, uint64_t bytes)
{
    char text[32];
    ctl_bytes_text(bytes, text);
    ctl_table_cell(t, "%s", what);
    ctl_table_cell(t, "%s", text);
}

static void print_memory(const struct ctl *c, const struct memory_plan *m)
{
    static const struct ctl_column columns[] = {{"MEMORY PER RANK", false}, {"SIZE", true}};
    struct ctl_table t = {.columns = columns, .n_columns = 2};
    add_row(&t, "weights", m->weights);
    add_row(&t, "gradients", m->gradients);
    add_row(&t, "optimizer", m->optimizer);
    add_row(&t, "activations", m->activations);
    add_row(&t, "buffers", m->buffers);
    add_row(&t, "total", m->total);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

static void print_text(const struct ctl *c, const struct plan *p)
{
    printf("model            %" PRIu64 " parameters, %" PRIu64 " active, %" PRIu32 " layers, %"
           PRIu32 " experts\n", p->counts.total, p->counts.active, p->model.n_layers,
           p->model.n_experts);
    printf("step             %" PRIu32 " sequences of %" PRIu32 " tokens: %" PRIu64
           " tokens, %" PRIu64 " pass%s per rank, %.3g FLOP\n", p->spec->train_global_batch,
           p->spec->data_sequence_length, p->n_tokens_step, p->n_passes,
           p->n_passes == 1 ? "" : "es", p->step_flops);
    printf("run              %" PRIu64 " steps, %.4g tokens, %.3g FLOP\n", p->spec->train_steps,
           (double)p->n_tokens_step * (double)p->spec->train_steps,
           p->step_flops * (double)p->spec->train_steps);
    printf("groups of rank 0, of %" PRIu32 " workers\n", p->layout.degrees.world);
    print_group("fsdp", &p->layout.fsdp, "cut the dense parameters");
    print_group("fsdp replicas", &p->layout.fsdp_replica, "hold the same slice of them");
    print_group("experts", &p->layout.ep, "serve all experts together");
    print_group("expert shards", &p->layout.expert_shard, "cut each expert");
    print_group("expert replicas", &p->layout.expert_replica, "hold the same slice of it");
    putchar('\n');
    print_memory(c, &p->memory);
    ctl_hint(c, "the file is right; nothing was submitted");
}

static struct json *group_json(const struct rank_group *g)
{
    struct json *ranks = json_new_array();
    for (uint32_t i = 0; i < g->n_ranks; i++)
        json_push(ranks, json_new_u64(g->ranks[i]));
    return ranks;
}

static void print_json(const struct ctl *c, const struct plan *p)
{
    struct json *o = json_new_object(), *model = json_new_object(), *memory = json_new_object();
    struct json *groups = json_new_object(), *step = json_new_object();
    json_put(model, "parameters_total", json_new_u64(p->counts.total));
    json_put(model, "parameters_active", json_new_u64(p->counts.active));
    json_put(model, "layers", json_new_u64(p->model.n_layers));
    json_put(model, "experts", json_new_u64(p->model.n_experts));
    json_put(memory, "weights", json_new_u64(p->memory.weights));
    json_put(memory, "gradients", json_new_u64(p->memory.gradients));
    json_put(memory, "optimizer", json_new_u64(p->memory.optimizer));
    json_put(memory, "activations", json_new_u64(p->memory.activations));
    json_put(memory, "buffers", json_new_u64(p->memory.buffers));
    json_put(memory, "total", json_new_u64(p->memory.total));
    json_put(groups, "fsdp", group_json(&p->layout.fsdp));
    json_put(groups, "fsdp_replica", group_json(&p->layout.fsdp_replica));
    json_put(groups, "expert_parallel", group_json(&p->layout.ep));
    json_put(groups, "expert_shard", group_json(&p->layout.expert_shard));
    json_put(groups, "expert_replica", group_json(&p->layout.expert_replica));
    json_put(step, "tokens", json_new_u64(p->n_tokens_step));
    json_put(step, "passes_per_rank", json_new_u64(p->n_passes));
    json_put(step, "flops", json_new_double(p->step_flops));
    json_put(o, "model", model);
    json_put(o, "step", step);
    json_put(o, "memory_per_rank", memory);
    json_put(o, "groups_of_rank_0", groups);
    json_put(o, "spec", ctl_json_spec(p->spec));
    ctl_json_one(c, "Plan", 0, o);
}

int ctl_plan(const struct ctl *c, const Ballast__JobSpec *spec)
{
    struct plan *p = xcalloc(1, sizeof *p);
    int rc = plan_init(c, spec, p);
    if (rc == CTL_OK && ctl_is_json(c))
        print_json(c, p);
    else if (rc == CTL_OK)
        print_text(c, p);
    layout_fini(&p->layout);
    free(p);
    return rc;
}
