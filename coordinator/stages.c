/* stages.c - which moves of a plan go first, and how many at one step boundary
 *
 * A slot may take what is new once the expert whose home it is has its new home: so slots follow
 * one another in chains, which are taken from their ends, one slot at a time, and in cycles, which
 * are taken at once. Where a cycle comes to a device twice, the two arrivals change slots, which
 * makes two cycles of it: so a device sends and receives one expert in each. */
#include "coordinator/stages.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define NONE UINT32_MAX

/* What is taken at once. */
struct unit {
    uint32_t layer, first, n; /* slots, in the layer's list */
    uint32_t then;            /* the unit that may be taken after this one, or NONE */
    bool     is_ready, is_taken;
    double   score;
};

struct chains {
    const struct stages_layer *l;
    uint32_t *next;       /* (slots) the one that must not be later, or NONE */
    bool     *is_node;    /* (slots) something changes */
    bool     *is_led;     /* (slots) it is the next of one */
    uint32_t *list;       /* (slots) of units, one after the other */
    uint32_t  n_listed;
    double   *home;       /* (experts) load of the home at present */
    double   *copy;       /* (slots) of another copy */
    double   *device;     /* (devices) all of it */
    double    mean;       /* over devices */
};

struct stages {
    struct chains *chains;     /* (n_layers) */
    uint32_t  n_layers, n_devices;
    struct unit *unit;
    uint32_t  n_units, n_alloc, n_left;
    uint32_t  now;             /* the stage that is filled */
    uint64_t *bytes;           /* (2, devices) sent and received in this stage */
    uint32_t *moves;           /* (n_layers, 2, devices) */
    struct stages_budget budget;
};

/* ---- chains and cycles ----------------------------------------------------------------------- */

static bool has_home_in(const struct placement *p, uint32_t slot)
{
    return p->expert[slot] != PLACEMENT_EMPTY && p->home[p->expert[slot]] == slot;
}

static void link_slots(struct chains *c)
{
    const struct placement *from = c->l->from, *to = c->l->to;
    for (uint32_t s = 0; s < placement_n_total(to); s++) {
        bool changes = from->expert[s] != to->expert[s];
        c->is_node[s] = changes || has_home_in(to, s) != has_home_in(from, s);
        c->next[s] = changes && has_home_in(from, s) ? to->home[from->expert[s]] : NONE;
    }
    for (uint32_t s = 0; s < placement_n_total(to); s++)
        if (c->next[s] != NONE)
            c->is_led[c->next[s]] = true;
}

/* What slots a and b of one device would take change places. */
static void swap_arrivals(struct placement *to, uint32_t a, uint32_t b)
{
    int32_t x = to->expert[a], y = to->expert[b];
    double share = to->share[a];
    to->expert[a] = y;
    to->expert[b] = x;
    to->share[a] = to->share[b];
    to->share[b] = share;
    to->home[x] = b;
    to->home[y] = a;
}

static uint32_t add_unit(struct stages *st, uint32_t layer, const uint32_t *slots, uint32_t n,
                         uint32_t after)
{
    struct chains *c = &st->chains[layer];
    if (st->n_units == st->n_alloc) {
        st->n_alloc = st->n_alloc ? 2 * st->n_alloc : 256;
        st->unit = xrealloc(st->unit, st->n_alloc * sizeof *st->unit);
    }
    st->unit[st->n_units] = (struct unit){.layer = layer, .first = c->n_listed, .n = n,
                                          .then = NONE, .is_ready = after == NONE};
    if (after != NONE)
        st->unit[after].then = st->n_units;
    for (uint32_t i = 0; i < n; i++)
        c->list[c->n_listed++] = slots[i];
    return st->n_units++;
}

/* From the slot that none leads to; its end is taken first. */
static void add_chain(struct stages *st, uint32_t layer, uint32_t first, uint32_t *path)
{
    struct chains *c = &st->chains[layer];
    uint32_t n = 0, after = NONE;
    for (uint32_t s = first; s != NONE; s = c->next[s]) {
        path[n++] = s;
        c->is_node[s] = false;
    }
    while (n-- > 0)
        after = add_unit(st, layer, &path[n], 1, after);
}

