/* hash.h - finds bytes that differ by accident; it keeps nobody out who means harm */
#ifndef COMMON_HASH_H
#define COMMON_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Of n bytes after what seed stands for: 0, or the hash of what came before. The same on all
 * machines of one byte order. */
uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t n);

/* FNV-1a (Fowler, Noll, Vo), for tables whose keys are a few bytes long. h: HASH_FNV, or the hash
 * of what comes before. The high bits are the better ones: fold them into the low. */
#define HASH_FNV UINT64_C(0xcbf29ce484222325)
static inline uint64_t hash_fnv(uint64_t h, const void *bytes, size_t n)
{
    for (const uint8_t *p = bytes, *end = p + n; p < end; p++)
        h = (h ^ *p) * UINT64_C(0x100000001b3);
    return h;
}

#endif
