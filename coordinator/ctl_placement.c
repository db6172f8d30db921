/* ctl_placement.c - which expert is in which slot, and how that came about; rebalancing by hand */
#include "coordinator/ctl_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/ctl_given.h"
#include "coordinator/json_of.h"

#define HISTORY_MOST 1000u /* the coordinator tells one more, if there is */

/* ---- history --------------------------------------------------------------------------------- */

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value entry_##NAME(const void *row, struct arena *a)                    \
    {                                                                                          \
        const Ballast__RebalanceEntry *e = row;                                                \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }

static const char *state_word(size_t i)
{
    static const char *const words[] = {"PREPARING", "DONE", "ENDED", NULL};
    return words[i];
}

static struct list_value state_of(const Ballast__RebalanceEntry *e)
{
    struct list_value v = list_text(e->state);
    v.color = !strcmp(e->state, "DONE") ? "32" : !strcmp(e->state, "ENDED") ? "31" : "33";
    return v;
}

static double gain_of(const Ballast__RebalanceEntry *e)
{
    return isfinite(e->realised_gain_s) ? e->realised_gain_s : e->predicted_gain_s;
}

COLUMN(epoch, list_count(a, e->epoch))
COLUMN(state, state_of(e))
COLUMN(time, list_instant(a, e->at_ns))
COLUMN(step, list_count(a, e->at_step))
COLUMN(by, list_text(e->automatic ? "auto" : "person"))
COLUMN(moves, list_count(a, e->n_moves))
COLUMN(bytes, list_bytes(a, e->bytes))
COLUMN(stages, list_count(a, e->n_stages))
COLUMN(pause, list_real(a, "%.0f ms", e->pause_s * 1e3))
COLUMN(before, list_real(a, "%.2f", e->imbalance_before))
COLUMN(predicted, list_real(a, "%.2f", e->imbalance_predicted))
COLUMN(after, list_real(a, "%.2f", e->imbalance_after))
COLUMN(gain, list_real(a, "%.1f ms", gain_of(e) * 1e3))
COLUMN(expected, list_real(a, "%.1f ms", e->predicted_gain_s * 1e3))
COLUMN(cause, list_text(e->cause))
COLUMN(reason, list_text(*e->reason ? e->reason : e->cause))

/* Times of moves are in milliseconds, as they are printed. */
static const struct list_column history_columns[] = {
    {"EPOCH", LIST_NUMBER, LIST_ALWAYS, entry_epoch, 0, false, NULL},
    {"STATE", LIST_TEXT, LIST_ALWAYS, entry_state, 0, false, state_word},
    {"TIME", LIST_INSTANT, LIST_ALWAYS, entry_time, 0, false, NULL},
    {"STEP", LIST_NUMBER, LIST_ALWAYS, entry_step, 0, false, NULL},
    {"BY", LIST_TEXT, LIST_ALWAYS, entry_by, 0, false, NULL},
    {"MOVES", LIST_NUMBER, LIST_ALWAYS, entry_moves, 0, false, NULL},
    {"BYTES", LIST_BYTES, LIST_ALWAYS, entry_bytes, 0, false, NULL},
    {"STAGES", LIST_NUMBER, LIST_ALWAYS, entry_stages, 0, false, NULL},
    {"PAUSE", LIST_NUMBER, LIST_ALWAYS, entry_pause, 0, false, NULL},
    {"BEFORE", LIST_NUMBER, LIST_ALWAYS, entry_before, 0, false, NULL},
    {"PREDICTED", LIST_NUMBER, LIST_ALWAYS, entry_predicted, 0, false, NULL},
    {"AFTER", LIST_NUMBER, LIST_ALWAYS, entry_after, 0, false, NULL},
    {"GAIN/STEP", LIST_NUMBER, LIST_ALWAYS, entry_gain, 0, false, NULL},
    {"EXPECTED", LIST_NUMBER, LIST_WIDE, entry_expected, 0, false, NULL},
    {"CAUSE", LIST_TEXT, LIST_WIDE, entry_cause, 0, false, NULL},
    {"REASON", LIST_TEXT, LIST_ALWAYS, entry_reason, 0, false, NULL},
};

static struct json *row_json(const void *row);

const struct ctl_list ctl_history_list = {
    .kind = "RebalanceList", .rows = "plans", .columns = history_columns,
    .n_columns = sizeof history_columns / sizeof *history_columns, .name = "epoch",
    .since = "time", .order = "epoch", .count = HISTORY_MOST, .json = row_json,
};

/* The table of all of them. */
static void print_history(const struct ctl *c, Ballast__RebalanceEntry *const *entries, size_t n)
{
    struct list_query q = {.list = &ctl_history_list};
    const void **rows = arena_alloc(&q.arena, (n + 1) * sizeof *rows);
    for (size_t i = 0; i < n; i++)
        rows[i] = entries[i];
    list_print(c, &q, rows, n, true);
    list_fini(&q);
}

static struct json *row_json(const void *row)
{
    return json_of_rebalance(row);
}

static struct json *history_json(Ballast__RebalanceEntry *const *entries, size_t n)
{
    struct json *items = json_new_array();
    for (size_t i = 0; i < n; i++)
        json_push(items, json_of_rebalance(entries[i]));
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
        print_history(c, r->history, r->n_history);
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

static void show_history(const struct ctl *c, struct list_query *q,
                         const Ballast__RebalanceHistoryReply *r)
{
    const void **rows = arena_alloc(&q->arena, (r->n_entries + 1) * sizeof *rows);
    bool was_cut;
    for (size_t i = 0; i < r->n_entries; i++)
        rows[i] = r->entries[i];
    size_t n = list_choose(q, rows, r->n_entries, &was_cut);
    list_show(c, q, rows, n, 0, was_cut);
    if (r->n_entries > HISTORY_MOST)
        ctl_hint(c, "older plans than the last %u stand in the table plans: ballast db query",
                 HISTORY_MOST);
    ctl_hint(c, "automatic rebalancing is %s", r->auto_on ? "on" : "off");
}

int ctl_rebalance_history(struct ctl *c)
{
    const ProtobufCMessage *message;
    struct list_query *q = xcalloc(1, sizeof *q);
    int rc = list_begin(c, &ctl_history_list, q);
    if (rc == CTL_OK)
        rc = call_rebalance(c, BALLAST__METHOD__METHOD_REBALANCE_HISTORY, c->args[0], &message);
    if (rc == CTL_OK)
        show_history(c, q, (const Ballast__RebalanceHistoryReply *)message);
    list_fini(q);
    free(q);
    return rc;
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
        ctl_json_one(c, "Job", reply->seq, json_of_job(reply->job));
    else
        printf("automatic rebalancing of job %" PRIu64 " is %s\n", reply->job->id,
               is_on ? "on" : "off");
    return CTL_OK;
}
