/* balance - the decision: which candidate, if any, is worth its price
 *
 * Three kinds of candidates stand against staying. Each is judged on scenarios that its search has
 * not seen, next to the placement in force on the same ones, so that the gain has an error of its
 * own. A plan must win, with that error taken off, a share of the layer's time, and over the
 * horizon more than its moves cost. What moves homes must also be clearly better than what only
 * adds copies: the model of the error may be wrong, and copies cannot do harm. */
#include "coordinator/balance.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/split.h"
#include "coordinator/arrange.h"

#define HOME_MARGIN    0.05 /* of the ratio, that a plan which moves homes must win by */
#define CHEAP_MOVES    0.05 /* of what a plan wins */
#define REPEATS_MAX    4    /* a plan is improved until nothing is left to propose */
#define TRIAL_WINDOWS  3    /* after which a plan has won or lost */
#define BARRED_WINDOWS 8    /* for which a kind that lost is not proposed; doubles */
#define RESTING_WINDOWS 4   /* at most, in which a layer that is as even as before is left alone */

struct trial {
    bool     is_on;
    enum balance_kind kind;
    struct placement  before; /* what would be in force without the plan */
    struct split     *split;  /* of it */
    uint32_t n_windows;
    double   realised, predicted_per_window;
};

struct balance {
    struct balance_policy policy;
    struct forecast *forecast;
    uint32_t n_experts, n_devices, n_slots;
    uint32_t cooldown;            /* windows left */
    uint32_t barred[BALANCE_KINDS], n_losses[BALANCE_KINDS];
    struct trial trial;
    bool     was_tried;
    uint32_t first_rest;          /* so that layers do not wake all at once */
    double   found;               /* the ratio of the newest search, with what it found; 0: none */
    uint32_t n_resting;           /* windows left in which that is believed */
    bool     is_free;             /* of the present proposal */
};

struct balance_policy balance_defaults(void)
{
    return (struct balance_policy){
        .n_nodes = 1, .horizon_windows = 10, .min_gain = 0.02, .cooldown_windows = 1, .risk = 1,
        .window_s = 0.5, .effort_us = 2000, .seed = 1,
        .costs = { .weight_bytes = 66060288, .state_bytes = 396361728, .link_bytes_s = 100e9,
                   .node_link_bytes_s = 25e9 },
    };
}

const char *balance_kind_name(enum balance_kind kind)
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

static void end_trial(struct balance *b)
{
    split_destroy(b->trial.split);
    placement_fini(&b->trial.before);
    b->trial.split = NULL;
    b->trial.is_on = false;
}

void balance_destroy(struct balance *b)
{
    if (!b)
        return;
    end_trial(b);
    forecast_destroy(b->forecast);
    free(b);
}

const struct forecast *balance_forecast(const struct balance *b)
{
    return b->forecast;
}

/* ---- what plans really bring ----------------------------------------------------------------- */

/* What the heaviest device would take if all were even. */
static double even_time(const struct balance *b, const double *load)
{
    double sum = 0, speed = 0;
    for (uint32_t e = 0; e < b->n_experts; e++)
        sum += load[e];
    for (uint32_t g = 0; g < b->n_devices; g++)
        speed += b->policy.speed ? b->policy.speed[g] : 1;
    return sum / speed;
}

static double ratio_of(const struct balance *b, const struct placement *p, const double *load,
                       double *out_share)
{
    struct split *s = split_create(p, b->policy.speed);
    double even = even_time(b, load), max = split_solve(s, load, out_share);
    split_destroy(s);
    return even > 0 ? max / even : 1;
}

static void watch_trial(struct balance *b, const double *load, const struct placement *in_force)
{
    struct trial *t = &b->trial;
    double even = even_time(b, load);
    if (!t->is_on || !(even > 0))
        return;
    t->realised += split_solve(t->split, load, NULL) / even - ratio_of(b, in_force, load, NULL);
    t->n_windows++;
    if (t->n_windows < TRIAL_WINDOWS)
        return;
    if (t->realised < 0) {
        b->barred[t->kind] = BARRED_WINDOWS << (b->n_losses[t->kind] < 8 ? b->n_losses[t->kind]++
                                                                         : 8);
    } else if (b->n_losses[t->kind]) {
        b->n_losses[t->kind]--;
    }
    end_trial(b);
}

void balance_observe(struct balance *b, const double *load, const struct placement *in_force)
{
    b->cooldown -= b->cooldown > 0;
    b->n_resting -= b->n_resting > 0;
    for (int k = 0; k < BALANCE_KINDS; k++)
        b->barred[k] -= b->barred[k] > 0;
    watch_trial(b, load, in_force);
    forecast_add(b->forecast, load);
}

