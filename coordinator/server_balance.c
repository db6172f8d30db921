/* server_balance.c - answers about expert load, placements and the database
 *
 * The store reads; what a placement means for a load is worked out here. A job without a recorded
 * placement has its experts in order, in slots as its specification says. */
#include "coordinator/server_parts.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/placement.h"
#include "common/split.h"

#define ROWS_DEFAULT    1000u
#define HISTORY_MAX     1000u
#define HISTORY_SHOWN   100u

/* ---- reading --------------------------------------------------------------------------------- */

static enum store_window window_of(const char *word)
{
    return !strcmp(word, "1m") ? STORE_1M : !strcmp(word, "1h") ? STORE_1H
         : !strcmp(word, "all") ? STORE_ALL : STORE_LAST;
}

bool balance_is_ours(Ballast__Method method)
{
    return method == BALLAST__METHOD__METHOD_EXPERTS ||
           method == BALLAST__METHOD__METHOD_PLACEMENT ||
           method == BALLAST__METHOD__METHOD_REBALANCE_HISTORY ||
           method == BALLAST__METHOD__METHOD_DB_QUERY ||
           method == BALLAST__METHOD__METHOD_DB_BACKUP;
}

void balance_plan_read(Ballast__Method method, const ProtobufCMessage *payload,
                       struct store_read *r)
{
    const Ballast__ExpertsRequest *experts = (const Ballast__ExpertsRequest *)payload;
    const Ballast__PlacementRequest *placement = (const Ballast__PlacementRequest *)payload;
    const Ballast__DbQueryRequest *query = (const Ballast__DbQueryRequest *)payload;
    switch (method) {
    case BALLAST__METHOD__METHOD_EXPERTS:
        r->kind = STORE_LOADS;
        r->job = experts->job_id;
        r->window = window_of(experts->window);
        r->layer = experts->layer;
        break;
    case BALLAST__METHOD__METHOD_PLACEMENT:
        r->kind = STORE_PLACEMENT;
        r->job = placement->job_id;
        r->is_newest = !placement->has_epoch;
        r->from = placement->epoch;
        r->limit = HISTORY_SHOWN;
        break;
    case BALLAST__METHOD__METHOD_DB_QUERY:
        r->kind = STORE_SQL;
        r->sql = query->sql;
        r->limit = query->limit_rows ? query->limit_rows : ROWS_DEFAULT;
        break;
    case BALLAST__METHOD__METHOD_DB_BACKUP:
        r->kind = STORE_BACKUP;
        r->path = ((const Ballast__DbBackupRequest *)payload)->path;
        break;
    default:
        r->kind = STORE_PLANS;
        r->job = ((const Ballast__RebalanceRequest *)payload)->job_id;
        r->limit = HISTORY_MAX;
        break;
    }
}

/* ---- placements ------------------------------------------------------------------------------ */

/* Of a job without a recorded one: 0, or -EINVAL if the experts do not fit. */
static int in_order(const struct store_read *r, struct placement *out)
{
    const Ballast__JobSpec *spec = r->spec;
    uint32_t n_devices = spec ? spec->parallel_expert_parallel_degree : 0;
    if (!n_devices)
        return -EINVAL;
    uint32_t n_slots = (r->loads.n_experts + n_devices - 1) / n_devices +
                       spec->rebalance_spare_slots_per_rank;
    return placement_init(out, r->loads.n_experts, n_devices, n_slots, NULL);
}

static Ballast__PlacementLayer *layer_message(const struct placement *p, uint32_t layer,
                                              struct arena *a)
{
    Ballast__PlacementLayer *out = arena_alloc(a, sizeof *out);
    uint32_t n_total = placement_n_total(p);
    ballast__placement_layer__init(out);
    out->layer = layer;
    out->n_experts = out->n_share = n_total;
    out->n_home = p->n_experts;
    out->experts = arena_memdup(a, p->expert, n_total * sizeof *out->experts);
    out->share = arena_memdup(a, p->share, n_total * sizeof *out->share);
    out->home = arena_memdup(a, p->home, p->n_experts * sizeof *out->home);
    return out;
}

static Ballast__Placement *in_order_message(const struct store_read *r, struct arena *a)
{
    Ballast__Placement *out = arena_alloc(a, sizeof *out);
    struct placement p;
    ballast__placement__init(out);
    if (in_order(r, &p) < 0)
        return out;
    out->n_devices = p.n_devices;
    out->n_slots = p.n_slots;
    out->layers = arena_alloc(a, (r->loads.n_layers + 1) * sizeof *out->layers);
    for (size_t i = 0; i < r->loads.n_layers; i++)
        out->layers[out->n_layers++] = layer_message(&p, r->loads.layers[i]->layer, a);
    placement_fini(&p);
    return out;
}

/* ---- imbalance over devices ------------------------------------------------------------------ */

static double imbalance_of(const struct placement *p, const Ballast__LayerExperts *l)
{
    double sum = 0, *load = xcalloc(l->n_tokens, sizeof *load);
    for (size_t e = 0; e < l->n_tokens; e++)
        sum += load[e] = (double)l->tokens[e];
    struct split *split = split_create(p, NULL);
    double most = split_solve(split, load, NULL);
    split_destroy(split);
    free(load);
    return sum > 0 ? most * p->n_devices / sum : 1;
}

