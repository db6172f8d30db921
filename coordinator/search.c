/* search.c - swaps, moves and exchanges of copies, judged on all scenarios at once
 *
 * Shares are kept per scenario and re-filled where a change touched them, so a candidate is judged
 * by the devices it touches alone: two rows of 16 numbers for a swap. Always the device that costs
 * most is relieved; one that cannot be is set aside until something changed. Two hot experts on
 * one device cost more than their sum, because everybody waits for the slowest: so the maximum is
 * what counts, as the 8th power, whose slope is the maximum's as far as there is one. */
#include "coordinator/search.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/search_parts.h"

#define SWAP_PARTNERS 8  /* devices tried per step */
#define SWAP_PAIRS    24 /* pairs of slots tried per device, where there are more */
#define REPLICA_COST  8  /* looking at a copy exchange, in swaps */
#define GAIN_MIN      1e-5f /* of the objective: below is rounding */

static uint32_t draw(struct search *s, uint32_t n)
{
    s->random = scenario_hash(s->random);
    return (uint32_t)((s->random >> 32) * n >> 32);
}

static quad power8(quad x)
{
    x *= x;
    x *= x;
    return x * x;
}

static float row_cost(const struct search *s, const struct row *r, uint32_t device)
{
    quad sum = { 0 };
    for (int i = 0; i < QUADS; i++)
        sum += s->weight.q[i] * power8(r->q[i] * s->slowness[device]);
    return quad_sum(sum);
}

/* The objective is sum over scenarios of weight * (sum of 8th powers)^(1/8), made linear here. */
static void reweigh(struct search *s)
{
    struct row sum = { 0 };
    for (uint32_t g = 0; g < s->p->n_devices; g++)
        for (int i = 0; i < QUADS; i++)
            sum.q[i] += power8(s->device[g].q[i] * s->slowness[g]);
    for (uint32_t k = 0; k < SCENARIOS; k++) {
        float x = sum.q[k / 4][k % 4];
        s->weight.q[k / 4][k % 4] =
            x > 0 ? s->p->weight[k] * powf(x, -7.0f / 8) / 8 : 0;
    }
    for (uint32_t g = 0; g < s->p->n_devices; g++)
        s->cost[g] = row_cost(s, &s->device[g], g);
}

void search_ratios(const struct search *s, float out[SCENARIOS])
{
    struct row max = { 0 };
    for (uint32_t g = 0; g < s->p->n_devices; g++)
        for (int i = 0; i < QUADS; i++)
            max.q[i] = quad_max(max.q[i], s->device[g].q[i] * s->slowness[g]);
    memcpy(out, &max, sizeof max);
}

