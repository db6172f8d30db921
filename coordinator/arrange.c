/* arrange.c - candidates: from nothing, by copies alone, step by step; and their judge
 *
 * Scenarios are drawn anew for every phase: few draws make a phase fast, many phases keep the
 * placement from fitting the accidents of a few draws. Where there is time, a short search is
 * followed by changes that are tried out with care. The judge's draws are its own. */
#include "coordinator/arrange.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/split.h"
#include "coordinator/pack.h"
#include "coordinator/refine.h"

#define PHASES_MAX        16
#define PHASE_CANDIDATES  1250
#define CAREFUL_PHASES    4
#define TRIES_MIN         40
#define TRIES_MAX         300 /* more win next to nothing */
#define HEAT              0.02f /* at the start, of the mean time */
#define COPY_POWER        0.7f  /* see pack_fresh */
#define JUDGE_SEED        0x6a75646765u
#define CAREFUL_SEED      0x6361726566u
#define EXACT_ROUNDS      256
#define EXACT_TRIES       24
#define EXACT_KICKS       24
#define EXACT_WORK        500000000 /* pairs of slots looked at, for sizes far from the usual */
#define SOLVE_WORK        100       /* per slot, and more where devices are very many */

/* Changes tried out with care after a short search, where there is time for enough of them. */
static void plan_care(struct arrange *a, uint32_t effort_us, uint32_t phase_us)
{
    const struct search_problem *p = &a->problem;
    uint32_t try_us = 4 + p->n_devices * p->n_slots / 20, draw_us = p->n_experts / 2;
    uint32_t before_us = CAREFUL_PHASES * phase_us + draw_us;
    a->n_tries = effort_us > before_us ? (effort_us - before_us) / try_us : 0;
    a->n_tries = a->n_tries < TRIES_MAX ? a->n_tries : TRIES_MAX;
    if (a->n_tries < TRIES_MIN)
        a->n_tries = 0;
    else if (a->n_phases > CAREFUL_PHASES)
        a->n_phases = CAREFUL_PHASES;
}

void arrange_init(struct arrange *a, const struct search_problem *problem,
                  const struct belief *belief, uint32_t effort_us)
{
    *a = (struct arrange){ .problem = *problem, .belief = belief };
    for (uint32_t k = 0; k < SCENARIOS; k++)
        a->problem.weight[k] = 1.0f / SCENARIOS;
    /* A phase looks at its candidates and draws for every expert; measured on one 2 GHz core. */
    uint32_t phase_us = 45 + problem->n_experts / 8;
    a->n_phases = effort_us / phase_us;
    a->n_phases = a->n_phases < 1 ? 1 : a->n_phases > PHASES_MAX ? PHASES_MAX : a->n_phases;
    size_t n = (size_t)problem->n_experts * SCENARIOS;
    a->load = xcalloc(a->n_phases * n, sizeof *a->load);
    plan_care(a, effort_us, phase_us);
    a->n_judges = a->n_tries ? ARRANGE_JUDGES_MAX : a->n_phases > 2 ? 2 : 1;
}

void arrange_fini(struct arrange *a)
{
    search_destroy(a->search);
    free(a->load);
    free(a->careful);
    free(a->judge);
    *a = (struct arrange){ 0 };
}

/* Lives until the next one begins. */
static struct search *begin_search(struct arrange *a, const struct placement *start,
                                   const float *load)
{
    if (a->search)
        search_restart(a->search, start, load);
    else
        a->search = search_create(&a->problem, start, load);
    return a->search;
}

static void draw_judges(struct arrange *a)
{
    size_t n = (size_t)a->problem.n_experts * SCENARIOS;
    if (a->judge)
        return;
    a->judge = xcalloc(a->n_judges * n, sizeof *a->judge);
    for (uint32_t i = 0; i < a->n_judges; i++)
        scenario_draw(a->belief, a->problem.n_devices,
                      scenario_hash(a->problem.seed ^ (JUDGE_SEED + i)), a->judge + i * n);
}

