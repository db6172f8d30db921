/* trace_replay.c - a recorded trace of expert loads, lived through by one way to balance */
#include "tests/trace_replay.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/split.h"
#include "tests/eplb.h"

static void give_up(const char *path, uint32_t n_line, const char *what)
{
    fprintf(stderr, "%s:%u: %s\n", path, n_line, what);
    exit(2);
}

void trace_read(const char *path, struct trace *out)
{
    struct trace t = { 0 };
    unsigned window, layer, expert, first_layer = 0, n_layers = 0, n_experts = 0;
    double load;
    uint32_t n = 0;
    size_t cap = 0;
    char head[64];
    FILE *f = fopen(path, "r");
    if (!f || !fgets(head, sizeof head, f) || strcmp(head, "window,layer,expert,load\n"))
        give_up(path, 1, f ? "expected the columns window,layer,expert,load" : strerror(errno));
    while (fscanf(f, "%u,%u,%u,%lf", &window, &layer, &expert, &load) == 4) {
        t.load = xgrow(t.load, n, &cap, sizeof *t.load);
        if (n == 0)
            first_layer = layer;
        if (window == 0) {
            n_layers = layer - first_layer + 1;
            n_experts = expert >= n_experts ? expert + 1 : n_experts;
        }
        if (n != (window * n_layers + layer - first_layer) * n_experts + expert)
            give_up(path, n + 2, "not the next of window, layer, expert");
        t.load[n++] = load;
    }
    fclose(f);
    if (!n || n % (n_layers * n_experts))
        give_up(path, n + 2, "the last window is not whole");
    t.n_windows = n / (n_layers * n_experts);
    t.n_layers = n_layers;
    t.n_experts = n_experts;
    *out = t;
}

void trace_fini(struct trace *t)
{
    free(t->load);
    *t = (struct trace){ 0 };
}

static const double *load_of(const struct trace *t, uint32_t window, uint32_t layer)
{
    return t->load + ((size_t)window * t->n_layers + layer) * t->n_experts;
}

static double resplit(const struct placement *p, const double *load, const double *speed)
{
    double sum = 0, all = 0;
    for (uint32_t e = 0; e < p->n_experts; e++)
        sum += load[e];
    for (uint32_t g = 0; g < p->n_devices; g++)
        all += speed ? speed[g] : 1;
    struct split *s = split_create(p, speed);
    double max = split_solve(s, load, NULL);
    split_destroy(s);
    return max / (sum / all);
}

static void choose(enum replay_kind kind, struct balance *b, const double *now,
                   const double *next, const struct placement *in_force, struct placement *out)
{
    struct balance_verdict v;
    if (kind == REPLAY_PEER)
        eplb_place(now, out);
    if (kind == REPLAY_PEER || kind == REPLAY_NONE)
        return;
    balance_observe(b, kind == REPLAY_ORACLE ? next : now, in_force);
    balance_propose(b, in_force, kind == REPLAY_ORACLE, out, &v);
    if (kind == REPLAY_OURS)
        balance_applied(b, in_force, &v);
}

static void run_layer(const struct trace *t, uint32_t layer, enum replay_kind kind,
                      struct placement *now, const struct balance_policy *policy,
                      struct replay *out)
{
    struct placement next;
    struct balance *b = balance_create(t->n_experts, now->n_devices, now->n_slots, policy);
    placement_init_like(&next, now);
    for (uint32_t i = 0; i + 1 < t->n_windows; i++) {
        struct plan plan;
        choose(kind, b, load_of(t, i, layer), load_of(t, i + 1, layer), now, &next);
        plan_init(&plan, now, &next, policy->n_nodes, &policy->costs);
        if (kind != REPLAY_ORACLE) {
            out->n_plans += plan.n_moves > 0;
            out->n_moves += placement_moves(now, &next);
            out->n_bytes += plan.n_bytes;
            out->move_s += plan.seconds;
        }
        plan_fini(&plan);
        placement_copy(now, &next);
        double ratio = resplit(now, load_of(t, i + 1, layer), policy->speed);
        double realised, predicted;
        out->ratio += ratio;
        out->ratio_born += i >= REPLAY_BORN ? ratio : 0;
        out->uneven_s += (ratio - 1) * policy->window_s;
        out->n_losing += balance_realised(b, &realised, &predicted) && realised < 0;
    }
    placement_fini(&next);
    balance_destroy(b);
}

void replay_run(const struct trace *t, enum replay_kind kind, uint32_t n_devices,
                const struct balance_policy *policy, struct replay *out)
{
    struct balance_policy known = *policy;
    known.is_known = policy->is_known || kind == REPLAY_ORACLE;
    *out = (struct replay){ 0 };
    for (uint32_t layer = 0; layer < t->n_layers; layer++) {
        struct placement p;
        struct err err;
        if (placement_init(&p, t->n_experts, n_devices, t->n_experts / n_devices + 1, &err) < 0)
            give_up("placement", 0, err.text);
        run_layer(t, layer, kind, &p, &known, out);
        placement_fini(&p);
    }
    out->ratio /= (double)(t->n_windows - 1) * t->n_layers;
    out->ratio_born /= (double)(t->n_windows - 1 - REPLAY_BORN) * t->n_layers;
}
