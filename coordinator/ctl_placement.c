/* ctl_placement.c - which expert is in which slot, and how that came about; rebalancing by hand */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/ctl_given.h"

/* ---- history --------------------------------------------------------------------------------- */

static const struct ctl_column history_columns[] = {
    {"EPOCH", true}, {"STATE", false}, {"TIME", false}, {"STEP", true}, {"BY", false},
    {"MOVES", true}, {"BYTES", true}, {"STAGES", true}, {"PAUSE", true}, {"BEFORE", true},
    {"PREDICTED", true}, {"AFTER", true}, {"GAIN/STEP", true}, {"REASON", false},
};

static void add_entry(struct ctl_table *t, const Ballast__RebalanceEntry *e)
{
    char stamp[CLOCK_STAMP_BYTES], bytes[32];
    clock_stamp(e->at_ns, stamp);
    ctl_bytes_text(e->bytes, bytes);
    ctl_table_cell(t, "%" PRIu32, e->epoch);
    ctl_table_cell(t, "%s", e->state);
    ctl_table_color(t, !strcmp(e->state, "DONE") ? "32" : !strcmp(e->state, "ENDED") ? "31" : "33");
    ctl_table_cell(t, "%s", stamp);
    ctl_table_cell(t, "%" PRIu64, e->at_step);
    ctl_table_cell(t, "%s", e->automatic ? "auto" : "person");
    ctl_table_cell(t, "%" PRIu32, e->n_moves);
    ctl_table_cell(t, "%s", bytes);
    ctl_table_cell(t, "%" PRIu32, e->n_stages);
    ctl_table_number(t, "%.0f ms", e->pause_s * 1e3);
    ctl_table_number(t, "%.2f", e->imbalance_before);
    ctl_table_number(t, "%.2f", e->imbalance_predicted);
    ctl_table_number(t, "%.2f", e->imbalance_after);
    ctl_table_number(t, "%.1f ms", (isfinite(e->realised_gain_s) ? e->realised_gain_s
                                                                 : e->predicted_gain_s) * 1e3);
    ctl_table_cell(t, "%s", *e->reason ? e->reason : e->cause);
}

