/* balance.c - the decision: which candidate, if any, is worth its price
 *
 * The best candidate must win, with the error of its gain taken off, a share of the layer's time,
 * and over the horizon more than its moves cost. */
#include "coordinator/balance_parts.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/mem.h"
#include "common/split.h"

#define RESTING_WINDOWS 4 /* at most, in which a layer that is as even as before is left alone */

struct balance_policy balance_defaults(void)
{
    return (struct balance_policy){
        .n_nodes = 1, .horizon_windows = 10, .min_gain = 0.02, .cooldown_windows = 1, .risk = 1,
        .window_s = 0.5, .effort_us = 2000, .seed = 1,
        .costs = { .weight_bytes = 66060288, .state_bytes = 396361728, .link_bytes_s = 100e9,
                   .node_link_bytes_s = 25e9 },
    };
}

static const char *kind_name(enum balance_kind kind)
{
    static const char *const name[] = { "stay", "copies", "steps", "fresh", "given" };
    return name[kind];
}

struct balance *balance_create(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots,
                               const struct balance_policy *policy)
{
    assert(policy->n_nodes && n_devices % policy->n_nodes == 0);
    struct balance *b = xcalloc(1, sizeof *b);
    b->policy = *policy;
    b->n_experts = n_experts;
    b->n_devices = n_devices;
    b->n_slots = n_slots;
    b->forecast = forecast_create(n_experts);
    b->first_rest = (uint32_t)(scenario_hash(policy->seed) % RESTING_WINDOWS);
    return b;
}

void balance_reprice(struct balance *b, double window_s, double horizon_windows,
                     const struct plan_costs *costs)
{
    b->policy.window_s = window_s;
    b->policy.horizon_windows = horizon_windows;
    b->policy.costs = *costs;
}

void balance_destroy(struct balance *b)
{
    if (!b)
        return;
    trial_end(b);
    forecast_destroy(b->forecast);
    free(b);
}

const struct forecast *balance_forecast(const struct balance *b)
{
    return b->forecast;
}

/* ---- windows --------------------------------------------------------------------------------- */

double balance_even_time(const struct balance *b, const double *load)
{
    double sum = 0, speed = 0;
    for (uint32_t e = 0; e < b->n_experts; e++)
        sum += load[e];
    for (uint32_t g = 0; g < b->n_devices; g++)
        speed += b->policy.speed ? b->policy.speed[g] : 1;
    return sum / speed;
}

double balance_ratio(const struct balance *b, const struct placement *p, const double *load,
                       double *out_share)
{
    struct split *s = split_create(p, b->policy.speed);
    double even = balance_even_time(b, load), max = split_solve(s, load, out_share);
    split_destroy(s);
    return even > 0 ? max / even : 1;
}

void balance_observe(struct balance *b, const double *load, const struct placement *in_force)
{
    b->cooldown -= b->cooldown > 0;
    b->n_resting -= b->n_resting > 0;
    for (int k = 0; k < BALANCE_KINDS; k++)
        b->barred[k] -= b->barred[k] > 0;
    trial_watch(b, load, in_force);
    forecast_add(b->forecast, load);
}

/* ---- proposing ------------------------------------------------------------------------------- */

static void say_why(const struct balance *b, const struct candidate *stay,
                    struct candidate *best, struct balance_verdict *out)
{
    struct balance_verdict *v = &best->verdict;
    if (best != stay && candidate_is_worth_it(b, best)) {
        snprintf(v->reason, sizeof v->reason, "%s: %u moves in %u rounds; max/mean %.3f -> %.3f "
                 "wins %.2f windows, costs %.2f, risk %.2f", kind_name(v->kind),
                 v->n_moves, v->n_rounds, v->ratio_before, v->ratio_after, v->gain, v->cost,
                 v->risk);
        *out = *v;
        return;
    }
    *out = (struct balance_verdict){ .kind = BALANCE_STAY,
        .ratio_before = candidate_ratio(stay), .ratio_after = candidate_ratio(stay) };
    if (best == stay || !v->n_moves)
        snprintf(out->reason, sizeof out->reason, "stay at max/mean %.3f: nothing better found",
                 out->ratio_before);
    else
        snprintf(out->reason, sizeof out->reason, "stay at max/mean %.3f: the best plan (%s) wins "
                 "%.2f windows, costs %.2f, risk %.2f; needs a sure gain of %.1f %%",
                 out->ratio_before, kind_name(v->kind), v->gain, v->cost, v->risk,
                 100 * b->policy.min_gain);
}

static bool has_nothing_to_do(const struct balance *b, struct balance_verdict *v)
{
    *v = (struct balance_verdict){ .kind = BALANCE_STAY, .ratio_before = 1, .ratio_after = 1 };
    if (!forecast_n_windows(b->forecast))
        snprintf(v->reason, sizeof v->reason, "stay: no load was seen yet");
    else if (b->cooldown)
        snprintf(v->reason, sizeof v->reason, "stay: %u windows of cooldown after the last change",
                 b->cooldown);
    else if (b->n_devices < 2)
        snprintf(v->reason, sizeof v->reason, "stay: there is one device only");
    else
        return false;
    return true;
}

