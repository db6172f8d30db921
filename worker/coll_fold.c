/* coll_fold.c - sums and maxima at the speed of memory
 *
 * A tile of elements at a time, which stays in registers while all inputs are added to it, and a
 * block of tiles from where it is written to all outputs while it is in the first cache. bfloat16
 * is summed in float32 and rounded once, to the nearest, ties to even. */
#include "worker/coll_fold.h"

#include <string.h>

#include "common/bf16.h"

#define BLOCK_BYTES 1024u /* of a sum */
#define TILE        4u    /* vectors */

/* Aligned as their elements are. */
#define VECTOR(type, bytes)                                                                        \
    type __attribute__((vector_size(bytes), aligned(sizeof(type)), may_alias))
typedef VECTOR(float, 64) f32_vector;
typedef VECTOR(int32_t, 64) i32_vector;
typedef VECTOR(uint32_t, 64) u32_vector;
typedef VECTOR(double, 64) f64_vector;
typedef VECTOR(int64_t, 64) i64_vector;
typedef VECTOR(uint16_t, 32) u16_vector;

#define SAME(x) (x)
#define BF16_VECTOR(x) ((f32_vector)(__builtin_convertvector(x, u32_vector) << 16))

#define SUM(a, b) ((a) + (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
/* The same of vectors, whose comparison gives a mask. */
#define MASKED(mask, a, b) (((mask) & (a)) | (~(mask) & (b)))
#define MAX_F32(a, b) ((f32_vector)MASKED((a) > (b), (i32_vector)(a), (i32_vector)(b)))
#define MAX_F64(a, b) ((f64_vector)MASKED((a) > (b), (i64_vector)(a), (i64_vector)(b)))

/* See add in struct fold. */
#define DEFINE_ADD(name, sum_type, type, vector, from_vector, from_one, fold_vector, fold_one)     \
    static void name(void *sum, bool begins, const uint8_t *const *in, uint32_t n_in, size_t at,   \
                     size_t n)                                                                     \
    {                                                                                              \
        enum { LANES = sizeof(vector) / sizeof(type), N = TILE * LANES };                          \
        typedef __typeof__(from_vector(*(vector *)0)) sum_vector;                                  \
        sum_type *to = sum;                                                                        \
        size_t e = 0;                                                                              \
        for (; e + N <= n; e += N) {                                                               \
            sum_vector tile[TILE], *all = (sum_vector *)(to + e);                                  \
            const vector *x = (const vector *)(in[0] + at + e * sizeof(type));                     \
            for (uint32_t k = 0; k < TILE; k++)                                                    \
                tile[k] = begins ? from_vector(x[k]) : all[k];                                     \
            for (uint32_t i = begins; i < n_in; i++) {                                             \
                x = (const vector *)(in[i] + at + e * sizeof(type));                               \
                for (uint32_t k = 0; k < TILE; k++)                                                \
                    tile[k] = fold_vector(tile[k], from_vector(x[k]));                             \
            }                                                                                      \
            for (uint32_t k = 0; k < TILE; k++)                                                    \
                all[k] = tile[k];                                                                  \
        }                                                                                          \
        for (; e < n; e++) {                                                                       \
            sum_type one = begins ? from_one(((const type *)(in[0] + at))[e]) : to[e];             \
            for (uint32_t i = begins; i < n_in; i++) {                                             \
                sum_type x = from_one(((const type *)(in[i] + at))[e]);                            \
                one = fold_one(one, x);                                                            \
            }                                                                                      \
            to[e] = one;                                                                           \
        }                                                                                          \
    }
DEFINE_ADD(sum_f32, float, float, f32_vector, SAME, SAME, SUM, SUM)
DEFINE_ADD(max_f32, float, float, f32_vector, SAME, SAME, MAX_F32, MAX)
DEFINE_ADD(sum_f64, double, double, f64_vector, SAME, SAME, SUM, SUM)
DEFINE_ADD(max_f64, double, double, f64_vector, SAME, SAME, MAX_F64, MAX)
DEFINE_ADD(sum_bf16, float, uint16_t, u16_vector, BF16_VECTOR, bf16_value, SUM, SUM)
DEFINE_ADD(max_bf16, float, uint16_t, u16_vector, BF16_VECTOR, bf16_value, MAX_F32, MAX)

static void store_f32(void *x, const void *sum, size_t n)
{
    memcpy(x, sum, n * sizeof(float));
}

static void store_f64(void *x, const void *sum, size_t n)
{
    memcpy(x, sum, n * sizeof(double));
}

static void store_bf16(void *x, const void *sum, size_t n)
{
    uint16_t *restrict b = x;
    const float *restrict a = sum;
    for (size_t i = 0; i < n; i++)
        b[i] = bf16_of(a[i]);
}

const struct fold *fold_of(enum elem_type type, enum coll_op op)
{
    static const struct fold folds[2][2] = {
        [ELEM_F32] = {[COLL_SUM] = {4, 4, sum_f32, store_f32},
                      [COLL_MAX] = {4, 4, max_f32, store_f32}},
        [ELEM_BF16] = {[COLL_SUM] = {2, 4, sum_bf16, store_bf16},
                       [COLL_MAX] = {2, 4, max_bf16, store_bf16}},
    };
    return &folds[type][op];
}

const struct fold *fold_of_f64(enum coll_op op)
{
    static const struct fold folds[2] = {[COLL_SUM] = {8, 8, sum_f64, store_f64},
                                         [COLL_MAX] = {8, 8, max_f64, store_f64}};
    return &folds[op];
}

void fold_run(const struct fold *f, const uint8_t *const *in, uint32_t n_in, size_t at, size_t n,
              uint8_t *const *out, uint32_t n_out)
{
    _Alignas(64) uint8_t sum[BLOCK_BYTES];
    size_t block = BLOCK_BYTES / f->sum_width;
    for (size_t done = 0; done < n; done += block) {
        size_t count = n - done < block ? n - done : block;
        f->add(sum, true, in, n_in, at + done * f->width, count);
        for (uint32_t i = 0; i < n_out; i++)
            f->store(out[i] + done * f->width, sum, count);
    }
}
