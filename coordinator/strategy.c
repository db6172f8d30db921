/* strategy.c - searches all degrees that divide what they must for the fastest plan that fits
 *
 * Exhaustive, with two cuts that lose nothing: state that alone is above a GPU's memory ends a
 * branch before activations are looked at, and of two ways to compute the same the cheaper in time
 * that fits is taken first. */
#include "coordinator/strategy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define MICRO_BATCH_MAX 64u
#define STEPS_MAX       32u /* numbers of GPUs that are tried between two powers of two */

struct strategy_limits strategy_all(void)
{
    struct strategy_limits l = {.sp_max = RANKS_MAX, .tp_max = 8, .bf16 = true};
    for (int i = 0; i < RECOMPUTE_WAYS; i++)
        l.recompute[i] = true;
    for (int i = 0; i < OFFLOAD_KINDS; i++)
        l.offload[i] = true;
    for (int i = 0; i < BASE_PRECISIONS; i++)
        l.base[i] = i != BASE_F32;
    return l;
}

uint32_t strategy_batch(uint64_t n_tokens, uint32_t sequence_length, uint32_t world)
{
    uint64_t n = n_tokens / sequence_length;
    if (n >= world)
        return (uint32_t)(n / world * world);
    uint32_t best = 1;
    for (uint32_t d = 1; d <= world && d <= (n ? n : 1); d++)
        if (world % d == 0)
            best = d;
    return best;
}

bool plan_is_whole(const struct job_shape *job, struct plan_choice *c)
{
    uint32_t experts = job->costs->n_experts ? job->costs->n_experts : 1;
    if (!c->fsdp || !c->ep || !c->expert_shard || !c->sp || !c->tp || !c->micro_batch ||
        c->world % c->fsdp || c->world % c->ep || experts % c->ep ||
        c->world / c->ep % c->expert_shard || c->world % (c->sp * c->tp) ||
        job->sequence_length % c->sp)
        return false;
    uint64_t pass = (uint64_t)c->micro_batch * (c->world / c->sp / c->tp);
    if (job->global_batch % pass)
        return false;
    c->accumulation = (uint32_t)(job->global_batch / pass);
    return true;
}

/* ---- the list of the best -------------------------------------------------------------------- */

static bool same_cuts(const struct plan_choice *a, const struct plan_choice *b)
{
    return a->fsdp == b->fsdp && a->ep == b->ep && a->expert_shard == b->expert_shard &&
           a->base == b->base;
}

static uint32_t place_of(const struct strategy *s, double tokens_per_s)
{
    uint32_t i = s->n_plans;
    while (i > 0 && s->plans[i - 1].time.tokens_per_s < tokens_per_s)
        i--;
    return i;
}

/* A plan that is no faster than the last of a full list is not looked for in it. */
static void keep(struct strategy *s, const struct strategy_plan *p)
{
    uint32_t old = 0, at = place_of(s, p->time.tokens_per_s);
    if (at == STRATEGY_PLANS_MAX)
        return;
    while (old < s->n_plans && !same_cuts(&s->plans[old].choice, &p->choice))
        old++;
    if (old < s->n_plans && old < at)
        return;
    if (old == s->n_plans && s->n_plans < STRATEGY_PLANS_MAX)
        s->n_plans++;
    else if (old == s->n_plans)
        old--;
    memmove(&s->plans[at + 1], &s->plans[at], (old - at) * sizeof *s->plans);
    s->plans[at] = *p;
}

/* ---- the loops ------------------------------------------------------------------------------ */

struct search {
    const struct job_shape *job;
    const struct strategy_limits *limits;
    struct strategy *out;
};

static void note_least(struct strategy *s, const struct plan_choice *c,
                       const struct plan_memory *m)
{
    if (!s->least.memory.total || m->total < s->least.memory.total) {
        s->least.choice = *c;
        s->least.memory = *m;
    }
}

static bool fits(const struct cluster *l, const struct plan_memory *m)
{
    return m->total <= l->gpu_memory && m->host <= l->host_memory / l->gpus_per_node;
}

