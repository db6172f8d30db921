/* mix.h - a word whose bits depend on all bits of another, and pseudo-random words: SplitMix64
 * (Steele, Lea, Flood 2014) and its finalizer */
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

/* The next word of a sequence, the same everywhere; any state is a good one to begin with. */
MIX_FN uint64_t mix_next(uint64_t *state)
{
    return mix_word(*state += UINT64_C(0x9e3779b97f4a7c15));
}

/* A number in [0, 1) of a word's upper bits, as many as a double has. */
MIX_FN double mix_unit(uint64_t x)
{
    return (double)(x >> 11) * 0x1p-53;
}

/* Word x at place i. A word that is 0 counts by its place, too. */
MIX_FN uint64_t mix_at(uint64_t x, uint64_t i)
{
    return mix_word(x ^ (i + 1) * UINT64_C(0x9e3779b97f4a7c15));
}

#endif
