/* cuda_ops_groups.h - what cases of products share: rows in groups, and what they count */
#ifndef TESTS_CUDA_OPS_GROUPS_H
#define TESTS_CUDA_OPS_GROUPS_H

#include "tests/cuda_ops.h"

static inline double product_flops(int64_t n, int64_t in, int64_t out)
{
    return 2.0 * (double)n * (double)in * (double)out;
}

/* With beta 0 what is assigned starts as NaN. */
static inline elem *assigned(struct trial *t, const char *name, int64_t n, int64_t beta)
{
    return beta ? inout_elems(t, name, n, 1) : out_elems(t, name, n);
}

enum { EVEN, SKEWED, ONE_HAS_ALL };

/* The rows of groups: empty ones, one-row ones and a large one among them unless even. */
static inline const int64_t *offsets_of(struct trial *t, int64_t n_rows, int32_t n_groups,
                                        int64_t kind)
{
    int64_t *offsets = trial_host(t, (size_t)(n_groups + 1) * sizeof *offsets);
    for (int32_t g = 0; g < n_groups; g++) {
        int64_t left = n_rows - offsets[g], groups_left = n_groups - g;
        int64_t rows = left / groups_left;
        if (kind == SKEWED)
            rows = g % 5 == 1 ? 0 : g % 5 == 3 ? 1 : trial_below(t, 2 * rows + 1);
        if (kind == ONE_HAS_ALL)
            rows = g == n_groups / 2 ? left : 0;
        if (g == n_groups - 1)
            rows = left;
        offsets[g + 1] = offsets[g] + (rows < left ? rows : left);
    }
    return offsets;
}

static inline void count_grouped(struct trial *t)
{
    int64_t n = t->d[0], groups = t->d[1], in = t->d[2], out = t->d[3];
    t->flops = product_flops(n, in, out);
    t->bytes = (double)elem_size(t->dev) * (double)(n * in + groups * in * out + n * out);
}

#endif
