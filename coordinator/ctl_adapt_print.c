/* ctl_adapt_print.c - what was found about a model, as tables in a terminal */
#include "coordinator/ctl_adapt.h"

#include <inttypes.h>
#include <string.h>

#define PLANS_SHOWN 8u

bool adapt_is_variant(const struct adapt *a, uint32_t i)
{
    const struct plan_choice *c = &a->all->plans[i].choice;
    for (uint32_t k = 0; k < i; k++) {
        const struct plan_choice *d = &a->all->plans[k].choice;
        if (c->ep == d->ep && c->sp == d->sp && c->tp == d->tp && c->base == d->base &&
            c->micro_batch == d->micro_batch && c->recompute == d->recompute &&
            c->offload == d->offload && c->is_f32 == d->is_f32)
            return true;
    }
    return false;
}

const char *adapt_devices(const struct adapt *a)
{
    return cluster_is_cpu(&a->cluster) ? "CPU ranks" : "GPUs";
}

static const char *one_device(const struct adapt *a)
{
    return cluster_is_cpu(&a->cluster) ? "CPU rank" : "GPU";
}

void adapt_shortfall(const struct adapt *a, char out[160])
{
    const struct plan_memory *m = &a->all->least.memory;
    uint64_t host = a->cluster.host_memory / a->cluster.gpus_per_node;
    if (!a->all->n_seen)
        snprintf(out, 160, "no degrees divide a step of %" PRIu32 " sequences over so many %s",
                 a->job.global_batch, adapt_devices(a));
    else if (m->total > a->cluster.gpu_memory)
        snprintf(out, 160, "the least is %.1f GB a %s, %.1f GB more than it has",
                 (double)m->total / 1e9, one_device(a),
                 (double)(m->total - a->cluster.gpu_memory) / 1e9);
    else
        snprintf(out, 160, "the least is %.1f GB a GPU with %.1f GB of the host's memory, which "
                 "has %.1f GB for each GPU", (double)m->total / 1e9, (double)m->host / 1e9,
                 (double)host / 1e9);
}

static void print_model(const struct adapt *a)
{
    const struct outline *o = a->outline;
    printf("model        %s: %" PRIu32 " layers, %" PRIu64 " parameters, %" PRIu64
           " active for a token\n", o->family, o->n_layers, a->counts.total, a->counts.active);
    printf("parts       ");
    for (int i = 0; i < OUTLINE_PARTS; i++)
        if (a->counts.parts[i])
            printf(" %s %.4g", outline_part_name((enum outline_part)i),
                   (double)a->counts.parts[i]);
    printf("\n");
    if (a->tensors.source != TENSORS_NONE)
        printf("checkpoint   %" PRIu64 " tensors, %" PRIu64 " bytes: %" PRIu64 " used, %" PRIu64
               " scales, %" PRIu64 " carried, %" PRIu64 " unknown\n", a->tensors.n_tensors,
               a->tensors.n_bytes, a->check.n_used, a->check.n_scales, a->check.n_carried,
               a->check.n_unknown);
    for (uint32_t i = 0; i < a->check.n_lines; i++)
        printf("  %s\n", a->check.lines[i]);
    for (uint32_t i = 0; i < o->n_notes; i++)
        printf("inferred     %s\n", o->notes[i]);
    if (json_count(a->keys_not_read))
        printf("not read     ");
    for (size_t i = 0; i < json_count(a->keys_not_read); i++)
        printf("%s%s", i ? ", " : "", json_as_string(json_at(a->keys_not_read, i)));
    if (json_count(a->keys_not_read))
        printf(": keys of config.json that are not known here; if one changes what the model "
               "computes, that is left out\n");
    if (!a->runs)
        printf("not yet      %s\n", a->why_not);
    putchar('\n');
}

