/* mxfp4.c - numbers of four bits, 32 to a scale */
#include "kernels/mxfp4.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/vmath.h"

static float scale_value(uint8_t e)
{
    return e ? vm_from_bits((uint32_t)e << 23) : 0x1p-127f;
}

/* A code's number without a table, so that a loop vectorises: a float with the same bit of
 * fraction. Below 1 there is no leading one: it is taken off again. */
static inline float value_of(uint32_t code)
{
    uint32_t size = code & 7, is_normal = size > 1;
    float x = vm_from_bits((size << 22) + ((127 - is_normal) << 23));
    x -= is_normal ? 0 : 1.0f;
    return vm_from_bits(vm_bits(x) | (code & 8) << 28);
}

void mxfp4_decode(float *restrict out, const uint8_t *restrict packed,
                  const uint8_t *restrict scales, int64_t n)
{
    assert(n % MXFP4_GROUP == 0);
    for (int64_t g = 0; g < n / MXFP4_GROUP; g++) {
        float scale = scale_value(scales[g]);
        uint32_t words[MXFP4_GROUP / 8]; /* eight codes each, the first in the lowest bits */
        memcpy(words, packed + g * (MXFP4_GROUP / 2), sizeof words);
        for (int k = 0; k < MXFP4_GROUP / 8; k++) {
            float *restrict to = out + g * MXFP4_GROUP + 8 * k;
#pragma omp simd
            for (int j = 0; j < 8; j++)
                to[j] = scale * value_of(words[k] >> (4 * j) & 15);
        }
    }
}

/* 2^floor(log2 amax) at 4, one more where amax would pass 7. */
static uint8_t scale_of(float amax)
{
    int exponent;
    if (amax == 0)
        return 0;
    double mantissa = 2 * frexp(amax, &exponent); /* in [1, 2), of 2^(exponent - 1) */
    int e = 127 + exponent - 1 - 2 + (mantissa >= 1.75);
    return (uint8_t)(e < 0 ? 0 : e > 254 ? 254 : e);
}

static uint8_t code_of(float x, double inverse_scale)
{
    double y = fabs(x) * inverse_scale;
    uint8_t size = y <= 0.25   ? 0
                   : y < 0.75  ? 1
                   : y <= 1.25 ? 2
                   : y < 1.75  ? 3
                   : y <= 2.5  ? 4
                   : y < 3.5   ? 5
                   : y <= 5    ? 6
                               : 7;
    return x < 0 ? size | 8 : size;
}

void mxfp4_encode(uint8_t *out_packed, uint8_t *out_scales, const float *x, int64_t n)
{
    assert(n % MXFP4_GROUP == 0);
    for (int64_t g = 0; g < n / MXFP4_GROUP; g++) {
        const float *from = x + g * MXFP4_GROUP;
        uint8_t *to = out_packed + g * (MXFP4_GROUP / 2);
        float amax = 0;
        for (int j = 0; j < MXFP4_GROUP; j++)
            amax = fmaxf(amax, fabsf(from[j]));
        out_scales[g] = scale_of(amax);
        double inverse = ldexp(1, 127 - out_scales[g]);
        for (int j = 0; j < MXFP4_GROUP; j += 2)
            to[j / 2] = (uint8_t)(code_of(from[j], inverse) | code_of(from[j + 1], inverse) << 4);
    }
}

int64_t mxfp4_find_nan(const uint8_t *scales, int64_t n_scales)
{
    for (int64_t i = 0; i < n_scales; i++)
        if (scales[i] == 255)
            return i;
    return -1;
}
