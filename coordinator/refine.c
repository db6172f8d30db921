/* refine - few changes, each tried out: made, shares found anew around it, then kept or taken back
 *
 * The objective is the heaviest device's time, averaged over 64 scenarios, as the 8th norm over
 * devices. Its slope is a price of each device's time in each scenario: dear is what is the
 * heaviest in many of them. Loads times prices tell what any change would win if it were small;
 * the best few of a dear device are tried out. */
#include "coordinator/refine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/refine_parts.h"

#define OFFERS    4     /* of a device that are tried out before another one's turn */
#define GAIN_MIN  1e-6f /* of the objective: below is rounding */
#define IN_VAIN   0.3f  /* a device's chance of a turn after one in vain */

/* Exchanges the experts of two slots, or puts a copy of a's in the place of what b holds. */
struct offer {
    float    worth; /* change of the objective, were it small */
    uint32_t a, b;
    bool     is_copy;
};

static uint32_t draw(struct refine *r, uint32_t n)
{
    r->random = scenario_hash(r->random);
    return (uint32_t)((r->random >> 32) * n >> 32);
}

static float dot(const struct wide *a, const struct wide *b)
{
    quad sum = { 0 };
    for (int i = 0; i < WIDE; i++)
        sum += a->q[i] * b->q[i];
    return quad_sum(sum);
}

/* ---- prices ---------------------------------------------------------------------------------- */

static quad power7(quad x)
{
    quad x2 = x * x;
    return x2 * x2 * x2 * x;
}

static void root8(const struct wide *x, struct wide *out)
{
    float f[REFINE_SCENARIOS];
    memcpy(f, x, sizeof f);
    for (int k = 0; k < REFINE_SCENARIOS; k++)
        f[k] = sqrtf(sqrtf(sqrtf(f[k])));
    memcpy(out, f, sizeof f);
}

/* Of the heaviest device's time. */
static quad scaled(const struct refine *r, const struct wide *load, uint32_t g, int i)
{
    return load->q[i] * r->slowness[g] * r->scale.q[i];
}

static void reprice(struct refine *r)
{
    uint32_t n = r->p->n_devices;
    const quad one = { 1, 1, 1, 1 }, tiny = one * 1e-6f;
    struct wide max = { 0 };
    for (uint32_t g = 0; g < n; g++)
        for (int i = 0; i < WIDE; i++)
            max.q[i] = quad_max(max.q[i], r->device[g].q[i] * r->slowness[g]);
    r->sum = (struct wide){ 0 };
    for (int i = 0; i < WIDE; i++)
        r->scale.q[i] = one / quad_max(max.q[i], tiny);
    for (uint32_t g = 0; g < n; g++)
        for (int i = 0; i < WIDE; i++) {
            quad x = scaled(r, &r->device[g], g, i), y = power7(x);
            r->price[g].q[i] = y;
            r->sum.q[i] += x * y;
        }
    root8(&r->sum, &r->norm);
    struct wide per;
    for (int i = 0; i < WIDE; i++) /* norm / sum: to the power of -7 */
        per.q[i] = r->norm.q[i] / r->sum.q[i] / (float)REFINE_SCENARIOS;
    for (uint32_t g = 0; g < n; g++) {
        quad turn = { 0 };
        for (int i = 0; i < WIDE; i++) {
            r->price[g].q[i] *= per.q[i] * r->slowness[g];
            turn += r->price[g].q[i] * r->device[g].q[i] * r->scale.q[i];
        }
        r->turn[g] = quad_sum(turn);
    }
}

/* ---- a change that is tried out -------------------------------------------------------------- */

static float measure(const struct refine *r)
{
    struct wide sum = r->sum, norm;
    quad all = { 0 };
    for (uint32_t j = 0; j < r->n_devices_kept; j++) {
        uint32_t g = r->device_kept[j];
        for (int i = 0; i < WIDE; i++) {
            quad x = scaled(r, &r->device[g], g, i), was = scaled(r, &r->device_was[j], g, i);
            sum.q[i] += x * power7(x) - was * power7(was);
        }
    }
    root8(&sum, &norm);
    for (int i = 0; i < WIDE; i++)
        all += (norm.q[i] - r->norm.q[i]) / r->scale.q[i];
    return quad_sum(all) / REFINE_SCENARIOS;
}