static void print_operators(const struct adapt *a)
{
    static const struct ctl_column columns[] = {
        {"OPERATOR", false}, {"LAYERS", true}, {"STATUS", false}, {"NOTE", false}};
    static const char *const colors[] = {"32", "33", "31"};
    struct ctl_table t = {.columns = columns, .n_columns = 4};
    for (int i = 0; i < OUTLINE_OPS; i++) {
        uint32_t n = operator_layers(a->outline, (enum outline_op)i);
        const struct operator_fact *f = operator_fact((enum outline_op)i);
        if (!n)
            continue;
        ctl_table_cell(&t, "%s", f->name);
        ctl_table_cell(&t, "%" PRIu32, n);
        ctl_table_cell(&t, "%s", operator_status_name(f->status));
        ctl_table_color(&t, colors[f->status]);
        ctl_table_cell(&t, "%s", f->note);
    }
    ctl_table_print(a->c, &t);
    ctl_table_fini(&t);
    putchar('\n');
}

static void add_plan(const struct adapt *a, struct ctl_table *t, const struct strategy_plan *p)
{
    const struct plan_choice *c = &p->choice;
    char lacks[256];
    ctl_table_cell(t, "%" PRIu32, c->world);
    ctl_table_cell(t, "%" PRIu32, c->fsdp);
    ctl_table_cell(t, "%" PRIu32, c->ep);
    ctl_table_cell(t, "%" PRIu32, c->expert_shard);
    ctl_table_cell(t, "%" PRIu32, c->sp);
    ctl_table_cell(t, "%" PRIu32, c->tp);
    ctl_table_cell(t, "%" PRIu32 "x%" PRIu32, c->micro_batch, c->accumulation);
    ctl_table_cell(t, "%s", recompute_words[c->recompute]);
    ctl_table_cell(t, "%s", offload_names[c->offload]);
    ctl_table_cell(t, "%s", a->job.is_lora ? base_names[c->base] : c->is_f32 ? "f32" : "bf16");
    ctl_table_cell(t, "%.1f", (double)p->memory.total / 1e9);
    ctl_table_cell(t, p->time.total < 0.1 ? "%.4f" : "%.2f", p->time.total);
    ctl_table_cell(t, "%.0f", p->time.tokens_per_s);
    ctl_table_cell(t, "%.0f%%", 100 * p->time.mfu);
    ctl_table_cell(t, "%s", adapt_engine_runs(a, c, lacks) ? "yes" : lacks);
}

static const struct ctl_column plan_columns[] = {
    {"GPUS", true}, {"FSDP", true}, {"EP", true}, {"SHARD", true}, {"SP", true}, {"TP", true},
    {"BATCH", true}, {"RECOMPUTE", false}, {"OFFLOAD", false}, {"WEIGHTS", false},
    {"GB/GPU", true}, {"STEP S", true}, {"TOKENS/S", true}, {"MFU", true},
    {"ENGINE RUNS IT", false}};

static void print_plans(const struct adapt *a)
{
    struct ctl_table t = {.columns = plan_columns,
                          .n_columns = sizeof plan_columns / sizeof *plan_columns};
    if (!a->all->n_plans) {
        char why[160];
        adapt_shortfall(a, why);
        printf("no plan fits %" PRIu32 " %s of %.0f GB: %s\n\n",
               a->cluster.nodes * a->cluster.gpus_per_node, adapt_devices(a),
               (double)a->cluster.gpu_memory / 1e9,
               why);
        return;
    }
    for (uint32_t i = 0, n = 0; i < a->all->n_plans && n < PLANS_SHOWN; i++)
        if (!adapt_is_variant(a, i)) {
            add_plan(a, &t, &a->all->plans[i]);
            n++;
        }
    ctl_table_print(a->c, &t);
    ctl_table_fini(&t);
    printf("%" PRIu64 " plans looked at, %" PRIu64 " fit\n\n", a->all->n_seen, a->all->n_fit);
    printf("beside the first\n");
    for (uint32_t i = 0; i < a->n_neighbours; i++)
        printf("  %-36s %s\n", a->neighbours[i].change, a->neighbours[i].reason);
    putchar('\n');
}

static void print_fewest(const struct adapt *a)
{
    for (uint32_t i = 0; i < a->n_fewest; i++) {
        const struct adapt_fewest *f = &a->fewest[i];
        const char *of = a->job.is_lora ? base_names[f->base] : "full training";
        if (f->world)
            printf("fewest       %" PRIu32 " %s of %.0f GB hold%s it with %s weights\n", f->world,
                   f->world > 1 ? adapt_devices(a) : one_device(a),
                   (double)a->cluster.gpu_memory / 1e9, f->world > 1 ? "" : "s", of);
        else
            printf("fewest       %u %s of %.0f GB do not hold it with %s weights\n", RANKS_MAX,
                   adapt_devices(a), (double)a->cluster.gpu_memory / 1e9, of);
    }
}

