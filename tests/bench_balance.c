/* bench_balance.c - the goal table of the planner on real loads: figures, met or not, and why
 *
 * usage: bench_balance DATA_FOLDER [effort_us [ROWS]], ROWS as in 245. Exits 1 if a figure that
 * must not get worse did. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/mem.h"
#include "common/split.h"
#include "coordinator/arrange.h"
#include "coordinator/balance.h"
#include "coordinator/bound.h"
#include "coordinator/search.h"
#include "tests/eplb.h"
#include "tests/trace_replay.h"

enum {
    KIMI_LAYERS = 26, KIMI_EXPERTS = 256, ROUTE_TOKENS = 200,
    OLMOE_LAYERS = 3, OLMOE_EXPERTS = 64, DOMAINS = 4
};

/* Which experts each token chose: 1 for each of them. */
struct routes {
    const char *name, *file;
    uint32_t n_layers, n_experts;
    double  *chosen; /* (n_layers, ROUTE_TOKENS, n_experts) */
};

static struct routes kimi = { "Kimi", "kimi-linear-48b-a3b-route.csv", KIMI_LAYERS, KIMI_EXPERTS,
                              NULL };
static struct routes olmoe_routes = { "OLMoE", "olmoe-1b7b-route.csv", 16, OLMOE_EXPERTS, NULL };
static double   olmoe[DOMAINS][OLMOE_LAYERS][OLMOE_EXPERTS];
static uint32_t effort_us = 2000;
static int      n_failed;

static FILE *open_data(const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name), line[512];
    FILE *f = fopen(path, "r");
    if (!f || !fgets(line, sizeof line, f)) {
        fprintf(stderr, "bench_balance: %s: %s\n", path, strerror(errno));
        exit(2);
    }
    free(path);
    return f;
}

static void read_routes(const char *folder, struct routes *r)
{
    FILE *f = open_data(folder, r->file);
    unsigned token, layer, e[8];
    r->chosen = xcalloc((size_t)r->n_layers * ROUTE_TOKENS * r->n_experts, sizeof *r->chosen);
    while (fscanf(f, "%u,%u,%u,%u,%u,%u,%u,%u,%u,%u", &token, &layer, e, e + 1, e + 2, e + 3,
                  e + 4, e + 5, e + 6, e + 7) == 10)
        for (int i = 0; i < 8 && token < ROUTE_TOKENS && layer < r->n_layers; i++)
            r->chosen[((size_t)layer * ROUTE_TOKENS + token) * r->n_experts +
                      e[i] % r->n_experts]++;
    fclose(f);
}

static void read_olmoe(const char *folder)
{
    static const char *const domain[DOMAINS] = { "arxiv", "book", "c4", "wikipedia" };
    FILE *f = open_data(folder, "olmoe-mixtral-counts.csv");
    char line[512], model[64], name[32], slots[16];
    unsigned layer, expert;
    double count;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%63[^,],%31[^,],%15[^,],%u,%u,%lf", model, name, slots, &layer, &expert,
                   &count) != 6 || strcmp(model, "OLMoE-1B-7B-0924") || strcmp(slots, "all"))
            continue;
        for (int d = 0; d < DOMAINS; d++)
            if (!strcmp(name, domain[d]) && expert < OLMOE_EXPERTS)
                olmoe[d][layer == 0 ? 0 : layer == 7 ? 1 : 2][expert] = count;
    }
    fclose(f);
}

static void routes_window(const struct routes *r, uint32_t layer, uint32_t from, uint32_t to,
                          double *out)
{
    memset(out, 0, r->n_experts * sizeof *out);
    for (uint32_t t = from; t < to; t++)
        for (uint32_t e = 0; e < r->n_experts; e++)
            out[e] += r->chosen[((size_t)layer * ROUTE_TOKENS + t) * r->n_experts + e];
}

/* ---- tools ----------------------------------------------------------------------------------- */

static double mean_load(const double *load, uint32_t n_experts, uint32_t n_devices)
{
    double sum = 0;
    for (uint32_t e = 0; e < n_experts; e++)
        sum += load[e];
    return sum / n_devices;
}

static double resplit(const struct placement *p, const double *load)
{
    struct split *s = split_create(p, NULL);
    double max = split_solve(s, load, NULL);
    split_destroy(s);
    return max / mean_load(load, p->n_experts, p->n_devices);
}

static double fixed(const struct placement *p, const double *load)
{
    return placement_max_load(p, load, NULL) / mean_load(load, p->n_experts, p->n_devices);
}

