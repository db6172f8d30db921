/* balance_search.c - the best candidate against staying
 *
 * Three kinds stand against it. What moves homes must be clearly better than what only adds copies,
 * which cannot do harm, as far as loads drift: how they do may be modelled wrongly. Where windows
 * differ by the noise of counting few tokens alone, the model is right. */
#include "coordinator/balance_parts.h"

#include <string.h>

#define HOME_MARGIN 0.05 /* of the ratio, that a plan which moves homes must win by in a drift */
#define CHEAP_MOVES 0.05 /* of what a plan wins */
#define REPEATS_MAX 4    /* a plan is improved until nothing is left to propose */

bool balance_differs(const struct placement *p, const struct placement *from)
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
    if (!balance_differs(p, from))
        return false;
    candidate_judge(b, a, c);
    if (kind == BALANCE_FRESH) {
        *fresh = *c;
        placement_init_like(&fresh->placement, p);
    }
    return true;
}

static bool speeds_differ(const struct balance *b)
{
    for (uint32_t g = 1; b->policy.speed && g < b->n_devices; g++)
        if (b->policy.speed[g] != b->policy.speed[0])
            return true;
    return false;
}

/* Names and slots as near to `from` as can be; worth the same. */
static void settle(const struct balance *b, const struct placement *from, struct candidate *c)
{
    struct placement *p = &c->placement;
    if (c->verdict.kind == BALANCE_FRESH && !speeds_differ(b)) {
        plan_align(p, from, b->policy.n_nodes);
        return;
    }
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

/* The best of all kinds against `stay`; a copy of it if none is better. */
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
            margin = HOME_MARGIN * a->belief->drift * best->verdict.ratio_after *
                     b->policy.horizon_windows;
        if (!make(b, a, &stay->placement, kind, fresh, &c)) {
            placement_fini(&c.placement);
            continue;
        }
        /* Names and price take longer than the search; most candidates cannot win any more. */
        c.net = candidate_measure(b, stay, &c);
        if (c.net > best->net + margin) {
            settle(b, &stay->placement, &c);
            candidate_weigh(b, stay, &c);
        }
        if (c.net > best->net + margin) {
            placement_fini(&best->placement);
            *best = c;
        } else {
            placement_fini(&c.placement);
        }
    }
}

/* Goes on from the best as if it were in force, until nothing is left that would be proposed then:
 * so the plan of a plan is empty. */
static void go_on(struct balance *b, struct arrange *a, const struct candidate *stay,
                  struct candidate *fresh, struct candidate *best)
{
    bool is_free = b->is_free;
    for (uint32_t i = 0; i < REPEATS_MAX && (is_free || candidate_is_worth_it(b, best)); i++) {
        struct candidate next;
        /* From what is placed anew one in two hundred goes on. */
        if (candidate_is_even_enough(b, best) ||
            (b->policy.is_brief && best->verdict.kind == BALANCE_FRESH))
            return;
        b->is_free = false;
        best_against(b, a, best, fresh, &next);
        bool goes_on = candidate_is_worth_it(b, &next);
        b->is_free = is_free;
        if (goes_on)
            candidate_weigh(b, stay, &next);
        if (goes_on && candidate_is_worth_it(b, &next)) {
            placement_fini(&best->placement);
            *best = next;
        } else {
            placement_fini(&next.placement);
            return;
        }
    }
}

void balance_search(struct balance *b, struct arrange *a, const struct candidate *stay,
                    struct candidate *best)
{
    struct candidate fresh = { .n_judged = 0 };
    best_against(b, a, stay, &fresh, best);
    go_on(b, a, stay, &fresh, best);
    placement_fini(&fresh.placement);
}
