/* propose.c - what the planner would do for one job now: the verdicts on all layers as one plan */
#include "coordinator/propose.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/balance.h"
#include "proto/placed.h"

#define EFFORT_US_MAX       2000u
#define EFFORT_US_EACH      8u     /* per expert and device: small models need no more */
#define EFFORT_US_ALL       40000u /* for all layers together */
#define PART_SIZE           (1u << 20) /* experts x devices that are thought about at once */
#define BRIEF_SIZE          (2 * (uint64_t)PART_SIZE) /* of all layers, from which it is brief */
#define LINK_BYTES_S_GUESS  1e9    /* before a move was measured */
#define EXPERTS_TIME_GUESS  0.5    /* of a step, where it was not measured */

struct layer {
    uint32_t               number;
    struct balance        *balance;
    struct placement       in_force, wanted; /* wanted: with the verdict */
    struct balance_verdict verdict;
    uint32_t              *stage;  /* of each slot of wanted; NULL before propose_stages */
    double                 even_s; /* of a window's time in this layer's experts, were all even */
};

struct propose {
    struct propose_policy policy;
    double          *speed;        /* (n_devices) */
    struct layer    *layers;
    uint32_t         n_layers, n_experts;
    uint32_t         epoch;        /* of what is in force */
    uint64_t         last_step, n_steps; /* of the newest window */
    double           step_s, horizon_windows;
    struct plan_costs costs;
    uint64_t         frozen_bytes; /* of costs.weight_bytes */
    uint32_t         n_thought;    /* layers with a verdict; all: newest is valid */
    struct proposal  newest;
};

struct propose *propose_create(const struct propose_policy *policy)
{
    struct propose *p = xcalloc(1, sizeof *p);
    p->policy = *policy;
    p->speed = xcalloc(policy->n_devices, sizeof *p->speed);
    return p;
}

static void drop_layers(struct propose *p)
{
    for (uint32_t i = 0; i < p->n_layers; i++) {
        balance_destroy(p->layers[i].balance);
        placement_fini(&p->layers[i].in_force);
        placement_fini(&p->layers[i].wanted);
        free(p->layers[i].stage);
    }
    free(p->layers);
    p->layers = NULL;
    p->n_layers = 0;
}

void propose_destroy(struct propose *p)
{
    if (!p)
        return;
    drop_layers(p);
    free(p->speed);
    free(p);
}

/* ---- windows ------------------------------------------------------------------------------- */

static bool has_shape(const struct propose *p, const struct load_window *w)
{
    bool fits = p->n_layers == w->n_layers && p->n_experts == w->n_experts;
    for (uint32_t i = 0; fits && i < w->n_layers; i++)
        fits = p->layers[i].number == w->layer[i];
    return fits;
}

static void measure(struct propose *p, const struct load_window *w)
{
    bool has_speed = w->n_devices == p->policy.n_devices;
    for (uint32_t g = 0; g < p->policy.n_devices; g++)
        p->speed[g] = has_speed ? w->speed[g] : 1;
    p->last_step = w->last_step;
    p->n_steps = w->n_steps;
    p->step_s = w->step_s;
    double windows = (double)p->policy.horizon_steps / (double)w->n_steps;
    p->horizon_windows = windows > 1 ? windows : 1;
    double link = w->link_bytes_per_s > 0 ? w->link_bytes_per_s : LINK_BYTES_S_GUESS;
    p->costs = (struct plan_costs){.weight_bytes = w->expert_bytes, .state_bytes = w->state_bytes,
                                   .link_bytes_s = link, .node_link_bytes_s = link};
    p->frozen_bytes = w->frozen_bytes;
}

