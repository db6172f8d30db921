/* ctl_loads.h - expert loads and placements as CSV files, every mistake with its line
 *
 * Columns are found by their names in the first line, in any order. */
#ifndef COORDINATOR_CTL_LOADS_H
#define COORDINATOR_CTL_LOADS_H

#include "common/placement.h"

struct loads {
    uint32_t n_windows, n_layers, n_experts;
    bool     has_windows; /* the file has that column */
    int64_t *window;      /* (n_windows) their numbers in the file, rising */
    uint32_t *layer;      /* (n_layers) their numbers in the file, rising */
    double  *load;        /* (n_windows, n_layers, n_experts) */
};

/* layer,expert,load and maybe window. Every window has all layers, every layer all experts from 0
 * to the largest, once; a load is finite and not negative. Gives, ended with loads_fini. */
int  loads_read(const char *path, struct loads *out, struct err *err);
void loads_fini(struct loads *l);
const double *loads_at(const struct loads *l, uint32_t window, uint32_t layer);

/* layer,device,expert and maybe slot, share, home (1 marks an expert's home), node (not used);
 * `gpu` is another name for device. A slot counts within its device, or through all devices; an
 * expert of -1 is an empty slot. n_slots 0: as many as the fullest device has, and one spare more
 * than all experts need. Placements of the layers of l, one after the other; *out is an array that
 * the caller ends with placements_free. */
int  placements_read(const char *path, const struct loads *l, uint32_t n_devices, uint32_t n_slots,
                     struct placement **out, struct err *err);
/* Marks in out_named, (LAYERS_MAX), the layers that the file has rows of. */
int  placements_layers(const char *path, bool *out_named, struct err *err);
void placements_free(struct placement *p, uint32_t n_layers);

/* Writes what placements_read reads. */
int  placements_write(const char *path, const struct loads *l, const struct placement *p,
                      struct err *err);

#endif
