/* ctl_balance.c - `ballast balance`: the planner offline, on anyone's loads */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <stdlib.h>

#include "common/field.h"
#include "coordinator/balance.h"
#include "coordinator/bound.h"
#include "common/split.h"
#include "coordinator/ctl_places.h"
#include "coordinator/ctl_trace.h"

#define EFFORT_ALL_US   50000 /* for all layers of a window together */
#define EFFORT_MIN_US   300
#define EFFORT_MAX_US   4000

struct run {
    const struct ctl *c;
    struct loads      loads;
    struct balance_policy policy;
    struct placement *now;  /* (n_layers) in force */
    struct placement *next; /* (n_layers) planned */
    struct balance  **balance;
    bool              is_free; /* nothing is in force yet */
    struct ctl_table  table;
    struct json      *windows, *layers;
};

/* ---- one layer in one window ----------------------------------------------------------------- */

static double mean_load(const double *load, const struct placement *p)
{
    double sum = 0;
    for (uint32_t e = 0; e < p->n_experts; e++)
        sum += load[e];
    return sum / p->n_devices;
}

static double fixed_ratio(const struct placement *p, const double *load)
{
    double mean = mean_load(load, p);
    return mean > 0 ? placement_max_load(p, load, NULL) / mean : 1;
}

static double resplit_ratio(const struct placement *p, const double *load)
{
    double mean = mean_load(load, p);
    struct split *s = split_create(p, NULL);
    double max = split_solve(s, load, NULL);
    split_destroy(s);
    return mean > 0 ? max / mean : 1;
}

static struct json *json_slots(const struct placement *p, bool of_shares)
{
    struct json *devices = json_new_array();
    for (uint32_t g = 0; g < p->n_devices; g++) {
        struct json *slots = json_new_array();
        for (uint32_t s = g * p->n_slots; s < (g + 1) * p->n_slots; s++)
            json_push(slots, of_shares ? json_new_double(p->share[s]) : json_new_i64(p->expert[s]));
        json_push(devices, slots);
    }
    return devices;
}

struct result {
    const double *load, *next_load; /* next: NULL in the last window */
    const struct placement *p;
    const struct balance_verdict *verdict;
    uint32_t layer, n_moves;
};

static struct json *json_layer(const struct run *r, const struct result *x)
{
    struct json *o = json_new_object();
    json_put(o, "layer", json_new_u64(x->layer));
    json_put(o, "max_over_mean", json_new_double(fixed_ratio(x->p, x->load)));
    json_put(o, "mean", json_new_double(mean_load(x->load, x->p)));
    json_put(o, "lower_bound", json_new_double(bound_ratio(x->load, x->p->n_experts,
                                                           x->p->n_devices, x->p->n_slots)));
    json_put(o, "moves", json_new_u64(x->n_moves));
    json_put(o, "reason", json_new_string(x->verdict->reason));
    if (r->loads.has_windows) {
        const double *next = x->next_load;
        json_put(o, "next_fixed", next ? json_new_double(fixed_ratio(x->p, next)) : NULL);
        json_put(o, "next_resplit", next ? json_new_double(resplit_ratio(x->p, next)) : NULL);
    }
    json_put(o, "placement", json_slots(x->p, false));
    json_put(o, "shares", json_slots(x->p, true));
    return o;
}

static void add_row(struct run *r, int64_t window, const struct result *x)
{
    struct ctl_table *t = &r->table;
    if (r->loads.has_windows)
        ctl_table_cell(t, "%" PRId64, window);
    ctl_table_cell(t, "%u", x->layer);
    ctl_table_cell(t, "%.4f", fixed_ratio(x->p, x->load));
    ctl_table_cell(t, "%.4f", bound_ratio(x->load, x->p->n_experts, x->p->n_devices,
                                          x->p->n_slots));
    if (r->loads.has_windows && x->next_load) {
        ctl_table_cell(t, "%.4f", fixed_ratio(x->p, x->next_load));
        ctl_table_cell(t, "%.4f", resplit_ratio(x->p, x->next_load));
    } else if (r->loads.has_windows) {
        ctl_table_cell(t, "-");
        ctl_table_cell(t, "-");
    }
    ctl_table_cell(t, "%u", x->n_moves);
    ctl_table_cell(t, "%s", x->verdict->reason);
}

static struct json *plan_layer(struct run *r, uint32_t window, uint32_t k)
{
    struct balance_verdict verdict;
    const double *load = loads_at(&r->loads, window, k);
    balance_observe(r->balance[k], load, &r->now[k]);
    balance_propose(r->balance[k], &r->now[k], r->is_free, &r->next[k], &verdict);
    if (!r->is_free)
        balance_applied(r->balance[k], &r->now[k], &verdict);
    struct result x = {
        .load = load, .p = &r->next[k], .verdict = &verdict, .layer = r->loads.layer[k],
        .next_load = window + 1 < r->loads.n_windows ? loads_at(&r->loads, window + 1, k) : NULL,
        .n_moves = r->is_free ? 0 : placement_moves(&r->now[k], &r->next[k]) };
    struct json *o = NULL;
    if (ctl_is_json(r->c))
        o = json_layer(r, &x);
    else
        add_row(r, r->loads.window[window], &x);
    placement_copy(&r->now[k], &r->next[k]);
    return o;
}

/* ---- the run --------------------------------------------------------------------------------- */

