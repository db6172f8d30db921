/* coll_fold.c - sums and maxima at the speed of memory
 *
 * A block at a time, small enough for the first cache. bfloat16 is summed in float32 and rounded
 * once, to the nearest, ties to even. */
#include "worker/coll_fold.h"

#include <string.h>

#include "common/bf16.h"

#define BLOCK_BYTES 16384u

#define DEFINE_MOVE(name, type)                                                                    \
    static void name(void *to, const void *from, size_t n)                                         \
    {                                                                                              \
        memcpy(to, from, n * sizeof(type));                                                        \
    }
DEFINE_MOVE(move_f32, float)
DEFINE_MOVE(move_f64, double)

#define DEFINE_ADD(name, type, expression)                                                         \
    static void name(void *sum, const void *x, size_t n)                                           \
    {                                                                                              \
        type *restrict a = sum;                                                                    \
        const type *restrict b = x;                                                                \
        for (size_t i = 0; i < n; i++)                                                             \
            a[i] = expression;                                                                     \
    }
DEFINE_ADD(sum_f32, float, a[i] + b[i])
DEFINE_ADD(max_f32, float, a[i] > b[i] ? a[i] : b[i])
DEFINE_ADD(sum_f64, double, a[i] + b[i])
DEFINE_ADD(max_f64, double, a[i] > b[i] ? a[i] : b[i])

/* ---- bfloat16 ------------------------------------------------------------------------------- */

static void load_bf16(void *sum, const void *x, size_t n)
{
    float *restrict a = sum;
    const uint16_t *restrict b = x;
    for (size_t i = 0; i < n; i++)
        a[i] = bf16_value(b[i]);
}

static void store_bf16(void *x, const void *sum, size_t n)
{
    uint16_t *restrict b = x;
    const float *restrict a = sum;
    for (size_t i = 0; i < n; i++)
        b[i] = bf16_of(a[i]);
}

#define DEFINE_ADD_BF16(name, expression)                                                          \
    static void name(void *sum, const void *x, size_t n)                                           \
    {                                                                                              \
        float *restrict a = sum;                                                                   \
        const uint16_t *restrict b = x;                                                            \
        for (size_t i = 0; i < n; i++)                                                             \
            a[i] = expression;                                                                     \
    }
DEFINE_ADD_BF16(sum_bf16, a[i] + bf16_value(b[i]))
DEFINE_ADD_BF16(max_bf16, a[i] > bf16_value(b[i]) ? a[i] : bf16_value(b[i]))

/* ---- all ------------------------------------------------------------------------------------ */

const struct fold *fold_of(enum elem_type type, enum coll_op op)
{
    static const struct fold folds[2][2] = {
        [ELEM_F32] = {[COLL_SUM] = {4, 4, move_f32, sum_f32, move_f32},
                      [COLL_MAX] = {4, 4, move_f32, max_f32, move_f32}},
        [ELEM_BF16] = {[COLL_SUM] = {2, 4, load_bf16, sum_bf16, store_bf16},
                       [COLL_MAX] = {2, 4, load_bf16, max_bf16, store_bf16}},
    };
    return &folds[type][op];
}

const struct fold *fold_of_f64(enum coll_op op)
{
    static const struct fold folds[2] = {[COLL_SUM] = {8, 8, move_f64, sum_f64, move_f64},
                                         [COLL_MAX] = {8, 8, move_f64, max_f64, move_f64}};
    return &folds[op];
}

void fold_run(const struct fold *f, const uint8_t *const *in, uint32_t n_in, size_t at, size_t n,
              uint8_t *const *out, uint32_t n_out)
{
    _Alignas(64) uint8_t sum[BLOCK_BYTES];
    size_t block = BLOCK_BYTES / f->sum_width;
    for (size_t done = 0; done < n; done += block) {
        size_t count = n - done < block ? n - done : block, byte = at + done * f->width;
        f->load(sum, in[0] + byte, count);
        for (uint32_t i = 1; i < n_in; i++)
            f->add(sum, in[i] + byte, count);
        for (uint32_t i = 0; i < n_out; i++)
            f->store(out[i] + done * f->width, sum, count);
    }
}

void fold_into(const struct fold *f, bool begins, const uint8_t *const *in, uint32_t n_in,
               size_t at, size_t n, uint8_t *sum)
{
    size_t block = BLOCK_BYTES / f->sum_width;
    for (size_t done = 0; done < n; done += block) {
        size_t count = n - done < block ? n - done : block, byte = at + done * f->width;
        uint8_t *to = sum + done * f->sum_width;
        if (begins)
            f->load(to, in[0] + byte, count);
        for (uint32_t i = begins; i < n_in; i++)
            f->add(to, in[i] + byte, count);
    }
}
