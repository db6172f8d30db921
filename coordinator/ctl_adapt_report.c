/* ctl_adapt_report.c - REPORT.md and operators-missing.md */
#include "coordinator/ctl_adapt.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define PLANS_SHOWN 16u
#define BAR_CELLS   60

static double gb(uint64_t bytes)
{
    return (double)bytes / 1e9;
}

/* ---- the model ------------------------------------------------------------------------------ */

static void write_counts(const struct adapt *a, FILE *f)
{
    const struct outline *o = a->outline;
    fprintf(f, "# %s\n\nFamily `%s`, %" PRIu32 " layers, hidden width %" PRIu32 ", vocabulary %"
            PRIu32 ", context %" PRIu32 ".\n\n", a->name, o->family, o->n_layers, o->hidden,
            o->vocab, o->context);
    fprintf(f, "| part | parameters |\n|---|---:|\n");
    for (int i = 0; i < OUTLINE_PARTS; i++)
        if (a->counts.parts[i])
            fprintf(f, "| %s | %" PRIu64 " |\n", outline_part_name((enum outline_part)i),
                    a->counts.parts[i]);
    fprintf(f, "| **text model** | **%" PRIu64 "** |\n| without padding | %" PRIu64 " |\n"
            "| used by one token | %" PRIu64 " |\n| the same without the embedding table | %" PRIu64
            " |\n", a->counts.total, a->counts.live, a->counts.active,
            a->counts.active - (uint64_t)o->hidden * o->vocab);
    if (a->knows_mtp && a->mtp)
        fprintf(f, "| next-token layers (carried) | %" PRIu64 " |\n", a->mtp);
    if (a->knows_vision && a->vision)
        fprintf(f, "| vision (carried) | %" PRIu64 " |\n", a->vision);
    if (*o->quant.method)
        fprintf(f, "\nWeights are packed: `%s`, %" PRIu32 " bits.\n", o->quant.method,
                o->quant.bits);
}

static void write_check(const struct adapt *a, FILE *f)
{
    const struct outline_check *k = &a->check;
    static const char *const sources[] = {"", "safetensors headers", "tensors.tsv",
                                          "an index without its shards: names only"};
    fprintf(f, "\n## Checkpoint\n\n");
    if (a->tensors.source == TENSORS_NONE) {
        fprintf(f, "No tensors in the folder: the structure is that of `config.json`.\n");
    } else {
        fprintf(f, "From %s: %" PRIu64 " tensors, %" PRIu64 " bytes.\n\n| tensors | number |\n"
                "|---|---:|\n| of the text model | %" PRIu64 " |\n| scales of packed weights | %"
                PRIu64 " |\n| carried along (vision, next-token layers, tables) | %" PRIu64
                " |\n| unknown | %" PRIu64 " |\n", sources[a->tensors.source],
                a->tensors.n_tensors, a->tensors.n_bytes, k->n_used, k->n_scales, k->n_carried,
                k->n_unknown);
        for (uint32_t i = 0; i < k->n_lines; i++)
            fprintf(f, "%s- %s\n", i ? "" : "\nWhat does not agree:\n\n", k->lines[i]);
        if (k->n_more)
            fprintf(f, "- and %" PRIu32 " more\n", k->n_more);
    }
    for (size_t i = 0; i < json_count(a->keys_not_read); i++)
        fprintf(f, "%s- `%s`\n", i ? "" : "\nKeys of `config.json` that are not known here; what "
                "one changes of what the model computes is left out:\n\n",
                json_as_string(json_at(a->keys_not_read, i)));
    for (uint32_t i = 0; i < a->outline->n_notes; i++)
        fprintf(f, "%s- %s\n", i ? "" : "\nInferred:\n\n", a->outline->notes[i]);
}

static void write_operators(const struct adapt *a, FILE *f)
{
    fprintf(f, "\n## Operators\n\n| operator | layers | status | note |\n|---|---:|---|---|\n");
    for (int i = 0; i < OUTLINE_OPS; i++) {
        uint32_t n = operator_layers(a->outline, (enum outline_op)i);
        const struct operator_fact *fact = operator_fact((enum outline_op)i);
        if (n)
            fprintf(f, "| %s | %" PRIu32 " | %s | %s |\n", fact->name, n,
                    operator_status_name(fact->status), fact->note);
    }
    if (a->runs)
        fprintf(f, "\nThe engine trains this model.\n");
    else
        fprintf(f, "\n**The engine does not train this model yet**: %s\n", a->why_not);
    if (operators_missing(a->outline))
        fprintf(f, "What is missing is described in `operators-missing.md`.\n");
}

