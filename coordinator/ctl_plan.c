/* ctl_plan.c - what --dry-run prints: the model, the data, the groups, who owns what, memory and
 * time
 *
 * Memory is what the engine takes; time is what a cluster's measured rates promise, and a cluster
 * nobody has named is one of H200. */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/conf.h"
#include "common/hf_config.h"
#include "common/memory_model.h"
#include "common/outline_config.h"
#include "coordinator/ctl_data.h"
#include "coordinator/json_of.h"
#include "coordinator/strategy.h"
#include "proto/job_fit.h"
#include "proto/job_map.h"
#include "proto/job_memory.h"
#include "proto/job_spec.h"

#define RANKS_SHOWN 16u /* all of so many; of more the first half of that, and the last */

struct plan {
    const Ballast__JobSpec *spec;
    struct model_spec   model;
    struct model_counts counts;
    struct layout       layout; /* of rank 0 */
    struct memory_plan  memory;
    uint64_t n_tokens_step, n_passes;
    double   step_flops;
    struct cluster   cluster;
    struct plan_time time; /* total 0: not known, the model has no outline */
    char changes[JOB_FIT_TEXT_MAX]; /* of a job that does not fit into a GPU of the cluster */
    struct ctl_data data;
};

static bool plan_fits(const struct plan *p)
{
    return p->memory.total <= p->cluster.gpu_memory;
}

static struct plan_choice choice_of(const struct plan *p)
{
    const Ballast__JobSpec *s = p->spec;
    struct layout_degrees d = p->layout.degrees;
    enum packing packing = job_trains_adapters(s) ? packing_of_base(s->model_base_precision)
                                                  : PACKING_NONE;
    bool is_f32 = !strcmp(s->train_precision, "f32");
    return (struct plan_choice){
        .world = d.world, .fsdp = d.fsdp, .ep = d.ep, .expert_shard = d.expert_shard, .sp = 1,
        .tp = 1, .micro_batch = s->train_micro_batch, .accumulation = (uint32_t)p->n_passes,
        .recompute = recompute_of(s->parallel_activation_checkpointing),
        .base = packing == PACKING_MXFP4 ? BASE_MXFP4
                : packing == PACKING_FP8 ? BASE_FP8
                : is_f32                 ? BASE_F32
                                         : BASE_BF16,
        .is_f32 = is_f32,
    };
}

static void plan_step_time(struct plan *p)
{
    struct outline *o = NULL;
    struct err err;
    char *config = xasprintf("%s/config.json", p->spec->model_path);
    if (outline_read(config, &o, &err) == 0) {
        struct costs costs;
        costs_init(o, p->spec->data_sequence_length, &costs);
        struct job_shape job = {
            .costs = &costs, .cluster = &p->cluster, .is_lora = job_trains_adapters(p->spec),
            .lora_rank = p->spec->lora_r, .sequence_length = p->spec->data_sequence_length,
            .global_batch = p->spec->train_global_batch,
            .is_serial = !p->spec->parallel_overlap,
        };
        struct plan_choice choice = choice_of(p);
        p->time = plan_time(&job, &choice);
    }
    free(o);
    free(config);
}

static int read_cluster(const struct ctl *c, struct plan *p)
{
    struct err err;
    if (!c->cluster)
        fields_init(&cluster_table, &p->cluster);
    else if (conf_read(c->cluster, &cluster_table, &p->cluster, &err) < 0)
        return ctl_fail(c, CTL_USAGE, "%s", err.text);
    return CTL_OK;
}

static uint32_t node_of(const struct plan *p, uint32_t rank)
{
    return rank / (p->cluster.gpus_per_node ? p->cluster.gpus_per_node : 1);
}

/* How many nodes one expert group lies on, at most. */
static uint32_t nodes_of_experts(const struct plan *p)
{
    uint32_t most = 0, ep = p->layout.degrees.ep;
    for (uint32_t r = 0; r < p->layout.degrees.world; r += ep) {
        uint32_t n = node_of(p, r + ep - 1) - node_of(p, r) + 1;
        most = n > most ? n : most;
    }
    return most;
}

