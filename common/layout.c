/* layout.c - cuts the ranks of a job into its groups */
#include "common/layout.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/mem.h"

#define DEGREES_SHOWN 8u

static bool divides(uint32_t i, uint32_t a, uint32_t b)
{
    return a % i == 0 && (!b || b % i == 0);
}

void layout_degrees_text(uint32_t a, uint32_t b, uint32_t wanted,
                         char out[LAYOUT_DEGREES_TEXT_MAX])
{
    uint32_t n = 0, below = 1, above = 0;
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 1; i <= a; i++) {
        if (!divides(i, a, b))
            continue;
        n++;
        if (i <= wanted)
            below = i;
        else if (!above)
            above = i;
    }
    for (uint32_t i = 1; i <= a; i++) {
        bool is_near = i == below || i == above;
        if (!divides(i, a, b) || (n > DEGREES_SHOWN && !is_near))
            continue;
        used += (size_t)snprintf(out + used, LAYOUT_DEGREES_TEXT_MAX - used, "%s%u",
                                 used ? ", " : n > DEGREES_SHOWN && i > 1 ? "..., " : "", i);
    }
    if (n > DEGREES_SHOWN && above != a && above)
        snprintf(out + used, LAYOUT_DEGREES_TEXT_MAX - used, ", ...");
}

static int degree_check(const char *key, uint32_t degree, uint32_t of, const char *what,
                        uint32_t also, struct err *err)
{
    if (degree && of % degree == 0 && (!also || also % degree == 0))
        return 0;
    char allowed[LAYOUT_DEGREES_TEXT_MAX];
    layout_degrees_text(of, also, degree, allowed);
    return err_set(err, -EINVAL, "%s %u does not divide %u %s%s; use one of %s", key, degree, of,
                   what, also ? " and the model's experts" : "", allowed);
}

/* n ranks first, first + step, ...; rank must be one of them. */
static struct rank_group group_of(uint32_t first, uint32_t step, uint32_t n, uint32_t rank)
{
    struct rank_group g = { xcalloc(n, sizeof *g.ranks), n, (rank - first) / step };
    for (uint32_t i = 0; i < n; i++)
        g.ranks[i] = first + i * step;
    assert(g.me < n && g.ranks[g.me] == rank);
    return g;
}

int layout_init(struct layout_degrees d, uint32_t n_experts, uint32_t rank, struct layout *out,
                struct err *err)
{
    int rc;

    if (!d.world || d.world > RANKS_MAX)
        return err_set(err, -EINVAL, "workers %u: a job has 1 to %u workers", d.world, RANKS_MAX);
    if (rank >= d.world)
        return err_set(err, -EINVAL, "rank %u: a job of %u workers has ranks 0 to %u", rank,
                       d.world, d.world - 1);
    rc = degree_check("fsdp_shard_degree", d.fsdp, d.world, "workers", 0, err);
    if (rc < 0)
        return rc;
    /* A model without experts has nothing to spread: only degree 1 divides. */
    rc = degree_check("expert_parallel_degree", d.ep, d.world, "workers",
                      n_experts ? n_experts : 1, err);
    if (rc < 0)
        return rc;
    uint32_t n_same = d.world / d.ep;
    if (!d.expert_shard)
        d.expert_shard = n_same;
    rc = degree_check("expert_shard_degree", d.expert_shard, n_same,
                      "workers that hold the same experts", 0, err);
    if (rc < 0)
        return rc;

    uint32_t place = rank % d.ep, nth = rank / d.ep; /* nth of the ranks with the same experts */
    uint32_t shard_first = nth - nth % d.expert_shard;
    *out = (struct layout){
        .degrees = d,
        .rank = rank,
        .fsdp = group_of(rank - rank % d.fsdp, 1, d.fsdp, rank),
        .fsdp_replica = group_of(rank % d.fsdp, d.fsdp, d.world / d.fsdp, rank),
        .ep = group_of(rank - place, 1, d.ep, rank),
        .expert_shard = group_of(place + shard_first * d.ep, d.ep, d.expert_shard, rank),
        .expert_replica = group_of(place + nth % d.expert_shard * d.ep, d.ep * d.expert_shard,
                                   n_same / d.expert_shard, rank),
    };
    return 0;
}

void layout_fini(struct layout *l)
{
    free(l->fsdp.ranks);
    free(l->fsdp_replica.ranks);
    free(l->ep.ranks);
    free(l->expert_shard.ranks);
    free(l->expert_replica.ranks);
    *l = (struct layout){0};
}