/* The same phase sees the same scenarios, whatever is being arranged. */
static const float *draw(struct arrange *a, uint32_t phase)
{
    size_t n = (size_t)a->problem.n_experts * SCENARIOS;
    for (; a->n_drawn <= phase; a->n_drawn++)
        scenario_draw(a->belief, a->problem.n_devices,
                      scenario_hash(a->problem.seed ^ (a->n_drawn + 1)), a->load + a->n_drawn * n);
    return a->load + phase * n;
}

/* What the searches leave is refined, on scenarios of its own. */
static void refine_placement(struct arrange *a, const struct placement *in_force,
                             struct placement *p)
{
    size_t n = (size_t)a->problem.n_experts * SCENARIOS;
    if (!a->n_tries)
        return;
    if (!a->careful) {
        a->careful = xcalloc(REFINE_DRAWS * n, sizeof *a->careful);
        for (uint32_t i = 0; i < REFINE_DRAWS; i++)
            scenario_draw(a->belief, a->problem.n_devices,
                          scenario_hash(a->problem.seed ^ (CAREFUL_SEED + i)), a->careful + i * n);
    }
    refine(&a->problem, in_force, a->careful, a->n_tries, p);
}

/* Cools to zero, so that the last phase only improves. */
static void search_phases(struct arrange *a, const struct placement *start, struct placement *out)
{
    struct search *s = begin_search(a, start, draw(a, 0));
    for (uint32_t i = 0; i < a->n_phases; i++) {
        if (i)
            search_redraw(s, draw(a, i));
        search_run(s, PHASE_CANDIDATES, HEAT * (float)(a->n_phases - 1 - i) / (float)a->n_phases);
    }
    search_placement(s, search_n_steps(s) - 1, out);
}

/* Copies by the load to a power below 1: what is hot now will be less so, what is not may be. */
static void pack_fresh(const struct arrange *a, struct placement *out)
{
    uint32_t n = a->problem.n_experts, *copies = xcalloc(n, sizeof *copies);
    double *worth = xcalloc(n, sizeof *worth);
    for (uint32_t e = 0; e < n; e++)
        worth[e] = (double)powf((float)a->belief->mean[e], COPY_POWER);
    pack_copies(n, a->problem.n_devices, placement_n_total(out), worth, copies);
    pack_place(a->belief->mean, copies, a->problem.speed, a->problem.n_nodes, out);
    free(worth);
    free(copies);
}

void arrange_fresh(struct arrange *a, const struct placement *start, struct placement *out)
{
    float price = a->problem.move_price;
    struct placement packed;
    placement_init_like(&packed, start);
    pack_fresh(a, &packed);
    a->problem.move_price = 0; /* everything moves anyway, compared with packed */
    if (a->n_tries)
        placement_copy(out, &packed);
    else
        search_phases(a, &packed, out);
    refine_placement(a, &packed, out);
    a->problem.move_price = price;
    placement_fini(&packed);
}

void arrange_copies(struct arrange *a, const struct placement *start, struct placement *out)
{
    bool keep_homes = a->problem.keep_homes;
    a->problem.keep_homes = true;
    search_phases(a, start, out);
    refine_placement(a, start, out);
    a->problem.keep_homes = keep_homes;
}

void arrange_steps(struct arrange *a, const struct placement *start, struct placement *out)
{
    struct search *s = begin_search(a, start, draw(a, 0));
    search_run(s, PHASE_CANDIDATES * (1 + a->n_phases / 4), 0);
    const struct search_step *step = search_steps(s);
    uint32_t best = 0;
    double least = INFINITY;
    for (uint32_t i = 0; i < search_n_steps(s); i++) {
        double worth = step[i].ratio + (double)a->problem.move_price * step[i].n_moves;
        if (worth < least) {
            least = worth;
            best = i;
        }
    }
    search_placement(s, best, out);
    refine_placement(a, start, out);
}