static int plan_init(const struct ctl *c, const Ballast__JobSpec *spec, struct plan *p)
{
    struct job_machine on = {.on_gpu = !strcmp(spec->train_precision, "bf16"), .n_threads = 1,
                             .node_ranks = p->cluster.gpus_per_node};
    const char *key;
    struct err err;
    p->spec = spec;
    if (hf_config_read(spec->model_path, &p->model, &err) < 0 ||
        layout_init(job_spec_degrees(spec), p->model.n_experts, 0, &p->layout, &err) < 0)
        return ctl_fail(c, CTL_USAGE, "%s", err.text);
    on.n_nodes = nodes_of_experts(p);
    if (job_memory(spec, &p->model, p->layout.degrees, &on, &p->memory, &key, &err) < 0)
        return ctl_fail(c, CTL_USAGE, "%s", err.text);
    if (!plan_fits(p))
        job_fit_text(spec, &p->model, &on, p->cluster.gpu_memory, p->changes);
    enum recompute how = recompute_of(spec->parallel_activation_checkpointing);
    p->counts = model_spec_count(&p->model);
    p->n_tokens_step = (uint64_t)spec->train_global_batch * spec->data_sequence_length;
    p->n_passes = spec->train_global_batch / (spec->train_micro_batch * spec->parallel_workers);
    uint64_t n_tokens = (uint64_t)spec->train_micro_batch * spec->data_sequence_length;
    bool by_piece = memory_chunks(n_tokens, p->layout.degrees.ep, memory_chunk_tokens(
                        model_spec_expert_flops(&p->model), on.on_gpu, how)) > 1;
    p->step_flops = (model_spec_flops(&p->counts) + recompute_flops(&p->model, how, by_piece)) *
                    (double)p->n_tokens_step;
    plan_step_time(p);
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

/* Slice i of n, counted from 1; "all" where nothing is cut. */
static void add_slice(struct ctl_table *t, const struct rank_group *g)
{
    if (g->n_ranks == 1)
        ctl_table_cell(t, "all");
    else
        ctl_table_cell(t, "%" PRIu32 " of %" PRIu32, g->me + 1, g->n_ranks);
}

static void add_owner(struct ctl_table *t, const struct plan *p, uint32_t rank)
{
    struct layout l;
    uint32_t n = p->model.n_experts / p->layout.degrees.ep;
    if (layout_init(p->layout.degrees, p->model.n_experts, rank, &l, NULL) < 0)
        return;
    ctl_table_cell(t, "%" PRIu32, rank);
    ctl_table_cell(t, "%" PRIu32, node_of(p, rank));
    add_slice(t, &l.fsdp);
    if (n == 1)
        ctl_table_cell(t, "%" PRIu32, l.ep.me);
    else if (n)
        ctl_table_cell(t, "%" PRIu32 " to %" PRIu32, l.ep.me * n, (l.ep.me + 1) * n - 1);
    else
        ctl_table_cell(t, "-");
    add_slice(t, &l.expert_shard);
    layout_fini(&l);
}

static void print_owners(const struct ctl *c, const struct plan *p)
{
    static const struct ctl_column columns[] = {{"RANK", true}, {"NODE", true},
                                                {"DENSE SLICE", false},
                                                {"EXPERTS OF A LAYER", false},
                                                {"SLICE OF EACH", false}};
    struct ctl_table t = {.columns = columns, .n_columns = 5};
    uint32_t world = p->layout.degrees.world, n_nodes = nodes_of_experts(p);
    uint32_t first = world > RANKS_SHOWN ? RANKS_SHOWN / 2 : world;
    for (uint32_t r = 0; r < first; r++)
        add_owner(&t, p, r);
    if (first < world)
        add_owner(&t, p, world - 1);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
    printf("  nodes of %" PRIu32 " (--cluster names others): ", p->cluster.gpus_per_node);
    if (n_nodes > 1)
        printf("an expert group lies on %" PRIu32 " of them\n\n", n_nodes);
    else
        printf("each expert group is inside one\n\n");
}

/* The parts of a plan, in the order of the trainer's log. */
#define MEMORY_PARTS 11u
struct memory_part {
    const char *name;
    uint64_t    bytes;
};

static void memory_parts(const struct memory_plan *m, struct memory_part out[MEMORY_PARTS])
{
    const struct memory_part parts[MEMORY_PARTS] = {
        {"weights", m->weights}, {"gradients", m->gradients}, {"optimizer", m->optimizer},
        {"activations", m->activations}, {"gathered", m->gathered}, {"dispatch", m->dispatch},
        {"staging", m->staging}, {"counters", m->counters}, {"scratch", m->scratch},
        {"process", m->process}, {"total", m->total},
    };
    memcpy(out, parts, sizeof parts);
}

/* What the bytes hold at the experts' side, however tokens are routed. */
static void print_rows(const struct plan *p)
{
    const struct memory_rows *rows = &p->memory.rows;
    bool stays = recompute_of(p->spec->parallel_activation_checkpointing) == RECOMPUTE_OFF;
    if (rows->piece == 0)
        return;
    printf("  of experts at most %" PRIu64 " rows of a layer come at once", rows->piece);
    if (stays)
        printf(" and %" PRIu64 " stay; where more would, they come again", rows->kept);
    printf("\n");
}

static void print_memory(const struct ctl *c, const struct plan *p)
{
    const struct memory_plan *m = &p->memory;
    static const struct ctl_column columns[] = {{"MEMORY PER RANK", false}, {"SIZE", true}};
    struct ctl_table t = {.columns = columns, .n_columns = 2};
    struct memory_part parts[MEMORY_PARTS];
    memory_parts(m, parts);
    for (uint32_t i = 0; i < MEMORY_PARTS; i++)
        add_row(&t, parts[i].name, parts[i].bytes);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
    print_rows(p);
    if (!plan_fits(p)) {
        char has[32];
        ctl_bytes_text(p->cluster.gpu_memory, has);
        printf("  which a GPU of %s does not have; into its %s %s\n", p->cluster.name, has,
               p->changes);
    }
}

static void print_time(const struct ctl *c, const struct plan *p)
{
    const struct plan_time *x = &p->time;
    const struct { const char *name; double seconds; } rows[] = {
        {"compute", x->compute}, {"all-to-all, not hidden", x->all_to_all_exposed},
        {"gathers, not hidden", x->gather_exposed}, {"optimizer", x->optimizer},
        {"total", x->total},
    };
    static const struct ctl_column columns[] = {{"TIME OF A STEP", false}, {"MS", true}};
    struct ctl_table t = {.columns = columns, .n_columns = 2};
    if (x->total <= 0)
        return;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ctl_table_cell(&t, "%s", rows[i].name);
        ctl_table_cell(&t, "%.3g", rows[i].seconds * 1e3);
    }
    putchar('\n');
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
    printf("  on %s: %.4g tokens/s, MFU %.2f\n", p->cluster.name, x->tokens_per_s, x->mfu);
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
    ctl_data_print(&p->data);
    printf("groups of rank 0, of %" PRIu32 " workers\n", p->layout.degrees.world);
    print_group("fsdp", &p->layout.fsdp, "cut the dense parameters");
    print_group("fsdp replicas", &p->layout.fsdp_replica, "hold the same slice of them");
    print_group("experts", &p->layout.ep, "serve all experts together");
    print_group("expert shards", &p->layout.expert_shard, "cut each expert");
    print_group("expert replicas", &p->layout.expert_replica, "hold the same slice of it");
    putchar('\n');
    print_owners(c, p);
    print_memory(c, p);
    print_time(c, p);
    ctl_hint(c, "the file is right; nothing was submitted");
}

