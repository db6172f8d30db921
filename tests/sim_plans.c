/* sim_plans.c - what trainers do with plans, and the loads they report
 *
 * As the real ones: a PREPARE or ABORT that arrives is looked at in the next step boundary; the
 * boundary word says one step later that every rank is ready, and then all move, stage by stage,
 * whatever has arrived since. In every boundary all ranks must have the same placement. */
#include "tests/sim.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/check.h"
#include "proto/placed.h"
#include "proto/message.h"

#define N_EXPERTS 8
#define N_LAYERS  2

uint32_t plans_epoch(const struct sim_trainer *t)
{
    return t->plans.placement ? t->plans.placement->epoch : 0;
}

static void drop(Ballast__Placement **p)
{
    if (*p)
        ballast__placement__free_unpacked(*p, NULL);
    *p = NULL;
}

static void drop_arrived(struct sim_plans *p)
{
    if (p->arrived)
        ballast__prepare__free_unpacked(p->arrived, NULL);
    p->arrived = NULL;
}

void plans_init(struct sim_trainer *t, const Ballast__Start *start)
{
    t->n_devices = start->spec->parallel_expert_parallel_degree;
    t->n_slots = t->n_devices ? (N_EXPERTS + t->n_devices - 1) / t->n_devices +
        start->spec->rebalance_spare_slots_per_rank : 0;
    t->window_steps = start->spec->rebalance_window_steps;
    if (start->placement)
        t->plans.placement = message_copy(start->placement, NULL);
}

void plans_fini(struct sim_trainer *t)
{
    drop(&t->plans.placement);
    drop(&t->plans.ready);
    drop_arrived(&t->plans);
}

static Ballast__Prepare *copy_prepare(const Ballast__Prepare *p)
{
    size_t n_bytes = ballast__prepare__get_packed_size(p);
    uint8_t *bytes = xcalloc(1, n_bytes);
    ballast__prepare__pack(p, bytes);
    Ballast__Prepare *copy = ballast__prepare__unpack(NULL, n_bytes, bytes);
    free(bytes);
    return copy;
}

void plans_receive(struct sim_trainer *t, const Ballast__TrainerMessage *m)
{
    struct sim_plans *p = &t->plans;
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_PREPARE) {
        drop_arrived(p);
        p->arrived = copy_prepare(m->prepare);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN &&
               m->abort_plan->epoch > p->aborted_epoch) {
        p->aborted_epoch = m->abort_plan->epoch;
    }
}

void plans_say(const struct sim_trainer *t, Ballast__RankState *s)
{
    s->placement_epoch = plans_epoch(t);
    s->prepared_epoch = t->plans.prepared_epoch;
    s->rejected_epoch = t->plans.rejected_epoch;
    s->plan_text = "no room";
    s->moved_bytes = 1000 * s->placement_epoch;
    s->pause_s = 0.001;
}

/* ---- the boundary -------------------------------------------------------------------------- */

static Ballast__Placement *merge(const struct sim_trainer *t, const Ballast__Placement *changes)
{
    struct arena arena = {0};
    Ballast__Placement *whole =
        message_copy(placed_merge(t->plans.placement, changes, &arena), NULL);
    arena_fini(&arena);
    return whole;
}

static void take(struct sim *s, struct sim_trainer *t)
{
    struct sim_plans *p = &t->plans;
    const Ballast__Prepare *a = p->arrived;
    uint32_t epoch = a ? a->placement->epoch : 0;
    struct err err = {0};
    if (a && epoch > plans_epoch(t) && epoch > p->prepared_epoch && epoch > p->rejected_epoch) {
        if (check_placement(a->placement, &err) < 0)
            sim_fail(s, "job %" PRIu64 ": a plan that is none: %s", t->job, err.text);
        bool may_be = a->base_epoch == plans_epoch(t) && epoch > p->aborted_epoch &&
            a->placement->n_slots == t->n_slots;
        if (may_be && !sim_chance(s, s->refuses)) {
            drop(&p->ready);
            p->ready = merge(t, a->placement);
            p->prepared_epoch = epoch;
        } else {
            p->rejected_epoch = epoch;
        }
    }
    drop_arrived(p);
    if (p->ready && p->ready->epoch <= p->aborted_epoch) {
        p->rejected_epoch = p->ready->epoch;
        drop(&p->ready);
    }
}