void balance_applied(struct balance *b, const struct placement *before,
                     const struct balance_verdict *verdict)
{
    if (verdict->kind == BALANCE_STAY)
        return;
    end_trial(b);
    b->cooldown = b->policy.cooldown_windows;
    b->was_tried = true;
    b->trial = (struct trial){ .is_on = true, .kind = verdict->kind,
        .predicted_per_window = verdict->ratio_before - verdict->ratio_after };
    placement_init_like(&b->trial.before, before);
    b->trial.split = split_create(before, b->policy.speed);
}

bool balance_realised(const struct balance *b, double *out_realised, double *out_predicted)
{
    if (!b->was_tried || !b->trial.n_windows)
        return false;
    *out_realised = b->trial.realised;
    *out_predicted = b->trial.predicted_per_window * b->trial.n_windows;
    return true;
}

/* ---- judging --------------------------------------------------------------------------------- */

#define N_JUDGED_MAX (ARRANGE_JUDGES_MAX * SCENARIOS)

struct candidate {
    struct placement placement;
    float    ratio[N_JUDGED_MAX];
    uint32_t n_judged;
    struct balance_verdict verdict;
    double net; /* over the horizon, in windows */
};

static void judge(const struct balance *b, struct arrange *a, struct candidate *c)
{
    c->n_judged = a->n_judges * SCENARIOS;
    if (!b->policy.is_known) {
        arrange_judge(a, &c->placement, c->ratio);
        return;
    }
    double ratio = ratio_of(b, &c->placement, a->belief->mean, NULL);
    for (uint32_t k = 0; k < c->n_judged; k++)
        c->ratio[k] = (float)ratio;
}

static double mean_ratio(const struct candidate *c)
{
    double sum = 0;
    for (uint32_t k = 0; k < c->n_judged; k++)
        sum += (double)c->ratio[k];
    return sum / c->n_judged;
}

/* Gain and risk of c against staying with `stay`, which is in force; what moves cost comes on top:
 * returns what c is worth at best. */
static double measure(const struct balance *b, const struct candidate *stay, struct candidate *c)
{
    const struct balance_policy *p = &b->policy;
    struct balance_verdict *v = &c->verdict;
    double mean, square = 0;
    v->ratio_before = mean_ratio(stay);
    v->ratio_after = mean_ratio(c);
    mean = v->ratio_before - v->ratio_after;
    for (uint32_t k = 0; k < c->n_judged; k++) {
        double d = (double)stay->ratio[k] - (double)c->ratio[k] - mean;
        square += d * d;
    }
    v->gain = p->horizon_windows * mean;
    v->risk = p->horizon_windows * p->risk * sqrt(square / (c->n_judged - 1) / c->n_judged);
    return v->gain - v->risk;
}

/* Gain, risk and price. */
static void weigh(const struct balance *b, const struct candidate *stay, struct candidate *c)
{
    const struct balance_policy *p = &b->policy;
    struct balance_verdict *v = &c->verdict;
    struct plan plan;
    double most = measure(b, stay, c);
    plan_price(&plan, &stay->placement, &c->placement, p->n_nodes, &p->costs);
    v->cost = b->is_free ? 0 : plan.seconds * (1 - p->hidden_share) / p->window_s;
    v->n_moves = plan.n_moves;
    v->n_rounds = plan.n_rounds;
    v->n_bytes = plan.n_bytes;
    c->net = most - v->cost;
}

static bool is_worth_it(const struct balance *b, const struct candidate *c)
{
    const struct balance_verdict *v = &c->verdict;
    double sure = (v->gain - v->risk) / b->policy.horizon_windows;
    if (b->is_free)
        return v->n_moves && c->net > 0;
    return v->n_moves && c->net > 0 && sure >= b->policy.min_gain * v->ratio_before;
}

/* Nobody could win min_gain any more. */
static bool is_even_enough(const struct balance *b, const struct candidate *c)
{
    return mean_ratio(c) < 1 + b->policy.min_gain;
}

