/* ctl_adapt_engine.c - which plans the engine runs today, asked of the job file's own checks */
#include "coordinator/ctl_adapt.h"

#include <stdlib.h>
#include <string.h>

#include "proto/job_memory.h"
#include "proto/job_spec.h"

#define PLANS_TRIED 40u /* of the fastest; each costs a map of the model's tensors */

static void set(Ballast__JobSpec *spec, const char *key, const char *text)
{
    struct err err;
    if (field_parse(field_find(&job_spec_table, key), spec, text, &err) < 0)
        abort(); /* a value that we made */
}

static void set_number(Ballast__JobSpec *spec, const char *key, uint64_t x)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)x);
    set(spec, key, text);
}

static Ballast__JobSpec *job_create(void)
{
    Ballast__JobSpec *spec = xcalloc(1, sizeof *spec);
    ballast__job_spec__init(spec);
    fields_init(&job_spec_table, spec);
    return spec;
}

void adapt_job_free(Ballast__JobSpec *spec)
{
    fields_fini(&job_spec_table, spec);
    free(spec);
}

/* ---- asking --------------------------------------------------------------------------------- */

static bool is_refused(const Ballast__JobSpec *spec, const char *key)
{
    struct problems problems = {0};
    bool refused = false;
    job_spec_check_together(spec, JOB_EXPERTS_UNKNOWN, &problems);
    for (size_t i = 0; i < problems.n; i++)
        refused |= !strcmp(problems.items[i].key, key);
    problems_fini(&problems);
    return refused;
}

static bool takes(const char *key, const char *value)
{
    Ballast__JobSpec *spec = job_create();
    set(spec, "train.mode", "lora"); /* in which everything below has a meaning */
    set(spec, "parallel.workers", "2");
    set(spec, key, value);
    bool taken = !is_refused(spec, key);
    adapt_job_free(spec);
    return taken;
}

struct strategy_limits adapt_engine(void)
{
    struct strategy_limits l = {
        .sp_max = takes("parallel.sequence_parallel_degree", "2") ? RANKS_MAX : 1,
        .tp_max = takes("parallel.tensor_parallel_degree", "2") ? 8 : 1,
        .bf16 = takes("train.precision", "bf16"),
        .f32 = takes("train.precision", "f32"),
    };
    for (int i = 0; i < RECOMPUTE_WAYS; i++)
        l.recompute[i] = takes("parallel.activation_checkpointing", recompute_words[i]);
    for (int i = 0; i < OFFLOAD_KINDS; i++)
        l.offload[i] = takes("parallel.offload", offload_names[i]);
    for (int i = 0; i < BASE_PRECISIONS; i++)
        l.base[i] = takes("model.base_precision", base_names[i]);
    return l;
}

static void lack(char out[256], const char *key, const char *value)
{
    size_t n = strlen(out);
    snprintf(out + n, 256 - n, "%s%s %s", n ? ", " : "", key, value);
}

bool adapt_engine_runs(const struct adapt *a, const struct plan_choice *p, char out_lacks[256])
{
    const struct strategy_limits *l = &a->engine;
    out_lacks[0] = '\0';
    if (!a->runs)
        lack(out_lacks, "operators", "of the model");
    if (p->sp > l->sp_max)
        lack(out_lacks, "sequence_parallel_degree", "above 1");
    if (p->tp > l->tp_max)
        lack(out_lacks, "tensor_parallel_degree", "above 1");
    if (!(p->is_f32 ? l->f32 : l->bf16))
        lack(out_lacks, "precision", p->is_f32 ? "f32" : "bf16");
    if (!l->recompute[p->recompute])
        lack(out_lacks, "activation_checkpointing", recompute_words[p->recompute]);
    if (!l->offload[p->offload])
        lack(out_lacks, "offload", offload_names[p->offload]);
    if (a->job.is_lora && !l->base[p->base])
        lack(out_lacks, "packed base_precision", base_names[p->base]);
    return !out_lacks[0];
}

/* ---- the job -------------------------------------------------------------------------------- */

const struct strategy_plan *adapt_job_plan(const struct adapt *a)
{
    return a->today_fits ? &a->today->plans[a->today_plan] : &a->today->least;
}

static bool model_has(const struct outline *o, const char *name)
{
    for (uint32_t i = 0; i < o->n_blocks; i++)
        for (uint32_t t = 0; t < o->blocks[i].n_tensors; t++)
            if (outline_tensor_match(&o->blocks[i].tensors[t], name))
                return true;
    return false;
}

static bool model_does(const struct outline *o, enum outline_op op)
{
    return operator_layers(o, op) > 0;
}

