/* test_coll_fold.c - many arrays become one as written down here, whatever their length and
 * place */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/bf16.h"
#include "worker/coll_copy.h"
#include "worker/coll_fold.h"

enum { N_IN = 5, N_MOST = 1100, N_OUT = 2, AT = 3 }; /* elements; AT: before the first */

static const size_t lengths[] = {0, 1, 63, 64, 65, 255, 256, 257, 319, 1024, 1091};

struct all {
    float    f32[N_IN][N_MOST];
    uint16_t bf16[N_IN][N_MOST];
    double   f64[N_IN][N_MOST];
};

static void fill(struct all *a)
{
    srand(11);
    for (size_t i = 0; i < N_IN; i++)
        for (size_t e = 0; e < N_MOST; e++) {
            a->f32[i][e] = ldexpf((float)(rand() - RAND_MAX / 2), rand() % 20 - 40);
            a->bf16[i][e] = bf16_of(a->f32[i][e]);
            a->f64[i][e] = a->f32[i][e] / 3.0;
        }
    a->f32[1][AT + 5] = INFINITY;
    a->f32[2][AT + 70] = NAN;
    a->bf16[3][AT + 6] = bf16_of(-INFINITY);
    a->bf16[0][AT + 71] = bf16_of(NAN);
}

#define DEFINE_EXPECT(name, sum_type, array, from, to)                                             \
    static void name(const struct all *a, enum coll_op op, uint32_t n_in, size_t n, void *out)     \
    {                                                                                              \
        for (size_t e = 0; e < n; e++) {                                                           \
            sum_type sum = from(a->array[0][AT + e]);                                              \
            for (uint32_t i = 1; i < n_in; i++) {                                                  \
                sum_type x = from(a->array[i][AT + e]);                                            \
                sum = op == COLL_SUM ? sum + x : sum > x ? sum : x;                                \
            }                                                                                      \
            __typeof__(a->array[0][0]) rounded = to(sum);                                          \
            memcpy((uint8_t *)out + e * sizeof rounded, &rounded, sizeof rounded);                 \
        }                                                                                          \
    }
#define SAME(x) (x)
DEFINE_EXPECT(expect_f32, float, f32, SAME, SAME)
DEFINE_EXPECT(expect_bf16, float, bf16, bf16_value, bf16_of)
DEFINE_EXPECT(expect_f64, double, f64, SAME, SAME)

typedef void (*expect_fn)(const struct all *, enum coll_op, uint32_t, size_t, void *);

/* At once, and in two steps, of which the first has one input less. */
static void check(const struct fold *f, const uint8_t *const *in, expect_fn expect,
                  const struct all *a, enum coll_op op)
{
    static uint8_t expected[N_MOST * 8], out[N_OUT][N_MOST * 8], sum[N_MOST * 8];
    uint8_t *outs[N_OUT] = {out[0], out[1]};
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
        for (uint32_t n_in = 1; n_in <= N_IN; n_in++) {
            size_t n = lengths[k], n_bytes = n * f->width;
            expect(a, op, n_in, n, expected);
            memset(out, 0xee, sizeof out);
            fold_run(f, in, n_in, AT * f->width, n, outs, N_OUT);
            for (uint32_t o = 0; o < N_OUT; o++) {
                assert_memory_equal(out[o], expected, n_bytes);
                assert_int_equal(out[o][n_bytes], 0xee);
            }
            memset(sum, 0xee, sizeof sum);
            f->add(sum, true, in, n_in > 1 ? n_in - 1 : 1, AT * f->width, n);
            if (n_in > 1)
                f->add(sum, false, in + n_in - 1, 1, AT * f->width, n);
            assert_int_equal(sum[n * f->sum_width], 0xee);
            f->store(out[0], sum, n);
            assert_memory_equal(out[0], expected, n_bytes);
        }
}

static void every_length_and_type(void **state)
{
    (void)state;
    struct all *a = calloc(1, sizeof *a);
    const uint8_t *f32[N_IN], *bf16[N_IN], *f64[N_IN];
    fill(a);
    for (size_t i = 0; i < N_IN; i++) {
        f32[i] = (const uint8_t *)a->f32[i];
        bf16[i] = (const uint8_t *)a->bf16[i];
        f64[i] = (const uint8_t *)a->f64[i];
    }
    for (enum coll_op op = COLL_SUM; op <= COLL_MAX; op++) {
        check(fold_of(ELEM_F32, op), f32, expect_f32, a, op);
        check(fold_of(ELEM_BF16, op), bf16, expect_bf16, a, op);
        check(fold_of_f64(op), f64, expect_f64, a, op);
    }
    free(a);
}

/* Past the caches and through them, from and to any place. */
static void pieces_are_copied(void **state)
{
    enum { N = 5000 };
    static _Alignas(64) uint8_t from[N], to[N];
    (void)state;
    for (size_t i = 0; i < N; i++)
        from[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t large = 0; large < 2; large++)
        for (size_t at = 0; at < 70; at += 3)
            for (size_t n = 0; n < 400; n += 13) {
                memset(to, 0xee, sizeof to);
                copy_piece(to + at, from + 2 * at + n, n, large << 30);
                assert_memory_equal(to + at, from + 2 * at + n, n);
                assert_int_equal(to[at + n], 0xee);
                if (at > 0)
                    assert_int_equal(to[at - 1], 0xee);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_length_and_type),
        cmocka_unit_test(pieces_are_copied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
