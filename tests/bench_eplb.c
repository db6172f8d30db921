/* bench_eplb.c - where a peer's planner puts experts: loads in, a placement out, both as CSV
 *
 * usage: bench_eplb LOADS.csv DEVICES SLOTS_PER_DEVICE PLACEMENT.csv. For the newest window. */
#include <stdio.h>
#include <stdlib.h>

#include "common/mem.h"
#include "coordinator/ctl_places.h"
#include "tests/eplb.h"

static int fail(const struct err *err)
{
    fprintf(stderr, "bench_eplb: %s\n", err->text);
    return 1;
}

int main(int argc, char **argv)
{
    struct loads l;
    struct err err;
    if (argc != 5) {
        fprintf(stderr, "usage: bench_eplb LOADS.csv DEVICES SLOTS_PER_DEVICE PLACEMENT.csv\n");
        return 2;
    }
    uint32_t n_devices = (uint32_t)strtoul(argv[2], NULL, 10);
    uint32_t n_slots = (uint32_t)strtoul(argv[3], NULL, 10);
    if (loads_read(argv[1], &l, &err) < 0)
        return fail(&err);
    struct placement *p = xcalloc(l.n_layers, sizeof *p);
    for (uint32_t k = 0; k < l.n_layers; k++) {
        if (placement_init(&p[k], l.n_experts, n_devices, n_slots, &err) < 0)
            return fail(&err);
        eplb_place(loads_at(&l, l.n_windows - 1, k), &p[k]);
    }
    int rc = placements_write(argv[4], &l, p, &err);
    placements_free(p, l.n_layers);
    loads_fini(&l);
    return rc < 0 ? fail(&err) : 0;
}
