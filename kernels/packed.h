/* packed.h - numbers of packed matrices, whatever they are packed as */
#ifndef KERNELS_PACKED_H
#define KERNELS_PACKED_H

#include <stdint.h>

#include "common/packing.h"

/* A matrix (rows, cols) of common/packing.h; bytes at a multiple of 4. */
struct packed {
    enum packing packing;
    const uint8_t *bytes;
    int64_t rows, cols;
};

/* Rows first_row .. + n_rows of columns first_col .. + n_cols, out (n_rows, n_cols). No code and no
 * scale may be NaN. MXFP4: first_col and n_cols are multiples of 32. */
void packed_decode(float *out, const struct packed *w, int64_t first_row, int64_t n_rows,
                   int64_t first_col, int64_t n_cols);

/* Packs finite numbers x (rows, cols) into packing_bytes bytes. */
void packed_encode(uint8_t *out, enum packing packing, const float *x, int64_t rows, int64_t cols);

#endif
