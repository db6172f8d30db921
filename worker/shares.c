/* shares.c - rows by source and slot
 *
 * Most experts have one slot, and their rows are what was counted. For the others the split of all
 * loads over the devices is solved exactly; the parts are then made of whole rows, or, in
 * deterministic mode, of all the rows that a source has. */
#include "worker/shares.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

struct shares {
    uint32_t  me;
    double   *load, *share; /* (n_experts); (n_devices, n_slots) */
    uint32_t *n_rows;       /* (n_devices) of one expert */
    uint32_t *device;       /* (n_devices) of its copies */
    double   *part;         /* (n_devices) their shares, or the rows that they lack */
    uint32_t *rows;         /* (n_devices, n_devices) source by copy */
};

struct shares *shares_create(const struct slots *slots)
{
    struct shares *s = xcalloc(1, sizeof *s);
    size_t n = slots->n_devices;
    *s = (struct shares){
        .me = slots->me,
        .load = xcalloc(slots->n_experts, sizeof *s->load),
        .share = xcalloc(n * slots->n_slots, sizeof *s->share),
        .n_rows = xcalloc(n, sizeof *s->n_rows),
        .device = xcalloc(n, sizeof *s->device),
        .part = xcalloc(n, sizeof *s->part),
        .rows = xcalloc(n * n, sizeof *s->rows),
    };
    return s;
}

void shares_destroy(struct shares *s)
{
    if (!s)
        return;
    free(s->load);
    free(s->share);
    free(s->n_rows);
    free(s->device);
    free(s->part);
    free(s->rows);
    free(s);
}

/* The source with the most rows that is not dealt yet, the first of equals; n: none is left. */
static uint32_t largest_left(const uint32_t *n_rows, const uint32_t *rows, uint32_t n,
                             uint32_t n_copies)
{
    uint32_t best = n;
    for (uint32_t m = 0; m < n; m++) {
        bool is_dealt = false;
        for (uint32_t c = 0; c < n_copies; c++)
            is_dealt = is_dealt || rows[(size_t)m * n_copies + c] > 0;
        if (!is_dealt && n_rows[m] > 0 && (best == n || n_rows[m] > n_rows[best]))
            best = m;
    }
    return best;
}

/* Sources by size to the copy that lacks most; a source's own device goes before others that lack
 * no more than half of its rows more. part: in, the shares. */
static void deal_sources(struct shares *s, uint32_t n_devices, uint32_t n_copies, double n_all)
{
    memset(s->rows, 0, (size_t)n_devices * n_copies * sizeof *s->rows);
    for (uint32_t c = 0; c < n_copies; c++)
        s->part[c] *= n_all;
    uint32_t m;
    while ((m = largest_left(s->n_rows, s->rows, n_devices, n_copies)) < n_devices) {
        uint32_t best = 0;
        double most = 0;
        for (uint32_t c = 0; c < n_copies; c++) {
            double lacks = s->part[c] + (s->device[c] == m ? 0.5 * s->n_rows[m] : 0);
            if (c == 0 || lacks > most) {
                most = lacks;
                best = c;
            }
        }
        s->rows[(size_t)m * n_copies + best] = s->n_rows[m];
        s->part[best] -= s->n_rows[m];
    }
}

/* What copy c of n_copies serves, into the tables. */
static void note_copy(const struct shares *s, const struct slots *slots, uint32_t slot, uint32_t c,
                      uint32_t n_copies, int64_t *to_slot, int64_t *arrived, int32_t *server)
{
    to_slot[slot] = s->rows[(size_t)s->me * n_copies + c];
    for (uint32_t m = 0; m < slots->n_devices; m++) {
        uint32_t n = s->rows[(size_t)m * n_copies + c];
        if (slot / slots->n_slots == s->me)
            arrived[(size_t)m * slots->n_slots + slot % slots->n_slots] = n;
        if (server && n > 0)
            server[m] = (int32_t)slot;
    }
}