static struct placement in_order(uint32_t n_experts, uint32_t n_devices)
{
    struct placement p;
    struct err err;
    if (placement_init(&p, n_experts, n_devices, n_experts / n_devices + 1, &err) < 0)
        exit(2);
    return p;
}

static void plan_windows(const double *const *window, uint32_t n_windows, bool is_known,
                         uint64_t seed, struct placement *p)
{
    struct balance_policy policy = balance_defaults();
    struct balance_verdict verdict;
    struct placement start;
    policy.effort_us = effort_us;
    policy.is_known = is_known;
    policy.seed = seed;
    placement_init_like(&start, p);
    struct balance *b = balance_create(p->n_experts, p->n_devices, p->n_slots, &policy);
    for (uint32_t i = 0; i < n_windows; i++)
        balance_observe(b, window[i], &start);
    balance_propose(b, &start, true, p, &verdict);
    struct err err;
    if (placement_check(p, &err) < 0) {
        printf("INVALID: %s\n", err.text);
        n_failed++;
    }
    balance_destroy(b);
    placement_fini(&start);
}

static void plan_one(const double *load, bool is_known, uint64_t seed, struct placement *p)
{
    plan_windows(&load, 1, is_known, seed, p);
}

/* Of this thread alone: other programs on the machine do not count. */
static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static const char *met(bool is_met)
{
    return is_met ? "met" : "NOT MET";
}

static void require(bool holds, const char *what)
{
    if (holds)
        return;
    printf("    got worse: %s\n", what);
    n_failed++;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void row_1(void)
{
    printf("1  known load, one spare slot, re-split, mean / worst max over mean (goal 1.000)\n");
    static const uint32_t devices[] = { 8, 16, 32, 32, 64 };
    for (int i = 0; i < 5; i++) {
        uint32_t is_kimi = i > 2, g = devices[i], n = 0;
        double sum = 0, worst = 0, peer = 0, load[KIMI_EXPERTS];
        for (uint32_t k = 0; k < (is_kimi ? KIMI_LAYERS : DOMAINS * OLMOE_LAYERS); k++, n++) {
            if (is_kimi)
                routes_window(&kimi, k, 0, ROUTE_TOKENS, load);
            else
                memcpy(load, olmoe[k / OLMOE_LAYERS][k % OLMOE_LAYERS],
                       OLMOE_EXPERTS * sizeof *load);
            struct placement p = in_order(is_kimi ? KIMI_EXPERTS : OLMOE_EXPERTS, g);
            eplb_place(load, &p);
            peer += fixed(&p, load);
            placement_fini(&p);
            p = in_order(is_kimi ? KIMI_EXPERTS : OLMOE_EXPERTS, g);
            plan_one(load, true, 1, &p);
            sum += fixed(&p, load);
            worst = fmax(worst, fixed(&p, load));
            placement_fini(&p);
        }
        printf("   %-5s G=%-2u  ours %.4f / %.4f   EPLB %.3f   %s\n", is_kimi ? "Kimi" : "OLMoE",
               g, sum / n, worst, peer / n, met(worst < 1.0005));
        require(worst < 1.005, "a known load is not balanced");
    }
}

enum { SEEDS = 4 };

struct next_window {
    double order, peer, ours, ours_fixed, known, oracle; /* sums over layers */
};

/* Plans on ROUTE_TOKENS / 2 tokens from `from` on, scores on those from `to` on. */
static void plan_ahead(const struct routes *r, uint32_t layer, uint32_t n_devices, uint32_t from,
                       uint32_t to, struct next_window *sum)
{
    enum { HALF = ROUTE_TOKENS / 2 };
    double first[KIMI_EXPERTS], next[KIMI_EXPERTS], jittered[KIMI_EXPERTS];
    struct placement start = in_order(r->n_experts, n_devices), p;
    routes_window(r, layer, from, from + HALF, first);
    routes_window(r, layer, to, to + HALF, next);
    sum->order += resplit(&start, next);
    placement_init_like(&p, &start);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        for (uint32_t e = 0; e < r->n_experts; e++)
            jittered[e] = first[e] + 1e-6 * (double)(scenario_hash(seed * 1000 + e) >> 40) /
                                         (1 << 24);
        eplb_place(jittered, &p);
        sum->peer += resplit(&p, next) / SEEDS;
        placement_copy(&p, &start);
        plan_one(first, false, seed, &p);
        sum->ours += resplit(&p, next) / SEEDS;
        sum->ours_fixed += fixed(&p, next) / SEEDS;
    }
    placement_copy(&p, &start);
    plan_one(first, true, 1, &p);
    sum->known += resplit(&p, next);
    placement_copy(&p, &start);
    plan_one(next, true, 1, &p);
    sum->oracle += resplit(&p, next);
    placement_fini(&p);
    placement_fini(&start);
}