static void say_why(const struct balance *b, const struct candidate *stay,
                    struct candidate *best, struct balance_verdict *out)
{
    struct balance_verdict *v = &best->verdict;
    if (best != stay && is_worth_it(b, best)) {
        snprintf(v->reason, sizeof v->reason, "%s: %u moves in %u rounds; max/mean %.3f -> %.3f "
                 "wins %.2f windows, costs %.2f, risk %.2f", balance_kind_name(v->kind),
                 v->n_moves, v->n_rounds, v->ratio_before, v->ratio_after, v->gain, v->cost,
                 v->risk);
        *out = *v;
        return;
    }
    *out = (struct balance_verdict){ .kind = BALANCE_STAY,
        .ratio_before = mean_ratio(stay), .ratio_after = mean_ratio(stay) };
    if (best == stay || !v->n_moves)
        snprintf(out->reason, sizeof out->reason, "stay at max/mean %.3f: nothing better found",
                 out->ratio_before);
    else
        snprintf(out->reason, sizeof out->reason, "stay at max/mean %.3f: the best plan (%s) wins "
                 "%.2f windows, costs %.2f, risk %.2f; needs a sure gain of %.1f %%",
                 out->ratio_before, balance_kind_name(v->kind), v->gain, v->cost, v->risk,
                 100 * b->policy.min_gain);
}

/* ---- proposing ------------------------------------------------------------------------------- */

static bool speeds_differ(const struct balance *b)
{
    for (uint32_t g = 1; b->policy.speed && g < b->n_devices; g++)
        if (b->policy.speed[g] != b->policy.speed[0])
            return true;
    return false;
}

static bool differs(const struct placement *p, const struct placement *from)
{
    return memcmp(p->expert, from->expert, placement_n_total(p) * sizeof *p->expert) != 0;
}

/* A candidate, and how it does in the judge's scenarios; false if nothing was found. Fresh ones are
 * the same whatever they start from, up to the names of devices, so one is made and judged once a
 * decision. */
static bool make(const struct balance *b, struct arrange *a, const struct placement *from,
                 enum balance_kind kind, struct candidate *fresh, struct candidate *c)
{
    if (kind == BALANCE_FRESH && fresh->n_judged) {
        *c = *fresh;
        placement_init_like(&c->placement, &fresh->placement);
        return true;
    }
    struct placement *p = &c->placement;
    placement_init_like(p, from);
    c->verdict = (struct balance_verdict){ .kind = kind };
    if (kind == BALANCE_COPIES)
        arrange_copies(a, from, p);
    else if (kind == BALANCE_STEPS)
        arrange_steps(a, from, p);
    else
        arrange_fresh(a, from, p);
    if (b->policy.is_known)
        arrange_exactly(a->belief->mean, b->policy.speed, kind == BALANCE_COPIES, p);
    if (!differs(p, from))
        return false;
    judge(b, a, c);
    if (kind == BALANCE_FRESH) {
        *fresh = *c;
        placement_init_like(&fresh->placement, p);
    }
    return true;
}

/* Names and slots as near to `from` as can be; worth the same. */
static void settle(const struct balance *b, const struct placement *from, struct candidate *c)
{
    struct placement *p = &c->placement;
    if (c->verdict.kind == BALANCE_FRESH && !speeds_differ(b))
        plan_align(p, from, b->policy.n_nodes);
    placement_keep_slots(p, from);
    placement_share_evenly(p);
    placement_keep_homes(p, from);
}

static float move_price(const struct balance *b)
{
    const struct balance_policy *p = &b->policy;
    if (b->is_free)
        return 0;
    /* A device sends and receives at once, so moves share rounds; half of them do, say. */
    double seconds = (double)(p->costs.weight_bytes + p->costs.state_bytes) / p->costs.link_bytes_s;
    return (float)(seconds * (1 - p->hidden_share) / p->window_s / p->horizon_windows * 2 /
                   b->n_devices);
}

/* Steps win by moving less: not where that saves next to nothing. */
static bool moves_are_cheap(const struct balance *b, const struct candidate *best)
{
    return b->is_free || (best->verdict.kind == BALANCE_FRESH &&
                          best->verdict.cost < CHEAP_MOVES * best->net);
}

/* The best of all kinds against `stay`, which is in force; a copy of stay if none is better. */
static void best_against(const struct balance *b, struct arrange *a, const struct candidate *stay,
                         struct candidate *fresh, struct candidate *best)
{
    *best = *stay;
    best->net = 0;
    best->verdict = (struct balance_verdict){ .kind = BALANCE_STAY };
    placement_init_like(&best->placement, &stay->placement);
    a->problem.move_price = move_price(b);
    static const enum balance_kind kinds[] = { BALANCE_COPIES, BALANCE_FRESH, BALANCE_STEPS };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        enum balance_kind kind = kinds[i];
        struct candidate c;
        if (b->barred[kind] || (kind == BALANCE_STEPS && moves_are_cheap(b, best)))
            continue;
        double margin = 0;
        if (kind == BALANCE_FRESH && best->verdict.kind == BALANCE_COPIES && !b->policy.is_known)
            margin = HOME_MARGIN * best->verdict.ratio_after * b->policy.horizon_windows;
        if (!make(b, a, &stay->placement, kind, fresh, &c)) {
            placement_fini(&c.placement);
            continue;
        }
        /* Names and price take longer than the search; most candidates cannot win any more. */
        c.net = measure(b, stay, &c);
        if (c.net > best->net + margin) {
            settle(b, &stay->placement, &c);
            weigh(b, stay, &c);
        }
        if (c.net > best->net + margin) {
            placement_fini(&best->placement);
            *best = c;
        } else {
            placement_fini(&c.placement);
        }
    }
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