/* All that leaves the state where it is: passes and what they keep. */
static void try_passes(struct search *s, struct plan_choice c)
{
    for (c.micro_batch = 1; c.micro_batch <= MICRO_BATCH_MAX; c.micro_batch *= 2) {
        bool any = false;
        for (int r = 0; r < RECOMPUTE_WAYS; r++) {
            c.recompute = (enum recompute)r;
            if (!s->limits->recompute[r] || !plan_is_whole(s->job, &c))
                continue;
            struct strategy_plan p = {.choice = c, .memory = plan_memory(s->job, &c)};
            s->out->n_seen++;
            note_least(s->out, &c, &p.memory);
            if (!fits(s->job->cluster, &p.memory))
                continue;
            any = true;
            s->out->n_fit++;
            p.time = plan_time(s->job, &c);
            keep(s->out, &p);
            if (c.offload != OFFLOAD_ACTIVATIONS)
                break; /* what keeps less is slower */
        }
        if (!any && c.micro_batch > 1)
            return; /* a larger pass needs more */
    }
}

static void try_state(struct search *s, struct plan_choice c)
{
    for (int base = 0; base < BASE_PRECISIONS; base++)
        for (int off = 0; off < OFFLOAD_KINDS; off++) {
            if (!s->limits->base[base] || !s->limits->offload[off] ||
                (!s->job->is_lora && base != BASE_BF16 && base != BASE_F32) ||
                (!s->job->is_lora && (base == BASE_F32) != c.is_f32))
                continue;
            c.base = (enum base_precision)base;
            c.offload = (enum offload_kind)off;
            c.micro_batch = 1;
            c.recompute = RECOMPUTE_FULL;
            if (!plan_is_whole(s->job, &c))
                continue;
            struct plan_memory m = plan_memory(s->job, &c);
            s->out->n_seen++;
            note_least(s->out, &c, &m);
            if (m.weights + m.gradients + m.optimizer > s->job->cluster->gpu_memory)
                continue;
            try_passes(s, c);
        }
}

static void try_cuts(struct search *s, struct plan_choice c)
{
    uint32_t experts = s->job->costs->n_experts ? s->job->costs->n_experts : 1;
    for (c.fsdp = 1; c.fsdp <= c.world; c.fsdp++) {
        if (c.world % c.fsdp)
            continue;
        for (c.ep = 1; c.ep <= c.world && c.ep <= experts; c.ep++) {
            if (c.world % c.ep || experts % c.ep)
                continue;
            for (c.expert_shard = 1; c.expert_shard <= c.world / c.ep; c.expert_shard *= 2)
                if (c.world / c.ep % c.expert_shard == 0)
                    try_state(s, c);
        }
    }
}

void strategy_search(const struct job_shape *job, const struct strategy_limits *limits,
                     uint32_t world, struct strategy *out)
{
    struct search s = {job, limits, out};
    struct plan_choice c = {.world = world};
    uint32_t tp_max = limits->tp_max < job->cluster->gpus_per_node ? limits->tp_max
                                                                   : job->cluster->gpus_per_node;
    memset(out, 0, sizeof *out);
    for (int f32 = 0; f32 < 2; f32++) {
        if (!(f32 ? limits->f32 : limits->bf16))
            continue;
        c.is_f32 = f32;
        for (c.tp = 1; c.tp <= tp_max && c.tp <= world; c.tp *= 2)
            for (c.sp = 1; c.sp <= limits->sp_max && c.sp * c.tp <= world; c.sp *= 2)
                if (job->sequence_length / c.sp >= 64)
                    try_cuts(&s, c);
    }
}

/* The same tokens a step, cut for another number of GPUs. */
static bool fits_on(const struct job_shape *job, const struct strategy_limits *limits,
                    uint32_t world, struct strategy *s, struct strategy_plan *out_plan)
{
    struct job_shape shape = *job;
    shape.global_batch = strategy_batch((uint64_t)job->global_batch * job->sequence_length,
                                        job->sequence_length, world);
    strategy_search(&shape, limits, world, s);
    if (s->n_plans)
        *out_plan = s->plans[0];
    return s->n_plans > 0;
}