/* Seconds that a window spends in one layer's experts, were all ranks even. */
static double even_time_s(const struct propose *p, const struct load_window *w,
                          const double *tokens)
{
    double n_rows = 0;
    for (uint32_t e = 0; e < w->n_experts; e++)
        n_rows += tokens[e];
    double even_s = w->row_s * n_rows / p->policy.n_ranks;
    double guess_s = w->step_s * (double)w->n_steps * EXPERTS_TIME_GUESS / w->n_layers;
    return even_s > 0 ? even_s : guess_s > 0 ? guess_s : 1e-6;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static struct balance *new_balance(const struct propose *p, uint32_t layer, uint32_t n_slots,
                                   double even_s)
{
    struct balance_policy b = balance_defaults();
    b.n_nodes = p->policy.n_nodes;
    b.speed = p->speed;
    b.horizon_windows = p->horizon_windows;
    b.min_gain = p->policy.min_gain;
    b.seed = 1 + layer;
    b.window_s = even_s;
    b.costs = p->costs;
    b.is_brief = (uint64_t)p->n_layers * p->n_experts * p->policy.n_devices >= BRIEF_SIZE;
    b.effort_us = min_u32(EFFORT_US_MAX, EFFORT_US_ALL / p->n_layers);
    b.effort_us = min_u32(b.effort_us, EFFORT_US_EACH * p->n_experts * p->policy.n_devices);
    return balance_create(p->n_experts, p->policy.n_devices, n_slots, &b);
}

static void set_in_force(struct propose *p, struct layer *l, const Ballast__Placement *in_force)
{
    uint32_t n_devices = p->policy.n_devices;
    uint32_t n_slots = (p->n_experts + n_devices - 1) / n_devices + p->policy.n_spare;
    long i = in_force ? placed_find(in_force, l->number) : -1;
    placement_fini(&l->in_force);
    if (i >= 0) {
        placed_layer(in_force, (size_t)i, &l->in_force);
        return;
    }
    int rc = placement_init(&l->in_force, p->n_experts, n_devices, n_slots, NULL);
    assert(rc == 0); /* the job was accepted with these numbers */
}

static void begin(struct propose *p, const struct load_window *w)
{
    drop_layers(p);
    p->n_layers = w->n_layers;
    p->n_experts = w->n_experts;
    p->layers = xcalloc(p->n_layers, sizeof *p->layers);
    for (uint32_t i = 0; i < p->n_layers; i++)
        p->layers[i].number = w->layer[i];
}

void propose_observe(struct propose *p, const struct load_window *w,
                     const Ballast__Placement *in_force)
{
    bool is_new = !has_shape(p, w), has_moved = is_new || p->epoch != w->epoch;
    measure(p, w);
    if (is_new)
        begin(p, w);
    for (uint32_t i = 0; i < p->n_layers; i++) {
        struct layer *l = &p->layers[i];
        const double *tokens = w->tokens + (size_t)i * w->n_experts;
        l->even_s = even_time_s(p, w, tokens);
        if (has_moved)
            set_in_force(p, l, in_force);
        if (!l->balance)
            l->balance = new_balance(p, i, l->in_force.n_slots, l->even_s);
        balance_reprice(l->balance, l->even_s, p->horizon_windows, &p->costs);
        balance_observe(l->balance, tokens, &l->in_force);
    }
    p->epoch = w->epoch;
    p->n_thought = 0;
}

/* ---- proposing ----------------------------------------------------------------------------- */

static bool changes(const struct layer *l)
{
    /* What is given may only drop copies, which moves nothing. */
    return l->verdict.kind != BALANCE_STAY &&
           (l->verdict.n_moves || l->verdict.kind == BALANCE_GIVEN);
}

static void add_up(const struct propose *p, struct proposal *s)
{
    for (uint32_t i = 0; i < p->n_layers; i++) {
        const struct layer *l = &p->layers[i];
        const struct balance_verdict *v = &l->verdict;
        s->imbalance_before += v->ratio_before / p->n_layers;
        s->imbalance_predicted += v->ratio_after / p->n_layers;
        if (!changes(l))
            continue;
        s->n_changed++;
        s->n_moves += v->n_moves;
        s->n_bytes += v->n_bytes;
        s->gain_s += v->gain / p->horizon_windows * l->even_s / (double)p->n_steps;
        s->cost_s += v->cost * l->even_s;
    }
}

static const struct layer *worst_layer(const struct propose *p)
{
    const struct layer *worst = &p->layers[0];
    for (uint32_t i = 1; i < p->n_layers; i++)
        if (p->layers[i].verdict.ratio_before > worst->verdict.ratio_before)
            worst = &p->layers[i];
    return worst;
}

static void say_why(const struct propose *p, struct proposal *s)
{
    const struct layer *worst = worst_layer(p);
    if (s->n_changed)
        snprintf(s->reason, sizeof s->reason, "%u move%s in %u of %u layers: a window's loads go "
                 "from %.3f to %.3f times the mean, wins %.3g ms of a step of %.3g ms, costs "
                 "%.3g ms once", s->n_moves, s->n_moves == 1 ? "" : "s", s->n_changed,
                 p->n_layers, s->imbalance_before, s->imbalance_predicted, s->gain_s * 1e3,
                 s->step_s * 1e3, s->cost_s * 1e3);
    else
        snprintf(s->reason, sizeof s->reason, "nothing to do; layer %u is the least even: %s",
                 worst->number, worst->verdict.reason);
}

static void conclude(struct propose *p)
{
    p->newest = (struct proposal){
        .revision = (uint64_t)p->epoch << 40 | (p->last_step & 0xffffffffffu),
        .step_s = p->step_s};
    add_up(p, &p->newest);
    say_why(p, &p->newest);
}

bool propose_think(struct propose *p)
{
    uint32_t n = 1 + PART_SIZE / (p->n_experts * p->policy.n_devices);
    assert(p->n_layers);
    for (; n && p->n_thought < p->n_layers; n--) {
        struct layer *l = &p->layers[p->n_thought++];
        placement_fini(&l->wanted);
        placement_init_like(&l->wanted, &l->in_force);
        balance_propose(l->balance, &l->in_force, false, &l->wanted, &l->verdict);
        if (p->n_thought == p->n_layers)
            conclude(p);
    }
    return p->n_thought == p->n_layers;
}

const struct proposal *propose_now(struct propose *p)
{
    while (!propose_think(p))
        ;
    return &p->newest;
}

static int check_given(const struct propose *p, const Ballast__Placement *given, struct err *err)
{
    const struct placement *have = &p->layers[0].in_force;
    uint32_t n_known = 0;
    if (given->n_devices != have->n_devices || given->n_slots != have->n_slots)
        return err_set(err, -EINVAL, "it has %u devices with %u slots, this job has %u with %u",
                       given->n_devices, given->n_slots, have->n_devices, have->n_slots);
    if (given->n_layers && given->layers[0]->n_home != p->n_experts)
        return err_set(err, -EINVAL, "it has %zu experts, this job has %u",
                       given->layers[0]->n_home, p->n_experts);
    for (uint32_t i = 0; i < p->n_layers; i++)
        n_known += placed_find(given, p->layers[i].number) >= 0;
    if (n_known < given->n_layers || !n_known)
        return err_set(err, -EINVAL, "it names %zu layers, of which this job has experts in %u",
                       given->n_layers, n_known);
    return 0;
}

int propose_given(struct propose *p, const Ballast__Placement *given, struct err *err)
{
    assert(p->n_layers);
    int rc = check_given(p, given, err);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < p->n_layers; i++) {
        struct layer *l = &p->layers[i];
        long at = placed_find(given, l->number);
        placement_fini(&l->wanted);
        if (at >= 0)
            placed_layer(given, (size_t)at, &l->wanted);
        else
            placement_init_like(&l->wanted, &l->in_force);
        balance_weigh(l->balance, &l->in_force, &l->wanted, &l->verdict);
    }
    p->n_thought = p->n_layers;
    conclude(p);
    return 0;
}