static struct json *group_json(const struct rank_group *g)
{
    struct json *ranks = json_new_array();
    for (uint32_t i = 0; i < g->n_ranks; i++)
        json_push(ranks, json_new_u64(g->ranks[i]));
    return ranks;
}

static struct json *slice_json(const struct rank_group *g)
{
    struct json *o = json_new_object();
    json_put(o, "slice", json_new_u64(g->me));
    json_put(o, "of", json_new_u64(g->n_ranks));
    return o;
}

static struct json *owners_json(const struct plan *p)
{
    struct json *ranks = json_new_array();
    uint32_t n = p->model.n_experts / p->layout.degrees.ep;
    for (uint32_t r = 0; r < p->layout.degrees.world; r++) {
        struct json *o = json_new_object();
        struct layout l;
        if (layout_init(p->layout.degrees, p->model.n_experts, r, &l, NULL) < 0)
            break;
        json_put(o, "rank", json_new_u64(r));
        json_put(o, "node", json_new_u64(node_of(p, r)));
        json_put(o, "dense", slice_json(&l.fsdp));
        json_put(o, "first_expert", json_new_u64((uint64_t)l.ep.me * n));
        json_put(o, "experts", json_new_u64(n));
        json_put(o, "expert", slice_json(&l.expert_shard));
        json_push(ranks, o);
        layout_fini(&l);
    }
    return ranks;
}

