/* fp8.h - numbers of eight bits (e4m3, without infinities), with a scale for each square block */
#ifndef KERNELS_FP8_H
#define KERNELS_FP8_H

#include <stdint.h>

#include "common/packing.h"

#define FP8_LARGEST 448.0f /* number of a code */

/* One number; NaN for 0x7f and 0xff. */
float fp8_e4m3_value(uint8_t code);

/* The nearest one, ties to the even code; what is larger than 448 becomes that. x is no NaN. */
uint8_t fp8_e4m3_of(float x);

/* A whole matrix (rows, cols) as codes and scales, laid out as fp8_e4m3_decode takes them. A scale
 * puts the largest of its block at 448; a block of zeros has scale 1. */
void fp8_e4m3_encode(uint8_t *out_bytes, float *out_scales, const float *x, int64_t rows,
                     int64_t cols);

/* Rows first_row .. + n_rows of columns first_col .. + n_cols of a matrix (rows, cols): out
 * (n_rows, n_cols) = code's number times its block's scale. bytes is the matrix's first byte, none
 * of them NaN; scales (ceil(rows / 128), ceil(cols / 128)). */
void fp8_e4m3_decode(float *out, const uint8_t *bytes, const float *scales, int64_t cols,
                     int64_t first_row, int64_t n_rows, int64_t first_col, int64_t n_cols);

/* Where the first byte that is NaN stands; -1 if there is none. */
int64_t fp8_e4m3_find_nan(const uint8_t *bytes, int64_t n);

#endif
