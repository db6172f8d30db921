/* hash.c - bytes to 64 bits, as fast as memory is read */
#include "common/hash.h"

#include <string.h>

#include "common/mix.h"

/* Four chains side by side, so that reading is what takes time. */
uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t n)
{
    uint64_t h[4] = {seed, mix_word(seed + 1), mix_word(seed + 2), mix_word(seed + 3)};
    uint64_t tail[4] = {0};
    const uint8_t *p = bytes;
    for (; n >= sizeof tail; n -= sizeof tail, p += sizeof tail)
        for (int i = 0; i < 4; i++) {
            uint64_t word;
            memcpy(&word, p + 8 * i, sizeof word);
            h[i] = (h[i] ^ word) * 0x9e3779b97f4a7c15u;
            h[i] ^= h[i] >> 32;
        }
    memcpy(tail, p, n);
    for (int i = 0; i < 4; i++)
        seed = mix_word(seed ^ mix_word(h[i] ^ tail[i]) ^ n);
    return seed;
}
