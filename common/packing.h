/* packing.h - the forms in which frozen matrices are kept packed, and what they take
 *
 * A packed matrix (rows, cols) is one run of bytes: its codes, row by row, and from
 * packing_scales_at on its scales. MXFP4: two numbers to a byte and a byte for each 32 of a row,
 * kernels/mxfp4.h. FP8: a byte a number and a float for each block of 128 x 128, blocks row by row,
 * kernels/fp8.h; it begins at a multiple of 4 bytes. */
#ifndef COMMON_PACKING_H
#define COMMON_PACKING_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"

#ifdef __cplusplus
extern "C" {
#endif

enum packing { PACKING_NONE, PACKING_MXFP4, PACKING_FP8 };

#define MXFP4_GROUP 32  /* numbers of a row to a scale */
#define FP8_BLOCK   128 /* rows and columns to a scale */

/* Of a job's model.base_precision: what its frozen experts are packed as. */
enum packing packing_of_base(const char *word);

/* Whether a matrix can be packed so: -EINVAL with name where its rows do not divide. */
int packing_check(enum packing packing, const char *name, uint64_t cols, struct err *err);

/* Of a packed matrix: where its scales begin, and all its bytes. */
uint64_t packing_scales_at(enum packing packing, uint64_t rows, uint64_t cols);
uint64_t packing_bytes(enum packing packing, uint64_t rows, uint64_t cols);

/* Bytes of the room in which a GPU unpacks experts' matrices before their products: of as many as
 * lie in GPU_UNPACK_BYTES, of n at most and one at least. matrix_bytes: of the largest,
 * unpacked. */
uint64_t packing_room(uint64_t n, uint64_t matrix_bytes);

#ifdef __cplusplus
}
#endif

#endif
