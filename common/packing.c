/* packing.c - sizes of packed matrices */
#include "common/packing.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "common/gpu_bytes.h"

enum packing packing_of_base(const char *word)
{
    return strcmp(word, "mxfp4") == 0 ? PACKING_MXFP4
           : strcmp(word, "fp8") == 0 ? PACKING_FP8
                                      : PACKING_NONE;
}

int packing_check(enum packing packing, const char *name, uint64_t cols, struct err *err)
{
    if (packing != PACKING_MXFP4 || cols % MXFP4_GROUP == 0)
        return 0;
    return err_set(err, -EINVAL, "MXFP4 packs rows in groups of %d numbers, but those of %s have %"
                   PRIu64, MXFP4_GROUP, name, cols);
}

uint64_t packing_room(uint64_t n, uint64_t matrix_bytes)
{
    uint64_t fit = matrix_bytes ? GPU_UNPACK_BYTES / matrix_bytes : 0;
    return matrix_bytes * (fit < 1 ? 1 : fit < n ? fit : n);
}

static uint64_t blocks(uint64_t n)
{
    return (n + FP8_BLOCK - 1) / FP8_BLOCK;
}

uint64_t packing_scales_at(enum packing packing, uint64_t rows, uint64_t cols)
{
    assert(packing != PACKING_NONE);
    return packing == PACKING_MXFP4 ? rows * cols / 2 : (rows * cols + 3) / 4 * 4;
}

uint64_t packing_bytes(enum packing packing, uint64_t rows, uint64_t cols)
{
    uint64_t scales = packing == PACKING_MXFP4 ? rows * cols / MXFP4_GROUP
                                               : blocks(rows) * blocks(cols) * sizeof(float);
    return packing_scales_at(packing, rows, cols) + scales;
}
