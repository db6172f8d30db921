/* vmath.h - exponentials without branches, so that loops over them vectorise; a maximum
 *
 * Each is within 4 ulp where the result is a normal float (tests/test_vmath.c); limits and NaN
 * behave as in libm. Written in plain C, so every compiler and every vector width gives the same
 * bits. */
#ifndef KERNELS_VMATH_H
#define KERNELS_VMATH_H

#include <stdint.h>
#include <string.h>

static inline float vm_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t vm_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* e^x. x = n ln2 + r, a polynomial for e^r, and 2^n in two factors, so that results below the
 * normal range are rounded and not cut off. */
static inline float vm_exp(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float t = x * 1.44269504088896341f + shift;
    float n = t - shift;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440054690583e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t i = (int32_t)(vm_bits(t) - vm_bits(shift));
    int32_t half = i >> 1;
    return p * vm_from_bits((uint32_t)(half + 127) << 23) *
           vm_from_bits((uint32_t)(i - half + 127) << 23);
}

static inline float vm_sigmoid(float x)
{
    return 1.0f / (1.0f + vm_exp(-x));
}

static inline float vm_abs(float x)
{
    return vm_from_bits(vm_bits(x) & 0x7fffffffu);
}

/* tanh x: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel. */
static inline float vm_tanh(float x)
{
    float a = vm_abs(x), s = x * x;
    float p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    p = p * s * x + x;
    float q = 1.0f - 2.0f / (vm_exp(2.0f * a) + 1.0f);
    q = vm_from_bits(vm_bits(q) | (vm_bits(x) & 0x80000000u));
    return a < 0.625f ? p : q;
}

/* log(1 + e^x) = max(x, 0) + 2 atanh(t / (2 + t)) with t = e^-|x|. */
static inline float vm_softplus(float x)
{
    float t = vm_exp(-vm_abs(x));
    float s = t / (2.0f + t), s2 = s * s;
    float p = 1.0f / 15;
    p = p * s2 + 1.0f / 13;
    p = p * s2 + 1.0f / 11;
    p = p * s2 + 1.0f / 9;
    p = p * s2 + 1.0f / 7;
    p = p * s2 + 1.0f / 5;
    p = p * s2 + 1.0f / 3;
    return (x > 0 ? x : 0) + 2 * (s + s * s2 * p);
}

/* The largest of n >= 1 numbers, none NaN: 16 running ones, so that it vectorises. */
static inline float vm_max(const float *x, int64_t n)
{
    float lanes[16], max;
    int64_t j = 0;
    for (int k = 0; k < 16; k++)
        lanes[k] = x[0];
    for (; j + 16 <= n; j += 16)
        for (int k = 0; k < 16; k++)
            lanes[k] = x[j + k] > lanes[k] ? x[j + k] : lanes[k];
    max = lanes[0];
    for (int k = 1; k < 16; k++)
        max = lanes[k] > max ? lanes[k] : max;
    for (; j < n; j++)
        max = x[j] > max ? x[j] : max;
    return max;
}

#endif