/* What moves cost, less what copies on several nodes are worth, of the experts in two slots. */
static float price_of(const struct refine *r, const struct offer *o, int32_t ea, int32_t eb)
{
    uint32_t ga = search_slots_device(&r->at, o->a), gb = search_slots_device(&r->at, o->b);
    int n_moves = (int)!search_slots_was_held(&r->at, gb, r->at.expert[o->b]) +
                  (int)!search_slots_was_held(&r->at, ga, r->at.expert[o->a]);
    float value = search_node_value(r->p, &r->at, ea, r->load[ea].q[0][0], -1, -1);
    if (eb >= 0)
        value += search_node_value(r->p, &r->at, eb, r->load[eb].q[0][0], -1, -1);
    return r->p->move_price * (float)n_moves - value;
}

static void swap(struct refine *r, uint32_t a, uint32_t b)
{
    int32_t ea = r->at.expert[a], eb = r->at.expert[b];
    refine_keep_slot(r, a);
    refine_keep_slot(r, b);
    refine_add_part(r, a, -1);
    refine_add_part(r, b, -1);
    struct wide t = r->part[a];
    r->part[a] = r->part[b];
    r->part[b] = t;
    search_slots_unlink(&r->at, a);
    if (eb >= 0) {
        search_slots_unlink(&r->at, b);
        search_slots_link(&r->at, a, eb);
    }
    search_slots_link(&r->at, b, ea);
    refine_add_part(r, a, 1);
    refine_add_part(r, b, 1);
}

/* What b served goes to another copy of its expert until shares are found. */
static void copy(struct refine *r, uint32_t a, uint32_t b)
{
    int32_t eb = r->at.expert[b];
    refine_keep_slot(r, b);
    if (eb >= 0) {
        refine_add_part(r, b, -1);
        search_slots_unlink(&r->at, b);
        uint32_t other = (uint32_t)r->at.head[eb];
        refine_keep_slot(r, other);
        refine_keep_device(r, search_slots_device(&r->at, other));
        for (int i = 0; i < WIDE; i++) {
            r->part[other].q[i] += r->part[b].q[i];
            r->device[search_slots_device(&r->at, other)].q[i] += r->part[b].q[i];
        }
    }
    r->part[b] = (struct wide){ 0 };
    search_slots_link(&r->at, b, r->at.expert[a]);
}

static void undo(struct refine *r, const struct offer *o, int32_t ea, int32_t eb)
{
    search_slots_unlink(&r->at, o->b);
    if (!o->is_copy) {
        if (eb >= 0)
            search_slots_unlink(&r->at, o->a);
        search_slots_link(&r->at, o->a, ea);
    }
    if (eb >= 0)
        search_slots_link(&r->at, o->b, eb);
    refine_take_back(r);
}

/* Whether it was kept. */
static bool try_out(struct refine *r, const struct offer *o)
{
    int32_t ea = r->at.expert[o->a], eb = r->at.expert[o->b];
    uint32_t ga = search_slots_device(&r->at, o->a), gb = search_slots_device(&r->at, o->b);
    float price = -price_of(r, o, ea, eb);
    if (o->is_copy)
        copy(r, o->a, o->b);
    else
        swap(r, o->a, o->b);
    price += price_of(r, o, ea, eb);
    if (o->is_copy && eb >= 0)
        for (int32_t c = r->at.head[eb]; c >= 0; c = r->at.next[c])
            refine_fill_device(r, search_slots_device(&r->at, (uint32_t)c), false);
    refine_fill_device(r, gb, false);
    refine_fill_device(r, ga, false);
    refine_fill_device(r, gb, true);
    if (!(measure(r) + price < -GAIN_MIN)) {
        undo(r, o, ea, eb);
        return false;
    }
    refine_forget(r);
    reprice(r);
    return true;
}

