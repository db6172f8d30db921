/* seed.h - what a test draws is drawn again alike, so that one run proves what the last one did */
#ifndef TESTS_SEED_H
#define TESTS_SEED_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* The seed of a test program: BALLAST_SEED or a fixed one; printed. */
static inline uint64_t test_seed(void)
{
    const char *text = getenv("BALLAST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 20260730;
    printf("seed %llu (set BALLAST_SEED for another)\n", (unsigned long long)seed);
    return seed;
}

#endif
