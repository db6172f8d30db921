/* virtual_experts.c - busy by placement, moved by plans, without a number computed
 *
 * Maps, splits, windows and lists of moves are the trainer's own; only what would take a device or
 * a network is worked out instead: a row takes so long that an evenly loaded rank spends its part
 * of a step in experts, a round of moves as long as its slowest one over its link. */
#include "worker/virtual_experts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/mem.h"
#include "proto/job_map.h"
#include "proto/job_spec.h"
#include "worker/plans.h"
#include "worker/virtual_transfer.h"
#include "worker/window.h"

struct virtual_experts {
    job_id   job;
    uint32_t attempt, world;
    const struct popularity *popularity;
    struct layout layout;
    struct slots  slots;
    struct window window;
    struct shard_expert_bytes bytes; /* of a whole expert */
    uint32_t n_sparse, *node; /* (n_devices) a number for each node */
    int64_t  n_layer_rows;    /* of all ranks */
    double   row_s;
    uint32_t boundary_mib;

    /* of the window under way */
    uint64_t routed_after; /* the step after which it begins, UINT64_MAX: none */
    bool     is_placed;    /* what follows it fits the placement in force */
    double  *shares;       /* (n_experts) scratch */
    double  *device_rows;  /* (n_devices) scratch */
    int64_t *rows, *zeros; /* (n_layers, n_experts); (n_layers) */
    double   busiest_rows, imbalance;

    /* of plans */
    struct plans *plans;
    struct virtual_place place;
    uint32_t arrived_epoch, n_arrived; /* the newest, and how many ranks it has reached */
};

/* ---- as the job says ------------------------------------------------------------------------ */

static int open_slots(struct virtual_experts *x, const Ballast__Start *s,
                      const struct model_spec *m, struct err *err)
{
    struct slots in_order;
    int rc = slots_init(&in_order, m, &x->layout, s->spec->rebalance_spare_slots_per_rank, err);
    if (rc < 0 || !s->placement || s->placement->n_layers == 0) {
        if (rc == 0)
            x->slots = in_order;
        return rc;
    }
    rc = slots_from(&in_order, s->placement, &x->slots, err);
    slots_fini(&in_order);
    return rc;
}

/* Ranks that hold the same experts cut each over expert_shard of them. */
static int open_bytes(struct virtual_experts *x, const Ballast__JobSpec *spec,
                      const struct model_spec *m, struct err *err)
{
    struct tensor_map map;
    const char *key;
    int rc = job_map_init(spec, m, &map, &key, err);
    if (rc < 0)
        return err_prefix(err, "%s", key);
    bool is_bf16 = strcmp(spec->train_precision, "bf16") == 0;
    size_t elem_bytes = is_bf16 ? 2 : 4, n_cuts = x->layout.degrees.expert_shard;
    size_t trained = map.expert.trained, f32 = trained / n_cuts * sizeof(float);
    x->place.part_bytes[SLOT_WEIGHTS] = trained / n_cuts * elem_bytes;
    x->place.part_bytes[SLOT_FROZEN] = map.expert.frozen / n_cuts * elem_bytes;
    x->place.part_bytes[SLOT_MASTER] = is_bf16 ? f32 : 0;
    x->place.part_bytes[SLOT_M] = f32;
    x->place.part_bytes[SLOT_V] = map.has_muon ? 0 : f32;
    x->bytes = (struct shard_expert_bytes){
        .weights = (trained + map.expert.frozen) * elem_bytes,
        .frozen = map.expert.frozen * elem_bytes,
        .state = trained * sizeof(float) * ((is_bf16 ? 2 : 1) + (map.has_muon ? 0 : 1)),
    };
    tensor_map_fini(&map);
    return 0;
}

static void find_nodes(struct virtual_experts *x, const Ballast__Start *s)
{
    const struct rank_group *ep = &x->layout.ep;
    x->node = xcalloc(ep->n_ranks, sizeof *x->node);
    for (uint32_t i = 0; i < ep->n_ranks; i++)
        while (strcmp(s->gang[ep->ranks[x->node[i]]]->node, s->gang[ep->ranks[i]]->node) != 0)
            x->node[i]++;
}

static void open_rows(struct virtual_experts *x, const Ballast__JobSpec *spec,
                      const struct model_spec *m)
{
    for (uint32_t l = 0; l < m->n_layers; l++)
        x->n_sparse += slots_is_sparse(&x->slots, l);
    x->n_layer_rows = (int64_t)spec->train_global_batch * spec->data_sequence_length * m->top_k;
    x->row_s = VIRTUAL_EXPERT_PART * VIRTUAL_STEP_S * x->world /
               ((double)x->n_sparse * (double)x->n_layer_rows);
    x->rows = xcalloc((size_t)m->n_layers * m->n_experts, sizeof *x->rows);
    x->zeros = xcalloc(m->n_layers, sizeof *x->zeros);
    x->shares = xcalloc(m->n_experts, sizeof *x->shares);
    x->device_rows = xcalloc(x->slots.n_devices, sizeof *x->device_rows);
    x->place.sent_bytes = xcalloc(x->slots.n_devices, sizeof *x->place.sent_bytes);
    x->routed_after = UINT64_MAX;
}