static uint32_t ready_epoch(const struct sim_trainer *t)
{
    return t->plans.ready ? t->plans.ready->epoch : 0;
}

/* All ranks have the same placement, with all experts in it. */
static void check_agreement(struct sim *s, const struct sim_gang *g)
{
    const struct sim_trainer *first = g->ranks[0];
    struct err err = {0};
    if (first->plans.placement && (first->plans.placement->n_layers != N_LAYERS ||
                                   check_placement(first->plans.placement, &err) < 0))
        sim_fail(s, "job %" PRIu64 " lost an expert: %s", g->job, err.text);
    for (uint32_t r = 1; r < g->n_ranks; r++) {
        const Ballast__Placement *a = first->plans.placement, *b = g->ranks[r]->plans.placement;
        uint8_t bytes[2][4096];
        size_t n = a ? ballast__placement__get_packed_size(a) : 0;
        bool is_same = n == (b ? ballast__placement__get_packed_size(b) : 0);
        assert(n <= sizeof bytes[0]);
        if (is_same && n) {
            ballast__placement__pack(a, bytes[0]);
            ballast__placement__pack(b, bytes[1]);
            is_same = !memcmp(bytes[0], bytes[1], n);
        }
        if (!is_same)
            sim_fail(s, "job %" PRIu64 " attempt %u: ranks 0 and %u train with placements %u and "
                     "%u", g->job, g->attempt, r, a ? a->epoch : 0, b ? b->epoch : 0);
    }
}

static uint32_t last_stage(const Ballast__Placement *p)
{
    uint32_t last = 0;
    for (size_t i = 0; i < p->n_layers; i++)
        for (size_t k = 0; k < p->layers[i]->n_stage; k++)
            last = p->layers[i]->stage[k] > last ? p->layers[i]->stage[k] : last;
    return last;
}

/* What a layer of the plan makes of what is in force, up to that stage. */
static Ballast__PlacementLayer *layer_at_stage(const struct sim_trainer *t, size_t i,
                                               uint32_t stage, struct arena *arena)
{
    const Ballast__Placement *now = t->plans.placement, *ready = t->plans.ready;
    struct placement from, to, part;
    placed_layer(ready, i, &to);
    if (now)
        placed_layer(now, i, &from);
    else
        placement_init(&from, to.n_experts, to.n_devices, to.n_slots, NULL);
    placement_init_like(&part, &to);
    if (ready->layers[i]->n_stage)
        placement_at_stage(&from, &to, ready->layers[i]->stage, stage, &part);
    Ballast__PlacementLayer *l = placed_pack(&part, ready->layers[i]->layer, arena);
    placement_fini(&from);
    placement_fini(&to);
    placement_fini(&part);
    return l;
}

/* As after that stage, which is not the last: a placement that has no epoch of its own. */
static void go_to_stage(struct sim *s, struct sim_trainer *t, uint32_t stage)
{
    struct arena arena = {0};
    struct err err = {0};
    Ballast__Placement *ready = t->plans.ready, part = *ready;
    part.epoch = plans_epoch(t);
    part.layers = arena_alloc(&arena, ready->n_layers * sizeof *part.layers);
    for (size_t i = 0; i < ready->n_layers; i++)
        part.layers[i] = layer_at_stage(t, i, stage, &arena);
    if (check_placement(&part, &err) < 0)
        sim_fail(s, "job %" PRIu64 ": stage %u is no placement: %s", t->job, stage, err.text);
    Ballast__Placement *next = message_copy(&part, NULL);
    arena_fini(&arena);
    drop(&t->plans.placement);
    t->plans.placement = next;
}