/* Of the load under the placement in force; copies share it as the ranks make them, as evenly as
 * they can. */
static double device_imbalance(const struct store_read *r, const Ballast__LayerExperts *l)
{
    const Ballast__Placement *m = r->placement;
    struct placement p;
    for (size_t i = 0; m && i < m->n_layers; i++) {
        const Ballast__PlacementLayer *layer = m->layers[i];
        if (layer->layer != l->layer || layer->n_home != l->n_tokens)
            continue;
        p = (struct placement){.n_experts = (uint32_t)layer->n_home, .n_devices = m->n_devices,
                               .n_slots = m->n_slots, .expert = layer->experts,
                               .share = layer->share, .home = layer->home};
        return imbalance_of(&p, l);
    }
    if (in_order(r, &p) < 0)
        return (double)NAN;
    double imbalance = imbalance_of(&p, l);
    placement_fini(&p);
    return imbalance;
}

/* ---- answers --------------------------------------------------------------------------------- */

static ProtobufCMessage *answer_experts(const struct store_read *r, struct arena *a)
{
    Ballast__ExpertsReply *reply = arena_alloc(a, sizeof *reply);
    ballast__experts_reply__init(reply);
    reply->layers = r->loads.layers;
    reply->n_layers = r->loads.n_layers;
    reply->first_step = r->loads.first_step;
    reply->last_step = r->loads.last_step;
    reply->placement_epoch = r->loads.placement_epoch;
    for (size_t i = 0; i < reply->n_layers; i++)
        reply->layers[i]->imbalance_devices = device_imbalance(r, reply->layers[i]);
    return &reply->base;
}

static ProtobufCMessage *answer_placement(const struct store_read *r, struct arena *a)
{
    Ballast__PlacementReply *reply = arena_alloc(a, sizeof *reply);
    ballast__placement_reply__init(reply);
    reply->placement = r->placement ? r->placement : in_order_message(r, a);
    reply->history = r->entries;
    reply->n_history = r->n_entries;
    return &reply->base;
}

static ProtobufCMessage *answer_history(const struct store_read *r, struct arena *a)
{
    Ballast__RebalanceHistoryReply *reply = arena_alloc(a, sizeof *reply);
    ballast__rebalance_history_reply__init(reply);
    reply->entries = r->entries;
    reply->n_entries = r->n_entries;
    reply->auto_on = r->is_auto_on;
    return &reply->base;
}

static ProtobufCMessage *answer_query(const struct store_read *r, struct arena *a)
{
    Ballast__DbQueryReply *reply = arena_alloc(a, sizeof *reply);
    ballast__db_query_reply__init(reply);
    reply->columns = r->columns;
    reply->n_columns = r->n_columns;
    reply->rows = r->rows;
    reply->n_rows = r->n_rows;
    reply->truncated = r->is_truncated;
    return &reply->base;
}

static ProtobufCMessage *answer_backup(const struct store_read *r, struct arena *a)
{
    Ballast__DbBackupReply *reply = arena_alloc(a, sizeof *reply);
    ballast__db_backup_reply__init(reply);
    reply->bytes = r->total;
    reply->path = arena_strdup(a, r->path);
    return &reply->base;
}

ProtobufCMessage *balance_answer(const struct store_read *r, struct arena *arena)
{
    switch (r->kind) {
    case STORE_LOADS:
        return answer_experts(r, arena);
    case STORE_PLACEMENT:
        return answer_placement(r, arena);
    case STORE_SQL:
        return answer_query(r, arena);
    case STORE_BACKUP:
        return answer_backup(r, arena);
    default:
        return answer_history(r, arena);
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

bool balance_refuses(const struct store_read *r, struct arena *arena, Ballast__Status *out_status)
{
    bool wants_load = r->kind == STORE_LOADS || (r->kind == STORE_PLACEMENT && !r->placement);
    if (r->rc == 0 && !(wants_load && !r->loads.n_layers))
        return false;
    if (r->rc == 0 && r->kind == STORE_LOADS && r->layer >= 0 && r->loads.last_step)
        check_status(out_status, arena, BALLAST__CODE__NOT_FOUND, "NO_LAYER",
                     "layer %d of job %llu has no experts", (int)r->layer,
                     (unsigned long long)r->job);
    else if (r->rc == 0)
        check_status(out_status, arena, BALLAST__CODE__FAILED_PRECONDITION, "NO_LOAD",
                     "job %llu has reported no expert load yet", (unsigned long long)r->job);
    else if (r->kind == STORE_SQL)
        check_status(out_status, arena,
                     r->rc == -EINVAL ? BALLAST__CODE__INVALID_ARGUMENT : BALLAST__CODE__CANCELLED,
                     r->rc == -EINVAL ? "SQL" : "LIMIT", "%s", r->err.text);
    else if (r->kind == STORE_BACKUP)
        check_status(out_status, arena,
                     r->rc == -EEXIST ? BALLAST__CODE__ALREADY_EXISTS
                                      : BALLAST__CODE__FAILED_PRECONDITION, "BACKUP", "%s",
                     r->err.text);
    else
        return false;
    return true;
}