static void row_2(void)
{
    static const struct {
        struct routes *routes;
        uint32_t n_devices;
        bool     is_backwards; /* plan on the second half, score on the first */
        const char *what;
    } cases[] = {
        { &kimi, 32, false, "" }, { &kimi, 64, false, "" },
        { &kimi, 32, true, " backwards" }, { &kimi, 64, true, " backwards" },
        { &olmoe_routes, 16, false, "" }, { &olmoe_routes, 32, false, "" },
        { &olmoe_routes, 16, true, " backwards" }, { &olmoe_routes, 32, true, " backwards" },
    };
    printf("2  routes: plan on tokens 0-99, score on 100-199, re-split, mean over layers (Kimi's "
           "goal 0.9 of EPLB;\n   stretch half its excess; the others are controls); %d seeds, "
           "EPLB over as many orders of equal loads\n", SEEDS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct routes *r = cases[i].routes;
        struct next_window sum = { 0 };
        uint32_t from = cases[i].is_backwards ? ROUTE_TOKENS / 2 : 0;
        for (uint32_t layer = 0; layer < r->n_layers; layer++)
            plan_ahead(r, layer, cases[i].n_devices, from, ROUTE_TOKENS / 2 - from, &sum);
        double n = r->n_layers, excess = sum.peer / n - 1;
        printf("   %s%s G=%u: ours %.3f (perfect for the first, too: %.3f; fixed shares %.3f)\n"
               "        EPLB %.3f, oracle %.3f, in order %.3f: %.3f of EPLB", r->name,
               cases[i].what, cases[i].n_devices, sum.ours / n, sum.known / n, sum.ours_fixed / n,
               sum.peer / n, sum.oracle / n, sum.order / n, sum.ours / sum.peer);
        if (i < 2)
            printf(" %s, stretch %.3f %s", met(sum.ours <= 0.9 * sum.peer), 1 + excess / 2,
                   met(sum.ours / n <= 1 + excess / 2));
        printf("\n");
        require(sum.ours <= 0.98 * sum.peer || i >= 2,
                "not clearly better than EPLB on the next window");
    }
}

static void row_3(void)
{
    printf("3  OLMoE: plan on any three domains, score on the fourth, re-split (goal: never worse "
           "than in order,\n   mean excess at most half of EPLB's)\n");
    for (uint32_t g = 8; g <= 32; g *= 2) {
        double order = 0, peer = 0, ours = 0;
        int n_worse = 0, n = 0;
        for (int d = 0; d < DOMAINS; d++)
            for (int layer = 0; layer < OLMOE_LAYERS; layer++) {
                const double *window[3], *next = olmoe[d][layer];
                double sum[OLMOE_EXPERTS] = { 0 };
                uint32_t k = 0;
                for (int x = 0; x < DOMAINS; x++)
                    if (x != d)
                        window[k++] = olmoe[x][layer];
                for (uint32_t e = 0; e < OLMOE_EXPERTS; e++)
                    for (uint32_t i = 0; i < 3; i++)
                        sum[e] += window[i][e];
                struct placement start = in_order(OLMOE_EXPERTS, g), p;
                placement_init_like(&p, &start);
                double straight = resplit(&start, next);
                eplb_place(sum, &p);
                peer += resplit(&p, next) * SEEDS;
                order += straight * SEEDS;
                for (uint64_t seed = 0; seed < SEEDS; seed++) {
                    placement_copy(&p, &start);
                    plan_windows(window, 3, false, seed, &p);
                    double ratio = resplit(&p, next);
                    ours += ratio;
                    n_worse += ratio > straight + 1e-9;
                    n++;
                }
                placement_fini(&p);
                placement_fini(&start);
            }
        printf("   G=%-2u ours %.3f, EPLB %.3f, in order %.3f: worse than in order %d of %d %s; "
               "half the excess %.3f %s\n", g, ours / n, peer / n, order / n, n_worse, n,
               met(!n_worse), 1 + (peer / n - 1) / 2, met(ours / n <= 1 + (peer / n - 1) / 2));
    }
}

static const char *const replay_name[REPLAY_KINDS] = {
    "none", "EPLB each window", "ours, automatic", "oracle",
};