void propose_forget(struct propose *p)
{
    p->n_thought = 0;
}

uint32_t propose_stages(struct propose *p, struct stages_budget budget)
{
    struct stages_layer *changing = xcalloc(p->n_layers, sizeof *changing);
    uint32_t n = 0;
    budget.weight_bytes = p->costs.weight_bytes - p->frozen_bytes;
    budget.state_bytes = p->costs.state_bytes;
    for (uint32_t i = 0; i < p->n_layers; i++) {
        struct layer *l = &p->layers[i];
        free(l->stage);
        l->stage = xcalloc(placement_n_total(&l->in_force), sizeof *l->stage);
        if (changes(l))
            changing[n++] = (struct stages_layer){
                .from = &l->in_force, .to = &l->wanted, .worth = l->even_s, .stage = l->stage,
                .load = forecast_belief(balance_forecast(l->balance))->mean};
    }
    uint32_t n_stages = stages_assign(changing, n, &budget);
    for (uint32_t i = 0; i < p->n_layers; i++)
        if (changes(&p->layers[i]))
            balance_share(p->layers[i].balance, &p->layers[i].wanted);
    free(changing);
    return n_stages;
}

static Ballast__PlacementLayer *pack_layer(const struct layer *l, struct arena *arena)
{
    Ballast__PlacementLayer *m =
        placed_pack(changes(l) ? &l->wanted : &l->in_force, l->number, arena);
    uint32_t n_total = placement_n_total(&l->in_force), last = 0;
    for (uint32_t s = 0; l->stage && s < n_total; s++)
        last = l->stage[s] > last ? l->stage[s] : last;
    if (last) {
        m->n_stage = n_total;
        m->stage = arena_memdup(arena, l->stage, n_total * sizeof *l->stage);
    }
    return m;
}

