/* device_load.c - tokens of experts become tokens of devices */
#include "coordinator/device_load.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "common/mem.h"
#include "common/split.h"

int device_load_in_order(const Ballast__JobSpec *spec, uint32_t n_experts, struct placement *out)
{
    uint32_t n_devices = spec ? spec->parallel_expert_parallel_degree : 0;
    if (!n_devices)
        return -EINVAL;
    uint32_t n_slots = (n_experts + n_devices - 1) / n_devices +
                       spec->rebalance_spare_slots_per_rank;
    return placement_init(out, n_experts, n_devices, n_slots, NULL);
}

uint32_t device_load_n_devices(const Ballast__Placement *m, const Ballast__JobSpec *spec)
{
    return m && m->n_devices ? m->n_devices : spec ? spec->parallel_expert_parallel_degree : 0;
}

static double solve(const struct placement *p, const uint64_t *tokens, double *sums)
{
    double sum = 0, *load = xcalloc(p->n_experts, sizeof *load);
    for (uint32_t e = 0; e < p->n_experts; e++)
        sum += load[e] = (double)tokens[e];
    struct split *split = split_create(p, NULL);
    double most = split_solve(split, load, NULL);
    for (uint32_t d = 0; sums && d < p->n_devices; d++)
        sums[d] += split_device_load(split)[d];
    split_destroy(split);
    free(load);
    return sum > 0 ? most * p->n_devices / sum : 1;
}

double device_load_imbalance(const Ballast__Placement *m, const Ballast__JobSpec *spec,
                             uint32_t layer, const uint64_t *tokens, uint32_t n_experts,
                             double *sums)
{
    struct placement p;
    for (size_t i = 0; m && i < m->n_layers; i++) {
        const Ballast__PlacementLayer *l = m->layers[i];
        if (l->layer != layer || l->n_home != n_experts)
            continue;
        p = (struct placement){.n_experts = n_experts, .n_devices = m->n_devices,
                               .n_slots = m->n_slots, .expert = l->experts, .share = l->share,
                               .home = l->home};
        return solve(&p, tokens, sums);
    }
    if (device_load_in_order(spec, n_experts, &p) < 0)
        return (double)NAN;
    double imbalance = solve(&p, tokens,
                             p.n_devices == device_load_n_devices(m, spec) ? sums : NULL);
    placement_fini(&p);
    return imbalance;
}