/* The mean of several seeds where one has an influence. */
static void replay_seeds(const struct trace *t, enum replay_kind kind, uint32_t n_devices,
                         struct balance_policy *policy, struct replay *out)
{
    uint32_t n = kind == REPLAY_OURS ? SEEDS : 1;
    struct replay sum = { 0 };
    for (policy->seed = 1; policy->seed <= n; policy->seed++) {
        replay_run(t, kind, n_devices, policy, out);
        sum.ratio += out->ratio / n;
        sum.ratio_born += out->ratio_born / n;
        sum.n_plans += out->n_plans;
        sum.n_moves += out->n_moves;
        sum.n_bytes += out->n_bytes / n;
        sum.uneven_s += out->uneven_s / n;
        sum.move_s += out->move_s / n;
        sum.n_losing += out->n_losing;
    }
    sum.n_plans /= n;
    sum.n_moves /= n;
    sum.n_losing /= n;
    *out = sum;
}

/* Recorded by tests/record_trace.py: windows of our own training while its text changes. */
static void row_4(void)
{
    struct trace t;
    trace_read(TRACE_PATH, &t);
    printf("4  recorded over a change of text (%u windows, %u layers, %u experts): plan on i, "
           "score on i+1\n   (goal: within 10 %% of the oracle with a quarter of EPLB's moves), "
           "and what it costs in virtual time; ours over 4 seeds\n"
           "   %-4s %-18s %9s %6s %6s %10s %9s %9s %9s\n", t.n_windows, t.n_layers,
           t.n_experts, "", "", "max/mean", "plans", "moves", "GB moved", "uneven s",
           "moving s", "lost s");
    for (uint32_t g = 8; g <= 32; g *= 2) {
        struct replay r[REPLAY_KINDS];
        struct balance_policy policy = balance_defaults();
        policy.effort_us = effort_us;
        for (enum replay_kind k = 0; k < REPLAY_KINDS; k++) {
            replay_seeds(&t, k, g, &policy, &r[k]);
            printf("   G=%-2u %-18s %9.3f %6u %6u %10.1f %9.2f %9.2f %9.2f\n", g, replay_name[k],
                   r[k].ratio, r[k].n_plans, r[k].n_moves, (double)r[k].n_bytes / 1e9,
                   r[k].uneven_s, r[k].move_s, r[k].uneven_s + r[k].move_s);
        }
        const struct replay *ours = &r[REPLAY_OURS], *peer = &r[REPLAY_PEER];
        printf("        %.3f of the oracle with %.3f of EPLB's moves: %s; windows with a losing "
               "plan %u\n", ours->ratio / r[REPLAY_ORACLE].ratio,
               (double)ours->n_moves / peer->n_moves,
               met(ours->ratio <= 1.1 * r[REPLAY_ORACLE].ratio &&
                   ours->n_moves * 4 <= peer->n_moves), ours->n_losing);
        printf("        without the first %d windows, in which the routers are born: ours %.3f, "
               "EPLB %.3f, %.3f of the oracle: %s\n", REPLAY_BORN, ours->ratio_born,
               peer->ratio_born, ours->ratio_born / r[REPLAY_ORACLE].ratio_born,
               met(ours->ratio_born <= 1.1 * r[REPLAY_ORACLE].ratio_born));
        require(ours->n_moves * 4 <= peer->n_moves, "more than a quarter of EPLB's moves");
        require(ours->uneven_s + ours->move_s < r[REPLAY_NONE].uneven_s,
                "balancing costs more than it brings");
    }
    trace_fini(&t);
}

enum { E = 896, G = 64, LAYERS = 92 };

/* 92 layers live through windows whose loads jitter by a tenth and drift a little: ms that a window
 * takes to be observed and decided, mean over the later ones. */
static double settled_windows(const double *load, struct balance_policy *policy)
{
    enum { WINDOWS = 12, FIRST = 4 };
    struct placement now[LAYERS], next = in_order(E, G);
    struct balance *b[LAYERS];
    double ms = 0;
    for (uint32_t k = 0; k < LAYERS; k++) {
        now[k] = in_order(E, G);
        policy->seed = k;
        b[k] = balance_create(E, G, next.n_slots, policy);
    }
    for (uint32_t w = 0; w < WINDOWS; w++)
        for (uint32_t k = 0; k < LAYERS; k++) {
            struct balance_verdict v;
            double seen[E];
            for (uint32_t e = 0; e < E; e++) {
                double jitter = (double)(scenario_hash((w * LAYERS + k) * E + e) >> 11) * 0x1p-53;
                seen[e] = floor(load[(e + 7 * k) % E] * (0.9 + 0.2 * jitter) *
                                (1 + 0.01 * w * (e % 3)));
            }
            double from = cpu_ms();
            balance_observe(b[k], seen, &now[k]);
            balance_propose(b[k], &now[k], false, &next, &v);
            ms += w >= FIRST ? cpu_ms() - from : 0;
            if (v.kind != BALANCE_STAY) {
                balance_applied(b[k], &now[k], &v);
                placement_copy(&now[k], &next);
            }
        }
    for (uint32_t k = 0; k < LAYERS; k++) {
        balance_destroy(b[k]);
        placement_fini(&now[k]);
    }
    placement_fini(&next);
    return ms / (WINDOWS - FIRST);
}

