/* ctl_places.c - placements as CSV */
#include "coordinator/ctl_places.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/csv.h"
#include "common/file.h"
#include "common/mem.h"

enum { LAYER, DEVICE, EXPERT, SLOT, SHARE, HOME, NODE, N_PLACE_COLUMNS };

struct place_row {
    double   v[N_PLACE_COLUMNS];
    uint64_t line;
};

static int read_place_rows(struct csv *c, struct place_row **out, size_t *out_n, struct err *err)
{
    size_t n = 0, cap = 0;
    struct place_row *row = NULL, r;
    int rc;
    while ((rc = csv_row(c, r.v, err)) > 0) {
        row = xgrow(row, n, &cap, sizeof *row);
        r.line = c->n_line;
        row[n++] = r;
    }
    *out = row;
    *out_n = n;
    return rc;
}

static uint32_t find_layer(const struct loads *l, uint32_t layer)
{
    uint32_t k = 0;
    while (k < l->n_layers && l->layer[k] != layer)
        k++;
    return k;
}

/* As many slots as the fullest device needs, and a spare one beyond what all experts need. */
static uint32_t slots_needed(const struct loads *l, const struct place_row *row, size_t n,
                             uint32_t n_devices)
{
    uint32_t *used = xcalloc((size_t)l->n_layers * n_devices, sizeof *used);
    uint32_t most = (l->n_experts + n_devices - 1) / n_devices + 1;
    for (size_t i = 0; i < n; i++) {
        uint32_t k = find_layer(l, (uint32_t)row[i].v[LAYER]);
        if (k == l->n_layers || row[i].v[DEVICE] >= n_devices)
            continue;
        uint32_t now = ++used[(size_t)k * n_devices + (uint32_t)row[i].v[DEVICE]];
        most = now > most ? now : most;
    }
    free(used);
    return most;
}

/* Slots may count through all devices, as others write them: then so many per device, else 0. */
static uint32_t slots_counted_through(const struct place_row *row, size_t n, uint32_t n_slots,
                                      uint32_t n_devices)
{
    double max = -1;
    for (size_t i = 0; i < n; i++)
        max = fmax(max, row[i].v[SLOT]); /* fmax passes over NAN */
    uint32_t per_device = max < n_slots ? 0 : (uint32_t)max / n_devices + 1;
    for (size_t i = 0; i < n && per_device; i++)
        if (row[i].v[DEVICE] != floor(row[i].v[SLOT] / per_device))
            return 0;
    return per_device <= n_slots ? per_device : 0;
}

/* The slot a row means, or -1 and what is wrong. */
static int64_t row_slot(struct csv *c, const struct placement *p, const struct place_row *r,
                        const uint64_t *taken, struct err *err)
{
    uint32_t device = (uint32_t)r->v[DEVICE], first = device * p->n_slots, i = 0;
    c->n_line = r->line;
    if (r->v[DEVICE] >= p->n_devices) {
        csv_fail(c, err, "device %.0f: there are devices 0 to %u", r->v[DEVICE], p->n_devices - 1);
        return -1;
    }
    if (!isnan(r->v[SLOT])) {
        if (r->v[SLOT] >= p->n_slots) {
            csv_fail(c, err, "slot %.0f: a device has slots 0 to %u", r->v[SLOT], p->n_slots - 1);
            return -1;
        }
        i = (uint32_t)r->v[SLOT];
        if (taken[first + i]) {
            csv_fail(c, err, "slot %u of device %u is taken, in line %" PRIu64, i, device,
                     taken[first + i]);
            return -1;
        }
        return first + i;
    }
    while (i < p->n_slots && taken[first + i])
        i++;
    if (i == p->n_slots) {
        csv_fail(c, err, "device %u has more experts than its %u slots", device, p->n_slots);
        return -1;
    }
    return first + i;
}

static int place_row(struct csv *c, struct placement *p, const struct place_row *r,
                     uint64_t *taken, bool *has_home, struct err *err)
{
    int64_t slot = row_slot(c, p, r, taken, err);
    int32_t expert = (int32_t)r->v[EXPERT];
    if (slot < 0)
        return -EINVAL;
    taken[slot] = r->line;
    if (expert < 0)
        return 0;
    if ((uint32_t)expert >= p->n_experts)
        return csv_fail(c, err, "expert %d: the loads have experts 0 to %u", expert,
                        p->n_experts - 1);
    int32_t other = placement_find(p, (uint32_t)slot / p->n_slots, (uint32_t)expert);
    if (other >= 0)
        return csv_fail(c, err, "expert %d is on device %.0f already, in line %" PRIu64, expert,
                        r->v[DEVICE], taken[other]);
    p->expert[slot] = expert;
    if (r->v[HOME] == 1 && has_home[expert])
        return csv_fail(c, err, "expert %d has two homes", expert);
    if (r->v[HOME] == 1) {
        has_home[expert] = true;
        p->home[expert] = (uint32_t)slot;
    }
    return 0;
}