/* ---- offers ---------------------------------------------------------------------------------- */

struct offers {
    struct offer at[OFFERS]; /* the best first */
    uint32_t n;
};

static void keep_best(struct offers *l, struct offer o)
{
    uint32_t i = l->n < OFFERS ? l->n++ : l->n - 1;
    for (; i > 0 && l->at[i - 1].worth > o.worth; i--)
        l->at[i] = l->at[i - 1];
    l->at[i] = o;
}

static bool is_wanted(const struct offers *l, float worth)
{
    return worth < (l->n < OFFERS ? 0 : l->at[OFFERS - 1].worth);
}

static float moves_price(const struct refine *r, uint32_t device, int32_t in, int32_t out)
{
    return r->p->move_price * (float)((int)!search_slots_was_held(&r->at, device, in) -
                                      (int)!search_slots_was_held(&r->at, device, out));
}

/* Half of a part goes where time is cheaper, scenario by scenario. */
static float copy_worth(const struct refine *r, uint32_t a, uint32_t to)
{
    const struct wide *here = &r->price[search_slots_device(&r->at, a)], *there = &r->price[to];
    const quad zero = { 0 };
    quad sum = { 0 };
    for (int i = 0; i < WIDE; i++)
        sum += r->part[a].q[i] * quad_max(here->q[i] - there->q[i], zero);
    return -0.5f * quad_sum(sum);
}

/* What b's part costs more with another copy of its expert. */
static float loss_without(const struct refine *r, uint32_t b, float own)
{
    int32_t e = r->at.expert[b];
    if (e < 0)
        return 0;
    uint32_t other = (uint32_t)r->at.head[e];
    other = other == b ? (uint32_t)r->at.next[b] : other;
    return dot(&r->price[search_slots_device(&r->at, other)], &r->part[b]) - own;
}

/* Between a device, whose parts' values are known, and one slot of another. */
static void offer_slot(struct refine *r, uint32_t g, uint32_t b, struct offers *out)
{
    uint32_t n = r->p->n_slots, h = search_slots_device(&r->at, b);
    int32_t eb = r->at.expert[b];
    bool may_go = eb < 0 || r->at.n_copies[eb] > 1;
    float own = dot(&r->price[h], &r->part[b]), here = dot(&r->price[g], &r->part[b]) - own;
    float loss = may_go ? loss_without(r, b, own) : 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = g * n + i;
        int32_t ea = r->at.expert[a];
        if (ea < 0 || ea == eb)
            continue;
        const float *value = r->value + (size_t)i * r->p->n_devices;
        float worth = value[h] - value[g] + here + moves_price(r, g, eb, ea) +
                      moves_price(r, h, ea, eb);
        if (is_wanted(out, worth) && !r->at.is_fixed[a] && search_slots_find(&r->at, h, ea) < 0 &&
            (eb < 0 || search_slots_find(&r->at, g, eb) < 0))
            keep_best(out, (struct offer){ worth, a, b, false });
        if (!may_go || draw(r, 2)) /* half of them, so that others have a turn */
            continue;
        worth = loss + moves_price(r, h, ea, eb) + copy_worth(r, a, h);
        if (is_wanted(out, worth) && search_slots_find(&r->at, h, ea) < 0)
            keep_best(out, (struct offer){ worth, a, b, true });
    }
}

static void list_offers(struct refine *r, uint32_t g, struct offers *out)
{
    uint32_t n = r->p->n_slots;
    out->n = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < r->p->n_devices; h++)
            r->value[(size_t)i * r->p->n_devices + h] = dot(&r->price[h], &r->part[g * n + i]);
    for (uint32_t b = 0; b < r->at.n_total; b++)
        if (search_slots_device(&r->at, b) != g && !r->at.is_fixed[b])
            offer_slot(r, g, b, out);
}

