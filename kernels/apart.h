/* apart.h - for the build BALLAST_APART, in which the host may not touch the cpu device's memory
 *
 * There the device's memory is poisoned for the address sanitizer, which looks at every access but
 * those of this folder. The sanitizer also looks into what the C library copies for others, so
 * this folder copies by itself. Included before all else. */
#ifndef KERNELS_APART_H
#define KERNELS_APART_H

#include <sanitizer/asan_interface.h>
#include <string.h>

static inline void *apart_memcpy(void *to, const void *from, size_t n)
{
    void *p = to;
    __asm__ volatile("rep movsb" : "+D"(p), "+S"(from), "+c"(n) : : "memory");
    return to;
}

static inline void *apart_memmove(void *to, const void *from, size_t n)
{
    char *last = (char *)to + n - 1;
    const char *last_from = (const char *)from + n - 1;
    if (n == 0 || to <= from || (const char *)to > last_from)
        return apart_memcpy(to, from, n);
    __asm__ volatile("std; rep movsb; cld" : "+D"(last), "+S"(last_from), "+c"(n) : : "memory");
    return to;
}

static inline void *apart_memset(void *to, int value, size_t n)
{
    void *p = to;
    __asm__ volatile("rep stosb" : "+D"(p), "+c"(n) : "a"(value) : "memory");
    return to;
}

#define memcpy  apart_memcpy
#define memmove apart_memmove
#define memset  apart_memset

#endif