static void add_cycle(struct stages *st, uint32_t layer, uint32_t first, uint32_t *path,
                      uint32_t *at)
{
    struct chains *c = &st->chains[layer];
    uint32_t n = 0, n_slots = c->l->to->n_slots;
    memset(at, 0xff, st->n_devices * sizeof *at); /* where in path a device is: nowhere */
    for (uint32_t s = first; c->is_node[s]; s = c->next[s]) {
        uint32_t g = s / n_slots, i = at[g];
        c->is_node[s] = false;
        if (i != NONE) {
            swap_arrivals(c->l->to, path[i], s);
            c->next[path[n - 1]] = path[i];
            add_unit(st, layer, &path[i], n - i, NONE);
            for (uint32_t k = i; k < n; k++)
                at[path[k] / n_slots] = NONE;
            n = i;
        }
        at[g] = n;
        path[n++] = s;
    }
    add_unit(st, layer, path, n, NONE);
}

static void find_units(struct stages *st, uint32_t layer)
{
    struct chains *c = &st->chains[layer];
    uint32_t n_total = placement_n_total(c->l->to);
    uint32_t *path = xcalloc(n_total, sizeof *path), *at = xcalloc(st->n_devices, sizeof *at);
    link_slots(c);
    for (uint32_t s = 0; s < n_total; s++)
        if (c->is_node[s] && !c->is_led[s])
            add_chain(st, layer, s, path);
    for (uint32_t s = 0; s < n_total; s++)
        if (c->is_node[s])
            add_cycle(st, layer, s, path, at);
    free(at);
    free(path);
}

/* ---- what a unit wins and costs -------------------------------------------------------------- */

static void spread_load(struct chains *c)
{
    const struct placement *from = c->l->from;
    struct placement even;
    placement_init_like(&even, from);
    placement_share_evenly(&even);
    c->mean = 1e-9; /* of no load at all */
    for (uint32_t s = 0; s < placement_n_total(from); s++) {
        int32_t e = from->expert[s];
        double load = e == PLACEMENT_EMPTY ? 0 : even.share[s] * c->l->load[e];
        bool is_home = has_home_in(from, s);
        c->copy[s] = is_home ? 0 : load;
        if (is_home)
            c->home[e] = load;
        c->device[s / from->n_slots] += load;
        c->mean += load / from->n_devices;
    }
    placement_fini(&even);
}

static uint32_t home_device(const struct chains *c, int32_t e)
{
    const struct placement *to = c->l->to;
    bool has_moved = c->l->stage[to->home[e]] != NONE;
    return (has_moved ? to->home[e] : c->l->from->home[e]) / to->n_slots;
}

/* Load that goes from one device to another. */
struct shift {
    uint32_t from, to;
    double   load;
};

/* What taking slot s shifts: a new home has all that the old one had, a copy its share of what the
 * home has, and a copy that goes leaves that to the home. Returns how many, at most 2. */
static uint32_t shifts_of(const struct chains *c, uint32_t s, struct shift out[2])
{
    const struct placement *from = c->l->from, *to = c->l->to;
    int32_t e = to->expert[s], old = from->expert[s];
    uint32_t device = s / to->n_slots, n = 0;
    if (e != old && c->copy[s] > 0)
        out[n++] = (struct shift){device, home_device(c, old), c->copy[s]};
    if (e != PLACEMENT_EMPTY && to->home[e] == s)
        out[n++] = (struct shift){home_device(c, e), device, c->home[e]};
    else if (e != PLACEMENT_EMPTY && e != old)
        out[n++] = (struct shift){home_device(c, e), device,
                                  fmin(to->share[s] * c->l->load[e], c->home[e])};
    return n;
}

/* The heaviest device counts, and those that are next. */
static double pressure(const struct chains *c, double load)
{
    double x = load / c->mean;
    return x * x * x * x;
}

/* Returns what the sum of the devices' pressures grows by. */
static double apply(struct chains *c, const struct shift *x)
{
    double *a = &c->device[x->from], *b = &c->device[x->to];
    double before = pressure(c, *a) + pressure(c, *b);
    if (x->from == x->to)
        return 0;
    *a -= x->load;
    *b += x->load;
    return pressure(c, *a) + pressure(c, *b) - before;
}

static void take_slot(struct chains *c, uint32_t s, uint32_t stage)
{
    const struct placement *from = c->l->from, *to = c->l->to;
    int32_t e = to->expert[s], old = from->expert[s];
    struct shift x[2];
    uint32_t n = shifts_of(c, s, x);
    for (uint32_t i = 0; i < n; i++)
        apply(c, &x[i]);
    if (old != PLACEMENT_EMPTY)
        c->home[old] += c->copy[s]; /* it has gone, or is the home now */
    c->copy[s] = 0;
    if (e != PLACEMENT_EMPTY && e != old && to->home[e] != s) {
        c->home[e] -= x[n - 1].load;
        c->copy[s] = x[n - 1].load;
    }
    c->l->stage[s] = stage;
}