static void set_train(const struct adapt *a, const struct strategy_plan *p, Ballast__JobSpec *s)
{
    set(s, "train.mode", a->job.is_lora ? "lora" : "full");
    set(s, "train.steps", "1000");
    set_number(s, "train.global_batch", a->job_today.global_batch);
    set_number(s, "train.micro_batch", p->choice.micro_batch);
    set(s, "train.precision", p->choice.is_f32 ? "f32" : "bf16");
    set(s, "train.optimizer.lr", a->job.is_lora ? "1e-4" : "2e-5");
    set(s, "train.schedule.warmup_steps", "50");
    set_number(s, "train.lora.r", a->job.lora_rank);
    set_number(s, "train.lora.alpha", 2ull * a->job.lora_rank);
    if (!model_has(a->outline, "self_attn.q_proj.weight"))
        set(s, "train.lora.targets", "[q_b_proj, o_proj]");
    if (model_does(a->outline, OP_ROUTER_GROUPS))
        set(s, "moe.bias_update", "sign");
    set(s, "rebalance.spare_slots_per_rank", "0"); /* as the plan's memory has it */
}

static void set_parallel(const struct plan_choice *p, Ballast__JobSpec *s)
{
    set_number(s, "parallel.workers", p->world);
    set_number(s, "parallel.fsdp_shard_degree", p->fsdp);
    set_number(s, "parallel.expert_parallel_degree", p->ep);
    set_number(s, "parallel.expert_shard_degree", p->expert_shard);
    set_number(s, "parallel.sequence_parallel_degree", p->sp);
    set_number(s, "parallel.tensor_parallel_degree", p->tp);
    set(s, "parallel.activation_checkpointing", recompute_words[p->recompute]);
    set(s, "parallel.offload", offload_names[p->offload]);
}

Ballast__JobSpec *adapt_job(const struct adapt *a, const struct strategy_plan *p)
{
    Ballast__JobSpec *s = job_create();
    set(s, "name", a->name);
    set(s, "model.path", a->model_dir);
    set(s, "model.base_precision", base_names[p->choice.base]);
    set(s, "data.train", "[data/train.bin]");
    set(s, "data.format", "u32");
    set_number(s, "data.sequence_length", a->job.sequence_length);
    set(s, "checkpoint.path", "checkpoints");
    set_train(a, p, s);
    set_parallel(&p->choice, s);
    return s;
}

/* ---- the plan that fits --------------------------------------------------------------------- */

/* By the account that submit gives; 0: it gives none. */
static uint64_t bytes_today(const struct adapt *a, const struct strategy_plan *p)
{
    Ballast__JobSpec *spec = adapt_job(a, p);
    struct job_machine on = {.on_gpu = !strcmp(spec->train_precision, "bf16"), .n_threads = 1};
    struct layout layout = {0};
    struct memory_plan memory = {0};
    const char *key;
    int rc = layout_init(job_spec_degrees(spec), a->spec->n_experts, 0, &layout, NULL);
    if (rc == 0 && a->cluster.gpus_per_node > 0)
        on.n_nodes = (layout.degrees.ep + a->cluster.gpus_per_node - 1) / a->cluster.gpus_per_node;
    if (rc < 0 || job_memory(spec, a->spec, layout.degrees, &on, &memory, &key, NULL) < 0)
        memory.total = 0;
    layout_fini(&layout);
    adapt_job_free(spec);
    return memory.total;
}

/* The first of the plans that a device of the cluster holds; false: of those tried none. */
static bool first_that_fits(const struct adapt *a, const struct strategy *s, uint32_t *out_plan,
                            uint64_t *out_bytes)
{
    uint32_t n = s->n_plans < PLANS_TRIED ? s->n_plans : PLANS_TRIED;
    uint64_t room = a->cluster.gpu_memory - (a->cluster.gpu_memory < a->cluster.gpu_reserve
                                                 ? a->cluster.gpu_memory : a->cluster.gpu_reserve);
    for (uint32_t i = 0; i < n; i++) {
        *out_plan = i;
        *out_bytes = bytes_today(a, &s->plans[i]);
        if (*out_bytes && *out_bytes <= room)
            return true;
    }
    return false;
}

void adapt_choose_today(struct adapt *a)
{
    a->today_fits = a->runs ? first_that_fits(a, a->today, &a->today_plan, &a->today_bytes)
                            : a->today->n_plans > 0;
    if (a->runs && !a->today_fits)
        a->today_bytes = bytes_today(a, &a->today->least);
}

void adapt_find_fewest_today(struct adapt *a, const struct strategy_limits *today)
{
    struct strategy *s = xcalloc(1, sizeof *s);
    struct job_shape shape = a->job_today;
    uint32_t world = strategy_fewest(&shape, today, RANKS_MAX, &(struct strategy_plan){0}), plan;
    uint64_t tokens = (uint64_t)shape.global_batch * shape.sequence_length, bytes;
    for (; world && world <= RANKS_MAX; world *= 2) {
        shape.global_batch = strategy_batch(tokens, shape.sequence_length, world);
        strategy_search(&shape, today, world, s);
        if (first_that_fits(a, s, &plan, &bytes))
            break;
    }
    a->fewest_today = world <= RANKS_MAX ? world : 0;
    free(s);
}