static void plan_windows(struct run *r)
{
    for (uint32_t w = 0; w < r->loads.n_windows; w++) {
        struct json *layers = json_new_array();
        for (uint32_t k = 0; k < r->loads.n_layers; k++) {
            struct json *o = plan_layer(r, w, k);
            if (o)
                json_push(layers, o);
        }
        r->is_free = false;
        if (r->loads.has_windows && ctl_is_json(r->c)) {
            struct json *window = json_new_object();
            json_put(window, "window", json_new_i64(r->loads.window[w]));
            json_put(window, "layers", layers);
            json_push(r->windows, window);
        } else if (ctl_is_json(r->c)) {
            r->layers = layers;
        } else {
            json_destroy(layers);
        }
    }
}

static void print(struct run *r)
{
    if (!ctl_is_json(r->c)) {
        ctl_table_print(r->c, &r->table);
        return;
    }
    struct json *root = json_new_object();
    if (r->loads.has_windows)
        json_put(root, "windows", r->windows);
    else
        json_put(root, "layers", r->layers);
    ctl_json_value(r->c, root);
}

static int start(struct run *r)
{
    const struct ctl *c = r->c;
    struct err err;
    uint32_t n_devices = (uint32_t)c->devices;
    uint32_t n_slots = (uint32_t)c->slots_per_device;
    if ((trace_is_one(c->loads) ? trace_read(c->loads, (uint32_t)c->window_steps, &r->loads, &err)
                                : loads_read(c->loads, &r->loads, &err)) < 0)
        return ctl_fail(c, CTL_USAGE, "%s", err.text);
    uint32_t n_layers = r->loads.n_layers, n_experts = r->loads.n_experts;
    if (!n_slots && !c->previous)
        n_slots = (n_experts + n_devices - 1) / n_devices + 1;
    if (c->previous) {
        if (placements_read(c->previous, &r->loads, n_devices, n_slots, &r->now, &err) < 0)
            return ctl_fail(c, CTL_USAGE, "%s", err.text);
    } else {
        r->is_free = true;
        r->now = xcalloc(n_layers, sizeof *r->now);
        for (uint32_t k = 0; k < n_layers; k++)
            if (placement_init(&r->now[k], n_experts, n_devices, n_slots, &err) < 0)
                return ctl_fail(c, CTL_USAGE, "%s", err.text);
    }
    uint32_t effort_us = EFFORT_ALL_US / n_layers;
    r->policy = balance_defaults();
    r->policy.n_nodes = c->nodes ? (uint32_t)c->nodes : 1;
    r->policy.is_known = !r->loads.has_windows;
    r->policy.effort_us = effort_us < EFFORT_MIN_US   ? EFFORT_MIN_US
                          : effort_us > EFFORT_MAX_US ? EFFORT_MAX_US
                                                      : effort_us;
    r->next = xcalloc(n_layers, sizeof *r->next);
    r->balance = xcalloc(n_layers, sizeof *r->balance);
    for (uint32_t k = 0; k < n_layers; k++) {
        placement_init_like(&r->next[k], &r->now[k]);
        r->balance[k] = balance_create(n_experts, n_devices, r->now[k].n_slots, &r->policy);
    }
    return CTL_OK;
}

static void run_fini(struct run *r)
{
    for (uint32_t k = 0; r->balance && k < r->loads.n_layers; k++)
        balance_destroy(r->balance[k]);
    free(r->balance);
    placements_free(r->now, r->loads.n_layers);
    placements_free(r->next, r->loads.n_layers);
    ctl_table_fini(&r->table);
    loads_fini(&r->loads);
}

static int check_options(const struct ctl *c)
{
    if (!c->loads)
        return ctl_fail(c, CTL_USAGE, "--loads is missing: a CSV file with the columns layer, "
                        "expert, load, or a trace of another system");
    if (!c->devices || c->devices > RANKS_MAX)
        return ctl_fail(c, CTL_USAGE, "--devices must be 1 to %u", RANKS_MAX);
    if (c->nodes > c->devices || (c->nodes && c->devices % c->nodes))
        return ctl_fail(c, CTL_USAGE, "--nodes %" PRIu64 " does not divide --devices %" PRIu64,
                        c->nodes, c->devices);
    if (c->slots_per_device > PLACEMENT_SLOTS_MAX)
        return ctl_fail(c, CTL_USAGE, "--slots-per-device must be at most %u",
                        PLACEMENT_SLOTS_MAX);
    return CTL_OK;
}

int ctl_balance(struct ctl *c)
{
    static const struct ctl_column once[] = {
        {"LAYER", true}, {"MAX/MEAN", true}, {"BOUND", true}, {"MOVES", true}, {"WHY", false} };
    static const struct ctl_column history[] = {
        {"WINDOW", true}, {"LAYER", true}, {"MAX/MEAN", true}, {"BOUND", true},
        {"NEXT-FIXED", true}, {"NEXT-RESPLIT", true}, {"MOVES", true}, {"WHY", false} };
    struct run r = { .c = c };
    struct err err;
    int code = check_options(c);
    if (code == CTL_OK)
        code = start(&r);
    if (code == CTL_OK) {
        bool windows = r.loads.has_windows;
        r.table.columns = windows ? history : once;
        r.table.n_columns = windows ? sizeof history / sizeof *history
                                    : sizeof once / sizeof *once;
        r.windows = windows && ctl_is_json(c) ? json_new_array() : NULL;
        plan_windows(&r);
        print(&r);
        if (c->placement_out &&
            placements_write(c->placement_out, &r.loads, r.now, &err) < 0)
            code = ctl_fail(c, CTL_FAILED, "%s", err.text);
    }
    run_fini(&r);
    return code;
}