/* Of slot s: which device sends, and how much; NONE where nothing travels. */
static uint32_t sender(const struct stages *st, const struct chains *c, uint32_t s,
                       uint64_t *out_bytes)
{
    const struct placement *from = c->l->from, *to = c->l->to;
    int32_t e = to->expert[s];
    uint32_t device = s / to->n_slots;
    if (e == PLACEMENT_EMPTY)
        return NONE;
    bool comes = placement_find(from, device, (uint32_t)e) < 0;
    bool home_comes = to->home[e] == s && from->home[e] / to->n_slots != device;
    *out_bytes = (comes ? st->budget.weight_bytes : 0) +
                 (home_comes ? st->budget.state_bytes : 0);
    if (!comes && !home_comes)
        return NONE;
    bool has_moved = !home_comes && c->l->stage[to->home[e]] < st->now;
    return (has_moved ? to->home[e] : from->home[e]) / to->n_slots;
}

static uint32_t *moves_of(const struct stages *st, uint32_t layer, uint32_t device, int way)
{
    return &st->moves[((size_t)layer * 2 + (uint32_t)way) * st->n_devices + device];
}

/* Counts the unit's moves, or takes them off again; false if a budget is exceeded. */
static bool count(struct stages *st, const struct unit *u, bool off)
{
    const struct chains *c = &st->chains[u->layer];
    bool fits = true;
    for (uint32_t i = 0; i < u->n; i++) {
        uint32_t s = c->list[u->first + i];
        uint64_t n = 0;
        uint32_t end[2] = {sender(st, c, s, &n), s / c->l->to->n_slots};
        for (int way = 0; way < 2 && end[0] != NONE; way++) {
            uint64_t *bytes = &st->bytes[(uint32_t)way * st->n_devices + end[way]];
            uint32_t *moves = moves_of(st, u->layer, end[way], way);
            *bytes = off ? *bytes - n : *bytes + n;
            *moves = off ? *moves - 1 : *moves + 1;
            fits = fits &&
                (!st->budget.boundary_bytes || *bytes <= st->budget.boundary_bytes) &&
                (!st->budget.layer_moves || *moves <= st->budget.layer_moves);
        }
    }
    return fits;
}

/* What the unit makes more even, for what it sends. */
static void rate(struct stages *st, struct unit *u)
{
    struct chains *c = &st->chains[u->layer];
    double grows = 0;
    uint64_t bytes = 1, n = 0;
    struct shift x[2];
    for (uint32_t i = 0; i < u->n; i++) {
        uint32_t s = c->list[u->first + i], n_shifts = shifts_of(c, s, x);
        for (uint32_t k = 0; k < n_shifts; k++)
            grows += apply(c, &x[k]);
        bytes += sender(st, c, s, &n) == NONE ? 0 : n;
    }
    for (uint32_t i = 0; i < u->n; i++) { /* and back */
        uint32_t n_shifts = shifts_of(c, c->list[u->first + i], x);
        for (uint32_t k = 0; k < n_shifts; k++)
            apply(c, &(struct shift){x[k].to, x[k].from, x[k].load});
    }
    u->score = -grows * c->l->worth / (double)bytes;
}

/* ---- stage after stage ----------------------------------------------------------------------- */

static int best_first(const void *a, const void *b)
{
    const struct unit *x = *(const struct unit *const *)a, *y = *(const struct unit *const *)b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x < y ? -1 : x > y;
}

static void take(struct stages *st, struct unit *u)
{
    struct chains *c = &st->chains[u->layer];
    for (uint32_t i = 0; i < u->n; i++)
        take_slot(c, c->list[u->first + i], st->now);
    u->is_taken = true;
    if (u->then != NONE)
        st->unit[u->then].is_ready = true;
    st->n_left--;
}

/* One pass over what may be taken; the first of a stage whatever its size. */
static void fill_once(struct stages *st, bool is_empty, struct unit **ready)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < st->n_units; i++) {
        struct unit *u = &st->unit[i];
        if (!u->is_ready || u->is_taken)
            continue;
        rate(st, u);
        ready[n++] = u;
    }
    qsort(ready, n, sizeof *ready, best_first);
    for (uint32_t i = 0; i < n; i++)
        if (count(st, ready[i], false) || is_empty) {
            take(st, ready[i]);
            is_empty = false;
        } else {
            count(st, ready[i], true);
        }
}

