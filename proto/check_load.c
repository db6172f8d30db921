/* check_load.c - what the fields of expert load and placements mean together */
#include "proto/check.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>

#include "common/placement.h"

static bool is_amount(double x)
{
    return isfinite(x) && x >= 0;
}

static int check_costs(const Ballast__LoadReport *r, struct err *err)
{
    if (!is_amount(r->step_s) || !is_amount(r->row_s) || !is_amount(r->link_bytes_per_s) ||
        !(is_amount(r->device_imbalance) || isnan(r->device_imbalance)))
        return err_set(err, -EINVAL, "times, rates and imbalance are numbers from 0");
    for (size_t i = 0; i < r->n_speed; i++)
        if (!isfinite(r->speed[i]) || r->speed[i] <= 0)
            return err_set(err, -EINVAL, "the speed of device %zu is not above 0", i);
    return 0;
}

int check_load_report(const Ballast__LoadReport *r, struct err *err)
{
    uint64_t n_counts = (uint64_t)r->n_nodes * r->n_experts;
    if (r->first_step > r->last_step)
        return err_set(err, -EINVAL, "the window of steps %" PRIu64 " to %" PRIu64 " is none",
                       r->first_step, r->last_step);
    for (size_t i = 0; i < r->n_layers; i++) {
        const Ballast__LayerLoad *l = r->layers[i];
        if (i && l->layer <= r->layers[i - 1]->layer)
            return err_set(err, -EINVAL, "layer %u is not after layer %u", l->layer,
                           r->layers[i - 1]->layer);
        if (l->n_tokens != n_counts)
            return err_set(err, -EINVAL, "layer %u has %zu counts, expected %u nodes x %u "
                           "experts", l->layer, l->n_tokens, r->n_nodes, r->n_experts);
    }
    return check_costs(r, err);
}

static int check_layer(const Ballast__Placement *p, const Ballast__PlacementLayer *l,
                       struct err *err)
{
    uint64_t n_total = (uint64_t)p->n_devices * p->n_slots;
    struct err why = {0};
    if (l->n_experts != n_total || l->n_share != n_total)
        return err_set(err, -EINVAL, "layer %u has %zu slots and %zu shares, expected %u devices "
                       "x %u slots", l->layer, l->n_experts, l->n_share, p->n_devices, p->n_slots);
    const struct placement map = {
        .n_experts = (uint32_t)l->n_home, .n_devices = p->n_devices, .n_slots = p->n_slots,
        .expert = l->experts, .share = l->share, .home = l->home,
    };
    int rc = placement_check(&map, &why);
    return rc < 0 ? err_set(err, rc, "layer %u: %s", l->layer, why.text) : 0;
}

int check_placement(const Ballast__Placement *p, struct err *err)
{
    if ((uint64_t)p->n_devices * p->n_slots > PLACEMENT_SLOTS_MAX)
        return err_set(err, -EINVAL, "%u devices x %u slots: at most %u slots are allowed",
                       p->n_devices, p->n_slots, PLACEMENT_SLOTS_MAX);
    for (size_t i = 0; i < p->n_layers; i++) {
        if (i && p->layers[i]->layer <= p->layers[i - 1]->layer)
            return err_set(err, -EINVAL, "layer %u is not after layer %u", p->layers[i]->layer,
                           p->layers[i - 1]->layer);
        if (p->layers[i]->n_home != p->layers[0]->n_home)
            return err_set(err, -EINVAL, "layer %u has %zu experts, others %zu",
                           p->layers[i]->layer, p->layers[i]->n_home, p->layers[0]->n_home);
        int rc = check_layer(p, p->layers[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}