void arrange_judge(struct arrange *a, const struct placement *p, float *out)
{
    draw_judges(a);
    size_t n = (size_t)a->problem.n_experts * SCENARIOS;
    struct search *s = begin_search(a, p, a->judge);
    search_ratios(s, out);
    for (uint32_t i = 1; i < a->n_judges; i++) {
        search_redraw(s, a->judge + i * n);
        search_ratios(s, out + i * SCENARIOS);
    }
}

/* ---- to the last row ------------------------------------------------------------------------- */

struct exact {
    const double *load, *speed;
    struct placement *p;
    uint8_t *locked;   /* (n_devices) */
    uint32_t *n_copies;
    double   even;     /* load over speed if all were even */
    int64_t  work;     /* that is left */
};

struct swap {
    uint32_t a, b; /* slots */
    double   miss; /* how far the exchanged load is from what should leave */
};

/* How good: the heaviest device first; where that is equal, because several are as heavy, how
 * uneven all are. */
struct worth {
    double ratio, unevenness;
};

static struct worth solve(struct exact *x)
{
    struct split *s = split_create(x->p, x->speed);
    struct worth w = { .ratio = split_solve(s, x->load, NULL) / x->even };
    const double *device = split_device_load(s);
    for (uint32_t g = 0; g < x->p->n_devices; g++) {
        double speed = x->speed ? x->speed[g] : 1, d = device[g] / speed / x->even - 1;
        w.unevenness += d * d * speed;
    }
    split_locked(s, x->locked);
    split_destroy(s);
    x->work -= (int64_t)SOLVE_WORK * placement_n_total(x->p) * (1 + x->p->n_devices / 256);
    return w;
}

static bool is_better(struct worth a, struct worth b)
{
    return a.ratio < b.ratio - 1e-9 ||
           (a.ratio < b.ratio + 1e-9 && a.unevenness < b.unevenness - 1e-7);
}

/* What leaves the locked devices with slot a's expert: nothing if a copy of it stays outside. */
static double weight_of(const struct exact *x, uint32_t slot)
{
    int32_t e = x->p->expert[slot];
    return e < 0 || x->n_copies[e] > 1 ? 0 : x->load[e];
}

static bool may_swap(const struct placement *p, uint32_t a, uint32_t b, bool keep_homes)
{
    int32_t ea = p->expert[a], eb = p->expert[b];
    if (ea == eb || (keep_homes && ((ea >= 0 && p->home[ea] == a) ||
                                    (eb >= 0 && p->home[eb] == b))))
        return false;
    return (ea < 0 || placement_find(p, b / p->n_slots, (uint32_t)ea) < 0) &&
           (eb < 0 || placement_find(p, a / p->n_slots, (uint32_t)eb) < 0);
}

static void do_swap(struct placement *p, uint32_t a, uint32_t b)
{
    int32_t ea = p->expert[a], eb = p->expert[b];
    p->expert[a] = eb;
    p->expert[b] = ea;
    if (ea >= 0 && p->home[ea] == a)
        p->home[ea] = b;
    if (eb >= 0 && p->home[eb] == b)
        p->home[eb] = a;
}

struct swaps {
    struct swap at[EXACT_TRIES]; /* the nearest misses first */
    uint32_t n;
};

static void keep_near(struct swaps *l, struct swap s)
{
    if (l->n == EXACT_TRIES && s.miss >= l->at[l->n - 1].miss)
        return;
    uint32_t i = l->n < EXACT_TRIES ? l->n++ : l->n - 1;
    for (; i > 0 && l->at[i - 1].miss > s.miss; i--)
        l->at[i] = l->at[i - 1];
    l->at[i] = s;
}

/* Swaps between locked and other devices: with `leave` > 0 those that take nearest to so much load
 * out; with 0 those that take one copy of several out, which opens a way, and little else in. */
