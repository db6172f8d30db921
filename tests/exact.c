/* exact.c - exact answers for tiny cases, by trying everything */
#include "tests/exact.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "common/mem.h"

double oracle_split(const struct placement *p, const double *load, const double *speed)
{
    double max = 0;
    assert(p->n_devices <= 16);
    for (uint32_t set = 1; set < 1u << p->n_devices; set++) {
        double locked = 0, fast = 0;
        for (uint32_t g = 0; g < p->n_devices; g++)
            if (set >> g & 1)
                fast += speed ? speed[g] : 1;
        for (uint32_t e = 0; e < p->n_experts; e++) {
            bool leaves = false;
            for (uint32_t s = 0; s < placement_n_total(p); s++)
                leaves |= p->expert[s] == (int32_t)e && !(set >> (s / p->n_slots) & 1);
            locked += leaves ? 0 : load[e];
        }
        max = fmax(max, locked / fast);
    }
    return max;
}

/* ---- without copies -------------------------------------------------------------------------- */

struct branch {
    const double *load;
    uint32_t n_experts, n_devices, n_slots;
    double   device[16];
    uint32_t used[16];
    double   best;
};

static void branch(struct branch *b, uint32_t e, double max)
{
    if (max >= b->best)
        return;
    if (e == b->n_experts) {
        b->best = max;
        return;
    }
    for (uint32_t g = 0; g < b->n_devices; g++) {
        bool was_empty = b->used[g] == 0;
        if (b->used[g] == b->n_slots)
            continue;
        b->device[g] += b->load[e];
        b->used[g]++;
        branch(b, e + 1, fmax(max, b->device[g]));
        b->device[g] -= b->load[e];
        b->used[g]--;
        if (was_empty)
            return; /* the other empty devices are the same */
    }
}

static int heavier_first(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

double oracle_single(const double *load, uint32_t n_experts, uint32_t n_devices, uint32_t n_slots)
{
    double *sorted = xmemdup(load, n_experts * sizeof *sorted);
    assert(n_devices <= 16);
    qsort(sorted, n_experts, sizeof *sorted, heavier_first);
    struct branch b = { .load = sorted, .n_experts = n_experts, .n_devices = n_devices,
                        .n_slots = n_slots, .best = INFINITY };
    branch(&b, 0, 0);
    free(sorted);
    return b.best;
}

/* ---- with copies ----------------------------------------------------------------------------- */

/* Devices are filled with sets of experts (bit masks), never smaller than the one before: their
 * order does not matter. */
static void fill(struct placement *p, uint32_t *set, uint32_t g, const double *load, double *best)
{
    if (g == p->n_devices) {
        uint32_t all = 0;
        for (uint32_t d = 0; d < g; d++) {
            uint32_t i = 0;
            all |= set[d];
            for (uint32_t s = 0; s < p->n_slots; s++)
                p->expert[d * p->n_slots + s] = PLACEMENT_EMPTY;
            for (uint32_t e = 0; e < p->n_experts; e++)
                if (set[d] >> e & 1)
                    p->expert[d * p->n_slots + i++] = (int32_t)e;
        }
        if (all == (1u << p->n_experts) - 1)
            *best = fmin(*best, oracle_split(p, load, NULL));
        return;
    }
    for (set[g] = g ? set[g - 1] : 0; set[g] < 1u << p->n_experts; set[g]++)
        if ((uint32_t)__builtin_popcount(set[g]) <= p->n_slots)
            fill(p, set, g + 1, load, best);
}

double oracle_copies(const double *load, uint32_t n_experts, uint32_t n_devices, uint32_t n_slots)
{
    struct placement p;
    struct err err;
    uint32_t set[16];
    double best = INFINITY;
    int rc = placement_init(&p, n_experts, n_devices, n_slots, &err);
    assert(rc == 0);
    fill(&p, set, 0, load, &best);
    placement_fini(&p);
    return best;
}
