/* bf16.h - bfloat16: the upper half of a float32 */
#ifndef COMMON_BF16_H
#define COMMON_BF16_H

#include <stdint.h>
#include <string.h>

/* To nearest, ties to even; a NaN keeps its sign and stays one. */
static inline uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40 : rounded);
}

static inline float bf16_value(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