/* ---- plans ---------------------------------------------------------------------------------- */

static void write_plan_rows(const struct adapt *a, FILE *f)
{
    fprintf(f, "| | FSDP | EP | expert shard | SP | TP | batch x passes | recompute | offload | "
            "weights | GB a GPU | step s | tokens/s | MFU | engine runs it |\n"
            "|---:|---:|---:|---:|---:|---:|---|---|---|---|---:|---:|---:|---:|---|\n");
    for (uint32_t i = 0, n = 0; i < a->all->n_plans && n < PLANS_SHOWN; i++) {
        const struct strategy_plan *p = &a->all->plans[i];
        if (adapt_is_variant(a, i))
            continue;
        n++;
        const struct plan_choice *c = &p->choice;
        char lacks[256];
        bool runs = adapt_engine_runs(a, c, lacks);
        fprintf(f, "| %u | %u | %u | %u | %u | %u | %u x %u | %s | %s | %s | %.1f | %.2f | %.0f | "
                "%.1f%% | %s%s |\n", i + 1, c->fsdp, c->ep, c->expert_shard, c->sp, c->tp,
                c->micro_batch, c->accumulation, recompute_words[c->recompute],
                offload_names[c->offload],
                a->job.is_lora ? base_names[c->base] : c->is_f32 ? "f32" : "bf16",
                gb(p->memory.total), p->time.total, p->time.tokens_per_s, 100 * p->time.mfu,
                runs ? "yes" : "lacks ", runs ? "" : lacks);
    }
}

static void write_bar_row(FILE *f, const char *name, uint64_t bytes, uint64_t room, char mark)
{
    char bar[BAR_CELLS + 1];
    int n = room ? (int)lround(BAR_CELLS * (double)bytes / (double)room) : 0;
    n = n > BAR_CELLS ? BAR_CELLS : n;
    memset(bar, mark, (size_t)n);
    bar[n] = '\0';
    fprintf(f, "%-12s %9.2f GB %5.1f%% %s\n", name, gb(bytes),
            room ? 100 * (double)bytes / (double)room : 0, bar);
}

/* One GPU's memory as bars; a full line is all of it. */
static void write_memory(const struct adapt *a, const struct strategy_plan *p, FILE *f)
{
    const struct plan_memory *m = &p->memory;
    uint64_t room = a->cluster.gpu_memory;
    fprintf(f, "```\n");
    write_bar_row(f, "weights", m->weights, room, '#');
    write_bar_row(f, "gradients", m->gradients, room, '+');
    write_bar_row(f, "optimizer", m->optimizer, room, '=');
    write_bar_row(f, "activations", m->activations, room, '~');
    write_bar_row(f, "buffers", m->buffers, room, '.');
    write_bar_row(f, "total", m->total, room, '*');
    write_bar_row(f, "a GPU has", room, room, '-');
    fprintf(f, "```\n");
}

static void write_time(const struct strategy_plan *p, FILE *f)
{
    const struct plan_time *t = &p->time;
    fprintf(f, "\n| of a step | s |\n|---|---:|\n| computing | %.3f |\n| tokens to experts and "
            "back, not hidden (of %.3f) | %.3f |\n| gathering weights, not hidden (of %.3f) | %.3f "
            "|\n| optimizer and copies' gradients | %.3f |\n| **step** | **%.3f** |\n", t->compute,
            t->all_to_all, t->all_to_all_exposed, t->gather, t->gather_exposed, t->optimizer,
            t->total);
}