static int fill_placement(struct csv *c, const struct place_row *row, size_t n, uint32_t layer,
                          struct placement *p, struct err *err)
{
    uint64_t *taken = xcalloc(placement_n_total(p), sizeof *taken); /* the line that took a slot */
    bool *has_home = xcalloc(p->n_experts, sizeof *has_home);
    uint32_t *home = xcalloc(p->n_experts, sizeof *home);
    int rc = 0;
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        p->expert[s] = PLACEMENT_EMPTY;
    for (size_t i = 0; i < n && rc == 0; i++)
        if (row[i].v[LAYER] == layer)
            rc = place_row(c, p, &row[i], taken, has_home, err);
    memcpy(home, p->home, p->n_experts * sizeof *home);
    if (rc == 0) {
        placement_share_evenly(p);
        placement_keep_homes(p, NULL);
        for (uint32_t e = 0; e < p->n_experts; e++)
            if (has_home[e])
                p->home[e] = home[e];
        struct err why;
        if (placement_check(p, &why) < 0)
            rc = err_set(err, -EINVAL, "%s: layer %u: %s", c->path, layer, why.text);
    }
    free(home);
    free(has_home);
    free(taken);
    return rc;
}

static const struct csv_column place_column[] = {
    [LAYER] = { "layer", NULL, true, false, 0, LAYERS_MAX - 1 },
    [DEVICE] = { "device", "gpu", true, false, 0, RANKS_MAX - 1 },
    [EXPERT] = { "expert", NULL, true, false, -1, EXPERTS_MAX - 1 },
    [SLOT] = { "slot", NULL, false, false, 0, PLACEMENT_SLOTS_MAX },
    [SHARE] = { "share", NULL, false, true, 0, 1 },
    [HOME] = { "home", NULL, false, false, 0, 1 },
    [NODE] = { "node", NULL, false, false, 0, RANKS_MAX - 1 },
};

int placements_layers(const char *path, bool *out_named, struct err *err)
{
    struct csv c;
    double row[N_PLACE_COLUMNS];
    int rc = csv_open(&c, path, place_column, N_PLACE_COLUMNS, err);
    while (rc == 0 && (rc = csv_row(&c, row, err)) > 0) {
        out_named[(uint32_t)row[LAYER]] = true;
        rc = 0;
    }
    csv_close(&c);
    return rc;
}

int placements_read(const char *path, const struct loads *l, uint32_t n_devices, uint32_t n_slots,
                    struct placement **out, struct err *err)
{
    struct csv c;
    struct place_row *row = NULL;
    size_t n = 0;
    int rc = csv_open(&c, path, place_column, N_PLACE_COLUMNS, err);
    if (rc == 0)
        rc = read_place_rows(&c, &row, &n, err);
    struct placement *p = xcalloc(l->n_layers, sizeof *p);
    if (rc == 0 && !n_slots)
        n_slots = slots_needed(l, row, n, n_devices);
    uint32_t through = slots_counted_through(row, n, n_slots, n_devices);
    for (size_t i = 0; i < n && through; i++)
        row[i].v[SLOT] = fmod(row[i].v[SLOT], through);
    for (uint32_t k = 0; k < l->n_layers && rc == 0; k++) {
        rc = placement_init(&p[k], l->n_experts, n_devices, n_slots, err);
        if (rc == 0)
            rc = fill_placement(&c, row, n, l->layer[k], &p[k], err);
    }
    free(row);
    csv_close(&c);
    if (rc < 0)
        placements_free(p, l->n_layers);
    else
        *out = p;
    return rc;
}

void placements_free(struct placement *p, uint32_t n_layers)
{
    for (uint32_t k = 0; p && k < n_layers; k++)
        placement_fini(&p[k]);
    free(p);
}

int placements_write(const char *path, const struct loads *l, const struct placement *p,
                     struct err *err)
{
    FILE *f = file_create(path, err);
    if (!f)
        return err->code;
    fprintf(f, "layer,device,slot,expert,share,home\n");
    for (uint32_t k = 0; k < l->n_layers; k++)
        for (uint32_t s = 0; s < placement_n_total(&p[k]); s++) {
            int32_t e = p[k].expert[s];
            fprintf(f, "%u,%u,%u,%d,%.17g,%d\n", l->layer[k], s / p[k].n_slots,
                    s % p[k].n_slots, e, p[k].share[s], e >= 0 && p[k].home[e] == s);
        }
    bool failed = ferror(f);
    if (fclose(f) != 0 || failed)
        return err_set(err, -EIO, "%s: cannot be written in full: %s", path, strerror(errno));
    return 0;
}
