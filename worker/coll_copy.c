/* coll_copy.c - copies, from some size on past the caches
 *
 * The C library writes past the caches only what is larger than the last of them, which on a
 * machine of many cores is hundreds of megabytes and shared with all. Copying and then reading a
 * result is faster so from about 8 MB on (Sapphire Rapids: 8 MB as fast, 32 MB 1.2 times). */
#include "worker/coll_copy.h"

#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

#define LARGE_BYTES ((size_t)8 << 20)
#define LINE_BYTES  64u

void copy_piece(void *to, const void *from, size_t n_bytes, size_t all)
{
    uint8_t *a = to;
    const uint8_t *b = from;
    size_t head = -(uintptr_t)to % LINE_BYTES;
    if (all < LARGE_BYTES || n_bytes < 2 * LINE_BYTES) {
        if (n_bytes > 0)
            memcpy(to, from, n_bytes);
        return;
    }
    memcpy(a, b, head);
    size_t at = head;
    for (; at + LINE_BYTES <= n_bytes; at += LINE_BYTES)
        for (size_t k = 0; k < LINE_BYTES; k += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(a + at + k),
                             _mm_loadu_si128((const __m128i *)(b + at + k)));
    _mm_sfence(); /* before anybody is told */
    memcpy(a + at, b + at, n_bytes - at);
}
