/* mxfp4.c - numbers of four bits, 32 to a scale */
#include "kernels/mxfp4.h"

#include <assert.h>
#include <math.h>

#include "kernels/vmath.h"

/* Half of what the scale stands for: codes below are twice their number. */
static float half_scale(uint8_t e)
{
    return e > 1 ? vm_from_bits((uint32_t)(e - 1) << 23) : e ? 0x1p-127f : 0x1p-128f;
}

/* Twice a code's number: 0, 1, 2, 3, 4, 6, 8, 12, without a table, so that a loop vectorises. */
static inline float twice(uint32_t code)
{
    uint32_t size = code & 7, is_normal = size > 1;
    uint32_t value = ((size & 1) | is_normal << 1) << ((size >> 1) - is_normal);
    return vm_from_bits(vm_bits((float)(int32_t)value) | (code & 8) << 28);
}

void mxfp4_decode(float *restrict out, const uint8_t *restrict packed,
                  const uint8_t *restrict scales, int64_t n)
{
    assert(n % MXFP4_GROUP == 0);
    for (int64_t g = 0; g < n / MXFP4_GROUP; g++) {
        float scale = half_scale(scales[g]);
        const uint8_t *restrict from = packed + g * (MXFP4_GROUP / 2);
        float *restrict to = out + g * MXFP4_GROUP;
        uint8_t codes[MXFP4_GROUP];
        for (int j = 0; j < MXFP4_GROUP / 2; j++) {
            codes[2 * j] = from[j] & 15;
            codes[2 * j + 1] = from[j] >> 4;
        }
#pragma omp simd
        for (int j = 0; j < MXFP4_GROUP; j++)
            to[j] = scale * twice(codes[j]);
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