static int open_all(struct virtual_experts *x, const Ballast__Start *s, const struct model_spec *m,
                    struct err *err)
{
    int rc;
    if ((rc = popularity_check(x->popularity, m->n_experts, err)) < 0 ||
        (rc = layout_init(job_spec_degrees(s->spec), m->n_experts, 0, &x->layout, err)) < 0 ||
        (rc = open_slots(x, s, m, err)) < 0 || (rc = open_bytes(x, s->spec, m, err)) < 0)
        return rc;
    find_nodes(x, s);
    x->place.node = x->node;
    open_rows(x, s->spec, m);
    window_init(&x->window, &x->slots, s->spec->rebalance_window_steps, s);
    x->boundary_mib = s->spec->rebalance_boundary_mib;
    return 0;
}

int virtual_experts_create(const Ballast__Start *start, const struct popularity *popularity,
                           const struct cluster *cluster, struct virtual_experts **out,
                           struct err *err)
{
    struct model_spec *m = xcalloc(1, sizeof *m);
    struct virtual_experts *x = NULL;
    int rc = hf_config_read(start->spec->model_path, m, err);
    if (rc == 0 && m->n_experts > 0) {
        x = xcalloc(1, sizeof *x);
        x->job = start->job_id;
        x->attempt = start->attempt;
        x->world = (uint32_t)start->n_gang;
        x->popularity = popularity;
        x->place.rates = cluster;
        x->plans = plans_create();
        rc = open_all(x, start, m, err);
    }
    free(m);
    if (rc < 0) {
        virtual_experts_destroy(x);
        return rc;
    }
    *out = x;
    return 0;
}