/* Little has changed since nothing better was found: a gain of min_gain is not to be expected. */
static bool may_rest(const struct balance *b, const struct candidate *stay)
{
    return b->policy.is_brief && b->n_resting && !b->is_free && !b->policy.is_known &&
           candidate_ratio(stay) < b->found * (1 + b->policy.min_gain / 2);
}

/* After a search. What would be better, but is not sure or dear, is looked at again each time. */
static void rest(struct balance *b, const struct candidate *stay, const struct candidate *best,
                 const struct balance_verdict *verdict)
{
    bool is_settled = verdict->kind != BALANCE_STAY || best->verdict.kind == BALANCE_STAY;
    uint32_t n = b->found > 0 ? RESTING_WINDOWS : 1 + b->first_rest;
    b->n_resting = is_settled ? n : 0;
    b->found = verdict->kind == BALANCE_STAY ? candidate_ratio(stay) : verdict->ratio_after;
}

static void decide(struct balance *b, struct arrange *a, const struct placement *in_force,
                   struct placement *out, struct balance_verdict *verdict)
{
    struct candidate stay = { .verdict.kind = BALANCE_STAY }, best;
    placement_init_like(&stay.placement, in_force);
    candidate_judge(b, a, &stay);
    if ((candidate_is_even_enough(b, &stay) || may_rest(b, &stay)) && !b->is_free) {
        say_why(b, &stay, &stay, verdict);
        placement_fini(&stay.placement);
        return;
    }
    balance_search(b, a, &stay, &best);
    say_why(b, &stay, best.verdict.kind == BALANCE_STAY ? &stay : &best, verdict);
    rest(b, &stay, &best, verdict);
    placement_copy(out, verdict->kind == BALANCE_STAY ? in_force : &best.placement);
    placement_fini(&best.placement);
    placement_fini(&stay.placement);
}

void balance_propose(struct balance *b, const struct placement *in_force, bool is_free,
                     struct placement *out, struct balance_verdict *verdict)
{
    b->is_free = is_free;
    placement_copy(out, in_force);
    if (!has_nothing_to_do(b, verdict)) {
        const struct belief *belief = forecast_belief(b->forecast);
        struct belief known = { .n_experts = b->n_experts, .sd = belief->sd,
            .mean = xmemdup(forecast_last(b->forecast), b->n_experts * sizeof(double)) };
        struct search_problem problem = {
            .n_experts = b->n_experts, .n_devices = b->n_devices, .n_slots = b->n_slots,
            .n_nodes = b->policy.n_nodes, .speed = b->policy.speed,
            .node_price = b->policy.n_nodes > 1 ? 0.01f : 0,
            .seed = b->policy.seed };
        struct arrange a;
        arrange_init(&a, &problem, b->policy.is_known ? &known : belief, b->policy.effort_us);
        decide(b, &a, in_force, out, verdict);
        arrange_fini(&a);
        free(known.mean);
    }
    if (forecast_n_windows(b->forecast) && !b->policy.is_brief)
        balance_share(b, out);
}

void balance_share(const struct balance *b, struct placement *p)
{
    const double *load = b->policy.is_known ? forecast_last(b->forecast)
                                            : forecast_belief(b->forecast)->mean;
    (void)balance_ratio(b, p, load, p->share);
}

void balance_weigh(const struct balance *b, const struct placement *in_force,
                   struct placement *given, struct balance_verdict *verdict)
{
    const struct balance_policy *p = &b->policy;
    const double *load = forecast_belief(b->forecast)->mean;
    struct balance_verdict v = { 0 };
    struct plan plan;
    placement_keep_slots(given, in_force);
    v.kind = balance_differs(given, in_force) ? BALANCE_GIVEN : BALANCE_STAY;
    placement_share_evenly(given);
    placement_keep_homes(given, in_force);
    plan_price(&plan, in_force, given, p->n_nodes, &p->costs);
    v.ratio_before = balance_ratio(b, in_force, load, NULL);
    v.ratio_after = balance_ratio(b, given, load, given->share);
    v.gain = p->horizon_windows * (v.ratio_before - v.ratio_after);
    v.cost = plan.seconds * (1 - p->hidden_share) / p->window_s;
    v.n_moves = plan.n_moves;
    v.n_rounds = plan.n_rounds;
    v.n_bytes = plan.n_bytes;
    snprintf(v.reason, sizeof v.reason, "%s: max/mean %.3f -> %.3f", kind_name(v.kind),
             v.ratio_before, v.ratio_after);
    *verdict = v;
}