Ballast__Placement *propose_placement(const struct propose *p, uint32_t epoch, bool all_layers,
                                      struct arena *arena)
{
    Ballast__Placement *m = arena_alloc(arena, sizeof *m);
    ballast__placement__init(m);
    m->epoch = epoch;
    m->n_devices = p->policy.n_devices;
    m->n_slots = p->layers[0].in_force.n_slots;
    m->layers = arena_alloc(arena, p->n_layers * sizeof *m->layers);
    for (uint32_t i = 0; i < p->n_layers; i++) {
        const struct layer *l = &p->layers[i];
        if (all_layers || changes(l))
            m->layers[m->n_layers++] = pack_layer(l, arena);
    }
    return m;
}

static Ballast__PlanMove *describe(const struct layer *l, const struct plan_move *move,
                                   struct arena *arena)
{
    Ballast__PlanMove *m = arena_alloc(arena, sizeof *m);
    ballast__plan_move__init(m);
    m->layer = l->number;
    m->expert = move->expert;
    m->from_device = move->from / l->in_force.n_slots;
    m->to_device = move->to / l->in_force.n_slots;
    m->is_home = move->with_state;
    m->bytes = move->n_bytes;
    return m;
}

size_t propose_moves(const struct propose *p, struct arena *arena, Ballast__PlanMove ***out_moves)
{
    size_t n = 0;
    Ballast__PlanMove **moves = arena_alloc(arena, p->newest.n_moves * sizeof *moves);
    for (uint32_t i = 0; i < p->n_layers; i++) {
        const struct layer *l = &p->layers[i];
        struct plan plan;
        if (!changes(l))
            continue;
        plan_init(&plan, &l->in_force, &l->wanted, p->policy.n_nodes, &p->costs);
        for (uint32_t k = 0; k < plan.n_moves && n < p->newest.n_moves; k++)
            moves[n++] = describe(l, &plan.move[k], arena);
        plan_fini(&plan);
    }
    *out_moves = moves;
    return n;
}

void propose_applied(struct propose *p)
{
    for (uint32_t i = 0; i < p->n_layers; i++) {
        struct layer *l = &p->layers[i];
        if (changes(l))
            balance_applied(l->balance, &l->in_force, &l->verdict);
        l->verdict = (struct balance_verdict){.kind = BALANCE_STAY};
    }
}