static void carry_out(struct sim *s, struct sim_gang *g, uint32_t dies)
{
    uint32_t last = last_stage(g->ranks[0]->plans.ready);
    if (g->stage == last)
        sim_say(s, "job %" PRIu64 " attempt %u: experts move, placement %u", g->job, g->attempt,
                g->agreed_epoch);
    else
        sim_say(s, "job %" PRIu64 " attempt %u: experts move, stage %u of placement %u", g->job,
                g->attempt, g->stage, g->agreed_epoch);
    for (uint32_t r = 0; r < g->n_ranks && r < dies; r++) {
        struct sim_plans *p = &g->ranks[r]->plans;
        assert(p->ready && p->ready->epoch == g->agreed_epoch);
        if (g->stage < last) {
            go_to_stage(s, g->ranks[r], g->stage);
            continue;
        }
        drop(&p->placement);
        p->placement = p->ready;
        for (size_t i = 0; i < p->placement->n_layers; i++)
            p->placement->layers[i]->n_stage = 0;
        p->ready = NULL;
    }
    g->stage = g->stage < last ? g->stage + 1 : 0;
    g->agreed_epoch = 0;
    g->window_step = g->step;
}

void plans_boundary(struct sim *s, struct sim_gang *g, uint32_t dies)
{
    check_agreement(s, g);
    if (g->agreed_epoch)
        carry_out(s, g, dies);
    if (dies < g->n_ranks)
        return;
    if (g->job < SIM_JOBS_MAX) {
        s->carried_out[g->job].attempt = g->attempt;
        s->carried_out[g->job].epoch = plans_epoch(g->ranks[0]);
    }
    for (uint32_t r = 0; r < g->n_ranks && !g->stage; r++) /* else nothing can stop it */
        take(s, g->ranks[r]);
    g->agreed_epoch = ready_epoch(g->ranks[0]);
    for (uint32_t r = 1; r < g->n_ranks; r++)
        if (ready_epoch(g->ranks[r]) != g->agreed_epoch)
            g->agreed_epoch = 0;
}

/* ---- loads --------------------------------------------------------------------------------- */

Ballast__LoadReport *plans_load(struct sim *s, struct sim_gang *g, struct arena *arena)
{
    const struct sim_trainer *t = g->ranks[0];
    if (!t->n_devices || g->stage || g->step < g->window_step + t->window_steps)
        return NULL;
    Ballast__LoadReport *r = arena_alloc(arena, sizeof *r);
    ballast__load_report__init(r);
    r->job_id = g->job;
    r->attempt = g->attempt;
    r->first_step = g->window_step + 1;
    r->last_step = g->window_step = g->step;
    r->n_nodes = 1;
    r->n_experts = N_EXPERTS;
    r->placement_epoch = plans_epoch(t);
    r->n_layers = N_LAYERS;
    r->layers = arena_alloc(arena, N_LAYERS * sizeof *r->layers);
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        Ballast__LayerLoad *l = arena_alloc(arena, sizeof *l);
        ballast__layer_load__init(l);
        l->layer = 2 * i + 1;
        l->n_tokens = N_EXPERTS;
        l->tokens = arena_alloc(arena, N_EXPERTS * sizeof *l->tokens);
        for (uint32_t e = 0; e < N_EXPERTS; e++)
            l->tokens[e] = 1000 + (uint32_t)sim_random(s, 100);
        l->tokens[(g->job + g->step / 5 + i) % N_EXPERTS] += 20000; /* the hot one changes */
        r->layers[i] = l;
    }
    r->step_s = 0.05;
    r->row_s = 1e-7;
    r->expert_bytes = 1000;
    r->state_bytes = 6000;
    r->link_bytes_per_s = 1e9;
    r->device_imbalance = 1 + (double)sim_random(s, 100) / 100;
    return r;
}
