/* patience.h - upper bounds on time in tests: far from what is right, near enough to find a hang
 *
 * A bound says "at once" against "at the next timeout", never how fast: machines are shared, and a
 * sanitizer slows some code a hundredfold. Figures belong to the bench programs. */
#ifndef TESTS_PATIENCE_H
#define TESTS_PATIENCE_H

#include <stdbool.h>

#include "common/clock.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PATIENCE_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PATIENCE_SANITIZED 1
#endif
#ifdef PATIENCE_SANITIZED
#define PATIENCE 60
#else
#define PATIENCE 10
#endif

/* What takes `seconds` on an idle machine at the very most has ended in time. */
static inline bool was_soon(uint64_t from_ns, double seconds)
{
    return (double)(clock_now_ns() - from_ns) < seconds * PATIENCE * 1e9;
}

/* When to give up waiting for what takes `seconds` there at most. */
static inline uint64_t patience_end_ns(double seconds)
{
    return clock_now_ns() + (uint64_t)(seconds * PATIENCE * 1e9);
}

#endif