/* The last word: whether a job can be submitted, and which. */
static void print_today(const struct adapt *a)
{
    const struct strategy_plan *p = adapt_job_plan(a);
    const struct plan_choice *c = &p->choice;
    double gb = (double)(a->today_bytes ? a->today_bytes : p->memory.total) / 1e9;
    if (!a->runs) {
        printf("today        nothing: the engine does not train this model; \"not yet\" above says "
               "what it waits for\n");
        return;
    }
    if (a->job.is_lora && a->tensors.source != TENSORS_SAFETENSORS)
        printf("today        the folder holds no weights, which adapters are trained beside\n");
    if (adapt_tensors_refused(a))
        printf("today        a job is refused until the tensors are those of config.json: see the "
               "lines under \"checkpoint\"\n");
    if (!a->today_fits)
        printf("today        nothing that the engine runs fits; the least is %.1f GB each\n", gb);
    else
        printf("today        the engine runs fsdp %" PRIu32 ", experts %" PRIu32 " x %" PRIu32
               ", %s%s: %.1f GB each, %.0f tokens/s\n", c->fsdp, c->ep, c->expert_shard,
               a->job.is_lora ? base_names[c->base] : c->is_f32 ? "f32" : "bf16",
               a->job.is_lora ? " base" : "", gb, p->time.tokens_per_s);
}

/* The smallest number of devices that was found to hold it, with any weights. */
static uint32_t fewest_of_all(const struct adapt *a)
{
    uint32_t fewest = 0;
    for (uint32_t i = 0; i < a->n_fewest; i++)
        if (a->fewest[i].world && (!fewest || a->fewest[i].world < fewest))
            fewest = a->fewest[i].world;
    return fewest;
}

/* By the engine's own account: what a device would have to hold, and how much of that it lacks. */
static void today_shortfall(const struct adapt *a, char out[160])
{
    uint64_t least = a->today_bytes ? a->today_bytes : adapt_job_plan(a)->memory.total;
    uint64_t has = a->cluster.gpu_memory - a->cluster.gpu_reserve;
    snprintf(out, 160, "the least is %.4g GB a %s, %.4g GB more than it has beside gpu_reserve",
             (double)least / 1e9, one_device(a), least > has ? (double)(least - has) / 1e9 : 0);
}

bool adapt_fits(const struct adapt *a, char out_why_not[ADAPT_TEXT_MAX])
{
    uint32_t world = a->cluster.nodes * a->cluster.gpus_per_node;
    bool any = a->all->n_plans > 0;
    uint32_t fewest = a->runs ? a->fewest_today : fewest_of_all(a);
    double gb = (double)a->cluster.gpu_memory / 1e9;
    char why[160], then[160];
    if (any && (!a->runs || a->today_fits))
        return true;
    if (any)
        today_shortfall(a, why);
    else
        adapt_shortfall(a, why);
    if (fewest && fewest != world)
        snprintf(then, sizeof then, "%" PRIu32 " %s of %.4g GB would hold it", fewest,
                 fewest > 1 ? adapt_devices(a) : one_device(a), gb);
    else
        snprintf(then, sizeof then, "it takes %s with more memory%s or a smaller "
                 "--sequence-length", adapt_devices(a), a->job.is_lora ? "" : ", --train lora");
    snprintf(out_why_not, ADAPT_TEXT_MAX, "no plan%s fits %" PRIu32 " %s of %.4g GB (%.200s): %s; "
             "%s", any ? " that the engine runs" : "", world, adapt_devices(a), gb,
             a->cluster.name, why, then);
    return false;
}

void adapt_print(const struct adapt *a)
{
    print_model(a);
    print_operators(a);
    print_plans(a);
    print_fewest(a);
    print_today(a);
    if (a->validation)
        adapt_validation_print(a, a->validation);
}