static void write_best(const struct adapt *a, FILE *f)
{
    const struct strategy_plan *best = &a->all->plans[0];
    char lacks[256];
    fprintf(f, "\n## The fastest plan that fits\n\nMemory of one GPU:\n\n");
    write_memory(a, best, f);
    write_time(best, f);
    if (!adapt_engine_runs(a, &best->choice, lacks))
        fprintf(f, "\nThe engine cannot run it yet; it lacks: %s.\n", lacks);
    fprintf(f, "\nWhat its neighbours lacked:\n\n| one thing changed | why it lost |\n|---|---|\n");
    for (uint32_t i = 0; i < a->n_neighbours; i++)
        fprintf(f, "| %s | %s |\n", a->neighbours[i].change, a->neighbours[i].reason);
}

/* The fastest plan of each way to store a frozen base. */
static void write_bases(const struct adapt *a, FILE *f)
{
    fprintf(f, "\n## How the frozen base is stored\n\nGB of one GPU, of the fastest plan of each:\n"
            "\n| base | FSDP | EP | expert shard | weights | gradients | optimizer | activations | "
            "buffers | total | tokens/s |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n");
    for (int base = 0; base < BASE_PRECISIONS; base++) {
        uint32_t i = 0;
        while (i < a->all->n_plans && a->all->plans[i].choice.base != (enum base_precision)base)
            i++;
        if (i == a->all->n_plans)
            continue;
        const struct plan_choice *c = &a->all->plans[i].choice;
        const struct plan_memory *m = &a->all->plans[i].memory;
        fprintf(f, "| %s | %u | %u | %u | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.0f |\n",
                base_names[base], c->fsdp, c->ep, c->expert_shard, gb(m->weights),
                gb(m->gradients), gb(m->optimizer), gb(m->activations), gb(m->buffers),
                gb(m->total), a->all->plans[i].time.tokens_per_s);
    }
}

static void write_fewest(const struct adapt *a, FILE *f)
{
    fprintf(f, "\n## The fewest %s\n\n| weights | %s of %.0f GB | FSDP | EP | expert shard | "
            "GB each |\n|---|---:|---:|---:|---:|---:|\n", adapt_devices(a), adapt_devices(a),
            gb(a->cluster.gpu_memory));
    for (uint32_t i = 0; i < a->n_fewest; i++) {
        const struct adapt_fewest *x = &a->fewest[i];
        const struct plan_choice *c = &x->plan.choice;
        if (x->world)
            fprintf(f, "| %s | %" PRIu32 " | %" PRIu32 " | %" PRIu32 " | %" PRIu32 " | %.1f |\n",
                    base_names[x->base], x->world, c->fsdp, c->ep, c->expert_shard,
                    gb(x->plan.memory.total));
        else
            fprintf(f, "| %s | more than %u | | | | |\n", base_names[x->base], RANKS_MAX);
    }
}

static void write_today(const struct adapt *a, FILE *f)
{
    const struct strategy_plan *p = adapt_job_plan(a);
    fprintf(f, "\n## What runs today\n\n");
    if (a->job.is_lora && a->tensors.source != TENSORS_SAFETENSORS)
        fprintf(f, "The folder holds no weights, which adapters are trained beside: `model.path` "
                "has to be a folder with them.\n\n");
    if (!a->runs) {
        fprintf(f, "`job.yaml` says how the model would be trained; `ballast submit` refuses it "
                "until its operators are there.\n");
        return;
    }
    if (a->today_fits)
        fprintf(f, "`job.yaml` is the fastest plan that the engine runs: %.0f tokens/s. By the "
                "engine's own account a rank takes %.2f GB.\n\n", p->time.tokens_per_s,
                gb(a->today_bytes));
    else
        fprintf(f, "Nothing that the engine runs fits. `job.yaml` is the plan of least memory; it "
                "lacks %.1f GB a GPU.\n\n",
                gb(p->memory.total > a->cluster.gpu_memory
                       ? p->memory.total - a->cluster.gpu_memory : 0));
    write_memory(a, p, f);
}

static void write_validation(const struct adapt_validation *v, FILE *f)
{
    fprintf(f, "\n## Checks of a shrunk model of the same structure\n\n| check | result | "
            "measured | limit | where |\n|---|---|---:|---:|---|\n");
    for (size_t i = 0; i < json_count(v->checks); i++) {
        struct adapt_check c = adapt_validation_check(v, i);
        fprintf(f, "| %s | %s | %.3g | %.3g | %s |\n", c.name,
                c.passed ? "pass" : "**fail**", c.measured, c.limit, c.where);
    }
    fprintf(f, "\nNot checked:\n\n");
    for (size_t i = 0; i < json_count(v->not_checked); i++)
        fprintf(f, "- %s\n", json_as_string(json_at(v->not_checked, i)));
}