uint32_t strategy_fewest(const struct job_shape *job, const struct strategy_limits *limits,
                         uint32_t most, struct strategy_plan *out_plan)
{
    struct strategy *s = xcalloc(1, sizeof *s);
    uint32_t fewest = 1, node = job->cluster->gpus_per_node;
    while (fewest <= most && !fits_on(job, limits, fewest, s, out_plan))
        fewest *= 2;
    /* Whole nodes between the last power of two that was too few and the first that is enough. */
    uint32_t step = fewest / 2 / node > STEPS_MAX ? fewest / 2 / STEPS_MAX / node * node : node;
    for (uint32_t world = fewest / 2 / node * node + step; fewest <= most && world < fewest;
         world += step)
        if (fits_on(job, limits, world, s, out_plan))
            fewest = world;
    free(s);
    return fewest <= most ? fewest : 0;
}

/* ---- neighbours ----------------------------------------------------------------------------- */

static void why(const struct job_shape *job, const struct strategy_plan *winner,
                struct neighbour *n)
{
    const struct plan_time *t = &n->plan.time, *w = &winner->time;
    uint64_t room = job->cluster->gpu_memory, need = n->plan.memory.total;
    if (need > room) {
        snprintf(n->reason, sizeof n->reason, "does not fit: %.1f GB a GPU, %.1f GB more than "
                 "there are", (double)need / 1e9, (double)(need - room) / 1e9);
        return;
    }
    if (n->plan.memory.host > job->cluster->host_memory / job->cluster->gpus_per_node) {
        snprintf(n->reason, sizeof n->reason, "does not fit: %.1f GB a GPU on the host",
                 (double)n->plan.memory.host / 1e9);
        return;
    }
    double parts[] = {t->compute - w->compute, t->all_to_all_exposed - w->all_to_all_exposed,
                      t->gather_exposed - w->gather_exposed, t->optimizer - w->optimizer};
    static const char *const names[] = {"computing", "tokens on their way to experts",
                                        "gathering weights", "the end of the step"};
    int most = 0;
    for (int i = 1; i < 4; i++)
        if (parts[i] > parts[most])
            most = i;
    double slower = 100 * (t->total / w->total - 1);
    if (slower < 0.05)
        snprintf(n->reason, sizeof n->reason, "as fast");
    else
        snprintf(n->reason, sizeof n->reason, "%.1f%% slower: %+.3g s a step in %s", slower,
                 parts[most], names[most]);
}

static void add_neighbour(const struct job_shape *job, const struct strategy_plan *winner,
                          struct plan_choice c, const char *what, uint32_t value,
                          struct neighbour *out, uint32_t *n)
{
    if (*n == NEIGHBOURS_MAX || !plan_is_whole(job, &c))
        return;
    struct neighbour *x = &out[*n];
    x->plan = (struct strategy_plan){c, plan_memory(job, &c), plan_time(job, &c)};
    snprintf(x->change, sizeof x->change, "%s %" PRIu32, what, value);
    why(job, winner, x);
    ++*n;
}

uint32_t strategy_neighbours(const struct job_shape *job, const struct strategy_plan *winner,
                             struct neighbour out[NEIGHBOURS_MAX])
{
    static const struct { const char *name; size_t at; } degrees[] = {
        {"fsdp_shard_degree", offsetof(struct plan_choice, fsdp)},
        {"expert_parallel_degree", offsetof(struct plan_choice, ep)},
        {"expert_shard_degree", offsetof(struct plan_choice, expert_shard)},
        {"sequence_parallel_degree", offsetof(struct plan_choice, sp)},
        {"tensor_parallel_degree", offsetof(struct plan_choice, tp)},
        {"micro_batch", offsetof(struct plan_choice, micro_batch)},
    };
    uint32_t n = 0;
    for (size_t i = 0; i < sizeof degrees / sizeof *degrees; i++)
        for (int up = 0; up < 2; up++) {
            struct plan_choice c = winner->choice;
            uint32_t *x = (uint32_t *)((char *)&c + degrees[i].at);
            *x = up ? *x * 2 : *x / 2;
            add_neighbour(job, winner, c, degrees[i].name, *x, out, &n);
        }
    for (int r = 0; r < RECOMPUTE_WAYS; r++) {
        struct plan_choice c = winner->choice;
        if (c.recompute == (enum recompute)r)
            continue;
        c.recompute = (enum recompute)r;
        uint32_t before = n;
        add_neighbour(job, winner, c, "", 0, out, &n);
        if (n > before)
            snprintf(out[before].change, sizeof out[before].change,
                     "activation_checkpointing %s", recompute_words[r]);
    }
    return n;
}