static double mean_ratio(const struct search *s)
{
    float ratio[SCENARIOS];
    double sum = 0;
    search_ratios(s, ratio);
    for (uint32_t k = 0; k < SCENARIOS; k++)
        sum += (double)s->p->weight[k] * (double)ratio[k];
    return sum;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void put(struct search *s, uint32_t slot, int32_t e)
{
    uint32_t g = slot / s->p->n_slots;
    int32_t before = s->at.expert[slot];
    if (before >= 0) {
        s->n_moves -= !search_slots_was_held(&s->at, g, before);
        search_slots_unlink(&s->at, slot);
    }
    if (e >= 0) {
        search_slots_link(&s->at, slot, e);
        s->n_moves += !search_slots_was_held(&s->at, g, e);
    }
    if (s->n_changes == s->change_cap) {
        s->change_cap = s->change_cap ? s->change_cap * 2 : 256;
        s->change = xrealloc(s->change, s->change_cap * sizeof *s->change);
    }
    s->change[s->n_changes++] = (struct change){ slot, before, e };
}

static void record_step(struct search *s)
{
    if (s->n_steps == s->step_cap) {
        s->step_cap = s->step_cap ? s->step_cap * 2 : 128;
        s->step = xrealloc(s->step, s->step_cap * sizeof *s->step);
        s->step_change = xrealloc(s->step_change, s->step_cap * sizeof *s->step_change);
    }
    s->step_change[s->n_steps] = s->n_changes;
    s->step[s->n_steps++] = (struct search_step){ mean_ratio(s), s->n_moves };
}

/* After a change on a device: its copied experts find new shares, and all they touch new costs. */
static void settle(struct search *s, uint32_t g)
{
    for (uint32_t c = g * s->p->n_slots; c < (g + 1) * s->p->n_slots; c++) {
        int32_t e = s->at.expert[c];
        if (e < 0 || s->at.n_copies[e] < 2)
            continue;
        search_fill(s, e);
        for (int32_t d = s->at.head[e]; d >= 0; d = s->at.next[d]) {
            uint32_t b = (uint32_t)d / s->p->n_slots;
            s->cost[b] = row_cost(s, &s->device[b], b);
        }
    }
    s->cost[g] = row_cost(s, &s->device[g], g);
}

struct candidate {
    float    delta;
    uint32_t a, b;   /* slots; a swap exchanges their experts */
    int32_t  expert; /* >= 0: slot b gets a copy of this instead */
};

static float moves_price(const struct search *s, uint32_t device, int32_t in, int32_t out)
{
    int more = !search_slots_was_held(&s->at, device, in);
    int less = !search_slots_was_held(&s->at, device, out);
    return s->p->move_price * (float)(more - less);
}

static float node_value(const struct search *s, int32_t e, int32_t without, int32_t with_slot)
{
    return search_node_value(s->p, &s->at, e, s->load[e].q[0][0], without, with_slot);
}

static void try_swap(struct search *s, uint32_t a, uint32_t b, struct candidate *best)
{
    uint32_t ga = a / s->p->n_slots, gb = b / s->p->n_slots;
    int32_t ea = s->at.expert[a], eb = s->at.expert[b];
    s->effort--;
    if (ea < 0 || ea == eb || s->at.is_fixed[a] || s->at.is_fixed[b])
        return;
    const struct row *la = &s->device[ga], *lb = &s->device[gb];
    quad sum = { 0 };
    for (int i = 0; i < QUADS; i++) {
        quad d = s->part[a].q[i] - s->part[b].q[i];
        sum += s->weight.q[i] * (power8((la->q[i] - d) * s->slowness[ga]) +
                                 power8((lb->q[i] + d) * s->slowness[gb]));
    }
    float delta = quad_sum(sum) - s->cost[ga] - s->cost[gb] + moves_price(s, ga, eb, ea) +
                  moves_price(s, gb, ea, eb);
    if (delta >= best->delta)
        return;
    if (search_slots_find(&s->at, gb, ea) >= 0 ||
        (eb >= 0 && search_slots_find(&s->at, ga, eb) >= 0))
        return;
    if (s->p->n_nodes > 1) {
        delta += node_value(s, ea, -1, -1) - node_value(s, ea, (int32_t)a, (int32_t)b);
        if (eb >= 0)
            delta += node_value(s, eb, -1, -1) - node_value(s, eb, (int32_t)b, (int32_t)a);
        if (delta >= best->delta)
            return;
    }
    *best = (struct candidate){ delta, a, b, -1 };
}

static float touched_cost(struct search *s, int32_t e, bool fresh)
{
    float sum = 0;
    for (int32_t c = s->at.head[e]; c >= 0; c = s->at.next[c]) {
        uint32_t g = (uint32_t)c / s->p->n_slots;
        sum += fresh ? row_cost(s, &s->device[g], g) - s->cost[g] : 0;
    }
    return sum;
}

/* Slot b (a spare copy of f, or empty) would hold e. The state is changed, judged, put back. */
static void try_replica(struct search *s, int32_t e, uint32_t b, struct candidate *best)
{
    enum { TOUCHED_MAX = 24 };
    uint32_t g = b / s->p->n_slots, n = 0, slot[TOUCHED_MAX];
    struct row part[TOUCHED_MAX], device[TOUCHED_MAX];
    int32_t f = s->at.expert[b];
    s->effort -= REPLICA_COST;
    if (s->at.is_fixed[b] || e == f || (f >= 0 && s->at.n_copies[f] < 2) ||
        search_slots_find(&s->at, g, e) >= 0)
        return;
    if (s->at.n_copies[e] + (f >= 0 ? s->at.n_copies[f] : 0) + 1 > TOUCHED_MAX)
        return; /* an expert with so many copies is levelled by every other step */
    float delta = moves_price(s, g, e, f) + node_value(s, e, -1, -1) -
                  node_value(s, e, -1, (int32_t)b);
    if (f >= 0)
        delta += node_value(s, f, -1, -1) - node_value(s, f, (int32_t)b, -1);
    for (int32_t c = s->at.head[e]; c >= 0; c = s->at.next[c])
        slot[n++] = (uint32_t)c;
    for (int32_t c = f >= 0 ? s->at.head[f] : -1; c >= 0; c = s->at.next[c])
        slot[n++] = (uint32_t)c;
    if (f < 0)
        slot[n++] = b;
    for (uint32_t i = 0; i < n; i++) {
        part[i] = s->part[slot[i]];
        device[i] = s->device[slot[i] / s->p->n_slots];
    }
    const struct row zero = { 0 };
    if (f >= 0) {
        /* Its part joins a sister's before it is filled anew: the sum must stay f's load. */
        search_add_part(s, b, -1);
        search_slots_unlink(&s->at, b);
        uint32_t sister = (uint32_t)s->at.head[f];
        for (int i = 0; i < QUADS; i++) {
            s->part[sister].q[i] += s->part[b].q[i];
            s->device[sister / s->p->n_slots].q[i] += s->part[b].q[i];
        }
        s->part[b] = zero;
        search_fill(s, f);
    }
    search_slots_link(&s->at, b, e);
    s->part[b] = zero;
    search_fill(s, e);
    /* Devices that hold both e and f would be counted twice. */
    delta += touched_cost(s, e, true);
    for (int32_t c = f >= 0 ? s->at.head[f] : -1; c >= 0; c = s->at.next[c]) {
        uint32_t d = (uint32_t)c / s->p->n_slots;
        if (search_slots_find(&s->at, d, e) < 0)
            delta += row_cost(s, &s->device[d], d) - s->cost[d];
    }
    search_slots_unlink(&s->at, b);
    if (f >= 0)
        search_slots_link(&s->at, b, f);
    for (uint32_t i = 0; i < n; i++) {
        s->part[slot[i]] = part[i];
        s->device[slot[i] / s->p->n_slots] = device[i];
    }
    if (delta < best->delta)
        *best = (struct candidate){ delta, b, b, e };
}

static void apply(struct search *s, const struct candidate *c)
{
    uint32_t ga = c->a / s->p->n_slots, gb = c->b / s->p->n_slots;
    int32_t ea = s->at.expert[c->a], eb = s->at.expert[c->b];
    const struct row zero = { 0 };
    search_add_part(s, c->b, -1);
    if (c->expert >= 0) {
        struct row orphan = s->part[c->b];
        put(s, c->b, c->expert);
        s->part[c->b] = zero;
        if (eb >= 0) {
            uint32_t sister = (uint32_t)s->at.head[eb];
            for (int i = 0; i < QUADS; i++) {
                s->part[sister].q[i] += orphan.q[i];
                s->device[sister / s->p->n_slots].q[i] += orphan.q[i];
            }
            settle(s, sister / s->p->n_slots);
        }
    } else {
        struct row t = s->part[c->a];
        search_add_part(s, c->a, -1);
        put(s, c->b, PLACEMENT_EMPTY);
        put(s, c->a, eb);
        put(s, c->b, ea);
        s->part[c->a] = s->part[c->b];
        s->part[c->b] = t;
        search_add_part(s, c->a, 1);
        search_add_part(s, c->b, 1);
        settle(s, ga);
    }
    settle(s, gb);
    record_step(s);
}

static uint32_t costliest(const struct search *s)
{
    uint32_t best = s->p->n_devices;
    for (uint32_t g = 0; g < s->p->n_devices; g++)
        if (s->aside[g] != s->n_steps && (best == s->p->n_devices || s->cost[g] > s->cost[best]))
            best = g;
    return best;
}

static void try_device(struct search *s, uint32_t a, uint32_t b, struct candidate *best)
{
    uint32_t n = s->p->n_slots;
    if (n * n <= SWAP_PAIRS)
        for (uint32_t i = 0; i < n * n; i++)
            try_swap(s, a * n + i / n, b * n + i % n, best);
    else
        for (uint32_t i = 0; i < SWAP_PAIRS; i++)
            try_swap(s, a * n + draw(s, n), b * n + draw(s, n), best);
    /* A copy of something on a, in the place of a copy on b that may go. */
    int32_t e = s->at.expert[a * n + draw(s, n)];
    for (uint32_t i = draw(s, n), tried = 0; tried < n && e >= 0; tried++, i = (i + 1) % n) {
        int32_t f = s->at.expert[b * n + i];
        if (!s->at.is_fixed[b * n + i] && (f < 0 || s->at.n_copies[f] > 1)) {
            try_replica(s, e, b * n + i, best);
            return;
        }
    }
}

void search_run(struct search *s, uint32_t n_candidates, float heat)
{
    uint32_t n = s->p->n_devices, since_reweigh = 0;
    uint32_t n_tried = n - 1 < SWAP_PARTNERS ? n - 1 : SWAP_PARTNERS;
    if (n < 2)
        return;
    memset(s->aside, 0, n * sizeof *s->aside);
    for (s->effort = n_candidates; s->effort > 0;) {
        uint32_t a = costliest(s), first = draw(s, n);
        if (a == n && heat <= 0)
            return;
        if (a == n) {
            memset(s->aside, 0, n * sizeof *s->aside);
            continue;
        }
        float limit = -GAIN_MIN + heat * (float)draw(s, 1024) / 1024;
        struct candidate best = { .delta = limit };
        for (uint32_t i = 0; i < n_tried; i++) {
            uint32_t b = n_tried == n - 1 ? (a + 1 + i) % n : (first + i * (n / n_tried)) % n;
            if (b != a)
                try_device(s, a, b, &best);
        }
        if (best.delta >= limit) {
            s->aside[a] = s->n_steps;
            continue;
        }
        apply(s, &best);
        if (++since_reweigh == 8) {
            reweigh(s);
            since_reweigh = 0;
        }
    }
}

/* ---- life ------------------------------------------------------------------------------------ */

void search_redraw(struct search *s, const float *load)
{
    memcpy(s->load, load, s->p->n_experts * sizeof *s->load);
    search_refill(s, 3);
    reweigh(s);
}

void search_restart(struct search *s, const struct placement *p, const float *load)
{
    const struct search_problem *problem = s->p;
    s->start = p;
    s->random = problem->seed;
    s->n_moves = s->n_changes = s->n_steps = 0;
    search_slots_start(&s->at, p, p, problem->keep_homes);
    for (uint32_t g = 0; g < p->n_devices; g++)
        s->slowness[g] = problem->speed ? (float)(1 / problem->speed[g]) : 1;
    search_redraw(s, load);
    record_step(s);
}

struct search *search_create(const struct search_problem *problem, const struct placement *p,
                             const float *load)
{
    assert(problem->n_nodes && problem->n_devices % problem->n_nodes == 0);
    struct search *s = xcalloc(1, sizeof *s);
    s->p = problem;
    search_slots_init(&s->at, p);
    s->load = xcalloc(p->n_experts, sizeof *s->load);
    s->part = xcalloc(s->at.n_total, sizeof *s->part);
    s->device = xcalloc(p->n_devices, sizeof *s->device);
    s->slowness = xcalloc(p->n_devices, sizeof *s->slowness);
    s->cost = xcalloc(p->n_devices, sizeof *s->cost);
    s->lane = xcalloc(p->n_devices, sizeof *s->lane);
    s->aside = xcalloc(p->n_devices, sizeof *s->aside);
    search_restart(s, p, load);
    return s;
}

void search_destroy(struct search *s)
{
    if (!s)
        return;
    void *parts[] = { s->load, s->part, s->device, s->slowness, s->cost, s->lane, s->aside,
                      s->change, s->step, s->step_change };
    search_slots_fini(&s->at);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(s);
}

uint32_t search_n_steps(const struct search *s)
{
    return s->n_steps;
}

const struct search_step *search_steps(const struct search *s)
{
    return s->step;
}

void search_placement(const struct search *s, uint32_t step, struct placement *out)
{
    assert(step < s->n_steps);
    memcpy(out->expert, s->at.expert, s->at.n_total * sizeof *out->expert);
    for (uint32_t i = s->n_changes; i-- > s->step_change[step];)
        out->expert[s->change[i].slot] = s->change[i].before;
    placement_keep_slots(out, s->start);
    placement_share_evenly(out);
    placement_keep_homes(out, s->start);
}