void adapt_report(const struct adapt *a, FILE *f)
{
    uint32_t world = a->cluster.nodes * a->cluster.gpus_per_node;
    write_counts(a, f);
    write_check(a, f);
    write_operators(a, f);
    fprintf(f, "\n## Plans\n\n%s on %" PRIu32 " %s of %.0f GB (%s, %" PRIu32 " node%s), sequences "
            "of %" PRIu32 " tokens, %" PRIu32 " of them a step. %" PRIu64 " plans looked at, %"
            PRIu64 " fit.\n\n", a->job.is_lora ? "LoRA" : "Full training", world,
            adapt_devices(a), gb(a->cluster.gpu_memory), a->cluster.name, a->cluster.nodes,
            a->cluster.nodes == 1 ? "" : "s", a->job.sequence_length,
            a->job.global_batch, a->all->n_seen, a->all->n_fit);
    if (a->all->n_plans) {
        write_plan_rows(a, f);
        write_best(a, f);
        if (a->job.is_lora)
            write_bases(a, f);
    } else {
        char why[160];
        adapt_shortfall(a, why);
        fprintf(f, "None fits: %s.\n\n", why);
        if (a->all->n_seen)
            write_memory(a, &a->all->least, f);
    }
    write_fewest(a, f);
    write_today(a, f);
    if (a->validation)
        write_validation(a->validation, f);
}

/* ---- what is missing ------------------------------------------------------------------------- */

static void write_tensors(const struct outline_block *b, FILE *f)
{
    for (uint32_t i = 0; i < b->n_tensors; i++) {
        const struct outline_tensor *t = &b->tensors[i];
        fprintf(f, "| `%.*s` | %" PRIu64, (int)strcspn(t->names, "|"), t->names, t->out);
        if (t->in)
            fprintf(f, " x %" PRIu64, t->in);
        if (t->n_copies > 1)
            fprintf(f, ", %" PRIu32 " times", t->n_copies);
        fprintf(f, " | %s |\n", outline_part_name(t->part));
    }
}

static void write_blocks(const struct outline *o, enum outline_op op, FILE *f)
{
    for (uint32_t i = 0; i < o->n_blocks; i++) {
        const struct outline_block *b = &o->blocks[i];
        if (!(b->ops >> op & 1))
            continue;
        fprintf(f, "\nIn %" PRIu32 " layers, block `%s`", outline_block_layers(o, i), b->kind);
        if (b->heads)
            fprintf(f, ": %" PRIu32 " heads, %" PRIu32 " of keys and values, key %" PRIu32
                    ", value %" PRIu32, b->heads, b->kv_heads, b->key_dim, b->value_dim);
        if (b->window)
            fprintf(f, ", window %" PRIu32, b->window);
        if (b->n_experts)
            fprintf(f, ": %" PRIu32 " experts, %" PRIu32 " chosen, width %" PRIu32, b->n_experts,
                    b->top_k, b->expert_inter);
        fprintf(f, ".\n\n| tensor | shape | part |\n|---|---|---|\n");
        write_tensors(b, f);
    }
}

void adapt_missing(const struct adapt *a, FILE *f)
{
    const struct outline *o = a->outline;
    fprintf(f, "# Operators that %s needs and the library lacks\n", a->name);
    if (!operators_missing(o))
        fprintf(f, "\nNone.\n");
    for (int i = 0; i < OUTLINE_OPS; i++) {
        const struct operator_fact *fact = operator_fact((enum outline_op)i);
        if (fact->status != OPERATOR_MISSING || !operator_layers(o, (enum outline_op)i))
            continue;
        fprintf(f, "\n## %s\n\n%s.\n\n    %s\n\nSource: %s. Sums and softmaxes in f32; a backward "
                "op beside the forward one, with a check against finite differences.\n",
                fact->name, fact->note, fact->formula, fact->source);
        write_blocks(o, (enum outline_op)i, f);
    }
    if (!a->runs)
        fprintf(f, "\n## The reader of configurations\n\n%s\n", a->why_not);
}