static void show_history(const struct ctl *c, Ballast__RebalanceEntry *const *entries, size_t n)
{
    struct ctl_table t = {.columns = history_columns,
                          .n_columns = sizeof history_columns / sizeof *history_columns};
    for (size_t i = 0; i < n; i++)
        add_entry(&t, entries[i]);
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

static struct json *entry_json(const Ballast__RebalanceEntry *e)
{
    struct json *o = json_new_object(), *imbalance = json_new_object();
    char stamp[CLOCK_STAMP_BYTES];
    clock_stamp(e->at_ns, stamp);
    json_put(imbalance, "before", json_new_double(e->imbalance_before));
    json_put(imbalance, "predicted", json_new_double(e->imbalance_predicted));
    json_put(imbalance, "after", json_new_double(e->imbalance_after));
    json_put(o, "epoch", json_new_u64(e->epoch));
    json_put(o, "state", json_new_string(e->state));
    json_put(o, "at", json_new_string(stamp));
    json_put(o, "step", json_new_u64(e->at_step));
    json_put(o, "automatic", json_new_bool(e->automatic));
    json_put(o, "cause", json_new_string(e->cause));
    json_put(o, "moves", json_new_u64(e->n_moves));
    json_put(o, "bytes", json_new_u64(e->bytes));
    json_put(o, "stages", json_new_u64(e->n_stages));
    json_put(o, "pause_seconds", json_new_double(e->pause_s));
    json_put(o, "imbalance", imbalance);
    json_put(o, "predicted_gain_seconds", json_new_double(e->predicted_gain_s));
    json_put(o, "realised_gain_seconds", json_new_double(e->realised_gain_s));
    json_put(o, "reason", json_new_string(e->reason));
    return o;
}

static struct json *history_json(Ballast__RebalanceEntry *const *entries, size_t n)
{
    struct json *items = json_new_array();
    for (size_t i = 0; i < n; i++)
        json_push(items, entry_json(entries[i]));
    return items;
}

/* ---- placement ------------------------------------------------------------------------------- */

static bool has_layer(const Ballast__Placement *p, uint64_t layer)
{
    for (size_t i = 0; i < p->n_layers; i++)
        if (p->layers[i]->layer == layer)
            return true;
    return false;
}

static bool is_wanted(const struct ctl *c, const Ballast__PlacementLayer *l)
{
    return !c->has_layer || l->layer == c->layer;
}

/* "3", of a copy "3 40%", of the copy that is its home "3 60%*"; "-" where a slot is empty. */
static char *slots_text(const Ballast__Placement *p, const Ballast__PlacementLayer *l,
                        uint32_t device)
{
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    if (!out)
        abort();
    for (uint32_t i = 0; i < p->n_slots; i++) {
        uint32_t slot = device * p->n_slots + i;
        int32_t e = l->experts[slot];
        fputs(i ? ", " : "", out);
        if (e < 0)
            fputc('-', out);
        else if (l->share[slot] >= 1)
            fprintf(out, "%" PRId32, e);
        else
            fprintf(out, "%" PRId32 " %.0f%%%s", e, l->share[slot] * 100,
                    l->home[e] == slot ? "*" : "");
    }
    fclose(out);
    return text;
}

static void show_layers(const struct ctl *c, const Ballast__Placement *p)
{
    static const struct ctl_column columns[] = {
        {"LAYER", true}, {"DEVICE", true}, {"EXPERTS (share of a copy, * its home)", false},
    };
    struct ctl_table t = {.columns = columns, .n_columns = sizeof columns / sizeof *columns};
    for (size_t i = 0; i < p->n_layers; i++)
        for (uint32_t d = 0; is_wanted(c, p->layers[i]) && d < p->n_devices; d++) {
            char *text = slots_text(p, p->layers[i], d);
            ctl_table_cell(&t, "%" PRIu32, p->layers[i]->layer);
            ctl_table_cell(&t, "%" PRIu32, d);
            ctl_table_cell(&t, "%s", text);
            free(text);
        }
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

static struct json *layer_json(const Ballast__Placement *p, const Ballast__PlacementLayer *l)
{
    struct json *o = json_new_object(), *experts = json_new_array(), *shares = json_new_array();
    struct json *homes = json_new_array();
    for (uint32_t d = 0; d < p->n_devices; d++) {
        struct json *row = json_new_array(), *parts = json_new_array();
        for (uint32_t i = d * p->n_slots; i < (d + 1) * p->n_slots; i++) {
            json_push(row, json_new_i64(l->experts[i]));
            json_push(parts, json_new_double(l->share[i]));
        }
        json_push(experts, row);
        json_push(shares, parts);
    }
    for (size_t e = 0; e < l->n_home; e++)
        json_push(homes, json_new_u64(l->home[e] / p->n_slots));
    json_put(o, "layer", json_new_u64(l->layer));
    json_put(o, "placement", experts);
    json_put(o, "shares", shares);
    json_put(o, "homes", homes); /* the device of each expert's */
    return o;
}

static void show_placement_json(const struct ctl *c, const Ballast__PlacementReply *r)
{
    struct json *o = json_new_object(), *layers = json_new_array();
    for (size_t i = 0; i < r->placement->n_layers; i++)
        if (is_wanted(c, r->placement->layers[i]))
            json_push(layers, layer_json(r->placement, r->placement->layers[i]));
    json_put(o, "epoch", json_new_u64(r->placement->epoch));
    json_put(o, "layers", layers);
    json_put(o, "history", history_json(r->history, r->n_history));
    ctl_json_one(c, "Placement", 0, o);
}

int ctl_placement(struct ctl *c)
{
    Ballast__PlacementRequest request = BALLAST__PLACEMENT_REQUEST__INIT;
    const ProtobufCMessage *message;
    if (!(request.job_id = ctl_job_id(c, c->args[0])))
        return CTL_USAGE;
    request.has_epoch = c->has_epoch;
    request.epoch = (uint32_t)c->epoch;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_PLACEMENT, &request.base, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__PlacementReply *r = (const Ballast__PlacementReply *)message;
    if (!r->placement)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no placement");
    if (c->has_layer && !has_layer(r->placement, c->layer))
        return ctl_fail(c, CTL_NOT_FOUND, "layer %" PRIu64 " of job %s has no experts", c->layer,
                        c->args[0]);
    if (c->placement_out && (rc = ctl_given_write(c, r->placement)) != CTL_OK)
        return rc;
    if (ctl_is_json(c)) {
        show_placement_json(c, r);
        return CTL_OK;
    }
    printf("placement %" PRIu32 ": %" PRIu32 " devices with %" PRIu32 " slots%s\n",
           r->placement->epoch, r->placement->n_devices, r->placement->n_slots,
           r->placement->epoch ? "" : ", experts in order");
    show_layers(c, r->placement);
    if (r->n_history) {
        putchar('\n');
        show_history(c, r->history, r->n_history);
    }
    return CTL_OK;
}

/* ---- rebalance ------------------------------------------------------------------------------- */

static struct json *plan_json(const Ballast__RebalancePlanReply *r)
{
    struct json *o = json_new_object(), *moves = json_new_array(), *imbalance = json_new_object();
    char revision[24];
    snprintf(revision, sizeof revision, "%" PRIu64, r->revision);
    for (size_t i = 0; i < r->n_moves; i++) {
        struct json *m = json_new_object();
        json_put(m, "layer", json_new_u64(r->moves[i]->layer));
        json_put(m, "expert", json_new_u64(r->moves[i]->expert));
        json_put(m, "from_device", json_new_u64(r->moves[i]->from_device));
        json_put(m, "to_device", json_new_u64(r->moves[i]->to_device));
        json_put(m, "home", json_new_bool(r->moves[i]->is_home));
        json_put(m, "bytes", json_new_u64(r->moves[i]->bytes));
        json_push(moves, m);
    }
    json_put(imbalance, "before", json_new_double(r->imbalance_before));
    json_put(imbalance, "predicted", json_new_double(r->imbalance_predicted));
    json_put(o, "revision", json_new_string(revision));
    json_put(o, "epoch", r->epoch ? json_new_u64(r->epoch) : NULL);
    json_put(o, "moves", moves);
    json_put(o, "bytes", json_new_u64(r->bytes));
    json_put(o, "predicted_gain_seconds", json_new_double(r->predicted_gain_s));
    json_put(o, "predicted_cost_seconds", json_new_double(r->predicted_cost_s));
    json_put(o, "imbalance", imbalance);
    json_put(o, "reason", json_new_string(r->reason));
    json_put(o, "automatic", json_new_bool(r->auto_on));
    return o;
}

static void show_moves(const struct ctl *c, const Ballast__RebalancePlanReply *r)
{
    static const struct ctl_column columns[] = {
        {"LAYER", true}, {"EXPERT", true}, {"FROM", true}, {"TO", true}, {"WHAT", false},
        {"BYTES", true},
    };
    struct ctl_table t = {.columns = columns, .n_columns = sizeof columns / sizeof *columns};
    for (size_t i = 0; i < r->n_moves; i++) {
        const Ballast__PlanMove *m = r->moves[i];
        char bytes[32];
        ctl_bytes_text(m->bytes, bytes);
        ctl_table_cell(&t, "%" PRIu32, m->layer);
        ctl_table_cell(&t, "%" PRIu32, m->expert);
        ctl_table_cell(&t, "%" PRIu32, m->from_device);
        ctl_table_cell(&t, "%" PRIu32, m->to_device);
        ctl_table_cell(&t, "%s", m->is_home ? "home" : "copy");
        ctl_table_cell(&t, "%s", bytes);
    }
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

static void show_sums(const Ballast__RebalancePlanReply *r)
{
    char bytes[32];
    ctl_bytes_text(r->bytes, bytes);
    printf("%zu moves, %s; imbalance over devices %.2f, then %.2f\n", r->n_moves, bytes,
           r->imbalance_before, r->imbalance_predicted);
    printf("predicted gain %.2f ms a step, cost %.2f ms once", r->predicted_gain_s * 1e3,
           r->predicted_cost_s * 1e3);
    if (r->predicted_gain_s > 0)
        printf(": pays after %.0f steps", ceil(r->predicted_cost_s / r->predicted_gain_s));
    putchar('\n');
}

static void show_nothing(const Ballast__RebalancePlanReply *r)
{
    static const char nothing[] = "nothing to do";
    bool says_so = !strncmp(r->reason, nothing, sizeof nothing - 1);
    if (!says_so)
        fputs(*r->reason ? "nothing to do: " : nothing, stdout);
    ctl_print_escaped(stdout, r->reason, strlen(r->reason), false);
    putchar('\n');
}

static int call_rebalance(struct ctl *c, Ballast__Method method, const char *id,
                          const ProtobufCMessage **out_reply)
{
    Ballast__RebalanceRequest request = BALLAST__REBALANCE_REQUEST__INIT;
    if (!(request.job_id = ctl_job_id(c, id)))
        return CTL_USAGE;
    request.revision = c->revision;
    if (c->placement) {
        int rc = ctl_given_read(c, request.job_id, &request.placement);
        if (rc != CTL_OK)
            return rc;
    }
    request.on = method == BALLAST__METHOD__METHOD_REBALANCE_AUTO && !strcmp(c->args[0], "on");
    return ctl_call(c, method, &request.base, out_reply);
}

int ctl_rebalance_plan(struct ctl *c)
{
    const ProtobufCMessage *message;
    int rc = call_rebalance(c, BALLAST__METHOD__METHOD_REBALANCE_PLAN, c->args[0], &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__RebalancePlanReply *r = (const Ballast__RebalancePlanReply *)message;
    if (ctl_is_json(c)) {
        ctl_json_one(c, "RebalancePlan", 0, plan_json(r));
    } else if (!r->n_moves) {
        show_nothing(r);
    } else {
        show_moves(c, r);
        show_sums(r);
        ctl_hint(c, "to do it: ballast rebalance apply %s --revision %" PRIu64, c->args[0],
                 r->revision);
    }
    return r->n_moves ? CTL_CHANGES : CTL_OK;
}

int ctl_rebalance_apply(struct ctl *c)
{
    const ProtobufCMessage *message;
    int rc = call_rebalance(c, BALLAST__METHOD__METHOD_REBALANCE_APPLY, c->args[0], &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__RebalancePlanReply *r = (const Ballast__RebalancePlanReply *)message;
    if (ctl_is_json(c)) {
        ctl_json_one(c, "RebalancePlan", 0, plan_json(r));
    } else if (!r->epoch) {
        show_nothing(r);
    } else {
        printf("placement %" PRIu32 " is proposed to the ranks\n", r->epoch);
        show_sums(r);
        ctl_hint(c, "what becomes of it: ballast rebalance history %s", c->args[0]);
    }
    return CTL_OK;
}

int ctl_rebalance_history(struct ctl *c)
{
    const ProtobufCMessage *message;
    int rc = call_rebalance(c, BALLAST__METHOD__METHOD_REBALANCE_HISTORY, c->args[0], &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__RebalanceHistoryReply *r = (const Ballast__RebalanceHistoryReply *)message;
    if (ctl_is_json(c))
        ctl_json_list(c, "RebalanceList", 0, false, history_json(r->entries, r->n_entries));
    else
        show_history(c, r->entries, r->n_entries);
    ctl_hint(c, "automatic rebalancing is %s", r->auto_on ? "on" : "off");
    return CTL_OK;
}

int ctl_rebalance_auto(struct ctl *c)
{
    const ProtobufCMessage *message;
    bool is_on = !strcmp(c->args[0], "on");
    if (!is_on && strcmp(c->args[0], "off"))
        return ctl_fail(c, CTL_USAGE, "expected on or off; usage: ballast rebalance auto on|off "
                        "ID");
    int rc = call_rebalance(c, BALLAST__METHOD__METHOD_REBALANCE_AUTO, c->args[1], &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__JobReply *reply = (const Ballast__JobReply *)message;
    if (!reply->job)
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer holds no job");
    if (ctl_is_json(c))
        ctl_json_one(c, "Job", reply->seq, ctl_json_job(reply->job));
    else
        printf("automatic rebalancing of job %" PRIu64 " is %s\n", reply->job->id,
               is_on ? "on" : "off");
    return CTL_OK;
}