/* Dear devices more often, those of which nothing was kept lately less so. */
static uint32_t choose_device(struct refine *r)
{
    float sum = 0;
    for (uint32_t g = 0; g < r->p->n_devices; g++)
        sum += r->turn[g] * r->chance[g];
    float x = sum * (float)draw(r, 1 << 20) / (1 << 20);
    for (uint32_t g = 0; g < r->p->n_devices; g++) {
        x -= r->turn[g] * r->chance[g];
        if (x < 0)
            return g;
    }
    return draw(r, r->p->n_devices);
}

static void improve(struct refine *r, uint32_t n_tries)
{
    struct offers offers;
    for (uint32_t g = 0; g < r->p->n_devices; g++)
        r->chance[g] = 1;
    while (n_tries) {
        uint32_t g = choose_device(r);
        bool is_kept = false;
        list_offers(r, g, &offers);
        n_tries -= offers.n == 0;
        for (uint32_t i = 0; i < offers.n && n_tries && !is_kept; i++, n_tries--)
            is_kept = try_out(r, &offers.at[i]);
        r->chance[g] *= IN_VAIN;
        for (uint32_t h = 0; is_kept && h < r->p->n_devices; h++)
            r->chance[h] = 1;
    }
}

/* ---- life ------------------------------------------------------------------------------------ */

static void init(struct refine *r, const struct search_problem *problem,
                 const struct placement *in_force, const float *load, const struct placement *p)
{
    uint32_t n_total = placement_n_total(p), n_devices = p->n_devices;
    *r = (struct refine){ .p = problem, .random = problem->seed };
    search_slots_init(&r->at, p);
    search_slots_start(&r->at, p, in_force, problem->keep_homes);
    r->load = xcalloc(p->n_experts, sizeof *r->load);
    r->part = xcalloc(n_total, sizeof *r->part);
    r->slot_was = xcalloc(n_total, sizeof *r->slot_was);
    r->slot_kept = xcalloc(n_total, sizeof *r->slot_kept);
    r->slot_is_kept = xcalloc(n_total, sizeof *r->slot_is_kept);
    r->device = xcalloc(n_devices, sizeof *r->device);
    r->device_was = xcalloc(n_devices, sizeof *r->device_was);
    r->device_kept = xcalloc(n_devices, sizeof *r->device_kept);
    r->device_is_kept = xcalloc(n_devices, sizeof *r->device_is_kept);
    r->price = xcalloc(n_devices, sizeof *r->price);
    r->slowness = xcalloc(n_devices, sizeof *r->slowness);
    r->turn = xcalloc(n_devices, sizeof *r->turn);
    r->chance = xcalloc(n_devices, sizeof *r->chance);
    r->value = xcalloc(n_total, sizeof *r->value);
    r->lane = xcalloc(n_devices, sizeof *r->lane);
    for (uint32_t g = 0; g < n_devices; g++)
        r->slowness[g] = problem->speed ? (float)(1 / problem->speed[g]) : 1;
    for (uint32_t i = 0; i < REFINE_DRAWS; i++)
        for (uint32_t e = 0; e < p->n_experts; e++)
            memcpy(&r->load[e].q[i * QUADS], load + ((size_t)i * p->n_experts + e) * SCENARIOS,
                   SCENARIOS * sizeof *load);
    refine_fill_all(r);
    reprice(r);
}

static void fini(struct refine *r)
{
    void *parts[] = { r->load, r->part, r->slot_was, r->slot_kept, r->slot_is_kept, r->device,
                      r->device_was, r->device_kept, r->device_is_kept, r->price, r->slowness,
                      r->turn, r->chance, r->value, r->lane };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    search_slots_fini(&r->at);
}

void refine(const struct search_problem *problem, const struct placement *in_force,
            const float *load, uint32_t n_tries, struct placement *p)
{
    struct refine r;
    if (p->n_devices < 2 || !n_tries)
        return;
    init(&r, problem, in_force, load, p);
    improve(&r, n_tries);
    memcpy(p->expert, r.at.expert, r.at.n_total * sizeof *p->expert);
    fini(&r);
    placement_keep_slots(p, in_force);
    placement_share_evenly(p);
    placement_keep_homes(p, in_force);
}
