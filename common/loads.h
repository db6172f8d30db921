/* loads.h - expert loads as a CSV file, every mistake with its line
 *
 * Columns are found by their names in the first line, in any order. */
#ifndef COMMON_LOADS_H
#define COMMON_LOADS_H

#include "common/err.h"
#include "common/types.h"

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

#endif