void virtual_experts_settings(struct virtual_experts *x, const Ballast__JobSpec *spec)
{
    x->boundary_mib = spec->rebalance_boundary_mib;
    if (x->window.n_steps == spec->rebalance_window_steps)
        return;
    x->window.n_steps = spec->rebalance_window_steps;
    window_break(&x->window);
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* What rounding leaves goes to the most popular expert. */
static void route_layer(struct virtual_experts *x, uint32_t layer, uint32_t nth, uint64_t after)
{
    uint32_t n = x->slots.n_experts, hottest = 0;
    int64_t *rows = x->rows + (size_t)layer * n, left = x->n_layer_rows;
    popularity_shares(x->popularity, layer, nth, after, x->window.n_steps, n, x->shares);
    for (uint32_t e = 0; e < n; e++) {
        rows[e] = (int64_t)(x->shares[e] * (double)x->n_layer_rows);
        left -= rows[e];
        hottest = x->shares[e] > x->shares[hottest] ? e : hottest;
    }
    rows[hottest] += left;
}

/* Returns the busiest device's rows: shares of copies follow the load, as in every true step. */
static double place_layer(struct virtual_experts *x, uint32_t layer)
{
    const struct slots_layer *l = &x->slots.layers[layer];
    const int64_t *rows = x->rows + (size_t)layer * x->slots.n_experts;
    double busiest = 0;
    for (uint32_t e = 0; e < x->slots.n_experts; e++)
        x->shares[e] = (double)rows[e];
    if (l->split)
        return split_solve(l->split, x->shares, NULL);
    memset(x->device_rows, 0, x->slots.n_devices * sizeof *x->device_rows);
    for (uint32_t e = 0; e < x->slots.n_experts; e++)
        x->device_rows[slots_home(&x->slots, layer, e)] += x->shares[e];
    for (uint32_t g = 0; g < x->slots.n_devices; g++)
        busiest = x->device_rows[g] > busiest ? x->device_rows[g] : busiest;
    return busiest;
}

static void look(struct virtual_experts *x, uint64_t step)
{
    uint64_t after = (step - 1) / x->window.n_steps * x->window.n_steps;
    uint32_t nth = 0;
    for (uint32_t l = 0; l < x->slots.n_layers && after != x->routed_after; l++)
        if (slots_is_sparse(&x->slots, l))
            route_layer(x, l, nth++, after);
    if (after == x->routed_after && x->is_placed)
        return;
    x->routed_after = after;
    x->is_placed = true;
    x->busiest_rows = 0;
    for (uint32_t l = 0; l < x->slots.n_layers; l++)
        if (slots_is_sparse(&x->slots, l))
            x->busiest_rows += place_layer(x, l);
    x->imbalance = x->busiest_rows * x->slots.n_devices /
                   ((double)x->n_sparse * (double)x->n_layer_rows);
}

/* Tokens come from all nodes alike; the window has them all at the node of whoever opened it. */
static void spread_over_nodes(Ballast__LoadReport *r)
{
    for (size_t i = 0; i < r->n_layers; i++)
        for (uint32_t e = 0; e < r->n_experts; e++) {
            uint32_t *at = r->layers[i]->tokens + e;
            uint64_t all = 0;
            for (uint64_t k = 0; k < r->n_nodes; k++)
                all += at[k * r->n_experts];
            for (uint64_t k = 0; k < r->n_nodes; k++)
                at[k * r->n_experts] = (uint32_t)(all * (k + 1) / r->n_nodes -
                                                  all * k / r->n_nodes);
        }
}

static Ballast__LoadReport *count(struct virtual_experts *x, uint64_t step, double step_s)
{
    int64_t n_rows = x->n_sparse * x->n_layer_rows;
    struct model_counters counters = {.served = x->rows, .rerouted = x->zeros,
                                      .dropped = x->zeros, .n_rows = n_rows,
                                      .expert_s = (double)n_rows * x->row_s};
    Ballast__LoadReport *r = NULL;
    window_add(&x->window, step, &counters, step_s, x->imbalance);
    if (plans_has_begun(x->plans)) /* the placement in force is none that has an epoch */
        window_break(&x->window);
    if (!window_is_over(&x->window, step))
        return NULL;
    int rc = window_report(&x->window, step, &x->slots, NULL, x->bytes, &r, NULL);
    if (rc < 0)
        return NULL;
    r->job_id = x->job;
    r->attempt = x->attempt;
    spread_over_nodes(r);
    return r;
}

/* ---- plans ---------------------------------------------------------------------------------- */

void virtual_experts_prepare(struct virtual_experts *x, const Ballast__Prepare *prepare)
{
    uint32_t epoch = prepare->placement->epoch;
    if (epoch > x->arrived_epoch) {
        x->arrived_epoch = epoch;
        x->n_arrived = 0;
    }
    x->n_arrived += epoch == x->arrived_epoch;
    if (x->n_arrived == x->world)
        plans_prepare(x->plans, prepare);
}

void virtual_experts_abort(struct virtual_experts *x, const Ballast__AbortPlan *abort_plan)
{
    plans_abort(x->plans, abort_plan);
}

static int make_transfer(void *place, struct slots *slots, struct slots *to,
                         uint32_t *const *stage, struct transfer **out, struct err *err)
{
    (void)err;
    return virtual_transfer_create(place, slots, to, stage, out);
}

/* Its next stage, or what goes ahead of them; returns how long that holds up the step. No virtual
 * transfer fails. */
static double carry_out(struct virtual_experts *x, uint64_t step)
{
    struct transfer_result moved = {0};
    double s;
    if (!plans_ahead(x->plans)) {
        plans_go_ahead(x->plans, (size_t)x->boundary_mib << 20, &s, NULL);
        return s;
    }
    plans_carry_out(x->plans, &moved, NULL);
    window_moved(&x->window, &moved);
    x->is_placed = false;
    if (step % x->window.n_steps != 0)
        window_break(&x->window);
    return moved.seconds;
}

/* ---- steps ---------------------------------------------------------------------------------- */

void virtual_experts_step(struct virtual_experts *x, uint64_t step, struct virtual_step *out)
{
    struct virtual_step s = {0};
    look(x, step);
    double rank_part = (double)x->slots.n_devices / x->world; /* of a device's rows */
    s.busiest_s = x->busiest_rows * rank_part * x->row_s;
    s.mean_s = VIRTUAL_EXPERT_PART * VIRTUAL_STEP_S;
    s.imbalance = x->imbalance;
    s.load = count(x, step, (1 - VIRTUAL_EXPERT_PART) * VIRTUAL_STEP_S + s.busiest_s);
    if (plans_ready(x->plans)) /* at the boundary before, as the word of all would have it */
        s.pause_s = carry_out(x, step);
    plans_take(x->plans, x->job, x->attempt, make_transfer, &x->place, &x->slots);
    *out = s;
}

void virtual_experts_say(const struct virtual_experts *x, uint32_t rank, Ballast__RankState *state)
{
    struct plans_facts facts = plans_facts(x->plans);
    state->placement_epoch = x->slots.epoch;
    state->prepared_epoch = facts.prepared_epoch;
    state->rejected_epoch = facts.rejected_epoch;
    state->plan_text = (char *)facts.text;
    state->moved_bytes = x->place.sent_bytes[rank % x->slots.n_devices];
    state->pause_s = facts.pause_s;
}

void virtual_experts_destroy(struct virtual_experts *x)
{
    if (!x)
        return;
    plans_destroy(x->plans);
    window_fini(&x->window);
    slots_fini(&x->slots);
    layout_fini(&x->layout);
    free(x->node);
    free(x->shares);
    free(x->device_rows);
    free(x->rows);
    free(x->zeros);
    free(x->place.sent_bytes);
    free(x);
}