static void list_swaps(struct exact *x, double leave, bool keep_homes, struct swaps *out)
{
    const struct placement *p = x->p;
    out->n = 0;
    for (uint32_t a = 0; a < placement_n_total(p) && x->work > 0; a++) {
        bool is_copy = p->expert[a] >= 0 && x->n_copies[p->expert[a]] > 1;
        if (!x->locked[a / p->n_slots] || (leave > 0 ? weight_of(x, a) <= 0 : !is_copy))
            continue;
        x->work -= placement_n_total(p);
        for (uint32_t b = 0; b < placement_n_total(p); b++) {
            double d = weight_of(x, a) - weight_of(x, b), miss = fabs(d - leave);
            if (x->locked[b / p->n_slots] || (leave > 0 && d <= 0) ||
                (out->n == EXACT_TRIES && miss >= out->at[out->n - 1].miss) ||
                !may_swap(p, a, b, keep_homes))
                continue;
            keep_near(out, (struct swap){ a, b, miss });
        }
    }
}

/* One swap that lowers the ratio; the whole excess of the locked devices need not leave at once. */
static bool relieve(struct exact *x, struct worth *worth, bool keep_homes)
{
    static const double part[] = { 1, 0.5, 0, 0.25, 0.1, 0.02 };
    struct swaps swaps;
    double speed_locked = 0, excess;
    for (uint32_t g = 0; g < x->p->n_devices; g++)
        speed_locked += x->locked[g] ? (x->speed ? x->speed[g] : 1) : 0;
    excess = (worth->ratio - 1) * x->even * speed_locked;
    uint8_t *locked = xmemdup(x->locked, x->p->n_devices);
    bool found = false;
    for (size_t k = 0; k < sizeof part / sizeof *part && !found; k++) {
        list_swaps(x, excess * part[k], keep_homes, &swaps);
        for (uint32_t i = 0; i < swaps.n && !found && x->work > 0; i++) {
            do_swap(x->p, swaps.at[i].a, swaps.at[i].b);
            struct worth now = solve(x);
            found = is_better(now, *worth);
            if (found)
                *worth = now;
            else
                do_swap(x->p, swaps.at[i].a, swaps.at[i].b);
        }
        if (!found)
            memcpy(x->locked, locked, x->p->n_devices);
    }
    free(locked);
    return found;
}

/* A few swaps out of what no single one improves. */
static void kick(struct exact *x, uint64_t seed, bool keep_homes)
{
    uint32_t n = placement_n_total(x->p);
    for (uint64_t i = 0, done = 0; done < 3 && i < 256; i++) {
        uint64_t r = scenario_hash(seed * 256 + i);
        uint32_t a = (uint32_t)r % n, b = (uint32_t)(r >> 32) % n;
        if (x->locked[a / x->p->n_slots] && !x->locked[b / x->p->n_slots] &&
            may_swap(x->p, a, b, keep_homes)) {
            do_swap(x->p, a, b);
            done++;
        }
    }
}

void arrange_exactly(const double *load, const double *speed, bool keep_homes,
                     struct placement *p)
{
    double speed_sum = 0, sum = 0;
    struct exact x = { .load = load, .speed = speed, .p = p, .work = EXACT_WORK };
    for (uint32_t g = 0; g < p->n_devices; g++)
        speed_sum += speed ? speed[g] : 1;
    for (uint32_t e = 0; e < p->n_experts; e++)
        sum += load[e];
    if (!(sum > 0))
        return;
    x.even = sum / speed_sum;
    x.locked = xcalloc(p->n_devices, sizeof *x.locked);
    x.n_copies = xcalloc(p->n_experts, sizeof *x.n_copies);
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        if (p->expert[s] >= 0)
            x.n_copies[p->expert[s]]++;
    struct worth worth = solve(&x), least = worth;
    struct placement best;
    placement_init_like(&best, p);
    for (uint32_t i = 0, n_kicks = 0; i < EXACT_ROUNDS && worth.ratio > 1 + 1e-6 && x.work > 0;
         i++) {
        if (relieve(&x, &worth, keep_homes))
            continue;
        if (is_better(worth, least)) {
            placement_copy(&best, p);
            least = worth;
        }
        if (++n_kicks > EXACT_KICKS)
            break;
        kick(&x, n_kicks, keep_homes);
        worth = solve(&x);
    }
    if (!is_better(worth, least))
        placement_copy(p, &best);
    placement_fini(&best);
    free(x.n_copies);
    free(x.locked);
}