static void deal_expert(struct shares *s, const struct slots *slots, const struct slots_layer *l,
                        uint32_t k, const struct shares_counts *counts, bool whole_sources,
                        int64_t *to_slot, int64_t *arrived, int32_t *servers)
{
    const uint32_t *copies = l->copies + l->first_copy[k];
    uint32_t n_copies = l->first_copy[k + 1] - l->first_copy[k], e = l->copied[k];
    int32_t *server = servers ? servers + (size_t)k * slots->n_devices : NULL;
    for (uint32_t m = 0; m < slots->n_devices; m++) {
        s->n_rows[m] = (uint32_t)shares_count(counts, m, e);
        if (server)
            server[m] = -1;
    }
    for (uint32_t c = 0; c < n_copies; c++) {
        s->device[c] = copies[c] / slots->n_slots;
        s->part[c] = s->share[copies[c]];
    }
    if (whole_sources)
        deal_sources(s, slots->n_devices, n_copies, s->load[e]);
    else
        split_rows(slots->n_devices, slots->devices_per_node, s->n_rows, n_copies, s->device,
                   s->part, s->rows);
    for (uint32_t c = 0; c < n_copies; c++)
        note_copy(s, slots, copies[c], c, n_copies, to_slot, arrived, server);
}

static void check_shares(const struct shares *s, const struct slots_layer *l, uint32_t n_total)
{
#ifdef BALLAST_CHECKS
    double *sum = xcalloc(l->map.n_experts, sizeof *sum);
    for (uint32_t slot = 0; slot < n_total; slot++)
        if (l->map.expert[slot] >= 0)
            sum[l->map.expert[slot]] += s->share[slot];
    for (uint32_t e = 0; e < l->map.n_experts; e++)
        assert(sum[e] > 1 - 1e-9 && sum[e] < 1 + 1e-9);
    free(sum);
#else
    (void)s;
    (void)l;
    (void)n_total;
#endif
}

static const double *load_homes(struct shares *s, const struct slots *slots,
                                const struct slots_layer *l)
{
    memset(s->part, 0, slots->n_devices * sizeof *s->part);
    for (uint32_t e = 0; e < slots->n_experts; e++)
        s->part[l->map.home[e] / slots->n_slots] += s->load[e];
    return s->part;
}

/* Parts of copies are rounded to whole rows. */
static int64_t add_rows(const struct slots *slots, const double *device_load, uint32_t n_copied,
                        int64_t *device_rows)
{
    int64_t most = 0;
    for (uint32_t m = 0; m < slots->n_devices; m++) {
        int64_t n = (int64_t)device_load[m] + (n_copied > 0 ? 1 + n_copied : 0);
        device_rows[m] += n;
        most = n > most ? n : most;
    }
    return most;
}

int64_t shares_rows(struct shares *s, const struct slots *slots, uint32_t layer,
                    const struct shares_counts *counts, bool whole_sources, int64_t *to_slot,
                    int64_t *arrived, int64_t *device_rows, int32_t *servers)
{
    const struct slots_layer *l = &slots->layers[layer];
    uint32_t n_total = slots->n_devices * slots->n_slots, n_experts = slots->n_experts;
    memset(to_slot, 0, n_total * sizeof *to_slot);
    memset(arrived, 0, n_total * sizeof *arrived);
    memset(s->load, 0, n_experts * sizeof *s->load);
    for (uint32_t m = 0; m < slots->n_devices; m++)
        for (uint32_t e = 0; e < n_experts; e++)
            s->load[e] += shares_count(counts, m, e);
    for (uint32_t e = 0; e < n_experts; e++) {
        uint32_t slot = l->map.home[e];
        if (l->copied_at[e] >= 0)
            continue;
        to_slot[slot] = shares_count(counts, s->me, e);
        if (slot / slots->n_slots == s->me)
            for (uint32_t m = 0; m < slots->n_devices; m++)
                arrived[(size_t)m * slots->n_slots + slot % slots->n_slots] =
                    shares_count(counts, m, e);
    }
    if (l->n_copied == 0)
        return add_rows(slots, load_homes(s, slots, l), 0, device_rows);
    split_solve(l->split, s->load, s->share);
    check_shares(s, l, n_total);
    int64_t most = add_rows(slots, split_device_load(l->split), l->n_copied, device_rows);
    for (uint32_t k = 0; k < l->n_copied; k++)
        deal_expert(s, slots, l, k, counts, whole_sources, to_slot, arrived, servers);
    return most;
}
