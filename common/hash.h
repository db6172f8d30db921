/* hash.h - finds bytes that differ by accident; it keeps nobody out who means harm */
#ifndef COMMON_HASH_H
#define COMMON_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Of n bytes after what seed stands for: 0, or the hash of what came before. The same on all
 * machines of one byte order. */
uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t n);

#endif
