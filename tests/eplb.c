/* eplb.c - see eplb.h */
#include "tests/eplb.h"

#include <stdlib.h>

#include "common/mem.h"

struct piece {
    uint32_t expert;
    double   load;
};

static int heavier_first(const void *a, const void *b)
{
    const struct piece *x = a, *y = b;
    if (x->load != y->load)
        return x->load > y->load ? -1 : 1;
    return x->expert < y->expert ? -1 : x->expert > y->expert;
}

void eplb_place(const double *load, struct placement *out)
{
    uint32_t n = placement_n_total(out), *copies = xcalloc(out->n_experts, sizeof *copies);
    struct piece *piece = xcalloc(n, sizeof *piece);
    double *sum = xcalloc(out->n_devices, sizeof *sum);
    uint32_t *used = xcalloc(out->n_devices, sizeof *used);
    for (uint32_t e = 0; e < out->n_experts; e++)
        copies[e] = 1;
    for (uint32_t i = out->n_experts; i < n; i++) {
        uint32_t best = 0;
        for (uint32_t e = 1; e < out->n_experts; e++)
            if (load[e] / copies[e] > load[best] / copies[best])
                best = e;
        copies[best]++;
    }
    for (uint32_t e = 0, i = 0; e < out->n_experts; e++)
        for (uint32_t c = 0; c < copies[e]; c++)
            piece[i++] = (struct piece){ e, load[e] / copies[e] };
    qsort(piece, n, sizeof *piece, heavier_first);
    for (uint32_t s = 0; s < n; s++) {
        out->expert[s] = PLACEMENT_EMPTY;
        out->share[s] = 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t best = out->n_devices;
        for (uint32_t g = 0; g < out->n_devices; g++)
            if (used[g] < out->n_slots && (best == out->n_devices || sum[g] < sum[best]))
                best = g;
        int32_t slot = placement_find(out, best, piece[i].expert);
        if (slot < 0) {
            slot = (int32_t)(best * out->n_slots + used[best]);
            out->expert[slot] = (int32_t)piece[i].expert;
        }
        out->share[slot] += 1.0 / copies[piece[i].expert];
        used[best]++;
        sum[best] += piece[i].load;
    }
    placement_keep_homes(out, NULL);
    free(used);
    free(sum);
    free(piece);
    free(copies);
}
