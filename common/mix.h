/* mix.h - a word whose bits depend on all bits of another: the finalizer of SplitMix64 (Steele,
 * Lea, Flood 2014) */
#ifndef COMMON_MIX_H
#define COMMON_MIX_H

#include <stdint.h>

#ifdef __CUDACC__
#define MIX_FN __host__ __device__ static inline
#else
#define MIX_FN static inline
#endif

MIX_FN uint64_t mix_word(uint64_t z)
{
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Word x at place i. A word that is 0 counts by its place, too. */
MIX_FN uint64_t mix_at(uint64_t x, uint64_t i)
{
    return mix_word(x ^ (i + 1) * UINT64_C(0x9e3779b97f4a7c15));
}

#endif