/* ms; p: of the last one. */
static double place_layers(const double *load, const double *sd, const struct placement *start,
                           struct placement *p)
{
    struct search_problem problem = { .n_experts = E, .n_devices = G, .n_slots = start->n_slots,
                                      .n_nodes = 1 };
    struct belief belief = { .n_experts = E, .mean = (double *)load, .sd = (double *)sd };
    double from = cpu_ms();
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct arrange a;
        problem.seed = layer;
        arrange_init(&a, &problem, &belief, 300);
        arrange_fresh(&a, start, p);
        arrange_fini(&a);
        struct split *s = split_create(p, NULL);
        split_solve(s, load, p->share);
        split_destroy(s);
    }
    return cpu_ms() - from;
}

/* ms; of a first window. */
static double decide_layers(const double *load, const struct placement *start,
                            struct balance_policy *policy)
{
    struct placement p = in_order(E, G);
    double from = cpu_ms();
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct balance_verdict v;
        policy->seed = layer;
        struct balance *b = balance_create(E, G, start->n_slots, policy);
        balance_observe(b, load, start);
        balance_propose(b, start, false, &p, &v);
        balance_destroy(b);
    }
    from = cpu_ms() - from;
    placement_fini(&p);
    return from;
}

static void row_5(void)
{
    enum { SPLITS = 2000, PASSES = 5 /* the best of them: others use the machine, too */ };
    double load[E], next[E], sd[E], max = 0;
    struct placement p = in_order(E, G), start = in_order(E, G);
    for (uint32_t e = 0; e < E; e++) {
        load[e] = floor(1000 * exp(3 * (double)(scenario_hash(e) >> 11) * 0x1p-53 - 1.5));
        sd[e] = 0.3 * load[e];
    }
    struct balance_policy policy = balance_defaults();
    double plan_ms = INFINITY, decide_ms = INFINITY;
    policy.effort_us = 300;
    policy.is_brief = true; /* as propose.c has it for so much */
    for (int pass = 0; pass < PASSES; pass++) {
        plan_ms = fmin(plan_ms, place_layers(load, sd, &start, &p) / LAYERS);
        decide_ms = fmin(decide_ms, decide_layers(load, &start, &policy));
    }
    place_layers(load, sd, &start, &p);
    double ratio = resplit(&p, load), settled_ms = settled_windows(load, &policy);
    struct split *s = split_create(&p, NULL);
    double from = cpu_ms();
    for (uint32_t i = 0; i < SPLITS; i++) {
        for (uint32_t e = 0; e < E; e++)
            next[e] = load[e] * (0.5 + (double)(scenario_hash(i * 1000 + e) >> 11) * 0x1p-53);
        max += split_solve(s, next, p.share);
    }
    double split_ms = (cpu_ms() - from) / SPLITS;
    split_destroy(s);
    printf("5  E=896 G=64 one spare slot, one core: place a layer anew %.3f ms (goal 0.5) %s, max/"
           "mean %.4f;\n   92 layers placed %.0f ms (goal 50) %s; decided, all candidates against "
           "staying: the first time %.0f ms %s,\n   a window of settled load %.0f ms %s; re-split "
           "%.4f ms (goal 0.05) %s\n", plan_ms, met(plan_ms <= 0.5), ratio, plan_ms * LAYERS,
           met(plan_ms * LAYERS <= 50), decide_ms, met(decide_ms <= 50), settled_ms,
           met(settled_ms <= 50), split_ms, met(split_ms <= 0.05 && max > 0));
    placement_fini(&p);
    placement_fini(&start);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_balance DATA_FOLDER [effort_us [ROWS]]\n");
        return 2;
    }
    mem_keep_freed(); /* as in the coordinator */
    if (argc > 2)
        effort_us = (uint32_t)strtoul(argv[2], NULL, 10);
    read_routes(argv[1], &kimi);
    read_routes(argv[1], &olmoe_routes);
    read_olmoe(argv[1]);
    printf("effort %u us per layer\n", effort_us);
    static void (*const row[])(void) = { row_1, row_2, row_3, row_4, row_5 };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        if (argc < 4 || strchr(argv[3], (int)('1' + i)))
            row[i]();
    return n_failed ? 1 : 0;
}
