/* cuda_ops_packed.c - cases of products over packed weights, and of unpacking them */
#include "tests/cuda_ops_groups.h"

#include <string.h>

#include "common/packing.h"

/* Any codes; of MXFP4 scales around one, and among them the smallest there is. */
static void fill_mxfp4(struct trial *t, uint8_t *bytes, int64_t scales_at, int64_t n_bytes)
{
    for (int64_t i = 0; i < scales_at; i++)
        bytes[i] = (uint8_t)trial_below(t, 256);
    for (int64_t i = scales_at; i < n_bytes; i++)
        bytes[i] = (uint8_t)(i % 17 == 0 ? i % 3 : 120 + trial_below(t, 5));
}

/* All but NaN; scales that make numbers as large as one, each block its own. */
static void fill_fp8(struct trial *t, uint8_t *bytes, int64_t scales_at, int64_t n_bytes)
{
    for (int64_t i = 0; i < scales_at; i++)
        bytes[i] = (uint8_t)(trial_below(t, 2) * 128 + trial_below(t, 127));
    for (int64_t i = scales_at; i < n_bytes; i += (int64_t)sizeof(float)) {
        float scale = (float)(1 + trial_below(t, 100)) * 1e-4f;
        memcpy(bytes + i, &scale, sizeof scale);
    }
}

static const uint8_t **packed_of(struct trial *t, enum packing packing, int32_t groups, int64_t in,
                                 int64_t out)
{
    int64_t scales_at = (int64_t)packing_scales_at(packing, (uint64_t)out, (uint64_t)in);
    int64_t n_bytes = (int64_t)packing_bytes(packing, (uint64_t)out, (uint64_t)in);
    int64_t stride = (n_bytes + 15) / 16 * 16;
    const uint8_t **w = trial_host(t, (size_t)groups * sizeof *w);
    uint8_t *host = trial_host(t, (size_t)(groups * stride));
    for (int32_t g = 0; g < groups; g++) {
        if (packing == PACKING_MXFP4)
            fill_mxfp4(t, host + g * stride, scales_at, n_bytes);
        else
            fill_fp8(t, host + g * stride, scales_at, n_bytes);
    }
    const uint8_t *all = in_bytes(t, host, (size_t)(groups * stride));
    for (int32_t g = 0; g < groups; g++)
        w[g] = all + g * stride;
    return w;
}

static void grouped_linear_packed(struct trial *t, enum packing packing)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3];
    int32_t groups = (int32_t)t->d[1];
    const int64_t *offsets = offsets_of(t, n, groups, t->d[4]);
    const elem *x = in_elems(t, n * in, 1);
    const uint8_t *const *w = packed_of(t, packing, groups, in, out);
    elem *y = out_elems(t, "y", n * out);
    count_grouped(t);
    TRIAL_RUN(t)
        t->dev->ops->grouped_linear_packed(t->dev, y, x, w, packing, offsets, groups, in, out);
}

static void grouped_linear_packed_dx(struct trial *t, enum packing packing)
{
    int64_t n = t->d[0], in = t->d[2], out = t->d[3], beta = t->d[5];
    int32_t groups = (int32_t)t->d[1];
    const int64_t *offsets = offsets_of(t, n, groups, t->d[4]);
    const elem *dy = in_elems(t, n * out, 1);
    const uint8_t *const *w = packed_of(t, packing, groups, in, out);
    elem *dx = assigned(t, "dx", n * in, beta);
    count_grouped(t);
    TRIAL_RUN(t)
        t->dev->ops->grouped_linear_packed_dx(t->dev, dx, dy, w, packing, offsets, groups, in, out,
                                              (float)beta);
}

static void grouped_linear_mxfp4(struct trial *t)
{
    grouped_linear_packed(t, PACKING_MXFP4);
}

static void grouped_linear_mxfp4_dx(struct trial *t)
{
    grouped_linear_packed_dx(t, PACKING_MXFP4);
}

static void grouped_linear_fp8(struct trial *t)
{
    grouped_linear_packed(t, PACKING_FP8);
}

static void grouped_linear_fp8_dx(struct trial *t)
{
    grouped_linear_packed_dx(t, PACKING_FP8);
}

