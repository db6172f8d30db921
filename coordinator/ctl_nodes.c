/* ctl_nodes.c - the fleet by nodes, and by states of nodes as sinfo has it */
#include "coordinator/ctl_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/ctl_hostlist.h"
#include "coordinator/event.h"

/* The workers of one node, or of all nodes in one state. */
struct group {
    const char *name;                   /* of the node */
    const char *state;
    uint32_t n_busy, n_idle, n_down, n; /* workers; down: neither busy nor free for work */
    uint64_t heartbeat_ms;              /* the longest of its workers */
    const char *sick, *reason;          /* of the first that has one, "" */
    uint64_t jobs[8];
    size_t   n_jobs, n_nodes;
    const char **nodes;                 /* of a state */
};

/* ---- grouping -------------------------------------------------------------------------------- */

static void add_job(struct group *g, uint64_t job)
{
    for (size_t i = 0; i < g->n_jobs; i++)
        if (g->jobs[i] == job)
            return;
    if (job && g->n_jobs < sizeof g->jobs / sizeof *g->jobs)
        g->jobs[g->n_jobs++] = job;
}

static void add_worker(struct group *g, const Ballast__Worker *w)
{
    const char *state = event_worker_state(w->state);
    g->state = !g->n || !strcmp(g->state, state) ? state : "MIXED";
    g->n++;
    g->n_busy += w->state == BALLAST__WORKER_STATE__WORKER_BUSY;
    g->n_idle += w->state == BALLAST__WORKER_STATE__WORKER_IDLE;
    g->n_down = g->n - g->n_busy - g->n_idle;
    g->heartbeat_ms = w->heartbeat_age_ms > g->heartbeat_ms ? w->heartbeat_age_ms
                                                            : g->heartbeat_ms;
    if (!*g->reason)
        g->reason = w->reason;
    if (!*g->sick && w->gpu)
        g->sick = w->gpu->sick;
    add_job(g, w->job_id);
}

static struct group *find(struct group *groups, size_t n, const char *name)
{
    size_t i = 0;
    while (i < n && strcmp(groups[i].name, name) != 0)
        i++;
    return &groups[i];
}

static int by_node(const void *a, const void *b)
{
    return strverscmp((*(Ballast__Worker *const *)a)->node, (*(Ballast__Worker *const *)b)->node);
}

/* Gives *out, freed with free(); room for as many groups as workers. */
static size_t by_nodes(const Ballast__WorkerListReply *fleet, struct group **out)
{
    struct group *groups = xcalloc(fleet->n_workers + 1, sizeof *groups);
    size_t n = 0;
    qsort(fleet->workers, fleet->n_workers, sizeof *fleet->workers, by_node);
    for (size_t i = 0; i < fleet->n_workers; i++) {
        const Ballast__Worker *w = fleet->workers[i];
        if (!n || strcmp(groups[n - 1].name, w->node) != 0)
            groups[n++] = (struct group){.name = w->node, .sick = "", .reason = "", .n_nodes = 1};
        add_worker(&groups[n - 1], w);
    }
    *out = groups;
    return n;
}

/* Of groups by node, those of each state together; in the arena. */
static size_t by_states(struct arena *a, const struct group *nodes, size_t n, struct group **out)
{
    struct group *states = arena_alloc(a, (n + 1) * sizeof *states);
    size_t n_states = 0;
    for (size_t i = 0; i < n; i++) {
        struct group *s = find(states, n_states, nodes[i].state);
        if (s == &states[n_states]) {
            *s = (struct group){.name = nodes[i].state, .state = nodes[i].state, .sick = "",
                                .reason = "", .nodes = arena_alloc(a, n * sizeof *s->nodes)};
            n_states++;
        }
        s->nodes[s->n_nodes++] = nodes[i].name;
        s->n_busy += nodes[i].n_busy;
        s->n_idle += nodes[i].n_idle;
        s->n_down += nodes[i].n_down;
        s->n += nodes[i].n;
    }
    *out = states;
    return n_states;
}

/* ---- columns --------------------------------------------------------------------------------- */

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value group_##NAME(const void *row, struct arena *a)                    \
    {                                                                                          \
        const struct group *g = row;                                                           \
        (void)a;                                                                               \
        return EXPRESSION;                                                                     \
    }

static struct list_value jobs_of(struct arena *a, const struct group *g)
{
    const char *text = "";
    for (size_t i = 0; i < g->n_jobs; i++)
        text = arena_printf(a, "%s%s%" PRIu64, text, i ? "," : "", g->jobs[i]);
    return list_text(text);
}

/* By how many there are in all. */
static struct list_value shares_of(struct arena *a, const struct group *g)
{
    return (struct list_value){arena_printf(a, "%u/%u/%u/%u", g->n_busy, g->n_idle, g->n_down,
                                            g->n), g->n, NULL};
}

COLUMN(name, list_text(g->name))
COLUMN(state, list_text(g->state))
COLUMN(shares, shares_of(a, g))
COLUMN(health, list_text(*g->sick ? g->sick : "well"))
COLUMN(heartbeat, list_real(a, "%.1fs", (double)g->heartbeat_ms / 1e3))
COLUMN(jobs, jobs_of(a, g))
COLUMN(reason, list_text(g->reason))
COLUMN(busy, list_count(a, g->n_busy))
COLUMN(idle, list_count(a, g->n_idle))
COLUMN(down, list_count(a, g->n_down))
COLUMN(n_nodes, list_count(a, g->n_nodes))
COLUMN(list, list_text(hostlist_pack(a, g->nodes, g->n_nodes)))