static void begin(struct stages *st)
{
    for (uint32_t k = 0; k < st->n_layers; k++) {
        struct chains *c = &st->chains[k];
        for (uint32_t s = 0; s < placement_n_total(c->l->to); s++)
            c->l->stage[s] = NONE;
        memset(c->device, 0, st->n_devices * sizeof *c->device);
        spread_load(c);
    }
    st->n_left = st->n_units;
    bool *follows = xcalloc(st->n_units + 1, sizeof *follows);
    for (uint32_t i = 0; i < st->n_units; i++)
        if (st->unit[i].then != NONE)
            follows[st->unit[i].then] = true;
    for (uint32_t i = 0; i < st->n_units; i++) {
        st->unit[i].is_taken = false;
        st->unit[i].is_ready = !follows[i];
    }
    free(follows);
}

/* With the budget as it is: the number of stages, or 0 if there would be more than n_max. */
static uint32_t fill(struct stages *st)
{
    struct unit **ready = xcalloc(st->n_units + 1, sizeof *ready);
    begin(st);
    for (st->now = 0; st->n_left && st->now < st->budget.n_max; st->now++) {
        memset(st->bytes, 0, 2 * (size_t)st->n_devices * sizeof *st->bytes);
        memset(st->moves, 0, 2 * (size_t)st->n_devices * st->n_layers * sizeof *st->moves);
        uint32_t n_before;
        bool is_empty = true;
        do {
            n_before = st->n_left;
            fill_once(st, is_empty, ready);
            is_empty = false;
        } while (st->n_left && st->n_left < n_before);
    }
    free(ready);
    return st->n_left ? 0 : st->now;
}

static void all_at_once(const struct stages_layer *layers, uint32_t n_layers)
{
    for (uint32_t k = 0; k < n_layers; k++)
        memset(layers[k].stage, 0, placement_n_total(layers[k].to) * sizeof *layers[k].stage);
}

static void stages_init(struct stages *st, const struct stages_layer *layers, uint32_t n_layers,
                        const struct stages_budget *budget)
{
    uint32_t n_devices = layers[0].to->n_devices, n_total = placement_n_total(layers[0].to);
    *st = (struct stages){.n_layers = n_layers, .n_devices = n_devices, .budget = *budget};
    st->chains = xcalloc(n_layers, sizeof *st->chains);
    st->bytes = xcalloc(2 * (size_t)n_devices, sizeof *st->bytes);
    st->moves = xcalloc(2 * (size_t)n_devices * n_layers, sizeof *st->moves);
    for (uint32_t k = 0; k < n_layers; k++) {
        st->chains[k] = (struct chains){
            .l = &layers[k], .next = xcalloc(n_total, sizeof(uint32_t)),
            .is_node = xcalloc(n_total, sizeof(bool)), .is_led = xcalloc(n_total, sizeof(bool)),
            .list = xcalloc(n_total, sizeof(uint32_t)),
            .home = xcalloc(layers[k].to->n_experts, sizeof(double)),
            .copy = xcalloc(n_total, sizeof(double)),
            .device = xcalloc(n_devices, sizeof(double))};
        find_units(st, k);
    }
}

static void stages_fini(struct stages *st)
{
    for (uint32_t k = 0; k < st->n_layers; k++) {
        free(st->chains[k].next);
        free(st->chains[k].is_node);
        free(st->chains[k].is_led);
        free(st->chains[k].list);
        free(st->chains[k].home);
        free(st->chains[k].copy);
        free(st->chains[k].device);
    }
    free(st->chains);
    free(st->unit);
    free(st->bytes);
    free(st->moves);
}

uint32_t stages_assign(const struct stages_layer *layers, uint32_t n_layers,
                       const struct stages_budget *budget)
{
    struct stages st;
    uint32_t n = 1;
    assert(budget->n_max && budget->n_max <= STAGES_MAX);
    all_at_once(layers, n_layers);
    if (!n_layers || budget->n_max == 1 || (!budget->boundary_bytes && !budget->layer_moves))
        return 1;
    stages_init(&st, layers, n_layers, budget);
    while ((n = fill(&st)) == 0 && st.n_units) {
        st.budget.boundary_bytes *= 2;
        st.budget.layer_moves *= 2;
    }
    for (uint32_t k = 0; k < n_layers && n > 1; k++)
        for (uint32_t s = 0; s < placement_n_total(layers[k].to); s++)
            if (layers[k].stage[s] == NONE)
                layers[k].stage[s] = 0; /* nothing changes there */
    for (uint32_t k = 0; k < n_layers && n > 1; k++)
        if (placement_check_stages(layers[k].from, layers[k].to, layers[k].stage, NULL) < 0)
            n = 1; /* it was not settled */
    stages_fini(&st);
    if (n <= 1)
        all_at_once(layers, n_layers);
    return n > 1 ? n : 1;
}
