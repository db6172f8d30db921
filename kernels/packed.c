/* packed.c - one way to every packing */
#include "kernels/packed.h"

#include <assert.h>
#include <stdbool.h>

#include "kernels/fp8.h"
#include "kernels/mxfp4.h"

static const uint8_t *scales_of(const struct packed *w)
{
    return w->bytes + packing_scales_at(w->packing, (uint64_t)w->rows, (uint64_t)w->cols);
}

static void decode_mxfp4(float *out, const struct packed *w, int64_t first_row, int64_t n_rows,
                         int64_t first_col, int64_t n_cols)
{
    const uint8_t *scales = scales_of(w);
    bool is_run = n_cols == w->cols; /* then rows follow one another */
    for (int64_t i = 0; i < (is_run ? 1 : n_rows); i++) {
        int64_t at = (first_row + i) * w->cols + first_col;
        mxfp4_decode(out + i * n_cols, w->bytes + at / 2, scales + at / MXFP4_GROUP,
                     is_run ? n_rows * n_cols : n_cols);
    }
}

void packed_decode(float *out, const struct packed *w, int64_t first_row, int64_t n_rows,
                   int64_t first_col, int64_t n_cols)
{
    if (w->packing == PACKING_MXFP4)
        decode_mxfp4(out, w, first_row, n_rows, first_col, n_cols);
    else
        fp8_e4m3_decode(out, w->bytes, (const float *)(const void *)scales_of(w), w->cols,
                        first_row, n_rows, first_col, n_cols);
}

void packed_encode(uint8_t *out, enum packing packing, const float *x, int64_t rows, int64_t cols)
{
    uint8_t *scales = out + packing_scales_at(packing, (uint64_t)rows, (uint64_t)cols);
    if (packing == PACKING_MXFP4)
        mxfp4_encode(out, scales, x, rows * cols);
    else
        fp8_e4m3_encode(out, (float *)(void *)scales, x, rows, cols);
}
