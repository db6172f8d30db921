/* server_balance.c - answers about expert load, placements and the database
 *
 * The store reads; what a placement means for a load is worked out here. A job without a recorded
 * placement has its experts in order, in slots as its specification says. */
#include "coordinator/server_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/placement.h"
#include "coordinator/device_load.h"

#define ROWS_DEFAULT    1000u
#define HISTORY_MAX     1001u /* one more than a client lists: are there more? */
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
        r->kind = experts->history ? STORE_LOAD_HISTORY : STORE_LOADS;
        r->limit = experts->history;
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
    if (device_load_in_order(r->spec, r->loads.n_experts, &p) < 0)
        return out;
    out->n_devices = p.n_devices;
    out->n_slots = p.n_slots;
    out->layers = arena_alloc(a, (r->loads.n_layers + 1) * sizeof *out->layers);
    for (size_t i = 0; i < r->loads.n_layers; i++)
        out->layers[out->n_layers++] = layer_message(&p, r->loads.layers[i]->layer, a);
    placement_fini(&p);
    return out;
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
    for (size_t i = 0; i < reply->n_layers; i++) {
        Ballast__LayerExperts *l = reply->layers[i];
        l->imbalance_devices = device_load_imbalance(r->placement, r->spec, l->layer, l->tokens,
                                                     (uint32_t)l->n_tokens, NULL);
    }
    return &reply->base;
}

static ProtobufCMessage *answer_load_history(const struct store_read *r, struct arena *a)
{
    Ballast__ExpertsReply *reply = arena_alloc(a, sizeof *reply);
    ballast__experts_reply__init(reply);
    reply->windows = r->windows;
    reply->n_windows = r->n_windows;
    reply->truncated = r->is_truncated;
    reply->first_step = r->windows[0]->first_step;
    reply->last_step = r->windows[r->n_windows - 1]->last_step;
    reply->placement_epoch = r->windows[r->n_windows - 1]->placement_epoch;
    if (r->spec) {
        reply->bias_update = r->spec->moe_bias_update;
        reply->bias_update_rate = r->spec->moe_bias_update_rate;
        reply->aux_loss_weight = r->spec->moe_aux_loss;
        reply->aux_scope = r->spec->moe_aux_scope;
    }
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
    case STORE_LOAD_HISTORY:
        return answer_load_history(r, arena);
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
    bool is_history = r->kind == STORE_LOAD_HISTORY;
    bool is_load = r->kind == STORE_LOADS || is_history;
    bool wants_load = is_load || (r->kind == STORE_PLACEMENT && !r->placement);
    bool has_load = is_history ? r->n_windows > 0 : r->loads.n_layers > 0;
    if (r->rc == 0 && (has_load || !wants_load))
        return false;
    if (r->rc == 0 && is_load && r->layer >= 0 && r->loads.last_step)
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
