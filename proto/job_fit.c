/* job_fit.c - tries the settings that change memory but not what is trained, cheapest first
 *
 * A change's cost is a guess at the part of the speed that it takes: recomputing a third of the
 * work, a finer cut more traffic, smaller passes worse products; layers in segments, too, where
 * those have few rows. Sets are tried in all combinations; one is not worth telling where some of
 * its changes are enough and cost no more. */
#include "proto/job_fit.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "proto/job_spec.h"

#define N_BEST       3
#define COST_SELECTIVE 0.15
#define COST_RECOMPUTE 0.33
#define COST_CUT       0.03 /* each doubling of a degree */
#define COST_PASS      0.10 /* each halving of the micro-batch */
#define COST_SPARE     0.02
#define COST_BLOCKING  0.10 /* 0.03 to 0.21 on two cores */
#define COST_SEGMENTS  0.03
#define COST_ROWS      256.0 /* over the tokens of a segment */
#define SEGMENT_MIN    512u
#define COST_WORKERS   1.0  /* each doubling: it takes more machines */

enum { RECOMPUTE = 1, FSDP = 2, EP = 4, MICRO = 8, SPARE = 16, WORKERS = 32, BLOCKING = 64,
       SEGMENTS = 128, N_MASKS = 256 };

struct set {
    unsigned changed;
    double   cost;
    uint64_t bytes;
    uint32_t workers, fsdp, ep, micro;
    uint32_t segment; /* tokens; 0: as it is */
    enum recompute recompute;
};

struct search {
    const Ballast__JobSpec *spec; /* as it is */
    const struct model_spec *model;
    struct memory_input in;       /* of it */
    uint64_t most_bytes;
    uint32_t node_ranks;          /* 0: all are on one node, or it does not matter */
    bool     may_cut;             /* layers may take a pass in segments */
    struct set cheapest[N_MASKS]; /* by the keys that are changed; changed 0: none fits */
    struct set best[N_BEST];
    uint32_t n_best;
};

static double doublings(uint32_t from, uint32_t to)
{
    double n = 0;
    for (double x = from; x < to; x *= 2)
        n++;
    return n;
}

/* Of sets that change the same keys only the cheapest stays. */
static void keep(struct search *s, const struct set *x)
{
    struct set *best = &s->cheapest[x->changed];
    if (!best->changed || x->cost < best->cost)
        *best = *x;
}

/* Whether some of its changes are enough, and cost no more: with other values. */
static bool is_pointless(const struct search *s, const struct set *x)
{
    for (unsigned m = 1; m < N_MASKS; m++)
        if (m != x->changed && (m & x->changed) == m && s->cheapest[m].changed &&
            s->cheapest[m].cost <= x->cost)
            return true;
    return false;
}

static void choose(struct search *s)
{
    for (unsigned m = 1; m < N_MASKS; m++) {
        const struct set *x = &s->cheapest[m];
        uint32_t at = s->n_best;
        if (!x->changed || is_pointless(s, x))
            continue;
        while (at > 0 && s->best[at - 1].cost > x->cost)
            at--;
        if (at == N_BEST)
            continue;
        if (s->n_best < N_BEST)
            s->n_best++;
        memmove(&s->best[at + 1], &s->best[at], (s->n_best - at - 1) * sizeof *x);
        s->best[at] = *x;
    }
}

/* On how many nodes an expert group may come to lie. */
static uint32_t nodes_of(uint32_t ep, uint32_t node_ranks)
{
    bool is_even = ep % node_ranks == 0 || node_ranks % ep == 0;
    return (ep + node_ranks - 1) / node_ranks + !is_even;
}

static bool fits_in(const struct search *s, struct memory_input in, uint32_t segment,
                    uint64_t *out_bytes)
{
    in.segment_tokens = segment;
    *out_bytes = memory_model(&in).total;
    return *out_bytes <= s->most_bytes;
}

