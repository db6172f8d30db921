/* placement.c - the map of one layer's experts to slots, and its invariants */
#include "common/placement.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

int placement_init(struct placement *p, uint32_t n_experts, uint32_t n_devices,
                   uint32_t n_slots, struct err *err)
{
    if (n_experts < 1 || n_experts > EXPERTS_MAX)
        return err_set(err, -EINVAL, "%u experts: must be 1 to %u", n_experts, EXPERTS_MAX);
    if (n_devices < 1 || n_devices > RANKS_MAX)
        return err_set(err, -EINVAL, "%u devices: must be 1 to %u", n_devices, RANKS_MAX);
    uint64_t n_total = (uint64_t)n_devices * n_slots;
    if (n_total > PLACEMENT_SLOTS_MAX)
        return err_set(err, -EINVAL, "%u devices with %u slots each: more than %u slots",
                       n_devices, n_slots, PLACEMENT_SLOTS_MAX);
    if (n_total < n_experts)
        return err_set(err, -EINVAL, "%u experts do not fit on %u devices with %u slots each: "
                       "give at least %u slots per device", n_experts, n_devices, n_slots,
                       (n_experts + n_devices - 1) / n_devices);
    uint32_t per_device = (n_experts + n_devices - 1) / n_devices;
    *p = (struct placement){ .n_experts = n_experts, .n_devices = n_devices, .n_slots = n_slots };
    p->expert = xcalloc(n_total, sizeof *p->expert);
    p->share = xcalloc(n_total, sizeof *p->share);
    p->home = xcalloc(n_experts, sizeof *p->home);
    for (uint32_t s = 0; s < n_total; s++)
        p->expert[s] = PLACEMENT_EMPTY;
    for (uint32_t e = 0; e < n_experts; e++) {
        uint32_t slot = e / per_device * n_slots + e % per_device;
        p->expert[slot] = (int32_t)e;
        p->share[slot] = 1;
        p->home[e] = slot;
    }
    return 0;
}

void placement_init_like(struct placement *p, const struct placement *from)
{
    uint32_t n_total = placement_n_total(from);
    *p = *from;
    p->expert = xmemdup(from->expert, n_total * sizeof *p->expert);
    p->share = xmemdup(from->share, n_total * sizeof *p->share);
    p->home = xmemdup(from->home, from->n_experts * sizeof *p->home);
}

void placement_fini(struct placement *p)
{
    if (!p)
        return;
    free(p->expert);
    free(p->share);
    free(p->home);
    *p = (struct placement){ 0 };
}

void placement_copy(struct placement *to, const struct placement *from)
{
    uint32_t n_total = placement_n_total(from);
    memcpy(to->expert, from->expert, n_total * sizeof *to->expert);
    memcpy(to->share, from->share, n_total * sizeof *to->share);
    memcpy(to->home, from->home, from->n_experts * sizeof *to->home);
}

static int check_experts(const struct placement *p, const double *sum, const uint32_t *n_copies,
                         struct err *err)
{
    for (uint32_t e = 0; e < p->n_experts; e++) {
        if (!n_copies[e])
            return err_set(err, -EINVAL, "expert %u is in no slot", e);
        if (fabs(sum[e] - 1) > 1e-6)
            return err_set(err, -EINVAL, "shares of expert %u sum to %.9g, not to 1", e, sum[e]);
        if (p->home[e] >= placement_n_total(p) || p->expert[p->home[e]] != (int32_t)e)
            return err_set(err, -EINVAL, "home of expert %u: slot %u does not hold it", e,
                           p->home[e]);
    }
    return 0;
}

static int check_slots(const struct placement *p, double *sum, uint32_t *n_copies, uint32_t *seen,
                       struct err *err)
{
    for (uint32_t s = 0; s < placement_n_total(p); s++) {
        uint32_t device = s / p->n_slots;
        int32_t e = p->expert[s];
        if (e == PLACEMENT_EMPTY) {
            if (p->share[s] != 0)
                return err_set(err, -EINVAL, "slot %u is empty but has a share", s);
            continue;
        }
        if (e < 0 || (uint32_t)e >= p->n_experts)
            return err_set(err, -EINVAL, "slot %u holds expert %d: must be 0 to %u, or %d for "
                           "none", s, e, p->n_experts - 1, PLACEMENT_EMPTY);
        if (seen[e] == device + 1)
            return err_set(err, -EINVAL, "device %u holds expert %d twice", device, e);
        if (!(p->share[s] >= 0 && p->share[s] <= 1 + 1e-9))
            return err_set(err, -EINVAL, "share of expert %d on device %u is %g: must be 0 to 1",
                           e, device, p->share[s]);
        seen[e] = device + 1;
        sum[e] += p->share[s];
        n_copies[e]++;
    }
    return 0;
}

int placement_check(const struct placement *p, struct err *err)
{
    double *sum = xcalloc(p->n_experts, sizeof *sum);
    uint32_t *n_copies = xcalloc(p->n_experts, sizeof *n_copies);
    uint32_t *seen = xcalloc(p->n_experts, sizeof *seen); /* the last device that holds it, + 1 */
    int rc = check_slots(p, sum, n_copies, seen, err);
    if (rc == 0)
        rc = check_experts(p, sum, n_copies, err);
    free(seen);
    free(n_copies);
    free(sum);
    return rc;
}

int32_t placement_find(const struct placement *p, uint32_t device, uint32_t expert)
{
    for (uint32_t s = device * p->n_slots; s < (device + 1) * p->n_slots; s++)
        if (p->expert[s] == (int32_t)expert)
            return (int32_t)s;
    return -1;
}

