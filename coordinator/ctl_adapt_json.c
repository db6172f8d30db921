/* ctl_adapt_json.c - what was found about a model, as JSON */
#include "coordinator/ctl_adapt.h"

#include <stdlib.h>
#include <string.h>

/* "kda + moe" */
static void name_layer(const struct outline *o, struct outline_layer layer, char out[64])
{
    const char *mixer = layer.mixer == OUTLINE_NONE ? "" : o->blocks[layer.mixer].kind;
    const char *ffn = layer.ffn == OUTLINE_NONE ? "" : o->blocks[layer.ffn].kind;
    snprintf(out, 64, "%s%s%s", mixer, *mixer && *ffn ? "+" : "", ffn);
}

static struct json *number_or_null(bool is_known, uint64_t x)
{
    return is_known ? json_new_u64(x) : NULL;
}

/* Runs of alike layers are added up; order of first appearance. */
static struct json *layers_json(const struct outline *o)
{
    struct json *list = json_new_array();
    bool *done = xcalloc(o->n_layers + 1, sizeof *done);
    for (uint32_t l = 0; l < o->n_layers; l++) {
        char kind[64], other[64];
        uint64_t n = 0;
        name_layer(o, o->layers[l], kind);
        for (uint32_t m = l; m < o->n_layers; m++) {
            name_layer(o, o->layers[m], other);
            if (!done[m] && !strcmp(kind, other)) {
                done[m] = true;
                n++;
            }
        }
        if (!n)
            continue;
        struct json *row = json_new_object();
        json_put(row, "kind", json_new_string(kind));
        json_put(row, "count", json_new_u64(n));
        json_push(list, row);
    }
    free(done);
    return list;
}

static struct json *model_json(const struct adapt *a)
{
    const struct outline *o = a->outline;
    struct json *m = json_new_object(), *parts = json_new_object(), *notes = json_new_array();
    for (int i = 0; i < OUTLINE_PARTS; i++)
        json_put(parts, outline_part_name((enum outline_part)i), json_new_u64(a->counts.parts[i]));
    for (uint32_t i = 0; i < o->n_notes; i++)
        json_push(notes, json_new_string(o->notes[i]));
    json_put(m, "family", json_new_string(o->family));
    json_put(m, "is_known", json_new_bool(o->is_known));
    json_put(m, "parameters_total", json_new_u64(a->counts.total));
    json_put(m, "parameters_live", json_new_u64(a->counts.live));
    json_put(m, "parameters_active", json_new_u64(a->counts.active));
    json_put(m, "parameters_active_without_embedding",
             json_new_u64(a->counts.active - (uint64_t)o->hidden * o->vocab));
    json_put(m, "parameters_vision", number_or_null(a->knows_vision, a->vision));
    json_put(m, "parameters_mtp", number_or_null(a->knows_mtp, a->mtp));
    json_put(m, "parameters_by_part", parts);
    json_put(m, "tensors", number_or_null(a->tensors.source != TENSORS_NONE,
                                          a->tensors.n_tensors));
    json_put(m, "bytes", number_or_null(a->tensors.n_bytes != 0, a->tensors.n_bytes));
    json_put(m, "layers", layers_json(o));
    json_put(m, "context", number_or_null(o->context != 0, o->context));
    json_put(m, "quantisation", *o->quant.method ? json_new_string(o->quant.method) : NULL);
    json_put(m, "inferred", notes);
    return m;
}

static struct json *check_json(const struct adapt *a)
{
    const struct outline_check *k = &a->check;
    struct json *o = json_new_object(), *lines = json_new_array();
    if (a->tensors.source == TENSORS_NONE) {
        json_destroy(o);
        json_destroy(lines);
        return NULL;
    }
    for (uint32_t i = 0; i < k->n_lines; i++)
        json_push(lines, json_new_string(k->lines[i]));
    json_put(o, "used", json_new_u64(k->n_used));
    json_put(o, "scales", json_new_u64(k->n_scales));
    json_put(o, "carried", json_new_u64(k->n_carried));
    json_put(o, "unknown", json_new_u64(k->n_unknown));
    json_put(o, "disagreements", lines);
    return o;
}

static struct json *operators_json(const struct adapt *a)
{
    struct json *list = json_new_array();
    for (int i = 0; i < OUTLINE_OPS; i++) {
        uint32_t n = operator_layers(a->outline, (enum outline_op)i);
        const struct operator_fact *f = operator_fact((enum outline_op)i);
        if (!n)
            continue;
        struct json *o = json_new_object();
        json_put(o, "op", json_new_string(f->name));
        json_put(o, "layers", json_new_u64(n));
        json_put(o, "status", json_new_string(operator_status_name(f->status)));
        json_put(o, "note", json_new_string(f->note));
        json_push(list, o);
    }
    return list;
}

static struct json *memory_json(const struct plan_memory *m)
{
    struct json *o = json_new_object();
    json_put(o, "weights", json_new_u64(m->weights));
    json_put(o, "gradients", json_new_u64(m->gradients));
    json_put(o, "optimizer", json_new_u64(m->optimizer));
    json_put(o, "activations", json_new_u64(m->activations));
    json_put(o, "buffers", json_new_u64(m->buffers));
    json_put(o, "total", json_new_u64(m->total));
    return o;
}

