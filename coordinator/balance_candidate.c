/* balance_candidate.c - how a placement that could be had does against the one in force
 *
 * It is judged on scenarios that its search has not seen, next to the placement in force on the
 * same ones, so that the gain has an error of its own. */
#include "coordinator/balance_parts.h"

#include <math.h>

void candidate_judge(const struct balance *b, struct arrange *a, struct candidate *c)
{
    c->n_judged = a->n_judges * SCENARIOS;
    if (!b->policy.is_known) {
        arrange_judge(a, &c->placement, c->ratio);
        return;
    }
    double ratio = balance_ratio(b, &c->placement, a->belief->mean, NULL);
    for (uint32_t k = 0; k < c->n_judged; k++)
        c->ratio[k] = (float)ratio;
}

double candidate_ratio(const struct candidate *c)
{
    double sum = 0;
    for (uint32_t k = 0; k < c->n_judged; k++)
        sum += (double)c->ratio[k];
    return sum / c->n_judged;
}

double candidate_measure(const struct balance *b, const struct candidate *stay, struct candidate *c)
{
    const struct balance_policy *p = &b->policy;
    struct balance_verdict *v = &c->verdict;
    double mean, square = 0;
    v->ratio_before = candidate_ratio(stay);
    v->ratio_after = candidate_ratio(c);
    mean = v->ratio_before - v->ratio_after;
    for (uint32_t k = 0; k < c->n_judged; k++) {
        double d = (double)stay->ratio[k] - (double)c->ratio[k] - mean;
        square += d * d;
    }
    v->gain = p->horizon_windows * mean;
    v->risk = p->horizon_windows * p->risk * sqrt(square / (c->n_judged - 1) / c->n_judged);
    return v->gain - v->risk;
}

void candidate_weigh(const struct balance *b, const struct candidate *stay, struct candidate *c)
{
    const struct balance_policy *p = &b->policy;
    struct balance_verdict *v = &c->verdict;
    struct plan plan;
    double most = candidate_measure(b, stay, c);
    plan_price(&plan, &stay->placement, &c->placement, p->n_nodes, &p->costs);
    v->cost = b->is_free ? 0 : plan.seconds * (1 - p->hidden_share) / p->window_s;
    v->n_moves = plan.n_moves;
    v->n_rounds = plan.n_rounds;
    v->n_bytes = plan.n_bytes;
    c->net = most - v->cost;
}

bool candidate_is_worth_it(const struct balance *b, const struct candidate *c)
{
    const struct balance_verdict *v = &c->verdict;
    double sure = (v->gain - v->risk) / b->policy.horizon_windows;
    if (b->is_free)
        return v->n_moves && c->net > 0;
    return v->n_moves && c->net > 0 && sure >= b->policy.min_gain * v->ratio_before;
}

bool candidate_is_even_enough(const struct balance *b, const struct candidate *c)
{
    return candidate_ratio(c) < 1 + b->policy.min_gain;
}