void placement_share_evenly(struct placement *p)
{
    uint32_t *n_copies = xcalloc(p->n_experts, sizeof *n_copies);
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        if (p->expert[s] != PLACEMENT_EMPTY)
            n_copies[p->expert[s]]++;
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        p->share[s] = p->expert[s] == PLACEMENT_EMPTY ? 0 : 1.0 / n_copies[p->expert[s]];
    free(n_copies);
}

void placement_keep_homes(struct placement *p, const struct placement *before)
{
    for (uint32_t s = placement_n_total(p); s-- > 0;)
        if (p->expert[s] != PLACEMENT_EMPTY)
            p->home[p->expert[s]] = s;
    if (!before)
        return;
    for (uint32_t e = 0; e < p->n_experts; e++) {
        uint32_t home = before->home[e];
        int32_t slot = p->expert[home] == (int32_t)e /* as nearly always */
                           ? (int32_t)home
                           : placement_find(p, home / before->n_slots, e);
        if (slot >= 0)
            p->home[e] = (uint32_t)slot;
    }
}

/* place: (n_experts) zeros, left so; mixed: (n) scratch. */
static void keep_slots_of_device(int32_t *slot, const int32_t *before, uint32_t *place,
                                 int32_t *mixed, uint32_t n)
{
    uint32_t n_changed = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool stays = slot[i] == before[i];
        mixed[i] = stays ? PLACEMENT_EMPTY : slot[i];
        slot[i] = stays ? slot[i] : PLACEMENT_EMPTY;
        n_changed += !stays;
    }
    if (!n_changed)
        return;
    for (uint32_t j = 0; j < n; j++)
        if (mixed[j] != PLACEMENT_EMPTY)
            place[mixed[j]] = j + 1;
    for (uint32_t i = 0; i < n; i++) {
        if (slot[i] != PLACEMENT_EMPTY || before[i] == PLACEMENT_EMPTY || !place[before[i]])
            continue;
        slot[i] = before[i];
        mixed[place[before[i]] - 1] = PLACEMENT_EMPTY;
        place[before[i]] = 0;
    }
    for (uint32_t i = 0, j = 0; i < n; i++) {
        if (slot[i] != PLACEMENT_EMPTY)
            continue;
        while (j < n && mixed[j] == PLACEMENT_EMPTY)
            j++;
        if (j == n)
            return;
        place[mixed[j]] = 0;
        slot[i] = mixed[j++];
    }
}

void placement_keep_slots(struct placement *p, const struct placement *before)
{
    int32_t *mixed = xcalloc(p->n_slots, sizeof *mixed);
    uint32_t *place = xcalloc(p->n_experts, sizeof *place);
    for (uint32_t g = 0; g < p->n_devices; g++)
        keep_slots_of_device(p->expert + (size_t)g * p->n_slots,
                             before->expert + (size_t)g * p->n_slots, place, mixed, p->n_slots);
    free(place);
    free(mixed);
}

void placement_at_stage(const struct placement *from, const struct placement *to,
                        const uint32_t *stage, uint32_t last, struct placement *out)
{
    for (uint32_t s = 0; s < placement_n_total(to); s++)
        out->expert[s] = stage[s] <= last ? to->expert[s] : from->expert[s];
    for (uint32_t e = 0; e < to->n_experts; e++)
        out->home[e] = stage[to->home[e]] <= last ? to->home[e] : from->home[e];
    placement_share_evenly(out);
}

static int check_settled(const struct placement *from, const struct placement *to,
                         struct err *err)
{
    for (uint32_t s = 0; s < placement_n_total(to); s++) {
        uint32_t device = s / to->n_slots;
        int32_t e = to->expert[s];
        int32_t before = e == PLACEMENT_EMPTY ? -1 : placement_find(from, device, (uint32_t)e);
        if (before >= 0 && (uint32_t)before != s)
            return err_set(err, -EINVAL, "expert %d changes its slot within device %u, which "
                           "stages do not allow", e, device);
    }
    return 0;
}

int placement_check_stages(const struct placement *from, const struct placement *to,
                           const uint32_t *stage, struct err *err)
{
    struct placement p;
    struct err why = { 0 };
    uint32_t last = 0;
    int rc = check_settled(from, to, err);
    for (uint32_t s = 0; s < placement_n_total(to); s++)
        last = stage[s] > last ? stage[s] : last;
    if (last >= STAGES_MAX)
        return err_set(err, -EINVAL, "%u stages: must be at most %u", last + 1, STAGES_MAX);
    placement_init_like(&p, to);
    for (uint32_t k = 0; k < last && rc == 0; k++) {
        placement_at_stage(from, to, stage, k, &p);
        if (placement_check(&p, &why) < 0)
            rc = err_set(err, -EINVAL, "stage %u is no placement: %s", k, why.text);
    }
    placement_fini(&p);
    return rc;
}

uint32_t placement_moves(const struct placement *from, const struct placement *to)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < placement_n_total(to); s++)
        if (to->expert[s] != PLACEMENT_EMPTY)
            n += placement_find(from, s / to->n_slots, (uint32_t)to->expert[s]) < 0;
    return n;
}

double placement_max_load(const struct placement *p, const double *load, const double *speed)
{
    double max = 0;
    for (uint32_t g = 0; g < p->n_devices; g++) {
        double sum = 0;
        for (uint32_t s = g * p->n_slots; s < (g + 1) * p->n_slots; s++)
            if (p->expert[s] != PLACEMENT_EMPTY)
                sum += load[p->expert[s]] * p->share[s];
        max = fmax(max, speed ? sum / speed[g] : sum);
    }
    return max;
}