static struct json *time_json(const struct plan_time *x)
{
    struct json *o = json_new_object();
    json_put(o, "compute_s", json_new_double(x->compute));
    json_put(o, "all_to_all_s", json_new_double(x->all_to_all));
    json_put(o, "all_to_all_exposed_s", json_new_double(x->all_to_all_exposed));
    json_put(o, "gather_s", json_new_double(x->gather));
    json_put(o, "gather_exposed_s", json_new_double(x->gather_exposed));
    json_put(o, "optimizer_s", json_new_double(x->optimizer));
    json_put(o, "total_s", json_new_double(x->total));
    json_put(o, "tokens_per_second", json_new_double(x->tokens_per_s));
    json_put(o, "mfu", json_new_double(x->mfu));
    return o;
}

static void print_json(const struct ctl *c, const struct plan *p)
{
    struct json *o = json_new_object(), *model = json_new_object(), *memory = json_new_object();
    struct memory_part parts[MEMORY_PARTS];
    struct json *groups = json_new_object(), *step = json_new_object();
    json_put(model, "parameters_total", json_new_u64(p->counts.total));
    json_put(model, "parameters_active", json_new_u64(p->counts.active));
    json_put(model, "layers", json_new_u64(p->model.n_layers));
    json_put(model, "experts", json_new_u64(p->model.n_experts));
    memory_parts(&p->memory, parts);
    for (uint32_t i = 0; i < MEMORY_PARTS; i++)
        json_put(memory, parts[i].name, json_new_u64(parts[i].bytes));
    json_put(memory, "buffers", json_new_u64(p->memory.buffers)); /* gathered to process */
    json_put(groups, "fsdp", group_json(&p->layout.fsdp));
    json_put(groups, "fsdp_replica", group_json(&p->layout.fsdp_replica));
    json_put(groups, "expert_parallel", group_json(&p->layout.ep));
    json_put(groups, "expert_shard", group_json(&p->layout.expert_shard));
    json_put(groups, "expert_replica", group_json(&p->layout.expert_replica));
    json_put(step, "tokens", json_new_u64(p->n_tokens_step));
    json_put(step, "passes_per_rank", json_new_u64(p->n_passes));
    json_put(step, "flops", json_new_double(p->step_flops));
    if (p->memory.rows.piece > 0) {
        json_put(step, "expert_rows_at_once", json_new_u64(p->memory.rows.piece));
        json_put(step, "expert_rows_kept", json_new_u64(p->memory.rows.kept));
    }
    json_put(o, "model", model);
    json_put(o, "step", step);
    json_put(o, "data", ctl_data_json(&p->data));
    json_put(o, "memory_per_rank", memory);
    json_put(o, "fits", json_new_bool(plan_fits(p)));
    if (!plan_fits(p))
        json_put(o, "changes", json_new_string(p->changes));
    json_put(o, "groups_of_rank_0", groups);
    json_put(o, "ranks", owners_json(p));
    if (p->time.total > 0)
        json_put(o, "time_of_a_step", time_json(&p->time));
    json_put(o, "spec", json_of_spec(p->spec));
    ctl_json_one(c, "Plan", 0, o);
}

int ctl_plan(const struct ctl *c, const Ballast__JobSpec *spec)
{
    struct plan *p = xcalloc(1, sizeof *p);
    int rc = read_cluster(c, p);
    if (rc == CTL_OK)
        rc = plan_init(c, spec, p);
    if (rc == CTL_OK) {
        ctl_data_count(spec, p->model.vocab, &p->data);
        if (ctl_is_json(c))
            print_json(c, p);
        else
            print_text(c, p);
        ctl_data_warn(c, &p->data);
    }
    if (rc == CTL_OK && c->cluster && !plan_fits(p))
        rc = CTL_LIMIT;
    layout_fini(&p->layout);
    fields_fini(&cluster_table, &p->cluster);
    free(p);
    return rc;
}