/* Goes on from the best as if it were in force, until nothing is left that would be proposed then:
 * so the plan of a plan is empty. */
static void go_on(struct balance *b, struct arrange *a, const struct candidate *stay,
                  struct candidate *fresh, struct candidate *best)
{
    bool is_free = b->is_free;
    for (uint32_t i = 0; i < REPEATS_MAX && (is_free || is_worth_it(b, best)); i++) {
        struct candidate next;
        /* From what is placed anew one in two hundred goes on. */
        if (is_even_enough(b, best) || (b->policy.is_brief && best->verdict.kind == BALANCE_FRESH))
            return;
        b->is_free = false;
        best_against(b, a, best, fresh, &next);
        bool goes_on = is_worth_it(b, &next);
        b->is_free = is_free;
        if (goes_on)
            weigh(b, stay, &next);
        if (goes_on && is_worth_it(b, &next)) {
            placement_fini(&best->placement);
            *best = next;
        } else {
            placement_fini(&next.placement);
            return;
        }
    }
}

/* Little has changed since nothing better was found: a gain of min_gain is not to be expected. */
static bool may_rest(const struct balance *b, const struct candidate *stay)
{
    return b->policy.is_brief && b->n_resting && !b->is_free && !b->policy.is_known &&
           mean_ratio(stay) < b->found * (1 + b->policy.min_gain / 2);
}

/* After a search. What would be better, but is not sure or dear, is looked at again each time. */
static void rest(struct balance *b, const struct candidate *stay, const struct candidate *best,
                 const struct balance_verdict *verdict)
{
    bool is_settled = verdict->kind != BALANCE_STAY || best->verdict.kind == BALANCE_STAY;
    uint32_t n = b->found > 0 ? RESTING_WINDOWS : 1 + b->first_rest;
    b->n_resting = is_settled ? n : 0;
    b->found = verdict->kind == BALANCE_STAY ? mean_ratio(stay) : verdict->ratio_after;
}

static void decide(struct balance *b, struct arrange *a, const struct placement *in_force,
                   struct placement *out, struct balance_verdict *verdict)
{
    struct candidate stay = { .verdict.kind = BALANCE_STAY }, fresh = { .n_judged = 0 }, best;
    placement_init_like(&stay.placement, in_force);
    judge(b, a, &stay);
    if ((is_even_enough(b, &stay) || may_rest(b, &stay)) && !b->is_free) {
        say_why(b, &stay, &stay, verdict);
        placement_fini(&stay.placement);
        return;
    }
    best_against(b, a, &stay, &fresh, &best);
    go_on(b, a, &stay, &fresh, &best);
    say_why(b, &stay, best.verdict.kind == BALANCE_STAY ? &stay : &best, verdict);
    rest(b, &stay, &best, verdict);
    placement_copy(out, verdict->kind == BALANCE_STAY ? in_force : &best.placement);
    placement_fini(&best.placement);
    placement_fini(&fresh.placement);
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
    (void)ratio_of(b, p, load, p->share);
}

void balance_weigh(const struct balance *b, const struct placement *in_force,
                   struct placement *given, struct balance_verdict *verdict)
{
    const struct balance_policy *p = &b->policy;
    const double *load = forecast_belief(b->forecast)->mean;
    struct balance_verdict v = { 0 };
    struct plan plan;
    placement_keep_slots(given, in_force);
    v.kind = differs(given, in_force) ? BALANCE_GIVEN : BALANCE_STAY;
    placement_share_evenly(given);
    placement_keep_homes(given, in_force);
    plan_price(&plan, in_force, given, p->n_nodes, &p->costs);
    v.ratio_before = ratio_of(b, in_force, load, NULL);
    v.ratio_after = ratio_of(b, given, load, given->share);
    v.gain = p->horizon_windows * (v.ratio_before - v.ratio_after);
    v.cost = plan.seconds * (1 - p->hidden_share) / p->window_s;
    v.n_moves = plan.n_moves;
    v.n_rounds = plan.n_rounds;
    v.n_bytes = plan.n_bytes;
    snprintf(v.reason, sizeof v.reason, "%s: max/mean %.3f -> %.3f", balance_kind_name(v.kind),
             v.ratio_before, v.ratio_after);
    *verdict = v;
}
