/* test_vmath.c - the exponentials against libm in double, over the whole range of float */
#include "tests/gradcheck.h"

#include <float.h>

#include "kernels/vmath.h"

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double softplus(double x)
{
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static const struct {
    const char *name;
    float (*ours)(float x);
    double (*truth)(double x);
    double ulps_max;
} functions[] = {
    {"exp", vm_exp, exp, 2},
    {"sigmoid", vm_sigmoid, sigmoid, 4},
    {"tanh", vm_tanh, tanh, 3},
    {"softplus", vm_softplus, softplus, 4},
};

/* The distance of one float from the next at x, in the normal range. */
static double ulp(double x)
{
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, exponent - 24);
}

/* Every 1001st float. */
static void close_to_libm_everywhere(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof functions / sizeof functions[0]; f++) {
        double worst = 0;
        float worst_x = 0;
        for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 1001) {
            float x = vm_from_bits((uint32_t)bits), y = functions[f].ours(x);
            double truth = functions[f].truth(x);
            if (isnan(x)) {
                assert_true(isnan(y));
                continue;
            }
            if (isinf((float)truth)) {
                assert_true(y == (float)truth || fabs(x) < 88.73);
                continue;
            }
            if (fabs(truth) < FLT_MIN) {
                assert_true(fabsf(y) <= FLT_MIN);
                continue;
            }
            double off = fabs(y - truth) / ulp(truth);
            if (off > worst) {
                worst = off;
                worst_x = x;
            }
        }
        printf("%s: at most %.2f ulp, at %.9g\n", functions[f].name, worst, worst_x);
        assert_true(worst <= functions[f].ulps_max);
    }
}

static void limits(void **state)
{
    (void)state;
    assert_true(vm_exp(0) == 1);
    assert_true(vm_exp(-INFINITY) == 0 && vm_exp(INFINITY) == INFINITY);
    assert_true(vm_exp(-1000) == 0 && vm_exp(1000) == INFINITY);
    assert_true(vm_sigmoid(-INFINITY) == 0 && vm_sigmoid(INFINITY) == 1);
    assert_true(vm_tanh(-INFINITY) == -1 && vm_tanh(INFINITY) == 1);
    assert_true(vm_softplus(-INFINITY) == 0 && vm_softplus(INFINITY) == INFINITY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(close_to_libm_everywhere),
        cmocka_unit_test(limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
