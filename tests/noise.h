/* noise.h - a number about normal that follows from tensor and element alone, on every layout */
#ifndef TESTS_NOISE_H
#define TESTS_NOISE_H

#include "common/mix.h"

static inline double noise(uint64_t tensor, uint64_t i)
{
    double sum = -6;
    uint64_t z = tensor * 0x9e3779b97f4a7c15ull + i * 0xd1b54a32d192ed03ull;
    for (int k = 0; k < 12; k++) {
        z = (z ^ z >> 31) * 0xbf58476d1ce4e5b9ull + 0x94d049bb133111ebull;
        sum += mix_unit(z);
    }
    return sum;
}

#endif