/* The longest segments with which a set fits that does not without. */
static void try_segments(struct search *s, struct set x, struct memory_input in)
{
    uint64_t now = memory_tokens_at_once(&in);
    if (!s->may_cut || x.recompute != RECOMPUTE_FULL || now <= SEGMENT_MIN ||
        !fits_in(s, in, SEGMENT_MIN, &x.bytes))
        return;
    for (x.segment = 1u << 31; x.segment >= now;)
        x.segment /= 2;
    while (!fits_in(s, in, x.segment, &x.bytes))
        x.segment /= 2;
    x.changed |= SEGMENTS;
    x.cost += COST_SEGMENTS + COST_ROWS / x.segment;
    keep(s, &x);
}

static void try_set(struct search *s, struct set x)
{
    Ballast__JobSpec spec = *s->spec;
    struct memory_input in = s->in;
    struct layout layout;
    struct err err;
    uint64_t pass = (uint64_t)x.workers * x.micro;
    if (spec.train_global_batch % pass != 0)
        return;
    spec.parallel_workers = x.workers;
    spec.parallel_fsdp_shard_degree = x.fsdp;
    spec.parallel_expert_parallel_degree = x.ep;
    if (x.changed & (EP | WORKERS))
        spec.parallel_expert_shard_degree = 0;
    in.n_tokens = (uint64_t)x.micro * spec.data_sequence_length;
    in.recompute = x.recompute;
    in.n_spare = x.changed & SPARE ? 0 : in.n_spare;
    in.is_blocking = in.is_blocking || x.changed & BLOCKING;
    if (layout_init(job_spec_degrees(&spec), s->model->n_experts, 0, &layout, &err) < 0)
        return;
    in.degrees = layout.degrees;
    if (s->node_ranks)
        in.n_nodes = nodes_of(x.ep, s->node_ranks);
    x.bytes = memory_model(&in).total;
    if (x.bytes > s->most_bytes)
        try_segments(s, x, in);
    else if (x.changed)
        keep(s, &x);
    layout_fini(&layout);
}

/* All cuts of as many workers, no coarser than now. */
static void try_cuts(struct search *s, struct set x)
{
    const Ballast__JobSpec *j = s->spec;
    for (x.fsdp = j->parallel_fsdp_shard_degree; x.fsdp <= x.workers; x.fsdp *= 2)
        for (x.ep = j->parallel_expert_parallel_degree; x.ep <= x.workers; x.ep *= 2) {
            struct set y = x;
            y.changed |= (x.fsdp != j->parallel_fsdp_shard_degree ? FSDP : 0) |
                         (x.ep != j->parallel_expert_parallel_degree ? EP : 0);
            y.cost += COST_CUT * (doublings(j->parallel_fsdp_shard_degree, x.fsdp) +
                                  doublings(j->parallel_expert_parallel_degree, x.ep));
            try_set(s, y);
        }
}

/* With and without overlap: without it a unit's weights and gradients wait for no others. */
static void try_overlap(struct search *s, struct set x)
{
    try_cuts(s, x);
    if (s->in.is_blocking)
        return;
    x.changed |= BLOCKING;
    x.cost += COST_BLOCKING;
    try_cuts(s, x);
}

/* All ways to recompute from now's on, with and without spare slots. */
static void try_others(struct search *s, struct set x)
{
    static const double costs[] = {0, COST_SELECTIVE, COST_RECOMPUTE};
    enum recompute now = s->in.recompute;
    for (int spare = 0; spare <= (s->spec->rebalance_spare_slots_per_rank > 0); spare++)
        for (int how = now; how < RECOMPUTE_WAYS; how++) {
            struct set y = x;
            y.recompute = (enum recompute)how;
            y.changed |= (how != (int)now ? RECOMPUTE : 0) | (spare ? SPARE : 0);
            y.cost += costs[how] - costs[now] + (spare ? COST_SPARE : 0);
            try_overlap(s, y);
        }
}

static void try_all(struct search *s)
{
    const Ballast__JobSpec *j = s->spec;
    for (uint32_t more = 1; more <= 8; more *= 2)
        for (uint32_t micro = j->train_micro_batch; micro > 0; micro /= 2) {
            struct set x = {.workers = j->parallel_workers * more, .micro = micro};
            if (x.workers > RANKS_MAX)
                continue;
            x.changed = (more > 1 ? WORKERS : 0) | (micro != j->train_micro_batch ? MICRO : 0);
            x.cost = COST_WORKERS * doublings(1, more) +
                     COST_PASS * doublings(micro, j->train_micro_batch);
            try_others(s, x);
        }
}