static const char *state_word(size_t i)
{
    const char *word = ctl_worker_state_word(i);
    return word ? word : i && ctl_worker_state_word(i - 1) ? "MIXED" : NULL;
}

static struct json *group_json(const struct group *g)
{
    struct json *o = json_new_object(), *jobs = json_new_array();
    char id[24];
    for (size_t i = 0; i < g->n_jobs; i++) {
        snprintf(id, sizeof id, "%" PRIu64, g->jobs[i]);
        json_push(jobs, json_new_string(id));
    }
    json_put(o, "state", json_new_string(g->state));
    json_put(o, "workers", json_new_u64(g->n));
    json_put(o, "workers_busy", json_new_u64(g->n_busy));
    json_put(o, "workers_idle", json_new_u64(g->n_idle));
    json_put(o, "workers_down", json_new_u64(g->n_down));
    if (!g->nodes)
        json_put(o, "jobs", jobs);
    else
        json_destroy(jobs);
    return o;
}

static struct json *node_json(const void *row)
{
    const struct group *g = row;
    struct json *o = group_json(g);
    json_put(o, "name", json_new_string(g->name));
    json_put(o, "heartbeat_age_seconds", json_new_double((double)g->heartbeat_ms / 1e3));
    json_put(o, "sick", *g->sick ? json_new_string(g->sick) : NULL);
    json_put(o, "reason", json_new_string(g->reason));
    return o;
}

static struct json *state_json(const void *row)
{
    const struct group *g = row;
    struct json *o = group_json(g), *nodes = json_new_array();
    for (size_t i = 0; i < g->n_nodes; i++)
        json_push(nodes, json_new_string(g->nodes[i]));
    json_put(o, "nodes", nodes);
    return o;
}

static const struct list_column node_columns[] = {
    {"NODE", LIST_TEXT, LIST_ALWAYS, group_name, 0, false, NULL},
    {"STATE", LIST_TEXT, LIST_ALWAYS, group_state, 0, false, state_word},
    {"WORKERS(A/I/D/T)", LIST_NUMBER, LIST_ALWAYS, group_shares, 0, false, NULL},
    {"HEALTH", LIST_TEXT, LIST_ALWAYS, group_health, 0, false, NULL},
    {"HB", LIST_SPAN, LIST_ALWAYS, group_heartbeat, 0, false, NULL},
    {"JOB", LIST_TEXT, LIST_ALWAYS, group_jobs, 0, false, NULL},
    {"BUSY", LIST_NUMBER, LIST_WIDE, group_busy, 0, false, NULL},
    {"IDLE", LIST_NUMBER, LIST_WIDE, group_idle, 0, false, NULL},
    {"DOWN", LIST_NUMBER, LIST_WIDE, group_down, 0, false, NULL},
    {"REASON", LIST_TEXT, LIST_ALWAYS, group_reason, 0, false, NULL},
};
const struct ctl_list ctl_node_list = {
    .kind = "NodeList", .rows = "nodes", .columns = node_columns,
    .n_columns = sizeof node_columns / sizeof *node_columns, .name = "node", .order = "node",
    .count = 1000, .json = node_json,
};

static const struct list_column state_columns[] = {
    {"STATE", LIST_TEXT, LIST_ALWAYS, group_state, 0, false, state_word},
    {"NODES", LIST_NUMBER, LIST_ALWAYS, group_n_nodes, 0, false, NULL},
    {"WORKERS(A/I/D/T)", LIST_NUMBER, LIST_ALWAYS, group_shares, 0, false, NULL},
    {"BUSY", LIST_NUMBER, LIST_WIDE, group_busy, 0, false, NULL},
    {"IDLE", LIST_NUMBER, LIST_WIDE, group_idle, 0, false, NULL},
    {"DOWN", LIST_NUMBER, LIST_WIDE, group_down, 0, false, NULL},
    {"NODELIST", LIST_TEXT, LIST_ALWAYS, group_list, 0, false, NULL},
};
static const struct ctl_list state_list = {
    .kind = "NodeStateList", .rows = "states", .columns = state_columns,
    .n_columns = sizeof state_columns / sizeof *state_columns, .name = "state", .order = "state",
    .json = state_json,
};

int ctl_nodes(struct ctl *c)
{
    const Ballast__WorkerListReply *fleet;
    struct list_query *q = xcalloc(1, sizeof *q);
    struct group *nodes = NULL, *rows = NULL;
    int rc = list_begin(c, c->summary ? &state_list : &ctl_node_list, q);
    if (rc == CTL_OK)
        rc = ctl_fleet(c, &fleet);
    if (rc == CTL_OK) {
        bool was_cut;
        size_t n = by_nodes(fleet, &nodes);
        rows = nodes;
        if (c->summary)
            n = by_states(&q->arena, nodes, n, &rows);
        const void **pointers = arena_alloc(&q->arena, (n + 1) * sizeof *pointers);
        for (size_t i = 0; i < n; i++)
            pointers[i] = &rows[i];
        n = list_choose(q, pointers, n, &was_cut);
        list_show(c, q, pointers, n, fleet->seq, was_cut);
        if (!fleet->n_workers)
            ctl_hint(c, "no worker has come yet: ballast-worker --config FILE");
    }
    free(nodes);
    list_fini(q);
    free(q);
    return rc;
}
