/* mxfp4.h - numbers of four bits, 32 to a scale: published experts as they are stored
 *
 * Two numbers to a byte, the low four bits first: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A
 * scale code e stands for 2^(e - 127), 0 included; 255 is NaN in the format and must be refused
 * where bytes come in (mxfp4_find_nan). A row of a matrix is a multiple of 32 numbers, so a matrix
 * is one run of them. */
#ifndef KERNELS_MXFP4_H
#define KERNELS_MXFP4_H

#include <stdint.h>

#include "common/packing.h"

/* n numbers, a multiple of 32: n / 2 bytes and n / 32 scales. */
void mxfp4_decode(float *out, const uint8_t *packed, const uint8_t *scales, int64_t n);

/* Packs n finite numbers, a multiple of 32. A scale puts the largest of its group at 4 to 7, and
 * what is above 6 becomes 6; ties go to the even code; a negative number that rounds to 0 keeps
 * its sign, a negative zero does not; a group of zeros has scale 0. Packing what was decoded gives
 * the same values again. */
void mxfp4_encode(uint8_t *out_packed, uint8_t *out_scales, const float *x, int64_t n);

/* Where the first scale that is NaN stands; -1 if there is none. */
int64_t mxfp4_find_nan(const uint8_t *scales, int64_t n_scales);

#endif