/* ---- words ----------------------------------------------------------------------------------- */

static void add(char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(char *text, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, JOB_FIT_TEXT_MAX - used, format, args);
    va_end(args);
}

static void add_key(char *text, bool *has_one, const char *key, uint32_t value)
{
    add(text, "%s%s: %" PRIu32, *has_one ? ", " : "", key, value);
    *has_one = true;
}

static void add_set(char *text, const struct set *x)
{
    bool has_one = false;
    if (x->changed & WORKERS)
        add_key(text, &has_one, "parallel.workers", x->workers);
    if (x->changed & FSDP)
        add_key(text, &has_one, "parallel.fsdp_shard_degree", x->fsdp);
    if (x->changed & EP)
        add_key(text, &has_one, "parallel.expert_parallel_degree", x->ep);
    if (x->changed & MICRO)
        add_key(text, &has_one, "train.micro_batch", x->micro);
    if (x->changed & SPARE)
        add_key(text, &has_one, "rebalance.spare_slots_per_rank", 0);
    if (x->changed & BLOCKING) {
        add(text, "%sparallel.overlap: false", has_one ? ", " : "");
        has_one = true;
    }
    if (x->changed & SEGMENTS)
        add_key(text, &has_one, "parallel.segment_tokens", x->segment);
    if (x->changed & RECOMPUTE)
        add(text, "%sparallel.activation_checkpointing: %s", has_one ? ", " : "",
            recompute_words[x->recompute]);
    add(text, " (%" PRIu64 " MiB a rank)", x->bytes >> 20);
}

/* Where capacities or the balance loss are of a segment, it would be another training. */
static bool may_cut(const Ballast__JobSpec *spec, const struct model_spec *model,
                    const struct job_machine *on)
{
    Ballast__JobSpec cut = *spec;
    struct problems problems = {0};
    struct tensor_map map;
    struct memory_input in;
    const char *key;
    cut.parallel_segment_tokens = SEGMENT_MIN;
    cut.parallel_activation_checkpointing = (char *)recompute_words[RECOMPUTE_FULL];
    bool is_same = spec->moe_capacity_factor <= 0 &&
                   !(spec->moe_aux_loss > 0 && !strcmp(spec->moe_aux_scope, "micro_batch"));
    bool may = is_same && job_spec_check_together(&cut, JOB_EXPERTS_UNKNOWN, &problems) == 0 &&
               job_memory_input(&cut, model, on, &map, &in, &key, NULL) == 0;
    if (may)
        tensor_map_fini(&map);
    problems_fini(&problems);
    return may;
}

void job_fit_text(const Ballast__JobSpec *spec, const struct model_spec *model,
                  const struct job_machine *on, uint64_t most_bytes,
                  char out_text[JOB_FIT_TEXT_MAX])
{
    struct search s = {.spec = spec, .model = model, .most_bytes = most_bytes};
    if (on && strcmp(spec->parallel_hierarchical_all_to_all, "off"))
        s.node_ranks = on->node_ranks;
    struct tensor_map map;
    const char *key;
    if (job_memory_input(spec, model, on, &map, &s.in, &key, NULL) == 0) {
        s.may_cut = may_cut(spec, model, on);
        try_all(&s);
        choose(&s);
        tensor_map_fini(&map);
    }
    out_text[0] = '\0';
    if (s.n_best == 0) {
        add(out_text, "no cut over up to %" PRIu32 " workers fits; a smaller model, shorter "
            "sequences, or train.mode: lora would", spec->parallel_workers * 8);
        return;
    }
    add(out_text, "%s fits: ", s.n_best > 1 ? "any of these" : "this");
    for (uint32_t i = 0; i < s.n_best; i++) {
        add(out_text, "%s", i ? "; or " : "");
        add_set(out_text, &s.best[i]);
    }
}