/* Rows d[2] .. d[2] + d[3] of (d[0], d[1]). */
static void unpack(struct trial *t, enum packing packing)
{
    int64_t rows = t->d[0], cols = t->d[1], first = t->d[2], n_rows = t->d[3];
    const uint8_t *const *w = packed_of(t, packing, 1, cols, rows);
    elem *out = out_elems(t, "out", n_rows * cols);
    t->bytes = (double)n_rows * (double)cols * (1 + (double)elem_size(t->dev));
    TRIAL_RUN(t)
        t->dev->ops->unpack(t->dev, out, w[0], packing, rows, cols, first, n_rows);
}

static void unpack_mxfp4(struct trial *t)
{
    unpack(t, PACKING_MXFP4);
}

static void unpack_fp8(struct trial *t)
{
    unpack(t, PACKING_FP8);
}

#define PACKED(op)                                                                                 \
    {#op, op, {0, 3, 32, 8, EVEN, 0}},                                                             \
    {#op, op, {1, 1, 32, 5, EVEN, 0}},                                                             \
    {#op, op, {40, 7, 96, 9, SKEWED, 1}},                                                          \
    {#op, op, {301, 4, 160, 136, SKEWED, 0}},                                                      \
    {#op, op, {1500, 3, 3584, 3072, EVEN, 1}, CASE_LARGE},                                         \
    {#op, op, {600, 9, 4096, 4096, SKEWED, 1}, CASE_LARGE}, /* in several runs */                 \
    {#op, op, {131072, 14, 3584, 3072, EVEN, 0}, CASE_BENCH}

/* Rows that divide by nothing, that end within a block, of several; those of two published
 * models. */
#define FP8(op)                                                                                    \
    {#op, op, {0, 3, 32, 8, EVEN, 0}},                                                             \
    {#op, op, {1, 1, 3, 5, EVEN, 0}},                                                              \
    {#op, op, {40, 7, 97, 9, SKEWED, 1}},                                                          \
    {#op, op, {130, 3, 131, 257, SKEWED, 1}},                                                      \
    {#op, op, {301, 4, 164, 300, ONE_HAS_ALL, 0}},                                                 \
    {#op, op, {333, 5, 264, 136, SKEWED, 1}},                                                      \
    {#op, op, {700, 6, 512, 384, SKEWED, 0}},                                                      \
    {#op, op, {1500, 3, 3584, 3072, EVEN, 1}, CASE_LARGE},                                         \
    {#op, op, {1000, 3, 7168, 2048, SKEWED, 0}, CASE_LARGE},                                       \
    {#op, op, {600, 9, 4096, 4096, SKEWED, 1}, CASE_LARGE}, /* in several runs */                 \
    {#op, op, {131072, 14, 3584, 3072, EVEN, 0}, CASE_BENCH}

/* So many rows an expert, from one that wants each weight for a few rows alone. */
#define OF_ROWS(op, rows, groups, in, out)                                                         \
    {#op, op, {(rows) * (groups), groups, in, out, EVEN, 0}, CASE_BENCH}
#define OF_K3(op, rows) OF_ROWS(op, rows, 14, 3584, 3072)
#define OF_64(op, rows) OF_ROWS(op, rows, 64, 2048, 1024)

static const struct op_case cases[] = {
    PACKED(grouped_linear_mxfp4), PACKED(grouped_linear_mxfp4_dx),
    FP8(grouped_linear_fp8), FP8(grouped_linear_fp8_dx),
    OF_K3(grouped_linear_fp8, 8), OF_K3(grouped_linear_fp8, 128), OF_K3(grouped_linear_fp8, 1024),
    OF_64(grouped_linear_fp8, 8), OF_64(grouped_linear_fp8, 128), OF_64(grouped_linear_fp8, 1024),
    OF_K3(grouped_linear_mxfp4, 8), OF_K3(grouped_linear_mxfp4, 128),
    OF_64(grouped_linear_mxfp4, 8), OF_64(grouped_linear_mxfp4, 1024),
    {"unpack_mxfp4", unpack_mxfp4, {3, 32, 1, 2}},
    {"unpack_mxfp4", unpack_mxfp4, {200, 416, 0, 200}},
    {"unpack_fp8", unpack_fp8, {1, 1, 0, 1}},
    {"unpack_fp8", unpack_fp8, {7, 3, 2, 0}},
    {"unpack_fp8", unpack_fp8, {300, 131, 97, 200}},
    {"unpack_fp8", unpack_fp8, {300, 264, 127, 2}},
    {"unpack_fp8", unpack_fp8, {576, 7168, 512, 64}},
    {"unpack_fp8", unpack_fp8, {18432, 7168, 0, 18432}, CASE_BENCH},
};

OP_FAMILY(packed, cases)
