/* packing.c - sizes of packed matrices */
#include "common/packing.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define ROOM_NUMBERS (128ull << 20) /* of bf16: 256 MiB */

/* An H200's: products of experts in bf16, bytes that unpack reads and writes, and one more op. */
#define PRODUCT_FLOPS 550e12
#define UNPACK_BYTES  3.5e12
#define START_SECONDS 4e-6
#define MXFP4_BYTES   (17.0 / 32) /* of a number */
#define FP8_BYTES     1.0

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

double packing_slowdown(enum packing packing)
{
    return packing == PACKING_MXFP4 ? 4.3 : packing == PACKING_FP8 ? 3.8 : 1;
}

/* A product over plain weights takes 2 rows matrix / PRODUCT_FLOPS, and one that decodes s times as
 * long, s = packing_slowdown. Unpacking takes n (START_SECONDS + matrix bytes / UNPACK_BYTES) with
 * the bytes of a packed number and two of bf16. It pays where that is less than the (s - 1) parts
 * that it saves: over matrices of 3584 x 3072 in FP8 from 120 rows of each on (13.4 us for 0.112 us
 * a row), in MXFP4 from 90, over 2048 x 1024 in FP8 from 270. */
bool packing_pays_to_unpack(enum packing packing, double rows, double n, double matrix)
{
    double bytes = (packing == PACKING_MXFP4 ? MXFP4_BYTES : FP8_BYTES) + 2;
    double unpacking = n * (START_SECONDS + matrix * bytes / UNPACK_BYTES);
    return (packing_slowdown(packing) - 1) * 2 * rows * matrix / PRODUCT_FLOPS > unpacking;
}

uint64_t packing_room(uint64_t n, uint64_t matrix)
{
    uint64_t fit = matrix ? ROOM_NUMBERS / matrix : 0;
    return matrix * (fit < 1 ? 1 : fit < n ? fit : n);
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