static struct json *time_json(const struct plan_time *t)
{
    struct json *o = json_new_object();
    json_put(o, "compute", json_new_double(t->compute));
    json_put(o, "all_to_all_exposed", json_new_double(t->all_to_all_exposed));
    json_put(o, "gather_exposed", json_new_double(t->gather_exposed));
    json_put(o, "optimizer", json_new_double(t->optimizer));
    json_put(o, "total", json_new_double(t->total));
    return o;
}

static struct json *plan_json(const struct adapt *a, const struct strategy_plan *p)
{
    const struct plan_choice *c = &p->choice;
    struct json *o = json_new_object();
    char lacks[256];
    bool runs = adapt_engine_runs(a, c, lacks) && a->runs;
    json_put(o, "world", json_new_u64(c->world));
    json_put(o, "nodes", json_new_u64((c->world + a->cluster.gpus_per_node - 1) /
                                      a->cluster.gpus_per_node));
    json_put(o, "fsdp_shard_degree", json_new_u64(c->fsdp));
    json_put(o, "expert_parallel_degree", json_new_u64(c->ep));
    json_put(o, "expert_shard_degree", json_new_u64(c->expert_shard));
    json_put(o, "sequence_parallel_degree", json_new_u64(c->sp));
    json_put(o, "tensor_parallel_degree", json_new_u64(c->tp));
    json_put(o, "activation_checkpointing", json_new_string(recompute_words[c->recompute]));
    json_put(o, "offload", json_new_string(offload_names[c->offload]));
    json_put(o, "precision", json_new_string(c->is_f32 ? "f32" : "bf16"));
    json_put(o, "base_precision", a->job.is_lora ? json_new_string(base_names[c->base]) : NULL);
    json_put(o, "micro_batch", json_new_u64(c->micro_batch));
    json_put(o, "gradient_accumulation", json_new_u64(c->accumulation));
    json_put(o, "memory_per_gpu", memory_json(&p->memory));
    json_put(o, "step_seconds", time_json(&p->time));
    json_put(o, "tokens_per_second", json_new_double(p->time.tokens_per_s));
    json_put(o, "mfu", json_new_double(p->time.mfu));
    json_put(o, "runs_today", json_new_bool(runs));
    json_put(o, "lacks", *lacks ? json_new_string(lacks) : NULL);
    return o;
}

static struct json *plans_json(const struct adapt *a)
{
    struct json *list = json_new_array();
    for (uint32_t i = 0; i < a->all->n_plans; i++) {
        struct json *o = plan_json(a, &a->all->plans[i]), *lost = json_new_array();
        for (uint32_t n = 0; i == 0 && n < a->n_neighbours; n++) {
            struct json *row = json_new_object();
            json_put(row, "change", json_new_string(a->neighbours[n].change));
            json_put(row, "reason", json_new_string(a->neighbours[n].reason));
            json_push(lost, row);
        }
        json_put(o, "rejected_neighbours", lost);
        json_push(list, o);
    }
    return list;
}

static struct json *fewest_json(const struct adapt *a)
{
    struct json *list = json_new_array();
    for (uint32_t i = 0; i < a->n_fewest; i++) {
        const struct adapt_fewest *f = &a->fewest[i];
        struct json *o = json_new_object();
        json_put(o, "base_precision", json_new_string(base_names[f->base]));
        json_put(o, "gpus", number_or_null(f->world != 0, f->world));
        json_put(o, "plan", f->world ? plan_json(a, &f->plan) : NULL);
        json_push(list, o);
    }
    return list;
}

struct json *adapt_json(const struct adapt *a)
{
    struct json *o = json_new_object(), *today = json_new_object();
    json_put(today, "model_runs", json_new_bool(a->runs));
    json_put(today, "reason", a->runs ? NULL : json_new_string(a->why_not));
    json_put(today, "tensors_refused", json_new_bool(adapt_tensors_refused(a)));
    json_put(today, "plan_fits", json_new_bool(a->today_fits));
    json_put(today, "memory_by_engine", number_or_null(a->today_bytes != 0, a->today_bytes));
    json_put(today, "plan", a->runs ? plan_json(a, adapt_job_plan(a)) : NULL);
    json_put(o, "model", model_json(a));
    json_put(o, "checkpoint", check_json(a));
    json_put(o, "keys_not_read", json_copy(a->keys_not_read));
    json_put(o, "operators", operators_json(a));
    json_put(o, "plans", plans_json(a));
    json_put(o, "plans_seen", json_new_u64(a->all->n_seen));
    json_put(o, "plans_fit", json_new_u64(a->all->n_fit));
    json_put(o, "least_memory_per_gpu", memory_json(&a->all->least.memory));
    json_put(o, "fewest_gpus", fewest_json(a));
    json_put(o, "today", today);
    if (a->validation) {
        struct json *v = json_new_object();
        json_put(v, "passed", json_new_bool(a->validation->passed));
        json_put(v, "checks", json_copy(a->validation->checks));
        json_put(v, "not_checked", json_copy(a->validation->not_checked));
        json_put(o, "validation", v);
    }
    return o;
}
