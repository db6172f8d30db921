/* job_degrees.c - the degrees of a job against its workers, its experts and each other
 *
 * What may be written for one degree is no help where another is wrong, too, or where the number
 * of workers is the mistake; so the nearest whole layouts are told as well. */
#include "proto/job_degrees.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/layout.h"
#include "proto/job_spec.h"

#define WHOLE_TEXT_MAX 256

/* A degree that is wrong, or that would have to be another one beside the others. */
struct degree {
    const char *key;
    uint32_t    is, nearest;
};
enum { FSDP, EP, SHARD, DEGREES };

/* What the expert degree must divide besides the workers; 0: not known. */
static uint32_t experts_to_divide(uint32_t n_experts)
{
    return n_experts == JOB_EXPERTS_UNKNOWN ? 0 : n_experts ? n_experts : 1;
}

static bool divides(uint32_t degree, uint32_t a, uint32_t b)
{
    return a % degree == 0 && (!b || b % degree == 0);
}

/* Of the degrees that divide both. */
static uint32_t nearest(uint32_t wanted, uint32_t a, uint32_t b)
{
    uint32_t best = 1;
    for (uint32_t i = 2; i <= a; i++) {
        uint32_t from_best = wanted > best ? wanted - best : best - wanted;
        uint32_t from_i = wanted > i ? wanted - i : i - wanted;
        if (divides(i, a, b) && from_i < from_best)
            best = i;
    }
    return best;
}

/* ---- with other workers ---------------------------------------------------------------------- */

static bool fits(const Ballast__JobSpec *s, uint32_t workers, uint32_t n_experts)
{
    uint32_t ep = s->parallel_expert_parallel_degree, shard = s->parallel_expert_shard_degree;
    return divides(s->parallel_fsdp_shard_degree, workers, 0) &&
           divides(ep, workers, experts_to_divide(n_experts)) &&
           (!shard || workers / ep % shard == 0) &&
           s->train_global_batch % ((uint64_t)workers * s->train_micro_batch) == 0;
}

/* "; or parallel.workers: 4 or 8". */
static void tell_workers(const Ballast__JobSpec *s, uint32_t n_experts, char *text)
{
    uint32_t below = s->parallel_workers - 1, above = s->parallel_workers + 1;
    while (below && !fits(s, below, n_experts))
        below--;
    while (above <= RANKS_MAX && !fits(s, above, n_experts))
        above++;
    if (below && above <= RANKS_MAX)
        sprintf(text, "; or parallel.workers: %" PRIu32 " or %" PRIu32, below, above);
    else if (below || above <= RANKS_MAX)
        sprintf(text, "; or parallel.workers: %" PRIu32, below ? below : above);
}

/* ---- with these workers ---------------------------------------------------------------------- */

static void find_nearest(const Ballast__JobSpec *s, uint32_t n_experts,
                         struct degree out[DEGREES])
{
    uint32_t workers = s->parallel_workers;
    out[FSDP] = (struct degree){"fsdp_shard_degree", s->parallel_fsdp_shard_degree, 0};
    out[EP] = (struct degree){"expert_parallel_degree", s->parallel_expert_parallel_degree, 0};
    out[SHARD] = (struct degree){"expert_shard_degree", s->parallel_expert_shard_degree, 0};
    out[FSDP].nearest = nearest(out[FSDP].is, workers, 0);
    out[EP].nearest = nearest(out[EP].is, workers, experts_to_divide(n_experts));
    if (out[SHARD].is) /* else it is what remains */
        out[SHARD].nearest = nearest(out[SHARD].is, workers / out[EP].nearest, 0);
}

/* "; together: fsdp_shard_degree 3, expert_parallel_degree 2", where one alone is not enough. */
static void tell_together(const struct degree *d, char *text)
{
    uint32_t n = 0;
    for (int i = 0; i < DEGREES; i++)
        n += d[i].is != d[i].nearest;
    for (int i = 0, has_one = 0; n > 1 && i < DEGREES; i++)
        if (d[i].is != d[i].nearest)
            text += sprintf(text, "%s%s %" PRIu32, has_one++ ? ", " : "; together: ", d[i].key,
                            d[i].nearest);
}

/* ---- all ------------------------------------------------------------------------------------- */

static void add(const char *key, uint32_t degree, uint32_t n, uint32_t also, const char *what,
                const char *whole, struct problems *out)
{
    char allowed[LAYOUT_DEGREES_TEXT_MAX], path[64], experts[64] = "";
    layout_degrees_text(n, also, degree, allowed);
    snprintf(path, sizeof path, "parallel.%s", key);
    if (also)
        snprintf(experts, sizeof experts, " and the model's %" PRIu32 " experts", also);
    problems_add(out, NULL, path, "%" PRIu32 " does not divide the %" PRIu32 " %s%s, allowed %s%s",
                 degree, n, what, experts, allowed, whole);
}

static void check_batch(const Ballast__JobSpec *s, struct problems *out)
{
    uint64_t pass = (uint64_t)s->parallel_workers * s->train_micro_batch;
    uint64_t below = s->train_global_batch / pass * pass;
    if (s->train_global_batch % pass != 0)
        problems_add(out, NULL, "train.global_batch",
                     "%" PRIu32 " is not a multiple of micro_batch x workers = %" PRIu32
                     " x %" PRIu32 " = %" PRIu64 "; the nearest is %" PRIu64,
                     s->train_global_batch, s->train_micro_batch, s->parallel_workers, pass,
                     below ? below : pass);
}

void job_degrees_check(const Ballast__JobSpec *s, uint32_t n_experts, struct problems *out)
{
    uint32_t workers = s->parallel_workers, also = experts_to_divide(n_experts);
    char whole[WHOLE_TEXT_MAX] = "";
    struct degree d[DEGREES];
    find_nearest(s, n_experts, d);
    tell_together(d, whole);
    tell_workers(s, n_experts, whole + strlen(whole));
    bool is_bad_ep = !divides(d[EP].is, workers, also);
    bool is_bad_shard = !is_bad_ep && d[SHARD].is && !divides(d[SHARD].is, workers / d[EP].is, 0);
    if (!divides(d[FSDP].is, workers, 0))
        add(d[FSDP].key, d[FSDP].is, workers, 0, "workers",
            is_bad_ep || is_bad_shard ? "" : whole, out);
    if (is_bad_ep && n_experts == 0)
        problems_add(out, NULL, "parallel.expert_parallel_degree",
                     "%" PRIu32 ", but the model has no experts, allowed 1", d[EP].is);
    else if (is_bad_ep)
        add(d[EP].key, d[EP].is, workers, also, "workers", whole, out);
    if (is_bad_shard)
        add(d[SHARD].key, d[SHARD].is, workers / d[EP].is, 0,
            workers == d[EP].is ? "worker that holds an expert"
                                : "workers that hold the same experts", whole, out);
    check_batch(s, out);
}
